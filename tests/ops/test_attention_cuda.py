"""The launcher of backend "cuda" as far as it goes without a GPU: what it passes, and what it may ask for."""

import itertools
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest

from kvlab.jit.build import build
from kvlab.jit.compile_gate import specialisations
from kvlab.jit.cubin import read_resources
from kvlab.jit.structs import words_of
from kvlab.ops import attention_arguments
from kvlab.ops.cuda import attention as attention_cuda
from kvlab.ops.cuda import attention_sm90, tile_list
from kvlab.views import CudaView

MIN_SHARED_BYTES = 99 * 1024  # what a block may have on every GPU from sm_80 on (sm_86, sm_89, sm_120)
HOPPER_SHARED_BYTES = 227 * 1024


def declared(source: str) -> list[dict[str, str]]:
    """Return the macros of every gated specialisation of a source."""
    return [dict(item.macros) for item in specialisations() if item.name == source]


@pytest.mark.parametrize("head_dim", attention_cuda.SHAPES)
def test_shapes_of_the_portable_kernel_are_gated_and_fit(head_dim: int) -> None:
    names = ("M_TILES", "WARPS", "BLOCK_N", "BLOCKS")
    shape = dict(zip(names, map(str, attention_cuda.SHAPES[head_dim]), strict=True))
    wanted = shape | {"HEAD_DIM": str(head_dim), "SOFTCAP": "0", "ALIGNED": "1", "BF16": "1"}
    assert wanted in declared("attention/forward.cu")
    assert attention_cuda.portable_shared_bytes(head_dim) <= MIN_SHARED_BYTES


@pytest.mark.parametrize("longest_k", [1, 1 << 20])
@pytest.mark.parametrize("capped", [False, True])
@pytest.mark.parametrize("head_dim", attention_sm90.SHAPES)
def test_shapes_of_the_hopper_kernel_are_gated_and_fit(head_dim: int, capped: bool, longest_k: int) -> None:
    found, keys, groups, q_slots = attention_sm90.shape_of(head_dim, capped, longest_k)
    assert found == head_dim
    wanted = {"HEAD_DIM": head_dim, "BLOCK_N": keys, "GROUPS": groups, "Q_SLOTS": q_slots}
    wanted |= {"BF16": 1, "SOFTCAP": int(capped)}
    assert {name: str(value) for name, value in wanted.items()} in declared("attention/forward_sm90.cu")
    static = 512  # mbarriers and tiles
    assert attention_sm90.shared_bytes(*(head_dim, keys, groups, q_slots)) + static <= HOPPER_SHARED_BYTES


@pytest.mark.parametrize("head_dim", attention_cuda.FLOAT32_DIMS)
def test_shapes_of_the_float32_kernel_are_gated_and_fit(head_dim: int) -> None:
    assert {"HEAD_DIM": str(head_dim)} in declared("attention/forward_float32.cu")
    assert attention_cuda.float32_shared_bytes(head_dim) <= MIN_SHARED_BYTES


def test_the_call_has_the_layout_of_the_kernels() -> None:
    portable = {"HEAD_DIM": 128, "BF16": 1, "M_TILES": 2, "WARPS": 4, "BLOCK_N": 64, "BLOCKS": 2}
    for name, macros in (
        ("attention/forward", portable | {"SOFTCAP": 0, "ALIGNED": 1}),
        ("attention/forward_float32", {"HEAD_DIM": 64}),
    ):
        resources = read_resources(build(name, macros, "sm_90a").cubin)["attend"]
        assert resources.parameter_bytes == (attention_cuda._CALL.size,)
    hopper = {"HEAD_DIM": 64, "BF16": 1, "BLOCK_N": 128, "SOFTCAP": 0, "GROUPS": 3, "Q_SLOTS": 2}
    call = attention_sm90._CALL
    for macros, maps in (({}, 4), ({"MERGE": 1}, 3)):
        resources = read_resources(build("attention/forward_sm90", hopper | macros, "sm_90a").cubin)["attend"]
        assert resources.parameter_bytes == (-(-(maps * 128 + call.size) // 64) * 64,)
    resources = read_resources(build("attention/tile_list", {}, "sm_90a").cubin)["make_tile_list"]
    assert resources.parameter_bytes == (tile_list._CALL.size,)


def view(shape: tuple[int, ...], strides: tuple[int, ...], pointer: int = 256) -> CudaView:
    return CudaView(pointer, shape, strides, "float16", 0)


@pytest.mark.parametrize(
    ("array", "aligned", "mapped"),
    [
        (view((2, 5, 4, 64), (1280, 256, 64, 1)), True, True),
        (view((2, 5, 4, 64), (1280, 64, 320, 1)), True, True),  # heads before positions
        (view((2, 5, 4, 64), (1280, 256, 64, 1), pointer=264), False, True),
        (view((2, 5, 4, 64), (1284, 256, 64, 1)), False, True),
        (view((1, 5, 4, 64), (1284, 256, 64, 1)), True, True),  # of the stride of one row nothing is read
        (view((2, 5, 4, 64), (0, 256, 64, 1)), True, False),  # one row expanded to a batch
        (view((2, 0, 4, 64), (0, 256, 64, 1)), True, False),
        (view((2, 5, 4, 64), (-1280, 256, 64, 1)), True, False),
        (view((2, 5, 4, 64), (1 << 39, 256, 64, 1)), True, False),
        (view((9, 4, 64), (256, 64, 1)), True, True),
        (view((9, 4, 64), (1 << 33, 64, 1)), True, False),
    ],
)
def test_which_arrays_are_copied_how(array: CudaView, aligned: bool, mapped: bool) -> None:
    assert attention_arguments.is_aligned(array) == aligned
    assert attention_arguments.can_be_mapped(array) == mapped


def test_strides_of_the_call() -> None:
    fields = attention_arguments.strides_of
    assert fields("q", view((2, 5, 4, 64), (1280, 256, 64, 1))) == (1280, 256, 64)
    assert fields("k", view((9, 4, 64), (300, 64, 1))) == (0, 300, 64)
    assert attention_arguments.contiguous_strides((2, 5, 4, 64)) == (1280, 256, 64)
    assert attention_arguments.contiguous_strides((9, 4, 64)) == (0, 256, 64)
    with pytest.raises(NotImplementedError, match="the last axis must be contiguous"):
        fields("v", view((2, 5, 4, 64), (1280, 256, 1, 4)))


class Map(NamedTuple):
    """What a tensor map was encoded from."""

    base: int
    sizes: list[int]
    strides: list[int]  # bytes, of all axes

    def element(self, coordinates: tuple[int, ...]) -> int | None:
        """Address, as hardware finds it; None beyond the end of an axis."""
        if any(not 0 <= at < size for at, size in zip(coordinates, self.sizes, strict=True)):
            return None
        return (
            self.base + sum(at * step for at, step in zip(coordinates, self.strides, strict=True))
        ) % 2**64


def encoded(monkeypatch: pytest.MonkeyPatch, array: CudaView, heads: int | None = None) -> Map:
    """Let an array be encoded where there may be no driver."""
    driver = pytest.importorskip("cuda.bindings.driver")
    found: list[Map] = []

    def encode(
        _: object, rank: int, base: int, sizes: list[Any], strides: list[Any], *rest: object
    ) -> tuple[int, Any]:
        found.append(Map(base, [int(x) for x in sizes], [2, *(int(x) for x in strides)]))
        assert rank == 5
        assert all(0 < step < 2**40 and step % 16 == 0 for step in found[0].strides[1:])
        return 0, SimpleNamespace(opaque=[0] * 16)

    monkeypatch.setattr(driver, "cuTensorMapEncodeTiled", encode)
    attention_arguments.encoder_of(array, 128, heads)(array.pointer)
    return found[0]


@pytest.mark.parametrize("strides", [(256, 64, 1), (64, 64 * 60, 1), (72 * 5, 72, 1), (1 << 32, 64, 1)])
def test_tensor_copies_end_with_each_sequence(
    monkeypatch: pytest.MonkeyPatch, strides: tuple[int, ...]
) -> None:
    heads, end, bounds = 4, 1 << 30, (0, 0, 7, 8, 50, 60)
    array = view((bounds[-1], heads, 64), strides, pointer=0x7F0000000100)
    of = encoded(monkeypatch, array)
    assert of.base == array.pointer  # hardware wants it in mapped memory
    for first, last in itertools.pairwise(bounds):
        for position, head in itertools.product(range(last - first + 128), range(heads)):
            at = (3, end - (last - first) + position, head, last, end)  # find_origin in common/hopper.cuh
            inside = array.pointer + 2 * (strides[0] * (first + position) + strides[1] * head + 3)
            assert of.element(at) == (inside if position < last - first else None)


def test_tensor_copies_of_one_length_and_of_one_token(monkeypatch: pytest.MonkeyPatch) -> None:
    of = encoded(monkeypatch, view((2, 5, 4, 64), (1280, 64, 320, 1)))
    assert of.element((1, 4, 3, 1, 0)) == 256 + 2 * (1 + 4 * 64 + 3 * 320 + 1280)
    assert of.element((1, 5, 3, 1, 0)) is None
    of = encoded(monkeypatch, view((1, 1, 64), (7, 9, 1)))
    assert of.element((1, (1 << 30) - 1, 0, 1, 1 << 30)) == 258


@pytest.mark.parametrize("shape", [(2, 5, 4, 64), (9, 4, 64)])
def test_rows_of_several_heads_change_places_with_positions(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...]
) -> None:
    array = view(shape, (1280, 64, 320, 1)[4 - len(shape) :])
    one, several = encoded(monkeypatch, array), encoded(monkeypatch, array, heads=2)
    swapped = [0, 2, 1, 3, 4]
    assert several.sizes == [one.sizes[axis] for axis in swapped]
    assert several.strides == [one.strides[axis] for axis in swapped]


@pytest.mark.parametrize("word", [0, 1])
@pytest.mark.parametrize("changing", [False, True])
def test_a_tensor_map_moves_where_only_its_address_depends_on_it(word: int, changing: bool) -> None:
    encoded_at: list[int] = []

    def expected(address: int, array: int) -> list[int]:
        words = list(range(array, array + 16))
        words[word] = address
        words[9] += address % 1000 if changing else 0
        return words

    def encode(address: int, array: int) -> list[int]:
        encoded_at.append(address)
        return expected(address, array)

    memory = np.zeros(40, np.uint64)
    maps = attention_arguments.TensorMaps(
        words_of(memory), *(lambda address, array=array: encode(address, array) for array in (3, 50))
    )
    for addresses in ((1 << 40, 512), ((1 << 46) + 512, 1 << 20), (1 << 20, 1 << 41)):
        maps.point_to(addresses)
        assert memory.tolist() == [*expected(addresses[0], 3), *expected(addresses[1], 50), *[0] * 8]
    movable = word == 0 and not changing
    assert (len(encoded_at) < 8) == movable  # 2 and 4 to look at, 2 for each call more

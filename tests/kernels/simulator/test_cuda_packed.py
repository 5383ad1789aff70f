"""Packed attention of backend "numba" in Numba's CUDA simulator against float64, on tiny shapes.

Needs `NUMBA_ENABLE_CUDASIM=1` before Numba is imported, so it runs in a process of its own (`make test`). The
launcher is the one that a GPU sees; what is replaced is the edge to the device.
"""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvlab.numba_kernels.cuda import integers as cuda_integers
from kvlab.numba_kernels.cuda import packed as cuda_packed
from kvlab.numba_kernels.cuda import packed_merge as cuda_packed_merge
from numba import cuda, types
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from kvlab.arrays import dtype_name, numpy_dtype
from kvlab.ops.numba import packed as packed_numba
from kvlab.ops.packed import Window
from kvlab.pages import QUAD, new_pool
from kvlab.reference import packed as reference
from kvlab.reference.blocks import placed_channels
from kvlab.reference.codec import hadamard_matrix
from kvlab.reference.pages import bit_address
from kvlab.reference.records import decode_page
from kvlab.views import CudaView
from tests.compare import assert_accurate, ulp
from tests.ops.test_packed import (
    PROFILES,
    RUNGS,
    RUNGS_IN_BLOCKS,
    SAME_WIDTHS,
    PackedCase,
    low_precision,
    make_pages,
    wrong_pages,
)
from tests.strategies import random_floats

Array = NDArray[Any]

# What NaN and infinity come to is part of the contract, and `np.errstate` does not reach simulated threads.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


class SimulatedKernel:
    """What `load` returns, on the simulator: arrays by address, scalars of exactly their type."""

    def __init__(self, made: tuple[Any, tuple[Any, ...], tuple[int, int]], at: dict[int, Array]) -> None:
        self.function, self.types, self.bounds = made
        self.at = at

    def __call__(
        self, grid: tuple[int, ...], block: tuple[int], args: tuple[Any, ...], shared: int, stream: int
    ) -> None:
        assert block[0] <= self.bounds[0]
        rest, taken = iter(args), []
        for kind in self.types:
            if isinstance(kind, types.UniTuple):
                taken.append(tuple(self.checked(next(rest), kind.dtype) for _ in range(kind.count)))
            elif isinstance(kind, types.CPointer):
                address, dtype = next(rest), np.dtype(str(kind.dtype))
                assert type(address) is int
                taken.append(self.at[address].view(dtype) if address else np.zeros(1, dtype))
            else:
                taken.append(self.checked(next(rest), kind))
        assert next(rest, None) is None
        cuda.jit(self.function)[grid, block](*taken)

    @staticmethod
    def checked(value: Any, kind: Any) -> Any:
        assert type(value) is np.dtype(str(kind)).type, f"{value!r} is no {kind}"
        return value


@dataclasses.dataclass
class Gpu:
    """The edge to the device, replaced: views, streams and compiled kernels."""

    multiprocessors: int = 1
    at: dict[int, Array] = dataclasses.field(default_factory=dict)

    def view(self, x: Any, name: str) -> CudaView:
        strides = tuple(step // x.itemsize for step in x.strides)
        if x.ctypes.data not in self.at:
            extent = (
                1 + sum((n - 1) * step for n, step in zip(x.shape, strides, strict=True)) if x.size else 0
            )
            self.at[x.ctypes.data] = as_strided(x, (extent,), (x.itemsize,)).view(np.uint8)
        return CudaView(x.ctypes.data, x.shape, strides, dtype_name(x), 0)

    def kernels(
        self,
        layouts: Any,
        dtype: str,
        query_rows: int,
        softcap: bool,
        kept: bool,
        windowed: bool,
        device: int,
    ) -> tuple[SimulatedKernel, SimulatedKernel, int]:
        options = packed_numba.options_of(layouts, dtype, query_rows)
        blocks = packed_numba.blocks_at_once(options, (9, 0), plain=not (softcap or kept or windowed))
        extra = {"softcap": int(softcap), "kept": int(kept), "window": int(windowed), "blocks": blocks}
        made = cuda_packed.attend_pages(**options, **extra)
        merging = cuda_packed_merge.merge_parts(**packed_numba.merging_options(options))
        slots = blocks * self.multiprocessors
        return SimulatedKernel(made, self.at), SimulatedKernel(merging, self.at), slots


def simulate(case: PackedCase, multiprocessors: int = 1, *, in_units: bool = False) -> Any:
    """Call the launcher of backend "numba" on a GPU of so many multiprocessors.

    `in_units`: as in a cache, all pools are one memory, of which `index` counts units of 16 bytes.
    """
    gpu = Gpu(multiprocessors)
    group = case.q.shape[2] // case.pages.rung.shape[1]
    options = dict(case.options)
    options["scale"] = case.q.shape[3] ** -0.5 if options["scale"] is None else options["scale"]
    # The kernel finds pools by their distance from the first, so they lie in one piece of memory here.
    whole = np.concatenate([pool.reshape(-1) for pool in case.pages.pools])
    memory = np.zeros(whole.size + 64, np.uint8)
    memory = memory[-memory.ctypes.data % 64 :][: whole.size]
    memory[:] = whole
    starts = np.cumsum([0, *(pool.size for pool in case.pages.pools)])
    pools = [
        memory[start : start + pool.size].reshape(pool.shape)
        for start, pool in zip(starts, case.pages.pools, strict=False)
    ]
    gpu.at[memory.ctypes.data] = memory
    pages: Any = dataclasses.replace(case.pages, pools=tuple(pools))
    if in_units:
        rung = np.minimum(pages.rung, len(pools) - 1)
        first, each = starts[rung] // 16, np.array([pool.shape[1] // 16 for pool in pools])[rung]
        index = np.where(pages.count > 0, first + each * pages.index, 2**32 - 1).astype(np.uint32)
        one_memory = {"pools": [memory] * len(pools), "index": index, "unit": 16}
        pages = SimpleNamespace(**(vars(pages) | one_memory))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packed_numba, "cuda_view", gpu.view)
        patch.setattr(packed_numba, "current_stream", lambda q: 0)
        patch.setattr(packed_numba, "_kernels", gpu.kernels)
        patch.setattr(packed_numba, "multiprocessors", lambda device: multiprocessors)
        window, first = options.pop("window", (-1, -1)), options.pop("first_position", None)
        stored_window = None if first is None else Window(window[0], first)
        return packed_numba.launch(case.q, pages, group, **options, window=stored_window)


def case_of(
    rungs: tuple[tuple[Any, int], ...],
    quads: list[list[int]],
    *,
    head_dim: int = 16,
    dtype: str = "float32",
    seqlen_q: int = 1,
    group: int = 1,
    **options: Any,
) -> PackedCase:
    rng = np.random.default_rng(head_dim + len(rungs) + seqlen_q + group)
    pages = make_pages(rng, rungs, head_dim, dtype, np.array(quads))
    shape = (len(quads), seqlen_q, len(quads[0]) * group, head_dim)
    q = random_floats(rng, shape, numpy_dtype(dtype), (-4, 1))
    return PackedCase(q, pages, {"scale": None, "softcap": 0.0, "keep_scores": 0} | options)


def assert_right(case: PackedCase, multiprocessors: int = 1, *, in_units: bool = False) -> None:
    result = simulate(case, multiprocessors, in_units=in_units)
    expected, expected_lse, scores = reference.packed_attention(case.q, case.pages, **case.options)
    low_out, low_lse = low_precision(case)
    assert_accurate(result.out, expected, low_out)
    assert_accurate(result.lse, expected_lse, low_lse, "lse")
    assert (result.scores is None) == (case.options["keep_scores"] == 0)
    if result.scores is not None:
        used = (np.arange(scores.shape[2]) < case.pages.num_pages[..., None] // QUAD)[..., None, None]
        close = max(1e-5, ulp(1, case.q.dtype) / 2)
        assert (np.isclose(result.scores, scores, rtol=close, atol=close) | ~used).all()


@pytest.mark.parametrize("bits", [2, 3, 4, 8, 16])
@pytest.mark.parametrize("head_dim", [16, 64, 80])
def test_one_width(bits: int, head_dim: int) -> None:
    """At 16 and 80 the last tile has a word of its own at 2 and 3 bits."""
    assert_right(case_of(((bits, bits),), [[2]], head_dim=head_dim))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_all_widths_ragged_rows_and_several_queries(dtype: str) -> None:
    options = {"seqlen_q": 2, "group": 3, "keep_scores": 1, "softcap": 2.0}
    assert_right(case_of(SAME_WIDTHS, [[4, 0], [2, 1]], dtype=dtype, **options), multiprocessors=2)


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_one_profile(profile: tuple[int, ...], head_dim: int) -> None:
    """At 64 a block is a tile, of which a word of 2 bits has two."""
    assert_right(case_of(((profile, 4),), [[2]], head_dim=head_dim))


@pytest.mark.parametrize(("head_dim", "dtype"), [(64, "bfloat16"), (192, "float16"), (256, "float32")])
def test_all_profiles_ragged_rows_and_several_queries(head_dim: int, dtype: str) -> None:
    options = {"seqlen_q": 2, "group": 3, "keep_scores": 1, "softcap": 2.0, "scale": 0.01}
    rungs = RUNGS_IN_BLOCKS[::4]
    assert_right(
        case_of(rungs, [[4, 0], [2, 3]], dtype=dtype, head_dim=head_dim, **options), multiprocessors=2
    )


@pytest.mark.parametrize("profile", [(8, 4, 2, 0), (4, 2, 2, 2)])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_codes_in_blocks_stand_for_their_numbers(profile: tuple[int, ...], head_dim: int) -> None:
    """Of a query that is rotated to one place the scores are the elements there, times a power of 2."""
    options = {"seqlen_q": 8, "keep_scores": 8, "scale": 1.0}
    case = case_of(((profile, 2),), [[1]], head_dim=head_dim, dtype="float16", **options)
    plain = {name: np.zeros_like(getattr(case.pages, name)) for name in ("k_mean", "k_shift", "exponent")}
    pages = dataclasses.replace(case.pages, **plain, k_gain=np.ones((1, 1, 4), np.float32))
    block = head_dim // 4
    butterflies = np.kron(np.eye(4), hadamard_matrix(block) * np.sqrt(block))
    places = np.arange(8) * head_dim // 8 + np.arange(8)  # two of each block
    q = np.zeros_like(case.q)
    q[0, :, 0, placed_channels(pages.k_order[0, 0])] = butterflies[:, places]
    scores = simulate(dataclasses.replace(case, q=q, pages=pages)).scores
    one = 2.0 ** (block.bit_length() // 2)
    for page in np.flatnonzero(pages.count[0, 0, :4]):
        record, count = pages.pools[0][pages.index[0, 0, page]], pages.count[0, 0, page]
        elements = decode_page(record, head_dim, profile, 2, "float16").k[:count, places]
        of_page = scores[0, 0, 0, :, 16 * page : 16 * page + count].T
        np.testing.assert_allclose(of_page, one * elements, rtol=1e-6)


def test_pages_of_a_cache() -> None:
    assert_right(case_of(((2, 3), (16, 4), (8, 8)), [[3, 1]], dtype="float16"), in_units=True)
    rungs = ((4, 2, 2, 0), 3), (16, 4), ((8, 4, 4, 2), 8)
    assert_right(case_of(rungs, [[3, 1]], dtype="float16", head_dim=64), in_units=True)


def test_a_window() -> None:
    """Query tokens see back to positions of their own; whole pages lie before them, or all."""
    first = np.array([300, 130_000], np.int32)
    window = {"window": (200, 0), "first_position": first, "keep_scores": 2}
    case = case_of(((4, 2), (16, 16), (2, 16)), [[6], [3]], seqlen_q=3, group=2, **window)
    case.pages.base[...] %= 2
    assert_right(case)


@pytest.mark.parametrize("rung", [(4, 2), (16, 16)])
def test_a_page_that_no_row_sees_may_hold_anything(rung: tuple[int, int]) -> None:
    """Of the first quad no page is seen, of the second the last two; the others are NaN."""
    window = {"window": (20, 0), "first_position": np.array([130], np.int32), "keep_scores": 1}
    case = case_of((rung,), [[2]], dtype="float16", **window)
    full = case.pages.index[0, 0, np.argmax(case.pages.count[0, 0] == 16)]
    layout, pool = case.pages.layouts[0], new_pool(8, case.pages.layouts[0])
    case.pages.count[..., :8], case.pages.base[...], case.pages.index[0, 0, :8] = 16, 0, np.arange(8)
    pool[...] = case.pages.pools[0][full]
    layout.positions_in(pool)[...] = np.arange(128).reshape(8, 16)
    case = dataclasses.replace(case, pages=dataclasses.replace(case.pages, pools=(pool,)))
    expected, expected_lse, _ = reference.packed_attention(case.q, case.pages, **case.options)
    low_out, low_lse = low_precision(case)
    pool[:6, : layout.positions] = 0xFF  # NaN
    result = simulate(case)
    assert_accurate(result.out, expected, low_out)
    assert_accurate(result.lse, expected_lse, low_lse, "lse")


def test_unequal_widths_and_strided_queries() -> None:
    case = case_of(RUNGS[1:24:6], [[7]], group=2)
    hostile = np.full((1, 2, 1, 20), np.nan, np.float32)
    hostile[..., 2:18] = case.q.transpose(0, 2, 1, 3)
    assert_right(dataclasses.replace(case, q=hostile[..., 2:18].transpose(0, 2, 1, 3)))


def test_the_number_of_parts_does_not_matter_beyond_rounding() -> None:
    case = case_of(((4, 2),), [[9]], head_dim=32)
    few, many = simulate(case), simulate(case, multiprocessors=9)
    again = simulate(case, multiprocessors=9)
    assert many.out.tobytes() == again.out.tobytes()
    assert many.out.tobytes() != few.out.tobytes(), "the sums have another order"
    np.testing.assert_allclose(many.out, few.out, rtol=2e-5, atol=1e-6)


WRONG = (
    *("last quad missed", "codes of K one lane off", "codes of V one lane off"),
    *("exponent of K one too large", "exponent of V one too large"),
)
WRONG_IN_BLOCKS = (
    *("channels in no order", "blocks of the next one's gain"),
    *("exponent of K one too large", "exponent of V one too large", "channels of keys not scaled"),
)


@pytest.mark.parametrize(
    ("rungs", "head_dim", "names"),
    [(((2, 4), (16, 3)), 16, WRONG), ((((8, 4, 2, 0), 4), (16, 3)), 64, WRONG_IN_BLOCKS)],
)
def test_the_comparison_rejects_what_mistakes_would_give(
    rungs: tuple[tuple[Any, int], ...], head_dim: int, names: tuple[str, ...]
) -> None:
    case = case_of(rungs, [[5, 6]], group=2, head_dim=head_dim)
    expected, _, _ = reference.packed_attention(case.q, case.pages)
    low, _ = low_precision(case)
    mistakes = wrong_pages(case.pages)
    for name in names:
        wrong = simulate(dataclasses.replace(case, pages=mistakes[name])).out
        with pytest.raises(AssertionError, match="out: "):
            assert_accurate(np.nan_to_num(wrong), expected, low)


def test_nan_of_a_live_token_shows_in_its_head_alone() -> None:
    case = case_of(((4, 4),), [[2, 2]])
    layout, pages = case.pages.layouts[0], case.pages
    live = next(p for p in range(8) if pages.count[0, 1, p])
    pages.pools[0][pages.index[0, 1, live], layout.v_scales] = 0xFF
    result = simulate(case)
    assert np.isnan(result.out[0, 0, 1]).all()
    assert np.isfinite(result.out[0, 0, 0]).all()
    assert np.isfinite(result.lse).all()


def test_infinite_raw_keys() -> None:
    """Keys of -inf have no weight, even if there is no other key; one of +inf leaves no number."""
    pages = make_pages(np.random.default_rng(7), ((16, 16),), 16, "float32", np.full((1, 3), 1), counts=(16,))
    places = bit_address(32, 16, "k")[:, :, 0] // 32
    for head, (value, slots) in enumerate([(-np.inf, slice(3)), (-np.inf, slice(None)), (np.inf, slice(1))]):
        for page in pages.index[0, head, :4]:
            pages.pools[0][page, : 16 * 16 * 4].view(np.float32)[places[slots]] = value
    q = np.ones((1, 1, 3, 16), np.float32)
    result = simulate(PackedCase(q, pages, {"scale": None, "softcap": 0.0, "keep_scores": 0}))
    expected, expected_lse, _ = reference.packed_attention(q, pages)
    np.testing.assert_allclose(result.out, expected, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(result.lse, expected_lse, rtol=1e-6)
    assert not result.out[0, 0, 1].any()
    assert np.isnan(result.out[0, 0, 2]).all()


def test_refuses_what_it_cannot_do() -> None:
    case = case_of(((2, 2),), [[1]], dtype="float16")
    with pytest.raises(NotImplementedError, match="q is float32 and the pages are of a float16 cache"):
        simulate(dataclasses.replace(case, q=case.q.astype(np.float32)))
    with pytest.raises(ValueError, match="q must be contiguous in its last axis"):
        simulate(dataclasses.replace(case, q=np.repeat(case.q, 2, axis=3)[..., ::2]))


@given(
    st.floats(2.0**-90, 2.0**127, width=32),
    st.floats(-1, 1, width=32),
    st.lists(st.integers(0, 255), min_size=4, max_size=4),
)
def test_numbers_become_integers_of_sixteen_bits(largest: float, share: float, codes: list[int]) -> None:
    """No number up to the largest one leaves the range, and products with codes are exact."""
    unit, inverse = cuda_integers.unit_of.fn(np.float32(largest).view(np.uint32))
    assert np.isclose(unit * inverse, 1, rtol=1e-6, atol=0)
    numbers = np.float32(largest) * np.array([1, share], np.float32)
    h = np.round((numbers * inverse).astype(np.float64)).astype(int)
    assert cuda_integers.MAX_FIXED_POINT // 2 <= h[0] <= cuda_integers.MAX_FIXED_POINT
    pair, word = (
        cuda_integers.pair_of.fn(*(numbers * inverse)),
        sum(code << 8 * i for i, code in enumerate(codes)),
    )
    for dot, two in ((cuda_integers.first_dot, codes[:2]), (cuda_integers.second_dot, codes[2:])):
        assert dot(pair, np.uint32(word), np.int32(-5)) == -5 + 2 * h @ two

"""Packing on a GPU, both backends: the stream of the CPU; what is refused; what is left alone."""

from __future__ import annotations

from typing import Any

import cupy
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

import kvlab
from tests.gpu.device import LIBRARIES, canaries_around_results, on_device, to_numpy
from tests.oracles import every_string
from tests.strategies import WIDTHS, code_arrays, ternary_arrays

BACKENDS = ("cuda", "numba")
both = pytest.mark.parametrize("backend", BACKENDS)


@both
@pytest.mark.parametrize("bits", WIDTHS)
def test_every_short_string(bits: int, backend: str) -> None:
    for length in range(12 // bits + 1):
        codes = every_string(2**bits, length).astype(np.uint8)
        packed = kvlab.pack(on_device(codes, "torch"), bits, backend=backend)
        assert np.array_equal(to_numpy(packed), kvlab.pack(codes, bits, backend="reference"))
        assert np.array_equal(to_numpy(kvlab.unpack(packed, bits, length, backend=backend)), codes)


@both
@settings(max_examples=40)
@given(code_arrays(), st.sampled_from(LIBRARIES))
def test_any_codes(backend: str, case: tuple[NDArray[Any], int], library: str) -> None:
    codes, bits = case
    on_gpu = on_device(codes, library)
    with canaries_around_results():
        packed = kvlab.pack(on_gpu, bits, backend=backend)
        again = kvlab.unpack(packed, bits, codes.shape[-1], backend=backend)
    assert kvlab.last_backend() == backend
    assert type(packed) is type(again) is type(on_gpu)
    assert np.array_equal(to_numpy(packed), kvlab.pack(codes, bits, backend="reference"))
    assert np.array_equal(to_numpy(again), codes)


@both
@settings(max_examples=40)
@given(ternary_arrays(), st.sampled_from(LIBRARIES))
def test_any_ternary_values(backend: str, values: NDArray[np.int8], library: str) -> None:
    with canaries_around_results():
        packed = kvlab.pack_ternary(on_device(values, library), backend=backend)
        again = kvlab.unpack_ternary(packed, values.shape[-1], backend=backend)
    assert np.array_equal(to_numpy(packed), kvlab.pack_ternary(values, backend="reference"))
    assert np.array_equal(to_numpy(again), values)


@both
@pytest.mark.parametrize("shape", [(40_007,), (3, 5, 128), (700, 96), (2, 20_001), (1, 4096)])
def test_tiles_and_their_ends(shape: tuple[int, ...], backend: str) -> None:
    rng = np.random.default_rng(0)
    values = rng.integers(-1, 2, shape, dtype=np.int8)
    packed = kvlab.pack_ternary(on_device(values, "torch"), backend=backend)
    assert np.array_equal(to_numpy(packed), kvlab.pack_ternary(values, backend="reference"))
    assert np.array_equal(to_numpy(kvlab.unpack_ternary(packed, shape[-1], backend=backend)), values)
    for bits in WIDTHS:
        codes = rng.integers(0, 2**bits, shape, dtype=np.uint8)
        packed = kvlab.pack(on_device(codes, "torch"), bits, backend=backend)
        assert np.array_equal(to_numpy(packed), kvlab.pack(codes, bits, backend="reference"))
        assert np.array_equal(to_numpy(kvlab.unpack(packed, bits, shape[-1], backend=backend)), codes)


@both
@pytest.mark.parametrize("bits", WIDTHS)
def test_misaligned_memory_and_unused_bits(bits: int, backend: str) -> None:
    codes = np.random.default_rng(0).integers(0, 2**bits, 2051, dtype=np.uint8)
    packed = kvlab.pack(on_device(codes, "torch")[3:], bits, backend=backend)
    assert np.array_equal(to_numpy(packed), kvlab.pack(codes[3:], bits, backend="reference"))
    count = 2045
    shifted = torch.full((packed.numel() + 5,), 255, dtype=torch.uint8, device="cuda")[5:]
    shifted[:] = packed
    used = count * bits % 8
    shorter = shifted[: -(-count * bits // 8)]
    if used:
        shorter[-1] |= 0xFF << used & 0xFF
    assert np.array_equal(to_numpy(kvlab.unpack(shorter, bits, count, backend=backend)), codes[3 : 3 + count])


@both
def test_what_is_refused_is_named(backend: str) -> None:
    for shape, index in (((3, 9000), (1, 8999)), ((7, 11), (5, 2))):
        codes = torch.zeros(shape, dtype=torch.uint8, device="cuda")
        codes[index] = codes[-1, -1] = 8
        with pytest.raises(ValueError, match=rf"codes\[{index[0]}, {index[1]}\] is 8: a code of 3 bits"):
            kvlab.pack(codes, 3, backend=backend)
    with pytest.raises(ValueError, match=r"values\[1, 2\] is 2: "):
        kvlab.pack_ternary(cupy.array([[0, 0, 0], [1, -1, 2]], cupy.int8), backend=backend)
    for value in range(-128, 128):
        values = torch.zeros(70, dtype=torch.int8, device="cuda")
        values[37] = value
        if abs(value) > 1:
            with pytest.raises(ValueError, match=rf"values\[37\] is {value}: "):
                kvlab.pack_ternary(values, backend=backend)
        else:
            kvlab.pack_ternary(values, backend=backend)
    with pytest.raises(ValueError, match=r"packed\[0, 1\] is 243: "):
        kvlab.unpack_ternary(cupy.array([[242, 243]], cupy.uint8), 10, backend=backend)


@both
def test_without_the_check_calls_can_be_captured(backend: str) -> None:
    codes = torch.randint(0, 8, (64, 96), dtype=torch.uint8, device="cuda")
    kvlab.unpack(kvlab.pack(codes, 3, check=False, backend=backend), 3, 96, backend=backend)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        packed = kvlab.pack(codes, 3, check=False, backend=backend)
        again = kvlab.unpack(packed, 3, 96, backend=backend)
    codes += 1
    codes %= 8
    graph.replay()
    assert torch.equal(again, codes)


def test_runs_of_more_than_2_31_codes() -> None:
    tail = torch.randint(0, 16, (3000,), dtype=torch.uint8, device="cuda")
    codes = torch.full((2**31 + 3000,), 9, dtype=torch.uint8, device="cuda")
    codes[-3000:] = tail
    packed = kvlab.pack(codes, 4)
    assert np.array_equal(to_numpy(packed[-1500:]), kvlab.pack(to_numpy(tail), 4, backend="reference"))
    assert bool((packed[:-1500] == 0x99).all())
    assert torch.equal(kvlab.unpack(packed, 4, len(codes)), codes)

"""Numba kernels of packing in the simulator: the stream of the oracle, bit for bit, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlab.ops.cuda import bits as bits_cuda
from tests.kernels.simulator.simulated import simulate
from tests.oracles import pack_ternary_with_integers, pack_with_one_integer
from tests.strategies import SEEDS, WIDTHS, hostile_view

SHAPES = st.tuples(st.integers(0, 3), st.integers(0, 20))


@pytest.fixture(autouse=True, scope="module")
def _simulated() -> object:
    with pytest.MonkeyPatch.context() as patch:
        simulate(patch)
        yield


@settings(max_examples=15)
@given(SHAPES, st.sampled_from(WIDTHS), SEEDS)
def test_any_codes(shape: tuple[int, int], bits: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    codes = hostile_view(rng, rng.integers(0, 2**bits, shape, dtype=np.uint8))
    packed = bits_cuda.pack_numba(codes, bits, True)
    assert np.array_equal(packed, pack_with_one_integer(codes, bits))
    if packed.size and shape[1] * bits % 8:
        packed[:, -1] |= 0xFF << shape[1] * bits % 8 & 0xFF  # unused bits are ignored
    assert np.array_equal(bits_cuda.unpack_numba(packed, bits, shape[1]), codes)


@settings(max_examples=15)
@given(SHAPES, SEEDS)
def test_any_ternary_values(shape: tuple[int, int], seed: int) -> None:
    values = np.random.default_rng(seed).integers(-1, 2, shape, dtype=np.int8)
    packed = bits_cuda.pack_ternary_numba(values, True)
    assert np.array_equal(packed, pack_ternary_with_integers(values))
    assert np.array_equal(bits_cuda.unpack_ternary_numba(packed, shape[1], True), values)


@pytest.mark.parametrize("bits", [1, 3, 6])
def test_the_first_code_that_is_too_large_is_named(bits: int) -> None:
    codes = np.zeros((3, 11), np.uint8)
    codes[1, 9] = codes[2, 3] = 2**bits
    with pytest.raises(ValueError, match=rf"codes\[1, 9\] is {2**bits}: "):
        bits_cuda.pack_numba(codes, bits, True)
    bits_cuda.pack_numba(codes, bits, False)


def test_other_than_ternary_is_refused() -> None:
    with pytest.raises(ValueError, match=r"values\[1, 2\] is 2: "):
        bits_cuda.pack_ternary_numba(np.array([[0, 0, 0], [1, -1, 2]], np.int8), True)
    with pytest.raises(ValueError, match=r"packed\[0, 1\] is 243: "):
        bits_cuda.unpack_ternary_numba(np.array([[242, 243]], np.uint8), 10, True)

"""The page format: every bit has one place, a warp finds its operands there, and the grid is what it says."""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvlab.reference import pages
from kvlab.reference.pages import HALF_CELL, STEPS, bit_address, candidate_steps, grid_codes, grid_values
from tests.strategies import SEEDS

STORED_BITS = (2, 3, 4, 8, 16, 32)
QUANTISED = (2, 3, 4, 8)
HEAD_DIMS = range(16, 257, 16)


@pytest.mark.parametrize("side", ["k", "v"])
@pytest.mark.parametrize("bits", STORED_BITS)
def test_every_bit_of_a_region_is_one_bit_of_one_code(bits: int, side: str) -> None:
    for head_dim in HEAD_DIMS:
        uses = np.bincount(bit_address(bits, head_dim, side).ravel())
        assert uses.size == 64 * head_dim * bits
        assert (uses == 1).all()


def read_as_a_warp(region: NDArray[np.uint8], bits: int) -> NDArray[np.uint32]:
    """Read a region as 32 lanes do: (tiles, 16, 16) of codes.

    Each lane expands its own words to registers of two elements, and the elements a0 to a7 go where the PTX
    ISA puts them in the 16 x 16 operand of mma.m16n8k16.
    """
    words = region.view("<u4").reshape(-1, 32)  # word, lane
    tiles = region.size * 8 // bits // 256
    matrix = np.zeros((tiles, 16, 16), np.uint32)
    group, thread = np.arange(32) // 4, np.arange(32) % 4
    for tile in range(tiles):
        for i in range(8):
            row = group if i in (0, 1, 4, 5) else group + 8
            column = thread * 2 + (i & 1) + (8 if i >= 4 else 0)
            matrix[tile, row, column] = _field(words, bits, tile, register=i // 2, half=16 * (i % 2))
    return matrix


def _field(words: NDArray[np.uint32], bits: int, tile: int, register: int, half: int) -> Any:
    if bits == 2:
        return words[tile // 2] >> (8 * (tile % 2) + 2 * register + half) & 3
    if bits == 3:
        first, pair = tile // 4 * 3, tile % 4 * 4 + register
        if pair < 15:
            return words[first + pair // 5] >> (3 * (pair % 5) + 1 + half) & 7
        low, middle, high = (words[first + j] >> half & 1 for j in range(3))
        return low + 2 * middle + 4 * high
    if bits == 4:
        return words[tile] >> (4 * register + half) & 15
    if bits == 8:
        return words[2 * tile + register // 2] >> (8 * (register % 2) + half) & 255
    if bits == 16:
        return words[4 * tile + register] >> half & 65535
    return words[8 * tile + 2 * register + half // 16]


@pytest.mark.parametrize("head_dim", [16, 48, 64, 128])
@pytest.mark.parametrize("bits", STORED_BITS)
def test_a_warp_finds_its_operands(bits: int, head_dim: int) -> None:
    rng = np.random.default_rng(bits * head_dim)
    region = rng.integers(0, 256, 8 * head_dim * bits, dtype=np.uint8)
    stream = np.unpackbits(region, bitorder="little").astype(np.uint64)
    matrix = read_as_a_warp(region, bits)
    blocks = head_dim // 16
    for slot in range(64):
        block = slot % 8 // 2
        row = slot // 8 + (8 if slot % 2 else 0)
        key = matrix[block * blocks : (block + 1) * blocks, row, :].ravel()
        value = matrix[block::4, :, row].ravel()
        for side, expected in (("k", key), ("v", value)):
            stream = np.unpackbits(region, bitorder="little").astype(np.uint64)
            codes = (stream[bit_address(bits, head_dim, side)[slot]] << np.arange(bits, dtype=np.uint64)).sum(
                1
            )
            np.testing.assert_array_equal(codes, expected)


def gaussian_error(step: float, bits: int) -> float:
    """The mean squared error of the grid of `step` for a standard normal variable."""

    def density(x: float) -> float:
        return math.exp(-x * x / 2) / math.sqrt(2 * math.pi)

    def above(x: float) -> float:
        return math.erfc(x / math.sqrt(2)) / 2

    error = 0.0
    for cell in range(2 ** (bits - 1)):
        low, value = 2 * cell * step, (2 * cell + 1) * step
        high = low + 2 * step if cell < 2 ** (bits - 1) - 1 else math.inf
        mass, mean = above(low) - above(high), density(low) - density(high)
        square = mass + low * density(low) - (high * density(high) if math.isfinite(high) else 0)
        error += square - 2 * value * mean + value * value * mass
    return 2 * error


@pytest.mark.parametrize(("bits", "known_error"), [(2, 0.1188), (3, 0.03744), (4, 0.01154)])
def test_half_cells_are_the_gaussian_optimum(bits: int, known_error: float) -> None:
    best = float(HALF_CELL[bits])
    assert gaussian_error(best, bits) == pytest.approx(known_error, rel=1e-3)
    nearby = best + np.arange(-20, 21) * 1e-4
    errors = [gaussian_error(step, bits) for step in nearby]
    assert nearby[int(np.argmin(errors))] == pytest.approx(best, abs=1.01e-4)


def test_steps_are_truncated_half_floats() -> None:
    finite = STEPS[: pages._HIGHEST_FINITE + 1]
    assert np.isfinite(finite).all()
    assert (np.diff(finite) > 0).all()
    assert (finite[0], finite[1], finite[-1]) == (0, 2.0**-17, 61440)
    assert not np.isfinite(STEPS[pages._HIGHEST_FINITE + 1 :]).any()
    assert np.isnan(STEPS[pages._NAN_STEP])
    ratio = finite[9:] / finite[8:-1]
    assert (ratio.min(), ratio.max()) == (np.float32(16) / 15, 1.125)


vectors = st.tuples(SEEDS, st.sampled_from(HEAD_DIMS), st.floats(-18, 18))


def draw(case: tuple[int, int, float], count: int = 20) -> NDArray[np.float32]:
    seed, head_dim, scale = case
    x = np.random.default_rng(seed).standard_normal((count, head_dim), dtype=np.float32)
    return x * np.float32(2.0**scale)


def squared_errors(x: NDArray[np.float32], byte: NDArray[Any], bits: int) -> NDArray[np.float64]:
    step = STEPS[byte][..., None]
    value = grid_values(grid_codes(x, step, bits), step, bits)
    errors: NDArray[np.float64] = np.square(x.astype(np.float64) - value).sum(-1)
    return errors


@given(vectors, st.sampled_from(QUANTISED))
def test_the_step_is_the_best_of_five(case: tuple[int, int, float], bits: int) -> None:
    x = draw(case)
    chosen = pages.choose_step(x, bits)
    candidates = candidate_steps(x, bits)
    assert (chosen[:, None] == candidates).any(axis=1).all()
    errors = squared_errors(x[:, None], candidates, bits)
    assert (squared_errors(x, chosen, bits) <= errors.min(1) * (1 + 1e-5)).all()


def test_the_search_is_worth_its_time() -> None:
    """A byte taken without the search is not mistaken for the best of five."""
    x = draw((0, 64, 0.0), 100)
    unsearched = candidate_steps(x, 4)[:, 2]
    assert (squared_errors(x, unsearched, 4) > squared_errors(x, pages.choose_step(x, 4), 4) * 1.00001).any()


def test_of_equally_good_steps_the_lower_is_taken() -> None:
    x = np.full((1, 32), 35, np.float32)
    x[0, ::2] *= -1
    errors = squared_errors(x[:, None], candidate_steps(x, 4), 4)[0]
    assert (errors == 0).sum() == 2
    assert STEPS[pages.choose_step(x, 4)] == 5  # 35 is 7 * 5 and 5 * 7


@pytest.mark.parametrize("bits", QUANTISED)
def test_vectors_without_a_step(bits: int) -> None:
    x = np.ones((5, 32), np.float32)
    x[0] = 0
    x[1] = 1e-40  # its squares are 0
    x[2, 7], x[3, 8], x[4, 9] = np.nan, np.inf, -np.inf
    codes, byte = pages.encode(x, bits)
    assert (codes == 2 ** (bits - 1)).all()
    assert byte.tolist() == [0, 0, 0xFF, 0xFF, 0xFF]
    values = grid_values(codes, STEPS[byte][:, None], bits)
    assert (values[:2] == 0).all()
    assert np.isnan(values[2:]).all()


@given(vectors, st.sampled_from(QUANTISED))
def test_error_of_an_element_is_at_most_a_step(case: tuple[int, int, float], bits: int) -> None:
    """|x - value| <= step wherever |x| <= 2**bits * step, but for the rounding of x / (2 step)."""
    x = draw(case)
    codes, byte = pages.encode(x, bits)
    step = STEPS[byte][:, None].astype(np.float64)
    error = np.abs(x - grid_values(codes, STEPS[byte][:, None], bits).astype(np.float64))
    inside = np.abs(x) <= 2**bits * step
    assert inside.mean() > 0.5
    assert (error <= step * (1 + 2.0 ** (bits - 24)))[inside].all()
    # Beyond the grid the outermost value stands.
    outermost = np.where(x < 0, 0, 2**bits - 1)
    assert (codes == outermost)[~inside].all()


@pytest.mark.parametrize("bits", QUANTISED)
def test_values_of_the_grid_have_their_own_codes(bits: int) -> None:
    codes = np.arange(2**bits)
    for step in STEPS[1 : pages._HIGHEST_FINITE + 1]:
        values = grid_values(codes, step, bits)
        np.testing.assert_array_equal(values.astype(np.float64), (2.0 * codes + 1 - 2**bits) * float(step))
        np.testing.assert_array_equal(grid_codes(values, step, bits), codes)


@pytest.mark.parametrize(("dtype", "kind"), [("float16", np.float16), ("bfloat16", ml_dtypes.bfloat16)])
def test_width_16_is_the_dtype_of_the_cache(dtype: str, kind: Any) -> None:
    patterns = np.arange(65536, dtype=np.uint32).astype(np.uint16)
    elements = patterns.view(kind)
    wide = pages.widen(patterns, dtype)
    np.testing.assert_array_equal(wide, elements.astype(np.float32))
    number = ~np.isnan(wide)
    np.testing.assert_array_equal(pages.narrow(wide, dtype)[number], patterns[number])
    assert np.isnan(pages.widen(pages.narrow(wide[~number], dtype), dtype)).all()
    # Half way between neighbours, just below and just above.
    finite = wide[np.isfinite(wide)]
    between = ((finite[:-1].astype(np.float64) + finite[1:]) / 2).astype(np.float32)
    for x in (between, np.nextafter(between, np.float32(0)), np.nextafter(between, np.float32(np.inf))):
        with np.errstate(over="ignore"):
            expected = x.astype(kind).view(np.uint16)
        np.testing.assert_array_equal(pages.narrow(x, dtype), expected)


def test_float32_caches_store_every_bit() -> None:
    x = np.random.default_rng(3).integers(0, 2**32, 1000, dtype=np.uint32).view(np.float32)
    again = pages.widen(pages.narrow(x, "float32"), "float32")
    np.testing.assert_array_equal(again.view(np.uint32), x.view(np.uint32))


@given(
    SEEDS,
    st.sampled_from((16, 48, 64)),
    st.sampled_from((*QUANTISED, 16)),
    st.sampled_from((*QUANTISED, 16)),
    st.sampled_from(("float16", "bfloat16", "float32")),
    st.integers(0, 64),
)
def test_a_page_gives_its_tokens_back(
    seed: int, head_dim: int, bits_k: int, bits_v: int, dtype: str, count: int
) -> None:
    rng = np.random.default_rng(seed)
    k, v = rng.standard_normal((2, count, head_dim), dtype=np.float32)
    positions = rng.integers(0, 65536, count, dtype=np.uint16)
    importance = rng.integers(0, 256, count, dtype=np.uint8)
    record = pages.encode_page(k, v, bits_k, bits_v, dtype, positions, importance)
    assert record.size % 64 == 0
    page = pages.decode_page(record, head_dim, bits_k, bits_v, dtype)
    for x, got, bits in ((k, page.k, bits_k), (v, page.v, bits_v)):
        if bits == 16:
            expected = pages.widen(pages.narrow(x, dtype), dtype)
        else:
            codes, byte = pages.encode(x, bits)
            expected = grid_values(codes, STEPS[byte][:, None], bits)
        np.testing.assert_array_equal(got[:count], expected)
    np.testing.assert_array_equal(page.positions[:count], positions)
    np.testing.assert_array_equal(page.importance[:count], importance)

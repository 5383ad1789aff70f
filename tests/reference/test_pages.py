"""The page format: every bit has one place, a warp finds its operands there, a page gives its tokens back."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvlab.reference import pages, records
from kvlab.reference.pages import SCALES, bit_address, code_words, grid_values
from tests.strategies import SEEDS

STORED_BITS = (2, 3, 4, 8, 16, 32)
QUANTISED = (2, 3, 4, 8)
HEAD_DIMS = range(16, 257, 16)
HIGHEST_FINITE = 0xF7


@pytest.mark.parametrize("side", ["k", "v"])
@pytest.mark.parametrize("bits", STORED_BITS)
def test_every_bit_of_a_code_has_a_place_of_its_own(bits: int, side: str) -> None:
    for head_dim in HEAD_DIMS:
        uses = np.bincount(bit_address(bits, head_dim, side).ravel(), minlength=16 * head_dim * bits)
        assert uses.max() == 1
        assert uses.size <= 1024 * code_words(bits, head_dim)
        alone = head_dim // 16 % {2: 2, 3: 4}.get(bits, 1)  # tiles in words that are not full
        unused = 1024 * code_words(bits, head_dim) - uses.sum()
        assert unused == alone * (512 if bits == 2 else 256)


def read_as_a_warp(region: NDArray[np.uint8], bits: int, tiles: int) -> NDArray[np.uint32]:
    """Read a region as 32 lanes do: (tiles, 16, 16) of codes.

    Each lane expands its own words to registers of two elements, and the elements a0 to a7 go where the PTX
    ISA puts them in the 16 x 16 operand of mma.m16n8k16.
    """
    words = region.view("<u4").reshape(-1, 32)  # word, lane
    matrix = np.zeros((tiles, 16, 16), np.uint32)
    group, thread = np.arange(32) // 4, np.arange(32) % 4
    for tile in range(tiles):
        for i in range(8):
            row = group if i in (0, 1, 4, 5) else group + 8
            column = thread * 2 + (i & 1) + (8 if i >= 4 else 0)
            matrix[tile, row, column] = _field(words, bits, tiles, tile, register=i // 2, half=16 * (i % 2))
    return matrix


def _field(words: NDArray[np.uint32], bits: int, tiles: int, tile: int, register: int, half: int) -> Any:
    if bits == 2:
        return words[tile // 2] >> (8 * (register // 2) + 4 * (tile % 2) + 2 * (register % 2) + half) & 3
    if bits == 3:
        first, pair = tile // 4 * 3, tile % 4 * 4 + register
        if tile >= tiles // 4 * 4:
            return words[first + tile % 4] >> (4 * register + half) & 7
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


@pytest.mark.parametrize("head_dim", [16, 48, 64, 80, 128, 208])
@pytest.mark.parametrize("bits", STORED_BITS)
def test_a_warp_finds_its_operands(bits: int, head_dim: int) -> None:
    rng = np.random.default_rng(bits * head_dim)
    region = rng.integers(0, 256, 128 * code_words(bits, head_dim), dtype=np.uint8)
    stream = np.unpackbits(region, bitorder="little").astype(np.uint64)
    matrix = read_as_a_warp(region, bits, head_dim // 16)
    for slot in range(16):
        token = slot // 2 + (8 if slot % 2 else 0)
        for side, expected in (("k", matrix[:, token, :].ravel()), ("v", matrix[:, :, token].ravel())):
            own = stream[bit_address(bits, head_dim, side)[slot]] << np.arange(bits, dtype=np.uint64)
            np.testing.assert_array_equal(own.sum(1), expected)


@pytest.mark.parametrize("side", ["k", "v"])
def test_one_mask_of_2_bits_takes_four_elements_of_a_row(side: str) -> None:
    """Of one row of one tile, so that an instruction on bytes needs no shuffle."""
    address = bit_address(2, 64, side)
    for start in (0, 2, 4, 6):
        byte_of_lane = [32 * 9 + 8 * i + start for i in range(4)]  # lane 9 of word 0
        slot, channel, _ = np.nonzero(np.isin(address, byte_of_lane) & (np.arange(2) == 0))
        row, along = (slot, channel) if side == "k" else (channel, slot)
        assert len(row) == 4
        assert len(set(row.tolist())) == 1
        assert len(set(along.tolist())) == 4


def test_steps_are_truncated_half_floats() -> None:
    finite = SCALES[: HIGHEST_FINITE + 1]
    assert np.isfinite(finite).all()
    assert (np.diff(finite) > 0).all()
    assert (finite[0], finite[1], finite[-1]) == (0, 2.0**-17, 61440)
    assert not np.isfinite(SCALES[HIGHEST_FINITE + 1 :]).any()
    assert np.isnan(SCALES[pages.NAN_SCALE])
    ratio = finite[9:] / finite[8:-1]
    assert (ratio.min(), ratio.max()) == (np.float32(16) / 15, 1.125)


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
    st.integers(0, 16),
)
def test_a_page_gives_its_tokens_back(
    seed: int, head_dim: int, bits_k: int, bits_v: int, dtype: str, count: int
) -> None:
    rng = np.random.default_rng(seed)
    k, v = rng.standard_normal((2, count, head_dim), dtype=np.float32)
    positions = rng.integers(0, 65536, count, dtype=np.uint16)
    importance = rng.integers(0, 256, count, dtype=np.uint8)
    record = records.encode_page(k, v, bits_k, bits_v, dtype, positions, importance)
    assert record.size % 16 == 0
    page = records.decode_page(record, head_dim, bits_k, bits_v, dtype)
    for x, got, bits in ((k, page.k, bits_k), (v, page.v, bits_v)):
        if bits == 16:
            expected = pages.widen(pages.narrow(x, dtype), dtype)
        else:
            codes, byte = pages.encode(x, bits)
            expected = grid_values(codes, SCALES[byte][:, None], bits)
        np.testing.assert_array_equal(got[:count], expected)
    np.testing.assert_array_equal(page.positions[:count], positions)
    np.testing.assert_array_equal(page.importance[:count], importance)

"""The arithmetic of packed/int8_mma.cuh in NumPy: codes as bytes, queries and weights in two parts of 8 bits.

As `test_packed_arithmetic.py` does for float16: that masked words are the codes, in the columns that the
factors are laid out for, that sums stay inside what the bits of a float can hold, and that results are closer
to float64 than those of float16 have to be.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from numpy.typing import NDArray

from kvlab.reference.pages import STEPS, bit_address
from tests.kernels.test_packed_arithmetic import (
    HEAD_DIM,
    ROWS,
    SLACK,
    Page,
    judge,
    ordinary_pages,
    page_lists,
    slot_of,
)

F32 = np.float32
Array = NDArray[Any]
MOST, COLUMN = 127 * 256 + 127, np.arange(HEAD_DIM) % 16
WIDTHS = (2, 3, 4, 8)
# Bytes in registers of rows g (even) and g + 8 (odd) hold codes times these, and columns 0 to 7 times LEFT.
EVEN, ODD, LEFT = {2: 16, 3: 1, 4: 1, 8: 1}, {2: 64, 3: 8, 4: 16, 8: 1}, {2: 1, 3: 4, 4: 1, 8: 1}
WORDS = {2: 1, 3: 3, 4: 2, 8: 4}  # of a lane that hold a fragment of two tiles, at 3 bits two of them


def pair_of_3(w: Array, pair: int, to: int) -> Array:
    """Pair 0 to 15 of three words, in both halves from a bit on."""
    if pair == 15:
        return np.bitwise_or.reduce([(x << to + i) & np.uint32(0x10001 << to + i) for i, x in enumerate(w)])
    stands, x = 1 + 3 * (pair % 5), w[pair // 5]
    moved = x << to - stands if stands < to else x >> stands - to
    return np.asarray(moved & np.uint32(7 * 0x10001 << to))


def expand(bits: int, w: Array) -> list[Array]:
    """Words (WORDS, lanes) to the four registers of each A fragment of two tiles that they hold."""
    if bits == 3:
        bit = ((2, 8), (5, 11))
        return [
            pair_of_3(w, 4 * tile + odd, bit[odd][0]) | pair_of_3(w, 4 * tile + 2 + odd, bit[odd][1])
            for tile in range(4)
            for odd in range(2)
        ]
    if bits == 2:
        return [x & np.uint32(mask) for x in (w[0] << 4, w[0]) for mask in (0x30303030, 0xC0C0C0C0)]
    if bits == 4:
        return [x & np.uint32(mask) for x in w for mask in (0x0F0F0F0F, 0xF0F0F0F0)]
    chosen = []
    for pair in (w[:2], w[2:]):
        parts = [pair[i % 2] >> (16 * (i // 2)) for i in range(4)]  # bytes 0, 4, 2, 6 and then those above
        for shift in (0, 8):
            chosen.append(sum((x >> shift & 0xFF) << (8 * i) for i, x in enumerate(parts)))
    return chosen


@pytest.mark.parametrize("bits", WIDTHS)
@pytest.mark.parametrize("side", ["k", "v"])
def test_masked_words_are_the_codes(bits: int, side: str) -> None:
    """And k of a fragment stands for the columns that packed/int8_mma.cuh says."""
    codes = np.random.default_rng(bits).integers(0, 1 << bits, (64, HEAD_DIM))
    stream = np.zeros(64 * HEAD_DIM * bits, np.uint8)
    stream[bit_address(bits, HEAD_DIM, side)] = codes[..., None] >> np.arange(bits) & 1
    words = np.packbits(stream, bitorder="little").view("<u4").reshape(-1, WORDS[bits], 32)
    found = np.full((64, HEAD_DIM), -1)
    g, u = np.arange(32) // 4, np.arange(32) % 4
    registers = [register for own in words for register in expand(bits, own)]
    for two in range(len(registers) // 4):
        for r, register in enumerate(registers[4 * two : 4 * two + 4]):
            row = g + 8 * (r % 2)
            for j in range(4):
                tile, right = (j % 2, r // 2) if bits == 2 else (r // 2, j % 2)
                tile, column = 2 * two + tile, 2 * u + j // 2 + 8 * right
                weight = (ODD if r % 2 else EVEN)[bits] * (1 if right else LEFT[bits])
                value, rest = np.divmod(register >> (8 * j) & 0xFF, weight)
                assert not rest.any()
                blocks = HEAD_DIM // 16
                if side == "k":
                    found[slot_of(row, tile // blocks), 16 * (tile % blocks) + column] = value
                else:
                    found[slot_of(column, tile % 4), 16 * (tile // 4) + row] = value
    assert np.array_equal(found, codes)


def joined(upper: Array, lower: Array, most: int) -> Array:
    """256 upper + lower, as one multiply-add of float32 gives it."""
    assert max(np.abs(upper).max(), np.abs(lower).max()) < most, "a sum leaves the bits of its float"
    return (256 * upper + lower).astype(F32)


def attend_all(pages: list[Page], q: Array) -> tuple[Array, Array]:
    """All pages against queries (ROWS, HEAD_DIM): out and the natural log-sum-exp."""
    x = (q.astype(np.float64) * HEAD_DIM**-0.5 / np.log(2)).astype(F32)
    peak = np.maximum(np.abs(x).max(1, keepdims=True), F32(1e-30))
    unit = peak * F32(2 / MOST)
    out, centre = np.zeros((ROWS, HEAD_DIM), F32), np.zeros((ROWS, 1), F32)
    reference, total = np.full((ROWS, 1), -np.inf, F32), np.zeros((ROWS, 1), F32)
    for page in pages:
        slots, bits = np.arange(64), page.bits
        weight, left = np.where(slots % 2, ODD[bits], EVEN[bits]), np.where(COLUMN >= 8, 1, LEFT[bits])
        fixed = np.rint(x * (F32(MOST) / peak / left)).astype(np.int64)
        upper, lower = fixed + 128 >> 8, (fixed + 128) % 256 - 128
        assert np.abs(upper).max() <= 127
        start = -((((1 << bits) - 1) * (fixed * left).sum(1, keepdims=True)) >> 1) * weight
        codes = page.k * weight[:, None] * left
        sums = joined(upper @ codes.T + (start >> 8), lower @ codes.T + (start & 255), 1 << 22)
        s = sums * (STEPS[page.k_steps] * (unit / weight.astype(F32)))
        s[:, slots >= page.count] = -np.inf
        top = s.max(1, keepdims=True)
        if (top > reference + SLACK).any():
            highest = np.maximum(top, reference)
            factor = np.exp2(reference - highest)
            out, centre, total, reference = out * factor, centre * factor, total * factor, highest
        p = np.exp2(s - reference)
        total = total + p.sum(1, keepdims=True)
        weights = p * np.where(slots < page.count, STEPS[page.v_steps], 0)
        largest = np.maximum(weights.max(1, keepdims=True), F32(2.0**-100))
        one = np.exp2(np.floor(np.log2(largest)) - 15) * F32(65536 / 65535)
        left = np.where(slots % 2, 1, LEFT[bits])
        scaled = np.rint(weights / one / left).astype(np.int64)
        assert scaled.max() < 1 << 16
        weight = np.where(COLUMN >= 8, ODD[bits], EVEN[bits])
        codes = page.v * weight * left[:, None]
        sums = joined((scaled >> 8) @ codes, (scaled & 255) @ codes, 1 << 23)
        out = out + sums * (2 * one / weight.astype(F32))
        centre = centre + weights.sum(1, keepdims=True) * F32(1 - (1 << bits))
    return (out + centre) / total, ((reference + np.log2(total)) * F32(np.log(2)))[:, 0]


@given(page_lists())
def test_results_are_closer_than_those_of_float16(case: tuple[list[Page], Array]) -> None:
    """Whatever the widths, in whatever order, however large steps and queries."""
    assert judge(*case, *attend_all(*case)) <= 0.5


@pytest.mark.parametrize("bits", WIDTHS)
def test_the_largest_sums_fit(bits: int) -> None:
    """Sums stay inside the ulps of the float their accumulator starts at, to head_dim 128, not at 256."""
    most = ((1 << bits) - 1) * max(EVEN[bits], ODD[bits]) * LEFT[bits]
    assert most < 256
    assert 64 * 255 * most < 1 << 23
    upper_of_scores = 128 * (127 * most // 2 + most // 2) + 1  # less the middle of the codes; signed
    lower_of_scores = 128 * 128 * most + 255
    assert max(upper_of_scores, lower_of_scores) < 1 << 22
    if bits == 8:
        assert 2 * (lower_of_scores - 255) > 1 << 22
    with pytest.raises(AssertionError, match="leaves"):
        joined(np.array([1 << 22]), np.array([0]), 1 << 22)


def test_the_judge_says_no(monkeypatch: pytest.MonkeyPatch) -> None:
    pages, q = ordinary_pages()
    out, lse = attend_all(pages, q)
    assert judge(pages, q, out, lse) <= 0.5
    assert judge(pages, q, attend_all(pages[1:], q)[0], lse) > 3
    for wrong in (lambda upper, lower: 256 * upper, lambda upper, lower: 256 * upper + (lower & 255) + 64):
        monkeypatch.setattr(f"{__name__}.joined", lambda u, v, _, wrong=wrong: wrong(u, v).astype(F32))
        assert judge(pages, q, *attend_all(pages, q)) > 1

"""The arithmetic of packed/int8_mma.cuh in NumPy: codes as bytes, queries and weights in two parts of 8 bits.

As `test_packed_arithmetic.py` does for float16: that masked words are the codes, in the columns that the
factors are laid out for, that sums stay inside what the bits of a float can hold, and that results are closer
to float64 than those of float16 have to be.
"""

from __future__ import annotations

from itertools import groupby
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from numpy.typing import NDArray

from kvlab.reference.pages import SCALES
from tests.kernels.test_packed_arithmetic import (
    HEAD_DIM,
    ROWS,
    SLACK,
    Quad,
    draw_words,
    judge,
    ordinary_quads,
    put_element,
    quad_lists,
    words_of,
)

F32 = np.float32
Array = NDArray[Any]
MAX_FIXED_POINT, COLUMN = 127 * 256 + 127, np.arange(HEAD_DIM) % 16
WIDTHS = (2, 3, 4, 8)
# Bytes in registers of rows g (even) and g + 8 (odd) hold codes times these, and columns 0 to 7 times LEFT;
# of values in second tiles times SECOND, of keys in both, for they are added.
EVEN, ODD, LEFT = {2: 1, 3: 1, 4: 1, 8: 1}, {2: 4, 3: 8, 4: 16, 8: 1}, {2: 1, 3: 4, 4: 1, 8: 1}
SECOND, TILES = {2: 16, 3: 1, 4: 1, 8: 1}, {2: 2, 3: 4, 4: 2, 8: 2}  # tiles that are loaded at once


def pair_of_3(w: Array, pair: int, to: int) -> Array:
    """Pair 0 to 15 of three words, in both halves from a bit on."""
    if pair == 15:
        return np.bitwise_or.reduce([(x << to + i) & np.uint32(0x10001 << to + i) for i, x in enumerate(w)])
    stands, x = 1 + 3 * (pair % 5), w[pair // 5]
    moved = x << to - stands if stands < to else x >> stands - to
    return np.asarray(moved & np.uint32(7 * 0x10001 << to))


def rows_of_tile(bits: int, w: Array, i: int, alone: bool, lifted: bool) -> list[Array]:
    """Registers of rows g and g + 8 of tile `i` of those whose words are `w`."""
    if bits == 2:
        masks = (0x30303030, 0xC0C0C0C0) if i or lifted else (0x03030303, 0x0C0C0C0C)
        return [(w[0] << 4 if lifted and i == 0 else w[0]) & np.uint32(mask) for mask in masks]
    if bits == 3 and alone:
        even = (w[i] & np.uint32(0x00070007)) << 2 | w[i] & np.uint32(0x07000700)
        return [even, (w[i] & np.uint32(0x00700070)) << 1 | w[i] >> 1 & np.uint32(0x38003800)]
    if bits == 3:
        bit = ((2, 8), (5, 11))
        return [
            pair_of_3(w, 4 * i + odd, bit[odd][0]) | pair_of_3(w, 4 * i + 2 + odd, bit[odd][1])
            for odd in range(2)
        ]
    if bits == 4:
        return [w[i] & np.uint32(mask) for mask in (0x0F0F0F0F, 0xF0F0F0F0)]
    parts = [w[2 * i + j % 2] >> (16 * (j // 2)) for j in range(4)]  # bytes 0, 4, 2, 6 and then those above
    return [sum((x >> shift & 0xFF) << (8 * j) for j, x in enumerate(parts)) for shift in (0, 8)]


@pytest.mark.parametrize("bits", WIDTHS)
@pytest.mark.parametrize("side", ["k", "v"])
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128])
def test_masked_words_are_the_codes(bits: int, side: str, head_dim: int) -> None:
    """And bytes stand for the columns that packed/int8_mma.cuh says."""
    codes, words = draw_words(bits, head_dim, side)
    found = np.full(codes.shape, -1)
    g, u = np.arange(32) // 4, np.arange(32) % 4
    for tile in range(head_dim // 16):
        first = tile // TILES[bits] * TILES[bits]
        own = words[words_of(bits, first) : words_of(bits, min(first + TILES[bits], head_dim // 16))]
        alone, lifted = first + TILES[bits] > head_dim // 16, side == "k"
        for odd, register in enumerate(rows_of_tile(bits, own, tile - first, alone, lifted)):
            for j in range(4):
                weight = (ODD if odd else EVEN)[bits] * (SECOND[bits] if lifted or tile % 2 else 1)
                weight *= 1 if j % 2 else LEFT[bits]
                value, rest = np.divmod(register >> (8 * j) & 0xFF, weight)
                assert not rest.any()
                put_element(found, side, tile, g + 8 * odd, 2 * u + j // 2 + 8 * (j % 2), value)
    assert np.array_equal(found, codes)


def joined(upper: Array, lower: Array, most: int) -> Array:
    """256 upper + lower, as one multiply-add of float32 gives it."""
    assert max(np.abs(upper).max(), np.abs(lower).max()) < most, "a sum leaves the bits of its float"
    return (256 * upper + lower).astype(F32)


def attend_all(quads: list[Quad], q: Array) -> tuple[Array, Array]:
    """All quads against queries (ROWS, HEAD_DIM): out and the natural log-sum-exp."""
    x = (q.astype(np.float64) * HEAD_DIM**-0.5 / np.log(2)).astype(F32)
    largest_q = np.maximum(np.abs(x).max(1, keepdims=True), F32(1e-30))
    unit = largest_q * F32(2 / MAX_FIXED_POINT)
    out, zero_point_sum = np.zeros((ROWS, HEAD_DIM), F32), np.zeros((ROWS, 1), F32)
    row_max, total = np.full((ROWS, 1), -np.inf, F32), np.zeros((ROWS, 1), F32)
    for quad in quads:
        slots, bits = np.arange(64), quad.bits
        weight = np.where(slots % 2, ODD[bits], EVEN[bits]) * SECOND[bits]
        left = np.where(COLUMN >= 8, 1, LEFT[bits])
        fixed = np.rint(x * (F32(MAX_FIXED_POINT) / largest_q / left)).astype(np.int64)
        upper, lower = fixed + 128 >> 8, (fixed + 128) % 256 - 128
        assert np.abs(upper).max() <= 127
        start = -((((1 << bits) - 1) * (fixed * left).sum(1, keepdims=True)) >> 1) * weight
        codes = quad.k * weight[:, None] * left
        sums = joined(upper @ codes.T + (start >> 8), lower @ codes.T + (start & 255), 1 << 22)
        s = sums * (SCALES[quad.k_scales] * (unit / weight.astype(F32)))
        s[:, slots >= quad.count] = -np.inf
        top = s.max(1, keepdims=True)
        if (top > row_max + SLACK).any():
            highest = np.maximum(top, row_max)
            factor = np.exp2(row_max - highest)
            out, zero_point_sum, total, row_max = (
                out * factor,
                zero_point_sum * factor,
                total * factor,
                highest,
            )
        p = np.exp2(s - row_max)
        total = total + p.sum(1, keepdims=True)
        weights = p * np.where(slots < quad.count, SCALES[quad.v_scales], 0)
        largest = np.maximum(weights.max(1, keepdims=True), F32(2.0**-100))
        one = np.exp2(np.floor(np.log2(largest)) - 15) * F32(65536 / 65535)
        left = np.where(slots % 2, 1, LEFT[bits])
        scaled = np.rint(weights / one / left).astype(np.int64)
        assert scaled.max() < 1 << 16
        weight = np.where(COLUMN >= 8, ODD[bits], EVEN[bits])
        weight = weight * np.where(np.arange(HEAD_DIM) // 16 % 2, SECOND[bits], 1)
        codes = quad.v * weight * left[:, None]
        sums = joined((scaled >> 8) @ codes, (scaled & 255) @ codes, 1 << 23)
        out = out + sums * (2 * one / weight.astype(F32))
        zero_point_sum = zero_point_sum + weights.sum(1, keepdims=True) * F32(1 - (1 << bits))
    return (out + zero_point_sum) / total, ((row_max + np.log2(total)) * F32(np.log(2)))[:, 0]


@given(quad_lists())
def test_results_are_closer_than_those_of_float16(case: tuple[list[Quad], Array]) -> None:
    """Whatever the widths, in whatever order, however large scales and queries."""
    assert judge(*case, *attend_all(*case)) <= 0.5


@pytest.mark.parametrize("bits", WIDTHS)
def test_the_largest_sums_fit(bits: int) -> None:
    """Sums stay inside the ulps of the float their accumulator starts at, to head_dim 128, not at 256."""
    most = ((1 << bits) - 1) * max(EVEN[bits], ODD[bits]) * LEFT[bits] * SECOND[bits]
    assert most < 256
    assert 64 * 255 * most < 1 << 23
    upper_of_scores = 128 * (127 * most // 2 + most // 2) + 1  # less the middle of the codes; signed
    lower_of_scores = 128 * 128 * most + 255
    assert max(upper_of_scores, lower_of_scores) < 1 << 22
    if bits == 8:
        assert 2 * (lower_of_scores - 255) > 1 << 22
    with pytest.raises(AssertionError, match="leaves"):
        joined(np.array([1 << 22]), np.array([0]), 1 << 22)


PROFILES = ((4, 2, 2, 0), (4, 4, 2, 2), (8, 4, 2, 2), (8, 4, 4, 4), (8, 8, 8, 8), (2, 0, 0, 0))
CELL = {0: 0, 2: 32, 4: 12, 8: 1}  # half of one, in scales


def elements_of(profile: tuple[int, ...], codes: Array) -> Array:
    """What codes (tokens, head_dim) stand for, in scales."""
    width = np.repeat(profile, codes.shape[1] // 4)
    return np.asarray((2 * codes + 1 - (1 << width)) * np.vectorize(CELL.get)(width))


def block_scores(profile: tuple[int, ...], codes: Array, q: Array) -> Array:
    """Scores (rows, tokens) of keys in blocks, of scales of 1: packed/int8_block_scores.cuh."""
    x, n = q.astype(F32), q.shape[1] // 4
    largest_q = np.abs(x).max(1, keepdims=True)
    fixed = np.rint(x * (F32(MAX_FIXED_POINT) / largest_q)).astype(np.int64)
    upper, lower = fixed + 128 >> 8, (fixed + 128) % 256 - 128
    lacks = np.array([-CELL[width] * ((1 << width) - 1) for width in profile], F32)
    sums = fixed.reshape(len(q), 4, n).sum(2).astype(F32)
    s = F32(0.5) * (sums * lacks).sum(1, keepdims=True) + np.zeros((len(q), len(codes)), F32)
    slots, first = np.arange(len(codes)), 0
    for width, blocks in groupby(profile):
        own = slice(first, first + n * len(list(blocks)))
        first = own.stop
        if width:
            weight = np.where(slots % 2, ODD[width], EVEN[width]) * SECOND[width]
            a = codes[:, own] * weight[:, None]
            part = joined(upper[:, own] @ a.T, lower[:, own] @ a.T, 1 << 22)
            s += part * (CELL[width] / weight.astype(F32))
    return np.asarray(s * (largest_q * F32(2 / MAX_FIXED_POINT)))


@pytest.mark.parametrize("profile", PROFILES, ids=str)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_scores_of_blocks_are_closer_than_those_of_float16(profile: tuple[int, ...], head_dim: int) -> None:
    rng, n = np.random.default_rng(head_dim), head_dim // 4
    codes = rng.integers(0, 1 << np.repeat(profile, n), (64, head_dim))
    q = rng.standard_normal((8, head_dim)) * np.repeat(2.0 ** -np.arange(4), n)
    exact = q @ elements_of(profile, codes).T
    low = q.astype(np.float16).astype(np.float64) @ elements_of(profile, codes).T
    allowed = 0.5 * np.abs(low - exact).max()
    assert np.abs(block_scores(profile, codes, q) - exact).max() < allowed
    for wrong in (codes ^ 1, np.roll(codes, 1, axis=1), np.roll(codes, 1, axis=0)):
        assert np.abs(block_scores(profile, wrong, q) - exact).max() > 10 * allowed


@pytest.mark.parametrize("profile", PROFILES, ids=str)
def test_the_largest_sums_of_runs_fit(profile: tuple[int, ...]) -> None:
    """To head_dim 128: the largest sum of lower bytes; that of upper ones is less."""
    for width in set(profile) - {0}:
        most = ((1 << width) - 1) * ODD[width] * SECOND[width]
        assert most < 256
        assert 32 * profile.count(width) * 128 * most < 1 << 22


def test_the_judge_says_no(monkeypatch: pytest.MonkeyPatch) -> None:
    quads, q = ordinary_quads()
    out, lse = attend_all(quads, q)
    assert judge(quads, q, out, lse) <= 0.5
    assert judge(quads, q, attend_all(quads[1:], q)[0], lse) > 3
    for wrong in (lambda upper, lower: 256 * upper, lambda upper, lower: 256 * upper + (lower & 255) + 64):
        monkeypatch.setattr(f"{__name__}.joined", lambda u, v, _, wrong=wrong: wrong(u, v).astype(F32))
        assert judge(quads, q, *attend_all(quads, q)) > 1

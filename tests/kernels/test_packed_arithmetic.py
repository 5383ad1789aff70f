"""The arithmetic of packed/packed_attention.cu in NumPy: float16 codes, powers of 2 for q and p, units.

A model of one warp, statement by statement as pages/codes.cuh, packed/scores.cuh, packed/values.cuh and
packed/state.cuh have it, so a machine without a GPU can tell whether the scheme itself is right: that masked
words are the codes, that nothing overflows float16, and that results are as close to float64 as promised.
What the model cannot tell is whether the kernel does the same: tests/gpu does.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvlab.reference.pages import SCALES, bit_address

F32 = np.float32
Array = NDArray[Any]
HEAD_DIM, ROWS = 32, 3
SLACK, EMPTY = F32(8), F32(-np.inf)
# Where a code stands in the 16 bits of its number: in even and odd rows of a tile, and how much higher in the
# second of two tiles (Fields in pages/codes.cuh).
EVEN, ODD, SECOND = {2: 0, 3: 1, 4: 0, 8: 0}, {2: 2, 3: 4, 4: 4, 8: 0}, {2: 4, 3: 0, 4: 0, 8: 0}
TILES, WORDS = {2: 2, 3: 4, 4: 1, 8: 1}, {2: 1, 3: 3, 4: 1, 8: 2}

CHANNEL = np.arange(HEAD_DIM)


def subnormal(codes: Array, bit: Array) -> Array:
    """Codes at a bit of 16 bits, read as float16."""
    bits = codes.astype(np.uint16) << bit.astype(np.uint16)
    assert bits.max(initial=0) < 1 << 10
    return bits.view(np.float16).astype(np.float64)


def groups_of(bits: int, tiles: int) -> list[tuple[int, int, int, int]]:
    """Tiles that share words: the first, how many, their first word, how many; the last have one each."""
    whole, count = tiles // TILES[bits], WORDS[bits]
    groups = [(i * TILES[bits], TILES[bits], i * count, count) for i in range(whole)]
    left = range(tiles % TILES[bits])
    return groups + [(whole * TILES[bits] + i, 1, whole * count + i, 1) for i in left]


def words_of(bits: int, tiles: int) -> int:
    """Words that a lane has of a side of so many tiles."""
    return sum(group[3] for group in groups_of(bits, tiles))


def expand(bits: int, words: Array) -> list[Array]:
    """Words (words, lanes) to the registers of the tiles that share them: four arrays (lanes,) a tile."""

    def at(x: Array, bit: int) -> Array:
        return x & np.uint32((((1 << bits) - 1) << bit) * 0x10001)

    even, odd, second = EVEN[bits], ODD[bits], SECOND[bits]
    if bits == 2:
        parts = [words[0], words[0] >> 8]
        return [at(x, bit + of_tile) for of_tile in (0, second) for x in parts for bit in (even, odd)]
    if bits == 4:
        return [at(words[0] >> (8 * i), bit) for i in range(2) for bit in (even, odd)]
    if bits == 8:
        return [at(w, 0) if r == 0 else w >> 8 & 0x00FF00FF for w in words for r in range(2)]
    if len(words) == 1:
        return [at(words[0] << 1, 1), at(words[0], 4), at(words[0] >> 7, 1), at(words[0] >> 8, 4)]
    registers = []
    for p in range(15):
        stands, wanted = 1 + 3 * (p % 5), odd if p % 2 else even
        word = words[p // 5]
        registers.append(
            at(word << (wanted - stands) if stands < wanted else word >> (stands - wanted), wanted)
        )
    last = sum((words[i] << (odd + i)) & np.uint32(0x10001 << (odd + i)) for i in range(3))
    return [*registers, np.asarray(last, np.uint32)]


def draw_words(bits: int, head_dim: int, side: str) -> tuple[Array, Array]:
    """Random codes of a side of a page, (16, head_dim), and its words, (words, lanes); unused bits set."""
    codes = np.random.default_rng(bits).integers(0, 1 << bits, (16, head_dim))
    stream = np.ones(32 * 32 * words_of(bits, head_dim // 16), np.uint8)
    stream[bit_address(bits, head_dim, side)] = codes[..., None] >> np.arange(bits) & 1
    return codes, np.packbits(stream, bitorder="little").view("<u4").reshape(-1, 32)


def put_element(found: Array, side: str, tile: int, row: Array, column: Array, value: Array) -> None:
    """Store what a tile of K (tokens x channels) or V (channels x tokens) has at a row and column."""
    token, channel = (row, column) if side == "k" else (column, row)
    found[2 * (token % 8) + token // 8, 16 * tile + channel] = value


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("side", ["k", "v"])
@pytest.mark.parametrize("head_dim", [16, 64, 80, 96, 112])
def test_masked_words_are_the_codes(bits: int, side: str, head_dim: int) -> None:
    codes, words = draw_words(bits, head_dim, side)
    found = np.full(codes.shape, np.nan)
    g, u = np.arange(32) // 4, np.arange(32) % 4
    for first, count, word, words_of_group in groups_of(bits, head_dim // 16):
        registers = expand(bits, words[word : word + words_of_group])
        for p, register in enumerate(registers[: 4 * count]):
            tile, r = first + p // 4, p % 4
            for half in range(2):
                value = (register >> (16 * half) & 0xFFFF).astype(np.uint16).view(np.float16)
                unit = 2.0 ** (24 - (ODD if r % 2 else EVEN)[bits] - SECOND[bits] * (tile % 2))
                put_element(
                    found, side, tile, g + 8 * (r % 2), 2 * u + half + 8 * (r // 2), value.astype(F32) * unit
                )
    assert np.array_equal(found, codes)


@dataclass
class Quad:
    """Codes and scale bytes of K and V of four pages; `count` slots are in use."""

    bits: int
    count: int
    k: Array
    v: Array
    k_scales: Array
    v_scales: Array


@dataclass
class State:
    """The accumulators of a warp, between quads."""

    bits: int = 0
    out: Array = field(default_factory=lambda: np.zeros((ROWS, HEAD_DIM), F32))
    zero_point_sum: Array = field(default_factory=lambda: np.zeros(ROWS, F32))
    row_max: Array = field(default_factory=lambda: np.zeros(ROWS, F32))
    sum: Array = field(default_factory=lambda: np.zeros(ROWS, F32))
    max_excess: np.float32 = EMPTY
    scale_limit: float = -1.0


def unit_of(bits: int) -> Array:
    """What codes of `bits` are multiplied by in `out`, for each channel."""
    if bits == 0:
        return np.ones(HEAD_DIM, F32)
    return np.exp2(channel_bit(bits) - 25.0).astype(F32)


def channel_bit(bits: int) -> Array:
    """Where codes of values stand, for each channel: a row of a tile."""
    bit: Array = np.where(CHANNEL % 16 >= 8, ODD[bits], EVEN[bits]) + second_bit(bits)
    return bit


def second_bit(bits: int) -> Array:
    """How much higher codes stand in second tiles, for each channel."""
    return SECOND[bits] * (CHANNEL // 16 % 2)


def change_basis(state: State, bits: int) -> None:
    state.out = (state.out / unit_of(state.bits) + state.zero_point_sum[:, None]) * unit_of(bits)
    state.zero_point_sum[:] = 0
    state.bits = bits


def attend(state: State, quad: Quad, q: Array, with_rest: bool) -> None:
    """One quad against queries (ROWS, HEAD_DIM) that hold the scale and the logarithm to base 2."""
    bits, slots = quad.bits, np.arange(64)
    used = slots < quad.count
    # Queries of float16 with one power of 2, in two parts if the cache is of float16; scores of raw codes.
    exponent = int(np.float32(np.abs(q).max()).view(np.uint32)) >> 23
    e = max(min(141 - exponent, 100), -100)
    rounded = (q * F32(2.0**e)).astype(np.float16)
    assert np.isfinite(rounded).all()
    rest = (q * F32(2.0**e) - rounded).astype(np.float16) * np.float16(with_rest)
    lowered = np.exp2(-second_bit(bits)).astype(np.float16)
    factors = sum((part * lowered).astype(np.float64) for part in (rounded, rest))
    total = (rounded.astype(np.float64) + rest).sum(1)
    row_bit = np.where(slots % 2, ODD[bits], EVEN[bits])
    tile = subnormal(quad.k, row_bit[:, None] + second_bit(bits))
    middle = -((1 << bits) - 1) * 0.5 / (1 << 24) * 2.0**row_bit
    raw = (factors @ tile.T + total[:, None] * middle).astype(F32)
    factor = SCALES[quad.k_scales] * (F32(2.0 ** (25 - e)) / F32(2) ** row_bit.astype(F32))
    s = raw * factor - state.row_max[:, None]
    s[:, ~used] = -np.inf

    # row_max follows the maximum, p_exponent the largest scale.
    scales = np.where(used, SCALES[quad.v_scales], 0)
    top = s.max(1)
    exponent_changes = scales.max() > state.scale_limit
    if (top > state.max_excess).any() or (exponent_changes and np.isfinite(top).any()):
        empty = np.isneginf(state.max_excess)
        exponent_before = F32(0) if empty else state.max_excess - SLACK
        if empty:
            state.max_excess = SLACK
        if exponent_changes:
            largest = int(np.float16(scales.max()).view(np.uint16)) >> 10
            state.max_excess = SLACK + F32(20 - largest)
            state.scale_limit = float(np.uint16(min(largest * 0x400 + 0x7FF, 0x7C00)).view(np.float16))
        rise = (top if empty else np.maximum(top, exponent_before)) - (state.max_excess - SLACK)
        old = np.zeros(ROWS, F32) if empty else np.exp2(-rise)
        state.row_max = state.row_max + rise
        state.sum, state.zero_point_sum = state.sum * old, state.zero_point_sum * old
        state.out = state.out * old[:, None]
        s = s - rise[:, None]
    p = np.exp2(s)
    state.sum = state.sum + p.sum(1)

    # Probabilities times scales in float16, and the sum of raw codes; the constant is a product of its own.
    weights = (p * scales).astype(np.float16)
    assert np.isfinite(weights).all(), "p times scale overflows"
    if state.bits != bits:
        change_basis(state, bits)
    tile = subnormal(quad.v, channel_bit(bits) + np.zeros_like(quad.v))
    state.out = (state.out + weights.astype(np.float64) @ tile).astype(F32)
    state.zero_point_sum = (
        state.zero_point_sum - weights.astype(np.float64).sum(1) * ((1 << bits) - 1)
    ).astype(F32)


def result(state: State) -> tuple[Array, Array]:
    """Return out (ROWS, HEAD_DIM) and the natural log-sum-exp (ROWS,)."""
    change_basis(state, 0)
    return state.out / state.sum[:, None], (state.row_max + np.log2(state.sum)) * F32(np.log(2))


def values_of(codes: Array, scales: Array, bits: int) -> Array:
    return (2.0 * codes + 1 - (1 << bits)) * SCALES[scales].astype(np.float64)[:, None]


@st.composite
def quad_lists(draw: st.DrawFn) -> tuple[list[Quad], Array]:
    """Up to six quads whose scales of V lie anywhere between 0 and 500, and queries with scores up to 50."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    quads = []
    for _ in range(draw(st.integers(1, 6))):
        bits, count = draw(st.sampled_from([2, 3, 4, 8])), draw(st.integers(1, 64))
        low = draw(st.integers(0, 180))
        k, v = rng.integers(0, 1 << bits, (2, 64, HEAD_DIM))
        k_scales = np.abs(SCALES[:0xF8] - F32(1.5 / (1 << bits))).argmin() + rng.integers(-4, 5, 64)
        v_scales = low + rng.integers(0, draw(st.integers(1, 12)), 64)
        v_scales[count:] = 0xFF  # NaN, and must not matter
        quads.append(Quad(bits, count, k, v, k_scales.astype(np.uint8), v_scales.astype(np.uint8)))
    q = (
        rng.standard_normal((ROWS, HEAD_DIM))
        * 10.0 ** np.array(draw(st.tuples(*[st.integers(-3, 0)] * ROWS)))[:, None]
    )
    return quads, (q * draw(st.sampled_from([0.1, 1.0, 5.0]))).astype(np.float16)


def judge(quads: list[Quad], q: Array, out: Array, lse: Array, with_rest: bool = False) -> float:
    """Return the error over what rounding p to 11 bits and q to 11, `with_rest` to 19, can explain."""
    scale = HEAD_DIM**-0.5
    k, v = (
        np.concatenate(
            [values_of(getattr(p, side), getattr(p, f"{side}_scales"), p.bits)[: p.count] for p in quads]
        )
        for side in ("k", "v")
    )
    scores = q.astype(np.float64) @ k.T * scale
    weights = np.exp(scores - scores.max(1, keepdims=True))
    total = weights.sum(1, keepdims=True)
    of_scores = (
        2.0 ** (-19 if with_rest else -11) * (np.abs(q.astype(np.float64)) @ np.abs(k).T * scale).max()
    )
    # The reference lies up to 20 below the maximum, so its sum with a logarithm has an ulp of that size.
    errors = [np.abs(lse - scores.max(1) - np.log(total[:, 0])) / (of_scores + 4e-6)]
    allowed = (2 * of_scores + 2.0**-10) * (weights @ np.abs(v) / total).max() + 1e-30
    errors.append(np.abs(out - weights @ v / total).max(1) / allowed)
    return float(np.max(errors))


def attend_all(quads: list[Quad], q: Array, with_rest: bool = False) -> tuple[Array, Array]:
    state = State()
    for quad in quads:
        attend(state, quad, (q.astype(np.float64) * HEAD_DIM**-0.5 / np.log(2)).astype(F32), with_rest)
    return result(state)


@pytest.mark.parametrize("with_rest", [False, True])
@given(case=quad_lists())
def test_results_are_as_close_as_promised(with_rest: bool, case: tuple[list[Quad], Array]) -> None:
    """Whatever the widths, in whatever order, however large scales and queries."""
    assert judge(*case, *attend_all(*case, with_rest), with_rest) <= 1


def ordinary_quads() -> tuple[list[Quad], Array]:
    """Full quads of every width, with scales as normal numbers have them, and queries."""
    rng = np.random.default_rng(0)
    quads = []
    for bits in (2, 3, 4, 8, 2):
        near = np.abs(SCALES[:0xF8] - F32(1.5 / (1 << bits))).argmin()
        codes, scales = rng.integers(0, 1 << bits, (2, 64, HEAD_DIM)), near + rng.integers(-4, 5, (2, 64))
        quads.append(Quad(bits, 64, *codes, *scales.astype(np.uint8)))
    q = rng.standard_normal((ROWS, HEAD_DIM)).astype(np.float16)
    return quads, q


def test_the_judge_says_no(monkeypatch: pytest.MonkeyPatch) -> None:
    quads, q = ordinary_quads()
    out, lse = attend_all(quads, q)
    assert judge(quads, q, out, lse) <= 1
    for wrong in (np.zeros_like(out), out[:, ::-1], attend_all(quads[1:], q)[0]):
        assert judge(quads, q, wrong, lse) > 3
    assert judge(quads, q, out, lse + F32(0.05)) > 3
    assert judge(quads, q, out, lse, with_rest=True) > 1
    right = unit_of
    for bits in (2, 3, 4, 8):
        monkeypatch.setattr(f"{__name__}.unit_of", lambda b, own=bits: right(b) * F32(1 + (b == own)))
        assert judge(quads, q, *attend_all(quads, q)) > 3

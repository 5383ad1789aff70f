"""Keys in blocks on the CPU against the reference, bit for bit, zeros with their signs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvlab.numba_kernels.cpu import scales as kernels
from numba import njit
from numpy.typing import NDArray

from kvlab.ops.cpu.page_tokens import prepared_frames
from kvlab.reference import blocks as reference
from kvlab.reference.pages import SCALES
from tests.strategies import SEEDS, page_vectors

PROFILES = [
    (4, 2, 2, 0),
    (4, 4, 2, 2),
    (8, 4, 2, 2),
    (8, 4, 4, 4),
    (8, 8, 8, 8),
    (2, 2, 2, 2),
    (8, 8, 0, 0),
    (2, 0, 0, 0),
]
HEAD_DIMS = (64, 128, 192, 256)


@njit
def _encode_all(x: Any, n: int, bits: int, origin: int, codes: Any, byte: Any, row: Any, sizes: Any) -> None:
    for i in range(len(byte)):
        byte[i] = kernels.encode_vector(x, i * n, bits, np.float32(0), origin, row, sizes)
        codes[i] = row


@njit
def _rotate_all(x: Any, n: int, frames: Any, of_row: Any, out: Any, scratch: Any) -> None:
    for i in range(len(of_row)):
        row = x[i * n : (i + 1) * n]
        kernels.scale_row(row, 0, n, frames, of_row[i], True)
        kernels.divide_row(row, 0, n, frames, of_row[i], 0)
        kernels.order_row(row, n, frames, of_row[i], scratch)
        kernels.rotate_row(x, i * n, n, kernels.log_of_keys(n, frames), frames, of_row[i], out)


def encoded(
    x: NDArray[np.float32], profile: tuple[int, ...], origin: int = kernels.RAW
) -> tuple[NDArray[Any], NDArray[Any]]:
    bits = int("".join(map(str, profile)), 16)
    codes, byte = np.full(x.shape, 999, np.uint32), np.full(len(x), 999, np.int64)
    row, sizes = np.full(x.shape[1], 999, np.uint32), np.full(x.shape[1], np.float32(np.nan))
    _encode_all(x.reshape(-1), x.shape[1], bits, origin, codes, byte, row, sizes)
    return codes, byte


def assert_same(x: NDArray[np.float32], profile: tuple[int, ...]) -> None:
    for origin in (kernels.RAW, kernels.DECODED):
        expected = reference.encode_blocks(x, profile, origin == kernels.DECODED)
        for got, wanted in zip(encoded(x, profile, origin), expected, strict=True):
            np.testing.assert_array_equal(got, wanted)


@given(SEEDS, st.integers(1, 40), st.sampled_from(HEAD_DIMS), st.sampled_from(PROFILES))
def test_codes_and_scales_are_those_of_the_reference(
    seed: int, n: int, head_dim: int, profile: tuple[int, ...]
) -> None:
    rng = np.random.default_rng(seed)
    assert_same(page_vectors(rng, n, head_dim), profile)
    blocks = rng.uniform(0.1, 3, (n, 4, 1)) * 2.0 ** rng.integers(-9, 20, (n, 1, 1))
    assert_same(
        (rng.standard_normal((n, 4, head_dim // 4)) * blocks).reshape(n, -1).astype(np.float32), profile
    )


@pytest.mark.parametrize("head_dim", [64, 256])
@pytest.mark.parametrize("profile", PROFILES)
def test_vectors_of_every_size(profile: tuple[int, ...], head_dim: int) -> None:
    """All mantissas of 7 bits with all exponents: all borders of guesses, scales, units and halvings."""
    size = (np.arange(0, 0x7F80, 3, dtype=np.uint32) << 16).view(np.float32)
    x = np.repeat(size[:, None], head_dim, axis=1)
    x[:, 1::2] *= -1
    x[1::2, 2:] *= np.float32(0.37)
    assert_same(x, profile)
    for end in (0, np.inf):
        assert_same(np.nextafter(x[::7], np.float32(end)), profile)


@pytest.mark.parametrize("profile", PROFILES)
def test_ties(profile: tuple[int, ...]) -> None:
    """Elements on borders of cells, half way between parts of them, or next to these."""
    rng = np.random.default_rng(profile[0])
    x = rng.standard_normal((300, 64), dtype=np.float32) * 16
    _, byte = reference.encode_blocks(x, profile)
    width = np.repeat(profile, 16)
    half = SCALES[byte][:, None] * np.array([reference.FACTORS[w] for w in width], np.float32)
    part = np.exp2(np.floor(np.log2(np.maximum(half, 1e-9))) - 5)
    x[:, ::3] = (np.rint(x / part) * part + part / 2)[:, ::3]
    x[:, 1::3] = (np.rint(x / np.maximum(half, 1e-9)) * half)[:, 1::3]
    for wanted in (x, np.nextafter(x, np.float32(0)), np.nextafter(x, np.float32(np.inf))):
        assert_same(wanted.astype(np.float32), profile)


@given(SEEDS, st.integers(1, 40), st.integers(1, 4), st.sampled_from(HEAD_DIMS))
def test_rotations_are_those_of_the_reference(seed: int, n: int, heads: int, head_dim: int) -> None:
    rng = np.random.default_rng(seed)
    of_row, x = rng.integers(0, heads, n), page_vectors(rng, n, head_dim)
    with np.errstate(over="ignore"):
        x = x.astype(np.float16).astype(np.float32)
    mean = rng.standard_normal((heads, head_dim)).astype(np.float16)
    half = heads, head_dim // 2
    shift = np.where(rng.random(half) < 0.1, 3, 0).astype(np.uint8) * (np.arange(heads)[:, None] > 0)
    exponent = rng.integers(-20, 12, (heads, 2)).astype(np.int8)
    order = np.argsort(rng.random(half), 1).astype(np.uint8)
    gain = np.exp2(rng.uniform(-3, 12, (heads, 4))).astype(np.float16).astype(np.float32)
    frames = prepared_frames(mean, shift.astype(np.uint8), exponent, order, gain)
    out, scratch, mine = np.full_like(x, np.nan), np.empty(head_dim, np.float32), x.copy()
    _rotate_all(mine.reshape(-1), head_dim, frames, of_row, out.reshape(-1), scratch)
    expected = np.empty_like(x)
    for i, h in enumerate(of_row):
        frame = reference.KeyFrame(mean[h], shift[h].astype(np.uint8), int(exponent[h, 0]), order[h], gain[h])
        expected[i] = reference.rotate_in_blocks(x[i : i + 1], frame, "float16")[0]
    is_nan = np.isnan(expected)
    np.testing.assert_array_equal(is_nan, np.isnan(out))
    np.testing.assert_array_equal(
        np.where(is_nan, 0, out).view(np.uint32), np.where(is_nan, 0, expected).view(np.uint32)
    )


def test_one_more_in_a_gain_or_another_order_is_seen() -> None:
    rng = np.random.default_rng(0)
    x, mean = rng.standard_normal((1, 64), dtype=np.float32), np.zeros((1, 64), np.float16)
    order, gain = np.arange(32, dtype=np.uint8)[None], np.ones((1, 4), np.float32)
    frame = reference.KeyFrame(mean[0], np.zeros(32, np.uint8), 0, order[0], gain[0])
    expected = reference.rotate_in_blocks(x, frame, "float32")
    for wrong in ((np.roll(order, 1), gain), (order, gain * np.float32(1 + 2**-10))):
        frames = prepared_frames(mean, np.zeros((1, 32), np.uint8), np.zeros((1, 2), np.int8), *wrong)
        out = np.empty_like(x)
        _rotate_all(x[0].copy(), 64, frames, np.zeros(1, np.int64), out[0], np.empty(64, np.float32))
        assert (out != expected).any()
    codes, byte = encoded(expected, (4, 4, 2, 2))
    found = reference.decode_blocks(codes, byte, (4, 4, 2, 2))
    assert (found != reference.decode_blocks(codes, byte + 1, (4, 4, 2, 2))).any()

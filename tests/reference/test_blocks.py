"""Keys in blocks: what the oracle keeps of them, against float64, and that products with queries stay."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvlab.ops.frame import exponent_of, key_gain, key_mean, key_order, key_shift
from kvlab.reference import blocks
from kvlab.reference.blocks import FACTORS, KeyFrame, decode_blocks, encode_blocks, rotate_in_blocks
from kvlab.reference.pages import SCALES, rotate_values
from kvlab.reference.records import decode_page, encode_page
from tests.strategies import SEEDS

PROFILES = [(4, 2, 2, 0), (4, 4, 2, 2), (8, 4, 2, 2), (8, 4, 4, 4), (8, 8, 8, 8), (2, 2, 2, 2), (8, 8, 0, 0)]
HEAD_DIMS = (64, 128, 192, 256)
ERROR = {2: 0.14, 4: 0.0125, 8: 2e-4}
"""Relative error of Gaussian elements: that of a width where a scale serves it alone, and a fifth more."""


def keys(rng: np.random.Generator, n: int, head_dim: int, dtype: str = "float16") -> NDArray[np.float32]:
    """Keys with a mean, whose pairs have energies from 1 to 1/3000."""
    half = rng.permutation(head_dim // 2)
    size = np.tile(np.exp(-half * 8 / head_dim), 2)
    k = rng.standard_normal((n, head_dim)) * size + rng.standard_normal(head_dim) * 3 * size
    return k.astype(np.float16).astype(np.float32) if dtype == "float16" else k.astype(np.float32)


def frame_of(k: NDArray[np.float32], query_sums: NDArray[np.float32] | None = None) -> KeyFrame:
    row = k[:, None]
    query_sums = np.zeros((1, k.shape[1]), np.float32) if query_sums is None else query_sums[None]
    exponent = exponent_of(row)
    mean = key_mean(row, exponent)
    shift = key_shift(row, mean, query_sums, exponent)
    order = key_order(row, mean, query_sums, exponent)
    gain = key_gain(row, mean, shift, order, exponent)
    return KeyFrame(mean[0], shift[0], int(exponent[0]), order[0], gain[0])


def restored(z: NDArray[np.float32], frame: KeyFrame) -> NDArray[np.float64]:
    """Keys of float64 from elements: queries of the identity."""
    query, product = blocks.query_in_blocks(np.eye(z.shape[1]), frame)
    restored: NDArray[np.float64] = np.ldexp(z.astype(np.float64) @ query.T + product, frame.exponent)
    return restored


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_every_bit_of_a_code_has_a_place_of_its_own(profile: tuple[int, ...], head_dim: int) -> None:
    places = np.concatenate([at.ravel() for _, at in blocks.profile_bits(profile, head_dim)])
    assert np.unique(places).size == places.size == 16 * head_dim * sum(profile) // 4
    assert places.max() < 1024 * blocks.profile_words(profile, head_dim)


@given(SEEDS, st.sampled_from(HEAD_DIMS), st.sampled_from(["float16", "bfloat16", "float32"]))
def test_products_with_queries_are_those_of_raw_keys(seed: int, head_dim: int, dtype: str) -> None:
    rng = np.random.default_rng(seed)
    k, query_sums = keys(rng, 80, head_dim), rng.random(head_dim, dtype=np.float32)
    k[:, [3, 3 + head_dim // 2]] *= 64  # a large pair
    frame = frame_of(k, query_sums)
    assert frame.shift.any()
    z = rotate_in_blocks(k, frame, "float32")
    query, product = blocks.query_in_blocks(q := rng.standard_normal((5, head_dim)), frame)
    scores = np.ldexp(query @ z.T.astype(np.float64) + product[:, None], frame.exponent)
    size = np.abs(q) @ np.abs(k.T.astype(np.float64))
    assert (np.abs(scores - q @ k.T) <= 2**-11 * size).all()
    other = frame._replace(order=np.roll(frame.order, 1))
    wrong, _ = blocks.query_in_blocks(q, other)
    assert (np.abs(np.ldexp(wrong @ z.T + product[:, None], frame.exponent) - q @ k.T) > 2**-11 * size).any()


@given(SEEDS, st.sampled_from(HEAD_DIMS))
def test_frames_are_permutations_and_numbers_of_11_bits(seed: int, head_dim: int) -> None:
    k = keys(np.random.default_rng(seed), 64, head_dim)
    frame, half = frame_of(k), head_dim // 2
    assert (np.sort(frame.order) == np.arange(half)).all()
    assert (np.sort(blocks.placed_channels(frame.order)) == np.arange(head_dim)).all()
    energy = np.square(k[4:] - frame.mean.astype(np.float64)).sum(0)
    pairs = (energy[:half] + energy[half:])[frame.order]
    assert (np.diff(pairs) <= 1e-9 * pairs[0]).all()
    assert not (frame.gain.view(np.uint32) & 0x1FFF).any()
    z = rotate_in_blocks(k[4:], frame, "float32").reshape(60, 4, -1)
    assert np.allclose(np.sqrt(np.square(z).mean((0, 2))), blocks.RMS, rtol=2e-3)


def test_ties_go_to_the_lower_channel_and_few_tokens_give_no_order() -> None:
    k = np.tile(np.float32([1, -1]), 32)[:, None, None].repeat(64, 2)
    assert (key_order(k, key_mean(k), np.ones((1, 64), np.float32))[0] == np.arange(32)).all()
    few = frame_of(keys(np.random.default_rng(0), 9, 64))
    assert (few.order == key_order(k, key_mean(k), np.ones((1, 64), np.float32))[0]).all()
    assert (few.gain == few.gain[0]).all()
    nothing = frame_of(np.zeros((64, 64), np.float32))
    assert (nothing.gain == 1).all()
    faint = keys(np.random.default_rng(0), 64, 64)
    faint[4:] *= np.float32(1e-38)  # behind sinks of usual size
    assert (frame_of(faint).gain == 1).all()
    wild = frame_of(np.full((64, 64), np.nan, np.float32))
    assert np.isfinite(wild.gain).all()
    assert (np.sort(wild.order) == np.arange(32)).all()


@given(SEEDS, st.sampled_from(HEAD_DIMS), st.sampled_from(PROFILES))
def test_codes_are_those_of_the_nearest_values(seed: int, head_dim: int, profile: tuple[int, ...]) -> None:
    rng = np.random.default_rng(seed)
    z = (rng.standard_normal((20, head_dim)) * 2.0 ** rng.integers(-8, 13, (20, 1))).astype(np.float32)
    z[0], z[1, 0], z[2, 5] = 0, np.nan, 2.0**90
    codes, byte = encode_blocks(z, profile)
    assert byte[0] == 0
    assert byte[1] == 0xFF
    scale = SCALES[byte].astype(np.float64)
    for b, width in enumerate(profile):
        own = slice(b * head_dim // 4, (b + 1) * head_dim // 4)
        if not width:
            assert not codes[:, own].any()
            continue
        assert codes[:, own].max() < 2**width
        half = scale[3:, None] * FACTORS[width]
        grid = (2.0 * np.arange(2**width) + 1 - 2**width) * half[..., None]
        off = np.abs(z[3:, own, None] - grid)
        mine = np.take_along_axis(off, codes[3:, own, None].astype(int), 2)[..., 0]
        # Elements are rounded to 11 bits of a whole number before they become codes.
        assert (mine <= off.min(2) + 2**-4 * half + 2**-10 * np.abs(z[3:, own])).all()


@given(SEEDS, st.sampled_from(HEAD_DIMS), st.sampled_from(PROFILES[:4]))
def test_a_first_block_far_larger_than_the_others_is_not_clipped(
    seed: int, head_dim: int, profile: tuple[int, ...]
) -> None:
    """As that of the first key of a text; were the guess that of blocks alike, it would be."""
    rng = np.random.default_rng(seed)
    z = rng.standard_normal((50, head_dim)).astype(np.float32) * 16
    z[:, : head_dim // 4] *= rng.uniform(4, 12, (50, 1)).astype(np.float32)
    first = z[:, : head_dim // 4]

    def error() -> Any:
        off = np.square(decode_blocks(*encode_blocks(z, profile), profile)[:, : head_dim // 4] - first)
        return off.sum() / np.square(first).sum()

    limit = 1e-3 if profile[0] == 8 else 0.015
    assert error() < limit
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks, "FIRST", np.float32(0))
        assert error() > 1.5 * limit


@given(SEEDS, st.sampled_from(HEAD_DIMS), st.sampled_from(PROFILES))
def test_the_step_is_nearly_the_best(seed: int, head_dim: int, profile: tuple[int, ...]) -> None:
    rng = np.random.default_rng(seed)
    z = rng.standard_normal((50, 4, head_dim // 4)) * rng.uniform(0.7, 1.4, (50, 4, 1)) * 16
    z = z.reshape(50, -1).astype(np.float32)
    codes, byte = encode_blocks(z, profile)

    def error(found: NDArray[np.float32]) -> Any:
        squares = np.square(found - z).reshape(50, 4, -1)[:, np.array(profile) > 0]
        return squares.sum(2) @ blocks.WEIGHTS[np.array(profile) > 0]

    every = []
    for shift in range(-6, 7):
        other, parts = byte.astype(int) + shift, []
        for b, width in enumerate(profile):
            own = z[:, b * head_dim // 4 : (b + 1) * head_dim // 4]
            half = SCALES[other][:, None] * FACTORS[width]
            top = 2**width - 1
            code = np.clip(np.floor(own / np.maximum(2 * half, 1e-9)) + 2**width // 2, 0, top)
            parts.append((2 * code + 1 - 2**width) * half)
        every.append(error(np.concatenate(parts, 1)))
    mine, best = error(decode_blocks(codes, byte, profile)), np.min(every, axis=0)
    limit = 1.6 if set(profile) <= {0, 8} else 1.15
    assert mine.mean() <= limit * best.mean()
    assert every[0].mean() > limit * best.mean()
    assert every[-1].mean() > limit * best.mean()


@given(SEEDS, st.sampled_from(HEAD_DIMS), st.sampled_from(PROFILES), st.floats(-8, 4))
def test_errors_of_blocks_are_those_of_their_widths(
    seed: int, head_dim: int, profile: tuple[int, ...], scale: float
) -> None:
    """Tiny and huge keys come back as well as others."""
    rng = np.random.default_rng(seed)
    k = keys(rng, 128, head_dim, "float32") * np.float32(10.0**scale)
    frame = frame_of(k)
    z = rotate_in_blocks(k, frame, "float32")
    codes, byte = encode_blocks(z, profile)
    found = decode_blocks(codes, byte, profile).astype(np.float64)
    errors = np.square(found - z).reshape(128, 4, -1).sum((0, 2)) / np.square(z).reshape(128, 4, -1).sum(
        (0, 2)
    )
    for width, error in zip(profile, errors, strict=True):
        assert error <= (1.5 * ERROR[width] if width else 1.0001)
    assert not frame.shift.any()
    whole = restored(found, frame)
    largest = np.square(k - k[4:64].mean(0)).sum()
    lost = np.square(whole - k).sum() / largest
    energies = 0.95, 0.13, 0.02, 0.005
    assert lost <= sum(1.5 * part * (ERROR[w] if w else 1) for part, w in zip(energies, profile, strict=True))
    assert np.square(restored(found[::-1], frame) - k).sum() / largest > 0.3


@given(SEEDS, st.sampled_from(PROFILES), st.integers(-26, 12))
def test_a_power_of_2_changes_exponents_alone(seed: int, profile: tuple[int, ...], power: int) -> None:
    k = keys(np.random.default_rng(seed), 80, 64)
    k /= np.abs(k[:64]).max() / np.float32(1.5)
    other = np.ldexp(k, power)
    first, second = frame_of(k), frame_of(other)
    assert first.exponent == 0
    assert second.exponent == (power if power < -4 or power > 11 else 0)
    if second.exponent:
        for name in ("mean", "shift", "order", "gain"):
            assert (getattr(first, name) == getattr(second, name)).all()
        ours, theirs = (rotate_in_blocks(x, f, "float32") for x, f in ((k, first), (other, second)))
        assert np.allclose(ours, theirs, rtol=0, atol=2**-9)


@given(SEEDS, st.integers(-26, 12))
def test_values_are_divided_by_their_exponent(seed: int, power: int) -> None:
    v = np.random.default_rng(seed).standard_normal((64, 64), dtype=np.float32)
    exponent = int(exponent_of(np.ldexp(v, power)[:, None])[0])
    there = rotate_values(np.ldexp(v, power), exponent)
    assert np.allclose(np.ldexp(there, exponent - power), rotate_values(v), atol=2**-12)
    assert 0.02 < np.abs(there).max() < 2.0**13


@given(SEEDS, st.sampled_from(HEAD_DIMS), st.sampled_from(PROFILES))
def test_a_page_gives_its_keys_back(seed: int, head_dim: int, profile: tuple[int, ...]) -> None:
    rng = np.random.default_rng(seed)
    z, v = rng.standard_normal((2, 16, head_dim), dtype=np.float32)
    where, weight = np.arange(16, dtype=np.uint16), np.full(16, 200, np.uint8)
    record = encode_page(z, v, profile, 2, "float16", where, weight)
    page = decode_page(record, head_dim, profile, 2, "float16")
    assert (page.k == decode_blocks(*encode_blocks(z, profile), profile)).all()
    assert (page.positions == where).all()
    assert (page.importance == weight).all()


@given(SEEDS, st.sampled_from(HEAD_DIMS), st.sampled_from(PROFILES), st.integers(1, 10))
def test_refit_codes_are_those_of_scaled_channels(
    seed: int, head_dim: int, profile: tuple[int, ...], orders: int
) -> None:
    """Elements are the nearest that the grid has to those of keys with the channels scaled down."""
    rng = np.random.default_rng(seed)
    x, n = rng.standard_normal((20, head_dim), dtype=np.float32) * 16, head_dim // 4
    codes, scale = encode_blocks(x, profile)
    order, further = rng.permutation(head_dim // 2).astype(np.uint8), np.zeros(head_dim // 2, np.uint8)
    further[rng.integers(head_dim // 2)] = orders
    new = blocks.refit_codes(codes, profile, order, further)
    mean, shift = np.zeros(head_dim, np.float16), np.zeros(head_dim // 2, np.uint8)
    before = KeyFrame(mean, shift, 0, order, np.ones(4, np.float32))
    keys = restored(decode_blocks(codes, scale, profile), before)
    wanted = np.ldexp(keys, -np.tile(further, 2).astype(int)) @ np.linalg.inv(
        restored(np.eye(head_dim), before)
    )

    def is_nearest(new: NDArray[np.uint8]) -> bool:
        half = np.repeat([FACTORS[width] for width in profile], n) * SCALES[scale].astype(np.float64)[:, None]
        reach = np.repeat([(1 << width) - 1 for width in profile], n) * half
        off = np.abs(np.clip(wanted, -reach, reach) - decode_blocks(new, scale, profile))
        return bool((off <= half * (1 + 1e-9)).all())

    assert is_nearest(new)
    touched = np.repeat((further[order].reshape(4, n // 2) > 0).any(1) & (np.array(profile) > 0), n)
    assert np.array_equal(new[:, ~touched], codes[:, ~touched])
    if touched.any():  # a code beside the nearest is found out
        beside = new.copy()
        at = np.flatnonzero(touched)[0]
        beside[:, at] = np.where(new[:, at] > 0, new[:, at] - 1, new[:, at] + 1)
        assert not is_nearest(beside)


@given(SEEDS, st.sampled_from(PROFILES))
def test_nothing_is_refit_without_a_channel(seed: int, profile: tuple[int, ...]) -> None:
    codes, _ = encode_blocks(np.random.default_rng(seed).standard_normal((9, 64), dtype=np.float32), profile)
    order = np.arange(32, dtype=np.uint8)
    assert np.array_equal(blocks.refit_codes(codes, profile, order, np.zeros(32, np.uint8)), codes)

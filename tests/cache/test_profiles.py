"""Caches whose ladders have profiles: how they are written, their frames, and what they give back."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvlab.arrays import numpy_dtype
from kvlab.cache.cache import MixedPrecisionCache
from kvlab.cache.layers import LayerFormat
from kvlab.ladder import Rung, loss_of, parse_bits
from kvlab.ops.key_frames import KeyFrames

LADDER = ("k4220v2", "k4422v2", "k8422v3", "k8444v4", 8)
HEADS_Q, HEADS = 4, 2


def tokens(n: int, dim: int = 64, scale: float = 1.0, dtype: str = "float16") -> tuple[np.ndarray, ...]:
    """Queries and keys whose pairs have energies from 1 to 1/55, keys with a mean, and values."""
    rng = np.random.default_rng(n)
    size = np.tile(np.exp(-rng.permutation(dim // 2) * 4 / dim), 2)
    q, k, v = (rng.standard_normal((1, n, heads, dim)) for heads in (HEADS_Q, HEADS, HEADS))
    k = (k + 2 * rng.standard_normal((HEADS, dim))) * size * scale
    return (2 * q * size / scale).astype(np.float32), k.astype(dtype), (v * scale).astype(dtype)


def cache_of(bits: Any, dim: int = 64, dtype: str = "float16", **options: Any) -> MixedPrecisionCache:
    return MixedPrecisionCache(1, HEADS_Q, HEADS, dim, bits=bits, dtype=dtype, **{"budget": None, **options})


def fed(
    cache: MixedPrecisionCache, whole: tuple[np.ndarray, ...], parts: tuple[int, ...]
) -> MixedPrecisionCache:
    first = 0
    for n in parts:
        cache.step(0, *(x[:, first : first + n] for x in whole))
        first += n
    return cache


def error(cache: MixedPrecisionCache, whole: tuple[np.ndarray, ...]) -> float:
    """Relative error of attention with the last queries."""
    q, k, v = (x.astype(np.float64)[0] for x in whole)
    out, wanted = np.asarray(cache.attend(0, whole[0][:, -16:]), np.float64)[0], []
    for head in range(HEADS_Q):
        of = head * HEADS // HEADS_Q
        scores = q[-16:, head] @ k[:, of].T / np.sqrt(q.shape[2])
        weights = np.exp(scores - scores.max(1, keepdims=True))
        wanted.append(weights / weights.sum(1, keepdims=True) @ v[:, of])
    reference = np.stack(wanted, 1)
    return float(np.linalg.norm(out - reference) / np.linalg.norm(reference))


ANGLES = tuple(1e4 ** (-np.arange(32) / 32))
OF_TOKEN = 2 * 2 * HEADS * 64  # bytes in float16


@pytest.mark.parametrize(
    ("options", "exact"),
    [
        ({"budget": 0.5}, True),
        ({"budget": "60%", "plan_length": 1024}, True),
        ({"budget": 0.5, "plan_length": 1023}, False),
        ({"budget": 0.5, "sliding_window": 1000}, False),
        ({"budget": 0.49}, False),
        ({"budget": None}, False),
        ({"budget": 0.5, "dtype": "float32"}, False),
        ({"budget": 1.0, "dtype": "float32"}, True),
        ({"budget": "1MiB"}, False),
        ({"budget": OF_TOKEN * 1000, "max_seqlen": 2000}, True),
        ({"budget": OF_TOKEN * 1000, "max_seqlen": 2000, "batch": 2}, False),
        ({"budget": OF_TOKEN * 1000, "max_seqlen": 3000, "sliding_window": 1999}, True),
    ],
)
def test_the_default_ladder_ends_in_16_where_bytes_are_many(options: dict[str, Any], exact: bool) -> None:
    cache = MixedPrecisionCache(1, HEADS_Q, HEADS, 64, rotary=ANGLES, **options)
    assert cache.bits == (*LADDER, *[16] * exact)


def test_bytes_beyond_8_bits_are_used() -> None:
    """A budget that grows has half of float16 at its end, and more before."""
    whole, options = tokens(400), {"budget": 0.5, "plan_length": 1024, "rotary": ANGLES}
    exact, packed = (
        error(fed(cache_of(x, **options), whole, (300, 100)), whole) for x in ("default", LADDER)
    )
    assert exact < 0.1 * packed


def test_profiles_are_written_as_digits() -> None:
    (ladder,) = parse_bits("8,k8422v3,k4220v2,16", 1)
    assert ladder == ((Rung((4, 2, 2, 0), 2)), Rung((8, 4, 2, 2), 3), Rung((8,) * 4, 8), Rung(16, 16))
    assert [str(rung) for rung in ladder] == ["k4220v2", "k8422v3", "8", "16"]
    assert parse_bits([str(rung) for rung in ladder], 1) == (ladder,)
    assert parse_bits("0-1:k8444v4+8,2:4+8", 3)[2] == (Rung(4, 4), Rung(8, 8))
    assert parse_bits("0,k8444v4", 1)[0][0] == (0, 0)


@pytest.mark.parametrize(
    ("bits", "message"),
    [
        (("k3v2", "k8422v3"), "'?k3v2'? has 3 bits for K beside a profile"),
        ("k2248v2", "'k2248v2' widens .* write k8422v2"),
        ("k8423v2", r"profile 8423 for K; it takes four of \(0, 2, 4, 8\)"),
        ("k0000v2", "the first not 0"),
        ("k8422v0", "width 0 for V"),
        ("k8422v5", "width 5 for V"),
        ("k84222v5", "has 5 digits for K"),
        ("8422", "width 8422 for K"),
        (("k8200v4", "k4444v8"), "a token demoted from"),
        (("k4220v2", 2), "take the same bytes"),
    ],
)
def test_profiles_that_do_not_exist(bits: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_bits(bits, 1)


def test_profiles_need_heads_of_four_blocks() -> None:
    with pytest.raises(
        ValueError, match=r"rung k4220v2 has a profile for K, which needs a head_dim .* got 80"
    ):
        cache_of(LADDER, dim=80)


def test_losses_and_bytes_rise_and_fall_with_the_ladder() -> None:
    layer = LayerFormat(parse_bits(LADDER, 1)[0], HEADS, 64, "float16")
    losses = [loss_of(rung) for rung in layer.ladder]
    assert losses == sorted(losses, reverse=True)
    assert [layer.layouts[r].v_codes - 16 for r in range(5)] == [128 * words for words in (2, 3, 4, 5, 8)]


@pytest.mark.parametrize("parts", [(10, 190), (1,) * 70 + (130,), (60, 140)])
def test_a_frame_does_not_depend_on_how_tokens_came(parts: tuple[int, ...]) -> None:
    whole = tokens(200)
    one, other = (fed(cache_of(LADDER), whole, x).pages(0) for x in ((200,), parts))
    for name in ("k_mean", "k_shift", "exponent", "k_order", "k_gain"):
        assert np.array_equal(getattr(one, name), getattr(other, name)), name
    assert (np.sort(one.k_order) == np.arange(32)).all()
    assert (one.k_order != np.arange(32)).any()
    assert (one.k_gain != 1).all()


@pytest.mark.parametrize("dim", [64, 128])
def test_more_bits_give_less_error(dim: int) -> None:
    whole = tokens(300, dim)
    errors = [
        error(fed(cache_of(rung, dim), whole, (300,)), whole) for rung in ("k4422v8", "k8444v8", "k8888v8")
    ]
    assert errors[0] > 2 * errors[1] > 5 * errors[2]
    assert errors[2] < 0.03


def test_blocks_keep_more_than_one_width_of_the_same_bytes() -> None:
    whole = tokens(400)
    blocks, one = (error(fed(cache_of(bits), whole, (400,)), whole) for bits in ("k8422v8", "k4v8"))
    assert blocks < one


def errors_at(scales: tuple[float, ...], bits: Any, dim: int, dtype: str, **options: Any) -> list[float]:
    found = []
    for scale in scales:
        q, k, v = tokens(300, dim, scale, "float32")
        whole = q, *(x.astype(numpy_dtype(dtype)) for x in (k, v))
        found.append(error(fed(cache_of(bits, dim, dtype, **options), whole, (200, 100)), whole))
    return found


@pytest.mark.parametrize(
    "bits", [LADDER, "k8444v4", ("k8422v3", 16), "k8888v8", (2, "k3v2", 8), "8", "4", "2"]
)
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_tiny_and_huge_tokens_come_back_as_others(bits: Any, dtype: str) -> None:
    options = {"budget": 0.27, "plan_length": 1} if isinstance(bits, tuple) else {}
    scales = (1.0, 1e-3, 4e3) if dtype == "float16" else (1.0, 1e-8, 1e-5, 1e-3, 1e4)
    found = errors_at(scales, bits, 64, dtype, **options)
    assert max(found) <= 1.1 * found[0]


@pytest.mark.parametrize(
    ("dim", "bits"),
    [
        *((dim, (2, "k3v2", "k4v3", 8)) for dim in (16, 48, 64, 80, 96, 128, 256)),
        *((64, bits) for bits in ("8", "4", "3", "2", "k8v2", "k16v8", "k8v16", (2, 4, 16), (4, 8))),
    ],
)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_powers_of_two_change_no_code_of_widths(dim: int, bits: Any, dtype: str) -> None:
    """Within the usual exponents steps follow; beyond, tokens are divided."""
    options = {"budget": 0.35, "plan_length": 1} if isinstance(bits, tuple) and dim >= 64 else {}
    scales = (1.0, 2.0**-10, 2.0**11) if dtype == "float16" else (1.0, 2.0**-27, 2.0**-17, 2.0**-10, 2.0**13)
    found = errors_at(scales, bits, dim, dtype, **options)
    np.testing.assert_allclose(found, found[0], rtol=0.03 if dtype == "float16" else 1e-3)


def test_a_budget_is_held_and_all_rungs_occur() -> None:
    whole, seen = tokens(600), np.zeros(5, bool)
    for budget in (0.17, 0.2, 0.27, 0.35):
        cache = fed(cache_of(LADDER, budget=budget, plan_length=1), whole, (500, *(1,) * 40))
        assert cache.nbytes <= budget * 540 * HEADS * 64 * 2 * 2
        seen |= np.array([pages.any() for pages in cache.allocation().values()])
        assert error(cache, tuple(x[:, :540] for x in whole)) < 0.6
    assert seen.all()


def test_a_loaded_cache_and_repeated_rows_go_on_as_the_first_would(tmp_path: Path) -> None:
    whole = tokens(300)
    cache = fed(cache_of(LADDER, budget=0.27, plan_length=1), whole, (200,))
    cache.save(tmp_path / "cache")
    loaded, repeated = (MixedPrecisionCache.load(tmp_path / "cache") for _ in range(2))
    repeated.repeat(2)
    new = [x[:, 200:216] for x in whole]
    out = cache.step(0, *new)
    np.testing.assert_array_equal(loaded.step(0, *new), out)
    both = repeated.step(0, *(np.repeat(x, 2, axis=0) for x in new))
    np.testing.assert_array_equal(both, np.repeat(out, 2, axis=0))


def test_rows_with_given_frames_wait_for_nothing() -> None:
    whole = tokens(300)
    own = fed(cache_of(LADDER), whole, (300,)).pages(0)
    frames = KeyFrames.measured([tuple(x[:, :64] for x in whole)])
    assert np.array_equal(frames.k_order[0], own.k_order[0]) is False  # queries of all tokens count
    cache = fed(cache_of("k8444v8", frames=frames), whole, (10,))
    assert (cache.pages(0).rung == 0).all()
    assert fed(cache_of("k8444v8"), whole, (10,)).pages(0).rung.max() == 1  # these wait, of width 16
    for name in ("k_mean", "k_order", "k_gain"):
        assert np.array_equal(getattr(cache.pages(0), name)[0], getattr(frames, name)[0])
    given, taken = (cache_of("k8422v8", frames=f) for f in (KeyFrames.measured([whole]), None))
    assert error(fed(given, whole, (300,)), whole) < error(fed(taken, whole, (300,)), whole)
    given.repeat(2)
    assert (given.pages(0).k_order == given.pages(0).k_order[:1]).all()
    given.reset()
    assert given.step(0, *(np.repeat(x[:, :5], 2, axis=0) for x in whole)).shape == (2, 5, HEADS_Q, 64)


def test_a_cache_with_given_frames_is_saved_with_those_of_its_rows(tmp_path: Path) -> None:
    whole = tokens(300)
    cache = fed(cache_of(LADDER, frames=KeyFrames.measured([whole])), whole, (200,))
    cache.save(tmp_path / "cache")
    loaded = MixedPrecisionCache.load(tmp_path / "cache")
    new = [x[:, 200:232] for x in whole]
    np.testing.assert_array_equal(loaded.step(0, *new), cache.step(0, *new))


def test_frames_of_another_model_are_refused() -> None:
    frames = KeyFrames.measured([tokens(80)])
    with pytest.raises(ValueError, match=r"frames are of .* \(1, 2, 64\), and the cache of \(1, 2, 128\)"):
        cache_of(LADDER, dim=128, frames=frames)
    with pytest.raises(ValueError, match="k_order does not have every rotary pair once"):
        replace(frames, k_order=np.zeros_like(frames.k_order))
    with pytest.raises(ValueError, match="k_gain must be float32"):
        replace(frames, k_gain=frames.k_gain.astype(np.float64))


@pytest.mark.parametrize("bits", [LADDER, (2, 4)])
def test_no_rows_may_be_reordered(bits: Any) -> None:
    cache, none = fed(cache_of(bits), tokens(80), (80,)), np.zeros(0, np.int64)
    cache.select(none)
    cache.reorder(none)
    assert (cache.batch, cache.seqlen) == (0, 80)

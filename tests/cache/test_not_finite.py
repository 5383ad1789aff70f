"""Keys and values that are NaN or infinite: what sees them is NaN, and nothing else is wrong."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from kvlab.cache.cache import MixedPrecisionCache
from kvlab.pages import TOKENS_PER_PAGE
from kvlab.reference.attention import attention

HEADS_Q, HEADS, DIM, BATCH = 4, 2, 64, 2
ROW, HEAD, CHANNEL = 1, 1, 11  # of the number that is not finite
ROTARY = tuple(10000.0 ** (-np.arange(DIM / 2) / (DIM / 2)))
LADDERS: dict[str, dict[str, Any]] = {
    "widths": {},
    "profiles": {"rotary": ROTARY},
    "exact": {"bits": (2, 4, 16)},
    "evicting": {"bits": (0, 4), "budget": 0.2},
    "dp": {"allocator": "dp"},
}

Array = NDArray[np.float32]


def make(**options: Any) -> MixedPrecisionCache:
    options = {"budget": 0.3, "plan_length": 128, "dtype": "float32", "batch": BATCH} | options
    return MixedPrecisionCache(1, HEADS_Q, HEADS, DIM, **options)


def draw(length: int) -> tuple[Array, Array, Array]:
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((BATCH, length, h, DIM), np.float32) for h in (HEADS_Q, HEADS, HEADS))
    k[..., 5] += 3
    return q, k, v


def spoiled(k: Array, v: Array, side: str, number: float, at: int) -> tuple[Array, Array]:
    k, v = k.copy(), v.copy()
    (k if side == "k" else v)[ROW, at, HEAD, CHANNEL] = number
    return k, v


def in_steps(cache: MixedPrecisionCache, q: Array, k: Array, v: Array, prompt: int, first: int = 0) -> Array:
    """What a cache gives for a prompt, and then token by token; tokens before `first` are in it."""
    ends = [first + prompt, *range(first + prompt + 1, q.shape[1] + 1)]
    outs = []
    for begin, end in zip([first, *ends], ends, strict=False):
        outs.append(cache.step(0, *(x[:, begin:end] for x in (q, k, v))))
        assert cache.budget_nbytes is None or cache.nbytes <= cache.budget_nbytes
    return np.concatenate(outs, 1)


def error(out: Array, wanted: NDArray[np.float64]) -> float:
    """Root mean square error of the affected row, over the size of what is wanted."""
    return float(np.sqrt(np.mean((out[ROW] - wanted[ROW]) ** 2) / np.mean(wanted[ROW] ** 2)))


@pytest.mark.parametrize(
    ("ladder", "number"), [*((name, np.nan) for name in LADDERS), ("widths", np.inf), ("profiles", np.inf)]
)
@pytest.mark.parametrize("side", ["k", "v"])
@pytest.mark.parametrize("at", [20, 110])  # of the prompt, and behind it
def test_no_other_row_or_head_is_wrong(ladder: str, side: str, number: float, at: int) -> None:
    q, k, v = draw(160)
    clean = in_steps(make(**LADDERS[ladder]), q, k, v, 100)
    found = in_steps(make(**LADDERS[ladder]), q, *spoiled(k, v, side, number, at), 100)
    assert (found[0] == clean[0]).all()  # the other row
    before = found[:, :at]
    assert ((before == clean[:, :at]) | ~np.isfinite(before)).all()
    # Weights of 0 times a masked value of the same call are NaN, as in torch.
    assert np.isfinite(before[..., np.arange(DIM) != CHANNEL]).all()
    assert np.isfinite(before).all() or (side == "v" and at < 100)
    other, own = np.s_[:, :, : HEADS_Q // 2], np.s_[ROW, at:, HEADS_Q // 2 :]
    wanted = attention(q, k, v, causal=True)[other]
    assert error(found[other], wanted) < 1.2 * error(clean[other], wanted)
    if ladder != "evicting" and (side == "v" or np.isnan(number)):
        assert not np.isfinite(found[own]).all(-1).any()


@pytest.mark.parametrize("ladder", ["widths", "profiles"])
@pytest.mark.parametrize("side", ["k", "v"])
@pytest.mark.parametrize("number", [np.nan, np.inf])
@pytest.mark.parametrize("at", [20, 97])  # among those that make the frame, and behind them
def test_a_cropped_number_leaves_nothing(ladder: str, side: str, number: float, at: int) -> None:
    """The frame of keys is taken from the first tokens: the number does not count in it."""
    q, k, v = draw(160)
    cache = make(**LADDERS[ladder] | {"budget": None})
    cache.step(0, *(x[:, :100] for x in (q, *spoiled(k, v, side, number, at))))
    cache.crop(100 - at + 3)
    first = cache.seqlen
    wanted = attention(q, k, v, causal=True)[:, first:]
    assert error(in_steps(cache, q, k, v, 1, first), wanted) < 0.02


@pytest.mark.parametrize("ladder", ["widths", "profiles"])
@pytest.mark.parametrize("side", ["k", "v"])
@pytest.mark.parametrize("number", [np.nan, np.inf])
def test_a_number_that_no_row_sees_any_more_leaves_nothing(ladder: str, side: str, number: float) -> None:
    """It is among the tokens that make the frame, and then leaves the sliding window."""
    (q, k, v), window, at = draw(160), 48, 20
    cache = make(**LADDERS[ladder] | {"budget": None, "sliding_window": window})
    found = in_steps(cache, q, *spoiled(k, v, side, number, at), 30)
    wanted = attention(q, k, v, causal=True, window=(window - 1, 0))
    later = np.s_[:, at + window + TOKENS_PER_PAGE :]
    assert error(found[later], wanted[later]) < 0.02

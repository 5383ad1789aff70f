"""How collecting calls save scores: packed/saved_scores.cuh in NumPy, read back by the reference.

A score becomes a byte by two multiply-adds of float16. Here is how far that may be from the score, for any
max_excess (p_exponent of packed/values.cuh and its slack), and that nothing becomes another's byte. tests/gpu
tells whether the kernel does the same.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvlab.reference.packed import scores_of_bytes

STEP = 0.08  # what a score may be off, in binary orders: half an eighth, and roundings of float16


def codes_of(scores: NDArray[np.float32], max_excess: float) -> NDArray[np.uint8]:
    """`code_pair`, of scores in base 2 less the row_max of the state; a step rounds once, as fma does."""
    top = np.float16(np.float32(255 / 256) - np.float32(max_excess) / np.float32(32)).astype(np.float64)
    with np.errstate(over="ignore", invalid="ignore"):
        p = (scores.astype(np.float16).astype(np.float64) / 32 + top).astype(np.float16)
    p = np.clip(np.nan_to_num(p, nan=0.0), 0, 1).astype(np.float64)
    return (p * 256 + 1024).astype(np.float16).view(np.uint16).astype(np.uint8)


def read_back(codes: NDArray[np.uint8], row_max: float) -> NDArray[Any]:
    """Scores in base 2, of rows of 64 codes that are all relative to `row_max`."""
    nbytes = -(-68 * len(codes) // 16) * 16
    quad = np.full(nbytes, 0xFF, np.uint8)
    of_lanes = codes.reshape(-1, 4, 8, 2).swapaxes(1, 2)  # a lane group has two slots of each page
    quad[: codes.size] = of_lanes.reshape(-1)
    quad[codes.size : codes.size + 4 * len(codes)].view(np.float32)[:] = row_max
    return scores_of_bytes(quad, len(codes)) / np.log(2)


@given(
    seed=st.integers(0, 2**32 - 1),
    p_exponent=st.integers(-10, 20),
    row_max=st.sampled_from([0.0, -500.0, 3.7, 4e4]),
    spread=st.sampled_from([0.1, 3.0, 40.0, 1e6]),
)
def test_a_score_comes_back_within_a_step(seed: int, p_exponent: int, row_max: float, spread: float) -> None:
    max_excess = p_exponent + 8.0
    scores = max_excess - spread * np.abs(np.random.default_rng(seed).standard_normal((3, 64))).astype(
        np.float32
    )
    scores[1, 5:9] = max_excess, -np.inf, np.nan, max_excess - 31
    codes = codes_of(scores, max_excess)
    found = read_back(codes, np.float32(row_max) + np.float32(max_excess)) - row_max
    used = codes > 0
    slack = 4 * np.spacing(np.float32(abs(row_max) + 40))
    assert np.abs(found[used] - scores[used]).max() <= STEP + slack
    assert not (scores[~used] > max_excess - 31.8).any()
    assert codes[1, 5] == 255
    assert not codes[1, 6:8].any()
    assert codes[1, 8] == 7
    order = np.argsort(scores[0])
    assert (np.diff(codes[0, order].astype(int)) >= 0).all()


def test_rounding_prefers_no_side() -> None:
    """Over many scores the mean of what is read back is right, and so is mass: within a thousandth."""
    scores = np.random.default_rng(0).uniform(-20, 8, (40, 64)).astype(np.float32)
    found = read_back(codes_of(scores, 8.0), 8.0)
    assert abs((found - scores).mean()) < 0.004
    assert abs(np.exp2(found - scores).mean() - 1) < 0.004
    assert abs(np.exp2(read_back(codes_of(scores, 8.0), 8.125) - scores).mean() - 1) > 0.05


def test_rows_without_a_token_have_no_score() -> None:
    codes = codes_of(np.full((2, 64), -np.inf, np.float32), -np.inf)
    assert not codes.any()
    assert np.isneginf(read_back(codes, -np.inf)).all()

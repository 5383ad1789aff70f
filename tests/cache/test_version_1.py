"""Files of version 1, written when rows had windows of exact tokens outside pages."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from kvlab.cache.cache import MixedPrecisionCache
from kvlab.cache.persistence import read
from kvlab.pages import read_tokens

FOLDER = Path(__file__).parents[1] / "data" / "cache_version_1"
EXACT = {"pages": [0, 0], "waiting": [30, 20], "window": [5, 5]}


@pytest.mark.parametrize("name", ["pages", "waiting", "few_bytes", "window", "sinks"])
def test_attention_is_as_it_was(name: str) -> None:
    with np.load(FOLDER / "attended.npz") as expected:
        q, wanted = expected["q"], expected[name]
    cache = MixedPrecisionCache.load(FOLDER / name)
    assert cache.floor == 0, "files of that time had none"
    out = cache.attend(0, q.astype(np.float32))
    assert np.abs(out - wanted).max() < (
        2e-3 if name in EXACT else 0.05
    )  # of others, exact tokens are packed
    k = np.ones((2, 1, 1, 32), np.float16)
    for _ in range(80):
        cache.append(0, k, k)
    assert cache.nbytes <= (cache.budget_nbytes or 0)


@pytest.mark.parametrize("name", list(EXACT))
def test_all_bits_are_as_they_were(name: str) -> None:
    _, arrays = read(FOLDER / name)
    cache = MixedPrecisionCache.load(FOLDER / name)
    pages = cache.pages(0)
    for r in range(3):
        assert np.array_equal(pages.pools[r], arrays[f"0.pool{r}"])
    assert np.array_equal(pages.k_mean, arrays["0.k_mean"])
    for row, n in enumerate(EXACT[name]):
        window = {of: arrays[f"0.window{row}.{of}"] for of in ("k", "v", "position")}
        entries = np.flatnonzero(pages.rung[row, 0, : pages.num_pages[row, 0]] >= 3)
        assert len(entries) == (n > 0)
        for entry in entries:
            rung, index = pages.rung[row, 0, entry], pages.index[row, 0, entry]
            pool, slots = pages.pools[rung], np.arange(n)
            k, v = read_tokens(pool, pages.layouts[rung], "float16", np.full(n, index), slots)
            assert np.array_equal(k, window["k"][:, 0])
            assert np.array_equal(v, window["v"][:, 0])
            position = pages.layouts[rung].positions_in(pool)[index, :n]
            assert np.array_equal(position, window["position"])

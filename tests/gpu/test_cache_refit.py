"""Frames that are fitted to later tokens: a cache on a GPU becomes that on a CPU, bit for bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from kvlab.cache.cache import MixedPrecisionCache
from kvlab.ops.frame import FRAME
from tests.cache_contents import contents_of
from tests.gpu.packed_cases import to_torch

LADDER = ("k4220v2", "k4422v2", "k8422v3", "k8444v4", 8)
HEADS_Q, HEADS, BATCH, PROMPT = 6, 2, 2, 300


def assert_same(caches: list[Any]) -> None:
    """Frames, ratios that frames are fitted to, and every token are the same."""
    one, other = (cache.pages(0) for cache in caches)
    for name in ("num_pages", "rung", "count", "base", *FRAME):
        assert np.array_equal(getattr(one, name), getattr(other, name)), name
    stores = [cache._device.store for cache in caches]
    assert np.array_equal(*(store.executor.to_host(store.tables["k_ratio"][0]) for store in stores))
    assert contents_of(caches[0]) == contents_of(caches[1])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize(
    ("parts", "begin", "factor", "options"),
    [
        ([PROMPT, *[1] * 40], PROMPT, 45, {}),
        ([PROMPT, *[3] * 14], PROMPT, 6, {}),
        ([PROMPT, 64, *[1] * 20], PROMPT, 11, {}),
        ([PROMPT, 40, *[16] * 3], PROMPT, 45, {"residual": 32}),
        ([40, *[1] * 60], 40, 45, {"plan_length": 2048}),
    ],
)
def test_fitted_frames(
    dtype: str, dim: int, parts: list[int], begin: int, factor: float, options: dict[str, Any]
) -> None:
    options = {"bits": LADDER, "budget": 0.3, "plan_length": 1, "importance": "key_norm"} | options
    caches = [
        MixedPrecisionCache(1, HEADS_Q, HEADS, dim, batch=BATCH, device=device, dtype=dtype, **options)
        for device in ("cpu", "cuda")
    ]
    rng, first = np.random.default_rng(dim), 0
    large = [3, dim // 2 - 4, dim // 2 + 3, dim - 4]
    for n in parts:
        q, k, v = (rng.standard_normal((BATCH, n, heads, dim)) for heads in (HEADS_Q, HEADS, HEADS))
        if first >= begin:
            q[..., large], k[..., large] = q[..., large] / factor, k[..., large] * factor
        valid, first = rng.random((BATCH, n)) < 0.9, first + n
        arrays = [torch.from_numpy(x).to(getattr(torch, dtype)) for x in (q, k, v)]
        caches[0].step(0, *(x.float().numpy() for x in arrays), valid=valid)
        caches[1].step(0, *(x.cuda() for x in arrays), valid=to_torch(valid))
        if first % 5 == 0 or n > 1:
            assert_same(caches)
    assert_same(caches)
    assert np.flatnonzero(caches[0].pages(0).k_shift.all((0, 1))).tolist() == large[:2]


@pytest.mark.parametrize("dim", [64, 128])
def test_another_fit_is_told_apart(dim: int) -> None:
    """One more pair in one head: frames and codes differ, and the comparison says so."""
    caches = []
    for pairs in ([5], [5, 9]):
        cache = MixedPrecisionCache(1, HEADS_Q, HEADS, dim, device="cuda", bits=LADDER, budget=None)
        rng = np.random.default_rng(0)
        for n in (PROMPT, *[1] * 40):
            q, k, v = (rng.standard_normal((1, n, heads, dim)) for heads in (HEADS_Q, HEADS, HEADS))
            if n == 1:
                large = [*pairs, *(pair + dim // 2 for pair in pairs)]
                k[:, :, 1, large] *= 45
                q[:, :, HEADS_Q // 2 :, large] /= 45
            cache.step(0, *(to_torch(x.astype(np.float16)) for x in (q, k, v)))
        caches.append(cache)
    assert [np.flatnonzero(x.pages(0).k_shift[0, 1]).tolist() for x in caches] == [[5], [5, 9]]
    with pytest.raises(AssertionError):
        assert_same(caches)

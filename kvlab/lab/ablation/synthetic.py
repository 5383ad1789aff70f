"""Fill the cache of an ablation case with synthetic keys and values of a given geometry.

Keys lie around a mean of their head with some large channels, as keys of models do; values have unit size. A
cache on a GPU is filled there, in parts of a context, as in a prefill.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvlab.cache.cache import MixedPrecisionCache
from kvlab.lab.ablation.grid import AblationCase
from kvlab.lab.gpu_lock import shared_gpu
from kvlab.new_arrays import to_host
from kvlab.ops.attention import attention

__all__ = ["EvaluatedCache", "fill", "new_cache", "query"]

_PART = 1024  # tokens of a step
Floats = NDArray[np.float32]


class EvaluatedCache(NamedTuple):
    """The cache of a case once it is full: its quality, one row of it on the CPU, seconds that it took."""

    quality: dict[str, float | int]
    cache: MixedPrecisionCache
    seconds: float


def new_cache(case: AblationCase, budget: float | None) -> MixedPrecisionCache:
    """Return an empty cache of one row, with the ladder and the shape of a case."""
    shape = case.geometry
    return MixedPrecisionCache(
        shape.num_layers,
        shape.num_heads,
        shape.num_kv_heads,
        shape.head_dim,
        budget=budget,
        bits=case.bits,
        plan_length=case.context_length,
        device=case.device,
    )


def query(case: AblationCase) -> Floats:
    """Return queries of one token, (1, 1, num_heads, head_dim)."""
    shape = (1, 1, case.geometry.num_heads, case.geometry.head_dim)
    return np.random.default_rng(case.seed + 1).standard_normal(shape, dtype=np.float32)


def fill(case: AblationCase, progress: Callable[[int, int], None]) -> EvaluatedCache:
    """Fill a cache with random tokens; `progress` is told the number of layers done and their total.

    Its quality is ``attention_error``, the one figure such data has: the relative error of attention in the
    first layer, against exact keys and values.
    """
    start = time.perf_counter()
    shape, cache = case.geometry, new_cache(case, case.budget)
    rng = np.random.default_rng(case.seed)
    kv_shape = (1, case.context_length, shape.num_kv_heads, shape.head_dim)
    first: list[Floats] = []
    for layer in range(shape.num_layers):
        spread = rng.lognormal(0, 0.5, kv_shape[2:]).astype(np.float32)
        mean = 2 * rng.standard_normal(kv_shape[2:], dtype=np.float32)
        k = mean + spread * rng.standard_normal(kv_shape, dtype=np.float32)
        v = rng.standard_normal(kv_shape, dtype=np.float32)
        q = rng.standard_normal((1, kv_shape[1], shape.num_heads, shape.head_dim), dtype=np.float32)
        with shared_gpu(case.device):
            for begin in range(0, case.context_length, _PART):
                cache.step(layer, *(_send(x[:, begin : begin + _PART], case.device) for x in (q, k, v)))
        first = first or [k, v]
        progress(layer + 1, shape.num_layers)
    with shared_gpu(case.device):
        out = cache.attend(0, _send(query(case), case.device))
        found = out if case.device == "cpu" else to_host(out).astype(np.float32)
        cache = cache if case.device == "cpu" else cache.to_cpu()
    exact = attention(query(case), *first, backend="reference")
    error = float(np.linalg.norm(found - exact) / np.linalg.norm(exact))
    return EvaluatedCache({"attention_error": error}, cache, time.perf_counter() - start)


def _send(x: Floats, device: str) -> Any:
    """An array where the cache is; in float16, the type of the cache, on a GPU."""
    if device == "cpu":
        return x
    import torch

    return torch.from_numpy(x).cuda().half()

"""One ablation case from configuration to result: memory, quality, speed and compression, measured.

The cache of a case is filled by a model that reads text (kvlab.lab.reading), or by synthetic keys and values
of a given geometry. Then its pages are weighed, and the attention of one new token over them is timed in all
layers. A case without packing keeps the allocation that was planned for packed storage and stores one code a
byte (kvlab.lab.unpacked): what packing saves is the difference of two measurements.

A budget that the smallest rung does not fit is a result too: status "infeasible", with the smallest budget
that would do. Everything else that fails is an error of the case.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvlab import environment
from kvlab.cache.cache import MixedPrecisionCache
from kvlab.cache.pages import LayerPages
from kvlab.errors import BudgetError
from kvlab.lab import guard
from kvlab.lab.grid import AblationCase
from kvlab.lab.results import provenance
from kvlab.lab.timing import Timing, time_in_turns
from kvlab.lab.unpacked import page_nbytes, unpack_pages
from kvlab.ops.attention import attention
from kvlab.ops.packed import packed_attention
from kvlab.registry import last_backend

__all__ = ["SCHEMA", "feasible_budget", "run"]

SCHEMA = "kvlab ablation 1"
_PART = 1024  # tokens of a step that fills a synthetic cache
_TOLERANCE = {"cpu": 1e-5, "cuda": 1e-2}  # of attention against float64: float32, bfloat16
_JOB = ("SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID", "SLURM_JOB_ID", "SLURM_RESTART_COUNT")
Tick = Callable[[int, int], None]


def run(case: AblationCase, progress: Tick = lambda done, total: None) -> dict[str, Any]:
    """Measure one case.

    Parameters
    ----------
    case : AblationCase
    progress : callable
        Told the number of steps done and their total.

    Returns
    -------
    dict
        ``schema``, ``experiment`` (the name), ``status``: "ok" or "infeasible"; ``config``; ``memory``,
        ``quality``, ``performance``, ``compression``: dicts, or None if infeasible (quality: only what a
        model can tell); ``smallest_feasible_budget``; ``reason``: why it is infeasible; ``provenance``.

    Raises
    ------
    MissingExtraError
        If the packages of the model are not installed.
    RuntimeError
        If an answer is wrong, a time impossible, or the GPU throttled.

    Examples
    --------
    >>> from kvlab.lab.grid import Geometry
    >>> case = AblationCase(0.3, "2,4", 128, model=None, geometry=Geometry(1, 2, 1, 32))
    >>> result = run(case)
    >>> result["status"], result["memory"]["memory_ratio"] <= 0.3
    ('ok', True)
    """
    start = time.perf_counter()
    least = feasible_budget(case)
    result: dict[str, Any] = {
        "schema": SCHEMA,
        "experiment": case.name,
        "status": "ok" if least <= case.budget else "infeasible",
        "config": case.to_dict(),
        **dict.fromkeys(("memory", "quality", "performance", "compression")),
        "smallest_feasible_budget": least,
        "reason": None if least <= case.budget else "the smallest width takes more than the budget",
    }
    backend = None
    if result["status"] == "ok":
        try:
            result["quality"], cache = _filled(case, progress)
        except BudgetError as error:  # on the way: partly filled pages take a page more than the least
            result |= {"status": "infeasible", "smallest_feasible_budget": None, "reason": str(error)}
        else:
            backend = _measure(case, cache, result)
    result["provenance"] = _provenance(case, backend, time.perf_counter() - start)
    guard.require_provenance(result)
    return result


def _measure(case: AblationCase, cache: MixedPrecisionCache, result: dict[str, Any]) -> str:
    """Put memory, performance and compression into a result; return the backend that ran."""
    packed = _pages_of(cache)
    pages = packed if case.use_packing else [unpack_pages(layer) for layer in packed]
    nbytes = sum(map(page_nbytes, pages))
    result["memory"] = _memory(case, packed, nbytes)
    result["performance"], backend = _performance(case, packed, pages)
    result["compression"] = _compression(case, result["memory"], nbytes)
    return backend


def feasible_budget(case: AblationCase) -> float:
    """Return the smallest budget, as a fraction of float16, that holds the context of a case.

    A cache that a model fills on a GPU needs some pages more than one on the CPU; synthetic ones are filled
    on the CPU for both.

    Examples
    --------
    >>> feasible_budget(AblationCase(0.2, "4,8", 2048)), feasible_budget(AblationCase(0.2, "2,4,8", 2048))
    (0.2703, 0.1453)
    """
    try:
        device = "cpu" if case.model is None else case.device
        _new_cache(case, budget=1, max_seqlen=case.context_length, device=device)
    except BudgetError as error:
        needed = error.needed_bytes or 0
    return math.ceil(1e4 * needed / case.geometry.fp16_nbytes(case.context_length)) / 1e4


def _new_cache(case: AblationCase, budget: float | int, **options: Any) -> MixedPrecisionCache:
    shape = case.geometry
    return MixedPrecisionCache(
        shape.num_layers,
        shape.num_heads,
        shape.num_kv_heads,
        shape.head_dim,
        budget=budget,
        bits=case.bits,
        plan_length=case.context_length,
        **options,
    )


# ---- what the cache holds ----------------------------------------------------------------------------------


def _filled(case: AblationCase, progress: Tick) -> tuple[dict[str, float | int], MixedPrecisionCache]:
    """Figures of quality, and the cache of one row at the context of the case."""
    if case.model is None:
        return _filled_synthetically(case, progress)
    from kvlab.lab.reading import read

    reading = read(case, progress)
    return dict(reading.quality), reading.cache


def _filled_synthetically(
    case: AblationCase, progress: Tick
) -> tuple[dict[str, float | int], MixedPrecisionCache]:
    """Keys around a mean of their head with some large channels, values of unit size, queries that match.

    The quality that such data can tell is the relative error of attention in the first layer, against exact
    keys and values.
    """
    shape, cache = case.geometry, _new_cache(case, case.budget)
    rng = np.random.default_rng(case.seed)
    kv_shape = (1, case.context_length, shape.num_kv_heads, shape.head_dim)
    kept: list[NDArray[np.float32]] = []
    for layer in range(shape.num_layers):
        spread = rng.lognormal(0, 0.5, kv_shape[2:]).astype(np.float32)
        mean = 2 * rng.standard_normal(kv_shape[2:], dtype=np.float32)
        k = mean + spread * rng.standard_normal(kv_shape, dtype=np.float32)
        v = rng.standard_normal(kv_shape, dtype=np.float32)
        q = rng.standard_normal((1, kv_shape[1], shape.num_heads, shape.head_dim), dtype=np.float32)
        for begin in range(0, case.context_length, _PART):
            part = np.s_[:, begin : begin + _PART]
            cache.step(layer, q[part], k[part], v[part])
        if layer == 0:
            kept = [k, v]
        progress(layer + 1, shape.num_layers)
    q = _query(case)
    exact = attention(q, *kept, backend="reference")
    error = np.linalg.norm(cache.attend(0, q) - exact) / np.linalg.norm(exact)
    return {"attention_error": float(error)}, cache


def _query(case: AblationCase) -> NDArray[np.float32]:
    shape = (1, 1, case.geometry.num_heads, case.geometry.head_dim)
    return np.random.default_rng(case.seed + 1).standard_normal(shape, dtype=np.float32)


def _pages_of(cache: MixedPrecisionCache) -> list[LayerPages]:
    return [layer.store.view() for layer in cache.layers]


# ---- figures -----------------------------------------------------------------------------------------------


def _memory(case: AblationCase, packed: list[LayerPages], nbytes: int) -> dict[str, Any]:
    """Bytes as they are stored; widths as they were allocated."""
    tokens: dict[int, int] = {}  # K and V are counted apart, for their widths may differ
    for pages in packed:
        live = np.arange(pages.rung.shape[2]) < pages.num_pages[..., None]
        held = np.bincount(pages.rung[live], pages.count[live], len(pages.layouts))
        for layout, count in zip(pages.layouts, held, strict=True):
            for width in (layout.bits_k, layout.bits_v):
                tokens[width] = tokens.get(width, 0) + int(count)
    total = sum(tokens.values())
    fp16 = case.geometry.fp16_nbytes(case.context_length)
    return {
        "memory_ratio": nbytes / fp16,
        "avg_bits": sum(width * count for width, count in tokens.items()) / total,
        "bits_per_element": 16 * nbytes / fp16,
        "allocated_gb": nbytes / 1e9,
        "fp16_gb": fp16 / 1e9,
        "precision_distribution": {str(width): count / total for width, count in sorted(tokens.items())},
    }


def _compression(case: AblationCase, memory: dict[str, Any], nbytes: int) -> dict[str, float]:
    fp16 = case.geometry.fp16_nbytes(case.context_length)
    return {
        "actual_vs_fp16": fp16 / nbytes,
        "actual_vs_int8": fp16 / 2 / nbytes,
        "theoretical_ratio": 16 / memory["avg_bits"],
    }


def _performance(
    case: AblationCase, packed: list[LayerPages], pages: list[LayerPages]
) -> tuple[dict[str, float | int], str]:
    """Time the attention of one new token over the stored tokens of all layers, once it is right."""
    expected = packed_attention(_query(case), packed[0], backend="reference").out
    repeats = 3 if os.environ.get("KVLAB_TINY") == "1" else 20
    if case.device == "cuda":
        from kvlab.lab.ablation_cuda import attend_layers

        timing, found, backend = attend_layers(pages, _query(case), repeats)
    else:
        timing, found, backend = _attend_layers(pages, _query(case), repeats)
    what = f"attention over the pages of {case.name}"
    error = guard.refuse_wrong(found, expected, _TOLERANCE[case.device], what)
    must_read = sum(map(page_nbytes, pages))
    guard.refuse_impossible(must_read, min(timing.seconds), _gpu_name() if case.device == "cuda" else None)
    mean = float(np.mean(timing.seconds))
    return {
        "avg_latency_ms": 1e3 * mean,
        "p5_latency_ms": 1e3 * timing.percentile(5),
        "p50_latency_ms": 1e3 * timing.median,
        "p95_latency_ms": 1e3 * timing.percentile(95),
        "throughput_tps": 1 / mean,
        "gb_per_s": must_read / mean / 1e9,
        "kernel_error": error,
        "repeats": repeats,
    }, backend


def _attend_layers(
    pages: list[LayerPages], q: NDArray[np.float32], repeats: int
) -> tuple[Timing, NDArray[np.float32], str]:
    """Seconds of each repeat over all layers, the output of the first layer, and the backend that ran."""
    found = packed_attention(q, pages[0]).out
    backend = last_backend()
    timings = time_in_turns(
        {"layers": lambda: [packed_attention(q, layer) for layer in pages]}, repeats=repeats
    )
    return timings["layers"], found, str(backend)


# ---- provenance --------------------------------------------------------------------------------------------


@lru_cache(maxsize=1)
def _machine() -> dict[str, Any]:
    """What is the same for all cases of a process: asking git and the GPU takes longer than a small case."""
    return provenance() | {"gpus": environment.report()["gpus"], "cuda": environment.report()["cuda"]}


def _gpu_name() -> str | None:
    gpus = _machine()["gpus"]
    return str(gpus[0]["name"]) if gpus else None


def _provenance(case: AblationCase, backend: str | None, seconds: float) -> dict[str, Any]:
    state = guard.gpu_state() if case.device == "cuda" else None
    guard.refuse_throttled(state)
    return {
        **_machine(),
        "settings": {"tiny": os.environ.get("KVLAB_TINY") == "1"},
        "case_id": case.id,
        "seed": case.seed,
        "backend": backend,
        "gpu_state": state,
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "seconds": seconds,
        "job": {name: os.environ[name] for name in _JOB if name in os.environ},
    }

"""One ablation case from configuration to result: memory, quality, speed and compression, measured.

The cache of a case is filled by a model that reads text (quality.py), or by synthetic keys and values of a
given geometry. Then its pages are weighed, and the attention of one new token over them is timed in all
layers. A case without packing keeps the allocation that was planned for packed storage and stores one code
a byte (unpacked.py): what packing saves is the difference of two measurements.

A budget that the smallest rung does not fit is a result too: status "infeasible", with the smallest budget
that would do. Everything else that fails is an error of the case.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any

import numpy as np

from kvlab import environment
from kvlab.cache.cache import MixedPrecisionCache
from kvlab.errors import BudgetError
from kvlab.lab import guard
from kvlab.lab.ablation.grid import AblationCase
from kvlab.lab.ablation.memory import refuse_too_large
from kvlab.lab.ablation.page_attention import time_layers
from kvlab.lab.ablation.synthetic import EvaluatedCache, fill, new_cache, query
from kvlab.lab.ablation.unpacked import page_nbytes, unpack_pages
from kvlab.lab.results import provenance
from kvlab.lab.targets import is_tiny
from kvlab.ops.packed import packed_attention
from kvlab.pages import LayerPages

__all__ = ["SCHEMA", "feasible_budget", "pages_of", "read_ahead", "run"]

SCHEMA = "kvlab ablation 1"
_JOB = ("SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID", "SLURM_JOB_ID", "SLURM_RESTART_COUNT")
Tick = Callable[[int, int], None]


def run(case: AblationCase, progress: Tick = lambda done, total: None) -> dict[str, Any]:
    """Measure one case.

    `progress` is told the number of chunks done and their total. The result has ``schema``, ``experiment``
    (the name), ``status``: "ok" or "infeasible"; ``config``; ``memory``, ``quality``, ``performance``,
    ``compression``: dicts, or None if infeasible (quality: only what a model can tell);
    ``smallest_feasible_budget``; ``reason``: why it is infeasible; ``provenance``.

    A case that needs more memory than is available raises OutOfMemory before anything is read. Wrong answers,
    impossible times and a throttled GPU are RuntimeErrors.

    Examples
    --------
    >>> from kvlab.lab.ablation.grid import Geometry
    >>> case = AblationCase(0.3, "2,4", 128, model=None, geometry=Geometry(1, 2, 1, 32))
    >>> result = run(case)
    >>> result["status"], result["memory"]["memory_ratio"] <= 0.3
    ('ok', True)
    """
    start = time.perf_counter()
    smallest = feasible_budget(case)
    result: dict[str, Any] = {
        "schema": SCHEMA,
        "experiment": case.name,
        "status": "ok" if smallest <= case.budget else "infeasible",
        "config": case.to_dict(),
        **dict.fromkeys(("memory", "quality", "performance", "compression")),
        "smallest_feasible_budget": smallest,
        "reason": None if smallest <= case.budget else "the smallest width takes more than the budget",
    }
    backend = None
    if result["status"] == "ok":
        try:
            found = _evaluated(case, progress)
        except BudgetError as error:  # on the way: partly filled pages take a page more than the least
            sure = feasible_budget(case)
            result |= {"status": "infeasible", "smallest_feasible_budget": sure, "reason": str(error)}
        else:
            start = time.perf_counter() - found.seconds  # of this case alone, whatever was read beside it
            result["quality"] = dict(found.quality)
            backend = _measure(case, found.cache, result)
    result["provenance"] = _provenance(case, backend, time.perf_counter() - start)
    guard.require_provenance(result)
    return result


def _measure(case: AblationCase, cache: MixedPrecisionCache, result: dict[str, Any]) -> str:
    """Put memory, performance and compression into a result; return the backend that ran."""
    packed = pages_of(cache)
    pages = packed if case.use_packing else [unpack_pages(layer) for layer in packed]
    nbytes = sum(map(page_nbytes, pages))
    result["memory"] = _memory(case, packed, nbytes)
    result["performance"], backend = _performance(case, packed, pages)
    result["compression"] = _compression(case, result["memory"], nbytes)
    return backend


def feasible_budget(case: AblationCase) -> float:
    """Return the smallest budget, as a fraction of float16, that holds the context of a case.

    Examples
    --------
    >>> feasible_budget(AblationCase(0.2, "4,8", 2048)), feasible_budget(AblationCase(0.2, "2,4,8", 2048))
    (0.2719, 0.1469)
    """
    cache = new_cache(case, None)  # or an error that says what its device does not have
    needed = cache.smallest_nbytes(case.context_length)
    return math.ceil(1e4 * needed / case.geometry.fp16_nbytes(case.context_length)) / 1e4


def read_ahead(cases: Sequence[AblationCase]) -> None:
    """Read several cases of one context together, so that full precision is read once; `run` finds it.

    The cases differ in budget, ladder and packing alone. Infeasible ones and those without a model are left
    to `run`. If together they need more memory than is available, nothing is read and OutOfMemory raised.
    """
    keys = dict.fromkeys(replace(case, use_packing=True) for case in cases)
    missing = [key for key in keys if key.model is not None and feasible_budget(key) <= key.budget]
    if not set(missing) <= set(_latest):
        refuse_too_large(missing)
        _read(missing, lambda done, total: None)


def _evaluated(case: AblationCase, progress: Tick) -> EvaluatedCache:
    """Figures of quality, and the cache of one row at the context of the case, on the CPU.

    Packed and unpacked cases keep the same codes, so they share both when they follow each other. The time
    of filling is the first one's.

    A budget that does not hold on the way is a BudgetError.
    """
    key = replace(case, use_packing=True)
    if key not in _latest:
        refuse_too_large([key])
        if case.model is None:
            _latest.clear()  # before the next one takes its memory
            _latest[key] = fill(key, progress)
        else:
            _read([key], progress)
    found = _latest[key]
    if isinstance(found, BudgetError):
        raise found
    _latest[key] = found._replace(seconds=0.0)
    return found


def _read(keys: Sequence[AblationCase], progress: Tick) -> None:
    from kvlab.lab.ablation.quality import measure_quality

    _latest.clear()
    _latest.update(measure_quality(keys, progress))


_latest: dict[AblationCase, EvaluatedCache | BudgetError] = {}
"""Results of the last evaluation, for the cases that share it."""


def pages_of(cache: MixedPrecisionCache) -> list[LayerPages]:
    """The stored pages of every layer of a cache on the CPU."""
    return [cache.pages(layer) for layer in range(cache.num_layers)]


# ---- figures -----------------------------------------------------------------------------------------------


def _memory(case: AblationCase, packed: list[LayerPages], nbytes: int) -> dict[str, Any]:
    """Bytes as they are stored; widths as they were allocated."""
    tokens: dict[float, int] = {}  # K and V are counted apart, for their widths may differ
    for pages in packed:
        live = np.arange(pages.rung.shape[2]) < pages.num_pages[..., None]
        held = np.bincount(pages.rung[live], pages.count[live], len(pages.layouts))
        for layout, count in zip(pages.layouts, held, strict=True):
            for width in (sum(layout.blocks) / 4, layout.bits_v):
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
    q = query(case)
    expected = packed_attention(q, packed[0], backend="reference").out
    repeats = 3 if is_tiny() else 20
    what = f"attention over the pages of {case.name}"
    timed = time_layers(pages, q, expected, device=case.device, repeats=repeats, what=what)
    latency = timed.timing.latency()
    return {
        **latency,
        "gb_per_s": timed.nbytes * latency["throughput_tps"] / 1e9,
        "kernel_error": timed.error,
        "repeats": repeats,
    }, timed.backend


# ---- provenance --------------------------------------------------------------------------------------------


@lru_cache(maxsize=1)
def _machine() -> dict[str, Any]:
    """What is the same for all cases of a process: asking git and the GPU takes longer than a small case."""
    return provenance() | {"gpus": environment.report()["gpus"], "cuda": environment.report()["cuda"]}


def _provenance(case: AblationCase, backend: str | None, seconds: float) -> dict[str, Any]:
    state = guard.gpu_state() if case.device == "cuda" else None
    guard.refuse_throttled(state)
    return {
        **_machine(),
        "settings": {"tiny": is_tiny()},
        "case_id": case.id,
        "seed": case.seed,
        "backend": backend,
        "gpu_state": state,
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "seconds": seconds,
        "job": {name: os.environ[name] for name in _JOB if name in os.environ},
    }

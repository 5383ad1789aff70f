"""`kvlab benchmark cache`: the cache work of one decode step, all layers, packed against dense float16.

The model has 32 layers, 32 query heads and 8 KV heads of 128 channels. The baseline fp16 is a dense float16
cache read by torch's scaled_dot_product_attention in its fastest way; the others are packed pages of random
codes: 8 bits, 4 bits, and mixed widths of 4 bits on average. Every layer has memory of its own, so a step
reads all of it. Each is compared with float64 before it is timed.
"""

from __future__ import annotations

import csv
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvlab.device import gpus
from kvlab.errors import needs_extra
from kvlab.lab import guard
from kvlab.lab.ablation.grid import Geometry
from kvlab.lab.ablation.unpacked import page_nbytes
from kvlab.lab.benchmark.baseline import Options
from kvlab.lab.benchmark.decode import (
    HEAD_DIM,
    NUM_HEADS_KV,
    NUM_HEADS_Q,
    WIDTHS,
    Mixed,
    make_pages,
)
from kvlab.lab.gpu_lock import gpu_lock
from kvlab.lab.limits import cpu_limit, gpu_limit
from kvlab.lab.results import Row, write
from kvlab.lab.timing import Timing, time_in_turns
from kvlab.ops.attention import attention
from kvlab.ops.packed import packed_attention
from kvlab.pages import LayerPages
from kvlab.registry import last_backend
from kvlab.sizes import parse_size

__all__ = ["BASELINES", "COMPARISON", "NOTE", "benchmark_cache", "compare"]

NOTE = (
    "one new token over the cache of all layers; memory ratio: of float16; speedup: over fp16, where it ran"
)
NUM_LAYERS = 32
BASELINES = {"fp16": None, "uniform_8bit": "8", "uniform_4bit": "4", "mixed": "mixed, average 4"}
"""Each baseline and its key in `kvlab.lab.benchmark.decode.WIDTHS`; None: dense."""
_RENAMED = {"smartkv_mixed": "mixed"}
"""Older names of baselines, which work for one version more, with a warning."""
COMPARISON = "benchmark_comparison.csv"
_TOLERANCE = {"cpu": {"fp16": 5e-3, "packed": 1e-5}, "cuda": {"fp16": 1e-2, "packed": 1e-2}}


def benchmark_cache(options: Options) -> list[Row]:
    """Time a decode step's cache work.

    Parameters
    ----------
    options : Options
        `baseline`: a key of `BASELINES`, or "all". The older name "smartkv_mixed" means "mixed" and gives a
        DeprecationWarning. `contexts`: multiples of 64. `repeats` and `device` count, too.

    Returns
    -------
    list of dict
        ``baseline``, ``context_length``, ``layers``, ``device``, ``backend``; ``avg_latency_ms`` and
        percentiles; ``throughput_tps``; ``allocated_gb``; ``memory_ratio``; ``speedup``: over fp16 at the
        same context, None if that was not among the baselines.

    Raises
    ------
    ValueError
        If a baseline is unknown, or a context no multiple of 64.
    Refused
        If a result is wrong or a time impossible.

    Examples
    --------
    >>> (row,) = benchmark_cache(Options(baseline="uniform_4bit", contexts="128", repeats=1, tiny=True))
    >>> row["baseline"], row["memory_ratio"] < 0.3
    ('uniform_4bit', True)
    """
    baselines = [*BASELINES] if options.baseline == "all" else [_current_name(options.baseline)]
    contexts = [parse_size(word, "contexts") for word in options.contexts.split(",")]
    repeats, device, num_layers = options.repeats, options.device, 2 if options.tiny else NUM_LAYERS
    if unknown := set(baselines) - set(BASELINES):
        raise ValueError(f"baseline={min(unknown)!r} is unknown; known are {', '.join(BASELINES)}")
    rows: list[Row] = []
    for context in contexts:
        fp16_ms = None
        for name in baselines:
            widths = BASELINES[name]
            if widths is None:
                measured, nbytes = _dense(context, num_layers, repeats, device)
            else:
                measured, nbytes = _packed(WIDTHS[widths], context, num_layers, repeats, device)
            timing, backend = measured
            fp16_ms = 1e3 * timing.median if name == "fp16" else fp16_ms
            geometry = Geometry(num_layers, NUM_HEADS_Q, NUM_HEADS_KV, HEAD_DIM)
            mean = float(np.mean(timing.seconds))
            rows.append(
                {
                    "baseline": name,
                    "context_length": context,
                    "layers": num_layers,
                    "device": device,
                    "backend": backend,
                    "avg_latency_ms": 1e3 * mean,
                    "p5_latency_ms": 1e3 * timing.percentile(5),
                    "p50_latency_ms": 1e3 * timing.median,
                    "p95_latency_ms": 1e3 * timing.percentile(95),
                    "throughput_tps": 1 / mean,
                    "allocated_gb": nbytes / 1e9,
                    "memory_ratio": nbytes / geometry.fp16_nbytes(context),
                    "speedup": None if fp16_ms is None else fp16_ms / (1e3 * timing.median),
                }
            )
    return rows


def compare(folder: Path) -> list[Row]:
    """Join the `benchmark_<baseline>.csv` of a folder into `benchmark_comparison.csv`.

    Returns
    -------
    list of dict
        One row a context: latency, throughput and memory of every baseline that is there.

    Raises
    ------
    FileNotFoundError
        If the folder has none.
    """
    names = (*_RENAMED, *BASELINES)  # a file of the newer name replaces one of the older
    paths = [path for name in names if (path := folder / f"benchmark_{name}.csv").exists()]
    if not paths:
        raise FileNotFoundError(
            f"{folder} holds no benchmark_<baseline>.csv; kvlab benchmark cache writes them"
        )
    table: dict[int, Row] = {}
    for path in paths:
        with path.open(newline="") as file:
            for line in csv.DictReader(file):
                row = table.setdefault(
                    int(line["context_length"]), {"context_length": int(line["context_length"])}
                )
                baseline = _RENAMED.get(line["baseline"], line["baseline"])
                for column in ("avg_latency_ms", "throughput_tps", "allocated_gb"):
                    row[f"{baseline}_{column}"] = float(line[column])
    rows = [table[context] for context in sorted(table)]
    columns = list(dict.fromkeys(column for row in rows for column in row))
    rows = [{column: row.get(column) for column in columns} for row in rows]
    write({"rows": rows}, folder / COMPARISON)
    return rows


def _current_name(name: str) -> str:
    """The name of a baseline today, with a warning for an older one."""
    if name in _RENAMED:
        warnings.warn(
            f"baseline={name!r} is now called {_RENAMED[name]!r}; the older name works for one version more",
            DeprecationWarning,
            stacklevel=3,
        )
    return _RENAMED.get(name, name)


_Measured = tuple[Timing, str]


def _query() -> NDArray[np.float32]:
    return np.random.default_rng(1).standard_normal((1, 1, NUM_HEADS_Q, HEAD_DIM), np.float32)


def _packed(widths: Mixed, context: int, num_layers: int, repeats: int, device: str) -> tuple[_Measured, int]:
    rng, q = np.random.default_rng(0), _query()
    pages = [make_pages(rng, widths, context) for _ in range(num_layers)]
    nbytes = sum(map(page_nbytes, pages))
    expected = packed_attention(q, pages[0], backend="reference").out
    if device == "cuda":
        from kvlab.lab.on_gpu import attend_layers

        timing, found, backend = attend_layers([_as_float16(layer) for layer in pages], q, repeats)
    else:
        found, backend = packed_attention(q, pages[0]).out, str(last_backend())
        calls = {"layers": lambda: [packed_attention(q, layer) for layer in pages]}
        timing = time_in_turns(calls, repeats=repeats)["layers"]
    _guard(found, expected, _TOLERANCE[device]["packed"], nbytes, timing, device)
    return (timing, backend), nbytes


def _as_float16(pages: LayerPages) -> LayerPages:
    """The same pages in a float16 cache, which differs in width 16 alone."""
    return replace(
        pages, layouts=tuple(replace(layout, itemsize=2) for layout in pages.layouts), dtype="float16"
    )


def _dense(context: int, num_layers: int, repeats: int, device: str) -> tuple[_Measured, int]:
    """The fastest of torch's ways to attend a dense cache."""
    with needs_extra("hf", "kvlab benchmark cache --baseline fp16"):
        import torch

    q = torch.from_numpy(_query().transpose(0, 2, 1, 3)).to(device).half()
    generator = torch.Generator(device).manual_seed(0)
    shape = (2, 1, NUM_HEADS_KV, context, HEAD_DIM)
    kv = [
        torch.randn(shape, generator=generator, device=device, dtype=torch.float16) for _ in range(num_layers)
    ]
    nbytes = sum(layer.numel() * layer.element_size() for layer in kv)
    exact = [x.cpu().float().transpose(1, 2).numpy() for x in kv[0]]
    rounded = q.cpu().float().transpose(1, 2).numpy()
    expected: Any = attention(rounded, *exact, backend="reference")
    calls: dict[str, Callable[[], object]] = {}
    for name, attend in _ways(q, device).items():
        found = attend(*kv[0]).cpu().float().numpy().reshape(expected.shape)
        guard.refuse_wrong(found, expected, _TOLERANCE[device]["fp16"], f"{name} over the dense cache")
        calls[name] = lambda attend=attend: [attend(k, v) for k, v in kv]  # type: ignore[misc]
    if device == "cuda":
        from kvlab.lab.timing_gpu import time_on_device

        with gpu_lock().exclusive():
            timings = time_on_device(calls, repeats)
    else:
        timings = time_in_turns(calls, repeats=repeats)
    timing = min(timings.values(), key=lambda each: each.median)
    _guard(found, expected, _TOLERANCE[device]["fp16"], nbytes, timing, device)
    return (timing, "torch"), nbytes


def _ways(q: Any, device: str) -> dict[str, Callable[[Any, Any], Any]]:
    """Ways to attend a dense cache with one token: a group's heads as queries, or as kernels for GPUs do."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    as_queries = q.reshape(1, NUM_HEADS_KV, -1, HEAD_DIM)
    ways: dict[str, Callable[[Any, Any], Any]] = {
        "heads as queries": lambda k, v: scaled_dot_product_attention(as_queries, k, v)
    }
    if device == "cuda":
        for backend in (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION):

            def attend(k: Any, v: Any, backend: Any = backend) -> Any:
                with sdpa_kernel(backend):
                    return scaled_dot_product_attention(q, k, v, enable_gqa=True)

            ways[backend.name] = attend
    return ways


def _guard(
    found: NDArray[Any], expected: NDArray[Any], tolerance: float, nbytes: int, timing: Timing, device: str
) -> None:
    if device == "cuda":
        guard.refuse_throttled(guard.gpu_state())
    guard.refuse_wrong(found, expected, tolerance, "attention over the cache")
    limit = cpu_limit if device == "cpu" else partial(gpu_limit, gpus()[0])
    guard.refuse_impossible(nbytes, min(timing.seconds), limit)

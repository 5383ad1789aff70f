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

from kvlab.errors import needs_extra
from kvlab.lab import guard
from kvlab.lab.ablation.grid import Geometry
from kvlab.lab.ablation.page_attention import TimedLayers, time_layers
from kvlab.lab.benchmark.baseline import Options
from kvlab.lab.benchmark.decode import HEAD_DIM, NUM_HEADS_KV, NUM_HEADS_Q, WIDTHS, make_pages
from kvlab.lab.gpu_lock import gpu_lock
from kvlab.lab.limits import limit_of
from kvlab.lab.results import Row, write
from kvlab.lab.timing import time_in_turns
from kvlab.lab.timing_gpu import time_on_device
from kvlab.ops.attention import attention
from kvlab.ops.packed import packed_attention
from kvlab.pages import LayerPages
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
_TOLERANCE = {"cpu": 5e-3, "cuda": 1e-2}
"""Of the dense cache against float64."""
_WHAT = "attention over the cache"


def benchmark_cache(options: Options) -> list[Row]:
    """Time a decode step's cache work.

    `options.baseline` is a key of `BASELINES`, or "all"; the older name "smartkv_mixed" means "mixed" and
    gives a DeprecationWarning. `options.contexts` are multiples of 64.

    A row has ``baseline``, ``context_length``, ``layers``, ``device``, ``backend``; ``avg_latency_ms`` and
    percentiles; ``throughput_tps``; ``allocated_gb``; ``memory_ratio``; ``speedup``: over fp16 at the same
    context, None if that was not among the baselines. Wrong results and impossible times are refused.

    Examples
    --------
    >>> (row,) = benchmark_cache(Options(baseline="uniform_4bit", contexts="128", repeats=1, tiny=True))
    >>> row["baseline"], row["memory_ratio"] < 0.3
    ('uniform_4bit', True)
    """
    baselines = [*BASELINES] if options.baseline == "all" else [_current_name(options.baseline)]
    contexts = [parse_size(word, "contexts") for word in options.contexts.split(",")]
    num_layers = 2 if options.tiny else NUM_LAYERS
    if unknown := set(baselines) - set(BASELINES):
        raise ValueError(f"baseline={min(unknown)!r} is unknown; known are {', '.join(BASELINES)}")
    rows: list[Row] = []
    for context in contexts:
        fp16_ms = None
        for name in baselines:
            timed = _time(name, context, num_layers, options)
            fp16_ms = 1e3 * timed.timing.median if name == "fp16" else fp16_ms
            geometry = Geometry(num_layers, NUM_HEADS_Q, NUM_HEADS_KV, HEAD_DIM)
            rows.append(
                {
                    "baseline": name,
                    "context_length": context,
                    "layers": num_layers,
                    "device": options.device,
                    "backend": timed.backend,
                    **timed.timing.latency(),
                    "allocated_gb": timed.nbytes / 1e9,
                    "memory_ratio": timed.nbytes / geometry.fp16_nbytes(context),
                    "speedup": None if fp16_ms is None else fp16_ms / (1e3 * timed.timing.median),
                }
            )
    return rows


def compare(folder: Path) -> list[Row]:
    """Join the `benchmark_<baseline>.csv` of a folder into `benchmark_comparison.csv`.

    A row is a context, with latency, throughput and memory of every baseline that is there; if none is, that
    is a FileNotFoundError.
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


def _time(baseline: str, context: int, num_layers: int, options: Options) -> TimedLayers:
    """Time one baseline at a context, and refuse figures of a GPU that had slowed down."""
    widths = BASELINES[baseline]
    if widths is None:
        timed = _dense(context, num_layers, options)
    else:
        rng, q, device = np.random.default_rng(0), _query(), options.device
        pages = [make_pages(rng, WIDTHS[widths], context) for _ in range(num_layers)]
        expected = packed_attention(q, pages[0], backend="reference").out
        if device == "cuda":
            pages = [_as_float16(layer) for layer in pages]
        timed = time_layers(pages, q, expected, device=device, repeats=options.repeats, what=_WHAT)
    if options.device == "cuda":
        guard.refuse_throttled(guard.gpu_state())
    return timed


def _query() -> NDArray[np.float32]:
    return np.random.default_rng(1).standard_normal((1, 1, NUM_HEADS_Q, HEAD_DIM), np.float32)


def _as_float16(pages: LayerPages) -> LayerPages:
    """The same pages in a float16 cache, which differs in width 16 alone."""
    return replace(
        pages, layouts=tuple(replace(layout, itemsize=2) for layout in pages.layouts), dtype="float16"
    )


def _dense(context: int, num_layers: int, options: Options) -> TimedLayers:
    """The fastest of torch's ways to attend a dense cache."""
    with needs_extra("hf", "kvlab benchmark cache --baseline fp16"):
        import torch

    device, repeats = options.device, options.repeats
    q = torch.from_numpy(_query().transpose(0, 2, 1, 3)).to(device).half()
    generator = torch.Generator(device).manual_seed(0)
    shape = (2, 1, NUM_HEADS_KV, context, HEAD_DIM)
    kv = [
        torch.randn(shape, generator=generator, device=device, dtype=torch.float16) for _ in range(num_layers)
    ]
    nbytes = sum(layer.nbytes for layer in kv)
    exact = [x.cpu().float().transpose(1, 2).numpy() for x in kv[0]]
    rounded = q.cpu().float().transpose(1, 2).numpy()
    expected: Any = attention(rounded, *exact, backend="reference")
    calls: dict[str, Callable[[], object]] = {}
    errors = {}
    for name, attend in _ways(q, device).items():
        found = attend(*kv[0]).cpu().float().numpy().reshape(expected.shape)
        errors[name] = guard.refuse_wrong(found, expected, _TOLERANCE[device], f"{name} over the dense cache")
        calls[name] = lambda attend=attend: [attend(k, v) for k, v in kv]  # type: ignore[misc]
    if device == "cuda":
        with gpu_lock().exclusive():
            timings = time_on_device(calls, repeats)
    else:
        timings = time_in_turns(calls, repeats=repeats)
    best = min(timings, key=lambda name: timings[name].median)
    guard.refuse_impossible(nbytes, min(timings[best].seconds), partial(limit_of, device))
    return TimedLayers(timings[best], nbytes, errors[best], "torch")


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

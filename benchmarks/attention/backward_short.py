"""Attention backward of short calls on a GPU, from CUDA graphs, beside torch's FlashAttention and cuDNN.

    python benchmarks/attention/backward_short.py OUT.json [--cases TEXT]

As backward.py, for causal calls of one sequence with few KV heads, whose kernels take no longer than the host
needs to launch them: so each contestant is recorded, gradients of torch on the stream of their forward, as
autograd wants it. Contestants take turns of 20 replays; medians of 7 turns.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from backward import contestants
from run import about, clocks_and_power

HEADS = {
    128: ((8, 1), (8, 2), (8, 4), (8, 8), (32, 8), (64, 8)),
    64: ((8, 1), (8, 4), (64, 8)),
    256: ((8, 1), (8, 4)),
}
CASES = [
    (1, tokens, heads, kv_heads, head_dim, True)
    for head_dim, pairs in HEADS.items()
    for heads, kv_heads in pairs
    for tokens in (512, 1024, 2048, 4096)
]
_REPLAYS, _TURNS = 20, 7


def recorded(call: Any, stream: torch.cuda.Stream) -> tuple[torch.cuda.CUDAGraph, Any]:
    """Return the call as a graph, and its results, which must stay."""
    with torch.cuda.stream(stream):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        results = call()
    return graph, results


def times_us(graphs: dict[str, torch.cuda.CUDAGraph]) -> dict[str, float]:
    found: dict[str, list[float]] = {name: [] for name in graphs}
    for turn in range(_TURNS + 1):
        for name, graph in graphs.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            for _ in range(_REPLAYS):
                graph.replay()
            end.record()
            end.synchronize()
            if turn:
                found[name].append(1e3 * begin.elapsed_time(end) / _REPLAYS)
    return {name: float(np.median(times)) for name, times in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("output", type=Path)
    parser.add_argument("--cases", default="", help='only those that contain this, as in "8/2 d128"')
    options = parser.parse_args()
    stream, results, clocks = torch.cuda.Stream(), [], {}
    for case in CASES:
        _, tokens, heads, kv_heads, head_dim, _ = case
        name = f"{tokens} tokens {heads}/{kv_heads} d{head_dim}"
        if options.cases not in name:
            continue
        with torch.cuda.stream(stream):
            calls = contestants(case, variants=True)
        calls.pop("kvlab portable")
        held = {contestant: recorded(call, stream) for contestant, call in calls.items()}
        times = times_us({contestant: graph for contestant, (graph, _) in held.items()})
        best = min(us for contestant, us in times.items() if not contestant.startswith("kvlab"))
        results.append({"case": name, "us": times, "speedup": best / times["kvlab"]})
        print(
            f"{name:26s}",
            *(f"{n} {us:.1f}" for n, us in times.items()),
            f"{best / times['kvlab']:.2f}",
            flush=True,
        )
        clocks[name] = clocks_and_power()
    options.output.write_text(json.dumps({"provenance": about(clocks), "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()

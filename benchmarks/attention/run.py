"""Forward attention on a GPU: time and TFLOPS beside torch's FlashAttention and cuDNN backends.

    python benchmarks/attention/run.py OUT.json [--variants]

Contestants take turns within one loop, since a GPU at its power limit clocks down as it warms up. Every case
is checked against float64 on a few heads before it is timed. TFLOPS count 4 * batch * heads * rows * keys *
head_dim operations, half of them under a causal mask. Calls are made as users make them; they take the GPU
longer than the host. `--variants` times the portable kernel too.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import kvlab
from kvlab.lab.guard import gpu_state
from kvlab.lab.results import provenance
from kvlab.ops.cuda import attention as attention_cuda

# batch, tokens, query heads, KV heads, head_dim, causal
CASES = {
    "d128 causal 16K mha16": (1, 16384, 16, 16, 128, True),
    "d128 full 16K mha16": (1, 16384, 16, 16, 128, False),
    "d128 causal 16K gqa64/8": (1, 16384, 64, 8, 128, True),
    "d128 causal 2K gqa32/8 b4": (4, 2048, 32, 8, 128, True),
    "d64 causal 16K mha32": (1, 16384, 32, 32, 64, True),
    "d64 full 16K mha32": (1, 16384, 32, 32, 64, False),
    "d256 causal 16K mha8": (1, 16384, 8, 8, 256, True),
    "d96 causal 8K mha16": (1, 8192, 16, 16, 96, True),
}
BACKENDS = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}


def contestants(case: tuple[int, int, int, int, int, bool], variants: bool) -> dict[str, Any]:
    batch, tokens, heads, kv_heads, d, causal = case
    torch.manual_seed(0)
    q, k, v = (
        torch.randn(batch, tokens, h, d, device="cuda", dtype=torch.bfloat16)
        for h in (heads, kv_heads, kv_heads)
    )

    def ours(hopper: bool) -> torch.Tensor:
        attention_cuda.HOPPER = hopper
        return kvlab.attention(q, k, v, causal=causal)

    def sdpa(backend: SDPBackend) -> torch.Tensor:
        with sdpa_kernel(backend):
            out = torch.nn.functional.scaled_dot_product_attention(
                q.transpose(1, 2),
                k.transpose(1, 2),
                v.transpose(1, 2),
                is_causal=causal,
                enable_gqa=heads != kv_heads,
            )
        return out.transpose(1, 2)

    calls = {"kvlab": lambda: ours(True)}
    calls |= {name: lambda b=backend: sdpa(b) for name, backend in BACKENDS.items()}
    if variants:
        calls["kvlab portable"] = lambda: ours(False)
    want = exact(q, k, v, causal)
    for name in list(calls):
        try:
            got = calls[name]()
        except RuntimeError as error:
            print(f"{name}: {str(error)[:90]}", flush=True)
            del calls[name]
            continue
        error = float((got[:1, :, :1].double() - want).norm() / want.norm())
        if not error < 6e-3:
            raise AssertionError(f"{name}: relative error {error:.2e}")
    return calls


def exact(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
    """The first head of the first row in float64, by blocks of rows."""
    a, b, c = (x[0, :, 0].double() for x in (q, k, v))
    parts = []
    for start in range(0, len(a), 2048):
        scores = a[start : start + 2048] @ b.T / a.shape[1] ** 0.5
        if causal:
            rows = torch.arange(start, start + len(scores), device="cuda")
            scores.masked_fill_(torch.arange(len(b), device="cuda") > rows[:, None], -torch.inf)
        parts.append(scores.softmax(-1) @ c)
    return torch.cat(parts)[None, :, None]


def times_ms(calls: dict[str, Any], rounds: int = 12) -> dict[str, float]:
    """Median time of each call, two calls at a time, contestants in turn."""
    found: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(rounds + 2):
        for name, call in calls.items():
            call()
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            call()
            call()
            end.record()
            end.synchronize()
            if turn >= 2:
                found[name].append(begin.elapsed_time(end) / 2)
    return {name: float(np.median(times)) for name, times in found.items()}


def recorded(call: Any) -> Any:
    """The call as a CUDA graph, in which kvlab's makes its list of tiles each time."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return lambda held=call: graph.replay()  # held: what the graph reads must stay


def clocks_and_power() -> str:
    state = gpu_state() or {}
    return f"{state.get('clocks.sm')}, {state.get('power.draw')}"


def about(clocks: dict[str, str]) -> dict[str, Any]:
    cudnn = torch.backends.cudnn.version()
    return provenance() | {"cudnn": cudnn, "clocks and power after each case": clocks}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("output", type=Path)
    parser.add_argument("--variants", action="store_true")
    options = parser.parse_args()
    results, clocks = [], {}
    for name, case in CASES.items():
        batch, tokens, heads, _, d, causal = case
        operations = 4 * batch * heads * tokens * tokens * d / (2 if causal else 1)
        calls = contestants(case, options.variants)
        for contestant, ms in times_ms(calls).items():
            row = {"case": name, "contestant": contestant, "ms": ms, "tflops": operations / ms / 1e9}
            results.append(row)
            print(f"{name:28s} {contestant:24s} {ms:8.3f} ms {row['tflops']:7.1f} TFLOPS", flush=True)
        clocks[name] = clocks_and_power()
    options.output.write_text(json.dumps({"provenance": about(clocks), "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()

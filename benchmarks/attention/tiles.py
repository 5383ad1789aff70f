"""Forward attention on a GPU by shape: TFLOPS beside torch's cuDNN and FlashAttention, and time of the host.

    python benchmarks/attention/tiles.py OUT.json [--variants]

Contestants take turns within one loop; each puts its calls behind a pause of the GPU, so that none waits for
the host. Every call is checked against cuDNN's (within 1 %) and, on one head, float64 before it is timed.
TFLOPS count 4 * batch * heads * rows * keys * head_dim operations, half of them under a causal mask. The time
of the host is that of a short call. `--variants` times other tiles and sections, too.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from run import BACKENDS, about, clocks_and_power, exact, recorded
from torch.nn.attention import sdpa_kernel

import kvlab
from kvlab.ops import attention as attention_ops
from kvlab.ops.attention_call import call_of, checked_options
from kvlab.ops.cuda import attention as attention_cuda
from kvlab.ops.cuda import attention_sm90, tile_list

Call = Callable[[], torch.Tensor]

# batch, tokens, query heads, KV heads, head_dim, causal; variable: the same sequences end to end
SHAPES = [
    *((1, 16384, 16, 16, 128, causal) for causal in (True, False)),
    (1, 32768, 32, 8, 128, True),
    *((2, tokens, 64, 8, 128, True) for tokens in (2048, 4096, 8192)),
    *((4, tokens, 32, 8, 128, True) for tokens in (2048, 4096)),
    *((1, 16384, 32, 32, 64, causal) for causal in (True, False)),
    (4, 4096, 32, 8, 64, True),
    (2, 8192, 16, 16, 96, True),
    (4, 4096, 32, 8, 96, True),
    (1, 16384, 32, 2, 256, True),
    (1, 16384, 8, 8, 256, False),
    (4, 4096, 16, 4, 256, True),
    *((8, tokens, 32, 8, d, True) for d in (64, 96, 128, 256) for tokens in (512, 1024, 2048)),
]
VARIABLE = [shape for shape in SHAPES if shape[0] == 8]
ROUNDS, LOOP_MS, PAUSE_CYCLES = 5, 0.8, 190_000  # the pause: for each call of a loop

# What to try beside a shape: (module, attribute) and value.
VARIANTS: dict[tuple[Any, ...], dict[str, dict[tuple[Any, str], Any]]] = {
    **{(8, tokens, 32, 8, 64, True): {"128 x 3": {(attention_sm90, "SHORT"): 0}} for tokens in (1024, 2048)},
    (2, 8192, 16, 16, 96, True): {
        "128 x 2": {(attention_sm90, "SHAPES"): attention_sm90.SHAPES | {96: (128, 2, 2)}}
    },
    (1, 16384, 16, 16, 128, True): {"4 pairs": {(tile_list, "_SECTION_PAIRS"): 4}},
    (8, 2048, 32, 8, 128, True): {"one section": {(tile_list, "_SECTION_BYTES"): 1 << 40}},
    (1, 32768, 32, 8, 128, True): {"4 pairs": {(tile_list, "_SECTION_PAIRS"): 4}},
}


@contextmanager
def instead(values: dict[tuple[Any, str], Any]) -> Iterator[None]:
    before = {key: getattr(*key) for key in values}
    for (module, name), value in values.items():
        setattr(module, name, value)
    attention_cuda._prepare.cache_clear()
    yield
    for (module, name), value in before.items():
        setattr(module, name, value)
    attention_cuda._prepare.cache_clear()


def contestants(shape: tuple[int, int, int, int, int, bool], variants: bool) -> dict[str, Call]:
    batch, tokens, heads, kv_heads, d, causal = shape
    torch.manual_seed(0)
    q, k, v = (
        torch.randn(batch, tokens, h, d, device="cuda", dtype=torch.bfloat16)
        for h in (heads, kv_heads, kv_heads)
    )

    def sdpa(backend: Any) -> torch.Tensor:
        with sdpa_kernel(backend):
            out = torch.nn.functional.scaled_dot_product_attention(
                q.transpose(1, 2),
                k.transpose(1, 2),
                v.transpose(1, 2),
                is_causal=causal,
                enable_gqa=heads != kv_heads,
            )
        return out.transpose(1, 2)

    calls: dict[str, Call] = {name: lambda b=backend: sdpa(b) for name, backend in BACKENDS.items()}
    if d > 128:
        calls.pop("flash")  # an order of magnitude slower than all others there
    calls["kvlab"] = lambda: kvlab.attention(q, k, v, causal=causal)
    if shape in VARIABLE:
        cu = torch.arange(0, (batch + 1) * tokens, tokens, device="cuda", dtype=torch.int32)
        flat = [x.flatten(0, 1) for x in (q, k, v)]
        calls["kvlab variable length"] = lambda: kvlab.attention_varlen(
            *flat, cu, cu, tokens, tokens, causal=causal
        )
        calls["kvlab in a graph"] = recorded(calls["kvlab"])
    check(calls, q, k, v, causal)
    if variants:
        for name, values in VARIANTS.get(shape, {}).items():
            with instead(values):
                calls["kvlab"]()
                options = checked_options(causal, None, (-1, -1), 0.0)
                call, addresses = call_of(attention_ops._FIXED, (q, k, v), None, options)
                prepared = attention_cuda._prepare(call, True)
            calls[f"kvlab {name}"] = lambda p=prepared, a=addresses: p(a, False)[0]
        check(calls, q, k, v, causal)
    return calls


def check(calls: dict[str, Call], q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> None:
    want, whole = exact(q, k, v, causal), calls["cudnn"]().float()
    for name, call in calls.items():
        got = call()
        if name == "kvlab in a graph":
            continue  # it gives nothing back
        got = got.reshape(q.shape)
        errors = [
            float((got[:1, :, :1].double() - want).norm() / want.norm()),
            float((got.float() - whole).norm() / whole.norm()),
        ]
        if not (errors[0] < 6e-3 and errors[1] < 1e-2):
            raise AssertionError(f"{name} {tuple(q.shape)}: relative errors {errors}")


def times_ms(calls: dict[str, Call], reps: int) -> dict[str, float]:
    """Median over loops in turns of the time of a call."""
    found: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(ROUNDS + 1):
        for name, call in calls.items():
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            torch.cuda._sleep(PAUSE_CYCLES * (reps + 1))
            call()
            begin.record()
            for _ in range(reps):
                call()
            end.record()
            end.synchronize()
            if turn:
                found[name].append(begin.elapsed_time(end) / reps)
    return {name: float(np.median(times)) for name, times in found.items()}


def host_us(call: Call) -> float:
    """Median time of a call on the host."""
    times = []
    for number in range(600):
        if number % 50 == 0:
            torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return float(np.median(times[100:])) * 1e6


def host_times() -> dict[str, float]:
    q, k, v = (torch.randn(1, 128, h, 128, device="cuda", dtype=torch.bfloat16) for h in (32, 8, 8))
    heads_first = [x.transpose(1, 2) for x in (q, k, v)]
    cu = torch.tensor([0, 128], device="cuda", dtype=torch.int32)
    flat = [x[0] for x in (q, k, v)]
    new = iter([[torch.randn_like(x) for x in (q, k, v)] for _ in range(600)])
    function = torch.nn.functional.scaled_dot_product_attention
    calls = {
        "torch SDPA": lambda: function(*heads_first, is_causal=True, enable_gqa=True),
        "kvlab": lambda: kvlab.attention(q, k, v, causal=True),
        "kvlab with lse": lambda: kvlab.attention(q, k, v, causal=True, return_lse=True),
        "kvlab variable length": lambda: kvlab.attention_varlen(*flat, cu, cu, 128, 128, causal=True),
        "kvlab, other addresses each time": lambda: kvlab.attention(*next(new), causal=True),
    }
    with torch.no_grad():
        return {name: host_us(call) for name, call in calls.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("output", type=Path)
    parser.add_argument("--variants", action="store_true")
    options = parser.parse_args()
    results: list[dict[str, Any]] = []
    clocks: dict[str, str] = {}
    provenance, host = about(clocks), host_times()
    print("host us:", ", ".join(f"{name} {us:.1f}" for name, us in host.items()), flush=True)
    for shape in SHAPES:
        batch, tokens, heads, kv_heads, d, causal = shape
        name = f"d{d} {'causal' if causal else 'full'} {batch}x{tokens} {heads}/{kv_heads}"
        operations = 4 * batch * heads * tokens * tokens * d / (2 if causal else 1)
        calls = contestants(shape, options.variants)
        found = times_ms(calls, max(1, int(LOOP_MS / (operations / 4.5e11 + 0.01))))
        base = max(operations / found[one] / 1e9 for one in BACKENDS if one in found)
        line = []
        for contestant, ms in found.items():
            row = {"case": name, "contestant": contestant, "ms": ms, "tflops": operations / ms / 1e9}
            results.append(row)
            line.append(f"{contestant} {row['tflops']:.0f} ({row['tflops'] / base:.2f})")
        print(f"{name}: {', '.join(line)}", flush=True)
        clocks[name] = clocks_and_power()
        document = {"provenance": provenance, "host us": host, "results": results}
        options.output.write_text(json.dumps(document, indent=1) + "\n")
        del calls
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()

"""Attention on a GPU beside cuDNN, FlashAttention 2 and, where installed, FlashAttention 4, in one loop.

    python benchmarks/attention/peers.py OUT.json [--only forward|backward|deterministic]

Forward, of fixed and of variable length, backward and deterministic backward: TFLOPS of each contestant, and
kvlab's speed relative to the best of the others. Contestants take turns, five loops each, behind a pause of
the GPU, so that none waits for the host; the median counts. kvlab's forward is checked against float64 on one
head, and every call against kvlab's, before it is timed. Operations count as in tiles.py, two and a half
times as many backward.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from run import about, clocks_and_power, exact
from tiles import times_ms

import kvlab
from kvlab.lab.benchmark.attention_peers import backward_of, peers

# batch, tokens, query heads, KV heads, head_dim, causal
LONG = [
    *((1, tokens, 32, 8, 128, True) for tokens in (2048, 4096, 8192, 16384, 32768)),
    (1, 16384, 16, 16, 128, True),
    (1, 16384, 16, 16, 128, False),
    *((2, tokens, 64, 8, 128, True) for tokens in (2048, 4096, 8192)),
    *((1, tokens, 32, 8, d, True) for d in (64, 96) for tokens in (2048, 4096, 8192, 16384, 32768)),
    *((1, tokens, 16, 4, 256, True) for tokens in (2048, 4096, 8192, 16384, 32768)),
]
SHORT = [(8, tokens, 32, 8, d, True) for d in (64, 96, 128, 256) for tokens in (512, 1024, 2048)]
LOOP_MS = 0.8
LIMIT = {"forward": 1e-2, "backward": 2e-2, "deterministic": 2e-2}

Shape = tuple[int, int, int, int, int, bool]


def forwards(shape: Shape, q: Any, k: Any, v: Any) -> dict[str, Callable[[], Any]]:
    """Return the forward calls by contestant."""
    batch, tokens, _, _, _, causal = shape
    calls: dict[str, Callable[[], Any]] = {"kvlab": lambda: kvlab.attention(q, k, v, causal=causal)}
    if batch == 8:
        cu = torch.arange(0, (batch + 1) * tokens, tokens, device="cuda", dtype=torch.int32)
        flat = [x.flatten(0, 1) for x in (q, k, v)]
        calls["kvlab variable length"] = lambda: kvlab.attention_varlen(
            *flat, cu, cu, tokens, tokens, causal=causal
        ).view(q.shape)
    return calls | {name: partial(peer, q, k, v, causal, False) for name, peer in peers("cuda").items()}


def backwards(shape: Shape, dout: Any, q: Any, k: Any, v: Any, deterministic: bool) -> dict[str, Any]:
    """Return the backward calls by contestant; torch cannot be asked for deterministic ones call by call."""
    causal = shape[-1]
    out, lse = kvlab.attention(q, k, v, causal=causal, return_lse=True)
    calls: dict[str, Any] = {
        "kvlab": lambda: kvlab.attention_backward(
            dout, q, k, v, out, lse, causal=causal, deterministic=deterministic
        )
    }
    for name, peer in peers("cuda").items():
        if deterministic and name != "fa4":
            continue
        try:
            calls[name] = backward_of(peer, dout, q, k, v, causal, deterministic)
        except (RuntimeError, AssertionError) as error:
            print(f"{name}: {str(error)[:90]}", flush=True)
    return calls


def checked(calls: dict[str, Any], limit: float) -> dict[str, Any]:
    """Return the calls that can be made, after a comparison of their results with kvlab's."""
    ours, found = calls["kvlab"](), {}
    for name, call in calls.items():
        try:
            theirs = call()
        except (RuntimeError, AssertionError) as error:
            print(f"{name}: {str(error)[:90]}", flush=True)
            continue
        pairs = zip(ours, theirs, strict=True) if isinstance(ours, tuple) else [(ours, theirs)]
        errors = [float((x.float() - y.float()).norm() / y.float().norm()) for x, y in pairs]
        if not max(errors) < limit:
            raise AssertionError(f"{name}: relative errors {errors}")
        found[name] = call
    return found


def measure(shape: Shape, direction: str) -> dict[str, float]:
    """Return TFLOPS by contestant."""
    batch, tokens, heads, heads_kv, d, causal = shape
    torch.manual_seed(0)
    q, k, v, dout = (
        torch.randn(batch, tokens, h, d, device="cuda", dtype=torch.bfloat16)
        for h in (heads, heads_kv, heads_kv, heads)
    )
    operations = 4 * batch * heads * tokens * tokens * d / (2 if causal else 1)
    if direction == "forward":
        calls = forwards(shape, q, k, v)
        want, got = exact(q, k, v, causal), calls["kvlab"]()[:1, :, :1].double()
        if not float((got - want).norm() / want.norm()) < 6e-3:
            raise AssertionError(f"kvlab {shape} is wrong")
    else:
        operations *= 2.5
        calls = backwards(shape, dout, q, k, v, direction == "deterministic")
    calls = checked(calls, LIMIT[direction])
    if d > 128:
        calls.pop("fa2", None)  # an order of magnitude slower than all others there
    reps = max(1, int(LOOP_MS / (operations / 4.5e11 + 0.01)))
    return {name: operations / ms / 1e9 for name, ms in times_ms(calls, reps).items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("output", type=Path)
    parser.add_argument("--only", choices=tuple(LIMIT))
    options = parser.parse_args()
    results: list[dict[str, Any]] = []
    clocks: dict[str, str] = {}
    provenance = about(clocks)
    for direction in (options.only,) if options.only else LIMIT:
        for shape in (*LONG, *SHORT):
            batch, tokens, heads, heads_kv, d, causal = shape
            case = f"{direction} d{d} {'causal' if causal else 'full'} {batch}x{tokens} {heads}/{heads_kv}"
            found = measure(shape, direction)
            best = max((x for name, x in found.items() if not name.startswith("kvlab")), default=0.0)
            results.append({"case": case, "tflops": found, "best peer": best})
            rates = ", ".join(f"{name} {x:.0f}" for name, x in found.items())
            ratio = f"{found['kvlab'] / best:.2f}" if best else "alone"
            print(f"{case}: {rates}: {ratio}", flush=True)
            clocks[case] = clocks_and_power()
            document = {"provenance": provenance, "results": results}
            options.output.write_text(json.dumps(document, indent=1) + "\n")
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()

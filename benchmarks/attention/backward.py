"""Attention backward on a GPU: time and TFLOPS beside torch's FlashAttention and cuDNN backends.

    python benchmarks/attention/backward.py OUT.json [--variants]

As run.py does it: contestants in turns within one loop, each checked against float64 on one head before it is
timed. TFLOPS count 10 * batch * heads * rows * keys * head_dim operations, half of them under a causal mask.
`--variants` times the portable kernel and the deterministic sum of dq too.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from run import BACKENDS, CASES, about, clocks_and_power, times_ms
from torch.nn.attention import sdpa_kernel

import kvlab
from kvlab.ops.cuda import attention_backward as launcher

Case = tuple[int, int, int, int, int, bool]
VARIANTS: dict[str, dict[str, Any]] = {
    "portable": {"HOPPER": False},
    "deterministic": {"deterministic": True},
}


def contestants(case: Case, variants: bool) -> dict[str, Any]:
    batch, tokens, heads, kv_heads, d, causal = case
    torch.manual_seed(0)
    q, k, v, dout = (
        torch.randn(batch, tokens, h, d, device="cuda", dtype=torch.bfloat16)
        for h in (heads, kv_heads, kv_heads, heads)
    )
    out, lse = kvlab.attention(q, k, v, causal=causal, return_lse=True)

    def ours(deterministic: bool = False, HOPPER: bool = True) -> Any:
        launcher.HOPPER = HOPPER
        return kvlab.attention_backward(dout, q, k, v, out, lse, causal=causal, deterministic=deterministic)

    def theirs(backend: Any) -> Any:
        leaves = [x.transpose(1, 2).detach().requires_grad_() for x in (q, k, v)]
        with sdpa_kernel(backend):
            result = torch.nn.functional.scaled_dot_product_attention(
                *leaves, is_causal=causal, enable_gqa=heads != kv_heads
            )
        above = dout.transpose(1, 2)
        return lambda: [
            x.transpose(1, 2) for x in torch.autograd.grad(result, leaves, above, retain_graph=True)
        ]

    calls: dict[str, Any] = {"kvlab": ours}
    for name, backend in BACKENDS.items():
        try:
            calls[name] = theirs(backend)
            calls[name]()
        except RuntimeError as error:
            print(f"{name}: {str(error)[:90]}", flush=True)
            calls.pop(name, None)
    if variants:
        calls |= {f"kvlab {name}": lambda o=options: ours(**o) for name, options in VARIANTS.items()}
    check(calls, exact(dout, q, k, v, causal), heads // kv_heads)
    return calls


def check(calls: dict[str, Any], want: list[torch.Tensor], group: int) -> None:
    for name, call in calls.items():
        for label, got, expected in zip(("dq", "dk", "dv"), call(), want, strict=True):
            part = got[0, :, :group] if label == "dq" else got[0, :, :1]
            error = float((part.double() - expected).norm() / expected.norm())
            if not error < 1e-2:
                raise AssertionError(f"{name}: {label} has a relative error of {error:.2e}")


def exact(
    dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool
) -> list[torch.Tensor]:
    """Gradients of the first KV head of the first row in float64, and of the query heads that read it."""
    b, c = k[0, :, 0].double(), v[0, :, 0].double()
    group, scale = q.shape[2] // k.shape[2], q.shape[3] ** -0.5
    dq = torch.empty_like(q[0, :, :group], dtype=torch.float64)
    dk, dv = torch.zeros_like(b), torch.zeros_like(c)
    for head in range(group):
        for start in range(0, len(b), 2048):
            a, above = (x[0, start : start + 2048, head].double() for x in (q, dout))
            scores = a @ b.T * scale
            if causal:
                rows = torch.arange(start, start + len(scores), device="cuda")
                scores.masked_fill_(torch.arange(len(b), device="cuda") > rows[:, None], -torch.inf)
            p = scores.softmax(-1)
            dp = above @ c.T
            ds = p * (dp - (p * dp).sum(-1, keepdim=True)) * scale
            dq[start : start + 2048, head] = ds @ b
            dk += ds.T @ a
            dv += p.T @ above
    return [dq, dk[:, None], dv[:, None]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("output", type=Path)
    parser.add_argument("--variants", action="store_true")
    parser.add_argument("--cases", default="", help="only those that contain this")
    options = parser.parse_args()
    results, clocks = [], {}
    for name, case in CASES.items():
        if options.cases not in name:
            continue
        batch, tokens, heads, _, d, causal = case
        operations = 10 * batch * heads * tokens * tokens * d / (2 if causal else 1)
        for contestant, ms in times_ms(contestants(case, options.variants), 5).items():
            row = {"case": name, "contestant": contestant, "ms": ms, "tflops": operations / ms / 1e9}
            results.append(row)
            print(f"{name:28s} {contestant:24s} {ms:8.3f} ms {row['tflops']:7.1f} TFLOPS", flush=True)
        clocks[name] = clocks_and_power()
    options.output.write_text(json.dumps({"provenance": about(clocks), "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()

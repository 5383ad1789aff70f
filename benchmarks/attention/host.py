"""Time that a call of attention takes the host, beside torch's SDPA, forward and with gradients by autograd.

    python benchmarks/attention/host.py OUT.json [--turns N] [--before CHECKOUT]

A call has 128 tokens, 32 query heads on 8 of 128 channels, bfloat16, causal: the GPU is done before the host
comes with the next one. Calls take turns of 40 in a row. Of the turns the median counts, and the least, for
other work on the host makes single turns slower. "one" is torch.autograd.set_multithreading_enabled(False),
where gradients need no other thread to wake up; "flash" has as many KV heads as query heads, since torch's
FlashAttention takes no fewer. With --before another checkout is measured, too: by this script in two
processes, which take turns.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import kvlab
from kvlab.integrations import torch_autograd, torch_grouped
from kvlab.integrations.flash_attn import flash_attn_func
from kvlab.lab.benchmark import harness

Call = Callable[[], Any]
TOKENS, HEADS, HEADS_KV, DIM, IN_A_ROW = 128, 32, 8, 128, 40
THREADS = "one", "default"
sdpa = partial(torch.nn.functional.scaled_dot_product_attention, is_causal=True, enable_gqa=True)


class Empty(torch.autograd.Function):
    """Computes nothing: what autograd itself takes."""

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        ctx.gradients = k.detach(), v.detach()
        return torch.empty_like(q)

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return dout, *ctx.gradients


def calls() -> dict[str, Call]:
    """Return calls by name."""
    new = partial(torch.randn, device="cuda", dtype=torch.bfloat16)
    q, k, v = (new(1, TOKENS, heads, DIM, requires_grad=True) for heads in (HEADS, HEADS_KV, HEADS_KV))
    plain = [x.detach() for x in (q, k, v)]
    turned = [x.transpose(1, 2).requires_grad_() for x in plain]
    plain_turned, equal = [x.detach() for x in turned], [torch.randn_like(turned[0]) for _ in "qkv"]
    equal = [x.requires_grad_() for x in equal]
    flat = [x[0].clone().requires_grad_() for x in plain]
    plain_flat = [x.detach() for x in flat]
    groups = [new(TOKENS // 2, HEADS, DIM, requires_grad=True) for _ in "ab"]
    numbers = partial(torch.tensor, device="cuda", dtype=torch.int32)
    bounds, rows, prefix = numbers([0, TOKENS]), numbers([0, TOKENS // 2]), numbers([TOKENS])
    dout = torch.randn_like(q)
    lengths = bounds, bounds, TOKENS, TOKENS
    grouped = partial(
        torch_grouped.grouped_attention_varlen, groups, *flat[1:], cu_seqlens_q_groups=[rows] * 2,
        cu_seqlens_k=bounds, prefix_lens=[prefix] * 2, max_seqlen_q=TOKENS // 2, max_seqlen_k=TOKENS,
    )  # fmt: skip
    douts = [torch.randn_like(x) for x in groups]

    def both(function: Callable[..., Any], inputs: list[torch.Tensor], above: Any) -> Call:
        return lambda: torch.autograd.grad(function(*inputs), inputs, above)

    def by(backend: SDPBackend, inputs: list[torch.Tensor]) -> Call:
        function = partial(sdpa, enable_gqa=inputs is turned)
        call = both(function, inputs, dout.transpose(1, 2))

        def run() -> None:
            with sdpa_kernel(backend):
                for _ in range(IN_A_ROW):
                    call()

        run.in_a_row = IN_A_ROW  # type: ignore[attr-defined]
        return run

    recorded = partial(torch_autograd.attention, causal=True)
    return {
        "kvlab": lambda: kvlab.attention(*plain, causal=True),
        "kvlab with lse": lambda: kvlab.attention(*plain, causal=True, return_lse=True),
        "kvlab, variable length": lambda: kvlab.attention_varlen(*plain_flat, *lengths, causal=True),
        "SDPA": lambda: sdpa(*plain_turned),
        "kvlab, recorded": lambda: recorded(q, k, v),
        "SDPA, recorded": lambda: sdpa(*turned),
        "kvlab and gradients": both(recorded, [q, k, v], dout),
        "SDPA and gradients": both(sdpa, turned, dout.transpose(1, 2)),
        "SDPA and gradients, cuDNN": by(SDPBackend.CUDNN_ATTENTION, turned),
        "SDPA and gradients, flash": by(SDPBackend.FLASH_ATTENTION, equal),
        "flash_attn_func and gradients": both(partial(flash_attn_func, causal=True), [q, k, v], dout),
        "kvlab, variable length, and gradients": both(
            lambda *x: torch_autograd.attention_varlen(*x, *lengths, causal=True), flat, dout[0]
        ),
        "kvlab, two groups, and gradients": lambda: torch.autograd.grad(
            grouped(), (*groups, *flat[1:]), douts
        ),
        "nothing and gradients": both(Empty.apply, [q, k, v], dout),
    }


def turn(call: Call) -> float:
    """Return microseconds of a call in a turn."""
    torch.cuda.synchronize()
    times = 1 if hasattr(call, "in_a_row") else IN_A_ROW
    start = time.perf_counter_ns()
    for _ in range(times):
        call()
    return (time.perf_counter_ns() - start) / IN_A_ROW / 1e3


def turns(made: dict[str, Call], threads: str) -> dict[str, float]:
    """Return microseconds of all calls in a turn."""
    with torch.autograd.set_multithreading_enabled(threads == "default"):
        return {name: turn(call) for name, call in made.items()}


def measure(number: int) -> Iterator[dict[str, Any]]:
    made = calls()
    for threads in THREADS:
        turns(made, threads)
        yield from _rows([turns(made, threads) for _ in range(number)], threads=threads)


def _rows(found: list[dict[str, float]], **of_all: str) -> Iterator[dict[str, Any]]:
    for name in found[0]:
        times = sorted(each[name] for each in found)
        yield {**of_all, "call": name, "host_us": times[len(times) // 2], "least_us": times[0]}


def serve() -> int:
    """Measure the calls that both checkouts have once for each line on stdin, which names the threads."""
    made = {name: call for name, call in calls().items() if not hasattr(call, "in_a_row")}
    for line in sys.stdin:
        print(json.dumps(turns(made, json.loads(line))), flush=True)
    return 0


def measure_both(before: Path, number: int) -> Iterator[dict[str, Any]]:
    """Measure in a process for each checkout, in turns; medians of ratios to SDPA come last."""
    from kvlab.lab.benchmark.versions import ask_in_turns

    folders = {"now": Path(__file__).parents[2], "before": before}
    questions = [*product(THREADS, folders)]
    found = ask_in_turns(__file__, folders, questions, number, arguments=["--serve"], kernels="cuda")
    for (threads, code), each in found.items():
        yield from _rows(each, threads=threads, code=code)
    for (threads, code), each in found.items():
        ratios = sorted(x["kvlab and gradients"] / x["SDPA and gradients"] for x in each)
        yield {"threads": threads, "code": code, "gradients_of_sdpa": ratios[len(ratios) // 2]}


def cases(given: argparse.Namespace) -> list[harness.Case]:
    if given.before:
        return [harness.Case("both in turns", partial(measure_both, given.before, given.turns))]
    return [harness.Case("all calls in turns", partial(measure, given.turns))]


def main() -> int:
    if sys.argv[1:] == ["--serve"]:
        return serve()
    parser = harness.options(__doc__)
    parser.add_argument("--turns", type=int, default=30)
    parser.add_argument("--before", type=Path, help="another checkout, to time it, too")
    return harness.run(parser, cases, cudnn=torch.backends.cudnn.version())


if __name__ == "__main__":
    raise SystemExit(main())

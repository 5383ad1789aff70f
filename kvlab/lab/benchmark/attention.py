"""`kvlab benchmark attention`: forward and backward beside torch's, by length, heads and batch.

Three sweeps through one point (512 tokens, 8 query heads on 4 KV heads, batch 1): lengths, pairs of heads,
batches, causal, 64 channels on the CPU and 128 on a GPU; and four other calls of 2,048 tokens, with and
without a mask. The baseline is torch's `scaled_dot_product_attention` on the same tensors: on the CPU with as
many threads, in float32; on a GPU in bfloat16 with its cuDNN and its FlashAttention 2, of which the faster
one counts. FlashAttention 4, if it is installed, stands in the same loop. Contestants take turns, on a GPU in
loops of a millisecond, and are called as a caller would call them: where a GPU waits for the host, the host's
time is measured. Short sequences on a GPU also stand beside kvlab on the CPU.

FLOPS count 4 * batch * heads * head_dim * (pairs of a row and a key it sees), 2.5 times as many backward.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import kvlab
from kvlab.errors import needs_extra
from kvlab.lab.benchmark.attention_peers import backward_of, peers
from kvlab.lab.benchmark.baseline import Options, check
from kvlab.lab.results import Row
from kvlab.lab.timing import limited_threads, time_in_turns
from kvlab.lab.timing_gpu import time_by_events

__all__ = ["CASES", "NOTE", "Case", "benchmark_attention", "flops", "release_cases"]

NOTE = (
    "speedup: median over turns of the time of torch's attention, its faster backend on a GPU; cudnn, fa2, "
    "fa4: times of cuDNN, FlashAttention 2 and 4; times cpu: of kvlab on the CPU"
)


class Case(NamedTuple):
    """Shape of a call with as many queries as keys; `head_dim` None: 64 on the CPU, 128 on a GPU."""

    tokens: int
    heads: tuple[int, int]
    batch: int
    head_dim: int | None = None
    causal: bool = True


_POINT = Case(512, (8, 4), 1)
_LENGTHS = (64, 128, 256, 512, 1024, 2048)
_HEADS = ((4, 4), (8, 4), (8, 1), (32, 8), (64, 8))
_OTHERS = (
    Case(2048, (8, 8), 1, 64, causal=False), Case(2048, (8, 8), 1, 64),
    Case(2048, (8, 8), 1, 128, causal=False), Case(2048, (8, 2), 1, 128),
)  # fmt: skip
_ON_GPU = ("cudnn", "fa2", "fa4")
_LOOP_SECONDS = 1e-3
_LONGEST = {"cpu": 8192, "cuda": 131_072}
_BESIDE_CPU = 2048  # tokens up to which a GPU stands beside the CPU

CASES = tuple(
    dict.fromkeys(
        [
            *(_POINT._replace(tokens=tokens) for tokens in _LENGTHS),
            *(_POINT._replace(heads=heads) for heads in _HEADS),
            *(_POINT._replace(batch=batch) for batch in (1, 2, 4, 8)),
            *_OTHERS,
        ]
    )
)
TINY_CASES = (Case(64, (4, 2), 1),)


def release_cases(device: str) -> tuple[Case, ...]:
    """Return the cases and lengths up to 8K on the CPU, 128K on a GPU.

    Examples
    --------
    >>> [case.tokens for case in release_cases("cpu")[len(CASES):]]
    [4096, 8192]
    """
    tokens, longer = 2 * _LENGTHS[-1], []
    while tokens <= _LONGEST[device]:
        longer.append(_POINT._replace(tokens=tokens))
        tokens *= 2
    return CASES + tuple(longer)


def flops(case: Case, head_dim: int, backward: bool) -> float:
    """Return the operations of a call.

    Examples
    --------
    >>> flops(Case(2, (1, 1), 1), 1, backward=False)
    12.0
    >>> flops(Case(2, (1, 1), 1, causal=False), 1, backward=True)
    40.0
    """
    seen = case.tokens * (case.tokens + 1) / 2 if case.causal else case.tokens**2
    return 4.0 * case.batch * case.heads[0] * head_dim * seen * (2.5 if backward else 1.0)


def benchmark_attention(options: Options) -> list[Row]:
    """Time every case, forward and backward.

    Of the options `threads`, `repeats`, `device` and `release` count. A row has ``tokens``, ``heads``,
    ``batch``, ``head_dim``, ``causal``, ``direction``; ``ms``, ``p5_ms``, ``p95_ms``; ``tflops``;
    ``torch_ms``, ``speedup``; on a GPU ``cudnn_ms``, ``fa2_ms`` and ``fa4_ms``, None where one does not take
    the call or is not installed; ``times_cpu``, None but on a GPU and for short sequences.
    """
    with needs_extra("hf", "kvlab benchmark attention"):
        import torch  # noqa: F401

    cases = TINY_CASES if options.tiny else release_cases(options.device) if options.release else CASES
    with limited_threads(options.threads):
        return [_measure(case, backward, options) for case in cases for backward in (False, True)]


def _measure(case: Case, backward: bool, options: Options) -> Row:
    on_gpu = options.device == "cuda"
    head_dim = case.head_dim or (128 if on_gpu else 64)
    calls = _contestants(case, head_dim, backward, options.device)
    timings = (
        time_by_events(calls, repeats=options.repeats, seconds=_LOOP_SECONDS)
        if on_gpu
        else time_in_turns(calls, repeats=options.repeats)
    )
    ours = timings.pop("kvlab")
    best = min((timings[name] for name in timings if name != "fa4"), key=lambda timing: timing.median)
    peers_ms = {f"{name}_ms": 1e3 * timings[name].median if name in timings else None for name in _ON_GPU}
    times_cpu = None
    if on_gpu and case.tokens <= _BESIDE_CPU:
        alone = {"kvlab": _contestants(case, head_dim, backward, "cpu")["kvlab"]}
        cpu = time_in_turns(alone, repeats=min(options.repeats, 3), warm_up=1)["kvlab"]
        times_cpu = cpu.median / ours.median
    return {
        "tokens": case.tokens,
        "heads": f"{case.heads[0]}/{case.heads[1]}",
        "batch": case.batch,
        "head_dim": head_dim,
        "causal": case.causal,
        "direction": "backward" if backward else "forward",
        **ours.milliseconds(),
        "tflops": flops(case, head_dim, backward) / ours.median / 1e12,
        "torch_ms": 1e3 * best.median,
        "speedup": ours.ratio_to(best),
        **(peers_ms if on_gpu else {}),
        "times_cpu": times_cpu,
    }


def _contestants(case: Case, head_dim: int, backward: bool, device: str) -> dict[str, Callable[[], object]]:
    """What is timed, by name, after its results have been compared."""
    import torch

    torch.manual_seed(0)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    q, k, v, dout = (
        torch.randn(case.batch, case.tokens, heads, head_dim, dtype=dtype, device=device)
        for heads in (*case.heads, case.heads[1], case.heads[0])
    )
    causal = case.causal
    out, lse = kvlab.attention(q, k, v, causal=causal, return_lse=True)
    calls: dict[str, Callable[[], object]] = {"kvlab": lambda: kvlab.attention(q, k, v, causal=causal)}
    if backward:
        calls["kvlab"] = lambda: kvlab.attention_backward(dout, q, k, v, out, lse, causal=causal)
    ours: Any = calls["kvlab"]() if backward else (out,)
    for name, peer in peers(device).items():
        call: Callable[[], Any] = partial(peer, q, k, v, causal, False)
        try:
            if backward:
                call = backward_of(peer, dout, q, k, v, causal)
            theirs = call()
        except (RuntimeError, AssertionError):  # it does not take the call
            continue
        limit = 1e-4 if device == "cpu" else 0.03
        for got, want in zip(ours, theirs if backward else (theirs,), strict=True):
            error = (got.float() - want.float()).abs().max() / want.float().abs().max()
            check(bool(error < limit), f"{case}, backward={backward}, beside {name},")
        calls[name] = call
    return calls

"""How much of its ranks' speed attention over them keeps.

    torchrun --nproc_per_node=N -m kvlab.parallel.benchmark

Every rank holds the same number of tokens. A *share* is the time of the whole attention on one device, while
all ranks are busy with it, over ranks times the time of all ranks together: 1 is N times the speed of one.
*Hidden* is the part of the time of all gathers alone by which the forward is not longer than without
communication. Times are those of the slowest rank, medians of rounds in which contestants take turns.
ring-flash-attn runs beside, over kvlab's attention, where it is installed.

``--model`` computes instead what `step_seconds` says of larger groups.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import json
import statistics
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from kvlab import parallel
from kvlab.lab.results import provenance
from kvlab.ops.attention import attention_varlen
from kvlab.ops.attention_backward import attention_varlen_backward
from kvlab.parallel.collectives import Pending, largest, on_device, process_group, random_inputs
from kvlab.parallel.functions import NO_WINDOW
from kvlab.parallel.gathered import GatheredAttention
from kvlab.parallel.layout import Shard, zigzag_llama3_plan
from kvlab.parallel.parts import Options

__all__ = ["SETS", "lengths_of", "main", "step_seconds"]

SETS: dict[str, tuple[tuple[float, ...], ...]] = {
    "fixed": ((1.0,),),
    "variable": ((1.0,), (0.5, 0.5), (0.7, 0.2, 0.1), (0.25, 0.25, 0.25, 0.25)),
}
"""Patterns of the lengths of sequences, as parts of all tokens."""


def lengths_of(pattern: tuple[float, ...], tokens: int, ranks: int) -> tuple[int, ...]:
    """Return lengths of sequences that fit the pattern and can be cut for zigzag ranks.

    Examples
    --------
    >>> lengths_of((0.7, 0.2, 0.1), 1024, 2)
    (1432, 408, 208)
    """
    total, unit = tokens * ranks, 2 * ranks
    found = [int(part * total) // unit * unit for part in pattern[:-1]]
    return (*found, total // unit * unit - sum(found))


def step_seconds(
    ranks: int,
    tokens: int,
    *,
    heads: int = 32,
    heads_kv: int = 8,
    head_dim: int = 128,
    strides: int = 2,
    tflops: float = 700.0,
    backward_tflops: float = 600.0,
    gbytes: float = 290.0,
    backward: bool = False,
) -> tuple[float, float]:
    """Return the time of a causal zigzag-llama3 step, and its share of the ranks' speed, by a model.

    A stride of heads is computed while the keys of the next are gathered; the first gather hides behind a
    rank's own keys, 1 / (2 ranks) of a stride's work. The backward computes 2.5 times as much, gathers again,
    and sends gradients in float32, twice the bytes of keys, the last of them behind all work.

    Parameters
    ----------
    ranks, tokens : int
        Tokens of a rank.
    heads, heads_kv, head_dim : int
    strides : int
        Gathers of a step.
    tflops, backward_tflops : float
        Rates of one device's attention, measured there (10^12 operations a second).
    gbytes : float
        Bus bandwidth of a gather of a rank, measured there (10^9 bytes a second).
    backward : bool
        Forward and backward instead of forward.

    Examples
    --------
    >>> seconds, share = step_seconds(2, 8192)
    >>> round(1e3 * seconds, 2), round(share, 2)
    (1.57, 1.0)
    """
    total = tokens * ranks
    work = 4 * heads * head_dim * total * total / 2 / ranks / (tflops * 1e12)
    gather = 4 * heads_kv * head_dim * total * (ranks - 1) / ranks / (gbytes * 1e9)

    def overlapped(work: float, sent: float) -> float:
        """Seconds of strides whose transfers run beside the work of the stride before."""
        first = max(sent / strides - work / strides / (2 * ranks), 0.0)
        return first + work + max(sent - work, 0.0) * (strides - 1) / strides

    seconds = overlapped(work, gather)
    if backward:
        behind = 2.5 * work * tflops / backward_tflops
        seconds += overlapped(behind, 3 * gather) + 2 * gather / strides
        work += behind
    return seconds, work / seconds


class _Silent(GatheredAttention):
    """The forward of a call whose keys of other ranks are there before it begins."""

    def _gather_one(self, x: Any) -> list[Pending]:
        rows = sum(len(x[part]) for part in self.plan.sends) * self.world_size
        return [Pending(x.new_zeros(rows, *x.shape[1:]), (), "", None)]


class _Case:
    """One pattern of lengths on this rank, and what is timed of it."""

    def __init__(
        self, lengths: tuple[int, ...], options: argparse.Namespace, rank: int, ranks: int, device: str
    ):
        heads_q, heads_kv = options.heads
        shapes = [(sum(lengths), heads, options.head_dim) for heads in (heads_q, heads_kv, heads_kv, heads_q)]
        whole = random_inputs(shapes, options.dtype, device)
        self.shard, self.options = Shard(lengths, rank, ranks), options
        self.cu = Shard(lengths, 0, 1, zigzag=False).cu_seqlens
        self.longest = max(lengths)
        *mine, self.dout = (parallel.extract_local(x, self.cu) for x in whole)
        self.mine, self.whole = [x.requires_grad_() for x in mine], whole
        self.plan = zigzag_llama3_plan(self.shard, True)
        self.device = device

    def together(self) -> Any:
        """Attention over all ranks."""
        size, (q, k, v) = self.shard.world_size, self.mine
        return parallel.zigzag_llama3_flash_attn_varlen_func(
            q, k, v, self.cu // size, self.cu, self.longest // size, self.longest, self.options.stride,
            causal=True, implementation=self.options.implementation,
        )  # fmt: skip

    def one_device(self, *, backward: bool) -> None:
        """The whole attention on this device."""
        q, k, v, dout = self.whole
        bounds = on_device(self.cu, q)
        sizes = (bounds, bounds, self.longest, self.longest)
        out, lse = attention_varlen(q, k, v, *sizes, causal=True, return_lse=True)
        if backward:
            attention_varlen_backward(dout, q, k, v, out, lse, *sizes, causal=True)

    def silent(self) -> None:
        """The forward without communication."""
        options = Options(None, NO_WINDOW, False, self.options.implementation)
        q, k, v = (x.detach() for x in self.mine)
        _Silent(self.plan, None, self.shard.world_size, self.options.stride, options).forward(q, k, v)

    def gathers(self) -> None:
        """All gathers of a forward, and nothing else."""
        call = GatheredAttention(
            self.plan, None, self.shard.world_size, self.options.stride, Options(None, NO_WINDOW, False)
        )
        k, v = (x.detach() for x in self.mine[1:])
        for first in range(0, k.shape[1], self.options.stride):
            for x in (k, v):
                for one in call._gather_one(x[:, first : first + self.options.stride]):
                    one.wait()

    def calls(self) -> dict[str, Callable[[], Any]]:
        """What is timed, by name."""
        found: dict[str, Callable[[], Any]] = {
            "one device, forward": lambda: self.one_device(backward=False),
            "one device, both": lambda: self.one_device(backward=True),
            "forward": lambda: self.together().detach(),
            "both": lambda: torch.autograd.grad(self.together(), self.mine, self.dout),
            "forward without communication": self.silent,
            "gathers alone": self.gathers,
        }
        peer = importlib.util.find_spec("ring_flash_attn") and len(self.shard.lengths) == 1
        if peer and self.shard.world_size > 1:
            attend, batched = _ring_flash_attn(), [x.detach()[None].requires_grad_() for x in self.mine]
            found["ring-flash-attn, forward"] = lambda: attend(*batched, causal=True).detach()
            found["ring-flash-attn, both"] = lambda: torch.autograd.grad(
                attend(*batched, causal=True), batched, self.dout[None]
            )
        return found


def _ring_flash_attn() -> Any:
    """ring-flash-attn's zigzag ring over kvlab's attention."""
    from transformers import modeling_flash_attention_utils as utils

    from kvlab.integrations import flash_attn

    flash_attn.install()
    # transformers has dropped a name that ring-flash-attn 0.1.8 imports for an adapter that is not used here.
    utils.__dict__.setdefault("is_flash_attn_greater_or_equal_2_10", None)
    return import_module("ring_flash_attn").zigzag_ring_flash_attn_func


def _seconds(call: Callable[[], Any], device: str, least: float) -> float:
    """Time of a call on the slowest rank, in a loop of at least so many seconds."""

    def wait() -> None:
        if device.startswith("cuda"):
            torch.cuda.synchronize()

    times = 1
    while True:
        dist.barrier()
        wait()
        start = time.perf_counter()
        for _ in range(times):
            call()
        wait()
        seconds = largest([time.perf_counter() - start], device)[0]
        if seconds >= least:
            return seconds / times
        times = max(2 * times, int(1.2 * least / seconds * times))


def _measure(case: _Case, repeats: int, least: float) -> dict[str, float]:
    """Median milliseconds by name, and shares."""
    calls, rounds = case.calls(), []
    for call in calls.values():
        call()
    for _ in range(repeats):
        rounds.append({name: _seconds(call, case.device, least) for name, call in calls.items()})
    median = {name: statistics.median(one[name] for one in rounds) for name in calls}
    ranks = case.shard.world_size
    found = {f"{name}, ms": 1e3 * seconds for name, seconds in median.items()}
    for what in ("forward", "both"):
        for name in (what, f"ring-flash-attn, {what}"):
            if name in median:
                found[f"{name}, share"] = median[f"one device, {what}"] / ranks / median[name]
    if ranks > 1:
        longer = median["forward"] - median["forward without communication"]
        found["hidden"] = 1 - longer / median["gathers alone"]
    return found


def _print_model(options: argparse.Namespace) -> None:
    heads_q, heads_kv = options.heads
    rates = f"{options.tflops} and {options.backward_tflops} TFLOPS a device, {options.gbytes} GB/s a gather"
    print(f"by the model, {rates}, {heads_q} heads on {heads_kv}:")
    for tokens in options.tokens:
        for ranks in (2, 4, 8, 64, 512):
            shares = []
            for backward in (False, True):
                seconds, share = step_seconds(
                    ranks, tokens, heads=heads_q, heads_kv=heads_kv, head_dim=options.head_dim,
                    strides=-(-heads_kv // options.stride), tflops=options.tflops,
                    backward_tflops=options.backward_tflops, gbytes=options.gbytes,
                    backward=backward,
                )  # fmt: skip
                shares.append(
                    f"{'both' if backward else 'forward'} {1e3 * seconds:.2f} ms, share {share:.2f}"
                )
            print(f"{tokens} tokens on each of {ranks} ranks: {'; '.join(shares)}")


def _positive(text: str) -> int:
    """A whole number from 1 on, for argparse, which names the option."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is not supported: it must be 1 or more")
    return number


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark from a shell."""
    parser = argparse.ArgumentParser(
        prog="python -m kvlab.parallel.benchmark",
        description="Time zigzag-llama3 over ranks beside one device, no communication, and peers.",
        epilog="example: torchrun --nproc_per_node=2 -m kvlab.parallel.benchmark --output cp.json",
    )
    parser.add_argument(
        "--tokens", type=_positive, nargs="+", default=(8192, 16384), help="tokens of a rank (8192 16384)"
    )
    parser.add_argument("--sets", choices=sorted(SETS), nargs="+", default=("fixed",), help="lengths (fixed)")
    parser.add_argument("--heads", type=_positive, nargs=2, default=(32, 8), help="query and KV heads (32 8)")
    parser.add_argument("--head-dim", type=_positive, default=128, help="channels of a head (128)")
    parser.add_argument("--stride", type=_positive, default=4, help="KV heads that are gathered at once (4)")
    parser.add_argument("--implementation", choices=("separate", "listed", "paired"), help="see the function")
    parser.add_argument(
        "--dtype", choices=("float32", "float16", "bfloat16"), help="bfloat16 on GPUs, else float32"
    )
    parser.add_argument("--repeats", type=_positive, default=3, help="rounds (3)")
    parser.add_argument("--seconds", type=float, default=0.2, help="of a loop, at least (0.2)")
    parser.add_argument(
        "--timeout", type=float, default=120, help="seconds until a silent rank ends all (120)"
    )
    parser.add_argument("--output", type=Path, help="write the results to this JSON file")
    parser.add_argument(
        "--model", action="store_true", help="compute larger groups by the model; needs no ranks"
    )
    parser.add_argument(
        "--tflops", type=float, default=700.0, help="of one device's forward, for --model (700)"
    )
    parser.add_argument(
        "--backward-tflops", type=float, default=600.0, help="of its backward, for --model (600)"
    )
    parser.add_argument("--gbytes", type=float, default=290.0, help="bus GB/s of a gather, for --model (290)")
    options = parser.parse_args(arguments)
    heads_q, heads_kv = options.heads
    if heads_q % heads_kv:
        parser.error(f"--heads {heads_q} {heads_kv}: query heads must be a multiple of KV heads")
    if options.stride > heads_kv:
        parser.error(f"--stride {options.stride}: there are {heads_kv} KV heads to gather")
    for tokens in options.tokens:
        if tokens % 8:
            parser.error(f"--tokens {tokens}: a rank's tokens must be a multiple of 8")
    if options.model:
        _print_model(options)
        return 0
    results: list[dict[str, Any]] = []
    with process_group(datetime.timedelta(seconds=options.timeout)) as (rank, ranks, device):
        options.dtype = options.dtype or ("bfloat16" if device.startswith("cuda") else "float32")
        for tokens in options.tokens:
            for pattern in (pattern for name in options.sets for pattern in SETS[name]):
                lengths = lengths_of(pattern, tokens, ranks)
                found = _measure(
                    _Case(lengths, options, rank, ranks, device), options.repeats, options.seconds
                )
                results.append({"ranks": ranks, "lengths": lengths, **found})
                if rank == 0:
                    print(f"{ranks} ranks, sequences of {', '.join(map(str, lengths))} tokens:")
                    print(
                        "".join(f"  {name}: {value:.3g}\n" for name, value in found.items()),
                        end="",
                        flush=True,
                    )
        if rank == 0 and options.output:
            document = {"provenance": provenance(), "results": results}
            options.output.write_text(json.dumps(document, indent=1) + "\n")
    return 0

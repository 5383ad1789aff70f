"""The parallel efficiency of attention over several ranks, and how much communication is hidden.

    torchrun --nproc_per_node=N -m kvlab.parallel.benchmark

Every rank holds the same number of tokens. *Efficiency* is t(1) / (N t(N)): t(1) is the time of the whole
attention on one device, while all ranks are busy with it, t(N) that of N ranks together. 1 is N times the
speed of one.

*Hidden* is the part of the communication that costs no time: 1 - (time of the forward less its time without
communication) / (time of all gathers alone). On GPUs it is measured by their own clocks, without the host, as
the median of many differences, with its standard error. All other times are those of loops, the host's part
among them. Times are those of the slowest rank, medians of rounds in which contestants take turns.

On GPUs torch's context_parallel over cuDNN runs beside them and, where it is installed, ring-flash-attn over
kvlab's attention.

``--model`` computes instead what `step_seconds` says of larger groups.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from kvlab.arguments import positive
from kvlab.lab.benchmark.context_parallel_calls import PEERS, Case, Contestant
from kvlab.lab.results import provenance
from kvlab.parallel.collectives import largest, process_group

__all__ = ["SETS", "lengths_of", "main", "step_seconds"]

SETS: dict[str, tuple[tuple[int, ...], ...]] = {
    "fixed": ((8192,),),
    "variable": ((8192,), (256, 7392, 544), (4096, 4096), (3104, 3200, 1600, 160, 128)),
}
"""Patterns of the lengths of sequences, as they add up to 8192; the variable ones are ring-flash-attn's."""


def lengths_of(pattern: tuple[int, ...], tokens: int, ranks: int) -> tuple[int, ...]:
    """Return lengths of sequences that fit the pattern and can be cut for zigzag ranks.

    Examples
    --------
    >>> lengths_of((256, 7392, 544), 1024, 2)
    (64, 1848, 136)
    """
    total, unit = tokens * ranks, 2 * ranks
    found = [part * total // sum(pattern) // unit * unit for part in pattern[:-1]]
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
    """Return the time of a causal zigzag-llama3 step, and its parallel efficiency, by a model.

    A stride of heads is computed while the keys of the next are gathered; the first gather hides behind a
    rank's own keys, 1 / ranks of a stride's work. The backward computes 2.5 times as much, gathers again, and
    sends gradients in float32, twice the bytes of keys, the last of them behind a stride's own keys.

    A rank has so many tokens, and a step gathers in so many strides. The rates of one device's attention
    (10^12 operations a second) and the bus bandwidth of a gather of a rank (10^9 bytes a second) are to be
    measured there.

    Examples
    --------
    >>> seconds, efficiency = step_seconds(2, 8192)
    >>> round(1e3 * seconds, 2), round(efficiency, 2)
    (1.57, 1.0)
    """
    total = tokens * ranks
    work = 4 * heads * head_dim * total * total / 2 / ranks / (tflops * 1e12)
    gather = 4 * heads_kv * head_dim * total * (ranks - 1) / ranks / (gbytes * 1e9)

    def overlapped(work: float, sent: float) -> float:
        """Seconds of strides whose transfers run beside the work of the stride before."""
        first = max(sent / strides - work / strides / ranks, 0.0)
        return first + work + max(sent - work, 0.0) * (strides - 1) / strides

    seconds = overlapped(work, gather)
    if backward:
        behind = 2.5 * work * tflops / backward_tflops
        last = max(2 * gather / strides - behind / strides / ranks, 0.0)
        seconds += overlapped(behind, 3 * gather) + last
        work += behind
    return seconds, work / seconds


@contextmanager
def _clock(device: str, host: float) -> Iterator[list[float]]:
    """Time what is put on the current stream, without the host, which takes so many seconds for it."""
    found: list[float] = []
    if not device.startswith("cuda"):
        start = time.perf_counter()
        yield found
        found.append(time.perf_counter() - start)
        return
    cuda: Any = torch.cuda
    begin, end = (cuda.Event(enable_timing=True) for _ in range(2))
    cuda._sleep(int(2e9 * host))
    begin.record()
    yield found
    end.record()
    cuda.synchronize()
    found.append(begin.elapsed_time(end) / 1e3)


class _Timer:
    """Times of calls on the slowest rank; a loop takes `min_seconds` at least."""

    def __init__(self, device: str, min_seconds: float) -> None:
        self.device, self.min_seconds = device, min_seconds
        self._times: dict[str, int] = {}  # calls of a loop

    def seconds(self, name: str, contestant: Contestant) -> tuple[float, float]:
        """Seconds of a call in a loop, and those that the host takes for it."""
        with contestant.context():
            return self._seconds(name, contestant.call)

    def _seconds(self, name: str, call: Callable[[], Any]) -> tuple[float, float]:
        while True:
            times = self._times.setdefault(name, 1)
            dist.barrier()
            self._wait()
            start = time.perf_counter()
            for _ in range(times):
                call()
            host = time.perf_counter() - start
            self._wait()
            seconds, host = largest([time.perf_counter() - start, host], self.device)
            if seconds >= 0.8 * self.min_seconds:
                return seconds / times, host / times
            self._times[name] = max(2 * times, int(1.2 * self.min_seconds / seconds * times))

    def device_seconds(self, call: Callable[[], Any], host: float, times: int = 8) -> float:
        """Seconds of a call on the device, for which the host takes so many."""
        dist.barrier()
        self._wait()
        with _clock(self.device, 1.5 * times * host) as found:
            for _ in range(times):
                call()
        return largest(found, self.device)[0] / times

    def _wait(self) -> None:
        if self.device.startswith("cuda"):
            torch.cuda.synchronize()


def _measure(case: Case, repeats: int, min_seconds: float) -> dict[str, float]:
    """Median milliseconds by name, efficiencies, and how much of the gathers is hidden."""
    calls, rounds, timer = case.calls(), [], _Timer(case.device, min_seconds)
    for contestant in calls.values():
        with contestant.context():
            contestant.call()
    turns = list(calls.items())
    for _ in range(repeats):  # back and forth, as a chip that is hot from the one before is slower
        rounds.append({name: timer.seconds(name, one) for name, one in turns})
        turns.reverse()
    found: dict[str, float] = {}
    for name in calls:
        for n, what in enumerate(("", ", host")):
            found[f"{name}{what}, ms"] = 1e3 * statistics.median(one[name][n] for one in rounds)
    if case.shard.world_size > 1:
        found |= _hidden(timer, calls, found, 3 * repeats)
    return found | _efficiencies([found], case.shard.world_size)


def _hidden(
    timer: _Timer, calls: dict[str, Contestant], found: dict[str, float], rounds: int
) -> dict[str, float]:
    """How much of the time of gathers does not make a forward longer."""
    names = "forward", "forward without communication", "gathers alone"
    times: dict[str, list[float]] = {name: [] for name in names}
    for n in range(rounds):
        for name in names if n % 2 else names[::-1]:
            host = found[f"{name}, host, ms"] / 1e3
            times[name].append(1e3 * timer.device_seconds(calls[name].call, host))
    alone, without = (statistics.median(times[name]) for name in names[:0:-1])
    longer = [one - other for one, other in zip(times[names[0]], times[names[1]], strict=True)]
    middle = statistics.median(longer)
    # The standard error of a median is 1.25 times that of a mean; the deviation is that of the middle half.
    deviation = 1.48 * statistics.median(abs(one - middle) for one in longer)
    return {
        "forward without communication, device, ms": without,
        "gathers alone, device, ms": alone,
        "longer by communication, device, ms": middle,
        "hidden": 1 - middle / alone,
        "hidden, error": 1.25 * deviation / rounds**0.5 / alone,
    }


def _efficiencies(cases: list[dict[str, float]], ranks: int) -> dict[str, float]:
    """Of several cases together: how much of the speed of so many devices each contestant keeps."""
    found = {}
    for what in ("forward", "both"):
        for peer in ("", *(f"{peer}, " for peer in PEERS)):
            name = f"{peer}{what}, ms"
            if all(name in case for case in cases):
                one = sum(case[f"one device, {what}, ms"] for case in cases)
                found[f"{peer}{what}, efficiency"] = one / ranks / sum(case[name] for case in cases)
    return found


def _print_model(options: argparse.Namespace) -> None:
    heads_q, heads_kv = options.heads
    rates = f"{options.tflops} and {options.backward_tflops} TFLOPS a device, {options.gbytes} GB/s a gather"
    print(f"by the model, {rates}, {heads_q} heads on {heads_kv}:")
    for tokens in options.tokens:
        for ranks in (2, 4, 8, 64, 512):
            efficiencies = []
            for backward in (False, True):
                seconds, efficiency = step_seconds(
                    ranks, tokens, heads=heads_q, heads_kv=heads_kv, head_dim=options.head_dim,
                    strides=-(-heads_kv // options.stride), tflops=options.tflops,
                    backward_tflops=options.backward_tflops, gbytes=options.gbytes,
                    backward=backward,
                )  # fmt: skip
                efficiencies.append(
                    f"{'both' if backward else 'forward'} {1e3 * seconds:.2f} ms, efficiency {efficiency:.2f}"
                )
            print(f"{tokens} tokens on each of {ranks} ranks: {'; '.join(efficiencies)}")


def _print(head: str, found: dict[str, Any]) -> None:
    numbers = (f"  {name}: {value:.3g}\n" for name, value in found.items() if isinstance(value, float))
    print(f"{head}:\n{''.join(numbers)}", end="", flush=True)


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark from a shell."""
    options = _parsed(arguments)
    if options.model:
        _print_model(options)
        return 0
    results: list[dict[str, Any]] = []
    sets: list[dict[str, Any]] = []
    with process_group(datetime.timedelta(seconds=options.timeout)) as (rank, ranks, device):
        options.dtype = options.dtype or ("bfloat16" if device.startswith("cuda") else "float32")
        for tokens, name in ((tokens, name) for tokens in options.tokens for name in options.sets):
            found = _measure_set(tokens, name, options, rank, ranks, device)
            results += found
            sets.append({"ranks": ranks, "tokens": tokens, "set": name, **_efficiencies(found, ranks)})
            if rank == 0 and len(found) > 1:
                _print(f"{ranks} ranks, {tokens} tokens of a rank, {name} lengths together", sets[-1])
            if rank == 0 and options.output:
                _write(options, results, sets)
    return 0


def _parsed(arguments: list[str] | None) -> argparse.Namespace:
    """The options, or an error that says which do not fit together."""
    parser = argparse.ArgumentParser(
        prog="python -m kvlab.parallel.benchmark",
        description="Time zigzag-llama3 over ranks beside one device, no communication, and peers.",
        epilog="example: torchrun --nproc_per_node=2 -m kvlab.parallel.benchmark --output cp.json",
    )
    add = parser.add_argument
    add("--tokens", type=positive, nargs="+", default=(8192, 16384), help="tokens of a rank (8192 16384)")
    add("--sets", choices=sorted(SETS), nargs="+", default=("fixed",), help="lengths (fixed)")
    add("--heads", type=positive, nargs=2, default=(32, 8), help="query and KV heads (32 8)")
    add("--head-dim", type=positive, default=128, help="channels of a head (128)")
    add("--stride", type=positive, default=4, help="KV heads that are gathered at once (4)")
    add("--implementation", choices=("separate", "listed", "paired"), help="see the function")
    add("--dtype", choices=("float32", "float16", "bfloat16"), help="bfloat16 on GPUs, else float32")
    beside = f"run beside, where they can ({' '.join(PEERS)})"
    add("--peers", choices=PEERS, nargs="*", default=PEERS, help=beside)
    add("--repeats", type=positive, default=5, help="rounds (5)")
    add("--seconds", type=float, default=0.2, help="of a loop, at least (0.2)")
    add("--timeout", type=float, default=120, help="seconds until a silent rank ends all (120)")
    add("--output", type=Path, help="write the results to this JSON file")
    add("--model", action="store_true", help="compute larger groups by the model; needs no ranks")
    add("--tflops", type=float, default=700.0, help="of one device's forward, for --model (700)")
    add("--backward-tflops", type=float, default=600.0, help="of its backward, for --model (600)")
    add("--gbytes", type=float, default=290.0, help="bus GB/s of a gather, for --model (290)")
    options = parser.parse_args(arguments)
    heads_q, heads_kv = options.heads
    if heads_q % heads_kv:
        parser.error(f"--heads {heads_q} {heads_kv}: query heads must be a multiple of KV heads")
    if options.stride > heads_kv:
        parser.error(f"--stride {options.stride}: there are {heads_kv} KV heads to gather")
    for tokens in options.tokens:
        if tokens % 8:
            parser.error(f"--tokens {tokens}: a rank's tokens must be a multiple of 8")
    return options


def _measure_set(
    tokens: int, name: str, options: argparse.Namespace, rank: int, ranks: int, device: str
) -> list[dict[str, Any]]:
    """Measure every pattern of a set, and print it on the first rank."""
    results = []
    for pattern in SETS[name]:
        lengths = lengths_of(pattern, tokens, ranks)
        case = Case(lengths, options, rank, ranks, device)
        results.append(
            {"ranks": ranks, "lengths": lengths, **_measure(case, options.repeats, options.seconds)}
        )
        if rank == 0:
            _print(f"{ranks} ranks, sequences of {', '.join(map(str, lengths))} tokens", results[-1])
    return results


def _write(options: argparse.Namespace, results: list[dict[str, Any]], sets: list[dict[str, Any]]) -> None:
    settings = {"stride": options.stride, "heads": str(options.heads), "head_dim": options.head_dim}
    document = {"provenance": provenance(**settings), "results": results, "sets": sets}
    options.output.write_text(json.dumps(document, indent=1) + "\n")

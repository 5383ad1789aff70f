"""`kvlab profile`: the cost of a call, and registers, memory and occupancy of its kernels.

For each call: its time, the least work and bytes that it needs, and so the fraction of the machine that it
uses. On a GPU every kernel that the call launches is listed too: time between two events, registers, spilled
bytes, shared memory and the occupancy that these allow; with Nsight Compute (``ncu``) on the path, also what
it measures. ``python -m kvlab.lab.profiling PART`` makes the calls of a part once, for any profiler.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy as np

import kvlab
from kvlab.jit.launch import Kernel, PreparedLaunch
from kvlab.jit.native import hold
from kvlab.lab.counters import count
from kvlab.lab.results import Row, provenance
from kvlab.lab.targets import PARTS, Machine, resolve
from kvlab.lab.timing import time_in_turns
from kvlab.lab.timing_gpu import new_event

__all__ = ["Call", "calls_of", "recorded", "run"]

_METRICS = {
    "sm__throughput.avg.pct_of_peak_sustained_elapsed": "compute_percent",
    "dram__throughput.avg.pct_of_peak_sustained_elapsed": "memory_percent",
    "sm__warps_active.avg.pct_of_peak_sustained_active": "warps_percent",
}


@dataclass(frozen=True)
class Call:
    """One call: how it is made, the operations it must do and the bytes it must move."""

    name: str
    shape: str
    make: Callable[[], object]
    flop: float
    nbytes: float


def calls_of(part: str, device: str, times: int = 1) -> list[Call]:
    """Return the calls by which a part of the library is judged, or with so many times the tokens or values.

    Examples
    --------
    >>> [call.name for call in calls_of("ternary", "cpu")]
    ['pack_ternary', 'unpack_ternary']
    """
    parts = {"attention": _attention, "packed": _packed, "ternary": _ternary, "grouped": _grouped,
             "engine": _engine}  # fmt: skip
    return parts[part](device, times)


def _draw(shape: tuple[int, ...], device: str) -> Any:
    rng = np.random.default_rng(0)
    x = rng.standard_normal(shape, dtype=np.float32)
    if device == "cpu":
        return x
    import torch

    return torch.from_numpy(x).to(device="cuda", dtype=torch.bfloat16)


def _attention(device: str, times: int) -> list[Call]:
    tokens, heads, kv_heads, dim = (1024, 8, 2, 64) if device == "cpu" else (8192, 32, 8, 128)
    tokens *= times
    q, k, v, dout = (_draw((1, tokens, h, dim), device) for h in (heads, kv_heads, kv_heads, heads))
    out, lse = kvlab.attention(q, k, v, causal=True, return_lse=True)
    size = 4 if device == "cpu" else 2
    of_q, of_kv = (tokens * h * dim * size for h in (heads, 2 * kv_heads))
    flop = 4.0 * heads * dim * tokens * (tokens + 1) / 2
    shape = f"1 x {tokens}, {heads}/{kv_heads} heads, d{dim}, causal"

    def backward() -> object:
        return kvlab.attention_backward(dout, q, k, v, out, lse, causal=True)

    rows = 4 * tokens * heads
    return [
        Call(
            "attention", shape, lambda: kvlab.attention(q, k, v, causal=True), flop, 2 * of_q + of_kv + rows
        ),
        Call("attention_backward", shape, backward, 2.5 * flop, 4 * of_q + 2 * of_kv + rows),
    ]


def _grouped(device: str, times: int) -> list[Call]:
    from kvlab.lab.benchmark import grouped

    tokens, shape = (1024, (8, 2, 64)) if device == "cpu" else (16384, grouped.CONFIGS["llama3-8b"])
    tokens *= times
    heads, kv_heads, dim = shape
    groups = grouped.groups_of(tokens, 2)
    calls = grouped.contestants(tokens, groups, shape, device)
    size = 4 if device == "cpu" else 2
    rows, keys = sum(n for n, _ in groups), {"separate": sum(n for _, n in groups)}
    of_q = 2 * size * rows * heads * dim
    text = f"2 groups of {groups[0][0]} rows, {tokens} tokens, {heads}/{kv_heads} heads, d{dim}, causal"
    return [
        Call(
            f"grouped, {name}", text, make, grouped.flops(groups, heads, dim),
            of_q + 2 * size * kv_heads * dim * keys.get(name, groups[1][1]),
        )
        for name, make in calls.items()
        if name in grouped.IMPLEMENTATIONS
    ]  # fmt: skip


def _packed(device: str, times: int) -> list[Call]:
    tokens, heads, kv_heads, dim = (2048, 8, 2, 64) if device == "cpu" else (32768, 32, 8, 128)
    tokens *= times
    k, v = (_draw((1, tokens, kv_heads, dim), device) for _ in range(2))
    q = _draw((1, 1, heads, dim), device)
    dtype = "float32" if device == "cpu" else "bfloat16"
    cache = kvlab.MixedPrecisionCache(1, heads, kv_heads, dim, dtype=dtype, device=device, plan_length=tokens)
    cache.append(0, k, v)
    shape = f"1 query on {tokens} tokens, {heads}/{kv_heads} heads, d{dim}, {cache.bits_per_element:.2f} bits"
    return [Call("attend", shape, lambda: cache.attend(0, q), 4.0 * heads * dim * tokens, cache.nbytes)]


def _ternary(device: str, times: int) -> list[Call]:
    count = times * (5 * 2**20 if device == "cpu" else 5 * 2**26)
    values: Any = np.random.default_rng(0).integers(-1, 2, count, dtype=np.int8)
    if device == "cuda":
        import torch

        values = torch.from_numpy(values).cuda()
    packed = kvlab.pack_ternary(values)
    shape = f"{count / 2**20:g} Mi values"
    return [
        Call("pack_ternary", shape, lambda: kvlab.pack_ternary(values), 0.0, 1.2 * count),
        Call("unpack_ternary", shape, lambda: kvlab.unpack_ternary(packed, count), 0.0, 1.2 * count),
    ]


def _engine(device: str, times: int) -> list[Call]:
    from dataclasses import replace

    from kvlab.engine import Decoder
    from kvlab.engine.geometry import published
    from kvlab.engine.weights import draw

    name, layers = ("pythia-14m", 6) if device == "cpu" else ("pythia-2.8b", 2)
    geometry, base = published(name)
    geometry, context = replace(geometry, layers=layers), 500 * times
    key = 2 * 2 * layers * geometry.heads_kv * geometry.head_dim
    lanes, shape = geometry.head_dim // 8, f"{name}, {layers} layers, 1 row behind {context} tokens"
    if device == "cuda":
        shape += f"; {32 // lanes * lanes} of 32 lanes attend, 32 multiply"

    def token(plan: str) -> Callable[[], object]:
        decoder = Decoder(
            draw(geometry, base, 0, "float16"), device=device, plan=plan, max_seqlen=context + 1
        )
        decoder.prefill(np.arange(context) % 999)

        def launch() -> None:  # of the newest token, again and again
            executor: Any = decoder._executor
            executor.run_again()

        return launch

    return [
        Call(f"token, plan {plan}", shape, token(plan), 2.0 * geometry.parameters,
             2 * geometry.parameters + context * key)
        for plan in (("graph",) if device == "cpu" else ("graph", "ops"))
    ]  # fmt: skip


def run(target: str, where: Machine, *, repeats: int = 10, release: bool = False) -> dict[str, Any]:
    """Profile the calls of a target.

    A call is timed `repeats` times, of which the median counts; with `release` there are also calls of four
    times the length. The result has ``target``, ``provenance``; ``rows``: a call each; ``kernels``: a launch
    each, on a GPU; ``ncu``: what Nsight Compute measured; ``skipped``: by part, why.
    """
    rows: list[Row] = []
    kernels: list[Row] = []
    counters: list[Row] = []
    skipped = {f"everything on {device}": reason for device, reason in where.skipped.items()}
    for device in where.devices:
        for part in resolve(target, more=PARTS):
            launched: list[Row] = []
            calls = (
                call for times in ((1, 4) if release else (1,)) for call in calls_of(part, device, times)
            )
            for call in calls:
                rows.append(_time(call, device, repeats))
                if device == "cuda":
                    launched += _launches(call)
            if device == "cuda":
                kernels += launched
                measured, reason = _count(part, {str(row["kernel"]) for row in launched})
                counters += measured
                skipped |= {} if reason is None else {f"counters of {part}": reason}
    return {
        "target": target,
        "provenance": provenance(target=target, repeats=repeats, release=release),
        "rows": rows,
        "kernels": kernels,
        "ncu": counters,
        "skipped": skipped,
    }


def _time(call: Call, device: str, repeats: int) -> Row:
    make = call.make if device == "cpu" else _waited(call.make)
    seconds = time_in_turns({call.name: make}, repeats=repeats)[call.name].median
    return {
        "device": device, "call": call.name, "shape": call.shape, "ms": 1e3 * seconds,
        "gflop": call.flop / 1e9, "gbyte": call.nbytes / 1e9, "tflops": call.flop / seconds / 1e12,
        "tb_per_s": call.nbytes / seconds / 1e12,
    }  # fmt: skip


def _waited(make: Callable[[], object]) -> Callable[[], object]:
    import torch

    def wait() -> None:
        make()
        torch.cuda.synchronize()

    return wait


# ---- kernels


@contextmanager
def recorded(
    launches: list[tuple[Kernel, tuple[int, ...], tuple[int, ...], int, Any, Any]],
) -> Iterator[None]:
    """Record every launch: kernel, grid, block, dynamic shared bytes, events before and after."""
    launch, launch_prepared = Kernel.__call__, PreparedLaunch.__call__

    def record(
        kernel: Kernel,
        grid: tuple[int, ...],
        block: tuple[int, ...],
        args: Any,
        shared_bytes: int = 0,
        stream_pointer: int = 0,
    ) -> None:
        marks = _marked(lambda: launch(kernel, grid, block, args, shared_bytes, stream_pointer))
        launches.append((kernel, grid, block, shared_bytes, *marks))

    def record_prepared(prepared: PreparedLaunch, stream_pointer: int) -> None:
        marks = _marked(lambda: launch_prepared(prepared, stream_pointer))
        launches.append((prepared.kernel, prepared.grid, prepared.block, prepared.shared_bytes, *marks))

    with (
        mock.patch.object(Kernel, "__call__", record),
        mock.patch.object(PreparedLaunch, "__call__", record_prepared),
        hold(),  # so that launches in turn are calls of each
    ):
        yield


def _marked(launch: Callable[[], object]) -> list[Any]:
    """Launch between two events."""
    marks = [new_event(), new_event()]
    marks[0].record()
    launch()
    marks[1].record()
    return marks


def _launches(call: Call) -> list[Row]:
    import cupy
    import torch

    launches: list[Any] = []
    with recorded(launches):
        call.make()
    torch.cuda.synchronize()
    threads = cupy.cuda.Device().attributes["MaxThreadsPerMultiProcessor"]
    rows: list[Row] = []
    for kernel, grid, block, shared, first, last in launches:
        size = int(np.prod(block))
        blocks = cupy.cuda.driver.occupancyMaxActiveBlocksPerMultiprocessor(
            kernel._function.ptr, size, shared
        )
        rows.append(
            {
                "call": call.name,
                "kernel": kernel.name,
                "grid": "x".join(map(str, grid)),
                "threads": size,
                "us": 1e3 * first.elapsed_time(last),
                "registers": kernel.resources.registers,
                "spilled_bytes": kernel.resources.local_bytes,
                "shared_kib": (kernel.resources.shared_bytes + shared) / 1024,
                "occupancy_percent": 100.0 * blocks * size / threads,
            }
        )
    return rows


def _count(part: str, names: set[str]) -> tuple[list[Row], str | None]:
    """Ask ncu for its counters of a part's calls, in kernels of these names; rows, or why there are none."""
    program = "-m", "kvlab.lab.profiling", part
    return count(program, _METRICS, "|".join(sorted(names)), "--launch-count", "20")


if __name__ == "__main__":
    for profiled in calls_of(sys.argv[1], "cuda"):
        profiled.make()  # what ncu looks at

"""Grouped attention, one launch beside separate calls of the same kernels, from CUDA graphs of one call each.

    python benchmarks/attention/grouped.py OUT.json [--only WHAT] [--cases TEXT] [--sm-margin N]
        [--before KERNELS]

Cases are ranks of 8 in zigzag context parallelism (two groups), and 2 to 16 groups of few rows whose prefixes
end evenly spaced. Heads are query heads / KV heads, of 128 channels, in bfloat16 under a causal mask. "ideal"
is one call of `kvlab.attention` with as many operations: the rows of all groups on one prefix. Before
gradients are timed they are compared with those of separate calls, and deterministic ones with themselves.
Contestants take turns, in another order in each; medians of 5 turns count. WHAT is forward, backward (both
without it) or bytes: what a forward call reads from memory, by Nsight Compute. With --before the forward's
kernels of another checkout run in the same loop, by today's launchers: KERNELS is its kernels/cuda.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import lru_cache, partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch

import kvlab
from kvlab.jit.build import build
from kvlab.jit.launch import load
from kvlab.lab.benchmark import harness
from kvlab.lab.benchmark.grouped import bytes_read
from kvlab.lab.timing_gpu import recorded, time_by_events
from kvlab.ops.cuda import grouped

Calls = dict[str, Callable[[], Any]]
Groups = list[tuple[int, int]]  # rows and prefix
RANKS, HEAD_DIM, K = 8, 128, 1024


def zigzag(tokens: int, rank: int) -> Groups:
    chunk = tokens // (2 * RANKS)
    return [(chunk, (rank + 1) * chunk), (chunk, (2 * RANKS - rank) * chunk)]


def even(tokens: int, count: int, rows: int) -> Groups:
    return [(rows, max(rows, tokens * (g + 1) // count)) for g in range(count)]


def even_prefix(groups: Groups) -> int:
    """Return the prefix on which the rows of all groups together see as many keys as on their own."""
    rows = sum(own for own, _ in groups)
    return round(sum(own * (keys - own / 2) for own, keys in groups) / rows + rows / 2)


CASES: dict[str, tuple[Groups, int, tuple[int, int]]] = {
    **{
        f"2 groups {tokens // K}K rank {rank} 32/8": (zigzag(tokens, rank), tokens, (32, 8))
        for tokens, rank in ((8 * K, 3), (16 * K, 3), (32 * K, 3), (64 * K, 3), (8 * K, 0), (32 * K, 0))
    },
    **{f"32K rank {rank} 4/1": (zigzag(32 * K, rank), 32 * K, (4, 1)) for rank in range(RANKS)},
    **{f"32K rank {rank} 8/2": (zigzag(32 * K, rank), 32 * K, (8, 2)) for rank in (0, 3, 7)},
    **{
        f"{count} groups of {rows} {tokens // K}K 32/8": (even(tokens, count, rows), tokens, (32, 8))
        for tokens in (4 * K, 8 * K, 16 * K)
        for count, rows in ((4, 512), (8, 256), (16, 64), (16, 1))
    },
    "4K on 32K, 4K on 64K 32/8": ([(4 * K, 32 * K), (4 * K, 64 * K)], 64 * K, (32, 8)),
    "100 on 100, 100 on 9,900 32/8": ([(100, 100), (100, 9900)], 9900, (32, 8)),
}


def arguments(groups: Groups, tokens: int, heads: tuple[int, int]) -> tuple[list[Any], dict[str, Any]]:
    """Return q of each group, k and v, and the keyword arguments of a call."""
    torch.manual_seed(0)
    shapes = [*((rows, heads[0]) for rows, _ in groups), *[(tokens, heads[1])] * 2]
    arrays = [torch.randn(*shape, HEAD_DIM, device="cuda", dtype=torch.bfloat16) for shape in shapes]

    def whole(numbers: list[int]) -> torch.Tensor:
        return torch.tensor(numbers, dtype=torch.int32, device="cuda")

    return arrays, {
        "cu_seqlens_q_groups": [whole([0, rows]) for rows, _ in groups],
        "cu_seqlens_k": whole([0, tokens]),
        "prefix_lens": [whole([keys]) for _, keys in groups],
        "max_seqlen_q": max(rows for rows, _ in groups),
        "max_seqlen_k": tokens,
    }


def forward(case: str, sm_margin: int) -> Calls:
    (*q, k, v), own = arguments(*CASES[case])
    own["sm_margin"] = sm_margin
    calls: Calls = {
        name: partial(kvlab.grouped_attention_varlen, q, k, v, implementation=name, **own)
        for name in ("separate", "listed", "paired")
    }
    rows, keys = torch.cat(q)[None], even_prefix(CASES[case][0])
    if len(rows[0]) <= keys:
        calls["ideal"] = partial(kvlab.attention, rows, k[None, :keys], v[None, :keys], causal=True)
    return calls


def of_sources(root: Path, call: Callable[[], Any]) -> Callable[[], Any]:
    """Return a call of one launch whose kernels are built from the sources below `root`; it is made once."""
    listed = lru_cache(maxsize=None)(grouped._listed.__wrapped__)

    def kernel(name: str, entry: str, macros: tuple[tuple[str, Any], ...], device: int) -> Any:
        return load(build(name, dict(macros), "sm_90a", root=root), entry, device=device)

    def with_them() -> Any:
        with mock.patch.object(grouped, "_listed", listed):
            return call()

    with (
        mock.patch.object(grouped, "cuda_kernel", kernel),
        mock.patch.object(grouped, "build", partial(build, root=root)),
    ):
        with_them()
    return with_them


def with_before(calls: Calls, root: Path) -> Calls:
    """Return the calls and those of the kernels before, after a comparison of their bits."""
    before = {f"{name} before": of_sources(root, calls[name]) for name in ("listed", "paired")}
    for name, call in before.items():
        if not all(map(torch.equal, call(), calls[name.removesuffix(" before")]())):
            raise RuntimeError(f"{name}: other bits")
    return calls | before


def backward(case: str, sm_margin: int) -> Calls:
    (*q, k, v), own = arguments(*CASES[case])
    own["sm_margin"] = sm_margin
    outs, lses = kvlab.grouped_attention_varlen(q, k, v, return_lse=True, **own)
    douts = [torch.randn_like(x) for x in q]
    calls: Calls = {
        name + " deterministic" * deterministic: partial(
            kvlab.grouped_attention_varlen_backward, douts, q, k, v, outs, lses, implementation=name,
            deterministic=deterministic, **own,
        )
        for deterministic in (False, True)
        for name in ("separate", "paired")
    }  # fmt: skip
    wanted = flat(calls["separate"]())
    for name, call in calls.items():
        for found, want in zip(flat(call()), wanted, strict=True):
            error = float((found.float() - want.float()).norm() / want.float().norm())
            if not error < 0.01:
                raise RuntimeError(f"{case}, {name}: {error} of the norm away from separate calls")
    first, second = (flat(calls["paired deterministic"]()) for _ in "ab")
    if not all(map(torch.equal, first, second)):
        raise RuntimeError(f"{case}: deterministic gradients differ between two calls")
    return calls


def flat(gradients: tuple[list[Any], Any, Any]) -> list[Any]:
    return [*gradients[0], *gradients[1:]]


def measure(kind: str, case: str, sm_margin: int, root: Path | None) -> dict[str, Any]:
    """Return medians, and how many times faster than separate calls of the same kind each is; or bytes."""
    if kind == "bytes":
        groups, tokens, heads = CASES[case]
        counted, reason = bytes_read(tokens, groups, (*heads, HEAD_DIM), sm_margin)
        return {"kind": kind, "case": case, "counted": counted or {"nothing": reason}}
    calls, stream = {"forward": forward, "backward": backward}[kind](case, sm_margin), torch.cuda.Stream()
    if root and kind == "forward":
        calls = with_before(calls, root)
    with torch.cuda.stream(stream):
        graphs = {name: recorded(call, stream=stream) for name, call in calls.items()}
    timings = time_by_events(graphs, repeats=5)
    base = {name: timings["separate" + " deterministic" * ("deterministic" in name)] for name in timings}
    return {
        "kind": kind,
        "case": case,
        "ms": {name: 1e3 * timing.median for name, timing in timings.items()},
        "x_separate": {name: timing.ratio_to(base[name]) for name, timing in timings.items()},
    }


def cases(given: argparse.Namespace) -> list[harness.Case]:
    return [
        harness.Case(f"{kind} {case}", partial(measure, kind, case, given.sm_margin, given.before))
        for kind in ((given.only,) if given.only else ("backward", "forward"))
        for case in CASES
        if given.cases in case
    ]


def main() -> int:
    parser = harness.options(__doc__)
    parser.add_argument("--only", choices=("forward", "backward", "bytes"))
    parser.add_argument("--cases", default="", help="only those whose names hold this text")
    parser.add_argument("--sm-margin", type=int, default=0, help="multiprocessors left to others")
    parser.add_argument("--before", type=Path, help="kernels/cuda of another checkout, to time it, too")
    return harness.run(parser, cases)


if __name__ == "__main__":
    raise SystemExit(main())

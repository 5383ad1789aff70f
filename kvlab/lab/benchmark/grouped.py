"""`kvlab benchmark grouped`: implementations of grouped attention beside each other, by length and groups.

Two groups are those of a middle rank of eight in zigzag context parallelism: 1/16 of the tokens each, which
see 4/16 and 13/16 of them. Other numbers share 1/8 of the tokens among groups whose prefixes end evenly
spaced. Heads are those of a model. On a GPU the calls stand beside FlashAttention 2, called once a group
behind a copy that puts gathered keys in order, as users of ring-flash-attention do it; there keys come rank
by rank.

Bytes of K and V are theory: separate calls read each prefix, others the longest one once. With Nsight Compute
on the path each case also says what a GPU reads from memory. ``python -m kvlab.lab.benchmark.grouped HEADS
HEADS_KV HEAD_DIM TOKENS SM_MARGIN ROWS,PREFIX ...`` makes the calls of a case for it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

import kvlab
from kvlab.arguments import choice
from kvlab.errors import needs_extra
from kvlab.lab.benchmark.baseline import Options, check
from kvlab.lab.counters import count
from kvlab.lab.results import Row
from kvlab.lab.timing import time_in_turns
from kvlab.ops.attention_call import MAX_GROUPS
from kvlab.sizes import parse_size

__all__ = [
    "CONFIGS",
    "IMPLEMENTATIONS",
    "NOTE",
    "benchmark_grouped",
    "bytes_read",
    "contestants",
    "flops",
    "groups_of",
]

CONFIGS = {"llama3-8b": (32, 8, 128), "llama3-70b": (64, 8, 128)}
"""Query heads, KV heads and head dimension of models."""

SEQLENS = {"cpu": "512,1K", "cuda": "4K,8K,16K,32K"}
"""Tokens, unless a caller says."""

NOTE = (
    "speedup: median over turns of the time of separate calls; kv gb: K and V that must be read, by theory; "
    "read gb, l2 hits: what ncu counts, Q among it; - where it does not count"
)

_RANKS = 8
_METRICS = {"dram__bytes_read.sum": "read_gb", "lts__t_sector_hit_rate.pct": "l2_hits"}
IMPLEMENTATIONS = ("separate", "listed", "paired")


def groups_of(tokens: int, groups: int) -> list[tuple[int, int]]:
    """Return rows and prefix of each group.

    Examples
    --------
    >>> groups_of(1600, 2), groups_of(1600, 4)
    ([(100, 400), (100, 1300)], [(50, 400), (50, 800), (50, 1200), (50, 1600)])
    """
    if groups == 2:
        chunk, rank = tokens // (2 * _RANKS), _RANKS // 2 - 1
        return [(chunk, (rank + 1) * chunk), (chunk, (2 * _RANKS - rank) * chunk)]
    rows = max(1, tokens // (_RANKS * groups))
    return [(rows, max(rows, tokens * (g + 1) // groups)) for g in range(groups)]


def flops(shape: Sequence[tuple[int, int]], heads: int, head_dim: int) -> float:
    """Return the operations of causal groups of (rows, prefix).

    Examples
    --------
    >>> flops([(2, 3)], 1, 1)
    20.0
    """
    return sum(
        4.0 * heads * head_dim * (rows * (keys - rows) + rows * (rows + 1) / 2) for rows, keys in shape
    )


def benchmark_grouped(options: Options) -> list[Row]:
    """Time every length with every number of groups.

    Of the options `seqlens`, `num_groups` (numbers divided by commas), `config`, `repeats` and `device`
    count. A row has ``tokens``, ``groups``, ``heads``, ``implementation``; ``ms``, ``p5_ms``, ``p95_ms``;
    ``speedup``; ``tflops``; ``kv_gb``; ``read_gb`` and ``l2_hits``, a percentage, or None.
    """
    heads, heads_kv, dim = CONFIGS[choice(options.config, "config", tuple(CONFIGS))]
    seqlens = options.seqlens or SEQLENS[options.device]
    lengths = [parse_size(word, "seqlens") for word in seqlens.split(",")]
    numbers = [parse_size(word, "num_groups") for word in options.num_groups.split(",")]
    for number in numbers:
        if not 1 <= number <= MAX_GROUPS:
            raise ValueError(f"num_groups={options.num_groups!r}: a call has 1 to {MAX_GROUPS} groups")
    for length in lengths:
        if length < 16 * MAX_GROUPS:
            raise ValueError(f"seqlens={seqlens!r}: lengths are at least {16 * MAX_GROUPS} tokens")
    rows: list[Row] = []
    for tokens in lengths:
        for number in numbers:
            rows += _measure(tokens, number, (heads, heads_kv, dim), options)
    return rows


def _measure(tokens: int, number: int, shape: tuple[int, int, int], options: Options) -> list[Row]:
    heads, heads_kv, dim = shape
    groups = groups_of(tokens, number)
    calls = contestants(tokens, groups, shape, options.device)
    if options.device == "cuda":
        from kvlab.lab.timing_gpu import time_by_events

        timings = time_by_events(calls, repeats=options.repeats)
    else:
        timings = time_in_turns(calls, repeats=options.repeats)
    separate = timings["separate"]
    prefixes = [keys for _, keys in groups]
    key_bytes = 2 * heads_kv * dim * (2 if options.device == "cuda" else 4)
    counted = bytes_read(tokens, groups, shape)[0] if options.device == "cuda" else {}
    return [
        {
            "tokens": tokens,
            "groups": number,
            "heads": f"{heads}/{heads_kv}",
            "implementation": name,
            **timing.milliseconds(),
            "speedup": timing.ratio_to(separate),
            "tflops": flops(groups, heads, dim) / timing.median / 1e12,
            "kv_gb": key_bytes * (max(prefixes) if name in ("listed", "paired") else sum(prefixes)) / 1e9,
            **counted.get(name, dict.fromkeys(_METRICS.values())),
        }
        for name, timing in timings.items()
    ]


def contestants(
    tokens: int, groups: list[tuple[int, int]], shape: tuple[int, int, int], device: str, sm_margin: int = 0
) -> dict[str, Callable[[], object]]:
    """What is timed, by name, after results have been compared."""
    heads, heads_kv, dim = shape
    rng = np.random.default_rng(0)
    drawn = [rng.standard_normal((rows, heads, dim), dtype=np.float32) for rows, _ in groups]
    drawn += [rng.standard_normal((tokens, heads_kv, dim), dtype=np.float32) for _ in "kv"]
    lengths = [np.array([0, rows], np.int32) for rows, _ in groups]
    lengths += [np.array([keys], np.int32) for _, keys in groups] + [np.array([0, tokens], np.int32)]
    arrays: list[Any] = [*drawn, *lengths]
    if device == "cuda":
        with needs_extra("hf", "kvlab benchmark grouped --device cuda"):
            import torch
        arrays = [torch.from_numpy(x).to("cuda", torch.bfloat16) for x in drawn]
        arrays += [torch.from_numpy(x).cuda() for x in lengths]
    count = len(groups)
    q, (k, v), rest = arrays[:count], arrays[count : count + 2], arrays[count + 2 :]

    def call(name: str) -> Any:
        return kvlab.grouped_attention_varlen(
            q, k, v, cu_seqlens_q_groups=rest[:count], prefix_lens=rest[count:-1], cu_seqlens_k=rest[-1],
            implementation=name, max_seqlen_q=max(rows for rows, _ in groups), max_seqlen_k=tokens,
            sm_margin=sm_margin,
        )  # fmt: skip

    calls: dict[str, Callable[[], object]] = {name: partial(call, name) for name in IMPLEMENTATIONS}
    expected = [
        kvlab.attention(x[None], k[None, :keys], v[None, :keys], causal=True)[0]
        for x, (_, keys) in zip(q, groups, strict=True)
    ]
    for name in IMPLEMENTATIONS:
        for got, want in zip(call(name), expected, strict=True):
            error = float(abs(got - want).max()) / float(abs(want).max())
            check(error < (1e-5 if device == "cpu" else 0.02), f"{tokens} tokens, {count} groups, {name},")
    if device == "cuda" and count == 2:
        calls["flash attention 2, keys copied"] = _flash(q, k, v, groups)
    return calls


def bytes_read(
    tokens: int, groups: list[tuple[int, int]], shape: tuple[int, int, int], sm_margin: int = 0
) -> tuple[dict[str, Row], str | None]:
    """Return what ncu counts of each implementation, or why there is nothing.

    A group is rows and prefix, the shape query heads, KV heads and head dimension; `sm_margin` is that of
    `kvlab.attention`.
    """
    arguments = [*map(str, (*shape, tokens, sm_margin)), *(f"{rows},{keys}" for rows, keys in groups)]
    launches, reason = count(
        ("-m", __name__, *arguments), _METRICS, "attend", "--cache-control", "none",
        "--profile-from-start", "off",
    )  # fmt: skip
    if reason is not None:
        return {}, reason
    of_call = dict(
        zip(IMPLEMENTATIONS, (launches[: len(groups)], *([x] for x in launches[len(groups) :])), strict=True)
    )
    return {
        name: {
            "read_gb": sum(float(x["read_gb"] or 0) for x in own) / 1e9,
            "l2_hits": sum(float(x["l2_hits"] or 0) for x in own) / len(own),
        }
        for name, own in of_call.items()
    }, None


def _flash(q: list[Any], k: Any, v: Any, groups: list[tuple[int, int]]) -> Callable[[], object]:
    """Two calls of torch's FlashAttention 2, behind a copy of chunks that lie rank by rank."""
    import torch

    chunks = 2 * _RANKS
    held = [chunk for rank in range(_RANKS) for chunk in (rank, chunks - 1 - rank)]
    order = torch.tensor([held.index(chunk) for chunk in range(chunks)], device="cuda")
    bounds = [[torch.tensor([0, n], dtype=torch.int32, device="cuda") for n in shape] for shape in groups]

    def call() -> object:
        in_order = [x.view(chunks, -1, *x.shape[1:])[order].view(x.shape) for x in (k, v)]
        return [
            torch.ops.aten._flash_attention_forward(
                x, *(y[:keys] for y in in_order), *cu, rows, keys, 0.0, True, False
            )[0]
            for x, cu, (rows, keys) in zip(q, bounds, groups, strict=True)
        ]

    return call


def _make_calls(arguments: Sequence[str]) -> None:
    """Make each implementation's call once, where ncu counts."""
    heads, heads_kv, dim, tokens, sm_margin = map(int, arguments[:5])
    groups = [(int(rows), int(keys)) for rows, keys in (x.split(",") for x in arguments[5:])]
    calls = contestants(tokens, groups, (heads, heads_kv, dim), "cuda", sm_margin)
    import torch

    with torch.cuda.profiler.profile():
        for name in IMPLEMENTATIONS:
            calls[name]()
        torch.cuda.synchronize()


if __name__ == "__main__":
    _make_calls(sys.argv[1:])

"""`kvlab benchmark decode --device cuda`: a query token over packed pages, against dense bfloat16 attention.

The yardstick is the fastest of cuDNN and FlashAttention SDPA on the same shape, on the same GPU, in the same
run. Pages hold random codes and lie in random order; the table of each sequence is sorted by width, the worst
order for a division of the work. Before a case is timed, one sequence is checked against float64 attention
over its dequantised pages, and every other against a call of its own, which divides the work differently.
Times are medians over replays of a CUDA graph that rotates over as many sets of pages as it takes to exceed
the second-level cache four times; after them the results have to be the same bits.

The floor is the bytes of codes and steps at the read bandwidth of the GPU; positions and importance lie
behind them in a page and are not read.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np

from kvlab.cache.pages import TOKENS_PER_PAGE, PageLayout
from kvlab.lab.results import Row
from kvlab.lab.yardstick import check
from kvlab.ops import packed_cuda
from kvlab.reference.packed import packed_attention

__all__ = [
    "CONTEXTS",
    "LADDERS",
    "NOTE",
    "Shape",
    "benchmark_decode",
    "draw_pages",
    "read_bandwidth",
    "time_dense",
    "time_packed",
]

CONTEXTS = (4_096, 8_192, 16_384, 32_768, 65_536, 131_072)
LADDERS: dict[str, dict[int, float]] = {
    "16": {16: 1.0}, "8": {8: 1.0}, "4": {4: 1.0}, "3": {3: 1.0}, "2": {2: 1.0},
    "8/4/2": {2: 0.4, 4: 0.4, 8: 0.2},
}  # fmt: skip
"""What pages hold, by name: the share of the pages of every sequence at each width."""

NOTE = "speedup: over the faster of cuDNN and FlashAttention in bfloat16; of floor: bytes at read bandwidth"

_READ_BANDWIDTH = {"NVIDIA H200": 4.70e12}  # measured with bulk copies; what torch reaches is less
_ROTATED_BYTES = 240e6
_MAX_SETS = 128
_CHECKED_TOKENS = 32_768  # longer sequences are not compared: the float64 attention takes too long


@dataclass(frozen=True)
class Shape:
    """One decode step of one layer: `tokens` stored tokens in each of `batch` rows."""

    batch: int
    tokens: int
    num_heads_q: int = 32
    num_heads_kv: int = 8
    head_dim: int = 128

    @property
    def pairs(self) -> int:
        """Sequences of pages: (row, KV head) pairs."""
        return self.batch * self.num_heads_kv


def benchmark_decode(
    *, contexts: Sequence[int] = CONTEXTS, ladders: Sequence[str] = tuple(LADDERS), repeats: int = 50
) -> list[Row]:
    """Time a decode step at batch 1, 32 query heads, 8 KV heads of 128 channels.

    Parameters
    ----------
    contexts : sequence of int
        Stored tokens, multiples of 64.
    ladders : sequence of str
        Keys of `LADDERS`.
    repeats : int
        Replays that are timed.

    Returns
    -------
    list of dict
        ``context``, ``widths``; ``packed_us``, ``dense_us``: medians; ``dense``: which it was; ``speedup``;
        ``tb_per_s``, ``floor_us``, ``of_floor``; ``relative_error``: against float64, None if not compared.

    Raises
    ------
    ValueError
        If a context is no multiple of 64.
    RuntimeError
        If a result is wrong.
    """
    import torch

    for context in contexts:
        if context <= 0 or context % TOKENS_PER_PAGE:
            raise ValueError(f"contexts must be multiples of {TOKENS_PER_PAGE} tokens, got {context}")
    bandwidth = read_bandwidth()
    rows = []
    for context in contexts:
        shape = Shape(1, context)
        dense = time_dense(shape, repeats)
        fastest = min(dense, key=lambda name: dense[name])
        for name in ladders:
            packed = time_packed(shape, LADDERS[name], repeats)
            floor = 1e6 * packed["bytes"] / bandwidth
            rows.append(
                {
                    "context": context,
                    "widths": name,
                    "packed_us": packed["us"],
                    "dense_us": dense[fastest],
                    "dense": fastest,
                    "speedup": dense[fastest] / packed["us"],
                    "tb_per_s": packed["bytes"] / packed["us"] / 1e6,
                    "floor_us": floor,
                    "of_floor": floor / packed["us"],
                    "relative_error": packed["relative_error"],
                }
            )
            torch.cuda.empty_cache()
    return rows


def read_bandwidth() -> float:
    """Return bytes a second that the current GPU reads: as measured on such a GPU, else what a sum reads."""
    import torch

    known = _READ_BANDWIDTH.get(torch.cuda.get_device_name())
    if known:
        return known
    data = torch.ones(2**30, device="cuda")
    return 1e6 * data.nbytes / _median_us([data.sum], 20)


def time_dense(shape: Shape, repeats: int = 50) -> dict[str, float]:
    """Return microseconds of each dense attention that supports the shape, by name."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    kv = (2, shape.batch, shape.num_heads_kv, shape.tokens, shape.head_dim)
    sets = max(1, min(8, round(_ROTATED_BYTES / (2 * np.prod(kv)))))
    data = [torch.randn(kv, device="cuda", dtype=torch.bfloat16) for _ in range(sets)]
    q = torch.randn(shape.batch, shape.num_heads_q, 1, shape.head_dim, device="cuda", dtype=torch.bfloat16)
    grouped = shape.num_heads_q != shape.num_heads_kv
    times = {}
    for name in ("CUDNN_ATTENTION", "FLASH_ATTENTION"):

        def attend(kv: Any, name: str = name) -> None:
            with sdpa_kernel(getattr(SDPBackend, name)):
                scaled_dot_product_attention(q, kv[0], kv[1], enable_gqa=grouped)

        try:
            times[name] = _median_us([partial(attend, kv) for kv in data], repeats)
        except RuntimeError as error:
            if "No available kernel" not in str(error):
                raise
    return times


def time_packed(
    shape: Shape,
    ladder: Mapping[int, float],
    repeats: int = 50,
    warps: int = 0,
    backend: Any = packed_cuda,
) -> dict[str, Any]:
    """Check and time one case.

    Parameters
    ----------
    shape : Shape
    ladder : mapping of int to float
        One of `LADDERS`.
    repeats : int
        Replays that are timed.
    warps : int
        Warps of a block of the CUDA C++ kernel; 0: what the library takes.
    backend : module
        The launcher: `kvlab.ops.packed_cuda` or `kvlab.ops.packed_numba`.

    Returns
    -------
    dict
        ``us``; ``bytes`` of codes and steps; ``sets`` of pages rotated over; ``relative_error``.
    """
    import torch

    pages = draw_pages(shape, ladder)
    needed = sum(layout.positions * int((pages.rung == r).sum()) for r, layout in enumerate(pages.layouts))
    sets = max(1, min(_MAX_SETS, round(_ROTATED_BYTES / needed)))
    every = [pages] + [draw_pages(shape, ladder) for _ in range(sets - 1)]
    group = shape.num_heads_q // shape.num_heads_kv
    q = torch.randn(shape.batch, 1, shape.num_heads_q, shape.head_dim, device="cuda", dtype=torch.bfloat16)
    out = torch.full_like(q, float("nan"))
    lse = torch.empty(shape.batch, shape.num_heads_q, 1, device="cuda")
    workspace = backend.make_workspace(q, shape.pairs, group, shape.head_dim)
    options = {"warps": warps} if warps else {}

    def attend(own: SimpleNamespace) -> None:
        backend.attend(q, own, out, lse, workspace, scale=shape.head_dim**-0.5, **options)

    attend(pages)
    case, error, before = f"packed attention of {shape}, widths {dict(ladder)},", None, out.clone()
    if shape.tokens <= _CHECKED_TOKENS:
        error = relative_error(pages, q, out, 0)
        check(error < 1e-2, f"{case} relative error {error},")
    apart = attended_apart(pages, q, backend)
    differences = (out - apart).float().norm(dim=-1) / apart.float().norm(dim=-1)
    check(bool((differences < 1e-2).all()), f"{case} pairs attended together and alone,")
    us = _median_us([partial(attend, own) for own in every], repeats)
    attend(pages)
    check(torch.equal(out, before), f"{case} after the timed calls,")
    return {"us": us, "bytes": needed, "sets": sets, "relative_error": error}


def attended_apart(pages: SimpleNamespace, q: Any, backend: Any = packed_cuda) -> Any:
    """Return what `attend` gives if every (row, KV head) is a call of its own."""
    import torch

    batch, kv_heads = pages.num_pages.shape
    group, out = q.shape[2] // kv_heads, torch.full_like(q, float("nan"))
    workspace = backend.make_workspace(q, 1, group, q.shape[3])
    lse = torch.empty(1, group, 1, device=q.device)
    part = torch.empty(1, 1, group, q.shape[3], dtype=q.dtype, device=q.device)
    for b, h in itertools.product(range(batch), range(kv_heads)):
        own, heads = (slice(b, b + 1), slice(h, h + 1)), slice(h * group, (h + 1) * group)
        tables = {name: getattr(pages, name)[own] for name in ("rung", "index", "count", "num_pages")}
        alone = SimpleNamespace(**vars(pages) | tables | {"k_mean": pages.k_mean[own]})
        backend.attend(q[own[0], :, heads], alone, part, lse, workspace, scale=q.shape[3] ** -0.5)
        out[own[0], :, heads] = part
    return out


def draw_pages(shape: Shape, ladder: Mapping[int, float], device: str = "cuda") -> SimpleNamespace:
    """Return full pages of random codes in random order; the table of each sequence is sorted by width."""
    import torch

    entries, widths = shape.tokens // TOKENS_PER_PAGE, sorted(ladder)
    layouts = tuple(PageLayout(shape.head_dim, bits, bits, 2) for bits in widths)
    bounds = np.round(np.cumsum([0.0, *(ladder[bits] for bits in widths)]) * entries).astype(int)
    rung = torch.empty(shape.pairs, entries, dtype=torch.uint8, device=device)
    index = torch.empty(shape.pairs, entries, dtype=torch.int32, device=device)
    pools = []
    for r, layout in enumerate(layouts):
        count = shape.pairs * int(bounds[r + 1] - bounds[r])
        pools.append(_draw_pool(layout, count, device))
        rung[:, bounds[r] : bounds[r + 1]] = r
        order = torch.randperm(count, device=device).to(torch.int32)
        index[:, bounds[r] : bounds[r + 1]] = order.view(shape.pairs, -1)
    table = (shape.batch, shape.num_heads_kv, entries)
    return SimpleNamespace(
        layouts=layouts,
        pools=tuple(pools),
        rung=rung.view(table),
        index=index.view(table),
        count=torch.full(table, TOKENS_PER_PAGE, dtype=torch.uint8, device=device),
        num_pages=torch.full(table[:2], entries, dtype=torch.int32, device=device),
        k_mean=torch.randn(*table[:2], shape.head_dim, device=device, dtype=torch.float16),
        dtype="bfloat16",
    )


def _draw_pool(layout: PageLayout, count: int, device: str) -> Any:
    """Pages whose values are of about unit size."""
    import torch

    words = torch.randint(-(2**31), 2**31 - 1, (count, layout.nbytes // 4), dtype=torch.int32, device=device)
    pool = words.view(torch.uint8)
    if layout.bits_k == 16:
        for begin in range(0, count, 1024):
            size = (min(1024, count - begin), layout.positions // 2)
            values = torch.randn(size, device=device, dtype=torch.bfloat16)
            pool[begin : begin + 1024, : layout.positions] = values.view(torch.uint8)
    else:
        step = torch.exp(torch.randn(count, 128, device=device) * 0.3) * (1.7 / 2**layout.bits_k)
        pool[:, layout.k_steps : layout.positions] = (step.half().view(torch.int16) >> 7).to(torch.uint8)
    return pool


def relative_error(pages: SimpleNamespace, q: Any, out: Any, pair: int) -> float:
    """Return the relative error of the heads of one (row, KV head) against float64."""
    heads, kv_heads = q.shape[2], pages.rung.shape[1]
    group, b, h = heads // kv_heads, pair // kv_heads, pair % kv_heads
    rung, index = pages.rung[b, h].cpu(), pages.index[b, h].cpu().long()
    pools, place = [], index.numpy().copy()
    for r, pool in enumerate(pages.pools):
        mine = rung == r
        pools.append(pool[index[mine].to(pool.device)].cpu().numpy())
        place[mine.numpy()] = np.arange(int(mine.sum()))
    one = SimpleNamespace(
        layouts=pages.layouts,
        pools=pools,
        rung=rung.numpy()[None, None],
        index=place[None, None],
        count=np.full((1, 1, len(rung)), TOKENS_PER_PAGE),
        num_pages=np.array([[len(rung)]]),
        k_mean=pages.k_mean[b, h].cpu().numpy()[None, None],
        dtype=pages.dtype,
    )
    own = slice(h * group, (h + 1) * group)
    options = {"scale": q.shape[3] ** -0.5, "softcap": 0.0, "keep_scores": 0}
    want = packed_attention(q[b : b + 1, :, own].float().cpu().numpy(), one, **options)[0]
    got = out[b : b + 1, :, own].float().cpu().numpy()
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


def _median_us(calls: Sequence[Callable[[], object]], repeats: int) -> float:
    """Median time of one of `calls`, all of which one graph runs in turn."""
    import torch

    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    for _ in range(3):
        graph.replay()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]  # type: ignore[no-untyped-call]
    marks[0].record()
    for mark in marks[1:]:
        graph.replay()
        mark.record()
    torch.cuda.synchronize()
    times = [first.elapsed_time(last) for first, last in itertools.pairwise(marks)]
    return 1e3 * float(np.median(times)) / len(calls)

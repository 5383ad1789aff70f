"""Time packed decode attention against the fastest bfloat16 decode of this machine.

    python benchmarks/packed_decode/run.py OUT.json [--shapes ...] [--ladders ...]

Every case is one query token over random pages in random order, checked against float64 attention on two
sequences before it is timed. Times are medians over replays of a CUDA graph that rotates over as many sets of
pages as it takes to exceed the second-level cache four times. `dense` is the fastest of cuDNN and
FlashAttention SDPA on the same shape in bfloat16; the floor is the bytes of codes and steps at 4.70 TB/s.
"""

from __future__ import annotations

import argparse
import itertools
import json
import pathlib
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(pathlib.Path(__file__).parents[2]))

from kvlab.cache.pages import PageLayout
from kvlab.environment import report
from kvlab.ops import packed_cuda

READ_BANDWIDTH = 4.70e12
ROTATED_BYTES = 240e6
LADDERS: dict[str, dict[int, float]] = {
    "16": {16: 1.0}, "8": {8: 1.0}, "4": {4: 1.0}, "3": {3: 1.0}, "2": {2: 1.0},
    "8/4/2": {2: 0.4, 4: 0.4, 8: 0.2},
}  # fmt: skip
SHAPES = {  # batch, tokens, query heads, KV heads, head_dim
    "gqa 1 x 32K": (1, 32768, 32, 8, 128), "mha 1 x 32K": (1, 32768, 32, 32, 128),
    "gqa 1 x 4K": (1, 4096, 32, 8, 128), "gqa 1 x 128K": (1, 131072, 32, 8, 128),
    "mha 1 x 128K": (1, 131072, 32, 32, 128), "gqa 8 x 32K": (8, 32768, 32, 8, 128),
    "mha 8 x 32K": (8, 32768, 32, 32, 128), "gqa 64 x 16K": (64, 16384, 32, 8, 128),
    "gqa 1 x 32K d64": (1, 32768, 32, 8, 64), "gqa 1 x 32K d80": (1, 32768, 32, 8, 80),
}  # fmt: skip


def median_us(calls: list[Any], replays: int = 50) -> float:
    """Median time of one of `calls`, all of which one graph runs in turn."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    for _ in range(3):
        graph.replay()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(replays + 1)]
    marks[0].record()
    for mark in marks[1:]:
        graph.replay()
        mark.record()
    torch.cuda.synchronize()
    return float(np.median([a.elapsed_time(b) for a, b in itertools.pairwise(marks)])) / len(calls) * 1e3


def dense_us(shape: tuple[int, int, int, int, int]) -> dict[str, float]:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    batch, tokens, heads, kv_heads, d = shape
    size = 4 * batch * tokens * kv_heads * d
    sets = max(1, min(8, round(ROTATED_BYTES / size)))
    data = [
        torch.randn(3, batch, kv_heads, tokens, d, device="cuda", dtype=torch.bfloat16)[:2]
        for _ in range(sets)
    ]
    q = torch.randn(batch, heads, 1, d, device="cuda", dtype=torch.bfloat16)
    times = {}
    for name in ("CUDNN_ATTENTION", "FLASH_ATTENTION"):

        def attend(kv: torch.Tensor, name: str = name) -> None:
            with sdpa_kernel(getattr(SDPBackend, name)):
                torch.nn.functional.scaled_dot_product_attention(
                    q, kv[0], kv[1], enable_gqa=heads != kv_heads
                )

        try:
            times[name] = median_us([lambda kv=kv: attend(kv) for kv in data])
        except RuntimeError as error:
            print(f"{name} {shape}: {str(error)[:100]}", flush=True)
    return times


def draw_pages(shape: tuple[int, int, int, int, int], ladder: dict[int, float]) -> SimpleNamespace:
    """Random pages; the table of each sequence is sorted by width."""
    batch, tokens, _, kv_heads, d = shape
    pairs, entries = batch * kv_heads, tokens // 64
    layouts = tuple(PageLayout(d, bits, bits, 2) for bits in sorted(ladder))
    bounds = np.round(np.cumsum([0.0, *(ladder[bits] for bits in sorted(ladder))]) * entries).astype(int)
    rung = torch.empty(pairs, entries, dtype=torch.uint8, device="cuda")
    index = torch.empty(pairs, entries, dtype=torch.int32, device="cuda")
    pools = []
    for r, layout in enumerate(layouts):
        own = slice(bounds[r], bounds[r + 1])
        count = pairs * (bounds[r + 1] - bounds[r])
        pool = torch.randint(
            -(2**31), 2**31 - 1, (count, layout.nbytes // 4), dtype=torch.int32, device="cuda"
        )
        pool = pool.view(torch.uint8)
        if layout.bits_k == 16:
            size = layout.positions
            for begin in range(0, count, 1024):
                values = torch.randn(min(1024, count - begin), size // 2, device="cuda", dtype=torch.bfloat16)
                pool[begin : begin + 1024, :size] = values.view(torch.uint8)
        else:
            step = torch.exp(torch.randn(count, 128, device="cuda") * 0.3) * (1.7 / 2**layout.bits_k)
            pool[:, layout.k_steps : layout.k_steps + 128] = (step.half().view(torch.int16) >> 7).to(
                torch.uint8
            )
        pools.append(pool)
        rung[:, own] = r
        index[:, own] = torch.randperm(count, device="cuda").to(torch.int32).view(pairs, -1)
    table = (batch, kv_heads, entries)
    return SimpleNamespace(
        layouts=layouts, pools=tuple(pools), rung=rung.view(table), index=index.view(table), dtype="bfloat16",
        count=torch.full(table, 64, dtype=torch.uint8, device="cuda"),
        num_pages=torch.full((batch, kv_heads), entries, dtype=torch.int32, device="cuda"),
        k_mean=torch.randn(batch, kv_heads, d, device="cuda", dtype=torch.float16),
    )  # fmt: skip


def error_of(pages: SimpleNamespace, q: torch.Tensor, out: torch.Tensor, pair: int) -> float:
    """Relative error of the heads of one (row, KV head) against float64."""
    from kvlab.reference.packed import packed_attention

    heads, kv_heads = q.shape[2], pages.rung.shape[1]
    group, b, h = heads // kv_heads, pair // kv_heads, pair % kv_heads
    pools, index = [], pages.index[b, h].cpu().numpy().copy()
    rung = pages.rung[b, h].cpu().numpy()
    for r, pool in enumerate(pages.pools):
        mine = rung == r
        pools.append(pool[torch.from_numpy(index[mine]).long().cuda()].cpu().numpy())
        index[mine] = np.arange(mine.sum())
    one = SimpleNamespace(
        layouts=pages.layouts, pools=pools, rung=rung[None, None], index=index[None, None], dtype="bfloat16",
        count=np.full((1, 1, len(rung)), 64), num_pages=np.array([[len(rung)]]),
        k_mean=pages.k_mean[b, h].cpu().numpy()[None, None],
    )  # fmt: skip
    own = slice(h * group, (h + 1) * group)
    want = packed_attention(q[b : b + 1, :, own].float().cpu().numpy(), one)[0]
    got = out[b : b + 1, :, own].float().cpu().numpy()
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


def packed_case(
    shape: tuple[int, int, int, int, int], ladder: str, warps: int, *, check: bool
) -> dict[str, Any]:
    batch, tokens, heads, kv_heads, d = shape
    pages = draw_pages(shape, LADDERS[ladder])
    needed = sum(layout.positions * int((pages.rung == r).sum()) for r, layout in enumerate(pages.layouts))
    sets = max(1, min(16, round(ROTATED_BYTES / needed)))
    every = [pages] + [draw_pages(shape, LADDERS[ladder]) for _ in range(sets - 1)]
    q = torch.randn(batch, 1, heads, d, device="cuda", dtype=torch.bfloat16)
    out, lse = torch.full_like(q, float("nan")), torch.empty(batch, heads, 1, device="cuda")
    workspace = packed_cuda.make_workspace(q, batch * kv_heads, heads // kv_heads, d)

    def call(own: SimpleNamespace) -> None:
        packed_cuda.attend(q, own, out, lse, workspace, scale=d**-0.5, warps=warps)

    call(pages)
    errors = (
        [error_of(pages, q, out, pair) for pair in (0, batch * kv_heads - 1)]
        if check and tokens <= 32768
        else []
    )
    if errors and not max(errors) < 1e-2:
        raise SystemExit(f"{shape} {ladder}: relative error {errors}")
    us = median_us([lambda own=own: call(own) for own in every])
    if needed / us / 1e-6 > 1.02 * READ_BANDWIDTH and sets * needed > 2e8:
        raise SystemExit(f"{shape} {ladder}: {us} us is faster than the memory")
    return {
        "us": us,
        "bytes": needed,
        "sets": sets,
        "tbs": needed / us / 1e6,
        "floor_share": needed / READ_BANDWIDTH / us * 1e6,
        "relative_error": max(errors, default=None),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--ladders", default=",".join(LADDERS))
    parser.add_argument("--warps", default="0", help="warps of a block to try; 0 is what the library takes")
    parser.add_argument("--no-check", action="store_true")
    parser.add_argument("--no-dense", action="store_true")
    options = parser.parse_args()
    rows = []
    for name in options.shapes.split(","):
        shape = SHAPES[name]
        dense = {} if options.no_dense else dense_us(shape)
        best = min(dense.values(), default=float("nan"))
        print(f"{name}: dense {dense}", flush=True)
        for ladder, warps in itertools.product(
            options.ladders.split(","), map(int, options.warps.split(","))
        ):
            try:
                row = packed_case(shape, ladder, warps, check=not options.no_check)
            except (NotImplementedError, RuntimeError) as error:
                print(f"{name} {ladder} w{warps}: {error!r}"[:200], flush=True)
                continue
            row |= {
                "shape": name,
                "ladder": ladder,
                "warps": warps,
                "dense_us": dense,
                "ratio": best / row["us"],
            }
            rows.append(row)
            print(
                f"{name:16s} {ladder:6s} w{warps:<2d} {row['us']:8.2f} us {row['tbs']:5.2f} TB/s "
                f"floor {row['floor_share']:.2f} ratio {row['ratio']:.2f} err {row['relative_error']}",
                flush=True,
            )
            torch.cuda.empty_cache()
        options.out.write_text(json.dumps({"environment": report(), "rows": rows}, indent=1))


if __name__ == "__main__":
    main()

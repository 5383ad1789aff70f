"""Pages on a GPU for benchmarks of decode attention, and checks of its results.

Pages hold random codes and lie in random order; the table of each sequence is sorted by width, the worst
order for a division of the work.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from kvlab.ops.frame import FRAME
from kvlab.pages import QUAD, TOKENS_PER_PAGE, DevicePages, PageLayout, Width, width_number
from kvlab.reference.packed import packed_attention

__all__ = ["Mixture", "Shape", "attended_apart", "draw_pages", "relative_error"]

Mixture = Mapping[int | tuple[Width, int], float]
"""The fraction of a sequence's pages at each width, or pair of a width or profile of K and a width of V."""


@dataclass(frozen=True)
class Shape:
    """One decode step of one layer: `tokens` stored tokens in each of `batch` rows."""

    batch: int
    tokens: int
    num_heads_q: int = 32
    num_heads_kv: int = 8
    head_dim: int = 128

    @property
    def num_sequences(self) -> int:
        """Sequences of pages: (row, KV head) pairs."""
        return self.batch * self.num_heads_kv


def draw_pages(shape: Shape, mixture: Mixture, device: str = "cuda") -> DevicePages:
    """Return full pages of random codes in random order; the table of each sequence is sorted by width."""
    import torch

    rungs = [(key if isinstance(key, tuple) else (key, key), fraction) for key, fraction in mixture.items()]
    in_order = sorted(rungs, key=lambda rung: (width_number(rung[0][0]), rung[0][1]))
    quads = shape.tokens // (QUAD * TOKENS_PER_PAGE)
    entries = QUAD * quads
    layouts = tuple(PageLayout(shape.head_dim, *bits, 2) for bits, _ in in_order)
    bounds = QUAD * np.round(np.cumsum([0.0, *(fraction for _, fraction in in_order)]) * quads).astype(int)
    rung = torch.empty(shape.num_sequences, entries, dtype=torch.uint8, device=device)
    index = torch.empty(shape.num_sequences, entries, dtype=torch.int32, device=device)
    pools = []
    for r, layout in enumerate(layouts):
        count = shape.num_sequences * int(bounds[r + 1] - bounds[r])
        pools.append(_draw_pool(layout, count, device))
        rung[:, bounds[r] : bounds[r + 1]] = r
        order = torch.randperm(count, device=device).to(torch.int32)
        index[:, bounds[r] : bounds[r + 1]] = order.view(shape.num_sequences, -1)
    frame = shape.batch, shape.num_heads_kv
    table = (*frame, entries)
    orders = [torch.randperm(shape.head_dim // 2, device=device) for _ in range(shape.num_sequences)]
    return DevicePages(
        layouts=layouts,
        pools=tuple(pools),
        rung=rung.view(table),
        index=index.view(table),
        count=torch.full(table, TOKENS_PER_PAGE, dtype=torch.uint8, device=device),
        base=torch.zeros(table, dtype=torch.int16, device=device),
        num_pages=torch.full(frame, entries, dtype=torch.int32, device=device),
        k_mean=torch.randn(*frame, shape.head_dim, device=device, dtype=torch.float16),
        k_shift=torch.zeros(*frame, shape.head_dim // 2, device=device, dtype=torch.uint8),
        exponent=torch.zeros(*frame, 2, device=device, dtype=torch.int8),
        k_order=torch.stack(orders).to(torch.uint8).view(*frame, shape.head_dim // 2),
        k_gain=(16 * torch.exp(torch.randn(*frame, 4, device=device) * 0.3)).half().float(),
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
        for begin, bits in ((layout.k_scales, layout.bits_k), (layout.v_scales, layout.bits_v)):
            unit = 0.25 if isinstance(bits, tuple) else 1.7 / 2**bits
            scale = torch.exp(torch.randn(count, TOKENS_PER_PAGE, device=device) * 0.3)
            codes = (scale * unit).half().view(torch.int16) >> 7
            pool[:, begin : begin + TOKENS_PER_PAGE] = codes.to(torch.uint8)
    return pool


def relative_error(pages: DevicePages, q: Any, out: Any, pair: int) -> float:
    """Return the relative error of the heads of one (row, KV head) against float64."""
    heads, kv_heads = q.shape[2], pages.rung.shape[1]
    group, b, h = heads // kv_heads, pair // kv_heads, pair % kv_heads
    rung, index = pages.rung[b, h].cpu(), pages.index[b, h].cpu().long()
    pools, slot = [], index.numpy().copy()
    for r, pool in enumerate(pages.pools):
        mine = rung == r
        pools.append(pool[index[mine].to(pool.device)].cpu().numpy())
        slot[mine.numpy()] = np.arange(int(mine.sum()))
    one = DevicePages(
        layouts=pages.layouts,
        pools=tuple(pools),
        rung=rung.numpy()[None, None],
        index=slot[None, None],
        count=np.full((1, 1, len(rung)), TOKENS_PER_PAGE),
        base=np.zeros((1, 1, len(rung)), np.uint16),
        num_pages=np.array([[len(rung)]]),
        **{name: getattr(pages, name)[b, h].cpu().numpy()[None, None] for name in FRAME},
        dtype=pages.dtype,
    )
    own = slice(h * group, (h + 1) * group)
    options = {"scale": q.shape[3] ** -0.5, "softcap": 0.0, "keep_scores": 0}
    want = packed_attention(q[b : b + 1, :, own].float().cpu().numpy(), one, **options)[0]
    got = out[b : b + 1, :, own].float().cpu().numpy()
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


def attended_apart(pages: DevicePages, q: Any, backend: Any) -> Any:
    """Return what `backend.attend` gives if every (row, KV head) is a call of its own."""
    import torch

    batch, kv_heads = pages.num_pages.shape
    group, out = q.shape[2] // kv_heads, torch.full_like(q, float("nan"))
    workspace = backend.make_workspace(q, 1, group, q.shape[3])
    lse = torch.empty(1, group, 1, device=q.device)
    part = torch.empty(1, 1, group, q.shape[3], dtype=q.dtype, device=q.device)
    for b, h in itertools.product(range(batch), range(kv_heads)):
        own, heads = (slice(b, b + 1), slice(h, h + 1)), slice(h * group, (h + 1) * group)
        tables = "rung", "index", "count", "base", "num_pages", *FRAME
        alone = replace(pages, **{name: getattr(pages, name)[own] for name in tables})
        backend.attend(q[own[0], :, heads], alone, part, lse, workspace, scale=q.shape[3] ** -0.5)
        out[own[0], :, heads] = part
    return out

"""Packed attention on the CPU: the kernels for a few query rows and for many.

This module lays out queries, page tables with addresses, and windows of rows for the kernels. Partial results
of a row are merged in order, so the result has the same bits for any number of threads.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvlab.arrays import Array, ArrayT
from kvlab.new_arrays import like_first
from kvlab.ops.cpu.exact import NO_REST
from kvlab.ops.cpu.layer import array_at, view_at
from kvlab.ops.packed import PackedAttention, Pages, Window
from kvlab.pages import QUAD, TOKENS_PER_PAGE, PageLayout
from kvlab.threads import run_parallel
from kvlab.views import CudaView, to_numpy_view

__all__ = ["AttendCall", "LseRest", "attend", "attend_into", "mass"]

ROWS_AT_ONCE = 4
"""Query rows that one expansion of a page serves on the CPU: what its registers hold."""

FEW_ROWS = 16
"""Query rows of a KV head up to which a page is expanded again for every four of them; with more, once."""

_ITEMS = 64
_QUADS_PER_ITEM = 4
_WORTH_SHARING = 8_000_000  # multiplications, about a quarter of a millisecond


@lru_cache(maxsize=64)
def _layout_table(layouts: tuple[PageLayout, ...], dtype: str, rows: int) -> NDArray[np.int64]:
    """Describe the rungs to the kernels; the addresses of the pools are filled in at each call.

    `rows` is what one product serves: up to `ROWS_AT_ONCE`, or 0 for pages that are expanded to memory.
    """
    from kvlab.numba_kernels.cpu import expand as cpu_expand
    from kvlab.numba_kernels.cpu import fragments as cpu_fragments
    from kvlab.numba_kernels.cpu import page as cpu_page

    table = np.zeros((len(layouts), cpu_page.LAYOUT_FIELDS), np.int64)
    for row, layout in zip(table, layouts, strict=True):
        k, v = (_kind(bits, dtype) for bits in (layout.bits_k, layout.bits_v))
        row[cpu_page.RECORD] = layout.nbytes
        row[cpu_page.V_CODES] = layout.v_codes
        row[cpu_page.K_SCALES] = layout.k_scales if layout.bits_k != 16 else -1
        row[cpu_page.V_SCALES] = layout.v_scales if layout.bits_v != 16 else -1
        row[cpu_page.POSITIONS] = layout.positions
        if rows:
            functions = cpu_fragments.key_product(k, rows), cpu_fragments.value_product(v, rows)
        else:
            functions = cpu_expand.expansion(k, "k"), cpu_expand.expansion(v, "v")
        row[cpu_page.K_FUNCTION], row[cpu_page.V_FUNCTION] = (one.address for one in functions)
    return table


def _kind(width: Any, dtype: str) -> str:
    """Return what kernels call the codes of a side."""
    if isinstance(width, tuple):
        return "".join(map(str, width))
    return dtype if width == 16 else str(width)


def _key_frames(pages: Pages, num_bh: int) -> tuple[NDArray[Any], ...]:
    """Return mean, shift, exponent, order and gain of keys: `keys` of `kernels/numba/cpu/key_frame.py`."""

    def of_heads(x: Any, kind: Any) -> NDArray[Any]:
        return np.ascontiguousarray(x).reshape(num_bh, x.shape[-1]).view(kind)

    mean = of_heads(pages.k_mean, np.float16).astype(np.float32)
    order, gain = of_heads(pages.k_order, np.uint8), of_heads(pages.k_gain, np.float32)
    if not any(layout.in_blocks for layout in pages.layouts):
        gain = gain[:, :0]
    return mean, of_heads(pages.k_shift, np.uint8), of_heads(pages.exponent, np.int8), order, gain


class _CpuCall(NamedTuple):
    """A call as the CPU kernels take it; num_bh is batch * num_heads_kv."""

    queries: NDArray[np.float32]  # (batch, seqlen_q, num_heads_q, head_dim)
    block: int  # in which keys are rotated
    keys: tuple[NDArray[Any], ...]  # their frames
    table: tuple[NDArray[Any], ...]  # rung, count, index (num_bh, entries); num_pages (num_bh,)
    base: NDArray[np.uint16]  # (num_bh, entries), or (num_bh, 0) without a window
    first_visible: NDArray[np.int64] | None  # (batch, seqlen_q): the first position a query token sees
    scale: float
    softcap: np.float32
    saved: NDArray[np.float32]  # (num_bh, quads, saved rows, 64), to be filled
    first_saved: int
    alone: bool

    def layouts(self, pages: Pages, rows: int, *, checked: bool = False) -> NDArray[np.int64]:
        """Describe the rungs with the addresses of their pools; refuse a table that leads outside them."""
        from kvlab.numba_kernels.cpu import page as cpu_page

        layouts = _layout_table(tuple(pages.layouts), pages.dtype, rows).copy()
        layouts[:, cpu_page.POOL] = [pool.ctypes.data for pool in pages.pools]
        last = np.array([pool.nbytes for pool in pages.pools]) - layouts[:, cpu_page.RECORD]
        if unit := getattr(pages, "unit", 0):  # bytes that `index` counts, if it does not count pages
            layouts[:, cpu_page.RECORD] = unit
        if not checked and not cpu_page.check_table(*self.table, layouts, last):
            raise ValueError(
                "pages: an entry of the page table names a page that does not exist; check_entries() says "
                "which"
            )
        return layouts

    @property
    def page_table(self) -> tuple[NDArray[Any], ...]:
        """The page table as the kernels take it."""
        return (*self.table[:3], self.base, self.table[3])

    def first_visible_of_rows(self, num_bh: int, *shape: int) -> NDArray[np.int64]:
        """`first_visible` of query rows, (num_bh, *shape); rows beyond the last are as the last."""
        if self.first_visible is None:
            return np.zeros((num_bh, *shape), np.int64)
        batch, seqlen_q = self.first_visible.shape
        group = self.queries.shape[2] * batch // max(num_bh, 1)
        token = np.minimum(np.arange(math.prod(shape)) // max(group, 1), seqlen_q - 1)
        return np.repeat(self.first_visible[:, token], num_bh // max(batch, 1), axis=0).reshape(
            num_bh, *shape
        )

    def splits(self, items: int, max_items: int, quads_each: int) -> int:
        """Into how many ranges to cut the quads of a row, so that there are about `max_items` of work."""
        used = int(self.table[3].max(initial=0)) // QUAD  # the table of a loaded cache is shorter
        return max(1, min(-(-max_items // max(items, 1)), used // quads_each))


def attend(
    q: ArrayT, pages: Pages, group: int, scale: float, softcap: float, keep_scores: int, window: Window | None
) -> PackedAttention[ArrayT]:
    """Launcher of backend "cpu" for `kvlab.ops.packed.packed_attention`."""
    view = to_numpy_view(q, "q")
    batch, seqlen_q, heads, _ = view.shape
    out, lse = np.empty(view.shape, np.float32), np.empty((batch, heads, seqlen_q), np.float32)
    quads = pages.rung.shape[2] // QUAD
    scores = np.empty((batch, heads // group, quads, keep_scores * group, QUAD * TOKENS_PER_PAGE), np.float32)
    attend_into(out, lse, scores, view, pages, group, scale, softcap, window)
    return PackedAttention(
        like_first(out.astype(view.dtype, copy=False), q),
        like_first(lse, q),
        like_first(scores, q) if keep_scores else None,
    )


def attend_into(
    out: NDArray[np.float32],
    lse: NDArray[np.float32],
    scores: NDArray[np.float32],
    view: NDArray[Any],
    pages: Pages,
    group: int,
    scale: float,
    softcap: float,
    window: Window | None = None,
) -> NDArray[np.float32]:
    """Attend with queries of NumPy; results and scores, of as many last rows as they have, go to arrays.

    Returns what lse lost when it was rounded to float32.
    """
    from kvlab.numba_kernels.cpu import packed_large as large
    from kvlab.numba_kernels.cpu.packed_merge import merge_parts

    batch, seqlen_q, heads, head_dim = view.shape
    num_bh, entries, query_rows = batch * (heads // group), pages.rung.shape[2], seqlen_q * group
    keep_scores = scores.shape[3] // group
    rung, count, index = (
        np.ascontiguousarray(x).reshape(num_bh, entries) for x in (pages.rung, pages.count, pages.index)
    )
    index = index.view(np.uint32)
    num_pages = np.ascontiguousarray(pages.num_pages).reshape(num_bh)
    base, first_visible = np.zeros((num_bh, 0), np.uint16), None
    if window:
        base = np.ascontiguousarray(pages.base).reshape(num_bh, entries).view(np.uint16)
        first = to_numpy_view(window.first, "first_position").astype(np.int64)
        first_visible = first[:, None] + np.arange(seqlen_q) - window.left
    keys = _key_frames(pages, num_bh)
    # Values, and keys that are not in blocks, are rotated in the largest power of two that divides head_dim.
    block = head_dim & -head_dim
    call = _CpuCall(
        queries=np.ascontiguousarray(view, np.float32),
        block=block // 4 if keys[-1].size else block,
        keys=keys,
        table=(rung, count, index, num_pages),
        base=base,
        first_visible=first_visible,
        scale=scale,
        softcap=np.float32(softcap),
        saved=scores.reshape(num_bh, *scores.shape[2:]),
        first_saved=(seqlen_q - keep_scores) * group,
        alone=2 * TOKENS_PER_PAGE * int(num_pages.sum()) * query_rows * head_dim < _WORTH_SHARING,
    )
    few = query_rows <= FEW_ROWS
    attend_rows = _attend_few_rows if few else _attend_many_rows
    least_size = large.LEAST_OF_FEW if few else large.LEAST_OF_MANY
    notes_each = large.NOTES if view.dtype == np.float32 else 0
    parts, row_max, sums, notes = attend_rows(call, pages, num_bh, query_rows, notes_each)
    row_sum = sums.astype(np.float64)
    if notes_each and large.any_large(row_max, row_sum, notes, query_rows, least_size, call.softcap):
        run_parallel(
            large.sharpen_parts, np.zeros(1, np.int64), call.queries, scale, softcap, least_size, keys,
            call.block, call.page_table, call.layouts(pages, 0, checked=True), parts, row_max, row_sum, notes,
            alone=call.alone,
        )  # fmt: skip
    rest = np.empty_like(lse)
    merge_parts(parts, row_max, row_sum, block, keys[2], out, lse, rest)
    return rest


_Notes = tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.float32]]
_Parts = tuple[NDArray[np.float32], NDArray[np.float32], NDArray[np.float32], _Notes]
"""out (2, num_bh, blocks, parts, rows, head_dim), row_max, row_sum (num_bh, blocks, parts, rows), notes."""


def _new_notes(shape: tuple[int, ...], notes_each: int) -> _Notes:
    """Room for the notes of `packed_large`."""
    number = np.empty(shape if notes_each else (0,) * len(shape), np.int32)
    slot = np.empty((*number.shape, notes_each), np.int32)
    return number, slot, np.empty(slot.shape, np.float32)


def _attend_few_rows(call: _CpuCall, pages: Pages, num_bh: int, query_rows: int, notes_each: int) -> _Parts:
    from kvlab.numba_kernels.cpu import packed as kernels

    head_dim = call.queries.shape[3]
    blocks = -(-query_rows // ROWS_AT_ONCE)
    rows = -(-query_rows // blocks) if 0 < blocks < 3 else ROWS_AT_ONCE
    layouts = call.layouts(pages, rows)
    coded, raw = np.empty((2, num_bh, blocks, head_dim // 16, 2, 2, rows, 4), np.float32)
    bias, first_visible = (
        np.empty((num_bh, blocks, rows), np.float32),
        call.first_visible_of_rows(num_bh, blocks, rows),
    )
    unit = np.float32(call.scale if call.softcap else call.scale * float(kernels.LOG2_E))
    kernels.lay_out_queries(call.queries, unit, call.keys, call.block, coded, raw, bias)
    splits = call.splits(num_bh * blocks, _ITEMS, _QUADS_PER_ITEM)
    parts = np.empty((2, num_bh, blocks, splits, rows, head_dim), np.float32)
    row_max, row_sum = np.empty((2, num_bh, blocks, splits, rows), np.float32)
    notes = _new_notes(row_max.shape, notes_each)
    run_parallel(
        kernels.attend_pages, np.zeros(2, np.int64), (coded, raw, bias, first_visible), call.page_table,
        layouts, pages.layouts[0].itemsize, call.softcap, call.saved, call.first_saved,
        (parts, row_max, row_sum), notes, alone=call.alone,
    )  # fmt: skip
    return parts, row_max, row_sum, notes


def _attend_many_rows(call: _CpuCall, pages: Pages, num_bh: int, query_rows: int, notes_each: int) -> _Parts:
    from kvlab.numba_kernels.cpu import packed_rows as kernels

    head_dim, layouts = call.queries.shape[3], call.layouts(pages, 0)
    panels = -(-query_rows // kernels.PANEL)
    blocks = -(-panels // kernels.PANELS)
    rows = min(panels, kernels.PANELS) * kernels.PANEL
    coded, raw = np.empty((2, num_bh, panels, (head_dim + 1) * kernels.PANEL), np.float32)
    first_visible = call.first_visible_of_rows(num_bh, panels, kernels.PANEL)
    kernels.lay_out_panels(call.queries, np.float32(call.scale), call.keys, call.block, coded, raw)
    # Two parts for each range of quads: those with coded values and those with raw ones.
    shape = (num_bh, blocks, 2 * call.splits(num_bh * blocks, _ITEMS // 4, 4 * _QUADS_PER_ITEM), rows)
    parts, (row_max, row_sum) = np.zeros((2, *shape, head_dim), np.float32), np.zeros((2, *shape), np.float32)
    notes = _new_notes(shape, notes_each)
    run_parallel(
        kernels.attend_rows, np.zeros(1, np.int64), (coded, raw, first_visible), call.page_table, layouts,
        call.softcap, call.saved, call.first_saved, (parts, row_max, row_sum), notes, alone=call.alone,
    )  # fmt: skip
    return parts, row_max, row_sum, notes


def mass(scores: ArrayT, lse: Array, pages: Pages, group: int) -> ArrayT:
    """Launcher of backend "cpu" for `kvlab.ops.packed.mass_from_scores`."""
    from kvlab.numba_kernels.cpu.packed_merge import sum_mass

    saved, total = to_numpy_view(scores, "scores"), to_numpy_view(lse, "lse")
    batch, kv_heads, quads, rows, slots = saved.shape
    num_bh = batch * kv_heads
    last = np.ascontiguousarray(total[..., total.shape[2] - rows // group :])
    mass = np.empty((num_bh, quads, slots), np.float32)
    count = np.ascontiguousarray(pages.count).reshape(num_bh, quads, QUAD)
    num_pages = np.ascontiguousarray(pages.num_pages).reshape(num_bh)
    flat = np.ascontiguousarray(saved).reshape(num_bh, quads, rows, slots)
    alone = flat.size < _WORTH_SHARING // 16
    run_parallel(sum_mass, np.zeros(1, np.int64), flat, last, count, num_pages, group, mass, alone=alone)
    return like_first(mass.reshape(batch, kv_heads, QUAD * quads, TOKENS_PER_PAGE), scores)


class LseRest:
    """What the last log-sum-exp over stored tokens lost when it was rounded to float32, by its address.

    Those who merge it with that of other tokens take it: at 50 it is up to 2e-6, which all weights of a part
    would be off by.
    """

    def __init__(self) -> None:
        self._address, self._values = 0, NO_REST

    def keep(self, address: int, values: NDArray[np.float32]) -> None:
        """Keep what is lost of the log-sum-exp at an address, and nothing else."""
        self._address, self._values = address, values

    def of(self, address: int, shape: tuple[int, ...]) -> NDArray[np.float32]:
        """What is lost of the log-sum-exp at an address, (batch, heads, rows); 0 if that is not known."""
        known = address == self._address and self._values.shape == shape
        return self._values if known else np.zeros(shape, np.float32)


class AttendCall:
    """Packed attention over the pages of one layer, as `kvlab.ops.cuda.packed.AttendCall`."""

    def __init__(
        self, pages: Any, *, scale: float, softcap: float, rest: LseRest, scores: Any = None,
        window: Window | None = None,
    ) -> None:  # fmt: skip
        self._pages, self._scale, self._softcap, self._rest = pages, scale, softcap, rest
        self._scores, self._window = scores, window

    def use(self, workspace: Any, scores: Any) -> None:
        """Keep scores elsewhere from now on."""
        self._scores = scores

    def __call__(self, view: CudaView, out: int, lse: int, stream: int) -> None:
        """Attend with the queries of a view; write to contiguous float32 arrays at two addresses."""
        (batch, num_new, heads, _), (*bh, entries) = view.shape, self._pages.rung.shape
        quads, slots = (*bh, entries // QUAD), QUAD * TOKENS_PER_PAGE
        kept = np.empty((*quads, 0), np.float32) if self._scores is None else self._scores.view(np.float32)
        results = array_at(out, view.shape, "float32"), array_at(lse, (batch, heads, num_new), "float32")
        lost = attend_into(
            *results, kept.reshape(*quads, kept.shape[-1] // slots, slots), view_at(view), self._pages,
            heads // bh[1], self._scale, self._softcap, self._window,
        )  # fmt: skip
        self._rest.keep(lse, lost)

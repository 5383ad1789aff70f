"""Launchers of the kernels that store tokens in a cache on a CPU: what `kvlab.ops.cuda.pages` is for a GPU.

They take layers (`HostLayer`) where those take addresses of structs. A launch has ended when it returns.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvlab.ops.cpu.exact import NO_REST, attend_exact, merge_two
from kvlab.ops.cpu.layer import HostLayer, array_at, vectors_of, view_at
from kvlab.ops.cpu.packed import LseRest
from kvlab.ops.cpu.refit import fit_frames
from kvlab.ops.cpu.rows import MergedTokens, NewRow, freeze_row
from kvlab.ops.cpu.scores import norm_codes
from kvlab.ops.frame import ASKING, LAST, add_queries
from kvlab.ops.layer_state import OBSERVED, ROWS, UNIT, WAITING_PAGES
from kvlab.pages import TOKENS_PER_PAGE, encode_importance
from kvlab.threads import run_parallel
from kvlab.views import CudaView

__all__ = ["AppendCall", "copy_pages", "crop_rows", "freeze_means", "merge_rows", "write_tokens"]

Floats = NDArray[np.float32]
_PARALLEL_MOVES = 256  # fewer take less than about a quarter of a millisecond


def write_tokens(layers: Sequence[HostLayer], moves: Sequence[Any], new_tokens: Any) -> None:
    """Carry out the moves of a phase, by layer."""
    from kvlab.numba_kernels.cpu.cache_write import write_moves

    num_new, first = int(new_tokens["num_new"]), int(new_tokens["first"])
    for layer, mine in zip(layers, moves, strict=True):
        if len(mine):
            begins = np.flatnonzero(np.diff(mine[:, 1], prepend=np.int64(-1), append=np.int64(-1)))
            run_parallel(
                write_moves, np.zeros(1, np.int64), begins, mine, layer.arena, layer.planned.rungs,
                layer.formats, layer.frames, _moved(layer, new_tokens), alone=len(mine) < _PARALLEL_MOVES,
            )  # fmt: skip
        if num_new:
            layer.tables["seqlen"][...] = first + num_new


def _moved(layer: HostLayer, new_tokens: Any) -> Any:
    """New tokens that a struct names, as kernels take them."""
    num_new, first, (batch, heads, _) = int(new_tokens["num_new"]), int(new_tokens["first"]), layer.shape
    codes = array_at(int(new_tokens["importance"]), (batch * heads, num_new), "uint8")
    positions = layer.positions(int(new_tokens["positions"]), num_new, first)
    k, v = vectors_of(new_tokens, (batch, num_new, heads, layer.head_dim))
    return layer.fresh(k, v, codes, positions)


def copy_pages(layers: Sequence[HostLayer], copies: Sequence[Any]) -> None:
    """Carry out page copies of a plan, by layer."""
    for layer, mine in zip(layers, copies, strict=True):
        units = layer.arena.reshape(-1, UNIT)
        for source, target, rung in mine.tolist():
            n = layer.layouts[rung].nbytes // UNIT
            units[target : target + n] = units[source : source + n]


def freeze_means(
    layer: HostLayer, new_tokens: Any, addresses: Sequence[int], before: int, *, lookahead: int, force: bool,
    queries: CudaView | None = None,
) -> None:  # fmt: skip
    """`kvlab.ops.cuda.pages.freeze_means`, of one layer."""
    (batch, heads, _), head_dim, num_new = layer.shape, layer.head_dim, int(new_tokens["num_new"])
    total, mask, codes = before + num_new, int(new_tokens["valid"]), int(new_tokens["importance"])
    wide, of_rows = ((batch, total, heads, head_dim), "float32"), (batch, total)
    kinds = (wide, wide, (of_rows, "uint8"), ((batch * heads, total), "uint8"), (of_rows, "int32"))
    given = zip(addresses, kinds, strict=True)
    merged = MergedTokens(before, *(array_at(at, *kind) if at else None for at, kind in given))
    k, v = vectors_of(new_tokens, (batch, num_new, heads, head_dim))
    k = layer.rounded(k)  # of exact tokens, of which the frame is taken
    valid = array_at(mask, (batch, num_new), "bool") if mask else np.ones((batch, num_new), bool)
    importance = array_at(codes, (batch, heads, num_new), "uint8")
    q = np.empty((batch, 0, heads, head_dim), np.float32) if queries is None else view_at(queries)
    for row in range(batch):
        new = NewRow(k[row], v[row], q[row], valid[row], importance[row], int(new_tokens["first"]))
        freeze_row(layer, row, new, merged, lookahead, force)


def crop_rows(layers: Sequence[HostLayer], end: int) -> None:
    """Give all rows another length, and take waiting tokens beyond it out of their pages."""
    for layer in layers:
        tables, tail = layer.with_waiting, layer.exact.positions
        layer.tables["seqlen"][...] = end
        waiting = (tables.num_pages > 0) & np.repeat(layer.waits, layer.shape[1])
        for bh in np.flatnonzero(waiting):
            for entry in range(WAITING_PAGES):
                start, count = int(tables.addresses[bh, entry]) * UNIT + tail, int(tables.counts[bh, entry])
                held = layer.arena[start : start + 2 * TOKENS_PER_PAGE].view("<u2")[:count]
                position = (int(tables.base[bh, entry]) << 16) + held.astype(np.int64)
                tables.counts[bh, entry] = (position < end).sum()


def merge_rows(head_dim: int, addresses: Sequence[int], shape: tuple[int, int, int], rest: LseRest) -> None:
    """`kvlab.ops.cuda.pages.merge_rows`; the other part is that over stored tokens."""
    (batch, num_new, heads), dtype = shape, "float32"
    out, other = (array_at(addresses[i], (*shape, head_dim), dtype) for i in (0, 2))
    lse, other_lse = (array_at(addresses[i], (batch, heads, num_new), dtype) for i in (1, 3))
    out[...], lse[...] = merge_two(other, other_lse, rest.of(addresses[3], other_lse.shape), out, lse)


class AppendCall:
    """The append of one layer; arguments of a call as those of `kvlab.ops.cuda.pages.AppendCall`."""

    def __init__(
        self, layer: HostLayer, *, scale: float, softcap: float, observed: int, rest: LseRest, rows: int = 0
    ) -> None:
        self._layer, self._observed, self._rows, self._rest = layer, observed, rows, rest
        self._scale, self._softcap = scale, softcap

    def __call__(
        self, q: CudaView | None, k: CudaView, v: CudaView, valid: int, out: int, lse: int, stored: bool,
        stream: int,
    ) -> None:  # fmt: skip
        """Finish attention over stored tokens with the new ones, then store these."""
        keys, values = view_at(k), view_at(v)
        batch, num_new, heads, _ = k.shape
        mask = array_at(valid, (batch, num_new), "bool") if valid else np.ones((batch, num_new), bool)
        codes = np.full((batch, heads, num_new), encode_importance(np.ones(1))[0], np.uint8)
        waits = self._layer.waits
        rows = {ROWS["all"]: np.ones_like(waits), ROWS["waiting"]: waits, ROWS["others"]: ~waits}[self._rows]
        if self._observed == OBSERVED["norm"]:
            codes = norm_codes(keys)
        if q is not None:
            mass = self._finish(view_at(q), keys, values, mask, out, lse, stored, rows)
            if self._observed == OBSERVED["mass"]:
                codes = encode_importance(np.nan_to_num(mass))
            self._note_queries(view_at(q), mask, waits & rows)
        self._store(None if q is None else view_at(q), keys, values, mask, codes, rows)

    def _finish(
        self, q: Any, k: Any, v: Any, valid: Any, out: int, lse: int, stored: bool, rows: NDArray[np.bool_]
    ) -> Floats:
        """Merge attention over new tokens of some rows into `out` and `lse`; return what these receive."""
        batch, num_new, heads, _ = q.shape
        every = array_at(out, q.shape, q.dtype.name), array_at(lse, (batch, heads, num_new), "float32")
        q, k, v, valid, result, total = (x[rows] for x in (q, k, v, valid, *every))
        lost = self._rest.of(lse, every[1].shape)[rows] if stored else NO_REST
        if not stored:
            result[...], total[...] = 0, -np.inf
        rules: dict[str, Any] = {"scale": self._scale, "softcap": self._softcap, "keep_rows": num_new}
        q, k, v = (x.astype(np.float32) for x in (q, k, v))
        exact = attend_exact(q, k, v, valid, **rules)
        result, total = exact.merged(result, total, lost)
        if not valid.all():
            result[~valid], total.swapaxes(1, 2)[~valid] = 0, np.inf
        every[0][rows], every[1][rows] = result, total
        received = np.zeros((batch, k.shape[2], num_new), np.float32)
        received[rows] = exact.mass(total)
        return received

    def _note_queries(self, q: Any, valid: Any, rows: NDArray[np.bool_]) -> None:
        """Add queries of some rows, which wait, to what their frames are made of."""
        tables = self._layer.tables
        for row in np.flatnonzero(rows):
            waiting = int(tables["count"][row, 0, :WAITING_PAGES].sum())
            asking = np.flatnonzero(valid[row])[max(ASKING - waiting, 0) : max(LAST - waiting, 0)]
            add_queries(tables["query_sums"][row], q[row, asking])

    def _store(self, q: Any, k: Any, v: Any, valid: Any, codes: Any, rows: NDArray[np.bool_]) -> None:
        """Store new tokens of some rows in open pages: codes (batch, heads, num_new) are their importance."""
        from kvlab.numba_kernels.cpu.cache_write import append_tokens

        layer, num_new = self._layer, k.shape[1]
        lengths, waits = layer.tables["seqlen"], layer.waits
        codes = np.ascontiguousarray(codes).reshape(-1, num_new)
        positions = layer.positions(0, num_new, int(lengths[rows].max(initial=0)))
        new, formats = layer.fresh(k, v, codes, positions), layer.formats
        if q is not None and layer.in_blocks:
            fit_frames(layer, q, new.k, valid & (rows & ~waits)[:, None])
        frames = layer.frames
        for tables, mine in ((layer.planned, ~waits & rows), (layer.with_waiting, waits & rows)):
            if mine.any() and not append_tokens(tables, formats, frames, new, valid & mine[:, None]):
                layer.tables["status"] |= 1
        lengths[rows] += num_new

"""The kernels of a cache in CPU memory: what the host's side of a cache launches, by Numba on NumPy arrays.

A cache is one model: arenas and tables (store.py), a planner, and some ten launches. `CpuKernels` has these
launches for a store in host memory, with the arguments of `kvlab.cache.cuda.GpuKernels`: addresses,
strides, structs. What a plan decides is `kvlab.reference.cache_plan` on both; same tokens and same importance
give the same pages. `CPU` has the memory that they work on.

A launch has ended when it returns, so there are no streams; move lists stay in the workspace of their plan.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvlab.arrays import CudaView, dtype_name, like_first, meant_strides, numpy_dtype, to_numpy_view
from kvlab.cache.cpu_rows import MergedTokens, NewRow, copy_pages, freeze_row, take_rows
from kvlab.cache.frame import ASKING, FRAME, FRAME_OF_BLOCKS, LAST, add_queries
from kvlab.cache.ladder import Rung, first_seen
from kvlab.cache.store import UNIT, WAITING_PAGES, DevicePages, DeviceStore, RowMove
from kvlab.ops.cpu.exact import attend_exact, exact_mass
from kvlab.ops.cpu.packed import attend_into, mass
from kvlab.ops.packed import Window
from kvlab.ops.plan import Ladder, PlanShape, choose_optimum, hulls_of
from kvlab.pages import (
    QUAD,
    TOKENS_PER_PAGE,
    PageLayout,
    decode_importance,
    encode_importance,
    prepared_frames,
    side_formats,
)
from kvlab.threads import run_parallel

__all__ = ["CPU", "AppendCall", "AttendCall", "CpuExecutor", "CpuKernels", "Workspace", "levels_of"]

Floats = NDArray[np.float32]
OBSERVED_MASS, OBSERVED_NORM = 0, 1
_NOTHING = SimpleNamespace(partial=np.zeros(0), semaphores=np.zeros(0))
_MAPPED = 1 << 18  # bytes from which on memory for pages is mapped by itself
_PARALLEL_MOVES = 256  # fewer take less than about a quarter of a millisecond


def array_at(address: int, shape: Sequence[int], dtype: str, strides: Sequence[int] | None = None) -> Any:
    """The array of host memory at an address; strides count elements, None: contiguous."""
    kind = numpy_dtype(dtype)
    steps = None if strides is None else [step * kind.itemsize for step in strides]
    if 0 in shape:
        return np.empty(shape, kind)
    last = sum((n - 1) * s for n, s in zip(shape, steps, strict=True)) if steps else 0
    nbytes = last + kind.itemsize if steps else int(np.prod(shape)) * kind.itemsize
    memory = memoryview((ctypes.c_char * nbytes).from_address(address))
    return np.ndarray(tuple(shape), kind, memory, strides=steps)


def view_at(view: CudaView) -> Any:
    """The array of host memory that a view names."""
    return array_at(view.pointer, view.shape, view.dtype, view.strides)


@dataclass
class Workspace:
    """Moves and page copies that the last plan of each layer has decided."""

    shape: PlanShape
    most_new_pages: int
    most_dropped: int
    moves: dict[int, tuple[NDArray[np.uint32], NDArray[np.uint32]]] = field(default_factory=dict)
    copies: dict[int, NDArray[np.uint32]] = field(default_factory=dict)
    nbytes: int = 0

    def move_lists(self, phase: int) -> tuple[Workspace, int]:
        """What `write_tokens` and `copy_pages` take."""
        return self, phase

    def max_groups(self, phase: int) -> int:
        """Most destination pages of a layer in a phase."""
        return self.most_dropped * TOKENS_PER_PAGE if phase else self.most_new_pages


class CpuKernels:
    """Launches for one store in host memory; methods and arguments as those for a GPU.

    Parameters
    ----------
    store : DeviceStore
        Whose arrays are NumPy arrays.
    """

    def __init__(self, store: DeviceStore) -> None:
        self.store = store
        self._tables: dict[int, Any] = {}

    # ---- what a layer is -----------------------------------------------------------------------------------

    def tables(self, layer: int) -> Any:
        """A layer as the planner's kernels take it."""
        from kvlab.numba_kernels.cpu.cache_groups import Tables

        if layer not in self._tables:
            store, layouts = self.store, self.store.stores[layer].layouts
            num_bh = store.batch * store.heads
            rungs = [(x.nbytes // UNIT, store.slab[layer] // x.nbytes, x.positions) for x in layouts]
            mine: dict[str, Any] = {name: table[layer] for name, table in store.tables.items()}
            for name in ("rung", "count", "index", "base", "open"):
                mine[name] = mine[name].reshape(num_bh, mine[name].shape[2])
            self._tables[layer] = Tables(
                np.array(rungs, np.int64).reshape(len(layouts), 3), store.arenas[layer], mine["rung"],
                mine["count"], mine["index"].view(np.uint32), mine["base"].view(np.uint16),
                mine["num_pages"].reshape(num_bh), mine["open"], mine["used"], mine["slab_count"],
                mine["slabs"], mine["free_slabs"], mine["num_free"], mine["entry_of"].view(np.uint32),
                mine["slab_slot"], mine["budget"], mine["status"],
                mine.get("waits", np.zeros(store.batch, np.int32)),
            )  # fmt: skip
        return self._tables[layer]

    def _whole_tables(self, layer: int) -> Any:
        """A layer with the pages of tokens that wait behind those of its ladder."""
        tables, layouts = self.tables(layer), self.store.layouts(layer)
        widest = [[x.nbytes // UNIT, 1, x.positions] for x in layouts[len(tables.rungs) :]]
        rungs = np.concatenate([tables.rungs, np.array(widest, np.int64).reshape(-1, 3)])
        return tables._replace(rungs=rungs)

    def _formats(self, layer: int) -> Any:
        return _formats(self.store.layouts(layer), self.store.stores[layer].dtype)

    def _frames(self, layer: int) -> Any:
        """Frames of keys as kernels take them."""
        tables = {name: table[layer] for name, table in self.store.tables.items()}
        in_blocks = self.store.stores[layer].in_blocks
        names = [name for name in FRAME if in_blocks or name not in FRAME_OF_BLOCKS]
        return prepared_frames(*(tables[name] for name in names))

    def _fresh(self, layer: int, k: Any, v: Any, codes: Any, positions: Any) -> Any:
        """New tokens, rounded to the cache's dtype."""
        from kvlab.numba_kernels.cpu.cache_write import Fresh

        kind = numpy_dtype(self.store.stores[layer].dtype)
        with np.errstate(over="ignore"):  # of padding, and of places that hold no token
            k, v = (np.ascontiguousarray(x.astype(kind, copy=False), np.float32) for x in (k, v))
        return Fresh(k, v, codes, positions)

    # ---- plans ---------------------------------------------------------------------------------------------

    def make_workspace(
        self, shape: PlanShape, layers: int, most_new_pages: int, most_dropped: int
    ) -> Workspace:
        """Where plans leave their moves."""
        return Workspace(shape, most_new_pages, most_dropped)

    def launch_plan(
        self, first: int, layers: int, workspace: Workspace, ladder: Ladder, stream: int, *, sink: int,
        recent: int, lookahead: int, fixed_nbytes: int, by_position: bool = False, cropped: bool = False,
        codes: int = 0, valid: int = 0, positions: int = 0, num_new: int = 0, first_position: int = 0,
        window: int = 0, floor: int = 0, rewind: int = 0, allocator: str = "greedy",
    ) -> None:  # fmt: skip
        """`kvlab.ops.cuda.plan.launch_plan`: layers are planned side by side, always as if `cropped`."""
        from kvlab.numba_kernels.cpu.cache_groups import NewTokens, Rules
        from kvlab.numba_kernels.cpu.cache_plan import choose_levels, count_tokens, finish_plan

        store, num_bh = self.store, self.store.batch * self.store.heads
        mask = (
            array_at(valid, (store.batch, num_new), "bool")
            if valid
            else np.ones((store.batch, num_new), bool)
        )
        at = self._positions(positions, num_new, first_position)
        workspace.moves, workspace.copies = {}, {}
        waiting = list(range(first, first + layers))

        def plan() -> None:
            while waiting:
                layer = waiting.pop()
                length = int(store.tables["seqlen"][layer].max(initial=0))
                seqlen = first_position + num_new if num_new else length
                new = NewTokens(array_at(codes, (num_bh, num_new), "uint8"), mask, at)
                oldest = first_seen(seqlen, store.reach(layer, rewind))
                rules = Rules(
                    store.heads, int(store.stores[layer].evicts), store.slab[layer] // UNIT,
                    workspace.shape.segments, seqlen, sink, recent, lookahead, by_position, fixed_nbytes,
                    workspace.most_new_pages, window, floor, oldest,
                )  # fmt: skip
                tables, levels, status = self.tables(layer), levels_of(ladder), 0
                groups, weights, bytes_left = count_tokens(tables, levels, rules, new)
                if allocator == "dp":
                    chunks = chunks_of(groups, weights, store.batch)
                    groups.chosen[:], status = choose_optimum(
                        ladder, rules.evicts, window, *chunks, bytes_left
                    )
                else:
                    uniform = allocator == "uniform"
                    status = choose_levels(levels, rules, groups, weights, bytes_left, uniform)
                *lists, copies, _, _, _ = finish_plan(tables, rules, new, groups, status)
                workspace.moves[layer], workspace.copies[layer] = (lists[0], lists[1]), copies

        run_parallel(plan, alone=layers == 1)

    def write_tokens(
        self, first: int, layers: int, lists: tuple[Workspace, int], groups: int, new_tokens: Any, stream: int
    ) -> None:
        """`kvlab.ops.cuda.pages.write_tokens`."""
        from kvlab.numba_kernels.cpu.cache_write import write_moves

        (workspace, phase), steps = lists, int(new_tokens["steps"])
        for layer in range(first, first + layers):
            moves = workspace.moves[layer][phase]
            if len(moves):
                new = self._new_tokens(layer, new_tokens)
                begins = np.flatnonzero(np.diff(moves[:, 1], prepend=np.int64(-1), append=np.int64(-1)))
                run_parallel(
                    write_moves, np.zeros(1, np.int64), begins, moves, self.store.arenas[layer],
                    self.tables(layer).rungs, self._formats(layer), self._frames(layer), new,
                    alone=len(moves) < _PARALLEL_MOVES,
                )  # fmt: skip
            if steps:
                self.store.tables["seqlen"][layer] = int(new_tokens["first"]) + steps

    def _new_tokens(self, layer: int, new_tokens: Any) -> Any:
        """New tokens that a struct names."""
        store, steps = self.store, int(new_tokens["steps"])
        shape = (store.batch, steps, store.heads, store.head_dim)
        k, v = (_vectors(new_tokens, side, shape, "float32") for side in "kv")
        codes = array_at(int(new_tokens["importance"]), (store.batch * store.heads, steps), "uint8")
        positions = int(new_tokens["positions"]) if "positions" in new_tokens.dtype.names else 0
        return self._fresh(layer, k, v, codes, self._positions(positions, steps, int(new_tokens["first"])))

    def _positions(self, address: int, steps: int, first: int) -> NDArray[np.int32]:
        """Positions of new tokens, (batch, steps): those at an address, or without one all from the first."""
        if address:
            found: NDArray[np.int32] = array_at(address, (self.store.batch, steps), "int32")
            return found
        return np.tile(np.arange(first, first + steps, dtype=np.int32), (self.store.batch, 1))

    def copy_pages(
        self, first: int, layers: int, lists: tuple[Workspace, int], copies: int, stream: int
    ) -> None:
        """`kvlab.ops.cuda.pages.copy_pages`."""
        for layer in range(first, first + layers):
            units = self.store.arenas[layer].reshape(-1, UNIT)
            for source, target, rung in lists[0].copies[layer].tolist():
                n = self.store.stores[layer].layouts[rung].nbytes // UNIT
                units[target : target + n] = units[source : source + n]

    # ---- new tokens ----------------------------------------------------------------------------------------

    def append_call(
        self, layer: int, top: Rung, *, steps: int, group: int, scale: float, softcap: float, observed: int,
        rows: int = 0,
    ) -> AppendCall:  # fmt: skip
        """`kvlab.ops.cuda.pages.AppendCall`."""
        return AppendCall(self, layer, scale=scale, softcap=softcap, observed=observed, rows=rows)

    def rows_of(self, layer: int, rows: int) -> NDArray[np.bool_]:
        """Which rows (batch,) an append serves, by one of `kvlab.ops.cuda.pages.ROWS`."""
        waits = self.store.tables["waits"][layer] > 0
        found: NDArray[np.bool_] = (np.ones_like(waits), waits, ~waits)[rows]
        return found

    def note_queries(self, layer: int, q: Any, valid: Any, rows: NDArray[np.bool_]) -> None:
        """Add queries of some rows to what the frames of those that wait are made of."""
        tables = {name: self.store.tables[name][layer] for name in ("waits", "count", "asked")}
        for row in np.flatnonzero((tables["waits"] > 0) & rows):
            waiting = int(tables["count"][row, 0, :WAITING_PAGES].sum())
            asking = np.flatnonzero(valid[row])[max(ASKING - waiting, 0) : max(LAST - waiting, 0)]
            add_queries(tables["asked"][row], q[row, asking])

    def append(self, layer: int, k: Any, v: Any, valid: Any, codes: Any, rows: NDArray[np.bool_]) -> None:
        """Store new tokens of some rows in open pages: codes (batch, heads, steps) are their importance."""
        from kvlab.numba_kernels.cpu.cache_write import append_tokens

        lengths = self.store.tables["seqlen"][layer]
        codes = np.ascontiguousarray(codes).reshape(-1, k.shape[1])
        positions = self._positions(0, k.shape[1], int(lengths[rows].max(initial=0)))
        new, formats, frames = (
            self._fresh(layer, k, v, codes, positions),
            self._formats(layer),
            self._frames(layer),
        )
        waits = self.store.tables["waits"][layer] > 0
        for tables, mine in ((self.tables(layer), ~waits & rows), (self._whole_tables(layer), waits & rows)):
            if mine.any() and not append_tokens(tables, formats, frames, new, valid & mine[:, None]):
                self.store.tables["status"][layer] |= 1
        lengths[rows] += k.shape[1]

    def take_rows(self, move: RowMove, stream: int) -> None:
        """Let rows become others; see `kvlab.cache.store`."""
        for layer in range(len(self.store.stores)):
            take_rows(self.store, layer, move)

    def freeze_means(
        self, layer: int, new_tokens: Any, addresses: Sequence[int], before: int, stream: int, *,
        lookahead: int, force: bool, queries: CudaView | None = None,
    ) -> None:  # fmt: skip
        """`kvlab.ops.cuda.pages.freeze_means`."""
        batch, head_dim = self.store.batch, self.store.head_dim
        dtype, steps, heads = "float32", int(new_tokens["steps"]), self.store.heads
        total, mask, codes = before + steps, int(new_tokens["valid"]), int(new_tokens["importance"])
        wide = (batch, total, heads, head_dim), dtype
        kinds = (wide, wide, ((batch, total), "uint8"), ((batch * heads, total), "uint8"))
        given = zip(addresses, (*kinds, ((batch, total), "int32")), strict=True)
        arrays: list[Any] = [array_at(at, *kind) if at else None for at, kind in given]
        merged = MergedTokens(before, *arrays)
        kind = numpy_dtype(self.store.stores[layer].dtype)  # of exact tokens, of which the mean is taken
        k, v = (_vectors(new_tokens, side, (batch, steps, heads, head_dim), dtype) for side in "kv")
        with np.errstate(over="ignore"):
            k = k.astype(kind, copy=False).astype(np.float32, copy=False)
        valid = array_at(mask, (batch, steps), "bool") if mask else np.ones((batch, steps), bool)
        importance = array_at(codes, (batch, heads, steps), "uint8")
        q = np.empty((batch, 0, heads, head_dim), np.float32) if queries is None else view_at(queries)
        for row in range(batch):
            new = NewRow(k[row], v[row], q[row], valid[row], importance[row], int(new_tokens["first"]))
            freeze_row(self.store, layer, row, new, merged, lookahead, force)

    def crop_rows(self, end: int, stream: int) -> None:
        """`kvlab.ops.cuda.pages.crop_rows`."""
        for layer in range(len(self.store.stores)):
            tables = self._whole_tables(layer)
            self.store.tables["seqlen"][layer] = end
            waiting = (tables.num_pages > 0) & np.repeat(tables.waits > 0, self.store.heads)
            tail = int(tables.rungs[-1, 2])
            for bh in np.flatnonzero(waiting):
                for entry in range(WAITING_PAGES):
                    start = int(tables.addresses[bh, entry]) * UNIT + tail
                    held = tables.arena[start : start + 2 * TOKENS_PER_PAGE].view("<u2")[
                        : int(tables.counts[bh, entry])
                    ]
                    position = (int(tables.base[bh, entry]) << 16) + held.astype(np.int64)
                    tables.counts[bh, entry] = (position < end).sum()

    # ---- attention -----------------------------------------------------------------------------------------

    def attend_call(self, q: Any, pages: DevicePages, workspace: Any, **options: Any) -> AttendCall:
        """`kvlab.ops.cuda.packed.AttendCall`."""
        return AttendCall(pages, **options)

    def attention_workspace(self, rows: int, semaphores: Any = None) -> Any:
        """Nothing: `kvlab.packed_attention` takes its own memory."""
        return _NOTHING

    def most_query_tokens(self, group: int) -> int:
        """How many query tokens an attention call takes."""
        return 1 << 20

    @staticmethod
    def kept_quad_bytes(rows: int) -> int:
        """Bytes that the kept scores of a quad take for so many query rows of a KV head: float32."""
        return 4 * QUAD * TOKENS_PER_PAGE * rows

    def merge_rows(self, addresses: Sequence[int], shape: tuple[int, int, int], stream: int) -> None:
        """`kvlab.ops.cuda.pages.merge_rows`."""
        batch, steps, heads = shape
        full, dtype = (*shape, self.store.head_dim), "float32"
        out, other = (array_at(addresses[i], full, dtype) for i in (0, 2))
        lse, other_lse = (array_at(addresses[i], (batch, heads, steps), "float32") for i in (1, 3))
        _merge(out, lse, other, other_lse)

    # ---- importance ----------------------------------------------------------------------------------------

    def score_stored(
        self, first: int, scores: Any, lse: Any, *, importance: str, take: float, span: int, counted: int,
        stream: int,
    ) -> None:  # fmt: skip
        """`kvlab.ops.cuda.scores.score_stored`."""
        from kvlab.numba_kernels.cpu.cache_write import follow_mass

        for layer, (kept, total) in enumerate(zip(scores, lse, strict=True), first):
            if not kept.size:
                continue
            rows = kept.view(np.float32).reshape(*kept.shape[:3], -1, QUAD * TOKENS_PER_PAGE)
            pages = self.store.pages(layer, waiting=True)
            received = np.nan_to_num(mass(rows, total, pages, total.shape[1] // self.store.heads))
            tables, length = self._whole_tables(layer), int(self.store.tables["seqlen"][layer].max(initial=0))
            follow_mass(
                tables, received.reshape(-1, *received.shape[2:]), length - counted, np.float32(take), span,
                importance == "forecast", *_scale_of_importance(),
            )  # fmt: skip

    @staticmethod
    def score_new(
        q: CudaView, k: CudaView, lse: Any, codes: Any, *, rows: int, scale: float, softcap: float = 0.0,
        stream: int,
    ) -> None:  # fmt: skip
        """`kvlab.ops.cuda.scores.score_new`: the attention that new tokens get from the last rows."""
        queries, keys = view_at(q).astype(np.float32), view_at(k).astype(np.float32)
        total = np.where(np.isfinite(lse), lse, np.float32(np.inf))
        visible, last = np.ones(keys.shape[:2], bool), np.ascontiguousarray(queries[:, -rows:])
        mass = exact_mass(last, np.ascontiguousarray(keys), visible, scale, softcap, total)
        codes[...] = encode_importance(np.nan_to_num(mass)).reshape(codes.shape)

    @staticmethod
    def score_norms(k: Any, codes: Any, importance: str, stream: int) -> None:
        """`kvlab.ops.cuda.scores.score_norms`."""
        if importance == "uniform":
            codes[...] = encode_importance(np.ones(1))[0]
        elif importance == "recency":
            steps = k.shape[1]
            codes[...] = encode_importance(1 / np.arange(steps, 0, -1))
        else:
            codes[...] = norm_codes(k).reshape(codes.shape)


class AppendCall:
    """The append of one layer; arguments of a call as those of `kvlab.ops.cuda.pages.AppendCall`."""

    def __init__(
        self, kernels: CpuKernels, layer: int, *, scale: float, softcap: float, observed: int, rows: int
    ) -> None:
        self._kernels, self._layer, self._observed, self._rows = kernels, layer, observed, rows
        self._scale, self._softcap = scale, softcap

    def __call__(
        self, q: CudaView | None, k: CudaView, v: CudaView, valid: int, out: int, lse: int, stored: bool,
        stream: int,
    ) -> None:  # fmt: skip
        """Finish attention over stored tokens with the new ones, then store these."""
        keys, values = view_at(k), view_at(v)
        batch, steps, heads, _ = k.shape
        mask = array_at(valid, (batch, steps), "bool") if valid else np.ones((batch, steps), bool)
        codes = np.full((batch, heads, steps), encode_importance(np.ones(1))[0], np.uint8)
        rows = self._kernels.rows_of(self._layer, self._rows)
        if self._observed == OBSERVED_NORM:
            codes = norm_codes(keys)
        if q is not None:
            mass = self._finish(view_at(q), keys, values, mask, out, lse, stored, rows)
            if self._observed == OBSERVED_MASS:
                codes = encode_importance(np.nan_to_num(mass))
            self._kernels.note_queries(self._layer, view_at(q), mask, rows)
        self._kernels.append(self._layer, keys, values, mask, codes, rows)

    def _finish(
        self, q: Any, k: Any, v: Any, valid: Any, out: int, lse: int, stored: bool, rows: NDArray[np.bool_]
    ) -> Floats:
        """Merge attention over new tokens of some rows into `out` and `lse`; return what these receive."""
        batch, steps, heads, _ = q.shape
        every = array_at(out, q.shape, q.dtype.name), array_at(lse, (batch, heads, steps), "float32")
        q, k, v, valid, result, total = (x[rows] for x in (q, k, v, valid, *every))
        if not stored:
            result[...], total[...] = 0, -np.inf
        rules: dict[str, Any] = {"scale": self._scale, "softcap": self._softcap, "keep_rows": steps}
        q, k, v = (x.astype(np.float32) for x in (q, k, v))
        exact = attend_exact(q, k, v, valid, **rules)
        _merge(result, total, exact.out, exact.lse)
        if not valid.all():
            result[~valid], total.swapaxes(1, 2)[~valid] = 0, np.inf
        every[0][rows], every[1][rows] = result, total
        received = np.zeros((batch, k.shape[2], steps), np.float32)
        received[rows] = exact.mass(total)
        return received


class AttendCall:
    """Packed attention over the pages of one layer, as `kvlab.ops.cuda.packed.AttendCall`."""

    def __init__(
        self, pages: DevicePages, *, scale: float, softcap: float, scores: Any = None,
        window: Window | None = None,
    ) -> None:  # fmt: skip
        self._pages, self._scale, self._softcap = pages, scale, softcap
        self._scores, self._window = scores, window

    def use(self, workspace: Any, scores: Any) -> None:
        """Keep scores elsewhere from now on."""
        self._scores = scores

    def __call__(self, view: CudaView, out: int, lse: int, stream: int) -> None:
        """Attend with the queries of a view; write to contiguous float32 arrays at two addresses."""
        (batch, steps, heads, _), (*bh, entries) = view.shape, self._pages.rung.shape
        quads, slots = (*bh, entries // QUAD), QUAD * TOKENS_PER_PAGE
        kept = np.empty((*quads, 0), np.float32) if self._scores is None else self._scores.view(np.float32)
        results = array_at(out, view.shape, "float32"), array_at(lse, (batch, heads, steps), "float32")
        attend_into(
            *results, kept.reshape(*quads, kept.shape[-1] // slots, slots), view_at(view), self._pages,
            heads // bh[1], self._scale, self._softcap, self._window,
        )  # fmt: skip


def _check_range(x: Floats, name: str) -> None:
    """Refuse finite numbers that would become infinite in float16, the dtype of the cache."""
    limit = np.finfo(np.float16).max
    largest = np.abs(x, where=np.isfinite(x), out=np.zeros_like(x)).max(initial=0) if x.size else 0
    if largest > limit:
        raise ValueError(
            f"{name} reaches {largest:g}, which a cache of dtype 'float16' (up to {limit:g}) does not hold: "
            "make it with dtype='bfloat16' or 'float32'"
        )


def norm_codes(k: Any) -> NDArray[np.uint8]:
    """Importance of keys (batch, steps, heads, head_dim): 1 / norm, (batch, heads, steps)."""
    squares = (k.astype(np.float64) ** 2).sum(-1).transpose(0, 2, 1)
    norm: Floats = np.sqrt(squares).astype(np.float32)
    inverse = np.reciprocal(np.maximum(norm, np.float32(1e-6)))
    return encode_importance(np.where(np.isfinite(inverse), inverse, np.float32(0)))


def _vectors(new_tokens: Any, side: str, shape: tuple[int, ...], dtype: str) -> Any:
    """Keys or values (batch, steps, heads, head_dim) that a `NewTokens` struct names."""
    strides = [int(new_tokens[f"{side}_{axis}"]) for axis in ("batch", "step", "head")]
    return array_at(int(new_tokens[side]), shape, dtype, [*strides, 1])


def _merge(out: Any, lse: Any, other: Any, other_lse: Any) -> None:
    """Merge attention over other keys into out and lse."""
    from kvlab.numba_kernels.cpu.exact import merge_two

    both, total = np.empty(out.shape, np.float32), np.empty_like(lse)
    first, second = (np.ascontiguousarray(x, np.float32) for x in (out, other))
    merge_two(first, lse, second, np.ascontiguousarray(other_lse), both, total)
    out[...], lse[...] = both, total


class CpuExecutor:
    """Memory and kernels of the CPU: arrays of NumPy."""

    kind = "cpu"
    kernels: Any = CpuKernels
    max_group = 1 << 30
    """Query heads of a KV head that an append can take."""

    @staticmethod
    def empty(shape: Sequence[int], dtype: str, like: Any) -> Any:
        """An array that is not initialised."""
        return np.empty(tuple(shape), numpy_dtype(dtype))

    @staticmethod
    def view(x: Any, name: str) -> CudaView:
        """Address, shape and strides of an array."""
        # Without an element NumPy's strides are 0, those of other frameworks are not.
        like = x if x.size else np.empty([max(n, 1) for n in x.shape], x.dtype)
        strides = meant_strides(like.shape, tuple(step // x.itemsize for step in like.strides))
        return CudaView(x.ctypes.data, x.shape, strides, dtype_name(x), 0)

    @staticmethod
    def pointer(x: Any) -> int:
        """The address of an array."""
        return int(x.ctypes.data)

    @staticmethod
    def stream(x: Any) -> int:
        """There are no streams."""
        return 0

    to_host = copied = staticmethod(np.array)

    @staticmethod
    def to_device(host: Any, like: Any) -> Any:
        """A copy."""
        return np.array(host)

    @staticmethod
    def contiguous(x: Any, name: str) -> Any:
        """A contiguous array: itself, or a copy."""
        return np.ascontiguousarray(x)

    overwrite = staticmethod(np.copyto)

    alignment = 1
    """Bytes that arrays begin at a multiple of."""

    def arena(self, nbytes: int, like: Any) -> Any:
        """Memory for pages, full of zeros, of which none is taken before it is written."""
        if nbytes < _MAPPED:
            raw = np.zeros(nbytes + UNIT, np.uint8)
            start = -raw.ctypes.data % UNIT
            return raw[start : start + nbytes]
        try:
            mapped = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise MemoryError(f"no {nbytes} bytes for pages: {error}") from None
        if hasattr(mmap, "MADV_HUGEPAGE"):
            mapped.madvise(mmap.MADV_HUGEPAGE)
        return np.frombuffer(mapped, np.uint8)

    def copied_arenas(self, store: DeviceStore) -> Any:
        """A copy of the pages that are live; others take no memory."""
        memory = self.arena(int(store.memory_of_arenas.nbytes), store.like)
        for layer, arena in enumerate(store.arenas_in(memory)):
            copy_pages(store, layer, arena)
        return memory

    def score_memory(self, shape: Sequence[int], like: Any) -> Any:
        """Memory for kept scores; of pages that are not live nothing is read."""
        return self.empty(shape, "uint8", like)

    def fill_zero(self, arena: Any) -> None:
        """Write zeros over memory for pages; what was mapped goes back to the system."""
        mapped = getattr(arena.base, "obj", None)
        if isinstance(mapped, mmap.mmap):
            mapped.madvise(mmap.MADV_DONTNEED)
        else:
            arena[...] = 0

    def taken(self, x: Any, name: str, dtype: str, mask: Any = None) -> Any:
        """An argument as kernels take it: float32, of NumPy, contiguous in its last axis.

        New keys and values have the `dtype` of the cache, in which they must be finite.
        """
        kind = dtype_name(x, name)
        if kind not in ("float16", "bfloat16", "float32"):
            raise TypeError(f"{name} has dtype {kind}; float16, bfloat16 and float32 are supported")
        found = to_numpy_view(x, name).astype(np.float32, copy=False)
        if dtype == "float16" and kind != "float16":
            whole = mask is None or mask.shape != found.shape[:2]
            _check_range(found if whole else found[mask], name)
        steps = found.strides
        plain = found.ndim == 4 and steps[3] == 4 and min(steps) >= 0
        return found if plain else np.ascontiguousarray(found)

    def taken_mask(self, valid: Any) -> Any:
        """What tokens are no padding, as kernels take it."""
        mask = to_numpy_view(valid, "valid")
        if mask.dtype != bool:
            raise TypeError(f"valid has dtype {mask.dtype}; it must be bool")
        return np.ascontiguousarray(mask)

    def given(self, out: Any, q: Any) -> Any:
        """A result for the caller whose queries were `q`."""
        return like_first(out.astype(numpy_dtype(dtype_name(q, "q")), copy=False), q)

    def check_layout(self, view: CudaView, name: str, dtype: str) -> None:
        """`taken` has seen to that."""

    def check_device(self, wanted: str | None, device: int) -> None:
        """Any CPU will do."""

    def input_dtype(self, dtype: str) -> str:
        """The dtype of new keys and values of a cache of this one."""
        return "float32"

    def aligned(self, view: CudaView) -> bool:
        """Whether `score_new` can read the vectors of an array."""
        return True


CPU = CpuExecutor()


def chunks_of(groups: Any, weights: Floats, batch: int) -> tuple[NDArray[np.int64], Floats]:
    """Chunks of every class, (batch, groups, classes), and the weights of all, in that order."""
    first, n = groups.chunk.ravel(), groups.chunks.ravel()
    at = np.arange(n.sum()) + np.repeat(first - (np.cumsum(n) - n), n)
    shape = batch, len(groups.chunks) // max(batch, 1), groups.chunks.shape[1]
    return groups.chunks.reshape(shape), weights[at]


@lru_cache(maxsize=64)
def levels_of(ladder: Ladder) -> Any:
    """A ladder as the planner's kernels take it."""
    from kvlab.numba_kernels.cpu.cache_groups import Levels

    hulls = hulls_of(ladder)
    levels, edges = (hulls[name].astype(np.int64) for name in ("level", "edges"))
    return Levels(np.array(ladder.cost, np.int64), np.ascontiguousarray(hulls["rate"]), levels, edges)


@lru_cache(maxsize=64)
def _formats(layouts: tuple[PageLayout, ...], dtype: str) -> Any:
    """Where codes lie in the pages of each rung."""
    from kvlab.numba_kernels.cpu.cache_write import Formats

    found = [side_formats(layout, dtype) for layout in layouts]
    sides = [[(s.codes, s.steps, s.bits, s.kind) for s, _ in pair] for pair in found]
    guess = [[s.guess for s, _ in pair] for pair in found]
    places = np.stack([np.stack([places for _, places in pair]) for pair in found])
    return Formats(np.array(sides, np.int64), np.array(guess, np.float32), places)


@lru_cache(maxsize=1)
def _scale_of_importance() -> tuple[NDArray[np.float64], Floats]:
    """Where the scores of codes 2 to 255 begin, and what each code stands for."""
    begins = 2.0 ** ((np.arange(1, 255) - 191.5) / 8)
    return begins, decode_importance(np.arange(256, dtype=np.uint8))

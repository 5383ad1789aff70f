"""The pages of one layer: where tokens lie, and how they move from rung to rung.

Tokens of one (row, KV head) lie in pages of 64, every page at one rung; any page takes any token of its rung.
To keep pages full, a change is planned for all tokens of a row at once (plan.py) and then carried out:
`apply` re-encodes tokens whose rung became lower, encodes new tokens straight at their rung, and fills the
holes by moving codes of the same rung, bit by bit. The memory of pages is in pools.py. Nothing here knows of
budgets across layers, importance policies or attention: see cache.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvlab.cache.allocator import Method
from kvlab.cache.ladder import Ladder, Rung
from kvlab.cache.plan import ERRORS, NewTokens, Plan, Rates, Tokens, Weigh, plan_row
from kvlab.cache.pools import PagePools
from kvlab.pages import (
    DECODED,
    PAGE_TABLE_BYTES,
    RAW,
    TOKENS_PER_PAGE,
    LayerPages,
    PageLayout,
    copy_tokens,
    read_tokens,
    rotate_vectors,
    write_tokens,
)

__all__ = ["ERRORS", "LayerStore", "NewTokens", "Plan", "Tokens", "Weigh"]

Ints = NDArray[np.int64]
Floats = NDArray[np.float32]


class LayerStore:
    """Page pools and page table of one layer.

    Parameters
    ----------
    ladder : tuple of Rung
        Rungs in use, lowest first; a first rung of width 0 means that tokens may be evicted.
    batch, num_heads_kv, head_dim : int
        Shape of the layer.
    dtype : {"float16", "bfloat16", "float32"}
        What width 16 stands for.
    """

    def __init__(self, ladder: Ladder, batch: int, num_heads_kv: int, head_dim: int, dtype: str) -> None:
        itemsize = 4 if dtype == "float32" else 2
        self.evicts = ladder[0].total == 0
        self.ladder = ladder[1:] if self.evicts else ladder
        self.batch, self.num_heads_kv, self.head_dim, self.dtype = batch, num_heads_kv, head_dim, dtype
        self.layouts = tuple(PageLayout(head_dim, *rung, itemsize) for rung in self.ladder)
        self.exact_layout = PageLayout(head_dim, 16, 16, itemsize)
        loss = np.array([ERRORS[rung.bits_k] + ERRORS[rung.bits_v] for rung in ladder])
        cost = np.array([0] * self.evicts + [self.page_bytes(r) for r in range(len(self.ladder))])
        self._rates = Rates(loss, cost, self.evicts)
        self.clear()

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take over the state of a copy, whose pools `copy.deepcopy` has put at any address."""
        vars(self).update(state)
        self._pools.realign()

    def clear(self) -> None:
        """Drop all tokens and pools."""
        shape = (self.batch, self.num_heads_kv, 0)
        self._pools = PagePools(self.layouts)
        self.rung, self.count = np.zeros(shape, np.uint8), np.zeros(shape, np.uint8)
        self.index, self.base = np.zeros(shape, np.uint32), np.zeros(shape, np.uint16)
        self.num_pages = np.zeros(shape[:2], np.int32)
        self.k_mean = np.zeros((*shape[:2], self.head_dim), np.float16)

    # ---- what is there -------------------------------------------------------------------------------------

    @property
    def pools(self) -> list[NDArray[np.uint8]]:
        """Pages of each rung, (pages, bytes of a page)."""
        return self._pools.memory

    @property
    def whole_ladder(self) -> Ladder:
        """The ladder as it was given, with its rung of width 0."""
        return (Rung(0, 0), *self.ladder) if self.evicts else self.ladder

    def page_bytes(self, rung: int) -> int:
        """Bytes that a page of a rung counts: its record and its entry in the page table."""
        return self.layouts[rung].nbytes + PAGE_TABLE_BYTES

    def view(self) -> LayerPages:
        """What an attention call reads."""
        return LayerPages(
            layouts=self.layouts,
            pools=tuple(self.pools),
            rung=self.rung,
            count=self.count,
            index=self.index,
            base=self.base,
            num_pages=self.num_pages,
            dtype=self.dtype,
            k_mean=self.k_mean,
        )

    def live(self) -> NDArray[np.bool_]:
        """Which entries of the page table are in use, (batch, heads, pages)."""
        mask: NDArray[np.bool_] = np.arange(self.rung.shape[2]) < self.num_pages[..., None]
        return mask

    def page_counts(self) -> Ints:
        """Number of pages of each rung, (batch, heads, rungs)."""
        rungs = np.arange(len(self.ladder))
        counts: Ints = ((self.rung[..., None] == rungs) & self.live()[..., None]).sum(2)
        return counts

    def nbytes(self) -> Ints:
        """Bytes in live pages and their table, for every row, (batch,)."""
        sizes = np.array([self.page_bytes(r) for r in range(len(self.ladder))])
        total: Ints = (self.page_counts() * sizes).sum((1, 2)) + self.fixed_nbytes
        return total

    @property
    def fixed_nbytes(self) -> int:
        """Bytes that a row takes without any page: number of pages and key mean of each head."""
        return self.num_heads_kv * (self.num_pages.itemsize + self.head_dim * self.k_mean.itemsize)

    @property
    def reserved_nbytes(self) -> int:
        """Bytes of the pools and tables, live or not."""
        tables = (self.rung, self.count, self.index, self.base, self.num_pages, self.k_mean)
        return self._pools.nbytes + sum(table.nbytes for table in tables)

    def smallest_nbytes(self, tokens: int) -> int:
        """Bytes of one row that holds `tokens` tokens in each head, all at the lowest rung."""
        lowest = 0 if self.evicts else self.page_bytes(0)
        pages = -(-tokens // TOKENS_PER_PAGE)
        return self.num_heads_kv * pages * lowest + self.fixed_nbytes

    def packed_nbytes(self, tokens: Tokens) -> int:
        """Bytes of a row that holds these tokens, all but one page of each (head, segment, rung) full."""
        place = np.stack([tokens.head, tokens.position >> 16, tokens.rung])
        (_, _, rung), count = np.unique(place, axis=1, return_counts=True)
        sizes = np.array([self.page_bytes(r) for r in range(len(self.ladder))])
        return int((-(-count // TOKENS_PER_PAGE) * sizes[rung]).sum()) + self.fixed_nbytes

    def tokens(self, row: int) -> Tokens:
        """All stored tokens of a row."""
        from kvlab.numba_kernels.cpu.store import list_tokens

        num_pages = self.num_pages[row]
        rung, count, index, base = (table[row] for table in self._tables())
        held = sum(int(counts[:pages].sum()) for counts, pages in zip(count, num_pages, strict=True))
        place, code = np.empty((5, held), np.int64), np.empty(held, np.uint8)
        for r in range(len(self.pools)):
            pool, record = self._record(r)
            list_tokens(r, num_pages, rung, count, index, base, pool, record, place, code)
        head, page, slot, rungs, position = place
        return Tokens(head, page, slot, rungs, position, code)

    def set_importance(self, row: int, tokens: Tokens) -> None:
        """Store the importance codes of tokens."""
        from kvlab.numba_kernels.cpu.store import store_codes

        head, page, slot, rung = tokens.head, tokens.page, tokens.slot, tokens.rung
        for r in range(len(self.pools)):
            pool, record = self._record(r)
            store_codes(r, head, page, slot, rung, self.index[row], pool, record, tokens.code)

    def _record(self, rung: int) -> tuple[NDArray[np.uint8], tuple[int, int, int]]:
        """The bytes of a rung's pages; bytes of one, and where its positions and importance begin."""
        layout = self.layouts[rung]
        return self.pools[rung].reshape(-1), (layout.nbytes, layout.positions, layout.importance)

    def _positions(self, rung: int) -> NDArray[np.uint16]:
        return self.layouts[rung].positions_in(self.pools[rung])

    def _importance(self, rung: int) -> NDArray[np.uint8]:
        return self.layouts[rung].importance_in(self.pools[rung])

    # ---- planning ------------------------------------------------------------------------------------------

    def plan(self, tokens: Tokens, new: NewTokens, budget: int | None, weigh: Weigh, method: Method) -> Plan:
        """Choose a rung for every token of a row, its pages and table within `budget`; see `plan_row`."""
        room = None if budget is None else budget - self.fixed_nbytes
        return plan_row(tokens, new, room, weigh, method, self._rates)

    # ---- carrying out --------------------------------------------------------------------------------------

    def open_pages(self, row: int, new: NewTokens) -> Ints | None:
        """For each head, a page of the top rung with room for all new tokens; None if one has none."""
        if len(new.position) == 0:
            return np.zeros(self.num_heads_kv, np.int64)
        base = new.position >> 16
        if base[0] != base[-1]:
            return None
        fits = self.live()[row] & (self.rung[row] == len(self.ladder) - 1) & (self.base[row] == base[0])
        fits &= self.count[row].astype(np.int64) + len(base) <= TOKENS_PER_PAGE
        return fits.argmax(1) if fits.any(1).all() else None

    def append(self, row: int, new: NewTokens) -> None:
        """Put new tokens into the open pages of the top rung, which `open_pages` has found to be there."""
        n, top, page = len(new.position), len(self.ladder) - 1, self.open_pages(row, new)
        if n == 0 or page is None:
            return
        heads = np.arange(self.num_heads_kv)
        slot = (self.count[row, heads, page].astype(np.int64)[:, None] + np.arange(n)).ravel()
        index = np.repeat(self.index[row, heads, page].astype(np.int64), n)
        k, v = (x.swapaxes(0, 1).reshape(-1, self.head_dim) for x in (new.k, new.v))
        if self.ladder[top].bits_k < 16:
            k = rotate_vectors(k, self.k_mean[row], np.repeat(heads, n))
        if self.ladder[top].bits_v < 16:
            v = rotate_vectors(v)
        write_tokens(self.pools[top], self.layouts[top], self.dtype, index, slot, k, v)
        self._positions(top)[index, slot] = np.tile(new.position & 0xFFFF, self.num_heads_kv)
        self._importance(top)[index, slot] = new.code.ravel()
        self.count[row, heads, page] += np.uint8(n)

    def apply(self, row: int, plan: Plan, new: NewTokens) -> None:
        """Carry out a plan: demote, evict, add, and close the holes."""
        arriving = self._arriving(row, plan, new)  # read before anything moves
        moves, (index, slot) = self._place(row, plan, arriving)
        order = np.lexsort((slot, index, arriving.rung))
        for r in range(len(self.ladder)):
            mine = moves[1:, moves[0] == r]
            if mine.size:
                copy_tokens(self.pools[r], self.layouts[r], self.dtype, *mine)
            which = order[arriving.rung[order] == r]
            if which.size:
                page, at = index[which], slot[which]
                k, v, steps = arriving.k[which], arriving.v[which], arriving.steps[:, which]
                write_tokens(self.pools[r], self.layouts[r], self.dtype, page, at, k, v, steps)
                self._positions(r)[page, at] = arriving.position[which] & 0xFFFF
                self._importance(r)[page, at] = arriving.code[which]
        for r in range(len(self.ladder)):
            if self._pools.is_loose(r):
                self._pack(r)

    def _arriving(self, row: int, plan: Plan, new: NewTokens) -> _Arriving:
        """Tokens that change their rung, and new ones, in the domain of the rung they go to."""
        tokens = plan.tokens
        leaving = np.flatnonzero((plan.stored >= 0) & (plan.stored != tokens.rung))
        leaving = leaving[np.argsort(tokens.rung[leaving], kind="stable")]
        head, token = np.nonzero(plan.new >= 0)
        n = len(leaving)
        k, v = (np.empty((n + len(head), self.head_dim), np.float32) for _ in "kv")
        steps = np.full((2, n + len(head)), RAW, np.int16)
        source = tokens.rung[leaving]
        index = self.index[row, tokens.head[leaving], tokens.page[leaving]].astype(np.int64)
        slot = tokens.slot[leaving]
        for r in range(len(self.ladder)):
            first, last = np.searchsorted(source, [r, r + 1])
            if first < last:
                part = slice(first, last)
                where = index[part], slot[part]
                k[part], v[part] = read_tokens(self.pools[r], self.layouts[r], self.dtype, *where)
                steps[:, part] = self._steps(r, plan.stored[leaving[part]], *where)
        k[n:], v[n:] = new.k[token, head], new.v[token, head]
        found = _Arriving(
            head=np.concatenate([tokens.head[leaving], head]),
            rung=np.concatenate([plan.stored[leaving], plan.new[head, token]]),
            k=k,
            v=v,
            position=np.concatenate([tokens.position[leaving], new.position[token]]),
            code=np.concatenate([tokens.code[leaving], new.code[head, token]]),
            steps=steps,
        )
        self._rotate_arriving(row, found)
        return found

    def _steps(self, rung: int, to: Ints, index: Ints, slot: Ints) -> NDArray[np.int16]:
        """Return what `write_tokens` is to know of the steps of tokens that leave a rung for others."""
        layout, steps = self.layouts[rung], np.full((2, len(to)), RAW, np.int16)
        for of_side, first, widths in (
            (steps[0], layout.k_steps, [other.bits_k for other in self.ladder]),
            (steps[1], layout.v_steps, [other.bits_v for other in self.ladder]),
        ):
            if widths[rung] < 16:
                stays = (np.array(widths) == widths[rung])[to]
                of_side[:] = DECODED
                of_side[stays] = self.pools[rung][index[stays], first + slot[stays]]
        return steps

    def _rotate_arriving(self, row: int, arriving: _Arriving) -> None:
        """Take the mean off and rotate what was at width 16, or is new, and will be packed.

        What comes from codes is rotated already; `arriving.steps` says so.
        """
        for x, mean, widths, steps in (
            (arriving.k, self.k_mean[row], [rung.bits_k for rung in self.ladder], arriving.steps[0]),
            (arriving.v, None, [rung.bits_v for rung in self.ladder], arriving.steps[1]),
        ):
            turns = (np.array(widths) < 16)[arriving.rung] & (steps == RAW)
            if turns.any():
                x[turns] = rotate_vectors(x[turns], mean, arriving.head[turns])

    def _place(self, row: int, plan: Plan, arriving: _Arriving) -> tuple[Ints, Ints]:
        """Rewrite the page table of a row; return the moves and the places of arriving tokens.

        Returns
        -------
        moves : (5, number of moves)
            Rung, page and slot from, page and slot to.
        places : (2, number of arriving tokens)
            Page and slot.
        """
        from kvlab.numba_kernels.cpu.store import place_row

        tokens, heads, old = plan.tokens, self.num_heads_kv, self.rung.shape[2]
        segment = arriving.position >> 16
        groups = len(self.ladder) * (int(segment.max(initial=0)) + 1)
        room = old + len(segment) // TOKENS_PER_PAGE + groups
        table = np.zeros((4, heads, room), np.int64)
        for wide, narrow in zip(table, self._tables(), strict=True):
            wide[:, :old] = narrow[row]
        num_pages = self.num_pages[row].astype(np.int64)
        free = np.zeros((len(self.ladder), max(map(len, self._pools.free)) + int(num_pages.sum())), np.int64)
        for stack, pages in zip(free, self._pools.free, strict=True):
            stack[: len(pages)] = pages
        num_free, used = np.array([len(pages) for pages in self._pools.free]), np.array(self._pools.used)
        moves = np.empty((5, len(tokens)), np.int64)
        places = np.empty((2, len(segment)), np.int64)
        moved = place_row(
            np.stack([tokens.head, tokens.page, tokens.slot, tokens.rung]),
            tokens.rung == plan.stored,
            np.stack([arriving.head, arriving.rung, segment]),
            table, num_pages, free, num_free, used, moves, places,
        )  # fmt: skip
        self._pools.set_free(
            [stack[:n].tolist() for stack, n in zip(free, num_free, strict=True)], used.tolist()
        )
        entries = int(num_pages.max())
        if entries > old:
            more = ((0, 0), (0, 0), (0, entries + entries // 4 + 1 - old))
            self.rung, self.count = np.pad(self.rung, more), np.pad(self.count, more)
            self.index, self.base = np.pad(self.index, more), np.pad(self.base, more)
        for wide, narrow in zip(table, self._tables(), strict=True):
            narrow[row, :, :entries] = wide[:, :entries]
        self.num_pages[row] = num_pages
        return moves[:, :moved], places

    def _tables(self) -> tuple[NDArray[Any], ...]:
        return self.rung, self.count, self.index, self.base

    def _pack(self, rung: int) -> None:
        """Give back the memory of free pages of a rung: the pages in use move together."""
        mine = self.live() & (self.rung == rung)
        index = self.index[mine]
        self._pools.replace(rung, self.pools[rung][index])
        self.index[mine] = np.arange(len(index), dtype=np.uint32)

    def restore(
        self,
        pools: list[NDArray[np.uint8]],
        tables: dict[str, NDArray[Any]],
        num_pages: NDArray[np.int32],
        k_mean: NDArray[np.float16],
    ) -> None:
        """Take over pages and tables that were saved; their indices run through each pool in order."""
        self.clear()
        for r, pages in enumerate(pools):
            self._pools.replace(r, pages)
        self.rung, self.count = tables["rung"], tables["count"]
        self.index, self.base = tables["index"], tables["base"]
        self.num_pages, self.k_mean = num_pages, k_mean

    # ---- rows ----------------------------------------------------------------------------------------------

    def take_rows(self, rows: Ints) -> None:
        """Make row i a copy of the present row `rows[i]`; the batch becomes `len(rows)`."""
        self.rung, self.count, self.base = self.rung[rows], self.count[rows], self.base[rows]
        self.index, self.num_pages = self.index[rows], self.num_pages[rows]
        self.k_mean = self.k_mean[rows]
        self.batch = len(rows)
        for r in range(len(self.ladder)):
            self._pack(r)


@dataclass(frozen=True, slots=True)
class _Arriving:
    """Tokens on their way to a rung, one entry each: those that change it, by the old one, then new ones."""

    head: Ints
    rung: Ints
    k: Floats
    v: Floats
    position: Ints
    code: NDArray[np.uint8]
    steps: NDArray[np.int16]  # (2, n): of keys and of values, as `write_tokens` takes them

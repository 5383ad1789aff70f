"""Layers for tests of the GPU's planner: built by plans, filled by appends, checked after every change.

A page of these layers holds, for each slot, an identity (what token it is) where a real page has codes, then
positions and importance as a real page has them. So carrying out a plan is a matter of NumPy.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from hypothesis import strategies as st
from kvlab.numba_kernels.cpu.cache_groups import Tables

from kvlab.ops.plan import PlanShape, crop_bounds, decode_bounds, optimum
from kvlab.reference.cache_layer import (
    NO_PAGE,
    PAGE,
    QUAD,
    RETRY,
    SEGMENT,
    UNIT,
    Change,
    Ladder,
    Layer,
    Rung,
    Tokens,
)
from kvlab.reference.cache_plan import by_price, plan, uniform

LADDERS = {
    "2348": (Ladder((1112, 1624, 2136, 4184), (0.223, 0.0654, 0.018, 1e-4)), False),
    "248": (Ladder((600, 1112, 2136), (0.223, 0.018, 1e-4)), False),
    "04": (Ladder((0, 2136), (2.0, 0.018)), True),
    "16": (Ladder((8248,), (0.0,)), False),
    "0 2 16": (Ladder((0, 1112, 8248), (2.0, 0.223, 0.0)), True),
    "equal": (Ladder((344, 344, 600, 600, 1112), (0.223, 0.144, 0.0417, 0.018, 1e-4)), False),
    "0 equal": (Ladder((0, 344, 344, 600), (2.0, 0.223, 0.018, 1e-4)), True),
}
"""Bytes and loss of each level, and whether the lowest is eviction; "equal": some have the same bytes."""


@st.composite
def planner_runs(draw: st.DrawFn) -> dict[str, object]:
    return {
        "name": draw(st.sampled_from(sorted(LADDERS))),
        "batch": draw(st.integers(1, 2)),
        "heads": draw(st.integers(1, 3)),
        "lengths": draw(st.lists(st.integers(0, 500), min_size=1, max_size=3)),
        "share": draw(st.floats(0, 1)),
        "steps": draw(st.integers(0, 6)),
        "cropped": draw(st.floats(0, 1)),
        "kind": draw(st.sampled_from(["normal", "equal", "padded"])),
        "first": draw(st.sampled_from([0, 65536 - 70])),
        "tight_slabs": draw(st.booleans()),
        "by_position": draw(st.booleans()),
        "tight": draw(st.booleans()),
        "window": draw(st.sampled_from([0, 0, 30, 130])),
        "reach": draw(st.sampled_from([0, 0, 1, 40, 200])),
        "floor": draw(st.sampled_from([0, 1, 40])) << 32,
        "choose": draw(st.sampled_from(sorted(CHOICES))),
        "seed": draw(st.integers(0, 2**32 - 1)),
    }


def empty_layer(name: str, batch: int, heads: int, entries: int, budget: int, slabs: int) -> Layer:
    """An empty layer; slabs hold 3 pages of the lowest rung, 2 of the next and so on, at least 1."""
    ladder, evicts = LADDERS[name]
    levels = len(ladder.cost) - evicts
    rungs = tuple(Rung(7 + r, max(3 - r, 1), UNIT * (4 + r)) for r in range(levels))
    slab_units = max(rung.record * rung.per_slab for rung in rungs)
    num_bh, shape = batch * heads, (batch * heads, entries)
    return Layer(
        batch, heads, rungs, evicts, slab_units,
        np.full(slabs * slab_units * UNIT, 0xEE, np.uint8),
        *(np.full(shape, 200, kind) for kind in (np.uint8, np.uint8, np.uint32, np.uint16)),
        np.zeros(num_bh, np.int32), np.full((num_bh, 2), -1, np.int32),
        np.zeros(levels, np.int32), np.zeros(levels, np.int32),
        np.zeros((levels, slabs), np.int32), np.arange(slabs, dtype=np.int32)[::-1].copy(), slabs,
        np.zeros((levels, 3 * slabs), np.uint32), np.zeros(slabs, np.int32),
        0, np.full(batch, budget, np.int64),
    )  # fmt: skip


def tables_of(layer: Layer) -> Tables:
    """A layer as the kernels of the CPU take it."""
    rungs = np.array([(r.record, r.per_slab, r.tail) for r in layer.rungs], np.int64)
    waits = np.zeros(layer.batch, np.int32) if layer.waits is None else layer.waits
    return Tables(
        rungs, layer.arena, layer.rung, layer.count, layer.index, layer.base, layer.num_pages, layer.open,
        layer.used, layer.slab_count, layer.slabs, layer.free_slabs, np.array([layer.num_free], np.int32),
        layer.entry_of, layer.slab_slot, layer.budget, np.zeros(1, np.int32), waits,
    )  # fmt: skip


def draw_tokens(rng: np.random.Generator, batch: int, heads: int, n: int, first: int, kind: str) -> Tokens:
    """New tokens with importance of all sizes, all equal, or with padding in front."""
    valid = np.ones((batch, n), bool)
    if kind == "padded":
        valid = np.arange(n) >= rng.integers(0, n + 1, (batch, 1))
    if kind == "equal":
        return Tokens(np.full((batch * heads, n), 192, np.uint8), valid, first)
    codes = np.clip(rng.normal(90, 40, (batch * heads, n)), 0, 255).astype(np.uint8)
    return Tokens(codes, valid, first)


def smallest(name: str, heads: int, tokens: int) -> int:
    """A budget that suffices for a row."""
    cost = LADDERS[name][0].cost
    return heads * (-(-tokens // PAGE) * cost[0] + 4 * cost[-1]) + 100


def run_budget(run: dict[str, Any]) -> int:
    """The budget of a row: somewhere above what suffices, or hardly enough for as few pages as can be."""
    name, heads, cost = run["name"], run["heads"], LADDERS[run["name"]][0].cost
    total = sum(run["lengths"]) + 16 * run["steps"]
    exact = -(-run["window"] // PAGE)
    if run["tight"]:  # tokens may lie in two segments, and new pages may be open in both
        return heads * ((total // PAGE + 2) * cost[0] + (2 + exact) * cost[-1]) + 100
    least = smallest(name, heads, total) + heads * exact * cost[-1]
    return int(least + run["share"] * (2 * heads * total * cost[-1] / PAGE))


def identities(layer: Layer, address: int) -> np.ndarray:
    start = address * UNIT
    return layer.arena[start : start + 4 * PAGE].view("<u4")


CHOICES = {"greedy": by_price, "uniform": uniform, "dp": optimum}


@dataclass
class Simulation:
    """A layer and the tokens that should be in it: (bh, position) -> how often.

    The identity of a token is position + (bh << 20).
    """

    layer: Layer
    name: str
    sink: int = 4
    recent: int = 8
    lookahead: int = 16
    fixed: int = 100
    window: int = 0
    floor: int = 0
    reach: int = 0
    choose: str = "greedy"
    held: Counter[tuple[int, int]] = field(default_factory=Counter)

    def change(
        self, new: Tokens | None = None, by_position: bool = False, max_new_pages: int = 1 << 30
    ) -> Change:
        """Plan, carry out, and check what must hold after any change."""
        ladder, _ = LADDERS[self.name]
        before = self.levels()
        change = plan(
            self.layer, ladder, new, sink=self.sink, recent=self.recent, lookahead=self.lookahead,
            fixed_nbytes=self.fixed, by_position=by_position, max_new_pages=max_new_pages,
            window=self.window, floor=self.floor, reach=self.reach, choose=CHOICES[self.choose],
        )  # fmt: skip
        self.carry_out(change, new)
        seqlen = self.layer.seqlen if new is None else new.first + new.code.shape[1]
        oldest = seqlen - self.reach + 1 if self.reach else 0
        for at in [at for at in self.held if at[1] < oldest]:
            del self.held[at]
        if new is not None and not change.status & RETRY:
            self.layer.seqlen = new.first + new.code.shape[1]
            for bh in range(len(new.code)):
                for s in np.flatnonzero(new.valid[bh // self.layer.heads]):
                    if new.first + int(s) >= oldest:
                        self.held[bh, new.first + int(s)] += 1
        self.check(before, change)
        return change

    def replan(self, by_position: bool) -> Change:
        """Plan without new tokens until all is well: a second plan closes up short chunks."""
        for _ in range(40):
            change = self.change(by_position=by_position)
            if not change.status:
                return change
        raise AssertionError("no end")

    def carry_out(self, change: Change, new: Tokens | None) -> None:
        layer = self.layer
        for phase in change.phases:
            seen, old = set(), layer.arena.copy()
            reader = Layer(**{**vars(layer), "arena": old})
            for origin, to, from_slot, to_slot, from_rung, to_rung, token in phase:
                assert (to, to_slot) not in seen
                seen.add((to, to_slot))
                if from_rung == 255:
                    assert new is not None
                    row, s = divmod(token, new.code.shape[1])
                    assert row == origin // layer.heads
                    assert new.valid[row, s]
                    position, code = new.first + s, int(new.code[origin, s])
                    identity = position + (origin << 20)
                else:
                    assert (origin, from_slot) not in seen
                    position = int(reader.positions(from_rung, origin)[from_slot])
                    code = int(reader.codes(from_rung, origin)[from_slot])
                    identity = int(identities(reader, origin)[from_slot])
                    assert identity >> 20 == token
                identities(layer, to)[to_slot] = identity
                layer.positions(to_rung, to)[to_slot] = position & 0xFFFF
                layer.codes(to_rung, to)[to_slot] = code
        sources = {origin for origin, _, _ in change.copies}
        for origin, to, r in change.copies:
            assert to not in sources
            size = layer.rungs[r].record * UNIT
            layer.arena[to * UNIT : to * UNIT + size] = layer.arena[origin * UNIT : origin * UNIT + size]

    def pages(self) -> list[list[int]]:
        """Entries of every bh that name a page."""
        held = np.arange(self.layer.index.shape[1]) < self.layer.num_pages[:, None]
        return [np.flatnonzero(row).tolist() for row in held & (self.layer.index != NO_PAGE)]

    def levels(self) -> dict[tuple[int, int], tuple[int, int]]:
        """Rung and code of every stored token by (bh, position)."""
        layer, found = self.layer, {}
        for bh, pages in enumerate(self.pages()):
            for e in pages:
                r, address, n = int(layer.rung[bh, e]), int(layer.index[bh, e]), int(layer.count[bh, e])
                at = (int(layer.base[bh, e]) << SEGMENT) + layer.positions(r, address)[:n].astype(np.int64)
                assert np.array_equal(identities(layer, address)[:n], at + (bh << 20))
                for position, code in zip(at.tolist(), layer.codes(r, address)[:n].tolist(), strict=True):
                    assert (bh, position) not in found
                    found[bh, position] = r, code
        return found

    def row_nbytes(self) -> np.ndarray:
        layer, (ladder, evicts) = self.layer, LADDERS[self.name]
        live = (np.arange(layer.rung.shape[1]) < layer.num_pages[:, None]) & (layer.index != NO_PAGE)
        cost = np.array(ladder.cost)[np.where(live, layer.rung, 0).astype(int) + evicts]
        return np.where(live, cost, 0).sum(1).reshape(layer.batch, layer.heads).sum(1) + self.fixed

    def check(self, before: dict[tuple[int, int], tuple[int, int]], change: Change) -> None:
        layer, (ladder, evicts) = self.layer, LADDERS[self.name]
        after = self.levels()
        missing = set(self.held) - set(after)
        assert set(after) <= set(self.held)
        assert evicts or not missing
        for at in missing:
            del self.held[at]
        for at, (r, code) in after.items():
            top = before[at][0] if at in before else len(layer.rungs) - 1
            assert r <= top
            assert (
                ladder.cost[r + evicts] not in ladder.cost[r + evicts + 1 :]
            )  # the highest of as many bytes
            assert code == before.get(at, (0, code))[1]
            if self.window and top == len(layer.rungs) - 1 and not change.status:
                assert (r == top) == (at[1] >= layer.seqlen - self.window)
        if not change.status:
            assert (self.row_nbytes() <= layer.budget).all()
            self.check_open_pages()
        self.check_pools()
        self.check_quads()
        self.check_full_pages(change)

    def check_open_pages(self) -> None:
        """The open pages take `lookahead` tokens, in order, each in its segment."""
        layer = self.layer
        for bh, pages in enumerate(layer.open):
            opened = [(int(layer.base[bh, e]), int(layer.count[bh, e]), e) for e in pages if e >= 0]
            for _, _, e in opened:
                assert e < layer.num_pages[bh]
                assert layer.rung[bh, e] == len(layer.rungs) - 1
            free = [[base, PAGE - n] for base, n, _ in opened]
            for position in range(layer.seqlen, layer.seqlen + self.lookahead):
                while free and (free[0][1] == 0 or free[0][0] != position >> SEGMENT):
                    free.pop(0)
                assert free, (bh, position)
                free[0][1] -= 1

    def check_pools(self) -> None:
        """Numbers without gaps, owners and tables of one mind, slabs either used or free."""
        layer = self.layer
        for r in range(len(layer.rungs)):
            found = {}
            for bh, pages in enumerate(self.pages()):
                for e in pages:
                    if layer.rung[bh, e] == r:
                        number = layer.number(r, int(layer.index[bh, e]))
                        assert number not in found
                        found[number] = bh * layer.rung.shape[1] + e
            assert sorted(found) == list(range(layer.used[r]))
            assert [found[i] for i in range(layer.used[r])] == layer.entry_of[r, : layer.used[r]].tolist()
            assert layer.slab_count[r] == -(-int(layer.used[r]) // layer.rungs[r].per_slab)
        used = [s for r in range(len(layer.rungs)) for s in layer.slabs[r, : layer.slab_count[r]].tolist()]
        assert sorted(used + layer.free_slabs[: layer.num_free].tolist()) == list(range(len(layer.slab_slot)))

    def check_quads(self) -> None:
        """Tables are sorted by rung in whole quads; fillers stand behind the pages of a rung, 3 at most."""
        layer = self.layer
        for bh, n in enumerate(layer.num_pages):
            rung, filler = layer.rung[bh, :n], layer.index[bh, :n] == NO_PAGE
            assert n % QUAD == 0
            assert (rung[:-1] <= rung[1:]).all()
            assert not layer.count[bh, :n][filler].any()
            for r in set(rung.tolist()):
                of_rung = filler[rung == r]
                assert len(of_rung) % QUAD == 0
                assert of_rung.sum() < QUAD
                assert not of_rung[: len(of_rung) - of_rung.sum()].any()

    def check_full_pages(self, change: Change) -> None:
        """No (bh, segment, rung) has more than one page that is neither full nor empty, two at the top.

        What was left over in any class may be in new ones of a row that was compact.
        """
        layer = self.layer
        partial: Counter[tuple[int, int, int]] = Counter()
        for bh in range(len(layer.num_pages)):
            for e in range(int(layer.num_pages[bh])):
                if 0 < layer.count[bh, e] < PAGE:
                    partial[bh, int(layer.base[bh, e]), int(layer.rung[bh, e])] += 1
        for (bh, _, r), n in partial.items():
            compact = bh // layer.heads in change.compact
            assert n <= 1 + (r == len(layer.rungs) - 1) + compact * len(layer.rungs)

    def forget(self, n: int) -> None:
        """Shorten the rows by n time steps, which the next change drops."""
        self.layer.seqlen -= n
        for at in [at for at in self.held if at[1] >= self.layer.seqlen]:
            del self.held[at]

    def append(self, codes: np.ndarray) -> None:
        """What the append kernel does with `codes` (num_bh, steps) of new tokens."""
        layer, top = self.layer, len(self.layer.rungs) - 1
        for s in range(codes.shape[1]):
            position = layer.seqlen
            for bh in range(len(codes)):
                for e in layer.open[bh]:
                    if e >= 0 and layer.base[bh, e] == position >> SEGMENT and layer.count[bh, e] < PAGE:
                        break
                else:
                    raise AssertionError("no open page")
                address, slot = int(layer.index[bh, e]), int(layer.count[bh, e])
                identities(layer, address)[slot] = position + (bh << 20)
                layer.positions(top, address)[slot] = position & 0xFFFF
                layer.codes(top, address)[slot] = codes[bh, s]
                layer.count[bh, e] += 1
                self.held[bh, position] += 1
            layer.seqlen += 1

    def observe(self, rng: np.random.Generator) -> None:
        """New importance for all stored tokens."""
        layer = self.layer
        for bh, pages in enumerate(self.pages()):
            for e in pages:
                codes = layer.codes(int(layer.rung[bh, e]), int(layer.index[bh, e]))
                codes[:] = np.clip(codes + rng.integers(-9, 10, PAGE), 0, 255)


def play(run: dict[str, Any], kind: type[Simulation]) -> None:
    """Carry out a run: prefills, then decode steps with a plan every 16 tokens, then a crop."""
    name, batch, heads = run["name"], run["batch"], run["heads"]
    rng = np.random.default_rng(run["seed"])
    total = sum(run["lengths"]) + 16 * run["steps"]
    budget = run_budget(run)
    slabs = 40 + batch * heads * (3 * total // PAGE + 10) * (1 if run["tight_slabs"] else 4) // 2
    layer = empty_layer(name, batch, heads, 3 * total // PAGE + 40, budget, slabs)
    layer.seqlen = run["first"]
    window = run["window"] if len(layer.rungs) > 1 else 0
    rules = {rule: run[rule] for rule in ("floor", "reach", "choose")}
    simulation = kind(layer, name, window=window, **rules)
    for n in run["lengths"]:
        new = draw_tokens(rng, batch, heads, n, layer.seqlen, run["kind"])
        for _ in range(40):
            if not simulation.change(new, run["by_position"]).status & RETRY:
                break
        else:
            raise AssertionError("no end")
        simulation.replan(run["by_position"])
    shape = PlanShape(batch, heads, layer.rung.shape[1], len(layer.rungs), layer.evicts, 2, 0)
    new_pages, dropped = decode_bounds(shape, LADDERS[name][0])
    if run["reach"]:  # between two plans so many tokens leave the sliding window
        new_pages, dropped = crop_bounds(shape, LADDERS[name][0], PAGE, 0)
    for step in range(run["steps"]):
        simulation.append(rng.integers(0, 256, (batch * heads, 16)).astype(np.uint8))
        simulation.observe(rng)
        change = simulation.replan(run["by_position"])
        # The first one still closes what prefills have left open; one level for all may change any page.
        if step and not run["tight"] and run["choose"] != "uniform":
            assert change.new_pages <= new_pages
            assert change.dropped <= dropped
    simulation.forget(int(run["cropped"] * (layer.seqlen - run["first"])))
    simulation.replan(run["by_position"])

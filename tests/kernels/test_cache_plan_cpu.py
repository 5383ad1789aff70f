"""The planner of the CPU does what its oracle does, bit for bit: tables, moves, copies, status."""

from __future__ import annotations

import copy
import dataclasses
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from kvlab.numba_kernels.cpu.cache_groups import NewTokens, Rules
from kvlab.numba_kernels.cpu.cache_plan import choose_levels, count_tokens, finish_plan

from kvlab.cache.layers import LayerFormat
from kvlab.ladder import parse_bits
from kvlab.ops.cpu.plan import chunks_of, levels_of
from kvlab.ops.plan import choose_optimum
from kvlab.reference.cache_layer import RETRY, SEGMENT, Change, Ladder, Layer, Tokens
from kvlab.reference.cache_plan import Choose, by_price, plan, uniform
from tests.planner_simulation import (
    CHOICES,
    LADDERS,
    Simulation,
    draw_tokens,
    empty_layer,
    planner_runs,
    play,
    tables_of,
)


def compiled_plan(
    layer: Layer, ladder: Ladder, new: Tokens | None, *, sink: int, recent: int, lookahead: int,
    fixed_nbytes: int, by_position: bool = False, max_new_pages: int = 1 << 30, segments: int = 0,
    window: int = 0, floor: int = 0, reach: int = 0, choose: Choose = by_price,
) -> Change:  # fmt: skip
    """What `plan` does, by the kernels of the CPU."""
    tables = tables_of(layer)
    if new is None:
        none = np.zeros((len(layer.num_pages), 0), np.uint8)
        new = Tokens(none, np.zeros((layer.batch, 0), bool), layer.seqlen)
    seqlen = new.first + new.code.shape[1]
    held = np.arange(layer.base.shape[1]) < layer.num_pages[:, None]
    last = max((seqlen + lookahead - 1) >> SEGMENT, int(layer.base[held].max(initial=0)), segments - 1)
    rules = Rules(
        layer.heads, int(layer.evicts), layer.slab_units, last + 1, seqlen, sink, recent, lookahead,
        by_position, fixed_nbytes, max_new_pages, window, floor, seqlen - reach + 1 if reach else 0,
    )  # fmt: skip
    at = np.tile(np.arange(new.first, seqlen), (layer.batch, 1)) if new.positions is None else new.positions
    fresh, levels = NewTokens(new.code, new.valid, at.astype(np.int32)), levels_of(ladder)
    groups, weights, bytes_left = count_tokens(tables, levels, rules, fresh)
    if choose in (by_price, uniform):
        chosen = choose_levels(levels, rules, groups, weights, bytes_left, choose is uniform)
    else:
        chunks = chunks_of(groups, weights, layer.batch)
        groups.chosen[:], chosen = choose_optimum(ladder, layer.evicts, window, *chunks, bytes_left)
    moves, closing, copies, new_pages, dropped, found = finish_plan(tables, rules, fresh, groups, chosen)
    layer.num_free = int(tables.num_free[0])
    assert tables.status[0] == found
    phases = [
        [
            (int(a), int(b), int(c & 255), int(c >> 8 & 255), int(c >> 16 & 255), int(c >> 24), int(d))
            for a, b, c, d in part
        ]
        for part in (moves, closing)
    ]
    return Change(
        (phases[0], phases[1]), [tuple(map(int, x)) for x in copies], [], [], new_pages, dropped, found
    )


def differences(first: Layer, second: Layer) -> list[str]:
    """Names of what two layers do not have in common."""
    pairs = [
        (field.name, getattr(first, field.name), getattr(second, field.name))
        for field in dataclasses.fields(Layer)
    ]
    return [name for name, x, y in pairs if not np.array_equal(x, y)]


class Compared(Simulation):
    """A simulation in which the kernels decide every change as well."""

    def change(
        self, new: Tokens | None = None, by_position: bool = False, max_new_pages: int = 1 << 30
    ) -> Change:
        ladder, _ = LADDERS[self.name]
        rules = {
            "sink": self.sink, "recent": self.recent, "lookahead": self.lookahead, "fixed_nbytes": self.fixed,
            "by_position": by_position, "max_new_pages": max_new_pages, "window": self.window,
            "floor": self.floor, "reach": self.reach, "choose": CHOICES[self.choose],
        }  # fmt: skip
        oracle, kernels = copy.deepcopy(self.layer), copy.deepcopy(self.layer)
        expected = plan(oracle, ladder, new, **rules)
        found = compiled_plan(kernels, ladder, new, **rules)
        assert not differences(oracle, kernels)
        assert dataclasses.replace(found, chunks=expected.chunks, compact=expected.compact) == expected
        return super().change(new, by_position, max_new_pages)


@given(run=planner_runs())
@settings(deadline=None, max_examples=25)
def test_every_change_is_that_of_the_oracle(run: dict) -> None:
    play(run, Compared)


@pytest.mark.parametrize("choose", CHOICES)
@pytest.mark.parametrize("name", ["equal", "0 equal"])
def test_levels_of_equal_bytes_are_chosen_as_by_the_oracle(name: str, choose: str) -> None:
    """Also where a plan is over its budget; `Simulation.check` refuses pages at others than the highest."""
    run = {
        "name": name, "batch": 1, "heads": 2, "lengths": [150, 90], "steps": 2, "cropped": 0.3, "share": 0.1,
        "kind": "normal", "first": 0, "tight_slabs": False, "by_position": False, "tight": True, "window": 0,
        "reach": 0, "floor": 1 << 32, "choose": choose, "seed": 0,
    }  # fmt: skip
    play(run, Compared)


def test_new_pages_are_cut_down_as_by_the_oracle() -> None:
    rng = np.random.default_rng(0)
    simulation = Compared(empty_layer("2348", 2, 2, 160, 150_000, 800), "2348")
    simulation.change(draw_tokens(rng, 2, 2, 700, 0, "normal"))
    simulation.layer.budget[:] = 90_000
    new = draw_tokens(rng, 2, 2, 200, 700, "padded")
    assert simulation.change(new, max_new_pages=2).status & RETRY
    while simulation.change(new, max_new_pages=40).status & RETRY:
        pass


def test_rows_that_wait_are_left_alone_and_then_come_with_their_positions() -> None:
    rng, rules = np.random.default_rng(1), {"sink": 4, "recent": 8, "lookahead": 16, "fixed_nbytes": 100}
    oracle = empty_layer("248", 2, 2, 40, 60_000, 200)
    oracle.waits = np.array([1, 0], np.int32)
    oracle.num_pages[:2], oracle.rung[:2] = 2, 3  # pages of a rung that no plan knows
    first = draw_tokens(rng, 2, 2, 60, 0, "normal")
    first.valid[0] = False
    second = draw_tokens(rng, 2, 2, 200, 60, "normal")
    positions = np.tile(np.arange(60, 260), (2, 1))
    positions[0, :50] = np.arange(10, 60)
    second.valid[1, :50] = False
    second = dataclasses.replace(second, positions=positions)
    for new, waits in ((first, 1), (second, 0)):
        oracle.waits[0] = waits
        oracle.num_pages[:2] = 2 * waits
        kernels = copy.deepcopy(oracle)
        expected, found = (
            f(x, LADDERS["248"][0], new, **rules) for f, x in ((plan, oracle), (compiled_plan, kernels))
        )
        assert not differences(oracle, kernels)
        assert dataclasses.replace(found, chunks=expected.chunks, compact=expected.compact) == expected
        assert (oracle.num_pages[0] == 2) == bool(waits)
        oracle.seqlen = new.first + new.code.shape[1]


def test_a_difference_is_found() -> None:
    layer = empty_layer("248", 1, 1, 20, 50_000, 40)
    other = copy.deepcopy(layer)
    other.entry_of[0, 0] += 1
    other.num_free -= 1
    assert differences(layer, other) == ["num_free", "entry_of"]


@pytest.mark.parametrize("head_dim", [16, 48, 64, 80, 128, 256])
def test_hulls_are_those_of_the_oracle(head_dim: int) -> None:
    """Of every ladder, with eviction and with pages of a window behind a rung of width 16."""
    words = ("0", "2", "k4v2", "3", "4", "k8v4", "8", "16")
    compared = 0
    for n in range(1, len(words) + 1):
        for bits in combinations(words, n):
            if bits == ("0",) or {"k4v2", "3"} <= {*bits}:  # which take the same bytes
                continue
            (rungs,) = parse_bits(bits, 1)
            for whole in (rungs, (*rungs, *parse_bits("16", 1)[0])):
                found = LayerFormat(whole, 2, head_dim, "float16").levels
                expected = Ladder(found.cost, found.loss)
                for top in range(len(found.cost)):
                    assert found.edges(top) == expected.edges(top)
                    compared += 1
    assert compared > 1000

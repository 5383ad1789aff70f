"""The oracle of the GPU's planner keeps what every plan promises, and is as good as the CPU's allocator."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlab.ops.allocator import allocate
from kvlab.ops.plan import ample_nbytes, smallest_nbytes
from kvlab.pages import decode_importance, encode_importance
from kvlab.reference import cache_plan
from kvlab.reference.cache_layer import OVER_BUDGET, PAGE, Ladder, Tokens
from kvlab.reference.cache_plan import Choose, token_weight
from tests.planner_simulation import (
    CHOICES,
    LADDERS,
    Simulation,
    draw_tokens,
    empty_layer,
    planner_runs,
    play,
    smallest,
)


@given(run=planner_runs())
@settings(deadline=None, max_examples=25)
def test_every_change_keeps_the_promises(run: dict) -> None:
    play(run, Simulation)


@given(seed=st.integers(0, 2**32 - 1), name=st.sampled_from(["2348", "248", "04"]), share=st.floats(0.1, 0.9))
@settings(deadline=None, max_examples=8)
def test_loss_is_that_of_the_allocator(seed: int, name: str, share: float) -> None:
    rng = np.random.default_rng(seed)
    ladder, n, heads = LADDERS[name][0], 2500, 3
    low, high = smallest(name, heads, n), heads * (n // PAGE + 2) * ladder.cost[-1]
    layer = empty_layer(name, 1, heads, 200, int(low + share * (high - low)), 800)
    simulation = Simulation(layer, name)
    change = simulation.change(draw_tokens(rng, 1, heads, n, 0, "normal"))
    _, weight, _, level = (np.array(column) for column in zip(*change.chunks, strict=True))
    loss = weight[:, None] * np.array(ladder.loss)
    room = int(np.array(ladder.cost)[level].sum() + layer.budget[0] - simulation.row_nbytes()[0])
    best = allocate(loss, ladder.cost, room)
    rows = np.arange(len(level))
    step = (loss[:, :-1] - loss[:, 1:])[level < best.max()].max(initial=0)
    assert loss[rows, level].sum() <= 1.02 * loss[rows, best].sum() + step


def test_unlimited_budget_keeps_everything_at_the_top_and_unimportant_tokens_too() -> None:
    layer = empty_layer("248", 1, 2, 60, 1 << 62, 100)
    new = Tokens(np.zeros((2, 700), np.uint8), np.ones((1, 700), bool), 0)
    Simulation(layer, "248").change(new)
    assert (layer.rung[:, : layer.num_pages[0]] == 2).all()


def test_too_small_a_budget_is_reported() -> None:
    layer = empty_layer("248", 1, 2, 60, 1000, 100)
    new = Tokens(np.zeros((2, 700), np.uint8), np.ones((1, 700), bool), 0)
    assert Simulation(layer, "248").change(new).status == OVER_BUDGET


@given(name=st.sampled_from(sorted(LADDERS)), n=st.integers(0, 600), heads=st.integers(1, 3))
@settings(deadline=None, max_examples=20)
def test_with_ample_bytes_no_plan_is_compact(name: str, n: int, heads: int) -> None:
    budget = ample_nbytes(n, heads, LADDERS[name][0], 100)
    layer = empty_layer(name, 1, heads, 80, budget, 200)
    new = draw_tokens(np.random.default_rng(n), 1, heads, n, 0, "normal")
    change = Simulation(layer, name).change(new)
    assert not change.status
    assert not change.compact


def levels_of(budget: int, seqlen: int, slabs: int) -> dict[tuple[int, int], tuple[int, int]]:
    """Rungs of so many alike tokens in one call, of which the first 4 and the last 8 received nothing."""
    layer = empty_layer("2348", 1, 1, 80, budget, slabs)
    simulation = Simulation(layer, "2348")
    codes = np.full((1, seqlen), 200, np.uint8)
    codes[0, :4] = codes[0, -8:] = 0
    simulation.change(Tokens(codes, np.ones((1, seqlen), bool), 0))
    return simulation.levels()


def test_sinks_and_recent_tokens_stay_at_the_top() -> None:
    found = levels_of(40 * 1112 + 3 * 4184 + 100, 640, 100)
    assert {found[0, position][0] for position in [*range(4), *range(632, 640)]} == {3}
    assert min(r for r, _ in found.values()) < 2


def test_of_the_newest_at_most_one_in_16_outweighs_others() -> None:
    found = levels_of(3 * 1112 + 2 * 4184 + 100, 64, 100)
    assert {found[0, position][0] for position in [*range(4), *range(60, 64)]} == {3}
    assert {found[0, position][0] for position in range(56, 60)} == {0}


def test_a_plan_behind_a_crop_drops_what_is_beyond_the_end() -> None:
    rng = np.random.default_rng(0)
    layer = empty_layer("248", 2, 2, 80, 200_000, 300)
    simulation = Simulation(layer, "248")
    simulation.change(draw_tokens(rng, 2, 2, 600, 0, "padded"))
    before = simulation.levels()
    simulation.forget(250)
    simulation.change()
    after = simulation.levels()
    assert set(after) == {at for at in before if at[1] < 350}
    simulation.append(rng.integers(0, 256, (4, 16)).astype(np.uint8))


def test_weights_are_those_of_the_importance_codes() -> None:
    codes = np.arange(1, 253)
    weights = np.array([token_weight(int(code)) for code in codes]) / 2**32
    assert np.allclose(weights, decode_importance(codes.astype(np.uint8)), rtol=4e-3)
    assert 0 < token_weight(0) < token_weight(1)
    ages = np.arange(1, 5000)
    assert np.array_equal(cache_plan.recency_code(ages), encode_importance(1 / ages))


def test_edges_are_the_lower_hull() -> None:
    ladder = Ladder((10, 20, 30, 40), (8.0, 7.5, 1.0, 0.5))
    assert [level for level, _ in ladder.edges(3)] == [2, 3]
    assert [level for level, _ in ladder.edges(1)] == [1]


@pytest.mark.parametrize("choose", CHOICES.values())
def test_of_levels_of_equal_bytes_the_highest_is_chosen(choose: Choose) -> None:
    """Chunks that lie lower already stay there: no bytes would be saved."""
    ladder = Ladder((10, 10, 10, 20, 20), (9.0, 8.0, 7.0, 2.0, 1.0))
    weights, ceilings = np.ones(5, np.float32), np.arange(5)
    for bytes_left in (40, 50):  # too few; hardly enough
        assert choose(weights, ceilings, ladder, bytes_left).tolist() == [0, 1, 2, 2, 2]
    assert choose(weights, ceilings, ladder, 70).tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("fault", ["lost", "twice", "entry_of", "budget"])
def test_checks_refuse_wrong_changes(fault: str) -> None:
    layer = empty_layer("248", 1, 1, 60, 40_000, 60)
    simulation = Simulation(layer, "248")
    rng = np.random.default_rng(0)
    simulation.change(draw_tokens(rng, 1, 1, 600, 0, "normal"))
    simulation.append(rng.integers(0, 256, (1, 16)).astype(np.uint8))
    before = simulation.levels()
    change = simulation.change()
    if fault == "lost":
        layer.num_pages[0] -= 1
    elif fault == "twice":
        layer.index[0, 0] = layer.index[0, 1]
    elif fault == "entry_of":
        layer.entry_of[0, 0] += 1
    else:
        layer.budget[0] = simulation.row_nbytes()[0] - 1
    with pytest.raises(AssertionError):
        simulation.check(before, change)


def layout_nbytes(simulation: Simulation, tokens: list[list[int]], window: int) -> int:
    """Bytes of a row whose groups have `tokens` outside the window and in it, in as few pages as can be."""
    ladder = LADDERS[simulation.name][0]
    pages = [(-(-n // PAGE), -(-exact // PAGE)) for n, exact in tokens]
    return simulation.fixed + sum(low * ladder.cost[0] + high * ladder.cost[-1] for low, high in pages)


@given(
    name=st.sampled_from(["2348", "248"]),
    lengths=st.lists(st.integers(1, 200), min_size=1, max_size=3),
    cropped=st.integers(0, 150),
    new=st.integers(0, 200),
    window=st.sampled_from([0, 40, 130]),
    kind=st.sampled_from(["normal", "padded"]),
    first=st.sampled_from([0, 65536 - 70]),
    reach=st.sampled_from([0, 0, 90]),
    seed=st.integers(0, 2**32 - 1),
)
@settings(deadline=None, max_examples=25)
def test_two_plans_reach_the_smallest_layout(
    name: str, lengths: list[int], cropped: int, new: int, window: int, kind: str, first: int, reach: int,
    seed: int,
) -> None:  # fmt: skip
    """Whatever stands in the pages; one byte less is too little, but for pages of the window."""
    rng, heads = np.random.default_rng(seed), 2
    layer = empty_layer(name, 1, heads, 300, 1 << 40, 900)
    layer.seqlen = first
    simulation = Simulation(layer, name, lookahead=0, window=window, reach=reach)
    for n in lengths:
        layer.budget[:] = int(rng.uniform(0.5, 3) * smallest(name, heads, sum(lengths)))
        simulation.change(draw_tokens(rng, 1, heads, n, layer.seqlen, kind))
    simulation.forget(min(cropped, sum(lengths)))
    simulation.change()
    fresh = draw_tokens(rng, 1, heads, new, layer.seqlen, kind)
    end, top = layer.seqlen + new, len(layer.rungs) - 1
    groups = [[0, 0] for _ in range(2 * heads)]
    stored = [(bh, at, r) for (bh, at), (r, _) in simulation.levels().items()]
    added = [(bh, layer.seqlen + int(s), top) for bh in range(heads) for s in np.flatnonzero(fresh.valid[0])]
    for bh, at, r in stored + added:
        if reach and at <= end - reach:
            continue
        groups[2 * bh + (at >> 16)][int(at >= end - window and r == top)] += 1
    layer.budget[:] = layout_nbytes(simulation, groups, window)
    promised = smallest_nbytes(end, heads, LADDERS[name][0], simulation.fixed, window=window, reach=reach)
    assert layer.budget[0] <= promised or first  # where positions do not begin at 0 there is one border more
    for tokens in (fresh, None):
        status = simulation.change(tokens).status
    assert status == 0
    layer.budget -= 1
    assert simulation.change().status == OVER_BUDGET or window or not sum(map(sum, groups))

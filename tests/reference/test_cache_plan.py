"""The oracle of the GPU's planner keeps what every plan promises, and is as good as the CPU's allocator."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlab.cache.allocator import allocate
from kvlab.cache.cuda.plan import PlanShape, decode_bounds, smallest_nbytes
from kvlab.cache.pages import decode_importance, encode_importance
from kvlab.reference import cache_plan
from kvlab.reference.cache_layer import NO_ROOM, PAGE, Ladder, Tokens
from kvlab.reference.cache_plan import token_weight
from tests.plans import LADDERS, Simulation, draw_tokens, empty_layer, smallest


@st.composite
def stories(draw: st.DrawFn) -> dict[str, object]:
    return {
        "name": draw(st.sampled_from(sorted(LADDERS))),
        "batch": draw(st.integers(1, 2)),
        "heads": draw(st.integers(1, 3)),
        "lengths": draw(st.lists(st.integers(0, 500), min_size=1, max_size=3)),
        "share": draw(st.floats(0, 1)),
        "steps": draw(st.integers(0, 6)),
        "kind": draw(st.sampled_from(["normal", "equal", "padded"])),
        "first": draw(st.sampled_from([0, 65536 - 70])),
        "tight_slabs": draw(st.booleans()),
        "by_position": draw(st.booleans()),
        "seed": draw(st.integers(0, 2**32 - 1)),
    }


@given(story=stories())
@settings(deadline=None, max_examples=25)
def test_every_change_keeps_the_promises(story: dict) -> None:
    name, batch, heads = story["name"], story["batch"], story["heads"]
    rng = np.random.default_rng(story["seed"])
    total = sum(story["lengths"]) + 16 * story["steps"]
    low = smallest(name, heads, total)
    budget = int(low + story["share"] * (2 * heads * total * LADDERS[name][0].cost[-1] / PAGE))
    slabs = 40 + batch * heads * (3 * total // PAGE + 10) * (1 if story["tight_slabs"] else 4) // 2
    layer = empty_layer(name, batch, heads, 3 * total // PAGE + 40, budget, slabs)
    layer.seqlen = story["first"]
    simulation = Simulation(layer, name)
    for n in story["lengths"]:
        new = draw_tokens(rng, batch, heads, n, layer.seqlen, story["kind"])
        for _ in range(40):
            if not simulation.change(new, story["by_position"]).status:
                break
        else:
            raise AssertionError("no end")
    shape = PlanShape(batch, heads, layer.rung.shape[1], len(layer.rungs), layer.evicts, 2, 0)
    births, dropped = decode_bounds(shape, LADDERS[name][0])
    for step in range(story["steps"]):
        simulation.append(rng.integers(0, 256, (batch * heads, 16)).astype(np.uint8))
        simulation.observe(rng)
        change = simulation.change(by_position=story["by_position"])
        assert change.status == 0
        if step:  # the first one still closes what prefills have left open
            assert change.births <= births
            assert change.dropped <= dropped


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
    layer = empty_layer("248", 1, 2, 40, 1 << 62, 100)
    new = Tokens(np.zeros((2, 700), np.uint8), np.ones((1, 700), bool), 0)
    Simulation(layer, "248").change(new)
    assert (layer.rung[:, : layer.num_pages[0]] == 2).all()


def test_too_small_a_budget_is_reported() -> None:
    layer = empty_layer("248", 1, 2, 40, 1000, 100)
    new = Tokens(np.zeros((2, 700), np.uint8), np.ones((1, 700), bool), 0)
    assert Simulation(layer, "248").change(new).status == NO_ROOM


@given(name=st.sampled_from(sorted(LADDERS)), n=st.integers(0, 600), heads=st.integers(1, 3))
@settings(deadline=None, max_examples=20)
def test_the_smallest_budget_suffices(name: str, n: int, heads: int) -> None:
    budget = smallest_nbytes(n, heads, LADDERS[name][0], 100)
    layer = empty_layer(name, 1, heads, 60, budget, 200)
    new = draw_tokens(np.random.default_rng(n), 1, heads, n, 0, "normal")
    assert Simulation(layer, name).change(new).status == 0


def test_sinks_and_recent_tokens_stay_at_the_top() -> None:
    layer = empty_layer("2348", 1, 1, 60, 10 * 4424 + 3 * 16712 + 100, 100)
    simulation = Simulation(layer, "2348")
    codes = np.full((1, 640), 200, np.uint8)
    codes[0, :4] = codes[0, -8:] = 0
    simulation.change(Tokens(codes, np.ones((1, 640), bool), 0))
    found = simulation.levels()
    assert {found[0, position][0] for position in [*range(4), *range(632, 640)]} == {3}
    assert min(r for r, _ in found.values()) < 2


def test_weights_are_those_of_the_importance_codes() -> None:
    codes = np.arange(1, 254)
    weights = np.array([token_weight(int(code)) for code in codes]) / 2**32
    assert np.allclose(weights, decode_importance(codes.astype(np.uint8)), rtol=4e-3)
    assert 0 < token_weight(0) < token_weight(1)
    ages = np.arange(1, 5000)
    assert np.array_equal(cache_plan.recency_code(ages), encode_importance(1 / ages))


def test_steps_are_the_lower_hull() -> None:
    ladder = Ladder((10, 20, 30, 40), (8.0, 7.5, 1.0, 0.5))
    assert [level for level, _ in ladder.steps(3)] == [2, 3]
    assert [level for level, _ in ladder.steps(1)] == [1]


@pytest.mark.parametrize("fault", ["lost", "twice", "owner", "budget"])
def test_checks_refuse_wrong_changes(fault: str) -> None:
    layer = empty_layer("248", 1, 1, 40, 40_000, 60)
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
    elif fault == "owner":
        layer.owner[0, 0] += 1
    else:
        layer.budget[0] = simulation.row_nbytes()[0] - 1
    with pytest.raises(AssertionError):
        simulation.check(before, change)

"""The page allocator against two independent optima: all combinations of rungs, a table over every byte."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from numpy.typing import NDArray

from kvlab.errors import BudgetError, OutOfMemory
from kvlab.ops import allocator
from kvlab.ops.allocator import METHODS, Method, allocate
from tests.strategies import LADDERS, AllocationCase, allocation_cases

Rungs = NDArray[np.int64]


def solve(case: AllocationCase, method: Method) -> Rungs:
    return allocate(case.loss, case.cost, case.budget, ceiling=case.ceiling, method=method)


def min_loss_of_all_combinations(case: AllocationCase) -> float:
    choices = list(itertools.product(*(range(top + 1) for top in case.top)))
    rungs = np.array(choices, dtype=np.int64).reshape(len(choices), len(case.loss))
    fits = case.cost[rungs].sum(axis=1) <= case.budget
    return float(case.loss[np.arange(len(case.loss)), rungs].sum(axis=1)[fits].min())


def min_loss_by_byte_table(case: AllocationCase) -> float:
    """Best loss for every number of bytes, one page after the other: the textbook dynamic program."""
    size = min(case.budget, len(case.loss) * int(case.cost[-1])) + 1
    table = np.zeros(size)
    for row, top in zip(case.loss, case.top, strict=True):
        longer = np.full(size, np.inf)
        for loss, cost in zip(row[: top + 1], case.cost, strict=False):
            longer[cost:] = np.minimum(longer[cost:], table[: max(size - cost, 0)] + loss)
        table = longer
    return float(table[-1])


def largest_hull_step(case: AllocationCase) -> float:
    """Walk along the lower hull of each page: the next corner is the rung under the steepest slope."""
    largest = 0.0
    for loss, top in zip(case.loss, case.top, strict=True):
        rung = 0
        while rung < top:
            slopes = (loss[rung] - loss[rung + 1 : top + 1]) / (
                case.cost[rung + 1 : top + 1] - case.cost[rung]
            )
            corner = rung + 1 + int(np.argmax(slopes))
            largest = max(largest, float(loss[rung] - loss[corner]))
            rung = corner
    return largest


def assert_allowed(case: AllocationCase, rung: Rungs) -> None:
    assert rung.dtype == np.int64
    assert rung.shape == (len(case.loss),)
    assert np.all((rung >= 0) & (rung <= case.top))
    assert case.total_cost(rung) <= case.budget


def assert_nothing_more_fits(case: AllocationCase, rung: Rungs) -> None:
    raisable = rung[rung < case.top]
    assert np.all(case.cost[raisable + 1] - case.cost[raisable] > case.budget - case.total_cost(rung))


def assert_optimal(case: AllocationCase, rung: Rungs, least: float) -> None:
    assert_allowed(case, rung)
    rounding = 2.0**-48 * float(np.sum(case.loss[:, 0]))
    assert math.isclose(case.total_loss(rung), least, rel_tol=1e-12, abs_tol=rounding)


def assert_within_one_step(case: AllocationCase, rung: Rungs, least: float) -> None:
    assert_allowed(case, rung)
    assert case.total_loss(rung) <= (least + largest_hull_step(case)) * (1 + 1e-12)


@given(allocation_cases(max_pages=6, max_cost=10**6))
def test_dp_and_greedy_against_all_combinations(case: AllocationCase) -> None:
    least = min_loss_of_all_combinations(case)
    assert_optimal(case, solve(case, "dp"), least)
    assert_within_one_step(case, solve(case, "greedy"), least)


@given(allocation_cases(max_pages=60, max_cost=100))
def test_dp_and_greedy_against_a_table_over_every_byte(case: AllocationCase) -> None:
    least = min_loss_by_byte_table(case)
    assert_optimal(case, solve(case, "dp"), least)
    assert_within_one_step(case, solve(case, "greedy"), least)


@given(allocation_cases(max_pages=6, max_cost=100))
def test_the_two_optima_agree(case: AllocationCase) -> None:
    assert math.isclose(min_loss_by_byte_table(case), min_loss_of_all_combinations(case), rel_tol=1e-12)


@given(allocation_cases(max_pages=200))
def test_what_holds_at_any_size(case: AllocationCase) -> None:
    greedy, dp, uniform = (solve(case, method) for method in METHODS)
    for rung in (greedy, dp, uniform):
        assert_allowed(case, rung)
    for rung in (greedy, dp):
        assert_nothing_more_fits(case, rung)
    least = case.total_loss(dp)
    assert_within_one_step(case, greedy, least)
    assert least <= min(case.total_loss(greedy), case.total_loss(uniform)) * (1 + 1e-12)
    for method, rung in zip(METHODS, (greedy, dp, uniform), strict=True):
        np.testing.assert_array_equal(solve(case, method), rung)


@given(allocation_cases(max_pages=100, max_cost=300))
def test_more_bytes_and_higher_ceilings_never_lose_more(case: AllocationCase) -> None:
    losses = [case.total_loss(solve(case, "dp"))]
    for more in (1, 17, 400):
        richer = AllocationCase(case.loss, case.cost, case.budget + more, case.ceiling)
        losses.append(case.total_loss(solve(richer, "dp")))
    losses.append(case.total_loss(solve(AllocationCase(case.loss, case.cost, richer.budget, None), "dp")))
    for less, more_loss in itertools.pairwise(reversed(losses)):
        assert less <= more_loss * (1 + 1e-12)


@given(allocation_cases(max_pages=40))
def test_uniform_is_the_highest_common_rung_that_fits(case: AllocationCase) -> None:
    fitting = [
        chosen
        for rung in range(len(case.cost))
        if case.total_cost(chosen := np.minimum(case.top, rung)) <= case.budget
    ]
    np.testing.assert_array_equal(solve(case, "uniform"), fitting[-1])


@given(allocation_cases(max_pages=40))
def test_arguments_are_left_alone_and_may_be_of_any_layout(case: AllocationCase) -> None:
    loss, cost = case.loss.copy(), case.cost.copy()
    loss.flags.writeable = cost.flags.writeable = False
    for method in METHODS:
        plain = allocate(loss, cost, case.budget, ceiling=case.ceiling, method=method)
        other = allocate(
            np.asfortranarray(loss), cost.astype(np.int32), np.int64(min(case.budget, 2**62)),
            ceiling=case.top.astype(np.uint8)[::-1][::-1], method=method,
        )  # fmt: skip
        np.testing.assert_array_equal(other, plain)


@pytest.mark.parametrize("cost", LADDERS)
@pytest.mark.parametrize("sigma", [2.0, 3.0])
@pytest.mark.parametrize("pages", [512, 4096])
def test_greedy_is_within_two_percent_at_real_sizes(cost: tuple[int, ...], sigma: float, pages: int) -> None:
    error = (1.0, 0.117, 0.0345, 0.0095, 3.5e-5)[-len(cost) :]
    loss = np.random.default_rng(7).lognormal(0, sigma, (pages, 1)) * error
    for fraction in (0.1, 0.3, 0.6, 0.9):
        case = AllocationCase(
            loss, np.array(cost), int(pages * (cost[0] + fraction * (cost[-1] - cost[0]))), None
        )
        dp, greedy = solve(case, "dp"), solve(case, "greedy")
        assert_allowed(case, dp)
        assert_allowed(case, greedy)
        assert case.total_loss(dp) <= case.total_loss(greedy) <= 1.02 * case.total_loss(dp)


def test_dp_finds_what_greedy_misses() -> None:
    """Six bytes on one page save most per byte, but five bytes on each of the two save more."""
    case = AllocationCase(np.array([[10.0, 4.0, 0.0], [10.0, 4.5, 0.0]]), np.array([0, 5, 6]), 10, None)
    np.testing.assert_array_equal(solve(case, "greedy"), [2, 0])
    np.testing.assert_array_equal(solve(case, "dp"), [1, 1])


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("pages", [1, 3])
def test_budget_at_its_boundaries(method: Method, pages: int) -> None:
    loss, cost = np.ones((pages, 1)) * [3.0, 1.0, 0.0], np.array([7, 11, 30])
    exact = AllocationCase(loss, cost, 7 * pages, None)
    np.testing.assert_array_equal(solve(exact, method), [0] * pages)
    with pytest.raises(
        BudgetError, match=rf"{pages} pages need {7 * pages} bytes.*budget is {7 * pages - 1}"
    ) as e:
        solve(AllocationCase(loss, cost, 7 * pages - 1, None), method)
    assert e.value.needed_bytes == 7 * pages
    np.testing.assert_array_equal(solve(AllocationCase(loss, cost, 30 * pages, None), method), [2] * pages)
    np.testing.assert_array_equal(solve(AllocationCase(loss, cost, 10**40, None), method), [2] * pages)
    short = solve(AllocationCase(loss, cost, 30 * pages - 1, None), method)
    assert np.sum(short) == 2 * pages - (pages if method == "uniform" else 1)


@pytest.mark.parametrize("method", METHODS)
def test_no_pages_and_one_rung(method: Method) -> None:
    empty = AllocationCase(np.zeros((0, 3)), np.array([1, 2, 3]), 0, None)
    assert solve(empty, method).shape == (0,)
    single = AllocationCase(np.ones((4, 1)), np.array([9]), 36, np.zeros(4, np.int64))
    np.testing.assert_array_equal(solve(single, method), [0] * 4)


@pytest.mark.parametrize("method", METHODS)
def test_pages_that_lose_nothing_keep_their_rung_if_there_is_room(method: Method) -> None:
    case = AllocationCase(np.zeros((5, 3)), np.array([1, 2, 4]), 20, np.array([2, 1, 0, 2, 2]))
    np.testing.assert_array_equal(solve(case, method), case.ceiling)


def test_ties_go_to_earlier_pages_and_are_levelled() -> None:
    equal = AllocationCase(np.ones((6, 1)) * [4.0, 1.0, 0.0], np.array([10, 20, 40]), 90, None)
    np.testing.assert_array_equal(solve(equal, "greedy"), [1, 1, 1, 0, 0, 0])
    nothing = AllocationCase(np.zeros((6, 3)), np.array([10, 20, 40]), 130, None)
    np.testing.assert_array_equal(solve(nothing, "greedy"), [1, 1, 1, 1, 1, 1])
    np.testing.assert_array_equal(solve(nothing, "dp"), [1, 1, 1, 1, 1, 1])


def test_an_instance_beyond_the_state_limit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    cost = np.array([3, 10_007, 20_011, 50_021])
    loss = (cost[-1] - cost) + np.sort(rng.random((60, 4)), axis=1)[:, ::-1]
    case = AllocationCase(loss, cost, 60 * 17_001, None)
    monkeypatch.setattr(allocator, "MAX_STATES", 1000)
    with pytest.raises(OutOfMemory, match=r'more than 1000 states for these 60 pages.*method "greedy"'):
        solve(case, "dp")
    assert_allowed(case, solve(case, "greedy"))


@pytest.mark.parametrize("pages", [64, 256, 1024, 4096])
@pytest.mark.parametrize("left", [1.25, 2.25, 3.75])
@pytest.mark.parametrize("spread", [0.5, 1.5, 3.0])
def test_states_of_the_optimum_grow_at_most_as_the_square_of_pages(
    spread: float, left: float, pages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the docstring of a cache says of the time of allocator "dp", in states, which take equal time."""
    cost, error = np.array([4, 6, 9, 14, 23]) * 100, np.array([0.35, 0.1, 0.03, 0.01, 0.0001])
    monkeypatch.setattr(allocator, "MAX_STATES", max(1 << 10, pages * pages >> 6))
    for seed in range(3):
        loss = np.random.default_rng(seed).lognormal(0, spread, pages)[:, None] * error
        case = AllocationCase(loss, cost, int(400 * left * pages), None)
        assert_allowed(case, solve(case, "dp"))


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"loss": [[1.0, 2.0], [1.0, 0.0]]}, ValueError, r"loss of page 0 is \[1\. 2\.\].*must not increase"),
        ({"loss": [[1.0, 0.0], [np.nan, 0.0]]}, ValueError, r"loss of page 1 .*finite"),
        ({"loss": [[1.0, 0.0], [1.0, np.nan]]}, ValueError, r"loss of page 1 .*finite"),
        ({"loss": [[np.inf, 0.0], [1.0, 0.0]]}, ValueError, r"loss of page 0 .*finite"),
        ({"loss": [[6e279, 0.0], [6e279, 0.0]]}, ValueError, r"below 1e\+280 in total"),
        ({"loss": [[1.0, -1.0], [1.0, 0.0]]}, ValueError, r"loss of page 0 .*not negative"),
        ({"loss": [1.0, 0.0]}, ValueError, r"loss has shape \(2,\); expected \(pages, 2\)"),
        ({"loss": [[1.0, 0.5, 0.0]] * 2}, ValueError, r"loss has shape \(2, 3\); expected \(pages, 2\)"),
        ({"cost": [5, 5]}, ValueError, r"cost is \[5 5\].*strictly increasing"),
        ({"cost": [-1, 5]}, ValueError, "cost .*none negative"),
        ({"cost": []}, ValueError, r"cost is \[\]"),
        ({"cost": [1, 2**61]}, ValueError, "cost goes up to .* overflow"),
        ({"cost": [1.0, 2.0]}, TypeError, "cost has dtype float64; integers"),
        ({"ceiling": [0, 2]}, ValueError, "ceiling goes from 0 to 2; rungs are 0 to 1"),
        ({"ceiling": [-1, 1]}, ValueError, "ceiling goes from -1 to 1"),
        ({"ceiling": [1]}, ValueError, r"ceiling has shape \(1,\); loss has 2 pages"),
        ({"ceiling": [0.5, 1]}, TypeError, "ceiling has dtype float64"),
        ({"budget": 30.0}, TypeError, r"budget is 30\.0; an integer"),
        ({"budget": -1}, BudgetError, r"2 pages need 2 bytes.*budget is -1"),
        ({"method": "dynamic"}, ValueError, "method is 'dynamic'; supported are 'greedy', 'dp', 'uniform'"),
    ],
)
def test_bad_arguments_are_named(changed: dict[str, object], error: type[Exception], message: str) -> None:
    arguments: dict[str, object] = {"loss": [[1.0, 0.0]] * 2, "cost": [1, 2], "budget": 3} | changed
    with pytest.raises(error, match=message):
        allocate(**arguments)  # type: ignore[arg-type]


def test_the_checks_reject_wrong_allocations() -> None:
    loss = np.random.default_rng(3).lognormal(0, 1, (30, 1)) * [1.0, 0.3, 0.02]
    case = AllocationCase(loss, np.array([10, 17, 40]), 614, np.full(30, 1) + np.arange(30) % 2)
    least = case.total_loss(solve(case, "dp"))
    assert_optimal(case, solve(case, "dp"), min_loss_by_byte_table(case))
    lowest = np.zeros(30, np.int64)
    over_budget, over_ceiling = case.top, lowest + 2 * (np.arange(30) == 0)
    for check, wrong in [
        (assert_within_one_step, lowest),
        (assert_optimal, solve(case, "greedy")),
        (assert_optimal, solve(case, "uniform")),
        (assert_optimal, over_budget),
        (assert_within_one_step, over_ceiling),
    ]:
        with pytest.raises(AssertionError):
            check(case, wrong, least)
    with pytest.raises(AssertionError):
        assert_nothing_more_fits(case, lowest)

"""The host's side of a cache on a GPU, on kernels in NumPy: budgets, tables, lengths, rows, files.

Against the CPU's own cache where both must agree, else against what the pages hold.
"""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvlab.cache import prefill
from kvlab.cache.cache import MixedPrecisionCache
from kvlab.cache.cuda import GPU
from kvlab.cache.reallocation import Reallocator
from kvlab.errors import BudgetError
from kvlab.ops.cuda import plan
from kvlab.ops.packed import packed_attention
from kvlab.ops.plan import PlanShape
from kvlab.pages import encode_importance
from tests.cache.host.cases import DIM, GROUP, HEADS, LAYERS, check_state, draw, make, step
from tests.cache.host.noted import Kernels
from tests.cache_contents import entries_with_tokens, pages_of, positions, tokens_in


@pytest.mark.parametrize(
    ("bits", "budget"), [((2, 4, 8), 0.4), ((0, 4), 0.3), ((4, 16), 0.75), ((8,), None), ("0:8,1:2+8", 0.75)]
)
def test_growth_of_a_row(kernels: Kernels, bits: Any, budget: Any) -> None:
    """Prefill, decode steps over several plans, chunks: nothing is lost and the budget holds."""
    cache, rng, length = make(bits=bits, budget=budget), np.random.default_rng(0), 0
    for steps in [200, *[1] * 18, 5, 16, 130, *[1] * 3, 250]:
        step(cache, rng, steps)
        length += steps
        assert cache.nbytes <= (cache.budget_nbytes or cache.nbytes)
    if bits != (0, 4):
        check_state(cache, [range(length)] * 2)
    assert cache.seqlen == length
    decode = [number for number, steps, _ in kernels.plans if steps == 0]
    assert decode[:2] == [0, 1]  # one plan served both layers


@pytest.mark.parametrize(
    "options",
    [
        {"allocator": "dp"},
        {"allocator": "uniform", "importance": "recency"},
        {"residual": 40, "budget": 0.7},
        {"residual": 70, "bits": (0, 4), "importance": "key_norm", "budget": 0.7},
        {"residual": 16, "bits": (4,), "budget": None},
    ],
)
def test_what_the_cpu_plans(kernels: Kernels, options: dict[str, Any]) -> None:
    """Other allocators and a residual window: nothing is lost, the budget holds, newest tokens are exact."""
    cache, rng = make(**{"budget": 0.5, "bits": (2, 4, 8), **options}), np.random.default_rng(11)
    for steps in [150, *[1] * 3, 16, 16, 16, 70, 5]:
        step(cache, rng, steps)
        assert cache.nbytes <= (cache.budget_nbytes or cache.nbytes)
    if cache.bits != (0, 4):
        check_state(cache, [range(276)] * 2)
    counts = {name: int(found.sum()) for name, found in cache.allocation().items()}
    assert min(counts.values()) >= 0 < sum(counts.values())
    if cache.allocator == "uniform":
        assert sum(n > 0 for n in counts.values()) <= 2  # one width, and the open pages
    residual = cache.residual
    for pages in pages_of(cache) if residual else []:
        for row in range(2):
            tokens = tokens_in(pages, row)
            exact = np.array([layout.bits_k == 16 for layout in pages.layouts])[tokens.rung]
            for head in range(HEADS):
                found = np.sort(tokens.position[exact & (tokens.head == head)])
                assert residual <= len(found) <= residual + 53
                assert found.tolist() == [*range(276)][276 - len(found) :]


@pytest.mark.parametrize("allocator", ["greedy", "dp"])
def test_importance_as_a_function(kernels: Kernels, allocator: str) -> None:
    """The host calls it for new tokens and for all stored ones, and what it says lies in the pages."""
    calls: list[tuple[bool, int, int]] = []

    def by_place(previous: Any, observed: Any, positions: Any, seqlen: int) -> Any:
        calls.append((previous is None, observed.size, seqlen))
        assert observed.shape == positions.shape
        return np.exp2(-(positions % 7.0) - (previous is None))

    cache, rng = make(importance=by_place, allocator=allocator), np.random.default_rng(14)
    valid = np.ones((2, 90), bool)
    valid[1, :17] = False
    step(cache, rng, 90, valid)
    assert calls == [(True, HEADS * 90, 90), (True, HEADS * 73, 90)] * LAYERS
    calls.clear()
    for steps in (1, 3, 20):  # the second does not collect
        step(cache, rng, steps)
    new = [(True, HEADS * n, length) for n, length in ((1, 91), (3, 94), (20, 114)) for _ in range(4)]
    assert [call for call in calls if call[0] and call[1]] == new
    stored = [
        (False, HEADS * n, length)
        for length in (90, 94)
        for _ in range(LAYERS)
        for n in (length, length - 17)
    ]
    assert [call for call in calls if not call[0]] == stored
    check_state(cache, [range(114), [*range(17, 114)]])
    for pages in pages_of(cache):
        for at in entries_with_tokens(pages):
            place = tuple(at)
            layout, count = pages.layouts[pages.rung[place]], int(pages.count[place])
            pool, index = pages.pools[pages.rung[place]], pages.index[place]
            position = layout.positions_in(pool)[index, :count].astype(int)
            wanted = np.exp2(-(position % 7.0) - (position >= 94))
            assert np.array_equal(layout.importance_in(pool)[index, :count], encode_importance(wanted))
    with pytest.raises(NotImplementedError, match="name a policy"):
        cache.prepare()


@pytest.mark.parametrize("new_fail", [False, True])
def test_a_function_that_fails_changes_nothing(
    kernels: Kernels, monkeypatch: pytest.MonkeyPatch, new_fail: bool
) -> None:
    """The kernel has put attention mass in the place of importance by then."""

    def by_place(previous: Any, observed: Any, positions: Any, seqlen: int) -> Any:
        fails = (previous is None) == new_fail and seqlen >= 90 + new_fail
        return -positions if fails else np.exp2(-(positions % 7.0))

    cache, rng = make(importance=by_place), np.random.default_rng(15)
    step(cache, rng, 90)
    device = cache._device
    arenas = [arena.copy() for arena in device.store.arenas]

    def score(layer: int, *rest: Any) -> None:
        device.store.arenas[layer][...] ^= 255

    monkeypatch.setattr(device.collector, "score", score)
    for steps in (1, 20):
        with pytest.raises(ValueError, match="negative or NaN"):
            cache.step(0, *draw(rng, cache, steps))
        assert device.lengths == [90, 90]
        assert all(map(np.array_equal, arenas, device.store.arenas))


def test_a_window_crops_and_travels(kernels: Kernels, tmp_path: Any) -> None:
    cache, rng = make(residual=40), np.random.default_rng(12)
    for steps in (150, 5, 16):
        step(cache, rng, steps)
    cache.crop(12)
    step(cache, rng, 1)
    cache.reorder(np.array([1, 0]))
    cache.repeat(2)
    cache.select(np.array([0, 3]))
    step(cache, rng, 2)
    check_state(cache, [range(162)] * 2)
    cache.save(tmp_path / "cache")
    q = draw(rng, cache, 1)[0]
    wanted = cache.attend(1, q)
    for device in ("cuda", "cpu"):
        again = MixedPrecisionCache.load(tmp_path / "cache", device=device)
        assert again.seqlen == 162
        assert np.abs(again.attend(1, q) - wanted).max() < 2e-3


@pytest.mark.parametrize("bits", [(4, 16), (0, 2, 16)])
def test_a_window_beside_width_16(kernels: Kernels, bits: Any) -> None:
    """Tokens that leave it may stay at width 16, as long as bytes last."""
    cache, rng = make(residual=40, bits=bits, budget=1.0), np.random.default_rng(4)
    for steps in (200, *[1] * 20, 100):
        step(cache, rng, steps)
    assert cache.nbytes <= (cache.budget_nbytes or 0)
    assert cache.allocation()["16"].any()


@pytest.mark.parametrize("most", [0, 1 << 30])
def test_rows_whose_attention_is_collected(
    kernels: Kernels, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    """All of the last 64 where their scores have room, else every fourth of them."""
    monkeypatch.setattr(prefill, "MAX_SCORE_NBYTES", most)
    cache, rng, seen = make(), np.random.default_rng(13), []
    step(cache, rng, 80)
    monkeypatch.setattr(
        cache._device.collector, "score", lambda layer, scores, lse, *rest: seen.append((scores, lse))
    )
    q, k, v = draw(rng, cache, 90)
    cache.step(0, q, k, v)
    rows = slice(26, 90) if most else slice(29, 90, 4)
    ((scores, lse),) = seen
    n = len(range(90)[rows])
    assert scores.shape[1:3] == (2, HEADS)
    assert scores.shape[4:] == (4 * 64 * n * GROUP,)
    assert lse.shape == (1, 2, HEADS * GROUP, n)
    assert np.isfinite(lse).all()


def test_nothing_stored_and_one_layer_ahead(kernels: Kernels) -> None:
    cache, rng = make(), np.random.default_rng(1)
    for _ in range(20):
        q, k, v = draw(rng, cache, 1)
        cache.step(0, q, k, v)
    for _ in range(20):
        q, k, v = draw(rng, cache, 1)
        cache.step(1, q, k, v)
    step(cache, rng, 2)
    check_state(cache, [range(22)] * 2)


def test_chunks_longer_than_the_time_between_plans_and_no_steps(kernels: Kernels) -> None:
    cache, rng = make(realloc_every=2), np.random.default_rng(9)
    for steps in (16, 0, 16, 1, 13):
        q, k, v = draw(rng, cache, steps)
        assert [cache.step(layer, q, k, v).shape for layer in range(LAYERS)] == [q.shape] * LAYERS
    cache.append(0, *draw(rng, cache, 0)[1:])
    check_state(cache, [range(46)] * 2)
    assert cache.attend(1, draw(rng, cache, 0)[0]).shape == (2, 0, HEADS * GROUP, DIM)


def test_an_empty_batch(kernels: Kernels) -> None:
    """Prefill, several collections of attention mass, other rows."""
    cache, rng = make(batch=0, realloc_every=4), np.random.default_rng(16)
    for steps in (90, *[1] * 9, 20):
        for layer in range(LAYERS):
            q, k, v = draw(rng, cache, steps)
            assert cache.step(layer, q, k, v).shape == q.shape
    cache.crop(30)
    cache.repeat(2)
    assert (cache.seqlen, cache.nbytes) == (89, 0)


def test_an_empty_batch_has_no_moves(kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    """No plan is launched that would say so, but what carries out moves and page copies is."""
    monkeypatch.setattr(plan, "empty", lambda shape, *_: np.full(shape, 255, np.uint8))
    monkeypatch.setattr(plan, "to_device", lambda host, like: np.array(host))
    monkeypatch.setattr(plan, "cuda_view", kernels.view)
    monkeypatch.setattr(plan, "shared_memory_per_block", lambda device: 99 << 10)
    shape = PlanShape(0, HEADS, 16, num_rungs=3, evicts=False, segments=1, new_tokens=20)
    workspace = plan.make_workspace(np.empty(0), shape, LAYERS, max_new_pages=4, max_dropped=1)
    start, numbers = workspace.memory.ctypes.data, workspace.memory.view(np.int32)
    for lists in workspace.lists.view(plan._LIST):
        for name in ("num_groups", "num_copies"):
            assert numbers[(int(lists[name]) - start) // 4] == 0


def test_padding(kernels: Kernels) -> None:
    cache, rng = make(), np.random.default_rng(2)
    valid = np.ones((2, 100), bool)
    valid[0, :37] = False
    step(cache, rng, 100, valid)
    step(cache, rng, 2, np.array([[True, False], [True, True]]))
    step(cache, rng, 1)
    check_state(cache, [[*range(37, 101), 102], range(103)])


@pytest.mark.parametrize("importance", ["attention", "forecast"])
@pytest.mark.parametrize("steps", [[100, 8], [20, 40], [1, 1]])
def test_queries_of_padding_are_not_looked_at(kernels: Kernels, importance: str, steps: list[int]) -> None:
    held = []
    for query in (0, np.nan):
        cache, rng = make(importance=importance, realloc_every=1), np.random.default_rng(7)
        for n in (80, *steps):
            valid = rng.random((2, n)) < 0.7
            valid[:, 0] = True
            for layer in range(LAYERS):
                q, k, v = draw(rng, cache, n)
                q[~valid] = query
                out = cache.step(layer, q, k, v, valid=valid)
                assert np.isfinite(out[valid]).all()
        held.append(pages_of(cache))
    for one, other in zip(*held, strict=True):
        assert all(np.array_equal(a, b) for a, b in zip(one.pools, other.pools, strict=True))


def test_a_mask_of_one_row_may_be_part_of_a_longer_one(kernels: Kernels) -> None:
    """Its rows are as far apart as those of the longer one, which torch calls contiguous."""
    cache, rng = make(batch=1), np.random.default_rng(2)
    mask = np.ones((1, 100), bool)
    mask[0, 70] = False
    step(cache, rng, 40, mask[:, 60:])
    step(cache, rng, 3, mask[:, 69:72])
    check_state(cache, [[p for p in range(43) if p not in (10, 41)]])


def test_new_tokens_may_be_overwritten_behind_their_step(kernels: Kernels) -> None:
    """Though a plan may have left them for another one, which reads them again."""
    held = []
    for overwrite in (False, True):
        cache, rng = make(budget=480_000, bits=(2, 8), plan_length=64), np.random.default_rng(3)
        for _ in range(2):
            step(cache, rng, 300)
        kernels.max_new_pages = [3]
        arrays, mask = draw(rng, cache, 300), np.ones((2, 300), bool)
        cache.step(0, *arrays, valid=mask)
        assert kernels.plans[-1] == (0, 300, 8)
        if overwrite:
            arrays[1][...], arrays[2][...], mask[...] = 0, 0, False
        cache.step(1, *draw(rng, cache, 300))
        held.append(pages_of(cache))
    for one, other in zip(*held, strict=True):
        assert all(np.array_equal(a, b) for a, b in zip(one.pools, other.pools, strict=True))


@pytest.mark.parametrize("most", [70, 100])
def test_more_queries_than_a_launch_takes(kernels: Kernels, most: int) -> None:
    cache, rng = make(), np.random.default_rng(8)
    step(cache, rng, 100)
    kernels.max_query_tokens = most
    step(cache, rng, 230)
    step(cache, rng, 100)
    check_state(cache, [range(430)] * 2)
    q = draw(rng, cache, 230)[0]
    parts = [cache.attend(0, q[:, first : first + 10]) for first in range(0, 230, 10)]
    assert np.abs(cache.attend(0, q) - np.concatenate(parts, 1)).max() < 1e-3


def test_a_prompt_that_needs_several_plans(kernels: Kernels) -> None:
    """Where old and new pages do not fit side by side, plans demote first and admit then."""
    cache, rng = make(budget=480_000, bits=(2, 8), plan_length=64), np.random.default_rng(3)
    for _ in range(3):
        step(cache, rng, 300)
    check_state(cache, [range(900)] * 2)
    assert cache.allocation()["2"].sum() > 0


def test_the_word_that_tokens_are_in_is_waited_for_once(
    kernels: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind the last layer, or before anything is done with a layer whose tokens may not be in."""
    words: list[tuple[int, ...]] = []

    def to_host(x: np.ndarray) -> np.ndarray:
        if x.shape == (LAYERS, 1):  # the status of all layers
            words.append(x.shape)
        return np.array(x)

    monkeypatch.setattr(kernels, "to_host", to_host)
    cache, rng = make(budget=480_000, bits=(2, 8), plan_length=64), np.random.default_rng(3)
    q, k, v = draw(rng, cache, 300)
    for _ in range(2):
        for layer in range(LAYERS):
            cache.step(layer, q, k, v)
    assert len(words) == 2
    kernels.max_new_pages = [3]
    cache.step(0, q, k, v)
    assert len(words) == 2
    assert kernels.plans[-1] == (0, 300, 8)
    assert cache._device.has_pending
    cache.attend(0, q)
    assert kernels.plans[-1] == (0, 300, 0)
    assert not cache._device.has_pending
    cache.step(1, *draw(rng, cache, 1))
    cache.step(1, *draw(rng, cache, 299))
    check_state(cache, [range(900)] * 2)


def test_refusal_changes_nothing(kernels: Kernels) -> None:
    cache, rng = make(budget=600_000, bits=(4, 8)), np.random.default_rng(4)
    step(cache, rng, 200)
    before = pages_of(cache)
    with pytest.raises(BudgetError, match=r"longest length that fits is [1-9]"):
        cache.step(0, *draw(rng, cache, 4000))
    for old, new in zip(before, pages_of(cache), strict=True):
        assert all(np.array_equal(a, b) for a, b in zip(old.pools, new.pools, strict=True))
    assert cache.seqlen == 200


def test_append_and_attend(kernels: Kernels) -> None:
    cache, rng = make(), np.random.default_rng(6)
    for steps in (150, 3, 1):
        for layer in range(LAYERS):
            cache.append(layer, *draw(rng, cache, steps)[1:])
    check_state(cache, [range(154)] * 2)
    q = draw(rng, cache, 2)[0]
    for layer, pages in enumerate(pages_of(cache)):
        wanted = packed_attention(q.astype(np.float32), pages).out
        assert np.abs(cache.attend(layer, q) - wanted).max() < 2e-3


def test_a_copy_goes_its_own_way(kernels: Kernels) -> None:
    """`copy.deepcopy`, as for a prompt that several continuations share."""
    cache, rng = make(), np.random.default_rng(9)
    step(cache, rng, 150)
    copy = deepcopy(cache)
    new, old = draw(rng, cache, 1), pages_of(cache)
    wanted = [cache.step(layer, *new) for layer in range(LAYERS)]
    cache.reset()
    for one, other in zip(pages_of(copy), old, strict=True):
        assert all(np.array_equal(a, b) for a, b in zip(one.pools, other.pools, strict=True))
    assert np.abs(np.array([copy.step(layer, *new) for layer in range(LAYERS)]) - wanted).max() < 2e-3
    check_state(copy, [range(151)] * 2)
    step(copy, rng, 20)


def test_rows_of_a_cache_that_was_emptied(kernels: Kernels) -> None:
    cache, rng = make(), np.random.default_rng(12)
    assert cache.nbytes <= cache.reserved_nbytes  # it has not met its GPU yet
    step(cache, rng, 70)
    cache.crop(70)
    cache.repeat(2)
    step(cache, rng, 70)
    check_state(cache, [range(70)] * 4)


def test_rows_lengths_and_files(kernels: Kernels, tmp_path: Any) -> None:
    cache, rng = make(), np.random.default_rng(7)
    step(cache, rng, 150)
    step(cache, rng, 5)
    cache.crop(12)
    step(cache, rng, 1)
    check_state(cache, [range(144)] * 2)
    cache.reorder(np.array([1, 1]))
    pages = pages_of(cache)[0]
    assert positions(pages, 0, 0) == positions(pages, 1, 0) == list(range(144))
    cache.repeat(2)
    step(cache, rng, 2)
    cache.select(np.array([0, 3, 1]))
    step(cache, rng, 1)
    check_state(cache, [range(147)] * 3)
    cache.save(tmp_path / "cache")
    q = draw(rng, cache, 1)[0]
    wanted = cache.attend(1, q)
    cache.reset()
    assert cache.seqlen == cache.nbytes - 3 * LAYERS * HEADS * (6 + 5 * DIM // 2) == 0
    step(cache, rng, 100)
    check_state(cache, [range(100)] * 3)
    for device in ("cuda", "cpu"):
        again = MixedPrecisionCache.load(tmp_path / "cache", device=device)
        assert again.seqlen == 147
        assert np.abs(again.attend(1, q) - wanted).max() < 2e-3


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        (lambda q, k, v: (q.astype(np.float32), k, v), TypeError, "q has dtype float32"),
        (lambda q, k, v: (q, k[:, :1], v), ValueError, "k has 1 tokens, but q has 2"),
        (lambda q, k, v: (q, k, v[:, :, :1]), ValueError, "v"),
        (lambda q, k, v: (q, k, v[..., ::-1]), ValueError, "v must be contiguous"),
    ],
)
def test_bad_arguments(
    kernels: Kernels, monkeypatch: pytest.MonkeyPatch, change: Any, error: Any, text: str
) -> None:
    for name in ("as_input", "check_layout"):
        monkeypatch.setattr(kernels, name, getattr(GPU, name))
    cache = make()
    with pytest.raises(error, match=text):
        cache.step(0, *change(*draw(np.random.default_rng(8), cache, 2)))
    assert cache.seqlen == 0


def test_a_copy_on_the_cpu_is_what_a_file_would_bring_there(kernels: Kernels, tmp_path: Path) -> None:
    cache, rng = make(budget=0.7, residual=20), np.random.default_rng(8)
    step(cache, rng, 300)
    step(cache, rng, 1)
    copy = cache.to_cpu()
    cache.save(tmp_path / "cache")
    loaded = MixedPrecisionCache.load(tmp_path / "cache", device="cpu")
    assert (copy.device, copy.seqlen, copy.nbytes) == ("cpu", cache.seqlen, loaded.nbytes)
    q = rng.standard_normal((cache.batch, 1, HEADS * GROUP, DIM), dtype=np.float32)
    for layer in range(LAYERS):
        np.testing.assert_allclose(copy.attend(layer, q), loaded.attend(layer, q), rtol=1e-5, atol=1e-6)
    step(cache, rng, 1)
    assert (copy.seqlen, cache.seqlen) == (301, 302)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_least_bytes_are_those_that_a_budget_is_refused_below(kernels: Kernels, device: str) -> None:
    options: dict[str, Any] = {"bits": (2, 4), "max_seqlen": 1000, "device": device}
    least = make(**options, budget=None).smallest_nbytes(1000)
    assert make(**options, budget=least).budget_nbytes == least
    with pytest.raises(BudgetError) as refused:
        make(**options, budget=least - 1)
    assert refused.value.needed_bytes == least


def test_an_empty_cache_has_no_pages_but_those_that_attention_opens(
    kernels: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plans of a prompt behind may drop open pages, so that their memory is for stored pages, too."""
    asked: list[bool] = []
    taken = Reallocator.write_workspace

    def noted(self: Any, tokens: int, moves_stored: bool) -> Any:
        if self.store.num_rungs > 1:  # not of the cache of 16 bits that results are compared with
            asked.append(moves_stored)
        return taken(self, tokens, moves_stored)

    monkeypatch.setattr(Reallocator, "write_workspace", noted)
    cache, rng = make(bits=(2, 4, 8), budget=0.9), np.random.default_rng(0)
    step(cache, rng, 72)
    step(cache, rng, 1)
    cache.crop(73)
    assert not any(pages.num_pages.any() for pages in pages_of(cache))
    step(cache, rng, 72)
    assert asked == [False] * 4
    cache.crop(72)
    attend, _ = cache.decode(0)
    q = draw(rng, cache, 1)[0].astype(np.float32)
    attend(q, np.ones_like(q))
    step(cache, rng, 40)
    assert asked[4:] == [True] * 2
    check_state(cache, [range(40)] * 2)

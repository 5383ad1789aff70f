"""Every token stands on one rank, and every pair of a query and a key that it sees is computed once."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvlab.ops.cuda.run_list import OWN
from kvlab.parallel.layout import (
    Part,
    Plan,
    Rows,
    Shard,
    llama3_plan,
    ring_parts,
    zigzag_llama3_plan,
)

WORLDS = st.integers(1, 64)
CHUNKS = st.lists(st.integers(0, 3), min_size=1, max_size=4)


def indices(rows: Rows, total: int) -> NDArray[np.int64]:
    return np.arange(total)[rows]


def seen(part: Part, queries: NDArray[np.int64], keys: NDArray[np.int64]) -> Counter[tuple[int, int]]:
    """Pairs of places in the stream that a variable-length call of this part computes."""
    mine, theirs = queries[part.q_rows], keys[part.k_rows]
    assert len(mine) == part.cu_q[-1]
    assert len(theirs) == part.cu_k[-1]
    found: Counter[tuple[int, int]] = Counter()
    for b in range(len(part.cu_q) - 1):
        rows, columns = mine[part.cu_q[b] : part.cu_q[b + 1]], theirs[part.cu_k[b] : part.cu_k[b + 1]]
        for n, row in enumerate(rows):
            last = len(columns) - len(rows) + n + 1 if part.causal else len(columns)
            found.update((int(row), int(key)) for key in columns[: max(0, last)])
    return found


def wanted(lengths: tuple[int, ...], causal: bool, left: int = -1) -> Counter[tuple[int, int]]:
    found: Counter[tuple[int, int]] = Counter()
    start = 0
    for n in lengths:
        for i in range(n):
            first = max(0, i - left) if left >= 0 else 0
            found.update((start + i, start + j) for j in range(first, i + 1 if causal else n))
        start += n
    return found


def gathered(plan: Plan, rank: int, shards: list[NDArray[np.int64]]) -> NDArray[np.int64]:
    """Places in the stream of the rows of the buffer of a rank."""
    return np.concatenate([rows[:n] for n, rows in zip(plan.takes[rank], shards, strict=True)])


@given(WORLDS, CHUNKS, st.booleans())
def test_every_token_stands_on_one_rank_at_its_position(world: int, chunks: list[int], zigzag: bool) -> None:
    lengths = tuple(n * world * (2 if zigzag else 1) for n in chunks)
    shards = [Shard(lengths, rank, world, zigzag) for rank in range(world)]
    assert sorted(np.concatenate([s.rows for s in shards])) == list(range(sum(lengths)))
    stream = np.concatenate([np.arange(n) for n in lengths])
    for shard in shards:
        assert shard.cu_seqlens[-1] == len(shard.rows) == sum(lengths) // world
        np.testing.assert_array_equal(shard.position_ids, stream[shard.rows])


@given(st.integers(1, 6), CHUNKS, st.booleans())
def test_gathered_zigzag_computes_every_pair_once(world: int, chunks: list[int], causal: bool) -> None:
    lengths = tuple(n * world * 2 for n in chunks)
    shards = [Shard(lengths, rank, world) for rank in range(world)]
    found: Counter[tuple[int, int]] = Counter()
    for shard in shards:
        plan = zigzag_llama3_plan(shard, causal)
        for part in plan.local:
            found += seen(part, shard.rows, shard.rows)
        for part in plan.gathered:
            found += seen(part, shard.rows, gathered(plan, shard.rank, [s.rows for s in shards]))
    assert found == wanted(lengths, causal)


@given(st.integers(1, 6), st.lists(st.integers(1, 3), min_size=1, max_size=3), st.integers(0, 30))
def test_a_window_loses_no_key_that_it_lets_see(world: int, chunks: list[int], left: int) -> None:
    lengths = tuple(n * world * 2 for n in chunks)
    shards = [Shard(lengths, rank, world) for rank in range(world)]
    found: Counter[tuple[int, int]] = Counter()
    for shard in shards:
        plan = zigzag_llama3_plan(shard, True, (left, 0))
        for part in plan.gathered:
            found += seen(part, shard.rows, gathered(plan, shard.rank, [s.rows for s in shards]))
    assert max(found.values()) == 1
    assert wanted(lengths, True, left) <= found <= wanted(lengths, True)


def seen_in_sums(plan: Plan, mine: NDArray[np.int64], theirs: NDArray[np.int64]) -> Counter[tuple[int, int]]:
    """Pairs of a query and a key that sums of dq take, by their places in the stream."""
    assert plan.seen is not None
    found: Counter[tuple[int, int]] = Counter()
    for part, keys in zip(plan.seen, (mine, theirs), strict=True):
        assert part.cu_k[-1] == len(keys)
        rows = part.cu_q[-1]
        for group, (prefix,) in enumerate(part.prefix_lens):
            for i, query in enumerate(mine[group * rows : (group + 1) * rows].tolist()):
                last = prefix - rows + i + 1 if part.causal else prefix
                found.update((query, key) for key in keys[:last].tolist())
    return found


@given(st.integers(2, 6), st.integers(0, 5))
def test_sums_of_dq_take_every_pair_once(world: int, chunk: int) -> None:
    lengths = (chunk * world * 2,)
    shards = [Shard(lengths, rank, world) for rank in range(world)]
    found: Counter[tuple[int, int]] = Counter()
    for shard in shards:
        plan = zigzag_llama3_plan(shard, True)
        assert (plan.seen is None) == (not sum(lengths))
        if plan.seen is None:
            continue
        for part in plan.seen:
            assert part.longest == (part.cu_q[-1], part.cu_k[-1])
        found += seen_in_sums(plan, shard.rows, gathered(plan, shard.rank, [s.rows for s in shards]))
    assert found == wanted(lengths, True)


def test_the_check_of_sums_sees_a_shorter_prefix() -> None:
    shards = [Shard((32,), rank, 2) for rank in range(2)]
    plan = zigzag_llama3_plan(shards[0], True)
    rows = shards[0].rows, gathered(plan, 0, [s.rows for s in shards])
    right = seen_in_sums(plan, *rows)
    assert plan.seen is not None
    own, theirs = plan.seen
    shorter = theirs._replace(prefix_lens=[np.maximum(x - 1, 0) for x in theirs.prefix_lens])
    assert seen_in_sums(plan._replace(seen=(own, shorter)), *rows) < right


@given(st.integers(2, 6), CHUNKS)
def test_runs_of_one_kernel_compute_every_pair_once(world: int, chunks: list[int]) -> None:
    lengths = tuple(n * world * 2 for n in chunks)
    shards = [Shard(lengths, rank, world) for rank in range(world)]
    found: Counter[tuple[int, int]] = Counter()
    for shard in shards:
        plan = zigzag_llama3_plan(shard, True)
        assert (plan.runs is None) == (not sum(lengths))
        if plan.runs is None:
            continue
        theirs = gathered(plan, shard.rank, [s.rows for s in shards])
        holders = np.repeat(np.arange(world), plan.takes[shard.rank])
        for g, b in np.ndindex(plan.runs.first_rows.shape):
            n, first = int(plan.runs.lengths[b]), int(plan.runs.first_rows[g, b])
            keys: list[int] = []
            for row, source in plan.runs.sources[g, b, : plan.runs.counts[g]].tolist():
                keys += (shard.rows if source == OWN else theirs)[row : row + n].tolist()
                assert source == OWN or set(holders[row : row + n].tolist()) <= {source}
            for i, query in enumerate(shard.rows[first : first + n].tolist()):
                found.update((query, key) for key in keys[: len(keys) - n + i + 1])
    assert found == wanted(lengths, True)


@pytest.mark.parametrize("rank", range(4))
def test_runs_of_others_are_read_in_the_order_in_which_they_come(rank: int) -> None:
    runs = zigzag_llama3_plan(Shard((32,), rank, 4), True).runs
    assert runs is not None
    late = runs.sources[1, 0, : runs.counts[1], 1][::-1].tolist()
    assert late[:2] == [OWN, OWN]
    assert list(dict.fromkeys(late[2:])) == [(rank - step) % 4 for step in (1, 2, 3)]


@given(st.integers(1, 6), CHUNKS, st.booleans(), st.booleans())
def test_a_ring_computes_every_pair_once(world: int, chunks: list[int], zigzag: bool, causal: bool) -> None:
    lengths = tuple(n * world * (2 if zigzag else 1) for n in chunks)
    shards = [Shard(lengths, rank, world, zigzag) for rank in range(world)]
    found: Counter[tuple[int, int]] = Counter()
    for shard in shards:
        for source in range(world):
            for part in ring_parts(shard, source, causal):
                found += seen(part, shard.rows, shards[source].rows)
    assert found == wanted(lengths, causal)


@given(st.integers(1, 6), st.lists(st.integers(0, 9), min_size=1, max_size=4), st.booleans())
def test_llama3_computes_every_pair_once(world: int, lengths: list[int], causal: bool) -> None:
    lengths = [*lengths, -sum(lengths) % world]
    total = sum(lengths)
    found: Counter[tuple[int, int]] = Counter()
    for rank in range(world):
        (part,) = llama3_plan(tuple(lengths), rank, world, causal).gathered
        mine = np.arange(total).reshape(world, -1)[rank]
        found += seen(part, mine, np.arange(total))
    assert found == wanted(tuple(lengths), causal)


@pytest.mark.parametrize("world", [1, 2, 4, 8, 64])
def test_zigzag_work_is_the_same_on_every_rank_and_needs_no_copy(world: int) -> None:
    work = []
    for rank in range(world):
        shard = Shard((world * 8,), rank, world)
        plan = zigzag_llama3_plan(shard, True)
        assert all(isinstance(part.k_rows, slice) for part in plan.gathered)
        parts = [(part, np.arange(8)) for part in plan.local]
        parts += [(part, np.arange(world * 8)) for part in plan.gathered]
        work.append(sum(seen(part, np.arange(8), keys).total() for part, keys in parts))
    assert len(set(work)) == 1


def test_the_check_of_pairs_sees_a_part_that_is_missing_and_one_too_many() -> None:
    shard = Shard((8,), 0, 1)
    (part,) = ring_parts(shard, 0, True)
    right = seen(part, shard.rows, shard.rows)
    assert right == wanted((8,), True)
    assert right + right != wanted((8,), True)
    assert seen(replace(part, causal=False), shard.rows, shard.rows) != wanted((8,), True)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Shard((8,), 2, 2), "rank=2: it must be from 0 to world_size - 1 = 1"),
        (lambda: Shard((8, 6), 0, 2), "sequence 1 has 6 tokens.*multiple of 4"),
        (lambda: llama3_plan((5,), 0, 2, True), "5 tokens cannot be shared out among 2 ranks"),
    ],
)
def test_errors_say_what_does_not_fit(make: object, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make()  # type: ignore[operator]

"""Lists of tiles over runs of keys against the oracle of grouped tiles, and what a tile reads of the runs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvlab.ops.cuda.run_list import ENTRY, OWN, RunTiling, even_order, run_table, tiles_of_runs
from kvlab.parallel.layout import Shard, zigzag_llama3_plan
from kvlab.reference import grouped_tiles as oracle

LENGTHS = st.lists(st.integers(0, 70), min_size=1, max_size=5)
BLOCK_N = 16


def plan_of(chunks: list[int], world: int, rank: int) -> Any:
    return zigzag_llama3_plan(Shard(tuple(8 * n * 2 * world for n in chunks), rank, world), True)


@given(LENGTHS, st.integers(2, 4), st.sampled_from([(1, 8), (4, 16), (2, 2)]), st.data())
def test_tiles_are_those_of_the_oracle(
    chunks: list[int], world: int, pack_group: tuple[int, int], data: st.DataObject
) -> None:
    rank, heads_kv = data.draw(st.integers(0, world - 1)), data.draw(st.integers(1, 3))
    sections = data.draw(st.integers(1, max(1, heads_kv * len(chunks))))
    runs = plan_of(chunks, world, rank).runs
    if runs is None:
        return
    pack, group = pack_group
    tiling = RunTiling(pack, 64 // pack, 2, sections)
    found = tiles_of_runs(runs, heads_kv, group, tiling)
    assert found.dtype == ENTRY == oracle.ENTRY
    rows = np.stack([runs.lengths, runs.lengths])
    lens = np.stack([runs.lengths * count for count in runs.counts])
    expected = oracle.grouped_tiles(
        rows, lens, lens.max(0), heads_kv, group, pack=pack, positions=64 // pack, entries=2, block_n=BLOCK_N,
        causal=True, paired=False,
    )  # fmt: skip
    expected["q_start"] = runs.first_rows[expected["group"], expected["sequence"]]
    most = 1 + runs.sources.shape[2]
    expected["k_start"] = (expected["group"] * len(runs.lengths) + expected["sequence"]) * most
    assert sorted(found.tolist()) == sorted(expected.tolist())

    pair = found["head_kv"][:, 0] * len(runs.lengths) + found["sequence"][:, 0]
    section = pair * sections // (heads_kv * len(runs.lengths))
    assert (np.diff(section) >= 0).all()
    longer = np.diff(found["loaded_keys"][:, 0]) > 0
    assert not longer[np.diff(section) == 0].any()


def rows_read(
    tile: NDArray[Any], table: NDArray[np.int32], key: int, block_n: int
) -> list[tuple[int, int] | None]:
    """Rank and row of each key of a tile of keys, None for zeros, as load_runs of the kernel copies them."""
    runs, last = table[tile["k_start"] :], int(tile["loaded_keys"])
    length = int(runs[0, 0])
    run, offset = divmod(key, length)
    is_one = offset + min(block_n, last - key) <= length
    found = list[tuple[int, int] | None]()
    while len(found) < block_n:
        rows = max(0, min(length - offset, last - key - len(found)))
        step = block_n if is_one else 32 if rows not in range(1, 32) and len(found) + 32 <= block_n else 8
        row, source = runs[1 + run].tolist() if rows else (0, 0)
        found += [(source, row + offset + j) if j < rows else None for j in range(step)]
        offset += step
        if offset >= length:
            offset, run = offset - length, run + 1
    return found


@given(LENGTHS, st.integers(2, 4), st.sampled_from([16, 112, 128]), st.data())
def test_tiles_read_every_key_that_they_see(
    chunks: list[int], world: int, block_n: int, data: st.DataObject
) -> None:
    rank = data.draw(st.integers(0, world - 1))
    runs = plan_of(chunks, world, rank).runs
    if runs is None:
        return
    table, n = run_table(runs), runs.lengths
    for tile in tiles_of_runs(runs, 1, 1, RunTiling(1, 64, 2, 1))[:, 0]:
        found = list[tuple[int, int] | None]()
        for key in range(0, int(tile["loaded_keys"]), block_n):
            found += rows_read(tile, table, key, block_n)
        places = runs.sources[tile["group"], tile["sequence"], : runs.counts[tile["group"]]].tolist()
        every = [(source, row + i) for row, source in places for i in range(n[tile["sequence"]])]
        last = int(tile["loaded_keys"])
        assert found[:last] == every[:last]
        assert not any(found[last:])


def test_own_keys_are_the_last() -> None:
    runs = plan_of([2, 5], 4, 2).runs
    for g, count in enumerate(runs.counts):
        own = runs.sources[g, :, :count, 1] == OWN
        assert own[:, -1 - g :].all()
        assert not own[:, : -1 - g].any()


@pytest.mark.parametrize("planted", ["position", "last_key", "k_start"])
def test_the_comparison_sees_a_wrong_tile(planted: str) -> None:
    runs = plan_of([9], 2, 1).runs
    right = tiles_of_runs(runs, 1, 1, RunTiling(1, 64, 2, 1))
    wrong = right.copy()
    wrong[planted][0] += 1
    assert sorted(right.tolist()) != sorted(wrong.tolist())


def ends_of(work: NDArray[np.int64], blocks: int) -> list[int]:
    """When each block is through, if a block that is free takes the next tile."""
    ends = [0] * blocks
    for cost in work.tolist():
        ends[ends.index(min(ends))] += cost
    return ends


@given(st.lists(st.integers(1, 40), max_size=80), st.integers(1, 9))
def test_blocks_end_no_later_in_the_even_order(work: list[int], blocks: int) -> None:
    given_order = np.sort(np.array(work, np.int64))[::-1]
    order = even_order(given_order, blocks)
    assert sorted(order.tolist()) == list(range(len(work)))
    assert max(ends_of(given_order[order], blocks)) <= max(ends_of(given_order, blocks))


@pytest.mark.parametrize(("world", "rank"), [(2, 1), (4, 3), (4, 1)])
def test_blocks_of_a_rank_without_short_tiles_end_together(world: int, rank: int) -> None:
    runs = zigzag_llama3_plan(Shard((8192 * world,), rank, world), True).runs
    assert runs is not None
    tiles = tiles_of_runs(runs, 8, 4, RunTiling(4, 16, 2, 2))
    work = -(-tiles["loaded_keys"][:, 0].astype(np.int64) // 128) + 1
    before, after = (ends_of(work[order], 132) for order in (slice(None), even_order(work, 132)))
    assert np.mean(before) < 0.992 * max(before)
    assert np.mean(after) > 0.999 * max(after)

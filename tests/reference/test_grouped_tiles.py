"""Lists of tiles of groups: every row once with the keys it sees, few loads, parts that make up the whole."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvlab.ops.cuda.attention_sm90 import SHAPES
from kvlab.ops.cuda.grouped import ENTRY_BYTES
from kvlab.ops.cuda.tile_list import PART_BYTES, ROWS, heads_of_tile
from kvlab.reference.grouped_tiles import (
    ENTRY,
    KEYS_PART,
    LAST_PARTS,
    MIN_KEYS,
    grouped_tiles,
    tiles_of_backward,
    tiles_of_keys,
)
from tests.reference.test_tile_list import BLOCKS, finish_times

KEYS = 128


def test_an_entry_is_as_large_as_the_kernel_says() -> None:
    assert ENTRY.itemsize == ENTRY_BYTES


def seen(
    tiles: NDArray[Any], pack: int, positions: int, causal: bool
) -> dict[tuple[int, int, int], list[int]]:
    """Return the keys that each (group, head, row of q) meets, in the order of parts."""
    found: dict[tuple[int, int, int], list[int]] = {}
    for t in tiles[np.argsort(tiles["part"][:, 0], kind="stable")].ravel():
        for position in range(t["position"], min(t["position"] + positions, t["q_length"])):
            last = min(t["last_key"], position + t["diagonal"] + 1) if causal else t["last_key"]
            keys = range(t["k_start"] + t["first_key"], t["k_start"] + max(last, t["first_key"]))
            for head in range(t["head_q"], t["head_q"] + pack):
                found.setdefault((t["group"], head, t["q_start"] + position), []).extend(keys)
    return found


def keys_met(tiles: NDArray[Any], pack: int, positions: int, rows: NDArray[Any]) -> list[NDArray[np.int64]]:
    """Return for each group how many keys, under a causal mask, parts meet of each (head, row of q)."""
    heads = int(tiles["head_q"].max(initial=0)) + pack
    found = [np.zeros((heads, total), np.int64) for total in rows.sum(axis=1)]
    for t in tiles.ravel():
        own = np.arange(t["position"], min(t["position"] + positions, t["q_length"]))
        last = np.minimum(t["last_key"], own + t["diagonal"] + 1)
        of_rows = found[t["group"]][t["head_q"] : t["head_q"] + pack]
        of_rows[:, t["q_start"] + own] += np.maximum(0, last - t["first_key"])
    return found


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(0, 60), st.integers(0, 40), st.integers(0, 40)), max_size=3),
    prefixes=st.lists(st.tuples(*[st.integers(0, 60)] * 2), min_size=3, max_size=3),
    shape=st.sampled_from([(1, 4, 2, 8), (2, 2, 3, 16), (4, 3, 2, 8)]),
    causal=st.booleans(),
    paired=st.booleans(),
    blocks=st.sampled_from([0, 4, 50]),
)
def test_every_row_meets_the_keys_it_sees_once(
    lengths: list[tuple[int, int, int]],
    prefixes: list[tuple[int, int]],
    shape: tuple[int, int, int, int],
    causal: bool,
    paired: bool,
    blocks: int,
) -> None:
    pack, positions, entries, block_n = shape
    keys, *rows = np.array(lengths, np.int64).reshape(-1, 3).T
    lens = np.minimum(np.array(prefixes, np.int64)[: len(keys)].reshape(-1, 2).T, keys)
    tiles = grouped_tiles(
        rows, lens, keys, 2, 4, pack=pack, positions=positions, entries=entries, block_n=block_n,
        causal=causal, paired=paired, blocks=blocks,
    )  # fmt: skip
    found = seen(tiles, pack, positions, causal)
    starts = np.cumsum(keys) - keys
    wanted = {}
    for g, of_group in enumerate(rows):
        begins = np.cumsum(of_group) - of_group
        for b, count in enumerate(of_group):
            for i in range(count):
                last = min(lens[g, b], lens[g, b] - count + i + 1) if causal else lens[g, b]
                own = list(range(starts[b], starts[b] + max(0, last)))
                wanted |= {(g, head, begins[b] + i): own for head in range(8)}
    assert found == wanted
    for t in tiles:
        assert len({*t["loaded_keys"]}) == len({*t["first_key"]}) == len({*t["num_parts"]}) == 1
        assert (t["loaded_keys"] >= t["last_key"]).all()
        assert t["first_key"][0] % block_n == 0
        assert (t["head_kv"] == t["head_q"] // 4).all()


def test_paired_tiles_load_least() -> None:
    """As few tiles of keys as rows in the order of their keys make; listed load more where rows are few."""
    shape = {"pack": 4, "positions": 16, "entries": 2, "block_n": KEYS, "causal": True}
    for rows, lens, saved in (
        ([[1]] * 16, [[4096]] * 16, 2.0),  # tokens of one prefix
        ([[16]] * 4, [[1000], [2000], [3000], [4000]], 10 / 6),
        ([[2048]] * 2, [[2048], [30720]], 1.0),  # a zigzag rank: all tiles are full
    ):
        listed, paired = (
            tiles_of_keys(grouped_tiles(rows, lens, [32768], 1, 4, paired=x, **shape), KEYS).sum()
            for x in (False, True)
        )
        assert listed / paired == pytest.approx(saved, rel=0.03)


@pytest.mark.parametrize("rank", range(8))
def test_one_kv_head_of_a_zigzag_rank_is_balanced_by_parts(rank: int) -> None:
    """32K tokens over 8 ranks: parts end together where whole tiles leave blocks idle."""
    shape = {"pack": 4, "positions": 16, "entries": 2, "block_n": KEYS, "causal": True, "paired": True}
    rows, lens = [[2048]] * 2, [[2048 * (rank + 1)], [2048 * (16 - rank)]]
    ends = []
    for blocks in (0, BLOCKS):
        tiles = grouped_tiles(rows, lens, [32768], 1, 4, blocks=blocks, **shape)
        costs = np.sort(tiles_of_keys(tiles, KEYS) + 3.0 + 2.0 * (tiles["num_parts"][:, 0] > 1))[::-1]
        times = finish_times(costs)
        ends.append(times.max())
        assert times.max() - times.min() <= costs.max()
    separate = sum(
        finish_times(
            np.sort(tiles_of_keys(grouped_tiles(*one, [32768], 1, 4, **shape), KEYS) + 3.0)[::-1]
        ).max()
        for one in (([rows[0]], [lens[0]]), ([rows[1]], [lens[1]]))
    )
    assert separate / ends[1] > 1.9
    assert ends[1] <= ends[0]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("number", [1, 2, 32, 300, 4096])
def test_blocks_are_done_within_one_tile(number: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    groups = (1, 2, 5)[seed]
    keys = np.maximum(1, (2.0 ** rng.uniform(0, 13, number)).astype(np.int64))
    keys = np.minimum(keys, 40_000 // number + 1)
    lens = np.stack([rng.integers(0, keys + 1) for _ in range(groups)])
    rows = rng.integers(0, lens // 2 + 2)
    block_n, entries, _ = SHAPES[128]
    pack = heads_of_tile(4)
    tiles = grouped_tiles(
        rows, lens, keys, 2, 4, pack=pack, positions=ROWS // pack, entries=entries, block_n=block_n,
        causal=True, paired=bool(seed % 2), blocks=BLOCKS,
    )  # fmt: skip
    met, begins = keys_met(tiles, pack, ROWS // pack, rows), np.cumsum(rows, axis=1) - rows
    for found, own, behind in zip(met, rows, lens - rows - begins, strict=True):
        assert (found == np.maximum(0, np.repeat(behind, own) + np.arange(1, own.sum() + 1))).all()
    if number < 4096:
        longest = int(np.argmax(tiles_of_keys(tiles, block_n)))
        fewer = keys_met(np.delete(tiles, longest, 0), pack, ROWS // pack, rows)
        assert not all(map(np.array_equal, fewer, met))
    costs = np.sort(tiles_of_keys(tiles, block_n) + 2.0)[::-1]
    if len(costs):
        times = finish_times(costs)
        assert times.max() - times.min() <= costs.max()
    parts = tiles[tiles["num_parts"][:, 0] > 1]
    assert len(parts) <= 2 * BLOCKS
    assert (tiles_of_keys(parts, block_n) >= MIN_KEYS).all()


def test_a_part_that_is_missing_is_found() -> None:
    shape = {"pack": 1, "positions": 4, "entries": 2, "block_n": 8, "causal": True, "paired": True}
    tiles = grouped_tiles([[8]], [[400]], [400], 1, 1, blocks=4, **shape)
    whole = seen(grouped_tiles([[8]], [[400]], [400], 1, 1, **shape), 1, 4, True)
    assert len(tiles) > 1
    assert seen(tiles, 1, 4, True) == whole
    assert seen(tiles[1:], 1, 4, True) != whole
    assert seen(np.concatenate([tiles, tiles[:1]]), 1, 4, True) != whole


def test_the_last_tiles_of_each_section_are_split() -> None:
    """No more than asked for, by length alone: of many equally long ones none."""
    shape = {"pack": 1, "positions": 8, "entries": 2, "block_n": 8, "paired": True}
    own = ([[48], [32]], [[400], [1200]], [1200], 2, 1)
    whole = grouped_tiles(*own, causal=True, **shape)
    for last, sections, splits in ((1, 2, 1), (2, 2, 2), (5, 2, 5), (1, 1, 0), (2, 1, 1)):
        tiles = grouped_tiles(*own, causal=True, last_tiles=last, sections=sections, **shape)
        assert seen(tiles, 1, 8, True) == seen(whole, 1, 8, True)
        parts = tiles[tiles["num_parts"][:, 0] > 1]
        for head in range(2):
            of_head = parts[parts["head_kv"][:, 0] == head]
            assert set(of_head["num_parts"][:, 0]) <= {LAST_PARTS}
            assert len(of_head) == LAST_PARTS * splits
    alike = grouped_tiles(*own, causal=False, last_tiles=2, sections=2, **shape)
    assert (alike["num_parts"] == 1).all()


def test_a_part_of_a_tile_of_keys_is_as_large_as_the_kernel_says() -> None:
    assert KEYS_PART.itemsize == PART_BYTES


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(0, 60), st.integers(0, 40), st.integers(0, 40)), max_size=3),
    prefixes=st.lists(st.tuples(*[st.integers(0, 60)] * 2), min_size=3, max_size=3),
    causal=st.booleans(),
    sections=st.integers(1, 3),
)
def test_every_pair_of_rows_and_keys_is_in_one_tile_of_keys(
    lengths: list[tuple[int, int, int]], prefixes: list[tuple[int, int]], causal: bool, sections: int
) -> None:
    """And the tiles that add to rows of dq are, in the order of keys, 0, 1, 2 and so on, none left out."""
    keys, *rows = np.array(lengths, np.int64).reshape(-1, 3).T
    lens = np.minimum(np.array(prefixes, np.int64)[: len(keys)].reshape(-1, 2).T, keys)
    shape: dict[str, Any] = {"positions": 8, "block_n": 4, "sections": sections, "causal": causal}
    tiles, longest_first = (
        tiles_of_backward(rows, lens, keys, 2, in_order=x, **shape) for x in (True, False)
    )
    assert sorted(map(str, tiles)) == sorted(map(str, longest_first))
    steps = {pair: [np.zeros((rows[g][pair], keys[pair]), int) for g in (0, 1)] for pair in range(len(keys))}
    added: dict[tuple[int, int, int, int], list[int]] = {}
    for tile in tiles:
        assert (np.diff(tile["q_length"]) <= 0).all()
        assert sorted(tile["group"]) == [0, 1]
        for part in tile:
            b, g, first = part["sequence"], part["group"], part["position"]
            assert part["num_tiles_of_keys"] == len(range(part["first_key"], part["last_key"], 4))
            if part["head_kv"] == 0:
                own = steps[b][g][part["first_key"] : part["last_key"], first : first + 8]
                own += 1
            for row in range(part["first_key"], part["last_key"], 4):
                added.setdefault((b, g, part["head_kv"], row), []).append(first // 8)
    assert all(blocks == list(range(len(blocks))) for blocks in added.values())
    for b, of_groups in steps.items():
        for g, met in enumerate(of_groups):
            own = np.arange(rows[g][b])[:, None] + lens[g, b] - rows[g][b]
            columns = np.arange(keys[b])
            seen = (columns < lens[g, b]) & ((columns <= own) | (not causal))
            assert (met[seen] == 1).all()
            assert met.max(initial=0) <= 1


def test_blocks_of_a_backward_of_two_groups_are_done_together() -> None:
    """A rank of zigzag context parallelism: within 2 % of an even division, separate calls within 5 %."""
    chunk, rank, ranks = 2048, 3, 8
    lens = [(rank + 1) * chunk, (2 * ranks - rank) * chunk]
    shape: dict[str, Any] = {"positions": 128, "block_n": 64, "sections": 1, "causal": True}
    keys = [2 * ranks * chunk]
    tiles = tiles_of_backward([[chunk]] * 2, [[n] for n in lens], keys, 8, **shape)
    costs = 4.0 * tiles["num_tiles_of_keys"].sum(1) + 3
    ends = finish_times(costs)
    assert ends.max() < 1.02 * costs.sum() / BLOCKS
    apart = 0.0
    for n in lens:
        own = tiles_of_backward([[chunk]], [[n]], keys, 8, **shape)
        apart += finish_times(4.0 * own["num_tiles_of_keys"].sum(1) + 3).max()
    assert ends.max() < apart

"""Lists of tiles: every row once, with the keys it sees, and blocks that are done at about the same time."""

from __future__ import annotations

import heapq
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvlab.ops.cuda.attention_sm90 import CAPPED_SHAPES, SHAPES
from kvlab.ops.cuda.tile_list import ROWS, TILE_BYTES, TILES_OF_BLOCK, heads_of_tile, num_sections
from kvlab.reference.tile_list import TILE, section_of, tile_list

BLOCKS, FAR = 132, 1 << 20


def covered(tiles: NDArray[Any], pack: int, positions: int, heads: int, total: int) -> NDArray[np.int64]:
    """Return how often each (head, row of q) is in a tile."""
    count = np.zeros((heads, total), np.int64)
    for t in tiles:
        first, last = t["position"], min(t["position"] + positions, t["q_length"])
        count[t["head_q"] : t["head_q"] + pack, t["q_start"] + first : t["q_start"] + last] += 1
    return count


def finish_times(costs: NDArray[np.float64], blocks: int = BLOCKS) -> NDArray[np.float64]:
    """Return when each block is done that takes the next tile of the list whenever it is done with one."""
    ends = [0.0] * blocks
    for cost in costs:
        heapq.heapreplace(ends, ends[0] + cost)
    return np.array(ends)


def test_a_tile_is_as_large_as_the_kernel_says() -> None:
    assert TILE.itemsize == TILE_BYTES


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(0, 90), st.integers(0, 90)), min_size=0, max_size=6),
    heads_kv=st.integers(1, 3),
    group=st.sampled_from([1, 2, 3, 5, 6, 8, 11, 96]),
    window=st.tuples(st.sampled_from([0, 7, 40, FAR]), st.sampled_from([0, 5, FAR])),
    groups=st.integers(1, 2),
    block_n=st.sampled_from([16, 48]),
    sections=st.integers(1, 5),
)
def test_every_row_once_with_the_keys_it_sees(
    lengths: list[tuple[int, int]],
    heads_kv: int,
    group: int,
    window: tuple[int, int],
    groups: int,
    block_n: int,
    sections: int,
) -> None:
    pack = heads_of_tile(group)
    positions = ROWS // pack * groups
    q_lengths, k_lengths = np.array(lengths, np.int64).reshape(-1, 2).T
    tiles = tile_list(
        q_lengths, k_lengths, heads_kv, group,
        pack=pack, positions=positions, block_n=block_n, sections=sections, window=window,
    )  # fmt: skip
    heads = heads_kv * group
    assert group % pack == 0
    assert (covered(tiles, pack, positions, heads, int(q_lengths.sum())) == 1).all()
    assert (tiles["head_kv"] == tiles["head_q"] // group).all()
    assert (tiles["head_kv"] == (tiles["head_q"] + pack - 1) // group).all()
    for t in tiles:
        rows = np.arange(t["position"], min(t["position"] + positions, t["q_length"])) + t["diagonal"]
        keys = np.arange(t["k_length"])
        seen = ((keys >= rows[:, None] - window[0]) & (keys <= rows[:, None] + window[1])).any(0)
        inside = keys[seen]
        assert t["first_key"] % block_n == 0 or t["first_key"] == t["last_key"]
        assert ((t["first_key"] <= inside) & (inside < t["last_key"])).all()
        if len(inside):
            assert t["last_key"] == inside[-1] + 1
            assert t["first_key"] == inside[0] // block_n * block_n
        else:
            assert t["num_tiles_of_keys"] <= 1
    section = section_of(tiles, len(lengths) * heads_kv, heads_kv, sections)
    assert (np.diff(section) >= 0).all()
    for one in np.unique(section):
        assert (np.diff(tiles["num_tiles_of_keys"][section == one]) <= 0).all()


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("number", [1, 2, 16, 300, 4096])
def test_blocks_are_done_within_one_tile(number: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    lengths = np.maximum(1, (2.0 ** rng.uniform(0, 13, number)).astype(np.int64))
    heads_kv, group = [(8, 4), (2, 16), (16, 1), (1, 8)][seed]
    if number == 4096:
        lengths, heads_kv = np.minimum(lengths, 600), 1
    pack = heads_of_tile(group)
    block_n, groups, _ = SHAPES[128]
    positions = ROWS // pack * groups
    count = int((-(-lengths // positions)).sum()) * heads_kv * (group // pack)
    bytes_of_keys = 4 * int(lengths.sum()) * heads_kv * 128
    sections = num_sections(number * heads_kv, bytes_of_keys, count, TILES_OF_BLOCK * BLOCKS)
    tiles = tile_list(
        lengths, lengths, heads_kv, group,
        pack=pack, positions=positions, block_n=block_n, sections=sections, window=(FAR, 0),
    )  # fmt: skip
    assert len(tiles) == count
    assert (covered(tiles, pack, positions, heads_kv * group, int(lengths.sum())) == 1).all()
    costs = tiles["num_tiles_of_keys"] + 2.0
    ends = finish_times(costs)
    assert ends.max() - ends.min() <= costs.max()
    shortest_first = finish_times(np.sort(costs))
    assert ends.max() <= shortest_first.max() + 1e-9 or len(tiles) < 3 * BLOCKS


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(0, 90), st.integers(0, 90)), min_size=0, max_size=5),
    heads_kv=st.integers(1, 3),
    window=st.tuples(st.sampled_from([0, 7, FAR]), st.sampled_from([0, 5, FAR])),
    sections=st.integers(1, 4),
)
def test_tiles_of_keys_wait_only_for_earlier_ones(
    lengths: list[tuple[int, int]], heads_kv: int, window: tuple[int, int], sections: int
) -> None:
    """Backward: rows and keys exchanged, in order; a block adds to dq behind all with lower keys."""
    block_m, block_n = 16, 32
    q_lengths, k_lengths = np.array(lengths, np.int64).reshape(-1, 2).T
    tiles = tile_list(
        k_lengths, q_lengths, heads_kv, 1,
        pack=1, positions=block_n, block_n=block_m, sections=min(sections, max(1, len(lengths) * heads_kv)),
        window=window[::-1], in_order=True,
    )  # fmt: skip
    assert (covered(tiles, 1, block_n, heads_kv, int(k_lengths.sum())) == 1).all()
    added: dict[tuple[int, int, int], list[int]] = {}
    for t in tiles:
        for row in range(t["first_key"], t["last_key"], block_m):
            added.setdefault((t["sequence"], t["head_kv"], row), []).append(t["position"] // block_n)
    for (sequence, _, row), blocks in added.items():
        behind = k_lengths[sequence] - q_lengths[sequence]
        first = max(0, row + behind - window[0]) // block_n  # as first_key_block has it
        assert blocks == list(range(first, first + len(blocks)))
    for sequence, (rows, keys) in enumerate(lengths):
        for row in range(rows):
            position = row + keys - rows
            if max(0, position - window[0]) <= min(keys - 1, position + window[1]):  # as sees_keys has it
                step = row // block_m * block_m  # is stored by the first block, in place of zeros
                assert all((sequence, head, step) in added for head in range(heads_kv))


def test_a_tile_too_many_is_found() -> None:
    tiles = tile_list([9], [9], 2, 1, pack=1, positions=4, block_n=2, sections=1, window=(9, 0))
    assert (covered(tiles, 1, 4, 2, 9) == 1).all()
    assert covered(np.concatenate([tiles, tiles[:1]]), 1, 4, 2, 9).max() == 2
    assert covered(tiles[1:], 1, 4, 2, 9).min() == 0


def test_a_causal_call_of_a_few_long_heads_is_balanced() -> None:
    """16K tokens, 16 heads of their own: sections of 3 heads, and a last of 1, would lose 4 % at the end."""
    head_dim, tokens, heads = 128, 16384, 16
    count = heads * tokens // 128
    sections = num_sections(heads, 4 * tokens * heads * head_dim, count, TILES_OF_BLOCK * BLOCKS)
    tiles = tile_list(
        [tokens], [tokens], heads, 1,
        pack=1, positions=128, block_n=128, sections=sections, window=(FAR, 0),
    )  # fmt: skip
    of_threes = tiles[np.lexsort((-tiles["num_tiles_of_keys"], tiles["head_kv"] // 3))]
    worst = []
    for order in (tiles, of_threes):
        costs = order["num_tiles_of_keys"] + 1.5
        worst.append(finish_times(costs).max() / (costs.sum() / BLOCKS))
    assert sections == 4
    assert worst[0] < 1.005
    assert worst[1] > 1.04


@settings(max_examples=100, deadline=None)
@given(sequences=st.integers(1, 20), heads_kv=st.integers(1, 9), sections=st.integers(1, 180))
def test_sections_are_as_equal_as_can_be_and_the_last_is_none_of_the_small(
    sequences: int, heads_kv: int, sections: int
) -> None:
    pairs = sequences * heads_kv
    sections = min(sections, pairs)
    tiles = np.zeros(pairs, TILE)
    tiles["sequence"], tiles["head_kv"] = np.divmod(np.arange(pairs), heads_kv)
    sizes = np.bincount(section_of(tiles, pairs, heads_kv, sections), minlength=sections)
    begins = [i * pairs // sections for i in range(sections + 1)]  # as the device has them
    assert sizes.tolist() == np.diff(begins).tolist()
    assert sizes[-1] == sizes.max() <= sizes.min() + 1


def test_keys_of_a_section_stay_in_the_cache_where_blocks_are_busy() -> None:
    """A head of 64K keys is a section; one of few rows shares it with as many as fill the blocks."""
    of_head = 4 * 65536 * 128
    assert num_sections(8, 8 * of_head, 8 * 256, BLOCKS) == 8
    assert num_sections(8, 8 * of_head, 8 * 64, BLOCKS) == 3
    assert num_sections(8, 8 * of_head, 8, BLOCKS) == 1
    assert num_sections(64, 24 << 20, 64 * 64, BLOCKS) == 1


def test_tiles_fill_their_rows() -> None:
    for group in range(1, 129):
        pack = heads_of_tile(group)
        assert group % pack == 0
        assert ROWS // pack * pack >= 60
    assert {*SHAPES} == {*CAPPED_SHAPES}

"""In which order blocks of attention backward on Hopper take rows: a model of backward_steps_sm90.cuh.

`Steps` and `find_steps` in Python. The model says whether every step is made once, and how long blocks of a
deterministic call wait for each other; tests/gpu says whether the kernels do the same.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

BLOCK_N, RUNS, SHORTEST_RUN, LONGEST_RUN = 128, 8, 4, 8  # of 128 and 256 channels, deterministic
BLOCK_M = 64


def steps_of_block(
    count: int, rows: int, group: int, split: int, rank: int, deterministic: bool
) -> Iterator[tuple[int, int]]:
    """`Steps`: the query head and the step of a tile, counted from its first row, that a block has."""

    def place(index: int) -> int:
        return count - 1 - index if deterministic else index

    if split > 1 and deterministic:
        for at in range(rank, count * group, split):
            yield at % group, place(at // group)
    elif split > 1:
        for at in range(rank * count * group // split, (rank + 1) * count * group // split):
            yield at // count, place(at % count)
    else:
        longest = LONGEST_RUN if deterministic else count
        run = min(max(SHORTEST_RUN if deterministic else 8, rows // (RUNS * BLOCK_M)), max(1, longest))
        for begin in range(0, count, run):
            for head in range(group):
                yield from ((head, place(index)) for index in range(begin, min(begin + run, count)))


@given(
    st.integers(0, 70), st.integers(0, 9), st.integers(1, 12), st.sampled_from([1, 2, 4, 8]), st.booleans()
)
def test_blocks_that_share_a_tile_make_every_step_once(
    count: int, before: int, group: int, split: int, deterministic: bool
) -> None:
    rows = (count + before) * BLOCK_M
    found = [list(steps_of_block(count, rows, group, split, x, deterministic)) for x in range(split)]
    assert sorted(itertools.chain(*found)) == [(head, step) for head in range(group) for step in range(count)]
    assert max(map(len, found)) - min(map(len, found)) <= 1


def duration(
    tokens: int, heads_kv: int, group: int, split: int, resident: int, *, deterministic: bool
) -> int:
    """Steps that a causal call takes whose clusters begin, in the order of keys, where one is done first.

    A block adds to a step of a head behind the block of the tile before, one step later at the earliest.
    """
    free, added = [0] * resident, dict[tuple[int, int, int], int]()
    for key in range(0, tokens, BLOCK_N):
        first, count = key // BLOCK_M, (tokens - key) // BLOCK_M
        for head_kv in range(heads_kv):
            begin, done = heapq.heappop(free), 0
            for rank in range(split):
                time = begin
                for head, step in steps_of_block(count, tokens, group, split, rank, deterministic):
                    place = head_kv, head, first + step
                    time = max(time, added.get(place, 0) if deterministic else 0) + 1
                    added[place] = time
                done = max(done, time)
            heapq.heappush(free, done)
    return max(free)


@pytest.mark.parametrize(
    ("tokens", "heads_kv", "group", "split", "resident"),
    [
        (2048, 8, 4, 2, 66),
        (2048, 4, 4, 2, 30),  # 256 channels from here on
        (4096, 4, 4, 1, 66),
        (8192, 4, 4, 1, 66),
    ],
)
def test_blocks_that_add_in_the_order_of_keys_hardly_wait(
    tokens: int, heads_kv: int, group: int, split: int, resident: int
) -> None:
    """Head by head these calls would take 1.19 to 1.44 times as long as in any order."""
    sizes = tokens, heads_kv, group, split, resident
    assert duration(*sizes, deterministic=True) <= 1.14 * duration(*sizes, deterministic=False)

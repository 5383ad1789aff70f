"""How blocks of attention backward on Hopper are divided: the steps they have, and how many share them."""

from __future__ import annotations

import heapq

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvlab.ops.cuda.attention_backward_split import (
    _REDUCE,
    _RESIDENT,
    _START,
    CLUSTER,
    _time,
    divide,
    num_sections,
    steps_of,
)
from kvlab.reference.attention import visible_keys

FAR = 1 << 30


@given(
    st.integers(0, 500), st.integers(1, 500), st.integers(0, 200) | st.just(FAR),
    st.integers(0, 200) | st.just(FAR),
)  # fmt: skip
def test_steps_cover_all_pairs_that_are_seen(rows: int, keys: int, left: int, right: int) -> None:
    block_m, block_n = 64, 128
    steps = steps_of(rows, keys, left, right, 1, block_m, block_n)
    window = tuple(-1 if side == FAR else side for side in (left, right))
    seen = visible_keys(rows, keys, causal=False, window=window)
    for block, count in enumerate(steps):
        used = np.flatnonzero(seen[:, block * block_n : (block + 1) * block_n].any(axis=1))
        tiles = used[-1] // block_m - used[0] // block_m + 1 if len(used) else 0
        assert count >= tiles
        assert count <= tiles + (len(used) == 0)  # where nothing is seen, rows between may make one
    assert steps_of(rows, keys, left, right, 3, block_m, block_n) == [3 * count for count in steps]


def finished(times: list[float], resident: int) -> float:
    """Return when the last is done if each begins, in this order, where one is done first."""
    busy = [0.0] * resident
    for time in times:
        heapq.heappush(busy, heapq.heappop(busy) + time)
    return max(busy)


@given(
    st.lists(st.integers(1, 200), min_size=1, max_size=30), st.integers(1, 20), st.integers(16, 140),
    st.sampled_from([(1, 1), (1, CLUSTER), (2, CLUSTER)]),
)  # fmt: skip
def test_a_division_is_never_much_slower_than_none(
    steps: list[int], copies: int, multiprocessors: int, sizes: tuple[int, int]
) -> None:
    """Beside a schedule of the clusters; what an order by length loses to the best one is at most a half."""
    blocks, largest = sizes
    steps.sort(reverse=True)

    def time(cluster_split: int) -> float:
        each = [_START + (_REDUCE if cluster_split > 1 else 0) + -(-own // cluster_split) for own in steps]
        resident = int(_RESIDENT[blocks * cluster_split] * multiprocessors)
        return finished([x for x in each for _ in range(copies)], resident)

    least = _time(steps, copies, 1, int(_RESIDENT[blocks] * multiprocessors))
    assert least <= time(1) + 1e-6 <= 1.5 * least + 1e-3
    cluster_split = divide(steps, copies, 1, multiprocessors, blocks, largest)
    assert cluster_split == 1 or cluster_split * blocks <= largest
    assert time(cluster_split) <= 1.5 * time(1)


def test_short_calls_share_keys_and_full_ones_do_not() -> None:
    full = steps_of(16384, 16384, FAR, 0, 1, 64, 128)
    assert divide(full, 16, 1, 132, 1, CLUSTER) == 1
    assert divide(full[:64], 8, 1, 132, 1, CLUSTER) == 1
    even = steps_of(2048, 2048, FAR, FAR, 1, 64, 128)
    assert divide(even, 8, 1, 132, 1, CLUSTER) == 1  # 128 blocks, one for each multiprocessor
    short = steps_of(512, 512, FAR, 0, 8, 64, 128)
    assert divide(short, 1, 1, 132, 1, CLUSTER) == CLUSTER
    assert divide(short, 1, 1, 132, 2, CLUSTER) == CLUSTER // 2
    assert divide(short, 1, 1, 132, 1, 1) == 1
    assert divide(short, 1, 1, 4, 1, CLUSTER) <= 2  # as many as such a device holds


def test_sections_of_deterministic_calls_are_those_that_were_fastest() -> None:
    """Pairs of a section, where an H100 was given 2 to 64 of them, by tokens, heads, KV heads, channels."""
    for (sequences, tokens, heads, heads_kv, dim), pairs in {
        (1, 16384, 16, 16, 128): 16, (1, 8192, 16, 16, 128): 16, (1, 32768, 16, 16, 128): 16,
        (1, 16384, 32, 8, 128): 8, (2, 8192, 64, 8, 128): 4, (2, 4096, 64, 8, 128): 8,
        (8, 2048, 32, 8, 128): 16, (8, 2048, 32, 8, 64): 16, (1, 16384, 32, 32, 64): 16,
    }.items():  # fmt: skip
        group, all_pairs = heads // heads_kv, sequences * heads_kv
        found = num_sections(all_pairs, tokens // 128, group, dim, 132, True, True)
        assert all_pairs / found == pairs


@given(
    st.integers(1, 4096), st.integers(1, 512), st.integers(1, 64), st.sampled_from([64, 96, 128, 256]),
    st.integers(1, 200), st.booleans(),
)  # fmt: skip
def test_sections_are_filled(pairs: int, tiles: int, group: int, dim: int, blocks: int, causal: bool) -> None:
    """A section of a deterministic call has tiles for all blocks, if there are several."""
    found = num_sections(pairs, tiles, group, dim, blocks, causal, True)
    assert 1 <= found <= pairs
    assert found == 1 or pairs // found * tiles >= 1.9 * blocks

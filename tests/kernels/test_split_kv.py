"""How packed attention divides its quads among thread blocks: every quad once, every split awaited.

`estimate_split` and `split_kv` of ``packed/split_kv.cuh`` in NumPy, in the same float32 arithmetic. A block
finds its range alone, and the last block to arrive at a sequence adds up the splits of all that hold quads of
it. So what all blocks find has to fit together, whatever the lengths: a block too many or too few leaves a
head unwritten and a semaphore that is wrong for the next call.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

Numbers = NDArray[np.int64]
BALANCED = np.float32(1.07)  # by how much the fullest block may exceed the mean if blocks keep to a sequence


def quotient(x: Numbers, d: Numbers | int, ulps: int) -> Numbers:
    """`quotient`, with a division that is off by `ulps`: that of a GPU may be by two."""
    ratio = (x.astype(np.float32) + np.float32(0.5)) / np.float32(d)
    for _ in range(abs(ulps)):
        ratio = np.nextafter(ratio, np.float32(np.inf * ulps))
    return ratio.astype(np.int64)


def estimated_split(grid: int, num_bh: Numbers | int, ulps: int = 0) -> tuple[Numbers, Numbers, Numbers]:
    """`estimate_split`: sequence, first block and number of blocks, for every block."""
    number = quotient((np.arange(grid) + 1) * num_bh - 1, grid, ulps)
    first = quotient(number * grid, num_bh, ulps)
    return number, first, quotient((number + 1) * grid, num_bh, ulps) - first


@pytest.mark.parametrize("ulps", [-2, 0, 2])
def test_blocks_agree_on_the_bounds_of_sequences(ulps: int) -> None:
    """All grids to 264 blocks and num_bh to 256: a sequence ends where the next one begins."""
    for grid in range(1, 265):
        num_bh = np.arange(1, min(grid, 256) + 1)[:, None]
        number, first, num_splits = estimated_split(grid, num_bh, ulps)
        block = np.arange(grid)
        assert (number[:, 0] == 0).all()
        assert (number[:, -1] == num_bh[:, 0] - 1).all()
        begins = np.diff(number, axis=1, prepend=-1)
        assert np.isin(begins, (0, 1)).all()
        assert (np.where(begins, block, first) == first).all()
        assert (np.where(begins, 0, first - np.roll(first, 1, axis=1)) == 0).all()
        ends = np.roll(begins, -1, axis=1) == 1
        assert (np.where(ends, block + 1, first + num_splits) == first + num_splits).all()


def test_rounding_halves_would_be_seen() -> None:
    """132 blocks, 8 sequences: what was wrong once, 16.5 blocks each, rounded by each block for itself."""
    per_pair = np.float32(132) / np.float32(8)
    number = ((np.arange(132, dtype=np.float32) + np.float32(0.5)) / per_pair).astype(np.int64)
    first = np.rint(number.astype(np.float32) * per_pair).astype(np.int64)
    blocks = np.bincount(number)
    assert (first != (np.cumsum(blocks) - blocks)[number]).any()


@dataclass
class WorkRange:
    """What one block finds: positions of the whole list, or with `num_splits` of its sequence alone."""

    begin: int = 0
    end: int = 0
    number: int = 0
    first_cta: int = 0
    num_splits: int = 0


def split_kv(grid: int, lengths: list[int], blocks: int) -> tuple[list[WorkRange], int, int]:
    """`split_kv`: the range of every block, the quads in all, and how many blocks have any."""
    num_bh, longest, total = len(lengths), np.float32(max(lengths)), sum(lengths)
    mean_of_fewest = np.float32(total) * np.float32(grid // num_bh)
    usual = blocks == 1 and num_bh <= grid and longest > 0
    if usual and longest * np.float32(grid) <= BALANCED * mean_of_fewest:
        ranges = [WorkRange(0, 0, *map(int, x)) for x in zip(*estimated_split(grid, num_bh), strict=True)]
        for b, range_ in enumerate(ranges):
            quads = lengths[range_.number]
            range_.num_splits = min(range_.num_splits, quads)
            range_.end = max(quads - (b - range_.first_cta) + range_.num_splits - 1, 0) // max(
                range_.num_splits, 1
            )
        return ranges, total, grid
    total *= blocks
    ctas = min(grid, total)
    per_quad = np.float32(ctas) / np.float32(max(total, 1))
    whole = [WorkRange(total * b // ctas, total * (b + 1) // ctas) for b in range(ctas)]
    part: list[WorkRange] = [WorkRange() for _ in range(ctas)]
    balanced, start = blocks == 1, 0
    for n, quads in enumerate(lengths):
        first, beyond = (int(np.rint(np.float32(x) * per_quad)) for x in (start, start + quads))
        balanced = balanced and bool(np.float32(quads) * per_quad <= BALANCED * np.float32(beyond - first))
        for b in range(first, beyond):
            num_splits = min(beyond - first, quads)
            end = int((quads - (b - first) + num_splits - 1) / num_splits) if num_splits else 0
            part[b] = WorkRange(0, end, n, first, num_splits)
        start += quads * blocks
    ranges = part if balanced else whole
    return ranges + [WorkRange() for _ in range(grid - ctas)], total, ctas


def work(grid: int, lengths: list[int], blocks: int) -> list[tuple[int, int]]:
    """Attend as the kernel does: how often each sequence was written, and the semaphores left over."""
    ranges, total, ctas = split_kv(grid, lengths, blocks)
    check_what_is_known(grid, len(lengths), blocks, ranges)
    quads = np.repeat(lengths, blocks)
    starts = np.cumsum(quads) - quads
    seen = [np.zeros(n, int) for n in quads]
    semaphores, written = np.zeros(len(quads), int), np.where(quads == 0, 1, 0)
    owner = lambda position: ((position + 1) * ctas - 1) // total  # noqa: E731
    for b, range_ in enumerate(ranges):
        pieces: list[tuple[int, Any, int]] = []
        if range_.num_splits and range_.end > range_.begin:
            own = b - range_.first_cta + range_.num_splits * np.arange(range_.end)
            pieces.append((range_.number, own, range_.num_splits))
        elif not range_.num_splits:
            for n, start in enumerate(starts):
                begin, end = max(range_.begin, start), min(range_.end, start + quads[n])
                if begin < end:
                    num_splits = owner(start + quads[n] - 1) - owner(start) + 1
                    pieces.append((n, np.arange(begin, end) - start, num_splits))
        for n, own, num_splits in pieces:
            np.add.at(seen[n], own, 1)
            semaphores[n] += num_splits > 1
            if num_splits == 1 or semaphores[n] == num_splits:
                semaphores[n] = 0
                written[n] += 1
    assert all((x == 1).all() for x in seen)
    return list(zip(written.tolist(), semaphores.tolist(), strict=True))


def check_what_is_known(grid: int, num_bh: int, blocks: int, ranges: list[WorkRange]) -> None:
    """A block keeps quads that it read by its estimate: its only one, or all if num_splits is right."""
    if blocks > 1 or num_bh > grid:
        return
    for b, (range_, *guess) in enumerate(zip(ranges, *estimated_split(grid, num_bh), strict=True)):
        number, first, num_splits = map(int, guess)
        same = range_.num_splits and (range_.number, range_.first_cta) == (number, first)
        if same and (range_.end <= 1 or range_.num_splits == num_splits):
            for position in range(range_.begin, range_.end):
                assert (
                    b - first + num_splits * position == b - range_.first_cta + range_.num_splits * position
                )


@given(
    grid=st.integers(1, 264),
    lengths=st.lists(st.integers(0, 40), min_size=1, max_size=40),
    spread=st.sampled_from((0, 0, 1, 2, 40)),
    blocks=st.sampled_from((1, 1, 1, 2, 3)),
)
def test_every_quad_is_attended_once_and_every_sequence_written_once(
    grid: int, lengths: list[int], spread: int, blocks: int
) -> None:
    """`spread`: by how much lengths differ, unless it is large."""
    if spread < 40:
        lengths = [max(lengths[0] - n % (spread + 1), 0) for n in lengths]
    assert all(outcome == (1, 0) for outcome in work(grid, lengths, blocks))


@pytest.mark.parametrize("num_bh", [1, 2, 4, 8, 16, 24, 32, 33, 64, 132, 133, 256])
def test_equal_lengths_on_132_multiprocessors(num_bh: int) -> None:
    for quads in (1, 2, 4, 5, 17, 64):
        assert all(outcome == (1, 0) for outcome in work(132, [quads] * num_bh, 1))

"""The list of tiles of attention over keys that lie in runs, made on the host from lengths that it knows.

The keys of a sequence that ranks share lie in a rank's own array and in a buffer for what others send. The
keys of one chunk of one rank are contiguous: a *run*. Each group of queries has an order of runs in which the
rank's own keys are read first (kernels go from the last keys to the first).

Entries of a tile are those of kernels/cuda/attention/grouped_tiles.cuh. KV heads come one after another, as
they are sent.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["ENTRY", "OWN", "RunTiling", "Runs", "even_order", "run_table", "tiles_of_runs"]

OWN = -1
"""In place of a rank: a run of the call's own arrays."""

_LAST = 8  # tiles of a block, of which some are exchanged with those of another

ENTRY = np.dtype(
    [
        (name, np.int32)
        for name in (
            "sequence", "head_q", "head_kv", "position", "q_start", "q_length", "k_start", "k_length",
            "first_key", "last_key", "diagonal", "group", "loaded_keys", "part", "num_parts", "slot",
        )
    ]
)  # fmt: skip


@dataclass(frozen=True, eq=False)
class Runs:
    """Queries of a rank, and where the keys that they see lie.

    Parameters
    ----------
    lengths : int array, (sequences,)
        Rows that each group has of a sequence, and keys of each of its runs.
    first_rows : int array, (groups, sequences)
        Of the rows of a group in q.
    sources : int array, (groups, sequences, max_runs, 2)
        Of each run that a group sees, first row and rank, or `OWN`; a causal mask ends with the last of them.
    counts : tuple of int
        Runs that each group sees of a sequence.
    """

    lengths: NDArray[np.int32]
    first_rows: NDArray[np.int32]
    sources: NDArray[np.int32]
    counts: tuple[int, ...]


class RunTiling(NamedTuple):
    """How the queries of a KV head are cut into tiles, and pairs of sequences and KV heads into sections."""

    pack: int  # query heads of a chunk
    positions: int  # query positions of a chunk
    entries: int  # chunks of a tile
    sections: int


def run_table(runs: Runs) -> NDArray[np.int32]:
    """Return the rows that tiles refer to: the length of a sequence's runs, then their sources."""
    groups, sequences, max_runs, _ = runs.sources.shape
    table = np.zeros((groups, sequences, 1 + max_runs, 2), np.int32)
    table[:, :, 0, 0] = runs.lengths
    table[:, :, 1:] = runs.sources
    return table.reshape(-1, 2)


def tiles_of_runs(runs: Runs, heads_kv: int, group: int, tiling: RunTiling) -> NDArray[Any]:
    """Return all tiles, section by section the longest first: array of `ENTRY`, (tiles, entries).

    Parameters
    ----------
    runs : Runs
    heads_kv, group : int
        KV heads, and query heads to each.
    tiling : RunTiling

    Examples
    --------
    A sequence of which a rank has two chunks of two tokens; the late one sees the early one, too.

    >>> sources = np.array([[[[0, OWN], [0, 0]]], [[[0, OWN], [2, OWN]]]], np.int32)
    >>> runs = Runs(np.array([2]), np.array([[0], [2]]), sources, (1, 2))
    >>> tiles_of_runs(runs, 1, 1, RunTiling(1, 1, 1, 1))[["q_start", "position", "last_key"]].ravel().tolist()
    [(2, 1, 4), (2, 0, 3), (0, 1, 2), (0, 0, 1)]
    """
    pack, positions, entries, sections = tiling
    groups, sequences, max_runs, _ = runs.sources.shape
    counts = -(-np.tile(runs.lengths, groups) // (positions * entries))
    of = np.repeat(np.arange(groups * sequences), counts)  # (group, sequence) of a tile
    first = (np.arange(len(of)) - np.repeat(np.cumsum(counts) - counts, counts)) * positions * entries
    position = first[:, None] + positions * np.arange(entries)
    of_group, sequence = of[:, None] // max(sequences, 1), of[:, None] % max(sequences, 1)
    rows = runs.lengths[sequence]
    keys = rows * np.array(runs.counts)[of_group]
    present = position < rows
    tile = np.zeros(position.shape, ENTRY)
    tile["sequence"], tile["group"], tile["num_parts"] = sequence, of_group, 1
    tile["position"] = np.where(present, position, 0)
    tile["q_start"] = runs.first_rows.reshape(-1)[of][:, None]
    tile["q_length"] = np.where(present, rows, 0)
    tile["k_start"], tile["k_length"] = (1 + max_runs) * of[:, None], keys
    tile["diagonal"] = keys - tile["q_length"]
    tile["last_key"] = np.where(present, keys - rows + np.minimum(position + positions, rows), 0)
    tile["loaded_keys"] = tile["last_key"].max(1, initial=0, keepdims=True)

    heads = np.arange(0, heads_kv * group, pack)
    every = np.repeat(tile[None], len(heads), axis=0)
    every["head_q"] = heads[:, None, None]
    every["head_kv"] = heads[:, None, None] // group
    every = every.reshape(-1, entries)
    pair = every["head_kv"][:, 0].astype(np.int64) * sequences + every["sequence"][:, 0]
    section = pair * sections // max(heads_kv * sequences, 1)
    order: NDArray[Any] = every[np.lexsort((-every["loaded_keys"][:, 0], section))]
    return order


def even_order(work: NDArray[np.int64], blocks: int) -> NDArray[np.int64]:
    """Return the order in which blocks, which take tiles in turn, end together.

    A rank may have no short tiles, and after a last long one most blocks would idle. So tiles among the last
    that a block would take in the order given are exchanged with such of another, as long as this makes the
    block with most work and that with least more alike.

    Parameters
    ----------
    work : int array, (tiles,)
        Of each tile, in the order given.
    blocks : int

    Examples
    --------
    In the order given one block would have 9 + 8 + 7 + 7 and the other 9 + 8 + 7.

    >>> work = np.array([9, 9, 8, 8, 7, 7, 7])
    >>> work[even_order(work, 2)].tolist()
    [9, 8, 7, 9, 7, 8, 7]
    """
    ends, tiles_of = [(0, block) for block in range(blocks)], list[list[int]]([] for _ in range(blocks))
    for tile, cost in enumerate(work.tolist()):
        end, block = ends[0]
        tiles_of[block].append(tile)
        heapq.heapreplace(ends, (end + cost, block))
    total = np.zeros(blocks, np.int64)
    total[[block for _, block in ends]] = [end for end, _ in ends]
    while True:
        longest, shortest = int(total.argmax()), int(total.argmin())
        gap = int(total[longest] - total[shortest])
        mine, other = tiles_of[longest][-_LAST:], tiles_of[shortest][-_LAST:]
        less = work[mine][:, None] - work[other]  # that an exchange takes from the one and gives the other
        best = np.unravel_index(np.abs(2 * less - gap).argmin(), less.shape) if less.size else (0, 0)
        if not less.size or abs(gap - 2 * int(less[best])) >= gap:
            break
        i, j = tiles_of[longest].index(mine[best[0]]), tiles_of[shortest].index(other[best[1]])
        tiles_of[longest][i], tiles_of[shortest][j] = tiles_of[shortest][j], tiles_of[longest][i]
        total[[longest, shortest]] += [-less[best], less[best]]
    starts = np.zeros(len(work), np.int64)
    for tiles in tiles_of:
        tiles[-_LAST:] = sorted(tiles[-_LAST:], key=lambda tile: (-work[tile], tile))
        starts[tiles] = np.cumsum(work[tiles]) - work[tiles]
    return np.argsort(starts, kind="stable")

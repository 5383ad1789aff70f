"""The list of tiles of an attention call, as kernels/cuda/attention/tile_list.cu makes it, in NumPy.

A tile is `positions` query positions of `pack` query heads that read one KV head, with the keys that its rows
see. (sequence, KV head) pairs are taken in sections, as many at a time as share L2; within a section the
tiles with most keys come first, so that what blocks take last is short.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

__all__ = ["TILE", "counter_of", "section_of", "tile_list"]

TILE = np.dtype(
    [
        (name, np.int32)
        for name in (
            "sequence", "head_q", "head_kv", "position", "q_start", "q_length", "k_start", "k_length",
            "first_key", "last_key", "diagonal", "num_tiles_of_keys",
        )
    ]
)  # fmt: skip
"""A tile: `diagonal` is the key at which query position 0 stands."""

_COUNTERS = 1024  # by which the device sorts tiles; of more lengths than that it takes several for one


def tile_list(
    q_lengths: ArrayLike,
    k_lengths: ArrayLike,
    heads_kv: int,
    group: int,
    *,
    pack: int,
    positions: int,
    block_n: int,
    sections: int,
    window: tuple[int, int],
    variable: bool = True,
    in_order: bool = False,
) -> NDArray[Any]:
    """Return all tiles in order; equally long ones of a section by pair, head and position.

    Parameters
    ----------
    q_lengths, k_lengths : int array, (sequences,)
    heads_kv, group : int
        KV heads, and query heads to each.
    pack, positions, block_n : int
        Query heads and query positions of a tile, and keys that it is computed for at a time.
    sections : int
        Into which (sequence, KV head) pairs are divided, each with as many as can be.
    window : (int, int)
        Keys a row sees before and after its own position, no less than 0.
    variable : bool
        Whether sequences lie end to end; else each begins at 0.
    in_order : bool
        Whether tiles of a section come in the order of positions, not the longest first.

    Returns
    -------
    structured array of `TILE`

    Examples
    --------
    Two heads of 5 rows under a causal mask, 4 rows a tile.

    >>> tiles = tile_list([5], [5], 2, 1, pack=1, positions=4, block_n=2, sections=1, window=(9, 0))
    >>> tiles[["head_q", "position", "first_key", "last_key"]].tolist()
    [(0, 4, 0, 5), (1, 4, 0, 5), (0, 0, 0, 4), (1, 0, 0, 4)]
    """
    lengths = np.asarray(q_lengths, np.int64), np.asarray(k_lengths, np.int64)
    starts = [(np.cumsum(x) - x) * variable for x in lengths]
    blocks = -(-lengths[0] // positions)
    count = blocks * (heads_kv * group // pack)
    sequence = np.repeat(np.arange(len(count)), count)
    at = np.arange(len(sequence)) - np.repeat(np.cumsum(count) - count, count)  # in its sequence
    head_q, position = at // blocks[sequence] * pack, at % blocks[sequence] * positions
    tiles = np.zeros(len(sequence), TILE)
    tiles["sequence"], tiles["head_q"], tiles["head_kv"] = sequence, head_q, head_q // group
    tiles["position"] = position
    for name, x, start in zip("qk", lengths, starts, strict=True):
        tiles[f"{name}_start"], tiles[f"{name}_length"] = start[sequence], x[sequence]
    rows, keys = lengths[0][sequence], lengths[1][sequence]
    diagonal = keys - rows
    bottom = np.minimum(position + positions, rows) - 1 + diagonal
    last = np.clip(bottom + window[1] + 1, 0, keys)
    first = np.minimum(np.maximum(position + diagonal - window[0], 0) // block_n * block_n, last)
    tiles["diagonal"], tiles["first_key"], tiles["last_key"] = diagonal, first, last
    tiles["num_tiles_of_keys"] = -(-(last - first) // block_n)
    longest = -(-int(lengths[1].max(initial=0)) // block_n)
    counters = position // positions if in_order else counter_of(tiles["num_tiles_of_keys"], longest)
    order = np.lexsort((counters, section_of(tiles, len(count) * heads_kv, heads_kv, sections)))
    return tiles[order]


def section_of(tiles: NDArray[Any], num_bh: int, heads_kv: int, sections: int) -> NDArray[np.int64]:
    """Return the section of each tile; section i begins at pair i * num_bh // sections."""
    pair = tiles["sequence"].astype(np.int64) * heads_kv + tiles["head_kv"]
    of_tile: NDArray[np.int64] = ((pair + 1) * sections - 1) // max(num_bh, 1)
    return of_tile


def counter_of(num_tiles_of_keys: NDArray[Any], longest: int) -> NDArray[np.int64]:
    """Return what the tiles of a section are sorted by, where none has more than `longest` tiles of keys."""
    shorter = longest - num_tiles_of_keys.astype(np.int64)
    if longest >= _COUNTERS:
        shorter = shorter * _COUNTERS // (longest + 1)
    counters: NDArray[np.int64] = shorter
    return counters

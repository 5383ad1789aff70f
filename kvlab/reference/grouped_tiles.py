"""The list of tiles of a call with groups of queries, as attention/grouped_list.cu makes it, in NumPy.

A chunk is `positions` query positions of a group in a sequence. A tile is several chunks that read one KV
head. Tiles of one group hold neighbouring chunks. Paired tiles hold chunks of all groups, those that see most
keys first: so few tiles of K and V are loaded, each for as many rows as possible. Where there are fewer tiles
than blocks, long tiles are split over their keys. Where K and V are larger than L2, the last tiles of a
section are split. In the backward a tile is one of keys, with the rows of all groups, as
attention/tile_list.cu makes it.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kvlab.reference.tile_list import TILE, counter_of, section_of, tile_list

__all__ = [
    "ENTRY",
    "KEYS_PART",
    "LAST_PARTS",
    "MIN_KEYS",
    "grouped_tiles",
    "tiles_of_backward",
    "tiles_of_keys",
]

ENTRY = np.dtype(
    [
        (name, np.int32)
        for name in (
            "sequence", "head_q", "head_kv", "position", "q_start", "q_length", "k_start", "k_length",
            "first_key", "last_key", "diagonal", "group", "loaded_keys", "part", "num_parts", "slot",
        )
    ]
)  # fmt: skip
"""What a warpgroup has of a tile."""

MIN_KEYS = 8
"""Tiles of keys of a part, at least."""
LAST_PARTS = 3
"""Of one of the last tiles of a section, at most."""


def grouped_tiles(
    q_lengths: ArrayLike,
    prefix_lens: ArrayLike,
    k_lengths: ArrayLike,
    heads_kv: int,
    group: int,
    *,
    pack: int,
    positions: int,
    entries: int,
    block_n: int,
    causal: bool,
    paired: bool,
    blocks: int = 0,
    last_tiles: int = 0,
    sections: int = 1,
    longest: int | None = None,
) -> NDArray[Any]:
    """Return all tiles; in the order of sequences, heads and keys, not that of the device.

    Parameters
    ----------
    q_lengths, prefix_lens : int array, (groups, sequences)
    k_lengths : int array, (sequences,)
    heads_kv, group : int
        KV heads, and query heads to each.
    pack, positions : int
        Query heads and query positions of a chunk.
    entries : int
        Chunks of a tile.
    block_n : int
        Keys that a tile is computed for at a time.
    causal, paired : bool
    blocks : int
        Blocks that take tiles, 0 where not all tiles may be split.
    last_tiles : int
        Tiles at the end of a section that are split, at most; the device's list has tiles without rows where
        fewer are.
    sections : int
        Into which (sequence, KV head) pairs are divided.
    longest : int, optional
        Tiles of keys that no tile has more of, as the sections are sorted; by default, as many as one has.

    Returns
    -------
    structured array of `ENTRY`, (tiles, entries)
        `slot` is 0.

    Examples
    --------
    Two groups of 4 rows see 3 and 7 keys; a chunk has 2 rows.

    >>> shape = {"pack": 1, "positions": 2, "entries": 2, "block_n": 2, "causal": True}
    >>> for paired in (False, True):
    ...     tiles = grouped_tiles([[4], [4]], [[3], [7]], [7], 1, 1, paired=paired, **shape)
    ...     print(tiles[["group", "position", "last_key"]].tolist())
    [[(0, 0, 1), (0, 2, 3)], [(1, 0, 5), (1, 2, 7)]]
    [[(1, 2, 7), (1, 0, 5)], [(0, 2, 3), (0, 0, 1)]]
    """
    rows_of, keys_of, lengths = (np.asarray(x, np.int64) for x in (q_lengths, prefix_lens, k_lengths))
    tiles = _tiles_of_a_head(rows_of, keys_of, lengths, positions, causal, entries, paired)
    of_head = np.array(tiles, ENTRY).reshape(-1, entries)
    heads = np.arange(0, heads_kv * group, pack)
    every = np.repeat(of_head[:, None], len(heads), axis=1)
    every["head_q"] = heads[:, None]
    every["head_kv"] = heads[:, None] // group
    tiles_of_all = every.reshape(-1, entries)
    num_tiles = tiles_of_keys(tiles_of_all, block_n)
    if last_tiles and len(num_tiles):
        section = section_of(tiles_of_all[:, 0], len(lengths) * heads_kv, heads_kv, sections)
        full = _full_of_last(num_tiles, section, last_tiles, longest)
    elif blocks and 2 * len(num_tiles) < 3 * blocks:  # what a block has to do on average
        full = np.full(len(num_tiles), max(MIN_KEYS, -(-int(num_tiles.sum()) // blocks)))
    else:
        return tiles_of_all
    return _split(tiles_of_all, block_n, full)


def _tiles_of_a_head(
    rows_of: NDArray[np.int64],
    keys_of: NDArray[np.int64],
    lengths: NDArray[np.int64],
    positions: int,
    causal: bool,
    entries: int,
    paired: bool,
) -> list[list[tuple[int, ...]]]:
    """Return the entries of the tiles of one KV head, sequence by sequence."""
    starts_q, starts_k = np.cumsum(rows_of, axis=1) - rows_of, np.cumsum(lengths) - lengths
    tiles: list[list[tuple[int, ...]]] = []
    for b, length in enumerate(lengths.tolist()):
        for members in _members(
            rows_of[:, b], np.minimum(keys_of[:, b], length), positions, causal, entries, paired
        ):
            own = []
            for g, position, last in members:
                rows, keys = int(rows_of[g, b]), int(min(keys_of[g, b], length))
                own.append(
                    (position, int(starts_q[g, b]), rows, int(starts_k[b]), keys, 0, last, keys - rows, g)
                )
            while len(own) < entries:  # no rows are left for this warpgroup
                position, start, rows, k_start, keys, *_, g = own[0]
                own.append((0, start, 0, k_start, keys, 0, 0, keys, g))
            tiles.append([(b, 0, 0, *entry, max(x[6] for x in own), 0, 1, 0) for entry in own])
    return tiles


def _full_of_last(
    num_tiles: NDArray[np.int64], section: NDArray[np.int64], last_tiles: int, longest: int | None
) -> NDArray[np.int64]:
    """Return how many tiles of keys a part has where the last tiles of each section are split."""
    counters = counter_of(num_tiles, int(num_tiles.max()) if longest is None else longest)
    from_counter = np.empty_like(num_tiles)  # tiles of its section that come with it or later
    for one in np.unique(section):
        own = counters[section == one]
        from_counter[section == one] = np.bincount(own)[::-1].cumsum()[::-1][own]
    part = np.maximum(MIN_KEYS, -(-num_tiles // LAST_PARTS))
    return np.where(from_counter <= last_tiles, part, 1 << 30)


def _members(
    rows: NDArray[np.int64], keys: NDArray[np.int64], positions: int, causal: bool, entries: int, paired: bool
) -> list[list[tuple[int, int, int]]]:
    """Return the chunks of each tile of a KV head: group, first position, key behind the last it sees."""
    of_group = []
    for g, (count, seen) in enumerate(zip(rows.tolist(), keys.tolist(), strict=True)):
        ends = [min(first + positions, count) for first in range(0, count, positions)]
        lasts = [max(0, seen - count + end) if causal else seen for end in ends]
        of_group.append([(g, i * positions, last) for i, last in enumerate(lasts)])
    lists: Sequence[list[tuple[int, int, int]]] = of_group
    if paired:
        lists = [sorted(itertools.chain(*of_group), key=lambda chunk: (-chunk[2], chunk[0], -chunk[1]))]
    return [chunks[i : i + entries] for chunks in lists for i in range(0, len(chunks), entries)]


def tiles_of_keys(tiles: NDArray[Any], block_n: int) -> NDArray[np.int64]:
    """Return how many tiles of keys each tile, or each part of one, goes through."""
    keys = tiles["loaded_keys"][:, 0].astype(np.int64) - tiles["first_key"][:, 0]
    return np.asarray(-(-keys // block_n))


def _split(tiles: NDArray[Any], block_n: int, full: NDArray[np.int64]) -> NDArray[Any]:
    """Split tiles over keys: parts of `full` tiles of keys, and what is left of the tile."""
    parts = np.maximum(0, tiles_of_keys(tiles, block_n) - MIN_KEYS) // full + 1
    split = np.repeat(tiles, parts, axis=0)
    number, full = (np.repeat(x, parts)[:, None] for x in (parts, full))
    part = (np.arange(len(split)) - np.repeat(np.cumsum(parts) - parts, parts))[:, None]
    split["part"], split["num_parts"] = part, number
    split["first_key"] = part * full * block_n
    split["loaded_keys"] = np.where(part + 1 < number, (part + 1) * full * block_n, split["loaded_keys"])
    split["last_key"] = np.where(
        split["q_length"] > 0, np.minimum(split["last_key"], split["loaded_keys"]), split["first_key"]
    )
    return split


KEYS_PART = np.dtype([*TILE.descr, ("group", np.int32), ("num_keys", np.int32), ("unused", np.int32, 2)])
"""A group's part of a tile of keys: `q_*` are the prefix that the group sees, `k_*` its rows."""


def tiles_of_backward(
    q_lengths: ArrayLike,
    prefix_lens: ArrayLike,
    k_lengths: ArrayLike,
    heads_kv: int,
    *,
    positions: int,
    block_n: int,
    sections: int,
    causal: bool,
    in_order: bool = False,
) -> NDArray[Any]:
    """Return the tiles of keys of the backward in order; of equally long ones as `tile_list` orders them.

    Parameters
    ----------
    q_lengths, prefix_lens : int array, (groups, sequences)
    k_lengths : int array, (sequences,)
    heads_kv : int
    positions, block_n : int
        Keys of a tile, and rows that it is computed for at a time.
    sections : int
        Into which (sequence, KV head) pairs are divided.
    causal : bool
    in_order : bool
        Whether tiles of a section come in the order of keys, not the longest first.

    Returns
    -------
    structured array of `KEYS_PART`, (tiles, groups)
        Of a tile those groups come first that see most keys.

    Examples
    --------
    Two groups of 2 rows see 3 and 6 keys of 6; a tile has 2 keys.

    >>> shape = {"positions": 2, "block_n": 1, "sections": 1, "causal": True, "in_order": True}
    >>> tiles = tiles_of_backward([[2], [2]], [[3], [6]], [6], 1, **shape)
    >>> tiles[["group", "position", "first_key", "last_key"]].tolist()  # doctest: +NORMALIZE_WHITESPACE
    [[(1, 0, 0, 2), (0, 0, 0, 2)], [(1, 2, 0, 2), (0, 2, 1, 2)], [(1, 4, 0, 2), (0, 4, 0, 0)]]
    """
    rows_of, keys_of = (np.asarray(x, np.int64) for x in (q_lengths, prefix_lens))
    lengths = np.asarray(k_lengths, np.int64)
    far = 1 << 30
    shape: dict[str, Any] = {
        "pack": 1, "positions": positions, "block_n": block_n, "sections": sections
    }  # fmt: skip
    window = (0 if causal else far, far)
    tiles = tile_list(lengths, 0 * lengths, heads_kv, 1, window=window, in_order=True, **shape)
    parts = np.zeros((len(tiles), len(rows_of)), KEYS_PART)
    for name in ("sequence", "head_q", "head_kv", "position", "q_start"):
        parts[name] = tiles[name][:, None]
    sequence = tiles["sequence"]
    parts["num_keys"] = lengths[sequence, None]
    for g, (rows, prefixes) in enumerate(zip(rows_of, np.minimum(keys_of, lengths), strict=True)):
        own, keys, position = rows[sequence], prefixes[sequence], tiles["position"]
        part, diagonal = parts[:, g], own - keys
        last = np.clip(np.minimum(position + positions, keys) - 1 + diagonal + far + 1, 0, own)
        first = np.minimum(np.maximum(position + diagonal - window[0], 0) // block_n * block_n, last)
        seen = position < keys
        part["group"], part["k_start"], part["k_length"] = g, (np.cumsum(rows) - rows)[sequence], own
        part["q_length"], part["diagonal"] = keys, diagonal
        part["first_key"], part["last_key"] = first * seen, last * seen
        part["num_tiles_of_keys"] = -(-(last - first) // block_n) * seen
    order = np.argsort(-parts["q_length"], axis=1, kind="stable")
    parts = np.take_along_axis(parts, order, axis=1)
    if in_order:
        return parts
    section = section_of(tiles, len(lengths) * heads_kv, heads_kv, sections)
    return parts[np.lexsort((-parts["num_tiles_of_keys"].sum(1), section))]

"""Which rank holds which tokens, and which keys its queries need from others: index arithmetic, nothing else.

A stream of sequences laid end to end (`lengths`) is shared out among W ranks. *Contiguous*: a sequence is cut
into W chunks, and rank r holds chunk r. *Zigzag*: it is cut into 2W chunks, and rank r holds chunks r (early)
and 2W - 1 - r (late), so that a causal mask leaves every rank the same work. A rank's tokens lie sequence by
sequence, the early chunk before the late one.

What a rank computes is a list of `Part`s: rows of its queries, and rows of a buffer of keys that they see.
Attention of parts over disjoint keys is merged by the log-sum-exps, so one list serves gathers and rings.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvlab.ops.cuda.query_gradients import Seen
from kvlab.ops.cuda.run_list import OWN, Runs

__all__ = [
    "ALL",
    "Part",
    "Plan",
    "Prefixes",
    "Rows",
    "Shard",
    "llama3_plan",
    "ring_parts",
    "zigzag_llama3_plan",
]

Rows = slice | NDArray[np.int64]
"""Rows of an array: a slice where they lie side by side, else their indices."""
ALL = slice(None)


@dataclass(frozen=True, eq=False)
class Part:
    """Queries of a rank and keys of one buffer, as one variable-length call takes them."""

    q_rows: Rows
    k_rows: Rows
    cu_q: NDArray[np.int32]
    cu_k: NDArray[np.int32]
    causal: bool

    @cached_property
    def longest(self) -> tuple[int, int]:
        """Most queries and keys of a sequence."""
        longest_q, longest_k = (int(np.diff(bounds).max(initial=0)) for bounds in (self.cu_q, self.cu_k))
        return longest_q, longest_k

    @cached_property
    def is_one(self) -> bool:
        """Whether this is a single sequence."""
        return len(self.cu_q) == 2


class Prefixes(NamedTuple):
    """Queries of a rank, group by group, and the prefixes of gathered keys that they see, for one call.

    `kvlab.grouped_attention_varlen` says what the fields are. Keys of several sequences lie in segments of
    the buffer, those of one in order.
    """

    q_rows: tuple[Rows, ...]
    cu_q: NDArray[np.int32]  # of each group
    prefix_lens: tuple[NDArray[np.int32], ...]
    cu_k: NDArray[np.int32]
    segment_table: NDArray[np.int32] | None = None
    segment_len: int | None = None


class Plan(NamedTuple):
    """What a rank does when keys are gathered.

    Attributes
    ----------
    takes : int64 array, (ranks, ranks)
        takes[r, s]: how many of the first rows of rank s rank r takes. Its buffer holds them rank after rank.
    local : tuple of Part
        Over the rank's own keys: what needs no communication.
    gathered : tuple of Part
        Over the buffer.
    prefixes : Prefixes or None
        The same as `gathered`, for one call; None where parts see no prefixes.
    runs : Runs or None
        The same as `local` and `gathered` together, for one kernel; None as `prefixes`.
    seen : (Seen, Seen), or None
        The same as `local` and as `gathered`, as the early and the late chunk of one sequence see it; None as
        `prefixes`, and of several sequences, whose early chunks do not lie side by side.
    """

    takes: NDArray[np.int64]
    local: tuple[Part, ...]
    gathered: tuple[Part, ...]
    prefixes: Prefixes | None = None
    runs: Runs | None = None
    seen: tuple[Seen, Seen] | None = None


@dataclass(frozen=True)
class Shard:
    """The tokens of one rank.

    Parameters
    ----------
    lengths : tuple of int
        Tokens of each whole sequence.
    rank, world_size : int
    zigzag : bool

    Raises
    ------
    ValueError
        If the rank is out of range, or a sequence cannot be cut into equal chunks.

    Examples
    --------
    >>> Shard((8, 16), 1, 2).rows
    array([ 2,  3,  4,  5, 12, 13, 14, 15, 16, 17, 18, 19])
    """

    lengths: tuple[int, ...]
    rank: int
    world_size: int
    zigzag: bool = True

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world_size:
            raise ValueError(f"rank={self.rank}: it must be from 0 to world_size - 1 = {self.world_size - 1}")
        for sequence, length in enumerate(self.lengths):
            if length < 0 or length % self.pieces:
                raise ValueError(
                    f"sequence {sequence} has {length} tokens: on {self.world_size} ranks its length must be "
                    f"a multiple of {self.pieces}; pad it"
                )

    @property
    def pieces(self) -> int:
        """Chunks of a whole sequence."""
        return self.world_size * (2 if self.zigzag else 1)

    @property
    def chunks(self) -> tuple[int, ...]:
        """The chunks of each sequence that this rank holds."""
        return self.held_by(self.rank)

    def held_by(self, rank: int) -> tuple[int, ...]:
        """The chunks of each sequence that a rank holds."""
        return (rank, self.pieces - 1 - rank) if self.zigzag else (rank,)

    @property
    def chunk_lengths(self) -> NDArray[np.int64]:
        """Tokens of a chunk of each sequence."""
        return np.array(self.lengths, np.int64) // self.pieces

    @property
    def cu_seqlens(self) -> NDArray[np.int32]:
        """Prefix sums of the tokens of each sequence that a rank holds."""
        return _bounds(self.chunk_lengths * len(self.chunks))

    @property
    def rows(self) -> NDArray[np.int64]:
        """Place of each of this rank's tokens in the whole stream."""
        starts, size = _bounds(self.lengths)[:-1].astype(np.int64), self.chunk_lengths
        return _as_indices([(s + c * n, n) for s, n in zip(starts, size, strict=True) for c in self.chunks])

    @property
    def position_ids(self) -> NDArray[np.int64]:
        """Position of each of this rank's tokens in its sequence, as rotary embeddings want it."""
        starts = np.repeat(_bounds(self.lengths)[:-1], np.diff(self.cu_seqlens))
        return self.rows - starts

    def half(self, which: int) -> Rows:
        """This rank's rows of its early (0) or late (1) chunks."""
        starts, size = self.cu_seqlens[:-1].astype(np.int64), self.chunk_lengths
        return _as_rows([(s + which * n, n) for s, n in zip(starts, size, strict=True)])


class _GatheredKeys(NamedTuple):
    """Keys that a rank has gathered: `begins` says where in its buffer those of each rank begin."""

    shard: Shard
    begins: NDArray[np.int64]

    def chunk(self, holder: int, sequence: int, which: int) -> tuple[int, int]:
        """Where in the buffer the early or late chunk of a rank begins, and its tokens."""
        length = int(self.shard.chunk_lengths[sequence])
        begin = int(self.begins[holder]) + int(self.shard.cu_seqlens[sequence])
        return begin + which * length, length

    def seen_by(
        self, q_rows: Rows, cu_q: NDArray[np.int32], chunks: list[tuple[int, int]], *, mask: bool
    ) -> Part:
        """Queries that see chunks (rank, which) of every sequence."""
        size = self.shard.chunk_lengths
        keys = [self.chunk(holder, b, which) for b in range(len(size)) for holder, which in chunks]
        return Part(q_rows, _as_rows(keys), cu_q, _bounds(size * len(chunks)), mask)


@lru_cache(maxsize=256)
def zigzag_llama3_plan(shard: Shard, causal: bool, window: tuple[int, int] = (-1, -1)) -> Plan:
    """Gathered keys, zigzag chunks.

    With a causal mask a rank attends its own keys as one sequence: its late chunk sees its early one. Of
    others all its queries see the early chunks of the ranks before it, and its late chunk both chunks of the
    ranks behind it; so these keys are disjoint, no mask is needed, and a rank takes no others. A rank takes
    the early chunk alone where there is one sequence, of which it is the first half of a rank's rows.

    With a window keys are taken from all ranks and read in the order of the sequence.

    Parameters
    ----------
    shard : Shard
        Zigzag.
    causal : bool
    window : (int, int)
        Keys before and after its own position that a row sees; -1 means no limit.
    """
    world, rank, size, mine = shard.world_size, shard.rank, shard.chunk_lengths, shard.cu_seqlens
    total = int(mine[-1])
    takes = np.full((world, world), total)
    if window == (-1, -1):
        np.fill_diagonal(takes, 0)
        if causal and len(size) == 1:
            takes[np.tril_indices(world, -1)] = total // 2
    keys = _GatheredKeys(shard, np.cumsum(takes[rank]) - takes[rank])
    if window != (-1, -1):
        return Plan(takes, (), _windowed_parts(keys, causal, window))
    before, behind = (
        [(holder, w) for holder in ranks for w in (0, 1)] for ranks in (range(rank), range(rank + 1, world))
    )
    local = (Part(ALL, ALL, mine, mine, causal),)
    if not causal:
        others = (keys.seen_by(ALL, mine, before + behind, mask=False),)
        return Plan(takes, local, others if world > 1 else ())
    before = before[::2]
    gathered = (
        keys.seen_by(ALL, mine, before, mask=False),
        keys.seen_by(shard.half(1), _bounds(size), behind, mask=False),
    )
    if len(size) > 1:
        gathered = _side_by_side(gathered, size, keys.begins, before, behind)
    prefixes = _prefixes(keys, before, behind) if world > 1 and total else None
    runs = _runs(shard, keys.chunk) if prefixes else None
    sums = None
    if prefixes and len(size) == 1:
        n, theirs = int(size[0]), int(takes[rank].sum())
        # Others' keys lie in the order of ranks: those before have sent their early chunk, which both see.
        sums = _seen(n, (n, 2 * n), 2 * n, causal=True), _seen(n, (rank * n, theirs), theirs, causal=False)
    return Plan(takes, local, tuple(p for p in gathered if p.cu_k[-1]), prefixes, runs, sums)


def _windowed_parts(keys: _GatheredKeys, causal: bool, window: tuple[int, int]) -> tuple[Part, ...]:
    """The early and the late queries of a rank, with the keys that a window may show them."""
    shard, (left, right) = keys.shard, window
    if not causal and right != 0:
        raise NotImplementedError(
            f"window={window} without causal: keys behind a chunk would have to be masked by "
            "position; pass causal=True"
        )
    world, size = shard.world_size, shard.chunk_lengths
    back = -(-left // max(1, int(size.min(initial=left)))) if left >= 0 else shard.pieces
    order = [(c, 0) if c < world else (shard.pieces - 1 - c, 1) for c in range(shard.pieces)]
    return tuple(
        keys.seen_by(shard.half(which), _bounds(size), order[max(0, c - back) : c + 1], mask=True)
        for which, c in enumerate(shard.chunks)
    )


def _prefixes(keys: _GatheredKeys, before: list[tuple[int, int]], behind: list[tuple[int, int]]) -> Prefixes:
    """Early and late queries as groups, which see prefixes of others' keys."""
    size, seen = keys.shard.chunk_lengths, before + behind
    early, late = keys.shard.half(0), keys.shard.half(1)
    groups = [(rows, count) for rows, count in ((early, len(before)), (late, len(seen))) if count]
    lens = tuple((size * count).astype(np.int32) for _, count in groups)
    prefixes = Prefixes(tuple(rows for rows, _ in groups), _bounds(size), lens, _bounds(size * len(seen)))
    if len(size) == 1:
        return prefixes
    length = int(np.gcd.reduce(size))
    table = np.zeros((len(size), len(seen) * int(size.max()) // length), np.int32)
    for b, row in enumerate(table):
        firsts = [keys.chunk(holder, b, which)[0] // length for holder, which in seen]
        numbers = np.add.outer(firsts, np.arange(size[b] // length)).ravel()
        row[: len(numbers)] = numbers
    return prefixes._replace(segment_table=table, segment_len=length)


def _side_by_side(
    parts: tuple[Part, Part],
    size: NDArray[np.int64],
    begins: NDArray[np.int64],
    before: list[tuple[int, int]],
    behind: list[tuple[int, int]],
) -> tuple[Part, Part]:
    """Parts of several sequences in rows that lie side by side, where they can, so that none is copied.

    Chunks that take no part are sequences of their own, with no keys or no rows: early chunks of queries that
    only late ones attend for, late chunks of the keys of a single rank.
    """
    first, second = parts
    if len(before) == 1:
        begin, total, none = int(begins[before[0][0]]), int(2 * size.sum()), 0 * size
        first = Part(ALL, slice(begin, begin + total), _both(2 * size, none), _both(size, size), first.causal)
    second = Part(ALL, second.k_rows, _both(size, size), _both(0 * size, size * len(behind)), second.causal)
    return first, second


def _both(first: NDArray[np.int64], second: NDArray[np.int64]) -> NDArray[np.int32]:
    """Prefix sums of two lengths for each sequence."""
    return _bounds(np.stack([first, second], 1).reshape(-1))


def _seen(rows: int, prefixes: tuple[int, int], keys: int, *, causal: bool) -> Seen:
    """Two chunks of queries of one sequence, and how many of some keys each sees."""
    lens = [np.array([n], np.int32) for n in prefixes]
    return Seen(
        _bounds((rows,)), _bounds((keys,)), lens, causal, (rows, keys), (rows, prefixes, keys, causal)
    )


def _runs(shard: Shard, chunk: Callable[[int, int, int], tuple[int, int]]) -> Runs:
    """Runs in the order in which a rank wants to read them, from the last to the first.

    Its own come first, then those of the rank before it, which sends to it first, and so on round.
    """
    rank, world, sequences = shard.rank, shard.world_size, range(len(shard.lengths))
    starts, size = shard.cu_seqlens[:-1].astype(np.int64), shard.chunk_lengths
    others = [(rank + step) % world for step in range(1, world)]
    early = [(holder, 0) for holder in others if holder < rank]
    late = [(holder, which) for holder in others for which in ((0,) if holder < rank else (0, 1))]
    sources = np.zeros((2, len(sequences), len(late) + 2, 2), np.int32)
    for group, seen in enumerate((early, late)):
        for b in sequences:
            own = [(starts[b] + which * size[b], OWN) for which in range(group + 1)]
            runs = [(chunk(holder, b, which)[0], holder) for holder, which in seen] + own
            sources[group, b, : len(runs)] = runs
    first_rows = np.stack([starts, starts + size]).astype(np.int32)
    return Runs(size.astype(np.int32), first_rows, sources, (len(early) + 1, len(late) + 2))


@lru_cache(maxsize=256)
def ring_parts(shard: Shard, source: int, causal: bool) -> tuple[Part, ...]:
    """What the keys of one rank, `source`, mean for the queries of another; for either layout.

    Parameters
    ----------
    shard : Shard
        Of the queries.
    source : int
        Rank whose keys they are.
    causal : bool
    """
    whole = shard.cu_seqlens
    if source == shard.rank or not causal:
        return (Part(ALL, ALL, whole, whole, causal),)
    if not shard.zigzag:
        return (Part(ALL, ALL, whole, whole, False),) if source < shard.rank else ()
    half = _bounds(shard.chunk_lengths)
    if source < shard.rank:  # its late chunk lies behind both of ours
        return (Part(ALL, shard.half(0), whole, half, False),)
    return (Part(shard.half(1), ALL, half, whole, False),)


@lru_cache(maxsize=256)
def llama3_plan(lengths: tuple[int, ...], rank: int, world_size: int, causal: bool) -> Plan:
    """Gathered keys, the whole stream cut into W equal pieces, wherever sequences end.

    Parameters
    ----------
    lengths : tuple of int
        Tokens of each whole sequence.
    rank, world_size : int
    causal : bool
        Leave out the keys behind the rank's last query.

    Raises
    ------
    ValueError
        If the stream cannot be cut into equal pieces.

    Examples
    --------
    >>> part = llama3_plan((5, 3), 1, 2, True).gathered[0]
    >>> part.cu_q, part.cu_k, part.k_rows
    (array([0, 1, 4], dtype=int32), array([0, 5, 8], dtype=int32), slice(0, 8, None))
    """
    bounds = _bounds(lengths).astype(np.int64)
    if bounds[-1] % world_size:
        raise ValueError(
            f"{bounds[-1]} tokens cannot be shared out among {world_size} ranks: pad them to a multiple"
        )
    first, last = (int(bounds[-1]) // world_size * r for r in (rank, rank + 1))
    mine = np.flatnonzero((bounds[1:] > first) & (bounds[:-1] < last))
    starts, ends = bounds[mine], bounds[mine + 1]
    stops = np.minimum(ends, last) if causal else ends
    cu_q = _bounds(np.minimum(ends, last) - np.maximum(starts, first))
    keys = slice(int(starts[0]), int(stops[-1])) if len(mine) else slice(0, 0)
    takes = np.full((world_size, world_size), last - first)
    return Plan(takes, (), (Part(ALL, keys, cu_q, _bounds(stops - starts), causal),))


def _bounds(lengths: Sequence[int] | NDArray[np.int64]) -> NDArray[np.int32]:
    """Prefix sums, from 0."""
    return np.concatenate([[0], np.cumsum(np.asarray(lengths, np.int64))]).astype(np.int32)


def _as_indices(runs: Sequence[tuple[int, int]]) -> NDArray[np.int64]:
    """Runs of (first row, rows), one behind the other."""
    return np.concatenate([np.arange(0), *(np.arange(first, first + n) for first, n in runs)])


def _as_rows(runs: Sequence[tuple[int, int]]) -> Rows:
    """Runs of (first row, rows): a slice where they lie side by side."""
    runs = [run for run in runs if run[1]]
    if not runs:
        return slice(0, 0)
    ends = [first + n for first, n in runs]
    if all(first == end for (first, _), end in zip(runs[1:], ends, strict=False)):
        return slice(int(runs[0][0]), int(ends[-1]))
    return _as_indices(runs)

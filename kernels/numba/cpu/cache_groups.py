"""Tables, rules and groups of tokens: what a plan of a layer reads and writes on the CPU.

`kvlab.reference.cache_plan` says what a plan is. A group is a (row, KV head, run of 65,536 positions); bh =
row * heads + head, g = bh * segments + segment. A class is a rung, or, as the last one, the new tokens. The
tuples are the structs of kernels/cuda/pages/state.cuh and kernels/cuda/plan/plan.cuh, as arrays of one layer.
"""

from typing import NamedTuple

import numpy as np
from numba import njit

from .simd import helper

PAGE, QUAD, UNIT, SEGMENT, KEYS = 16, 4, 16, 16, 256
NO_PAGE = 0xFFFFFFFF
"""Address in a filler, an entry without a page. Tables are sorted by rung, whole quads of each."""
RECENT, SINK, WINDOW = 253, 254, 255
"""Keys of tokens that outweigh all importance codes, which end at 252; those of the window never move."""
TOKENS_PER_RECENT = 16
"""At most one in so many tokens is recent."""
NEW_TOKEN, DROPPED = 255, -1
OVER_BUDGET, TABLE_FULL, RETRY = 1, 4, 8
"""Bits of a layer's status."""
RECORD, PER_SLAB, TAIL = range(3)
"""Columns of `Tables.rungs`: units of a page, pages of a slab, byte offset of positions in a page."""

allocating = njit(error_model="numpy")
"""Decorator of functions that only kernels call and that allocate arrays; others are `helper`s."""


class Tables(NamedTuple):
    """A layer, as LayerState of pages/state.cuh; all arrays are contiguous, and all but `rungs` change."""

    rungs: np.ndarray  # int64 (rungs, 3)
    arena: np.ndarray  # uint8
    rung: np.ndarray  # uint8 (bh, entries)
    counts: np.ndarray  # uint8 (bh, entries)
    addresses: np.ndarray  # uint32 (bh, entries)
    base: np.ndarray  # uint16 (bh, entries)
    num_pages: np.ndarray  # int32 (bh,)
    open: np.ndarray  # int32 (bh, 2)
    used: np.ndarray  # int32 (rungs,)
    slab_count: np.ndarray  # int32 (rungs,)
    slabs: np.ndarray  # int32 (rungs, slabs)
    free_slabs: np.ndarray  # int32 (slabs,)
    num_free: np.ndarray  # int32 (1,)
    entry_of: np.ndarray  # uint32 (rungs, pages)
    slab_slot: np.ndarray  # int32 (slabs,)
    budget: np.ndarray  # int64 (batch,)
    status: np.ndarray  # int32 (1,)
    waits: np.ndarray  # int32 (batch,): rows whose pages a plan leaves alone


class Levels(NamedTuple):
    """Bytes of a page at each level, and the lower hull of (bytes, loss) up to each level."""

    cost: np.ndarray  # int64 (levels,)
    rate: np.ndarray  # float32 (levels, levels): loss saved by a byte, by edge of the hull
    level: np.ndarray  # int64 (levels, levels): where an edge leads
    edges: np.ndarray  # int64 (levels,)


class NewTokens(NamedTuple):
    """Tokens that are not stored yet: importance codes, which are no padding, positions."""

    codes: np.ndarray  # uint8 (bh, tokens)
    valid: np.ndarray  # bool (batch, tokens)
    positions: np.ndarray  # int32 (batch, tokens)


class Rules(NamedTuple):
    """What `kvlab.reference.cache_plan.plan` is told; `segments` of each bh, `levels` = rungs + evicts.

    `oldest`: the first position that is kept.
    """

    heads: int
    evicts: int
    slab_units: int
    segments: int
    seqlen: int
    sink: int
    recent: int
    lookahead: int
    by_position: bool
    fixed_nbytes: int
    max_new_pages: int
    window: int
    floor: int
    oldest: int


class Groups(NamedTuple):
    """What is counted and decided of every group; classes and levels as in the reference."""

    starts: np.ndarray  # int32 (groups, classes, KEYS): tokens of smaller keys
    tokens: np.ndarray  # int64 (groups, classes)
    movable: np.ndarray  # int64 (groups, classes): tokens outside the window
    chunks: np.ndarray  # int64 (groups, classes)
    slots: np.ndarray  # int64 (groups, rungs): slots in use, tokens beyond the end included
    kinds: np.ndarray  # int64 (groups, rungs, 3): pages that are full, partly filled, empty
    chunk: np.ndarray  # int64 (groups, classes): where the weights of its chunks begin
    number: np.ndarray  # int64 (groups, classes): number of its first chunk in the row
    chosen: np.ndarray  # int64 (groups, classes, levels): chunks
    extra: np.ndarray  # bool (groups,): whether an empty page is to be held ready
    new_pages: np.ndarray  # int64 (groups, rungs): new pages
    first: np.ndarray  # int64 (groups, rungs): number of the first new page
    role: np.ndarray  # int64 (groups, 2): entry of the page with what is left over, of the empty page; or -1


@allocating
def new_groups(groups, rungs, levels):
    """Groups of which nothing is known yet."""
    classes = rungs + 1
    return Groups(
        np.zeros((groups, classes, KEYS), np.int32),
        np.zeros((groups, classes), np.int64),
        np.zeros((groups, classes), np.int64),
        np.zeros((groups, classes), np.int64),
        np.zeros((groups, rungs), np.int64),
        np.zeros((groups, rungs, 3), np.int64),
        np.zeros((groups, classes), np.int64),
        np.zeros((groups, classes), np.int64),
        np.zeros((groups, classes, levels), np.int64),
        np.zeros(groups, np.bool_),
        np.zeros((groups, rungs), np.int64),
        np.zeros((groups, rungs), np.int64),
        np.full((groups, 2), -1, np.int64),
    )


@helper
def planned_pages(tables, rules, bh):
    """Pages that a plan sees: none of a row that waits."""
    return np.int64(0 if tables.waits[bh // rules.heads] else tables.num_pages[bh])


@helper
def page_address(tables, slab_units, r, number):
    """Units from the start of the arena to page `number` of rung r."""
    per_slab = tables.rungs[r, PER_SLAB]
    slab = np.int64(tables.slabs[r, number // per_slab])
    return slab * slab_units + number % per_slab * tables.rungs[r, RECORD]


@helper
def page_number(tables, slab_units, r, address):
    """The inverse of `page_address`."""
    slab, within = address // slab_units, address % slab_units
    return np.int64(tables.slab_slot[slab]) * tables.rungs[r, PER_SLAB] + within // tables.rungs[r, RECORD]


@helper
def key_of(rules, code, position, window):
    """What tokens are ordered by; -1 for those beyond either end. If `window` is 0 none is of the window."""
    if position >= rules.seqlen or position < rules.oldest:
        return -1
    if position >= rules.seqlen - window:
        return WINDOW
    if position < rules.sink:
        return SINK
    if position >= rules.seqlen - min(rules.recent, rules.seqlen // TOKENS_PER_RECENT):
        return RECENT
    if rules.by_position:
        age = np.float64(rules.seqlen - position)
        return max(np.int64(np.floor(192.5 - 8 * np.log2(age))), 1)
    return min(np.int64(code), RECENT - 1)


@helper
def chunk_tokens(groups, g, c):
    """Tokens of the chunks of a class: a page each, but for the last one of a compact class."""
    return min(PAGE * groups.chunks[g, c], groups.movable[g, c])


@helper
def left_over(groups, g, c):
    """Tokens of a class beside its chunks: those that fill no chunk, and the window."""
    return groups.tokens[g, c] - chunk_tokens(groups, g, c)


@helper
def tokens_leaving(groups, rules, g, c):
    """Tokens of a stored class that change their rung."""
    chunks = groups.chunks[g, c] - groups.chosen[g, c, c + rules.evicts]
    return min(PAGE * chunks, groups.movable[g, c])


@helper
def tokens_moved(groups, rules, g, c, r):
    """Tokens of class c that go to new pages of rung r."""
    level, before, most = r + rules.evicts, np.int64(0), chunk_tokens(groups, g, c)
    for lower in range(level):
        before += groups.chosen[g, c, lower]
    end = before + groups.chosen[g, c, level]
    moved = min(PAGE * end, most) - min(PAGE * before, most)
    rungs = groups.kinds.shape[1]
    return moved + left_over(groups, g, c) if c == rungs and r == rungs - 1 else moved


@helper
def pages_of(tokens):
    """Pages that so many tokens fill."""
    return (tokens + PAGE - 1) // PAGE


@helper
def pages_needed(groups, rules, g, r):
    """Pages that the tokens of a stored class fill once the leaving ones are gone."""
    return pages_of(groups.tokens[g, r] - tokens_leaving(groups, rules, g, r))


@helper
def pages_held(groups, g, r):
    """Pages of a rung that a group has."""
    return groups.kinds[g, r, 0] + groups.kinds[g, r, 1] + groups.kinds[g, r, 2]


@helper
def slots_left(groups, g):
    """Free slots of the page that takes the next tokens of a group: the one with what is left over."""
    rungs = groups.kinds.shape[1]
    left = left_over(groups, g, rungs) % PAGE
    if left == 0:
        left = left_over(groups, g, rungs - 1) % PAGE
    return PAGE - left if left else 0


@helper
def opens_empty(groups, rules, g):
    """Whether the page that a group holds ready is a new one."""
    top = groups.kinds.shape[1] - 1
    return groups.extra[g] and pages_held(groups, g, top) <= pages_needed(groups, rules, g, top)

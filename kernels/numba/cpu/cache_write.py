"""Write tokens into the pages of a cache on the CPU: those that a plan moves, and those of a decode step.

A page lies in the arena of its layer; its address counts units of 16 bytes. A token with new widths is
decoded, rotated if it comes from width 16, and encoded again. A token that keeps its widths is copied bit for
bit. One thread writes a page, in the order of the list, so the bytes do not depend on the number of threads.
No move of a list writes what another one reads.

Scratch of a thread: four vectors, 4 KiB at most.
"""

from typing import NamedTuple

import numpy as np

from .cache_groups import NEW_TOKEN, PAGE, SEGMENT, TAIL, UNIT
from .pages import FLOAT16, decode, narrow, put_codes, take_codes, widen
from .scales import (
    DECODED,
    PROFILE,
    RAW,
    divide_row,
    encode_vector,
    log_of_block,
    log_of_keys,
    order_row,
    rotate_row,
    scale_row,
    turn_signs,
)
from .simd import helper
from .softmax import serial, take_number

CODES, SCALES, BITS, KIND = range(4)
"""Columns of `Formats.sides`: byte offsets in a page, bits stored for an element, what width 16 is."""
KEYS, VALUES = range(2)


class Formats(NamedTuple):
    """Where K and V lie in the pages of each rung, as `pages.Side` says it of one."""

    sides: np.ndarray  # int64 (rungs, 2, 4)
    guess: np.ndarray  # float32 (rungs, 2)
    addresses: np.ndarray  # int32 (rungs, 2, 16, head_dim)


class Fresh(NamedTuple):
    """New tokens: vectors in the cache's dtype as float32, and importance codes (bh, tokens)."""

    k: np.ndarray  # float32 (batch, tokens, heads, head_dim)
    v: np.ndarray
    codes: np.ndarray  # uint8
    positions: np.ndarray  # int32 (batch, tokens)


@helper
def _is_coded(bits):
    return bits < 16 or bits >= PROFILE


@helper
def _encode(words, arena, formats, r, side, address, slot, x, known, codes, sizes):
    """Store a vector, rotated if it is to be coded."""
    numbers, start = formats.sides[r, side], address * UNIT
    if _is_coded(numbers[BITS]):
        byte = encode_vector(x, 0, numbers[BITS], formats.guess[r, side], known, codes, sizes)
        arena[start + numbers[SCALES] + slot] = byte
    else:
        narrow(x, 0, numbers[KIND], codes)
    put_codes(words, (start + numbers[CODES]) // 4, formats.addresses[r, side], slot, numbers[BITS], codes)


@helper
def _store_raw(words, arena, formats, r, side, address, slot, raw, frames, bh, x, codes, sizes):
    """Store a vector as it is outside pages: in its frame and rotated where it is coded; `raw` may change."""
    if _is_coded(formats.sides[r, side, BITS]):
        n = raw.size
        if side == KEYS:
            scale_row(raw, 0, n, frames, bh, formats.sides[r, side, KIND] == FLOAT16)
        else:
            turn_signs(raw, 0, n)
        divide_row(raw, 0, n, frames, bh, side)
        if side == KEYS:
            order_row(raw, n, frames, bh, x)
        log = log_of_keys(n, frames) if side == KEYS else log_of_block(n)
        rotate_row(raw, 0, n, log, frames, bh if side == KEYS else -1, x)
        _encode(words, arena, formats, r, side, address, slot, x, RAW, codes, sizes)
    else:
        _encode(words, arena, formats, r, side, address, slot, raw, RAW, codes, sizes)


@helper
def _move_side(words, arena, formats, side, source, target, frames, bh, raw, x, codes, sizes):
    """Move K or V of a stored token; source and target are (address, slot, rung)."""
    (origin, from_slot, a), (address, slot, b) = source, target
    before, start = formats.sides[a, side], origin * UNIT
    bits = before[BITS]
    take_codes(words, (start + before[CODES]) // 4, formats.addresses[a, side], from_slot, bits, codes)
    if bits == formats.sides[b, side, BITS]:
        after, to = formats.sides[b, side], address * UNIT
        if _is_coded(bits):
            arena[to + after[SCALES] + slot] = arena[start + before[SCALES] + from_slot]
        put_codes(words, (to + after[CODES]) // 4, formats.addresses[b, side], slot, bits, codes)
    elif _is_coded(bits):
        decode(codes, arena[start + before[SCALES] + from_slot], bits, x, 0)
        _encode(words, arena, formats, b, side, address, slot, x, DECODED, codes, sizes)
    else:
        widen(codes, before[KIND], raw, 0)
        _store_raw(words, arena, formats, b, side, address, slot, raw, frames, bh, x, codes, sizes)


@helper
def _copy_row(x, row):
    for i in range(row.size):
        row[i] = x[i]


@serial
def write_moves(counter, begins, moves, arena, rungs, formats, frames, new):
    """Carry out moves: what one thread does, taking pages from the counter until none is left.

    begins int64 (pages + 1,): where the moves to each page begin. moves uint32 (n, 4): as of
    `cache_plan.plan_layer`. frames: of keys, as `scales.Frames`.
    """
    words, shorts = arena.view(np.uint32), arena.view(np.uint16)
    head_dim, (_, tokens, heads, _) = formats.addresses.shape[3], new.k.shape
    raw, x, sizes = np.empty((3, head_dim), np.float32)
    codes, page = np.empty(head_dim, np.uint32), take_number(counter)
    while page < begins.size - 1:
        for i in range(begins[page], begins[page + 1]):
            origin, address, token = np.int64(moves[i, 0]), np.int64(moves[i, 1]), np.int64(moves[i, 3])
            slots = np.int64(moves[i, 2])
            from_slot, slot, a, b = slots & 255, slots >> 8 & 255, slots >> 16 & 255, slots >> 24
            tail = address * UNIT + rungs[b, TAIL]
            if a == NEW_TOKEN:
                row, step, bh = token // tokens, token % tokens, origin
                shorts[tail // 2 + slot] = new.positions[row, step] & 0xFFFF
                arena[tail + 2 * PAGE + slot] = new.codes[bh, step]
                for side in range(2):
                    _copy_row((new.k if side == KEYS else new.v)[row, step, bh % heads], raw)
                    _store_raw(
                        words, arena, formats, b, side, address, slot, raw, frames, bh, x, codes, sizes
                    )
            else:
                before = origin * UNIT + rungs[a, TAIL]
                shorts[tail // 2 + slot] = shorts[before // 2 + from_slot]
                arena[tail + 2 * PAGE + slot] = arena[before + 2 * PAGE + from_slot]
                source, target = (origin, from_slot, a), (address, slot, b)
                for side in range(2):
                    _move_side(
                        words, arena, formats, side, source, target, frames, token, raw, x, codes, sizes
                    )
        page = take_number(counter)


@serial
def append_tokens(tables, formats, frames, new, valid):
    """Store new tokens, valid bool (batch, tokens), in the open pages; return whether all found a place."""
    arena, top = tables.arena, len(tables.rungs) - 1
    words, shorts = arena.view(np.uint32), arena.view(np.uint16)
    head_dim, (batch, tokens, heads, _) = formats.addresses.shape[3], new.k.shape
    raw, x, sizes = np.empty((3, head_dim), np.float32)
    codes, whole = np.empty(head_dim, np.uint32), True
    for bh in range(batch * heads):
        row = bh // heads
        for step in range(tokens):
            if not valid[row, step]:
                continue
            position, e = np.int64(new.positions[row, step]), -1
            for i in range(2):
                page = tables.open[bh, i]
                if e < 0 <= page and tables.counts[bh, page] < PAGE:
                    e = page if tables.base[bh, page] == position >> SEGMENT else -1
            if e < 0:
                whole = False
                continue
            address, slot = np.int64(tables.addresses[bh, e]), np.int64(tables.counts[bh, e])
            for side in range(2):
                _copy_row((new.k if side == KEYS else new.v)[row, step, bh % heads], raw)
                _store_raw(words, arena, formats, top, side, address, slot, raw, frames, bh, x, codes, sizes)
            tail = address * UNIT + tables.rungs[top, TAIL]
            shorts[tail // 2 + slot] = position & 0xFFFF
            arena[tail + 2 * PAGE + slot] = new.codes[bh, step]
            tables.counts[bh, e] = slot + 1
    return whole


@serial
def follow_ratios(ratios, q, k, mean, valid, max_ratio, jump):
    """Let ratios of keys and queries follow new tokens: `follow_ratios` of kvlab/reference/blocks.py.

    ratios int16 (batch, heads, head_dim / 2); q float32 (batch, tokens, query heads, head_dim); k the same of
    KV heads; mean float32 (batch, heads, head_dim); valid bool (batch, tokens).
    """
    batch, tokens, heads, head_dim = k.shape
    half, group, infinite = head_dim // 2, q.shape[2] // heads, np.float32(np.inf)
    sizes = np.empty((2, half), np.float32)
    lines = sizes.view(np.int32)
    for row in range(batch):
        for step in range(tokens):
            if not valid[row, step]:
                continue
            for head in range(heads):
                key, center = k[row, step, head], mean[row, head]
                for i in range(half):
                    sizes[0, i] = abs(key[i] - center[i]) + abs(key[half + i] - center[half + i])
                    sizes[1, i] = 0
                for g in range(group):
                    query = q[row, step, head * group + g]
                    for i in range(half):
                        sizes[1, i] += abs(query[i])
                        sizes[1, i] += abs(query[half + i])
                for i in range(half):
                    size, energy = sizes[0, i], sizes[1, i]
                    if 0 < size < infinite and 0 < energy < infinite:
                        now = (np.int64(lines[0, i]) >> 15) - (np.int64(lines[1, i]) >> 15)
                        ratio = np.int64(ratios[row, head, i])
                        change = min(max(now, -max_ratio), max_ratio) - ratio
                        jumps = group > 1 and change >= jump
                        ratios[row, head, i] = ratio + (change if jumps else change >> 3)


@serial
def has_grown(ratios, shifts, first_limit, next_limit):
    """Whether a rotary pair of any head has become large; `further_shift` of kvlab/ops/frame.py says more."""
    batch, heads, half = ratios.shape
    own = np.empty(half, np.int64)
    for row in range(batch):
        for head in range(heads):
            over = np.int64(-(1 << 30))  # of a pair that has grown most, less what is asked of it
            for i in range(half):
                own[i] = np.int64(ratios[row, head, i]) - (np.int64(shifts[row, head, i]) << 9)
                over = max(over, own[i] - (next_limit if shifts[row, head, i] else first_limit))
            own.sort()
            if over >= own[(half - 1) // 2]:
                return True
    return False


@serial
def follow_mass(tables, mass, seqlen, take, span, forecast, code_of, score_of):
    """Bring the importance of stored tokens up to date with the attention mass they received.

    mass float32 (bh, entries, 16). What is new weighs 1 / (1 + age / span), at least `take`, as in
    `kvlab.cache.importance`. code_of float64 (254,): where the scores of codes 2, 3, ... begin;
    score_of float32 (256,).
    """
    shorts, one, nothing = tables.arena.view(np.uint16), np.float32(1), np.float32(0)
    for bh in range(len(tables.num_pages)):
        for e in range(tables.num_pages[bh]):
            tail = np.int64(tables.addresses[bh, e]) * UNIT + tables.rungs[tables.rung[bh, e], TAIL]
            start = np.int64(tables.base[bh, e]) << SEGMENT
            for slot in range(tables.counts[bh, e]):
                age = seqlen - start - np.int64(shorts[tail // 2 + slot])
                if age <= 0:  # a token of the call itself
                    continue
                at = tail + 2 * PAGE + slot
                previous = score_of[tables.arena[at]]
                change = mass[bh, e, slot] - previous
                weight = max(take, one / np.float32(1 + age // span))
                level = previous + weight * change
                if forecast:
                    level = max(previous + (weight + take) * change, nothing)
                tables.arena[at] = _code(level, code_of)


@helper
def _code(score, code_of):
    """The importance code of a score: 0 of 0, else by where the scores of each code begin."""
    if not score > 0:
        return 0
    low, high = 0, code_of.size
    while low < high:
        middle = (low + high) // 2
        if code_of[middle] <= score:
            low = middle + 1
        else:
            high = middle
    return low + 1

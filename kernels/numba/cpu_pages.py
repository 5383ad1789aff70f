"""Tokens into pages and out of them on the CPU: the format of kvlab/reference/pages.py, bit for bit.

A token is encoded on its own: the step byte is searched and the codes are made in a row of `head_dim`
elements, then a scatter puts them where the page keeps them. That place is the order in which the tensor
cores of a GPU want their operands (the fragment order of mma.sync m16n8k16), so one token touches words all
over the code region and shares each word with other tokens of its page. Hence a page belongs to one thread,
and a thread walks its tokens in the order of the list: the result does not depend on the number of threads.

One compiled version serves all widths, dtypes and head dims: the cost of a token is in loops over its
elements, not in the branches between them. `fastmath` is off everywhere: codes are part of the contract.
"""

from typing import NamedTuple

import numpy as np

from numba import njit, prange

FLOAT16, BFLOAT16, FLOAT32 = 0, 1, 2
"""Values of Layout.kind: what elements of width 16 are."""

_HIGHEST_FINITE = 0xF7
_NAN_STEP = 0xFF
_STEP_OF = (np.arange(256, dtype=np.uint16) << 7).view(np.float16).astype(np.float32)


class Layout(NamedTuple):
    """A page's record in numbers: widths, byte offsets, and the half cells where the step search starts."""

    head_dim: int
    kind: int
    bits_k: int  # bits stored: 32 for width 16 of a float32 cache
    bits_v: int
    k_codes: int
    v_codes: int
    k_steps: int
    v_steps: int
    positions: int
    importance: int
    half_cell_k: np.float32
    half_cell_v: np.float32


# The place of a code in the region.


@njit
def _place(bits, tile, register):
    """Word (in units of 32 lanes) and bit of one register of a tile; bit -1: spread over three words.

    A word holds 16 // bits pairs, the two codes of a pair at the same bit of its halves. Tiles share words in
    groups: 2 tiles of 2 bits to a word, 4 tiles of 3 bits to three words, whose spare bit 0 takes pair 15.
    """
    tiles = 2 if bits == 2 else (4 if bits == 3 else 1)
    pairs_per_word = 16 // bits
    pair = 4 * (tile % tiles) + register
    first = tile // tiles * (bits * tiles // 4)
    if bits == 3 and pair == 15:
        return first, -1
    return first + pair // pairs_per_word, 16 % bits + bits * (pair % pairs_per_word)


@njit
def _put_k(words, codes, slot, bits):
    """Put the codes of a key: a tile row, so four neighbouring lanes take two pairs each."""
    block, lane, odd = slot % 8 // 2, 4 * (slot // 8), slot % 2
    tiles = codes.size // 16
    for part in range(2 * tiles):
        register = odd + 2 * (part % 2)
        if bits == 32:
            at = 32 * (8 * (block * tiles + part // 2) + 2 * register) + lane
            for u in range(4):
                words[at + u], words[at + 32 + u] = codes[8 * part + 2 * u], codes[8 * part + 2 * u + 1]
            continue
        word, bit = _place(bits, block * tiles + part // 2, register)
        at = 32 * word + lane
        keep = np.uint32(~((0x10001 * ((1 << bits) - 1)) << bit)) if bit >= 0 else np.uint32(~0x10001)
        for u in range(4):
            pair = codes[8 * part + 2 * u] | (codes[8 * part + 2 * u + 1] << np.uint32(16))
            if bit >= 0:
                words[at + u] = (words[at + u] & keep) | np.uint32(pair << bit)
            else:
                for i in range(3):
                    spread = np.uint32((pair >> i) & 0x10001)
                    words[at + u + 32 * i] = (words[at + u + 32 * i] & keep) | spread


@njit
def _take_k(words, codes, slot, bits):
    """Take the codes of a key: the inverse of `_put_k`."""
    block, lane, odd = slot % 8 // 2, 4 * (slot // 8), slot % 2
    tiles = codes.size // 16
    mask = np.uint32((1 << bits) - 1)
    for part in range(2 * tiles):
        register = odd + 2 * (part % 2)
        if bits == 32:
            at = 32 * (8 * (block * tiles + part // 2) + 2 * register) + lane
            for u in range(4):
                codes[8 * part + 2 * u], codes[8 * part + 2 * u + 1] = words[at + u], words[at + 32 + u]
            continue
        word, bit = _place(bits, block * tiles + part // 2, register)
        at = 32 * word + lane
        for u in range(4):
            if bit >= 0:
                pair = words[at + u] >> np.uint32(bit)
            else:
                pair = np.uint32(0)
                for i in range(3):
                    pair |= (words[at + u + 32 * i] & np.uint32(0x10001)) << np.uint32(i)
            codes[8 * part + 2 * u] = pair & mask
            codes[8 * part + 2 * u + 1] = (pair >> np.uint32(16)) & mask


@njit
def _put_v(words, codes, slot, bits):
    """Put the codes of a value: a tile column, so each code is in one half of a word of its own lane."""
    block, odd = slot % 8 // 2, slot % 2
    lane, half = slot // 16, slot // 8 % 2
    for part in range(codes.size // 8):
        register = 2 * odd + part % 2
        tile = part // 2 * 4 + block
        if bits == 32:
            at = 32 * (8 * tile + 2 * register + half) + lane
            for g in range(8):
                words[at + 4 * g] = codes[8 * part + g]
            continue
        word, bit = _place(bits, tile, register)
        at = 32 * word + lane
        if bit >= 0:
            shift = bit + 16 * half
            keep = np.uint32(~(((1 << bits) - 1) << shift))
            for g in range(8):
                words[at + 4 * g] = (words[at + 4 * g] & keep) | np.uint32(codes[8 * part + g] << shift)
        else:
            keep = np.uint32(~(1 << (16 * half)))
            for g in range(8):
                for i in range(3):
                    spread = np.uint32(((codes[8 * part + g] >> i) & 1) << (16 * half))
                    words[at + 4 * g + 32 * i] = (words[at + 4 * g + 32 * i] & keep) | spread


@njit
def _take_v(words, codes, slot, bits):
    """Take the codes of a value: the inverse of `_put_v`."""
    block, odd = slot % 8 // 2, slot % 2
    lane, half = slot // 16, slot // 8 % 2
    mask = np.uint32((1 << bits) - 1)
    for part in range(codes.size // 8):
        register = 2 * odd + part % 2
        tile = part // 2 * 4 + block
        if bits == 32:
            at = 32 * (8 * tile + 2 * register + half) + lane
            for g in range(8):
                codes[8 * part + g] = words[at + 4 * g]
            continue
        word, bit = _place(bits, tile, register)
        at = 32 * word + lane
        if bit >= 0:
            shift = np.uint32(bit + 16 * half)
            for g in range(8):
                codes[8 * part + g] = (words[at + 4 * g] >> shift) & mask
        else:
            shift = np.uint32(16 * half)
            for g in range(8):
                code = np.uint32(0)
                for i in range(3):
                    code |= ((words[at + 4 * g + 32 * i] >> shift) & np.uint32(1)) << np.uint32(i)
                codes[8 * part + g] = code


# Elements of width 16: the cache's own dtype.


@njit
def _half_of(bits):
    """Round float32 bits to float16 bits, to nearest, ties to even; a NaN keeps its sign only."""
    sign, magnitude = (bits >> 16) & 0x8000, bits & 0x7FFFFFFF
    if magnitude > 0x7F800000:
        return sign | 0x7E00
    if magnitude >= 0x477FF000:  # 65520, half way from the largest float16 to the next power of two
        return sign | 0x7C00
    if magnitude >= 0x38800000:  # 2**-14, the smallest normal float16
        rebased = magnitude - (112 << 23)
        return sign | ((rebased + 0xFFF + ((rebased >> 13) & 1)) >> 13)
    if magnitude < 0x33000000:  # 2**-25, half of the smallest float16
        return sign
    shift = 126 - (magnitude >> 23)
    mantissa = (magnitude & 0x7FFFFF) | 0x800000
    return sign | ((mantissa + (1 << (shift - 1)) - 1 + ((mantissa >> shift) & 1)) >> shift)


@njit
def _narrow(x, kind, codes):
    """Store float32 elements as the bits of the cache's dtype."""
    bits = x.view(np.uint32)
    for i in range(x.size):
        b = np.int64(bits[i])
        if kind == FLOAT16:
            b = _half_of(b)
        elif kind == BFLOAT16:
            is_nan = (b & 0x7FFFFFFF) > 0x7F800000
            b = ((b >> 16) & 0x8000) | 0x7FC0 if is_nan else (b + 0x7FFF + ((b >> 16) & 1)) >> 16
        codes[i] = b


@njit
def _widen(codes, kind, x):
    """Read the bits of the cache's dtype as float32 elements: exact."""
    bits = x.view(np.uint32)
    for i in range(x.size):
        b = np.int64(codes[i])
        if kind == FLOAT16:
            sign, magnitude = (b & 0x8000) << 16, b & 0x7FFF
            if magnitude >= 0x7C00:
                b = sign | 0x7F800000 | (magnitude << 13)
            elif magnitude >= 0x400:
                b = sign | ((magnitude << 13) + (112 << 23))
            else:
                x[i] = np.float32(magnitude) * np.float32(2.0**-24)
                b = sign | np.int64(bits[i])
        elif kind == BFLOAT16:
            b <<= 16
        bits[i] = b


# Elements of fewer bits: a step for the vector, a code for each element.


@njit
def _tree_sum(a):
    """Sum a power of two of elements in place, halving: a[i] += a[i + h]."""
    h = a.size // 2
    while h > 0:
        for i in range(h):
            a[i] += a[i + h]
        h //= 2
    return a[0]


@njit
def _squared_error(x, step, bits, squares):
    """Sum the squared errors of `x` on the grid of `step`."""
    low, high = np.float32(-(1 << (bits - 1))), np.float32((1 << (bits - 1)) - 1)
    cell = step + step
    for i in range(x.size):
        y = np.floor(x[i] / cell)
        y = low if y < low else y
        y = high if y > high else y
        error = x[i] - (y + y + np.float32(1)) * step
        squares[i] = error * error
    return _tree_sum(squares)


@njit
def _all_finite(x):
    finite = True
    for i in range(x.size):
        finite &= np.isfinite(x[i])
    return finite


@njit
def _best_step(x, bits, half_cell, squares):
    """Choose the step byte of a vector; `squares` is scratch, zero beyond x.size."""
    for i in range(x.size):
        squares[i] = x[i] * x[i]
    total = _tree_sum(squares)
    if not np.isfinite(total) and not _all_finite(x):
        return _NAN_STEP
    rms = np.sqrt(total / np.float32(x.size))
    if rms == 0:
        return 0
    guess = np.empty(1, np.float32)
    guess[0] = rms * half_cell
    half = _half_of(np.int64(guess.view(np.uint32)[0]))
    byte = min(max((half + 63 + ((half >> 7) & 1)) >> 7, 1), _HIGHEST_FINITE)
    best, least = 0, np.float32(0)
    for candidate in range(max(byte - 2, 1), min(byte + 2, _HIGHEST_FINITE) + 1):
        error = _squared_error(x, _STEP_OF[candidate], bits, squares)
        if best == 0 or error < least:
            best, least = candidate, error
    return best


@njit
def _encode(x, bits, half_cell, codes, squares):
    """Make the codes of a vector and return its step byte."""
    byte = _best_step(x, bits, half_cell, squares)
    middle = np.float32(1 << (bits - 1))
    if byte == 0 or byte == _NAN_STEP:
        codes[:] = np.uint32(middle)
        return byte
    cell = _STEP_OF[byte] + _STEP_OF[byte]
    high = middle + middle - np.float32(1)
    for i in range(x.size):
        code = np.floor(x[i] / cell) + middle
        code = np.float32(0) if code < 0 else code
        code = high if code > high else code
        codes[i] = np.uint32(np.int32(code))
    return byte


@njit
def _decode(codes, byte, bits, x):
    """value = (2 * code + 1 - 2**bits) * step"""
    step, shift = _STEP_OF[byte], np.int32(1 - (1 << bits))
    for i in range(x.size):
        x[i] = np.float32(np.int32(codes[i]) * 2 + shift) * step


# Lists of tokens.


@njit
def _power_of_two(n):
    size = 1
    while size < n:
        size *= 2
    return size


@njit
def _first_bad(pages, page, slot):
    """The index of the first entry outside the pool, or -1."""
    for i in range(page.size):
        if not (0 <= page[i] < pages and 0 <= slot[i] < 64):
            return i
    return -1


@njit
def _write_part(pool, layout, page, slot, k, v, part, parts):
    words = pool.view(np.uint32)
    codes = np.empty(layout.head_dim, np.uint32)
    squares = np.zeros(_power_of_two(layout.head_dim), np.float32)
    for i in range(page.size):
        if page[i] % parts != part:
            continue
        if layout.bits_k < 16:
            byte = _encode(k[i], layout.bits_k, layout.half_cell_k, codes, squares)
            pool[page[i], layout.k_steps + slot[i]] = byte
        else:
            _narrow(k[i], layout.kind, codes)
        _put_k(words[page[i], layout.k_codes // 4 :], codes, slot[i], layout.bits_k)
        if layout.bits_v < 16:
            byte = _encode(v[i], layout.bits_v, layout.half_cell_v, codes, squares)
            pool[page[i], layout.v_steps + slot[i]] = byte
        else:
            _narrow(v[i], layout.kind, codes)
        _put_v(words[page[i], layout.v_codes // 4 :], codes, slot[i], layout.bits_v)


@njit(parallel=True, cache=True)
def write_tokens(pool, layout, page, slot, k, v, parts):
    """Encode token i into slot[i] of page[i]; -1, or the index of an entry outside the pool.

    pool uint8 (pages, record), page and slot int64 (n,), k and v float32 (n, head_dim), all contiguous.
    `parts`: how many threads to use at most.
    """
    bad = _first_bad(pool.shape[0], page, slot)
    if bad >= 0:
        return bad
    for part in prange(parts):
        _write_part(pool, layout, page, slot, k, v, part, parts)
    return -1


@njit
def _read_part(pool, layout, page, slot, k, v, start, stop):
    words = pool.view(np.uint32)
    codes = np.empty(layout.head_dim, np.uint32)
    for i in range(start, stop):
        record = pool[page[i]]
        _take_k(words[page[i], layout.k_codes // 4 :], codes, slot[i], layout.bits_k)
        if layout.bits_k < 16:
            _decode(codes, record[layout.k_steps + slot[i]], layout.bits_k, k[i])
        else:
            _widen(codes, layout.kind, k[i])
        _take_v(words[page[i], layout.v_codes // 4 :], codes, slot[i], layout.bits_v)
        if layout.bits_v < 16:
            _decode(codes, record[layout.v_steps + slot[i]], layout.bits_v, v[i])
        else:
            _widen(codes, layout.kind, v[i])


@njit(parallel=True, cache=True)
def read_tokens(pool, layout, page, slot, k, v, parts):
    """Decode slot[i] of page[i] into k[i] and v[i]; -1, or the index of an entry outside the pool."""
    bad = _first_bad(pool.shape[0], page, slot)
    if bad >= 0:
        return bad
    for part in prange(parts):
        start, stop = page.size * part // parts, page.size * (part + 1) // parts
        _read_part(pool, layout, page, slot, k, v, start, stop)
    return -1


@njit(cache=True)
def copy_tokens(pool, layout, page_from, slot_from, page_to, slot_to):
    """Copy tokens one after the other, everything a page knows of them; -1, or the index of a bad entry."""
    bad = max(_first_bad(pool.shape[0], page_from, slot_from), _first_bad(pool.shape[0], page_to, slot_to))
    if bad >= 0:
        return bad
    words = pool.view(np.uint32)
    codes = np.empty(layout.head_dim, np.uint32)
    for i in range(page_from.size):
        source, target, old, new = page_from[i], page_to[i], slot_from[i], slot_to[i]
        _take_k(words[source, layout.k_codes // 4 :], codes, old, layout.bits_k)
        _put_k(words[target, layout.k_codes // 4 :], codes, new, layout.bits_k)
        _take_v(words[source, layout.v_codes // 4 :], codes, old, layout.bits_v)
        _put_v(words[target, layout.v_codes // 4 :], codes, new, layout.bits_v)
        if layout.bits_k < 16:
            pool[target, layout.k_steps + new] = pool[source, layout.k_steps + old]
        if layout.bits_v < 16:
            pool[target, layout.v_steps + new] = pool[source, layout.v_steps + old]
        for byte in range(2):
            pool[target, layout.positions + 2 * new + byte] = pool[source, layout.positions + 2 * old + byte]
        pool[target, layout.importance + new] = pool[source, layout.importance + old]
    return -1

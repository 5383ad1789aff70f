"""Encode tokens into pages and decode them on the CPU, bit for bit as kvlab/reference/pages.py.

Each token is encoded on its own: `scales` searches its scale byte and makes its codes, a row of `head_dim`
elements. A scatter then writes the codes to the page, by a table of addresses of bits that the caller makes.
A token shares words with other tokens of its page. So one thread owns a page and writes its tokens in the
order of the list, and the result does not depend on the number of threads.

One compiled version serves all widths, dtypes and head dims: the cost of a token is in loops over its
elements, not in the branches between them. Arrays are flat and addressed by position, because slices of an
array that threads share cost more than the work on a token. `fastmath` is off everywhere: codes are part of
the contract.
"""

from typing import NamedTuple

import numpy as np
from numba import njit, prange

from .parallel import parallel_kernel
from .scales import FACTORS, PROFILE, SCALES, coded_blocks, encode_vector, width_of_block
from .simd import bits_of, float_of_bits, float_of_half, half_of

FLOAT16, BFLOAT16, FLOAT32 = range(3)
"""Values of Side.kind."""


class Side(NamedTuple):
    """The K or the V half of a page. All functions work on one half; a page's two halves share no word.

    With it goes an array `addresses`, int32 (16, head_dim): for slot and channel, the address of the code's
    lowest bit in the code region. The other bits follow it; where ~address is given instead, which is
    negative, each of them is 32 words after the one before.
    """

    nbytes: int  # of a page
    codes: int  # byte offset of the codes
    scales: int  # byte offset of theirs
    bits: int  # stored for an element: 32 for width 16 of a float32 cache; or a profile (`scales.PROFILE`)
    kind: int  # what elements of width 16 are
    guess: np.float32  # where the scale search starts, of kvlab/reference/pages.py


@njit
def put_codes(words, first, addresses, slot, bits, codes):
    """Put the codes of a token into the code region that begins at words[first]."""
    if bits < PROFILE:
        _put_run(words, first, addresses, slot, bits, codes, 0, codes.size)
        return
    each = codes.size // 4
    for block in range(coded_blocks(bits)):
        width = width_of_block(bits, block)
        _put_run(words, first, addresses, slot, width, codes, block * each, block * each + each)


@njit
def _put_run(words, first, addresses, slot, bits, codes, begin, end):
    mask = np.uint32((1 << bits) - 1)
    for channel in range(begin, end):
        address = addresses[slot, channel]
        if address >= 0:
            word, shift = first + (address >> 5), np.uint32(address & 31)
            words[word] = (words[word] & ~(mask << shift)) | (codes[channel] << shift)
        else:
            word, shift = first + (~address >> 5), np.uint32(~address & 31)
            for j in range(bits):
                bit = (codes[channel] >> np.uint32(j)) & np.uint32(1)
                words[word + 32 * j] = (words[word + 32 * j] & ~(np.uint32(1) << shift)) | (bit << shift)


@njit
def take_codes(words, first, addresses, slot, bits, codes):
    """Take the codes of a token: the inverse of `put_codes`; 0 in blocks of width 0."""
    if bits < PROFILE:
        _take_run(words, first, addresses, slot, bits, codes, 0, codes.size)
        return
    each = codes.size // 4
    for block in range(4):
        width = width_of_block(bits, block)
        if width:
            _take_run(words, first, addresses, slot, width, codes, block * each, block * each + each)
        else:
            codes[block * each : block * each + each] = 0


@njit
def _take_run(words, first, addresses, slot, bits, codes, begin, end):
    mask = np.uint32((1 << bits) - 1)
    for channel in range(begin, end):
        address = addresses[slot, channel]
        if address >= 0:
            codes[channel] = (words[first + (address >> 5)] >> np.uint32(address & 31)) & mask
        else:
            word, shift = first + (~address >> 5), np.uint32(~address & 31)
            code = np.uint32(0)
            for j in range(bits):
                code |= ((words[word + 32 * j] >> shift) & np.uint32(1)) << np.uint32(j)
            codes[channel] = code


# Elements of width 16: the cache's own dtype.


@njit
def narrow(x, start, kind, codes):
    """Store float32 elements as the bits of the cache's dtype, rounded half to even."""
    for i in range(codes.size):
        if kind == FLOAT16:
            codes[i] = half_of(x[start + i])
        else:
            bits = bits_of(x[start + i])
            if kind == BFLOAT16:
                is_nan = (bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
                rounded = (np.int64(bits) + 0x7FFF + ((bits >> np.uint32(16)) & np.uint32(1))) >> 16
                bits = np.uint32((bits >> np.uint32(16)) | np.uint32(0x40)) if is_nan else np.uint32(rounded)
            codes[i] = bits


@njit
def widen(codes, kind, x, start):
    """Read the bits of the cache's dtype as float32 elements: exact."""
    for i in range(codes.size):
        if kind == FLOAT16:
            x[start + i] = float_of_half(np.uint16(codes[i]))
        else:
            x[start + i] = float_of_bits(codes[i] << np.uint32(16) if kind == BFLOAT16 else codes[i])


# Elements of fewer bits: a scale for the vector, a code for each element (`scales`).


@njit
def decode(codes, byte, bits, x, start):
    """value = (2 * code + 1 - 2**bits) * scale, or that times the factor of the width of a block"""
    if bits < PROFILE:
        _decode_run(codes, SCALES[byte], bits, x, start, 0, codes.size)
        return
    each = codes.size // 4
    for block in range(4):
        width = width_of_block(bits, block)
        if width:
            scale = SCALES[byte] * FACTORS[width]
            _decode_run(codes, scale, width, x, start, block * each, block * each + each)
        else:
            x[start + block * each : start + block * each + each] = SCALES[byte] * np.float32(0)


@njit
def _decode_run(codes, scale, bits, x, start, begin, end):
    shift = np.int32(1 - (1 << bits))
    for i in range(begin, end):
        x[start + i] = np.float32(np.int32(codes[i]) * np.int32(2) + shift) * scale


# Lists of tokens.


@njit
def _first_bad(pages, slots, page, slot):
    """The index of the first entry outside the pool, or -1."""
    for i in range(page.size):
        if not (0 <= page[i] < pages and 0 <= slot[i] < slots):
            return i
    return -1


@njit
def _write_part(pool, words, side, addresses, page, slot, x, known, part, parts):
    d = addresses.shape[1]
    codes, sizes = np.empty(d, np.uint32), np.empty(d, np.float32)
    for i in range(page.size):
        if page[i] % parts != part:
            continue
        start = page[i] * side.nbytes
        if side.bits < 16 or side.bits >= PROFILE:
            byte = encode_vector(x, i * d, side.bits, side.guess, known[i], codes, sizes)
            pool[start + side.scales + slot[i]] = byte
        else:
            narrow(x, i * d, side.kind, codes)
        put_codes(words, (start + side.codes) // 4, addresses, slot[i], side.bits, codes)


@njit(cache=True)
def write_side(pool, side, addresses, page, slot, x, known):
    """Encode vector i into slot[i] of page[i]; -1, or the index of an entry outside the pool.

    pool uint8 (pages * nbytes,), page and slot int64 (n,), x float32 (n * head_dim,), known int16 (n,): as
    `encode_vector` takes them; all contiguous.
    """
    bad = _first_bad(pool.size // side.nbytes, addresses.shape[0], page, slot)
    if bad < 0:
        _write_part(pool, pool.view(np.uint32), side, addresses, page, slot, x, known, 0, 1)
    return bad


@parallel_kernel()
def write_side_parallel(pool, side, addresses, page, slot, x, known, parts):
    """Do what `write_side` does in `parts` threads: for many vectors, as threads take a while to wake."""
    bad = _first_bad(pool.size // side.nbytes, addresses.shape[0], page, slot)
    if bad < 0:
        words = pool.view(np.uint32)
        for part in prange(parts):
            _write_part(pool, words, side, addresses, page, slot, x, known, part, parts)
    return bad


@njit
def _read_part(pool, words, side, addresses, page, slot, x, first, last):
    d = addresses.shape[1]
    codes = np.empty(d, np.uint32)
    for i in range(first, last):
        start = page[i] * side.nbytes
        take_codes(words, (start + side.codes) // 4, addresses, slot[i], side.bits, codes)
        if side.bits < 16 or side.bits >= PROFILE:
            decode(codes, pool[start + side.scales + slot[i]], side.bits, x, i * d)
        else:
            widen(codes, side.kind, x, i * d)


@njit(cache=True)
def read_side(pool, side, addresses, page, slot, x):
    """Decode slot[i] of page[i] into vector i of x; arguments and result as of `write_side`."""
    bad = _first_bad(pool.size // side.nbytes, addresses.shape[0], page, slot)
    if bad < 0:
        _read_part(pool, pool.view(np.uint32), side, addresses, page, slot, x, 0, page.size)
    return bad


@parallel_kernel()
def read_side_parallel(pool, side, addresses, page, slot, x, parts):
    """Do what `read_side` does in `parts` threads."""
    bad = _first_bad(pool.size // side.nbytes, addresses.shape[0], page, slot)
    if bad < 0:
        words = pool.view(np.uint32)
        for part in prange(parts):
            first, last = page.size * part // parts, page.size * (part + 1) // parts
            _read_part(pool, words, side, addresses, page, slot, x, first, last)
    return bad

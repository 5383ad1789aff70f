"""Rotate vectors, find scales and make codes on the CPU, as kvlab/reference/pages.py, bit for bit.

The reference rounds elements to whole numbers before it adds them up. So sums up to 2**24 are exact in any
order, and these loops may use any number of lanes and accumulators. Functions take flat arrays and work on n
elements from x[start] on; n is a multiple of 16.
"""

from typing import NamedTuple

import numpy as np

from .fragments import FACTORS as FACTORS_OF
from .groups import hadamard_run
from .simd import (
    LANES,
    bits_of,
    float_of_bits,
    float_of_half,
    half_of,
    helper,
    highest,
    larger_magnitude,
    load,
    magnitude,
    maximum,
    minimum,
    nearest,
    splat,
    store,
    store_cut,
    through_half,
    total,
    zero_if_finite,
)
from .softmax import serial

_ZERO, _HALF, _ONE = np.float32(0), np.float32(0.5), np.float32(1)
_ROOT_2 = np.float32(np.float16(np.sqrt(2)))
_MIN_EXPONENT, _TOO_LARGE = -39, np.float32(2**100)
_NAN_SCALE, _LEAST_ABOVE = 0xFF, -16
_ABOVE, _HIGHER = np.float32(1 + 2**-7), np.float32(17 / 16)
_HIGHER_IN_BLOCKS = np.float32(19 / 16)
_CODE_PARTS = np.array([0, 0, 6, 5, 4, 0, 0, 0, 4])
RAW, DECODED = -1, -2
"""In place of a scale byte that is to be found: of a raw vector, or one that comes from codes."""
SCALES = (np.arange(256, dtype=np.uint16) << 7).view(np.float16).astype(np.float32)
"""The scale that each byte stands for."""
_BOTH = np.arange(256) & np.arange(256) >> 1 & 0x55
_MORE = (np.arange(256) & 0x7C == 0x7C).astype(np.int64)
SIGNS = (1 - 2 * ((_BOTH ^ _BOTH >> 2 ^ _BOTH >> 4 ^ _BOTH >> 6 ^ _MORE) & 1)).astype(np.float32)
"""What the channels of values are multiplied by before they are rotated."""


PROFILE = 1 << 12
"""Bits of a side from here on are a profile: the widths of four blocks, 4 bits each, the first uppermost."""
FACTORS = np.array([FACTORS_OF.get(str(width), 0) for width in range(9)], np.float32)
_BLOCK_GUESS = np.array([0, 0, 0.07, 0, 0.052, 0, 0, 0, 0.036], np.float32)
_FIRST, _FIRST_DECODED = np.float32(2.5), np.float32(1.77)
_MORE_CHANNELS = np.array([0, 1, 0.82, 0.73, 0.68], np.float32)  # by head_dim / 64
_WEIGHTS = np.array([8, 2, 1, 1])
_BLOCK_TOP = 17


class Frames(NamedTuple):
    """Frames of keys, one a (row, KV head): see `kvlab.ops.frame`."""

    sums: np.ndarray  # float32 (m * head_dim,), of `_sum_whole`: the transforms of the scaled means
    most: np.ndarray  # float32 (m,), the largest magnitudes of these means
    powers: np.ndarray  # float32 (m * head_dim,), what channels are multiplied by
    scaled: np.ndarray  # bool (m,), whether any of them is not 1
    down: np.ndarray  # float32 (m, 2), what keys and values are multiplied by, too
    order: np.ndarray  # uint8 (m * head_dim,), where keys are kept in blocks, else (0,)
    gain: np.ndarray  # float32 (m * 4,), likewise


@helper
def _power(exponent):
    """Return 2**exponent, for exponents from -126 to 127."""
    return float_of_bits(np.uint32((exponent + 127) << 23))


@helper
def _exponent(x):
    """Return floor(log2(x)) of a normal number above 0; of 0 and subnormal numbers -127, of others 128."""
    return np.int64(bits_of(x) >> np.uint32(23)) - 127


@helper
def _largest(x, start, n):
    """Return the largest magnitude, NaN if an element is not finite."""
    even = odd = splat(_ZERO)
    for i in range(start, start + n, 2 * LANES):
        even, odd = larger_magnitude(even, load(x, i)), larger_magnitude(odd, load(x, i + LANES))
    most = larger_magnitude(even, odd)
    return highest(most) + zero_if_finite(most)


@helper
def _unit_exponent(largest, log):
    """Return that of the whole numbers that are transformed: 2**log of them add up to 2**24 at most."""
    return max(_exponent(largest) - (23 - log), _MIN_EXPONENT)


@helper
def _sum_whole(x, start, n, log, exponent, sums):
    """Transform n elements from x[start], as whole numbers of 2**exponent, into sums[start]."""
    down = splat(_power(-exponent))
    for i in range(start, start + n, LANES):
        store(sums, i, nearest(load(x, i) * down))
    hadamard_run(sums, start, n, 1 << log)


@helper
def rotate_row(x, start, n, log, frames, k, out):
    """Rotate n elements from x[start] into out[start], less the mean of frame k if k is 0 or more.

    Keys in blocks are in their order; `log` is that of a block then.
    """
    in_blocks = k >= 0 and frames.order.size > 0
    largest = _largest(x, start, n)
    if not largest < _TOO_LARGE:
        for i in range(start, start + n):
            out[i] = np.float32(np.nan)
        return
    exponent = _unit_exponent(max(largest, frames.most[k]) if k >= 0 else largest, log)
    _sum_whole(x, start, n, log, exponent, out)
    if k >= 0:
        by, behind = splat(_power(_unit_exponent(frames.most[k], log) - exponent)), k * n - start
        for i in range(start, start + n, LANES):
            store(out, i, load(out, i) - load(frames.sums, behind + i) * by)
    # Quarters of sums, whole and of 11 bits: as float16, where 1 stands for its least number.
    down, up = splat(_power(-26)), _power(26 + exponent - (log + 1) // 2)
    factor = splat(up * _ROOT_2 if log % 2 and not in_blocks else up)
    for i in range(start, start + n, LANES):
        store(out, i, through_half(load(out, i) * down) * factor)
    if in_blocks:
        for i in range(0, n, LANES):
            store(out, start + i, load(out, start + i) * splat(frames.gain[4 * k + 4 * i // n]))


@helper
def turn_signs(x, start, n):
    """Multiply the n elements of a value from x[start] by its signs."""
    for i in range(n):
        x[start + i] *= SIGNS[i]


@helper
def log_of_block(head_dim):
    """Return the binary logarithm of the largest power of 2 that divides head_dim, a multiple of 16."""
    log = 4
    while head_dim >> log & 1 == 0:
        log += 1
    return log


@helper
def log_of_keys(head_dim, frames):
    """Return that of what keys are transformed by: a head, or a block of channels."""
    return log_of_block(head_dim // 4 if frames.order.size else head_dim)


@helper
def scale_row(x, start, n, frames, k, halves):
    """Scale n elements from x[start] down as frame k says; `halves`: they stay of the type float16."""
    if not frames.scaled[k]:
        return
    for i in range(0, n, LANES):
        scaled = load(x, start + i) * load(frames.powers, k * n + i)
        store(x, start + i, through_half(scaled) if halves else scaled)


@helper
def divide_row(x, start, n, frames, k, side):
    """Divide n elements from x[start] by the power of 2 of keys (side 0) or values (1) of frame k."""
    down = frames.down[k, side]
    if down != _ONE:
        for i in range(start, start + n):
            x[i] *= down


@helper
def order_row(x, n, frames, k, scratch):
    """Put the first n elements of x in the order of frame k, where it has one."""
    if frames.order.size:
        for i in range(n):
            scratch[i] = x[np.int64(frames.order[k * n + i])]
        for i in range(n):
            x[i] = scratch[i]


@serial
def prepare_frames(mean, shift, frames):
    """Fill in frames of means, float32 (m, head_dim), which are scaled, and shifts, uint8 (m, head_dim)."""
    flat, n = mean.reshape(-1), mean.shape[1]
    log, row, scratch = log_of_keys(n, frames), np.empty(n, np.float32), np.empty(n, np.float32)
    for k in range(len(mean)):
        orders = np.uint8(0)
        for i in range(n):
            orders |= shift[k, i]
            frames.powers[k * n + i] = _power(-np.int64(shift[k, i]))
            flat[k * n + i] *= frames.powers[k * n + i]
        frames.scaled[k] = orders != 0
        for i in range(n):
            row[i] = flat[k * n + i]
        order_row(row, n, frames, k, scratch)
        for i in range(n):
            flat[k * n + i] = row[i]
        frames.most[k] = _largest(flat, k * n, n)
        _sum_whole(flat, k * n, n, log, _unit_exponent(frames.most[k], log), frames.sums)


@helper
def _take_sizes(x, start, n, factor, sizes):
    """Put magnitudes times `factor` into `sizes`, as whole numbers."""
    by = splat(factor)
    for i in range(0, n, LANES):
        store(sizes, i, nearest(magnitude(load(x, start + i) * by)))


@helper
def _two_sums(sizes, n):
    """Return the sum of sizes and that of their squares."""
    sums = squares = splat(_ZERO)
    for i in range(0, n, LANES):
        size = load(sizes, i)
        sums, squares = sums + size, squares + size * size
    return total(sums), total(squares)


@helper
def _two_errors(sizes, n, bits, first, second):
    """Sum the squared errors of sizes on the grids of two scales; sizes and scales are whole numbers.

    The upper half of a grid is symmetric, and so are the halves of that: sizes are folded at their middles
    until one value is left.
    """
    s, t = splat(first), splat(second)
    s2, t2 = s + s, t + t
    s4, t4 = s2 + s2, t2 + t2
    s8, t8 = s4 + s4, t4 + t4
    of_s = of_t = splat(_ZERO)
    for i in range(0, n, LANES):
        a = b = load(sizes, i)
        if bits == 4:
            a, b = magnitude(a - s8), magnitude(b - t8)
        if bits > 2:
            a, b = magnitude(a - s4), magnitude(b - t4)
        a, b = magnitude(a - s2) - s, magnitude(b - t2) - t
        of_s, of_t = of_s + a * a, of_t + b * b
    return total(of_s), total(of_t)


@helper
def _search_scale(x, start, n, bits, guess, decoded, largest, exponent, sizes):
    """Return the scale byte: `kvlab.reference.pages.search_scale`, 0 if there is none.

    `guess` is of `kvlab.reference.pages.GUESS`, `largest` that of the magnitudes, above 0 and finite, and
    `exponent` that of 2**7 units of sizes; `sizes` is scratch.
    """
    top = min(exponent, bits + 13)  # the exponent when the vector has been halved
    if bits == 8:
        if exponent < _LEAST_ABOVE:
            return 0
        wanted = largest * _power(top - exponent) * guess
        word = half_of(wanted)
        return (np.int64(word) + (float_of_half(word) < wanted) + 127) >> 7
    if exponent < -24:  # the guess is below 2**-18 then, whatever the other elements are
        return 0
    compared = n // 16 * 3 // 4 * 16 if n >= 128 else n  # compared_channels
    _take_sizes(x, start, compared, _power(7 - exponent), sizes)
    wanted = largest = largest * _power(7 - exponent)
    if bits < 4:
        sums, squares = _two_sums(sizes, compared)
        if decoded:
            guess *= _HIGHER
        wanted = (squares + largest * largest) / (sums + largest)
        if bits == 3:
            wanted = np.sqrt(largest * wanted)
    near = np.int64(half_of(wanted * guess * _power(top - 7)))
    if near < 64:
        return 0
    if bits < 4 and n >= 128 and not decoded:  # not is_searched
        return (near + 64) >> 7
    return _best_scale(sizes, compared, bits, max(near >> 7, 3), _power(7 - top))


@helper
def _whole_scale(byte, bits, in_units):
    return min(np.floor(SCALES[byte] * in_units), np.float32(255 >> (bits - 1)))


@helper
def _best_scale(sizes, n, bits, below, in_units):
    """Return the better of two bytes, or at 2 and 3 bits the next one on its side.

    Scales times `in_units` are those of sizes. Both next ones are tried: to wait until it is known which one
    is needed takes longer.
    """
    first, second = _whole_scale(below, bits, in_units), _whole_scale(below + 1, bits, in_units)
    low, high = _two_errors(sizes, n, bits, first, second)
    up = np.int64(high < low)
    best = below + up
    if bits < 4:
        first, second = _whole_scale(below - 1, bits, in_units), _whole_scale(below + 2, bits, in_units)
        lower, higher = _two_errors(sizes, n, bits, first, second)
        is_better = (higher if up else lower) < min(low, high)
        best += (2 * up - 1) * np.int64(is_better)
    return best


@helper
def encode_vector(x, start, bits, guess, known, codes, sizes):
    """Make the codes (uint32) of a vector and return its scale byte; `sizes` (float32) is scratch.

    `known`: its scale byte, of a vector that was read from codes of this width and stays what it is; or RAW
    or DECODED.
    """
    if bits >= PROFILE:
        return _encode_in_blocks(x, start, bits, known, codes, sizes)
    n = codes.size
    largest = _largest(x, start, n)
    byte, exponent = 0, _exponent(largest * _ABOVE)
    if known >= 0:
        byte, exponent = known, 0  # its grid is that of no vector that is halved
    elif np.isnan(largest):
        byte = _NAN_SCALE
    elif largest > _ZERO:
        byte = _search_scale(x, start, n, bits, guess, known == DECODED, largest, exponent, sizes)
    middle = np.float32(1 << (bits - 1))
    if byte == 0 or byte == _NAN_SCALE:
        for i in range(n):
            codes[i] = np.uint32(middle)
        return byte

    unit = _exponent(SCALES[byte]) - _CODE_PARTS[bits]
    in_units = _power(min(bits + 13 - exponent, 0) - unit)
    # A quotient of whole numbers below 2**13 with a cell below 2**8 is at least half a cell's part away from
    # an integer if half of 1 is added first: the rounding of the reciprocal does not matter.
    reciprocal = _HALF / (SCALES[byte] * _power(-unit))
    shift, low, high = splat(middle + _HALF * reciprocal), splat(_ZERO), splat(middle + middle - _ONE)
    if bits == 8:  # 11 bits of whole numbers: those of float16, where 1 stands for its least number
        by, scale = splat(in_units * _power(-24)), splat(reciprocal * _power(24))
        for i in range(0, n, LANES):
            whole = through_half(load(x, start + i) * by)
            store_cut(codes, i, minimum(high, maximum(low, whole * scale + shift)))
    else:  # what has more than 11 bits is beyond the grid, however it is rounded
        by, scale = splat(in_units), splat(reciprocal)
        for i in range(0, n, LANES):
            whole = nearest(load(x, start + i) * by)
            store_cut(codes, i, minimum(high, maximum(low, whole * scale + shift)))
    return byte


@helper
def width_of_block(profile, block):
    """Return the width of one of the four blocks of a profile."""
    return profile >> (12 - 4 * block) & 15


@helper
def coded_blocks(profile):
    """Return how many blocks, the first, have codes."""
    blocks = 4
    while width_of_block(profile, blocks - 1) == 0:
        blocks -= 1
    return blocks


@helper
def _block_error(sizes, n, profile, blocks, byte, in_units):
    """Sum the errors of sizes on the grids of a scale, weighted by block: a whole number."""
    each, scale, error = n // 4, SCALES[byte] * in_units, 0
    for block in range(blocks):
        width, first, sums = width_of_block(profile, block), block * each, splat(_ZERO)
        if width == 8:
            reach = min(np.floor(scale * np.float32(256)), np.float32(255))
            error += 16 * _WEIGHTS[block] * max(np.int64(_largest(sizes, first, each) - reach), 0)
            continue
        s = splat(min(np.floor(scale * FACTORS[width]), np.float32(255 >> (width - 1))))
        s2 = s + s
        s4 = s2 + s2
        s8 = s4 + s4
        for i in range(first, first + each, LANES):
            a = load(sizes, i)
            if width == 4:
                a = magnitude(magnitude(a - s8) - s4)
            off = magnitude(a - s2) - s
            sums = sums + off * off
        error += _WEIGHTS[block] * np.int64(total(sums))
    return error


@helper
def _search_in_blocks(x, start, n, profile, blocks, decoded, largest, exponent, sizes):
    """Return the scale byte: `kvlab.reference.blocks.search_block_scale`, 0 if there is none."""
    top, each = min(exponent, _BLOCK_TOP), n // 4
    if width_of_block(profile, blocks - 1) == 8:
        if exponent < _LEAST_ABOVE:
            return 0
        wanted = largest * _power(top - exponent - 8)
        word = half_of(wanted)
        return (np.int64(word) + (float_of_half(word) < wanted) + 127) >> 7
    if exponent < -20:  # less than a 64th of the largest element, which is less than half of the least scale
        return 0
    squares = min_square = _ZERO
    for block in range(blocks):
        size = _largest(x, start + block * each, each) * _power(7 - exponent)
        squares += size * size * (_BLOCK_GUESS[width_of_block(profile, block)] * _MORE_CHANNELS[n // 64])
        if block == 0:
            min_square = squares * (_FIRST_DECODED if decoded else _FIRST)
    guess = np.sqrt(max(squares, min_square))
    if decoded:
        guess *= _HIGHER_IN_BLOCKS
    near = np.int64(half_of(guess * _power(top - 13)))
    if near < 64:
        return 0
    _take_sizes(x, start, blocks * each, _power(7 - exponent), sizes)
    in_units, best = _power(7 - top), max(near >> 7, 3)
    low = _block_error(sizes, n, profile, blocks, best, in_units)
    high = _block_error(sizes, n, profile, blocks, best + 1, in_units)
    up = np.int64(high < low)
    best += up
    if n < 128 or decoded:
        beyond = best + 2 * up - 1
        if _block_error(sizes, n, profile, blocks, beyond, in_units) < min(low, high):
            return beyond
    return best


@helper
def _encode_in_blocks(x, start, profile, known, codes, sizes):
    """Make the codes of a key in blocks: as `encode_vector`, of which it is a case."""
    n, blocks = codes.size, coded_blocks(profile)
    each = n // 4
    largest = _largest(x, start, blocks * each)
    byte, exponent = 0, _exponent(largest * _ABOVE)
    if known >= 0:
        byte, exponent = known, 0
    elif np.isnan(largest):
        byte = _NAN_SCALE
    elif largest > _ZERO:
        byte = _search_in_blocks(x, start, n, profile, blocks, known == DECODED, largest, exponent, sizes)
    for block in range(4):
        width, first = width_of_block(profile, block), block * each
        if width == 0 or byte == 0 or byte == _NAN_SCALE:
            for i in range(first, first + each):
                codes[i] = np.uint32(1 << width >> 1)
            continue
        half = SCALES[byte] * FACTORS[width]
        unit = _exponent(half) - _CODE_PARTS[width]
        in_units = _power(min(_BLOCK_TOP - exponent, 0) - unit)
        reciprocal, middle = _HALF / (half * _power(-unit)), np.float32(1 << (width - 1))
        shift, low, high = splat(middle + _HALF * reciprocal), splat(_ZERO), splat(middle + middle - _ONE)
        if width == 8:
            by, scale = splat(in_units * _power(-24)), splat(reciprocal * _power(24))
            for i in range(first, first + each, LANES):
                whole = through_half(load(x, start + i) * by)
                store_cut(codes, i, minimum(high, maximum(low, whole * scale + shift)))
        else:
            by, scale = splat(in_units), splat(reciprocal)
            for i in range(first, first + each, LANES):
                whole = nearest(load(x, start + i) * by)
                store_cut(codes, i, minimum(high, maximum(low, whole * scale + shift)))
    return byte

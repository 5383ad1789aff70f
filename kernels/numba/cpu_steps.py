"""Vectors on their way into pages on the CPU: rotation, step, codes; kvlab/reference/pages.py bit for bit.

The reference brings elements to whole numbers before it adds them up, so sums here are exact in any order as
long as they stay below 2**24: lanes and accumulators are free. Functions work on n elements from x[start] on,
n a multiple of 16, of flat arrays.
"""

import numpy as np
from numba import prange

from .cpu_groups import hadamard_run
from .cpu_simd import (
    LANES,
    bits_of,
    float_of_bits,
    float_of_half,
    half_of,
    helper,
    highest,
    kernel,
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

_ZERO, _HALF, _ONE = np.float32(0), np.float32(0.5), np.float32(1)
_ROOT_2 = np.float32(np.sqrt(2))
_LEAST_EXPONENT, _TOO_LARGE = -40, np.float32(2**100)
_NAN_STEP = 0xFF
_CANDIDATES = np.array([0, 0, 5, 5, 3])
STEP_OF = (np.arange(256, dtype=np.uint16) << 7).view(np.float16).astype(np.float32)
"""The step that each byte stands for."""


@helper
def _power(exponent):
    """Return 2**exponent, for exponents from -126 to 127."""
    return float_of_bits(np.uint32((exponent + 127) << 23))


@helper
def _exponent(x):
    """Return floor(log2(x)) of a normal number above 0; of 0 and subnormal numbers -127, of others 128."""
    return np.int64(bits_of(x) >> np.uint32(23)) - 127


@helper
def _largest(x, start, n, stretch):
    """Return the largest magnitude of x * stretch, NaN if one is not finite."""
    most = splat(_ZERO)
    for i in range(start, start + n, LANES):
        most = larger_magnitude(most, load(x, i) * splat(stretch))
    return highest(most) + zero_if_finite(most)


@helper
def _rotate_row(x, start, n, out):
    """Rotate n elements from x[start] into out[start]."""
    block, log = n & -n, 0
    while block >> log > 1:
        log += 1
    stretch = _ROOT_2 if log % 2 else _ONE
    largest = _largest(x, start, n, stretch)
    if not largest < _TOO_LARGE:
        for i in range(start, start + n):
            out[i] = np.float32(np.nan)
        return
    exponent = max(_exponent(largest) - 10, _LEAST_EXPONENT)
    scale, down = splat(stretch), splat(_power(-exponent))
    for i in range(start, start + n, LANES):
        store(out, i, nearest(load(x, i) * scale * down))
    hadamard_run(out, start, n, block)
    # Sums are whole and below 2**19: 2**-4 of them is a normal float16 or 0, and 11 bits are what it keeps.
    sixteenth, up = splat(_power(-4)), splat(_power(exponent + 4 - (log + 1) // 2))
    for i in range(start, start + n, LANES):
        store(out, i, through_half(load(out, i) * sixteenth) * up)


@kernel
def rotate_rows(x, head_dim, out):
    """Rotate the vectors of x into out, both float32 (n * head_dim,): `kvlab.reference.pages.rotate`."""
    for row in prange(x.size // head_dim):
        _rotate_row(x, row * head_dim, head_dim, out)


@helper
def _lowest_step(x, start, n, bits, guess, largest):
    """Return the lowest step byte to be tried, or 0 if there is none.

    `guess` is of `kvlab.reference.pages.GUESS`, `largest` that of the magnitudes, above 0 and finite.
    """
    exponent = _exponent(largest)
    if bits == 8:
        wanted = largest * _power(min(bits + 13 - exponent, 0)) * guess
        word = half_of(wanted)
        return max((np.int64(word) + (float_of_half(word) < wanted) + 127) >> 7, 1)
    if exponent < -24:  # then the guess is nearer to 0 than to 2**-17, whatever the other elements are
        return 0
    wanted = largest * _power(6 - exponent)
    if bits < 4:
        down, squares = splat(_power(6 - exponent)), splat(_ZERO)
        for i in range(start, start + n, LANES):
            whole = nearest(load(x, i) * down)
            squares = squares + whole * whole
        root = np.sqrt(total(squares) / np.float32(n))
        for _ in range(4 - bits):
            wanted = np.sqrt(wanted * root)
    word = np.int64(half_of(wanted * guess * _power(min(exponent, bits + 13) - 6)))
    near = (word + 63 + ((word >> 7) & 1)) >> 7
    half = _CANDIDATES[bits] // 2
    return max(near, half + 1) - half if near > 0 else 0


@helper
def _squared_error(whole, n, bits, step):
    """Sum the squared errors of whole numbers on the grid of `step`, which is whole as well.

    The grid is symmetric, and each half of it, and each half of that: |x| is folded at their middles until
    one value is left.
    """
    at_8 = splat(step * np.float32(8) if bits == 4 else _ZERO)
    at_4 = splat(step * np.float32(4) if bits >= 3 else _ZERO)
    at_2, at_1 = splat(step + step), splat(step)
    even, odd = splat(_ZERO), splat(_ZERO)
    for i in range(0, n, 2 * LANES):
        a, b = magnitude(load(whole, i)), magnitude(load(whole, i + LANES))
        a, b = magnitude(a - at_8), magnitude(b - at_8)
        a, b = magnitude(a - at_4), magnitude(b - at_4)
        a, b = magnitude(a - at_2) - at_1, magnitude(b - at_2) - at_1
        even = even + a * a
        odd = odd + b * b
    return total(even + odd)


@helper
def _best_step(whole, n, bits, lowest, in_parts):
    """Return the byte of least squared error among the candidates; steps are multiplied by `in_parts`.

    At 4 bits sums can be more than 2**24 where the largest element is below 2**-10 and most are near it. They
    are then more however they are rounded, and the sum of the highest candidate is far less.
    """
    best, least = lowest, np.float32(np.inf)
    for candidate in range(lowest, lowest + _CANDIDATES[bits]):
        error = _squared_error(whole, n, bits, STEP_OF[candidate] * in_parts)
        if error < least:
            best, least = candidate, error
    return best


@helper
def encode_vector(x, start, bits, guess, codes, whole):
    """Make the codes (uint32) of a vector and return its step byte; `whole` (float32) is scratch."""
    n = codes.size
    largest = _largest(x, start, n, _ONE)
    byte = 0
    if np.isnan(largest):
        byte = _NAN_STEP
    elif largest > _ZERO:
        byte = _lowest_step(x, start, n, bits, guess, largest)
    middle = np.float32(1 << (bits - 1))
    if byte == 0 or byte == _NAN_STEP:
        for i in range(n):
            codes[i] = np.uint32(middle)
        return byte

    unit = _exponent(STEP_OF[byte]) - 4
    in_units = splat(_power(min(bits + 13 - _exponent(largest), 0) - unit))
    if bits == 8:  # numbers may be 2048 or more: rounded as float16 does where 1 stands for its least number
        down, up = splat(_power(-24)), splat(_power(24))
        for i in range(0, n, LANES):
            store(whole, i, through_half(load(x, start + i) * in_units * down) * up)
    else:
        for i in range(0, n, LANES):
            store(whole, i, nearest(load(x, start + i) * in_units))
        byte = _best_step(whole, n, bits, byte, _power(-unit))

    # A quotient of whole numbers below 2**13 with a cell below 2**7 is at least half a cell's part away from
    # an integer if half of 1 is added first: the rounding of the reciprocal does not matter.
    reciprocal = _HALF / (STEP_OF[byte] * _power(-unit))
    shift, scale = splat(middle + _HALF * reciprocal), splat(reciprocal)
    low, high = splat(_ZERO), splat(middle + middle - _ONE)
    for i in range(0, n, LANES):
        store_cut(codes, i, minimum(high, maximum(low, load(whole, i) * scale + shift)))
    return byte

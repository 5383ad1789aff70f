"""One group of a codec on the CPU: what its values say about its scale, and from values to codes.

A group is the elements that share a scale, in a float32 buffer padded to whole vectors. Its work has two
phases, so that the kernels of `cpu_codec` can run the first over many groups before the second: what waits
for the end of a reduction in one group is then hidden behind the next group. Between them `find_scales` of
`cpu_words` turns ranges and magnitudes into scales.
"""

import numpy as np

from .cpu_simd import (
    LANES,
    bits_of,
    butterflies,
    count_greater,
    float_of_bits,
    helper,
    highest,
    larger_magnitude,
    load,
    lowest,
    magnitude,
    maximum,
    minimum,
    splat,
    store,
    store_codes,
    store_indices,
    store_mirrored,
    total,
    zero_if_finite,
)

GRID = 64
"""Entries of the table of guesses for each unit of magnitude."""

_ZERO, _HALF = np.float32(0), np.float32(0.5)
_INFINITY = np.float32(np.inf)
_SMALLEST_TO_DIVIDE_BY = np.float32(2.0**-100)


@helper
def pad(count):
    """Return the number of elements in whole vectors."""
    return (count + LANES - 1) // LANES * LANES


# ---------------------------------------------------------------------------------------------------------
# First phase: what a group needs to know of its values
# ---------------------------------------------------------------------------------------------------------


@helper
def measure_range(values, start, count):
    """Return the lowest and the highest value, NaN if an element is not finite; fills up the last vector."""
    for i in range(start + count, start + pad(count)):
        values[i] = values[start]
    low = high = load(values, start)
    size = splat(_ZERO)
    for i in range(start, start + count, LANES):
        x = load(values, i)
        low, high, size = minimum(x, low), maximum(x, high), larger_magnitude(size, x)
    nothing = zero_if_finite(size)
    return lowest(low) + nothing, highest(high) + nothing


@helper
def measure_magnitude(values, start, count):
    """Return the largest magnitude, NaN if an element is not finite."""
    size = splat(_ZERO)
    for i in range(start, start + count, LANES):
        size = larger_magnitude(size, load(values, i))
    return highest(size) + zero_if_finite(size)


@helper
def root_mean_square(values, start, count, largest, squares):
    """Return sqrt(mean of squares): summed by halves, after a division by a power of two near `largest`."""
    exponent = max(bits_of(largest) >> np.uint32(23), np.uint32(1))
    down = splat(float_of_bits(np.uint32((np.uint32(254) - exponent) << np.uint32(23))))
    left, h = pad(count), LANES
    while 2 * h < left:
        h *= 2
    folded = max(left - h, 0)
    for i in range(0, folded, LANES):  # the first halving, on the way
        y, z = load(values, start + i) * down, load(values, start + h + i) * down
        store(squares, i, y * y + z * z)
    for i in range(folded, min(h, left), LANES):
        y = load(values, start + i) * down
        store(squares, i, y * y)
    while h > LANES:
        h //= 2
        for i in range(0, h, LANES):
            store(squares, i, load(squares, i) + load(squares, i + h))
    mean = total(load(squares, 0)) / np.float32(count)
    return np.sqrt(mean) * float_of_bits(np.uint32(exponent << np.uint32(23)))


@helper
def hadamard_run(x, first, count, block):
    """Transform x[first:first + count], flat float32, in place by blocks, without the final 1 / sqrt(block).

    `block` is the largest power of two that divides `count`. Butterflies run at distance h = 1, 2, 4, ...
    """
    if block < LANES:
        h = 1
        while h < block:
            for start in range(first, first + count, 2 * h):
                for i in range(start, start + h):
                    a, b = x[i], x[i + h]
                    x[i], x[i + h] = a + b, a - b
            h *= 2
        return
    for i in range(first, first + count, LANES):
        store(x, i, butterflies(load(x, i)))
    h = LANES
    while 2 * h < block:  # two distances in one pass over memory
        for start in range(first, first + count, 4 * h):
            for i in range(start, start + h, LANES):
                a, b, c, d = load(x, i), load(x, i + h), load(x, i + 2 * h), load(x, i + 3 * h)
                a, b, c, d = a + b, a - b, c + d, c - d
                store(x, i, a + c)
                store(x, i + h, b + d)
                store(x, i + 2 * h, a - c)
                store(x, i + 3 * h, b - d)
        h *= 4
    if h < block:
        for start in range(first, first + count, 2 * h):
            for i in range(start, start + h, LANES):
                a, b = load(x, i), load(x, i + h)
                store(x, i, a + b)
                store(x, i + h, a - b)


@helper
def rotate(values, start, count, factor):
    """Apply the block Hadamard transform to values[start:start + count]; factor from `rotation_factor`."""
    hadamard_run(values, start, count, count & -count)
    for i in range(start, start + count, LANES):
        store(values, i, load(values, i) * splat(factor))


@helper
def rotation_factor(count):
    """Return what makes the transform of `count` elements orthonormal, 1 / sqrt(block)."""
    return np.float32(1 / np.sqrt(np.float64(count & -count)))


# ---------------------------------------------------------------------------------------------------------
# Second phase: codes. Whole vectors are written, up to 7 bytes beyond the group.
# ---------------------------------------------------------------------------------------------------------


@helper
def round_to_codes(values, start, count, scale, offset, top, codes, first):
    """AFFINE and SYMMETRIC: the nearest of the equally spaced values, ties to even."""
    s, o, zero, t = splat(scale), splat(offset), splat(_ZERO), splat(top)
    for i in range(0, count, LANES):
        code = (load(values, start + i) - o) / s
        store_codes(codes, first + i, minimum(maximum(code, zero), t))


@helper
def count_thresholds(values, start, count, scale, thresholds, guesses, scaled, indices, codes, first):
    """HADAMARD: the number of thresholds below the magnitude, up or down from the middle by the sign.

    With many thresholds a table says how many there are at least: guesses[m] for a magnitude of m / GRID
    scales or more, at most one too few. Scratch: scaled, float32 (thresholds + 1); indices, uint16 (padded
    group).
    """
    for k in range(thresholds.size):
        scaled[k] = thresholds[k] * scale
    if guesses.size == 0 or not scale > _SMALLEST_TO_DIVIDE_BY:
        _count_all(values, start, count, scaled, thresholds.size, codes, first)
    else:
        _count_from_guess(values, start, count, scale, scaled, guesses, indices, codes, first)


@helper
def _count_all(values, start, count, scaled, thresholds, codes, first):
    zero, i = splat(_ZERO), 0
    while i + 4 * LANES <= count:  # four vectors at a time share the loads and the steps of the loop
        at = start + i
        a, b = load(values, at), load(values, at + LANES)
        c, d = load(values, at + 2 * LANES), load(values, at + 3 * LANES)
        size_a, size_b, size_c, size_d = magnitude(a), magnitude(b), magnitude(c), magnitude(d)
        of_a, of_b, of_c, of_d = zero, zero, zero, zero
        for k in range(thresholds):
            threshold = splat(scaled[k])
            of_a, of_b = count_greater(of_a, size_a, threshold), count_greater(of_b, size_b, threshold)
            of_c, of_d = count_greater(of_c, size_c, threshold), count_greater(of_d, size_d, threshold)
        to = first + i
        store_mirrored(codes, to, of_a, a, thresholds + 1)
        store_mirrored(codes, to + LANES, of_b, b, thresholds + 1)
        store_mirrored(codes, to + 2 * LANES, of_c, c, thresholds + 1)
        store_mirrored(codes, to + 3 * LANES, of_d, d, thresholds + 1)
        i += 4 * LANES
    while i < count:
        y = load(values, start + i)
        counted = zero
        for k in range(thresholds):
            counted = count_greater(counted, magnitude(y), splat(scaled[k]))
        store_mirrored(codes, first + i, counted, y, thresholds + 1)
        i += LANES


@helper
def _count_from_guess(values, start, count, scale, scaled, guesses, indices, codes, first):
    levels = scaled.size  # of each sign: one more than thresholds
    scaled[levels - 1] = _INFINITY
    inverse, last = splat(np.float32(GRID) / scale), splat(np.float32(guesses.size - 1))
    for i in range(0, count, LANES):
        store_indices(indices, i, minimum(magnitude(load(values, start + i)) * inverse, last))
    y, out = values[start : start + count], codes[first : first + count]
    for i in range(count):
        guess = guesses[indices[i]]
        code = levels + guess + (abs(y[i]) > scaled[guess])
        out[i] = np.uint8(2 * levels - 1 - code if y[i] < 0 else code)


@helper
def round_to_ternary(values, start, count, scale, codes, first):
    """TERNARY: -1, 0 or 1 as int8, by comparison with half the scale."""
    border, minus = splat(scale * _HALF), splat(scale * -_HALF)
    for i in range(0, count, LANES):
        x = load(values, start + i)
        store_codes(codes, first + i, (x > border) - (minus > x))

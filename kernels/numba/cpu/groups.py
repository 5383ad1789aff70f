"""One group of a codec on the CPU: find the scale of its values, then turn values into codes.

The elements of a group share a scale and lie in a float32 buffer padded to whole vectors. The work has two
phases. The kernels of `codec` run the first phase over many groups before the second, so that the next group
hides the latency of a reduction. Between the phases `find_scales` of `words` turns ranges and magnitudes into
scales.
"""

import numpy as np

from .simd import (
    LANES,
    bits_of,
    butterflies,
    float_of_bits,
    helper,
    highest,
    larger_magnitude,
    load,
    lowest,
    maximum,
    minimum,
    splat,
    store,
    store_codes,
    total,
    zero_if_finite,
)
from .words import HADAMARD, TERNARY

_ZERO, _HALF = np.float32(0), np.float32(0.5)
_TERNARY_LEVEL = np.float32(1.2240064)


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
def _four_squares(values, start, down):
    """Sum the squares of vectors 0, 4, 8, 12 from start on by halves."""
    a, b = load(values, start) * down, load(values, start + 4 * LANES) * down
    c, d = load(values, start + 8 * LANES) * down, load(values, start + 12 * LANES) * down
    return (a * a + c * c) + (b * b + d * d)


@helper
def _sum_by_halves(values, start, count, down, squares):
    """Return the last vector of sums; `squares` is scratch."""
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
    return load(squares, 0)


@helper
def root_mean_square(values, start, count, largest, squares):
    """Return sqrt(mean of squares): summed by halves, after a division by a power of two near `largest`."""
    exponent = max(bits_of(largest) >> np.uint32(23), np.uint32(1))
    down = splat(float_of_bits(np.uint32((np.uint32(254) - exponent) << np.uint32(23))))
    if count == 16 * LANES:
        even = _four_squares(values, start, down) + _four_squares(values, start + 2 * LANES, down)
        odd = _four_squares(values, start + LANES, down) + _four_squares(values, start + 3 * LANES, down)
        sums = even + odd
    else:
        sums = _sum_by_halves(values, start, count, down, squares)
    mean = total(sums) / np.float32(count)
    return np.sqrt(mean) * float_of_bits(np.uint32(exponent << np.uint32(23)))


@helper
def hadamard_run(x, first, count, block):
    """Transform x[first:first + count], flat float32, in place by blocks, without the final 1 / sqrt(block).

    `block` is a power of two that divides `count`. Butterflies run at distance h = 1, 2, 4, ...
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
    h = LANES
    if block >= 4 * LANES:  # five distances in one pass over memory
        for i in range(first, first + count, 4 * LANES):
            a, b = butterflies(load(x, i)), butterflies(load(x, i + LANES))
            c, d = butterflies(load(x, i + 2 * LANES)), butterflies(load(x, i + 3 * LANES))
            a, b, c, d = a + b, a - b, c + d, c - d
            store(x, i, a + c)
            store(x, i + LANES, b + d)
            store(x, i + 2 * LANES, a - c)
            store(x, i + 3 * LANES, b - d)
        h = 4 * LANES
    else:
        for i in range(first, first + count, LANES):
            store(x, i, butterflies(load(x, i)))
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
def rotate(values, count, block, factor):
    """Apply the block Hadamard transform to values[:count]; factor from `rotation_factor`."""
    hadamard_run(values, 0, count, block)
    for i in range(0, count, LANES):
        store(values, i, load(values, i) * splat(factor))


@helper
def rotation_factor(count):
    """Return what makes the transform of `count` elements orthonormal, 1 / sqrt(block)."""
    return np.float32(1 / np.sqrt(np.float64(count & -count)))


@helper
def _count(k, of_row, group, rest):
    """Return the number of elements of group k; the last of a row has `rest`."""
    return rest if rest < group and k % of_row == of_row - 1 else group


@helper
def measure_squares(codec, values, stride, rows, n, group, squares, stats):
    """HADAMARD, TERNARY: put what the scales of groups are made of to stats[0], as `find_scales` wants it.

    Groups of rows of n values stand `stride` apart, their largest magnitudes in stats[1]; those of HADAMARD
    are then transformed, without the factor. All groups go through one step before the next, so that the end
    of a reduction is hidden behind the group after it.
    """
    of_row = (n + group - 1) // group
    rest = n - (of_row - 1) * group
    for k in range(rows * of_row):
        count = _count(k, of_row, group, rest)
        stats[0, k] = root_mean_square(values, k * stride, count, stats[1, k], squares)
        if codec == TERNARY:
            stats[0, k] *= _TERNARY_LEVEL
    if codec == HADAMARD and rest == group == stride:
        hadamard_run(values, 0, rows * n, group & -group)
    elif codec == HADAMARD:
        for k in range(rows * of_row):
            count = _count(k, of_row, group, rest)
            hadamard_run(values, k * stride, count, count & -count)


# ---------------------------------------------------------------------------------------------------------
# Second phase: codes (of a codebook: `units`). Whole vectors are written, up to 7 bytes beyond the group.
# ---------------------------------------------------------------------------------------------------------


@helper
def round_to_codes(values, start, count, scale, offset, top, codes, first):
    """AFFINE and SYMMETRIC: the nearest of the equally spaced values, ties to even."""
    s, o, zero, t = splat(scale), splat(offset), splat(_ZERO), splat(top)
    for i in range(0, count, LANES):
        code = (load(values, start + i) - o) / s
        store_codes(codes, first + i, minimum(maximum(code, zero), t))


@helper
def round_to_ternary(values, start, count, scale, codes, first):
    """TERNARY: -1, 0 or 1 as int8, by comparison with half the scale."""
    border, minus = splat(scale * _HALF), splat(scale * -_HALF)
    for i in range(0, count, LANES):
        x = load(values, start + i)
        store_codes(codes, first + i, (x > border) - (minus > x))

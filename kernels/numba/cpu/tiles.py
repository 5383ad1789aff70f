"""Tiles of keys and panels of query rows, for attention forward and backward on the CPU.

A panel is 24 query rows of one KV head, three vectors wide, laid out transposed so that a lane is a row:
(position, head of the group), heads fastest, so that the heads that read one KV head share its tiles. A tile
is up to 64 keys of one head, one after the other, widened to float32.

    queries[channel][24]   a panel;    tile[key][pitch]   keys or values;    scores[key][24]

Every product here is one loop, `multiply`, which keeps 4 x 24 sums in 12 registers and meets the elements of
its left side one by one, so nothing is ever transposed for it.
"""

import math

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from .elements import load_values
from .fragments import multiply_add
from .simd import (
    F32X8,
    I32X8,
    LANES,
    any_above,
    float32x8,
    helper,
    load,
    load_unaligned,
    magnitude,
    maximum,
    minimum,
    pointer_to,
    splat,
    store,
    store_unaligned,
    where,
)
from .softmax import exp2

PANEL = 24
"""Query rows that are computed together."""

PANELS = 8
"""Panels that share a tile of keys."""

KEYS = 64

CHUNK = 8
"""Products that are added one to the other in a score. A score may be much smaller than the sums on the way
to it; with 32 its error was up to four times that of a dot product in vectors."""

CHUNK_OF_ROUGH = 32
"""The same where `sharpen_softmax` computes large weights again, and for sums of weighted values."""

CHUNK_OF_STORED = 16
"""The same for scores of what a cache holds; decoding (`packed`) adds as many."""

LARGE_PART = np.float32(0.5)
"""In float32 a weight is large if, times the size of its score, it is above this part of the row's sum."""

LEAST_SIZE, LEAST_CAPPED, LARGEST_SIZE = np.float32(4), np.float32(16), np.float32(31)
"""Bounds of what counts as the size of a score, in units of log 2. A capped score hides its own. With the
largest, 64 equal keys of a tile are not large: in float32 all have the same error, which cancels unless some
lose it."""

NEAR = np.float32(2.0**-4)
"""Keys are near the first one where none is farther from it than this share of it. What their scores have in
common cancels in dq, errors of float32 do not, and lse has it whole: so all their weights count as large."""

NONE_NEAR, SOME_NEAR, ALL_EQUAL = range(3)
"""What `rows_near` finds: equal keys have one score, which is computed once for a tile."""

LOWEST = np.float32(-1e30)
"""A row_max before any key; finite, so that -inf - row_max is never NaN."""

MINUS_INFINITY = np.float32(-np.inf)
_LARGEST_EXPONENT, _LOG_2 = 64.0, math.log(2)
_ZERO, _ONE, _TWO = np.float32(0), np.float32(1), np.float32(2)

# tanh(x) = x + x^3 P(x^2) for |x| <= 0.625, the polynomial of the Cephes library.
_TANH = tuple(map(np.float32, (-5.70498872745e-3, 2.06390887954e-2, -5.37397155531e-2, 1.33314422036e-1)))
_TANH_LAST, _TANH_SMALL = np.float32(-3.33332819422e-1), np.float32(0.625)
_TANH_RATE, _TANH_LARGEST = np.float32(2 * math.log2(math.e)), np.float32(40)
_TANH_IS_ONE = np.float32(10)


@intrinsic
def fused(typing_context, a, b, c):
    """Return a * b + c, rounded once where the machine can."""

    def generate(context, builder, signature, arguments):
        return multiply_add(builder, *arguments)

    return float32x8(float32x8, float32x8, float32x8), generate


@intrinsic
def _spread(typing_context, array, index):
    """Return eight copies of array[index], of float32."""

    def generate(context, builder, signature, arguments):
        kind = ir.FloatType()
        one = builder.load(pointer_to(context, builder, signature.args[0], *arguments, kind))
        lane = builder.insert_element(ir.Constant(F32X8, ir.Undefined), one, ir.Constant(ir.IntType(32), 0))
        return builder.shuffle_vector(lane, lane, ir.Constant(I32X8, [0] * LANES))

    return float32x8(array, types.intp), generate


@helper
def _add(c, at, factor, x):
    store(c, at, fused(load(c, at), factor, x))


@helper
def multiply(a, row_step, step, b, depth, chunk, c, rows, rescale, fresh):
    """c = a @ b if fresh, else c * rescale + a @ b; b (depth, PANEL), c (rows, PANEL), rows a multiple of 4.

    Element (i, k) of a is a[i * row_step + k * step]. rescale (PANEL,) is a factor of each column. Sums of
    `chunk` products are added up, which loses less than adding one product after the other.
    """
    one, chunks = splat(_ONE), (depth + chunk - 1) // chunk
    for part in range(rows // 4 * chunks):
        row, begin = part // chunks * 4, part % chunks * chunk
        first = row * row_step
        x00 = x01 = x02 = x10 = x11 = x12 = splat(_ZERO)
        x20 = x21 = x22 = x30 = x31 = x32 = splat(_ZERO)
        for k in range(begin, min(begin + chunk, depth)):
            y0, y1, y2 = load(b, k * PANEL), load(b, k * PANEL + 8), load(b, k * PANEL + 16)
            own = first + k * step
            z = _spread(a, own)
            x00, x01, x02 = fused(z, y0, x00), fused(z, y1, x01), fused(z, y2, x02)
            z = _spread(a, own + row_step)
            x10, x11, x12 = fused(z, y0, x10), fused(z, y1, x11), fused(z, y2, x12)
            z = _spread(a, own + 2 * row_step)
            x20, x21, x22 = fused(z, y0, x20), fused(z, y1, x21), fused(z, y2, x22)
            z = _spread(a, own + 3 * row_step)
            x30, x31, x32 = fused(z, y0, x30), fused(z, y1, x31), fused(z, y2, x32)
        at = row * PANEL
        if fresh and begin == 0:
            store(c, at, x00)
            store(c, at + 8, x01)
            store(c, at + 16, x02)
            store(c, at + 24, x10)
            store(c, at + 32, x11)
            store(c, at + 40, x12)
            store(c, at + 48, x20)
            store(c, at + 56, x21)
            store(c, at + 64, x22)
            store(c, at + 72, x30)
            store(c, at + 80, x31)
            store(c, at + 88, x32)
        else:
            s0 = load(rescale, 0) if begin == 0 else one
            s1 = load(rescale, 8) if begin == 0 else one
            s2 = load(rescale, 16) if begin == 0 else one
            _add(c, at, s0, x00)
            _add(c, at + 8, s1, x01)
            _add(c, at + 16, s2, x02)
            _add(c, at + 24, s0, x10)
            _add(c, at + 32, s1, x11)
            _add(c, at + 40, s2, x12)
            _add(c, at + 48, s0, x20)
            _add(c, at + 56, s1, x21)
            _add(c, at + 64, s2, x22)
            _add(c, at + 72, s0, x30)
            _add(c, at + 80, s1, x31)
            _add(c, at + 88, s2, x32)


@helper
def _one_less_tanh(x):
    """1 - tanh |x|, small numbers as exact as others."""
    growth = exp2(minimum(splat(_TANH_LARGEST), magnitude(x)) * splat(_TANH_RATE))
    return splat(_TWO) / (growth + splat(_ONE))


@helper
def _tanh(x):
    square = x * x
    polynomial = splat(_TANH[0])
    for coefficient in _TANH[1:]:
        polynomial = fused(polynomial, square, splat(coefficient))
    polynomial = fused(polynomial, square, splat(_TANH_LAST))
    small = fused(polynomial * square, x, x)
    large = splat(_ONE) - _one_less_tanh(x)
    large = where(splat(_ZERO) > x, splat(_ZERO) - large, large)
    return where(magnitude(x) > splat(_TANH_SMALL), large, small)


@helper
def cap(scores, keys, rate, softcap):
    """scores = softcap * tanh(rate * scores)."""
    for i in range(0, keys * PANEL, LANES):
        store(scores, i, splat(softcap) * _tanh(splat(rate) * load(scores, i)))


@helper
def cap_and_bend(scores, keys, rate, softcap, bends):
    """Do what `cap` does; bends = 1 - tanh(rate * scores)^2, what a capped score grows by when a score does.

    A capped score near softcap does not hold this difference any more. Where a tanh is 1 in float32 it is 0.
    """
    for i in range(0, keys * PANEL, LANES):
        x = splat(rate) * load(scores, i)
        less = _one_less_tanh(x)
        bend = less * (splat(_TWO) - less)
        store(bends, i, where(magnitude(x) > splat(_TANH_IS_ONE), splat(_ZERO), bend))
        store(scores, i, splat(softcap) * _tanh(x))


@helper
def apply_mask(scores, keys, first, last):
    """Hide the keys before `first` and after `last` (PANEL,) of each row, counted within the tile."""
    hidden = splat(MINUS_INFINITY)
    for lane in range(0, PANEL, LANES):
        low, high = load(first, lane), load(last, lane)
        for j in range(keys):
            key, at = splat(np.float32(j)), j * PANEL + lane
            store(scores, at, where((low > key) + (key > high), hidden, load(scores, at)))


@helper
def update_softmax(scores, keys, scale_log2, row_max, row_sum, rescale, peak):
    """Turn scores into weights exp2(scale_log2 * score - row_max), raise row_max; older sums times `rescale`.

    row_max is a rounded product with scale_log2: all that is relative to it is relative to one number.
    keys is a multiple of 4. peak (PANEL,), if not empty, receives the largest weight of each row.
    """
    for lane in range(0, PANEL, LANES):
        best = load(scores, lane)
        for j in range(1, keys):
            best = maximum(load(scores, j * PANEL + lane), best)
        before = load(row_max, lane)
        new_max = maximum(best * splat(scale_log2), before)
        below = splat(_ZERO) - new_max
        if peak.size:
            store(peak, lane, exp2(fused(best, splat(scale_log2), below)))
        lost = exp2(before - new_max)
        total = load(row_sum, lane) * lost
        for first in range(0, keys, 4):
            part = splat(_ZERO)
            for j in range(first, first + 4):
                weight = exp2(fused(load(scores, j * PANEL + lane), splat(scale_log2), below))
                part = part + weight
                store(scores, j * PANEL + lane, weight)
            total = total + part
        store(row_max, lane, new_max)
        store(row_sum, lane, total)
        store(rescale, lane, lost)


@intrinsic
def _add_products(typing_context, row, first, panel, lane, depth, sums):
    """sums (8,) = row[first + k] * panel[k * PANEL + lane + i], summed over k < depth in float64.

    Two sums, of even k and of odd ones, so that an addition does not wait for the one before.
    """

    def generate(context, builder, signature, arguments):
        row, first, panel, lane, depth, sums = arguments
        row_type, _, panel_type, _, _, sums_type = signature.args
        vector, one = ir.VectorType(ir.DoubleType(), LANES), depth.type(1)
        kind = ir.FunctionType(vector, [vector] * 3)
        multiply_double = builder.module.declare_intrinsic("llvm.fmuladd.v8f64", (), kind)
        totals = [cgutils.alloca_once_value(builder, ir.Constant(vector, [0.0] * LANES)) for _ in range(2)]

        def add(k, total):
            source = pointer_to(context, builder, row_type, row, builder.add(first, k), ir.FloatType())
            factor = builder.fpext(builder.load(source), ir.DoubleType())
            factor = builder.insert_element(ir.Constant(vector, ir.Undefined), factor, ir.IntType(32)(0))
            factor = builder.shuffle_vector(factor, factor, ir.Constant(I32X8, [0] * LANES))
            at = builder.add(builder.mul(k, k.type(PANEL)), lane)
            of_rows = load_unaligned(builder, pointer_to(context, builder, panel_type, panel, at, F32X8))
            operands = [factor, builder.fpext(of_rows, vector), builder.load(total)]
            builder.store(builder.call(multiply_double, operands), total)

        with cgutils.for_range(builder, builder.lshr(depth, one)) as loop:
            even = builder.shl(loop.index, one)
            add(even, totals[0])
            add(builder.or_(even, one), totals[1])
        with builder.if_then(builder.trunc(depth, ir.IntType(1))):
            add(builder.sub(depth, one), totals[0])
        target = pointer_to(context, builder, sums_type, sums, ir.IntType(64)(0), vector)
        store_unaligned(builder, builder.fadd(*map(builder.load, totals)), target)
        return context.get_dummy_value()

    return types.void(row, types.intp, panel, types.intp, types.intp, sums), generate


@helper
def large_share(size, softcap):
    """The part of a row's weight above which a weight is large; size: that of the row's scores, in log 2."""
    size = maximum(magnitude(size), splat(LEAST_CAPPED if softcap > 0 else LEAST_SIZE))
    return splat(LARGE_PART) / minimum(size, splat(LARGEST_SIZE))


@helper
def count_within(x32, seq, head, distance):
    """How many float32 keys, from the first of a sequence on, are no farther from it than this part of it."""
    one, whole = x32[seq[0], seq[3], head], x32.shape[3] // LANES * LANES
    for key in range(1, seq[4]):
        other = x32[seq[0], seq[3] + key, head]
        for channel in range(0, whole, LANES):
            x = load(one, channel)
            if any_above(magnitude(load(other, channel) - x), splat(distance) * magnitude(x)):
                return key
        for channel in range(whole, x32.shape[3]):
            if abs(other[channel] - one[channel]) > distance * abs(one[channel]):
                return key
    return seq[4]


@helper
def count_near(x32, seq, head):
    """How many float32 keys, from the first of a sequence on, lie near it, and how many are equal to it.

    None if the first is 0: what scores of zeros have in common is exact.
    """
    if not seq[4] or not np.any(x32[seq[0], seq[3], head]):
        return 0, 0
    near = count_within(x32, seq, head, NEAR)
    return near, count_within(x32, seq, head, _ZERO) if near > 1 else near


@helper
def rows_near(seq, group, row, rows, right, limits, counts, near):
    """near (PANEL,) = 1 for rows that see none but the first keys, which are near, else 0.

    counts: how many are near, and how many equal, as `count_near` returns them. Returns NONE_NEAR, or
    ALL_EQUAL if no row of the panel sees another key than those that are equal, or SOME_NEAR. `near` follows
    from a row and the keys alone, whatever rows stand beside it. limits may be empty.
    """
    last = 0
    for lane in range(PANEL):
        position = min(row + lane, rows - 1) // group
        last = min(position + seq[4] - seq[2] + right + 1, seq[4])
        if limits.size:
            last = limits[seq[1] + position]
        near[lane] = last <= counts[0]
        if lane == 0 and last > counts[0]:
            return NONE_NEAR  # later rows see no fewer keys
    return ALL_EQUAL if last <= counts[1] else SOME_NEAR


@helper
def sharpen(
    weight, limit, tile, first, queries, lane, channels, factor, rate, softcap, above, unit, near, bends, at,
    sums, exponents,
):  # fmt: skip
    """Return weights above `limit` anew, exp2(unit * (factor * score - above)) with a score in float64.

    A score of 40 in float32 is off by some 4e-6, and so is its weight, relatively: where few keys have all
    the weight of a row, more than out may be. `first` is where the key begins in its tile, `lane` the first
    of eight rows of a panel, above (PANEL,). Of rows that are `near`, which may be empty, bends[at:] is made
    anew, what `cap_and_bend` gives. sums (8,) float64 and exponents (8,) float32 are scratch.
    """
    _add_products(tile, first, queries, lane, channels, sums)
    for i in range(LANES):
        score = sums[i]
        if softcap > 0:
            capped = math.tanh(rate * score)
            score = softcap * capped
            if near.size and near[lane + i] > 0:
                bends[at + i] = (1 - capped) * (1 + capped)
        exponents[i] = min(unit * (factor * score - above[lane + i]), _LARGEST_EXPONENT)
    return where(weight > limit, exp2(load(exponents, 0)), weight)


@helper
def _sharpen_equal(
    scores, keys, tile, queries, lane, channels, scale_log2, rate, softcap, row_max, row_sum, exact_sums,
    sums, exponents,
):  # fmt: skip
    """Do what `sharpen_softmax` does for eight rows that see none but equal keys: one weight for all."""
    zero, one = splat(_ZERO), splat(_ONE)
    sharp = sharpen(
        one, zero, tile, 0, queries, lane, channels, scale_log2, rate, softcap, row_max, _ONE, row_max[:0],
        exponents, 0, sums, exponents,
    )  # fmt: skip
    gain = count = zero
    for at in range(lane, keys * PANEL, PANEL):
        weight = load(scores, at)
        seen = weight > zero
        count = count + seen
        gain = gain + where(seen, sharp - weight, zero)
        store(scores, at, where(seen, sharp, weight))
    store(row_sum, lane, load(row_sum, lane) + gain)
    for i in range(LANES):
        sums[i] = math.exp(exponents[i] * _LOG_2)
    store(exponents, 0, count)
    for i in range(LANES):
        exact_sums[0, lane + i] += sums[i] * exponents[i]
        sums[i] = exponents[i]
    store(exponents, 0, sharp)
    for i in range(LANES):
        exact_sums[1, lane + i] += sums[i] * exponents[i]


@helper
def sharpen_softmax(
    scores, keys, tile, pitch, queries, channels, scale_log2, rate, softcap, near, equal, row_max, row_sum,
    rescale, peak, exact_sums, sums, exponents,
):  # fmt: skip
    """Compute large weights again, from scores in float64; of rows that are `near` all, and sums of them.

    Call it after `update_softmax`. near may be empty; equal: no row sees other keys than equal ones.
    exact_sums (2, PANEL) float64: of weights, and of those that are rounded to float32.
    """
    for lane in range(0, PANEL, LANES):
        before, gain = load(row_sum, lane), splat(_ZERO)
        limit = before * large_share(load(row_max, lane), softcap)
        if near.size:
            limit = where(load(near, lane), splat(_ZERO), limit)
            for i in range(LANES):
                exact_sums[0, lane + i] *= rescale[lane + i]
                exact_sums[1, lane + i] *= rescale[lane + i]
        if not any_above(load(peak, lane), limit):
            continue
        if equal:
            _sharpen_equal(
                scores, keys, tile, queries, lane, channels, scale_log2, rate, softcap, row_max, row_sum,
                exact_sums, sums, exponents,
            )  # fmt: skip
            continue
        for at in range(lane, keys * PANEL, PANEL):
            weight = load(scores, at)
            if any_above(weight, limit):
                sharp = sharpen(
                    weight, limit, tile, at // PANEL * pitch, queries, lane, channels, scale_log2, rate,
                    softcap, row_max, _ONE, near[:0], exponents, 0, sums, exponents,
                )  # fmt: skip
                store(scores, at, sharp)
                gain = gain + (sharp - weight)
                for i in range(LANES if near.size else 0):
                    if near[lane + i] > 0 and scores[at + i] > 0:
                        exact_sums[0, lane + i] += math.exp(exponents[i] * _LOG_2)
                        exact_sums[1, lane + i] += scores[at + i]
        store(row_sum, lane, before + gain)


@helper
def read_panel(x16, x32, dtype, seq, head, group, row, rows, sign, line, queries):
    """queries (channels, PANEL) = sign * q of the rows from `row` on; 0 beyond the last of `rows`."""
    channels = x16.shape[3] + x32.shape[3]
    for lane in range(PANEL):
        if row + lane < rows:
            position, own = seq[1] + (row + lane) // group, head * group + (row + lane) % group
            load_values(x16[seq[0], position, own], x32[seq[0], position, own], dtype, 0, channels, line, 0)
            for channel in range(line.size):
                queries[channel * PANEL + lane] = sign * line[channel]
        else:
            for channel in range(line.size):
                queries[channel * PANEL + lane] = 0


@helper
def read_tile(x16, x32, dtype, seq, head, key, keys, pitch, tile):
    """tile (KEYS, pitch) = the rows of `keys` keys from `key` on; zeros up to the next multiple of 4."""
    channels = x16.shape[3] + x32.shape[3]
    for j in range(keys):
        at = seq[3] + key + j
        load_values(x16[seq[0], at, head], x32[seq[0], at, head], dtype, 0, channels, tile, j * pitch)
    for i in range(keys * pitch, (keys + 3) // 4 * 4 * pitch):
        tile[i] = 0


@helper
def mask_of(seq, group, row, rows, key, left, right, first, last):
    """first, last (PANEL,): which keys of the tile at `key` each row sees; whether any is hidden."""
    behind = seq[4] - seq[2]
    some = False
    for lane in range(PANEL):
        position = min(row + lane, rows - 1) // group + behind
        low = max(position - left, 0) - key
        high = min(position + right, seq[4] - 1) - key
        first[lane], last[lane] = max(0, min(low, KEYS)), max(-1, min(high, KEYS))
        some |= low > 0 or high < KEYS - 1
    return some


def array_type(element, dimensions, readonly=True):
    return types.Array(element, dimensions, "A", readonly=readonly, aligned=False)


# Compiled once for all strides: an array of any layout fits "A".
READ = types.Tuple((array_type(types.uint16, 4), array_type(types.float32, 4)))
WRITE = types.Tuple((array_type(types.uint16, 4, False), array_type(types.float32, 4, False)))

"""Codes of a codebook on the CPU: count the borders at or below a value.

A value is the product y r (kvlab/reference/codec.py). Borders are whole numbers, so floor(y r) decides. One
fused multiply-add rounds y r to the nearest integer; the sign of a second one says whether y r lies below it.
Codes of up to 4 bits have borders up to 127: bytes compare 32 values with each border at a time, and larger
integers saturate. Codes of more bits come from a table with the code of every integer.

Scales far from 1, and processors without these operations, use float64, which holds the product exactly.
"""

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic, models, register_model

from .groups import rotation_factor
from .simd import (
    F32X8,
    I32X8,
    LANES,
    float32x8,
    helper,
    load,
    load_unaligned,
    pointer_to,
    splat,
    splat_i32,
    store_unaligned,
)

COUNTED = 1, 3, 7
"""Numbers of positive borders that are counted."""

STEP = 32
"""Values whose borders are counted together; rows are read and written in whole steps."""

_I32 = ir.IntType(32)
_I8X32 = ir.VectorType(ir.IntType(8), STEP)
_ROUNDER, _ROUNDER_BITS = 12582912.0, 0x4B400000  # 3 2**22: no bits are left for a fraction
_ZERO, _ONE = np.float32(0), np.float32(1)

# Scales between which no inverse, sum or grown product of up to _LONG elements is beyond float32.
_SMALL, _LARGE, _LONG = np.float32(2.0**-66), np.float32(2.0**66), 2**20
# Above _FINE the inverse is less than 1, and times the growth more than 1 again: no product underflows.
_FINE, _GROWTH = np.float32(2.0**-10), np.float32(2.0**80)
_RAISE = np.float32(2.0**60)
"""What a scale below _SMALL is multiplied by, and its values, before the inverse is taken."""


class Int8x32(types.Type):
    """Numba type of 32 small integers."""

    def __init__(self):
        super().__init__(name="int8x32")


int8x32 = Int8x32()


@register_model(Int8x32)
class _Int8x32Model(models.PrimitiveModel):
    def __init__(self, manager, numba_type):
        super().__init__(manager, numba_type, _I8X32)


@intrinsic
def fuses(typing_context):
    """Say whether this processor multiplies and adds eight values with one rounding; known when compiling."""

    def generate(context, builder, signature, arguments):
        machine, _, features = context.codegen().magic_tuple()
        fused = machine.startswith(("aarch64", "arm64")) or "+fma" in features.split(",")
        return context.get_constant(types.boolean, fused)

    return types.boolean(), generate


def _emit_floor(builder, y, r, grown, minus_growth):
    """Emit the integers below the products, exactly, where they are less than 2**22 in magnitude.

    What a product lies above or below the nearest integer is found times a power of two, which keeps a
    difference of 0 for products that are integers: `grown` is r times it.
    """
    fma = builder.module.declare_intrinsic("llvm.fma.v8f32", (), ir.FunctionType(F32X8, [F32X8] * 3))
    rounder = ir.Constant(F32X8, [_ROUNDER] * LANES)
    raised = builder.call(fma, [y, r, rounder])
    nearest = builder.fsub(raised, rounder)
    beyond = builder.call(fma, [y, grown, builder.fmul(nearest, minus_growth)])
    below = builder.fcmp_ordered("<", beyond, ir.Constant(F32X8, [0.0] * LANES))
    integer = builder.sub(builder.bitcast(raised, I32X8), splat_i32(_ROUNDER_BITS))
    return builder.add(integer, builder.sext(below, I32X8))


def _emit_join(builder, a, b):
    """Emit one vector of the elements of two."""
    lanes = ir.Constant(ir.VectorType(_I32, 2 * a.type.count), list(range(2 * a.type.count)))
    return builder.shuffle_vector(a, b, lanes)


def _emit_saturated(builder, value, bits):
    """Emit the elements as integers of `bits` bits, those beyond as the nearest of them."""
    of = value.type
    for relation, limit in ((">", 2 ** (bits - 1) - 1), ("<", -(2 ** (bits - 1)))):
        end = ir.Constant(of, [limit] * of.count)
        value = builder.select(builder.icmp_signed(relation, value, end), end, value)
    return builder.trunc(value, ir.VectorType(ir.IntType(bits), of.count))


def _emit_packed(builder, a, b, bits):
    """Emit the saturated elements of two vectors as AVX2 packs them: 128 bits of a, of b, of a, of b."""
    both = _emit_saturated(builder, _emit_join(builder, a, b), bits)
    words = builder.bitcast(both, ir.VectorType(ir.IntType(64), 4))
    order = ir.Constant(ir.VectorType(_I32, 4), [0, 2, 1, 3])
    return builder.bitcast(builder.shuffle_vector(words, words, order), both.type)


@intrinsic
def floors(typing_context, a, b, c, d, r, grown, minus_growth):
    """Return the integers below 32 products, saturated to bytes."""

    def generate(context, builder, signature, arguments):
        a, b, c, d = (_emit_floor(builder, y, *arguments[4:]) for y in arguments[:4])
        low, high = _emit_packed(builder, a, b, 16), _emit_packed(builder, c, d, 16)
        scattered = builder.bitcast(_emit_packed(builder, low, high, 8), I32X8)
        order = ir.Constant(I32X8, [0, 4, 1, 5, 2, 6, 3, 7])
        return builder.bitcast(builder.shuffle_vector(scattered, scattered, order), _I8X32)

    return int8x32(*[float32x8] * 7), generate


@intrinsic
def mirrored(typing_context, value):
    """Return integers from 0 and, for those below, what is as far from -1: -1 becomes 0, -2 becomes 1."""

    def generate(context, builder, signature, arguments):
        sign = builder.ashr(arguments[0], ir.Constant(_I8X32, [7] * STEP))
        return builder.xor(arguments[0], sign)

    return int8x32(int8x32), generate


@intrinsic
def same_bytes(typing_context, value):
    """Return 32 copies of an int8."""

    def generate(context, builder, signature, arguments):
        one = builder.insert_element(ir.Constant(_I8X32, ir.Undefined), arguments[0], _I32(0))
        return builder.shuffle_vector(one, one, ir.Constant(ir.VectorType(_I32, STEP), [0] * STEP))

    return int8x32(types.int8), generate


def _make_count(rows):
    """Return an intrinsic (start, row, value) -> start less how many of `rows` rows are above value."""

    @intrinsic
    def count_down(typing_context, start, row, value):
        def generate(context, builder, signature, arguments):
            count, row, value = arguments
            zero = ir.Constant(ir.IntType(64), 0)
            first = pointer_to(context, builder, signature.args[1], row, zero, _I8X32)
            for k in range(rows):
                borders = load_unaligned(builder, builder.gep(first, [_I32(k)]))
                above = builder.icmp_signed(">", borders, value)
                count = builder.add(count, builder.sext(above, _I8X32))
            return count

        return int8x32(int8x32, row, int8x32), generate

    return count_down


_less_above_1, _less_above_3, _less_above_7 = map(_make_count, COUNTED)


@intrinsic
def store_mirrored(typing_context, row, index, upper, value, top):
    """Write 32 codes: upper, or what it is to the highest code, top - upper, where value < 0."""

    def generate(context, builder, signature, arguments):
        row, index, upper, value, top = arguments
        sign = builder.ashr(value, ir.Constant(_I8X32, [7] * STEP))
        pointer = pointer_to(context, builder, signature.args[0], row, index, _I8X32)
        store_unaligned(builder, builder.xor(upper, builder.and_(sign, top)), pointer)
        return context.get_dummy_value()

    return types.void(row, types.intp, int8x32, int8x32, int8x32), generate


@intrinsic
def store_indices(typing_context, row, index, a, b, r, grown, minus_growth, limit):
    """Write the integers below 16 products plus limit, as uint16 from 0 to 2 limit - 1."""

    def generate(context, builder, signature, arguments):
        row, index, a, b, *inverse, limit = arguments
        both = _emit_join(builder, _emit_floor(builder, a, *inverse), _emit_floor(builder, b, *inverse))
        value = _emit_saturated(builder, both, 16)
        one = builder.insert_element(ir.Constant(value.type, ir.Undefined), limit, _I32(0))
        limits = builder.shuffle_vector(
            one, one, ir.Constant(ir.VectorType(_I32, 2 * LANES), [0] * 2 * LANES)
        )
        last = builder.sub(limits, ir.Constant(value.type, [1] * 2 * LANES))
        value = builder.select(builder.icmp_signed("<", value, last), value, last)
        value = builder.add(value, limits)
        zero = ir.Constant(value.type, [0] * 2 * LANES)
        value = builder.select(builder.icmp_signed(">", value, zero), value, zero)
        store_unaligned(
            builder, value, pointer_to(context, builder, signature.args[0], row, index, value.type)
        )
        return context.get_dummy_value()

    return types.void(row, types.intp, *[float32x8] * 5, types.int16), generate


@intrinsic
def store_entries(typing_context, row, index, table, indices, first):
    """Write the entries of a table of bytes at eight indices; as one word, since stores are what is short."""

    def generate(context, builder, signature, arguments):
        row, index, table, indices, first = arguments
        word = ir.IntType(64)
        entries = context.make_array(signature.args[2])(context, builder, table).data
        source = pointer_to(context, builder, signature.args[3], indices, first, ir.IntType(16))
        result = ir.Constant(word, 0)
        for lane in range(LANES):
            number = builder.zext(builder.load(builder.gep(source, [_I32(lane)])), word)
            entry = builder.zext(builder.load(builder.gep(entries, [number])), word)
            result = builder.or_(result, builder.shl(entry, ir.Constant(word, 8 * lane)))
        target = pointer_to(context, builder, signature.args[0], row, index, word)
        store_unaligned(builder, result, target)
        return context.get_dummy_value()

    return types.void(row, types.intp, table, indices, types.intp), generate


@helper
def count_borders(values, stride, rows, n, group, scales, unit, borders, table, indices, codes):
    """HADAMARD: the codes of rows of n sums of butterflies, in groups that stand `stride` apart in values.

    A call takes many groups, since handing over so many arrays costs as much as 32 values do.

    scales : float32, of each group; unit : float32, of the codebook
    borders : int8 (positive borders, 32), each in a row of its own; empty if they are too many
    table : uint8 (2 limit), the code of every integer from -limit on
    indices : uint16 (padded group), scratch
    """
    factor, k = unit * rotation_factor(group), 0
    for row in range(rows):
        for first in range(0, n, group):
            count, to, of_group = min(group, n - first), row * n + first, factor
            if count < group:
                of_group = unit * rotation_factor(count)
            scale, start = scales[k], k * stride
            k += 1
            if fuses() and (scale == _ZERO or (_SMALL <= scale <= _LARGE)) and count <= _LONG:
                r = of_group / scale if scale > _ZERO else _ZERO
                growth = _GROWTH if scale > _FINE else _ONE
                if borders.size > 0:
                    _count(values, start, count, r, growth, borders, codes, to)
                else:
                    _look_up(values, start, count, r, growth, table, indices, codes, to)
            else:
                look_up_in_float64(values, start, count, scale, of_group, table, codes, to)


@helper
def _count(values, start, count, r, growth, borders, codes, first):
    positive = borders.size // STEP
    highest = same_bytes(np.int8(2 * positive + 1))
    inverse, grown, minus_growth = splat(r), splat(r * growth), splat(-growth)
    for i in range(0, count, STEP):
        at = start + i
        a, b = load(values, at), load(values, at + LANES)
        c, d = load(values, at + 2 * LANES), load(values, at + 3 * LANES)
        value = floors(a, b, c, d, inverse, grown, minus_growth)
        size = mirrored(value)
        if positive == 1:
            upper = _less_above_1(highest, borders, size)
        elif positive == 3:
            upper = _less_above_3(highest, borders, size)
        else:
            upper = _less_above_7(highest, borders, size)
        store_mirrored(codes, first + i, upper, value, highest)


@helper
def _look_up(values, start, count, r, growth, table, indices, codes, first):
    limit = np.int16(table.size // 2)
    inverse, grown, minus_growth = splat(r), splat(r * growth), splat(-growth)
    for i in range(0, count, 2 * LANES):
        a, b = load(values, start + i), load(values, start + i + LANES)
        store_indices(indices, i, a, b, inverse, grown, minus_growth, limit)
    for i in range(0, count, LANES):
        store_entries(codes, first + i, table, indices, i)


@helper
def look_up_in_float64(values, start, count, scale, unit, table, codes, first):
    limit = table.size // 2
    factor = _RAISE if scale < _SMALL else _ONE
    r = np.float64(unit / (scale * factor) if scale > _ZERO else _ZERO)
    for i in range(count):
        product = np.float64(values[start + i] * factor) * r
        number = np.int64(0)
        if product >= limit:
            number = limit - 1
        elif product < -limit:
            number = -limit
        elif product == product:
            number = np.int64(np.floor(product))
        codes[first + i] = table[np.uint64(number + limit)]

"""Rows of float64 in vector code, for the few sums that must not lose what float32 does.

Loops of Numba over mixed types are not made vector code. Rows are contiguous; lengths are multiples of 8, but
for `hadamard64`. Nothing checks an index.
"""

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from .simd import F32X8, I32X8, LANES, helper, load_unaligned, pointer_to, store_unaligned

_DOUBLE = ir.DoubleType()
_F64X8 = ir.VectorType(_DOUBLE, LANES)


def _load_wide(builder, pointer):
    """Load eight floats as doubles."""
    return builder.fpext(load_unaligned(builder, pointer), _F64X8)


@intrinsic
def dot(typing_context, x, y, first, count):
    """Return <x, y[first:first + count]>, x float64, y float32."""

    def generate(context, builder, signature, arguments):
        x, y, first, count = arguments
        total = cgutils.alloca_once_value(builder, ir.Constant(_F64X8, [0.0] * LANES))
        with cgutils.for_range(builder, builder.lshr(count, count.type(3))) as loop:
            at = builder.shl(loop.index, count.type(3))
            own = pointer_to(context, builder, signature.args[0], x, at, _F64X8)
            other = pointer_to(context, builder, signature.args[1], y, builder.add(first, at), F32X8)
            product = builder.fmul(load_unaligned(builder, own), _load_wide(builder, other))
            builder.store(builder.fadd(builder.load(total), product), total)
        lanes, found = builder.load(total), ir.Constant(_DOUBLE, 0.0)
        for lane in range(LANES):
            found = builder.fadd(found, builder.extract_element(lanes, ir.IntType(32)(lane)))
        return found

    return types.float64(x, y, types.intp, types.intp), generate


@intrinsic
def add_scaled(typing_context, x, factor, y):
    """x += factor * y, x and factor float64, y float32."""

    def generate(context, builder, signature, arguments):
        x, factor, y = arguments
        one = builder.insert_element(ir.Constant(_F64X8, ir.Undefined), factor, ir.IntType(32)(0))
        factors = builder.shuffle_vector(one, one, ir.Constant(I32X8, [0] * LANES))
        count = builder.extract_value(context.make_array(signature.args[0])(context, builder, x).shape, 0)
        with cgutils.for_range(builder, builder.lshr(count, count.type(3))) as loop:
            at = builder.shl(loop.index, count.type(3))
            own = pointer_to(context, builder, signature.args[0], x, at, _F64X8)
            other = pointer_to(context, builder, signature.args[2], y, at, F32X8)
            product = builder.fmul(factors, _load_wide(builder, other))
            store_unaligned(builder, builder.fadd(load_unaligned(builder, own), product), own)
        return context.get_dummy_value()

    return types.void(x, types.float64, y), generate


@intrinsic
def _butterflies(typing_context, x, first):
    """Do what `butterflies` of `simd` does to x[first:first + 8] in place."""

    def generate(context, builder, signature, arguments):
        pointer = pointer_to(context, builder, signature.args[0], *arguments, _F64X8)
        value = load_unaligned(builder, pointer)
        for h in (1, 2, 4):
            partner = builder.shuffle_vector(value, value, ir.Constant(I32X8, [k ^ h for k in range(LANES)]))
            signs = ir.Constant(_F64X8, [-1.0 if k & h else 1.0 for k in range(LANES)])
            value = builder.fadd(builder.fmul(value, signs), partner)
        store_unaligned(builder, value, pointer)
        return context.get_dummy_value()

    return types.void(x, types.intp), generate


@intrinsic
def _butterfly(typing_context, x, first, second):
    """x[first:first + 8], x[second:second + 8] = their sum and difference."""

    def generate(context, builder, signature, arguments):
        x, first, second = arguments
        low, high = (pointer_to(context, builder, signature.args[0], x, at, _F64X8) for at in (first, second))
        a, b = load_unaligned(builder, low), load_unaligned(builder, high)
        store_unaligned(builder, builder.fadd(a, b), low)
        store_unaligned(builder, builder.fsub(a, b), high)
        return context.get_dummy_value()

    return types.void(x, types.intp, types.intp), generate


@helper
def hadamard64(x, block):
    """`hadamard_run` of `groups` over all of x, float64."""
    h = 1
    if block >= LANES:
        for first in range(0, x.size, LANES):
            _butterflies(x, first)
        h = LANES
    while h < block:
        for start in range(0, x.size, 2 * h):
            if h >= LANES:
                for i in range(start, start + h, LANES):
                    _butterfly(x, i, i + h)
            else:
                for i in range(start, start + h):
                    a, b = x[i], x[i + h]
                    x[i], x[i + h] = a + b, a - b
        h *= 2

"""Powers of two, and counters that threads share: used by all attention kernels of the CPU.

Scores are in units of log 2 inside, so that a weight of the softmax is 2^(score - row_max).
"""

import math

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from .fragments import multiply_add
from .simd import float32x8, helper

LOG2_E = np.float32(math.log2(math.e))

serial = njit(error_model="numpy", nogil=True, cache=True)
"""Decorator of what Python calls: one thread's work."""

_I32X8, _F32X8 = ir.VectorType(ir.IntType(32), 8), ir.VectorType(ir.FloatType(), 8)
_ONE = ir.Constant(ir.IntType(64), 1)
_LOOKS = 50_000  # about a tenth of a millisecond

# 2^f on -0.5 <= f <= 0.5, 1 at 0, relative error 3e-9 before rounding (fitted for the least largest error).
_EXP2 = (1.0, 0.693147182, 0.240226477, 0.0555035993, 0.00961850584, 0.00133908063, 0.000153264613)


def floats(value):
    """Eight equal floats, as a constant."""
    return ir.Constant(_F32X8, [value] * 8)


def integers(value):
    """Eight equal integers, as a constant."""
    return ir.Constant(_I32X8, [value] * 8)


def emit_exp2(builder, x):
    """Emit `exp2` of a vector."""
    magic = 12582912.0  # 1.5 * 2^23: adding it rounds to an integer, which its low bits then hold
    shifted = builder.fadd(x, floats(magic))
    fraction = builder.fsub(x, builder.fsub(shifted, floats(magic)))
    result = floats(_EXP2[-1])
    for coefficient in _EXP2[-2::-1]:
        result = multiply_add(builder, result, fraction, floats(coefficient))
    whole = builder.add(builder.bitcast(shifted, _I32X8), integers(127 - 0x4B400000))
    result = builder.fmul(result, builder.bitcast(builder.shl(whole, integers(23)), _F32X8))
    return builder.select(builder.fcmp_ordered("<", x, floats(-126.0)), floats(0.0), result)


@intrinsic
def exp2(typing_context, x):
    """Return 2^x of eight floats up to 127, to about 1 ulp; 0 below -126, NaN for NaN."""

    def generate(context, builder, signature, arguments):
        return emit_exp2(builder, arguments[0])

    return float32x8(float32x8), generate


@intrinsic
def take_number(typing_context, counter):
    """Return counter[0] and add one to it, in one step for all threads."""

    def generate(context, builder, signature, arguments):
        data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        return builder.atomic_rmw("add", data, ir.Constant(ir.IntType(64), 1), "monotonic")

    return types.int64(counter), generate


@intrinsic
def _add_done(typing_context, counter, count):
    """Add to counter[1], which says how many items are done; what was written for them can then be seen."""

    def generate(context, builder, signature, arguments):
        data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        return builder.atomic_rmw("add", builder.gep(data, [_ONE]), arguments[1], "acq_rel")

    return types.int64(counter, types.int64), generate


@intrinsic
def _read_done(typing_context, counter):
    """Return counter[1], as other threads have left it."""

    def generate(context, builder, signature, arguments):
        data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        return builder.load_atomic(builder.gep(data, [_ONE]), "acquire", 8)

    return types.int64(counter), generate


@helper
def all_done(counter, own, items):
    """Say that this thread has done `own` items; return whether all are done, after a short wait.

    To sleep until another thread ends takes longer than the items that are left of a short call.
    """
    _add_done(counter, own)
    looks = 0
    while looks < _LOOKS and _read_done(counter) != items:
        looks += 1
    return looks < _LOOKS

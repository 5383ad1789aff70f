"""Eight float32 values as one Numba value, for CPU kernels whose loops LLVM does not vectorise by itself.

Numba's own loops miss vector code wherever a reduction must keep its order (no `fastmath` here: codes must be
the same on every backend), where an index may be negative, or where neighbours are combined. With these
functions a kernel says what happens to eight elements: ``store(out, i, load(x, i) * splat(scale))``. They are
plain LLVM vector instructions, which LLVM lowers to what the machine has (AVX2: one register, NEON: two).

Rows are contiguous; nothing checks an index. Half-precision rows are uint16 arrays of their bits.
"""

import operator

from llvmlite import ir
from numba import njit, types
from numba.core import typing
from numba.core.typing.templates import ConcreteTemplate, infer_global
from numba.extending import intrinsic, lower_builtin, models, register_model

from .parallel import parallel_kernel

helper = njit(error_model="numpy", _nrt=False)
"""Decorator of functions that only kernels call; a division by zero gives infinity or NaN, as in NumPy.

They borrow the arrays of their callers and allocate none, so they count no references (`_nrt=False`):
counting is atomic, and costs more than the work on a group.
"""

kernel = parallel_kernel(error_model="numpy")
"""Decorator of functions that Python calls."""

LANES = 8
"""Elements of one vector; rows in scratch memory are padded to a multiple of it."""

_I32, _I64, _F32 = ir.IntType(32), ir.IntType(64), ir.FloatType()
F32X8 = ir.VectorType(_F32, LANES)
I32X8 = ir.VectorType(_I32, LANES)
I16X8 = ir.VectorType(ir.IntType(16), LANES)
_I8X8 = ir.VectorType(ir.IntType(8), LANES)
F16X8 = ir.VectorType(ir.HalfType(), LANES)


class Float32x8(types.Type):
    """Numba type of eight float32 values."""

    def __init__(self):
        super().__init__(name="float32x8")


float32x8 = Float32x8()


@register_model(Float32x8)
class _Float32x8Model(models.PrimitiveModel):
    def __init__(self, manager, numba_type):
        super().__init__(manager, numba_type, F32X8)


def _lanes(values):
    return ir.Constant(I32X8, values)


def splat_i32(value):
    """Return a constant of eight 32-bit integers, for intrinsics."""
    return ir.Constant(I32X8, [value] * LANES)


def pointer_to(context, builder, array_type, array, index, pointee):
    """Return the address of array[index] as a pointer to `pointee`; for intrinsics, here and in kernels."""
    data = context.make_array(array_type)(context, builder, array).data
    return builder.bitcast(builder.gep(data, [index]), pointee.as_pointer())


def load_unaligned(builder, pointer):
    """Load through a pointer of any alignment."""
    value = builder.load(pointer)
    value.align = 1
    return value


def store_unaligned(builder, value, pointer):
    """Store through a pointer of any alignment."""
    builder.store(value, pointer).align = 1


def _make_load(memory_type, widen):
    """Return an intrinsic (row, index) -> float32x8 that reads eight elements and widens them."""

    @intrinsic
    def load_eight(typing_context, row, index):
        def generate(context, builder, signature, arguments):
            pointer = pointer_to(context, builder, signature.args[0], *arguments, memory_type)
            return widen(builder, load_unaligned(builder, pointer))

        return float32x8(row, types.intp), generate

    return load_eight


def _make_store(memory_type, narrow):
    """Return an intrinsic (row, index, value) that narrows eight floats and writes them."""

    @intrinsic
    def store_eight(typing_context, row, index, value):
        def generate(context, builder, signature, arguments):
            array, first, vector = arguments
            pointer = pointer_to(context, builder, signature.args[0], array, first, memory_type)
            store_unaligned(builder, narrow(builder, vector), pointer)
            return context.get_dummy_value()

        return types.void(row, types.intp, float32x8), generate

    return store_eight


def _widen_bfloat(builder, value):
    return builder.bitcast(builder.shl(builder.zext(value, I32X8), splat_i32(16)), F32X8)


def narrow_bfloat(builder, value):
    """Emit rounding to the nearest bfloat16, ties to even; a NaN becomes the quiet NaN of its sign."""
    bits = builder.bitcast(value, I32X8)
    odd = builder.and_(builder.lshr(bits, splat_i32(16)), splat_i32(1))
    rounded = builder.lshr(builder.add(bits, builder.add(odd, splat_i32(0x7FFF))), splat_i32(16))
    quiet = builder.or_(builder.and_(builder.lshr(bits, splat_i32(16)), splat_i32(0x8000)), splat_i32(0x7FC0))
    is_nan = builder.fcmp_unordered("uno", value, value)
    return builder.trunc(builder.select(is_nan, quiet, rounded), I16X8)


def _narrow_code(builder, value):
    """Round to the nearest integer, ties to even, and keep the low byte; for 0 <= value < 2**22.

    Adding 1.5 * 2**23 leaves no fraction bits, so the addition itself rounds, and the integer is in the low
    bits of the sum.
    """
    shifted = builder.fadd(value, ir.Constant(F32X8, [12582912.0] * LANES))
    return builder.trunc(builder.bitcast(shifted, I32X8), _I8X8)


load = _make_load(F32X8, lambda builder, value: value)
load_half = _make_load(F16X8, lambda builder, value: builder.fpext(value, F32X8))
load_bfloat = _make_load(I16X8, _widen_bfloat)
load_codes = _make_load(_I8X8, lambda builder, value: builder.uitofp(value, F32X8))
load_digits = _make_load(_I8X8, lambda builder, value: builder.sitofp(value, F32X8))
store = _make_store(F32X8, lambda builder, value: value)
store_half = _make_store(F16X8, lambda builder, value: builder.fptrunc(value, F16X8))
store_bfloat = _make_store(I16X8, narrow_bfloat)
store_codes = _make_store(_I8X8, _narrow_code)
store_cut = _make_store(I32X8, lambda builder, value: builder.fptosi(value, I32X8))


def _make_binary(emit):
    @intrinsic
    def binary(typing_context, a, b):
        def generate(context, builder, signature, arguments):
            return emit(builder, *arguments)

        return float32x8(float32x8, float32x8), generate

    return binary


def _select(comparison):
    """Take a where (a comparison b) holds and b elsewhere: where either is NaN, b."""

    def emit(builder, a, b):
        return builder.select(builder.fcmp_ordered(comparison, a, b), a, b)

    return emit


def _count_where_greater(builder, a, b):
    return builder.uitofp(builder.fcmp_ordered(">", a, b), F32X8)


_OPERATORS = {
    operator.add: lambda builder, a, b: builder.fadd(a, b),
    operator.sub: lambda builder, a, b: builder.fsub(a, b),
    operator.mul: lambda builder, a, b: builder.fmul(a, b),
    operator.truediv: lambda builder, a, b: builder.fdiv(a, b),
    operator.gt: _count_where_greater,  # 1.0 where a > b, else 0.0
}
minimum = _make_binary(_select("<"))
maximum = _make_binary(_select(">"))


def _define_operator(symbol, emit):
    """Give an operator a meaning for two vectors; not by `overload`, which would compile a function each."""

    @infer_global(symbol)
    class _OfVectors(ConcreteTemplate):
        cases = (typing.signature(float32x8, float32x8, float32x8),)

    @lower_builtin(symbol, float32x8, float32x8)
    def lower(context, builder, signature, arguments):
        return emit(builder, *arguments)


for _symbol, _emit in _OPERATORS.items():
    _define_operator(_symbol, _emit)


@intrinsic
def splat(typing_context, value):
    """Return eight copies of a float32."""

    def generate(context, builder, signature, arguments):
        one = builder.insert_element(ir.Constant(F32X8, ir.Undefined), arguments[0], ir.Constant(_I32, 0))
        return builder.shuffle_vector(one, one, splat_i32(0))

    return float32x8(types.float32), generate


@intrinsic
def multiply_add(typing_context, a, b, c):
    """Return a * b + c, rounded once where the machine can."""

    def generate(context, builder, signature, arguments):
        kind = ir.FunctionType(F32X8, [F32X8] * 3)
        return builder.call(builder.module.declare_intrinsic("llvm.fmuladd.v8f32", (), kind), arguments)

    return float32x8(float32x8, float32x8, float32x8), generate


@intrinsic
def magnitude(typing_context, value):
    """Return |value|, NaN included."""

    def generate(context, builder, signature, arguments):
        bits = builder.and_(builder.bitcast(arguments[0], I32X8), splat_i32(0x7FFFFFFF))
        return builder.bitcast(bits, F32X8)

    return float32x8(float32x8), generate


@intrinsic
def nearest(typing_context, value):
    """Return the nearest integers, of two the even one, as floats."""

    def generate(context, builder, signature, arguments):
        kind = ir.FunctionType(F32X8, [F32X8])
        return builder.call(builder.module.declare_intrinsic("llvm.rint.v8f32", (), kind), arguments)

    return float32x8(float32x8), generate


@intrinsic
def through_half(typing_context, value):
    """Return the values rounded to float16, half to even: infinite beyond it."""

    def generate(context, builder, signature, arguments):
        return builder.fpext(builder.fptrunc(arguments[0], F16X8), F32X8)

    return float32x8(float32x8), generate


def _make_reduction(emit):
    """Return an intrinsic float32x8 -> float32 that combines lanes at distance 4, 2, 1."""

    @intrinsic
    def reduction(typing_context, value):
        def generate(context, builder, signature, arguments):
            (x,) = arguments
            for h in (4, 2, 1):
                partner = builder.shuffle_vector(x, x, _lanes([k ^ h for k in range(LANES)]))
                x = emit(builder, x, partner)
            return builder.extract_element(x, ir.Constant(_I32, 0))

        return types.float32(float32x8), generate

    return reduction


@intrinsic
def look_up(typing_context, table, codes, index):
    """Return table[code] of the eight codes from codes[index] on; table float32."""

    def generate(context, builder, signature, arguments):
        table, codes, first = arguments
        entries = context.make_array(signature.args[0])(context, builder, table).data
        source = pointer_to(context, builder, signature.args[1], codes, first, ir.IntType(8))
        result = ir.Constant(F32X8, ir.Undefined)
        for lane in range(LANES):
            code = builder.zext(builder.load(builder.gep(source, [_I64(lane)])), _I64)
            result = builder.insert_element(result, builder.load(builder.gep(entries, [code])), _I32(lane))
        return result

    return float32x8(table, codes, types.intp), generate


@intrinsic
def where(typing_context, condition, a, b):
    """Return a where condition is not 0 (what a comparison gives) and b elsewhere."""

    def generate(context, builder, signature, arguments):
        condition, a, b = arguments
        zero = ir.Constant(F32X8, [0.0] * LANES)
        return builder.select(builder.fcmp_unordered("!=", condition, zero), a, b)

    return float32x8(float32x8, float32x8, float32x8), generate


@intrinsic
def any_above(typing_context, a, b):
    """Say whether a > b in any lane."""

    def generate(context, builder, signature, arguments):
        mask = builder.bitcast(builder.fcmp_ordered(">", *arguments), ir.IntType(LANES))
        return builder.icmp_unsigned("!=", mask, mask.type(0))

    return types.boolean(float32x8, float32x8), generate


@intrinsic
def larger_magnitude(typing_context, bits, value):
    """Return the larger of bits and |value|, compared as integers: an infinity or a NaN wins for good."""

    def generate(context, builder, signature, arguments):
        bits, value = (builder.bitcast(x, I32X8) for x in arguments)
        own = builder.and_(value, splat_i32(0x7FFFFFFF))
        return builder.bitcast(builder.select(builder.icmp_signed(">", own, bits), own, bits), F32X8)

    return float32x8(float32x8, float32x8), generate


@intrinsic
def zero_if_finite(typing_context, bits):
    """Return 0 if `larger_magnitude` has met finite numbers only, else NaN."""

    def generate(context, builder, signature, arguments):
        beyond = builder.icmp_signed(">", builder.bitcast(arguments[0], I32X8), splat_i32(0x7F7FFFFF))
        mask = builder.bitcast(beyond, ir.IntType(LANES))
        is_none = builder.icmp_unsigned("==", mask, mask.type(0))
        return builder.select(is_none, _F32(0.0), _F32(float("nan")))

    return types.float32(float32x8), generate


lowest = _make_reduction(_select("<"))
highest = _make_reduction(_select(">"))
total = _make_reduction(lambda builder, a, b: builder.fadd(a, b))


@intrinsic
def butterflies(typing_context, value):
    """Return the Hadamard butterflies at distance 1, 2, 4: lane k becomes x[k] + x[k ^ h] or x[k ^ h] - x[k].

    The difference is taken where bit h of k is set, so the pair (a, b) becomes (a + b, a - b).
    """

    def generate(context, builder, signature, arguments):
        (x,) = arguments
        kind = ir.FunctionType(F32X8, [F32X8] * 3)
        multiply_add = builder.module.declare_intrinsic("llvm.fmuladd.v8f32", (), kind)
        for h in (1, 2, 4):
            partner = builder.shuffle_vector(x, x, _lanes([k ^ h for k in range(LANES)]))
            signs = ir.Constant(F32X8, [-1.0 if k & h else 1.0 for k in range(LANES)])
            x = builder.call(multiply_add, [x, signs, partner])  # fused or not: the product is exact
        return x

    return float32x8(float32x8), generate


@intrinsic
def half_of(typing_context, value):
    """Return the bits of the float16 nearest to a float32, ties to even."""

    def generate(context, builder, signature, arguments):
        return builder.bitcast(builder.fptrunc(arguments[0], ir.HalfType()), ir.IntType(16))

    return types.uint16(types.float32), generate


@intrinsic
def float_of_half(typing_context, word):
    """Return the float32 that the bits of a float16 stand for."""

    def generate(context, builder, signature, arguments):
        return builder.fpext(builder.bitcast(arguments[0], ir.HalfType()), _F32)

    return types.float32(types.uint16), generate


@intrinsic
def bits_of(typing_context, value):
    """Return the bits of a float32."""

    def generate(context, builder, signature, arguments):
        return builder.bitcast(arguments[0], _I32)

    return types.uint32(types.float32), generate


@intrinsic
def float_of_bits(typing_context, bits):
    """Return the float32 of 32 bits."""

    def generate(context, builder, signature, arguments):
        return builder.bitcast(arguments[0], _F32)

    return types.float32(types.uint32), generate

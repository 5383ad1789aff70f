"""Codecs on the CPU: the arithmetic of kvlab/reference/codec.py, bit for bit, at the speed of memory.

Numba's loops over short rows with a stride of 1, 2 or 4 do not vectorise, so the butterflies are written
as LLVM vector instructions on eight floats; LLVM lowers them to what the machine has (AVX, NEON). Nothing
here may use `fastmath`: codes must be the same on every backend.
"""

from llvmlite import ir

from numba import njit, prange, types
from numba.extending import intrinsic

_LANES = 8
_VECTOR = ir.VectorType(ir.FloatType(), _LANES)


def _lanes(order):
    return ir.Constant(ir.VectorType(ir.IntType(32), _LANES), order)


def _pointer(context, builder, array_type, array, index):
    data = context.make_array(array_type)(context, builder, array).data
    return builder.bitcast(builder.gep(data, [index]), _VECTOR.as_pointer())


def _load(builder, pointer):
    value = builder.load(pointer)
    value.align = 4
    return value


def _store(builder, value, pointer):
    builder.store(value, pointer).align = 4


def _butterflies_in_vector(builder, x):
    """Distances 1, 2 and 4: lane k becomes x[k] + x[k ^ h], or x[k ^ h] - x[k] where bit h of k is set."""
    for h in (1, 2, 4):
        undefined = ir.Constant(_VECTOR, ir.Undefined)
        partner = builder.shuffle_vector(x, undefined, _lanes([k ^ h for k in range(_LANES)]))
        choose = _lanes([k + _LANES if k & h else k for k in range(_LANES)])
        x = builder.shuffle_vector(builder.fadd(x, partner), builder.fsub(partner, x), choose)
    return x


def _make_butterflies(count):
    """Return an intrinsic that transforms `count` * 8 floats at row[start], in registers."""

    @intrinsic
    def butterflies(typing_context, row, start):
        def generate(context, builder, signature, arguments):
            row_type, (array, first) = signature.args[0], arguments
            starts = [builder.add(first, ir.Constant(first.type, _LANES * k)) for k in range(count)]
            pointers = [_pointer(context, builder, row_type, array, start) for start in starts]
            x = [_butterflies_in_vector(builder, _load(builder, pointer)) for pointer in pointers]
            h = 1
            while h < count:
                for k in range(count):
                    if not k & h:
                        x[k], x[k + h] = builder.fadd(x[k], x[k + h]), builder.fsub(x[k], x[k + h])
                h *= 2
            for value, pointer in zip(x, pointers, strict=True):
                _store(builder, value, pointer)
            return context.get_dummy_value()

        return types.void(row, types.intp), generate

    return butterflies


_butterflies_8, _butterflies_16, _butterflies_32, _butterflies_64 = map(_make_butterflies, (1, 2, 4, 8))


@intrinsic
def _butterfly_across(typing_context, row, start, h):
    """One butterfly of eight neighbouring pairs (row[start + i], row[start + h + i])."""

    def generate(context, builder, signature, arguments):
        row_type, (array, first, distance) = signature.args[0], arguments
        left = _pointer(context, builder, row_type, array, first)
        right = _pointer(context, builder, row_type, array, builder.add(first, distance))
        a, b = _load(builder, left), _load(builder, right)
        _store(builder, builder.fadd(a, b), left)
        _store(builder, builder.fsub(a, b), right)
        return context.get_dummy_value()

    return types.void(row, types.intp, types.intp), generate


@njit
def hadamard_row(row, block):
    """Transform each block of a contiguous float32 row in place, without the final 1 / sqrt(block)."""
    n = row.size
    if block < 8:
        h = 1
        while h < block:
            for start in range(0, n, 2 * h):
                for i in range(start, start + h):
                    a, b = row[i], row[i + h]
                    row[i], row[i + h] = a + b, a - b
            h *= 2
    elif block == 8:
        for start in range(0, n, 8):
            _butterflies_8(row, start)
    elif block == 16:
        for start in range(0, n, 16):
            _butterflies_16(row, start)
    elif block == 32:
        for start in range(0, n, 32):
            _butterflies_32(row, start)
    else:
        for start in range(0, n, 64):
            _butterflies_64(row, start)
        h = 64
        while h < block:
            for start in range(0, n, 2 * h):
                for i in range(start, start + h, 8):
                    _butterfly_across(row, i, h)
            h *= 2


@njit(parallel=True, cache=True)
def hadamard_rows(x, block, factor, out):
    """Transform the rows of x (rows, n), contiguous float32, into out; factor is float32(1 / sqrt(block))."""
    for r in prange(x.shape[0]):
        row = out[r]
        row[:] = x[r]
        hadamard_row(row, block)
        for i in range(row.size):
            row[i] *= factor

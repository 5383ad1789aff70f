"""Packing on the CPU: codes of 1 to 8 bits to the interchange stream and back.

Eight codes of b bits are exactly b bytes, so a vector of four 64-bit lanes takes 32 codes at once: three
shift-and-merge steps bring the eight codes of a lane together in its low 8 * b bits, and one byte shuffle
drops the unused bytes between lanes. Unpacking is the same backwards. What is left of a row, fewer than 32
codes, is done one code at a time. Element i of a row is bits [i * b, (i + 1) * b) of its bytes.
"""

from functools import reduce

import numpy as np
from llvmlite import ir
from numba import prange, types
from numba.core import cgutils
from numba.extending import intrinsic

from .simd import helper, kernel, load_unaligned, pointer_to, store_unaligned

STEP = 32
"""Codes that one vector step packs or unpacks."""

_WORDS = STEP // 8
_I8, _I32, _I64 = ir.IntType(8), ir.IntType(32), ir.IntType(64)
_WORD_VECTOR = ir.VectorType(_I64, _WORDS)
_BYTE_VECTOR = ir.VectorType(_I8, STEP)


def _every_word(value):
    return ir.Constant(_WORD_VECTOR, [value] * _WORDS)


def _low_bits(count, lane):
    """A 64-bit mask of the `count` low bits of every lane of `lane` bits."""
    return sum(((1 << count) - 1) << start for start in range(0, 64, lane))


def _shuffle_bytes(builder, source, order):
    """Take the bytes `order` of a vector; -1 gives a zero byte."""
    length = source.type.count
    positions = ir.Constant(ir.VectorType(_I32, len(order)), [length if k < 0 else k for k in order])
    return builder.shuffle_vector(source, ir.Constant(source.type, [0] * length), positions)


def _emit_pack_step(builder, bits, source, target):
    """Pack 32 codes; return a vector that is not 0 if a code is too big."""
    words = load_unaligned(builder, builder.bitcast(source, _WORD_VECTOR.as_pointer()))
    too_big = builder.and_(words, _every_word(_low_bits(8, 8) & ~_low_bits(bits, 8)))
    for lane in (8, 16, 32):
        lower = _every_word(_low_bits(lane, 2 * lane))
        low = builder.and_(words, lower)
        high = builder.and_(builder.lshr(words, _every_word(lane)), lower)
        words = builder.or_(low, builder.shl(high, _every_word(bits * lane // 8)))
    order = [8 * word + byte for word in range(_WORDS) for byte in range(bits)]
    stream = _shuffle_bytes(builder, builder.bitcast(words, _BYTE_VECTOR), order)
    store_unaligned(builder, stream, builder.bitcast(target, stream.type.as_pointer()))
    return too_big


def _emit_unpack_step(builder, bits, source, target):
    """Unpack 32 codes."""
    stream_type = ir.VectorType(_I8, bits * _WORDS)
    stream = load_unaligned(builder, builder.bitcast(source, stream_type.as_pointer()))
    order = [bits * word + byte if byte < bits else -1 for word in range(_WORDS) for byte in range(8)]
    words = builder.bitcast(_shuffle_bytes(builder, stream, order), _WORD_VECTOR)
    for lane in (32, 16, 8):
        width = bits * lane // 8
        mask = _every_word(_low_bits(width, 2 * lane))
        high = builder.and_(builder.lshr(words, _every_word(width)), mask)
        words = builder.or_(builder.and_(words, mask), builder.shl(high, _every_word(lane)))
    store_unaligned(builder, words, builder.bitcast(target, _WORD_VECTOR.as_pointer()))
    return _every_word(0)


def _make_loop(emit_step, *step_bytes):
    """Return an intrinsic (source, first, target, start, bits, count): one loop for each width.

    step_bytes: bytes that a step reads, and writes, by width. The width is a case of a switch around the
    loops, so that a kernel is compiled once for all of them.
    """

    @intrinsic
    def take_loop(typing_context, source, first, target, start, bits, count):
        def generate(context, builder, signature, arguments):
            _, _, _, _, bits, count = arguments
            source = pointer_to(context, builder, signature.args[0], *arguments[:2], _I8)
            target = pointer_to(context, builder, signature.args[2], *arguments[2:4], _I8)
            found = cgutils.alloca_once_value(builder, _every_word(0))
            after = builder.append_basic_block("after")
            choice = builder.switch(bits, after)
            for width in _WIDTHS:
                block = builder.append_basic_block(f"bits_{width}")
                choice.add_case(bits.type(width), block)
                builder.position_at_end(block)
                with cgutils.for_range(builder, count) as loop:
                    read, written = (builder.mul(loop.index, _I64(size(width))) for size in step_bytes)
                    here, there = builder.gep(source, [read]), builder.gep(target, [written])
                    seen = emit_step(builder, width, here, there)
                    builder.store(builder.or_(builder.load(found), seen), found)
                builder.branch(after)
            builder.position_at_end(after)
            words = [builder.extract_element(builder.load(found), _I32(word)) for word in range(_WORDS)]
            return reduce(builder.or_, words)

        integers = (types.intp,) * 2
        return types.uint64(source, types.intp, target, types.intp, *integers), generate

    return take_loop


_WIDTHS = (1, 2, 3, 4, 5, 6, 8)
_pack_loop = _make_loop(_emit_pack_step, lambda bits: STEP, lambda bits: _WORDS * bits)
_unpack_loop = _make_loop(_emit_unpack_step, lambda bits: _WORDS * bits, lambda bits: STEP)


@helper
def pack_run(codes, start, count, bits, packed, target):
    """Pack codes[start:start + count] to packed[target:], both flat uint8; not 0 if a code is too big."""
    whole = count // STEP * STEP
    too_big = _pack_loop(codes, start, packed, target, bits, count // STEP)
    if whole < count:
        too_big |= _pack_tail(codes, start + whole, count - whole, bits, packed, target + whole // 8 * bits)
    return too_big


@helper
def _pack_tail(codes, start, count, bits, packed, target):
    too_big = np.uint64(0)
    waiting, filled = np.uint64(0), np.uint64(0)
    for i in range(start, start + count):
        code = np.uint64(codes[i])
        too_big |= code >> np.uint64(bits)
        waiting |= code << filled
        filled += np.uint64(bits)
        while filled >= np.uint64(8):
            packed[target] = np.uint8(waiting & np.uint64(255))
            waiting >>= np.uint64(8)
            filled -= np.uint64(8)
            target += 1
    if filled > np.uint64(0):
        packed[target] = np.uint8(waiting & np.uint64(255))
    return too_big


@helper
def unpack_run(packed, start, bits, codes, target, count):
    """Unpack packed[start:] to codes[target:target + count], both flat uint8."""
    whole = count // STEP * STEP
    _unpack_loop(packed, start, codes, target, bits, count // STEP)
    if whole < count:
        _unpack_tail(packed, start + whole // 8 * bits, bits, codes, target + whole, count - whole)


@helper
def _unpack_tail(packed, start, bits, codes, target, count):
    mask = (np.uint64(1) << np.uint64(bits)) - np.uint64(1)
    waiting, filled = np.uint64(0), np.uint64(0)
    for i in range(target, target + count):
        if filled < np.uint64(bits):
            waiting |= np.uint64(packed[start]) << filled
            filled += np.uint64(8)
            start += 1
        codes[i] = np.uint8(waiting & mask)
        waiting >>= np.uint64(bits)
        filled -= np.uint64(bits)


@helper
def pack_ternary_run(values, packed):
    """Pack int8 values -1, 0, 1 to packed; True if a value is none of these."""
    wrong = False
    whole = values.size // 5
    for byte in range(whole):
        i = 5 * byte
        number = 0
        for value in (values[i + 4], values[i + 3], values[i + 2], values[i + 1], values[i]):
            wrong |= (value < -1) | (value > 1)
            number = 3 * number + value + 1
        packed[byte] = np.uint8(number)
    if 5 * whole < values.size:
        number = 0
        for i in range(values.size - 1, 5 * whole - 1, -1):
            wrong |= (values[i] < -1) | (values[i] > 1)
            number = 3 * number + values[i] + 1
        packed[whole] = np.uint8(number)
    return wrong


_TERNARY_VALUES = np.array([[byte // 3**i % 3 - 1 for i in range(5)] for byte in range(256)], np.int8)
_LAST_TERNARY_BYTE = 3**5 - 1


@helper
def unpack_ternary_run(packed, values):
    """Unpack packed to int8 values; True if a byte stands for no five values."""
    wrong = False
    whole = values.size // 5
    for k in range(whole):
        byte = packed[k]
        wrong |= byte > _LAST_TERNARY_BYTE
        for i in range(5):
            values[5 * k + i] = _TERNARY_VALUES[byte, i]
    if 5 * whole < values.size:
        byte = packed[whole]
        wrong |= byte > _LAST_TERNARY_BYTE
        for i in range(values.size - 5 * whole):
            values[5 * whole + i] = _TERNARY_VALUES[byte, i]
    return wrong


# A run is a stretch of codes whose bytes start on a byte border of their own: one row, or, where rows end on
# byte borders anyway, any multiple of 8 codes. All runs have `run` codes and `run_bytes` bytes but the last.


@kernel
def pack_runs(codes, run, bits, packed, run_bytes):
    """Pack flat uint8 codes to flat uint8 packed; return how many runs hold a code of 2**bits or more."""
    bad = 0
    for r in prange((codes.size + run - 1) // run):
        count = min(run, codes.size - r * run)
        bad += np.int64(pack_run(codes, r * run, count, bits, packed, r * run_bytes) != 0)
    return bad


@kernel
def unpack_runs(packed, run_bytes, bits, codes, run):
    """Unpack flat uint8 packed to flat uint8 codes."""
    for r in prange((codes.size + run - 1) // run):
        unpack_run(packed, r * run_bytes, bits, codes, r * run, min(run, codes.size - r * run))


@kernel
def pack_ternary_runs(values, run, packed, run_bytes):
    """Pack flat int8 values to flat uint8 packed; return how many runs hold a value other than -1, 0, 1."""
    bad = 0
    for r in prange((values.size + run - 1) // run):
        bad += np.int64(pack_ternary_run(values[r * run : (r + 1) * run], packed[r * run_bytes :]))
    return bad


@kernel
def unpack_ternary_runs(packed, run_bytes, values, run):
    """Unpack flat uint8 packed to flat int8 values; return how many runs hold a byte above 242."""
    bad = 0
    for r in prange((values.size + run - 1) // run):
        bad += np.int64(unpack_ternary_run(packed[r * run_bytes :], values[r * run : (r + 1) * run]))
    return bad

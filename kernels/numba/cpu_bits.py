"""Packing on the CPU: codes of 1 to 8 bits to the interchange stream and back.

Eight codes of b bits are exactly b bytes, so a vector of four 64-bit lanes takes 32 codes at once: three
shift-and-merge steps bring the eight codes of a lane together in its low 8 * b bits, and one byte shuffle
drops the unused bytes between lanes. Unpacking is the same backwards. What is left of a row, fewer than 32
codes, is done one code at a time. Element i of a row is bits [i * b, (i + 1) * b) of its bytes.
"""

import numpy as np
from llvmlite import ir
from numba import prange, types
from numba.extending import intrinsic

from .cpu_simd import helper, kernel, load_unaligned, pointer_to, store_unaligned

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


def _make_pack_step(bits):
    """Return an intrinsic: pack codes[first:first + 32] to packed[target:]; not 0 if a code is too big."""

    @intrinsic
    def pack_step(typing_context, codes, first, packed, target):
        def generate(context, builder, signature, arguments):
            source = pointer_to(context, builder, signature.args[0], *arguments[:2], _WORD_VECTOR)
            words = load_unaligned(builder, source)
            too_big = builder.and_(words, _every_word(_low_bits(8, 8) & ~_low_bits(bits, 8)))
            for lane in (8, 16, 32):
                lower = _every_word(_low_bits(lane, 2 * lane))
                low = builder.and_(words, lower)
                high = builder.and_(builder.lshr(words, _every_word(lane)), lower)
                words = builder.or_(low, builder.shl(high, _every_word(bits * lane // 8)))
            order = [8 * word + byte for word in range(_WORDS) for byte in range(bits)]
            stream = _shuffle_bytes(builder, builder.bitcast(words, _BYTE_VECTOR), order)
            destination = pointer_to(context, builder, signature.args[2], *arguments[2:], stream.type)
            store_unaligned(builder, stream, destination)
            found = builder.extract_element(too_big, _I32(0))
            for word in range(1, _WORDS):
                found = builder.or_(found, builder.extract_element(too_big, _I32(word)))
            return found

        return types.uint64(codes, types.intp, packed, types.intp), generate

    return pack_step


def _make_unpack_step(bits):
    """Return an intrinsic that unpacks the 32 codes at packed[first:] to codes[target:target + 32]."""

    @intrinsic
    def unpack_step(typing_context, packed, first, codes, target):
        def generate(context, builder, signature, arguments):
            stream_type = ir.VectorType(_I8, bits * _WORDS)
            source = pointer_to(context, builder, signature.args[0], *arguments[:2], stream_type)
            order = [bits * word + byte if byte < bits else -1 for word in range(_WORDS) for byte in range(8)]
            spread = _shuffle_bytes(builder, load_unaligned(builder, source), order)
            words = builder.bitcast(spread, _WORD_VECTOR)
            for lane in (32, 16, 8):
                width = bits * lane // 8
                mask = _every_word(_low_bits(width, 2 * lane))
                high = builder.and_(builder.lshr(words, _every_word(width)), mask)
                words = builder.or_(builder.and_(words, mask), builder.shl(high, _every_word(lane)))
            destination = pointer_to(context, builder, signature.args[2], *arguments[2:], _WORD_VECTOR)
            store_unaligned(builder, words, destination)
            return context.get_dummy_value()

        return types.void(packed, types.intp, codes, types.intp), generate

    return unpack_step


def _make_pack_whole(bits):
    step = _make_pack_step(bits)

    @helper
    def pack_whole_steps(codes, start, count, packed, target):
        too_big = np.uint64(0)
        for done in range(0, count, STEP):
            too_big |= step(codes, start + done, packed, target + done // 8 * bits)
        return too_big

    return pack_whole_steps


def _make_unpack_whole(bits):
    step = _make_unpack_step(bits)

    @helper
    def unpack_whole_steps(packed, start, codes, target, count):
        for done in range(0, count, STEP):
            step(packed, start + done // 8 * bits, codes, target + done)

    return unpack_whole_steps


_WIDTHS = (1, 2, 3, 4, 5, 6, 8)
_pack_1, _pack_2, _pack_3, _pack_4, _pack_5, _pack_6, _pack_8 = map(_make_pack_whole, _WIDTHS)
_unpack_1, _unpack_2, _unpack_3, _unpack_4, _unpack_5, _unpack_6, _unpack_8 = map(_make_unpack_whole, _WIDTHS)


@helper
def pack_run(codes, start, count, bits, packed, target):
    """Pack codes[start:start + count] to packed[target:], both flat uint8; not 0 if a code is too big."""
    whole = count // STEP * STEP
    if bits == 1:
        too_big = _pack_1(codes, start, whole, packed, target)
    elif bits == 2:
        too_big = _pack_2(codes, start, whole, packed, target)
    elif bits == 3:
        too_big = _pack_3(codes, start, whole, packed, target)
    elif bits == 4:
        too_big = _pack_4(codes, start, whole, packed, target)
    elif bits == 5:
        too_big = _pack_5(codes, start, whole, packed, target)
    elif bits == 6:
        too_big = _pack_6(codes, start, whole, packed, target)
    else:
        too_big = _pack_8(codes, start, whole, packed, target)
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
    if bits == 1:
        _unpack_1(packed, start, codes, target, whole)
    elif bits == 2:
        _unpack_2(packed, start, codes, target, whole)
    elif bits == 3:
        _unpack_3(packed, start, codes, target, whole)
    elif bits == 4:
        _unpack_4(packed, start, codes, target, whole)
    elif bits == 5:
        _unpack_5(packed, start, codes, target, whole)
    elif bits == 6:
        _unpack_6(packed, start, codes, target, whole)
    else:
        _unpack_8(packed, start, codes, target, whole)
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

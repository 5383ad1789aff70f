"""Packing on a GPU in Numba: the interchange bit stream, written for reading.

Eight codes of b bits are exactly b bytes. So a thread takes 8 codes of a row, collects them in one integer of
64 bits, code i at bit b * i, and writes its b bytes; the last thread of a row has fewer. Ternary values are
the digits of numbers in base 3: a thread takes five values and their byte. Threads are numbered through all
rows, neighbours in a row are neighbours in memory.

``bad[0]`` becomes 1 if a code, value or byte is none. Arrays are flat; `rows` and `n` say how they are cut.
"""

import numpy as np
from numba import cuda, types

uint8, int8, int32, int64 = np.uint8, np.int8, np.int32, np.int64

BYTES, WORD, COUNT = types.CPointer(types.uint8), types.CPointer(types.int32), types.int64
VALUES = types.CPointer(types.int8)
BOUNDS = 256, 4

LAST_TERNARY_BYTE = 3**5 - 1


def pack_rows(bits):
    """Make the kernel (codes, rows, n, packed, bad)."""

    def kernel(codes, rows, n, packed, bad):
        parts = (n + 7) // 8
        index = int64(cuda.grid(1))
        if index >= rows * parts:
            return
        row, part = index // parts, index % parts
        count = min(8, n - 8 * part)
        stream = int64(0)
        for i in range(count):
            code = int64(codes[row * n + 8 * part + i])
            if code >> bits:
                bad[0] = int32(1)
            stream |= code << (bits * i)
        first = row * ((n * bits + 7) // 8) + bits * part
        for i in range((count * bits + 7) // 8):
            packed[first + i] = uint8((stream >> (8 * i)) & 255)

    return kernel, (BYTES, COUNT, COUNT, BYTES, WORD), BOUNDS


def unpack_rows(bits):
    """Make the kernel (packed, rows, n, codes)."""

    def kernel(packed, rows, n, codes):
        parts = (n + 7) // 8
        index = int64(cuda.grid(1))
        if index >= rows * parts:
            return
        row, part = index // parts, index % parts
        count = min(8, n - 8 * part)
        first = row * ((n * bits + 7) // 8) + bits * part
        stream = int64(0)
        for i in range((count * bits + 7) // 8):
            stream |= int64(packed[first + i]) << (8 * i)
        for i in range(count):
            codes[row * n + 8 * part + i] = uint8((stream >> (bits * i)) & (2**bits - 1))

    return kernel, (BYTES, COUNT, COUNT, BYTES), BOUNDS


def pack_ternary_rows():
    """Make the kernel (values, rows, n, packed, bad)."""

    def kernel(values, rows, n, packed, bad):
        row_bytes = (n + 4) // 5
        index = int64(cuda.grid(1))
        if index >= rows * row_bytes:
            return
        row, first = index // row_bytes, 5 * (index % row_bytes)
        number, weight = int64(0), int64(1)
        for i in range(first, min(first + 5, n)):
            value = int64(values[row * n + i])
            if value < -1 or value > 1:
                bad[0] = int32(1)
            number += weight * (value + 1)
            weight *= 3
        packed[index] = uint8(number & 255)

    return kernel, (VALUES, COUNT, COUNT, BYTES, WORD), BOUNDS


def unpack_ternary_rows():
    """Make the kernel (packed, rows, n, values, bad)."""

    def kernel(packed, rows, n, values, bad):
        row_bytes = (n + 4) // 5
        index = int64(cuda.grid(1))
        if index >= rows * row_bytes:
            return
        row, first = index // row_bytes, 5 * (index % row_bytes)
        number = int64(packed[index])
        if number > LAST_TERNARY_BYTE:
            bad[0] = int32(1)
        for i in range(first, min(first + 5, n)):
            values[row * n + i] = int8(number % 3 - 1)
            number //= 3

    return kernel, (BYTES, COUNT, COUNT, VALUES, WORD), BOUNDS


# gate: pack_rows bits=3,4 registers<=64
# gate: unpack_rows bits=3,4 registers<=64
# gate: pack_ternary_rows registers<=64
# gate: unpack_ternary_rows registers<=64

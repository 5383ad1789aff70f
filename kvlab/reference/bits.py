"""Packing in NumPy: the interchange bit stream, written through individual bits.

Element i of the last axis is bits [i * bits, (i + 1) * bits) of a little-endian stream: bit j of the stream
is bit j % 8 of byte j // 8. What is left of the last byte is zero. Ternary values -1, 0, 1 take five to a
byte, as the digits 0, 1, 2 of a number in base 3, the first value the least significant digit.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["pack", "pack_ternary", "unpack", "unpack_ternary"]

_TERNARY_WEIGHTS = 3 ** np.arange(5)


def pack(codes: NDArray[np.uint8], bits: int) -> NDArray[np.uint8]:
    """Pack codes below 2**bits, shape (..., n), to bytes, shape (..., ceil(n * bits / 8)).

    Examples
    --------
    >>> pack(np.array([1, 2, 3], np.uint8), 4)
    array([33,  3], dtype=uint8)
    """
    every_bit = np.unpackbits(codes[..., None], axis=-1, count=bits, bitorder="little")
    stream = every_bit.reshape(*codes.shape[:-1], codes.shape[-1] * bits)
    return np.packbits(stream, axis=-1, bitorder="little")


def unpack(packed: NDArray[np.uint8], bits: int, count: int) -> NDArray[np.uint8]:
    """Unpack the first `count` codes of each row of bytes, shape (..., bytes); other bits are ignored.

    Examples
    --------
    >>> unpack(np.array([33, 3], np.uint8), 4, 3)
    array([1, 2, 3], dtype=uint8)
    """
    stream = np.unpackbits(packed, axis=-1, count=count * bits, bitorder="little")
    every_bit = stream.reshape(*packed.shape[:-1], count, bits)
    return np.packbits(every_bit, axis=-1, bitorder="little")[..., 0]


def pack_ternary(values: NDArray[np.int8]) -> NDArray[np.uint8]:
    """Pack values -1, 0, 1, shape (..., n), to bytes, shape (..., ceil(n / 5)).

    Examples
    --------
    >>> pack_ternary(np.array([1, 0, -1, -1, -1, 1], np.int8))
    array([5, 2], dtype=uint8)
    """
    *rows, n = values.shape
    digits = np.zeros((*rows, -(-n // 5) * 5), np.int64)
    digits[..., :n] = values.astype(np.int64) + 1
    return (digits.reshape(*rows, -(-n // 5), 5) @ _TERNARY_WEIGHTS).astype(np.uint8)


def unpack_ternary(packed: NDArray[np.uint8], count: int) -> NDArray[np.int8]:
    """Unpack the first `count` values of each row of bytes, shape (..., bytes).

    Examples
    --------
    >>> unpack_ternary(np.array([5, 2], np.uint8), 6)
    array([ 1,  0, -1, -1, -1,  1], dtype=int8)
    """
    *rows, size = packed.shape
    digits = packed[..., None].astype(np.int64) // _TERNARY_WEIGHTS % 3
    return (digits.reshape(*rows, 5 * size)[..., :count] - 1).astype(np.int8)

"""Answers by another road: what tests compare packing with, sharing nothing with the library."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


def pack_with_one_integer(codes: NDArray[Any], bits: int) -> NDArray[np.uint8]:
    """Pack each row by writing it down as one big integer, whose little-endian bytes are the stream."""
    *rows, count = codes.shape
    size = -(-count * bits // 8)
    out = np.zeros((*rows, size), np.uint8)
    for index in np.ndindex(*rows):
        number = sum(int(code) << (i * bits) for i, code in enumerate(codes[index]))
        out[index] = list(number.to_bytes(size, "little"))
    return out


def pack_ternary_with_integers(values: NDArray[np.int8]) -> NDArray[np.uint8]:
    """Pack each row of values by adding up powers of three."""
    *rows, count = values.shape
    out = np.zeros((*rows, -(-count // 5)), np.uint8)
    for index in np.ndindex(*rows):
        for i, value in enumerate(values[index]):
            out[(*index, i // 5)] += (int(value) + 1) * 3 ** (i % 5)
    return out


def every_string(base: int, length: int) -> NDArray[np.int64]:
    """Return all strings of `length` digits below `base`, shape (base ** length, length), in counting order.

    The first digit of a string is the lowest one of its number.
    """
    return np.arange(base**length)[:, None] // base ** np.arange(length) % base

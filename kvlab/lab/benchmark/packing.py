"""`kvlab benchmark packing`: pack and unpack at every width, against a copy and against NumPy.

Arrays are flat codes, 1 byte each. NumPy runs a vectorised expression, printed below the table, on a part of
the data, with one thread, as it does.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

import kvlab
from kvlab.lab.benchmark.baseline import Options, against_copy, check
from kvlab.lab.results import Row
from kvlab.ops.bits import WIDTHS

__all__ = ["NOTE", "benchmark_packing", "numpy_pack", "numpy_unpack"]

Bytes = NDArray[np.uint8]

_NUMPY_PART = 16  # NumPy gets one part in so many

NOTE = """NumPy, 1, 2, 4, 8 bits: c[:, 0] | c[:, 1] << bits | ...;  p[:, None] >> shifts & mask
NumPy, 3, 5, 6 bits: the same in 64-bit words of 8 codes, of which `bits` bytes are kept
NumPy, ternary: (v + 1).reshape(-1, 5) @ [1, 3, 9, 27, 81];  p[:, None] // [1, 3, 9, 27, 81] % 3 - 1"""
"""The expressions NumPy is timed with."""


def benchmark_packing(options: Options) -> list[Row]:
    """Measure pack and unpack at every width and of ternary values; two rows each.

    A row has ``operation``; ``bits``; ``times_smaller``: than int8; figures of `against_copy`.
    """
    rng = np.random.default_rng(0)
    count = max(options.size // (320 * _NUMPY_PART), 1) * 320 * _NUMPY_PART
    rows: list[Row] = []
    for bits in WIDTHS:
        rows += _fixed_width(bits, rng.integers(0, 2**bits, count, dtype=np.uint8), options)
    return rows + _ternary(rng.integers(-1, 2, count, dtype=np.int8), options)


def _fixed_width(bits: int, codes: Bytes, options: Options) -> list[Row]:
    packed, count = kvlab.pack(codes, bits), len(codes)
    part, packed_part = codes[: count // _NUMPY_PART], packed[: len(packed) // _NUMPY_PART]
    check(np.array_equal(numpy_pack(part, bits), packed_part), f"pack, {bits} bits")
    check(np.array_equal(numpy_unpack(packed_part, bits), part), f"NumPy's unpack, {bits} bits")
    check(np.array_equal(kvlab.unpack(packed, bits, count), codes), f"unpack, {bits} bits")
    calls = lambda: kvlab.pack(codes, bits), lambda: kvlab.unpack(packed, bits, count)
    numpy_calls = lambda: numpy_pack(part, bits), lambda: numpy_unpack(packed_part, bits)
    return _measure(bits, codes.nbytes, packed.nbytes, calls, numpy_calls, options)


def _ternary(values: NDArray[np.int8], options: Options) -> list[Row]:
    packed, count = kvlab.pack_ternary(values), len(values)
    part, packed_part = values[: count // _NUMPY_PART], packed[: len(packed) // _NUMPY_PART]
    weights = np.array([1, 3, 9, 27, 81], np.uint8)

    def numpy_ternary_pack() -> Bytes:
        digits = part.view(np.uint8) + np.uint8(1)
        packed: Bytes = digits.reshape(-1, 5) @ weights
        return packed

    def numpy_ternary_unpack() -> NDArray[np.int8]:
        digits = packed_part[:, None] // weights % np.uint8(3)
        return digits.view(np.int8).reshape(-1) - np.int8(1)

    check(np.array_equal(numpy_ternary_pack(), packed_part), "pack_ternary")
    check(np.array_equal(numpy_ternary_unpack(), part), "NumPy's unpack_ternary")
    check(np.array_equal(kvlab.unpack_ternary(packed, count), values), "unpack_ternary")
    calls = lambda: kvlab.pack_ternary(values), lambda: kvlab.unpack_ternary(packed, count)
    numpy_calls = numpy_ternary_pack, numpy_ternary_unpack
    return _measure(1.6, values.nbytes, packed.nbytes, calls, numpy_calls, options)


def _measure(
    bits: float,
    nbytes: int,
    packed_nbytes: int,
    calls: tuple[Callable[[], object], Callable[[], object]],
    numpy_calls: tuple[Callable[[], object], Callable[[], object]],
    options: Options,
) -> list[Row]:
    rows: list[Row] = []
    for name, call, numpy_call in zip(("pack", "unpack"), calls, numpy_calls, strict=True):
        what: Row = {"operation": name, "bits": bits, "times_smaller": nbytes / packed_nbytes}
        figures = against_copy(call, nbytes + packed_nbytes, options, numpy_call, 1 / _NUMPY_PART)
        rows.append(what | figures)
    return rows


def numpy_pack(codes: Bytes, bits: int) -> Bytes:
    """Pack flat codes, a multiple of 8, with NumPy: the codes of a byte, or of 8 bytes, are shifted together.

    Examples
    --------
    >>> numpy_pack(np.arange(8, dtype=np.uint8), 4)
    array([ 16,  50,  84, 118], dtype=uint8)
    """
    if 8 % bits == 0:
        fields = codes.reshape(-1, 8 // bits)
        packed = fields[:, 0].copy()
        for i in range(1, 8 // bits):
            packed |= fields[:, i] << np.uint8(i * bits)
        return packed
    fields = codes.reshape(-1, 8)
    words = fields[:, 0].astype("<u8")
    for i in range(1, 8):
        words |= fields[:, i].astype("<u8") << np.uint64(i * bits)
    return words.view(np.uint8).reshape(-1, 8)[:, :bits].reshape(-1)


def numpy_unpack(packed: Bytes, bits: int) -> Bytes:
    """Unpack what `numpy_pack` made.

    Examples
    --------
    >>> numpy_unpack(np.array([ 16,  50,  84, 118], np.uint8), 4)
    array([0, 1, 2, 3, 4, 5, 6, 7], dtype=uint8)
    """
    if 8 % bits == 0:
        shifts = np.arange(0, 8, bits, dtype=np.uint8)
        return (packed[:, None] >> shifts & np.uint8(2**bits - 1)).reshape(-1)
    padded = np.zeros((len(packed) // bits, 8), np.uint8)
    padded[:, :bits] = packed.reshape(-1, bits)
    shifts = np.arange(0, 8 * bits, bits, dtype=np.uint64)
    return (padded.view("<u8") >> shifts & np.uint64(2**bits - 1)).astype(np.uint8).reshape(-1)

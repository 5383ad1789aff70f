"""Packing on a GPU: launches of ``codec/bits.cu`` and ``codec/ternary.cu``, and of their Numba counterparts.

Rows that end on byte borders form one run, which the CUDA C++ kernels pack at the speed of memory. For other
rows a thread packs 8 codes. The Numba kernels, written for reading, always do the latter.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from kvlab.arrays import ArrayT
from kvlab.jit.launch import cuda_kernel, numba_kernel
from kvlab.new_arrays import empty
from kvlab.ops import bits as ops
from kvlab.ops.device_arrays import (
    Flag,
    contiguous,
    launch,
    pointer,
    to_host,
)
from kvlab.views import cuda_view

__all__ = ["pack", "pack_ternary", "unpack", "unpack_ternary"]

_THREADS = 256
_TILE, _WARPS = 1024, 8  # codes of a warp of the tiled kernels; warps of a block
_TERNARY_PART = 1020  # ternary values that a warp takes of a longer row


def pack(codes: ArrayT, bits: int, check: bool, backend: str = "cuda") -> ArrayT:
    """Launcher of backends "cuda" and "numba" for `kvlab.pack`."""
    source: Any = contiguous(codes, "codes")
    *rows, n = source.shape
    packed: ArrayT = empty((*rows, ops.packed_bytes(n, bits)), "uint8", source)
    flag = Flag(source, check and bits < 8, backend)
    _launch(
        "pack",
        source,
        packed,
        math.prod(rows),
        n,
        bits,
        [pointer(source)],
        [pointer(packed), flag.pointer],
        backend,
    )
    if flag.is_raised():
        ops.refuse_large(to_host(source, "codes"), bits)
    return packed


def unpack(packed: ArrayT, bits: int, count: int, backend: str = "cuda") -> ArrayT:
    """Launcher of backends "cuda" and "numba" for `kvlab.unpack`."""
    source: Any = contiguous(packed, "packed")
    *rows, _ = source.shape
    codes: ArrayT = empty((*rows, count), "uint8", source)
    _launch(
        "unpack", source, codes, math.prod(rows), count, bits, [pointer(source)], [pointer(codes)], backend
    )
    return codes


def _launch(
    name: str,
    source: Any,
    result: Any,
    rows: int,
    n: int,
    bits: int,
    before: list[int],
    after: list[int],
    backend: str,
) -> None:
    """Launch ``pack_*`` or ``unpack_*``; pointers stand before and after the shape."""
    if rows * n == 0:
        return
    device = cuda_view(source, name).device
    if backend == "cuda" and (rows == 1 or n * bits % 8 == 0):
        kernel = cuda_kernel("codec/bits", f"{name}_flat", (("CODE_BITS", bits),), device)
        arguments = [*before, np.int64(rows * n), *after]
        launch(kernel, -(-rows * n // (_TILE * _WARPS)), (32 * _WARPS,), arguments, result)
        return
    if backend == "cuda":
        kernel = cuda_kernel("codec/bits", f"{name}_rows", (("CODE_BITS", bits),), device)
    else:
        kernel = numba_kernel("bits", f"{name}_rows", (("bits", bits),), device)
    arguments = [*before, np.int64(rows), np.int64(n), *after]
    launch(kernel, -(-rows * -(-n // 8) // _THREADS), (_THREADS,), arguments, result)


def pack_ternary(values: ArrayT, check: bool, backend: str = "cuda") -> ArrayT:
    """Launcher of backends "cuda" and "numba" for `kvlab.pack_ternary`."""
    source: Any = contiguous(values, "values")
    *rows, n = source.shape
    packed: ArrayT = empty((*rows, -(-n // 5)), "uint8", source)
    flag = Flag(source, check, backend)
    _launch_ternary("pack_ternary", source, packed, math.prod(rows), n, flag, backend)
    if flag.is_raised():
        ops.refuse_other_than_ternary(to_host(source, "values"))
    return packed


def unpack_ternary(packed: ArrayT, count: int, check: bool, backend: str = "cuda") -> ArrayT:
    """Launcher of backends "cuda" and "numba" for `kvlab.unpack_ternary`."""
    source: Any = contiguous(packed, "packed")
    *rows, _ = source.shape
    values: ArrayT = empty((*rows, count), "int8", source)
    flag = Flag(source, check, backend)
    _launch_ternary("unpack_ternary", source, values, math.prod(rows), count, flag, backend)
    if flag.is_raised():
        ops.refuse_no_ternary_byte(to_host(source, "packed"))
    return values


def _launch_ternary(name: str, source: Any, result: Any, rows: int, n: int, flag: Flag, backend: str) -> None:
    if rows * n == 0:
        return
    device = cuda_view(source, name).device
    shape = [np.int64(rows), np.int64(n)]
    arguments = [pointer(source), *shape, pointer(result), flag.pointer]
    if backend == "numba":
        kernel = numba_kernel("bits", f"{name}_rows", (), device)
        launch(kernel, -(-rows * -(-n // 5) // _THREADS), (_THREADS,), arguments, result)
        return
    if n % 5 == 0:  # rows follow each other without gaps: one long row
        rows, n = 1, rows * n
        arguments[1:3] = np.int64(rows), np.int64(n)
    tiles = -(-rows // (_TILE // n)) if n <= _TILE else rows * -(-n // _TERNARY_PART)
    kernel = cuda_kernel("codec/ternary", name, (), device)
    launch(kernel, -(-tiles // _WARPS), (32 * _WARPS,), arguments, result)


def pack_numba(codes: ArrayT, bits: int, check: bool) -> ArrayT:
    """`pack` for backend "numba"."""
    return pack(codes, bits, check, "numba")


def unpack_numba(packed: ArrayT, bits: int, count: int) -> ArrayT:
    """`unpack` for backend "numba"."""
    return unpack(packed, bits, count, "numba")


def pack_ternary_numba(values: ArrayT, check: bool) -> ArrayT:
    """`pack_ternary` for backend "numba"."""
    return pack_ternary(values, check, "numba")


def unpack_ternary_numba(packed: ArrayT, count: int, check: bool) -> ArrayT:
    """`unpack_ternary` for backend "numba"."""
    return unpack_ternary(packed, count, check, "numba")

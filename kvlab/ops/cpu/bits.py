"""Packing of low-bit codes on the CPU: an array of any layout to calls of the Numba kernels.

Kernels take contiguous memory and divide it among threads. An array with gaps is copied in parts of a few
MiB, never as a whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvlab.arrays import ArrayT
from kvlab.new_arrays import like_first
from kvlab.ops.bits import packed_bytes, refuse_large, refuse_no_ternary_byte, refuse_other_than_ternary
from kvlab.views import to_numpy_view

__all__ = [
    "contiguous_blocks",
    "pack",
    "pack_ternary",
    "unpack",
    "unpack_ternary",
]

_RUN = 8000  # codes of one parallel task; a multiple of 8 and of 5
_BLOCK_BYTES = 8 * 2**20


def contiguous_blocks(x: NDArray[Any], whole_axes: int = 1) -> Iterator[tuple[Any, NDArray[Any]]]:
    """Yield (index, block): block equals x[index], and is as kernels take it: contiguous, aligned, writable.

    An array that is so already comes as one block, itself; others are copied part by part, never as a whole.
    (Writable, because Numba would compile a kernel again for read-only arrays; no kernel writes to inputs.)

    Parameters
    ----------
    x : numpy.ndarray
    whole_axes : int
        Number of last axes that no block splits.

    Examples
    --------
    >>> [(index, block.shape) for index, block in contiguous_blocks(np.zeros((4, 6))[:, ::2])]
    [((), (4, 3))]
    """
    if x.flags.carray:
        yield (), x
    elif x.nbytes <= _BLOCK_BYTES or x.ndim <= whole_axes:
        yield (), x.copy()
    elif x[0].nbytes > _BLOCK_BYTES:
        for i in range(len(x)):
            for index, block in contiguous_blocks(x[i], whole_axes):
                yield (i, *index), block
    else:
        step = _BLOCK_BYTES // x[0].nbytes
        for start in range(0, len(x), step):
            part = slice(start, start + step)
            yield (part,), x[part].copy()


def _runs(count: int, bits: int) -> tuple[int, int]:
    """Return codes and bytes of a parallel task: one row, or any stretch where rows end on byte borders."""
    return (_RUN, _RUN // 8 * bits) if count % 8 == 0 else (count, packed_bytes(count, bits))


def _ternary_runs(count: int) -> tuple[int, int]:
    return (_RUN, _RUN // 5) if count % 5 == 0 else (count, -(-count // 5))


# ---- launchers: arguments are those of `kvlab.ops.bits`, checked; wrong values are always looked for ----


def pack(codes: ArrayT, bits: int, check: bool) -> ArrayT:
    from kvlab.numba_kernels.cpu.bits import pack_runs

    view = to_numpy_view(codes, "codes")
    *rows, count = view.shape
    out = np.empty((*rows, packed_bytes(count, bits)), np.uint8)
    run, run_bytes = _runs(count, bits)
    if view.size:
        for index, block in contiguous_blocks(view):
            if pack_runs(block.reshape(-1), run, bits, out[index].reshape(-1), run_bytes):
                refuse_large(view, bits)
    return like_first(out, codes)


def unpack(packed: ArrayT, bits: int, count: int) -> ArrayT:
    from kvlab.numba_kernels.cpu.bits import unpack_runs

    view = to_numpy_view(packed, "packed")
    out = np.empty((*view.shape[:-1], count), np.uint8)
    run, run_bytes = _runs(count, bits)
    if out.size:
        for index, block in contiguous_blocks(view):
            unpack_runs(block.reshape(-1), run_bytes, bits, out[index].reshape(-1), run)
    return like_first(out, packed)


def pack_ternary(values: ArrayT, check: bool) -> ArrayT:
    from kvlab.numba_kernels.cpu.bits import pack_ternary_runs

    view = to_numpy_view(values, "values")
    *rows, count = view.shape
    out = np.empty((*rows, -(-count // 5)), np.uint8)
    run, run_bytes = _ternary_runs(count)
    if view.size:
        for index, block in contiguous_blocks(view):
            if pack_ternary_runs(block.reshape(-1), run, out[index].reshape(-1), run_bytes):
                refuse_other_than_ternary(view)
    return like_first(out, values)


def unpack_ternary(packed: ArrayT, count: int, check: bool) -> ArrayT:
    from kvlab.numba_kernels.cpu.bits import unpack_ternary_runs

    view = to_numpy_view(packed, "packed")
    out = np.empty((*view.shape[:-1], count), np.int8)
    run, run_bytes = _ternary_runs(count)
    if out.size:
        for index, block in contiguous_blocks(view):
            if unpack_ternary_runs(block.reshape(-1), run_bytes, out[index].reshape(-1), run):
                refuse_no_ternary_byte(view)
    return like_first(out, packed)

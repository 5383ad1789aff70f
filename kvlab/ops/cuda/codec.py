"""Codecs on a GPU: which kernel serves which layout, for backends "cuda" and "numba".

- ``codec/rows.cu``: groups of 32 to 1,024 elements, a power of two, along rows of whole groups. One pass.
- ``codec/columns.cu``: affine and symmetric groups of up to 128 rows, one scale a column. One pass.
- ``codec/groups.cu`` and its Numba counterpart: groups of any size along rows, to codes of one byte, which
  another launch packs.

Groups along any other axis: the caller's library first turns that axis to the end, and back afterwards.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import numpy as np

from kvlab.arrays import ArrayT, dtype_name, numpy_dtype
from kvlab.jit.launch import cuda_kernel, numba_kernel
from kvlab.jit.structs import Struct
from kvlab.new_arrays import empty
from kvlab.ops import codebooks
from kvlab.ops.bits import refuse_no_ternary_byte
from kvlab.ops.codec import Quantized, refuse_unrepresentable
from kvlab.ops.codec_layout import CODECS, FLOATS, Layout
from kvlab.ops.cuda import bits as bits_cuda
from kvlab.ops.device_arrays import (
    Flag,
    contiguous,
    launch,
    multiprocessors,
    permuted,
    pointer,
    to_host,
)
from kvlab.views import cuda_view

__all__ = ["codebook", "dequantize", "dequantize_numba", "quantize", "quantize_numba"]

_TILE, _WARPS = 1024, 8  # elements of a tile of codec/rows.cu; tiles of a block at a time
_TILES_BY_TABLE = 4  # tiles that a warp takes one after the other where the block fills a table first
_COLUMN_WARPS, _COLUMN_ROWS = 2, 64  # of a block of codec/columns.cu; rows of a warp that dequantises
_MAX_COLUMN_GROUP = 128
_SHARED_FLOATS = 8 * 1024  # of a group of codec/groups.cu; larger ones stand in global memory
_SCRATCH_FLOATS = 2**26
_SCRATCH_BLOCKS = 512
_BLOCKS_A_MULTIPROCESSOR = 32  # of codec/groups.cu
_SHAPE = Struct(units="q", length="q", columns="q", group="q", groups="q")
_GROUPS = Struct(rows="q", n="q", group="q")
_BOOK = Struct(reach="i", units="f", borders="255i", levels="256f")


def quantize(
    x: ArrayT, layout: Layout, nan: str, backend: str = "cuda"
) -> tuple[ArrayT, ArrayT, ArrayT | None]:
    """Launcher of backends "cuda" and "numba" for `kvlab.quantize`."""
    source: Any = contiguous(x, "x")
    flag = Flag(source, nan == "raise", backend)
    rows, columns = _takes_rows(layout), _takes_columns(layout, _MAX_COLUMN_GROUP)
    if math.prod(layout.shape) and (backend == "numba" or not (rows or columns)):
        packed, words = _quantize_groups(source, layout, flag, backend)
    else:
        packed = empty(layout.packed_shape, "uint8", source)
        words = [empty(layout.scale_shape, "float16", source) for _ in range(1 + (layout.codec == "affine"))]
        if rows:
            _quantize_rows(source, packed, words, layout, flag)
        elif columns:
            _quantize_columns(source, packed, words, layout, flag)
    if flag.is_raised():
        refuse_unrepresentable(to_host(source, "x"))
    return packed, words[0], words[1] if len(words) > 1 else None


def dequantize(
    quantized: Quantized[ArrayT], layout: Layout, dtype: str, check: bool, backend: str = "cuda"
) -> ArrayT:
    """Launcher of backends "cuda" and "numba" for `kvlab.dequantize`."""
    packed: Any = contiguous(quantized.packed, "quantized.packed")
    words = [contiguous(quantized.scale, "quantized.scale")]
    if layout.codec == "affine":
        words.append(contiguous(quantized.offset, "quantized.offset"))
    out: ArrayT
    if not math.prod(layout.shape):
        out = empty(layout.shape, dtype, packed)
    elif backend == "cuda" and _takes_rows(layout):
        out = empty(layout.shape, dtype, packed)
        flag = Flag(packed, check and layout.codec == "ternary", backend)
        _dequantize_rows(packed, words, out, layout, dtype, flag)
        if flag.is_raised():
            refuse_no_ternary_byte(to_host(packed, "packed"))
    elif backend == "cuda" and _takes_columns(layout, layout.shape[layout.axis]):
        out = empty(layout.shape, dtype, packed)
        _dequantize_columns(packed, words, out, layout, dtype)
    else:
        out = _dequantize_groups(packed, words, layout, dtype, check, backend)
    return out


def quantize_numba(x: ArrayT, layout: Layout, nan: str) -> tuple[ArrayT, ArrayT, ArrayT | None]:
    """`quantize` for backend "numba"."""
    return quantize(x, layout, nan, "numba")


def dequantize_numba(quantized: Quantized[ArrayT], layout: Layout, dtype: str, check: bool) -> ArrayT:
    """`dequantize` for backend "numba"."""
    return dequantize(quantized, layout, dtype, check, "numba")


# ---- Groups along rows, one pass


def _takes_rows(layout: Layout) -> bool:
    n, group = layout.shape[-1], layout.group_size
    fits = layout.along_rows and 32 <= group <= _TILE and group & (group - 1) == 0 and n % group == 0
    return fits and (layout.codec != "ternary" or _TILE % n == 0)


def _quantize_rows(x: Any, packed: Any, words: list[Any], layout: Layout, flag: Flag) -> None:
    arguments = [pointer(packed), *_addresses(words), flag.pointer]
    _launch_rows("quantize_rows", x, arguments, layout, dtype_name(x))


def _dequantize_rows(packed: Any, words: list[Any], out: Any, layout: Layout, dtype: str, flag: Flag) -> None:
    arguments = [*_addresses(words), pointer(out), flag.pointer]
    _launch_rows("dequantize_rows", packed, arguments, layout, dtype)


def _launch_rows(name: str, source: Any, addresses: list[int], layout: Layout, dtype: str) -> None:
    count, (book, table) = math.prod(layout.shape), _book_of(layout)
    macros = (*_macros(layout, dtype), ("LANES", layout.group_size // 32))
    kernel = cuda_kernel("codec/rows", name, macros, cuda_view(source, "x").device)
    blocks = -(-count // (_TILE * _WARPS * (_TILES_BY_TABLE if layout.codec == "hadamard" else 1)))
    shared = table if name == "quantize_rows" else 0
    arguments = [pointer(source), np.int64(count), np.int32(layout.shape[-1]), *addresses, book]
    launch(kernel, blocks, (32 * _WARPS,), arguments, source, shared)


def _addresses(words: list[Any]) -> list[int]:
    """Return the addresses of scales and of offsets, or null."""
    return [pointer(words[0]), pointer(words[1]) if len(words) > 1 else 0]


def _macros(layout: Layout, dtype: str) -> tuple[tuple[str, int], ...]:
    codec = CODECS.index(layout.codec)
    return ("DTYPE", FLOATS.index(dtype)), ("CODEC", codec), ("CODE_BITS", _bits(layout))


def _bits(layout: Layout) -> int:
    """Return the bits of a code in a byte of its own: 2 for a ternary digit."""
    return 2 if layout.codec == "ternary" else int(layout.bits)


@cache
def codebook(bits: int) -> dict[str, Any]:
    """Return what kernels take of the codebook of a width: borders and levels, and where the last border is.

    Examples
    --------
    >>> book = codebook(4)
    >>> book["reach"], book["borders"][12:16]
    (121, array([ 72,  92, 120,   0], dtype=int32))
    """
    borders, levels = codebooks.borders(bits), codebooks.levels(bits)
    padded = np.zeros(255, np.int32), np.zeros(256, np.float32)
    for table, numbers in zip(padded, (borders, levels), strict=True):
        table[: len(numbers)] = numbers
    return {
        "reach": int(borders[-1]) + 1,
        "units": codebooks.units(bits),
        "borders": padded[0],
        "levels": padded[1],
    }


@cache
def _book(bits: int) -> tuple[Any, int]:
    """Return the codebook as an argument of kernels and the bytes of their table of codes; 0 bits: none."""
    book = codebook(bits) if bits else {"reach": 0}
    return _BOOK.pack(**book), 2 * book["reach"]


def _book_of(layout: Layout) -> tuple[Any, int]:
    return _book(int(layout.bits) if layout.codec == "hadamard" else 0)


def _numba_codebook(entry: str, bits: int) -> dict[str, Any]:
    """Return the options of a Numba kernel that are its codebook."""
    if entry == "dequantize_groups":
        return {"levels": tuple(map(float, codebooks.levels(bits)))}
    return {"unit": float(codebooks.units(bits)), "borders": tuple(map(int, codebooks.borders(bits)))}


# ---- Groups across rows, one pass


def _takes_columns(layout: Layout, largest: int) -> bool:
    fits = not layout.along_rows and layout.codec in ("affine", "symmetric")
    return fits and layout.shape[-1] % 32 == 0 and layout.group_size <= largest


def _quantize_columns(x: Any, packed: Any, words: list[Any], layout: Layout, flag: Flag) -> None:
    addresses = [pointer(packed), *_addresses(words), flag.pointer]
    _launch_columns("quantize_columns", x, addresses, layout, dtype_name(x), None)


def _dequantize_columns(packed: Any, words: list[Any], out: Any, layout: Layout, dtype: str) -> None:
    parts = -(-layout.group_size // _COLUMN_ROWS)
    _launch_columns("dequantize_columns", packed, [*_addresses(words), pointer(out)], layout, dtype, parts)


def _launch_columns(
    name: str, source: Any, addresses: list[int], layout: Layout, dtype: str, parts: int | None
) -> None:
    """Launch a warp for two units, or `parts` of them; a unit is 32 columns of a group."""
    length, columns = layout.shape[layout.axis], math.prod(layout.shape[layout.axis + 1 :])
    groups = -(-length // layout.group_size)
    units = math.prod(layout.shape[: layout.axis]) * groups * columns // 32
    shape = _SHAPE.pack(units=units, length=length, columns=columns, group=layout.group_size, groups=groups)
    kernel = cuda_kernel("codec/columns", name, _macros(layout, dtype), cuda_view(source, "x").device)
    blocks = -(-(-(-units // 2) * (parts or 1)) // _COLUMN_WARPS)
    arguments = [pointer(source), shape, *([] if parts is None else [np.int64(parts)]), *addresses]
    threads = 32 * _COLUMN_WARPS
    kept = 0 if parts else threads * layout.group_size * 2 * numpy_dtype(dtype).itemsize
    launch(kernel, blocks, (threads,), arguments, source, kept)


# ---- Groups of any size, codes of one byte between two launches


def _quantize_groups(x: Any, layout: Layout, flag: Flag, backend: str) -> tuple[Any, list[Any]]:
    to_end, back = _orders(layout)
    source = contiguous(permuted(x, to_end), "x")
    transposed = layout.transposed
    codes = empty(transposed.shape, "int8" if layout.codec == "ternary" else "uint8", source)
    words = [empty(transposed.scale_shape, "float16", source) for _ in range(1 + (layout.codec == "affine"))]
    _launch_groups("quantize_groups", source, [codes, *words], transposed, dtype_name(source), flag, backend)
    codes, *words = (contiguous(permuted(array, back), "codes") for array in (codes, *words))
    if layout.codec == "ternary":
        return bits_cuda.pack_ternary(codes, False, backend), words
    return bits_cuda.pack(codes, int(layout.bits), False, backend), words


def _dequantize_groups(
    packed: Any, words: list[Any], layout: Layout, dtype: str, check: bool, backend: str
) -> Any:
    to_end, back = _orders(layout)
    n = layout.shape[-1]
    if layout.codec == "ternary":
        codes: Any = bits_cuda.unpack_ternary(packed, n, check, backend)
    else:
        codes = bits_cuda.unpack(packed, int(layout.bits), n, backend)
    codes, *words = (contiguous(permuted(array, to_end), "codes") for array in (codes, *words))
    out = empty(layout.transposed.shape, dtype, codes)
    _launch_groups("dequantize_groups", codes, [*words, out], layout.transposed, dtype, None, backend)
    return contiguous(permuted(out, back), "out")


def _orders(layout: Layout) -> tuple[list[int], list[int]]:
    """Return the orders of axes that turn the axis of groups to the end, and back."""
    axes = range(len(layout.shape))
    to_end = [*(axis for axis in axes if axis != layout.axis), layout.axis]
    return to_end, [to_end.index(axis) for axis in axes]


def _launch_groups(
    entry: str, source: Any, results: list[Any], layout: Layout, dtype: str, flag: Flag | None, backend: str
) -> None:
    """Launch on `source` and `results`, in the order of parameters; words stand together."""
    n, group = layout.shape[-1], layout.group_size
    rows = math.prod(layout.shape[:-1])
    groups = rows * -(-n // group)
    pitch = 1 << (group - 1).bit_length()
    blocks, scratch, shared = min(groups, 2**31 - 1), None, 4 * pitch
    if pitch > _SHARED_FLOATS:
        blocks = max(1, min(groups, _SCRATCH_BLOCKS, _SCRATCH_FLOATS // pitch))
        scratch, shared = empty((blocks * pitch,), "float32", source), 0
    addresses = [pointer(array) for array in results]
    if layout.codec != "affine":
        addresses.insert(1 if flag is None else 2, 0)  # no offset
    addresses += [] if flag is None else [flag.pointer]
    bits, device = _bits(layout), cuda_view(source, "x").device
    threads = min(256, max(32, pitch // 4))
    if backend == "numba":
        options: dict[str, Any] = {
            "dtype": dtype,
            "codec": layout.codec,
            "bits": bits,
            "shared": int(scratch is None),
        }
        if layout.codec == "hadamard":
            options |= _numba_codebook(entry, bits)
        kernel = numba_kernel("codec", entry, tuple(options.items()), device)
        shape, book = [np.int64(rows), np.int64(n), np.int64(group)], []
    else:
        kernel = cuda_kernel("codec/groups", entry, _macros(layout, dtype), device)
        shape, (argument, table) = [_GROUPS.pack(rows=rows, n=n, group=group)], _book_of(layout)
        book, shared = [argument], shared + table
        blocks = min(blocks, _BLOCKS_A_MULTIPROCESSOR * multiprocessors(device))
    arguments = [pointer(source), *shape, *addresses, pointer(scratch), np.int64(pitch), *book]
    launch(kernel, blocks, (threads,), arguments, source, shared)

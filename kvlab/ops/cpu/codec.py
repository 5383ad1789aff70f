"""Codecs on the CPU: from an array of any layout to calls of the Numba kernels, and back.

Kernels take contiguous memory. An array with gaps is copied in parts of a few MiB, never as a whole. Groups
across rows have kernels of their own for the affine codecs; the others turn the axis to the end first.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvlab.arrays import ArrayT, dtype_name, numpy_dtype
from kvlab.new_arrays import like_first
from kvlab.ops import codebooks
from kvlab.ops.bits import pack, pack_ternary, unpack, unpack_ternary
from kvlab.ops.codec import Quantized, refuse_unrepresentable
from kvlab.ops.codec_layout import CODECS, FLOATS, Layout, half_levels
from kvlab.ops.cpu.bits import contiguous_blocks
from kvlab.views import to_numpy_view

__all__ = ["dequantize", "pack_codes", "quantize", "unpack_codes", "views_of"]

_NO_BITS, _NO_FLOATS = np.empty(0, np.uint16), np.empty(0, np.float32)


def quantize(x: ArrayT, layout: Layout, nan: str) -> tuple[ArrayT, ArrayT, ArrayT | None]:
    """Launcher of backend "cpu": packed codes, scale and offset."""
    view = to_numpy_view(x, "x")
    if layout.along_rows or layout.codec in ("affine", "symmetric"):
        packed, words, bad = _quantize_in_place(view, layout)
    else:
        transposed, axis = layout.transposed, layout.axis
        packed, words, bad = _quantize_in_place(np.moveaxis(view, axis, -1), transposed)
        packed = pack_codes(np.moveaxis(unpack_codes(packed, transposed, "cpu"), -1, axis), layout, "cpu")
        words = np.ascontiguousarray(np.moveaxis(words, -1, axis + 1))
    if bad and nan == "raise":
        refuse_unrepresentable(view)
    scale, *offset = (like_first(array.view(np.float16), x) for array in words)
    return like_first(packed, x), scale, offset[0] if offset else None


def _quantize_in_place(x: NDArray[Any], layout: Layout) -> tuple[NDArray[np.uint8], NDArray[np.uint16], int]:
    """Quantise along rows or columns; words (1 or 2, *scale shape) are scale and, if affine, offset."""
    from kvlab.numba_kernels.cpu.codec import quantize_rows
    from kvlab.numba_kernels.cpu.columns import quantize_columns

    codec, bits = CODECS.index(layout.codec), int(layout.bits)
    packed = np.empty(layout.packed_shape, np.uint8)
    words = np.empty((2 if layout.codec == "affine" else 1, *layout.scale_shape), np.uint16)
    book = _codebook(bits if layout.codec == "hadamard" else 1)
    half, bad = half_levels(bits), 0
    if x.size == 0:
        return packed, words, bad
    for index, block in contiguous_blocks(x, len(layout.shape) - layout.axis):
        scale = words[0][index].reshape(-1)
        offset = words[1][index].reshape(-1) if layout.codec == "affine" else _NO_BITS
        outputs = packed[index].reshape(-1), scale, offset
        source = _elements(block)
        how = codec, bits, layout.group_size
        if layout.along_rows:
            bad += quantize_rows(*source, layout.shape[-1], *how, *book, half, *outputs)
        else:
            bad += quantize_columns(*source, _columns(block.size, layout), *how, half, *outputs)
    return packed, words, bad


@cache
def _codebook(bits: int) -> tuple[np.float32, NDArray[np.int8], NDArray[np.uint8]]:
    """Return units and borders of a codebook as kernels take them."""
    from kvlab.numba_kernels.cpu.codec import tables_of_borders

    return codebooks.units(bits), *tables_of_borders(codebooks.borders(bits))


def dequantize(quantized: Quantized[ArrayT], layout: Layout, dtype: str, check: bool) -> ArrayT:
    """Launcher of backend "cpu": the values, saturated."""
    packed, scale, offset = views_of(quantized)
    if layout.along_rows or layout.codec in ("affine", "symmetric"):
        out = _dequantize_in_place(packed, scale, offset, layout, numpy_dtype(dtype))
    else:
        transposed, axis = layout.transposed, layout.axis
        packed = pack_codes(np.moveaxis(unpack_codes(packed, layout, "cpu"), axis, -1), transposed, "cpu")
        out = _dequantize_in_place(packed, np.moveaxis(scale, axis, -1), None, transposed, numpy_dtype(dtype))
        out = np.ascontiguousarray(np.moveaxis(out, -1, axis))
    return like_first(out, quantized.packed)


def _dequantize_in_place(
    packed: NDArray[np.uint8],
    scale: NDArray[np.float16],
    offset: NDArray[np.float16] | None,
    layout: Layout,
    dtype: np.dtype[Any],
) -> NDArray[Any]:
    from kvlab.numba_kernels.cpu.codec import dequantize_rows
    from kvlab.numba_kernels.cpu.columns import dequantize_columns

    codec, bits = CODECS.index(layout.codec), int(layout.bits)
    levels = codebooks.levels(bits) if layout.codec == "hadamard" else _NO_FLOATS
    out = np.empty(layout.shape, dtype)
    if out.size == 0:
        return out
    for index, block in contiguous_blocks(packed, len(layout.shape) - layout.axis):
        words = [_words(scale[index]), _NO_BITS if offset is None else _words(offset[index])]
        part = out[index]
        bits16, floats, kind = _elements(part)
        target = kind, bits16, floats
        how = codec, bits, layout.group_size
        if layout.along_rows:
            if dequantize_rows(block.reshape(-1), layout.shape[-1], *how, levels, *words, *target):
                unpack_ternary(packed, layout.shape[-1], backend="cpu")  # names the byte that is none
        else:
            dequantize_columns(block.reshape(-1), _columns(part.size, layout), *how, *words, *target)
    return out


def _elements(x: NDArray[Any]) -> tuple[NDArray[np.uint16], NDArray[np.float32], int]:
    """Return a contiguous array as kernels take it: flat 16-bit elements, flat float32 elements, the type."""
    kind = FLOATS.index(dtype_name(x))
    flat = x.reshape(-1)
    return (_NO_BITS, flat, kind) if flat.dtype == np.float32 else (flat.view(np.uint16), _NO_FLOATS, kind)


def _words(x: NDArray[np.float16]) -> NDArray[np.uint16]:
    return np.ascontiguousarray(x).view(np.uint16).reshape(-1)


def _columns(size: int, layout: Layout) -> tuple[int, int, int, int]:
    """Return (outer, length, inner, n) of `size` elements, groups running along `length`."""
    length, count = layout.shape[layout.axis], layout.shape[-1]
    inner = math.prod(layout.shape[layout.axis + 1 : -1])
    return size // (length * inner * count), length, inner, count


def views_of(quantized: Quantized[Any]) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any] | None]:
    """Packed codes, scale and offset as arrays of NumPy."""
    offset = None if quantized.offset is None else to_numpy_view(quantized.offset, "quantized.offset")
    packed = to_numpy_view(quantized.packed, "quantized.packed")
    return packed, to_numpy_view(quantized.scale, "quantized.scale"), offset


def pack_codes(codes: NDArray[Any], layout: Layout, backend: str) -> NDArray[np.uint8]:
    """Pack codes as `Quantized` has them."""
    if layout.codec == "ternary":
        return pack_ternary(codes, backend=backend)
    return pack(codes, int(layout.bits), backend=backend)


def unpack_codes(packed: NDArray[np.uint8], layout: Layout, backend: str) -> NDArray[Any]:
    """Undo `pack_codes`."""
    if layout.codec == "ternary":
        return unpack_ternary(packed, layout.shape[-1], backend=backend)
    return unpack(packed, int(layout.bits), layout.shape[-1], backend=backend)

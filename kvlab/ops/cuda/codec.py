"""Codecs on a GPU: which kernel serves which layout, for backends "cuda" and "numba".

- ``codec/rows.cu``, ``codec/hadamard.cu``, ``codec/quantize_ternary.cu``: groups of 32 to 1,024 elements, a
  power of two, along rows of whole groups. One pass.
- ``codec/columns.cu``: affine and symmetric groups of up to 128 rows, one scale a column. One pass.
- ``codec/groups.cu`` and its Numba counterpart: groups of any size along rows, to codes of one byte, which
  another launch packs. Any other axis is turned to the end by the caller's library first, and back.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from kvlab.arrays import ArrayT, cuda_view, dtype_name, empty
from kvlab.jit.launch import cuda_kernel, numba_kernel
from kvlab.jit.structs import Struct
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

__all__ = ["dequantize", "dequantize_numba", "quantize", "quantize_numba"]

_TILE = 1024  # elements of a warp of codec/rows.cu, and of a part of codec/quantize_ternary.cu
_BLOCK, _TERNARY_BLOCK = 8 * _TILE, 4 * 2 * _TILE  # elements of a block
_MAX_COLUMN_GROUP = 128
_SHARED_FLOATS = 8 * 1024  # of a group of codec/groups.cu; larger ones stand in global memory
_SCRATCH_FLOATS = 2**26
_SCRATCH_BLOCKS = 512
_SHAPE = Struct(chunks="q", length="q", columns="q", group="q", groups="q")
_GROUPS = Struct(rows="q", n="q", group="q", bits="i")
_BOOKS = {"quantize": Struct(numbers="256i"), "dequantize": Struct(numbers="128f")}


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
    call = _rows_call("quantize", x, layout, dtype_name(x))
    arguments = [pointer(x), *call.shape, pointer(packed), *call.addresses(words), flag.pointer, *call.book]
    launch(call.kernel, call.blocks, (call.threads,), arguments, x, call.shared)


def _dequantize_rows(packed: Any, words: list[Any], out: Any, layout: Layout, dtype: str, flag: Flag) -> None:
    call = _rows_call("dequantize", packed, layout, dtype)
    last = [flag.pointer] if layout.codec == "ternary" else call.book
    arguments = [pointer(packed), *call.shape, *call.addresses(words), pointer(out), *last]
    launch(call.kernel, call.blocks, (call.threads,), arguments, out, call.shared)


class _RowsCall(NamedTuple):
    """A kernel of rows.cu, hadamard.cu or quantize_ternary.cu, and what it is launched with."""

    kernel: Any
    shape: list[Any]
    has_offset: bool
    book: list[Any]
    blocks: int
    threads: int
    shared: int = 0

    def addresses(self, words: list[Any]) -> list[int]:
        """Return those of scales and, where the kernel has an argument for them, of offsets or null."""
        given = [pointer(array) for array in words]
        return [*given, 0] if self.has_offset and len(given) == 1 else given


def _rows_call(name: str, like: Any, layout: Layout, dtype: str) -> _RowsCall:
    count, group, device = math.prod(layout.shape), layout.group_size, cuda_view(like, "x").device
    macros = {"DTYPE": FLOATS.index(dtype)}
    shape: list[Any] = [np.int64(count)]
    if layout.codec == "ternary":
        macros["LANES"] = group // 32
        kernel = cuda_kernel("codec/quantize_ternary", f"{name}_ternary", tuple(macros.items()), device)
        shape.append(np.int32(layout.shape[-1]))
        return _RowsCall(kernel, shape, False, [], -(-count // _TERNARY_BLOCK), 128)
    macros["CODE_BITS"] = int(layout.bits)
    if layout.codec == "hadamard":
        values = min(group, 32 if (name, dtype) == ("dequantize", "float32") else 64)  # of a lane
        macros |= {"GROUP": group, "VALUES": values}
        kernel = cuda_kernel("codec/hadamard", f"{name}_hadamard", tuple(macros.items()), device)
        turns, warps = 4, 2  # tiles of a warp, warps of a block
        if name == "quantize":
            if layout.bits > 4:
                warps = 8
                turns = _even_turns(-(-count // (32 * values)), 16 * multiprocessors(device))
            shape.append(np.int32(turns))
        blocks = -(-count // (32 * warps * values * turns))
        lane = values * (2 if dtype != "float32" else 4) + 16 + values * int(layout.bits) // 8
        book = [_book(name, layout)]
        return _RowsCall(kernel, shape, False, book, blocks, 32 * warps, 32 * warps * lane)
    macros |= {"CODEC": CODECS.index(layout.codec), "LANES": group // 32}
    kernel = cuda_kernel("codec/rows", f"{name}_rows", tuple(macros.items()), device)
    return _RowsCall(kernel, shape, True, [], -(-count // _BLOCK), 256)


def _even_turns(tiles: int, warps: int) -> int:
    """Return how many tiles a warp takes, about 24, for `warps` warps at a time to end together."""
    waves = max(1, round(tiles / (warps * 24)))
    return max(1, -(-tiles // (warps * waves)))


def _bits(layout: Layout) -> int:
    """Return the bits of a code in a byte of its own: 2 for a ternary digit."""
    return 2 if layout.codec == "ternary" else int(layout.bits)


def _book(name: str, layout: Layout) -> Any:
    return _book_of(name, int(layout.bits) if layout.codec == "hadamard" else 0)


@cache
def _book_of(name: str, bits: int) -> Any:
    """Return what kernels take of a codebook; zeros for 0 bits.

    To quantise, its borders: 256 int32; to dequantise, its positive levels: 128 float32.
    """
    numbers = np.zeros(256, np.int32) if name == "quantize" else np.zeros(128, np.float32)
    if bits:
        given = codebooks.borders(bits) if name == "quantize" else codebooks.levels(bits)[2 ** (bits - 1) :]
        numbers[: len(given)] = given
    return _BOOKS[name].pack(numbers=numbers)


def _numba_codebook(entry: str, bits: int) -> dict[str, Any]:
    """Return the options of a Numba kernel that are its codebook."""
    if entry == "dequantize_groups":
        return {"levels": tuple(map(float, codebooks.levels(bits)))}
    return {"unit": float(codebooks.units(bits)), "borders": tuple(map(int, codebooks.borders(bits)))}


# ---- Groups across rows, one pass


def _takes_columns(layout: Layout, largest: int) -> bool:
    fits = not layout.along_rows and layout.codec in ("affine", "symmetric")
    return fits and layout.shape[-1] % 32 == 0 and layout.group_size <= largest


def _columns(layout: Layout, dtype: str, width: int) -> tuple[dict[str, int], Any, int]:
    """Return macros, the shape as kernels take it, and how many chunks of `width` columns there are."""
    length, columns = layout.shape[layout.axis], math.prod(layout.shape[layout.axis + 1 :])
    groups = -(-length // layout.group_size)
    chunks = math.prod(layout.shape[: layout.axis]) * groups * columns // width
    shape = _SHAPE.pack(chunks=chunks, length=length, columns=columns, group=layout.group_size, groups=groups)
    macros = {
        "DTYPE": FLOATS.index(dtype),
        "CODEC": CODECS.index(layout.codec),
        "CODE_BITS": int(layout.bits),
    }
    return macros, shape, chunks


def _quantize_columns(x: Any, packed: Any, words: list[Any], layout: Layout, flag: Flag) -> None:
    dtype = dtype_name(x)
    width = 8 if layout.bits == 3 else 4
    macros, shape, chunks = _columns(layout, dtype, width)
    kernel = cuda_kernel("codec/columns", "quantize_columns", tuple(macros.items()), cuda_view(x, "x").device)
    codes = {2: 0, 4: 0, 8: 0, 3: 24}.get(int(layout.bits), 68)  # bytes of a row of codes on the way
    shared = 2 * layout.group_size * (64 * (4 if dtype == "float32" else 2) + codes)
    addresses = [pointer(packed), pointer(words[0]), pointer(words[1]) if len(words) > 1 else 0]
    blocks = -(-chunks * width // 128)
    launch(kernel, blocks, (64,), [pointer(x), shape, *addresses, flag.pointer], x, shared)


def _dequantize_columns(packed: Any, words: list[Any], out: Any, layout: Layout, dtype: str) -> None:
    macros, shape, chunks = _columns(layout, dtype, 4 if dtype == "float32" else 8)
    blocks = -(-chunks // 32)
    device = cuda_view(packed, "packed").device
    kernel = cuda_kernel("codec/columns", "dequantize_columns", tuple(macros.items()), device)
    warps = min(-(-layout.group_size // 8), 8)
    row_blocks = -(-layout.group_size // (8 * warps))
    addresses = [pointer(words[0]), pointer(words[1]) if len(words) > 1 else 0, pointer(out)]
    arguments = [pointer(packed), shape, np.int64(row_blocks), *addresses]
    launch(kernel, blocks * row_blocks, (32, warps), arguments, out)


# ---- Groups of any size, codes of one byte between two launches


def _quantize_groups(x: Any, layout: Layout, flag: Flag, backend: str) -> tuple[Any, list[Any]]:
    to_end, back = _orders(layout)
    source = contiguous(permuted(x, to_end), "x")
    turned = layout.turned
    codes = empty(turned.shape, "int8" if layout.codec == "ternary" else "uint8", source)
    words = [empty(turned.scale_shape, "float16", source) for _ in range(1 + (layout.codec == "affine"))]
    _launch_groups("quantize_groups", source, [codes, *words], turned, dtype_name(source), flag, backend)
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
    out = empty(layout.turned.shape, dtype, codes)
    _launch_groups("dequantize_groups", codes, [*words, out], layout.turned, dtype, None, backend)
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
        macros = (("DTYPE", FLOATS.index(dtype)), ("CODEC", CODECS.index(layout.codec)))
        kernel = cuda_kernel("codec/groups", entry, macros, device)
        shape = [_GROUPS.pack(rows=rows, n=n, group=group, bits=bits)]
        book = [_book(entry.removesuffix("_groups"), layout)]
    arguments = [pointer(source), *shape, *addresses, pointer(scratch), np.int64(pitch), *book]
    launch(kernel, blocks, (threads,), arguments, source, shared)

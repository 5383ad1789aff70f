"""Arguments of the attention kernels: a struct, and tensor maps for tensor copies.

While shapes, strides and options stay the same, only addresses change from call to call. The rest of the
struct is packed once and kept as a `Template`; a call fills in its addresses. Otherwise the host would take
longer than a short kernel runs.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from kvlab.arrays import CudaView, cuda_view
from kvlab.jit.structs import ADDRESS, TENSOR, Template
from kvlab.jit.structs import Struct as Layout

if TYPE_CHECKING:
    from kvlab.ops.attention import Scores, Sequences

__all__ = [
    "ADDRESS",
    "TENSOR",
    "Layout",
    "Lengths",
    "Template",
    "TensorMaps",
    "bounds_of",
    "can_be_mapped",
    "contiguous_strides",
    "fields_of",
    "is_aligned",
    "is_capped",
    "placed",
    "strides_of",
    "tensor_map",
]

FAR = 1 << 30
"""A side of the window without limit; and what no length may exceed."""

_END = 1 << 30  # of the axis of a tensor map that ends with a sequence; kernels know it, too
_WRAP = (1 << 64) // _END  # bytes: so many steps of it are none

Lengths = tuple[int, int, int]
"""Sequences of a call, and at least as many rows and keys as the longest has."""


def placed(view: CudaView) -> CudaView:
    """Return a view that says of its address only where it lies between multiples of 16."""
    return CudaView(view[0] % 16, *view[1:])


def strides_of(name: str, view: CudaView) -> tuple[int, int, int]:
    """Return the strides of batch, position and head."""
    if view.shape[-1] > 1 and view.strides[-1] != 1 and 0 not in view.shape:
        raise NotImplementedError(
            f"{name} has strides {view.strides}: on a GPU the last axis must be contiguous; pass a copy"
        )
    return view.strides[0] if len(view.shape) == 4 else 0, view.strides[-3], view.strides[-2]


def contiguous_strides(shape: Sequence[int]) -> tuple[int, int, int]:
    """Return the strides of batch, position and head of a new array."""
    *batch, positions, heads, dim = shape
    return positions * heads * dim if batch else 0, heads * dim, dim


def bounds_of(sequences: Sequences | None, q: CudaView, k: CudaView) -> tuple[tuple[int, int], Lengths]:
    """Return the addresses of cu_seqlens, 0 for a call of fixed length, and what is known of the lengths."""
    if sequences is None:
        return (0, 0), (q.shape[0], q.shape[1], k.shape[1])
    views = cuda_view(sequences.cu_q, "cu_seqlens_q"), cuda_view(sequences.cu_k, "cu_seqlens_k")
    for name, view in zip(("cu_seqlens_q", "cu_seqlens_k"), views, strict=True):
        if view.shape[0] > 1 and view.strides[0] != 1:
            raise NotImplementedError(f"{name} has stride {view.strides[0]}: pass a contiguous copy")
    lengths = views[0].shape[0] - 1, sequences.max_q, sequences.max_k
    return (views[0].pointer, views[1].pointer), lengths


def fields_of(q: CudaView, k: CudaView, lengths: Lengths, scores: Scores) -> dict[str, Any]:
    """Return the fields that forward and backward have in common, after a check of their limits."""
    number, longest_q, longest_k = lengths
    kv_heads = k.shape[-2]
    group = q.shape[-2] // kv_heads
    longest = max(longest_q, longest_k)
    if longest * group >= FAR or number > 65535 or kv_heads > 65535:
        raise NotImplementedError(
            f"attention of {number} sequences of up to {longest} tokens, {kv_heads} KV heads, {group} "
            "query heads to each: a launch takes at most 65535 sequences and KV heads, and fewer than "
            f"{FAR} tokens times query heads a sequence; call it for a part of them at a time"
        )
    left, right = (FAR if side < 0 else min(side, FAR) for side in scores[:2])
    return {
        "q": strides_of("q", q), "seqlen_q": longest_q, "seqlen_k": longest_k, "group": group,
        "dim": q.shape[-1], "left": left, "right": right, "scale": scores.scale, "softcap": scores.softcap,
    }  # fmt: skip


def is_capped(scores: Scores) -> bool:
    """Whether a call needs the kernels that cap scores; they take scales that are not positive, too."""
    return scores.softcap > 0 or not scores.scale > 0


def is_aligned(view: CudaView) -> bool:
    """Whether every row of the last axis begins at a multiple of 16 bytes."""
    steps = (step for step, size in zip(view.strides[:-1], view.shape[:-1], strict=True) if size > 1)
    return view.pointer % 16 == 0 and view.shape[-1] % 8 == 0 and all(step % 8 == 0 for step in steps)


def can_be_mapped(view: CudaView) -> bool:
    """Whether tensor copies can read an array of aligned rows."""
    farthest = [_WRAP if len(view.shape) == 3 else 1 << 40, 1 << 40, 1 << 40, 1 << 40]
    return 0 not in view.shape and all(
        0 < 2 * step < most
        for step, size, most in zip(view.strides, view.shape, farthest, strict=False)
        if size > 1
    )


@lru_cache(maxsize=4096)
def tensor_map(view: CudaView, rows: int) -> Any:
    """Describe q, k, v or dout to tensor copies of `rows` positions and 64 channels."""
    return np.frombuffer(TensorMaps(view, rows).at(view.pointer), "V128")[0]


class TensorMaps:
    """Describes arrays of one shape, dtype and strides to tensor copies of 64 channels.

    Axes are channels, positions, heads, rows of the batch, and one of size 1. A copy fills up with zeros what
    it would read beyond the end of an axis. For variable length that must be the end of a sequence, wherever
    it lies. So axes 1 and 3 have the stride of positions, of END = 2^30 and total + 1 elements: coordinates
    END - length + i and start + length are position start + i, and END positions further; and axis 1 ends
    with the sequence. Axis 4 goes END positions back, as END times its stride is that modulo 2^64. The base
    stays the array's own address: hardware wants it in mapped memory even if nothing is read there.

    Parameters
    ----------
    view : CudaView
        One of the arrays.
    rows : int
        Positions of a copy.
    heads : int, optional
        Heads of a copy; then axes 1 and 2 change places, so that rows are (position, head), heads fastest.
    """

    _MOST = 256  # maps that are remembered: the same addresses come again and again

    def __init__(self, view: CudaView, rows: int, heads: int | None = None) -> None:
        from cuda.bindings import driver

        _, shape, strides, dtype, _ = view
        steps = [2 * step if size > 1 else 16 for step, size in zip(strides, shape, strict=True)]
        sizes, of_axes = (
            [shape[-1], shape[-3], shape[-2], shape[0], 1],
            [2, steps[-3], steps[-2], steps[0], 16],
        )
        if len(shape) == 3:
            sizes[1], sizes[3], sizes[4] = _END, shape[0] + 1, _END + 1
            of_axes[4] = _WRAP - steps[0]
        box = [64, rows, heads or 1, 1, 1]
        if heads is not None:
            for axes in (sizes, of_axes, box):
                axes[1], axes[2] = axes[2], axes[1]
        self._encode, self._what = driver.cuTensorMapEncodeTiled, (dtype, shape, strides)
        self._before = getattr(driver.CUtensorMapDataType, f"CU_TENSOR_MAP_DATA_TYPE_{dtype.upper()}"), 5
        self._behind = (
            [driver.cuuint64_t(size) for size in sizes],
            [driver.cuuint64_t(step) for step in of_axes[1:]],
            [driver.cuuint32_t(size) for size in box],
            [driver.cuuint32_t(1)] * 5,
            driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
            driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
            driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
        self._known: dict[int, bytes] = {}
        self._behind_address, self._is_movable = b"", False

    def at(self, pointer: int) -> bytes:
        """Return the 128 bytes that describe the array at this address."""
        if self._is_movable:
            return pointer.to_bytes(8, "little") + self._behind_address
        known = self._known.get(pointer)
        if known is not None:
            return known
        error, encoded = self._encode(*self._before, pointer, *self._behind)
        if int(error) != 0:
            dtype, shape, strides = self._what
            raise RuntimeError(
                f"cuTensorMapEncodeTiled of {dtype} {shape} with strides {strides}: {error.name}"
            )
        if len(self._known) >= self._MOST:
            self._known.clear()
        found = self._known[pointer] = struct.pack("<16Q", *map(int, encoded.opaque))
        if int.from_bytes(found[:8], "little") == pointer:  # if two maps agree, nothing else depends on it
            self._is_movable = len(self._known) > 1 and self._behind_address == found[8:]
            self._behind_address = found[8:]
        return found

"""Arguments of the attention kernels: a struct, and tensor maps for tensor copies.

While shapes, strides and options stay the same, only addresses change from call to call. So the rest is
packed once, and a call writes its addresses into it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from kvlab.jit.native import Target
from kvlab.views import CudaView

if TYPE_CHECKING:
    from kvlab.ops.attention_call import Call, Scores

__all__ = [
    "MAP_WORDS",
    "Lengths",
    "TensorMaps",
    "can_be_mapped",
    "check_bounds",
    "contiguous_strides",
    "encoder_of",
    "fields_of",
    "is_aligned",
    "is_capped",
    "lengths_of",
    "strides_of",
]

FAR = 1 << 30
"""A side of the window without limit; and what no length may exceed."""

_END = 1 << 30  # of the axis of a tensor map that ends with a sequence; kernels know it, too
_WRAP = (1 << 64) // _END  # bytes: so many steps of it are none

Lengths = tuple[int, int, int]
"""Sequences of a call, and at least as many rows and keys as the longest has."""


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


def check_bounds(name: str, view: CudaView) -> None:
    """Refuse prefix sums that kernels cannot read."""
    if view.shape[0] > 1 and view.strides[0] != 1:
        raise NotImplementedError(f"{name} has stride {view.strides[0]}: pass a contiguous copy")


def lengths_of(call: Call) -> Lengths:
    """Return what is known of the lengths of a call, after a check of its prefix sums."""
    q, k = call.views[:2]
    if call.longest is None:
        return q.shape[0], q.shape[1], k.shape[1]
    for name, view in zip(call.signature.names[-2:], call.views[-2:], strict=True):
        check_bounds(name, view)
    return call.views[-1].shape[0] - 1, *call.longest


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
    strides = (stride for stride, size in zip(view.strides[:-1], view.shape[:-1], strict=True) if size > 1)
    return view.pointer % 16 == 0 and view.shape[-1] % 8 == 0 and all(stride % 8 == 0 for stride in strides)


def can_be_mapped(view: CudaView) -> bool:
    """Whether tensor copies can read an array of aligned rows."""
    limits = [_WRAP if len(view.shape) == 3 else 1 << 40, 1 << 40, 1 << 40, 1 << 40]
    return 0 not in view.shape and all(
        0 < 2 * step < limit
        for step, size, limit in zip(view.strides, view.shape, limits, strict=False)
        if size > 1
    )


MAP_WORDS = 16
"""Words of 8 bytes of a tensor map."""


def encoder_of(view: CudaView, rows: int, heads: int | None = None) -> Callable[[int], list[int]]:
    """Return what describes an array at an address to tensor copies of 64 channels: the words of a map.

    Axes are channels, positions, heads, rows of the batch, and one of size 1. A copy fills up with zeros what
    it would read beyond the end of an axis. For variable length that must be the end of a sequence, wherever
    it lies. So axes 1 and 3 have the stride of positions, of END = 2^30 and total + 1 elements: coordinates
    END - length + i and start + length are position start + i, and END positions further; and axis 1 ends
    with the sequence. Axis 4 goes END positions back, as END times its stride is that modulo 2^64. The base
    stays the array's own address: hardware wants it in mapped memory even if nothing is read there.

    Parameters
    ----------
    view : CudaView
        The array; its address does not matter.
    rows : int
        Positions of a copy.
    heads : int, optional
        Heads of a copy; then axes 1 and 2 change places, so that rows are (position, head), heads fastest.
    """
    from cuda.bindings import driver

    _, shape, strides, dtype, _ = view
    pitch = [2 * stride if size > 1 else 16 for stride, size in zip(strides, shape, strict=True)]
    sizes, of_axes = (
        [shape[-1], shape[-3], shape[-2], shape[0], 1],
        [2, pitch[-3], pitch[-2], pitch[0], 16],
    )
    if len(shape) == 3:
        sizes[1], sizes[3], sizes[4] = _END, shape[0] + 1, _END + 1
        of_axes[4] = _WRAP - pitch[0]
    box = [64, rows, heads or 1, 1, 1]
    if heads is not None:
        for axes in (sizes, of_axes, box):
            axes[1], axes[2] = axes[2], axes[1]
    before = getattr(driver.CUtensorMapDataType, f"CU_TENSOR_MAP_DATA_TYPE_{dtype.upper()}"), 5
    behind = (
        [driver.cuuint64_t(size) for size in sizes],
        [driver.cuuint64_t(step) for step in of_axes[1:]],
        [driver.cuuint32_t(size) for size in box],
        [driver.cuuint32_t(1)] * 5,
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
        driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )

    def encode(address: int) -> list[int]:
        error, encoded = driver.cuTensorMapEncodeTiled(*before, address, *behind)
        if error == driver.CUresult.CUDA_ERROR_INVALID_CONTEXT:  # the thread has not used CUDA yet
            import cupy

            cupy.cuda.runtime.free(0)  # makes the context
            error, encoded = driver.cuTensorMapEncodeTiled(*before, address, *behind)
        if int(error) != 0:
            raise RuntimeError(
                f"cuTensorMapEncodeTiled of {dtype} {shape} with strides {strides}: {error.name}"
            )
        return list(map(int, encoded.opaque))

    return encode


class TensorMaps:
    """Tensor maps at the head of a kernel's argument, which follow the addresses of their arrays.

    Asking the driver for a map takes longer than the rest of a call. Where a map is its address and words
    that do not depend on it, the address alone needs to be written.

    Parameters
    ----------
    words : memoryview
        The argument; see `words_of`.
    *encoders : function
        What `encoder_of` returned for each array.
    indices : sequence of int, optional
        Which of the argument's maps is each array's; the first ones if not given.

    Attributes
    ----------
    begins : list of int
        First words of the maps.
    follow : bool
        Whether only these still depend on addresses, and are addresses; not known before the first call.
    """

    def __init__(
        self,
        words: memoryview,
        *encoders: Callable[[int], list[int]],
        indices: Sequence[int] | None = None,
    ) -> None:
        self._words, self._encoders = words, encoders
        self.begins = [MAP_WORDS * index for index in indices or range(len(encoders))]
        self.follow = not encoders

    def point_to(self, addresses: Sequence[int]) -> None:
        """Write the maps of the arrays at these addresses, of which there may be more."""
        for begin, word in zip(self.begins, self.first_words(addresses), strict=False):
            self._words[begin] = word

    def targets(self, *words: Sequence[int]) -> tuple[list[Target], list[Target]]:
        """Return where the addresses of arrays are written, given the addresses of the words that they have
        beside maps: where maps do not follow, as `point_to` has written them, and where they do."""
        base = np.frombuffer(self._words, np.uint64).ctypes.data
        maps = [[base + 8 * begin] for begin in self.begins]
        maps += [[]] * (len(words) - len(maps))
        alone, both = (
            [[(at, 0) for at in each] for each in some]
            for some in (words, [(*own, *of_map) for own, of_map in zip(words, maps, strict=True)])
        )
        return [*alone], [*both]

    def first_words(self, addresses: Sequence[int]) -> Sequence[int]:
        """Write what else than their first words changes of the maps of the arrays at these addresses; return
        the first words, and addresses for which there is no map."""
        if self.follow:
            return addresses
        maps = [encode(address) for encode, address in zip(self._encoders, addresses, strict=False)]
        for begin, words in zip(self.begins, maps, strict=True):
            for at, word in enumerate(words, begin):
                self._words[at] = word
        self.follow = all(map(_begins_with_address, self._encoders, addresses))
        return [*(words[0] for words in maps), *addresses[len(maps) :]]


def _begins_with_address(encode: Callable[[int], list[int]], address: int) -> bool:
    (first, *rest), (moved, *others) = encode(address), encode(address + 16)
    return (first, moved) == (address, address + 16) and rest == others

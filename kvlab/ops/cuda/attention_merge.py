"""Merges on a GPU, a launch each: of several parts into new arrays, and of one into rows, in place."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from threading import Lock
from typing import Any

from kvlab.arrays import Array, ArrayT
from kvlab.jit.launch import PreparedLaunch, cuda_kernel
from kvlab.jit.structs import ADDRESS, TENSOR, Struct, words_of
from kvlab.new_arrays import empty
from kvlab.ops.array_kinds import Kind, kinds_of, stream_of, view_of
from kvlab.ops.attention_arguments import strides_of
from kvlab.ops.device_arrays import launch
from kvlab.views import cuda_view, pointer_of

__all__ = ["merge", "merge_rows"]

MAX_PARTS = 32  # of one launch, whose argument holds all addresses
_WARPS = 4  # of a block, a row each
_STRIDES_OF_LSE = ("batch", "position", "head")

_CALL = Struct(
    out=ADDRESS, lse=ADDRESS, positions="q", dim="i", count="i",
    **{
        name: form
        for i in range(MAX_PARTS)
        for name, form in (
            (f"out{i}", TENSOR), (f"lse{i}", ADDRESS), *((f"{axis}{i}", "q") for axis in _STRIDES_OF_LSE),
        )
    },
)  # fmt: skip


def merge(outs: Sequence[ArrayT], lses: Sequence[Array]) -> tuple[ArrayT, ArrayT]:
    """Launcher of backend "cuda" of merge_attention."""
    if len(outs) > MAX_PARTS:
        raise NotImplementedError(
            f"outs has {len(outs)} parts: on a GPU at most {MAX_PARTS} are merged at a time; "
            "merge as many, and then what comes out with the rest"
        )
    out_views = [cuda_view(x, f"outs[{i}]") for i, x in enumerate(outs)]
    lse_views = [cuda_view(x, f"lses[{i}]") for i, x in enumerate(lses)]
    shape, dtype = out_views[0].shape, out_views[0].dtype
    *batch, positions, heads, dim = shape
    number = batch[0] if batch else 1
    if max(number, heads) > 65535:
        raise NotImplementedError(
            f"outs[0] has shape {shape}: a launch takes at most 65535 rows of a batch and heads; merge a part"
        )
    out, lse = empty(shape, dtype, outs[0]), empty((*batch, heads, positions), "float32", outs[0])
    call: dict[str, Any] = {"positions": positions, "dim": dim, "count": len(outs)}
    call |= {"out": pointer_of(out), "lse": pointer_of(lse)}
    for i, (of_out, of_lse) in enumerate(zip(out_views, lse_views, strict=True)):
        strides = of_lse.strides if len(of_lse.strides) == 3 else (0, *of_lse.strides)
        call[f"out{i}"], call[f"lse{i}"] = (of_out.pointer, strides_of(f"outs[{i}]", of_out)), of_lse.pointer
        call |= {f"batch{i}": strides[0], f"position{i}": strides[2], f"head{i}": strides[1]}
    macros = (("FLOAT32", int(dtype == "float32")), ("BF16", int(dtype == "bfloat16")))
    kernel = cuda_kernel("attention/merge", "merge", macros, out_views[0].device)
    grid = -(-positions // _WARPS), heads, number
    launch(kernel, grid, (32 * _WARPS,), [_CALL.pack(**call)], outs[0])
    return out, lse


_ROWS_CALL = Struct(
    out=ADDRESS, position="q", head="q", lse=ADDRESS, lse_head="q", new_out=ADDRESS, new_position="q",
    new_head="q", new_lse=ADDRESS, new_lse_head="q", rows=ADDRESS, first="q", count="q", heads="i", dim="i",
)  # fmt: skip
_ROWS_ADDRESSES = [_ROWS_CALL.word(name) for name in ("out", "lse", "new_out", "new_lse", "rows")]
_ROWS_THREADS = 256


def merge_rows(out: Any, lse: Any, rows: Any, new_out: Any, new_lse: Any) -> None:
    """Merge attention over more keys into rows of a result, in place.

    Parameters
    ----------
    out : array, (positions, heads, dim)
        float32, or the dtype of new_out.
    lse : float32 array, (heads, positions)
    rows : slice or int64 array, (count,)
        Positions of out and lse, none twice.
    new_out : array, (count, heads, dim)
    new_lse : float32 array, (heads, count)
        The last axes of all arrays are contiguous.
    """
    arrays = (out, lse, new_out, new_lse) if isinstance(rows, slice) else (out, lse, new_out, new_lse, rows)
    names = ("out", "lse", "new_out", "new_lse", "rows")
    kinds, addresses = kinds_of(arrays, names[: len(arrays)])
    _prepare_rows(kinds, rows.start or 0 if isinstance(rows, slice) else 0)(addresses)


class _Rows:
    """`merge_rows` of arrays of some kinds."""

    def __init__(self, kinds: tuple[Kind, ...], first: int) -> None:
        to, lse, new, new_lse = map(view_of, kinds, ("out", "lse", "new_out", "new_lse"))
        count, heads, dim = new.shape
        vector = 4 if new.dtype == "float32" else 8
        offsets = (
            to.pointer,
            new.pointer,
            *(x.strides[axis] * 2 for x in (to, new) for axis in (0, 1)),
            2 * dim,
        )
        if any(offset % 16 for offset in offsets):
            vector = 1
        lanes = next(n for n in (1, 2, 4, 8, 16, 32) if n * vector >= dim or n == 32)
        wide = to.dtype == "float32" and new.dtype != "float32"
        macros = {"FLOAT32": int(new.dtype == "float32"), "BF16": int(new.dtype == "bfloat16")}
        macros |= {"WIDE": int(wide), "VECTOR": vector, "LANES": lanes}
        kernel = cuda_kernel("attention/merge_rows", "merge_rows", tuple(macros.items()), to.device)
        argument = _ROWS_CALL.array({
            "position": to.strides[0], "head": to.strides[1], "lse_head": lse.strides[0],
            "new_position": new.strides[0], "new_head": new.strides[1], "new_lse_head": new_lse.strides[0],
            "first": first, "count": count, "heads": heads, "dim": dim,
        })  # fmt: skip
        self._words, self._stream, self._lock = words_of(argument), stream_of(kinds[0]), Lock()
        blocks = -(-count * heads // (_ROWS_THREADS // lanes))
        self._launch = PreparedLaunch(kernel, (blocks,), (_ROWS_THREADS,), argument)

    def __call__(self, addresses: Sequence[int]) -> None:
        with self._lock:
            for word, address in zip(_ROWS_ADDRESSES, addresses, strict=False):
                self._words[word] = address
            self._launch(self._stream())


_prepare_rows = lru_cache(maxsize=1024)(_Rows)

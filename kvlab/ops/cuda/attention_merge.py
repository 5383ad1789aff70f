"""merge_attention on a GPU: one launch over all rows, with the addresses of all parts in its argument."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvlab.arrays import Array, ArrayT, cuda_view, empty, pointer_of
from kvlab.jit.launch import cuda_kernel
from kvlab.jit.structs import ADDRESS, TENSOR, Struct
from kvlab.ops.attention_arguments import strides_of
from kvlab.ops.device_arrays import launch

__all__ = ["merge"]

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

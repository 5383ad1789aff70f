"""Attention on a GPU: choose the specialisation of ``attention.cu`` and launch it.

A call is one launch on the caller's stream and allocates nothing but its results. Lengths of variable-length
calls are read on the device, so nothing waits for it. What a kernel is specialised for is the head dimension
(filled up with zeros to the next that there is a kernel for), the dtype, whether rows can be copied 16 bytes
at a time, and whether scores are capped.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from kvlab.arrays import ArrayT, CudaView, cuda_view, current_stream, dtype_name, empty
from kvlab.build import Kernel, arch_of, build, load
from kvlab.device import compute_capability

if TYPE_CHECKING:
    from kvlab.ops.attention import Scores, Sequences

__all__ = ["attend"]

_TENSOR = np.dtype([("data", "u8"), ("batch", "i8"), ("position", "i8"), ("head", "i8")])
_CALL = np.dtype(
    [
        *((name, _TENSOR) for name in ("q", "k", "v", "out")),
        *((name, "u8") for name in ("lse",)),
        *((name, "i8") for name in ("lse_batch", "lse_head")),
        *((name, "u8") for name in ("cu_q", "cu_k")),
        *((name, "i4") for name in ("seqlen_q", "seqlen_k", "group", "dim", "left", "right")),
        *((name, "f4") for name in ("scale", "softcap")),
    ]
)
_FAR = 1 << 30  # a side of the window without limit; and what no length may exceed

# By head dimension: tiles of 16 rows a warp has, warps, keys of a tile, blocks on a multiprocessor. 32 rows a
# warp halve what it reads of K and V in shared memory, as long as their output fits into registers.
SHAPES = {
    32: (2, 4, 64, 2),
    64: (2, 4, 64, 2),
    80: (2, 4, 64, 2),
    96: (2, 4, 64, 2),
    128: (2, 4, 64, 2),
    192: (1, 4, 64, 2),
    256: (1, 4, 64, 2),
}


def attend(q: ArrayT, k: Any, v: Any, sequences: Sequences | None, scores: Scores) -> tuple[ArrayT, ArrayT]:
    """Launcher of backend "cuda"; arguments and results as `kvlab.ops.attention_cpu.attend`."""
    views = {name: cuda_view(x, name) for name, x in (("q", q), ("k", k), ("v", v))}
    *rows, heads, dim = views["q"].shape
    kv_heads = views["k"].shape[-2]
    out = empty(views["q"].shape, dtype_name(q), q)
    lse = empty((*rows[:-1], heads, rows[-1]), "float32", q)
    call = np.zeros((), _CALL)
    for name, view in views.items():
        _set_tensor(call, name, view)
    _set_tensor(call, "out", cuda_view(out, "out"))
    call["lse"] = cuda_view(lse, "lse").pointer
    call["lse_batch"], call["lse_head"] = heads * rows[-1], rows[-1]
    if sequences is None:
        number, longest = rows[0], (rows[1], views["k"].shape[1])
    else:
        number, longest = _set_sequences(call, sequences)
    group = heads // max(kv_heads, 1)
    if max(longest) * max(group, 1) >= _FAR or number > 65535 or kv_heads > 65535:
        raise NotImplementedError(
            f"attention of {number} sequences of up to {max(longest)} tokens, {kv_heads} KV heads, {group} "
            "query heads to each: a launch takes at most 65535 sequences and KV heads, and fewer than "
            f"{_FAR} tokens times query heads a sequence; call it for a part of them at a time"
        )
    call["seqlen_q"], call["seqlen_k"], call["group"], call["dim"] = *longest, group, dim
    call["left"], call["right"] = (_FAR if side < 0 else min(side, _FAR) for side in scores[:2])
    call["scale"], call["softcap"] = scores.scale, scores.softcap
    capped = scores.softcap > 0 or not scores.scale > 0
    aligned = dim % 8 == 0 and all(map(_is_aligned, views.values()))
    kernel, block, threads, shared_bytes = _kernel(dim, dtype_name(q), capped, aligned, views["q"].device)
    grid = (-(-longest[0] * group // block), kv_heads, number)
    argument = np.frombuffer(call.tobytes(), f"V{_CALL.itemsize}")[0]
    kernel(grid, (threads,), (argument,), shared_bytes, current_stream(q))
    return out, lse


def _set_tensor(call: Any, name: str, view: CudaView) -> None:
    if view.shape[-1] > 1 and view.strides[-1] != 1:
        raise NotImplementedError(
            f"{name} has strides {view.strides}: on a GPU the last axis must be contiguous; pass a copy"
        )
    call[name]["data"] = view.pointer
    batch = view.strides[0] if len(view.shape) == 4 else 0
    call[name]["batch"], call[name]["position"], call[name]["head"] = batch, *view.strides[-3:-1]


def _set_sequences(call: Any, sequences: Sequences) -> tuple[int, tuple[int, int]]:
    for name, array in (("cu_q", sequences.cu_q), ("cu_k", sequences.cu_k)):
        view = cuda_view(array, name)
        if view.shape[0] > 1 and view.strides[0] != 1:
            raise NotImplementedError(f"{name} has stride {view.strides[0]}: pass a contiguous copy")
        call[name] = view.pointer
    return view.shape[0] - 1, (sequences.max_q, sequences.max_k)


def _is_aligned(view: CudaView) -> bool:
    """Whether every row of the last axis begins at a multiple of 16 bytes."""
    steps = (step for step, size in zip(view.strides[:-1], view.shape[:-1], strict=True) if size > 1)
    return view.pointer % 16 == 0 and all(step % 8 == 0 for step in steps)


@lru_cache(maxsize=256)
def _kernel(dim: int, dtype: str, capped: bool, aligned: bool, device: int) -> tuple[Kernel, int, int, int]:
    """Return a kernel, the query rows of a block, its threads and its bytes of shared memory."""
    capability = compute_capability(device)
    if capability < (8, 0):
        raise NotImplementedError(
            f"attention on a GPU takes compute capability 8.0 or later; device {device} has "
            f"{capability[0]}.{capability[1]}: move the arrays to the CPU"
        )
    head_dim = min(size for size in SHAPES if size >= dim)
    tiles, warps, block_n, blocks = SHAPES[head_dim]
    macros = {
        "HEAD_DIM": head_dim, "BF16": int(dtype == "bfloat16"), "M_TILES": tiles, "WARPS": warps,
        "BLOCK_N": block_n, "BLOCKS": blocks, "CAPPED": int(capped), "ALIGNED": int(aligned),
    }  # fmt: skip
    kernel = load(build("attention", macros, arch_of(*capability)), device=device)
    rows = 16 * tiles * warps
    return kernel, rows, 32 * warps, 2 * (rows + 2 * block_n) * (head_dim + 8)

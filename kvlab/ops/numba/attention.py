"""Attention and its gradients on a GPU through Numba: choose the specialisation and launch it.

Numba is only the compiler (`kvlab.jit.numba`): launches are those of CUDA C++ kernels, on the caller's
stream, and wait for nothing. This is the backend for reading, and for GPUs before compute capability 8.0;
`kvlab.ops.cuda.attention` is the one for speed. Gradients are the same bits every time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from kvlab.arrays import ArrayT
from kvlab.jit.launch import numba_kernel
from kvlab.new_arrays import empty
from kvlab.ops.attention_arguments import Lengths, check_bounds, fields_of, strides_of
from kvlab.ops.device_arrays import launch
from kvlab.views import CudaView, cuda_view

if TYPE_CHECKING:
    from kvlab.ops.attention_call import Scores, Sequences

__all__ = ["attend", "attend_backward"]

_LANES = 8  # threads that share a row
_PREPARE_THREADS = 128
HEAD_DIMS = (16, 32, 64, 96, 128, 192, 256)

# Rows of a tile by head dimension, so that the tiles of a block fit 48 KiB.
FORWARD_TILES = {16: 32, 32: 32, 64: 32, 96: 32, 128: 32, 192: 16, 256: 16}
BACKWARD_TILES = {16: 32, 32: 32, 64: 32, 96: 16, 128: 16, 192: 8, 256: 8}


def attend(q: ArrayT, k: Any, v: Any, sequences: Sequences | None, scores: Scores) -> tuple[ArrayT, ArrayT]:
    """Launcher of backend "numba"; arguments and results as `kvlab.ops.cpu.attention.attend`."""
    views = [cuda_view(x, name) for name, x in (("q", q), ("k", k), ("v", v))]
    shape, dtype = views[0].shape, views[0].dtype
    out = empty(shape, dtype, q)
    lse = empty((*shape[:-3], shape[-2], shape[-3]), "float32", q)
    tensors = [*zip("qkv", views, strict=True), ("out", cuda_view(out, "out"))]
    common, grid, options = _call(tensors, sequences, scores, FORWARD_TILES)
    kernel = numba_kernel("attention", "attend", options, views[0].device)
    arguments = [*_tensors(tensors), *_of_rows(cuda_view(lse, "lse")), *common]
    tile = dict(options)["tile"]
    launch(kernel, grid(0, tile), (_LANES * tile,), arguments, q)
    return out, lse


def attend_backward(
    dout: Any,
    q: ArrayT,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    sequences: Sequences | None,
    scores: Scores,
    deterministic: bool,
    float32_dk_dv: bool,
) -> tuple[ArrayT, ArrayT, ArrayT]:
    """Launcher of backend "numba": dq, dk and dv, contiguous, in the dtype of q; always deterministic."""
    inputs = {"q": q, "k": k, "v": v, "dout": dout, "out": out}
    views = {name: cuda_view(x, name) for name, x in inputs.items()}
    of_lse = cuda_view(lse, "lse")
    grads = [empty(views[name].shape, views["q"].dtype, q) for name in ("q", "k", "v")]
    dpsum = empty(of_lse.shape, "float32", q)
    of_dpsum = cuda_view(dpsum, "dpsum")
    device, dtype = views["q"].device, views["q"].dtype
    count = int(np.prod(of_lse.shape))
    prepare = numba_kernel("attention_backward", "prepare", (("dtype", dtype),), device)
    arguments = _tensors([(name, views[name]) for name in ("dout", "out")])
    heads, positions = of_lse.shape[-2:]
    arguments += [*_of_rows(of_dpsum), *map(np.int64, (positions, heads, views["q"].shape[-1], count))]
    launch(prepare, -(-count // _PREPARE_THREADS), (_PREPARE_THREADS,), arguments, q)

    four = [(name, views[name]) for name in ("q", "k", "v", "dout")]
    common, grid, options = _call(four, sequences, scores, BACKWARD_TILES)
    tile = dict(options)["tile"]
    rows = [of_lse.pointer, of_dpsum.pointer, *_of_rows(of_lse)[1:], *_of_rows(of_dpsum)[1:]]
    for side, entry, names in ((0, "attend_queries", ("dq",)), (1, "attend_keys", ("dk", "dv"))):
        kernel = numba_kernel("attention_backward", entry, options, device)
        results = [(name, cuda_view(x, name)) for name, x in zip(names, grads[side:], strict=False)]
        launch(kernel, grid(side, tile), (_LANES * tile,), [*_tensors(four + results), *rows, *common], q)
    return grads[0], grads[1], grads[2]


def _call(
    tensors: Sequence[tuple[str, CudaView]],
    sequences: Sequences | None,
    scores: Scores,
    tiles: dict[int, int],
) -> tuple[list[Any], Any, tuple[tuple[str, Any], ...]]:
    """Return where sequences lie and how scores are made, as arguments; the grid; options of the kernels."""
    (_, q), (_, k), *_ = tensors
    bounds, lengths = _bounds_of(sequences, q, k)
    fields = fields_of(q, k, lengths, scores)
    shape = (fields[name] for name in ("seqlen_q", "seqlen_k", "group", "dim", "left", "right"))
    arguments = [
        *bounds, np.int64(sequences is not None), *map(np.int64, shape),
        np.float32(scores.scale), np.float32(scores.softcap),
    ]  # fmt: skip
    number, longest_q, longest_k = lengths

    def grid(side: int, tile: int) -> tuple[int, int, int]:
        rows = (longest_q * fields["group"], longest_k)[side]
        return -(-rows // tile), k.shape[-2], number

    head_dim = min(size for size in HEAD_DIMS if size >= q.shape[-1])
    return arguments, grid, (("head_dim", head_dim), ("dtype", q.dtype), ("tile", tiles[head_dim]))


def _bounds_of(sequences: Sequences | None, q: CudaView, k: CudaView) -> tuple[tuple[int, int], Lengths]:
    """Return the addresses of cu_seqlens, 0 for a call of fixed length, and what is known of the lengths."""
    if sequences is None:
        return (0, 0), (q.shape[0], q.shape[1], k.shape[1])
    views = cuda_view(sequences.cu_q, "cu_seqlens_q"), cuda_view(sequences.cu_k, "cu_seqlens_k")
    for name, view in zip(("cu_seqlens_q", "cu_seqlens_k"), views, strict=True):
        check_bounds(name, view)
    lengths = views[0].shape[0] - 1, sequences.max_q, sequences.max_k
    return (views[0].pointer, views[1].pointer), lengths


def _tensors(tensors: Sequence[tuple[str, CudaView]]) -> list[Any]:
    """Addresses and strides."""
    return [
        argument
        for name, view in tensors
        for argument in (view.pointer, *map(np.int64, strides_of(name, view)))
    ]


def _of_rows(view: CudaView) -> list[Any]:
    """Address, strides of batch and head of numbers (batch, heads, positions) or (heads, positions)."""
    if view.shape[-1] > 1 and view.strides[-1] != 1:
        raise NotImplementedError(
            f"lse has strides {view.strides}: its last axis must be contiguous on a GPU"
        )
    batch = view.strides[0] if len(view.shape) == 3 else 0
    return [view.pointer, np.int64(batch), np.int64(view.strides[-2])]

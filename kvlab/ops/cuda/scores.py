"""Launchers of ``kernels/cuda/plan/score.cu``, which bring the importance of tokens up to date.

They wait for nothing. The policies are those of `kvlab.cache.importance` by name; a user's function is called
by the host (kvlab/cache/prefill.py).
"""

from __future__ import annotations

import math
import struct
from functools import lru_cache
from threading import Lock
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvlab.arrays import device_of, dtype_name
from kvlab.jit.launch import PreparedLaunch
from kvlab.ops.cuda.packed import SAVED_ROW_BYTES
from kvlab.ops.cuda.packed_mass import SAVED_SCORES, score_kernel
from kvlab.ops.device_arrays import dense_pointer
from kvlab.views import CudaView, cuda_view, pointer_of

__all__ = ["lies_in_units", "score_new", "score_norms", "score_stored"]

_SCORE_NEW = struct.Struct("4Q6q4i2f")
"""`ScoreNew` of plan/score.cu: addresses of q, k, lse, codes; strides of q and k; heads, group, seqlen,
window; scale, softcap."""
_FOLLOWING = np.dtype([("take", "f4"), *((name, "i4") for name in ("span", "old", "forecast", "counted"))])
_SCORING = np.dtype([("layers", "u8"), ("saved", SAVED_SCORES), ("following", _FOLLOWING)], align=True)
_THREADS, _WARPS = 256, 8
_SCORE_THREADS, _QUADS = 64, 8  # of a block of score_stored
_FILLING = Lock()  # caches of several threads may share a launch
_KINDS = {"attention": 0, "forecast": 0, "key_norm": 0, "recency": 1, "uniform": 2}


def score_stored(
    states: int,
    scores: Any,
    lse: Any,
    *,
    importance: str,
    take: float,
    span: int,
    counted: int,
    stream: int,
) -> None:
    """Bring the importance of all tokens in pages of some layers up to date with the attention they received.

    Parameters
    ----------
    states : int
        Address of the LayerState structs of the layers.
    scores : uint8 array, (layers, batch, num_heads_kv, quads, nbytes), contiguous
        What packed attention saved of the last query rows, `kvlab.ops.cuda.packed.saved_quad_bytes` a quad.
    lse : float32 array, (layers, batch, num_heads_q, seqlen), contiguous
        Of every query row over all its keys, stored or not.
    importance : {"attention", "forecast"}
        Other policies do not observe attention: they need no call.
    take, span
        From `kvlab.cache.importance.weight_of_collection`.
    counted : int
        Tokens of this call that the layers' lengths on the device count already.
    """
    layers, batch, heads, quads, nbytes = scores.shape
    group, rows = lse.shape[2] // heads, nbytes // SAVED_ROW_BYTES  # there is less than a row of padding
    grid = -(-quads // _QUADS), batch * heads, layers
    if not all(grid):
        return
    call, launch = _scoring(grid, device_of(scores).index)
    old = min(span * (math.ceil(1 / take) - 1), 1 << 30) if take > 0 else 1 << 30
    saved = pointer_of(scores), pointer_of(lse), group, rows // group, lse.shape[-1], quads
    with _FILLING:
        call[0] = states, saved, (take, span, old, importance == "forecast", counted)
        launch(stream)


@lru_cache(maxsize=64)
def _scoring(grid: tuple[int, int, int], device: int) -> tuple[NDArray[Any], PreparedLaunch]:
    """The argument of `score_stored`, to be filled in, and its launch."""
    call = np.zeros(1, _SCORING)
    kernel = score_kernel("score_stored", device)
    return call, PreparedLaunch(kernel, grid, (_SCORE_THREADS,), call, early=True)


def score_new(
    q: CudaView, k: CudaView, lse: Any, codes: Any, *, rows: int, scale: float, softcap: float = 0.0,
    stream: int,
) -> None:  # fmt: skip
    """Importance of the tokens of a prefill: the attention they get from its last `rows` queries.

    Parameters
    ----------
    q, k : CudaView, (batch, seqlen, num_heads_q or num_heads_kv, head_dim)
        float16 or bfloat16; by strides, the last axis contiguous and all vectors at multiples of 16 bytes.
        Row i sees keys 0 to i.
    lse : float32 array, (batch, num_heads_q, seqlen)
        Over all keys of each row, stored ones included. A row with an infinite one counts as if it gave no
        key any attention: padding, for example.
    codes : uint8 array, (batch * num_heads_kv, seqlen)
        Receives the importance codes.
    scale, softcap : float
        Of the attention.

    Raises
    ------
    ValueError
        If q or k does not lie at multiples of 16 bytes.
    """
    for name, view in (("q", q), ("k", k)):
        if view.strides[3] != 1 or not lies_in_units(view):
            raise ValueError(
                f"{name} must have a contiguous last axis and vectors at multiples of 16 bytes, got strides "
                f"{view.strides} at address {view.pointer}: pass a contiguous copy"
            )
    batch, seqlen, heads_q, head_dim = q.shape
    heads, whole = k.shape[2], dense_pointer(cuda_view(lse, "lse"), "lse")
    call = _SCORE_NEW.pack(
        q.pointer, k.pointer, whole, pointer_of(codes), *q.strides[:3], *k.strides[:3],
        heads, heads_q // heads, seqlen, min(seqlen, rows), scale, softcap,
    )  # fmt: skip
    kernel = score_kernel("score_new", q.device, head_dim, q.dtype)
    keys_per_block = _WARPS * (32 if head_dim <= 128 else 16)
    kernel((-(-seqlen // keys_per_block), batch * heads), (_THREADS,), (np.void(call),), 0, stream)


def lies_in_units(view: CudaView) -> bool:
    """Whether all vectors of an array (B, S, H, D) of 16-bit elements begin at multiples of 16 bytes."""
    return not (view.pointer % 16 or any(stride % 8 for stride in view.strides[:3]))


def score_norms(k: Any, codes: Any, importance: str, stream: int) -> None:
    """Importance of new tokens without queries: 1 / norm of the key, or what their policy says of any token.

    k (batch, seqlen, num_heads_kv, head_dim) by strides, codes (batch * num_heads_kv, seqlen) uint8.
    """
    view: CudaView = cuda_view(k, "k")
    batch, seqlen, heads, head_dim = k.shape
    kernel = score_kernel("score_norms", view.device, head_dim, dtype_name(k, "k"))
    numbers = np.int32(heads), np.int32(seqlen), np.int32(_KINDS[importance])
    strides = [np.int64(step) for step in view.strides[:3]]
    arguments = (view.pointer, cuda_view(codes, "codes").pointer, *strides, *numbers)
    kernel((-(-seqlen // _WARPS), batch * heads), (_THREADS,), arguments, 0, stream)

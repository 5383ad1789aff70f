"""Attention on the CPU: launchers of the backend "cpu".

Fixed and variable lengths have one layout: arrays (batch, seqlen, heads, head_dim), and for each sequence its
row of the batch, its first query and key, and the numbers of both. So a kernel has one loop for both.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvlab.arrays import Array, ArrayT, dtype_name
from kvlab.new_arrays import like_first
from kvlab.threads import run_parallel
from kvlab.views import to_numpy_view

if TYPE_CHECKING:
    from kvlab.ops.attention_call import Scores, Sequences

__all__ = [
    "Views",
    "attend",
    "attend_sequences",
    "bounds_of",
    "items_of",
    "lay_out",
    "merge",
    "part_views",
    "results_of",
    "score_numbers",
    "split_by_width",
    "worth_sharing",
]

_FAR = 1 << 40  # a side of the window without limit

_WORTH_SHARING = 8_000_000  # multiplications, about a quarter of a millisecond


class Views(NamedTuple):
    """The arguments of a call, fixed or variable length, as one thing."""

    q: NDArray[Any]  # (batch, seqlen_q, num_heads_q, head_dim)
    k: NDArray[Any]  # (batch, seqlen_k, num_heads_kv, head_dim)
    v: NDArray[Any]
    seq_info: NDArray[np.int64]  # (sequences, 5): row of the batch, first query, number, first key, number

    @property
    def dtype_code(self) -> int:
        """Dtype of q as kernels take it."""
        from kvlab.numba_kernels.cpu.elements import BFLOAT16, FLOAT16, FLOAT32

        return int({"float16": FLOAT16, "bfloat16": BFLOAT16, "float32": FLOAT32}[dtype_name(self.q)])


def lay_out(q: Any, k: Any, v: Any, sequences: Sequences | None) -> Views:
    """Return views of q, k and v, and where sequences lie; refuses lengths that do not fit."""
    views = [to_numpy_view(x, name) for name, x in (("q", q), ("k", k), ("v", v))]
    if sequences is not None:
        views = [x[None] for x in views]
        bounds_q = bounds_of("cu_seqlens_q", sequences.cu_q, sequences.max_q, views[0].shape[1])
        bounds_k = bounds_of("cu_seqlens_k", sequences.cu_k, sequences.max_k, views[1].shape[1])
        seq_info = np.zeros((len(bounds_q) - 1, 5), np.int64)
        seq_info[:, 1], seq_info[:, 2] = bounds_q[:-1], np.diff(bounds_q)
        seq_info[:, 3], seq_info[:, 4] = bounds_k[:-1], np.diff(bounds_k)
    else:
        seq_info = np.zeros((len(views[0]), 5), np.int64)
        seq_info[:, 0] = np.arange(len(views[0]))
        seq_info[:, 2], seq_info[:, 4] = views[0].shape[1], views[1].shape[1]
    return Views(views[0], views[1], views[2], seq_info)


def bounds_of(name: str, cu_seqlens: Any, max_seqlen: int, total: int) -> NDArray[np.int64]:
    """Return prefix sums, ``cu_seqlens_q`` or another, after a check against the rows there are."""
    bounds = to_numpy_view(cu_seqlens, name).astype(np.int64)
    lengths = np.diff(bounds)
    which = name.removeprefix("cu_seqlens_")
    if bounds[0] != 0 or bounds[-1] != total or (lengths < 0).any():
        raise ValueError(f"{name} is {bounds.tolist()}: it must rise from 0 to {total}, the rows of {which}")
    if lengths.max(initial=0) > max_seqlen:
        raise ValueError(
            f"max_seqlen_{which[0]} is {max_seqlen}, but one sequence has {lengths.max()} rows: pass that"
        )
    return bounds


def attend(q: ArrayT, k: Any, v: Any, sequences: Sequences | None, scores: Scores) -> tuple[ArrayT, ArrayT]:
    """Launcher of backend "cpu".

    Parameters
    ----------
    q, k, v : array
        (batch, seqlen, heads, head_dim) each, or with `sequences` (total, heads, head_dim).
    sequences : Sequences or None
    scores : Scores

    Returns
    -------
    out : array, shape and dtype of q
    lse : float32 array, (batch, num_heads_q, seqlen_q) or (num_heads_q, total_q)
    """
    views = lay_out(q, k, v, sequences)
    out, lse = attend_sequences(
        views, scores, np.empty(0, np.int64), alone=not worth_sharing(views, products=1)
    )
    return results_of(q, out, lse, sequences)


def attend_sequences(
    views: Views, scores: Scores, limits: NDArray[np.int64], *, alone: bool
) -> tuple[NDArray[Any], NDArray[np.float32]]:
    """Attend sequences where they lie: out (batch, seqlen_q, num_heads_q, head_dim) and lse.

    `limits`, if not empty, are how many keys each position of q sees, rising within a sequence.
    """
    from kvlab.numba_kernels.cpu import attention as kernels

    kv_heads = views.k.shape[2]
    group = views.q.shape[2] // kv_heads
    out = np.empty(views.q.shape, views.q.dtype)
    lse = np.empty((out.shape[0], out.shape[2], out.shape[1]), np.float32)
    seq_info = views.seq_info
    run_parallel(
        kernels.attend, np.zeros(1, np.int64),
        items_of(seq_info[:, 2] * group, kv_heads, kernels.PANELS * kernels.PANEL), seq_info, limits,
        *map(split_by_width, views[:3]), views.dtype_code, group, *score_numbers(scores, kernels.LOG2_E),
        split_by_width(out), lse, alone=alone,
    )  # fmt: skip
    return out, lse


def score_numbers(scores: Scores, unit: float = 1) -> tuple[Any, ...]:
    """Return what kernels take of `scores`: left, right, sign, factor, rate, softcap.

    The factor brings products of q and k, or capped scores, to natural scores times `unit`.
    """
    left, right = (_FAR if side < 0 else side for side in (scores.left, scores.right))
    return left, right, *score_factors(scores.scale, scores.softcap, unit)


def score_factors(scale: float, softcap: float, unit: float = 1) -> tuple[np.float32, ...]:
    """Return sign, factor, rate and softcap of `score_numbers`."""
    # A scale of 0 becomes one that no score is seen with, so that hidden keys, at -inf, stay hidden.
    size = max(abs(scale), 1e-37)
    factor = unit if softcap else size * unit
    rate = size / softcap if softcap else 1.0
    return tuple(map(np.float32, (math.copysign(1, scale), factor, rate, softcap)))


def worth_sharing(views: Views, products: int) -> bool:
    """Say whether a call is long enough for several threads; `products`: pairs of matrix products in it."""
    cells = int((views.seq_info[:, 2] * views.seq_info[:, 4]).sum())
    return products * cells * int(views.q.shape[2] * views.q.shape[3]) >= _WORTH_SHARING


def items_of(rows: NDArray[np.int64], kv_heads: int, block: int) -> NDArray[np.int64]:
    """(n, 3): sequence, KV head, block of query rows; late blocks, the dearest under a causal mask, first."""
    blocks = -(-rows // block)
    cells = np.arange(blocks.max(initial=0))[::-1]
    number, sequence, head = np.meshgrid(cells, np.arange(len(rows)), np.arange(kv_heads), indexing="ij")
    items = np.stack([sequence, head, number], axis=-1).reshape(-1, 3)
    return np.asarray(items[items[:, 2] < blocks[items[:, 0]]])


def split_by_width(x: NDArray[Any]) -> tuple[NDArray[np.uint16], NDArray[np.float32]]:
    """(bits of 16-bit elements, 32-bit elements) of an array, its last axis made contiguous; one is empty."""
    if x.shape[-1] > 1 and x.strides[-1] != x.itemsize:
        x = np.ascontiguousarray(x)
    empty = (*x.shape[:-1], 0)
    if x.dtype == np.float32:
        return np.empty(empty, np.uint16), x
    return x.view(np.uint16), np.empty(empty, np.float32)


def results_of(
    q: ArrayT, out: NDArray[Any], lse: NDArray[np.float32], sequences: Sequences | None
) -> tuple[ArrayT, ArrayT]:
    if sequences is not None:
        out, lse = out[0], lse[0]
    return like_first(out, q), like_first(lse, q)


def part_views(name: str, arrays: Sequence[Array]) -> list[NDArray[Any]]:
    return [to_numpy_view(array, f"{name}[{i}]") for i, array in enumerate(arrays)]


@np.errstate(divide="ignore", invalid="ignore", over="ignore")
def merge(outs: Sequence[ArrayT], lses: Sequence[Array]) -> tuple[ArrayT, ArrayT]:
    """Launcher of backend "cpu" of merge_attention: part by part, so that at most two exist widened."""
    out_views, lse_views = part_views("outs", outs), np.stack(part_views("lses", lses))
    largest = lse_views.max(axis=0)
    largest = np.where(largest == -np.inf, np.float32(0), largest)  # rows without keys: exp(-inf - 0) is 0
    weights = np.exp(lse_views - largest)
    total = weights.sum(axis=0)
    weights /= np.where(total == 0, np.float32(1), total)
    merged = np.zeros(out_views[0].shape, dtype=np.float32)
    for weight, out in zip(np.swapaxes(weights, -1, -2)[..., None], out_views, strict=True):
        merged += np.where(weight == 0, np.float32(0), weight * out.astype(np.float32))
    lse = largest + np.log(total)
    return like_first(merged.astype(out_views[0].dtype), outs[0]), like_first(lse, outs[0])

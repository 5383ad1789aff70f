"""Gradients of attention on the CPU: launcher of the backend "cpu"."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kvlab.arrays import ArrayT
from kvlab.new_arrays import like_first
from kvlab.ops.cpu.attention import items_of, lay_out, score_numbers, split_by_width, worth_sharing
from kvlab.threads import run_parallel
from kvlab.views import to_numpy_view

if TYPE_CHECKING:
    from kvlab.ops.attention_call import Scores, Sequences

__all__ = ["attend_backward", "beside_q", "gradients_of"]


def beside_q(
    dout: Any, out: Any, lse: Any, sequences: Sequences | None
) -> tuple[NDArray[Any], NDArray[Any], NDArray[np.float32]]:
    """dout, out (batch, seqlen_q, num_heads_q, head_dim) and lse (batch, num_heads_q, seqlen_q)."""
    views = to_numpy_view(dout, "dout"), to_numpy_view(out, "out"), to_numpy_view(lse, "lse")
    return views if sequences is None else (views[0][None], views[1][None], views[2][None])


def attend_backward(
    dout: ArrayT, q: Any, k: Any, v: Any, out: Any, lse: Any,
    sequences: Sequences | None, scores: Scores, deterministic: bool, float32_dk_dv: bool = False,
) -> tuple[ArrayT, ArrayT, ArrayT]:  # fmt: skip
    """Launcher of backend "cpu", which is always deterministic.

    Parameters
    ----------
    dout, q, k, v, out : array
        (batch, seqlen, heads, head_dim) each, or with `sequences` (total, heads, head_dim).
    lse : float32 array, (batch, num_heads_q, seqlen_q) or (num_heads_q, total_q)
    sequences : Sequences or None
    scores : Scores
    float32_dk_dv : bool
        Whether dk and dv are float32, as they are summed.

    Returns
    -------
    dq, dk, dv : array, shapes and dtypes of q, k, v
    """
    from kvlab.numba_kernels.cpu import attention_backward as kernels

    views = lay_out(q, k, v, sequences)
    above, rows_out, logs = beside_q(dout, out, lse, sequences)
    kv_heads = views.k.shape[2]
    group = views.q.shape[2] // kv_heads
    of_keys = np.dtype(np.float32) if float32_dk_dv else views.k.dtype
    gradients = [np.empty(x.shape, of_keys if i else x.dtype) for i, x in enumerate(views[:3])]
    dq, dk, dv = map(split_by_width, gradients)
    delta = np.empty(logs.shape, np.float32)
    numbers = score_numbers(scores)
    seq_info, alone = views.seq_info, not worth_sharing(views, products=3)
    inputs = [split_by_width(x) for x in (above, *views[:3])]
    run_parallel(
        kernels.backward_queries, np.zeros(1, np.int64),
        items_of(seq_info[:, 2] * group, kv_heads, kernels.PANELS * kernels.PANEL), seq_info,
        *inputs, split_by_width(rows_out), logs, views.dtype_code, group, *numbers, np.float32(scores.scale),
        delta, dq, alone=alone,
    )  # fmt: skip
    # Under a causal mask the first keys are the dearest.
    run_parallel(
        kernels.backward_keys, np.zeros(1, np.int64),
        items_of(seq_info[:, 4], kv_heads, kernels.TILES * kernels.KEYS)[::-1], seq_info,
        *inputs, logs, delta, views.dtype_code, group, *numbers, np.float32(abs(scores.scale)), dk, dv,
        alone=alone,
    )  # fmt: skip
    return gradients_of(dout, sequences, *gradients)


def gradients_of(
    first: ArrayT, sequences: Sequences | None, *gradients: NDArray[Any]
) -> tuple[ArrayT, ArrayT, ArrayT]:
    """Return dq, dk and dv as arrays of the kind of the first argument."""
    dq, dk, dv = (like_first(x if sequences is None else x[0], first) for x in gradients)
    return dq, dk, dv

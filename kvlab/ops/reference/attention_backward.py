"""Gradients of attention in float64: launcher of the backend "reference"."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from kvlab.arrays import ArrayT
from kvlab.ops.cpu.attention import lay_out
from kvlab.ops.cpu.attention_backward import beside_q, gradients_of
from kvlab.reference import attention_backward as reference
from kvlab.reference.attention import visible_keys

if TYPE_CHECKING:
    from kvlab.ops.attention_call import Scores, Sequences

__all__ = ["attend_backward"]


def attend_backward(
    dout: ArrayT, q: Any, k: Any, v: Any, out: Any, lse: Any,
    sequences: Sequences | None, scores: Scores, deterministic: bool, float32_dk_dv: bool = False,
) -> tuple[ArrayT, ArrayT, ArrayT]:  # fmt: skip
    """Launcher of backend "reference"; arguments as `kvlab.ops.cpu.attention_backward.attend_backward`."""
    views = lay_out(q, k, v, sequences)
    wide = [x.astype(np.float64) for x in (*views[:3], *beside_q(dout, out, lse, sequences))]
    dq, dk, dv = (np.zeros(x.shape) for x in wide[:3])
    for b, q0, rows, k0, keys in views.seq_info.tolist():
        visible = visible_keys(rows, keys, window=(scores.left, scores.right))
        own_q, own_k = slice(q0, q0 + rows), slice(k0, k0 + keys)
        dq[b, own_q], dk[b, own_k], dv[b, own_k] = reference.backward_rows(
            wide[3][b, own_q], wide[0][b, own_q], wide[1][b, own_k], wide[2][b, own_k],
            wide[4][b, own_q], wide[5][b, :, own_q], visible, scale=scores.scale, softcap=scores.softcap,
        )  # fmt: skip
    own = views.q.dtype
    of_keys = np.dtype(np.float32) if float32_dk_dv else own
    return gradients_of(dout, sequences, dq.astype(own), dk.astype(of_keys), dv.astype(of_keys))

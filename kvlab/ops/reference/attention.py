"""Attention in float64: launchers of the backend "reference"."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from kvlab.arrays import Array, ArrayT
from kvlab.new_arrays import like_first
from kvlab.ops.cpu.attention import lay_out, part_views, results_of
from kvlab.reference import attention as reference

if TYPE_CHECKING:
    from kvlab.ops.attention_call import Scores, Sequences

__all__ = ["attend", "merge"]


def attend(q: ArrayT, k: Any, v: Any, sequences: Sequences | None, scores: Scores) -> tuple[ArrayT, ArrayT]:
    """Launcher of backend "reference"; arguments as `kvlab.ops.cpu.attention.attend`."""
    views = lay_out(q, k, v, sequences)
    wide = [x.astype(np.float64) for x in views[:3]]
    out = np.zeros(views.q.shape, views.q.dtype)
    lse = np.full((out.shape[0], out.shape[2], out.shape[1]), -np.inf, np.float32)
    for b, q0, rows, k0, keys in views.seq_info.tolist():
        visible = reference.visible_keys(rows, keys, window=(scores.left, scores.right))
        own_q, own_k = slice(q0, q0 + rows), slice(k0, k0 + keys)
        one = reference.attend_rows(
            wide[0][b, own_q], wide[1][b, own_k], wide[2][b, own_k], visible,
            scale=scores.scale, softcap=scores.softcap,
        )  # fmt: skip
        out[b, own_q], lse[b, :, own_q] = one
    return results_of(q, out, lse, sequences)


def merge(outs: Sequence[ArrayT], lses: Sequence[Array]) -> tuple[ArrayT, ArrayT]:
    """Launcher of backend "reference" of merge_attention."""
    out_views = part_views("outs", outs)
    out, lse = reference.merge_attention(out_views, part_views("lses", lses))
    return like_first(out.astype(out_views[0].dtype), outs[0]), like_first(lse.astype(np.float32), outs[0])

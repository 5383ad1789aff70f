"""Results, workspace and limits of one call, for both GPU backends of packed attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from kvlab.arrays import ArrayT, dtype_name
from kvlab.new_arrays import empty

if TYPE_CHECKING:
    from kvlab.ops.packed import PackedAttention, Pages, Window

__all__ = ["MAX_RUNGS", "allocate_and_attend"]

MAX_RUNGS = 16
"""Rungs that the kernels' arguments have room for."""


def allocate_and_attend(
    make_workspace: Callable[[Any, int, int, int], Any],
    attend: Callable[..., None],
    q: ArrayT,
    pages: Pages,
    group: int,
    scale: float,
    softcap: float,
    keep_scores: int,
    window: Window | None = None,
) -> PackedAttention[ArrayT]:
    """Make results and a workspace and call a backend's `attend`: one call of `packed_attention`."""
    from kvlab.ops.packed import PackedAttention

    batch, seqlen_q, heads, head_dim = q.shape  # type: ignore[attr-defined]
    dtype = dtype_name(q, "q")
    if dtype != pages.dtype:
        raise NotImplementedError(
            f"q is {dtype} and the pages are of a {pages.dtype} cache; on a GPU both must be the same"
        )
    if len(pages.layouts) > MAX_RUNGS:
        raise NotImplementedError(
            f"pages have {len(pages.layouts)} rungs; on a GPU at most {MAX_RUNGS} are supported"
        )
    kv_heads, quads = pages.rung.shape[1], pages.rung.shape[2] // 4
    out = empty((batch, seqlen_q, heads, head_dim), dtype, q)
    lse = empty((batch, heads, seqlen_q), "float32", q)
    scores = empty((batch, kv_heads, quads, keep_scores * group, 64), "float32", q) if keep_scores else None
    if batch * seqlen_q * heads:
        workspace = make_workspace(q, batch * kv_heads, seqlen_q * group, head_dim)
        options = {"scale": scale, "softcap": softcap, "scores": scores, "window": window}
        attend(q, pages, out, lse, workspace, **options)
    return PackedAttention(out, lse, scores)

"""Attention over packed pages in float64: launchers of the backend "reference"."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvlab.arrays import Array, ArrayT
from kvlab.new_arrays import like_first
from kvlab.ops.packed import PackedAttention, Pages, Window
from kvlab.pages import TOKENS_PER_PAGE
from kvlab.reference import packed as reference
from kvlab.views import to_numpy_view

__all__ = ["attend", "mass"]


def attend(
    q: ArrayT, pages: Pages, group: int, scale: float, softcap: float, keep_scores: int, window: Window | None
) -> PackedAttention[ArrayT]:
    """Launcher of backend "reference" for `kvlab.ops.packed.packed_attention`."""
    queries = to_numpy_view(q, "q")
    seen: dict[str, Any] = {}
    if window:
        first = to_numpy_view(window.first, "first_position")
        seen = {"window": (window.left, -1), "first_position": first}
    out, lse, scores = reference.packed_attention(
        queries, pages, scale=scale, softcap=softcap, keep_scores=keep_scores, **seen
    )
    kept = like_first(scores.astype(np.float32), q) if keep_scores else None
    return PackedAttention(
        like_first(out.astype(queries.dtype), q), like_first(lse.astype(np.float32), q), kept
    )


def mass(scores: ArrayT, lse: Array, pages: Pages, group: int) -> ArrayT:
    """Launcher of backend "reference" for `kvlab.ops.packed.mass_from_scores`."""
    entry, slot = np.arange(pages.rung.shape[2])[:, None], np.arange(TOKENS_PER_PAGE)
    used = (entry < pages.num_pages[..., None, None]) & (slot < pages.count[..., None])
    mass = reference.mass_from_scores(to_numpy_view(scores, "scores"), to_numpy_view(lse, "lse"))
    return like_first(np.where(used, mass, 0).astype(np.float32), scores)

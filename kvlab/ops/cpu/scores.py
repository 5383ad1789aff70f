"""Importance of tokens on a CPU: what `kvlab.ops.cuda.scores` is for a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvlab.ops.cpu.exact import exact_mass
from kvlab.ops.cpu.layer import HostLayer, view_at
from kvlab.ops.cpu.packed import mass
from kvlab.pages import QUAD, TOKENS_PER_PAGE, decode_importance, encode_importance
from kvlab.views import CudaView

__all__ = ["norm_codes", "scale_of_importance", "score_new", "score_norms", "score_stored"]

Floats = NDArray[np.float32]


def score_stored(
    layers: Sequence[HostLayer], pages: Sequence[Any], scores: Any, lse: Any, *, importance: str, take: float,
    span: int, counted: int,
) -> None:  # fmt: skip
    """`kvlab.ops.cuda.scores.score_stored`; `pages` are those of the layers, with tokens that wait."""
    from kvlab.numba_kernels.cpu.cache_write import follow_mass

    for layer, stored, kept, total in zip(layers, pages, scores, lse, strict=True):
        if not kept.size:
            continue
        rows = kept.view(np.float32).reshape(*kept.shape[:3], -1, QUAD * TOKENS_PER_PAGE)
        received = np.nan_to_num(mass(rows, total, stored, total.shape[1] // layer.shape[1]))
        follow_mass(
            layer.with_waiting, received.reshape(-1, *received.shape[2:]), layer.seqlen - counted,
            np.float32(take), span, importance == "forecast", *scale_of_importance(),
        )  # fmt: skip


def score_new(
    q: CudaView, k: CudaView, lse: Any, codes: Any, *, rows: int, scale: float, softcap: float = 0.0,
    stream: int = 0,
) -> None:  # fmt: skip
    """`kvlab.ops.cuda.scores.score_new`: the attention that new tokens get from the last rows."""
    queries, keys = view_at(q).astype(np.float32), view_at(k).astype(np.float32)
    total = np.where(np.isfinite(lse), lse, np.float32(np.inf))
    visible, last = np.ones(keys.shape[:2], bool), np.ascontiguousarray(queries[:, -rows:])
    received = exact_mass(last, np.ascontiguousarray(keys), visible, scale, softcap, total)
    codes[...] = encode_importance(np.nan_to_num(received)).reshape(codes.shape)


def score_norms(k: Any, codes: Any, importance: str, stream: int = 0) -> None:
    """`kvlab.ops.cuda.scores.score_norms`."""
    if importance == "uniform":
        codes[...] = encode_importance(np.ones(1))[0]
    elif importance == "recency":
        codes[...] = encode_importance(1 / np.arange(k.shape[1], 0, -1))
    else:
        codes[...] = norm_codes(k).reshape(codes.shape)


def norm_codes(k: Any) -> NDArray[np.uint8]:
    """Importance of keys (batch, num_new, heads, head_dim): 1 / norm, (batch, heads, num_new)."""
    squares = (k.astype(np.float64) ** 2).sum(-1).transpose(0, 2, 1)
    norm: Floats = np.sqrt(squares).astype(np.float32)
    inverse = np.reciprocal(np.maximum(norm, np.float32(1e-6)))
    return encode_importance(np.where(np.isfinite(inverse), inverse, np.float32(0)))


@lru_cache(maxsize=1)
def scale_of_importance() -> tuple[NDArray[np.float64], Floats]:
    """Where the scores of codes 2 to 255 begin, and what each code stands for."""
    begins = 2.0 ** ((np.arange(1, 255) - 191.5) / 8)
    return begins, decode_importance(np.arange(256, dtype=np.uint8))

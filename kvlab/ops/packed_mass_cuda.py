"""Attention mass on a GPU: kept scores become probabilities, one launch (``kernels/cuda/cache_score.cu``)."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from kvlab.arrays import Array, ArrayT, cuda_view, current_stream, empty
from kvlab.build import Kernel, arch_of, build, load
from kvlab.device import compute_capability

if TYPE_CHECKING:
    from kvlab.ops.packed import Pages

__all__ = ["kept_scores", "launch", "score_kernel"]

_NUMBERS = ("group", "positions", "seqlen", "entries")
_KEPT = np.dtype([("scores", "u8"), ("lse", "u8"), *((name, "i4") for name in _NUMBERS)])
_THREADS, _PAGES = 256, 16  # of a block


@lru_cache(maxsize=64)
def score_kernel(entry: str, device: int, head_dim: int = 128, dtype: str = "bfloat16") -> Kernel:
    """Return a kernel of ``cache_score.cu``; those that read no keys are the same for any head_dim."""
    macros = {"HEAD_DIM": head_dim, "BF16": int(dtype == "bfloat16")}
    return load(build("cache_score", macros, arch_of(*compute_capability(device))), entry, device=device)


def kept_scores(scores: Any, lse: Any, group: int) -> tuple[Any, tuple[int, int]]:
    """Return the struct `Kept` of the kernels, and their grid for one layer.

    scores (..., batch, num_heads_kv, entries, rows, 64) and lse (..., batch, num_heads_q, seqlen) float32,
    contiguous.
    """
    batch, heads, entries, rows, _ = scores.shape[-5:]
    kept = np.zeros((), _KEPT)
    kept["scores"], kept["lse"] = cuda_view(scores, "scores").pointer, cuda_view(lse, "lse").pointer
    for name, number in zip(_NUMBERS, (group, rows // group, lse.shape[-1], entries), strict=True):
        kept[name] = number
    return np.frombuffer(kept.tobytes(), f"V{_KEPT.itemsize}")[0], (-(-entries // _PAGES), batch * heads)


def launch(scores: ArrayT, lse: Array, pages: Pages, group: int) -> ArrayT:
    """Launcher of backend "cuda" for `kvlab.ops.packed.mass_from_scores`."""
    *table, _, slots = scores.shape  # type: ignore[attr-defined]
    mass = empty((*table, slots), "float32", scores)
    kept, grid = kept_scores(scores, lse, group)
    names = {"pages.count": pages.count, "pages.num_pages": pages.num_pages, "mass": mass}
    pointers = [cuda_view(x, name).pointer for name, x in names.items()]
    kernel = score_kernel("mass_of_scores", cuda_view(mass, "mass").device)
    kernel(grid, (_THREADS,), (*pointers, kept), 0, current_stream(scores))
    return mass

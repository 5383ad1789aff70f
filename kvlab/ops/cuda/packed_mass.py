"""Attention mass on a GPU: kept scores become probabilities, one launch (``kernels/cuda/plan/score.cu``)."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kvlab.arrays import Array, ArrayT, cuda_view, empty
from kvlab.device import compute_capability
from kvlab.jit.build import Kernel, arch_of, build, load
from kvlab.ops.device_arrays import contiguous, dense_pointer
from kvlab.ops.device_arrays import launch as launch_on_device

if TYPE_CHECKING:
    from kvlab.ops.packed import Pages

__all__ = ["KEPT", "kept_scores", "launch", "score_kernel"]

_NUMBERS = ("group", "positions", "seqlen", "entries")
KEPT = np.dtype([("scores", "u8"), ("lse", "u8"), *((name, "i4") for name in _NUMBERS)])
"""`Kept` of plan/score.cu."""
_THREADS, _PAGES = 256, 16  # of a block


@lru_cache(maxsize=64)
def score_kernel(entry: str, device: int, head_dim: int = 128, dtype: str = "bfloat16") -> Kernel:
    """Return a kernel of ``plan/score.cu``; those that read no keys are the same for any head_dim."""
    macros = {"HEAD_DIM": head_dim, "BF16": int(dtype == "bfloat16")}
    return load(build("plan/score", macros, arch_of(*compute_capability(device))), entry, device=device)


def kept_scores(scores: Any, lse: Any, group: int, rows: int, entries: int) -> NDArray[Any]:
    """Return a `KEPT` of scores of so many rows and of lse (..., seqlen) float32, both contiguous."""
    kept = np.zeros((), KEPT)
    kept["scores"], kept["lse"] = cuda_view(scores, "scores").pointer, cuda_view(lse, "lse").pointer
    for name, number in zip(_NUMBERS, (group, rows // group, lse.shape[-1], entries), strict=True):
        kept[name] = number
    return kept


def launch(scores: ArrayT, lse: Array, pages: Pages, group: int) -> ArrayT:
    """Launcher of backend "cuda" for `kvlab.ops.packed.mass_from_scores`."""
    batch, heads, entries, rows, slots = scores.shape  # type: ignore[attr-defined]
    scores, lse = contiguous(scores, "scores"), contiguous(lse, "lse")
    mass = empty((batch, heads, entries, slots), "float32", scores)
    kept = np.frombuffer(kept_scores(scores, lse, group, rows, entries).tobytes(), f"V{KEPT.itemsize}")[0]
    grid = -(-entries // _PAGES), batch * heads
    names = {"pages.count": pages.count, "pages.num_pages": pages.num_pages, "mass": mass}
    pointers = [dense_pointer(cuda_view(x, name), name) for name, x in names.items()]
    kernel = score_kernel("mass_of_scores", cuda_view(mass, "mass").device)
    launch_on_device(kernel, grid, (_THREADS,), (*pointers, kept), scores)
    return mass

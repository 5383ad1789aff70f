"""Attention mass on a GPU: saved scores become probabilities, one launch (``kernels/cuda/plan/score.cu``)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvlab.arrays import Array, ArrayT
from kvlab.jit.launch import Kernel, cuda_kernel
from kvlab.jit.structs import ADDRESS, Struct
from kvlab.new_arrays import empty
from kvlab.ops.device_arrays import contiguous, dense_pointer
from kvlab.ops.device_arrays import launch as launch_on_device
from kvlab.pages import QUAD, TOKENS_PER_PAGE
from kvlab.views import cuda_view

if TYPE_CHECKING:
    from kvlab.ops.packed import Pages

__all__ = ["SAVED_SCORES", "launch", "score_kernel"]

_SAVED_SCORES = Struct(scores=ADDRESS, lse=ADDRESS, group="i", positions="i", seqlen="i", quads="i")
SAVED_SCORES = _SAVED_SCORES.dtype
"""`SavedScores` of plan/score.cu."""
_THREADS, _QUADS = 256, 16  # of a block


def score_kernel(entry: str, device: int, head_dim: int = 128, dtype: str = "bfloat16") -> Kernel:
    """Return a kernel of ``plan/score.cu``; those that read no keys are the same for any head_dim."""
    macros = (("HEAD_DIM", head_dim), ("BF16", int(dtype == "bfloat16")))
    return cuda_kernel("plan/score", entry, macros, device)


def launch(scores: ArrayT, lse: Array, pages: Pages, group: int) -> ArrayT:
    """Launcher of backend "cuda" for `kvlab.ops.packed.mass_from_scores`."""
    batch, heads, quads, rows, _ = scores.shape  # type: ignore[attr-defined]
    scores, lse = contiguous(scores, "scores"), contiguous(lse, "lse")
    mass = empty((batch, heads, QUAD * quads, TOKENS_PER_PAGE), "float32", scores)
    saved = _SAVED_SCORES.pack(
        scores=dense_pointer(cuda_view(scores, "scores"), "scores"),
        lse=dense_pointer(cuda_view(lse, "lse"), "lse"),
        group=group,
        positions=rows // group,
        seqlen=lse.shape[-1],  # type: ignore[attr-defined]
        quads=quads,
    )
    grid = -(-quads // _QUADS), batch * heads
    names = {"pages.count": pages.count, "pages.num_pages": pages.num_pages, "mass": mass}
    pointers = [dense_pointer(cuda_view(x, name), name) for name, x in names.items()]
    kernel = score_kernel("mass_of_scores", cuda_view(mass, "mass").device)
    launch_on_device(kernel, grid, (_THREADS,), (*pointers, saved), scores)
    return mass

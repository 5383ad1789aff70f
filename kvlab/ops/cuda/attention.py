"""Attention on a GPU: choose the kernel and its specialisation, and launch it.

A call runs on the caller's stream. Lengths of variable-length calls are read on the device, so nothing waits
for it. A kernel is specialised for the head dimension (padded with zeros to the next supported one), the
dtype, whether rows can be copied 16 bytes at a time, and whether scores are capped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from kvlab.arrays import ArrayT, CudaView, cuda_view, empty, pointer_of
from kvlab.device import compute_capability
from kvlab.jit.build import arch_of, build
from kvlab.jit.launch import Kernel, load
from kvlab.ops.attention_arguments import (
    ADDRESS,
    TENSOR,
    Layout,
    Lengths,
    bounds_of,
    can_be_mapped,
    contiguous_strides,
    fields_of,
    is_aligned,
    is_capped,
    placed,
    strides_of,
)
from kvlab.ops.cuda.attention_sm90 import HopperAttention
from kvlab.ops.device_arrays import launch

if TYPE_CHECKING:
    from kvlab.ops.attention import Scores, Sequences

__all__ = ["attend"]

_CALL = Layout(
    **dict.fromkeys(("q", "k", "v", "out"), TENSOR),
    lse=ADDRESS, lse_batch="q", lse_head="q", cu_q=ADDRESS, cu_k=ADDRESS,
    **dict.fromkeys(("seqlen_q", "seqlen_k", "group", "dim", "left", "right"), "i"),
    **dict.fromkeys(("scale", "softcap"), "f"),
)  # fmt: skip

# By head dimension: tiles of 16 rows a warp has, warps, keys of a tile, blocks on a multiprocessor. 32 rows a
# warp halve what it reads of K and V in shared memory, as long as their output fits into registers.
SHAPES = {
    32: (2, 4, 32, 3),
    64: (2, 4, 32, 3),
    80: (2, 4, 64, 2),
    96: (2, 4, 64, 2),
    128: (2, 4, 64, 2),
    192: (1, 4, 64, 2),
    256: (1, 4, 64, 2),
}

# The kernel for float32: head dimensions that there is one for.
FLOAT32_DIMS = (32, 64, 96, 128, 192, 256)
_FLOAT32_ROWS, _FLOAT32_THREADS = 32, 128

HOPPER = True
"""Whether to use the kernel for Hopper; tests and benchmarks of the other one turn it off."""


class _Prepared(NamedTuple):
    """All of a call that does not change while its shapes, strides and options stay the same."""

    launch: HopperAttention | _PortableAttention
    out_shape: tuple[int, ...]
    lse_shape: tuple[int, ...]


def attend(
    q: ArrayT, k: Any, v: Any, sequences: Sequences | None, scores: Scores, sm_margin: int = 0
) -> tuple[ArrayT, ArrayT]:
    """Launcher of backend "cuda"; arguments and results as `kvlab.ops.cpu.attention.attend`.

    `sm_margin` is how many multiprocessors persistent blocks leave to others; other kernels leave none.
    """
    views = cuda_view(q, "q"), cuda_view(k, "k"), cuda_view(v, "v")
    bounds, lengths = bounds_of(sequences, *views[:2])
    variable = sequences is not None
    prepared = _prepare(*map(placed, views), lengths, scores, variable, HOPPER, sm_margin)
    out = empty(prepared.out_shape, views[0].dtype, q)
    lse = empty(prepared.lse_shape, "float32", q)
    pointers = [view.pointer for view in views]
    prepared.launch([*pointers, pointer_of(out)], pointer_of(lse), bounds, q)
    return out, lse


@lru_cache(maxsize=4096)
def _prepare(
    q: CudaView,
    k: CudaView,
    v: CudaView,
    lengths: Lengths,
    scores: Scores,
    variable: bool,
    hopper: bool,
    sm_margin: int,
) -> _Prepared:
    """Prepare calls of one kind; views as `placed` gives them."""
    views = q, k, v
    aligned = q.dtype != "float32" and all(map(is_aligned, views))
    call: HopperAttention | _PortableAttention
    if (
        hopper
        and compute_capability(q.device) == (9, 0)
        and aligned
        and all(map(can_be_mapped, views))
        and lengths[0]
    ):
        call = HopperAttention(q, k, v, lengths, scores, variable, sm_margin)
    else:
        call = _PortableAttention(q, k, v, lengths, scores, aligned)
    *rows, heads, _ = q.shape
    return _Prepared(call, q.shape, (*rows[:-1], heads, rows[-1]))


class _PortableAttention:
    """Calls of one kind on other GPUs, in float32, and of arrays that tensor copies cannot read.

    Called as `HopperAttention`.
    """

    def __init__(
        self, q: CudaView, k: CudaView, v: CudaView, lengths: Lengths, scores: Scores, aligned: bool
    ) -> None:
        *rows, heads, dim = q.shape
        call = fields_of(q, k, lengths, scores)
        call |= {"k": strides_of("k", k), "v": strides_of("v", v), "out": contiguous_strides(q.shape)}
        call |= {"lse_batch": heads * rows[-1], "lse_head": rows[-1]}
        self._plan = _plan(dim, q.dtype, is_capped(scores), aligned, q.device)
        self._template = _CALL.template(call)
        self._grid = -(-lengths[1] * call["group"] // self._plan.rows), k.shape[-2], lengths[0]

    def __call__(self, pointers: Sequence[int], lse: int, bounds: tuple[int, int], like: Any) -> None:
        plan, argument = self._plan, self._template.fill([*pointers, lse, *bounds])
        launch(plan.kernel, self._grid, (plan.threads,), [argument], like, plan.shared_bytes)


@dataclass(frozen=True)
class _Plan:
    kernel: Kernel
    rows: int  # query rows of a block
    threads: int
    shared_bytes: int


@lru_cache(maxsize=256)
def _plan(dim: int, dtype: str, capped: bool, aligned: bool, device: int) -> _Plan:
    """Choose the kernel."""
    arch = arch_of(*compute_capability(device))
    if dtype == "float32":
        head_dim = min(size for size in FLOAT32_DIMS if size >= dim)
        kernel = load(build("attention/forward_float32", {"HEAD_DIM": head_dim}, arch), device=device)
        return _Plan(kernel, _FLOAT32_ROWS, _FLOAT32_THREADS, float32_shared_bytes(head_dim))
    macros = {"BF16": int(dtype == "bfloat16"), "SOFTCAP": int(capped), "ALIGNED": int(aligned)}
    head_dim = min(size for size in SHAPES if size >= dim)
    tiles, warps, keys, blocks = SHAPES[head_dim]
    macros |= {"HEAD_DIM": head_dim, "M_TILES": tiles, "WARPS": warps, "BLOCK_N": keys, "BLOCKS": blocks}
    kernel = load(build("attention/forward", macros, arch), device=device)
    return _Plan(kernel, 16 * tiles * warps, 32 * warps, portable_shared_bytes(head_dim))


def portable_shared_bytes(head_dim: int) -> int:
    """Q, K and V of a block, rows 8 elements longer than head_dim."""
    tiles, warps, keys, _ = SHAPES[head_dim]
    return 2 * (16 * tiles * warps + 2 * keys) * (head_dim + 8)


def float32_shared_bytes(head_dim: int) -> int:
    """Q, K or V, rows 4 elements longer than head_dim; P, as much longer than the keys of a tile."""
    return 4 * (2 * _FLOAT32_ROWS * (head_dim + 4) + _FLOAT32_ROWS * (_FLOAT32_ROWS + 4))

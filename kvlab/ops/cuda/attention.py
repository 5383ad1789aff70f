"""Attention on a GPU: choose the kernel and its specialisation, and launch it.

A call is one launch on the caller's stream and allocates nothing but its results. Lengths of variable-length
calls are read on the device, so nothing waits for it. A kernel is specialised for the head dimension (padded
with zeros to the next supported one), the dtype, whether rows can be copied 16 bytes at a time, and whether
scores are capped.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from kvlab.arrays import ArrayT, CudaView, cuda_view, empty, pointer_of
from kvlab.device import compute_capability
from kvlab.jit.build import Kernel, arch_of, build, load
from kvlab.ops.attention_arguments import (
    ADDRESS,
    TENSOR,
    Layout,
    Lengths,
    Template,
    bounds_of,
    can_be_mapped,
    contiguous_strides,
    fields_of,
    is_aligned,
    is_capped,
    placed,
    strides_of,
    tensor_map,
)
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

# The kernel for Hopper: by head dimension, keys of a tile, warpgroups of 64 rows that compute. There are two
# where scores are capped: three leave too few registers for that. Where no sequence has more than SHORT keys
# to a query head of the group, what a block does once weighs more than what it does for a key, so fewer
# blocks of more rows are faster.
HOPPER_SHAPES = {64: (128, 3), 128: (128, 2), 256: (64, 2)}
SHORT_SHAPES = HOPPER_SHAPES | {128: (64, 3)}
SHORT = 1024

# The kernel for float32: head dimensions that there is one for.
FLOAT32_DIMS = (32, 64, 96, 128, 192, 256)
_FLOAT32_ROWS, _FLOAT32_THREADS = 32, 128

HOPPER = True
"""Whether to use that kernel; tests and benchmarks of the other one turn it off."""


@dataclass(frozen=True)
class _Plan:
    kernel: Kernel
    rows: int  # query rows of a block
    threads: int
    shared_bytes: int
    box: int  # keys that a tensor copy brings; 0 if the kernel does not use them


class _Prepared(NamedTuple):
    """All of a call that does not change while its shapes, strides and options stay the same."""

    plan: _Plan
    call: Template
    grid: tuple[int, int, int]
    out_shape: tuple[int, ...]
    lse_shape: tuple[int, ...]


def attend(q: ArrayT, k: Any, v: Any, sequences: Sequences | None, scores: Scores) -> tuple[ArrayT, ArrayT]:
    """Launcher of backend "cuda"; arguments and results as `kvlab.ops.cpu.attention.attend`."""
    views = cuda_view(q, "q"), cuda_view(k, "k"), cuda_view(v, "v")
    bounds, lengths = bounds_of(sequences, *views[:2])
    prepared = _prepare(*map(placed, views), lengths, scores, HOPPER)
    plan = prepared.plan
    out = empty(prepared.out_shape, views[0].dtype, q)
    lse = empty(prepared.lse_shape, "float32", q)
    addresses = [view.pointer for view in views] + [pointer_of(out), pointer_of(lse), *bounds]
    arguments = [prepared.call.fill(addresses)]
    if plan.box:
        arguments = [tensor_map(view, plan.box) for view in views[1:]] + arguments
    launch(plan.kernel, prepared.grid, (plan.threads,), arguments, q, plan.shared_bytes)
    return out, lse


@lru_cache(maxsize=4096)
def _prepare(
    q: CudaView, k: CudaView, v: CudaView, lengths: Lengths, scores: Scores, hopper: bool
) -> _Prepared:
    """Prepare calls of one kind; views as `placed` gives them."""
    *rows, heads, dim = q.shape
    call = fields_of(q, k, lengths, scores)
    call |= {"k": strides_of("k", k), "v": strides_of("v", v), "out": contiguous_strides(q.shape)}
    call |= {"lse_batch": heads * rows[-1], "lse_head": rows[-1]}
    aligned = all(map(is_aligned, (q, k, v)))
    tensor_copies = hopper and aligned and can_be_mapped(k) and can_be_mapped(v)
    number, longest_q, longest_k = lengths
    short = longest_k <= SHORT * call["group"]
    plan = _plan(dim, q.dtype, is_capped(scores), aligned, tensor_copies, short, q.device)
    grid = -(-longest_q * call["group"] // plan.rows), k.shape[-2], number
    return _Prepared(plan, _CALL.template(call), grid, q.shape, (*rows[:-1], heads, rows[-1]))


@lru_cache(maxsize=256)
def _plan(
    dim: int, dtype: str, capped: bool, aligned: bool, tensor_copies: bool, short: bool, device: int
) -> _Plan:
    """Choose the kernel; `tensor_copies`: whether they may bring K and V, on a GPU that has them."""
    capability = compute_capability(device)
    if dtype == "float32":
        head_dim = min(size for size in FLOAT32_DIMS if size >= dim)
        kernel = load(
            build("attention/forward_float32", {"HEAD_DIM": head_dim}, arch_of(*capability)), device=device
        )
        return _Plan(kernel, _FLOAT32_ROWS, _FLOAT32_THREADS, float32_shared_bytes(head_dim), 0)
    macros = {"BF16": int(dtype == "bfloat16"), "CAPPED": int(capped)}
    if capability == (9, 0) and tensor_copies:
        head_dim = min(size for size in HOPPER_SHAPES if size >= dim)
        keys, groups = hopper_shape(head_dim, capped, short)
        macros |= {"HEAD_DIM": head_dim, "BLOCK_N": keys, "GROUPS": groups}
        kernel = load(build("attention/forward_sm90", macros, "sm_90a"), device=device)
        shared_bytes = hopper_shared_bytes(head_dim, keys, groups)
        return _Plan(kernel, 64 * groups, 128 + 128 * groups, shared_bytes, keys)
    head_dim = min(size for size in SHAPES if size >= dim)
    tiles, warps, keys, blocks = SHAPES[head_dim]
    macros |= {"HEAD_DIM": head_dim, "M_TILES": tiles, "WARPS": warps, "BLOCK_N": keys, "BLOCKS": blocks}
    kernel = load(
        build("attention/forward", macros | {"ALIGNED": int(aligned)}, arch_of(*capability)), device=device
    )
    return _Plan(kernel, 16 * tiles * warps, 32 * warps, portable_shared_bytes(head_dim), 0)


def portable_shared_bytes(head_dim: int) -> int:
    """Q, K and V of a block, rows 8 elements longer than head_dim."""
    tiles, warps, keys, _ = SHAPES[head_dim]
    return 2 * (16 * tiles * warps + 2 * keys) * (head_dim + 8)


def hopper_shape(head_dim: int, capped: bool, short: bool) -> tuple[int, int]:
    """Keys of a tile, and warpgroups that compute."""
    if capped:
        return HOPPER_SHAPES[head_dim][0], 2
    return (SHORT_SHAPES if short else HOPPER_SHAPES)[head_dim]


def hopper_shared_bytes(head_dim: int, keys: int, groups: int) -> int:
    """Q, or out, rows 8 elements longer; two stages of K and V; room to begin at a multiple of 1024."""
    return 1024 + 2 * (64 * groups * (head_dim + 8) + 4 * keys * head_dim)


def float32_shared_bytes(head_dim: int) -> int:
    """Q, K or V, rows 4 elements longer than head_dim; P, as much longer than the keys of a tile."""
    return 4 * (2 * _FLOAT32_ROWS * (head_dim + 4) + _FLOAT32_ROWS * (_FLOAT32_ROWS + 4))

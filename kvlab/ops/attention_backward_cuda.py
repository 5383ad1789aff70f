"""Attention backward on a GPU: three launches around a workspace, on the caller's stream.

``attention_backward_ends.cu`` prepares the workspace (each row's log-sum-exp, its sum of dout * out, zeros
for dq), ``attention_backward.cu``, or on Hopper ``attention_backward_sm90*.cu``, goes through keys and rows,
and the first finishes dq. dk and dv are summed
in registers, over all rows and over the query heads of a group; parts of dq come from many blocks and are
added in float32 in memory, in the order of the keys if the call is to be deterministic.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from kvlab.arrays import ArrayT, cuda_view, current_stream, dtype_name, empty
from kvlab.build import Kernel, arch_of, build, load
from kvlab.device import compute_capability
from kvlab.ops.attention_cuda import (
    FAR,
    TENSOR,
    Layout,
    can_be_mapped,
    check_limits,
    is_aligned,
    set_sequences,
    tensor_fields,
    tensor_map,
)

if TYPE_CHECKING:
    from kvlab.ops.attention import Scores, Sequences

__all__ = ["attend_backward"]

_CALL = Layout(
    **dict.fromkeys(("q", "k", "v", "dout", "out", "dq", "dk", "dv"), TENSOR),
    **dict.fromkeys(("lse", "peaks", "deltas", "sums", "turns", "cu_q", "cu_k"), "q"),
    **dict.fromkeys(("lse_batch", "lse_head", "rows"), "q"),
    **dict.fromkeys(("seqlen_q", "seqlen_k", "heads_kv", "group", "dim", "left", "right"), "i"),
    **dict.fromkeys(("scale", "softcap"), "f"),
    ordered="i",
)
_ALIGNED_ROWS = 128  # the workspace has this many rows, or a multiple, for a sequence
_ROWS_OF_END = 32  # of a block of the kernels before and after


class Shape(NamedTuple):
    """A tiling of the portable kernel; its head of comments says what the numbers are."""

    block_m: int
    block_n: int
    warps: int
    key_warps: int
    row_warps: int
    q_stages: int

    def shared_bytes(self, head_dim: int) -> int:
        """K and V, stages of Q, dout; P and dS; two stages of peaks and deltas."""
        rows = 2 * self.block_n + (self.q_stages + 1) * self.block_m
        return 2 * rows * (head_dim + 8) + 4 * self.block_n * (self.block_m + 8) + 16 * self.block_m


# By head dimension, the fastest first: a device takes the first that fits its shared memory. The last ones
# fit 99 KiB.
SHAPES = {
    32: (Shape(128, 128, 8, 4, 4, 2), Shape(64, 64, 8, 4, 4, 2)),
    64: (Shape(64, 128, 8, 4, 4, 2), Shape(64, 64, 8, 4, 4, 2)),
    96: (Shape(64, 128, 8, 4, 4, 2), Shape(32, 64, 4, 4, 2, 2)),
    128: (Shape(64, 128, 8, 4, 2, 2), Shape(32, 64, 8, 4, 2, 2)),
    192: (Shape(64, 64, 8, 2, 2, 2), Shape(32, 32, 4, 2, 2, 2)),
    256: (Shape(64, 64, 8, 2, 2, 2), Shape(64, 64, 8, 2, 2, 1), Shape(32, 32, 4, 2, 2, 1)),
}


class HopperShape(NamedTuple):
    """A tiling of the kernels for Hopper."""

    source: str
    block_m: int
    block_n: int
    dout_stages: int
    score_stages: int  # of P and dS together

    def shared_bytes(self, head_dim: int) -> int:
        """K, V, two stages of Q, dout; P and dS; dQ; room to begin at a multiple of 1024."""
        rows = 2 * self.block_n + (2 + self.dout_stages) * self.block_m
        sums = 4 * 2 * 64 * 64
        return 1024 + 2 * rows * head_dim + 2 * self.score_stages * self.block_n * self.block_m + sums


HOPPER_SHAPES = {
    64: HopperShape("attention_backward_sm90", 128, 128, 2, 2),
    128: HopperShape("attention_backward_sm90", 64, 128, 2, 2),
    256: HopperShape("attention_backward_sm90_wide", 64, 64, 1, 4),
}
_HOPPER_THREADS = 384

# The kernel for float32: by head dimension, keys and rows of a tile.
FLOAT32_BLOCKS = {32: 32, 64: 32, 96: 32, 128: 32, 192: 16, 256: 16}

HOPPER = True
"""Whether to use those; tests and benchmarks of the portable one turn it off and clear the plans."""

_KIB = 1024
_SHARED_BYTES = {(8, 0): 163 * _KIB, (8, 7): 163 * _KIB, (9, 0): 227 * _KIB, (10, 0): 227 * _KIB}
_LEAST_SHARED_BYTES = 99 * _KIB


@dataclass(frozen=True)
class _Plan:
    prepare: Kernel
    main: Kernel
    finish: Kernel
    head_dim: int
    keys: int  # of a block
    threads: int
    shared_bytes: int
    box: int  # rows that a tensor copy of q and dout brings; 0 if the kernel does not use them


def attend_backward(
    dout: Any,
    q: ArrayT,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    sequences: Sequences | None,
    scores: Scores,
    deterministic: bool,
) -> tuple[ArrayT, ArrayT, ArrayT]:
    """Launcher of backend "cuda": dq, dk and dv, contiguous, in the dtype of q."""
    inputs = {"q": q, "k": k, "v": v, "dout": dout, "out": out}
    views = {name: cuda_view(x, name) for name, x in inputs.items()}
    *rows, heads, dim = views["q"].shape
    kv_heads = views["k"].shape[-2]
    group = heads // kv_heads
    kind = dtype_name(q)
    grads = [empty(views[name].shape, kind, q) for name in ("q", "k", "v")]
    views |= {name: cuda_view(x, name) for name, x in zip(("dq", "dk", "dv"), grads, strict=True)}
    call: dict[str, Any] = {name: tensor_fields(name, view) for name, view in views.items()}
    _set_lse(call, lse)
    if sequences is None:
        number, longest = rows[0], (rows[1], views["k"].shape[1])
        call["cu_q"] = call["cu_k"] = 0
        stored = number * -(-longest[0] // _ALIGNED_ROWS) * _ALIGNED_ROWS
    else:
        number, longest = set_sequences(call, sequences)
        stored = (rows[0] // _ALIGNED_ROWS + number) * _ALIGNED_ROWS
    check_limits(number, longest, kv_heads, group)
    call["seqlen_q"], call["seqlen_k"], call["rows"] = *longest, stored
    call["heads_kv"], call["group"], call["dim"] = kv_heads, group, dim
    call["left"], call["right"] = (FAR if side < 0 else min(side, FAR) for side in scores[:2])
    call["scale"], call["softcap"] = scores.scale, scores.softcap
    capped = scores.softcap > 0 or not scores.scale > 0
    aligned = dim % 8 == 0 and all(map(is_aligned, views.values()))
    mapped = aligned and all(can_be_mapped(views[name]) for name in ("q", "k", "v", "dout"))
    plan = _plan(dim, kind, capped, aligned, mapped, views["q"].device)
    workspace = _allocate(call, heads * stored, plan.head_dim, deterministic, q)
    arguments = [_CALL.pack(call)]
    stream = current_stream(q)
    ends = (-(-longest[0] // _ALIGNED_ROWS) * _ALIGNED_ROWS // _ROWS_OF_END, heads, number)
    plan.prepare(ends, (128,), arguments, 0, stream)
    blocks = -(-longest[1] // plan.keys)
    grid = (blocks * kv_heads, 1, number) if deterministic else (blocks, kv_heads, number)
    maps = []
    if plan.box:
        sizes = {"q": (plan.box, longest[0]), "k": (plan.keys, longest[1]), "v": (plan.keys, longest[1])}
        sizes["dout"] = sizes["q"]
        maps = [tensor_map(views[name], *size) for name, size in sizes.items()]
    plan.main(grid, (plan.threads,), maps + arguments, plan.shared_bytes, stream)
    plan.finish(ends, (128,), arguments, 0, stream)
    del workspace  # stream-ordered: what reuses the memory comes after these launches
    return grads[0], grads[1], grads[2]


def _set_lse(call: dict[str, Any], lse: Any) -> None:
    view = cuda_view(lse, "lse")
    if view.shape[-1] > 1 and view.strides[-1] != 1:
        raise NotImplementedError(
            f"lse has strides {view.strides}: its last axis must be contiguous on a GPU"
        )
    call["lse"] = view.pointer
    call["lse_batch"], call["lse_head"] = view.strides[0] if len(view.shape) == 3 else 0, view.strides[-2]


def _allocate(call: dict[str, Any], rows: int, head_dim: int, deterministic: bool, like: Any) -> Any:
    """Allocate the workspace: sums, then peaks, deltas, and who added to the tiles of sums."""
    turns = rows // 16 if deterministic else 0
    workspace = empty((rows * (head_dim + 2) + turns,), "float32", like)
    start = cuda_view(workspace, "workspace").pointer
    call["sums"], call["peaks"] = start, start + 4 * rows * head_dim
    call["deltas"] = start + 4 * rows * (head_dim + 1)
    call["turns"], call["ordered"] = start + 4 * rows * (head_dim + 2), deterministic
    return workspace


@lru_cache(maxsize=256)
def _plan(dim: int, dtype: str, capped: bool, aligned: bool, mapped: bool, device: int) -> _Plan:
    """Choose the kernels; `mapped`: whether tensor copies could bring q, k, v and dout."""
    capability = compute_capability(device)
    if capability < (8, 0):
        raise NotImplementedError(
            f"attention_backward on a GPU takes compute capability 8.0 or later; device {device} has "
            f"{capability[0]}.{capability[1]}: move the arrays to the CPU"
        )
    arch = arch_of(*capability)
    if dtype == "float32":
        return _float32_plan(dim, arch, device)
    hopper = HOPPER and capability == (9, 0) and mapped
    head_dim = min(size for size in (HOPPER_SHAPES if hopper else SHAPES) if size >= dim)
    macros = {"HEAD_DIM": head_dim, "BF16": int(dtype == "bfloat16")}
    ends = build("attention_backward_ends", macros | {"ALIGNED": int(aligned), "FLOAT32": 0}, arch)
    prepare, finish = (load(ends, entry, device=device) for entry in ("prepare", "finish"))
    macros["CAPPED"] = int(capped)
    if hopper:
        tiling = HOPPER_SHAPES[head_dim]
        main = load(build(tiling.source, macros, "sm_90a"), device=device)
        sizes = tiling.block_n, _HOPPER_THREADS, tiling.shared_bytes(head_dim), tiling.block_m
        return _Plan(prepare, main, finish, head_dim, *sizes)
    shape = shape_for(head_dim, capability)
    macros |= {"ALIGNED": int(aligned)} | {name.upper(): value for name, value in shape._asdict().items()}
    main = load(build("attention_backward", macros, arch), device=device)
    sizes = shape.block_n, 32 * shape.warps, shape.shared_bytes(head_dim), 0
    return _Plan(prepare, main, finish, head_dim, *sizes)


def _float32_plan(dim: int, arch: str, device: int) -> _Plan:
    head_dim = min(size for size in FLOAT32_BLOCKS if size >= dim)
    block = FLOAT32_BLOCKS[head_dim]
    ends = build(
        "attention_backward_ends", {"HEAD_DIM": head_dim, "FLOAT32": 1, "BF16": 0, "ALIGNED": 0}, arch
    )
    prepare, finish = (load(ends, entry, device=device) for entry in ("prepare", "finish"))
    main = load(
        build("attention_backward_float32", {"HEAD_DIM": head_dim, "BLOCK": block}, arch), device=device
    )
    return _Plan(prepare, main, finish, head_dim, block, 4 * block, float32_shared_bytes(head_dim), 0)


def float32_shared_bytes(head_dim: int) -> int:
    """K, V, Q and dout, rows 4 elements longer than head_dim; P and dS, as much longer than a block."""
    block = FLOAT32_BLOCKS[head_dim]
    return 4 * (4 * block * (head_dim + 4) + 2 * block * (block + 4))


def shape_for(head_dim: int, capability: tuple[int, int]) -> Shape:
    """Return the first tiling of a head dimension that fits the shared memory of a multiprocessor."""
    limit = _SHARED_BYTES.get(capability, _LEAST_SHARED_BYTES)
    return next(shape for shape in SHAPES[head_dim] if shape.shared_bytes(head_dim) <= limit)

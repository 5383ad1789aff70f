"""Attention on a GPU: choose the kernel and its specialisation, and launch it.

A call is one launch on the caller's stream and allocates nothing but its results. Lengths of variable-length
calls are read on the device, so nothing waits for it. What a kernel is specialised for is the head dimension
(filled up with zeros to the next that there is a kernel for), the dtype, whether rows can be copied 16 bytes
at a time, and whether scores are capped.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from kvlab.arrays import ArrayT, CudaView, cuda_view, current_stream, dtype_name, empty
from kvlab.build import Kernel, arch_of, build, load
from kvlab.device import compute_capability

if TYPE_CHECKING:
    from kvlab.ops.attention import Scores, Sequences

__all__ = ["attend"]


class Layout:
    """A struct that a kernel takes: names and `struct` formats of its fields, in their order."""

    def __init__(self, **fields: str) -> None:
        self._fields = fields
        self._struct = struct.Struct("<" + "".join(fields.values()))
        self._dtype = np.dtype(f"V{self._struct.size}")
        self.size = self._struct.size

    def pack(self, call: dict[str, Any]) -> Any:
        """Return the values of all fields, those of a tensor as `tensor_fields`, as one kernel argument."""
        values: list[Any] = []
        for name, form in self._fields.items():
            (values.extend if form == TENSOR else values.append)(call[name])
        return np.frombuffer(self._struct.pack(*values), self._dtype)[0]


TENSOR = "4q"  # address, strides of batch, position and head
_CALL = Layout(
    **dict.fromkeys(("q", "k", "v", "out"), TENSOR),
    **dict.fromkeys(("lse", "lse_batch", "lse_head", "cu_q", "cu_k"), "q"),
    **dict.fromkeys(("seqlen_q", "seqlen_k", "group", "dim", "left", "right"), "i"),
    **dict.fromkeys(("scale", "softcap"), "f"),
)
FAR = 1 << 30  # a side of the window without limit; and what no length may exceed

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

# The kernel for Hopper: by head dimension, keys of a tile.
HOPPER_SHAPES = {64: 128, 128: 128, 256: 64}
_HOPPER_ROWS, _HOPPER_THREADS = 128, 384

# The kernel for float32: head dimensions that there is one for.
FLOAT32_DIMS = (32, 64, 96, 128, 192, 256)
_FLOAT32_ROWS, _FLOAT32_THREADS = 32, 128

HOPPER = True
"""Whether to use that kernel; tests and benchmarks of the other one turn it off and clear the plans."""


@dataclass(frozen=True)
class _Plan:
    kernel: Kernel
    rows: int  # query rows of a block
    threads: int
    shared_bytes: int
    box: int  # keys that a tensor copy brings; 0 if the kernel does not use them


def attend(q: ArrayT, k: Any, v: Any, sequences: Sequences | None, scores: Scores) -> tuple[ArrayT, ArrayT]:
    """Launcher of backend "cuda"; arguments and results as `kvlab.ops.attention_cpu.attend`."""
    views = {name: cuda_view(x, name) for name, x in (("q", q), ("k", k), ("v", v))}
    *rows, heads, dim = views["q"].shape
    kv_heads = views["k"].shape[-2]
    kind = dtype_name(q)
    out = empty(views["q"].shape, kind, q)
    lse = empty((*rows[:-1], heads, rows[-1]), "float32", q)
    call: dict[str, Any] = {name: tensor_fields(name, view) for name, view in views.items()}
    call["out"] = tensor_fields("out", cuda_view(out, "out"))
    call["lse"] = cuda_view(lse, "lse").pointer
    call["lse_batch"], call["lse_head"] = heads * rows[-1], rows[-1]
    if sequences is None:
        number, longest = rows[0], (rows[1], views["k"].shape[1])
        call["cu_q"] = call["cu_k"] = 0
    else:
        number, longest = set_sequences(call, sequences)
    group = heads // kv_heads
    check_limits(number, longest, kv_heads, group)
    call["seqlen_q"], call["seqlen_k"], call["group"], call["dim"] = *longest, group, dim
    call["left"], call["right"] = (FAR if side < 0 else min(side, FAR) for side in scores[:2])
    call["scale"], call["softcap"] = scores.scale, scores.softcap
    capped = scores.softcap > 0 or not scores.scale > 0
    aligned = dim % 8 == 0 and all(map(is_aligned, views.values()))
    tensor_copies = aligned and can_be_mapped(views["k"]) and can_be_mapped(views["v"])
    plan = _plan(dim, kind, capped, aligned, tensor_copies, views["q"].device)
    arguments = [_CALL.pack(call)]
    if plan.box:
        arguments = [tensor_map(views[name], plan.box, longest[1]) for name in ("k", "v")] + arguments
    grid = (-(-longest[0] * group // plan.rows), kv_heads, number)
    plan.kernel(grid, (plan.threads,), arguments, plan.shared_bytes, current_stream(q))
    return out, lse


def check_limits(number: int, longest: tuple[int, int], kv_heads: int, group: int) -> None:
    if max(longest) * group >= FAR or number > 65535 or kv_heads > 65535:
        raise NotImplementedError(
            f"attention of {number} sequences of up to {max(longest)} tokens, {kv_heads} KV heads, {group} "
            "query heads to each: a launch takes at most 65535 sequences and KV heads, and fewer than "
            f"{FAR} tokens times query heads a sequence; call it for a part of them at a time"
        )


def tensor_fields(name: str, view: CudaView) -> tuple[int, int, int, int]:
    """Return the address and the strides of batch, position and head."""
    if view.shape[-1] > 1 and view.strides[-1] != 1:
        raise NotImplementedError(
            f"{name} has strides {view.strides}: on a GPU the last axis must be contiguous; pass a copy"
        )
    batch = view.strides[0] if len(view.shape) == 4 else 0
    return view.pointer, batch, view.strides[-3], view.strides[-2]


def set_sequences(call: dict[str, Any], sequences: Sequences) -> tuple[int, tuple[int, int]]:
    for name, array in (("cu_q", sequences.cu_q), ("cu_k", sequences.cu_k)):
        view = cuda_view(array, name)
        if view.shape[0] > 1 and view.strides[0] != 1:
            raise NotImplementedError(f"{name} has stride {view.strides[0]}: pass a contiguous copy")
        call[name] = view.pointer
    return view.shape[0] - 1, (sequences.max_q, sequences.max_k)


def is_aligned(view: CudaView) -> bool:
    """Whether every row of the last axis begins at a multiple of 16 bytes."""
    steps = (step for step, size in zip(view.strides[:-1], view.shape[:-1], strict=True) if size > 1)
    return view.pointer % 16 == 0 and all(step % 8 == 0 for step in steps)


def can_be_mapped(view: CudaView) -> bool:
    """Whether tensor copies can read an array of aligned rows."""
    return 0 not in view.shape and all(
        0 < 2 * step < 1 << 40 for step, size in zip(view.strides, view.shape, strict=True) if size > 1
    )


@lru_cache(maxsize=4096)
def tensor_map(view: CudaView, rows: int, longest: int) -> Any:
    """Describe q, k or v to tensor copies of `rows` positions and 64 channels.

    A copy fills up with zeros what it would read beyond the end of an axis. For variable length that must be
    the end of a sequence, wherever it lies. So positions get two axes of the same stride, of `longest` and
    total + 1 elements, in an array that begins `longest` positions earlier: element (longest - length + i,
    start + length) is position start + i, and the first axis ends with the sequence.
    """
    from cuda.bindings import driver

    pointer, shape, strides, dtype, _ = view
    if len(shape) == 3:
        longest, step = max(longest, 1), strides[0] if shape[0] > 1 else 8
        pointer -= 2 * longest * step
        shape, strides = (shape[0] + 1, longest, *shape[1:]), (step, step, *strides[1:])
    batch, seqlen, heads, dim = shape
    steps = [2 * step if size > 1 else 16 for step, size in zip(strides, shape, strict=True)]
    element = getattr(driver.CUtensorMapDataType, f"CU_TENSOR_MAP_DATA_TYPE_{dtype.upper()}")
    error, tensor_map = driver.cuTensorMapEncodeTiled(
        element, 4, pointer,
        [driver.cuuint64_t(size) for size in (dim, seqlen, heads, batch)],
        [driver.cuuint64_t(steps[axis]) for axis in (1, 2, 0)],
        [driver.cuuint32_t(size) for size in (64, rows, 1, 1)],
        [driver.cuuint32_t(1)] * 4,
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
        driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )  # fmt: skip
    if int(error) != 0:
        raise RuntimeError(f"cuTensorMapEncodeTiled of {dtype} {shape} with strides {strides}: {error.name}")
    words = np.array([int(word) for word in tensor_map.opaque], np.uint64)
    return np.frombuffer(words.tobytes(), "V128")[0]


@lru_cache(maxsize=256)
def _plan(dim: int, dtype: str, capped: bool, aligned: bool, tensor_copies: bool, device: int) -> _Plan:
    """Choose the kernel; `tensor_copies`: whether they could bring K and V."""
    capability = compute_capability(device)
    if capability < (8, 0):
        raise NotImplementedError(
            f"attention on a GPU takes compute capability 8.0 or later; device {device} has "
            f"{capability[0]}.{capability[1]}: move the arrays to the CPU"
        )
    if dtype == "float32":
        head_dim = min(size for size in FLOAT32_DIMS if size >= dim)
        kernel = load(build("attention_float32", {"HEAD_DIM": head_dim}, arch_of(*capability)), device=device)
        return _Plan(kernel, _FLOAT32_ROWS, _FLOAT32_THREADS, float32_shared_bytes(head_dim), 0)
    macros = {"BF16": int(dtype == "bfloat16"), "CAPPED": int(capped)}
    if HOPPER and capability == (9, 0) and tensor_copies:
        head_dim = min(size for size in HOPPER_SHAPES if size >= dim)
        keys = HOPPER_SHAPES[head_dim]
        macros |= {"HEAD_DIM": head_dim, "BLOCK_N": keys}
        kernel = load(build("attention_sm90", macros, "sm_90a"), device=device)
        return _Plan(kernel, _HOPPER_ROWS, _HOPPER_THREADS, hopper_shared_bytes(head_dim), keys)
    head_dim = min(size for size in SHAPES if size >= dim)
    tiles, warps, keys, blocks = SHAPES[head_dim]
    macros |= {"HEAD_DIM": head_dim, "M_TILES": tiles, "WARPS": warps, "BLOCK_N": keys, "BLOCKS": blocks}
    kernel = load(build("attention", macros | {"ALIGNED": int(aligned)}, arch_of(*capability)), device=device)
    return _Plan(kernel, 16 * tiles * warps, 32 * warps, portable_shared_bytes(head_dim), 0)


def portable_shared_bytes(head_dim: int) -> int:
    """Q, K and V of a block, rows 8 elements longer than head_dim."""
    tiles, warps, keys, _ = SHAPES[head_dim]
    return 2 * (16 * tiles * warps + 2 * keys) * (head_dim + 8)


def hopper_shared_bytes(head_dim: int) -> int:
    """Q, or out, rows 8 elements longer; two stages of K and V; room to begin at a multiple of 1024."""
    return 1024 + 2 * (_HOPPER_ROWS * (head_dim + 8) + 4 * HOPPER_SHAPES[head_dim] * head_dim)


def float32_shared_bytes(head_dim: int) -> int:
    """Q, K or V, rows 4 elements longer than head_dim; P, as much longer than the keys of a tile."""
    return 4 * (2 * _FLOAT32_ROWS * (head_dim + 4) + _FLOAT32_ROWS * (_FLOAT32_ROWS + 4))

"""Attention backward on a GPU: three launches around a workspace, on the caller's stream.

``attention/backward_pre_post.cu`` prepares the workspace (each row's log-sum-exp and sum of dout * out, zeros
for dq where no block stores its part before others add theirs), ``attention/backward.cu``, or on Hopper
``attention/backward_sm90*.cu``, works on a list of tiles of keys (``tile_list.py``), and the first file
finishes dq. dk and dv are summed in registers over all rows and query heads of a group. Where
``attention_backward_split.py`` divides these among blocks, the blocks add their sums. Parts of dq come from
many blocks and are added in float32 in memory, in the order of the keys if the call is deterministic. A call
whose list `TileLists` does not keep makes it first.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from threading import Lock
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from kvlab.device import compute_capability
from kvlab.jit.build import arch_of, build
from kvlab.jit.launch import Kernel, PreparedLaunch, PreparedLaunches, load
from kvlab.jit.native import Target
from kvlab.jit.structs import ADDRESS, TENSOR, Struct, addresses_of, words_of
from kvlab.ops.array_kinds import allocator, stream_of
from kvlab.ops.attention_arguments import (
    MAP_WORDS,
    Lengths,
    TensorMaps,
    can_be_mapped,
    contiguous_strides,
    encoder_of,
    fields_of,
    is_aligned,
    is_capped,
    lengths_of,
    strides_of,
)
from kvlab.ops.attention_call import FLOAT32_DK_DV, SM_MARGIN
from kvlab.ops.cuda.attention_backward_split import CLUSTER, divide, num_sections, steps_of
from kvlab.ops.cuda.tile_list import ListBuilder, TileLists, Tiling
from kvlab.ops.device_arrays import multiprocessors
from kvlab.views import CudaView

if TYPE_CHECKING:
    from kvlab.ops.attention_call import Call

__all__ = [
    "FIELDS",
    "PREPOST_ROWS",
    "PREPOST_THREADS",
    "Plan",
    "attend_backward",
    "has_long_steps",
    "plan_of",
    "tiles_of",
]

FIELDS: dict[str, str] = dict(
    **dict.fromkeys(("q", "k", "v", "dout", "out", "dq", "dk", "dv"), TENSOR),
    **dict.fromkeys(("lse", "lse_log2", "dpsum", "dq_accum", "dq_semaphore", "cu_q", "cu_k"), ADDRESS),
    **dict.fromkeys(("lse_batch", "lse_head", "rows"), "q"),
    **dict.fromkeys(("seqlen_q", "seqlen_k", "group", "dim", "left", "right"), "i"),
    **dict.fromkeys(("scale", "softcap"), "f"),
    deterministic="i",
    float32_dk_dv="i",
    list=ADDRESS,
    semaphore=ADDRESS,
)
"""Of the struct that the kernels take."""

_CALL = Struct(**FIELDS)
ALIGNED_ROWS = 128  # the workspace has this many rows, or a multiple, for a sequence; see `Plan`
PREPOST_ROWS, PREPOST_THREADS = 32, 256  # of a block of the kernels before and after the main one


class Shape(NamedTuple):
    """A tiling of the portable kernel; its head of comments says what the numbers are."""

    block_m: int
    block_n: int
    warps: int
    key_warps: int
    row_warps: int
    q_stages: int

    def shared_bytes(self, head_dim: int) -> int:
        """K and V, stages of Q, dout; P and dS; two stages of lse_log2 and dpsum."""
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
    rest: int  # bytes: two blocks of dQ, or half of the keys of the cluster's other block
    cluster: int  # blocks that work together

    def shared_bytes(self, head_dim: int) -> int:
        """K, V, two stages of Q, dout; P and dS; the rest; room to begin at a multiple of 1024."""
        rows = 2 * self.block_n + (2 + self.dout_stages) * self.block_m
        scores = 2 * self.score_stages * self.block_n * self.block_m
        return 1024 + 128 * rows * -(-head_dim // 64) + scores + self.rest


HOPPER_SHAPES = {
    64: HopperShape("attention/backward_sm90", 128, 128, 2, 2, 32 * 1024, 1),
    96: HopperShape("attention/backward_sm90", 64, 128, 2, 2, 32 * 1024, 1),
    128: HopperShape("attention/backward_sm90", 64, 128, 2, 2, 32 * 1024, 1),
    256: HopperShape("attention/backward_sm90_wide", 64, 64, 1, 4, 16 * 1024, 2),
}
LONG_STEPS = {128: HopperShape("attention/backward_sm90", 80, 128, 2, 2, 40 * 1024, 1)}
"""By head dimension, of calls that `has_long_steps` names."""
_LONG, _SHORT, _MEDIUM = 8192, 1024, 2048  # rows; keys
_MANY_HEADS = 128  # of all sequences
_KEYS = 128  # of a tile
HOPPER_THREADS = 384

# The kernel for float32: by head dimension, keys and rows of a tile.
FLOAT32_BLOCKS = {32: 32, 64: 32, 96: 32, 128: 32, 192: 16, 256: 16}

HOPPER = True
"""Whether to use those; tests and benchmarks of the portable one turn it off."""

_KIB = 1024
_SHARED_BYTES = {(8, 0): 163 * _KIB, (8, 7): 163 * _KIB, (9, 0): 227 * _KIB, (10, 0): 227 * _KIB}
_MIN_SHARED_BYTES = 99 * _KIB


@dataclass(frozen=True)
class Plan:
    """The kernels of a call."""

    preprocess: Kernel
    main: Kernel
    postprocess: Kernel
    head_dim: int
    keys: int  # of a block
    threads: int
    shared_bytes: int
    box: int  # rows that a tensor copy of q and dout brings; 0 if the kernel does not use them
    persistent: bool = False  # whether a block, or cluster, takes one tile after the other
    aligned_rows: int = ALIGNED_ROWS


def attend_backward(call: Call, addresses: Sequence[int]) -> tuple[Any, Any, Any]:
    """Launcher of backend "cuda": dq, dk and dv, contiguous, in the dtype of q or, dk and dv, in float32.

    `addresses` are those of q, k, v, dout, out and lse and, if lengths are variable, of cu_seqlens.
    """
    prepared = _prepare(call, HOPPER)
    (dq, dk, dv, _workspace), made = prepared.new()
    stream, at, semaphore, maps = prepared.stream(), 0, 0, prepared.maps
    with prepared.lock:
        if not maps.follow:
            maps.point_to(addresses)
        if prepared.lists:
            _kept, at, semaphore, _ = prepared.lists.get(addresses[:5:-1], stream)  # cu_seqlens_k, _q
        prepared.runs[maps.follow](stream, at, semaphore, *made, *addresses)
    # The workspace goes; what takes its memory comes after these launches on the stream.
    return dq, dk, dv


class _Prepared:
    """A call but for its addresses.

    Attributes
    ----------
    new : function
        Returns new gradients and a workspace, and their addresses.
    stream : function
        Returns the current stream.
    lists : TileLists or None
        None where nothing is to be done.
    maps : TensorMaps
        Of q, k, v and dout.
    runs : sequence of function
        Makes the three launches, given a stream, the list and its semaphore, addresses of what is new and of
        the arrays of the call; not in two threads at once. The second for maps that follow these.
    lock : Lock
        Of `maps`, `lists` and `runs`.
    """

    lists: TileLists | None = None

    def __init__(self, call: Call, hopper: bool) -> None:
        q, k, v, dout, _, lse = call.views[:6]
        lengths = number, longest_q, _ = lengths_of(call)
        fields = fields_of(q, k, lengths, call.scores) | _strides_of_lse(lse)
        chosen = _choose(call, hopper, fields)
        plan = chosen.plan
        aligned_rows = -(-longest_q // plan.aligned_rows) * plan.aligned_rows
        # What variable lengths take together follows from their number and total alone.
        rows = (
            number * aligned_rows
            if call.longest is None
            else (q.shape[0] // plan.aligned_rows + number) * plan.aligned_rows
        )
        workspace = self._reserve(call, chosen, rows)
        maps = ((q, plan.box), (k, plan.keys), (v, plan.keys), (dout, plan.box)) if plan.box else ()
        of_call = _CALL.array(fields | _more_fields(call, rows, chosen.deterministic)).view(np.uint64)
        argument = np.concatenate([np.zeros(MAP_WORDS * len(maps), np.uint64), of_call])
        of_call = argument[MAP_WORDS * len(maps) :]
        self.maps = TensorMaps(words_of(argument), *(encoder_of(*x) for x in maps))
        blocks = self._prepare_list(call, chosen, fields) if number else 0
        grid = aligned_rows // PREPOST_ROWS, q.shape[-2], number
        launches = (
            PreparedLaunch(plan.preprocess, grid, (PREPOST_THREADS,), of_call),
            PreparedLaunch(plan.main, (blocks,), (plan.threads,), argument, plan.shared_bytes),
            PreparedLaunch(plan.postprocess, grid, (PREPOST_THREADS,), of_call),
        )

        def at(*names: str) -> list[int]:
            return addresses_of(of_call, map(_CALL.word, names))

        of_workspace = list(zip(at(*workspace), workspace.values(), strict=True))
        new_targets: list[Target] = [*at("list", "semaphore", "dq", "dk", "dv"), of_workspace]
        words = at("q", "k", "v", "dout", "out", "lse", "cu_q", "cu_k")[: len(call.kinds)]
        arrays = [(word,) for word in words]
        self.runs = [
            PreparedLaunches(launches, [*new_targets, *each]).run for each in self.maps.targets(*arrays)
        ]

    def _reserve(self, call: Call, chosen: _Choice, rows: int) -> dict[str, int]:
        """Prepare what makes gradients and a workspace of so many rows; return where its arrays begin."""
        q, k, v = call.views[:3]
        head_dim, heads, kind = chosen.plan.head_dim, q.shape[-2], call.kinds[0]
        num_rows, semaphores = heads * rows, heads * rows // 16 if chosen.has_semaphores else 0
        of_keys = "float32" if _is_wide(call) else q.dtype
        workspace = (num_rows * (head_dim + 2) + semaphores,), "float32"
        self.new = allocator(kind, (q.shape, q.dtype), (k.shape, of_keys), (v.shape, of_keys), workspace)
        self.stream, self.lock = stream_of(kind), Lock()
        accum_nbytes = 4 * num_rows * head_dim
        return {
            "lse_log2": accum_nbytes, "dpsum": accum_nbytes + 4 * num_rows, "dq_accum": 0,
            "dq_semaphore": accum_nbytes + 8 * num_rows,
        }  # fmt: skip

    def _prepare_list(self, call: Call, chosen: _Choice, fields: dict[str, Any]) -> int:
        """Prepare the list of tiles; return how many blocks the main kernel has."""
        plan, tiles, cluster_split = chosen.plan, chosen.tiles, chosen.cluster_split
        sections = 1
        if chosen.hopper and cluster_split == 1:
            sections = _num_sections(call, tiles, fields, plan.head_dim, chosen.deterministic)
        builder = _list_builder(call, tiles, fields, sections, chosen.deterministic)
        blocks = builder.capacity * cluster_split * tiles[2]
        self.lists = TileLists(builder, call.longest is not None, call.kinds[0])
        if plan.persistent and cluster_split == 1:
            sm_margin = call.extra // SM_MARGIN
            at_once = max(1, (multiprocessors(call.views[0].device) - sm_margin) // tiles[2])
            blocks = min(blocks, at_once * tiles[2])
        return blocks


class _Choice(NamedTuple):
    """Which kernels a call has, and how its work is divided."""

    plan: Plan
    tiles: tuple[int, int, int]  # rows, keys, blocks that work together
    cluster_split: int
    hopper: bool
    deterministic: bool
    has_semaphores: bool  # parts of dq are stored or added in an order


def _choose(call: Call, hopper: bool, fields: dict[str, Any]) -> _Choice:
    q, k, v, dout, out = call.views[:5]
    heads, dim, lengths = q.shape[-2], q.shape[-1], lengths_of(call)
    deterministic, sm_margin = bool(call.extra & 1), call.extra // SM_MARGIN
    aligned = all(map(is_aligned, (q, k, v, dout, out)))
    hopper = hopper and compute_capability(q.device) == (9, 0) and q.dtype != "float32"
    hopper = hopper and aligned and all(map(can_be_mapped, (q, k, v, dout)))
    tiles = tiles_of(dim, q.dtype, hopper, q.device)
    largest = CLUSTER if hopper and not sm_margin else 1  # blocks that share keys do not persist
    cluster_split = _cluster_split(tiles, q, k, lengths, fields, largest)
    capped = is_capped(call.scores)
    if hopper and cluster_split == 1 and call.longest is None:
        blocks = multiprocessors(q.device)
        deterministic = deterministic or is_faster_in_order(dim, heads, lengths, fields, blocks)
    long_steps = hopper and cluster_split == 1
    long_steps = long_steps and has_long_steps(dim, capped, deterministic, lengths, fields)
    # Short calls gain by it; in long ones a block would look for each part whether it is the first.
    first_stores = hopper and (deterministic or (lengths[2] <= _SHORT and not long_steps))
    plan = plan_of(
        dim, q.dtype, capped, aligned, hopper, cluster_split, deterministic, q.device, 1, long_steps,
        first_stores, sm_margin > 0,
    )  # fmt: skip
    tiles = (plan.box, *tiles[1:]) if long_steps else tiles
    return _Choice(plan, tiles, cluster_split, hopper, deterministic, deterministic or first_stores)


def _is_wide(call: Call) -> bool:
    """Whether dk and dv are float32 where q is not."""
    return bool(call.extra & FLOAT32_DK_DV) and call.views[0].dtype != "float32"


def _more_fields(call: Call, rows: int, deterministic: bool) -> dict[str, Any]:
    """Return fields of a call of so many rows in the workspace: strides of all arrays, and switches."""
    q, k, v, dout, out = call.views[:5]
    given = (("k", k), ("v", v), ("dout", dout), ("out", out))
    strides = {name: strides_of(name, x) for name, x in given}
    strides |= {f"d{name}": contiguous_strides(x.shape) for name, x in (("q", q), ("k", k), ("v", v))}
    return strides | {"rows": rows, "deterministic": deterministic, "float32_dk_dv": _is_wide(call)}


_prepare = lru_cache(maxsize=4096)(_Prepared)


def _list_builder(
    call: Call, tiles: tuple[int, int, int], fields: dict[str, Any], sections: int, in_order: bool
) -> ListBuilder:
    """Return what makes the list of tiles: the forward's with rows and keys exchanged."""
    k, (number, longest_q, longest_k) = call.views[1], lengths_of(call)
    block_m, block_n, _ = tiles
    return ListBuilder(
        Tiling(1, block_n, block_m), (number, longest_k, longest_q), k.shape[0], k.shape[-2], 1,
        (fields["right"], fields["left"]), 0, call.longest is not None, k.device, in_order,
        sections,
    )  # fmt: skip


def _num_sections(
    call: Call, tiles: tuple[int, int, int], fields: dict[str, Any], head_dim: int, in_order: bool
) -> int:
    """Return how many sections the list has where no blocks share keys."""
    k, (number, _, longest_k) = call.views[1], lengths_of(call)
    _, block_n, blocks = tiles
    return num_sections(
        number * k.shape[-2], -(-longest_k // block_n), fields["group"], head_dim,
        multiprocessors(k.device) // blocks, fields["right"] < longest_k, in_order,
    )  # fmt: skip


def _cluster_split(
    tiles: tuple[int, int, int],
    q: CudaView,
    k: CudaView,
    lengths: Lengths,
    call: dict[str, Any],
    largest: int,
) -> int:
    """Divide a call; one of variable length as if all its sequences were as long as the longest."""
    number, rows, keys = lengths
    block_m, block_n, blocks = tiles
    num_steps = steps_of(rows, keys, call["left"], call["right"], call["group"], block_m, block_n)
    return divide(num_steps, k.shape[-2], number, multiprocessors(q.device), blocks, largest)


def tiles_of(dim: int, dtype: str, hopper: bool, device: int) -> tuple[int, int, int]:
    """Return rows of a step, keys that are worked on together, and by how many blocks."""
    if hopper:
        tiling = HOPPER_SHAPES[_stored_dim(dim, HOPPER_SHAPES)]
        return tiling.block_m, tiling.block_n * tiling.cluster, tiling.cluster
    if dtype == "float32":
        block = FLOAT32_BLOCKS[_stored_dim(dim, FLOAT32_BLOCKS)]
        return block, block, 1
    shape = shape_for(_stored_dim(dim, SHAPES), compute_capability(device))
    return shape.block_m, shape.block_n, 1


def is_faster_in_order(dim: int, heads: int, lengths: Lengths, call: dict[str, Any], blocks: int) -> bool:
    """Whether a call of fixed length on Hopper, whose blocks share no keys, is made as a deterministic one.

    The dq of many heads of medium length is larger than L2; in order it need not be zeros first, and blocks
    that add to the same rows follow each other. That goes on to longer sequences where eight heads or more
    read a KV head and blocks have few tiles each. Measured on an H100.
    """
    number, _, keys = lengths
    causal, tiles = call["right"] < keys, number * (heads // call["group"]) * -(-keys // _KEYS)
    many = dim <= 128 and keys <= _MEDIUM and number * heads >= _MANY_HEADS
    shared = 64 < dim <= 128 and keys <= 2 * _MEDIUM and call["group"] >= 8 and tiles <= 4 * blocks
    return causal and keys > _SHORT and (many or shared)


def has_long_steps(
    dim: int, capped: bool, deterministic: bool, lengths: Lengths, call: dict[str, Any]
) -> bool:
    """Whether a call on Hopper, no blocks of which share keys, has steps of more rows.

    These move fewer bytes for a product. At the edges of a mask, and behind the last row, more of their
    products are wasted, which short calls notice. Measured on an H100.
    """
    _, rows, keys = lengths
    known = not capped and not deterministic and _stored_dim(dim, HOPPER_SHAPES) in LONG_STEPS
    return known and rows >= _LONG and call["left"] >= keys


def _stored_dim(dim: int, sizes: Iterable[int]) -> int:
    """Return the least of the head dimensions of kernels that holds `dim` channels."""
    return min(size for size in sizes if size >= dim)


def _strides_of_lse(lse: CudaView) -> dict[str, int]:
    if lse.shape[-1] > 1 and lse.strides[-1] != 1:
        raise NotImplementedError(f"lse has strides {lse.strides}: its last axis must be contiguous on a GPU")
    return {"lse_batch": lse.strides[0] if len(lse.shape) == 3 else 0, "lse_head": lse.strides[-2]}


@lru_cache(maxsize=256)
def plan_of(
    dim: int,
    dtype: str,
    capped: bool,
    aligned: bool,
    hopper: bool,
    cluster_split: int,
    deterministic: bool,
    device: int,
    groups: int = 1,
    long_steps: bool = False,
    first_stores: bool = False,
    leaves_some: bool = False,
) -> Plan:
    """Choose the kernels; `hopper`: those for Hopper, whose tensor copies can bring q, k, v and dout.

    Only these have more than one group of queries, `groups` at most, long steps, blocks the first of which
    stores its part of dq, and blocks that persist, above 128 channels where some multiprocessors are left.
    """
    capability = compute_capability(device)
    arch = arch_of(*capability)
    if dtype == "float32":
        return _float32_plan(dim, arch, device)
    head_dim = _stored_dim(dim, HOPPER_SHAPES if hopper else SHAPES)
    macros = {"HEAD_DIM": head_dim, "BF16": int(dtype == "bfloat16")}
    macros |= {"QUERY_GROUPS": groups} if groups > 1 else {}
    macros |= {"FIRST_STORES": 1} if first_stores else {}
    if long_steps:
        macros["BLOCK_M"] = LONG_STEPS[head_dim].block_m
    around = macros | {"ALIGNED": int(aligned), "FLOAT32": 0}
    prepost = build("attention/backward_pre_post", around, arch)
    preprocess, postprocess = (load(prepost, entry, device=device) for entry in ("preprocess", "postprocess"))
    macros["SOFTCAP"] = int(capped)
    if hopper:
        tiling = (LONG_STEPS if long_steps else HOPPER_SHAPES)[head_dim]
        macros["CLUSTER_SPLIT"] = cluster_split
        if deterministic:
            macros["DETERMINISTIC"] = 1
        persistent = tiling.cluster == 1 or leaves_some
        if persistent and tiling.cluster > 1:
            macros["PERSISTENT"] = 1
        main = load(build(tiling.source, macros, "sm_90a"), device=device)
        sizes = tiling.block_n, HOPPER_THREADS, tiling.shared_bytes(head_dim), tiling.block_m
        aligned_rows = 2 * tiling.block_m if long_steps else ALIGNED_ROWS
        return Plan(preprocess, main, postprocess, head_dim, *sizes, persistent, aligned_rows)
    shape = shape_for(head_dim, capability)
    macros |= {"ALIGNED": int(aligned)} | {name.upper(): value for name, value in shape._asdict().items()}
    main = load(build("attention/backward", macros, arch), device=device)
    sizes = shape.block_n, 32 * shape.warps, shape.shared_bytes(head_dim), 0
    return Plan(preprocess, main, postprocess, head_dim, *sizes)


def _float32_plan(dim: int, arch: str, device: int) -> Plan:
    head_dim = _stored_dim(dim, FLOAT32_BLOCKS)
    block = FLOAT32_BLOCKS[head_dim]
    prepost = build(
        "attention/backward_pre_post", {"HEAD_DIM": head_dim, "FLOAT32": 1, "BF16": 0, "ALIGNED": 0}, arch
    )
    preprocess, postprocess = (load(prepost, entry, device=device) for entry in ("preprocess", "postprocess"))
    main = load(
        build("attention/backward_float32", {"HEAD_DIM": head_dim, "BLOCK": block}, arch), device=device
    )
    return Plan(preprocess, main, postprocess, head_dim, block, 4 * block, float32_shared_bytes(head_dim), 0)


def float32_shared_bytes(head_dim: int) -> int:
    """K, V, Q and dout, rows 4 elements longer than head_dim; P and dS, as much longer than a block."""
    block = FLOAT32_BLOCKS[head_dim]
    return 4 * (4 * block * (head_dim + 4) + 2 * block * (block + 4))


def shape_for(head_dim: int, capability: tuple[int, int]) -> Shape:
    """Return the first tiling of a head dimension that fits the shared memory of a multiprocessor."""
    limit = _SHARED_BYTES.get(capability, _MIN_SHARED_BYTES)
    return next(shape for shape in SHAPES[head_dim] if shape.shared_bytes(head_dim) <= limit)

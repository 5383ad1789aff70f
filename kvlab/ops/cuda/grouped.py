"""Attention of groups of queries on Hopper: one list of the tiles of all groups, one kernel that walks it.

Lengths are read on the device, where a first kernel makes the list (kernels/cuda/attention/grouped_list.cu);
nothing waits. Results of all groups are parts of one array each, so the kernel stores by one tensor map.
Where a list has so few tiles that blocks would idle, long tiles are split over keys; then a workspace holds
the parts. What the kernel for Hopper does not take is computed separately (see kvlab/ops/grouped.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from threading import Lock
from typing import TYPE_CHECKING, Any

import numpy as np

from kvlab.arrays import ArrayT, CudaView, cuda_view, current_stream, empty, pointer_of
from kvlab.jit.build import build
from kvlab.jit.launch import PreparedLaunch, cuda_kernel, load
from kvlab.jit.structs import ADDRESS, Struct
from kvlab.ops.attention_arguments import (
    TensorMaps,
    can_be_mapped,
    contiguous_strides,
    fields_of,
    is_aligned,
    is_capped,
    placed,
)
from kvlab.ops.cuda.attention import attend as attend_one
from kvlab.ops.cuda.attention_sm90 import SHAPES, shared_bytes
from kvlab.ops.cuda.tile_list import HEAD_BYTES, ROWS, SEMAPHORE_OFFSET, heads_of_tile, pairs_of_section
from kvlab.ops.device_arrays import launch, multiprocessors

if TYPE_CHECKING:
    from kvlab.ops.attention import Scores
    from kvlab.ops.grouped import Groups

__all__ = ["ENTRY_BYTES", "GroupedCall", "attend", "attend_separately", "separately"]

MOST_GROUPS = 16
ENTRY_BYTES = 64
SPLIT_DIM = 128  # largest head dimension whose tiles are split over keys

_LIST_THREADS, _PREFIX_THREADS = 1024, 128
_EACH = range(MOST_GROUPS)

_LIST_CALL = Struct(
    **{f"cu_q{g}": ADDRESS for g in _EACH},
    **{f"prefix_lens{g}": ADDRESS for g in _EACH},
    **dict.fromkeys(("cu_k", "list", "arrivals", "bases", "order"), ADDRESS),
    **dict.fromkeys(
        (
            "capacity", "sequences", "groups", "heads_kv", "group", "pack", "positions", "entries", "block_n",
            "pairs", "causal", "paired", "blocks", "most_parts",
        ),
        "i",
    ),
)  # fmt: skip

_CALL = Struct(
    lse=ADDRESS, lse_batch="q", lse_head="q", parts=ADDRESS, arrivals=ADDRESS, segments=ADDRESS,
    num_segments="i", segment_len="i", box="i", **{f"first_row{g}": "i" for g in _EACH}, unused="i",
    list=ADDRESS, semaphore=ADDRESS,
    **dict.fromkeys(("variable", "pack", "positions", "reciprocal", "dim", "left", "right"), "i"),
    **dict.fromkeys(("scale", "softcap"), "f"),
)  # fmt: skip
_MAP_BYTES = 128
_ARGUMENT_BYTES = -(-((MOST_GROUPS + 3) * _MAP_BYTES + _CALL.size) // 64) * 64

_PREFIX_CALL = Struct(
    **{f"cu_q{g}": ADDRESS for g in _EACH},
    **{f"prefix_lens{g}": ADDRESS for g in _EACH},
    cu_k=ADDRESS, bounds=ADDRESS, sequences="i", unused="i",
)  # fmt: skip


def attend(
    q_groups: Sequence[ArrayT],
    k: Any,
    v: Any,
    groups: Groups,
    scores: Scores,
    implementation: str | None,
    sm_margin: int,
) -> tuple[list[ArrayT], list[ArrayT]]:
    """Launcher of backend "cuda" for Hopper; arguments and results as `kvlab.ops.cpu.grouped.attend`."""
    views = [cuda_view(q, f"q_groups[{g}]") for g, q in enumerate(q_groups)]
    keys = cuda_view(k, "k"), cuda_view(v, "v")
    present = [g for g, view in enumerate(views) if view.shape[0]]
    mapped = [views[g] for g in present]
    arrays = [*mapped, *keys]
    suits = all(map(is_aligned, arrays)) and all(map(can_be_mapped, arrays)) and not is_capped(scores)
    if not present or keys[0].shape[0] == 0 or (implementation is None and not suits):
        return attend_separately(q_groups, k, v, groups, scores, implementation, sm_margin)
    if not suits:
        raise NotImplementedError(
            f"implementation={implementation!r}: the scale must be positive, and rows of all arrays must "
            "begin at multiples of 16 bytes, in memory that no two elements share; pass copies, or "
            "implementation='separate'"
        )
    lengths = groups.cu_k.shape[0] - 1, groups.max_q, groups.max_k  # type: ignore[attr-defined]
    prepared = _prepare(
        tuple(map(placed, mapped)), *map(placed, keys), lengths, scores, implementation != "listed", sm_margin
    )
    rows = [view.shape[0] for view in views]
    heads, dim = views[0].shape[1:]
    out = empty((sum(rows), heads, dim), views[0].dtype, q_groups[0])
    lse = empty((heads, sum(rows)), "float32", q_groups[0])
    prepared(
        [view.pointer for view in mapped], [view.pointer for view in keys], pointer_of(out), pointer_of(lse),
        [_address(groups.cu_q[g], f"cu_seqlens_q_groups[{g}]") for g in present],
        [_address(groups.prefix_lens[g], f"prefix_lens[{g}]") for g in present],
        _address(groups.cu_k, "cu_seqlens_k"), q_groups[0],
    )  # fmt: skip
    ends = np.cumsum([0, *rows]).tolist()
    spans = [slice(*ends[g : g + 2]) for g in range(len(rows))]
    of_all: tuple[Any, Any] = out, lse
    return [of_all[0][span] for span in spans], [of_all[1][:, span] for span in spans]


def _address(x: Any, name: str) -> int:
    view = cuda_view(x, name)
    if view.shape[0] > 1 and view.strides[0] != 1:
        raise NotImplementedError(f"{name} has stride {view.strides[0]}: pass a contiguous copy")
    return view.pointer


@lru_cache(maxsize=1024)
def _prepare(
    q_groups: tuple[CudaView, ...],
    k: CudaView,
    v: CudaView,
    lengths: tuple[int, int, int],
    scores: Scores,
    paired: bool,
    sm_margin: int,
) -> GroupedCall:
    return GroupedCall(q_groups, k, v, lengths, scores, paired, sm_margin)


class GroupedCall:
    """All calls of one kind: of the same shapes, strides and options.

    Parameters
    ----------
    q_groups : tuple of CudaView
        Of groups that have rows.
    k, v : CudaView
    lengths : tuple of int
        Sequences, and at least as many rows and keys as the longest has.
    scores : Scores
    paired : bool
        Whether tiles hold rows of several groups.
    sm_margin : int
        Multiprocessors to leave to others.

    Attributes
    ----------
    capacity : int
        Most tiles that a list can have, parts counted.
    split_blocks : int
        Blocks that parts of tiles are made for; 0 where tiles are never split.
    """

    def __init__(
        self,
        q_groups: tuple[CudaView, ...],
        k: CudaView,
        v: CudaView,
        lengths: tuple[int, int, int],
        scores: Scores,
        paired: bool,
        sm_margin: int,
    ) -> None:
        first, device, sequences = q_groups[0], q_groups[0].device, lengths[0]
        fields = fields_of(first, k, lengths, scores)
        _, heads, dim = first.shape
        heads_kv, group = k.shape[-2], fields["group"]
        head_dim = min(size for size in SHAPES if size >= dim)
        block_n, entries, q_slots = SHAPES[head_dim]
        pack = heads_of_tile(group)
        positions = ROWS // pack
        rows = [view.shape[0] for view in q_groups]
        tile = positions * entries
        of_head = sum((count + sequences * (tile - 1)) // tile for count in rows)
        self.capacity = of_head * heads_kv * (group // pack)
        blocks = max(1, multiprocessors(device) - sm_margin)
        self.split_blocks = blocks if head_dim <= SPLIT_DIM and self.capacity <= 2 * blocks else 0
        most_parts = 3 * self.split_blocks
        self.capacity += most_parts
        sizes = (
            HEAD_BYTES + entries * ENTRY_BYTES * self.capacity, 4 * entries * most_parts, 4 * sequences,
            4 * entries * of_head,
        )  # fmt: skip
        begins = np.cumsum([0, *(-(-size // 16) * 16 for size in sizes)]).tolist()
        self._begins, self.nbytes = begins[:4], begins[4]  # list, arrivals, bases, order
        self._part_floats = most_parts * entries * 128 * (head_dim // 2 + 4)
        pairs = sequences * heads_kv
        bytes_of_keys = 4 * k.shape[0] * heads_kv * dim
        of_section = pairs if self.split_blocks else pairs_of_section(pairs, bytes_of_keys)
        self._list_template = _LIST_CALL.template({
            "capacity": self.capacity, "sequences": sequences, "groups": len(rows), "heads_kv": heads_kv,
            "group": group, "pack": pack, "positions": positions, "entries": entries, "block_n": block_n,
            "pairs": of_section, "causal": int(scores.right == 0), "paired": int(paired),
            "blocks": self.split_blocks, "most_parts": most_parts,
        })  # fmt: skip
        self._list_argument = np.zeros(1, f"V{_LIST_CALL.size}")
        make_list = cuda_kernel("attention/grouped_list", "make_grouped_list", (), device)
        self._make_list = PreparedLaunch(
            make_list, (-(-pairs // of_section),), (_LIST_THREADS,), self._list_argument
        )
        all_rows = (sum(rows), heads, dim)
        out = CudaView(0, all_rows, (*contiguous_strides(all_rows)[1:], 1), *first[3:])
        self._q_maps = [TensorMaps(view, positions, pack) for view in q_groups]
        self._kv_maps = [TensorMaps(view, block_n) for view in (k, v)]
        self._out_map = TensorMaps(out, positions, pack)
        first_rows = np.cumsum([0, *rows]).tolist()
        self._template = _CALL.template(
            {name: fields[name] for name in ("dim", "left", "right", "scale", "softcap")}
            | {f"first_row{g}": first_rows[min(g, len(rows))] for g in _EACH}
            | {
                "lse_batch": 0,
                "lse_head": sum(rows),
                "num_segments": 0,
                "segment_len": 0,
                "box": 0,
                "unused": 0,
            }
            | {"variable": 1, "pack": pack, "positions": positions, "reciprocal": -(-65536 // pack)}
        )
        self._argument = np.zeros(1, f"V{_ARGUMENT_BYTES}")
        macros = {
            "HEAD_DIM": head_dim,
            "BLOCK_N": block_n,
            "GROUPS": entries,
            "Q_SLOTS": q_slots,
            "SOFTCAP": 0,
        }
        macros |= {"BF16": int(first.dtype == "bfloat16"), "QUERY_GROUPS": MOST_GROUPS}
        kernel = load(build("attention/forward_sm90", macros, "sm_90a"), device=device)
        self._attend = PreparedLaunch(
            kernel, (min(self.capacity, blocks),), (128 + 128 * entries,), self._argument,
            shared_bytes(head_dim, block_n, entries, q_slots),
        )  # fmt: skip
        self._lock = Lock()

    def __call__(
        self,
        q_groups: Sequence[int],
        keys: Sequence[int],
        out: int,
        lse: int,
        cu_q: Sequence[int],
        prefix_lens: Sequence[int],
        cu_k: int,
        like: Any,
    ) -> None:
        """Launch on the current stream of `like`, from whose library memory comes; all else are addresses."""
        stream = current_stream(like)
        memory = empty((self.nbytes,), "uint8", like)
        parts = empty((self._part_floats,), "float32", like) if self._part_floats else None
        tiles, arrivals, bases, order = (pointer_of(memory) + begin for begin in self._begins)
        nothing = [0] * (MOST_GROUPS - len(q_groups))
        bounds = (*cu_q, *nothing, *prefix_lens, *nothing, cu_k)
        maps = [maps.at(pointer) for maps, pointer in zip(self._q_maps, q_groups, strict=True)]
        maps += [maps[0]] * len(nothing)
        maps += [maps.at(pointer) for maps, pointer in zip(self._kv_maps, keys, strict=True)]
        maps.append(self._out_map.at(out))
        addresses = (
            lse,
            pointer_of(parts) if parts is not None else 0,
            arrivals,
            0,
            tiles,
            tiles + SEMAPHORE_OFFSET,
        )
        with self._lock:
            self._list_argument[0] = self._list_template.pack((*bounds, tiles, arrivals, bases, order))
            self._make_list(stream)
            self._argument[0] = b"".join((*maps, self._template.pack(addresses)))
            self._attend(stream)
        del memory, parts  # stream-ordered: what reuses them comes after these launches


def attend_separately(
    q_groups: Sequence[ArrayT],
    k: Any,
    v: Any,
    groups: Groups,
    scores: Scores,
    _implementation: str | None,
    sm_margin: int,
) -> tuple[list[ArrayT], list[ArrayT]]:
    """Launcher of backend "cuda" for separate calls; arguments and results as `attend`."""
    results = [
        attend_one(q, k, v, sequences, scores, sm_margin)
        for q, sequences in zip(q_groups, separately(q_groups, groups), strict=True)
    ]
    return [out for out, _ in results], [lse for _, lse in results]


def separately(q_groups: Sequence[Any], groups: Groups) -> list[Any]:
    """Return the sequences of a call of each group: every prefix, and behind it a gap without queries."""
    from kvlab.ops.attention import Sequences

    like = q_groups[0]
    sequences = groups.cu_k.shape[0] - 1  # type: ignore[attr-defined]
    bounds = empty((len(q_groups), 2, 2 * sequences + 1), "int32", like)
    nothing = [0] * (MOST_GROUPS - len(q_groups))
    cu_q = [_address(x, f"cu_seqlens_q_groups[{g}]") for g, x in enumerate(groups.cu_q)]
    lens = [_address(x, f"prefix_lens[{g}]") for g, x in enumerate(groups.prefix_lens)]
    call = _PREFIX_CALL.template({"sequences": sequences, "unused": 0}).fill(
        [*cu_q, *nothing, *lens, *nothing, _address(groups.cu_k, "cu_seqlens_k"), pointer_of(bounds)]
    )
    kernel = cuda_kernel(
        "attention/prefixes", "cut_prefixes", (), cuda_view(groups.cu_k, "cu_seqlens_k").device
    )
    grid = sequences // _PREFIX_THREADS + 1, len(q_groups)
    launch(kernel, grid, (_PREFIX_THREADS,), [call], like)
    return [Sequences(bounds[g][0], bounds[g][1], groups.max_q, groups.max_k) for g in range(len(q_groups))]

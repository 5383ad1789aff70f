"""Attention of groups of queries on Hopper: one list of the tiles of all groups, one kernel that walks it.

Lengths are read on the device, where a first kernel makes the list (kernels/cuda/attention/grouped_list.cu);
nothing waits. Results of all groups are parts of one array each, so the kernel stores by one tensor map.
Where a list has so few tiles that blocks would idle, long tiles are split over keys; then a workspace holds
the parts. What the kernel for Hopper does not take is computed separately (see kvlab/ops/grouped.py).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from threading import Lock
from typing import TYPE_CHECKING, Any

import numpy as np

from kvlab.arrays import CudaView
from kvlab.jit.build import build
from kvlab.jit.launch import PreparedLaunch, cuda_kernel, load
from kvlab.jit.structs import ADDRESS, Struct, words_of
from kvlab.ops.array_kinds import allocator, splitter, stream_of
from kvlab.ops.attention_arguments import (
    MAP_WORDS,
    TensorMaps,
    can_be_mapped,
    contiguous_strides,
    encoder_of,
    fields_of,
    is_aligned,
    is_capped,
)
from kvlab.ops.attention_call import MAX_GROUPS
from kvlab.ops.cuda.attention_sm90 import SHAPES, shared_bytes
from kvlab.ops.cuda.grouped_separate import attend_with, check_lengths
from kvlab.ops.cuda.tile_list import HEAD_BYTES, ROWS, SEMAPHORE_OFFSET, heads_of_tile, num_sections
from kvlab.ops.device_arrays import multiprocessors

if TYPE_CHECKING:
    from kvlab.ops.grouped import GroupedArrays, GroupedCall

__all__ = ["ENTRY_BYTES", "ListedCall", "attend", "attend_separately"]

ENTRY_BYTES = 64
SPLIT_DIM = 128
"""Largest head dimension whose tiles are split over keys."""

_LIST_THREADS = 1024
_EACH = range(MAX_GROUPS)

_LIST_CALL = Struct(
    **{f"cu_q{g}": ADDRESS for g in _EACH},
    **{f"prefix_lens{g}": ADDRESS for g in _EACH},
    **dict.fromkeys(("cu_k", "list", "arrivals", "bases", "order", "tile_parts"), ADDRESS),
    **dict.fromkeys(
        (
            "capacity", "sequences", "groups", "heads_kv", "group", "pack", "positions", "entries", "block_n",
            "longest", "causal", "paired", "blocks", "most_parts",
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
_NUM_MAPS = MAX_GROUPS + 3  # q of each group that has rows, behind 16 of these k, v, out
_ARGUMENT_BYTES = -(-(8 * MAP_WORDS * _NUM_MAPS + _CALL.size) // 64) * 64
_LIST_WORD = _LIST_CALL.word("list")
_FIRST_WORD = MAP_WORDS * _NUM_MAPS
_LSE, _PARTS, _ARRIVALS, _SEGMENTS, _LIST, _SEMAPHORE = (
    _FIRST_WORD + _CALL.word(name) for name in ("lse", "parts", "arrivals", "segments", "list", "semaphore")
)


def attend(call: GroupedCall, arrays: GroupedArrays, addresses: Sequence[int]) -> tuple[list[Any], list[Any]]:
    """Launcher of backend "cuda" for Hopper: outs and lses, lists with one array a group."""
    listed = _listed(call)
    if listed is None:
        return attend_separately(call, arrays, addresses)
    return listed(addresses)


def attend_separately(
    call: GroupedCall, arrays: GroupedArrays, addresses: Sequence[int]
) -> tuple[list[Any], list[Any]]:
    """Launcher of backend "cuda" for separate calls."""
    return attend_with("cuda", call, arrays, addresses)


@lru_cache(maxsize=1024)
def _listed(call: GroupedCall) -> ListedCall | None:
    """Prepare a call; None if it is to be computed separately."""
    count = call.groups
    present = [g for g in range(count) if call.rows[g]]
    views = [call.views[g] for g in present] + [*call.views[count : count + 2]]
    if not present or views[-1].shape[0] == 0:
        return None
    suits = all(map(is_aligned, views)) and all(map(can_be_mapped, views)) and not is_capped(call.scores)
    if suits:
        return ListedCall(call, present)
    if call.implementation is None:
        return None
    raise NotImplementedError(
        f"implementation={call.implementation!r}: the scale must be positive, and rows of all arrays must "
        "begin at multiples of 16 bytes, in memory that no two elements share; pass copies, or "
        "implementation='separate'"
    )


class ListedCall:
    """All calls of one kind, of arrays that tensor copies can read.

    Parameters
    ----------
    call : GroupedCall
    present : list of int
        The groups that have rows.

    Attributes
    ----------
    capacity : int
        Most tiles that a list can have, parts counted.
    split_blocks : int
        Blocks that parts of tiles are made for; 0 where tiles are never split.
    sections : int
        Of a list.
    """

    def __init__(self, call: GroupedCall, present: list[int]) -> None:
        check_lengths(call)
        count = call.groups
        q_groups = [call.views[g] for g in present]
        k, v = call.views[count : count + 2]
        first, device, sequences = q_groups[0], k.device, call.sizes["batch"]
        fields = fields_of(first, k, (sequences, *call.longest), call.scores)
        heads, dim, heads_kv, group = first.shape[1], first.shape[2], k.shape[1], fields["group"]
        head_dim = min(size for size in SHAPES if size >= dim)
        block_n, entries, q_slots = SHAPES[head_dim]
        pack = heads_of_tile(group)
        positions, rows = ROWS // pack, call.rows
        tile = positions * entries
        box = block_n if call.segment_len is None else math.gcd(block_n, call.segment_len)
        if box % 8:
            raise NotImplementedError(
                f"segment_len={call.segment_len}: on a GPU a segment has a multiple of 8 tokens; pass a copy "
                "of k and v in order"
            )
        of_head = sum((rows[g] + sequences * (tile - 1)) // tile for g in present)
        blocks = max(1, multiprocessors(device) - call.sm_margin)
        units = heads_kv * (group // pack)
        tiles, fewest = of_head * units, -(-sum(rows) // tile) * units
        may_split = head_dim <= SPLIT_DIM and tiles <= 2 * blocks and 2 * fewest < 3 * blocks
        self.split_blocks = blocks if may_split else 0
        most_parts = 2 * self.split_blocks
        self.capacity = tiles + most_parts
        sizes = (
            HEAD_BYTES + entries * ENTRY_BYTES * self.capacity, 4 * entries * most_parts, 4 * sequences,
            4 * entries * of_head, 24 * tiles,
        )  # fmt: skip
        begins = np.cumsum([0, *(-(-size // 16) * 16 for size in sizes)]).tolist()
        *self._begins, self._parts_begin = begins  # of the list, arrivals, bases, order, tile_parts, parts
        kind = call.kinds[0]
        bytes_of_parts = 4 * most_parts * entries * 128 * (head_dim // 2 + 4)
        self._new_list = allocator((begins[5] + bytes_of_parts,), "uint8", kind)
        total = (sum(rows), heads, dim)
        self._new_out = allocator(total, first.dtype, kind)
        self._new_lse = allocator((heads, sum(rows)), "float32", kind) if call.return_lse else None
        self._stream = stream_of(kind)
        starts = np.cumsum([0, *rows]).tolist()
        self._split_out, self._split_lse = (splitter(rows, axis, kind) for axis in (0, 1))

        # Places of addresses among those of a call: q, k, v; cu_seqlens, prefixes.
        self._mapped = [*present, count, count + 1]
        self._num_lengths = 3 * count + 3  # a table of segments comes behind
        cu_q, lens = (range(_LIST_CALL.word(name), _LIST_CALL.size) for name in ("cu_q0", "prefix_lens0"))
        self._lengths = [
            *zip(cu_q, (count + 2 + g for g in present), strict=False),
            *zip(lens, (2 * count + 2 + g for g in present), strict=False),
            (_LIST_CALL.word("cu_k"), self._num_lengths - 1),
        ]
        pairs = sequences * heads_kv
        bytes_of_keys = 4 * k.shape[0] * heads_kv * dim
        self.sections = 1 if self.split_blocks else num_sections(pairs, bytes_of_keys, tiles, blocks)
        list_argument = _LIST_CALL.array({
            "capacity": self.capacity, "sequences": sequences, "groups": len(present), "heads_kv": heads_kv,
            "group": group, "pack": pack, "positions": positions, "entries": entries, "block_n": block_n,
            "longest": -(-call.longest[1] // block_n), "causal": int(call.scores.right == 0),
            "paired": int(call.implementation != "listed"), "blocks": self.split_blocks,
            "most_parts": most_parts,
        })  # fmt: skip
        self._list_words, self._made_at = words_of(list_argument), -1
        make_list = cuda_kernel("attention/grouped_list", "make_grouped_list", (), device)
        self._make_list = PreparedLaunch(make_list, (self.sections,), (_LIST_THREADS,), list_argument)

        argument = np.zeros(_ARGUMENT_BYTES // 8, np.uint64)
        of_call = _CALL.array(
            {name: fields[name] for name in ("dim", "left", "right", "scale", "softcap")}
            | {f"first_row{g}": starts[present[g]] if g < len(present) else 0 for g in _EACH}
            | {"num_segments": call.sizes.get("most_segments", 0), "segment_len": call.segment_len or 0}
            | {"lse_batch": 0, "box": box, "unused": 0}
            | {"lse_head": sum(rows), "variable": 1}
            | {"pack": pack, "positions": positions, "reciprocal": -(-65536 // pack)}
        )
        argument[_FIRST_WORD:][: _CALL.size // 8] = of_call.view(np.uint64)
        self._words = words_of(argument)
        out = CudaView(0, total, (*contiguous_strides(total)[1:], 1), *first[3:])
        of_q = [encoder_of(q, positions, pack) for q in q_groups]
        of_keys = [encoder_of(x, box) for x in (k, v)]
        places = [*range(len(present)), *range(MAX_GROUPS, _NUM_MAPS)]
        self._maps = TensorMaps(self._words, *of_q, *of_keys, encoder_of(out, positions, pack), places=places)
        macros = {"HEAD_DIM": head_dim, "BLOCK_N": block_n, "GROUPS": entries, "Q_SLOTS": q_slots}
        macros |= {"BF16": int(first.dtype == "bfloat16"), "SOFTCAP": 0, "QUERY_GROUPS": MAX_GROUPS}
        kernel = load(build("attention/forward_sm90", macros, "sm_90a"), device=device)
        self._attend = PreparedLaunch(
            kernel, (min(self.capacity, blocks),), (128 + 128 * entries,), argument,
            shared_bytes(head_dim, block_n, entries, q_slots), early=True,
        )  # fmt: skip
        self._lock = Lock()

    def __call__(self, addresses: Sequence[int]) -> tuple[list[Any], list[Any]]:
        """Launch on the current stream of the arrays' library, given their addresses."""
        out, out_at = self._new_out()
        lse, lse_at = self._new_lse() if self._new_lse else (None, 0)
        stream = self._stream()
        with self._lock:
            made, at = self._launch_list(addresses, stream)
            self._maps.point_to([*[addresses[place] for place in self._mapped], out_at])
            words = self._words
            words[_LSE], words[_PARTS], words[_ARRIVALS] = (
                lse_at,
                at + self._parts_begin,
                at + self._begins[1],
            )
            words[_SEGMENTS] = sum(addresses[self._num_lengths :])
            words[_LIST], words[_SEMAPHORE] = at, at + SEMAPHORE_OFFSET
            self._attend(stream)
        del made  # stream-ordered: what reuses the memory comes after these launches
        return self._split_out(out), [] if lse is None else self._split_lse(lse)

    def _launch_list(self, addresses: Sequence[int], stream: int) -> tuple[Any, int]:
        """Make a list on a stream, in new memory that begins with it and ends with the workspace of parts."""
        made = self._new_list()
        words, at = self._list_words, made[1]
        for word, place in self._lengths:
            words[word] = addresses[place]
        if at != self._made_at:  # memory often comes again
            self._made_at = at
            for word, begin in enumerate(self._begins, _LIST_WORD):
                words[word] = at + begin
        self._make_list(stream)
        return made

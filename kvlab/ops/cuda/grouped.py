"""Attention of groups of queries on Hopper: one list of the tiles of all groups, one kernel that walks it.

Lengths are read on the device, where a first kernel makes the list (kernels/cuda/attention/grouped_list.cu);
nothing waits. Results of all groups are parts of one array each, so the kernel stores by one tensor map.
Where a list has so few tiles that blocks would idle, long tiles are split over keys, and a few where K and V
are larger than L2; then a workspace holds the parts. What the kernel for Hopper does not take is computed
separately (see kvlab/ops/grouped.py).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from threading import Lock
from typing import TYPE_CHECKING, Any

import numpy as np

from kvlab.jit.build import build
from kvlab.jit.launch import PreparedLaunch, PreparedLaunches, cuda_kernel, load
from kvlab.jit.structs import ADDRESS, Struct, addresses_of, words_of
from kvlab.new_arrays import on_device_of
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
from kvlab.ops.cuda.attention_sm90 import RESULTS, SHAPES, out_strides, shared_bytes
from kvlab.ops.cuda.grouped_separate import attend as attend_separately
from kvlab.ops.cuda.grouped_separate import check_lengths, check_separate
from kvlab.ops.cuda.tile_list import (
    DIVISOR,
    HEAD_BYTES,
    ROWS,
    SECTION_BYTES,
    SEMAPHORE_OFFSET,
    divisor,
    heads_of_tile,
    num_sections,
)
from kvlab.ops.device_arrays import multiprocessors
from kvlab.views import CudaView

if TYPE_CHECKING:
    from kvlab.ops.grouped import GroupedArrays, GroupedCall

__all__ = ["ENTRY_BYTES", "ListedCall", "attend"]

ENTRY_BYTES = 64
SPLIT_DIM = 128
"""Largest head dimension whose tiles are split over keys."""
LAST_TILES, LAST_PARTS = 8, 3
"""Tiles at the end of a section that are split where K and V of a pair do not fit into L2, and their parts,
at most (LAST_PARTS in kernels/cuda/attention/grouped_list.cu)."""

_LIST_THREADS = 1024
_EACH = range(MAX_GROUPS)

_LIST_CALL = Struct(
    **{f"cu_q{g}": ADDRESS for g in _EACH},
    **{f"prefix_lens{g}": ADDRESS for g in _EACH},
    **dict.fromkeys(("cu_k", "list", "arrivals", "bases", "order", "tile_parts"), ADDRESS),
    **dict.fromkeys(("capacity", "sequences", "groups", "heads_kv", "group", "pack"), "i"),
    **dict.fromkeys(("positions", "entries", "block_n", "packs"), (DIVISOR, 1)),
    **dict.fromkeys(("longest", "causal", "paired", "blocks", "last"), "i"),
)  # fmt: skip

_OF_GROUPS = "cu_q", "prefix_lens"
_LIST_WORD = _LIST_CALL.word("list")

_RESULTS = Struct(**RESULTS)


def _call_of(results: int) -> Struct:
    return Struct(
        results=(_RESULTS, results), parts=ADDRESS, arrivals=ADDRESS, segments=ADDRESS,
        num_segments="i", segment_len="i", box="i", **{f"first_row{g}": "i" for g in _EACH}, unused="i",
        list=ADDRESS, semaphore=ADDRESS,
        **dict.fromkeys(("variable", "pack", "positions", "reciprocal", "dim", "left", "right"), "i"),
        **dict.fromkeys(("scale", "softcap"), "f"),
    )  # fmt: skip


_CALL, _MERGING_CALL = _call_of(1), _call_of(MAX_GROUPS)  # results of all groups, or of each
_KEY_MAPS = MAX_GROUPS  # behind q of each group that has rows: k, v, and out where it is not merged


def attend(call: GroupedCall, arrays: GroupedArrays, addresses: Sequence[int]) -> tuple[list[Any], list[Any]]:
    """Launcher of backend "cuda" for Hopper: outs and lses, lists with one array a group."""
    listed = _listed(call, False)
    if listed is not None:
        return listed(addresses)
    if call.segment_len is not None and not (sum(call.rows) and call.sizes["total_k"]):
        return _nothing_seen(call)
    return attend_separately(call, arrays, addresses)


def _nothing_seen(call: GroupedCall) -> tuple[list[Any], list[Any]]:
    """Return outs of 0 and lses of -inf: of no rows, or of no keys."""
    heads, dim = call.sizes["Hq"], call.sizes["D"]
    shapes: list[tuple[tuple[int, ...], str]] = [((n, heads, dim), call.dtype) for n in call.rows]
    shapes += [((heads, n), "float32") for n in call.rows]
    found, _ = allocator(call.kinds[0], *shapes)()
    for i, x in enumerate(found):
        with on_device_of(x):
            x[...] = 0 if i < call.groups else -math.inf
    return found[: call.groups], found[call.groups :]


def attend_into(call: GroupedCall, addresses: Sequence[int]) -> bool:
    """Launcher of backend "cuda" of attention that is merged into results over other keys; whether it ran.

    It does not for arrays that the kernel does not take.
    """
    count = call.groups
    outs, lses = (
        [view for view, rows in zip(views, call.rows, strict=True) if rows]
        for views in (call.views[-2 * count : -count], call.views[-count:])
    )
    suits = all(map(is_aligned, outs)) and all(lse.strides[1] == 1 or lse.shape[1] == 1 for lse in lses)
    listed = _listed(call, True) if suits else None
    if listed is not None:
        listed(addresses)
    return listed is not None


@lru_cache(maxsize=1024)
def _listed(call: GroupedCall, merges: bool) -> ListedCall | None:
    """Prepare a call; None if it is to be computed separately."""
    count = call.groups
    present = [g for g in range(count) if call.rows[g]]
    views = [call.views[g] for g in present] + [*call.views[count : count + 2]]
    if not present or views[-1].shape[0] == 0:
        return None
    suits = all(map(is_aligned, views)) and all(map(can_be_mapped, views)) and not is_capped(call.scores)
    if suits:
        return ListedCall(call, present, merges)
    check_separate(call)
    return None


class ListedCall:
    """All calls of one kind, of arrays that tensor copies can read.

    Parameters
    ----------
    call : GroupedCall
    present : list of int
        The groups that have rows.
    merges : bool
        Whether the kernel merges into results over other keys; then there are no new ones.

    Attributes
    ----------
    capacity : int
        Most tiles that a list can have, parts counted.
    split_blocks : int
        Blocks that parts of tiles are made for; 0 where tiles are never split.
    sections : int
        Of a list.
    last_tiles : int
        At the end of a section that are split over keys, at most.
    """

    def __init__(self, call: GroupedCall, present: list[int], merges: bool = False) -> None:
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
        tiles, min_tiles = of_head * units, -(-sum(rows) // tile) * units
        may_split = head_dim <= SPLIT_DIM and tiles <= 2 * blocks and 2 * min_tiles < 3 * blocks
        self.split_blocks = blocks if may_split else 0
        num_bh, bytes_of_keys = sequences * heads_kv, 4 * k.shape[0] * heads_kv * dim
        self.sections = 1 if self.split_blocks else num_sections(num_bh, bytes_of_keys, tiles, blocks)
        is_large = bytes_of_keys > SECTION_BYTES * num_bh and head_dim <= SPLIT_DIM
        self.last_tiles = LAST_TILES if is_large and not self.split_blocks else 0
        max_parts = 2 * self.split_blocks + self.sections * self.last_tiles * LAST_PARTS
        self.capacity = tiles + max_parts
        sizes = (
            HEAD_BYTES + entries * ENTRY_BYTES * self.capacity, 4 * entries * max_parts, 4 * sequences,
            4 * entries * of_head, 32 * tiles,
        )  # fmt: skip
        begins = np.cumsum([0, *(-(-size // 16) * 16 for size in sizes)]).tolist()
        *self._begins, self._parts_begin = begins  # of the list, arrivals, bases, order, tile_parts, parts
        kind = call.kinds[0]
        bytes_of_parts = 4 * max_parts * entries * 128 * (head_dim // 2 + 4)
        self._new_list = allocator(kind, ((begins[5] + bytes_of_parts,), "uint8"))
        total = (sum(rows), heads, dim)
        of_lse = ((heads, sum(rows)), "float32")
        self._new = None if merges else allocator(kind, (total, first.dtype), *[of_lse] * call.return_lse)
        self._stream = stream_of(kind)
        self._split_out, self._split_lse = (splitter(rows, axis, kind) for axis in (0, 1))

        # Indices of addresses among those of a call: q, k, v; cu_seqlens, prefixes.
        self._mapped = [*present, count, count + 1]
        cu_q, lens = ([_LIST_CALL.word(f"{name}{i}") for i in range(len(present))] for name in _OF_GROUPS)
        of_list = [*cu_q, *lens, _LIST_CALL.word("cu_k")]
        of_list += range(_LIST_WORD, _LIST_WORD + len(self._begins))
        self._lengths = [count + 2 + g for g in present] + [2 * count + 2 + g for g in present]
        self._lengths.append(3 * count + 2)
        list_argument = _LIST_CALL.array({
            "capacity": self.capacity, "sequences": sequences, "groups": len(present), "heads_kv": heads_kv,
            "group": group, "pack": pack, "positions": divisor(positions), "entries": divisor(entries),
            "block_n": divisor(block_n), "packs": divisor(group // pack),
            "longest": -(-call.longest[1] // block_n), "causal": int(call.scores.right == 0),
            "paired": int(call.implementation != "listed"), "blocks": self.split_blocks,
            "last": self.last_tiles,
        })  # fmt: skip
        make_list = cuda_kernel("attention/grouped_list", "make_grouped_list", (), device)
        self._make_list = PreparedLaunches(
            [PreparedLaunch(make_list, (self.sections,), (_LIST_THREADS,), list_argument)],
            addresses_of(list_argument, of_list),
        )  # fmt: skip

        struct, num_maps = (_MERGING_CALL, _KEY_MAPS + 2) if merges else (_CALL, _KEY_MAPS + 3)
        first_word, starts = MAP_WORDS * num_maps, np.cumsum([0, *rows]).tolist()
        first_rows = [0 if merges else starts[g] for g in present] + [0] * (MAX_GROUPS - len(present))
        of_call = struct.array(
            {name: fields[name] for name in ("dim", "left", "right", "scale", "softcap")}
            | {f"first_row{g}": row for g, row in enumerate(first_rows)}
            | {"num_segments": call.sizes.get("max_segments", 0), "segment_len": call.segment_len or 0}
            | {"results": 0, "box": box, "unused": 0, "variable": 1}
            | {"pack": pack, "positions": positions, "reciprocal": -(-65536 // pack)}
        )
        out = CudaView(0, total, (*contiguous_strides(total)[1:], 1), *first[3:])
        of_result = of_call["results"][0]
        words_of_results, self._unmapped = [], [3 * count + 3] * (call.segment_len is not None)
        for i, g in enumerate(present if merges else present[:1]):
            into, lse_head = out, sum(rows)
            if merges:
                out_index, lse_index = (len(call.names) - at + g for at in (2 * count, count))
                into, lse_head = call.views[out_index], call.views[lse_index].strides[0]
                self._unmapped += [out_index, lse_index]
            strides = out_strides(f"into[0][{g}]", into) | {"lse_head": lse_head}
            for name, stride in strides.items():
                of_result[name][i] = stride
            begin = first_word + struct.word("results") + i * (_RESULTS.size // 8)
            words_of_results += [begin + _RESULTS.word(name) for name in ("out", "lse")]
        argument = np.zeros(-(-(8 * first_word + struct.size) // 64) * 8, np.uint64)
        argument[first_word:][: struct.size // 8] = of_call.view(np.uint64)
        encoders = [
            *(encoder_of(q, positions, pack) for q in q_groups),
            *(encoder_of(x, box) for x in (k, v)),
        ]
        if not merges:
            encoders.append(encoder_of(out, positions, pack))
        indices = [*range(len(present)), *range(_KEY_MAPS, num_maps)]
        self._maps = TensorMaps(words_of(argument), *encoders, indices=indices)
        macros = {"HEAD_DIM": head_dim, "BLOCK_N": block_n, "GROUPS": entries, "Q_SLOTS": q_slots}
        macros |= {"BF16": int(first.dtype == "bfloat16"), "SOFTCAP": 0, "QUERY_GROUPS": MAX_GROUPS}
        macros |= {"MERGE": 1} if merges else {}
        kernel = load(build("attention/forward_sm90", macros, "sm_90a"), device=device)
        attend = PreparedLaunch(
            kernel, (min(self.capacity, blocks),), (128 + 128 * entries,), argument,
            shared_bytes(head_dim, block_n, entries, q_slots), early=True,
        )  # fmt: skip
        names = ("parts", "arrivals", "list", "semaphore", *["segments"] * (call.segment_len is not None))
        words = [*self._maps.begins, *(first_word + struct.word(name) for name in names)]
        words += words_of_results
        self._attend = PreparedLaunches([attend], addresses_of(argument, words))
        self._lock = Lock()

    def __call__(self, addresses: Sequence[int]) -> tuple[list[Any], list[Any]]:
        """Launch on the current stream of the arrays' library, given their addresses."""
        stream = self._stream()
        mapped = [addresses[index] for index in self._mapped]
        unmapped = [addresses[index] for index in self._unmapped]
        if self._new:
            (out, *lse), (out_at, *lse_at) = self._new()
            mapped.append(out_at)
            unmapped += [out_at, lse_at[0] if lse else 0]
        with self._lock:
            made, at = self._launch_list(addresses, stream)
            self._attend.run(
                stream, *self._maps.first_words(mapped), at + self._parts_begin, at + self._begins[1], at,
                at + SEMAPHORE_OFFSET, *unmapped,
            )  # fmt: skip
        del made  # stream-ordered: what reuses the memory comes after these launches
        if not self._new:
            return [], []
        return self._split_out(out), self._split_lse(lse[0]) if lse else []

    def _launch_list(self, addresses: Sequence[int], stream: int) -> tuple[Any, int]:
        """Make a list on a stream, in new memory that begins with it and ends with the workspace of parts."""
        (made,), (at,) = self._new_list()
        lengths = [addresses[index] for index in self._lengths]
        self._make_list.run(stream, *lengths, *[at + begin for begin in self._begins])
        return made, at

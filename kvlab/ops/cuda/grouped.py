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
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from kvlab.jit.build import build
from kvlab.jit.launch import Kernel, PreparedLaunch, PreparedLaunches, cuda_kernel, load
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


class _Cut(NamedTuple):
    """How a call is cut into tiles."""

    head_dim: int  # of the kernel
    block_n: int  # keys of a tile
    entries: int  # of a list, to a tile: each has a group and ROWS rows
    q_slots: int
    pack: int  # heads of a tile
    group: int  # heads of a KV head
    box: int  # keys that a tensor copy brings

    @property
    def packs(self) -> int:
        """Into how many packs the heads of a KV head are cut."""
        return self.group // self.pack

    @property
    def positions(self) -> int:
        """Positions of an entry."""
        return ROWS // self.pack

    @property
    def tile(self) -> int:
        """Positions of a tile."""
        return self.positions * self.entries


def _cut_of(call: GroupedCall, dim: int, group: int) -> _Cut:
    head_dim = min(size for size in SHAPES if size >= dim)
    block_n, entries, q_slots = SHAPES[head_dim]
    pack = heads_of_tile(group)
    box = block_n if call.segment_len is None else math.gcd(block_n, call.segment_len)
    if box % 8:
        raise NotImplementedError(
            f"segment_len={call.segment_len}: on a GPU a segment has a multiple of 8 tokens; pass a copy "
            "of k and v in order"
        )
    return _Cut(head_dim, block_n, entries, q_slots, pack, group, box)


def _kernel(cut: _Cut, dtype: str, merges: bool, device: int) -> Kernel:
    macros = {"HEAD_DIM": cut.head_dim, "BLOCK_N": cut.block_n, "GROUPS": cut.entries, "Q_SLOTS": cut.q_slots}
    macros |= {"BF16": int(dtype == "bfloat16"), "SOFTCAP": 0, "QUERY_GROUPS": MAX_GROUPS}
    macros |= {"MERGE": 1} if merges else {}
    return load(build("attention/forward_sm90", macros, "sm_90a"), device=device)


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
        q, k = call.views[present[0]], call.views[call.groups]
        fields = fields_of(q, k, (call.sizes["batch"], *call.longest), call.scores)
        cut = _cut_of(call, q.shape[2], fields["group"])
        blocks = max(1, multiprocessors(k.device) - call.sm_margin)
        of_head, tiles, max_parts = self._divide(call, present, cut, blocks)
        self._reserve(call, cut, (of_head, tiles, max_parts), (q.shape[1], q.shape[2], q.dtype), merges)
        self._prepare_list(call, present, cut)
        self._prepare_attention(call, present, cut, fields, min(self.capacity, blocks), merges)
        self._lock = Lock()

    def _divide(self, call: GroupedCall, present: list[int], cut: _Cut, blocks: int) -> tuple[int, int, int]:
        """Choose sections and split tiles; return most tiles of a head, of all, and parts of tiles."""
        k, sequences, rows, tile = call.views[call.groups], call.sizes["batch"], call.rows, cut.tile
        heads_kv, dim = k.shape[1], k.shape[2]
        of_head = sum((rows[g] + sequences * (tile - 1)) // tile for g in present)
        units = heads_kv * cut.packs
        tiles, min_tiles = of_head * units, -(-sum(rows) // tile) * units
        may_split = cut.head_dim <= SPLIT_DIM and tiles <= 2 * blocks and 2 * min_tiles < 3 * blocks
        self.split_blocks = blocks if may_split else 0
        num_bh, bytes_of_keys = sequences * heads_kv, 4 * k.shape[0] * heads_kv * dim
        self.sections = 1 if self.split_blocks else num_sections(num_bh, bytes_of_keys, tiles, blocks)
        is_large = bytes_of_keys > SECTION_BYTES * num_bh and cut.head_dim <= SPLIT_DIM
        self.last_tiles = LAST_TILES if is_large and not self.split_blocks else 0
        max_parts = 2 * self.split_blocks + self.sections * self.last_tiles * LAST_PARTS
        self.capacity = tiles + max_parts
        return of_head, tiles, max_parts

    def _reserve(
        self,
        call: GroupedCall,
        cut: _Cut,
        counts: tuple[int, int, int],
        of_rows: tuple[int, int, str],
        merges: bool,
    ) -> None:
        """Prepare what makes new arrays: the list with the workspace of parts, and results."""
        (of_head, tiles, max_parts), (heads, dim, dtype) = counts, of_rows
        entries, rows, kind = cut.entries, call.rows, call.kinds[0]
        sizes = (
            HEAD_BYTES + entries * ENTRY_BYTES * self.capacity, 4 * entries * max_parts,
            4 * call.sizes["batch"], 4 * entries * of_head, 32 * tiles,
        )  # fmt: skip
        begins = np.cumsum([0, *(-(-size // 16) * 16 for size in sizes)]).tolist()
        *self._begins, self._parts_begin = begins  # of the list, arrivals, bases, order, tile_parts, parts
        bytes_of_parts = 4 * max_parts * entries * 128 * (cut.head_dim // 2 + 4)
        self._new_list = allocator(kind, ((begins[5] + bytes_of_parts,), "uint8"))
        of_lse = ((heads, sum(rows)), "float32")
        out = (sum(rows), heads, dim), dtype
        self._new = None if merges else allocator(kind, out, *[of_lse] * call.return_lse)
        self._stream = stream_of(kind)
        self._split_out, self._split_lse = (splitter(rows, axis, kind) for axis in (0, 1))

    def _prepare_list(self, call: GroupedCall, present: list[int], cut: _Cut) -> None:
        """Prepare the launch that makes the list of tiles."""
        count, device = call.groups, call.views[call.groups].device
        cu_q, lens = ([_LIST_CALL.word(f"{name}{i}") for i in range(len(present))] for name in _OF_GROUPS)
        of_list = [*cu_q, *lens, _LIST_CALL.word("cu_k")]
        of_list += range(_LIST_WORD, _LIST_WORD + len(self._begins))
        # Indices of addresses among those of a call: cu_seqlens, prefixes.
        self._lengths = [count + 2 + g for g in present] + [2 * count + 2 + g for g in present]
        self._lengths.append(3 * count + 2)
        argument = _LIST_CALL.array({
            "capacity": self.capacity, "sequences": call.sizes["batch"], "groups": len(present),
            "heads_kv": call.views[count].shape[1], "group": cut.group, "pack": cut.pack,
            "positions": divisor(cut.positions), "entries": divisor(cut.entries),
            "block_n": divisor(cut.block_n), "packs": divisor(cut.packs),
            "longest": -(-call.longest[1] // cut.block_n), "causal": int(call.scores.right == 0),
            "paired": int(call.implementation != "listed"), "blocks": self.split_blocks,
            "last": self.last_tiles,
        })  # fmt: skip
        make_list = cuda_kernel("attention/grouped_list", "make_grouped_list", (), device)
        self._make_list = PreparedLaunches(
            [PreparedLaunch(make_list, (self.sections,), (_LIST_THREADS,), argument)],
            addresses_of(argument, of_list),
        )  # fmt: skip

    def _prepare_attention(
        self,
        call: GroupedCall,
        present: list[int],
        cut: _Cut,
        fields: dict[str, Any],
        blocks: int,
        merges: bool,
    ) -> None:
        """Prepare the launch that attends what is in the list."""
        count, rows, has_segments = call.groups, call.rows, call.segment_len is not None
        q_groups, (k, v) = [call.views[g] for g in present], call.views[count : count + 2]
        first = q_groups[0]
        struct, num_maps = (_MERGING_CALL, _KEY_MAPS + 2) if merges else (_CALL, _KEY_MAPS + 3)
        starts = np.cumsum([0, *rows]).tolist()
        first_rows = [0 if merges else starts[g] for g in present] + [0] * (MAX_GROUPS - len(present))
        of_call = struct.array(
            {name: fields[name] for name in ("dim", "left", "right", "scale", "softcap")}
            | {f"first_row{g}": row for g, row in enumerate(first_rows)}
            | {"num_segments": call.sizes.get("max_segments", 0), "segment_len": call.segment_len or 0}
            | {"results": 0, "box": cut.box, "unused": 0, "variable": 1}
            | {"pack": cut.pack, "positions": cut.positions, "reciprocal": -(-65536 // cut.pack)}
        )
        total = sum(rows), first.shape[1], first.shape[2]
        out = CudaView(0, total, (*contiguous_strides(total)[1:], 1), *first[3:])
        first_word = MAP_WORDS * num_maps
        words_of_results = [
            first_word + word
            for word in self._describe_results(call, present, struct, of_call["results"][0], out, merges)
        ]
        argument = np.zeros(-(-(8 * first_word + struct.size) // 64) * 8, np.uint64)
        argument[first_word:][: struct.size // 8] = of_call.view(np.uint64)

        encoders = [encoder_of(q, cut.positions, cut.pack) for q in q_groups]
        encoders += [encoder_of(x, cut.box) for x in (k, v)]
        if not merges:
            encoders.append(encoder_of(out, cut.positions, cut.pack))
        indices = [*range(len(present)), *range(_KEY_MAPS, num_maps)]
        self._mapped = [*present, count, count + 1]  # indices of addresses of q, k and v
        self._maps = TensorMaps(words_of(argument), *encoders, indices=indices)
        kernel = _kernel(cut, first.dtype, merges, k.device)
        attend = PreparedLaunch(
            kernel, (blocks,), (128 + 128 * cut.entries,), argument,
            shared_bytes(cut.head_dim, cut.block_n, cut.entries, cut.q_slots), early=True,
        )  # fmt: skip
        names = ("parts", "arrivals", "list", "semaphore", *["segments"] * has_segments)
        words = [*self._maps.begins, *(first_word + struct.word(name) for name in names)]
        self._attend = PreparedLaunches([attend], addresses_of(argument, words + words_of_results))

    def _describe_results(
        self,
        call: GroupedCall,
        present: list[int],
        struct: Struct,
        of_result: Any,
        out: CudaView,
        merges: bool,
    ) -> list[int]:
        """Write the strides of results into a call; return the words of their addresses in it.

        Results are `out` and its log-sum-exp, of all groups, or those of each that attention `merges` into.
        """
        count = call.groups
        words, self._unmapped = [], [3 * count + 3] * (call.segment_len is not None)
        for i, g in enumerate(present if merges else present[:1]):
            into, lse_head = out, sum(call.rows)
            if merges:
                out_index, lse_index = (len(call.names) - at + g for at in (2 * count, count))
                into, lse_head = call.views[out_index], call.views[lse_index].strides[0]
                self._unmapped += [out_index, lse_index]
            strides = out_strides(f"into[0][{g}]", into) | {"lse_head": lse_head}
            for name, stride in strides.items():
                of_result[name][i] = stride
            begin = struct.word("results") + i * (_RESULTS.size // 8)
            words += [begin + _RESULTS.word(name) for name in ("out", "lse")]
        return words

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

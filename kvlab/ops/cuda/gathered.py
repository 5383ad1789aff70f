"""Attention on Hopper over a rank's own keys and those that other ranks send meanwhile, by one launch.

The kernel walks a list of tiles made on the host (`run_list.py`), once for each kind of call. Tiles read
what the rank has itself first; before a run of another rank is copied, the thread that loads keys waits for
a counter in memory, which that rank raises when the keys are there. So no result is merged, and a late
run delays only the tiles that read it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from threading import Lock
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvlab.device import compute_capability, enough_memory
from kvlab.jit.build import build
from kvlab.jit.launch import PreparedLaunch, load
from kvlab.jit.structs import ADDRESS, Struct, words_of
from kvlab.ops.array_kinds import Kind, allocator, kinds_of, stream_of, view_of
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
from kvlab.ops.attention_call import MAX_GROUPS, scores_of
from kvlab.ops.cuda.attention_sm90 import CAPPED_SHAPES, RESULTS, out_strides, shared_bytes
from kvlab.ops.cuda.run_list import OWN, Runs, RunTiling, even_order, run_table, tiles_of_runs
from kvlab.ops.cuda.tile_list import (
    HEAD_BYTES,
    ROWS,
    TileLists,
    heads_of_tile,
    num_sections,
)
from kvlab.ops.device_arrays import multiprocessors
from kvlab.views import CudaView

__all__ = ["Arrival", "attend_runs"]

SHAPES = CAPPED_SHAPES  # with two warpgroups: what loads runs takes registers, too
BOXES = 32, 8  # rows of copies where a tile of keys has several runs

_WORK_OF_TILE = 1  # beside that for its keys, counted in tiles of keys
_MAX_RANKS = 32  # a bit each
_KEY_MAPS = 2 * (1 + len(BOXES))  # of K, and of V
_CALL = Struct(
    **RESULTS, parts=ADDRESS, arrivals=ADDRESS, runs=ADDRESS, arrived=ADDRESS,
    first_arrival="I", heads_of_piece="i", last_piece="i",
    **{f"first_row{g}": "i" for g in range(MAX_GROUPS)}, unused="i",
    list=ADDRESS, semaphore=ADDRESS,
    **dict.fromkeys(("variable", "pack", "positions", "reciprocal", "dim", "left", "right"), "i"),
    **dict.fromkeys(("scale", "softcap"), "f"),
)  # fmt: skip
_NUM_MAPS = MAX_GROUPS + 2 * _KEY_MAPS + 1
_FIRST_WORD = MAP_WORDS * _NUM_MAPS
_LSE, _OUT, _RUNS, _ARRIVED, _FIRST_ARRIVAL, _LAST_PIECE, _LIST, _SEMAPHORE = (
    _FIRST_WORD + _CALL.word(name)
    for name in ("lse", "out", "runs", "arrived", "first_arrival", "last_piece", "list", "semaphore")
)
_NAMES = ("q", "k", "v", "keys of other ranks", "values of other ranks")


class Arrival(NamedTuple):
    """When keys of other ranks are there.

    A rank sends KV heads piece by piece, and counts the pieces that have come from it in a word of memory.
    """

    counters: int
    """Address of a word for each rank."""
    first: int
    """What it has reached when the first piece of this call is there, modulo 2^32."""
    heads_of_piece: int


def attend_runs(
    q: Any, own: tuple[Any, Any], others: tuple[Any, Any], runs: Runs, arrival: Arrival, scale: float | None
) -> tuple[Any, Any] | None:
    """Return out and lse of causal attention over keys in runs; None where there is no kernel for it.

    There is one in 16 bits on compute capability 9.0, for arrays that tensor copies can read and runs of a
    multiple of 8 keys.

    Parameters
    ----------
    q : tensor, (total_q, heads_q, head_dim)
    own, others : (k, v), tensors, (rows, heads_kv, head_dim)
        Of this rank, and those that come.
    runs : Runs
        Where the keys that queries see lie in these.
    arrival : Arrival
    scale : float or None
        As in `kvlab.attention`.
    """
    kinds, addresses = kinds_of((q, *own, *others), _NAMES)
    prepared = _prepare(kinds, runs, scale)
    return None if prepared is None else prepared(addresses, arrival)


@lru_cache(maxsize=64)  # a list takes 4 KB for 1,024 tokens of a KV head
def _prepare(kinds: tuple[Kind, ...], runs: Runs, scale: float | None) -> _Prepared | None:
    views = [view_of(kind, name) for kind, name in zip(kinds, _NAMES, strict=True)]
    suits = (
        compute_capability(views[0].device) == (9, 0)
        and views[0].dtype in ("float16", "bfloat16")
        and views[0].shape[-1] <= max(SHAPES)
        and all(map(is_aligned, views))
        and all(map(can_be_mapped, views))
        and not is_capped(scores_of(views[0].shape[-1], (True, scale, -1, -1, 0.0)))
        and not (runs.lengths % BOXES[-1]).any()
        and runs.sources[..., 1].max(initial=OWN) < _MAX_RANKS
    )
    return _Prepared(kinds, views, runs, scale) if suits else None


class _Prepared:
    """All calls of one kind."""

    def __init__(
        self, kinds: tuple[Kind, ...], views: Sequence[CudaView], runs: Runs, scale: float | None
    ) -> None:
        q, k = views[:2]
        total, heads, dim = q.shape
        sequences, longest = len(runs.lengths), int(runs.lengths.max(initial=0))
        scores = scores_of(dim, (True, scale, -1, -1, 0.0))
        fields = fields_of(q, k, (sequences, longest, longest * max(runs.counts)), scores)
        head_dim = min(size for size in SHAPES if size >= dim)
        block_n, entries, q_slots = SHAPES[head_dim]
        pack = heads_of_tile(fields["group"])
        tiling = RunTiling(pack, ROWS // pack, entries, _sections(runs, k.shape[1], dim))
        num_tiles = self._prepare_list(kinds[0], k, runs, fields["group"], tiling, block_n)
        self._new = allocator(kinds[0], (q.shape, q.dtype), ((heads, total), "float32"))
        self._memory = enough_memory(2 * total * heads * dim + 4 * total * heads, "attention", "cuda")
        self._stream = stream_of(kinds[0])
        argument = self._prepare_argument(views, len(runs.counts), fields, tiling, block_n)
        macros = {"HEAD_DIM": head_dim, "BLOCK_N": block_n, "GROUPS": entries, "Q_SLOTS": q_slots}
        macros |= {"BF16": int(q.dtype == "bfloat16"), "SOFTCAP": 0, "QUERY_GROUPS": MAX_GROUPS}
        kernel = load(build("attention/forward_sm90", macros | {"GATHERED": 1}, "sm_90a"), device=q.device)
        self._launch = PreparedLaunch(
            kernel, (min(num_tiles, multiprocessors(q.device)),), (128 + 128 * entries,), argument,
            shared_bytes(head_dim, block_n, entries, q_slots),
        )  # fmt: skip
        self._lock = Lock()

    def _prepare_list(
        self, kind: Kind, k: CudaView, runs: Runs, group: int, tiling: RunTiling, block_n: int
    ) -> int:
        """Make the list of tiles on the host, in an order that keeps all blocks busy; return their number."""
        tiles = tiles_of_runs(runs, k.shape[1], group, tiling)
        work = -(-tiles["loaded_keys"][:, 0].astype(np.int64) // block_n) + _WORK_OF_TILE
        made = _MadeList(tiles[even_order(work, multiprocessors(k.device))], run_table(runs))
        self._table_begin, self._lists = made.table_begin, TileLists(made, False, kind)
        return len(tiles)

    def _prepare_argument(
        self,
        views: Sequence[CudaView],
        groups: int,
        fields: dict[str, Any],
        tiling: RunTiling,
        block_n: int,
    ) -> NDArray[np.uint64]:
        """Return what the kernel takes: tensor maps, and the call behind them."""
        q, pack, positions = views[0], tiling.pack, tiling.positions
        out = CudaView(0, q.shape, (*contiguous_strides(q.shape)[1:], 1), *q[3:])
        of_call = _CALL.array(
            {name: fields[name] for name in ("dim", "left", "right", "scale", "softcap")}
            | dict.fromkeys([f"first_row{g}" for g in range(MAX_GROUPS)], 0)
            | dict.fromkeys(("lse_batch", "first_arrival", "heads_of_piece", "last_piece", "unused"), 0)
            | {"lse_head": q.shape[0], "variable": 1}
            | {"pack": pack, "positions": positions, "reciprocal": -(-65536 // pack)}
            | out_strides("out", out)
        )
        argument = np.zeros(-(-(8 * _FIRST_WORD + _CALL.size) // 64) * 8, np.uint64)
        argument[_FIRST_WORD:][: _CALL.size // 8] = of_call.view(np.uint64)
        self._words = words_of(argument)
        of_keys = [encoder_of(x, rows) for x in views[1:] for rows in (block_n, *BOXES)]
        # Of K its own maps, long boxes first, and those of the keys that come; then those of V.
        behind = [MAX_GROUPS + n for n in (0, 1, 2, 6, 7, 8, 3, 4, 5, 9, 10, 11)]
        self._groups, self._heads_kv = groups, views[1].shape[1]
        self._maps = TensorMaps(
            self._words, *[encoder_of(q, positions, pack)] * groups, *of_keys,
            encoder_of(out, positions, pack), indices=[*range(groups), *behind, _NUM_MAPS - 1],
        )  # fmt: skip
        return argument

    def __call__(self, addresses: Sequence[int], arrival: Arrival) -> tuple[Any, Any]:
        with self._memory:
            (out, lse), (out_at, lse_at) = self._new()
        q, *keys = addresses
        stream, words = self._stream(), self._words
        with self._lock:
            self._maps.point_to(
                [*[q] * self._groups, *(x for x in keys for _ in range(_KEY_MAPS // 2)), out_at]
            )
            _kept, at, semaphore, _ = self._lists.get((), stream)
            words[_LSE], words[_OUT] = lse_at, out_at
            words[_RUNS], words[_ARRIVED] = at + self._table_begin, arrival.counters
            words[_LIST], words[_SEMAPHORE] = at, semaphore
            words[_FIRST_ARRIVAL] = arrival.first % (1 << 32) | arrival.heads_of_piece << 32
            words[_LAST_PIECE] = (self._heads_kv - 1) // arrival.heads_of_piece  # first_row0 behind it is 0
            self._launch(stream)
        return out, lse


class _MadeList:
    """A list that the host has made and copies to the device: its head, tiles, the table of runs behind them.

    It does what `ListBuilder` does for `TileLists`. The host's memory is pinned, so nothing waits for a copy.
    """

    def __init__(self, tiles: NDArray[Any], table: NDArray[np.int32]) -> None:
        import cupy

        head = np.array([len(tiles), 0, 0, 0], np.int32)
        pieces = [x.reshape(-1).view(np.uint8) for x in (head, tiles, table)]
        self.table_begin = HEAD_BYTES + tiles.nbytes
        self.nbytes = self.table_begin + table.nbytes
        self._host = cupy.cuda.alloc_pinned_memory(self.nbytes)
        np.frombuffer(self._host, np.uint8, self.nbytes)[:] = np.concatenate(pieces)

    def build(self, address: int, bounds: Sequence[int], stream: int) -> None:
        """Copy the list to this address, on this stream; there are no bounds."""
        from cuda.bindings import driver

        (error,) = driver.cuMemcpyHtoDAsync(address, self._host.ptr, self.nbytes, stream)
        if error:
            raise RuntimeError(f"the CUDA driver answered {error.name} to the copy of a list of tiles")


def _sections(runs: Runs, heads_kv: int, dim: int) -> int:
    """Return into how many sections a list is divided, so that K and V of a section stay in L2, where what
    comes is written, too. Sections may have few tiles, as blocks end together all the same."""
    bytes_of_keys = 4 * int(runs.lengths.sum()) * max(runs.counts) * heads_kv * dim
    return num_sections(len(runs.lengths) * heads_kv, 2 * bytes_of_keys, 1, 0)

"""Attention forward on Hopper: persistent blocks that walk a list of tiles.

A call launches one kernel, and before it the one that makes the list, where `TileLists` has none yet. Nothing
waits for the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from threading import Lock
from typing import TYPE_CHECKING

import numpy as np

from kvlab.jit.build import build
from kvlab.jit.launch import PreparedLaunch, PreparedLaunches, load
from kvlab.jit.structs import ADDRESS, Struct, addresses_of, words_of
from kvlab.ops.attention_arguments import (
    MAP_WORDS,
    TensorMaps,
    contiguous_strides,
    encoder_of,
    fields_of,
    is_capped,
    lengths_of,
    strides_of,
)
from kvlab.ops.cuda.tile_list import (
    ROWS,
    ListBuilder,
    TileLists,
    Tiling,
    heads_of_tile,
)
from kvlab.ops.device_arrays import multiprocessors
from kvlab.views import CudaView

if TYPE_CHECKING:
    from kvlab.ops.attention_call import Call

__all__ = ["RESULTS", "HopperAttention", "out_strides"]

# By head dimension: keys of a tile, warpgroups of 64 rows that compute, slots for queries. Capped scores take
# registers, so two warpgroups compute them.
SHAPES = {64: (128, 3, 2), 96: (112, 3, 2), 128: (128, 2, 2), 256: (80, 2, 1)}
CAPPED_SHAPES = {64: (128, 2, 2), 96: (128, 2, 2), 128: (128, 2, 2), 256: (80, 2, 1)}

# Where no sequence has more than SHORT keys, what a block does once for a tile weighs more.
SHORT_SHAPES = SHAPES | {64: (64, 4, 2)}
SHORT = 2048

RESULTS = {"lse": ADDRESS, "lse_batch": "q", "lse_head": "q"}
RESULTS |= {"out": ADDRESS, "out_batch": "q", "out_position": "q", "out_head": "q"}
"""Where a call has its results (`Results` in kernels/cuda/attention/forward_call_sm90.cuh)."""

_REST = {
    "list": ADDRESS, "semaphore": ADDRESS,
    **dict.fromkeys(("variable", "pack", "positions", "reciprocal", "dim", "left", "right"), "i"),
    **dict.fromkeys(("scale", "softcap"), "f"),
}  # fmt: skip
_CALL = Struct(**RESULTS, **_REST)


def shape_of(dim: int, capped: bool, longest_k: int) -> tuple[int, int, int, int]:
    """Return the head dimension that there is a kernel for, and its shape."""
    shapes = CAPPED_SHAPES if capped else SHORT_SHAPES if longest_k <= SHORT else SHAPES
    head_dim = min(size for size in shapes if size >= dim)
    return head_dim, *shapes[head_dim]


def shared_bytes(head_dim: int, block_n: int, groups: int, q_slots: int) -> int:
    """Slots of 64 rows of Q, two stages of K and V, up to 1024 bytes to begin at a multiple of that."""
    row_bytes = 128 * -(-head_dim // 64)
    return 1024 + row_bytes * (ROWS * groups * q_slots + 4 * block_n)


def out_strides(name: str, out: CudaView) -> dict[str, int]:
    """Return the fields of `RESULTS` that an out sets, whose name is that of the user's argument."""
    return dict(zip(("out_batch", "out_position", "out_head"), strides_of(name, out), strict=True))


class HopperAttention:
    """All calls of one kind, of arrays that tensor copies can read; `call.extra` is their sm_margin.

    Parameters
    ----------
    call : Call
        Of arrays q, k, v, then out and lse if they are merged into, and cu_seqlens of variable lengths last.
    merges : bool
        Whether results are merged into out, float32, and lse over other keys.
    """

    def __init__(self, call: Call, merges: bool = False) -> None:
        q, k, v = call.views[:3]
        lengths, scores, variable = lengths_of(call), call.scores, call.longest is not None
        fields = fields_of(q, k, lengths, scores)
        *rows, heads, dim = q.shape
        heads_kv, group = k.shape[-2], fields["group"]
        head_dim, block_n, groups, q_slots = shape_of(dim, is_capped(scores), lengths[2])
        pack = heads_of_tile(group)
        positions = ROWS // pack
        strides_of("v", v)
        window = fields["left"], fields["right"]
        builder = ListBuilder(
            Tiling(pack, positions * groups, block_n), lengths, rows[-1], heads_kv, group, window,
            4 * k.shape[0] * (1 if variable else k.shape[1]) * heads_kv * dim, variable, q.device,
        )  # fmt: skip
        self._lists = TileLists(builder, variable, call.kinds[0])
        encoders = [encoder_of(q, positions, pack), encoder_of(k, block_n), encoder_of(v, block_n)]
        if merges:
            out, lse_head = call.views[3], call.views[4].strides[0]
        else:
            out = CudaView(0, q.shape, (*contiguous_strides(q.shape)[4 - len(q.shape) :], 1), *q[3:])
            lse_head = rows[-1]
            encoders.append(encoder_of(out, positions, pack))
        of_call = _CALL.array(
            fields
            | {"variable": int(variable), "pack": pack, "positions": positions}
            | {"reciprocal": -(-65536 // pack)}
            | {"lse_batch": 0 if variable else heads * rows[-1], "lse_head": lse_head}
            | out_strides("out", out)
        )
        first_word = MAP_WORDS * len(encoders)
        argument = np.zeros(-(-(8 * first_word + _CALL.size) // 64) * 8, np.uint64)
        argument[first_word:][: _CALL.size // 8] = of_call.view(np.uint64)
        self._maps = TensorMaps(words_of(argument), *encoders)
        names = ("out", "lse", "list", "semaphore")
        out_at, *words = addresses_of(argument, (first_word + _CALL.word(name) for name in names))
        targets = self._maps.targets((), (), (), (out_at,))
        macros = {"HEAD_DIM": head_dim, "BLOCK_N": block_n, "GROUPS": groups, "Q_SLOTS": q_slots}
        macros |= {"BF16": int(q.dtype == "bfloat16"), "SOFTCAP": int(is_capped(scores))}
        macros |= {"MERGE": 1} if merges else {}
        kernel = load(build("attention/forward_sm90", macros, "sm_90a"), device=q.device)
        blocks = min(builder.capacity, max(1, multiprocessors(q.device) - call.extra))
        bytes_of_block = shared_bytes(head_dim, block_n, groups, q_slots)
        of_kernel = kernel, (blocks,), (128 + 128 * groups,), argument, bytes_of_block
        # By whether the list is made by the launch before, and whether maps follow addresses.
        self._runs = [
            [PreparedLaunches([launch], [*each, *words]).run for each in targets]
            for launch in (PreparedLaunch(*of_kernel, early=early) for early in (False, True))
        ]
        self._lock = Lock()

    def launch(self, addresses: Sequence[int], out: int, lse: int, stream: int) -> None:
        """Launch on a stream.

        Parameters
        ----------
        addresses : sequence of int
            Of q, k and v and, if lengths are variable, of cu_seqlens.
        out, lse : int
            Addresses of the results; that of lse is 0 where it is not wanted.
        stream : int
        """
        q, k, v, *bounds = addresses
        maps = self._maps
        with self._lock:
            if not maps.follow:
                maps.point_to((q, k, v, out))
            _kept, at, semaphore, is_new = self._lists.get(bounds, stream)
            self._runs[is_new][maps.follow](stream, q, k, v, out, lse, at, semaphore)

"""Attention forward on Hopper: persistent blocks that walk a list of tiles.

A call launches one kernel, and before it the one that makes the list, where `TileLists` has none yet. Nothing
waits for the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from threading import Lock
from typing import TYPE_CHECKING, Any

import numpy as np

from kvlab.arrays import CudaView, current_stream, pointer_of
from kvlab.jit.build import build
from kvlab.jit.launch import PreparedLaunch, load
from kvlab.ops.attention_arguments import (
    ADDRESS,
    Layout,
    Lengths,
    TensorMaps,
    contiguous_strides,
    fields_of,
    is_capped,
    strides_of,
)
from kvlab.ops.cuda.tile_list import (
    ROWS,
    SEMAPHORE_OFFSET,
    ListBuilder,
    TileLists,
    Tiling,
    heads_of_tile,
)
from kvlab.ops.device_arrays import multiprocessors

if TYPE_CHECKING:
    from kvlab.ops.attention import Scores

__all__ = ["HopperAttention"]

# By head dimension: keys of a tile, warpgroups of 64 rows that compute, slots for queries. Capped scores take
# registers, so two warpgroups compute them.
SHAPES = {64: (128, 3, 2), 96: (112, 3, 2), 128: (128, 2, 2), 256: (80, 2, 1)}
CAPPED_SHAPES = {64: (128, 2, 2), 96: (128, 2, 2), 128: (128, 2, 2), 256: (80, 2, 1)}

# Where no sequence has more than SHORT keys, what a block does once for a tile weighs more.
SHORT_SHAPES = SHAPES | {64: (64, 4, 2)}
SHORT = 2048

_ARGUMENT_BYTES = 640  # four tensor maps, the call, and what fills it up to a multiple of 64

_CALL = Layout(
    lse=ADDRESS, lse_batch="q", lse_head="q", list=ADDRESS, semaphore=ADDRESS,
    **dict.fromkeys(("variable", "pack", "positions", "reciprocal", "dim", "left", "right"), "i"),
    **dict.fromkeys(("scale", "softcap"), "f"),
)  # fmt: skip


def shape_of(dim: int, capped: bool, longest_k: int) -> tuple[int, int, int, int]:
    """Return the head dimension that there is a kernel for, and its shape."""
    shapes = CAPPED_SHAPES if capped else SHORT_SHAPES if longest_k <= SHORT else SHAPES
    head_dim = min(size for size in shapes if size >= dim)
    return head_dim, *shapes[head_dim]


def shared_bytes(head_dim: int, block_n: int, groups: int, q_slots: int) -> int:
    """Slots of 64 rows of Q, two stages of K and V, up to 1024 bytes to begin at a multiple of that."""
    row_bytes = 128 * -(-head_dim // 64)
    return 1024 + row_bytes * (ROWS * groups * q_slots + 4 * block_n)


class HopperAttention:
    """All calls of one kind: of one shape, with the same strides and options.

    Parameters
    ----------
    q, k, v : CudaView
        Arrays of such a call, which tensor copies can read.
    lengths : tuple of int
        Sequences, and at least as many rows and keys as the longest has.
    scores : Scores
    variable : bool
        Whether sequences have lengths of their own.
    sm_margin : int
        Multiprocessors to leave to others.
    """

    def __init__(
        self,
        q: CudaView,
        k: CudaView,
        v: CudaView,
        lengths: Lengths,
        scores: Scores,
        variable: bool,
        sm_margin: int,
    ) -> None:
        fields = fields_of(q, k, lengths, scores)
        *rows, heads, dim = q.shape
        heads_kv, group = k.shape[-2], fields["group"]
        head_dim, block_n, groups, q_slots = shape_of(dim, is_capped(scores), lengths[2])
        pack = heads_of_tile(group)
        positions = ROWS // pack
        strides_of("v", v)
        out = CudaView(0, q.shape, (*contiguous_strides(q.shape)[4 - len(q.shape) :], 1), *q[3:])
        self._maps = (
            TensorMaps(q, positions, pack), TensorMaps(k, block_n), TensorMaps(v, block_n),
            TensorMaps(out, positions, pack),
        )  # fmt: skip
        window = fields["left"], fields["right"]
        builder = ListBuilder(
            Tiling(pack, positions * groups, block_n), lengths, rows[-1], heads_kv, group, window,
            4 * k.shape[0] * (1 if variable else k.shape[1]) * heads_kv * dim, variable, q.device,
        )  # fmt: skip
        self._lists = TileLists(builder, variable)
        self._template = _CALL.template(
            fields
            | {"variable": int(variable), "pack": pack, "positions": positions}
            | {"reciprocal": -(-65536 // pack)}
            | {"lse_batch": 0 if variable else heads * rows[-1], "lse_head": rows[-1]}
        )
        self._argument = np.zeros(1, f"V{_ARGUMENT_BYTES}")
        macros = {"HEAD_DIM": head_dim, "BLOCK_N": block_n, "GROUPS": groups, "Q_SLOTS": q_slots}
        macros |= {"BF16": int(q.dtype == "bfloat16"), "SOFTCAP": int(is_capped(scores))}
        kernel = load(build("attention/forward_sm90", macros, "sm_90a"), device=q.device)
        blocks = min(builder.capacity, max(1, multiprocessors(q.device) - sm_margin))
        self._launch = PreparedLaunch(
            kernel, (blocks,), (128 + 128 * groups,), self._argument,
            shared_bytes(head_dim, block_n, groups, q_slots),
        )  # fmt: skip
        self._lock = Lock()

    def __call__(self, pointers: Sequence[int], lse: int, bounds: tuple[int, int], like: Any) -> None:
        """Launch on the current stream of `like`.

        Parameters
        ----------
        pointers : sequence of int
            Addresses of q, k, v and out.
        lse : int
            And of lse.
        bounds : (int, int)
            And of cu_seqlens, 0 where lengths are not variable.
        like : array
            From whose library memory comes.
        """
        stream = current_stream(like)
        maps = [maps.at(pointer) for maps, pointer in zip(self._maps, pointers, strict=True)]
        with self._lock:
            kept = self._lists.get(bounds, like, stream)
            address = pointer_of(kept)
            call = self._template.pack((lse, address, address + SEMAPHORE_OFFSET))
            self._argument[0] = b"".join((*maps, call))
            self._launch(stream)

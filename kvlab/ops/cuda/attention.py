"""Attention on a GPU: choose the kernel and its specialisation, and launch it.

A call runs on the caller's stream. Lengths of variable-length calls are read on the device, so nothing waits
for it. A kernel is specialised for the head dimension (padded with zeros to the next supported one), the
dtype, whether rows can be copied 16 bytes at a time, and whether scores are capped.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from threading import Lock
from typing import TYPE_CHECKING, Any

from kvlab.device import compute_capability
from kvlab.jit.build import arch_of, build
from kvlab.jit.launch import Kernel, PreparedLaunch, PreparedLaunches, load
from kvlab.jit.structs import ADDRESS, TENSOR, Struct, addresses_of
from kvlab.ops.array_kinds import allocator, stream_of
from kvlab.ops.attention_arguments import (
    can_be_mapped,
    contiguous_strides,
    fields_of,
    is_aligned,
    is_capped,
    lengths_of,
    strides_of,
)
from kvlab.ops.cuda.attention_sm90 import HopperAttention
from kvlab.ops.cuda.tile_list import ListBuilder, TileLists, Tiling, heads_of_tile

if TYPE_CHECKING:
    from kvlab.ops.attention_call import Call

__all__ = ["attend", "attend_into"]

_CALL = Struct(
    **dict.fromkeys(("q", "k", "v", "out"), TENSOR),
    lse=ADDRESS, lse_batch="q", lse_head="q", list=ADDRESS,
    **dict.fromkeys(("variable", "pack", "positions", "dim", "left", "right"), "i"),
    **dict.fromkeys(("scale", "softcap"), "f"),
)  # fmt: skip

_ADDRESS_WORDS = [_CALL.word(name) for name in ("q", "k", "v", "out", "lse", "list")]

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

# The kernel for float32: head dimensions that there is one for.
FLOAT32_DIMS = (32, 64, 96, 128, 192, 256)
_FLOAT32_ROWS, _FLOAT32_KEYS, _FLOAT32_THREADS = 32, 32, 128

HOPPER = True
"""Whether to use the kernel for Hopper; tests and benchmarks of the other one turn it off."""


def attend(call: Call, addresses: Sequence[int], return_lse: bool) -> tuple[Any, Any]:
    """Launcher of backend "cuda".

    Parameters
    ----------
    call : Call
    addresses : sequence of int
        Of q, k and v and, if lengths are variable, of cu_seqlens.
    return_lse : bool

    Returns
    -------
    out, lse : array
        As `kvlab.ops.cpu.attention.attend`; lse is None unless it was asked for.
    """
    prepared = _prepare(call, HOPPER)
    if return_lse:
        (out, lse), (out_address, lse_address) = prepared.new_both()
    else:
        ((out,), (out_address,)), lse, lse_address = prepared.new_out(), None, 0
    prepared.launch(addresses, out_address, lse_address, prepared.stream())
    return out, lse


def attend_into(call: Call, addresses: Sequence[int]) -> bool:
    """Launcher of backend "cuda" of attention that is merged into results over other keys; whether it ran.

    It does not for arrays that tensor copies cannot read, and for capped scores.

    Parameters
    ----------
    call : Call
    addresses : sequence of int
        Of q, k, v, out, lse and cu_seqlens.
    """
    prepared = _prepare_into(call) if HOPPER else None
    if prepared is None:
        return False
    kernel, stream = prepared
    q, k, v, out, lse, *bounds = addresses
    kernel.launch((q, k, v, *bounds), out, lse, stream())
    return True


@lru_cache(maxsize=1024)
def _prepare_into(call: Call) -> tuple[HopperAttention, Callable[[], int]] | None:
    """Prepare calls of one kind; None where no kernel merges results."""
    q, k, v, out, lse = call.views[:5]
    suits = (
        not is_capped(call.scores)
        and all(map(is_aligned, (q, k, v, out)))
        and all(map(can_be_mapped, (q, k, v)))
        and (lse.strides[1] == 1 or lse.shape[1] == 1)
    )
    return (HopperAttention(call, merges=True), stream_of(call.kinds[0])) if suits else None


class _Prepared:
    """A call but for its addresses.

    Attributes
    ----------
    new_out, new_both : function
        Return a new out, and out and lse, and their addresses.
    stream : function
        Returns the current stream.
    launch : function
        As `HopperAttention.launch`.
    """

    def __init__(self, call: Call, hopper: bool) -> None:
        q, k, v = call.views[:3]
        *rows, heads, _ = q.shape
        kind = call.kinds[0]
        results = (q.shape, q.dtype), ((*rows[:-1], heads, rows[-1]), "float32")
        self.new_out, self.new_both = allocator(kind, results[0]), allocator(kind, *results)
        self.stream = stream_of(kind)
        mapped = hopper and compute_capability(q.device) == (9, 0) and lengths_of(call)[0] > 0
        aligned = q.dtype != "float32" and all(map(is_aligned, (q, k, v)))
        kernel = (
            HopperAttention(call)
            if mapped and aligned and all(map(can_be_mapped, (q, k, v)))
            else _PortableAttention(call, aligned)
        )
        self.launch = kernel.launch


_prepare = lru_cache(maxsize=4096)(_Prepared)


class _PortableAttention:
    """Calls of one kind on other GPUs, in float32, and of arrays that tensor copies cannot read.

    Launched as `HopperAttention`.
    """

    def __init__(self, call: Call, aligned: bool) -> None:
        q, k, v = call.views[:3]
        *rows, heads, dim = q.shape
        lengths = lengths_of(call)
        fields = fields_of(q, k, lengths, call.scores)
        variable, heads_kv, group = call.longest is not None, k.shape[-2], fields["group"]
        plan = _plan(dim, q.dtype, is_capped(call.scores), aligned, q.device)
        pack = heads_of_tile(group, plan.rows)
        positions = plan.rows // pack
        fields |= {"k": strides_of("k", k), "v": strides_of("v", v), "out": contiguous_strides(q.shape)}
        fields |= {"lse_batch": heads * rows[-1], "lse_head": rows[-1]}
        fields |= {"variable": int(variable), "pack": pack, "positions": positions}
        argument = _CALL.array(fields)
        blocks, self._lists = 0, None
        if lengths[0]:
            bytes_of_keys = 2 * math.prod(k.shape) * (4 if q.dtype == "float32" else 2)
            builder = ListBuilder(
                Tiling(pack, positions, plan.keys), lengths, rows[-1], heads_kv, group,
                (fields["left"], fields["right"]), bytes_of_keys, variable, q.device,
            )  # fmt: skip
            blocks, self._lists = builder.capacity, TileLists(builder, variable, call.kinds[0])
        launch = PreparedLaunch(plan.kernel, (blocks,), (plan.threads,), argument, plan.shared_bytes)
        self._launches = PreparedLaunches([launch], addresses_of(argument, _ADDRESS_WORDS))
        self._lock = Lock()

    def launch(self, addresses: Sequence[int], out: int, lse: int, stream: int) -> None:
        """As `HopperAttention.launch`."""
        q, k, v, *bounds = addresses
        with self._lock:
            _kept, at, _, _ = self._lists.get(bounds, stream) if self._lists else (None, 0, 0, False)
            self._launches.run(stream, q, k, v, out, lse, at)


@dataclass(frozen=True)
class _Plan:
    kernel: Kernel
    rows: int  # query rows of a block
    keys: int  # of a tile of keys
    threads: int
    shared_bytes: int


@lru_cache(maxsize=256)
def _plan(dim: int, dtype: str, capped: bool, aligned: bool, device: int) -> _Plan:
    """Choose the kernel."""
    arch = arch_of(*compute_capability(device))
    if dtype == "float32":
        head_dim = min(size for size in FLOAT32_DIMS if size >= dim)
        kernel = load(build("attention/forward_float32", {"HEAD_DIM": head_dim}, arch), device=device)
        return _Plan(kernel, _FLOAT32_ROWS, _FLOAT32_KEYS, _FLOAT32_THREADS, float32_shared_bytes(head_dim))
    macros = {"BF16": int(dtype == "bfloat16"), "SOFTCAP": int(capped), "ALIGNED": int(aligned)}
    head_dim = min(size for size in SHAPES if size >= dim)
    tiles, warps, keys, blocks = SHAPES[head_dim]
    macros |= {"HEAD_DIM": head_dim, "M_TILES": tiles, "WARPS": warps, "BLOCK_N": keys, "BLOCKS": blocks}
    kernel = load(build("attention/forward", macros, arch), device=device)
    return _Plan(kernel, 16 * tiles * warps, keys, 32 * warps, portable_shared_bytes(head_dim))


def portable_shared_bytes(head_dim: int) -> int:
    """Q, K and V of a block, rows 8 elements longer than head_dim."""
    tiles, warps, keys, _ = SHAPES[head_dim]
    return 2 * (16 * tiles * warps + 2 * keys) * (head_dim + 8)


def float32_shared_bytes(head_dim: int) -> int:
    """Q, K or V, rows 4 elements longer than head_dim; P, as much longer than the keys of a tile."""
    return 4 * ((_FLOAT32_ROWS + _FLOAT32_KEYS) * (head_dim + 4) + _FLOAT32_ROWS * (_FLOAT32_KEYS + 4))

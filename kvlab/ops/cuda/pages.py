"""Launchers of the kernels that store tokens in a cache on a GPU.

The kernels are `pages/append.cu`, `pages/write.cu`, `pages/prefill.cu`, `pages/means.cu` and `pages/rows.cu`.

A decode step's append is launched once a layer and token, so its arguments are kept as the bytes of one
struct, in which a call changes no more than the addresses of what is new.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from kvlab.device import compute_capability
from kvlab.jit.build import arch_of, build
from kvlab.jit.launch import Kernel, PreparedLaunch, load
from kvlab.ops.device_arrays import multiprocessors, shared_memory_per_block
from kvlab.ops.layer_state import NEW_TOKENS, STATE
from kvlab.pages import TOKENS_PER_PAGE, Width, width_number
from kvlab.views import CudaView

__all__ = [
    "MAX_GROUP",
    "AppendCall",
    "copy_pages",
    "crop_rows",
    "freeze_means",
    "merge_rows",
    "refit_frames",
    "take_rows",
    "write_tokens",
]

_APPEND = np.dtype(
    [
        ("layer", STATE),
        ("new_tokens", NEW_TOKENS),
        *((name, "u8") for name in ("q", "out", "lse")),
        *((name, "i8") for name in ("q_batch", "q_step", "q_head")),
        *((name, "i4") for name in ("group", "has_stored", "observed")),
        ("scale", "f4"),
        ("softcap", "f4"),
        ("rows", "i4"),
    ],
    align=True,
)
_FREEZE = np.dtype(
    [
        ("layer", "u8"),
        ("new_tokens", NEW_TOKENS),
        *((name, "u8") for name in ("k", "v", "valid", "importance", "positions")),
        ("q", "u8"),
        *((name, "i8") for name in ("q_batch", "q_step", "q_head")),
        *((name, "i4") for name in ("num_heads_q", "before", "lookahead", "force")),
        ("mean_factor", "u8"),
    ],
    align=True,
)
_QUERIES = np.dtype(
    [("q", "u8"), *((name, "i8") for name in ("batch", "step", "head")), ("group", "i4")], align=True
)
_FIT = np.dtype([("layer", "u8"), ("new_tokens", NEW_TOKENS), ("queries", _QUERIES)], align=True)
_ROWS = np.dtype(
    [
        *((name, "u8") for name in ("from", "to", "sources", "rows", "origins", "kept")),
        *((name, "u8") for name in ("free_numbers", "copies", "num_copies", "copied_rows")),
        *((name, "i4") for name in ("capacity", "head_dim", "num_copied_rows")),
    ],
    align=True,
)
_NEW, _QUERY, _STORED = (_APPEND.fields[name][1] for name in ("new_tokens", "q", "has_stored"))  # type: ignore[index]
_WRITE_NEW, _WRITE_QUERY = struct.Struct("4Q6q").pack_into, struct.Struct("3Q3q").pack_into
_WRITE_STORED = struct.Struct("i").pack_into
MAX_GROUP = 16
"""Query heads of a KV head that one append can take."""
_THREADS, _WRITE_THREADS, _APPEND_THREADS, _FREEZE_THREADS, _TABLE_THREADS = 256, 128, 512, 512, 1024
_BLOCKS, _MOVE_BLOCKS = 36, 12  # a multiprocessor, of all layers together: whole waves of 2, 3, 4 or 6
_FEW_BLOCKS = 8  # where most lists are empty or short
_MANY_PAGES = 4096  # from which on a warp writes four at a time


class AppendCall:
    """The append of one layer for a number of new tokens, all arguments but the new ones laid down.

    Parameters
    ----------
    state : STATE scalar
        Of the layer.
    top : (int or tuple, int)
        Widths of keys and values of open pages.
    head_dim : int
    dtype : str
    device : int
    num_new, group : int
    scale, softcap : float
    observed : int
        One of `OBSERVED`.
    rows : int
        One of `ROWS`.
    in_blocks : bool
        The ladder has profiles.
    """

    def __init__(
        self,
        state: Any,
        top: tuple[Width, int],
        head_dim: int,
        dtype: str,
        device: int,
        *,
        num_new: int,
        group: int,
        scale: float,
        softcap: float,
        observed: int,
        rows: int = 0,
        in_blocks: bool = False,
    ) -> None:
        kernel = _append_kernel(head_dim, dtype, width_number(top[0]), top[1], device, in_blocks)
        call = np.zeros(1, _APPEND)
        call["layer"], call["group"], call["observed"] = state, group, observed
        call["scale"], call["softcap"], call["rows"] = scale, softcap, rows
        call["new_tokens"]["num_new"] = num_new
        self._bytes = call.view(np.uint8).data
        grid = int(state["heads"]), int(state["batch"])
        self._launch = (
            PreparedLaunch(kernel, grid, (_APPEND_THREADS,), call, early=True) if all(grid) else None
        )

    def __call__(
        self,
        q: CudaView | None,
        k: CudaView,
        v: CudaView,
        valid: int,
        out: int,
        lse: int,
        stored: bool,
        stream: int,
    ) -> None:
        """Launch; without queries `q` is None and `out`, `lse` are not read. `valid` is an address or 0."""
        call = self._bytes
        _WRITE_NEW(call, _NEW, k.pointer, v.pointer, valid, 0, *k.strides[:3], *v.strides[:3])
        if q is None:
            _WRITE_QUERY(call, _QUERY, 0, 0, 0, 0, 0, 0)  # or those of a step before would be read again
        else:
            _WRITE_QUERY(call, _QUERY, q.pointer, out, lse, *q.strides[:3])
        _WRITE_STORED(call, _STORED, stored)
        if self._launch is not None:
            self._launch(stream)


def write_tokens(
    head_dim: int, dtype: str, device: int, states: int, lists: int, layers: int, groups: int,
    new_tokens: Any, stream: int, *, profiles: str = "",
) -> None:  # fmt: skip
    """Carry out the moves of `layers` lists of at most `groups` destination pages each.

    All moves to a page are of one (row, KV head). New tokens of a long prefill, whose cache is empty, have a
    kernel of their own if their vectors can be copied in units of 16 bytes. Layers have one ladder;
    `profiles` are its `kvlab.pages.profile_names`.
    """
    in_blocks = bool(profiles)
    if groups * layers >= _MANY_PAGES and _can_prefill(new_tokens):
        kernel = _kernel("pages/prefill", "write_prefill", head_dim, dtype, device, profiles=profiles)
        row = -(-2 * head_dim // 128) * 128
        own = 13 * head_dim + 2144 if in_blocks else 5 * head_dim + 2112
        each = -(-(own + TOKENS_PER_PAGE * row) // 128) * 128  # WarpSpace in pages/prefill.cu
        on_hopper = 28 if head_dim == 64 else 20
        max_warps = {9: on_hopper, 12: 12}.get(compute_capability(device)[0], 16)  # WARPS there
        max_warps = 8 if head_dim > 128 else max_warps
        free = shared_memory_per_block(device) - kernel.resources.shared_bytes
        warps = min(max_warps, free // each)
        grid = _grid(-(-groups // (4 * warps)), layers, multiprocessors(device))
        kernel(grid, (32 * warps,), (states, lists, new_tokens), warps * each, stream)
        return
    kernel = _kernel("pages/write", "write_tokens", head_dim, dtype, device, profiles=profiles)
    blocks = _BLOCKS if new_tokens["k"] else _MOVE_BLOCKS
    warps = _WRITE_THREADS // 32
    grid = _grid(-(-groups // warps), layers, blocks * multiprocessors(device))
    own = 89 * head_dim + 1856 if in_blocks else 78 * head_dim + 1728  # WarpSpace in pages/sources.cuh
    kernel((*grid, 2), (_WRITE_THREADS,), (states, lists, new_tokens), warps * own, stream)


def _can_prefill(new_tokens: Any) -> bool:
    """Whether `NewTokens` are those of an empty cache, where write_prefill can copy them from."""
    if not new_tokens["k"] or new_tokens["first"] or new_tokens["positions"]:
        return False
    strides = [int(new_tokens[f"{side}_{axis}"]) for side in "kv" for axis in ("batch", "step", "head")]
    if any(
        number % 16
        for number in (int(new_tokens["k"]), int(new_tokens["v"]), *(2 * stride for stride in strides))
    ):
        return False
    return all(0 <= 2 * stride * int(new_tokens["num_new"]) < 1 << 32 for stride in (strides[1], strides[4]))


def _grid(groups: int, layers: int, blocks: int) -> tuple[int, int]:
    """At most `blocks` blocks for at most so many pages of each layer."""
    return max(1, min(groups, blocks // layers)), layers


def copy_pages(
    head_dim: int, dtype: str, device: int, states: int, lists: int, layers: int, copies: int, stream: int
) -> None:
    """Carry out the page copies of `layers` lists of at most `copies` each."""
    kernel = _kernel("pages/write", "copy_pages", head_dim, dtype, device)
    grid = _grid(-(-copies // 8), layers, _FEW_BLOCKS * multiprocessors(device))  # 8 warps, a page each
    kernel(grid, (_THREADS,), (states, lists), 0, stream)


def freeze_means(
    head_dim: int, dtype: str, device: int, state: int, batch: int, new_tokens: Any, addresses: Sequence[int],
    before: int, mean_factor: int, stream: int, *, lookahead: int, force: bool,
    queries: CudaView | None = None, in_blocks: bool = False,
) -> None:  # fmt: skip
    """Take the frame of the keys of rows that have enough tokens, and keep the tokens of the others.

    Parameters
    ----------
    state : int
        Address of the LayerState of the layer.
    new_tokens : NewTokens
        Of the call, with `num_new` 0 if it has none.
    addresses : sequence of int
        Of k, v, valid, importance and positions of `kvlab.cache.waiting.Merged`, 0 where there is none.
    before : int
        Waiting tokens of a row that these take.
    mean_factor : int
        Address of what means are multiplied by, (head_dim,) float32.
    lookahead : int
        Tokens that may come until the next call.
    force : bool
        No row waits any longer.
    queries : CudaView, optional
        (batch, num_new, query heads, head_dim), of the tokens of the call.
    in_blocks : bool
        The ladder has profiles.
    """
    call = np.zeros(1, _FREEZE)
    call["layer"], call["new_tokens"] = state, new_tokens
    for name, address in zip(("k", "v", "valid", "importance", "positions"), addresses, strict=True):
        call[name] = address
    call["before"], call["lookahead"], call["force"] = before, lookahead, force
    call["mean_factor"] = mean_factor
    if queries is not None:
        call["q"], call["num_heads_q"] = queries.pointer, queries.shape[2]
        call["q_batch"], call["q_step"], call["q_head"] = queries.strides[:3]
    if batch:
        kernel = _kernel("pages/means", "freeze_means", head_dim, dtype, device, in_blocks)
        kernel((batch,), (_FREEZE_THREADS,), (call[0],), 0, stream)


def refit_frames(
    head_dim: int, dtype: str, device: int, state: int, num_bh: int, heads: int, new: Any, queries: CudaView,
    stream: int,
) -> None:  # fmt: skip
    """Fit the frames of a layer, whose keys are kept in blocks, to the newest tokens of a prefill.

    An append fits them to its own.

    Parameters
    ----------
    state : int
        Address of the LayerState of the layer.
    num_bh, heads : int
        (row, KV head)s, and KV heads of a row.
    new : NewTokens
    queries : CudaView
        (batch, num_new, query heads, head_dim), of the same tokens.
    """
    call = np.zeros(1, _FIT)
    call["layer"], call["new_tokens"] = state, new
    call["queries"] = (queries.pointer, *queries.strides[:3], queries.shape[2] // heads)
    if num_bh:
        kernel = _kernel("pages/means", "refit_frames", head_dim, dtype, device, True)
        kernel((num_bh,), (_FREEZE_THREADS,), (call[0],), 0, stream)


def crop_rows(
    head_dim: int, dtype: str, device: int, states: int, layers: int, batch: int, seqlen: int, stream: int
) -> None:  # fmt: skip
    """Give all rows of some layers another length, and take waiting tokens beyond it out of their pages.

    Other pages keep theirs until a plan, told that they are `cropped`, drops them.
    """
    if batch:
        kernel = _kernel("pages/means", "crop_rows", head_dim, dtype, device)
        kernel((batch, layers), (_FREEZE_THREADS,), (states, np.int32(seqlen)), 0, stream)


def take_rows(
    head_dim: int, dtype: str, device: int, addresses: Sequence[int], capacity: int, num_copied_rows: int,
    layers: int, stream: int, *, in_place: bool, in_blocks: bool = False,
) -> None:  # fmt: skip
    """Let rows of some layers take over the pages of others; see `kvlab.cache.store`.

    Parameters
    ----------
    addresses : sequence of int
        As in `Rows` of pages/rows.cu, from `from` to `copied_rows`.
    capacity : int
        Pages of a layer that the lists take.
    num_copied_rows : int
        Of rows in `copied_rows`.
    in_place : bool
        As in `RowMove`.
    in_blocks : bool
        Frames have orders and gains, for ladders with profiles.
    """
    call = np.zeros(1, _ROWS)
    call.view(np.uint64)[: len(addresses)] = addresses
    call["capacity"], call["head_dim"], call["num_copied_rows"] = capacity, head_dim, num_copied_rows
    if not capacity:
        return
    grid = _grid(capacity, layers, _FEW_BLOCKS * multiprocessors(device))
    _row_kernel("take_rows", device, in_blocks)((1, layers), (_TABLE_THREADS,), (call[0],), 0, stream)
    for entry in ("move_kept", "gather_pages") if in_place else ("gather_pages", "clear_free"):
        _row_kernel(entry, device)(grid, (_THREADS,), (call[0],), 0, stream)


@lru_cache(maxsize=16)
def _row_kernel(entry: str, device: int, in_blocks: bool = False) -> Kernel:
    macros = _with_blocks({"BF16": 0}, in_blocks)
    return load(build("pages/rows", macros, arch_of(*compute_capability(device))), entry, device=device)


def merge_rows(
    head_dim: int, dtype: str, device: int, addresses: Sequence[int], shape: tuple[int, int, int], stream: int
) -> None:  # fmt: skip
    """Merge attention over other keys into the first.

    Addresses are of out, lse, the other out and its lse, contiguous; shape is (batch, num_new, heads).
    """
    batch, num_new, heads = shape
    kernel, rows = _kernel("pages/write", "merge_rows", head_dim, dtype, device), batch * num_new * heads
    numbers = (np.int32(rows), np.int32(num_new), np.int32(heads))
    kernel((-(-rows // 8),), (_THREADS,), (*addresses, *numbers), 0, stream)


@lru_cache(maxsize=64)
def _append_kernel(head_dim: int, dtype: str, top_k: int, top_v: int, device: int, in_blocks: bool) -> Kernel:
    macros = {"HEAD_DIM": head_dim, "BF16": int(dtype == "bfloat16"), "BITS_K": top_k, "BITS_V": top_v}
    return load(
        build("pages/append", _with_blocks(macros, in_blocks), arch_of(*compute_capability(device))),
        device=device,
    )


@lru_cache(maxsize=64)
def _kernel(
    source: str,
    entry: str,
    head_dim: int,
    dtype: str,
    device: int,
    in_blocks: bool = False,
    profiles: str = "",
) -> Kernel:
    macros = _with_blocks({"HEAD_DIM": head_dim, "BF16": int(dtype == "bfloat16")}, in_blocks)
    if profiles:
        macros["PROFILES"] = profiles
    return load(build(source, macros, arch_of(*compute_capability(device))), entry, device=device)


def _with_blocks(macros: dict[str, int], in_blocks: bool) -> dict[str, int | str]:
    """Macros of a source, with that of ladders with profiles if that is what it is built for."""
    return {**macros, **({"IN_BLOCKS": 1} if in_blocks else {})}

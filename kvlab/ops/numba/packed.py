"""Packed attention on a GPU through Numba: choose the specialisation of ``cuda/packed.py`` and launch it.

Two kernels a call, one for the parts of all sequences and one that merges them. Both are compiled by Numba
but launched like CUDA C++ (`kvlab.jit.numba`), on the caller's stream, and read lengths and page tables on
the device, so a captured CUDA graph follows them. This is the backend for GPUs before compute capability 9.0,
for float32 caches, and for reading; `kvlab.ops.cuda.packed` is the one for speed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

import numpy as np

from kvlab.device import compute_capability
from kvlab.jit.launch import Kernel, numba_kernel
from kvlab.new_arrays import empty
from kvlab.ops.device_arrays import dense_pointer, multiprocessors
from kvlab.ops.packed_gpu import MAX_RUNGS, allocate_and_attend
from kvlab.pages import profile_names
from kvlab.views import CudaView, cuda_view, current_stream

if TYPE_CHECKING:
    from kvlab.ops.packed import Pages, Window
    from kvlab.pages import PageLayout

__all__ = ["Workspace", "attend", "launch", "make_workspace", "options_of", "table_arguments"]

_WARPS, _MERGE_THREADS = 2, 128
_MAX_BLOCKS = 6  # of a multiprocessor
_MAX_ROWS, _MAX_ROUNDS = 4, 2


@dataclass(frozen=True)
class Workspace:
    """Device memory that a call needs between its two kernels; calls that overlap in time need one each.

    Attributes
    ----------
    partial : float32 array
        For each part of a sequence, round and query row: the sum of p v, the maximum, the sum of p.
    """

    partial: Any


def make_workspace(like: Any, num_bh: int, query_rows: int, head_dim: int) -> Workspace:
    """Allocate the workspace of calls with so many (row, KV head) and query rows (seqlen_q * group)."""
    sequences = num_bh * _row_blocks(query_rows, head_dim)
    blocks = max(sequences, _MAX_BLOCKS * multiprocessors(cuda_view(like, "q").device))
    shape = (blocks * _WARPS, _MAX_ROUNDS, rows_at_once(query_rows, head_dim), head_dim + 2)
    return Workspace(empty(shape, "float32", like))


def rows_at_once(query_rows: int, head_dim: int) -> int:
    """Return how many query rows one expansion of a quad serves: what registers hold, a power of two."""
    max_rows = _MAX_ROWS if head_dim <= 128 else _MAX_ROWS // 2
    return min(1 << max(query_rows - 1, 0).bit_length(), max_rows)


def _row_blocks(query_rows: int, head_dim: int) -> int:
    return -(-query_rows // rows_at_once(query_rows, head_dim))


def options_of(layouts: tuple[PageLayout, ...], dtype: str, query_rows: int) -> dict[str, Any]:
    """Return the options of `attend_pages`: what a cache never changes, and how many rows go together."""
    widths_k, widths_v = (
        sum({1 if bits == 2 else 2 if bits == 3 else bits for bits in sides})
        for sides in ([bits for x in layouts for bits in x.blocks], [x.bits_v for x in layouts])
    )
    head_dim = layouts[0].head_dim
    rows = rows_at_once(query_rows, head_dim)
    options = {"head_dim": head_dim, "dtype": dtype, "widths_k": widths_k, "widths_v": widths_v, "rows": rows}
    return options | {"profiles": profile_names(layout.bits_k for layout in layouts)}


def merging_options(options: dict[str, Any]) -> dict[str, Any]:
    """Return the options of `merge_parts`, given those of `attend_pages`."""
    return {name: options[name] for name in ("head_dim", "dtype", "widths_v", "rows")}


def blocks_at_once(options: dict[str, Any], capability: tuple[int, int], *, plain: bool) -> int:
    """Return how many blocks of `attend_pages` a multiprocessor holds: fewer where registers run short.

    `plain`: scores are neither capped nor kept, and no token is hidden.
    """
    few_widths = all(options[side].bit_count() <= 3 for side in ("widths_k", "widths_v"))
    enough = capability[0] == 9 and plain and few_widths and options["dtype"] != "float32"
    return _MAX_BLOCKS if enough else 4


@lru_cache(maxsize=256)
def _kernels(
    layouts: tuple[PageLayout, ...],
    dtype: str,
    query_rows: int,
    softcap: bool,
    kept: bool,
    windowed: bool,
    device: int,
) -> tuple[Kernel, Kernel, int]:
    """Return both kernels and how many blocks of the first one the device runs at a time."""
    capability = compute_capability(device)
    options = options_of(layouts, dtype, query_rows)
    blocks = blocks_at_once(options, capability, plain=not (softcap or kept or windowed))
    extra = {"softcap": int(softcap), "kept": int(kept), "window": int(windowed), "blocks": blocks}
    attending = options | extra
    merging = merging_options(options)
    attend_kernel = numba_kernel("packed", "attend_pages", tuple(attending.items()), device)
    merge_kernel = numba_kernel("packed_merge", "merge_parts", tuple(merging.items()), device)
    return attend_kernel, merge_kernel, blocks * multiprocessors(device)


def num_splits_of(sequences: int, quads: int, slots: int) -> int:
    """Return how many blocks a sequence is split over: all fill the device once, and have a quad a warp."""
    return max(1, min(slots // max(sequences, 1), -(-quads // _WARPS)))


def table_arguments(
    layouts: tuple[PageLayout, ...], pools: list[int]
) -> tuple[list[Any], np.int64, np.int64]:
    """Describe the rungs to the kernel.

    Parameters
    ----------
    layouts : tuple of PageLayout
    pools : list of int
        Addresses of the pools in bytes; a multiple of 4 apart.

    Returns
    -------
    pool_offsets : list of int64
        Where each pool begins, in words from the first; `MAX_RUNGS` of them.
    bits_k, bits_v : int64
        Four bits a rung, the first lowest; 0 is width 16, and a profile is its number from 1 on.
    """
    pool_offsets = [(pool - pools[0]) // 4 for pool in pools] + [0] * (MAX_RUNGS - len(pools))
    in_blocks = dict.fromkeys(layout.bits_k for layout in layouts if layout.in_blocks)
    if len(in_blocks) > 15:
        raise NotImplementedError(
            f"pages have {len(in_blocks)} profiles of K; backend 'numba' supports 15: use a shorter ladder"
        )
    numbers = {profile: number for number, profile in enumerate(in_blocks, 1)}
    widths_k = [numbers.get(layout.bits_k) or layout.blocks[0] % 16 for layout in layouts]
    bits_k = sum(width << 4 * r for r, width in enumerate(widths_k))
    bits_v = sum((layout.bits_v % 16) << 4 * r for r, layout in enumerate(layouts))
    signed = np.array([bits_k, bits_v], np.uint64).view(np.int64)
    return [np.int64(offset) for offset in pool_offsets], signed[0], signed[1]


def attend(
    q: Any,
    pages: Pages,
    out: Any,
    lse: Any,
    workspace: Workspace,
    *,
    scale: float,
    softcap: float = 0.0,
    scores: Any = None,
    window: Window | None = None,
) -> None:
    """Attend all tokens of `pages`; allocates nothing, waits for nothing, launches two kernels.

    Parameters
    ----------
    q : array, (batch, seqlen_q, num_heads_q, head_dim)
        Of the dtype of the cache; the last axis contiguous.
    pages : Pages
        On the device of `q`; `k_mean` is float16, `k_shift` uint8, `exponent` int8, and with profiles
        `k_order` uint8, `k_gain` float32. Tables contiguous, `count` at a multiple of 4 bytes.
    out : array, shape and dtype of `q`, contiguous
    lse : float32 array, (batch, num_heads_q, seqlen_q), contiguous
    workspace : Workspace
        From `make_workspace` for at least this many sequences.
    scale, softcap : float
        As in `kvlab.ops.packed.packed_attention`.
    scores : float32 array, (batch, num_heads_kv, entries / 4, keep_scores * group, 64), contiguous, optional
        Receives the scores of the last rows.
    window : Window, optional
        How far the queries see; `first` contiguous, and `pages` with `base`. None: everything.
    """
    batch, seqlen_q, heads, head_dim = q.shape
    kv_heads, quads = pages.rung.shape[1], pages.rung.shape[2] // 4
    group = heads // kv_heads
    query_rows, view = seqlen_q * group, cuda_view(q, "q")
    _check(view, batch, kv_heads)
    kept = 0 if scores is None else scores.shape[3]
    attend_parts, merge_parts, slots = _kernels(
        tuple(pages.layouts), pages.dtype, query_rows, softcap > 0, kept > 0, window is not None, view.device
    )
    row_blocks = _row_blocks(query_rows, head_dim)
    num_splits = num_splits_of(batch * kv_heads * row_blocks, quads, slots)
    exponent = cuda_view(pages.exponent, "pages.exponent").pointer
    partial = cuda_view(workspace.partial, "workspace").pointer
    saved_scores = 0 if scores is None else cuda_view(scores, "scores").pointer
    stream = current_stream(q)
    attend_parts(
        (row_blocks * num_splits, kv_heads, batch), (32 * _WARPS,),
        (*_page_arguments(pages), view.pointer, *map(np.int64, view.strides[:3]), partial, saved_scores,
         *map(np.int32, (num_splits, quads, query_rows, group, kept)), np.float32(scale), np.float32(softcap),
         *_window_arguments(pages, window), exponent, *_block_arguments(pages)),
        0, stream,
    )  # fmt: skip
    merge_parts(
        (query_rows, kv_heads, batch), (_MERGE_THREADS,),
        (partial, cuda_view(out, "out").pointer, cuda_view(lse, "lse").pointer,
         *map(np.int32, (num_splits * _WARPS, query_rows, group)), exponent),
        0, stream,
    )  # fmt: skip


def _check(q: CudaView, batch: int, kv_heads: int) -> None:
    if q.strides[3] != 1:
        raise ValueError(f"q must be contiguous in its last axis, got strides {q.strides}")
    if max(batch, kv_heads) > 65535:
        raise NotImplementedError(
            f"{batch} rows and {kv_heads} KV heads are more than the 65535 of one call: attend fewer rows of "
            "the batch at a time"
        )


def _page_arguments(pages: Pages) -> list[Any]:
    """Return what the first kernel takes of the pools and their tables, from `memory` to `k_shift`."""
    views = [cuda_view(pool, "pages.pools") for pool in pages.pools]
    if max(math.prod(view.shape) for view in views) > 1 << 36:
        raise NotImplementedError(
            "a pool of more than 64 GiB is more than the kernel can address: use fewer rows"
        )
    pools = [view.pointer for view in views]
    pool_offsets, bits_k, bits_v = table_arguments(tuple(pages.layouts), pools)
    unit = np.int32(getattr(pages, "unit", 0) // 16)
    names = ("rung", "count", "index", "num_pages", "k_mean", "k_shift")
    return [pools[0], *pool_offsets, unit, bits_k, bits_v, *_pointers(pages, *names)]


def _window_arguments(pages: Pages, window: Window | None) -> tuple[int, int, np.int32]:
    """Return the upper bits of positions, where queries stand, and how far they see; zeros if all."""
    if window is None:
        return 0, 0, np.int32(0)
    first = dense_pointer(cuda_view(window.first, "first_position"), "first_position")
    return _pointers(pages, "base")[0], first, np.int32(window.left)


def _block_arguments(pages: Pages) -> list[int]:
    """Return the order and the gains of keys in blocks of channels; zeros if there are none."""
    if any(layout.in_blocks for layout in pages.layouts):
        return _pointers(pages, "k_order", "k_gain")
    return [0, 0]


def _pointers(pages: Pages, *names: str) -> list[int]:
    return [cuda_view(getattr(pages, name), f"pages.{name}").pointer for name in names]


launch = partial(allocate_and_attend, make_workspace, attend)
"""Launcher of backend "numba" for `kvlab.ops.packed.packed_attention`."""

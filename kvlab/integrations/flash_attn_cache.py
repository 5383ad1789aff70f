"""Caches in the layout of flash-attn: how `kvlab.integrations.flash_attn` reads and updates them.

Rows of a cache hold different numbers of tokens within one block of memory. Variable-length attention sees
this block as one long array of keys. The gaps in it are sequences without queries, which no kernel reads. So
a contiguous cache is attended in place, and lengths stay on the device. Where grouped attention reads keys in
segments (`_can_read_pages`) pages and chosen rows are attended in place, too, by a kernel that divides long
rows over blocks, and so are caches whose rows are too few for all blocks; elsewhere they are copied together.

Lengths and indices are those that flash_attn_cache_checks.py returns, so all are in range.
"""

from __future__ import annotations

from typing import Any

import torch

import kvlab
import kvlab.ops.attention  # whose rows `call_of` chooses from
from kvlab.arguments import LONGEST, whole_number
from kvlab.integrations.flash_attn_arguments import check_index, check_tensor
from kvlab.integrations.flash_attn_cache_checks import CacheRows, can_look, check_pages
from kvlab.integrations.torch_autograd import with_contiguous_rows
from kvlab.ops.attention_arguments import can_be_mapped, is_aligned
from kvlab.ops.attention_call import BOUNDS, RAGGED_Q, Signature, call_of
from kvlab.ops.device_arrays import multiprocessors
from kvlab.shapes import match_shapes
from kvlab.torch_compile import opaque
from kvlab.views import cuda_view

__all__ = ["attend_cache", "attend_paged", "rotate_new", "write_new"]

Tensor = torch.Tensor

_OF_PAGES = ("num_blocks", "page_block_size", "Hk", "D")
_PAGE_STEP = 16  # tokens; a kernel copies a page in parts of so many, or of more that divide it
_TILE_ROWS = 128  # (position, head) pairs of a tile, about
_PAGED = Signature("attention", q=RAGGED_Q, k=_OF_PAGES, v=_OF_PAGES, **BOUNDS)


def attend_cache(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, rows: CacheRows, options: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """Attend to the tokens of each row of a cache, the new ones included.

    Parameters
    ----------
    q : tensor, (batch, seqlen_q, heads, head_dim)
    k_cache, v_cache : tensor
        As in `flash_attn_with_kvcache`.
    rows : CacheRows
    options : dict
        For `kvlab.attention_varlen`.

    Returns
    -------
    out : tensor, (batch, seqlen_q, heads, head_dim)
    lse : float32 tensor, (batch, heads, seqlen_q)
    """
    batch, seqlen, heads, head_dim = q.shape
    bounds_q = torch.arange(batch + 1, dtype=torch.int32, device=q.device) * seqlen
    of_q = q.reshape(-1, heads, head_dim), bounds_q, seqlen
    lengths = rows.lengths + rows.num_new if rows.num_new else rows.lengths
    pages = rows.pages
    if pages is None and rows.chosen is not None:
        pages = rows.chosen[:, None]  # a row of the cache is a page, too
    elif pages is None and q.is_cuda and _leaves_blocks_idle(q, k_cache):
        pages = torch.arange(batch, device=q.device)[:, None]
    if pages is not None and rows.starts is None and _can_read_pages(q, k_cache, v_cache, pages, options):
        out, lse = _attend_pages(*of_q, k_cache, v_cache, pages, lengths, options)
    else:
        if rows.pages is not None:
            k, v = _gather_pages(k_cache, rows.pages), _gather_pages(v_cache, rows.pages)
        else:
            chosen: Any = slice(batch) if rows.chosen is None else rows.chosen
            k, v = k_cache[chosen], v_cache[chosen]
        out, lse = _attend_ragged(*of_q, k, v, lengths, rows.starts, options)
    return out.view(q.shape), lse.view(heads, batch, seqlen).transpose(0, 1).contiguous()


@opaque
def attend_paged(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    block_table: Tensor,
    options: dict[str, Any],
) -> tuple[Tensor, Tensor]:
    """Attend to sequences whose keys lie in pages, (num_blocks, page_block_size, kv_heads, head_dim)."""
    arrays = q, k, v, cu_seqlens_q, cu_seqlens_k
    for x, name in zip(arrays, _PAGED.names, strict=True):
        check_tensor(x, name)
    with torch.no_grad():
        call_of(_PAGED, arrays, None)
    check_index(block_table, "block_table", q.device)
    batch = len(cu_seqlens_q) - 1
    match_shapes(
        {
            "cu_seqlens_q": ((batch,), ("batch",)),
            "block_table": (block_table.shape, ("batch", "max_num_blocks")),
        }
    )
    longest_q = whole_number(max_seqlen_q, "max_seqlen_q", 0, LONGEST)
    longest_k = whole_number(max_seqlen_k, "max_seqlen_k", 0, LONGEST)
    with torch.no_grad():
        pages = block_table if len(k) else block_table[:, :0]
        capacity = k.shape[1] * pages.shape[1]
        lengths = cu_seqlens_k.diff()
        if can_look(q):
            _check_bounds(cu_seqlens_k, lengths, min(longest_k, capacity), capacity)
        else:
            lengths, cu_seqlens_q = lengths.clamp(0, capacity), cu_seqlens_q.clamp(0, len(q))
        pages = check_pages(pages, None, lengths, k)
        if _can_read_pages(q, k, v, pages, options):
            return _attend_pages(q, cu_seqlens_q, longest_q, k, v, pages, lengths, options)
        k, v = _gather_pages(k, pages), _gather_pages(v, pages)
        return _attend_ragged(q, cu_seqlens_q, longest_q, k, v, lengths, None, options)


def _check_bounds(cu_seqlens_k: Tensor, lengths: Tensor, longest: int, capacity: int) -> None:
    """Refuse lengths of sequences in pages; those of queries are checked as in all calls."""
    if int(cu_seqlens_k[0]) or bool(((lengths < 0) | (lengths > longest)).any()):
        raise ValueError(
            f"cu_seqlens_k is {cu_seqlens_k.tolist()}: it must rise from 0 by at most {longest}, the lesser "
            f"of max_seqlen_k and the {capacity} tokens that the pages of a sequence hold"
        )


def _attend_pages(
    q: Tensor, cu_seqlens_q: Tensor, longest: int, k: Tensor, v: Tensor, pages: Tensor, lengths: Tensor,
    options: dict[str, Any],
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Attend to pages where they lie: k, v (num_blocks, page_block_size, ...); q (total_q, ...)."""
    page_size, (batch, max_pages) = k.shape[1], pages.shape
    capacity = max_pages * page_size
    bounds = torch.arange(0, (batch + 1) * capacity, capacity, dtype=torch.int32, device=q.device)
    outs, lses = kvlab.grouped_attention_varlen(
        [q], k.flatten(0, 1), v.flatten(0, 1), cu_seqlens_q_groups=[cu_seqlens_q], cu_seqlens_k=bounds,
        prefix_lens=[lengths], causal=options["causal"], scale=options["scale"], return_lse=True,
        max_seqlen_q=longest, max_seqlen_k=capacity, segment_table=pages.int(), segment_len=page_size,
    )  # fmt: skip
    return outs[0], lses[0]


def _leaves_blocks_idle(q: Tensor, k_cache: Tensor) -> bool:
    """Whether there are fewer tiles than blocks, so that a kernel that divides rows over blocks is faster."""
    batch, seqlen, heads, _ = q.shape
    heads_kv = k_cache.shape[2]
    tiles = batch * heads_kv * -(-seqlen * heads // heads_kv // _TILE_ROWS)
    return tiles < multiprocessors(q.device.index)


def _can_read_pages(q: Tensor, k: Tensor, v: Tensor, pages: Tensor, options: dict[str, Any]) -> bool:
    """Whether a kernel reads pages where they lie: on Hopper, in 16 bits, pages of a multiple of 16 tokens
    that follow each other in memory, without a window and a soft cap.

    q is (..., heads, head_dim), its rows one behind the other.
    """
    return (
        q.is_cuda
        and torch.cuda.get_device_capability(q.device) == (9, 0)
        and q.element_size() == 2
        and k.shape[1] % _PAGE_STEP == 0
        and 0 not in (q.numel(), k.numel(), pages.numel())
        and q.is_contiguous()
        and options["window"] == (-1, -1)
        and options["softcap"] == 0
        and (options["scale"] is None or options["scale"] > 0)
        and all(len(x) == 1 or x.stride(0) == x.shape[1] * x.stride(1) for x in (k, v))
        and q.shape[-1] % 8 == 0
        and all(is_aligned(view) and can_be_mapped(view) for view in (cuda_view(k, "k"), cuda_view(v, "v")))
        and q.data_ptr() % 16 == 0
    )


def _attend_ragged(
    q: Tensor, cu_seqlens_q: Tensor, longest: int, k: Tensor, v: Tensor, lengths: Tensor,
    starts: Tensor | None, options: dict[str, Any],
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Attend with sequences and gaps in turns; q (total_q, heads, head_dim), k, v (batch, capacity, ...)."""
    batch, capacity = k.shape[:2]
    first = torch.arange(batch, dtype=torch.int32, device=q.device) * capacity
    # A gap before each sequence, and one behind the last.
    bounds_k = torch.full((2 * batch + 2,), batch * capacity, dtype=torch.int32, device=q.device)
    bounds_k[:1].zero_()  # an assignment of a number would wait for the GPU
    bounds_k[1:-1:2] = first if starts is None else first + starts
    bounds_k[2::2] = first + lengths
    bounds_q = cu_seqlens_q[:, None].expand(-1, 2).flatten()
    # Rows of q that are not contiguous would be refused by a GPU, as would those of a cache that is no copy.
    q, k, v = with_contiguous_rows(q, *(x.reshape(-1, *x.shape[2:]) for x in (k, v)))
    # A gap reaches from the end of one row to the start of the next: at most two rows.
    out, lse = kvlab.attention_varlen(
        q, k, v, bounds_q, bounds_k, longest, 2 * capacity, return_lse=True, **options
    )
    return out, lse


def _gather_pages(pages: Tensor, table: Tensor) -> Tensor:
    """Copy the pages of each row together: (batch, blocks * page_block_size, kv_heads, head_dim)."""
    return pages[table].flatten(1, 2)


def rotate_new(
    q: Tensor, k: Tensor, rows: CacheRows, cos: Tensor, sin: Tensor, one_position: bool, interleaved: bool
) -> tuple[Tensor, Tensor]:
    """Rotate q and new keys to their positions behind the tokens of each row.

    Parameters
    ----------
    q, k : tensor, (batch, seqlen_q or num_new, heads, head_dim)
    rows : CacheRows
    cos, sin : tensor, (positions, rotary_dim / 2)
    one_position : bool
        Rotate all rows of q to the first new position.
    interleaved : bool
        As in `flash_attn_with_kvcache`.
    """
    before = rows.lengths if rows.starts is None else rows.lengths - rows.starts
    offsets = torch.arange(max(rows.num_new, q.shape[1], 1), device=q.device)
    # A GPU has not looked at lengths, so positions may lie beyond the tables.
    positions = (before.long()[:, None] + offsets).clamp(max=max(len(cos) - 1, 0))
    own = positions[:, :1] if one_position else positions[:, : q.shape[1]]
    return _rotate(q, own, cos, sin, interleaved), _rotate(
        k, positions[:, : rows.num_new], cos, sin, interleaved
    )


def write_new(k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, rows: CacheRows) -> None:
    """Write k and v (batch, num_new, kv_heads, head_dim) into the cache, behind the tokens of each row."""
    slots = rows.lengths.long()[:, None] + torch.arange(rows.num_new, device=k.device)
    if rows.pages is not None:
        page_size = max(k_cache.shape[1], 1)
        where = rows.pages.gather(1, slots // page_size), slots % page_size
    else:
        chosen = torch.arange(len(k), device=k.device) if rows.chosen is None else rows.chosen
        where = chosen[:, None].expand_as(slots), slots
    k_cache[where], v_cache[where] = k, v


def _rotate(x: Tensor, positions: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Turn pairs of the first channels of x (batch, seqlen, heads, head_dim) by angles of positions."""
    half = cos.shape[1]
    turned = x[..., : 2 * half].float()
    if interleaved:
        a, b = turned[..., 0::2], turned[..., 1::2]
    else:
        a, b = turned[..., :half], turned[..., half:]
    c, s = (table[positions].float()[:, :, None] for table in (cos, sin))
    parts = a * c - b * s, a * s + b * c
    joined = torch.stack(parts, dim=-1).flatten(-2) if interleaved else torch.cat(parts, dim=-1)
    return torch.cat([joined.to(x.dtype), x[..., 2 * half :]], dim=-1)

"""Caches as flash-attn lays them out: what `kvlab.integrations.flash_attn` does with them before attention.

Rows of a cache hold different numbers of tokens, somewhere in the middle of one block of memory. For
variable-length attention that is one long array of keys in which some sequences are gaps: sequences without
queries, which no kernel reads. So a contiguous cache is attended in place, and lengths stay on the device.
"""

from __future__ import annotations

from typing import Any

import torch

import kvlab

__all__ = ["append", "attend_cache", "attend_paged", "gather_pages"]

Tensor = torch.Tensor


def attend_cache(
    q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, starts: Tensor | None, options: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """Attend to the tokens starts[b] up to lengths[b] of each row of a cache.

    Parameters
    ----------
    q : tensor, (batch, seqlen_q, heads, head_dim)
    k, v : tensor, (batch, capacity, kv_heads, head_dim)
    lengths, starts : int tensor, (batch,)
    options : dict
        For `kvlab.attention_varlen`, with return_lse.

    Returns
    -------
    out : tensor, (batch, seqlen_q, heads, head_dim)
    lse : float32 tensor, (batch, heads, seqlen_q)
    """
    batch, seqlen, heads, head_dim = q.shape
    counts = torch.full((batch,), seqlen, dtype=torch.int32, device=q.device)
    out, lse = _attend_ragged(q.reshape(-1, heads, head_dim), counts, seqlen, k, v, lengths, starts, options)
    return out.view(q.shape), lse.view(heads, batch, seqlen).transpose(0, 1).contiguous()


def attend_paged(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    block_table: Tensor,
    options: dict[str, Any],
) -> tuple[Tensor, Tensor]:
    """Attend to sequences whose keys lie in pages, (num_blocks, page_block_size, kv_heads, head_dim)."""
    with torch.no_grad():
        k, v = gather_pages(k, block_table), gather_pages(v, block_table)
        counts, lengths = cu_seqlens_q.diff(), cu_seqlens_k.diff()
        return _attend_ragged(q, counts, int(max_seqlen_q), k, v, lengths, None, options)


def _attend_ragged(
    q: Tensor, counts: Tensor, longest: int, k: Tensor, v: Tensor, lengths: Tensor, starts: Tensor | None,
    options: dict[str, Any],
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Attend with sequences and gaps in turns; q (total_q, heads, head_dim), counts[b] rows of it each."""
    batch, capacity = k.shape[:2]
    first = torch.arange(batch, dtype=torch.int32, device=q.device) * capacity
    begins = first if starts is None else first + starts.int()
    ends = first + lengths.int()
    # A gap before each sequence, and one behind the last.
    bounds_k = torch.stack([begins, ends], dim=1).flatten()
    bounds_k = torch.cat([bounds_k.new_zeros(1), bounds_k, bounds_k.new_tensor([batch * capacity])])
    cumulative = counts.cumsum(0, dtype=torch.int32)
    rows = torch.stack([cumulative - counts.int(), cumulative], dim=1).flatten()
    bounds_q = torch.cat([rows.new_zeros(1), rows, rows[-1:] if batch else rows.new_zeros(1)])
    k, v = (x.reshape(-1, *x.shape[2:]) for x in (k, v))
    q = q if q.stride(-1) == 1 else q.contiguous()
    # A gap reaches from the end of one row to the start of the next: at most two rows.
    out, lse = kvlab.attention_varlen(q, k, v, bounds_q, bounds_k, longest, 2 * capacity, **options)
    return out, lse


def gather_pages(pages: Tensor, block_table: Tensor) -> Tensor:
    """Copy the pages of each row together: (batch, blocks * page_block_size, kv_heads, head_dim)."""
    return pages[block_table.long()].flatten(1, 2)


def append(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    lengths: int | Tensor | None,
    chosen: Tensor | None,
    starts: Tensor | None,
    block_table: Tensor | None,
    *,
    one_position: bool,
    interleaved: bool,
) -> tuple[Tensor, Tensor]:
    """Rotate q and k, and write k and v into the cache.

    Parameters
    ----------
    q, k_cache, v_cache, k, v, block_table
        As in `flash_attn_with_kvcache`.
    cos, sin, lengths, chosen, starts
        Its rotary_cos, rotary_sin, cache_seqlens, cache_batch_idx and cache_leftpad.
    one_position : bool
        Rotate all rows of q to the first new position.
    interleaved : bool
        Its rotary_interleaved.

    Returns
    -------
    q : tensor
        Rotated, if cos and sin are given.
    lengths : int32 tensor, (batch,)
        Tokens in each row, the new ones included.
    """
    if (k is None) != (v is None) or (cos is None) != (sin is None):
        raise ValueError(
            "pass both of k and v, or neither; and both of rotary_cos and rotary_sin, or neither"
        )
    batch = q.shape[0]
    capacity = k_cache.shape[1] * (1 if block_table is None else block_table.shape[1])
    if not isinstance(lengths, Tensor):
        filled = capacity if lengths is None else int(lengths)
        lengths = torch.full((batch,), filled, dtype=torch.int32, device=q.device)
    if k is None or v is None:
        if cos is not None:
            raise ValueError("rotary_cos and rotary_sin rotate new keys: pass k and v too, or leave them out")
        return q, lengths.int()
    new = k.shape[1]
    if q.device.type == "cpu" and int(lengths.max()) + new > capacity:
        raise ValueError(
            f"k has {new} new tokens behind up to {int(lengths.max())}: the cache holds {capacity}"
        )
    steps = torch.arange(max(new, q.shape[1]), device=q.device)
    behind = lengths.long()[:, None] + steps  # places in the cache
    if cos is not None and sin is not None:
        positions = behind if starts is None else behind - starts.long()[:, None]
        k = _rotate(k, positions[:, :new], cos, sin, interleaved)
        own = positions[:, :1] if one_position else positions[:, : q.shape[1]]
        q = _rotate(q, own, cos, sin, interleaved)
    rows = torch.arange(batch, device=q.device) if chosen is None else chosen.long()
    slots = behind[:, :new]
    if block_table is None:
        where = rows[:, None].expand_as(slots), slots
    else:
        page = k_cache.shape[1]
        where = block_table.long().gather(1, slots // page), slots % page
    k_cache[where], v_cache[where] = k, v
    return q, lengths.int() + new


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

"""Checks of a call of `flash_attn_with_kvcache`, before anything is written.

Shapes, dtypes and numbers are checked on every device. Values in tensors are checked on the CPU. A GPU would
have to be waited for, so there they are moved to the nearest value in range: what follows may index with all
that `check_cache` returns, without another look.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from kvlab.arguments import LONGEST, whole_number
from kvlab.integrations.flash_attn_arguments import check_index, check_tensor
from kvlab.ops.attention_call import Signature, call_of
from kvlab.shapes import match_shapes

__all__ = ["CacheRows", "can_look", "check_cache", "check_pages", "check_range"]

Tensor = torch.Tensor

_OF_Q, _OF_NEW = ("batch", "seqlen_q", "Hq", "D"), ("batch", "seqlen_new", "Hk", "D")
_OF_ROWS, _OF_PAGES = ("batch_cache", "seqlen_cache", "Hk", "D"), ("num_blocks", "page_block_size", "Hk", "D")
_CACHES = [
    Signature("attention", q=_OF_Q, k_cache=of_cache, v_cache=of_cache, **new)
    for of_cache in (_OF_ROWS, _OF_PAGES)
    for new in ({}, {"k": _OF_NEW, "v": _OF_NEW})
]


class CacheRows(NamedTuple):
    """Where the tokens of each row of a call lie in the cache; all of it in range."""

    lengths: Tensor  # int32, (batch,): tokens before the call, left padding included
    num_new: int
    starts: Tensor | None  # int32, (batch,): first token, at most the length
    chosen: Tensor | None  # int64, (batch,): row of the cache
    pages: Tensor | None  # int64, (batch, blocks): page of the cache
    capacity: int  # tokens that a row can hold


def check_cache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    rotary_cos: Tensor | None,
    rotary_sin: Tensor | None,
    cache_seqlens: int | Tensor | None,
    cache_batch_idx: Tensor | None,
    cache_leftpad: Tensor | None,
    block_table: Tensor | None,
    *,
    one_position: bool,
) -> CacheRows:
    """Refuse what cannot be right; arguments are those of `flash_attn_with_kvcache`.

    Parameters
    ----------
    one_position : bool
        Whether all rows of q are rotated to the first new position.

    Raises
    ------
    TypeError, ValueError, NotImplementedError
        Naming the argument.
    """
    if (k is None) != (v is None) or (rotary_cos is None) != (rotary_sin is None):
        raise ValueError(
            "pass both of k and v, or neither; and both of rotary_cos and rotary_sin, or neither"
        )
    if rotary_cos is not None and k is None:
        raise ValueError("rotary_cos and rotary_sin rotate new keys: pass k and v too, or leave them out")
    if block_table is not None and cache_batch_idx is not None:
        raise ValueError("pass block_table or cache_batch_idx, not both: pages belong to rows of block_table")
    sizes = _check_shapes(
        q, k_cache, v_cache, k, v, cache_seqlens, cache_batch_idx, cache_leftpad, block_table
    )
    num_new = sizes.get("seqlen_new", 0)
    pages, capacity = _pages_and_capacity(k_cache, block_table, cache_batch_idx, sizes["batch"])
    lengths = _check_lengths(cache_seqlens, q, num_new, capacity)
    starts = None
    if cache_leftpad is not None:
        starts = check_range(cache_leftpad, "cache_leftpad", lengths, "the row's cache_seqlens").int()
    if cache_batch_idx is not None:
        reason = f"the cache has {len(k_cache)} rows"
        cache_batch_idx = check_range(cache_batch_idx, "cache_batch_idx", len(k_cache) - 1, reason).long()
    if pages is not None:
        pages = check_pages(pages, starts, lengths + num_new, k_cache)
    rows = CacheRows(lengths, num_new, starts, cache_batch_idx, pages, capacity)
    if rotary_cos is not None and rotary_sin is not None:
        last = num_new if one_position else max(num_new, sizes["seqlen_q"])
        _check_rotary(q, rows, rotary_cos, rotary_sin, last)
    return rows


def _check_shapes(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Tensor | None, v: Tensor | None,
    seqlens: Any, chosen: Any, leftpad: Any, block_table: Any,
) -> dict[str, int]:  # fmt: skip
    """Check kinds, shapes, dtypes and devices; return the value of each symbol."""
    signature = _CACHES[2 * (block_table is not None) + (k is not None)]
    arrays: tuple[Any, ...] = (q, k_cache, v_cache) if k is None else (q, k_cache, v_cache, k, v)
    for x, name in zip(arrays, signature.names, strict=True):
        check_tensor(x, name)
    with torch.no_grad():
        sizes = dict(call_of(signature, arrays, None)[0].sizes)
    shapes: dict[str, tuple[Sequence[int], Sequence[str | int]]] = {"q": (q.shape[:1], ("batch",))}
    for x, name in ((seqlens, "cache_seqlens"), (chosen, "cache_batch_idx"), (leftpad, "cache_leftpad")):
        if isinstance(x, torch.Tensor) or (x is not None and name != "cache_seqlens"):
            check_index(x, name, q.device)
            shapes[name] = x.shape, ("batch",)
    if block_table is not None:
        check_index(block_table, "block_table", q.device)
        shapes["block_table"] = block_table.shape, ("batch", "max_num_blocks_per_seq")
    match_shapes(shapes)
    return sizes


def _pages_and_capacity(
    k_cache: Tensor, block_table: Tensor | None, cache_batch_idx: Tensor | None, batch: int
) -> tuple[Tensor | None, int]:
    """Return the table of pages, without columns where no page is, and how many tokens a row can have."""
    pages, capacity = block_table, k_cache.shape[1]
    if pages is not None:
        pages = pages if len(k_cache) else pages[:, :0]
        capacity *= pages.shape[1]
    elif len(k_cache) < batch and (cache_batch_idx is None or not len(k_cache)):
        raise ValueError(f"k_cache has {len(k_cache)} rows, q has {batch}: each needs a row of the cache")
    if batch * capacity > LONGEST:
        raise NotImplementedError(
            f"a cache of {batch} rows of {capacity} tokens: positions count to {LONGEST} over all "
            "rows of a call; call it for a part of the rows at a time"
        )
    return pages, capacity


def _check_lengths(cache_seqlens: Any, q: Tensor, num_new: int, capacity: int) -> Tensor:
    """Return the lengths before the call, int32 (batch,)."""
    if num_new > capacity:
        raise ValueError(f"k has {num_new} new tokens: a row of the cache holds {capacity}")
    if isinstance(cache_seqlens, torch.Tensor):
        reason = f"a row of the cache holds {capacity} tokens" + f", {num_new} of them new" * (num_new > 0)
        return check_range(cache_seqlens, "cache_seqlens", capacity - num_new, reason).int()
    length = capacity if cache_seqlens is None else whole_number(cache_seqlens, "cache_seqlens")
    if not 0 <= length <= capacity - num_new:
        raise ValueError(
            f"cache_seqlens={cache_seqlens} must lie between 0 and {capacity - num_new}: a row of the cache "
            f"holds {capacity} tokens, {num_new} of them new; not given, it means all of them"
        )
    return torch.full((len(q),), length, dtype=torch.int32, device=q.device)


def can_look(x: Tensor) -> bool:
    """Whether the values of a tensor can be had without waiting for a device."""
    return x.device.type == "cpu"


def check_range(index: Tensor, name: str, most: int | Tensor, reason: str) -> Tensor:
    """Refuse values outside 0 to `most` on a CPU; return them moved into it on a GPU.

    Examples
    --------
    >>> check_range(torch.tensor([3, 9]), "cache_seqlens", 8, "a row of the cache holds 8 tokens")
    Traceback (most recent call last):
        ...
    ValueError: cache_seqlens[1]=9 must lie between 0 and 8: a row of the cache holds 8 tokens
    """
    if not can_look(index):
        return index.clamp(0, most) if isinstance(most, int) else index.clamp(min=0).minimum(most)
    wrong = (index < 0) | (index > most)
    if bool(wrong.any()):
        where = int(wrong.nonzero()[0])
        limit = most if isinstance(most, int) else int(most[where])
        raise ValueError(f"{name}[{where}]={int(index[where])} must lie between 0 and {limit}: {reason}")
    return index


def check_pages(block_table: Tensor, starts: Tensor | None, lengths: Tensor, cache: Tensor) -> Tensor:
    """Refuse pages that hold tokens and do not exist; return a table of pages that all exist.

    Parameters
    ----------
    block_table : int tensor, (batch, blocks)
    starts, lengths : int tensor, (batch,)
        First token and the end of each row; the new tokens included.
    cache : tensor, (num_blocks, page_block_size, kv_heads, head_dim)
    """
    num_blocks, page_size = cache.shape[:2]
    if can_look(block_table) and page_size:
        column = torch.arange(block_table.shape[1])
        used = column * page_size < lengths[:, None]
        if starts is not None:
            used &= (column + 1) * page_size > starts[:, None]
        wrong = used & ((block_table < 0) | (block_table >= num_blocks))
        if bool(wrong.any()):
            row, block = wrong.nonzero()[0].tolist()
            raise ValueError(
                f"block_table[{row}, {block}]={int(block_table[row, block])} must lie between 0 and "
                f"{num_blocks - 1}: the cache has {num_blocks} pages, and row {row} has tokens in this one"
            )
    return block_table.long().clamp(0, max(num_blocks - 1, 0))


def _check_rotary(q: Tensor, rows: CacheRows, cos: Tensor, sin: Tensor, last: int) -> None:
    """Refuse tables that do not reach the position of the last of `last` rows."""
    for table, name in ((cos, "rotary_cos"), (sin, "rotary_sin")):
        check_tensor(table, name)
        if not table.dtype.is_floating_point:
            kind = str(table.dtype).removeprefix("torch.")
            raise TypeError(f"{name} has dtype {kind}; it must be that of q")
        if table.device != q.device:
            raise ValueError(f"{name} is on {table.device}, q on {q.device}: they must be on one device")
    pattern = ("positions", "rotary_dim / 2")
    sizes = match_shapes({"rotary_cos": (cos.shape, pattern), "rotary_sin": (sin.shape, pattern)})
    rotary_dim, head_dim = 2 * sizes["rotary_dim / 2"], q.shape[-1]
    if rotary_dim > head_dim:
        raise ValueError(f"rotary_cos turns {rotary_dim} channels: q has a head_dim of {head_dim}")
    if not last or not len(q):
        return
    if not len(cos):
        raise ValueError("rotary_cos has no positions: it must have one for each token of the cache")
    if can_look(q):
        positions = rows.lengths if rows.starts is None else rows.lengths - rows.starts
        need = int(positions.max()) + last
        if need > len(cos):
            raise ValueError(f"rotary_cos has {len(cos)} positions: this call needs {need}")

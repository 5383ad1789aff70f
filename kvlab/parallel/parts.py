"""Attention over a list of parts, forward and backward, with sums in float32.

Parts see disjoint keys, so their results are merged by the log-sum-exps (`kvlab.merge_attention`), and a
gradient is a sum over parts, each computed from the merged out and lse. Sums over parts are kept in float32:
rounding them to 16 bits after every part would let the error grow with the number of ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from kvlab.ops.attention import attention, attention_varlen, merge_attention
from kvlab.ops.attention_backward import attention_backward, attention_varlen_backward
from kvlab.ops.cuda.attention_merge import merge_rows
from kvlab.ops.grouped import grouped_attention_varlen
from kvlab.parallel.collectives import filled, on_device
from kvlab.parallel.layout import ALL, Part, Prefixes, Rows

__all__ = [
    "Options",
    "add_gradients",
    "add_rows",
    "attend",
    "attend_prefixes",
    "attention_of",
    "empty_result",
    "gradients",
    "merged",
    "rows_of",
]


class Options(NamedTuple):
    """Options of attention that all parts share."""

    scale: float | None
    window: tuple[int, int]
    deterministic: bool
    implementation: str | None = None  # of attention over gathered keys


def rows_of(x: Any, rows: Rows) -> Any:
    """Rows of a tensor: itself for all, a view for a slice, else a copy."""
    if isinstance(rows, slice) and rows == ALL:
        return x
    return x[rows] if isinstance(rows, slice) else x.index_select(0, on_device(rows, x.device))


def _columns_of(lse: Any, rows: Rows) -> Any:
    if isinstance(rows, slice) and rows == ALL:
        return lse
    return lse[:, rows] if isinstance(rows, slice) else lse.index_select(1, on_device(rows, lse.device))


def empty_result(q: Any) -> tuple[Any, Any]:
    """Out and lse of queries that have seen no key yet, float32."""
    total, heads, _ = q.shape
    return filled(tuple(q.shape), 0.0, q), filled((heads, total), -float("inf"), q)


def attend(
    result: tuple[Any, Any] | None, q: Any, k: Any, v: Any, parts: Sequence[Part], options: Options
) -> tuple[Any, Any] | None:
    """Merge attention of q over parts of k and v into `result`, float32 out and lse, in place; return it.

    Where there is no result yet, the first part of all queries is, in its dtype.
    """
    for part in parts:
        rows = part.q_rows
        if result is None or not isinstance(rows, slice):
            result = merged(result, rows, attention_of(q, k, v, part, options), q)
            continue
        mine, keys, values = (
            _wide(rows_of(x, some)) for x, some in ((q, rows), (k, part.k_rows), (v, part.k_rows))
        )
        attention_varlen(
            mine, keys, values, *_lengths(part, q.device), causal=part.causal, scale=options.scale,
            window=options.window, into=(result[0][rows], result[1][:, rows]),
        )  # fmt: skip
    return result


def attention_of(q: Any, k: Any, v: Any, part: Part, options: Options) -> tuple[Any, Any]:
    """Return out and lse of the queries of a part."""
    q, k, v = _wide(rows_of(q, part.q_rows)), *(_wide(rows_of(x, part.k_rows)) for x in (k, v))
    mask: dict[str, Any] = {"causal": part.causal, "scale": options.scale, "window": options.window}
    if part.is_one:
        out, lse = attention(q[None], k[None], v[None], **mask, return_lse=True)
        return out[0], lse[0]
    out, lse = attention_varlen(q, k, v, *_lengths(part, q.device), **mask, return_lse=True)
    return out, lse


def attend_prefixes(
    result: tuple[Any, Any] | None, q: Any, k: Any, v: Any, prefixes: Prefixes, options: Options
) -> tuple[Any, Any] | None:
    """Merge attention of groups of q over prefixes of k and v into `result`, as `attend`, by one call."""
    table = prefixes.segment_table
    cu_q, longest = on_device(prefixes.cu_q, q.device), np.diff(prefixes.cu_q).max(initial=0)
    outs, lses = grouped_attention_varlen(
        [_wide(rows_of(q, rows)) for rows in prefixes.q_rows], _wide(k), _wide(v),
        cu_seqlens_q_groups=[cu_q] * len(prefixes.q_rows), cu_seqlens_k=on_device(prefixes.cu_k, q.device),
        prefix_lens=[on_device(lens, q.device) for lens in prefixes.prefix_lens], causal=False,
        scale=options.scale, return_lse=True, implementation=options.implementation,
        max_seqlen_q=int(longest), max_seqlen_k=int(np.diff(prefixes.cu_k).max(initial=0)),
        segment_table=None if table is None else on_device(table, q.device).view(table.shape),
        segment_len=prefixes.segment_len,
    )  # fmt: skip
    for rows, *found in zip(prefixes.q_rows, outs, lses, strict=True):
        result = merged(result, rows, found, q)
    return result


def merged(result: tuple[Any, Any] | None, rows: Rows, found: Sequence[Any], q: Any) -> tuple[Any, Any]:
    """Merge out and lse of some rows over more keys into those of all, in place; return these."""
    if result is None:
        if isinstance(rows, slice) and rows == ALL:
            return found[0], found[1]
        result = empty_result(q)
    out, lse = result
    if out.is_cuda:
        merge_rows(out, lse, rows if isinstance(rows, slice) else on_device(rows, out.device), *found)
        return result
    before = rows_of(out, rows), _columns_of(lse, rows)
    new = merge_attention((before[0], found[0].to(out.dtype)), (before[1], found[1]))
    _put(out, rows, new[0])
    _put(lse.T, rows, new[1].T)
    return result


def gradients(
    dout: Any, q: Any, out: Any, lse: Any, k: Any, v: Any, part: Part, options: Options
) -> tuple[Any, Any, Any]:
    """Return dq of the queries of a part, and dk and dv of its keys, float32; `lse` is that over all keys."""
    dout, q, out = (_wide(rows_of(x, part.q_rows)) for x in (dout, q, out))
    k, v = (_wide(rows_of(x, part.k_rows)) for x in (k, v))
    arrays = dout, q, k, v, out, _columns_of(lse, part.q_rows)
    given: dict[str, Any] = {"causal": part.causal, "scale": options.scale, "window": options.window}
    given |= {"deterministic": options.deterministic, "float32_dk_dv": q.is_cuda}
    if part.is_one:
        dq, dk, dv = attention_backward(*(x[None] for x in arrays), **given)
        return dq[0], dk[0], dv[0]
    return attention_varlen_backward(*arrays, *_lengths(part, q.device), **given)


def add_gradients(
    sums: tuple[Any, Any, Any], arrays: Sequence[Any], parts: Sequence[Part], options: Options
) -> None:
    """Add gradients of parts to `sums`, float32 dq, dk and dv, in place; `arrays` as `gradients` has them."""
    for part in parts:
        dout, q, out, lse, k, v = arrays
        found = gradients(dout, q, out, lse, k, v, part, options)
        for total, rows, new in zip(sums, (part.q_rows, part.k_rows, part.k_rows), found, strict=True):
            add_rows(total, rows, new)


@lru_cache(maxsize=1024)
def _lengths(part: Part, device: Any) -> tuple[Any, Any, int, int]:
    return on_device(part.cu_q, device), on_device(part.cu_k, device), *part.longest


def _wide(x: Any) -> Any:
    """16-bit floats on a CPU in float32, in which its kernels compute anyway, so that no part is rounded."""
    return x.float() if x.device.type == "cpu" and x.element_size() < 4 else x


def _put(x: Any, rows: Rows, values: Any) -> None:
    if isinstance(rows, slice):
        x[rows] = values
    else:
        x.index_copy_(0, on_device(rows, x.device), values)


def add_rows(x: Any, rows: Rows, values: Any) -> None:
    """Add values to rows of a tensor, in place."""
    if isinstance(rows, slice):
        x[rows] += values
    else:
        x.index_add_(0, on_device(rows, x.device), values.to(x.dtype))

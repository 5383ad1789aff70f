"""Attention over a list of parts, forward and backward, with sums in float32.

Parts see disjoint keys, so their results are merged by the log-sum-exps (`kvlab.merge_attention`), and a
gradient is a sum over parts, each computed from the merged out and lse. Sums over parts are kept in float32:
rounding them to 16 bits after every part would let the error grow with the number of ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from kvlab.ops.attention import attention_varlen, merge_attention
from kvlab.ops.attention_backward import attention_varlen_backward
from kvlab.ops.grouped import grouped_attention_varlen
from kvlab.parallel.collectives import filled, on_device
from kvlab.parallel.layout import Part, Prefixes, Rows

__all__ = [
    "Options",
    "add_gradients",
    "add_rows",
    "attend",
    "attend_prefixes",
    "empty_result",
    "rows_of",
]


class Options(NamedTuple):
    """Options of attention that all parts share."""

    scale: float | None
    window: tuple[int, int]
    deterministic: bool
    implementation: str | None = None  # of attention over gathered keys


def rows_of(x: Any, rows: Rows) -> Any:
    """Rows of a tensor: a view for a slice, else a copy."""
    return x[rows] if isinstance(rows, slice) else x.index_select(0, on_device(rows, x))


def empty_result(q: Any) -> tuple[Any, Any]:
    """Out and lse of queries that have seen no key yet, float32."""
    total, heads, _ = q.shape
    return filled(tuple(q.shape), 0.0, q), filled((heads, total), -float("inf"), q)


def attend(result: tuple[Any, Any], q: Any, k: Any, v: Any, parts: Sequence[Part], options: Options) -> None:
    """Merge attention of q over parts of k and v into `result`, out and lse, in place."""
    for part in parts:
        own = _rows_of_result(result, part.q_rows)
        attention_varlen(
            _wide(rows_of(q, part.q_rows)), _wide(rows_of(k, part.k_rows)), _wide(rows_of(v, part.k_rows)),
            *_lengths(part, q), causal=part.causal, scale=options.scale, window=options.window, into=own,
        )  # fmt: skip
        if not isinstance(part.q_rows, slice):
            _put_result(result, part.q_rows, own)


def attend_prefixes(
    result: tuple[Any, Any], q: Any, k: Any, v: Any, prefixes: Prefixes, options: Options
) -> None:
    """Merge attention of groups of q over prefixes of k and v into `result`, as `attend`, by one call."""
    cu_q, longest = on_device(prefixes.cu_q, q), np.diff(prefixes.cu_q).max(initial=0)
    outs, lses = grouped_attention_varlen(
        [_wide(rows_of(q, rows)) for rows in prefixes.q_rows], _wide(k), _wide(v),
        cu_seqlens_q_groups=[cu_q] * len(prefixes.q_rows), cu_seqlens_k=on_device(prefixes.cu_k, q),
        prefix_lens=[on_device(lens, q) for lens in prefixes.prefix_lens], causal=False,
        scale=options.scale, return_lse=True, implementation=options.implementation,
        max_seqlen_q=int(longest), max_seqlen_k=int(np.diff(prefixes.cu_k).max(initial=0)),
        segment_table=on_device(prefixes.segment_table, q).view(prefixes.segment_table.shape),
        segment_len=prefixes.segment_len,
    )  # fmt: skip
    for rows, *found in zip(prefixes.q_rows, outs, lses, strict=True):
        before = _rows_of_result(result, rows)
        new = merge_attention((before[0], found[0].float()), (before[1], found[1]))
        _put_result(result, rows, new)


def _rows_of_result(result: tuple[Any, Any], rows: Rows) -> tuple[Any, Any]:
    """Out and lse of some rows: views for a slice, else copies."""
    out, lse = result
    if isinstance(rows, slice):
        return out[rows], lse[:, rows]
    return rows_of(out, rows), rows_of(lse.T, rows).T.contiguous()


def _put_result(result: tuple[Any, Any], rows: Rows, new: tuple[Any, Any]) -> None:
    _put(result[0], rows, new[0])
    _put(result[1].T, rows, new[1].T)


def add_gradients(
    sums: tuple[Any, Any, Any], arrays: tuple[Any, Any, Any, Any, Any, Any], parts: Sequence[Part],
    options: Options,
) -> None:  # fmt: skip
    """Add gradients of parts to `sums`, float32 dq, dk and dv, in place.

    Parameters
    ----------
    sums : tuple of float32 tensors
        Shapes of q, k and v.
    arrays : tuple of tensors
        dout, q, k, v, out and lse; out and lse over all keys.
    parts, options
        As in `attend`.
    """
    dout, q, k, v, out, lse = arrays
    for part in parts:
        part_dout, part_q, part_out = (_wide(rows_of(x, part.q_rows)) for x in (dout, q, out))
        part_k, part_v = (_wide(rows_of(x, part.k_rows)) for x in (k, v))
        part_lse = rows_of(lse.T, part.q_rows).T.contiguous()
        found = attention_varlen_backward(
            part_dout, part_q, part_k, part_v, part_out, part_lse, *_lengths(part, q), causal=part.causal,
            scale=options.scale, window=options.window, deterministic=options.deterministic,
        )  # fmt: skip
        for total, rows, new in zip(sums, (part.q_rows, part.k_rows, part.k_rows), found, strict=True):
            add_rows(total, rows, new.float())


def _lengths(part: Part, like: Any) -> tuple[Any, Any, int, int]:
    longest = (int((bounds[1:] - bounds[:-1]).max(initial=0)) for bounds in (part.cu_q, part.cu_k))
    max_q, max_k = longest
    return on_device(part.cu_q, like), on_device(part.cu_k, like), max_q, max_k


def _wide(x: Any) -> Any:
    """16-bit floats on a CPU in float32, in which its kernels compute anyway, so that no part is rounded."""
    return x.float() if x.device.type == "cpu" and x.element_size() < 4 else x


def _put(x: Any, rows: Rows, values: Any) -> None:
    if isinstance(rows, slice):
        x[rows] = values
    else:
        x.index_copy_(0, on_device(rows, x), values)


def add_rows(x: Any, rows: Rows, values: Any) -> None:
    """Add values to rows of a tensor, in place."""
    if isinstance(rows, slice):
        x[rows] += values
    else:
        x.index_add_(0, on_device(rows, x), values)

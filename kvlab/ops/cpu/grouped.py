"""Attention of groups of queries on the CPU: launchers of the backends "cpu" and "reference".

One call of the kernel for all groups. Listed, each (sequence, group) is a sequence of its own. Paired, the
rows of all groups of a sequence are one sequence, in the order of the keys that they see: so 192 rows that
share a tile of keys may be of several groups. Queries are copied into that order, and results out of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kvlab.arrays import ArrayT, like_first, to_numpy_view
from kvlab.ops.cpu.attention import Views, attend_places, bounds_of, worth_sharing
from kvlab.ops.cpu.attention import attend as attend_one
from kvlab.reference import grouped as reference

if TYPE_CHECKING:
    from kvlab.ops.attention import Scores
    from kvlab.ops.grouped import Groups

__all__ = ["attend", "attend_reference", "lengths_of", "sequences_of"]


def lengths_of(
    q_groups: Sequence[Any], k: Any, groups: Groups
) -> tuple[list[NDArray[np.int64]], NDArray[np.int64], list[NDArray[np.int64]]]:
    """Return bounds of the rows of each group and of the keys, and prefixes; refuses what does not fit."""
    cu_k = bounds_of("cu_seqlens_k", groups.cu_k, groups.max_k, k.shape[0])
    cu_q, lens = [], []
    for g, (q, bounds, prefix) in enumerate(zip(q_groups, groups.cu_q, groups.prefix_lens, strict=True)):
        cu_q.append(bounds_of(f"cu_seqlens_q_groups[{g}]", bounds, groups.max_q, q.shape[0]))
        lens.append(to_numpy_view(prefix, f"prefix_lens[{g}]").astype(np.int64))
        wrong = np.flatnonzero((lens[g] < 0) | (lens[g] > np.diff(cu_k)))
        if len(wrong):
            b = int(wrong[0])
            raise ValueError(
                f"prefix_lens[{g}][{b}] is {lens[g][b]}: sequence {b} has {np.diff(cu_k)[b]} keys, and a "
                "prefix 0 up to as many"
            )
    return cu_q, cu_k, lens


def attend_reference(
    q_groups: Sequence[ArrayT], k: Any, v: Any, groups: Groups, scores: Scores, *_: Any
) -> tuple[list[ArrayT], list[ArrayT]]:
    """Launcher of backend "reference"; arguments as `attend`."""
    views = [to_numpy_view(q, f"q_groups[{g}]") for g, q in enumerate(q_groups)]
    cu_q, cu_k, lens = lengths_of(views, k, groups)
    outs, lses = reference.grouped_attention_varlen(
        views, to_numpy_view(k, "k"), to_numpy_view(v, "v"), cu_seqlens_q_groups=cu_q, cu_seqlens_k=cu_k,
        prefix_lens=lens, causal=scores.right == 0, scale=scores.scale,
    )  # fmt: skip
    return (
        [like_first(out.astype(q.dtype), q_groups[0]) for out, q in zip(outs, views, strict=True)],
        [like_first(lse.astype(np.float32), q_groups[0]) for lse in lses],
    )


def attend(
    q_groups: Sequence[ArrayT],
    k: Any,
    v: Any,
    groups: Groups,
    scores: Scores,
    implementation: str | None = None,
    _sm_margin: int = 0,
) -> tuple[list[ArrayT], list[ArrayT]]:
    """Launcher of backend "cpu".

    Parameters
    ----------
    q_groups : list of arrays, (rows of the group, num_heads_q, head_dim)
    k, v : array, (total_k, num_heads_kv, head_dim)
    groups : Groups
    scores : Scores
    implementation : str, optional
        Of `kvlab.ops.grouped.IMPLEMENTATIONS`; by default paired.

    Returns
    -------
    outs, lses : lists of arrays, one a group
    """
    views = [to_numpy_view(q, f"q_groups[{g}]") for g, q in enumerate(q_groups)]
    cu_q, cu_k, lens = lengths_of(views, k, groups)
    if implementation == "separate":
        results = [
            attend_one(q, k, v, sequences_of(groups, own, cu_k, prefix), scores)
            for q, own, prefix in zip(q_groups, cu_q, lens, strict=True)
        ]
        return [out for out, _ in results], [lse for _, lse in results]
    starts = np.cumsum([0, *(len(q) for q in views)])
    q = np.concatenate(views)
    keys = np.stack(lens)  # (groups, sequences)
    rows = np.stack([np.diff(x) for x in cu_q])
    order, limits = np.arange(len(q)), np.empty(0, np.int64)
    if implementation == "listed":
        first_row = np.stack([x[:-1] + start for x, start in zip(cu_q, starts, strict=False)])
        places = np.zeros((rows.size, 5), np.int64)
        places[:, 1], places[:, 2], places[:, 4] = first_row.ravel(), rows.ravel(), keys.ravel()
        places[:, 3] = np.tile(cu_k[:-1], len(views))
    else:
        order, limits = _by_keys(rows, keys, scores.right == 0)
        places = np.zeros((rows.shape[1], 5), np.int64)
        places[:, 2] = rows.sum(axis=0)
        places[:, 1] = np.cumsum(places[:, 2]) - places[:, 2]
        places[:, 3], places[:, 4] = cu_k[:-1], keys.max(axis=0)
    all_rows = Views(q[order][None], to_numpy_view(k, "k")[None], to_numpy_view(v, "v")[None], places)
    found, logs = attend_places(all_rows, scores, limits, alone=not worth_sharing(all_rows, products=1))
    out, lse = np.empty_like(found[0]), np.empty_like(logs[0])
    out[order], lse[:, order] = found[0], logs[0]
    spans = [slice(*starts[g : g + 2]) for g in range(len(views))]
    return (
        [like_first(out[span], q_groups[0]) for span in spans],
        [like_first(np.ascontiguousarray(lse[:, span]), q_groups[0]) for span in spans],
    )


def sequences_of(
    groups: Groups, cu_q: NDArray[np.int64], cu_k: NDArray[np.int64], lens: NDArray[np.int64]
) -> Any:
    """Return the sequences of a separate call: each prefix, and behind it a gap without queries."""
    from kvlab.ops.attention import Sequences

    bounds = np.zeros((2, 2 * len(lens) + 1), np.int32)
    bounds[0, :-1], bounds[0, -1] = np.repeat(cu_q, 2)[1:-1], cu_q[-1]
    bounds[1, :-1:2], bounds[1, 1::2], bounds[1, -1] = cu_k[:-1], cu_k[:-1] + lens, cu_k[-1]
    return Sequences(bounds[0], bounds[1], groups.max_q, groups.max_k)


def _by_keys(
    rows: NDArray[np.int64], keys: NDArray[np.int64], causal: bool
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the order of all rows, group after group, by sequence and the keys they see, and how many.

    rows, keys: (groups, sequences).
    """
    count, (_, sequences) = rows.ravel(), rows.shape
    of = np.repeat(np.arange(count.size), count)  # (group, sequence) of each row
    inside = np.arange(len(of)) - np.repeat(np.cumsum(count) - count, count)
    limit = keys.ravel()[of]
    if causal:
        limit = np.maximum(0, limit - count[of] + inside + 1)
    order = np.lexsort((limit, of % max(sequences, 1)))
    return order, limit[order]

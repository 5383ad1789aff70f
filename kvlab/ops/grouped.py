"""Attention of several groups of queries that see prefixes of the same keys, and its gradients.

A rank of zigzag context parallelism holds two chunks of every sequence. They see prefixes of the same
gathered keys, of different lengths. One call for both starts one kernel, whose blocks take the tiles of both
from one list, instead of two kernels that each wait for their longest tile; keys are neither cut nor copied.

Three implementations give the same answer. "separate" calls ordinary attention for each group: a prefix is a
sequence, and behind it lies a gap, a sequence of keys without queries. "listed" puts the tiles of all groups
into one list. "paired" also lets a tile hold rows of several groups, those that see most keys first, so that
tiles of K and V are loaded for as many rows as can be.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from kvlab.arguments import LONGEST, choice, flag, number, whole_number
from kvlab.arrays import Array, ArrayT, Device, device_of, dtype_name, numpy_dtype, one_device
from kvlab.device import enough_memory
from kvlab.ops.attention import Scores
from kvlab.registry import (
    ON_CUDA,
    ON_NUMBA,
    AtLeast,
    Implementation,
    check_backend,
    choose,
    register,
    requirements_of,
    rows,
)
from kvlab.shapes import match_shapes

__all__ = ["IMPLEMENTATIONS", "MOST_GROUPS", "Groups", "grouped_attention_varlen"]

IMPLEMENTATIONS: tuple[str, ...] = ("paired", "listed", "separate")
MOST_GROUPS = 16

_FLOATS = ("float16", "bfloat16", "float32")
_CPU: dict[str, Any] = {"dtype": _FLOATS, "head_dim": AtLeast(1), "implementation": IMPLEMENTATIONS}
_GPU: dict[str, Any] = {"dtype": _FLOATS, "head_dim": range(1, 257), "implementation": ("separate",)}
_HOPPER: dict[str, Any] = {
    "dtype": _FLOATS[:2], "head_dim": range(1, 257), "implementation": IMPLEMENTATIONS[:2],
    "compute_capability": ((9, 0),),
}  # fmt: skip

register(
    Implementation("grouped_attention", "cpu", "kvlab.ops.cpu.grouped:attend", _CPU),
    Implementation(
        "grouped_attention", "reference", "kvlab.ops.cpu.grouped:attend_reference",
        _CPU | {"dtype": (*_FLOATS, "float64")},
    ),
    Implementation("grouped_attention", "cuda", "kvlab.ops.cuda.grouped:attend", _HOPPER),
    Implementation(
        "grouped_attention", "cuda", "kvlab.ops.cuda.grouped:attend_separately", _GPU | ON_CUDA
    ),
    Implementation(
        "grouped_attention", "numba", "kvlab.ops.numba.grouped:attend_separately", _GPU | ON_NUMBA
    ),
)  # fmt: skip


class Groups(NamedTuple):
    """Where rows of each group lie, and how many keys they see; `max_q`, `max_k`: the longest sequence."""

    cu_q: tuple[Array, ...]
    cu_k: Array
    prefix_lens: tuple[Array, ...]
    max_q: int
    max_k: int


class _Checked(NamedTuple):
    sizes: dict[str, int]
    dtype: str
    device: Device


def grouped_attention_varlen(
    q_groups: Sequence[ArrayT],
    k: Array,
    v: Array,
    *,
    cu_seqlens_q_groups: Sequence[Array],
    cu_seqlens_k: Array,
    prefix_lens: Sequence[Array],
    causal: bool = True,
    scale: float | None = None,
    return_lse: bool = False,
    implementation: str | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    sm_margin: int = 0,
    backend: str | None = None,
) -> list[ArrayT] | tuple[list[ArrayT], list[ArrayT]]:
    """Attention of groups of queries, each to a prefix of the keys of every sequence.

    Rows of group g in sequence b see the first prefix_lens[g][b] keys of the sequence. With `causal` the last
    of these rows stands at the last of these keys, as in `attention_varlen` of the prefix alone.

    Parameters
    ----------
    q_groups : list of arrays, (total_q of the group, num_heads_q, head_dim)
        1 to 16 groups; float16, bfloat16 or float32 (``"reference"`` takes float64, too).
    k, v : array, (total_k, num_heads_kv, head_dim)
    cu_seqlens_q_groups : list of int32 arrays, (batch + 1,)
        For each group, prefix sums of its rows in each sequence; there may be none in a sequence, or at all.
    cu_seqlens_k : int32 array, (batch + 1,)
    prefix_lens : list of int32 arrays, (batch,)
        For each group, how many keys of each sequence it sees: 0 up to all. Prefixes need not be nested. A
        GPU does not check values; it takes longer prefixes for whole sequences.
    causal : bool
    scale : float, optional
        Factor on the scores; 1 / sqrt(head_dim) if not given.
    return_lse : bool
        Also return the log-sum-exps.
    implementation : str, optional
        ``"paired"``, ``"listed"`` or ``"separate"``: how the work is divided (see the module's head), not
        what comes out. By default paired where there are kernels for it (CPU; on compute capability 9.0 in 16
        bits, for arrays whose rows begin at multiples of 16 bytes), else separate.
    max_seqlen_q, max_seqlen_k : int, optional
        At least the longest sequence of any group, and of k. Without them the totals count; separate calls of
        many sequences then start many blocks that find nothing to do.
    sm_margin, backend
        As in `kvlab.attention`; ``"numba"`` has separate calls only.

    Returns
    -------
    outs : list of arrays, as q_groups
        On a GPU they may be parts of one array. 0 for rows that see no key.
    lses : list of float32 arrays, (num_heads_q, total_q of the group), only if return_lse
        -inf for rows that see no key. The last axis is contiguous.

    Raises
    ------
    ValueError
        If there are no groups or more than 16, lists differ in length, or as `kvlab.attention_varlen`; on the
        CPU also if a prefix is longer than its sequence.
    TypeError, NotImplementedError, kvlab.OutOfMemory
        As `kvlab.attention_varlen`.

    References
    ----------
    Llama Team, "The Llama 3 herd of models", arXiv:2407.21783, 2024, section 3.3.2 (context parallelism).

    Examples
    --------
    One sequence of four keys. A group of one row stands at the second key, another at the last.

    >>> import kvlab
    >>> import numpy as np
    >>> q, k = np.ones((1, 1, 2), np.float32), np.zeros((4, 1, 2), np.float32)
    >>> v = np.arange(8, dtype=np.float32).reshape(4, 1, 2)
    >>> one, four = np.array([0, 1], np.int32), np.array([0, 4], np.int32)
    >>> early, late = kvlab.grouped_attention_varlen(
    ...     [q, q], k, v, cu_seqlens_q_groups=[one, one], cu_seqlens_k=four,
    ...     prefix_lens=[np.array([2], np.int32), np.array([4], np.int32)],
    ... )
    >>> early.ravel(), late.ravel()
    (array([1., 2.], dtype=float32), array([3., 4.], dtype=float32))
    """
    call, groups = _check(
        q_groups, k, v, cu_seqlens_q_groups, cu_seqlens_k, prefix_lens, max_seqlen_q, max_seqlen_k
    )
    scores = _scores_of(call, causal, scale)
    return_lse = flag(return_lse, "return_lse")
    margin = whole_number(sm_margin, "sm_margin", 0, LONGEST)
    row = _row_of("grouped_attention", call, implementation, backend)
    of_q = call.sizes["rows"] * call.sizes["Hq"]
    need = of_q * (call.sizes["D"] * numpy_dtype(call.dtype).itemsize + 4)
    with enough_memory(need, "grouped_attention_varlen", call.device.kind):
        outs, lses = row.launch(q_groups, k, v, groups, scores, implementation, margin)
    return (outs, lses) if return_lse else outs


def _scores_of(call: _Checked, causal: bool, scale: float | None) -> Scores:
    right = 0 if flag(causal, "causal") else -1
    return Scores(-1, right, 1 / math.sqrt(call.sizes["D"]) if scale is None else number(scale, "scale"), 0.0)


def _row_of(
    operation: str, call: _Checked, implementation: str | None, backend: str | None
) -> Implementation:
    """Choose who computes a call: if no implementation is asked for, by the first that a row has."""
    check_backend(backend)
    facts = {"dtype": call.dtype, "head_dim": call.sizes["D"], **requirements_of(call.device)}
    words = (
        IMPLEMENTATIONS
        if implementation is None
        else (choice(implementation, "implementation", IMPLEMENTATIONS),)
    )
    for word in words[:-1]:
        for row in rows(operation):
            if (
                row.device_kind == call.device.kind
                and backend in (None, row.backend)
                and not row.unsupported(facts | {"implementation": word})
            ):
                return row
    return choose(operation, call.device.kind, backend, implementation=words[-1], **facts)


def _check(
    q_groups: Sequence[Array],
    k: Array,
    v: Array,
    cu_seqlens_q_groups: Sequence[Array],
    cu_seqlens_k: Array,
    prefix_lens: Sequence[Array],
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
    **others: Sequence[Array],
) -> tuple[_Checked, Groups]:
    """Check the arrays of a call; `others` are lists of further arrays, one a group."""
    lists = {
        "q_groups": q_groups,
        "cu_seqlens_q_groups": cu_seqlens_q_groups,
        "prefix_lens": prefix_lens,
        **others,
    }
    for name, given in lists.items():
        if not isinstance(given, list | tuple):
            raise TypeError(f"{name} must be a list or tuple of arrays, got {type(given).__name__}")
        if len(given) != len(q_groups):
            raise ValueError(
                f"{name} has {len(given)} groups, q_groups {len(q_groups)}: they must be as many"
            )
    if not 1 <= len(q_groups) <= MOST_GROUPS:
        raise ValueError(f"q_groups has {len(q_groups)} groups: it must have 1 to {MOST_GROUPS}")
    named = {f"{name}[{g}]": array for name, given in lists.items() for g, array in enumerate(given)}
    named |= {"k": k, "v": v, "cu_seqlens_k": cu_seqlens_k}
    facts = tuple((name, dtype_name(x, name), x.shape, device_of(x, name)) for name, x in named.items())  # type: ignore[attr-defined]
    call = _checked(facts, len(q_groups))
    longest = [
        total if given is None else whole_number(given, name, 0, LONGEST)
        for given, name, total in (
            (max_seqlen_q, "max_seqlen_q", call.sizes["longest"]),
            (max_seqlen_k, "max_seqlen_k", call.sizes["total_k"]),
        )
    ]
    return call, Groups(tuple(cu_seqlens_q_groups), cu_seqlens_k, tuple(prefix_lens), *longest)


_PATTERNS: dict[str, tuple[str, ...]] = {
    "q_groups": ("rows {}", "Hq", "D"), "douts": ("rows {}", "Hq", "D"), "outs": ("rows {}", "Hq", "D"),
    "lses": ("Hq", "rows {}"), "cu_seqlens_q_groups": ("batch + 1",), "prefix_lens": ("batch",),
    "k": ("total_k", "Hk", "D"), "v": ("total_k", "Hk", "D"), "cu_seqlens_k": ("batch + 1",),
}  # fmt: skip
_DTYPES = {
    "lses": "float32",
    **dict.fromkeys(("cu_seqlens_q_groups", "cu_seqlens_k", "prefix_lens"), "int32"),
}


@lru_cache(maxsize=1024)
def _checked(facts: tuple[tuple[str, str, tuple[int, ...], Device], ...], number_of_groups: int) -> _Checked:
    shapes = {}
    kind = facts[0][1]
    for name, dtype, shape, _ in facts:
        argument, _, index = name.rstrip("]").partition("[")
        shapes[name] = shape, tuple(symbol.format(index) for symbol in _PATTERNS[argument])
        wanted = _DTYPES.get(argument, kind)
        if dtype != wanted:
            beside = "" if argument in _DTYPES else ", as q_groups[0] has"
            raise TypeError(f"{name} has dtype {dtype}; it must be {wanted}{beside}")
    sizes = match_shapes(shapes)
    if sizes["batch + 1"] != sizes["batch"] + 1:
        raise ValueError(
            f"prefix_lens[0] has {sizes['batch']} elements, cu_seqlens_k {sizes['batch + 1']}: for a batch "
            "of sequences they have batch and batch + 1"
        )
    if sizes["Hk"] == 0 or sizes["Hq"] % sizes["Hk"]:
        raise ValueError(
            f"q_groups[0] has {sizes['Hq']} heads: it must be a multiple of the {sizes['Hk']} heads of k and "
            "v, which must be at least one"
        )
    if sizes["D"] == 0:
        raise ValueError("q_groups[0] has D = 0: head_dim must be at least 1")
    of_groups = [sizes[f"rows {g}"] for g in range(number_of_groups)]
    sizes |= {"rows": sum(of_groups), "longest": max(of_groups)}
    return _Checked(sizes, kind, one_device({name: device for name, _, _, device in facts}))

"""Gradients of attention of several groups of queries that see prefixes of the same keys.

Each group is an ordinary call (see kvlab/ops/grouped.py, "separate"), or all are one ("paired"); what groups
give to the same keys is added up in float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from kvlab.arguments import LONGEST, flag, number, whole_number
from kvlab.arrays import Array, ArrayT
from kvlab.ops.array_kinds import Kind, dtype_of_kind, kinds_of
from kvlab.ops.attention_call import MAX_GROUPS
from kvlab.ops.grouped import (
    CPU,
    GPU,
    HOPPER,
    IMPLEMENTATIONS,
    GroupedArrays,
    GroupedCall,
    call_of,
    check_groups,
)
from kvlab.registry import ON_CUDA, ON_NUMBA, Implementation, register
from kvlab.shapes import match_shapes
from kvlab.torch_compile import opaque

__all__ = ["BACKWARD", "Results", "grouped_attention_varlen_backward", "names_of_results"]

BACKWARD = "grouped_attention_backward"
_HOPPER = HOPPER | {"head_dim": range(1, 129)}
_CUDA = GPU | ON_CUDA | {"implementation": IMPLEMENTATIONS}  # the only way where the forward's words get here
register(
    Implementation(BACKWARD, "cpu", "kvlab.ops.cpu.grouped:attend_backward", CPU),
    Implementation(
        BACKWARD, "reference", "kvlab.ops.reference.grouped:attend_backward",
        CPU | {"dtype": (*CPU["dtype"], "float64")},
    ),
    Implementation(BACKWARD, "cuda", "kvlab.ops.cuda.grouped_backward:attend_backward", _HOPPER),
    Implementation(BACKWARD, "cuda", "kvlab.ops.cuda.grouped_separate:attend_backward", _CUDA),
    Implementation(BACKWARD, "numba", "kvlab.ops.cuda.grouped_separate:attend_backward", GPU | ON_NUMBA),
)  # fmt: skip


class Results(NamedTuple):
    """What the forward gave, and the gradient of the loss with respect to it: lists, an array a group.

    `kinds` and `addresses` are those of all, named by `names_of_results`.
    """

    douts: Sequence[Any]
    outs: Sequence[Any]
    lses: Sequence[Any]
    kinds: tuple[Kind, ...]
    addresses: Sequence[int]


@lru_cache(maxsize=MAX_GROUPS)
def names_of_results(groups: int) -> tuple[str, ...]:
    """Names of douts, outs and lses, in order."""
    return tuple(f"{name}[{g}]" for name in ("douts", "outs", "lses") for g in range(groups))


@opaque
def grouped_attention_varlen_backward(
    douts: Sequence[ArrayT],
    q_groups: Sequence[Array],
    k: Array,
    v: Array,
    outs: Sequence[Array],
    lses: Sequence[Array],
    *,
    cu_seqlens_q_groups: Sequence[Array],
    cu_seqlens_k: Array,
    prefix_lens: Sequence[Array],
    causal: bool = True,
    scale: float | None = None,
    deterministic: bool = False,
    float32_dk_dv: bool = False,
    implementation: str | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    sm_margin: int = 0,
    backend: str | None = None,
) -> tuple[list[ArrayT], ArrayT, ArrayT]:
    """Gradients of `grouped_attention_varlen` with respect to q_groups, k and v.

    Parameters
    ----------
    douts : list of arrays, as q_groups
        Gradients of the loss with respect to outs.
    q_groups, k, v, cu_seqlens_q_groups, cu_seqlens_k, prefix_lens, causal, scale, max_seqlen_q, max_seqlen_k
        The arguments of the forward call.
    outs, lses : lists of arrays
        Its results, or those of attention over these keys and others.
    deterministic : bool
        Give the same bits every time. ``"cuda"`` is faster without, the others always do.
    float32_dk_dv : bool
        Return dk and dv in float32, for a sum over devices. Separate calls on a GPU round each group's part
        to the dtype of k, not their sum.
    implementation : str, optional
        As in the forward. ``"paired"`` and ``"listed"`` are one launch on compute capability 9.0, in
        16 bits and up to 128 channels: a tile of keys meets the rows of all groups; elsewhere on a GPU each
        group is a call. On a CPU the three are the same. By default paired where that is one launch, for
        arrays whose rows begin at multiples of 16 bytes, else separate.
    sm_margin : int
        As in `attention_backward`.
    backend : str, optional
        As in `kvlab.attention`.

    Returns
    -------
    dq_groups : list of arrays, shapes and dtype of q_groups
    dk, dv : array, (total_k, num_heads_kv, head_dim)
        0 for keys that no row sees.

    Raises
    ------
    ValueError, TypeError, NotImplementedError, kvlab.OutOfMemory
        As `grouped_attention_varlen`.

    Examples
    --------
    Two groups of one row that sees one key: dv is the sum of both douts.

    >>> import kvlab
    >>> import numpy as np
    >>> x, one, bounds = np.ones((1, 1, 2), np.float32), np.array([1], np.int32), np.array([0, 1], np.int32)
    >>> lengths = {"cu_seqlens_q_groups": [bounds] * 2, "cu_seqlens_k": bounds, "prefix_lens": [one] * 2}
    >>> outs, lses = kvlab.grouped_attention_varlen([x, x], x, x, return_lse=True, **lengths)
    >>> kvlab.grouped_attention_varlen_backward([x, 4 * x], [x, x], x, x, outs, lses, **lengths)[2].ravel()
    array([5., 5.], dtype=float32)
    """
    arrays = GroupedArrays(q_groups, k, v, cu_seqlens_q_groups, prefix_lens, cu_seqlens_k)
    call, addresses = call_of(
        BACKWARD, arrays, flag(causal, "causal"), None if scale is None else number(scale, "scale"),
        implementation, (max_seqlen_q, max_seqlen_k), whole_number(sm_margin, "sm_margin", 0, LONGEST),
        backend,
    )  # fmt: skip
    for name, results in (("douts", douts), ("outs", outs), ("lses", lses)):
        check_groups(name, results, q_groups)
    kinds, of_results = kinds_of([*douts, *outs, *lses], names_of_results(call.groups))
    _check_results(call, kinds)
    gradients: tuple[list[ArrayT], ArrayT, ArrayT] = call.row.launch(
        call, arrays, addresses, Results(douts, outs, lses, kinds, of_results),
        flag(deterministic, "deterministic"), flag(float32_dk_dv, "float32_dk_dv"),
    )  # fmt: skip
    return gradients


@lru_cache(maxsize=1024)
def _check_results(call: GroupedCall, kinds: tuple[Kind, ...]) -> None:
    shapes = {}
    for name, kind in zip(names_of_results(call.groups), kinds, strict=True):
        argument, _, index = name.rstrip("]").partition("[")
        rows = call.rows[int(index)]
        of_lse = argument == "lses"
        wanted, found = "float32" if of_lse else call.dtype, dtype_of_kind(kind, name)
        if found != wanted:
            raise TypeError(f"{name} has dtype {found}; it must be {wanted}")
        heads, dim = call.sizes["Hq"], call.sizes["D"]
        shapes[name] = kind[0], (heads, rows) if of_lse else (rows, heads, dim)
    match_shapes(shapes)

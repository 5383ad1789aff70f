"""Gradients of attention, over sequences of one length or of several.

The forward keeps no probabilities. The backward computes them again, tile by tile, from q, k and the
log-sum-exp of a row. So gradients need no memory that grows with the product of the lengths either [1]_.

The results of the forward are arguments. They may be those of attention over more keys than are given here,
as `merge_attention` gives them: then dk and dv are right for these keys, and dq is their share of the sum
over all parts. So gradients over a context that is spread over devices are computed part by part.

References
----------
.. [1] Dao, "FlashAttention-2", arXiv:2307.08691, 2023, algorithm 2.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvlab.arguments import LONGEST, flag, whole_number
from kvlab.arrays import Array, ArrayT
from kvlab.ops.attention import CUDA_REQUIREMENTS, NUMBA_REQUIREMENTS, REFERENCE_REQUIREMENTS, REQUIREMENTS
from kvlab.ops.attention_call import (
    BOUNDS,
    EVERYWHERE,
    FLOAT32_DK_DV,
    OF_K,
    OF_Q,
    RAGGED_K,
    RAGGED_Q,
    SM_MARGIN,
    Call,
    Options,
    Signature,
    call_of,
    checked_options,
    longest_of,
)
from kvlab.registry import Implementation, note_backend, register
from kvlab.torch_compile import opaque

__all__ = ["attention_backward", "attention_varlen_backward", "backward"]

_CPU = "kvlab.ops.cpu.attention_backward"

_FIXED = Signature("attention_backward", q=OF_Q, k=OF_K, v=OF_K, dout=OF_Q, out=OF_Q, lse=("B", "Hq", "Sq"))
_VARLEN = Signature(
    "attention_backward",
    q=RAGGED_Q, k=RAGGED_K, v=RAGGED_K, dout=RAGGED_Q, out=RAGGED_Q, lse=("Hq", "total_q"), **BOUNDS,
)  # fmt: skip

register(
    Implementation("attention_backward", "cpu", f"{_CPU}:attend_backward", REQUIREMENTS),
    Implementation(
        "attention_backward",
        "reference",
        "kvlab.ops.reference.attention_backward:attend_backward",
        REFERENCE_REQUIREMENTS,
    ),
    Implementation(
        "attention_backward", "cuda", "kvlab.ops.cuda.attention_backward:attend_backward", CUDA_REQUIREMENTS
    ),
    Implementation(
        "attention_backward", "numba", "kvlab.ops.numba.attention:attend_backward", NUMBA_REQUIREMENTS
    ),
)


@opaque
def attention_backward(
    dout: ArrayT,
    q: Array,
    k: Array,
    v: Array,
    out: Array,
    lse: Array,
    *,
    causal: bool = False,
    scale: float | None = None,
    window: tuple[int, int] = EVERYWHERE,
    softcap: float = 0.0,
    deterministic: bool = False,
    float32_dk_dv: bool = False,
    sm_margin: int = 0,
    backend: str | None = None,
) -> tuple[ArrayT, ArrayT, ArrayT]:
    """Gradients of `attention` with respect to q, k and v.

    Parameters
    ----------
    dout : array, (batch, seqlen_q, num_heads_q, head_dim)
        Gradient of the loss with respect to out.
    q, k, v, causal, scale, window, softcap
        The arguments of the forward call.
    out : array, (batch, seqlen_q, num_heads_q, head_dim)
    lse : float32 array, (batch, num_heads_q, seqlen_q)
        Its results, or those of attention over these keys and others. Of float64, too, lse is float32, so
        gradients are 1e-7 off.
    deterministic : bool
        Give the same bits every time. ``"cuda"`` is faster without, the others always do.
    float32_dk_dv : bool
        Give dk and dv as they are summed, in float32, so that parts of them from several devices can be
        added. ``"numba"`` does not for 16-bit inputs.
    sm_margin : int
        Multiprocessors left to other kernels, as in `attention`. Above 128 channels blocks work in pairs, so
        an odd number leaves one more, and take 1.1 to 1.6 times as long where any are left.
    backend : str, optional
        As in `attention`; sums are float32, over the query heads of a group too, ``"reference"`` float64.

    Returns
    -------
    dq, dk, dv : array
        Shapes and dtypes of q, k and v; kind and device of dout. 0 for rows that see no key, and for keys
        that no row sees.

    Raises
    ------
    ValueError, TypeError, NotImplementedError, kvlab.OutOfMemory
        As `attention`.

    Examples
    --------
    One key: whatever the scores, out is v, and its gradient is that of v.

    >>> import kvlab
    >>> import numpy as np
    >>> q, k, v = np.ones((3, 1, 1, 1, 2), np.float32)
    >>> out, lse = kvlab.attention(q, k, v, return_lse=True)
    >>> dq, dk, dv = kvlab.attention_backward(np.full_like(out, 5), q, k, v, out, lse)
    >>> dq.ravel(), dv.ravel()
    (array([0., 0.], dtype=float32), array([5., 5.], dtype=float32))
    """
    options = checked_options(causal, scale, window, softcap)
    extra = _extra(deterministic, float32_dk_dv, sm_margin)
    gradients: tuple[ArrayT, ArrayT, ArrayT] = backward(
        (q, k, v, dout, out, lse), None, options, extra, backend
    )
    return gradients


@opaque
def attention_varlen_backward(
    dout: ArrayT,
    q: Array,
    k: Array,
    v: Array,
    out: Array,
    lse: Array,
    cu_seqlens_q: Array,
    cu_seqlens_k: Array,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    causal: bool = False,
    scale: float | None = None,
    window: tuple[int, int] = EVERYWHERE,
    softcap: float = 0.0,
    deterministic: bool = False,
    float32_dk_dv: bool = False,
    sm_margin: int = 0,
    backend: str | None = None,
) -> tuple[ArrayT, ArrayT, ArrayT]:
    """Gradients of `attention_varlen` with respect to q, k and v.

    Parameters
    ----------
    dout, out : array, (total_q, num_heads_q, head_dim)
    lse : float32 array, (num_heads_q, total_q)
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal, scale, window, softcap
        The arguments of the forward call.
    deterministic, float32_dk_dv, sm_margin, backend
        As in `attention_backward`, as is the meaning of out and lse.

    Returns
    -------
    dq, dk, dv : array
        Shapes and dtypes of q, k and v; kind and device of dout.

    Raises
    ------
    ValueError, TypeError, NotImplementedError
        As `attention_varlen`.

    Examples
    --------
    Two sequences of one key each.

    >>> import kvlab
    >>> import numpy as np
    >>> q, k, v = np.ones((3, 2, 1, 2), np.float32)
    >>> lengths = np.arange(3, dtype=np.int32), np.arange(3, dtype=np.int32), 1, 1
    >>> out, lse = kvlab.attention_varlen(q, k, v, *lengths, return_lse=True)
    >>> dout = np.array([[[1, 2]], [[3, 4]]], np.float32)
    >>> kvlab.attention_varlen_backward(dout, q, k, v, out, lse, *lengths)[2][:, 0]
    array([[1., 2.],
           [3., 4.]], dtype=float32)
    """
    options, longest = checked_options(causal, scale, window, softcap), longest_of(max_seqlen_q, max_seqlen_k)
    arrays = q, k, v, dout, out, lse, cu_seqlens_q, cu_seqlens_k
    extra = _extra(deterministic, float32_dk_dv, sm_margin)
    gradients: tuple[ArrayT, ArrayT, ArrayT] = backward(arrays, longest, options, extra, backend)
    return gradients


def backward(
    arrays: Sequence[Any],
    longest: tuple[int, int] | None,
    options: Options,
    extra: int,
    backend: str | None = None,
) -> Any:
    """Gradients, given q, k, v, dout, out, lse and, with `longest`, cu_seqlens; numbers are checked, and
    `extra` is that of a `Call`."""
    call, addresses = call_of(signature_of(longest), arrays, backend, options, longest, extra)
    return compute(call, addresses, arrays)


def signature_of(longest: tuple[int, int] | None) -> Signature:
    """Return the signature of calls of fixed length, where there is no longest one, or of variable length."""
    return _FIXED if longest is None else _VARLEN


def compute(call: Call, addresses: Sequence[int], arrays: Sequence[Any]) -> Any:
    """`backward`, of a call that is known."""
    if call.row.backend == "cuda":
        try:  # the workspace too is allocated before any launch
            found = call.row.function(call, addresses)
        except Exception as error:
            call.memory.explain(error)
            raise
        note_backend("cuda")
        return found
    extra = call.extra
    if extra & FLOAT32_DK_DV and call.row.backend == "numba" and call.dtype != "float32":
        raise NotImplementedError(
            f"float32_dk_dv=True: backend 'numba' gives dk and dv in the dtype of {call.dtype} inputs; use "
            "backend 'cuda', or pass float32"
        )
    with call.memory:
        q, k, v, dout, out, lse = arrays[:6]
        sequences = call.sequences(arrays)
        flags = bool(extra & 1), bool(extra & FLOAT32_DK_DV)
        return call.row.launch(dout, q, k, v, out, lse, sequences, call.scores, *flags)


def _extra(deterministic: bool, float32_dk_dv: bool, sm_margin: int) -> int:
    """Check options of gradients alone; return them as `Call.extra`."""
    extra = flag(deterministic, "deterministic") + FLOAT32_DK_DV * flag(float32_dk_dv, "float32_dk_dv")
    return extra + SM_MARGIN * whole_number(sm_margin, "sm_margin", 0, LONGEST)

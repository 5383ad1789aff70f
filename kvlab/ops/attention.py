"""Attention over sequences of one length or of several, and the merge of partial results.

Softmax over all keys is a weighted mean of softmaxes over disjoint parts, with weights known from the parts'
log-sum-exps. So a kernel may go through the keys tile by tile and keep no score, and attention may be
computed part by part (pages of different widths, splits of a long context, the shards of a ring of devices)
and merged with no error but rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from kvlab.arguments import LONGEST, flag, whole_number
from kvlab.arrays import Array, ArrayT, check_writable, common_device, dtype_name
from kvlab.new_arrays import on_device_of
from kvlab.ops.attention_call import (
    BOUNDS,
    EVERYWHERE,
    OF_K,
    OF_Q,
    RAGGED_K,
    RAGGED_Q,
    Call,
    Options,
    Signature,
    call_of,
    checked_options,
    longest_of,
)
from kvlab.registry import (
    ON_CUDA,
    ON_NUMBA,
    AtLeast,
    Implementation,
    choose,
    note_backend,
    register,
    requirements_of,
    rows,
)
from kvlab.shapes import match_shapes
from kvlab.torch_compile import opaque

__all__ = ["attend", "attention", "attention_varlen", "merge_attention", "merge_into"]

_FLOATS = ("float16", "bfloat16", "float32")
REQUIREMENTS: dict[str, Any] = {"dtype": _FLOATS, "head_dim": AtLeast(1)}
REFERENCE_REQUIREMENTS: dict[str, Any] = {"dtype": (*_FLOATS, "float64"), "head_dim": AtLeast(1)}
_GPU_REQUIREMENTS: dict[str, Any] = {"dtype": _FLOATS, "head_dim": range(1, 257)}
CUDA_REQUIREMENTS, NUMBA_REQUIREMENTS = _GPU_REQUIREMENTS | ON_CUDA, _GPU_REQUIREMENTS | ON_NUMBA

# Pattern of an out and of its lse, by the number of dimensions of the out.
_LAYOUTS = {
    4: (("B", "Sq", "Hq", "D"), ("B", "Hq", "Sq")),
    3: (("total_q", "Hq", "D"), ("Hq", "total_q")),
}

register(
    Implementation("attention", "cpu", "kvlab.ops.cpu.attention:attend", REQUIREMENTS),
    Implementation("attention", "reference", "kvlab.ops.reference.attention:attend", REFERENCE_REQUIREMENTS),
    Implementation("attention", "cuda", "kvlab.ops.cuda.attention:attend", CUDA_REQUIREMENTS),
    Implementation("attention", "numba", "kvlab.ops.numba.attention:attend", NUMBA_REQUIREMENTS),
    Implementation(
        "attention_into",
        "cuda",
        "kvlab.ops.cuda.attention:attend_into",
        {"dtype": _FLOATS[:2], "head_dim": range(1, 257), "compute_capability": ((9, 0),)},
    ),
    Implementation("merge_attention", "cpu", "kvlab.ops.cpu.attention:merge", {"dtype": _FLOATS}),
    Implementation(
        "merge_attention", "cuda", "kvlab.ops.cuda.attention_merge:merge", {"dtype": _FLOATS} | ON_CUDA
    ),
    Implementation("merge_attention", "reference", "kvlab.ops.reference.attention:merge", {"dtype": _FLOATS}),
)


_FIXED = Signature("attention", q=OF_Q, k=OF_K, v=OF_K)
_VARLEN = Signature("attention", q=RAGGED_Q, k=RAGGED_K, v=RAGGED_K, **BOUNDS)
_INTO = Signature(
    "attention", q=RAGGED_Q, k=RAGGED_K, v=RAGGED_K,
    **dict(zip(("into[0]", "into[1]"), _LAYOUTS[3], strict=True)), **BOUNDS,
)  # fmt: skip


@opaque
def attention(
    q: ArrayT,
    k: Array,
    v: Array,
    *,
    causal: bool = False,
    scale: float | None = None,
    window: tuple[int, int] = EVERYWHERE,
    softcap: float = 0.0,
    return_lse: bool = False,
    sm_margin: int = 0,
    backend: str | None = None,
) -> ArrayT | tuple[ArrayT, ArrayT]:
    """Scaled dot-product attention over sequences of one length.

    out = softmax(scale * q k^T) v for every head [1]_; query head h reads KV head
    h // (num_heads_q // num_heads_kv) [2]_. Keys are read tile by tile and no score is kept [3]_, so memory
    beyond the result does not grow with the lengths. The mask is aligned to the end: the last query row
    stands at the last key.

    Parameters
    ----------
    q : array, (batch, seqlen_q, num_heads_q, head_dim)
        float16, bfloat16 or float32; any strides. float64 runs on ``"reference"`` alone, slowly and on the
        CPU. On a GPU head_dim is at most 256.
    k, v : array, (batch, seqlen_k, num_heads_kv, head_dim)
        Dtype and device of q. On a GPU the last axis must be contiguous.
    causal : bool
        Hide the keys after a row's own position.
    scale : float, optional
        Factor on the scores; 1 / sqrt(head_dim) if not given.
    window : (int, int)
        How many keys before and after its own position a row sees; -1 means no limit.
    softcap : float
        If positive, scores are softcap * tanh(score / softcap).
    return_lse : bool
        Also return the log-sum-exp of the scores.
    sm_margin : int
        Multiprocessors that a GPU's persistent blocks leave to other kernels, such as those that communicate;
        kernels without such blocks (the CPU's, and those of GPUs other than Hopper) have nothing to leave.
    backend : str, optional
        ``"cpu"``, ``"cuda"`` and ``"numba"`` (Numba CUDA, for reading) compute in float32 from the inputs as
        they are, ``"cuda"`` with probabilities in the dtype of q; ``"reference"`` in float64. By default the
        fastest on the device.

    Returns
    -------
    out : array, (batch, seqlen_q, num_heads_q, head_dim)
        Kind, dtype and device of q; 0 for rows that see no key.
    lse : float32 array, (batch, num_heads_q, seqlen_q), only if return_lse
        Natural logarithm; -inf for rows that see no key. `merge_attention` joins parts with it.

    Raises
    ------
    ValueError
        If shapes do not fit, num_heads_q is no multiple of num_heads_kv, window or softcap is out of range,
        or arrays are on different devices.
    TypeError
        If an argument is no array, or q, k and v are not of one dtype.
    NotImplementedError
        If no backend on the device supports the call; the message says what would.
    kvlab.OutOfMemory
        If the results do not fit into memory (`kvlab.device.estimate` says what a call takes).

    References
    ----------
    .. [1] Vaswani et al., "Attention is all you need", 2017, equation 1.
    .. [2] Ainslie et al., "GQA", arXiv:2305.13245, 2023.
    .. [3] Dao, "FlashAttention-2", arXiv:2307.08691, 2023, algorithm 1.

    Examples
    --------
    Two query rows, one key: the causal mask leaves the first row without a key.

    >>> import kvlab
    >>> import numpy as np
    >>> q, k, v = (np.full((1, rows, 1, 4), x, np.float32) for rows, x in ((2, 1), (1, 1), (1, 7)))
    >>> out, lse = kvlab.attention(q, k, v, causal=True, return_lse=True)
    >>> out[0, :, 0, 0], lse[0, 0]
    (array([0., 7.], dtype=float32), array([-inf,   2.], dtype=float32))
    """
    options = checked_options(causal, scale, window, softcap)
    return_lse = flag(return_lse, "return_lse")
    sm_margin = whole_number(sm_margin, "sm_margin", 0, LONGEST)
    result: ArrayT | tuple[ArrayT, ArrayT] = attend((q, k, v), None, options, return_lse, sm_margin, backend)
    return result


@opaque
def attention_varlen(
    q: ArrayT,
    k: Array,
    v: Array,
    cu_seqlens_q: Array,
    cu_seqlens_k: Array,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    causal: bool = False,
    scale: float | None = None,
    window: tuple[int, int] = EVERYWHERE,
    softcap: float = 0.0,
    return_lse: bool = False,
    sm_margin: int = 0,
    into: tuple[ArrayT, ArrayT] | None = None,
    backend: str | None = None,
) -> ArrayT | tuple[ArrayT, ArrayT]:
    """Scaled dot-product attention over sequences of different lengths, laid end to end.

    Sequence b has the query rows from cu_seqlens_q[b] up to cu_seqlens_q[b + 1] and the keys from
    cu_seqlens_k[b] up to cu_seqlens_k[b + 1]; either may be empty. The mask is aligned within each sequence.

    Parameters
    ----------
    q : array, (total_q, num_heads_q, head_dim)
    k, v : array, (total_k, num_heads_kv, head_dim)
    cu_seqlens_q, cu_seqlens_k : int32 array, (batch + 1,)
        Prefix sums of the lengths: 0, ..., total; on the device of q. A GPU does not check their values.
    max_seqlen_q, max_seqlen_k : int
        At least the longest length.
    causal, scale, window, softcap, return_lse, sm_margin, backend
        As in `attention`, as are dtypes.
    into : (out, lse), optional
        Results of these queries over other keys, float32, (total_q, num_heads_q, head_dim) and (num_heads_q,
        total_q), writable. What these keys give is merged into them in place, as `merge_attention` does, and
        they are what is returned. Where lse is -inf, no key has been seen yet and what out holds is not
        read. On compute capability 9.0 in 16 bits the kernel of attention does it, without a soft cap.

    Returns
    -------
    out : array, (total_q, num_heads_q, head_dim)
    lse : float32 array, (num_heads_q, total_q), only if return_lse or into

    Raises
    ------
    ValueError
        As `attention`; on the CPU also if cu_seqlens do not rise from 0 to the total, or hold a sequence that
        is longer than max_seqlen.
    TypeError, NotImplementedError
        As `attention`.

    Examples
    --------
    Three sequences with 1, 0 and 1 query rows and 2, 1 and 0 keys.

    >>> import kvlab
    >>> import numpy as np
    >>> q, k = np.ones((2, 1, 4), np.float32), np.zeros((3, 1, 4), np.float32)
    >>> v = np.arange(12, dtype=np.float32).reshape(3, 1, 4)
    >>> bounds = np.array([[0, 1, 1, 2], [0, 2, 3, 3]], np.int32)
    >>> kvlab.attention_varlen(q, k, v, *bounds, 1, 2)[:, 0]
    array([[2., 3., 4., 5.],
           [0., 0., 0., 0.]], dtype=float32)

    Keys come in two parts, of one key and of two: the first row sees a key of each.

    >>> out, lse = np.zeros((2, 1, 4), np.float32), np.full((1, 2), -np.inf, np.float32)
    >>> for keys, bounds_k in ((slice(1), [0, 1, 1, 1]), (slice(1, 3), [0, 1, 1, 2])):
    ...     lengths = bounds[0], np.array(bounds_k, np.int32), 1, 1
    ...     out, lse = kvlab.attention_varlen(q, k[keys], v[keys], *lengths, into=(out, lse))
    >>> out[:, 0, 0], np.exp(lse).round()
    (array([2., 8.], dtype=float32), array([[2., 1.]], dtype=float32))
    """
    options, longest = checked_options(causal, scale, window, softcap), longest_of(max_seqlen_q, max_seqlen_k)
    arrays = q, k, v, cu_seqlens_q, cu_seqlens_k
    return_lse = flag(return_lse, "return_lse")
    sm_margin = whole_number(sm_margin, "sm_margin", 0, LONGEST)
    if into is not None:
        _attend_into(into, arrays, longest, options, sm_margin, backend)
        return into
    result: ArrayT | tuple[ArrayT, ArrayT] = attend(arrays, longest, options, return_lse, sm_margin, backend)
    return result


def _attend_into(
    into: tuple[Any, Any],
    arrays: tuple[Any, ...],
    longest: tuple[int, int],
    options: Options,
    sm_margin: int,
    backend: str | None,
) -> None:
    """Merge attention into results over other keys, by one kernel where there is one."""
    if not isinstance(into, tuple | list) or len(into) != 2:
        raise TypeError(f"into must be a tuple of two arrays, out and lse, got {type(into).__name__}")
    all_arrays = *arrays[:3], *into, *arrays[3:]
    call, addresses = call_of(_INTO, all_arrays, backend, options, longest, sm_margin)
    for i, x in enumerate(into):
        check_writable(x, f"into[{i}]")
    row = _row_into(call)
    if row is not None and row.launch(call, addresses):
        return
    found = attend(arrays, longest, options, True, sm_margin, backend)
    merge_into(into, found, call.row.backend)


def merge_into(into: tuple[Any, Any], found: tuple[Any, Any], backend: str) -> None:
    """Merge out and lse, float32, in place with those over other keys, by the backend that computed these."""
    kind = backend if backend in ("reference", "cpu", "cuda") else None
    with on_device_of(into[0]):
        merged = merge_attention((into[0], _float32(found[0])), (into[1], _float32(found[1])), backend=kind)
        for x, new in zip(into, merged, strict=True):
            x[...] = new


@lru_cache(maxsize=4096)
def _row_into(call: Call) -> Implementation | None:
    """Find what attends and merges at once; None where two launchers do it one after the other."""
    requirements = {"dtype": call.dtype, "head_dim": call.sizes["D"], **requirements_of(call.device)}
    for row in rows("attention_into"):
        if (row.backend, row.device_kind) == (call.row.backend, call.device.kind):
            return None if row.unsupported(requirements) else row
    return None


def _float32(x: Any) -> Any:
    return x.float() if hasattr(x, "float") else x.astype("float32")


def attend(
    arrays: Sequence[Any],
    longest: tuple[int, int] | None,
    options: Options,
    return_lse: bool,
    sm_margin: int = 0,
    backend: str | None = None,
) -> Any:
    """`attention` of q, k and v, or with `longest` `attention_varlen`; numbers and flags are checked."""
    call, addresses = call_of(signature_of(longest), arrays, backend, options, longest, sm_margin)
    return compute(call, addresses, arrays, return_lse)


def signature_of(longest: tuple[int, int] | None) -> Signature:
    """Return the signature of calls of fixed length, where there is no longest one, or of variable length."""
    return _FIXED if longest is None else _VARLEN


def compute(call: Call, addresses: Sequence[int], arrays: Sequence[Any], return_lse: bool) -> Any:
    """`attend`, of a call that is known."""
    if call.row.backend == "cuda":
        try:  # takes no time, as `with` and `launch` do
            out, lse = call.row.function(call, addresses, return_lse)
        except Exception as error:
            call.memory.explain(error)
            raise
        note_backend("cuda")
    else:
        with call.memory:
            out, lse = call.row.launch(*arrays[:3], call.sequences(arrays), call.scores)
    return (out, lse) if return_lse else out


@opaque
def merge_attention(
    outs: Sequence[ArrayT], lses: Sequence[Array], *, backend: str | None = None
) -> tuple[ArrayT, ArrayT]:
    """Merge attention over disjoint parts of the keys into attention over all of them.

    With lse = log sum_i exp lse_i, out = sum_i exp(lse_i - lse) out_i: the merge is exact up to rounding,
    whatever the parts, their order and their grouping [1]_. A part in which a row saw no key (lse_i = -inf)
    adds nothing to that row, whatever its out_i holds; a row that saw no key in any part gives out 0 and lse
    -inf.

    Parameters
    ----------
    outs : sequence of arrays
        Outputs of the parts, each (batch, seqlen_q, num_heads_q, head_dim) or (total_q, num_heads_q,
        head_dim); float16, bfloat16 or float32, all the same.
    lses : sequence of arrays
        Their log-sum-exps, each float32, (batch, num_heads_q, seqlen_q) or (num_heads_q, total_q).
    backend : str, optional
        ``"cpu"`` and ``"cuda"`` compute in float32, ``"reference"`` in float64; by default the fastest on the
        arrays' device.

    Returns
    -------
    out : array
        Shape and dtype of one of the outs; kind and device of the first.
    lse : array
        float32, shape of one of the lses.

    Raises
    ------
    ValueError
        If there is no part, outs and lses differ in number, shapes do not fit, or arrays are on different
        devices.
    TypeError
        If an argument is no array, or dtypes are not as above.
    NotImplementedError
        If no backend on the arrays' device supports the call; on a GPU also if the last axis of an out is not
        contiguous, or there are more than 32 parts.

    References
    ----------
    .. [1] Milakov and Gimelshein, "Online normalizer calculation for softmax", arXiv:1805.02867, 2018,
       section 3.1.

    Examples
    --------
    A part of one key and a part of three, all scores zero: the weights are 1/4 and 3/4.

    >>> import kvlab
    >>> import numpy as np
    >>> outs = [np.full((1, 1, 1), value, np.float16) for value in (4, 8)]
    >>> lses = [np.log(np.full((1, 1), keys, np.float32)) for keys in (1, 3)]
    >>> out, lse = kvlab.merge_attention(outs, lses)
    >>> out.item(), round(np.exp(lse.item()))
    (7.0, 4)
    """
    _check_parts(outs, lses)
    device = common_device(_named("outs", outs) | _named("lses", lses))
    row = choose(
        "merge_attention", device.kind, backend, dtype=dtype_name(outs[0]), **requirements_of(device)
    )
    merged: tuple[ArrayT, ArrayT] = row.launch(outs, lses)
    return merged


def _named(name: str, arrays: Sequence[Array]) -> dict[str, Any]:
    return {f"{name}[{i}]": array for i, array in enumerate(arrays)}


def _check_parts(outs: Sequence[Array], lses: Sequence[Array]) -> None:
    for name, parts in (("outs", outs), ("lses", lses)):
        if not isinstance(parts, list | tuple):
            raise TypeError(f"{name} must be a list or tuple of arrays, got {type(parts).__name__}")
    if len(outs) == 0 or len(outs) != len(lses):
        raise ValueError(f"outs has {len(outs)} parts, lses {len(lses)}: pass equally many, at least one")
    named_outs, named_lses = _named("outs", outs), _named("lses", lses)
    kind = dtype_name(outs[0], "outs[0]")
    for name, array in (named_outs | named_lses).items():
        wanted = kind if name in named_outs else "float32"
        if dtype_name(array, name) != wanted:
            raise TypeError(f"{name} has dtype {dtype_name(array)}; it must be {wanted}")
    shape = tuple(named_outs["outs[0]"].shape)
    if len(shape) not in _LAYOUTS:
        raise ValueError(
            f"outs[0] has shape {shape}; it must have dimensions (B, Sq, Hq, D) or (total_q, Hq, D)"
        )
    out_pattern, lse_pattern = _LAYOUTS[len(shape)]
    match_shapes(
        {name: (out.shape, out_pattern) for name, out in named_outs.items()}
        | {name: (lse.shape, lse_pattern) for name, lse in named_lses.items()}
    )

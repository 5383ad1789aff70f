"""Attention over sequences of one length or of several, and the merge of partial results.

Softmax over all keys is a weighted mean of softmaxes over disjoint parts, with weights known from the parts'
log-sum-exps. So a kernel may go through the keys tile by tile and keep no score, and attention may be
computed part by part (pages of different widths, splits of a long context, the shards of a ring of devices)
and merged with no error but rounding.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from kvlab.arguments import LONGEST, flag, number, sides_of_window, whole_number
from kvlab.arrays import (
    Array,
    ArrayT,
    Device,
    common_device,
    device_of,
    dtype_name,
    numpy_dtype,
    one_device,
)
from kvlab.device import enough_memory
from kvlab.registry import (
    ON_CUDA,
    ON_NUMBA,
    AtLeast,
    Implementation,
    check_backend,
    choose,
    register,
    requirements_of,
)
from kvlab.shapes import match_shapes

__all__ = [
    "Checked",
    "Patterns",
    "Scores",
    "Sequences",
    "attention",
    "attention_varlen",
    "check_call",
    "merge_attention",
    "scores_of",
    "sequences_of",
]

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
    Implementation(
        "attention", "reference", "kvlab.ops.cpu.attention:attend_reference", REFERENCE_REQUIREMENTS
    ),
    Implementation("attention", "cuda", "kvlab.ops.cuda.attention:attend", CUDA_REQUIREMENTS),
    Implementation("attention", "numba", "kvlab.ops.numba.attention:attend", NUMBA_REQUIREMENTS),
    Implementation("merge_attention", "cpu", "kvlab.ops.cpu.attention:merge", {"dtype": _FLOATS}),
    Implementation(
        "merge_attention", "cuda", "kvlab.ops.cuda.attention_merge:merge", {"dtype": _FLOATS} | ON_CUDA
    ),
    Implementation(
        "merge_attention", "reference", "kvlab.ops.cpu.attention:merge_reference", {"dtype": _FLOATS}
    ),
)


Patterns = tuple[tuple[str, tuple[str, ...]], ...]
OF_Q, OF_K = ("B", "Sq", "Hq", "D"), ("B", "Sk", "Hk", "D")
_FIXED: Patterns = (("q", OF_Q), ("k", OF_K), ("v", OF_K))
RAGGED_Q, RAGGED_K = ("total_q", "Hq", "D"), ("total_k", "Hk", "D")
BOUNDS: Patterns = (("cu_seqlens_q", ("batch + 1",)), ("cu_seqlens_k", ("batch + 1",)))
_VARLEN: Patterns = (("q", RAGGED_Q), ("k", RAGGED_K), ("v", RAGGED_K), *BOUNDS)

_DTYPE_OF = {"lse": "float32", "cu_seqlens_q": "int32", "cu_seqlens_k": "int32"}
"""Arrays that have a dtype of their own; all others have that of q."""


class Checked(NamedTuple):
    """What follows from the arrays of a call: who computes it, the value of each symbol, where, in what."""

    row: Implementation
    sizes: dict[str, int]
    dtype: str
    device: Device


class Sequences(NamedTuple):
    """Where the sequences of a variable-length call lie; `max_q` and `max_k` are at least the longest."""

    cu_q: Array
    cu_k: Array
    max_q: int
    max_k: int


class Scores(NamedTuple):
    """Which keys a row sees and how it scores them, defaults resolved.

    A row at position p sees the keys from p - left to p + right; -1 means no limit.
    """

    left: int
    right: int
    scale: float
    softcap: float


def attention(
    q: ArrayT,
    k: Array,
    v: Array,
    *,
    causal: bool = False,
    scale: float | None = None,
    window: tuple[int, int] = (-1, -1),
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
        float16, bfloat16 or float32 (``"reference"`` takes float64, too); any strides. On a GPU head_dim is
        at most 256.
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
    call = check_call("attention", _FIXED, (q, k, v), backend)
    scores = scores_of(call.sizes["D"], causal, scale, window, softcap)
    return _attend(call, q, k, v, None, scores, flag(return_lse, "return_lse"), _margin_of(sm_margin))


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
    window: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    return_lse: bool = False,
    sm_margin: int = 0,
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

    Returns
    -------
    out : array, (total_q, num_heads_q, head_dim)
    lse : float32 array, (num_heads_q, total_q), only if return_lse

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
    """
    call = check_call("attention", _VARLEN, (q, k, v, cu_seqlens_q, cu_seqlens_k), backend)
    sequences = sequences_of(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    scores = scores_of(call.sizes["D"], causal, scale, window, softcap)
    return_lse = flag(return_lse, "return_lse")
    return _attend(call, q, k, v, sequences, scores, return_lse, _margin_of(sm_margin))


def sequences_of(cu_seqlens_q: Array, cu_seqlens_k: Array, max_seqlen_q: int, max_seqlen_k: int) -> Sequences:
    """Check the lengths beside the prefix sums, which `check_call` has checked."""
    longest = ((max_seqlen_q, "max_seqlen_q"), (max_seqlen_k, "max_seqlen_k"))
    return Sequences(
        cu_seqlens_q, cu_seqlens_k, *(whole_number(value, name, 0, LONGEST) for value, name in longest)
    )


def scores_of(
    head_dim: int, causal: bool, scale: float | None, window: tuple[int, int], softcap: float
) -> Scores:
    """Check mask and score options, and resolve their defaults."""
    left, right = sides_of_window(window)
    scale = 1 / math.sqrt(head_dim) if scale is None else number(scale, "scale")
    return Scores(left, 0 if flag(causal, "causal") else right, scale, number(softcap, "softcap", least=0))


def _margin_of(sm_margin: int) -> int:
    """Check how many multiprocessors to leave to others."""
    return whole_number(sm_margin, "sm_margin", 0, LONGEST)


def _attend(
    call: Checked,
    q: ArrayT,
    k: Array,
    v: Array,
    sequences: Sequences | None,
    scores: Scores,
    return_lse: bool,
    sm_margin: int,
) -> ArrayT | tuple[ArrayT, ArrayT]:
    sizes = call.sizes
    rows = (sizes["B"] * sizes["Sq"] if sequences is None else sizes["total_q"]) * sizes["Hq"]
    need = rows * (sizes["D"] * numpy_dtype(call.dtype).itemsize + 4)
    margin = {"sm_margin": sm_margin} if sm_margin and call.row.backend == "cuda" else {}
    with enough_memory(need, "attention", call.device.kind):
        result: tuple[ArrayT, ArrayT] = call.row.launch(q, k, v, sequences, scores, **margin)
    return result if return_lse else result[0]


def check_call(operation: str, patterns: Patterns, arrays: Sequence[Array], backend: str | None) -> Checked:
    """Check the arrays of a call, and choose who computes it.

    The answer follows from shapes, dtypes and devices, and calls repeat these. So the answer is cached: a new
    check takes the host longer than a short kernel runs.

    Parameters
    ----------
    operation : str
    patterns : tuple of (argument name, symbols of its shape)
        One for each array.
    arrays : sequence of arrays
    backend : str, optional
        As the caller gave it.
    """
    facts = tuple(
        [
            (dtype_name(array, name), array.shape, device_of(array, name))  # type: ignore[attr-defined]
            for array, (name, _) in zip(arrays, patterns, strict=True)
        ]
    )
    check_backend(backend)
    return _checked(operation, patterns, facts, backend)


@lru_cache(maxsize=4096)
def _checked(
    operation: str,
    patterns: Patterns,
    facts: tuple[tuple[str, tuple[int, ...], Device], ...],
    backend: str | None,
) -> Checked:
    named = {name: fact for (name, _), fact in zip(patterns, facts, strict=True)}
    sizes = match_shapes({name: (named[name][1], pattern) for name, pattern in patterns})
    if sizes.get("batch + 1") == 0:
        raise ValueError("cu_seqlens_q is empty: it must have batch + 1 elements, [0] for no sequence")
    if sizes["Hk"] == 0 or sizes["Hq"] % sizes["Hk"]:
        raise ValueError(
            f"q has {sizes['Hq']} heads: it must be a multiple of the {sizes['Hk']} heads of k and v, "
            "which must be at least one"
        )
    if sizes["D"] == 0:
        raise ValueError("q has D = 0: head_dim must be at least 1")
    kind = named["q"][0]
    for name, (dtype, _, _) in named.items():
        if name in _DTYPE_OF and dtype != _DTYPE_OF[name]:
            raise TypeError(f"{name} has dtype {dtype}; it must be {_DTYPE_OF[name]}")
        if name not in _DTYPE_OF and dtype != kind:
            raise TypeError(f"{name} has dtype {dtype}, q has {kind}: they must be the same")
    device = one_device({name: device for name, (_, _, device) in named.items()})
    row = choose(operation, device.kind, backend, dtype=kind, head_dim=sizes["D"], **requirements_of(device))
    return Checked(row, sizes, kind, device)


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

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

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

from kvlab.arguments import LONGEST, choice, flag, number, whole_number
from kvlab.arrays import Array, ArrayT, Device, check_writable, numpy_dtype, one_device
from kvlab.device import enough_memory
from kvlab.ops.array_kinds import Kind, device_of_kind, dtype_of_kind, kinds_of, view_of
from kvlab.ops.attention import merge_into
from kvlab.ops.attention_call import MAX_GROUPS, Scores, scores_of
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
from kvlab.shapes import check_heads, match_shapes
from kvlab.torch_compile import opaque
from kvlab.views import CudaView

__all__ = [
    "CPU",
    "GPU",
    "HOPPER",
    "IMPLEMENTATIONS",
    "GroupedArrays",
    "GroupedCall",
    "call_of",
    "check_groups",
    "grouped_attention_varlen",
]

IMPLEMENTATIONS: tuple[str, ...] = ("paired", "listed", "separate")

_FLOATS = ("float16", "bfloat16", "float32")
CPU: dict[str, Any] = {"dtype": _FLOATS, "head_dim": AtLeast(1), "implementation": IMPLEMENTATIONS}
GPU: dict[str, Any] = {"dtype": _FLOATS, "head_dim": range(1, 257), "implementation": ("separate",)}
HOPPER: dict[str, Any] = {
    "dtype": _FLOATS[:2], "head_dim": range(1, 257), "implementation": IMPLEMENTATIONS[:2],
    "compute_capability": ((9, 0),),
}  # fmt: skip

_FORWARD = "grouped_attention"
register(
    Implementation(_FORWARD, "cpu", "kvlab.ops.cpu.grouped:attend", CPU),
    Implementation(
        _FORWARD, "reference", "kvlab.ops.reference.grouped:attend",
        CPU | {"dtype": (*_FLOATS, "float64")},
    ),
    Implementation(_FORWARD, "cuda", "kvlab.ops.cuda.grouped:attend", HOPPER),
    Implementation(_FORWARD, "cuda", "kvlab.ops.cuda.grouped_separate:attend", GPU | ON_CUDA),
    Implementation(_FORWARD, "numba", "kvlab.ops.cuda.grouped_separate:attend", GPU | ON_NUMBA),
    Implementation("grouped_attention_into", "cuda", "kvlab.ops.cuda.grouped:attend_into", HOPPER),
)  # fmt: skip


class GroupedArrays(NamedTuple):
    """The arrays of a call; lists have one for each group."""

    q_groups: Sequence[Any]
    k: Any
    v: Any
    cu_q: Sequence[Any]
    prefix_lens: Sequence[Any]
    cu_k: Any
    segments: Any = None
    into: Any = None

    def named(self) -> tuple[list[Any], tuple[str, ...]]:
        """Return all arrays, in order, and their names."""
        rest = [] if self.segments is None else [self.segments]
        for arrays in self.into or ():
            rest += arrays
        arrays = [*self.q_groups, self.k, self.v, *self.cu_q, *self.prefix_lens, self.cu_k, *rest]
        return arrays, _names_of(len(self.q_groups), self.segments is not None, self.into is not None)


@lru_cache(maxsize=4 * MAX_GROUPS)
def _names_of(groups: int, has_table: bool, merges: bool) -> tuple[str, ...]:
    q, cu_q, lens, outs, lses = (
        [f"{name}[{g}]" for g in range(groups)]
        for name in ("q_groups", "cu_seqlens_q_groups", "prefix_lens", "into[0]", "into[1]")
    )
    table, into = ["segment_table"] * has_table, [*outs, *lses] * merges
    return (*q, "k", "v", *cu_q, *lens, "cu_seqlens_k", *table, *into)


@dataclass(frozen=True, eq=False)
class GroupedCall:
    """What follows from the arguments of a call apart from addresses; equal calls are one object.

    `implementation` is None where the caller leaves the choice; `longest`, the longest sequence of any group
    and of k, are totals where he does not know. Without `return_lse` launchers may return no lses.
    """

    row: Implementation
    sizes: Mapping[str, int]
    dtype: str
    device: Device
    kinds: tuple[Kind, ...]
    groups: int
    scores: Scores
    implementation: str | None
    longest: tuple[int, int]
    sm_margin: int
    segment_len: int | None
    return_lse: bool
    merges: bool

    @property
    def rows(self) -> list[int]:
        """Rows of each group."""
        return [self.sizes[f"rows {g}"] for g in range(self.groups)]

    @property
    def names(self) -> tuple[str, ...]:
        """Of the arrays."""
        return _names_of(self.groups, self.segment_len is not None, self.merges)

    @cached_property
    def views(self) -> tuple[CudaView, ...]:
        """The arrays, which are on a GPU, as views whose addresses are those of their kinds."""
        return tuple(map(view_of, self.kinds, self.names))

    @cached_property
    def memory(self) -> enough_memory:
        """To be entered while results are allocated."""
        numbers = sum(self.rows) * self.sizes["Hq"]
        need = numbers * (self.sizes["D"] * numpy_dtype(self.dtype).itemsize + 4)
        return enough_memory(need, "grouped_attention_varlen", self.device.kind)


@opaque
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
    segment_table: Array | None = None,
    segment_len: int | None = None,
    sm_margin: int = 0,
    into: tuple[Sequence[ArrayT], Sequence[ArrayT]] | None = None,
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
    segment_table : int32 array, (batch, max_segments), optional
        If given, keys of a sequence lie in segments: those from j * segment_len on in the rows of k and v
        from segment_table[b][j] * segment_len on. So gathered buffers of context parallelism and paged caches
        are read where they lie by ``"listed"`` and ``"paired"`` on Hopper; the CPU copies what it reads.
        cu_seqlens_k then says how long sequences are, not where.
    segment_len : int, optional
        Tokens of a segment; on a GPU a multiple of 8. Goes with segment_table.
    sm_margin, backend
        As in `kvlab.attention`; ``"numba"`` has separate calls only.
    into : (outs, lses), optional
        Results of these queries over other keys, float32, in lists with one array a group. What these keys
        give is merged into them in place, as `kvlab.attention_varlen` says, and they are what is returned;
        ``"listed"`` and ``"paired"`` do it in the same kernel on Hopper.

    Returns
    -------
    outs : list of arrays, as q_groups
        On a GPU they may be parts of one array. 0 for rows that see no key.
    lses : list of float32 arrays, (num_heads_q, total_q of the group), only if return_lse or into
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
    arrays = GroupedArrays(
        q_groups, k, v, cu_seqlens_q_groups, prefix_lens, cu_seqlens_k, segment_table, into
    )
    if (segment_table is None) != (segment_len is None):
        one, other = ("segment_len", "segment_table")[:: 1 if segment_table is None else -1]
        raise ValueError(f"{other}=None, but {one} is given: pass both, or neither")
    return_lse = flag(return_lse, "return_lse") or into is not None
    call, addresses = call_of(
        _FORWARD, arrays, flag(causal, "causal"), None if scale is None else number(scale, "scale"),
        implementation, (max_seqlen_q, max_seqlen_k), whole_number(sm_margin, "sm_margin", 0, LONGEST),
        backend, None if segment_len is None else whole_number(segment_len, "segment_len", 1, LONGEST),
        return_lse,
    )  # fmt: skip
    for i, results in enumerate(into or ()):
        for g, x in enumerate(results):
            check_writable(x, f"into[{i}][{g}]")
    if into is not None and (row := _row_into(call)) and row.launch(call, addresses):
        return list(into[0]), list(into[1])
    with call.memory:
        outs, lses = call.row.launch(call, arrays, addresses)
    if into is not None:
        for old_out, old_lse, out, lse in zip(*into, outs, lses, strict=True):
            merge_into((old_out, old_lse), (out, lse), call.row.backend)
        return list(into[0]), list(into[1])
    return (outs, lses) if return_lse else outs


def _check_into(into: Any, q_groups: Any) -> None:
    if into is None:
        return
    if not isinstance(into, tuple | list) or len(into) != 2:
        raise TypeError(f"into must be a tuple of two lists, outs and lses, got {type(into).__name__}")
    for i, part in enumerate(into):
        check_groups(f"into[{i}]", part, q_groups)


@lru_cache(maxsize=1024)
def _row_into(call: GroupedCall) -> Implementation | None:
    """Find what attends and merges at once; None where that is one launcher after the other."""
    requirements = {"dtype": call.dtype, "head_dim": call.sizes["D"], **requirements_of(call.device)}
    requirements["implementation"] = call.implementation or IMPLEMENTATIONS[0]
    for row in rows("grouped_attention_into"):
        if (row.backend, row.device_kind) == (call.row.backend, call.device.kind):
            return None if row.unsupported(requirements) else row
    return None


def call_of(
    operation: str,
    arrays: GroupedArrays,
    causal: bool,
    scale: float | None,
    implementation: str | None,
    longest: tuple[int | None, int | None],
    sm_margin: int,
    backend: str | None,
    segment_len: int | None = None,
    return_lse: bool = True,
) -> tuple[GroupedCall, list[int]]:
    """Check a call, and choose who computes it; also return the addresses of arrays on a GPU."""
    groups = arrays.q_groups
    check_groups("q_groups", groups, groups)
    check_groups("cu_seqlens_q_groups", arrays.cu_q, groups)
    check_groups("prefix_lens", arrays.prefix_lens, groups)
    _check_into(arrays.into, groups)
    if implementation is not None:
        choice(implementation, "implementation", IMPLEMENTATIONS)
    for value, name in zip(longest, ("max_seqlen_q", "max_seqlen_k"), strict=True):
        if value is not None:
            whole_number(value, name, 0, LONGEST)
    check_backend(backend)
    kinds, addresses = kinds_of(*arrays.named())
    return _checked(
        operation, kinds, len(groups), causal, scale, implementation, longest, sm_margin, backend,
        segment_len, return_lse, arrays.into is not None,
    ), addresses  # fmt: skip


def check_groups(name: str, arrays: Any, q_groups: Any) -> None:
    """Refuse what is no list of arrays, or not one for each group."""
    if not isinstance(arrays, list | tuple):
        raise TypeError(f"{name} must be a list or tuple of arrays, got {type(arrays).__name__}")
    if not 1 <= len(arrays) <= MAX_GROUPS:
        raise ValueError(f"{name} has {len(arrays)} groups: it must have 1 to {MAX_GROUPS}")
    if len(arrays) != len(q_groups):
        raise ValueError(f"{name} has {len(arrays)} groups, q_groups {len(q_groups)}: pass equally many")


_PATTERNS: dict[str, tuple[str, ...]] = {
    "q_groups": ("rows {}", "Hq", "D"), "k": ("total_k", "Hk", "D"), "v": ("total_k", "Hk", "D"),
    "cu_seqlens_q_groups": ("batch + 1",), "prefix_lens": ("batch",), "cu_seqlens_k": ("batch + 1",),
    "segment_table": ("batch", "max_segments"),
    "into[0]": ("rows {}", "Hq", "D"), "into[1]": ("Hq", "rows {}"),
}  # fmt: skip
_DTYPES = dict.fromkeys(("cu_seqlens_q_groups", "cu_seqlens_k", "prefix_lens", "segment_table"), "int32")
_DTYPES |= dict.fromkeys(("into[0]", "into[1]"), "float32")


def _checked_kinds(named: Mapping[str, Kind]) -> tuple[str, Mapping[str, int], Device]:
    """Check the kinds of arrays by name; return the dtype of q, the value of each symbol and the device."""
    shapes, devices = {}, {}
    dtype = dtype_of_kind(named["q_groups[0]"], "q_groups[0]")
    for name, kind in named.items():
        of_list, _, index = name.removesuffix("]").rpartition("[")
        argument = of_list or name
        found, fixed = dtype_of_kind(kind, name), _DTYPES.get(argument)
        if found != (fixed or dtype):
            wanted = fixed or f"{dtype}, as q_groups[0] has"
            raise TypeError(f"{name} has dtype {found}; it must be {wanted}")
        shapes[name] = kind[0], tuple(symbol.format(index) for symbol in _PATTERNS[argument])
        devices[name] = device_of_kind(kind, name)
    sizes = match_shapes(shapes)
    if sizes["batch + 1"] != sizes["batch"] + 1:
        raise ValueError(
            f"prefix_lens[0] has {sizes['batch']} elements, cu_seqlens_k {sizes['batch + 1']}: for a batch "
            "of sequences they have batch and batch + 1"
        )
    check_heads(sizes, "q_groups[0]")
    if sizes["D"] == 0:
        raise ValueError("q_groups[0] has D = 0: head_dim must be at least 1")
    return dtype, sizes, one_device(devices)


@lru_cache(maxsize=1024)
def _checked(
    operation: str,
    kinds: tuple[Kind, ...],
    groups: int,
    causal: bool,
    scale: float | None,
    implementation: str | None,
    longest: tuple[int | None, int | None],
    sm_margin: int,
    backend: str | None,
    segment_len: int | None,
    return_lse: bool,
    merges: bool,
) -> GroupedCall:
    named = dict(zip(_names_of(groups, segment_len is not None, merges), kinds, strict=True))
    dtype, sizes, device = _checked_kinds(named)
    row = _row_of(operation, device, dtype, sizes["D"], implementation, backend)
    if segment_len is not None and device.kind == "cuda" and implementation == "separate":
        raise NotImplementedError(
            "segment_table with implementation='separate': ordinary calls want the keys of a sequence "
            "in a row; pass a copy in order, or implementation='listed'"
        )
    total_k = sizes["total_k"] if segment_len is None else sizes["max_segments"] * segment_len
    totals = max(sizes[f"rows {g}"] for g in range(groups)), total_k
    max_seqlens = [total if most is None else most for most, total in zip(longest, totals, strict=True)]
    scores = scores_of(sizes["D"], (causal, scale, -1, -1, 0.0))
    return GroupedCall(
        row, sizes, dtype, device, kinds, groups, scores, implementation, (max_seqlens[0], max_seqlens[1]),
        sm_margin, segment_len, return_lse, merges,
    )  # fmt: skip


def _row_of(
    operation: str, device: Device, dtype: str, head_dim: int, implementation: str | None, backend: str | None
) -> Implementation:
    """Choose who computes a call: if no implementation is asked for, by the first that a row has."""
    requirements = {"dtype": dtype, "head_dim": head_dim, **requirements_of(device)}
    words = IMPLEMENTATIONS if implementation is None else (implementation,)
    for word in words[:-1]:
        for row in rows(operation):
            if (
                row.device_kind == device.kind
                and backend in (None, row.backend)
                and not row.unsupported(requirements | {"implementation": word})
            ):
                return row
    return choose(operation, device.kind, backend, implementation=words[-1], **requirements)

"""A call of attention, checked once: who computes it, and all that follows from its arguments but addresses.

Checks and the search for a kernel would take the host longer than a short kernel runs. So `call_of` makes a
`Call` from the kinds of the arrays and from the options, and remembers it. Equal calls are one object, so a
backend may remember what it makes of a `Call`, too.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

from kvlab.arguments import LONGEST, flag, number, sides_of_window, whole_number
from kvlab.arrays import Array, Device, numpy_dtype, one_device, takes_duals
from kvlab.device import enough_memory
from kvlab.ops.array_kinds import (
    Kind,
    LastCall,
    device_of_kind,
    dtype_of_kind,
    kinds_of,
    view_of,
)
from kvlab.registry import Implementation, check_backend, choose, requirements_of
from kvlab.shapes import check_heads, match_shapes
from kvlab.views import CudaView

__all__ = [
    "BOUNDS",
    "EVERYWHERE",
    "FLOAT32_DK_DV",
    "MAX_GROUPS",
    "OF_K",
    "OF_Q",
    "RAGGED_K",
    "RAGGED_Q",
    "SM_MARGIN",
    "Call",
    "Options",
    "Scores",
    "Sequences",
    "Signature",
    "call_of",
    "checked_options",
    "last_call",
    "longest_of",
    "scores_of",
]

OF_Q, OF_K = ("B", "Sq", "Hq", "D"), ("B", "Sk", "Hk", "D")
RAGGED_Q, RAGGED_K = ("total_q", "Hq", "D"), ("total_k", "Hk", "D")
BOUNDS = {"cu_seqlens_q": ("batch + 1",), "cu_seqlens_k": ("batch + 1",)}

_DTYPE_OF = {
    "lse": "float32", "cu_seqlens_q": "int32", "cu_seqlens_k": "int32", "into[0]": "float32",
    "into[1]": "float32",
}  # fmt: skip
"""Arrays that have a dtype of their own; all others have that of q."""

FLOAT32_DK_DV, SM_MARGIN = 2, 4
"""In `Call.extra` of gradients, beside 1 for deterministic ones: dk and dv are float32 whatever q is; and for
each multiprocessor that is left to other kernels."""

MAX_GROUPS = 16
"""Of queries, of a grouped call."""

Options = tuple[bool, float | None, int, int, float]
"""causal, scale, both sides of the window, softcap: as given, but of these very types."""


EVERYWHERE = (-1, -1)
"""The window without limits: the default of `window`, known by its identity."""


class Signature:
    """The arrays that an operation takes, by name, and the symbols of their shapes."""

    def __init__(self, operation: str, **patterns: tuple[str, ...]) -> None:
        self.operation, self.names, self.patterns = operation, tuple(patterns), patterns


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


@dataclass(frozen=True, eq=False)
class Call:
    """What follows from the arguments of a call apart from addresses; equal calls are one object.

    `longest` is max_seqlen_q and max_seqlen_k, None for sequences of one length; `extra` an option of one
    operation alone.
    """

    signature: Signature
    row: Implementation
    sizes: Mapping[str, int]
    dtype: str
    device: Device
    kinds: tuple[Kind, ...]
    scores: Scores
    longest: tuple[int, int] | None
    extra: int

    def sequences(self, arrays: Sequence[Array]) -> Sequences | None:
        """Return where the sequences lie, given the arrays of the call."""
        return None if self.longest is None else Sequences(arrays[-2], arrays[-1], *self.longest)

    @cached_property
    def views(self) -> tuple[CudaView, ...]:
        """The arrays, which are on a GPU, as views whose addresses are those of their kinds."""
        return tuple(map(view_of, self.kinds, self.signature.names))

    @cached_property
    def memory(self) -> enough_memory:
        """To be entered while memory is allocated: results, and of gradients a number for each row."""
        sizes, is_fixed = self.sizes, self.longest is None
        of_q = (sizes["B"] * sizes["Sq"] if is_fixed else sizes["total_q"]) * sizes["Hq"]
        numbers = of_q * sizes["D"]
        if self.signature.operation == "attention_backward":
            of_k = sizes["B"] * sizes["Sk"] if is_fixed else sizes["total_k"]
            numbers += 2 * of_k * sizes["Hk"] * sizes["D"]
        need = numbers * numpy_dtype(self.dtype).itemsize + 4 * of_q
        return enough_memory(need, self.signature.operation, self.device.kind)


def checked_options(causal: bool, scale: float | None, window: tuple[int, int], softcap: float) -> Options:
    """Check mask and score options."""
    if (
        type(causal) is bool
        and scale is None
        and window is EVERYWHERE
        and type(softcap) is float
        and not softcap
    ):
        return causal, None, -1, -1, 0.0  # most calls; each of these checks takes a call of Python
    return (
        flag(causal, "causal"),
        None if scale is None else number(scale, "scale"),
        *sides_of_window(window),
        number(softcap, "softcap", minimum=0),
    )


def scores_of(head_dim: int, options: Options) -> Scores:
    """Resolve the defaults of mask and score options."""
    causal, scale, left, right, softcap = options
    return Scores(left, 0 if causal else right, 1 / math.sqrt(head_dim) if scale is None else scale, softcap)


def longest_of(max_seqlen_q: int, max_seqlen_k: int) -> tuple[int, int]:
    """Check the lengths beside the prefix sums."""
    return (
        whole_number(max_seqlen_q, "max_seqlen_q", 0, LONGEST),
        whole_number(max_seqlen_k, "max_seqlen_k", 0, LONGEST),
    )


def call_of(
    signature: Signature,
    arrays: Sequence[Array],
    backend: str | None,
    options: Options = (False, None, -1, -1, 0.0),
    longest: tuple[int, int] | None = None,
    extra: int = 0,
) -> tuple[Call, list[int]]:
    """Check a call that attends with q to k and v, and choose who computes it.

    Parameters
    ----------
    signature : Signature
        One of a few that live as long as the process.
    arrays : sequence of arrays
        As the signature names them.
    backend : str, optional
        As the caller gave it.
    options, longest, extra
        See `Options` and `Call`.

    Returns
    -------
    Call
    list of int
        The addresses of the arrays, where they are on a GPU.
    """
    check_backend(backend)
    torch = sys.modules.get("torch")
    # `kinds_of` refuses tensors that it cannot record, and dual ones, which `LastCall` takes for plain ones.
    records = torch is not None and torch.is_grad_enabled()
    last = last_call(signature, options, longest, extra, backend, records)
    found = None if torch is not None and takes_duals(torch) else last.find(arrays)
    if found is None:
        kinds, addresses = kinds_of(arrays, signature.names)
        found = _call_of(signature, kinds, backend, options, longest, extra), addresses
        last.keep(found[0], arrays, addresses)
    return found


@lru_cache(maxsize=4096)
def last_call(
    signature: Signature,
    options: Options,
    longest: tuple[int, int] | None,
    extra: int,
    backend: str | None,
    records: bool,
) -> LastCall[Call]:
    """Return what knows the last call with these arguments, made where torch `records` gradients or not."""
    return LastCall()


@lru_cache(maxsize=4096)
def _call_of(
    signature: Signature,
    kinds: tuple[Kind, ...],
    backend: str | None,
    options: Options,
    longest: tuple[int, int] | None,
    extra: int,
) -> Call:
    named = dict(zip(signature.names, kinds, strict=True))
    dtypes = {name: dtype_of_kind(kind, name) for name, kind in named.items()}
    devices = {name: device_of_kind(kind, name) for name, kind in named.items()}
    sizes = match_shapes({name: (named[name][0], pattern) for name, pattern in signature.patterns.items()})
    if sizes.get("batch + 1") == 0:
        raise ValueError("cu_seqlens_q is empty: it must have batch + 1 elements, [0] for no sequence")
    check_heads(sizes, "q")
    if sizes["D"] == 0:
        raise ValueError("q has D = 0: head_dim must be at least 1")
    for name, dtype in dtypes.items():
        if name in _DTYPE_OF and dtype != _DTYPE_OF[name]:
            raise TypeError(f"{name} has dtype {dtype}; it must be {_DTYPE_OF[name]}")
        if name not in _DTYPE_OF and dtype != dtypes["q"]:
            raise TypeError(f"{name} has dtype {dtype}, q has {dtypes['q']}: they must be the same")
    device = one_device(devices)
    row = choose(
        signature.operation, device.kind, backend, dtype=dtypes["q"], head_dim=sizes["D"],
        **requirements_of(device),
    )  # fmt: skip
    scores = scores_of(sizes["D"], options)
    return Call(signature, row, sizes, dtypes["q"], device, kinds, scores, longest, extra)

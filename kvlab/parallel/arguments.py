"""Check the arguments of the functions in functions.py and bring them into the form of their calls."""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise
from operator import index
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvlab.arguments import LONGEST, choice, flag, number, sides_of_window, whole_number
from kvlab.ops.grouped import IMPLEMENTATIONS
from kvlab.parallel.parts import Options
from kvlab.shapes import check_heads, match_shapes

__all__ = [
    "NO_WINDOW",
    "Window",
    "answer",
    "bounds_of",
    "check_longest",
    "check_pieces",
    "check_slice",
    "check_tokens",
    "check_total",
    "implementation_of",
    "lengths_of",
    "numbers_of",
    "options_of",
]

Window = tuple[int, int]
NO_WINDOW: Window = (-1, -1)


def options_of(scale: float | None, window: Window, deterministic: bool) -> Options:
    """Return how to attend, checked."""
    scale = None if scale is None else number(scale, "softmax_scale")
    return Options(scale, sides_of_window(window, "window_size"), flag(deterministic, "deterministic"))


def implementation_of(
    implementation: str | None, triton_grouped: bool, grouped_attention: bool
) -> str | None:
    """What a caller asks for, by whichever word."""
    words: set[str] = set()
    if implementation is not None:
        words.add(choice(implementation, "implementation", IMPLEMENTATIONS))
    if flag(triton_grouped, "use_triton_grouped"):
        words.add("paired")
    if flag(grouped_attention, "use_grouped_attention"):
        words.add("separate")
    if len(words) > 1:
        raise ValueError(
            f"implementation={implementation!r}, use_triton_grouped={triton_grouped}, "
            f"use_grouped_attention={grouped_attention} ask for {' and '.join(sorted(words))}: choose one"
        )
    return next(iter(words), None)


def check_pieces(
    q: Any, cu_q: NDArray[np.int32], cu_k: NDArray[np.int32], longest_q: int, longest_k: int
) -> None:
    """Check the pieces of sequences that a rank of a stream holds, and the keys that they see."""
    if len(cu_q) != len(cu_k):
        raise ValueError(f"cu_seqlens_q has {len(cu_q) - 1} sequences and cu_seqlens_k {len(cu_k) - 1}")
    check_total(q, "q", int(cu_q[-1]))
    for side, bounds, longest in (("q", cu_q, longest_q), ("k", cu_k, longest_k)):
        check_longest(tuple(np.diff(bounds).tolist()), longest, f"max_seqlen_{side}")


def check_slice(keys: slice, total: int, count: int) -> None:
    """Check that a slice of all keys has as many as their lengths say."""
    if not isinstance(keys, slice):
        raise TypeError(
            f"local_k_slice={keys!r}: it must be the slice of llama3_flash_attn_prepare_cu_seqlens"
        )
    found = len(range(total)[keys])
    if keys.step not in (None, 1) or found != count:
        raise ValueError(f"local_k_slice={keys}: it has {found} of {total} keys; cu_seqlens_k has {count}")


@lru_cache(maxsize=256)
def check_tokens(q: Any, k: Any, v: Any, total: int | None) -> None:
    """Check the shapes of a rank's tensors."""
    keys = ("total_q", "Hk", "D")  # a rank has as many keys as queries
    sizes = match_shapes({"q": (q, ("total_q", "Hq", "D")), "k": (k, keys), "v": (v, keys)})
    check_heads(sizes, "q")
    if total is not None:
        _check_length(q[0], "q", total)


def check_total(x: Any, name: str, total: int) -> None:
    """Refuse a tensor of another number of tokens than the lengths add up to."""
    _check_length(len(x), name, total)


def _check_length(tokens: int, name: str, total: int) -> None:
    if tokens != total:
        raise ValueError(f"{name} has {tokens} tokens; the lengths add up to {total}")


def numbers_of(cu_seqlens: Any, name: str) -> tuple[int, ...]:
    """Prefix sums on the host, not checked yet."""
    numbers = cu_seqlens.tolist() if hasattr(cu_seqlens, "tolist") else cu_seqlens
    try:
        return tuple(map(index, numbers))
    except TypeError:
        raise TypeError(f"{name}={numbers!r}: it must be one row of numbers that rise from 0") from None


def bounds_of(cu_seqlens: Any, name: str) -> NDArray[np.int32]:
    """Prefix sums on the host."""
    numbers = numbers_of(cu_seqlens, name)
    if not numbers or numbers[0] or any(a > b for a, b in pairwise(numbers)):
        raise ValueError(f"{name}={list(numbers)}: it must be one row of numbers that rise from 0")
    if numbers[-1] > LONGEST:
        raise ValueError(f"{name} rises to {numbers[-1]}: at most {LONGEST} tokens are supported")
    return np.array(numbers, np.int32)


def lengths_of(cu_seqlens: Any, name: str) -> tuple[int, ...]:
    """Lengths of sequences, from their prefix sums."""
    return tuple(np.diff(bounds_of(cu_seqlens, name)).tolist())


def check_longest(lengths: tuple[int, ...], max_seqlen: int, name: str) -> None:
    """Refuse a longest length that a sequence exceeds."""
    if whole_number(max_seqlen, name, 0, LONGEST) < max(lengths, default=0):
        raise ValueError(
            f"{name}={max_seqlen}: the longest sequence has {max(lengths)} tokens; pass at least that"
        )


def answer(result: tuple[Any, Any], return_lse: bool) -> Any:
    """Out, or out, lse and the probabilities after dropout, of which there are none."""
    return (*result, None) if flag(return_lse, "return_attn_probs") else result[0]

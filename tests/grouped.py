"""Calls of grouped attention for tests: drawn and named, what they should give, and typical wrong answers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

import kvlab
from kvlab.reference import grouped as reference
from kvlab.reference.attention import merge_attention as merge_exactly
from tests.compare import each_sequence, low_precision_attention, low_precision_merge
from tests.gradients import Gradients, low_precision_gradients
from tests.gradients import each_sequence as gradients_of_each
from tests.strategies import FLOATS, HEAD_PAIRS, SEEDS, head_dims, hostile_view, random_floats

Array = NDArray[Any]


@dataclass(frozen=True, repr=False)
class GroupedCase:
    """A call of `grouped_attention_varlen`; prints as lengths."""

    q_groups: list[Array]
    k: Array
    v: Array
    lengths: list[list[int]]  # rows of each group in each sequence
    prefixes: list[list[int]]
    k_lengths: list[int]
    causal: bool = True
    scale: float | None = None

    @property
    def options(self) -> dict[str, Any]:
        """Return the keyword arguments."""
        return {
            "cu_seqlens_q_groups": [_bounds(x) for x in self.lengths],
            "cu_seqlens_k": _bounds(self.k_lengths),
            "prefix_lens": [np.array(x, np.int32) for x in self.prefixes],
            "causal": self.causal,
            "scale": self.scale,
        }

    def __repr__(self) -> str:
        return (
            f"GroupedCase(q_groups[0]: {self.q_groups[0].dtype} {self.q_groups[0].shape}, k: {self.k.shape}, "
            f"rows {self.lengths}, prefixes {self.prefixes} of {self.k_lengths}, causal={self.causal})"
        )

    @cached_property
    def expected(self) -> tuple[list[Array], list[Array]]:
        """Outs and lses in float64."""
        return reference.grouped_attention_varlen(self.q_groups, self.k, self.v, **self.options)

    @cached_property
    def low_precision(self) -> tuple[list[Array], list[Array]]:
        """Outs and lses of the formula in the dtype of q, each prefix cut out."""
        found = []
        for q, rows, prefix in zip(self.q_groups, self.lengths, self.prefixes, strict=True):
            keys, values = (x[self.seen(prefix)] for x in (self.k, self.v))
            found.append(
                each_sequence(
                    low_precision_attention, q, keys, values, _bounds(rows), _bounds(prefix),
                    causal=self.causal, scale=self.scale,
                )
            )  # fmt: skip
        return [out for out, _ in found], [lse for _, lse in found]

    def expected_gradients(self, douts: list[Array]) -> Gradients:
        """Return dq of all groups as one, dk and dv, in float64."""
        arrays = self.q_groups, self.k, self.v, *self.expected
        dq, dk, dv = reference.grouped_attention_varlen_backward(douts, *arrays, **self.options)
        return np.concatenate(dq), dk, dv

    def low_precision_gradients(self, douts: list[Array]) -> Gradients:
        """Return the same of the formula in the dtype of q; parts of dk and dv are rounded, then added."""
        dk, dv = (np.zeros(x.shape, np.float32) for x in (self.k, self.v))
        dq_groups = []
        for dout, q, rows, prefix in zip(douts, self.q_groups, self.lengths, self.prefixes, strict=True):
            own = self.seen(prefix)
            dq, *of_keys = gradients_of_each(
                low_precision_gradients, dout, q, self.k[own], self.v[own], _bounds(rows), _bounds(prefix),
                causal=self.causal, scale=self.scale,
            )  # fmt: skip
            dq_groups.append(dq)
            for total, part in zip((dk, dv), of_keys, strict=True):
                total[own] += part.astype(np.float32)
        return np.concatenate(dq_groups), dk.astype(self.k.dtype), dv.astype(self.k.dtype)

    def douts(self, seed: int = 7) -> list[Array]:
        """Return gradients of outs."""
        rng = np.random.default_rng(seed)
        return [random_floats(rng, q.shape, q.dtype, (-3, 1)) for q in self.q_groups]

    def seen(self, prefix: list[int]) -> NDArray[np.int64]:
        """Return the rows of k that lie in the prefixes of a group."""
        starts = _bounds(self.k_lengths)
        parts = [np.arange(s, s + n) for s, n in zip(starts, prefix, strict=False)]
        return np.concatenate([np.zeros(0, np.int64), *parts]).astype(np.int64)

    def wrong(self) -> dict[str, list[Array]]:
        """Return the outs of typical bugs, by name."""
        exchanged = self.prefixes[1:] + self.prefixes[:1]
        whole = [list(self.k_lengths) for _ in self.prefixes]
        answers: dict[str, Any] = {
            "zeros": [np.zeros(q.shape) for q in self.q_groups],
            "whole sequences for prefixes": self._with(prefixes=whole),
            "prefixes of another group": self._with(prefixes=exchanged),
            "one key fewer": self._with(prefixes=[[max(0, n - 1) for n in x] for x in self.prefixes]),
            "groups exchanged": self.expected[0][::-1],
            "mask forgotten": self._with(causal=not self.causal),
        }
        return {
            name: [x.astype(q.dtype) for x, q in zip(answer, self.q_groups, strict=True)]
            for name, answer in answers.items()
        }

    def _with(self, **changes: Any) -> list[Array]:
        values = {name: getattr(self, name) for name in self.__dataclass_fields__} | changes
        return GroupedCase(**values).expected[0]


def _bounds(lengths: list[int]) -> NDArray[np.int32]:
    return np.cumsum([0, *lengths]).astype(np.int32)


def make_case(
    lengths: list[list[int]],
    prefixes: list[list[int]],
    k_lengths: list[int],
    heads: tuple[int, int] = (4, 2),
    head_dim: int = 64,
    dtype: np.dtype[Any] = FLOATS[0],
    seed: int = 0,
    **options: Any,
) -> GroupedCase:
    """Fill a call with random numbers of like size."""
    rng = np.random.default_rng(seed)
    q = [random_floats(rng, (sum(x), heads[0], head_dim), dtype, (-3, 1)) for x in lengths]
    k, v = (random_floats(rng, (sum(k_lengths), heads[1], head_dim), dtype, (-3, 1)) for _ in "kv")
    return GroupedCase(q, k, v, lengths, prefixes, k_lengths, **options)


def normal_case(
    lengths: list[list[int]], prefixes: list[list[int]], k_lengths: list[int], **options: Any
) -> GroupedCase:
    """Fill a call with normal numbers in float16, as published tests of grouped attention do."""
    case = make_case(lengths, prefixes, k_lengths, **options)
    rng = np.random.default_rng(0)
    q, (k, v) = case.q_groups, (case.k, case.v)
    *q, k, v = (rng.standard_normal(x.shape).astype(np.float16) for x in (*q, k, v))
    return replace(case, q_groups=q, k=k, v=v)


def separate_calls(
    case: GroupedCase,
    put: Callable[[Array], Any] = lambda x: x,
    get: Callable[[Any], Array] = lambda x: np.asarray(x),
) -> tuple[list[Array], Gradients]:
    """Return outs, and dq of all groups as one, dk and dv, of one call of `attention_varlen` a group.

    Each call gets its prefixes cut out; `put` brings an array to the device, and `get` one back.
    """
    outs, dq_groups = [], []
    dk, dv = (np.zeros(x.shape, np.float32) for x in (case.k, case.v))
    for q, dout, rows, prefix in zip(case.q_groups, case.douts(), case.lengths, case.prefixes, strict=True):
        own = case.seen(prefix)
        arrays = [put(x) for x in (q, case.k[own], case.v[own])]
        sequences = put(_bounds(rows)), put(_bounds(prefix)), max(rows), max(prefix)
        options: dict[str, Any] = {"causal": case.causal, "scale": case.scale}
        out, lse = kvlab.attention_varlen(*arrays, *sequences, return_lse=True, **options)
        dq, *of_keys = kvlab.attention_varlen_backward(put(dout), *arrays, out, lse, *sequences, **options)
        outs.append(get(out))
        dq_groups.append(get(dq))
        for total, part in zip((dk, dv), of_keys, strict=True):
            total[own] += get(part).astype(np.float32)
    return outs, (np.concatenate(dq_groups), dk, dv)


def other_keys(case: GroupedCase, seed: int) -> GroupedCase:
    """Return a call of the same queries on other keys, of which some sequences have none, without a mask."""
    rng = np.random.default_rng(seed)
    drawn = rng.integers(0, 90, len(case.k_lengths)) * (rng.random(len(case.k_lengths)) < 0.8)
    k_lengths = [int(n) for n in drawn]
    prefixes = [[int(rng.integers(0, n + 1)) for n in k_lengths] for _ in case.lengths]
    shape = sum(k_lengths), *case.k.shape[1:]
    k, v = (random_floats(rng, shape, case.k.dtype, (-3, 1)) for _ in "kv")
    return replace(case, k=k, v=v, k_lengths=k_lengths, prefixes=prefixes, causal=False)


def expected_of_parts(
    parts: list[GroupedCase],
) -> tuple[tuple[list[Array], list[Array]], tuple[list[Array], list[Array]]]:
    """Return outs and lses over the keys of all parts in float64, and in the dtype of the queries."""
    found = []
    for merge, of_part in (
        (merge_exactly, lambda case: case.expected), (low_precision_merge, lambda case: case.low_precision),
    ):  # fmt: skip
        each = [of_part(case) for case in parts]
        pairs = [
            merge([outs[g] for outs, _ in each], [lses[g] for _, lses in each])
            for g in range(len(parts[0].q_groups))
        ]
        found.append(([out for out, _ in pairs], [lse for _, lse in pairs]))
    return found[0], found[1]


def in_segments(case: GroupedCase, segment_len: int, seed: int = 1) -> tuple[Array, Array, Array]:
    """Return k and v with keys of each sequence in segments out of order, NaN between, and their table."""
    rng = np.random.default_rng(seed)
    counts = [-(-n // segment_len) for n in case.k_lengths]
    places = rng.permutation(sum(counts) + 3)
    table = np.zeros((len(counts), max(counts, default=0)), np.int32)
    gathered = [np.full((len(places) * segment_len, *x.shape[1:]), np.nan, x.dtype) for x in (case.k, case.v)]
    starts, used = _bounds(case.k_lengths), 0
    for b, (count, length) in enumerate(zip(counts, case.k_lengths, strict=True)):
        table[b, :count] = places[used : used + count]
        used += count
        for j, place in enumerate(table[b, :count]):
            size = min(segment_len, length - j * segment_len)
            source = slice(starts[b] + j * segment_len, starts[b] + j * segment_len + size)
            for to, x in zip(gathered, (case.k, case.v), strict=True):
                to[place * segment_len : place * segment_len + size] = x[source]
    return gathered[0], gathered[1], table


def zigzag(tokens: int, ranks: int, rank: int, sequences: int = 1, **options: Any) -> GroupedCase:
    """Return the call of a rank of zigzag context parallelism: its early and its late chunk."""
    chunk = tokens // (2 * ranks)
    prefixes = [[(rank + 1) * chunk] * sequences, [(2 * ranks - rank) * chunk] * sequences]
    return make_case([[chunk] * sequences] * 2, prefixes, [tokens] * sequences, **options)


def scenarios(size: int = 1) -> dict[str, dict[str, Any]]:
    """Return named calls, as arguments of `make_case`; lengths grow with `size`."""
    n = size
    calls: dict[str, tuple[Any, Any, Any]] = {
        "two groups of a zigzag rank": ([[32 * n]] * 2, [[64 * n], [224 * n]], [256 * n]),
        "one group": ([[40 * n, 3]], [[90 * n, 7]], [100 * n, 9]),
        "three nested prefixes": (
            [[20 * n, 9]] * 3, [[30 * n, 9], [60 * n, 20], [100 * n, 31]], [100 * n, 31],
        ),
        "equal prefixes": ([[17 * n], [30 * n]], [[70 * n]] * 2, [90 * n]),
        "unrelated prefixes": (
            [[5, 40 * n, 0], [33 * n, 2, 8], [1, 1, 1]],
            [[50 * n, 41 * n, 20], [33 * n, 90, 0], [60 * n, 1, 12]], [60 * n, 100 * n, 20],
        ),
        "highly imbalanced prefixes": ([[10, 4]] * 2, [[n, 9], [99 * n, 5]], [100 * n, 9]),
        "single tokens": ([[1]] * 4, [[1], [40 * n], [41 * n], [77 * n]], [77 * n]),
        "an empty group": ([[0], [30]], [[5], [30 * n]], [40 * n]),
        "no rows": ([[0], [0]], [[5], [3]], [8]),
        "rows beyond the prefix": ([[50 * n], [20]], [[20 * n], [0]], [40 * n]),
        "no sequences": ([[], []], [[], []], []),
        "no keys": ([[3], [2]], [[0], [0]], [0]),
        "sixteen groups": (
            [[(7 * g) % 19, 1] for g in range(16)], [[5 * n * g + 3, g] for g in range(16)], [80 * n, 16],
        ),
        "thirty-two sequences": (
            [[b % 5 for b in range(32)], [(3 * b) % 7 for b in range(32)]],
            [[b % 9 for b in range(32)], [b % 17 for b in range(32)]], [20] * 32,
        ),
        "no mask": ([[30 * n, 4], [9, 50]], [[70 * n, 10], [40 * n, 3]], [80 * n, 11]),
    }  # fmt: skip
    names = "lengths", "prefixes", "k_lengths"
    return {
        name: dict(zip(names, call, strict=True)) | {"causal": name != "no mask"}
        for name, call in calls.items()
    }


@st.composite
def grouped_cases(draw: st.DrawFn, *, dtypes: tuple[np.dtype[Any], ...] = FLOATS) -> GroupedCase:
    """Draw a call of up to 5 groups and 3 sequences; anything may be empty, arrays may be hostile views."""
    count, batch = draw(st.integers(1, 5)), draw(st.integers(0, 3))
    k_lengths = [draw(st.just(0) | st.integers(0, 90)) for _ in range(batch)]
    lengths = [[draw(st.just(0) | st.integers(0, 60)) for _ in range(batch)] for _ in range(count)]
    prefixes = [[draw(st.integers(0, n)) for n in k_lengths] for _ in range(count)]
    heads, head_dim = draw(st.sampled_from(HEAD_PAIRS)), draw(head_dims())
    dtype, seed = draw(st.sampled_from(dtypes)), draw(SEEDS)
    case = make_case(
        lengths, prefixes, k_lengths, heads, head_dim, dtype, seed,
        causal=draw(st.booleans()), scale=draw(st.none() | st.sampled_from((0.3, 1.0))),
    )  # fmt: skip
    if draw(st.booleans()):
        rng = np.random.default_rng(seed)
        hostile = [hostile_view(rng, x) for x in (*case.q_groups, case.k, case.v)]
        return GroupedCase(
            hostile[:-2], *hostile[-2:], lengths, prefixes, k_lengths, causal=case.causal, scale=case.scale
        )
    return case

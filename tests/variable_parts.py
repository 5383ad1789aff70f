"""Cases of attention over disjoint parts of the keys of sequences, which are merged one after the other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvlab.reference import attention as reference
from tests.compare import each_sequence, low_precision_attention, low_precision_merge

__all__ = ["PartsCase", "expected_of_parts", "make_parts"]

Array = NDArray[Any]


@dataclass
class PartsCase:
    """Queries of some sequences; of each part the keys, values, their lengths and the mask."""

    q: Array
    q_lengths: Array
    parts: list[tuple[Array, Array, Array, bool]]

    def calls(self) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
        """Return k, v and lengths of each call, and its options."""
        bounds_q = np.cumsum([0, *self.q_lengths]).astype(np.int32)
        longest = int(self.q_lengths.max(initial=0))
        return [
            (
                (k, v, bounds_q, np.cumsum([0, *lengths]).astype(np.int32), longest, int(lengths.max())),
                {"causal": causal},
            )
            for k, v, lengths, causal in self.parts
        ]


def make_parts(
    rng: np.random.Generator,
    dtype: np.dtype[Any],
    heads: tuple[int, int] = (4, 2),
    head_dim: int = 8,
    most: int = 12,
) -> PartsCase:
    """Draw up to four sequences and three parts, the last of which may have a causal mask."""
    number = int(rng.integers(1, 5))
    q_lengths = rng.integers(0, most, number)
    q_lengths[rng.integers(number)] += 1

    def draw(tokens: int, heads: int) -> Array:
        return rng.standard_normal((tokens, heads, head_dim)).astype(dtype)

    parts = []
    for _ in range(int(rng.integers(1, 4))):
        lengths = rng.integers(0, 2 * most, number) * (rng.random(number) < 0.8)
        total = int(lengths.sum())
        parts.append((draw(total, heads[1]), draw(total, heads[1]), lengths, False))
    if rng.random() < 0.5:
        parts[-1] = (*parts[-1][:3], True)
    return PartsCase(draw(int(q_lengths.sum()), heads[0]), q_lengths, parts)


def expected_of_parts(case: PartsCase) -> tuple[tuple[Array, Array], tuple[Array, Array]]:
    """Return out and lse in float64, and of parts that are computed in the inputs' dtype."""
    exact, low = [], []
    for (k, v, *lengths), options in case.calls():
        exact.append(reference.attention_varlen(case.q, k, v, *lengths, return_lse=True, **options))
        low.append(each_sequence(low_precision_attention, case.q, k, v, *lengths[:2], **options))
    outs, lses = zip(*exact, strict=True)
    low_outs, low_lses = zip(*low, strict=True)
    return reference.merge_attention(outs, lses), low_precision_merge(low_outs, low_lses)

"""Packed attention on a GPU: shapes that hypothesis chooses, few specialisations of the kernel.

What goes wrong with a shape, such as a division of quads among blocks that leaves a head out, goes wrong for
all widths; so widths are few and sizes many.
"""

from __future__ import annotations

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvlab.ops.cuda import packed as packed_cuda
from kvlab.ops.numba import packed as packed_numba
from tests.gpu.packed_cases import MIXED, MIXED_PROFILES, check, draw_pages, draw_queries
from tests.strategies import SEEDS

KINDS = st.sampled_from(
    [
        ("float16", 64, ((2, 2), (8, 8))),
        ("float16", 64, MIXED),
        ("bfloat16", 128, MIXED[:4]),
        ("bfloat16", 128, MIXED),
        ("bfloat16", 64, MIXED_PROFILES[:-1]),
        ("float16", 128, MIXED_PROFILES),
    ]
)


@st.composite
def tables(draw: st.DrawFn) -> np.ndarray:
    """Numbers of quads (batch, KV heads): all equal, nearly so, random, or one sequence far longer."""
    shape = draw(st.integers(1, 4)), draw(st.integers(1, 10))
    rng = np.random.default_rng(draw(SEEDS))
    most = draw(st.sampled_from([1, 3, 12, 25]))
    kind = draw(st.sampled_from(["equal", "near", "any", "one long"]))
    if kind == "equal":
        return np.full(shape, most)
    if kind == "near":
        return most + rng.integers(0, 2 + most // 10, shape)
    lengths = rng.integers(0, most + 1, shape)
    if kind == "one long":
        lengths[rng.integers(shape[0]), rng.integers(shape[1])] = 12 * most
    return lengths


BROAD = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
GROUPS, STEPS = st.integers(1, 16), st.sampled_from([1, 1, 1, 2, 5, 16])


@settings(max_examples=40, **BROAD)
@given(KINDS, tables(), GROUPS, STEPS, st.sampled_from([0.0, 4.0]), st.booleans(), SEEDS)
def test_any_shape(
    kind: tuple[str, int, tuple[tuple[int, int], ...]],
    lengths: np.ndarray,
    group: int,
    seqlen: int,
    softcap: float,
    full: bool,
    seed: int,
) -> None:
    dtype, head_dim, rungs = kind
    pages = draw_pages(seed, dtype, head_dim, rungs, lengths, full=full)
    q = draw_queries(seed, dtype, len(lengths), seqlen, lengths.shape[1] * group, head_dim)
    check(packed_cuda, q, pages, softcap=softcap, keep_scores=min(seqlen, seed % 3))


@settings(max_examples=15, **BROAD)
@given(tables(), GROUPS, STEPS, SEEDS)
def test_any_shape_in_numba(lengths: np.ndarray, group: int, seqlen: int, seed: int) -> None:
    """Without the options, for each of which a kernel would be compiled."""
    pages = draw_pages(seed, "float16", 64, ((2, 2), (8, 8)), lengths)
    q = draw_queries(seed, "float16", len(lengths), seqlen, lengths.shape[1] * group, 64)
    check(packed_numba, q, pages)

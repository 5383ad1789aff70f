"""Calls that are hard on accuracy, drawn by number: few keys, equal keys, which cancel, and scores up to 80.

A draw is a kind and a number, so that each call can be had again alone. `shares` computes a call and returns
the error of each result as a share of what promise 2 allows: above 1 it is beyond the promise.
`benchmarks/accuracy/draws.py` counts thousands of them, `tests/ops/test_draws.py` some.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

import kvlab
from kvlab.arrays import numpy_dtype
from kvlab.ops.attention_backward import attention_backward
from kvlab.ops.cpu.exact import attend_exact
from kvlab.ops.cpu.packed import attend_into
from kvlab.ops.packed import packed_attention
from kvlab.pages import QUAD, TOKENS_PER_PAGE
from kvlab.reference import attention as reference
from kvlab.reference.packed import stored_tokens
from tests.compare import low_precision_attention, share_of_allowed
from tests.gradients import exact_gradients, low_precision_gradients
from tests.grouped import GroupedCase
from tests.ops.test_packed import PROFILES, WIDTHS, make_pages
from tests.strategies import FLOATS, random_floats

Array = NDArray[Any]
Shares = dict[str, float]

KEYS = ("unrelated", "nearly equal", "large scores", "equal")
HEADS = ((1, 1), (2, 1), (3, 3), (6, 2), (4, 4))
LARGEST = (1, 5, 20, 40, 80)
FEW, MANY = (1, 2, 3, 4, 6, 10, 20, 70), (65, 130, 200, 300, 700)
IMPLEMENTATIONS = ("separate", "listed", "paired")


class Call(NamedTuple):
    """A call of attention, its gradient of out and which keys it has."""

    q: Array
    k: Array
    v: Array
    dout: Array
    options: dict[str, Any]
    keys: str


def draw_call(rng: np.random.Generator, dtype: np.dtype[Any], counts: tuple[int, ...] = FEW) -> Call:
    """Draw a call: 1 to 39 rows on one of some counts of keys, causal or not, every fourth with a cap."""
    head_dim = int(rng.choice((8, 16, 20, 32, 64, 80, 128)))
    heads, kv_heads = HEADS[rng.integers(len(HEADS))]
    rows, count = int(rng.integers(1, 40)), int(rng.choice(counts))
    scale = float(rng.choice((0.3, 1.0, 1.5, head_dim**-0.5, 1 / 3, 0.7, np.log(2))))
    keys = KEYS[rng.integers(len(KEYS))]
    q, k, v = (
        random_floats(rng, (1, n, h, head_dim), FLOATS[2], (-3, 1)).astype(np.float64)
        for n, h in ((rows, heads), (count, kv_heads), (count, kv_heads))
    )
    if keys in ("nearly equal", "equal"):
        spread = 2e-3 if keys == "nearly equal" else 0.0
        k = k[:, :1] * (1 + spread * rng.standard_normal((1, count, kv_heads, 1)))
    if keys != "unrelated":
        q *= rng.choice(LARGEST) / _largest_score(q, k, scale)
    options: dict[str, Any] = {"scale": scale, "causal": bool(rng.integers(2))}
    if rng.integers(4) == 0:
        options["softcap"] = float(rng.choice((2.0, 30.0)))
    q, k, v = (x.astype(dtype) for x in (q, k, v))
    return Call(q, k, v, random_floats(rng, q.shape, dtype, (-3, 1)), options, keys)


def shares_of_attention(
    rng: np.random.Generator, dtype: np.dtype[Any], *, counts: tuple[int, ...] = FEW
) -> tuple[str, Shares]:
    """Return the keys of a call, and shares of out, lse, dq, dk and dv."""
    q, k, v, dout, options, keys = draw_call(rng, dtype, counts)
    out, lse = kvlab.attention(q, k, v, return_lse=True, backend="cpu", **options)
    gradients = attention_backward(dout, q, k, v, out, lse, backend="cpu", **options)
    actual = (out, lse, *gradients)
    expected = (
        *reference.attention(q, k, v, return_lse=True, **options), *exact_gradients(dout, q, k, v, **options),
    )  # fmt: skip
    low = (
        *low_precision_attention(q, k, v, **options), *low_precision_gradients(dout, q, k, v, **options),
    )  # fmt: skip
    return keys, _shares(("out", "lse", "dq", "dk", "dv"), actual, expected, low)


def shares_of_grouped(
    rng: np.random.Generator, dtype: np.dtype[Any], *, counts: tuple[int, ...] = FEW
) -> tuple[str, Shares]:
    """Return the same of groups of queries, of which each attends a prefix of the keys of a call."""
    q, k, v, dout, options, keys = draw_call(rng, dtype, counts)
    rows, count, groups = q.shape[1], k.shape[1], int(rng.integers(1, 5))
    cuts = np.sort(rng.integers(0, rows + 1, groups - 1))
    lengths = np.diff((0, *cuts, rows)).tolist()
    prefixes = rng.integers(1, count + 1, groups).tolist()
    case = GroupedCase(
        np.split(q[0], cuts), k[0], v[0], [[n] for n in lengths], [[n] for n in prefixes], [count],
        causal=options["causal"], scale=options["scale"],
    )  # fmt: skip
    douts = np.split(dout[0], cuts)
    chosen = {"backend": "cpu", "implementation": IMPLEMENTATIONS[rng.integers(3)]}
    outs, lses = kvlab.grouped_attention_varlen(
        case.q_groups, case.k, case.v, return_lse=True, **case.options, **chosen
    )
    dq_groups, dk, dv = kvlab.grouped_attention_varlen_backward(
        douts, case.q_groups, case.k, case.v, outs, lses, **case.options, backend="cpu"
    )

    def joined(outs: Any, lses: Any) -> tuple[Array, Array]:
        return np.concatenate(outs), np.concatenate(lses, axis=-1)

    actual = *joined(outs, lses), np.concatenate(dq_groups), dk, dv
    expected = *joined(*case.expected), *case.expected_gradients(douts)
    low = *joined(*case.low_precision), *case.low_precision_gradients(douts)
    return keys, _shares(("out", "lse", "dq", "dk", "dv"), actual, expected, low)


def shares_of_packed(
    rng: np.random.Generator, dtype: np.dtype[Any], *, in_blocks: bool = False, exact: bool = False
) -> tuple[str, Shares]:
    """Return the keys of a call on pages of any widths, and shares of out and lse; all rows see all pages.

    With `exact`, in float32 alone, recent tokens stand behind the stored ones, one for each row and more.
    """
    head_dim = int(rng.choice((64, 128) if in_blocks else (16, 32, 64, 80, 128)))
    kinds = ((*PROFILES, 16) if in_blocks else WIDTHS), WIDTHS
    rungs = {tuple(kind[rng.integers(len(kind))] for kind in kinds) for _ in range(rng.integers(1, 3))}
    kv_heads, group = int(rng.integers(1, 3)), int(rng.choice((1, 2, 4)))
    rows = int(rng.choice((1, 1, 2, 8, 30)))
    count = (int(rng.choice((1, 1, 2, 5))),)
    quads = rng.integers(1, 4, (1, kv_heads))
    pages = make_pages(rng, tuple(sorted(rungs, key=str)), head_dim, dtype.name, quads, count)
    keys = ("unrelated", "large scores", "equal")[rng.integers(3)]
    if keys == "equal":
        for r, (layout, pool) in enumerate(zip(pages.layouts, pages.pools, strict=True)):
            of_keys, used = slice(layout.k_codes, layout.v_codes), pages.index[pages.rung == r]
            if used.size:
                pool[:, of_keys] = pool[used[0], of_keys]
    stored = [
        [np.concatenate(part) for part in zip(*stored_tokens(pages, 0, h), strict=True)]
        for h in range(kv_heads)
    ]
    scale = float(rng.choice((0.05, 0.3, head_dim**-0.5, 1 / 3)))
    q = random_floats(rng, (1, rows, kv_heads * group, head_dim), FLOATS[2], (-3, 1)).astype(np.float64)
    if keys != "unrelated":
        most = max(_largest_score(q, k[None, :, None], scale) for k, _ in stored)
        q *= rng.choice(LARGEST) / most
    q = q.astype(dtype)
    options: dict[str, Any] = {"scale": scale, "softcap": float(rng.choice((0.0, 0.0, 0.0, 30.0)))}
    if exact:  # as a step of a cache has it
        out, lse = np.empty(q.shape, dtype), np.empty((1, q.shape[2], rows), np.float32)
        scores = np.empty((1, kv_heads, pages.rung.shape[2] // QUAD, 0, QUAD * TOKENS_PER_PAGE), np.float32)
        rest = attend_into(out, lse, scores, q, pages, group, **options)
    else:
        out, lse, _ = packed_attention(q, pages, backend="cpu", **options)
    recent = rows + int(rng.choice((0, 3, 20))) if exact else 0
    own_k, own_v = (random_floats(rng, (1, recent, kv_heads, head_dim), dtype, (-3, 1)) for _ in "kv")
    if exact:
        part = attend_exact(q, own_k, own_v, np.ones((1, recent), bool), keep_rows=0, **options)
        out, lse = part.merged(out, lse, rest)
    expected, low = [], []
    for h, (k, v) in enumerate(stored):
        own = q[:, :, h * group : (h + 1) * group]
        wide_k, wide_v = (
            np.concatenate([x, y[0, :, h].astype(np.float64)])[None, :, None]
            for x, y in ((k, own_k), (v, own_v))
        )
        expected.append(reference.attention(own, wide_k, wide_v, return_lse=True, causal=exact, **options))
        low.append(
            low_precision_attention(own, wide_k.astype(dtype), wide_v.astype(dtype), causal=exact, **options)
        )
    wanted, lower = (
        (np.concatenate([x for x, _ in found], 2), np.concatenate([x for _, x in found], 1))
        for found in (expected, low)
    )
    return keys, _shares(("out", "lse"), (out, lse), wanted, lower)


# The place of a kind is part of its draws: new ones come last.
KINDS: dict[str, Callable[[np.random.Generator, np.dtype[Any]], tuple[str, Shares]]] = {
    "attention": shares_of_attention,
    "grouped": shares_of_grouped,
    "packed and recent": lambda rng, dtype: shares_of_packed(rng, dtype, exact=True),
    "packed, profiles": lambda rng, dtype: shares_of_packed(rng, dtype, in_blocks=True),
    "packed, widths": shares_of_packed,
    "attention, many keys": lambda rng, dtype: shares_of_attention(rng, dtype, counts=MANY),
    "grouped, many keys": lambda rng, dtype: shares_of_grouped(rng, dtype, counts=MANY),
}

CASES = [
    (kind, dtype)
    for kind in KINDS
    for dtype in ("float32", "float16", "bfloat16")
    if dtype == "float32" or kind not in ("packed and recent", "attention, many keys", "grouped, many keys")
]


def shares(kind: str, dtype: str, number: int) -> tuple[str, Shares]:
    """Return the keys of a draw, and its errors as shares of what promise 2 allows."""
    rng = np.random.default_rng((list(KINDS).index(kind), number))
    return KINDS[kind](rng, numpy_dtype(dtype))


def _largest_score(q: Array, k: Array, scale: float) -> float:
    repeated = np.repeat(k, q.shape[2] // k.shape[2], axis=2)
    return float(np.abs(scale * np.einsum("bqhd,bkhd->bhqk", q, repeated)).max())


def _shares(names: tuple[str, ...], actual: Any, expected: Any, low: Any) -> Shares:
    found = zip(names, actual, expected, low, strict=True)
    return {name: share_of_allowed(*three) for name, *three in found}

"""Every hypothesis strategy of the tests.

Hypothesis draws shapes, options and seeds; the elements of large arrays come from a seeded generator, as bit
patterns, so that a failure shrinks to a small shape and is repeated exactly. Each section serves one part of
the library; what two sections need stands at the top.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

Array = NDArray[Any]

FLOATS = tuple(np.dtype(kind) for kind in (np.float16, ml_dtypes.bfloat16, np.float32))
"""The element types of queries, keys and values."""

# Bits of the mantissa and bias of the exponent.
_LAYOUTS = {FLOATS[0]: (10, 15), FLOATS[1]: (7, 127), FLOATS[2]: (23, 127)}

SEEDS = st.integers(0, 2**32 - 1)


def random_floats(
    rng: np.random.Generator,
    shape: tuple[int, ...],
    dtype: np.dtype[Any],
    exponents: tuple[int, int] = (-8, 1),
) -> Array:
    """Return floats of random bits: any sign and mantissa, exponents from the first to the last of a range.

    One element in a hundred is a zero or a subnormal number, of either sign.
    """
    mantissa_bits, bias = _LAYOUTS[dtype]
    exponent = rng.integers(exponents[0] + bias, exponents[1] + bias, shape, endpoint=True)
    exponent = np.where(rng.random(shape) < 0.01, 0, exponent)
    mantissa = rng.integers(0, 2**mantissa_bits, shape) * (rng.random(shape) < 0.99)
    sign = rng.integers(0, 2, shape)
    pattern = sign << (dtype.itemsize * 8 - 1) | exponent << mantissa_bits | mantissa
    return pattern.astype(f"uint{dtype.itemsize * 8}").view(dtype)


def hostile_view(rng: np.random.Generator, array: Array) -> Array:
    """Return a view equal to `array`, its axes stored in another order, with gaps, in the midst of poison.

    The memory around and between the elements is NaN (the largest value for integers): who reads it will show
    it.
    """
    order = rng.permutation(array.ndim)
    before, step, after = (rng.integers(low, 3, array.ndim) for low in (0, 1, 0))
    stored = [before[axis] + step[axis] * array.shape[axis] + after[axis] for axis in order]
    poison = np.iinfo(array.dtype).max if array.dtype.kind in "ui" else np.nan
    buffer = np.full(stored, poison, dtype=array.dtype).transpose(np.argsort(order))
    slices: list[Any] = [slice(b, b + s * n, s) for b, s, n in zip(before, step, array.shape, strict=True)]
    view = buffer[(*slices, ...)]
    view[...] = array
    return view


# Pages

VECTOR_KINDS = ("normal", "spikes", "one size", "two sizes", "ties", "any size", "bit patterns")


def page_vectors(
    rng: np.random.Generator, n: int, head_dim: int, kinds: tuple[str, ...] = VECTOR_KINDS
) -> NDArray[np.float32]:
    """Return vectors to be stored in pages, of any size; those of bit patterns may be infinite or NaN.

    "ties" are whole multiples of a step: each lies on a border of cells or is a value of the grid.
    """
    made = {
        "normal": rng.standard_normal((n, head_dim)),
        "spikes": np.where(rng.random((n, head_dim)) < 2 / head_dim, 1, 1e-3 * rng.standard_normal((n, 1))),
        "one size": np.ones((n, head_dim)),
        "two sizes": np.where(rng.random((n, head_dim)) < rng.random((n, 1)), 1, rng.random((n, 1))),
        "ties": rng.integers(-18, 19, (n, head_dim)) * rng.integers(8, 16, (n, 1)) / 256,
        "any size": 2.0 ** rng.uniform(-30, 0, (n, head_dim)),
    }
    powers = np.where(rng.random((n, 1)) < 0.5, rng.integers(-24, 4, (n, 1)), rng.integers(-150, 120, (n, 1)))
    stretched = rng.choice([1, 1, rng.uniform(1, 2)], (n, 1))
    scale = stretched * rng.choice([-1, 1], (n, head_dim)) * 2.0**powers
    patterns = rng.integers(0, 2**32, (n, head_dim), np.uint32)
    patterns[rng.random(n) < 0.7] &= 0xBFFFFFFF  # all below 2
    special = np.array([0, -0.0, 1e-40, 4e-23, 2.0**-18, 65504, 65520, 1e20, 3e38, np.inf, -np.inf, np.nan])
    few = rng.choice(special.astype(np.float32).view(np.uint32), (n, head_dim))
    few[few == 0x7FC00000] = rng.choice(np.array([0x7F800001, 0xFFA0F00D, 0x7FFFFFFF], np.uint32))
    patterns = np.where(rng.random((n, head_dim)) < rng.choice([0, 0.02, 0.5, 1], (n, 1)), few, patterns)
    kind = rng.integers(len(kinds), size=n)
    x = np.empty((n, head_dim), np.float32)
    for i, name in enumerate(kinds):
        mine = kind == i
        x[mine] = patterns.view(np.float32)[mine] if name == "bit patterns" else (made[name] * scale)[mine]
    return x


# Attention

HEAD_PAIRS = ((1, 1), (2, 1), (3, 3), (6, 2), (4, 4), (9, 3), (5, 1), (7, 7))
"""(num_heads_q, num_heads_kv): multi-head, grouped and multi-query, odd counts among them."""


@dataclass(frozen=True, repr=False)
class AttentionCase:
    """A call of `attention`; prints as shapes."""

    q: Array
    k: Array
    v: Array
    options: dict[str, Any]  # causal, scale, window, softcap

    def __repr__(self) -> str:
        shapes = (f"{name}: {x.dtype} {x.shape}" for name, x in (("q", self.q), ("k", self.k), ("v", self.v)))
        return f"{type(self).__name__}({', '.join(shapes)}, {self.options})"


@dataclass(frozen=True, repr=False)
class VarlenAttentionCase(AttentionCase):
    """A call of `attention_varlen`."""

    cu_seqlens_q: NDArray[np.int32]
    cu_seqlens_k: NDArray[np.int32]

    @property
    def args(self) -> tuple[Any, ...]:
        """Return the positional arguments."""
        longest_q, longest_k = (
            int(np.diff(x).max(initial=0)) for x in (self.cu_seqlens_q, self.cu_seqlens_k)
        )
        return self.q, self.k, self.v, self.cu_seqlens_q, self.cu_seqlens_k, longest_q, longest_k

    def __repr__(self) -> str:
        return f"{super().__repr__()[:-1]}, {self.cu_seqlens_q.tolist()}, {self.cu_seqlens_k.tolist()})"


def attention_options() -> st.SearchStrategy[dict[str, Any]]:
    """Draw the mask and the score options that every attention takes."""
    window_sides = st.integers(-1, 12)
    return st.fixed_dictionaries(
        {
            "causal": st.booleans(),
            "scale": st.none() | st.sampled_from((0.0625, 0.3, 1.5)),
            "window": st.just((-1, -1)) | st.tuples(window_sides, window_sides),
            "softcap": st.sampled_from((0.0, 0.0, 2.0, 30.0)),
        }
    )


def head_dims() -> st.SearchStrategy[int]:
    """Draw a head dimension: powers of two, odd multiples of 16, and one that is neither."""
    return st.sampled_from((8, 16, 32, 64, 80, 96, 20))


@st.composite
def attention_cases(
    draw: st.DrawFn, *, dtypes: tuple[np.dtype[Any], ...] = FLOATS, max_seqlen: int = 40, min_seqlen: int = 0
) -> AttentionCase:
    """Draw a fixed-length call; lengths and batch may be 0, arrays may be hostile views."""
    batch = draw(st.integers(min(min_seqlen, 1), 3))
    seqlen_q, seqlen_k = draw(st.tuples(*[st.integers(min_seqlen, max_seqlen)] * 2))
    q, k, v = _draw_qkv(draw, (batch, seqlen_q), (batch, seqlen_k), dtypes)
    return AttentionCase(q, k, v, draw(attention_options()))


@st.composite
def varlen_attention_cases(
    draw: st.DrawFn, *, dtypes: tuple[np.dtype[Any], ...] = FLOATS, max_seqlen: int = 30
) -> VarlenAttentionCase:
    """Draw a variable-length call; every sequence may have no queries, no keys, or neither."""
    length = st.just(0) | st.integers(0, max_seqlen)
    lengths = np.array(draw(st.lists(st.tuples(length, length), max_size=4)), dtype=np.int32).reshape(-1, 2)
    cu_seqlens_q, cu_seqlens_k = np.vstack([np.zeros((1, 2)), lengths.cumsum(axis=0)]).astype(np.int32).T
    q, k, v = _draw_qkv(draw, (int(cu_seqlens_q[-1]),), (int(cu_seqlens_k[-1]),), dtypes)
    return VarlenAttentionCase(q, k, v, draw(attention_options()), cu_seqlens_q, cu_seqlens_k)


@st.composite
def large_score_cases(
    draw: st.DrawFn,
    *,
    dtypes: tuple[np.dtype[Any], ...] = FLOATS,
    keys: tuple[str, ...] = ("unrelated", "nearly equal", "equal"),
    largest: tuple[float, ...] = (1, 5, 20, 40, 80),
) -> AttentionCase:
    """Draw a call in which few keys, unrelated or equal, have all the weight, and scores up to `largest`.

    The scales are no numbers of float32. All rows see all keys: errors of one row hang on luck.
    """
    (num_heads_q, num_heads_kv), head_dim = (
        draw(st.sampled_from(HEAD_PAIRS)),
        draw(head_dims() | st.just(128)),
    )
    seqlen_q, seqlen_k = draw(st.integers(8, 40)), draw(st.sampled_from((1, 2, 3, 4, 6, 10, 20)))
    scale, dtype = draw(st.sampled_from((0.3, 0.7, 1 / 3, np.log(2), 1.1))), draw(st.sampled_from(dtypes))
    rng, kind, size = (
        np.random.default_rng(draw(SEEDS)),
        draw(st.sampled_from(keys)),
        draw(st.sampled_from(largest)),
    )
    rows = (seqlen_q, num_heads_q), *[(seqlen_k, num_heads_kv)] * 2
    q, k, v = (random_floats(rng, (1, *row, head_dim), FLOATS[2], (-3, 1)).astype(np.float64) for row in rows)
    if kind != "unrelated":
        spread = 2e-3 if kind == "nearly equal" else 0.0
        k = k[:, :1] * (1 + spread * rng.standard_normal((1, seqlen_k, num_heads_kv, 1)))
    repeated = np.repeat(k, num_heads_q // num_heads_kv, axis=2)
    q *= size / np.abs(scale * np.einsum("bqhd,bkhd->bhqk", q, repeated)).max()
    options = {"scale": float(scale), "softcap": draw(st.sampled_from((0.0, 0.0, 2.0, 30.0)))}
    return AttentionCase(*(x.astype(dtype) for x in (q, k, v)), options)


def _draw_qkv(
    draw: st.DrawFn, rows_q: tuple[int, ...], rows_k: tuple[int, ...], dtypes: tuple[np.dtype[Any], ...]
) -> tuple[Array, Array, Array]:
    num_heads_q, num_heads_kv = draw(st.sampled_from(HEAD_PAIRS))
    head_dim, dtype, rng = (
        draw(head_dims()),
        draw(st.sampled_from(dtypes)),
        np.random.default_rng(draw(SEEDS)),
    )
    shapes = (*rows_q, num_heads_q, head_dim), *[(*rows_k, num_heads_kv, head_dim)] * 2
    q, k, v = (random_floats(rng, shape, dtype) for shape in shapes)
    if draw(st.booleans()):
        q, k, v = (hostile_view(rng, x) for x in (q, k, v))
    return q, k, v


# Allocation.


@dataclass(frozen=True)
class AllocationCase:
    """The arguments of `allocate`; the budget is enough for the lowest rungs."""

    loss: NDArray[np.float64]
    cost: NDArray[np.int64]
    budget: int
    ceiling: NDArray[np.int64] | None

    def total_loss(self, rung: NDArray[np.int64]) -> float:
        """Return the loss of an allocation."""
        return float(np.sum(self.loss[np.arange(len(rung)), rung]))

    def total_cost(self, rung: NDArray[np.int64]) -> int:
        """Return the bytes of an allocation."""
        return int(np.sum(self.cost[rung]))

    @property
    def top(self) -> NDArray[np.int64]:
        """Return the highest rung each page may take."""
        return np.full(len(self.loss), len(self.cost) - 1) if self.ceiling is None else self.ceiling


LADDERS = ((0, 600, 856, 1112, 2136), (600, 856, 1112, 2136, 4152), (1112, 1624, 2136, 4184))
"""Bytes of a page at widths (0), 2, 3, 4, 8 and 16, head dimension 64, and 2, 3, 4, 8, 128."""


@st.composite
def allocation_cases(draw: st.DrawFn, *, max_pages: int, max_cost: int | None = None) -> AllocationCase:
    """Draw pages that differ little or by orders of magnitude, on ladders real and awkward, at any budget.

    Losses may be convex in bytes, proportional to them, small integers (many ties) or arbitrary; pages may be
    equal, or lose nothing at all. No rung costs more than `max_cost`; without it, ladders are real or small.
    """
    rng = np.random.default_rng(draw(SEEDS))
    pages = draw(st.integers(0, max_pages))
    cost = np.array(draw(st.sets(st.integers(0, max_cost or 1000), min_size=1, max_size=5).map(sorted)))
    if max_cost is None and draw(st.booleans()):
        cost = np.array(draw(st.sampled_from(LADDERS)))
    shape = pages, len(cost)
    kind = draw(st.sampled_from(("convex", "proportional", "integers", "arbitrary")))
    if kind == "convex":
        loss = np.tile(4.0 ** -np.arange(len(cost)), (pages, 1))
    elif kind == "proportional":
        loss = np.tile((cost[-1] - cost) / 1.0, (pages, 1)) + draw(st.sampled_from((0, 1))) * rng.random(
            shape
        )
    elif kind == "integers":
        loss = rng.integers(0, 4, shape) / 1.0
    else:
        loss = rng.lognormal(0, 2, shape)
    weight = rng.lognormal(0, draw(st.sampled_from((0.0, 0.1, 2.0, 3.0))), pages)
    weight[rng.random(pages) < draw(st.sampled_from((0.0, 0.0, 0.3)))] = 0
    loss = np.ascontiguousarray(np.sort(loss, axis=1)[:, ::-1]) * weight[:, None]
    least, most = pages * int(cost[0]), pages * int(cost[-1])
    budget = draw(st.integers(least, most) | st.sampled_from((least, most, most + 10**30)))
    ceiling = draw(st.none() | st.just(rng.integers(0, len(cost), pages)))
    return AllocationCase(loss, cost, budget, ceiling)


# Packing and codecs

WIDTHS = (1, 2, 3, 4, 5, 6, 8)
"""Bits of one code."""


def array_shapes(max_last: int = 70) -> st.SearchStrategy[tuple[int, ...]]:
    """Draw shapes of one to four axes, any of which may be empty."""
    leading = st.lists(st.integers(0, 4), max_size=3)
    return st.tuples(leading, st.integers(0, max_last)).map(lambda drawn: (*drawn[0], drawn[1]))


@st.composite
def code_arrays(draw: st.DrawFn) -> tuple[NDArray[np.uint8], int]:
    """Draw codes and their width; the array may be a hostile view."""
    bits, rng = draw(st.sampled_from(WIDTHS)), np.random.default_rng(draw(SEEDS))
    codes = rng.integers(0, 2**bits, draw(array_shapes()), dtype=np.uint8)
    return hostile_view(rng, codes) if draw(st.booleans()) else codes, bits


@st.composite
def ternary_arrays(draw: st.DrawFn) -> NDArray[np.int8]:
    """Draw values -1, 0, 1; the array may be a hostile view."""
    rng = np.random.default_rng(draw(SEEDS))
    values = rng.integers(-1, 2, draw(array_shapes()), dtype=np.int8)
    return hostile_view(rng, values) if draw(st.booleans()) else values


@dataclass(frozen=True, repr=False)
class CodecCase:
    """A call of `quantize`; prints as shape and options."""

    x: Array
    bits: float
    options: dict[str, Any]  # axis, group_size, codec

    def __repr__(self) -> str:
        return f"CodecCase({self.x.dtype} {self.x.shape}, {self.bits}, {self.options})"


CODECS = ("affine", "symmetric", "hadamard", "ternary")

CODEC_CONTENTS = (
    "normal",
    "any scale",
    "bit patterns",
    "constant",
    "few values",
    "far from zero",
    "least numbers",
)
"""What an array to be quantised may hold; "bit patterns" has NaN and infinities among them."""


FINITE_CONTENTS = tuple(content for content in CODEC_CONTENTS if content != "bit patterns")


@st.composite
def codec_cases(
    draw: st.DrawFn,
    *,
    codecs: tuple[str, ...] = CODECS,
    contents: tuple[str, ...] = CODEC_CONTENTS,
    dtypes: tuple[np.dtype[Any], ...] = FLOATS,
) -> CodecCase:
    """Draw an array of up to four axes, none of them empty, and how to quantise it."""
    rng = np.random.default_rng(draw(SEEDS))
    last = draw(st.integers(1, 70) | st.sampled_from((80, 96, 128, 256)))
    shape = (*draw(st.lists(st.integers(1, 5), max_size=3)), last)
    x = codec_content(rng, shape, draw(st.sampled_from(contents)), draw(st.sampled_from(dtypes)))
    codec = draw(st.sampled_from(codecs))
    axis = draw(st.integers(-len(shape), len(shape) - 1))
    options = {"axis": axis, "group_size": draw(st.none() | st.integers(1, shape[axis])), "codec": codec}
    x = hostile_view(rng, x) if draw(st.booleans()) else x
    return CodecCase(x, 1.6 if codec == "ternary" else draw(st.sampled_from(WIDTHS)), options)


def codec_content(
    rng: np.random.Generator, shape: tuple[int, ...], content: str, dtype: np.dtype[Any]
) -> Array:
    """Return an array that holds one of `CODEC_CONTENTS`; what is beyond the range of `dtype` is cut off."""
    rows = (*shape[:-1], 1)
    if content == "bit patterns":
        return rng.integers(0, 2 ** (8 * dtype.itemsize), shape).astype(f"u{dtype.itemsize}").view(dtype)
    x = rng.standard_normal(shape)
    if content == "any scale":
        x *= np.exp2(rng.integers(-140, 120, rows))
    elif content == "constant":
        x = np.broadcast_to(x[..., :1], shape) * np.exp2(rng.integers(-30, 30, rows))
    elif content == "few values":
        x = rng.integers(-3, 4, shape) * rng.choice([0.0, 1.0, 6e-8, 1e-5, 65504 / 3, 1e30], rows)
    elif content == "far from zero":
        x = 10 + 1e-3 * x
    elif content == "least numbers":
        x = rng.integers(-9, 10, shape) * float(ml_dtypes.finfo(dtype).smallest_subnormal)
    largest = float(np.finfo(np.float16).max) if dtype == np.float16 else 2.0**126
    return np.clip(x, -largest, largest).astype(dtype)

"""What gradients of attention are judged with: the formula in low precision, and the answers of typical bugs.

As in `tests.compare`, and judged by its `assert_accurate`. The low-precision formula stores probabilities,
their slopes and the output in the dtype of q, and sums in float32, as around every tensor core. What rounding
lse to float32 costs, at scores of thousands more than anything else, is in it.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from numpy.typing import ArrayLike, NDArray

from kvlab.reference import attention as forward
from kvlab.reference import attention_backward as reference
from tests.compare import assert_accurate

Array = NDArray[Any]
Gradients = tuple[Array, Array, Array]


def exact_gradients(dout: Array, q: Array, k: Array, v: Array, **options: Any) -> Gradients:
    """Return dq, dk, dv in float64, from a float64 forward."""
    out, lse = forward.attention(q, k, v, return_lse=True, **options)
    return reference.attention_backward(dout, q, k, v, out, lse, **options)


def low_precision_gradients(
    dout: Array,
    q: Array,
    k: Array,
    v: Array,
    *,
    causal: bool = False,
    scale: float | None = None,
    window: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
) -> Gradients:
    """Compute the gradients from an exact forward, its out stored in the dtype of q, its lse in float32.

    Heads are repeated and then summed, which no kernel does. The order in which float32 sums add their terms
    is a kernel's own, so those that something cancels in are taken an ulp of their terms' size away from what
    NumPy finds: scores once, and twice the difference of two sums that makes a slope. (A row that sees one
    key has slopes of zero; NumPy may happen to find just that, which no kernel needs to.)
    """
    seqlen_q, heads, head_dim = q.shape[1:]
    seqlen_k, kv_heads = k.shape[1:3]
    factor = np.float32(head_dim**-0.5 if scale is None else scale)

    def stored(x: Array) -> Array:
        return x.astype(q.dtype).astype(np.float32)

    q_wide, above = q.astype(np.float32), dout.astype(np.float32)
    k_wide, v_wide = (np.repeat(x.astype(np.float32), heads // kv_heads, axis=2) for x in (k, v))
    options: dict[str, Any] = {"causal": causal, "scale": scale, "window": window, "softcap": softcap}
    out, lse = (np.asarray(x) for x in forward.attention(q, k, v, return_lse=True, **options))
    out, lse = stored(out), lse.astype(np.float32)[..., None]
    scores = factor * np.einsum("bqhd,bkhd->bhqk", q_wide, k_wide, optimize=True)
    sizes = factor * np.einsum("bqhd,bkhd->bhqk", np.abs(q_wide), np.abs(k_wide), optimize=True)
    scores += np.spacing(np.abs(sizes))
    bend = np.float32(1)
    if softcap > 0:
        scores = np.float32(softcap) * np.tanh(scores / np.float32(softcap))
        bend = 1 - (scores / np.float32(softcap)) ** 2
    visible = forward.visible_keys(seqlen_q, seqlen_k, causal=causal, window=window)
    scores = np.where(visible, scores, -np.inf).astype(np.float32)
    p = stored(np.exp(scores - np.where(lse == -np.inf, np.float32(0), lse)))
    terms = above * out
    delta = (terms.sum(axis=-1) + 2 * np.spacing(np.abs(terms).sum(axis=-1))).swapaxes(1, 2)[..., None]
    slopes = stored(p * (np.einsum("bqhd,bkhd->bhqk", above, v_wide, optimize=True) - delta) * bend)

    dq = factor * np.einsum("bhqk,bkhd->bqhd", slopes, k_wide, optimize=True)
    dk = factor * np.einsum("bhqk,bqhd->bkhd", slopes, q_wide, optimize=True)
    dv = np.einsum("bhqk,bqhd->bkhd", p, above, optimize=True)
    grouped = (*k.shape[:3], heads // kv_heads, head_dim)
    return dq.astype(q.dtype), *(x.reshape(grouped).sum(axis=3).astype(q.dtype) for x in (dk, dv))


def each_sequence(
    gradients: Callable[..., Gradients],
    dout: Array,
    q: Array,
    k: Array,
    v: Array,
    cu_seqlens_q: ArrayLike,
    cu_seqlens_k: ArrayLike,
    **options: Any,
) -> Gradients:
    """Call the gradients of a fixed-length call on every sequence by itself, and join them."""
    parts: list[list[Array]] = [[q[:0]], [k[:0]], [v[:0]]]
    bounds = pairwise(np.asarray(cu_seqlens_q)), pairwise(np.asarray(cu_seqlens_k))
    for (q0, q1), (k0, k1) in zip(*bounds, strict=True):
        own = (dout[None, q0:q1], q[None, q0:q1], k[None, k0:k1], v[None, k0:k1])
        for part, one in zip(parts, gradients(*own, **options), strict=True):
            part.append(one[0])
    dq, dk, dv = (np.concatenate(part) for part in parts)
    return dq, dk, dv


def assert_gradients(actual: Gradients, expected: Gradients, low: Gradients) -> None:
    """Judge dq, dk and dv, each by itself."""
    for name, *three in zip(("dq", "dk", "dv"), actual, expected, low, strict=True):
        assert_accurate(*three, name)


def assert_refuses(wrong: Gradients, expected: Gradients, low: Gradients) -> None:
    """Raise unless the judge says no to a wrong answer."""
    with pytest.raises(AssertionError, match=r"d[qkv]: error"):
        assert_gradients(wrong, expected, low)


def wrong_gradients(dout: Array, q: Array, k: Array, v: Array, **options: Any) -> dict[str, Gradients]:
    """Return what typical bugs would answer, by name, in the dtype of q."""
    out, lse = forward.attention(q, k, v, return_lse=True, **options)
    arguments = (dout, q, k, v, out, lse)
    right = reference.attention_backward(*arguments, **options)
    answers: dict[str, Any] = {
        "zeros": [np.zeros(x.shape) for x in right],
        "dout as it comes": [dout, right[1], right[2]],
        "delta left out": reference.attention_backward(dout, q, k, v, 0 * out, lse, **options),
        "scale left out": [right[0] * 3, right[1] * 3, right[2]],
        "a query row missing": [_without_a_row(right[0]), *right[1:]],
        "a key missing in dk": [right[0], _without_a_row(right[1]), right[2]],
        "a key missing in dv": [*right[:2], _without_a_row(right[2])],
    }
    if options.get("softcap", 0) > 0:
        plain = options | {"softcap": 0.0}
        answers["missing softcap"] = exact_gradients(dout, q, k, v, **plain)
    heads, kv_heads = q.shape[2], k.shape[2]
    group = heads // kv_heads
    if heads > 1:
        answers["permuted heads"] = [np.roll(right[0], 1, axis=2), *right[1:]]
    if group > 1:
        one = [x[:, :, ::group] for x in (dout, q)], [out[:, :, ::group], lse[:, ::group]]
        alone = reference.attention_backward(*one[0], k, v, *one[1], **options)
        answers["one head of a group"] = [right[0], *alone[1:]]
    for name, step in (("mask shifted left", -1), ("mask shifted right", 1)):
        answers[name] = _shifted(step, dout, q, k, v, **options)
    return {name: tuple(np.asarray(x).astype(q.dtype) for x in answer) for name, answer in answers.items()}


def _shifted(step: int, dout: Array, q: Array, k: Array, v: Array, **options: Any) -> list[Array]:
    """Gradients where every row sees the keys of its neighbour."""
    mask = {name: options[name] for name in ("causal", "window") if name in options}
    score = {name: options[name] for name in ("scale", "softcap") if name in options}
    visible = np.roll(forward.visible_keys(q.shape[1], k.shape[1], **mask), step, axis=1)
    wide = [x.astype(np.float64) for x in (dout, q, k, v)]
    results = []
    for b in range(len(q)):
        dout_b, q_b, k_b, v_b = (x[b] for x in wide)
        out, lse = forward.attend_rows(q_b, k_b, v_b, visible, **score)
        results.append(reference.backward_rows(dout_b, q_b, k_b, v_b, out, lse, visible, **score))
    return [np.stack(parts) for parts in zip(*results, strict=True)]


def _without_a_row(x: Array) -> Array:
    """Gradients differ in size, unlike rows of out: leave out one of the middle."""
    size = np.abs(x).max(axis=-1, keepdims=True)
    return np.where(size == np.sort(size, axis=None)[size.size // 2], 0.0, x)

"""Judging a result: how close is close enough, and proof that the judge can say no.

A kernel may be off by as much as the same formula is when NumPy computes it in the input dtype, twice over,
plus two units in the last place of the output. So the tolerance comes from the data and nobody tunes it:

    max|actual - expected| <= 2 * max|low_precision - expected| + 2 * ulp(max|expected|)

`expected` is float64, `low_precision` comes from one of the `low_precision_*` functions below, each max runs
over the whole array, and the ulp is that of actual's dtype. Infinities and NaN must stand at exactly the same
places.

A judge that never says no is worth nothing: `wrong_attention` plants the answers of typical bugs (a mask
shifted by one, heads mixed up, a scale forgotten), so that every test of attention can prove that its data
tell them apart.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kvlab.reference import attention as reference
from kvlab.reference.codec import hadamard_matrix

Array = NDArray[Any]


def assert_accurate(actual: Array, expected: ArrayLike, low_precision: ArrayLike, name: str = "out") -> None:
    """Raise AssertionError unless `actual` is as close to the float64 result `expected` as its dtype allows.

    `low_precision` is the same formula in the input dtype. The message names the worst element. Raises
    ValueError if these data cannot judge: the low-precision formula, or the output dtype at max|expected|,
    overflows.
    """
    got, want, low = (np.asarray(x, dtype=np.float64) for x in (actual, expected, low_precision))
    error, allowed_low, allowed_ulp = _error_and_allowed(got, want, low, actual.dtype, name)
    allowed = allowed_low + allowed_ulp
    if error.max(initial=0) > allowed:
        worst = np.unravel_index(error.argmax(), error.shape)
        place = tuple(map(int, worst))
        raise AssertionError(
            f"{name}: error {error[worst]:.3g} at {place}: {got[worst]:.9g}, expected {want[worst]:.9g}, "
            f"{low[worst]:.9g} in low precision. Allowed is {allowed:.3g}: {allowed_low:.3g} for low "
            f"precision and {allowed_ulp:.3g} for 2 ulp of {actual.dtype}. "
            f"{np.count_nonzero(error > allowed)} of {error.size} elements exceed it"
        )


def share_of_allowed(actual: Array, expected: ArrayLike, low_precision: ArrayLike) -> float:
    """Return the largest error as a share of what `assert_accurate` allows: 1 at most passes there."""
    got, want, low = (np.asarray(x, dtype=np.float64) for x in (actual, expected, low_precision))
    error, *allowed = _error_and_allowed(got, want, low, actual.dtype, "result")
    return float(error.max(initial=0) / sum(allowed)) if error.any() else 0.0


def ulp(value: float, dtype: np.dtype[Any]) -> float:
    """Return the distance from |value| to the next number of this dtype; NaN if it overflows."""
    with np.errstate(over="ignore", invalid="ignore"):
        return float(np.spacing(np.abs(np.asarray(value).astype(dtype))))


def _error_and_allowed(
    got: Array, want: Array, low: Array, dtype: np.dtype[Any], name: str
) -> tuple[Array, float, float]:
    """Return errors, and what is allowed for low precision and for 2 ulp."""
    if not got.shape == want.shape == low.shape:
        raise AssertionError(f"{name}: shape {got.shape}, expected {want.shape}, low precision {low.shape}")
    _assert_same_places(got, want, name)
    finite = np.isfinite(want)
    if not finite.any():
        return np.zeros(want.shape), 0.0, 0.0
    allowed_low = float(2 * _distance(low, want, finite).max())
    allowed_ulp = 2 * ulp(np.abs(want[finite]).max(), dtype)
    if not np.isfinite(allowed_low + allowed_ulp):
        raise ValueError(f"{name}: these data overflow in {dtype} or in low precision, and cannot judge")
    return _distance(got, want, finite), allowed_low, allowed_ulp


def _distance(x: Array, expected: Array, where: NDArray[np.bool_]) -> Array:
    return np.abs(np.subtract(x, expected, where=where, out=np.zeros_like(expected)))


def _assert_same_places(got: Array, want: Array, name: str) -> None:
    kinds: dict[str, Callable[[Array], Array]] = {"NaN": np.isnan, "+inf": np.isposinf, "-inf": np.isneginf}
    for kind, is_kind in kinds.items():
        differing = np.argwhere(is_kind(got) != is_kind(want))
        if len(differing):
            place = tuple(map(int, differing[0]))
            raise AssertionError(
                f"{name}: {kind} stands at other places than expected, first at {place}: {got[place]}, "
                f"expected {want[place]}; {len(differing)} of {got.size} elements differ in this"
            )


def low_precision_attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    causal: bool = False,
    scale: float | None = None,
    window: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
) -> tuple[Array, Array]:
    """Compute attention with scores, probabilities and output stored in the dtype of q: (out, float32 lse).

    Matrix products are summed and the softmax is computed in float32, as around every tensor core. Written
    apart from the reference (heads repeated, each row's keys as a range), so that each checks the other.
    """
    seqlen_q, num_heads_q, head_dim = q.shape[1:]
    seqlen_k, num_heads_kv = k.shape[1:3]

    def stored(x: Array) -> Array:
        return x.astype(q.dtype).astype(np.float32)

    q_scaled = stored(q.astype(np.float32) * np.float32(head_dim**-0.5 if scale is None else scale))
    k_all, v_all = (np.repeat(x.astype(np.float32), num_heads_q // num_heads_kv, axis=2) for x in (k, v))
    scores = stored(np.einsum("bqhd,bkhd->bhqk", q_scaled, k_all, optimize=True))
    if softcap > 0:
        scores = stored(np.float32(softcap) * np.tanh(scores / np.float32(softcap)))
    first, last = _visible_range(np.arange(seqlen_k - seqlen_q, seqlen_k), seqlen_k, causal, window)
    scores = np.where(_within(first, last, seqlen_k), scores, -np.inf).astype(np.float32)

    largest = np.maximum(scores.max(axis=-1, keepdims=True, initial=-np.inf), np.finfo(np.float32).min)
    weights = np.exp(scores - largest)
    total = weights.sum(axis=-1, keepdims=True)
    probabilities = stored(weights / np.where(total == 0, np.float32(1), total))
    out = np.einsum("bhqk,bkhd->bqhd", probabilities, v_all, optimize=True).astype(q.dtype)
    with np.errstate(divide="ignore"):
        return out, (largest + np.log(total))[..., 0]


def low_precision_in_bases(q: Array, k: Array, v: Array, bases: int = 32) -> Array:
    """Out of `low_precision_attention` in the basis, of several, that takes each element farthest.

    In float32 a single key that dominates a row may be lucky in one order of sums.
    """
    head_dim = q.shape[-1]
    signs = np.random.default_rng(0).choice([-1, 1], (bases, head_dim, 1))
    turns = [np.eye(head_dim), *(sign * hadamard_matrix(head_dim) for sign in signs[1:])]
    outs = []
    for turn in turns:
        rotated = [(x.astype(np.float64) @ turn).astype(q.dtype) for x in (q, k, v)]
        outs.append(low_precision_attention(*rotated)[0] @ turn.T.astype(np.float32))
    far = np.abs(np.stack(outs) - outs[0]).argmax(axis=0)[None]
    return np.take_along_axis(np.stack(outs), far, 0)[0]


def low_precision_merge(outs: Sequence[Array], lses: Sequence[Array]) -> tuple[Array, Array]:
    """Merge partial attention with weights and output stored in the dtype of the outs: (out, float32 lse)."""
    dtype = outs[0].dtype
    parts = np.stack([np.asarray(lse, dtype=np.float32) for lse in lses])
    lse = np.logaddexp.reduce(parts, axis=0)
    weights = np.exp(parts - np.maximum(lse, np.finfo(np.float32).min)).astype(dtype).astype(np.float32)
    weights = np.swapaxes(weights, -1, -2)[..., None]
    merged = sum(weight * out.astype(np.float32) for weight, out in zip(weights, outs, strict=True))
    return np.asarray(merged).astype(dtype), lse


def each_sequence(
    attend: Callable[..., tuple[Array, Array]],
    q: Array,
    k: Array,
    v: Array,
    cu_seqlens_q: ArrayLike,
    cu_seqlens_k: ArrayLike,
    **options: Any,
) -> tuple[Array, Array]:
    """Call a fixed-length attention on every sequence by itself, and join out and lse for variable length."""
    bounds_q, bounds_k = pairwise(np.asarray(cu_seqlens_q)), pairwise(np.asarray(cu_seqlens_k))
    results = [
        attend(q[None, q0:q1], k[None, k0:k1], v[None, k0:k1], **options)
        for (q0, q1), (k0, k1) in zip(bounds_q, bounds_k, strict=True)
    ]
    outs = [q[:0], *(out[0] for out, _ in results)]
    lses = [np.zeros((q.shape[1], 0), np.float32), *(lse[0] for _, lse in results)]
    return np.concatenate(outs), np.concatenate(lses, axis=-1)


def wrong_attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    causal: bool = False,
    scale: float | None = None,
    window: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
) -> dict[str, Array]:
    """Return what typical bugs would answer for a fixed-length call, by name, in the dtype of q.

    Only bugs that this call can show: heads cannot be permuted where there is one. Telling them from the
    right answer takes rows that see several keys, and rows of like size: the tolerance is that of the largest
    row. A row that averages thousands of keys is so small that in bfloat16 nobody misses it, unless few keys
    dominate it.
    """
    options: dict[str, Any] = {"causal": causal, "scale": scale, "window": window, "softcap": softcap}
    seqlen_q, num_heads_q = q.shape[1:3]
    seqlen_k, num_heads_kv = k.shape[1:3]
    group = num_heads_q // num_heads_kv
    right: Any = reference.attention(q, k, v, **options)
    answers: dict[str, Any] = {
        "zeros": np.zeros(q.shape),
        "smallest row missing": _without_smallest_row(right),
        "mean of v": reference.attention(np.zeros_like(q), k, v, **options),
        "missing scale": reference.attention(q, k, v, **options | {"scale": 1.0}),
    }
    if softcap > 0:
        answers["missing softcap"] = reference.attention(q, k, v, **options | {"softcap": 0.0})
    if num_heads_q > 1:
        answers["permuted heads"] = np.roll(right, 1, axis=2)
    if num_heads_kv > 1:
        answers["swapped kv heads"] = reference.attention(q, k[:, :, ::-1], v[:, :, ::-1], **options)
    if num_heads_kv > 1 and group > 1:
        k_tiled, v_tiled = (np.concatenate([x] * group, axis=2) for x in (k, v))
        answers["head h reads kv head h % num_heads_kv"] = reference.attention(q, k_tiled, v_tiled, **options)

    first, last = _visible_range(np.arange(seqlen_k - seqlen_q, seqlen_k), seqlen_k, causal, window)
    masks = {"mask shifted left": (first - 1, last - 1), "mask shifted right": (first + 1, last + 1)}
    if seqlen_q != seqlen_k and (causal or window != (-1, -1)):
        masks["mask aligned top-left"] = _visible_range(np.arange(seqlen_q), seqlen_k, causal, window)
    for name, (first, last) in masks.items():
        visible = _within(first, last, seqlen_k)
        answers[name] = _masked_attention(q, k, v, visible, scale=scale, softcap=softcap)
    return {name: answer.astype(q.dtype) for name, answer in answers.items()}


def _visible_range(
    position: Array, seqlen_k: int, causal: bool, window: tuple[int, int]
) -> tuple[Array, Array]:
    """Return the first and the last key that rows at these positions see."""
    left, right = window[0], 0 if causal else window[1]
    first = np.zeros_like(position) if left < 0 else np.maximum(position - left, 0)
    last = np.full_like(position, seqlen_k - 1) if right < 0 else np.minimum(position + right, seqlen_k - 1)
    return first, last


def _within(first: Array, last: Array, seqlen_k: int) -> NDArray[np.bool_]:
    key = np.arange(seqlen_k)
    return (key >= first[:, None]) & (key <= last[:, None])


def _without_smallest_row(out: Array) -> Array:
    size = np.abs(out).max(axis=-1, keepdims=True)
    return np.where(size == size[size > 0].min(initial=np.inf), 0.0, out)


def _masked_attention(
    q: Array, k: Array, v: Array, visible: NDArray[np.bool_], *, scale: float | None, softcap: float
) -> Array:
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    options: dict[str, Any] = {"scale": scale, "softcap": softcap}
    return np.stack([reference.attend_rows(q[b], k[b], v[b], visible, **options)[0] for b in range(len(q))])

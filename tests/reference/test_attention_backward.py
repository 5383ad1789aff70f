"""The float64 gradients of attention: against finite differences, torch's autograd, and the law of parts."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from numpy.typing import NDArray

from kvlab.reference import attention as forward
from kvlab.reference.attention_backward import attention_backward, attention_varlen_backward
from tests.gradients import each_sequence, exact_gradients
from tests.strategies import (
    SEEDS,
    AttentionCase,
    VarlenAttentionCase,
    attention_cases,
    varlen_attention_cases,
)

Array = NDArray[Any]


def _wide(case: AttentionCase, seed: int) -> tuple[np.random.Generator, list[Array]]:
    rng = np.random.default_rng(seed)
    q, k, v = (x.astype(np.float64) for x in (case.q, case.k, case.v))
    return rng, [rng.standard_normal(q.shape), q, k, v]


@given(attention_cases(max_seqlen=6), SEEDS)
def test_agrees_with_finite_differences(case: AttentionCase, seed: int) -> None:
    rng, (dout, q, k, v) = _wide(case, seed)
    gradients = exact_gradients(dout, q, k, v, **case.options)
    for argument, gradient in enumerate(gradients):
        way = rng.standard_normal(gradient.shape)
        way /= max(np.linalg.norm(way), 1.0)
        losses = []
        for step in (-2e-6, 2e-6):
            moved = [q, k, v]
            moved[argument] = moved[argument] + step * way
            losses.append((dout * forward.attention(*moved, **case.options)).sum())
        expected = (losses[1] - losses[0]) / 4e-6
        size = 1 + np.abs(dout).sum() * (1 + np.abs(v).max(initial=0))
        assert abs((gradient * way).sum() - expected) < 1e-7 * size


@settings(max_examples=25)
@given(attention_cases(max_seqlen=12), SEEDS)
def test_agrees_with_autograd(case: AttentionCase, seed: int) -> None:
    torch = pytest.importorskip("torch")
    _, (dout, q, k, v) = _wide(case, seed)
    options = case.options
    leaves = [torch.tensor(x, requires_grad=True) for x in (q, k, v)]
    group, scale = q.shape[2] // k.shape[2], options["scale"] or q.shape[-1] ** -0.5
    heads_first = [leaves[0].transpose(1, 2)]
    heads_first += [x.transpose(1, 2).repeat_interleave(group, 1) for x in leaves[1:]]
    scores = scale * heads_first[0] @ heads_first[1].transpose(2, 3)
    if options["softcap"]:
        scores = options["softcap"] * torch.tanh(scores / options["softcap"])
    mask = {name: options[name] for name in ("causal", "window")}
    visible = torch.from_numpy(forward.visible_keys(q.shape[1], k.shape[1], **mask))
    probabilities = scores.masked_fill(~visible, -1e300).softmax(-1) * visible.any(1, keepdim=True)
    (probabilities @ heads_first[2]).transpose(1, 2).backward(torch.from_numpy(dout))
    for gradient, leaf in zip(exact_gradients(dout, q, k, v, **options), leaves, strict=True):
        np.testing.assert_allclose(gradient, leaf.grad.numpy(), rtol=1e-9, atol=1e-9)


@given(varlen_attention_cases(max_seqlen=6), SEEDS)
def test_sequences_do_not_touch_each_other(case: VarlenAttentionCase, seed: int) -> None:
    _, (dout, q, k, v) = _wide(case, seed)
    bounds = case.cu_seqlens_q, case.cu_seqlens_k
    out, lse = forward.attention_varlen(*case.args, return_lse=True, **case.options)
    actual = attention_varlen_backward(dout, q, k, v, out, lse, *bounds, **case.options)
    expected = each_sequence(exact_gradients, dout, q, k, v, *bounds, **case.options)
    for one, other in zip(actual, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-12, atol=1e-12)


@given(attention_cases(min_seqlen=2, max_seqlen=9), SEEDS)
def test_gradients_of_parts_of_the_keys_are_parts_of_the_gradient(case: AttentionCase, seed: int) -> None:
    _, (dout, q, k, v) = _wide(case, seed)
    options: dict[str, Any] = {name: case.options[name] for name in ("scale", "softcap")}
    out, lse = forward.attention(q, k, v, return_lse=True, **options)
    whole = attention_backward(dout, q, k, v, out, lse, **options)
    half = k.shape[1] // 2
    parts = [
        attention_backward(dout, q, k[:, keys], v[:, keys], out, lse, **options)
        for keys in (slice(None, half), slice(half, None))
    ]
    np.testing.assert_allclose(parts[0][0] + parts[1][0], whole[0], rtol=1e-9, atol=1e-9)
    for i in (1, 2):
        joined = np.concatenate([part[i] for part in parts], axis=1)
        np.testing.assert_allclose(joined, whole[i], rtol=1e-9, atol=1e-9)


def test_a_capped_score_near_the_cap_keeps_its_small_slope() -> None:
    """1 - tanh(x)^2 is 3e-13 at x = 15: the difference would hold four digits of it, and none at 20."""
    for x in (0.1, 15.0, 20.0):
        q, k, v = (
            np.ones((1, 1, 1, 1)),
            np.array([x, 0.0]).reshape(1, 2, 1, 1),
            np.eye(2)[:, :1].reshape(1, 2, 1, 1),
        )
        dq = exact_gradients(np.ones((1, 1, 1, 1)), q, k, v, scale=1.0, softcap=1.0)[0]
        p = 1 / (1 + np.exp(-np.tanh(x)))
        expected = p * (1 - p) * 4 * np.exp(-2 * x) / (1 + np.exp(-2 * x)) ** 2 * x
        np.testing.assert_allclose(dq.item(), expected, rtol=1e-12)

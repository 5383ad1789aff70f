"""Gradients of attention on every backend of the CPU: promise 2, any shape, and what they refuse."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from numpy.typing import NDArray

from kvlab.ops.attention import attention, attention_varlen, merge_attention
from kvlab.ops.attention_backward import attention_backward, attention_varlen_backward, compute
from kvlab.ops.attention_call import FLOAT32_DK_DV
from kvlab.registry import last_backend, rows
from tests.gradients import (
    assert_gradients,
    assert_refuses,
    each_sequence,
    exact_gradients,
    low_precision_gradients,
    wrong_gradients,
)
from tests.strategies import (
    FLOATS,
    SEEDS,
    AttentionCase,
    VarlenAttentionCase,
    attention_cases,
    large_score_cases,
    random_floats,
    varlen_attention_cases,
)

Array = NDArray[Any]

BACKENDS = [row.backend for row in rows("attention_backward") if row.device_kind == "cpu"]


def _draw(seed: int, dtype: np.dtype[Any], *shapes: tuple[int, ...]) -> list[Array]:
    rng = np.random.default_rng(seed)
    return [random_floats(rng, shape, dtype, (-3, 1)) for shape in shapes]


def _gradients(dout: Array, q: Array, k: Array, v: Array, backend: str = "cpu", **options: Any) -> Any:
    out, lse = attention(q, k, v, return_lse=True, backend=backend, **options)
    return attention_backward(dout, q, k, v, out, lse, backend=backend, **options)


@pytest.mark.parametrize("backend", BACKENDS)
@settings(max_examples=30)
@given(case=attention_cases(max_seqlen=70), seed=SEEDS)
def test_fixed_length_agrees_with_the_reference(backend: str, case: AttentionCase, seed: int) -> None:
    dout = random_floats(np.random.default_rng(seed), case.q.shape, case.q.dtype)
    arrays = dout, case.q, case.k, case.v
    before = [x.tobytes() for x in arrays]
    actual = _gradients(*arrays, backend=backend, **case.options)
    assert last_backend() == backend
    assert {x.dtype for x in actual} == {case.q.dtype}
    expected = exact_gradients(*arrays, **case.options)
    assert_gradients(actual, expected, low_precision_gradients(*arrays, **case.options))
    assert [x.tobytes() for x in arrays] == before


@pytest.mark.parametrize("backend", BACKENDS)
@settings(max_examples=30)
@given(case=varlen_attention_cases(max_seqlen=60), seed=SEEDS)
def test_variable_length_agrees_with_the_reference(
    backend: str, case: VarlenAttentionCase, seed: int
) -> None:
    dout = random_floats(np.random.default_rng(seed), case.q.shape, case.q.dtype)
    out, lse = attention_varlen(*case.args, return_lse=True, backend=backend, **case.options)
    q, k, v, *sequences = case.args
    actual = attention_varlen_backward(dout, q, k, v, out, lse, *sequences, backend=backend, **case.options)
    arrays = dout, q, k, v, *sequences[:2]
    expected = each_sequence(exact_gradients, *arrays, **case.options)
    assert_gradients(actual, expected, each_sequence(low_precision_gradients, *arrays, **case.options))


@pytest.mark.parametrize("backend", BACKENDS)
@given(case=large_score_cases(), seed=SEEDS)
def test_few_keys_and_large_scores(backend: str, case: AttentionCase, seed: int) -> None:
    """Slopes of equal keys cancel in dq, in which rounding of out would be left."""
    arrays = random_floats(np.random.default_rng(seed), case.q.shape, case.q.dtype), case.q, case.k, case.v
    actual = _gradients(*arrays, backend=backend, **case.options)
    expected = exact_gradients(*arrays, **case.options)
    assert_gradients(actual, expected, low_precision_gradients(*arrays, **case.options))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("head_dim", [48, 128, 200])
def test_many_tiles_and_panels(dtype: np.dtype[Any], head_dim: int) -> None:
    """Several blocks of keys and of rows; the window leaves tiles out on both sides."""
    of_q, of_k = (1, 150, 4, head_dim), (1, 600, 2, head_dim)
    dout, q, k, v = _draw(1, dtype, of_q, of_q, of_k, of_k)
    for options in ({"causal": True}, {"window": (130, 40), "softcap": 20.0}):
        expected = exact_gradients(dout, q, k, v, **options)
        low = low_precision_gradients(dout, q, k, v, **options)
        assert_gradients(_gradients(dout, q, k, v, **options), expected, low)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_wrong_answers_would_be_noticed(backend: str, dtype: np.dtype[Any]) -> None:
    arrays = _draw(2, dtype, (1, 40, 6, 64), (1, 40, 6, 64), (1, 70, 2, 64), (1, 70, 2, 64))
    options: dict[str, Any] = {"causal": True, "window": (30, -1), "softcap": 4.0}
    expected, low = exact_gradients(*arrays, **options), low_precision_gradients(*arrays, **options)
    assert_gradients(_gradients(*arrays, backend=backend, **options), expected, low)
    wrong = wrong_gradients(*arrays, **options)
    assert len(wrong) == 12
    for answer in wrong.values():
        assert_refuses(answer, expected, low)


@pytest.mark.parametrize("backend", BACKENDS)
def test_parts_of_the_keys_give_parts_of_the_gradients(backend: str) -> None:
    dout, q, k, v = _draw(3, FLOATS[2], *[(2, 9, 4, 32)] * 2, *[(2, 90, 2, 32)] * 2)
    whole = _gradients(dout, q, k, v, backend=backend)
    cuts = [slice(i, i + 30) for i in range(0, 90, 30)]
    forward = [attention(q, k[:, cut], v[:, cut], return_lse=True, backend=backend) for cut in cuts]
    out, lse = merge_attention([one for one, _ in forward], [one for _, one in forward])
    parts = [attention_backward(dout, q, k[:, c], v[:, c], out, lse, backend=backend) for c in cuts]
    np.testing.assert_allclose(sum(part[0] for part in parts), whole[0], atol=2e-5)
    for i in (1, 2):
        np.testing.assert_allclose(np.concatenate([part[i] for part in parts], 1), whole[i], atol=2e-5)


def test_same_bits_for_any_number_of_threads_and_batch_mates() -> None:
    from numba import get_num_threads, set_num_threads

    arrays = _draw(4, FLOATS[0], *[(3, 200, 4, 64)] * 2, *[(3, 300, 2, 64)] * 2)
    together, threads = _gradients(*arrays, causal=True), get_num_threads()
    set_num_threads(1)
    try:
        alone = _gradients(*(x[1:2] for x in arrays), causal=True)
    finally:
        set_num_threads(threads)
    for one, other in zip(alone, together, strict=True):
        np.testing.assert_array_equal(one[0], other[1])


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_nobody_sees_has_no_gradient(backend: str) -> None:
    dout, q, k, v = _draw(5, FLOATS[2], *[(1, 30, 2, 16)] * 2, *[(1, 20, 2, 16)] * 2)
    dq = _gradients(dout, q, k, v, backend, causal=True, window=(3, -1))[0]
    assert (dq[:, :10] == 0).all()
    assert (dq[:, 11:] != 0).any(axis=-1).all()
    few = _gradients(dout[:, :5], q[:, :5], k, v, backend, window=(2, 0))
    assert (few[1][:, :13] == 0).all()
    assert (few[2][:, :13] == 0).all()
    assert (few[2][:, 13:] != 0).any(axis=-1).all()


def test_extreme_inputs() -> None:
    dout, q, k, v = _draw(6, FLOATS[2], *[(1, 30, 2, 64)] * 2, *[(1, 150, 2, 64)] * 2)
    k[:, 77] *= 40  # one dominant key
    for factor, options in ((10, {}), (10, {"causal": True}), (0, {"causal": True})):
        arrays = dout, np.float32(factor) * q, np.float32(factor) * k, v
        expected = exact_gradients(*arrays, **options)
        assert_gradients(
            _gradients(*arrays, **options), expected, low_precision_gradients(*arrays, **options)
        )
    dout[:, 20] = np.nan
    dq, dk, dv = _gradients(dout, q, k, v, causal=True)
    assert np.isnan(dq[:, 20]).all()
    assert np.isfinite(np.delete(dq, 20, axis=1)).all()
    assert np.isfinite(dk[:, 141:]).all()
    assert np.isnan(dv[:, 140]).all()


@pytest.mark.parametrize("kind", ["float16", "bfloat16", "float32", "float64"])
def test_torch_in_torch_out(kind: str) -> None:
    torch = pytest.importorskip("torch")
    q, k, v, dout = (torch.randn(2, 5, h, 16).to(getattr(torch, kind)) for h in (4, 2, 2, 4))
    gradients = _gradients(dout, q, k, v, backend="reference" if kind == "float64" else "cpu")
    assert last_backend() == ("reference" if kind == "float64" else "cpu")
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    heads_first = [x.transpose(1, 2) for x in leaves]
    exact = torch.nn.functional.scaled_dot_product_attention(*heads_first, enable_gqa=True)
    exact.transpose(1, 2).backward(dout.double())
    for gradient, leaf in zip(gradients, leaves, strict=True):
        assert gradient.dtype == q.dtype
        assert (gradient.double() - leaf.grad).abs().max() < (1e-6 if kind == "float64" else 0.05)


X = np.ones((2, 5, 4, 8), np.float16)
LSE = np.ones((2, 4, 5), np.float32)
ARGUMENTS = {"dout": X, "q": X, "k": X, "v": X, "out": X, "lse": LSE}


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"dout": X[:, :4]}, ValueError, "dout has Sq = 4"),
        ({"out": X[..., :6]}, ValueError, "out has D = 6"),
        ({"lse": LSE[:, :, :4]}, ValueError, "lse has Sq = 4"),
        ({"lse": LSE.astype(np.float64)}, TypeError, "lse has dtype float64; it must be float32"),
        ({"dout": X.astype(np.float32)}, TypeError, "dout has dtype float32, q has float16"),
        ({"k": X[:, :, :3], "v": X[:, :, :3]}, ValueError, "q has 4 heads: .* multiple of the 3 heads"),
        ({"deterministic": 2}, TypeError, "deterministic"),
        ({"backend": "cuda"}, NotImplementedError, "works on cuda arrays"),
        ({"v": [1.0]}, TypeError, "v must be an array"),
    ],
)
def test_what_does_not_fit_is_refused(changed: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        attention_backward(**(ARGUMENTS | changed))


@pytest.mark.parametrize("backend", BACKENDS)
def test_variable_lengths_that_do_not_fit_are_refused(backend: str) -> None:
    cu = np.array([0, 4, 10], np.int32)
    y, lse = np.ones((10, 4, 8), np.float16), np.ones((4, 10), np.float32)
    with pytest.raises(ValueError, match=r"cu_seqlens_k is \[1, 5, 11\]: it must rise from 0 to 10"):
        attention_varlen_backward(y, y, y, y, y, lse, cu, cu + 1, 6, 6, backend=backend)
    with pytest.raises(ValueError, match=r"lse has total_q = 9"):
        attention_varlen_backward(y, y, y, y, y, lse[:, :9], cu, cu, 6, 6, backend=backend)


@pytest.mark.parametrize("head_dim", [8, 13, 64])
@pytest.mark.parametrize("dtype", FLOATS[:2], ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_of_keys_in_float32(backend: str, dtype: np.dtype[Any], head_dim: int) -> None:
    rng = np.random.default_rng(0)
    q, dout = (rng.standard_normal((1, 30, 4, head_dim)).astype(dtype) for _ in "qd")
    k, v = (rng.standard_normal((1, 90, 2, head_dim)).astype(dtype) for _ in "kv")
    out, lse = attention(q, k, v, causal=True, return_lse=True, backend=backend)
    wide, narrow = (
        attention_backward(dout, q, k, v, out, lse, causal=True, float32_dk_dv=in_float32, backend=backend)
        for in_float32 in (True, False)
    )
    exact = exact_gradients(dout, q, k, v, causal=True)
    np.testing.assert_array_equal(wide[0], narrow[0])
    for one, other in zip(wide[1:], narrow[1:], strict=True):
        assert (one.dtype, other.dtype) == (np.float32, dtype)
        np.testing.assert_array_equal(one.astype(dtype), other)
    # of dv, which owes nothing to the rounding of out
    errors = [np.abs(x.astype(np.float64) - exact[2]).max() for x in (wide[2], narrow[2])]
    assert errors[0] < 1e-5 < errors[1]


def test_a_flag_that_is_a_number_is_refused() -> None:
    q = np.ones((1, 3, 1, 4), np.float32)
    out, lse = attention(q, q, q, return_lse=True)
    with pytest.raises(TypeError, match=r"float32_dk_dv=1\.0 must be True or False"):
        attention_backward(q, q, q, q, out, lse, float32_dk_dv=1.0)  # type: ignore[arg-type]


def test_float32_gradients_of_keys_of_16_bit_inputs_are_refused_by_numba() -> None:
    """Before anything runs, so no GPU is needed to see it."""
    call: Any = SimpleNamespace(extra=FLOAT32_DK_DV, row=SimpleNamespace(backend="numba"), dtype="float16")
    with pytest.raises(NotImplementedError, match=r"float32_dk_dv=True: backend 'numba' gives dk and dv in"):
        compute(call, (), ())

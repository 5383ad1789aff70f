"""attention and attention_varlen on every backend of the CPU: promise 2, any shape, and what they refuse."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from numpy.typing import NDArray

from kvlab.ops.attention import attention, attention_varlen, merge_attention
from kvlab.reference import attention as reference
from kvlab.registry import last_backend, rows
from tests.compare import assert_accurate, each_sequence, low_precision_attention, wrong_attention
from tests.strategies import (
    FLOATS,
    AttentionCase,
    VarlenAttentionCase,
    attention_cases,
    large_score_cases,
    random_floats,
    varlen_attention_cases,
)

Array = NDArray[Any]

BACKENDS = [row.backend for row in rows("attention") if row.device_kind == "cpu"]


@pytest.mark.parametrize("backend", BACKENDS)
@given(case=attention_cases(max_seqlen=80))
def test_fixed_length_agrees_with_the_reference(backend: str, case: AttentionCase) -> None:
    before = [x.tobytes() for x in (case.q, case.k, case.v)]
    out, lse = attention(case.q, case.k, case.v, return_lse=True, backend=backend, **case.options)
    assert last_backend() == backend
    assert (out.dtype, lse.dtype) == (case.q.dtype, np.float32)
    expected, expected_lse = reference.attention(case.q, case.k, case.v, return_lse=True, **case.options)
    low, low_lse = low_precision_attention(case.q, case.k, case.v, **case.options)
    assert_accurate(out, expected, low)
    assert_accurate(lse, expected_lse, low_lse, "lse")
    assert [x.tobytes() for x in (case.q, case.k, case.v)] == before


@pytest.mark.parametrize("backend", BACKENDS)
@given(case=varlen_attention_cases(max_seqlen=70))
def test_variable_length_agrees_with_the_reference(backend: str, case: VarlenAttentionCase) -> None:
    out, lse = attention_varlen(*case.args, return_lse=True, backend=backend, **case.options)
    expected, expected_lse = reference.attention_varlen(*case.args, return_lse=True, **case.options)
    arrays = case.args[:5]
    low, low_lse = each_sequence(low_precision_attention, *arrays, **case.options)
    assert_accurate(out, expected, low)
    assert_accurate(lse, expected_lse, low_lse, "lse")


@pytest.mark.parametrize("backend", BACKENDS)
@given(case=large_score_cases())
def test_few_keys_and_large_scores(backend: str, case: AttentionCase) -> None:
    """The rounding of a score in float32 would be seen in out: weights of few keys hang on it."""
    out, lse = attention(case.q, case.k, case.v, return_lse=True, backend=backend, **case.options)
    expected, expected_lse = reference.attention(case.q, case.k, case.v, return_lse=True, **case.options)
    low, low_lse = low_precision_attention(case.q, case.k, case.v, **case.options)
    assert_accurate(out, expected, low)
    assert_accurate(lse, expected_lse, low_lse, "lse")


def _draw(seed: int, dtype: np.dtype[Any], *shapes: tuple[int, ...]) -> list[Array]:
    rng = np.random.default_rng(seed)
    return [random_floats(rng, shape, dtype, (-3, 1)) for shape in shapes]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("head_dim", [48, 128, 200, 256])
def test_many_tiles_and_panels(dtype: np.dtype[Any], head_dim: int) -> None:
    """Several tiles of keys and blocks of rows; the window leaves tiles out on both sides."""
    shapes = (1, 150, 4, head_dim), (1, 500, 2, head_dim), (1, 500, 2, head_dim)
    q, k, v = _draw(1, dtype, *shapes)
    for window in ((-1, -1), (130, 40)):
        out, lse = attention(q, k, v, causal=window[0] < 0, window=window, return_lse=True)
        options: dict[str, Any] = {"causal": window[0] < 0, "window": window}
        expected, expected_lse = reference.attention(q, k, v, return_lse=True, **options)
        low, low_lse = low_precision_attention(q, k, v, **options)
        assert_accurate(out, expected, low)
        assert_accurate(lse, expected_lse, low_lse, "lse")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_wrong_answers_would_be_noticed(backend: str, dtype: np.dtype[Any]) -> None:
    q, k, v = _draw(2, dtype, (1, 40, 6, 64), (1, 70, 2, 64), (1, 70, 2, 64))
    options: dict[str, Any] = {"causal": True, "window": (30, -1), "softcap": 4.0}
    expected, low = reference.attention(q, k, v, **options), low_precision_attention(q, k, v, **options)[0]
    assert_accurate(attention(q, k, v, backend=backend, **options), expected, low)
    for answer in wrong_attention(q, k, v, **options).values():
        with pytest.raises(AssertionError, match="out: error"):
            assert_accurate(answer, expected, low)


@pytest.mark.parametrize("backend", BACKENDS)
def test_parts_of_the_keys_merge_to_the_whole(backend: str) -> None:
    q, k, v = _draw(3, FLOATS[2], (2, 9, 4, 32), (2, 100, 2, 32), (2, 100, 2, 32))
    parts = [
        attention(q, k[:, i : i + 30], v[:, i : i + 30], return_lse=True, backend=backend)
        for i in range(0, 100, 30)
    ]
    merged, lse = merge_attention([out for out, _ in parts], [lse for _, lse in parts])
    whole, whole_lse = attention(q, k, v, return_lse=True, backend=backend)
    np.testing.assert_allclose(merged, whole, atol=2e-6)
    np.testing.assert_allclose(lse, whole_lse, atol=2e-6)


def test_same_bits_for_any_number_of_threads_and_batch_mates() -> None:
    from numba import get_num_threads, set_num_threads

    q, k, v = _draw(4, FLOATS[0], (3, 200, 4, 64), (3, 300, 2, 64), (3, 300, 2, 64))
    out, threads = attention(q, k, v, causal=True), get_num_threads()
    set_num_threads(1)
    try:
        alone = attention(q[1:2], k[1:2], v[1:2], causal=True)
    finally:
        set_num_threads(threads)
    np.testing.assert_array_equal(alone[0], out[1])


def test_extreme_inputs() -> None:
    q, k, v = _draw(5, FLOATS[2], (1, 30, 2, 64), (1, 150, 2, 64), (1, 150, 2, 64))
    k[:, 77] *= 40  # one dominant key
    for causal in (False, True):
        expected = reference.attention(10 * q, 10 * k, v, causal=causal)
        low = low_precision_attention(10 * q, 10 * k, v, causal=causal)[0]
        assert_accurate(attention(10 * q, 10 * k, v, causal=causal), expected, low)
    k[:, 130:] = np.inf
    out = attention(q, k, v, causal=True)
    assert np.isfinite(out[:, :10]).all()
    assert np.isnan(out[:, 10:]).any(axis=-1).all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", ["float16", "bfloat16", "float32"])
def test_torch_in_torch_out(backend: str, kind: str) -> None:
    torch = pytest.importorskip("torch")
    q, k, v = (torch.randn(2, 5, h, 16).to(getattr(torch, kind)) for h in (4, 2, 2))
    out, lse = attention(q, k, v, return_lse=True, backend=backend)
    assert (out.dtype, lse.dtype) == (q.dtype, torch.float32)
    wide = [x.double().transpose(1, 2) for x in (q, k, v)]
    exact = torch.nn.functional.scaled_dot_product_attention(*wide, enable_gqa=True).transpose(1, 2)
    assert (out.double() - exact).abs().max() < 0.02


X = np.ones((2, 5, 4, 8), np.float16)
Y = np.ones((10, 4, 8), np.float16)
CU = np.array([0, 4, 10], np.int32)


@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        ((X, X[:, :, :3], X[:, :, :3]), {}, ValueError, "q has 4 heads: .* multiple of the 3 heads"),
        ((X, X[:, :, :0], X[:, :, :0]), {}, ValueError, "q has 4 heads"),
        ((X[:, :, :0],) * 3, {}, ValueError, "q has 0 heads: .* the 0 heads of k and v"),
        ((X, X, X[:, :4]), {}, ValueError, r"v has Sk = 4 .*k has Sk = 5"),
        ((X, X[..., :6], X), {}, ValueError, r"k has D = 6 .*q has D = 8"),
        ((X[0], X, X), {}, ValueError, "q must have 4 dimensions"),
        ((X[..., :0],) * 3, {}, ValueError, "head_dim must be at least 1"),
        ((X, X, X), {"window": (-2, 0)}, ValueError, "window=-2"),
        ((X, X, X), {"window": (1.5, 0)}, TypeError, "float"),
        ((X, X, X), {"softcap": -1.0}, ValueError, "softcap=-1.0"),
        ((X, X.astype(np.float32), X), {}, TypeError, "k has dtype float32, q has float16"),
        ((X.astype(np.int32),) * 3, {}, NotImplementedError, "dtype=int32 .*; convert the arrays to"),
        ((X.astype(float),) * 3, {"backend": "cpu"}, NotImplementedError, "dtype=float64"),
        (([1.0], X, X), {}, TypeError, "q must be an array"),
        ((X, X, X), {"backend": "cuda"}, NotImplementedError, "works on cuda arrays"),
    ],
)
def test_what_does_not_fit_is_refused(arguments: Any, options: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        attention(*arguments, **options)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({3: CU[:2]}, ValueError, "batch . 1"),
        ({3: CU[:0], 4: CU[:0]}, ValueError, "must have batch . 1 elements"),
        ({3: CU.astype(np.int64)}, TypeError, "cu_seqlens_q has dtype int64; it must be int32"),
        ({4: CU + 1}, ValueError, r"cu_seqlens_k is \[1, 5, 11\]: it must rise from 0 to 10"),
        ({4: np.array([0, 11, 10], np.int32)}, ValueError, "must rise from 0 to 10"),
        ({5: 5}, ValueError, "max_seqlen_q is 5, but one sequence has 6 rows"),
        ({6: -1}, ValueError, "max_seqlen_k=-1 must lie between 0"),
        ({6: 6.0}, TypeError, "float"),
    ],
)
def test_variable_lengths_that_do_not_fit_are_refused(
    backend: str, changed: Any, error: Any, message: str
) -> None:
    arguments = dict(enumerate((Y, Y, Y, CU, CU, 6, 6))) | changed
    with pytest.raises(error, match=message):
        attention_varlen(*arguments.values(), backend=backend)


def test_bfloat16_is_the_type_of_ml_dtypes() -> None:
    q, k, v = _draw(6, FLOATS[1], (1, 3, 1, 8), (1, 4, 1, 8), (1, 4, 1, 8))
    assert attention(q, k, v).dtype == ml_dtypes.bfloat16

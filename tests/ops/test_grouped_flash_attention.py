"""grouped_attention_varlen on backends of the CPU: promise 2, equal to separate calls, what it refuses."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from numpy.typing import NDArray

import kvlab
from kvlab.ops.grouped import IMPLEMENTATIONS
from kvlab.registry import last_backend, rows
from tests.compare import assert_accurate
from tests.gradients import Gradients, assert_gradients, assert_refuses
from tests.grouped import (
    GroupedCase,
    grouped_cases,
    in_segments,
    make_case,
    normal_case,
    scenarios,
    separate_calls,
    zigzag,
)
from tests.strategies import FLOATS

Array = NDArray[Any]

BACKENDS = [row.backend for row in rows("grouped_attention") if row.device_kind == "cpu"]


def attend(case: GroupedCase, **options: Any) -> tuple[list[Array], list[Array]]:
    found: Any = kvlab.grouped_attention_varlen(
        case.q_groups, case.k, case.v, return_lse=True, **case.options, **options
    )
    return found


def assert_right(case: GroupedCase, outs: list[Array], lses: list[Array]) -> None:
    """Judge all groups as the one call that they are."""
    for q, out, lse in zip(case.q_groups, outs, lses, strict=True):
        assert (out.shape, out.dtype, lse.shape, lse.dtype) == (
            q.shape,
            q.dtype,
            (q.shape[1], len(q)),
            np.float32,
        )
    for name, axis, found in (("outs", 0, outs), ("lses", 1, lses)):
        kind = int(name == "lses")
        expected, low = (np.concatenate(x[kind], axis) for x in (case.expected, case.low_precision))
        assert_accurate(np.concatenate(found, axis), expected, low, name)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("backend", BACKENDS)
@settings(max_examples=40)
@given(case=grouped_cases())
def test_any_call_agrees_with_the_reference(backend: str, implementation: str, case: GroupedCase) -> None:
    """Outputs and log-sum-exp are within promise 2, and the arguments stay as they are."""
    before = [x.tobytes() for x in (*case.q_groups, case.k, case.v)]
    outs, lses = attend(case, backend=backend, implementation=implementation)
    assert last_backend() == backend
    assert_right(case, outs, lses)
    assert [x.tobytes() for x in (*case.q_groups, case.k, case.v)] == before


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_row_with_few_keys_and_a_large_score(backend: str, implementation: str) -> None:
    """Sums of 40 in float32, before the scale, made out 2.6e-6 wrong where 1.6e-6 is allowed."""
    case = make_case(
        [[0, 0, 0], [0, 0, 0], [0, 0, 44], [60, 60, 60], [22, 0, 60]],
        [*[[0, 0, 0]] * 4, [3, 0, 0]], [10, 0, 0], heads=(3, 3), head_dim=16, dtype=FLOATS[2], seed=1102,
        causal=False, scale=0.3,
    )  # fmt: skip
    assert_right(case, *attend(case, backend=backend, implementation=implementation))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    "name", ["two groups of a zigzag rank", "three nested prefixes", "unrelated prefixes"]
)
def test_float16_against_separate_calls(name: str, implementation: str) -> None:
    """Outs to 1e-3 and gradients to 1e-2, as the published tests of grouped attention have it."""
    case = normal_case(**scenarios()[name], head_dim=32)
    outs, of_separate = separate_calls(case)
    found, _ = attend(case, implementation=implementation)
    for one, other in zip(found, outs, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-3)
    for one, other in zip(gradients(case), of_separate, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-2)
    fewer = replace(case, prefixes=[[max(0, x - 1) for x in prefix] for prefix in case.prefixes])
    wrong, _ = attend(fewer, implementation=implementation)
    for one, other in zip((*wrong, *gradients(fewer)), (*outs, *of_separate), strict=True):
        assert np.abs(one.astype(np.float32) - other.astype(np.float32)).max() > 1e-2


@pytest.mark.parametrize("dtype", FLOATS[:2], ids=str)
@pytest.mark.parametrize("heads", [(32, 8), (64, 8)], ids=str)
@pytest.mark.parametrize("name", scenarios())
def test_scenarios(name: str, heads: tuple[int, int], dtype: np.dtype[Any]) -> None:
    case = make_case(**scenarios()[name], heads=heads, head_dim=16, dtype=dtype)
    separate = attend(case, implementation="separate")
    assert_right(case, *separate)
    for implementation in ("listed", "paired", None):
        for kind, one in zip(separate, attend(case, implementation=implementation), strict=True):
            for expected, found in zip(kind, one, strict=True):
                np.testing.assert_array_equal(found.view(np.uint8), expected.view(np.uint8))


def gradients(case: GroupedCase, **options: Any) -> Gradients:
    outs, lses = attend(case, backend=options.get("backend"))
    arrays = case.douts(), case.q_groups, case.k, case.v, outs, lses
    dq, dk, dv = kvlab.grouped_attention_varlen_backward(*arrays, **case.options, **options)
    return np.concatenate(dq), dk, dv


@pytest.mark.parametrize("backend", BACKENDS)
@settings(max_examples=25)
@given(case=grouped_cases())
def test_gradients_agree_with_the_reference(backend: str, case: GroupedCase) -> None:
    found = gradients(case, backend=backend)
    assert last_backend() == backend
    assert {x.dtype for x in found} == {case.k.dtype}
    douts = case.douts()
    assert_gradients(found, case.expected_gradients(douts), case.low_precision_gradients(douts))


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_of_keys_in_float32(backend: str) -> None:
    case = make_case([[20], [30]], [[30], [60]], [64], dtype=FLOATS[1])
    wide, narrow = (gradients(case, backend=backend, float32_dk_dv=x) for x in (True, False))
    for one, other in zip(wide[1:], narrow[1:], strict=True):
        assert (one.dtype, other.dtype) == (np.float32, FLOATS[1])
        np.testing.assert_array_equal(one.astype(FLOATS[1]), other)
    right = case.expected_gradients(case.douts())[2]
    errors = [np.abs(x.astype(np.float64) - right).max() for x in (wide[2], narrow[2])]
    assert 50 * errors[0] < errors[1]


def test_wrong_gradients_would_be_noticed() -> None:
    case = make_case([[20, 9], [20, 9]], [[30, 11], [60, 25]], [64, 40], seed=3)
    douts = case.douts()
    right, low = case.expected_gradients(douts), case.low_precision_gradients(douts)
    assert_gradients(gradients(case), right, low)
    dq, dk, dv = (x.astype(case.k.dtype) for x in right)
    one_group = make_case([[20, 9]], [[30, 11]], [64, 40])
    alone = GroupedCase(
        case.q_groups[:1], case.k, case.v, one_group.lengths, one_group.prefixes, one_group.k_lengths
    )
    _, dk_of_one, dv_of_one = (x.astype(case.k.dtype) for x in alone.expected_gradients(douts[:1]))
    for wrong in ((0 * dq, dk, dv), (dq, dk_of_one, dv), (dq, dk, dv_of_one), (dq[::-1], dk, dv)):
        assert_refuses(wrong, right, low)


@pytest.mark.parametrize("kind", ["float32", "float64"])
def test_autograd(kind: str) -> None:
    torch = pytest.importorskip("torch")
    from kvlab.integrations.torch_grouped import grouped_attention_varlen

    case = make_case([[5, 4], [7, 2]], [[6, 9], [12, 3]], [12, 9], head_dim=8, dtype=FLOATS[2])
    dtype = getattr(torch, kind)
    leaves = [torch.tensor(x, dtype=dtype, requires_grad=True) for x in (case.k, case.v, *case.q_groups)]
    options = case.options
    for name in ("cu_seqlens_q_groups", "prefix_lens"):
        options[name] = [torch.tensor(x) for x in options[name]]
    options["cu_seqlens_k"] = torch.tensor(options["cu_seqlens_k"])
    outs = grouped_attention_varlen(leaves[2:], *leaves[:2], **options)
    douts = [torch.tensor(x, dtype=outs[0].dtype) for x in case.douts()]
    found = torch.autograd.grad(outs, leaves, douts)
    dq, dk, dv = case.expected_gradients(case.douts())
    for one, expected in zip(found, (dk, dv, dq[:9], dq[9:]), strict=True):
        np.testing.assert_allclose(one.numpy(), expected, atol=1e-4)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["unrelated prefixes", "thirty-two sequences", "no keys", "no sequences"])
@pytest.mark.parametrize("segment_len", [1, 7, 16])
def test_keys_in_segments(name: str, segment_len: int, backend: str) -> None:
    case = make_case(**scenarios()[name], head_dim=16)
    k, v, table = in_segments(case, segment_len)
    found: Any = kvlab.grouped_attention_varlen(
        case.q_groups, k, v, segment_table=table, segment_len=segment_len, return_lse=True, backend=backend,
        **case.options,
    )  # fmt: skip
    for one, other in zip(found, attend(case, backend=backend), strict=True):
        for a, b in zip(one, other, strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"segment_len": None}, "segment_len=None, but segment_table is given: pass both"),
        ({"segment_table": None}, "segment_table=None, but segment_len is given"),
        ({"segment_len": 0}, "segment_len=0"),
        ({"segment_table": np.zeros((1, 9), np.int32)}, "segment_table has batch = 1"),
        ({"segment_table": np.full((2, 9), 50, np.int32)}, "segment_table names rows 400 to"),
        ({"segment_len": 1, "max_seqlen_k": 20}, r"sequences have \[5, 16\] keys: they may have 0 up to 9"),
    ],
)
def test_segments_refuse(changes: dict[str, Any], message: str) -> None:
    case = make_case([[3, 2]], [[3, 2]], [5, 16], dtype=FLOATS[2])
    options = {"segment_table": np.zeros((2, 9), np.int32), "segment_len": 8, **case.options} | changes
    with pytest.raises(ValueError, match=message):
        kvlab.grouped_attention_varlen(case.q_groups, case.k, case.v, **options)


@pytest.mark.parametrize("rank", range(4))
def test_ranks_of_a_zigzag_make_up_the_whole(rank: int) -> None:
    """The chunks of a rank, cut out of a call over all tokens."""
    case = zigzag(128, 4, rank, dtype=FLOATS[2], head_dim=32)
    chunk, bounds = 16, np.array([0, 128], np.int32)
    q = np.zeros((128, 4, 32), np.float32)
    places = [slice(i * chunk, (i + 1) * chunk) for i in (rank, 7 - rank)]
    for place, own in zip(places, case.q_groups, strict=True):
        q[place] = own
    whole: Any = kvlab.attention_varlen(q, case.k, case.v, bounds, bounds, 128, 128, causal=True)
    for place, out in zip(places, attend(case)[0], strict=True):
        np.testing.assert_allclose(out, whole[place], atol=2e-6)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_wrong_answers_would_be_noticed(dtype: np.dtype[Any]) -> None:
    case = make_case([[20, 9], [20, 9]], [[30, 11], [60, 25]], [64, 40], dtype=dtype, seed=3)
    expected, low = case.expected[0], case.low_precision[0]
    for name, answer in case.wrong().items():
        judged = [assert_rejected(*three) for three in zip(answer, expected, low, strict=True)]
        assert any(judged), name


def assert_rejected(answer: Array, expected: Array, low: Array) -> bool:
    try:
        assert_accurate(answer, expected, low)
    except AssertionError:
        return True
    return False


def test_keys_that_no_group_sees_may_be_anything() -> None:
    case = make_case([[9, 4], [7, 5]], [[30, 6], [20, 3]], [64, 40])
    clean = attend(case)
    for x in (case.k, case.v):
        x[30:64], x[70:] = np.nan, np.nan
    for one, other in zip(clean, attend(case), strict=True):
        for a, b in zip(one, other, strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("kind", ["float16", "bfloat16", "float32"])
def test_torch_in_torch_out(kind: str) -> None:
    torch = pytest.importorskip("torch")
    q, k = torch.ones(5, 4, 8, dtype=getattr(torch, kind)), torch.ones(9, 2, 8, dtype=getattr(torch, kind))
    bounds = {"cu_seqlens_q_groups": [torch.tensor([0, 5], dtype=torch.int32)] * 2}
    bounds |= {"cu_seqlens_k": torch.tensor([0, 9], dtype=torch.int32)}
    bounds |= {"prefix_lens": [torch.tensor([n], dtype=torch.int32) for n in (5, 9)]}
    outs, lses = kvlab.grouped_attention_varlen([q, q], k, k, return_lse=True, **bounds)
    assert all(isinstance(x, torch.Tensor) for x in (*outs, *lses))
    assert all(x.dtype == q.dtype and bool((x == 1).all()) for x in outs)


CASE = make_case([[3, 2], [4, 1]], [[3, 2], [5, 6]], [5, 6], dtype=FLOATS[2])


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"q_groups": CASE.q_groups[0]}, TypeError, "q_groups must be a list or tuple of arrays, got n"),
        ({"q_groups": []}, ValueError, "q_groups has 0 groups: it must have 1 to 16"),
        ({"prefix_lens": []}, ValueError, "prefix_lens has 0 groups"),
        ({"q_groups": [CASE.q_groups[0], CASE.q_groups[1][:, :2]]}, ValueError, r"q_groups\[1\] has Hq = 2"),
        ({"k": CASE.k[..., :32]}, ValueError, "k has D = 32"),
        ({"v": CASE.v[:3]}, ValueError, "v has total_k = 3"),
        ({"k": CASE.k.astype(np.float16)}, TypeError, r"k has dtype float16; it must be float32, as q_"),
        ({"cu_seqlens_k": np.array([0, 5, 11])}, TypeError, "cu_seqlens_k has dtype int64; it must be int32"),
        ({"cu_seqlens_k": np.array([0, 11], np.int32)}, ValueError, r"batch \+ 1 = "),
        ({"cu_seqlens_k": np.array([0, 5, 10], np.int32)}, ValueError, r"cu_seqlens_k is \[0, 5, 10\]: it"),
        ({"prefix_lens": [np.array([3, 2], np.int32), np.array([6, 6], np.int32)]}, ValueError,
         r"prefix_lens\[1\]\[0\] is 6: sequence 0 has 5 keys"),
        ({"prefix_lens": [np.array([3, -2], np.int32)] * 2}, ValueError, r"prefix_lens\[0\]\[1\] is -2"),
        ({"prefix_lens": [np.array([3], np.int32)] * 2}, ValueError, r"prefix_lens\[0\] has 1 elements"),
        ({"implementation": "fused"}, ValueError, "implementation='fused' is not supported"),
        ({"max_seqlen_q": 2}, ValueError, "max_seqlen_q is 2, but one sequence has 3 rows"),
        ({"max_seqlen_k": -1}, ValueError, "max_seqlen_k=-1"),
        ({"backend": "gpu"}, ValueError, "backend"),
        ({"backend": "cuda"}, NotImplementedError, "cuda"),
        ({"causal": "yes"}, TypeError, "causal='yes'"),
    ],
)  # fmt: skip
def test_refuses(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    arguments = {"q_groups": CASE.q_groups, "k": CASE.k, "v": CASE.v, **CASE.options} | changes
    with pytest.raises(error, match=message):
        kvlab.grouped_attention_varlen(**arguments)


def test_seventeen_groups_are_too_many() -> None:
    case = make_case([[1]] * 17, [[1]] * 17, [1])
    with pytest.raises(ValueError, match="q_groups has 17 groups: it must have 1 to 16"):
        attend(case)


@pytest.mark.parametrize(
    ("name", "change", "error", "message"),
    [
        ("douts", lambda x: x[:1], ValueError, "douts has 1 groups, q_groups 2: pass equally many"),
        ("outs", lambda x: [x[0], x[1][:2]], ValueError, r"outs\[1\] must have 5 on axis 0, got 2"),
        ("lses", lambda x: [y.astype(np.float64) for y in x], TypeError, r"lses\[0\] has dtype float64"),
        ("douts", lambda x: [y.astype(np.float16) for y in x], TypeError, r"douts\[0\] has dtype float16"),
        ("lses", lambda x: x[0], TypeError, "lses must be a list or tuple of arrays, got ndarray"),
    ],
)
def test_gradients_refuse(name: str, change: Any, error: type[Exception], message: str) -> None:
    outs, lses = attend(CASE)
    arrays = {"douts": CASE.douts(), "outs": outs, "lses": lses}
    arrays[name] = change(arrays[name])
    with pytest.raises(error, match=message):
        kvlab.grouped_attention_varlen_backward(
            q_groups=CASE.q_groups, k=CASE.k, v=CASE.v, **arrays, **CASE.options
        )

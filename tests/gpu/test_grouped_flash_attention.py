"""grouped_attention_varlen on GPUs: promise 2, the same bits as separate calls where tiles are, repeated."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

import kvlab
from kvlab.integrations.torch_grouped import grouped_attention_varlen
from kvlab.ops.cuda import grouped as grouped_cuda
from kvlab.ops.cuda import tile_list as tile_list_cuda
from tests.compare import assert_accurate
from tests.gpu.attention_cases import DTYPES, poison, to_numpy
from tests.gradients import assert_gradients
from tests.grouped import (
    GroupedCase,
    in_segments,
    make_case,
    normal_case,
    scenarios,
    separate_calls,
    zigzag,
)


def on_gpu(x: np.ndarray) -> torch.Tensor:
    if x.dtype == DTYPES["bfloat16"]:
        return torch.from_numpy(np.ascontiguousarray(x).view(np.int16)).cuda().view(torch.bfloat16)
    return torch.from_numpy(np.ascontiguousarray(x)).cuda()


def arguments(case: GroupedCase) -> tuple[tuple[Any, ...], dict[str, Any]]:
    options = dict(case.options)
    for name in ("cu_seqlens_q_groups", "prefix_lens"):
        options[name] = [on_gpu(x) for x in options[name]]
    options["cu_seqlens_k"] = on_gpu(options["cu_seqlens_k"])
    return ([on_gpu(q) for q in case.q_groups], on_gpu(case.k), on_gpu(case.v)), options


def attend(case: GroupedCase, **options: Any) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    arrays, own = arguments(case)
    poison(torch.cat(arrays[0]))
    found: Any = kvlab.grouped_attention_varlen(*arrays, return_lse=True, **own, **options)
    return found


def assert_right(case: GroupedCase, outs: list[torch.Tensor], lses: list[torch.Tensor]) -> None:
    """Judge all groups as the one call that they are."""
    for q, out, lse in zip(case.q_groups, outs, lses, strict=True):
        assert (tuple(out.shape), tuple(lse.shape)) == (q.shape, (q.shape[1], len(q)))
    for name, axis, found in (("outs", 0, outs), ("lses", 1, lses)):
        kind = int(name == "lses")
        expected, low = (np.concatenate(x[kind], axis) for x in (case.expected, case.low_precision))
        assert_accurate(np.concatenate([to_numpy(x) for x in found], axis), expected, low, name)


KINDS = (
    ((32, 8), 128, "bfloat16"), ((32, 8), 128, "float16"), ((64, 8), 64, "bfloat16"), ((4, 4), 96, "float16"),
    ((8, 1), 256, "bfloat16"),
)  # fmt: skip


@pytest.mark.parametrize(("heads", "head_dim", "dtype"), KINDS)
@pytest.mark.parametrize("name", scenarios())
def test_scenarios(name: str, heads: tuple[int, int], head_dim: int, dtype: str) -> None:
    case = make_case(**scenarios(3)[name], heads=heads, head_dim=head_dim, dtype=DTYPES[dtype])
    for implementation in ("separate", "listed", "paired"):
        outs, lses = attend(case, implementation=implementation)
        assert kvlab.last_backend() == "cuda"
        assert_right(case, outs, lses)


@pytest.mark.parametrize("backend", ["cuda", "numba"])
@pytest.mark.parametrize("name", scenarios())
def test_separate_calls_in_float32(name: str, backend: str) -> None:
    case = make_case(**scenarios()[name], head_dim=48, dtype=np.dtype(np.float32))
    assert_right(case, *attend(case, backend=backend))
    assert kvlab.last_backend() == backend


@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
def test_equal_to_separate_calls_bit_for_bit_where_nothing_is_split(head_dim: int) -> None:
    """Enough tiles that none is split over keys; then each row meets its keys as in a call of its own."""
    case = zigzag(2048, 2, 1, sequences=4, heads=(32, 8), head_dim=head_dim)
    separate = attend(case, implementation="separate")
    for implementation in ("listed", "paired"):
        for kind, one in zip(separate, attend(case, implementation=implementation), strict=True):
            for expected, found in zip(kind, one, strict=True):
                assert torch.equal(found, expected)


@pytest.mark.parametrize("implementation", ["listed", "paired"])
def test_tiles_split_over_keys(implementation: str) -> None:
    """One KV head and many keys; the same bits a thousand times, whichever part of a tile comes last."""
    case = zigzag(8192, 8, 3, heads=(4, 1), head_dim=128, seed=5)
    outs, lses = attend(case, implementation=implementation)
    assert_right(case, outs, lses)
    arrays, own = arguments(case)
    for _ in range(1000):
        again: Any = kvlab.grouped_attention_varlen(
            *arrays, return_lse=True, implementation=implementation, **own
        )
        for kind, one in zip((outs, lses), again, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(kind, one, strict=True))


@pytest.mark.parametrize("head_dim", [64, 96, 128])
@pytest.mark.parametrize("implementation", ["listed", "paired"])
def test_last_tiles_of_sections_split_over_keys(
    implementation: str, head_dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of many tiles of K and V larger than L2; right, and the same bits again."""
    case = make_case([[600]] * 2, [[3200], [3600]], [3600], heads=(4, 2), head_dim=head_dim, seed=6)
    monkeypatch.setattr(grouped_cuda, "multiprocessors", lambda device: 16)
    grouped_cuda._listed.cache_clear()
    whole = attend(case, implementation=implementation)
    for module in (grouped_cuda, tile_list_cuda):
        monkeypatch.setattr(module, "SECTION_BYTES", 1)
    grouped_cuda._listed.cache_clear()
    found = attend(case, implementation=implementation)
    assert_right(case, *found)
    for _ in range(20):
        for kind, one in zip(found, attend(case, implementation=implementation), strict=True):
            assert all(torch.equal(a, b) for a, b in zip(kind, one, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(whole[1], found[1], strict=True))
    grouped_cuda._listed.cache_clear()


@pytest.mark.parametrize(
    ("heads", "head_dim", "dtype"),
    [((8, 2), 64, "float16"), ((8, 2), 128, "bfloat16"), ((4, 4), 96, "float16"), ((8, 1), 256, "float16")],
)
@pytest.mark.parametrize("name", scenarios())
def test_gradients(name: str, heads: tuple[int, int], head_dim: int, dtype: str) -> None:
    """Of one launch and of separate calls; a deterministic call gives the same bits ten times."""
    case = make_case(**scenarios(3)[name], heads=heads, head_dim=head_dim, dtype=DTYPES[dtype])
    arrays, own = arguments(case)
    outs, lses = attend(case)
    douts = [on_gpu(x) for x in case.douts()]
    expected, low = case.expected_gradients(case.douts()), case.low_precision_gradients(case.douts())
    for options in ({}, {"deterministic": True}, {"implementation": "separate"}, {"sm_margin": 120}):
        poison(torch.cat(arrays[0]))
        call = partial(kvlab.grouped_attention_varlen_backward, douts, *arrays, outs, lses, **own, **options)
        dq, dk, dv = call()
        assert_gradients(tuple(to_numpy(x) for x in (torch.cat(dq), dk, dv)), expected, low)
        for again in (call() for _ in range(10 if "deterministic" in options else 0)):
            assert all(torch.equal(a, b) for a, b in zip((*dq, dk, dv), (*again[0], *again[1:]), strict=True))


def worst_tile(expected: torch.Tensor, found: torch.Tensor) -> float:
    """Return the largest error of 64 rows, as a part of their norm."""
    parts = zip(expected.float().split(64), found.float().split(64), strict=True)
    return max(float((one - other).norm() / one.norm().clamp(min=1e-9)) for one, other in parts)


def test_a_tile_without_a_group_would_be_noticed() -> None:
    """Where 64 of 4,096 keys have the gradients of one group alone, or of none."""
    case = zigzag(4096, 4, 1, head_dim=64, seed=2, heads=(4, 1))
    arrays, own = arguments(case)
    outs, lses = attend(case)
    douts = [on_gpu(x) for x in case.douts()]
    both, one = (
        kvlab.grouped_attention_varlen_backward(x, *arrays, outs, lses, **own)[1:]
        for x in (douts, [douts[0], torch.zeros_like(douts[1])])
    )
    for whole, part in zip(both, one, strict=True):
        assert worst_tile(whole, whole.clone()) == 0
        for of_tile in (part[64:128], 0):
            wrong = whole.clone()
            wrong[64:128] = of_tile
            assert worst_tile(whole, wrong) > 0.1


@pytest.mark.parametrize("head_dim", [64, 96, 128])
def test_gradients_of_many_tiles(head_dim: int) -> None:
    """More tiles than blocks, and steps that clusters share: one launch against separate calls."""
    for shape in ({"heads": (8, 8), "sequences": 3}, {"heads": (4, 1), "sequences": 1}):
        case = zigzag(4096, 4, 1, head_dim=head_dim, seed=2, **shape)
        arrays, own = arguments(case)
        outs, lses = attend(case)
        douts = [on_gpu(x) for x in case.douts()]
        for deterministic in (False, True):
            found = [
                kvlab.grouped_attention_varlen_backward(
                    douts, *arrays, outs, lses, implementation=name, deterministic=deterministic,
                    float32_dk_dv=True, **own,
                )
                for name in ("separate", "paired")
            ]  # fmt: skip
            shorter = own | {"prefix_lens": [x - 1 for x in own["prefix_lens"]]}
            wrong = kvlab.grouped_attention_varlen_backward(douts, *arrays, outs, lses, **shorter)
            right, paired, wrong = ((torch.cat(x[0]).float(), *x[1:]) for x in (*found, wrong))
            for one, other, shifted in zip(right, paired, wrong, strict=True):
                assert (one - other).norm() < 3e-3 * one.norm() < (one - shifted.float()).norm()


@pytest.mark.parametrize("implementation", ["separate", "listed", "paired"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_float16_against_separate_calls(head_dim: int, implementation: str) -> None:
    """Outs to 1e-3 and gradients to 1e-2, as the published tests of grouped attention have it."""
    case = normal_case(
        [[200, 64]] * 2, [[520, 320], [1000, 400]], [1000, 400], heads=(8, 2), head_dim=head_dim
    )
    expected, of_separate = separate_calls(case, on_gpu, to_numpy)
    outs, lses = attend(case, implementation=implementation)
    for one, other in zip(outs, expected, strict=True):
        np.testing.assert_allclose(to_numpy(one), other, rtol=0, atol=1e-3)
    arrays, own = arguments(case)
    douts = [on_gpu(x) for x in case.douts()]
    dq, dk, dv = kvlab.grouped_attention_varlen_backward(douts, *arrays, outs, lses, **own)
    for one, other in zip((torch.cat(dq), dk, dv), of_separate, strict=True):
        np.testing.assert_allclose(to_numpy(one), other, rtol=0, atol=1e-2)
    own["prefix_lens"] = [x - 1 for x in own["prefix_lens"]]
    wrong = kvlab.grouped_attention_varlen(*arrays, implementation=implementation, **own)
    for one, other in zip(wrong, expected, strict=True):
        assert np.abs(to_numpy(one).astype(np.float32) - other.astype(np.float32)).max() > 1e-2


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("name", ["two groups of a zigzag rank", "unrelated prefixes", "an empty group"])
def test_gradients_of_keys_in_float32(name: str, head_dim: int) -> None:
    case = make_case(**scenarios(3)[name], heads=(8, 2), head_dim=head_dim)
    arrays, own = arguments(case)
    outs, lses = attend(case)
    douts = [on_gpu(x) for x in case.douts()]
    expected, low = case.expected_gradients(case.douts()), case.low_precision_gradients(case.douts())
    for wide in (False, True):
        dq, dk, dv = kvlab.grouped_attention_varlen_backward(
            douts, *arrays, outs, lses, float32_dk_dv=wide, **own
        )
        assert (dk.dtype, dv.dtype) == ((torch.float32 if wide else torch.float16),) * 2
        found = torch.cat(dq), dk.half(), dv.half()
        assert_gradients(tuple(to_numpy(x) for x in found), expected, low)


def test_autograd_of_groups() -> None:
    case = make_case(**scenarios(2)["two groups of a zigzag rank"], heads=(8, 2), head_dim=64)
    (q_groups, k, v), own = arguments(case)
    leaves = [x.requires_grad_() for x in (k, v, *q_groups)]
    outs = grouped_attention_varlen(q_groups, k, v, deterministic=True, **own)
    douts = [on_gpu(x) for x in case.douts()]
    dk, dv, *dq = torch.autograd.grad(outs, leaves, douts)
    expected, low = case.expected_gradients(case.douts()), case.low_precision_gradients(case.douts())
    assert_gradients(tuple(to_numpy(x) for x in (torch.cat(dq), dk, dv)), expected, low)


def test_wrong_answers_would_be_noticed() -> None:
    case = make_case([[200, 9], [20, 90]], [[300, 11], [600, 250]], [640, 400], head_dim=128, seed=3)
    expected, low = (np.concatenate(x[0]) for x in (case.expected, case.low_precision))
    outs, _ = attend(case)
    assert_accurate(np.concatenate([to_numpy(x) for x in outs]), expected, low)
    for answer in case.wrong().values():
        if len(answer[0]) == len(case.q_groups[0]):
            with pytest.raises(AssertionError):
                assert_accurate(np.concatenate(answer), expected, low)


def test_keys_that_no_group_sees_may_be_anything() -> None:
    case = make_case([[90, 40], [70, 50]], [[300, 60], [200, 30]], [640, 400], head_dim=128)
    clean = attend(case)
    for x in (case.k, case.v):
        x[300:640], x[700:] = np.nan, np.nan
    for one, other in zip(clean, attend(case), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize(
    ("head_dim", "segment_len"), [(128, 128), (128, 16), (128, 200), (64, 64), (96, 32), (256, 256)]
)
@pytest.mark.parametrize("name", ["unrelated prefixes", "thirty-two sequences", "single tokens"])
def test_keys_in_segments(name: str, head_dim: int, segment_len: int) -> None:
    """The same bits as keys in a row; what lies between segments is NaN."""
    case = make_case(**scenarios(3)[name], heads=(8, 2), head_dim=head_dim)
    expected = attend(case)
    k, v, table = (on_gpu(x) for x in in_segments(case, segment_len))
    (q_groups, *_), own = arguments(case)
    found: Any = kvlab.grouped_attention_varlen(
        q_groups, k, v, segment_table=table, segment_len=segment_len, return_lse=True, **own
    )
    for kind, one in zip(expected, found, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(kind, one, strict=True))


@pytest.mark.parametrize("implementation", ["listed", "paired", None])
@pytest.mark.parametrize("keys", [0, 40])
@pytest.mark.parametrize("rows", [0, 3])
def test_segments_without_rows_or_keys(rows: int, keys: int, implementation: str | None) -> None:
    """No rows, no keys, or keys that none of the rows sees, are no error."""
    case = make_case([[rows], [0]], [[0], [keys]], [keys], heads=(4, 2), head_dim=64)
    k, v, table = (on_gpu(x) for x in in_segments(case, 16))
    (q_groups, *_), own = arguments(case)
    options = {"segment_len": 16, "implementation": implementation, **own}
    for of_keys in ((k, v), (k[:0], v[:0])) if keys == 0 else ((k, v),):
        call = partial(kvlab.grouped_attention_varlen, q_groups, *of_keys, segment_table=table, **options)
        outs, lses = call(return_lse=True)
        assert [tuple(x.shape) for x in (*outs, *lses)] == [(rows, 4, 64), (0, 4, 64), (4, rows), (4, 0)]
        assert all(bool((x == 0).all()) for x in outs)
        assert all(bool((x == -torch.inf).all()) for x in lses)
        into = [torch.ones_like(x, dtype=torch.float32) for x in outs], [torch.ones_like(x) for x in lses]
        call(into=into)
        assert all(bool((x == 1).all()) for x in (*into[0], *into[1]))


def test_segments_that_cannot_be_read_are_refused() -> None:
    case = make_case([[40], [30]], [[50], [90]], [100], heads=(4, 2), head_dim=64)
    k, v, table = (on_gpu(x) for x in in_segments(case, 12))
    (q_groups, *_), own = arguments(case)
    with pytest.raises(NotImplementedError, match="segment_len=12: on a GPU a segment has a multiple of 8"):
        kvlab.grouped_attention_varlen(q_groups, k, v, segment_table=table, segment_len=12, **own)
    with pytest.raises(NotImplementedError, match="segment_table with implementation='separate'"):
        kvlab.grouped_attention_varlen(
            q_groups, k, v, segment_table=table, segment_len=12, implementation="separate", **own
        )


def test_unsuitable_arrays_are_refused_or_computed_separately() -> None:
    case = make_case([[40], [30]], [[50], [90]], [100], head_dim=36)
    with pytest.raises(NotImplementedError, match="pass copies, or implementation='separate'"):
        attend(case, implementation="paired")
    assert_right(case, *attend(case))


def test_in_a_graph() -> None:
    case = zigzag(4096, 4, 2, heads=(8, 2), head_dim=128)
    arrays, own = arguments(case)
    expected: Any = kvlab.grouped_attention_varlen(*arrays, **own)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found: Any = kvlab.grouped_attention_varlen(*arrays, **own)
    for _ in range(10):
        for out in found:
            out.zero_()
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))

"""Grouped attention on a GPU under stress: long prefixes, large numbers, repeated calls."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import cupy
import numpy as np
import pytest
import torch

import kvlab
from tests.compare import assert_accurate
from tests.gpu.attention_cases import to_numpy
from tests.gpu.test_grouped_flash_attention import arguments, attend, on_gpu, worst_tile
from tests.gradients import assert_gradients, assert_refuses
from tests.grouped import GroupedCase, make_case

LIMIT = 1e-4
"""Of the error of out in float16, whose numbers are some 1e-2 where a row sees so many keys."""

Call = tuple[list[torch.Tensor], torch.Tensor, torch.Tensor, dict[str, Any]]


def zigzag_call(tokens: int, dtype: torch.dtype, rank: int = 3, ranks: int = 8) -> Call:
    """Return the arrays and lengths of a rank, four query heads on one of 128 channels."""
    generator = torch.Generator("cuda").manual_seed(tokens)
    chunk = tokens // (2 * ranks)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, 128, device="cuda", generator=generator).to(dtype)

    def whole(*numbers: int) -> torch.Tensor:
        return torch.tensor(numbers, dtype=torch.int32, device="cuda")

    prefixes = (rank + 1) * chunk, (2 * ranks - rank) * chunk
    return [draw(chunk, 4) for _ in prefixes], draw(tokens, 1), draw(tokens, 1), {
        "cu_seqlens_q_groups": [whole(0, chunk)] * 2, "cu_seqlens_k": whole(0, tokens),
        "prefix_lens": [whole(n) for n in prefixes],
    }  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("tokens", [65536, 131072])
def test_long_prefixes(tokens: int, dtype: torch.dtype) -> None:
    """Some rows against float64, and all implementations within 1 % of the norm of separate calls."""
    q, k, v, own = zigzag_call(tokens, dtype)
    unit = 1 if dtype == torch.float16 else 8  # bfloat16 has 3 bits fewer
    found: dict[str, Any] = {}
    for name in ("separate", "listed", "paired"):
        outs, lses = kvlab.grouped_attention_varlen(q, k, v, return_lse=True, implementation=name, **own)
        douts = [x.flip(0) for x in q]
        gradients = kvlab.grouped_attention_varlen_backward(
            douts, q, k, v, outs, lses, implementation=name, **own
        )
        found[name] = [*outs, *lses, *gradients[0], *gradients[1:]]
        rows = torch.arange(0, len(q[0]), 997, device="cuda")
        for x, out, lse, prefix in zip(q, outs, lses, own["prefix_lens"], strict=True):
            exact, exact_lse = exact_rows(x, k, v, rows, int(prefix[0]))
            assert (out[rows, 0] - exact).abs().max() < LIMIT * unit
            assert (lse[0, rows] - exact_lse).abs().max() < 2e-4
    for name in ("listed", "paired"):
        for one, other in zip(found["separate"], found[name], strict=True):
            assert (one.float() - other.float()).norm() < 1e-2 * one.float().norm()
        for one, other in zip(found["separate"][-2:], found[name][-2:], strict=True):  # dk and dv
            assert worst_tile(one, other) < 5e-2  # else a missing tile would not be seen


def exact_rows(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rows: torch.Tensor, prefix: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return out and lse of rows of the first head in float64."""
    scores = q[rows, 0].double() @ k[:prefix, 0].double().T / q.shape[-1] ** 0.5
    last = prefix - len(q) + rows
    scores.masked_fill_(torch.arange(prefix, device="cuda") > last[:, None], -torch.inf)
    return scores.softmax(-1) @ v[:prefix, 0].double(), scores.logsumexp(-1)


def test_a_few_keys_that_are_missing_would_be_noticed() -> None:
    """Of 53,248 that the later group sees, 64 are missing."""
    q, k, v, own = zigzag_call(65536, torch.float16)
    rows, prefix = torch.arange(0, len(q[1]), 997, device="cuda"), int(own["prefix_lens"][1][0])
    fewer = {**own, "prefix_lens": [x - 64 for x in own["prefix_lens"]]}
    for options, is_right in ((own, True), (fewer, False)):
        outs = kvlab.grouped_attention_varlen(q, k, v, **options)
        exact, _ = exact_rows(q[1], k, v, rows, prefix)
        assert bool((outs[1][rows, 0] - exact).abs().max() < LIMIT) is is_right


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("implementation", ["separate", "listed", "paired"])
def test_inputs_ten_times_as_large(implementation: str, head_dim: int, deterministic: bool) -> None:
    """Outs and gradients, of which those of keys are a hundred times as large."""
    case, douts = ten_times(head_dim)
    expected, low = (np.concatenate(x[0]) for x in (case.expected, case.low_precision))
    outs, lses = attend(case, implementation=implementation)
    assert_accurate(np.concatenate([to_numpy(x) for x in outs]), expected, low)
    arrays, own = arguments(case)
    dq, dk, dv = kvlab.grouped_attention_varlen_backward(
        [on_gpu(x) for x in douts], *arrays, outs, lses, implementation=implementation,
        deterministic=deterministic, **own,
    )  # fmt: skip
    found = tuple(to_numpy(x) for x in (torch.cat(dq), dk, dv))
    right = case.expected_gradients(douts)
    assert_gradients(found, right, case.low_precision_gradients(douts))


def test_numbers_that_are_not_ten_times_as_large_would_be_noticed() -> None:
    """Each of q, k, v and dout, one after the other, as it was."""
    case, douts = ten_times(64)
    right, low = case.expected_gradients(douts), case.low_precision_gradients(douts)
    tenth, dtype = np.float32(0.1), case.k.dtype
    small_q = replace(case, q_groups=[(tenth * q).astype(dtype) for q in case.q_groups])
    small_k, small_v = (replace(case, **{x: (tenth * getattr(case, x)).astype(dtype)}) for x in "kv")
    small_douts = [(tenth * x).astype(dtype) for x in douts]
    for other, of_other in ((small_q, douts), (small_k, douts), (small_v, douts), (case, small_douts)):
        dq, dk, dv = (x.astype(dtype) for x in other.expected_gradients(of_other))
        assert_refuses((dq, dk, dv), right, low)


def ten_times(head_dim: int) -> tuple[GroupedCase, list[Any]]:
    """Return a call and gradients of its outs, all of whose numbers are ten times as large."""
    case = make_case(
        [[200, 9], [80, 130]], [[300, 11], [600, 250]], [640, 400], heads=(8, 2), head_dim=head_dim
    )
    large = replace(case, q_groups=[10 * q for q in case.q_groups], k=10 * case.k, v=10 * case.v)
    return large, [10 * x for x in case.douts()]


@pytest.mark.parametrize("calls", [10, 1000])
def test_repeated_calls_give_the_same_bits_and_keep_no_memory(calls: int) -> None:
    case = make_case([[90, 40], [70, 50]], [[300, 60], [200, 30]], [340, 100], heads=(8, 2), head_dim=128)
    arrays, own = arguments(case)

    def once() -> list[torch.Tensor]:
        outs, lses = kvlab.grouped_attention_varlen(*arrays, return_lse=True, **own)
        found = kvlab.grouped_attention_varlen_backward(
            arrays[0], *arrays, outs, lses, deterministic=True, **own
        )
        return [*outs, *lses, *found[0], *found[1:]]

    first, again = once(), once()
    taken = torch.cuda.memory_allocated(), cupy.get_default_memory_pool().used_bytes()
    for _ in range(calls):
        again = once()
        assert all(map(torch.equal, first, again))
    assert taken == (torch.cuda.memory_allocated(), cupy.get_default_memory_pool().used_bytes())

"""Attention of backend "numba" on a GPU, and merge_attention there, against float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import kvlab
from kvlab.reference import attention as reference
from tests.compare import assert_accurate, each_sequence, low_precision_attention, low_precision_merge
from tests.gpu.attention_cases import (
    DTYPES,
    HEADS,
    LENGTHS,
    draw,
    draw_options,
    poison,
    to_numpy,
    with_noise,
)
from tests.gradients import assert_gradients, exact_gradients, low_precision_gradients
from tests.gradients import each_sequence as gradients_of_each

KINDS = [*DTYPES, "float32"]
HEAD_DIMS = (20, 64, 96, 128, 256)  # each is compiled anew


@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize("seed", range(4))
def test_one_length(dtype: str, seed: int) -> None:
    rng = np.random.default_rng(400 + seed)
    for _ in range(12):
        heads, kv_heads = HEADS[rng.integers(len(HEADS))]
        dim, rows, keys = rng.choice(HEAD_DIMS), *rng.choice(LENGTHS, 2)
        batch = int(rng.integers(0, 3))
        q, dout = (draw(rng, (batch, rows, heads, dim), dtype) for _ in range(2))
        k, v = (draw(rng, (batch, keys, kv_heads, dim), dtype) for _ in range(2))
        options = draw_options(rng)
        poison(q)
        out, lse = kvlab.attention(q, k, v, return_lse=True, backend="numba", **options)
        assert kvlab.last_backend() == "numba"
        arrays = [to_numpy(x) for x in (q, k, v)]
        expected = reference.attention(*arrays, return_lse=True, **options)
        low = low_precision_attention(*arrays, **options)
        assert_accurate(to_numpy(out), expected[0], low[0])
        assert_accurate(to_numpy(lse), expected[1], low[1], "lse")
        calls = [
            kvlab.attention_backward(dout, q, k, v, out, lse, backend="numba", **options) for _ in range(2)
        ]
        assert all(torch.equal(x, y) for x, y in zip(*calls, strict=True))
        arrays = [to_numpy(dout), *arrays]
        low_ones = with_noise(low_precision_gradients(*arrays, **options), *arrays, options["scale"])
        assert_gradients(tuple(map(to_numpy, calls[0])), exact_gradients(*arrays, **options), low_ones)


@pytest.mark.parametrize("dtype", KINDS)
def test_lengths_that_differ(dtype: str) -> None:
    rng = np.random.default_rng(500)
    for _ in range(8):
        heads, kv_heads = HEADS[rng.integers(len(HEADS))]
        dim, batch = rng.choice(HEAD_DIMS), int(rng.integers(0, 6))
        bounds = [np.cumsum([0, *rng.choice(LENGTHS, batch)]).astype(np.int32) for _ in range(2)]
        longest = [int(np.diff(x).max(initial=0)) for x in bounds]
        q, dout = (draw(rng, (bounds[0][-1], heads, dim), dtype) for _ in range(2))
        k, v = (draw(rng, (bounds[1][-1], kv_heads, dim), dtype) for _ in range(2))
        options = draw_options(rng)
        sequences: tuple[Any, ...] = (*(torch.from_numpy(x).cuda() for x in bounds), *longest)
        out, lse = kvlab.attention_varlen(q, k, v, *sequences, return_lse=True, backend="numba", **options)
        arrays = [to_numpy(x) for x in (q, k, v)]
        expected = reference.attention_varlen(*arrays, *bounds, *longest, **options)
        low, _ = each_sequence(low_precision_attention, *arrays, *bounds, **options)
        assert_accurate(to_numpy(out), expected, low)
        got = kvlab.attention_varlen_backward(dout, q, k, v, out, lse, *sequences, backend="numba", **options)
        arrays = [to_numpy(dout), *arrays]
        exact, low_ones = (
            gradients_of_each(f, *arrays, *bounds, **options)
            for f in (exact_gradients, low_precision_gradients)
        )
        low_ones = with_noise(low_ones, *arrays, options["scale"])
        assert_gradients(tuple(map(to_numpy, got)), exact, low_ones)


@pytest.mark.parametrize("dtype", KINDS)
def test_merging_parts_of_the_keys(dtype: str) -> None:
    """A part without keys among them, NaN where a part has none, a transposed lse; 32 parts are most."""
    rng = np.random.default_rng(600)
    for shape in ((2, 37, 6, 72), (41, 3, 20)):
        lses = [
            torch.from_numpy(rng.normal(0, 30, (*shape[:-3], shape[-2], shape[-3])).astype(np.float32)).cuda()
            for _ in range(5)
        ]
        outs = [draw(rng, shape, dtype) for _ in range(5)]
        lses[1][:] = -torch.inf
        outs[1][:] = torch.nan
        for lse, out in zip(lses, outs, strict=True):
            lse[..., 5] = -torch.inf
            out[..., 5, :, :] = torch.nan
        lses[2] = lses[2].transpose(-1, -2).contiguous().transpose(-1, -2)
        poison(outs[0])
        merged, lse = kvlab.merge_attention(outs, lses)
        assert kvlab.last_backend() == "cuda"
        arrays = [to_numpy(x) for x in outs], [to_numpy(x) for x in lses]
        expected = reference.merge_attention(*arrays)
        known = [np.where(np.isnan(x.astype(np.float32)), 0, x).astype(x.dtype) for x in arrays[0]]
        low = low_precision_merge(known, arrays[1])
        assert_accurate(to_numpy(merged), expected[0], low[0])
        assert_accurate(to_numpy(lse), expected[1], low[1], "lse")
    with pytest.raises(NotImplementedError, match="outs has 33 parts: on a GPU at most 32"):
        kvlab.merge_attention([outs[0]] * 33, [lses[0]] * 33)

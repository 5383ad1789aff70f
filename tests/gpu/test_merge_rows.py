"""Attention over more keys merged into rows of a result, in place, against merge_attention in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvlab.ops.cuda.attention_merge import merge_rows
from kvlab.reference import attention as reference
from tests.compare import assert_accurate, low_precision_merge
from tests.gpu.attention_cases import to_numpy

TOTAL, HEADS = 37, 6
INDICES = torch.tensor([30, 2, 3, 17, 5, 36, 0, 9])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("dim", [72, 128, 20, 13, 256])
@pytest.mark.parametrize("rows", [slice(None), slice(12, 37), INDICES])
def test_rows_take_more_keys(dtype: str, wide: bool, dim: int, rows: object) -> None:
    """Rows without keys before, without new ones (NaN in what is added) or without either; others stay."""
    generator, kind = torch.Generator().manual_seed(dim), getattr(torch, dtype)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    out = draw(TOTAL, 2 * HEADS, dim).to("cuda", torch.float32 if wide else kind)[:, HEADS:]
    lse = 30 * draw(HEADS, TOTAL).cuda()
    places = torch.arange(TOTAL)[rows]
    new, new_lse = draw(len(places), HEADS, dim).to("cuda", kind), 30 * draw(HEADS, len(places)).cuda()
    new_lse[:, 1], new[1] = -torch.inf, torch.nan
    new_lse[1, 2], new[2, 1] = -torch.inf, torch.nan
    lse[:, places[2:4]] = -torch.inf
    out[places[2:4]] = 0
    before = out.clone(), lse.clone()
    merge_rows(out, lse, rows if isinstance(rows, slice) else rows.cuda(), new, new_lse)
    parts = [to_numpy(before[0][places]), to_numpy(new)], [to_numpy(before[1][:, places]), to_numpy(new_lse)]
    parts[0][:] = [np.nan_to_num(x.astype(np.float32)) for x in parts[0]]
    expected = reference.merge_attention([x.astype(np.float64) for x in parts[0]], parts[1])
    low = low_precision_merge([x.astype(to_numpy(out).dtype) for x in parts[0]], parts[1])
    assert_accurate(to_numpy(out[places]), expected[0], low[0])
    assert_accurate(to_numpy(lse[:, places]), expected[1], low[1], "lse")
    others = [n for n in range(TOTAL) if n not in places]
    assert torch.equal(out[others], before[0][others])
    assert torch.equal(lse[:, others], before[1][:, others])

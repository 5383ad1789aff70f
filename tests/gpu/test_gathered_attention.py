"""Attention over runs of keys, of all ranks on one GPU, against the oracle; keys that come while it waits."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
import torch

from kvlab.ops.cuda.gathered import Arrival, attend_runs
from kvlab.parallel.layout import Shard, zigzag_llama3_plan
from kvlab.reference import attention as reference
from tests.compare import assert_accurate, each_sequence, low_precision_attention
from tests.gpu.attention_cases import poison, to_numpy

LENGTHS = {
    "one": (1536,), "two": (768, 256), "short runs": (64, 1216, 0, 192, 64), "no last": (2048 - 64, 64, 0),
}  # fmt: skip
SHAPES = ((8, 2, 128, "bfloat16"), (4, 4, 64, "float16"), (6, 2, 96, "bfloat16"), (8, 1, 256, "float16"))


def inputs(lengths: tuple[int, ...], heads: int, heads_kv: int, dim: int, dtype: str) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(sum(lengths) + dim)
    shapes = [(sum(lengths), n, dim) for n in (heads, heads_kv, heads_kv)]
    return [torch.randn(shape, generator=generator).to("cuda", getattr(torch, dtype)) for shape in shapes]


def rank_call(whole: list[torch.Tensor], lengths: tuple[int, ...], rank: int, world: int) -> Any:
    """q, k and v of a rank, what comes from others, the plan, and where the rank's rows stand."""
    shards = [torch.from_numpy(Shard(lengths, r, world).rows).cuda() for r in range(world)]
    plan = zigzag_llama3_plan(Shard(lengths, rank, world), True)
    mine = [x[shards[rank]] for x in whole]
    come = [
        torch.cat([x[rows[:n]] for rows, n in zip(shards, plan.takes[rank], strict=True)]) for x in whole[1:]
    ]
    return mine, come, plan, shards[rank]


def counters(world: int, value: int = 0) -> torch.Tensor:
    return torch.full((world,), value, dtype=torch.int32, device="cuda")


def expected(whole: list[torch.Tensor], lengths: tuple[int, ...]) -> tuple[Any, Any]:
    arrays, bounds = [to_numpy(x) for x in whole], np.cumsum([0, *lengths]).astype(np.int32)
    right = reference.attention_varlen(
        *arrays, bounds, bounds, max(lengths), max(lengths), causal=True, return_lse=True
    )
    return right, each_sequence(low_precision_attention, *arrays, bounds, bounds, causal=True)


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", LENGTHS)
def test_ranks_together_give_what_the_oracle_gives(
    name: str, shape: tuple[int, int, int, str], world: int
) -> None:
    lengths = LENGTHS[name]
    whole = inputs(lengths, *shape)
    out, lse = torch.empty_like(whole[0]), torch.empty(shape[0], sum(lengths), device="cuda")
    there = counters(world)
    for rank in range(world):
        (q, k, v), come, plan, rows = rank_call(whole, lengths, rank, world)
        poison(q)
        for _ in range(2):  # the list is made, then kept
            found = attend_runs(
                q, (k, v), tuple(come), plan.runs, Arrival(there.data_ptr(), 0, 1 << 20), None
            )
            assert found is not None
        out[rows], lse[:, rows] = found
    right, low = expected(whole, lengths)
    assert_accurate(to_numpy(out), right[0], low[0])
    assert_accurate(to_numpy(lse), right[1], low[1], "lse")


@pytest.mark.parametrize("heads_of_piece", [1, 2])
def test_keys_are_not_read_before_they_have_come(heads_of_piece: int) -> None:
    """NaN lies where keys are to come; copy engines bring these from the host while the kernel waits."""
    world, rank, lengths, begin = 4, 2, (4096, 512), 7
    whole = inputs(lengths, 8, 2, 128, "bfloat16")
    (q, k, v), come, plan, _ = rank_call(whole, lengths, rank, world)
    there = counters(world)
    wanted = attend_runs(q, (k, v), tuple(come), plan.runs, Arrival(there.data_ptr(), 0, 1 << 20), None)
    assert wanted is not None
    buffers = tuple(torch.full_like(x, float("nan")) for x in come)
    there.fill_(begin - 1)
    on_host = [x.cpu().pin_memory() for x in come]
    values = [torch.full((1,), begin + n, dtype=torch.int32).pin_memory() for n in range(2)]
    side, ends = torch.cuda.Stream(), np.cumsum(plan.takes[rank])
    torch.cuda.synchronize()
    found = attend_runs(q, (k, v), buffers, plan.runs, Arrival(there.data_ptr(), begin, heads_of_piece), None)
    time.sleep(0.02)  # it waits
    over = torch.cuda.Event()
    over.record()
    assert not over.query()
    with torch.cuda.stream(side):
        for piece, first in enumerate(range(0, 2, heads_of_piece)):
            for source in (1, 0, 3):
                some = slice(ends[source] - plan.takes[rank, source], ends[source])
                for buffer, x in zip(buffers, on_host, strict=True):
                    if heads_of_piece == 2:
                        buffer[some].copy_(x[some], non_blocking=True)
                    else:
                        copy_head(buffer[some], x[some], first, side.cuda_stream)
                there[source : source + 1].copy_(values[piece], non_blocking=True)
    torch.cuda.synchronize()
    assert found is not None
    for one, other in zip(found, wanted, strict=True):
        assert torch.equal(one, other)


def copy_head(to: torch.Tensor, source: torch.Tensor, head: int, stream: int) -> None:
    """Copy a head of all rows from the host by a copy engine; torch would take a kernel."""
    from cuda.bindings import driver

    copy, row = driver.CUDA_MEMCPY2D(), to.stride(0) * to.element_size()
    width = to.stride(1) * to.element_size()
    copy.srcMemoryType = driver.CUmemorytype.CU_MEMORYTYPE_HOST
    copy.dstMemoryType = driver.CUmemorytype.CU_MEMORYTYPE_DEVICE
    copy.srcHost, copy.dstDevice = source.data_ptr() + head * width, to.data_ptr() + head * width
    copy.srcPitch, copy.dstPitch, copy.WidthInBytes, copy.Height = row, row, width, len(to)
    (error,) = driver.cuMemcpy2DAsync(copy, stream)
    assert not error


def test_the_comparison_sees_keys_that_never_came() -> None:
    lengths, world = (1536,), 2
    whole = inputs(lengths, 8, 2, 128, "bfloat16")
    (q, k, v), come, plan, rows = rank_call(whole, lengths, 1, world)
    stale = come[0], come[1].roll(8, 0)
    found = attend_runs(q, (k, v), stale, plan.runs, Arrival(counters(world).data_ptr(), 0, 1 << 20), None)
    assert found is not None
    right, low = expected(whole, lengths)
    rows = rows.cpu()
    with pytest.raises(AssertionError, match="out"):
        assert_accurate(to_numpy(found[0]), right[0][rows], low[0][rows])

"""dq summed over own keys and those of others, of all ranks on one GPU, against gradients of the whole."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from kvlab.ops.cuda import grouped_backward
from kvlab.ops.cuda.query_gradients import Seen, begin_sum
from kvlab.parallel.gathered import _on_device
from kvlab.parallel.layout import Shard, zigzag_llama3_plan
from kvlab.reference.attention import attention_varlen
from kvlab.reference.attention_backward import attention_varlen_backward
from tests.gpu.attention_cases import poison, to_numpy

LENGTHS = (1536, 1528)
SHAPES = ((8, 2, 128, "bfloat16"), (4, 4, 64, "float16"), (6, 2, 96, "bfloat16"))


def gradients(
    length: int, shape: tuple[int, int, int, str], world: int, *, change: int = 0
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Gradients of ranks together, and of the oracle; `change` is added to the prefixes of others' keys."""
    lengths, (heads, heads_kv, dim, dtype) = (length,), shape
    generator = torch.Generator().manual_seed(sum(lengths) + dim)
    q, k, v, dout = (
        torch.randn((sum(lengths), n, dim), generator=generator).to("cuda", getattr(torch, dtype))
        for n in (heads, heads_kv, heads_kv, heads)
    )
    bounds = np.cumsum([0, *lengths]).astype(np.int32)
    sizes = bounds, bounds, max(lengths), max(lengths)
    arrays = [to_numpy(x) for x in (q, k, v)]
    right, log_sums = attention_varlen(*arrays, *sizes, causal=True, return_lse=True)
    wanted = attention_varlen_backward(to_numpy(dout), *arrays, right, log_sums, bounds, bounds, causal=True)
    out, lse = (torch.from_numpy(np.asarray(x)).cuda() for x in (right, log_sums))
    out, lse = out.to(q.dtype), lse.float()
    found = [torch.full_like(q, float("nan")), *(torch.zeros(x.shape, device="cuda") for x in (k, v))]
    shards = [torch.from_numpy(Shard(lengths, rank, world).rows).cuda() for rank in range(world)]
    for rank, rows in enumerate(shards):
        plan = zigzag_llama3_plan(Shard(lengths, rank, world), True)
        assert plan.seen is not None
        theirs = torch.cat([other[:n] for other, n in zip(shards, plan.takes[rank], strict=True)])
        own, others = (_on_device(seen, q.device) for seen in plan.seen)
        others = _changed(others, change)
        dq = torch.empty(len(rows), 2 * heads, dim, device="cuda", dtype=q.dtype)[:, heads:]
        for _ in range(2):  # lists are made, then kept
            poison(dq)
            queries = dout[rows], q[rows], out[rows], lse[:, rows].contiguous()
            summed = begin_sum(queries, None, dq, k[rows], v[rows], own)
            assert summed is not None
            parts = [(rows, summed.add_own())]
            with torch.cuda.stream(side := torch.cuda.Stream()):
                side.wait_stream(torch.cuda.default_stream())
                parts.append((theirs, summed.add(k[theirs], v[theirs], others)))
            torch.cuda.default_stream().wait_stream(side)
            summed.finish()
            torch.cuda.synchronize()
        found[0][rows] = dq
        for places, of_keys in parts:
            for total, one in zip(found[1:], of_keys, strict=True):
                total.index_add_(0, places, one)
    return [to_numpy(x) for x in found], list(wanted)


def _changed(seen: Seen, change: int) -> Seen:
    if not change:
        return seen
    lens = [(x + change).clamp(min=0) for x in seen.prefix_lens]
    return seen._replace(prefix_lens=lens, name=(seen.name, change))


def errors(found: list[np.ndarray], wanted: list[np.ndarray]) -> list[float]:
    pairs = [(np.asarray(x, np.float64), y) for x, y in zip(found, wanted, strict=True)]
    return [float(np.abs(one - other).max() / np.abs(other).max()) for one, other in pairs]


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Long steps wherever the kernel can; rows of a step of the calls that were made."""
    found: list[int] = []
    plan_of = grouped_backward.plan_of

    def remember(*options: Any) -> Any:
        found.append(plan_of(*options).box)
        return plan_of(*options)

    monkeypatch.setattr(grouped_backward, "plan_of", remember)
    monkeypatch.setattr(grouped_backward, "has_long_steps", lambda dim, *_: dim > 96)
    monkeypatch.setattr(grouped_backward, "divide", lambda *_: 1)
    grouped_backward.listed_call.cache_clear()
    yield found
    grouped_backward.listed_call.cache_clear()


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("dim", [104, 128])
@pytest.mark.parametrize("length", [16, 160, 1280, *LENGTHS, 2728])
def test_long_steps(steps: list[int], length: int, dim: int, world: int) -> None:
    for dtype in ("bfloat16", "float16"):
        assert max(errors(*gradients(length, (8, 2, dim, dtype), world))) < 1e-2
    assert set(steps) == {80}


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("length", LENGTHS)
def test_ranks_together_give_the_gradients_of_the_whole(
    length: int, shape: tuple[int, int, int, str], world: int
) -> None:
    assert max(errors(*gradients(length, shape, world))) < 1e-2


def test_a_shorter_prefix_would_be_noticed() -> None:
    assert min(errors(*gradients(1536, SHAPES[0], 2, change=-16))) > 2e-2

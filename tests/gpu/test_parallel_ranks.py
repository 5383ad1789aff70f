"""Context parallelism on ranks with a GPU each: what no CPU can show of copies between GPUs.

That ranks together give what one device gives is the part of ``python -m kvlab.parallel.check``.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from kvlab import parallel
from kvlab.parallel import copy_engines
from tests.parallel.ranks import Ranks

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")

SIZE = min(4, torch.cuda.device_count())
TIMEOUT = 12.0
LENGTHS = ((2048 * SIZE,), (64 * SIZE, 1216 * SIZE, 256 * SIZE))


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    group = Ranks(SIZE, backend="nccl")
    yield group
    group.close()


def leaves(seed: int, lengths: tuple[int, ...], size: int) -> list[torch.Tensor]:
    generator = torch.Generator("cuda").manual_seed(seed)
    total = sum(lengths) // size
    return [
        torch.randn(
            total, heads, 128, generator=generator, device="cuda", dtype=torch.bfloat16
        ).requires_grad_()
        for heads in (8, 4, 4)
    ]


def attend(
    mine: list[torch.Tensor], lengths: tuple[int, ...], size: int, *, deterministic: bool = False
) -> torch.Tensor:
    cu = [sum(lengths[:n]) for n in range(len(lengths) + 1)]
    local = [n // size for n in cu]
    out: torch.Tensor = parallel.zigzag_llama3_flash_attn_varlen_func(
        *mine, local, cu, max(lengths) // size, max(lengths), 2, causal=True, deterministic=deterministic
    )
    return out


def calls_under_way(rank: int, size: int) -> list[str]:
    """Where several calls with different data, one behind the other without a wait, differ from each alone.

    Each rank is late in turns, so that others run ahead of it by as much as they can.
    """
    wrong = []
    for lengths in LENGTHS:
        alone = []
        for seed in range(6):
            mine = leaves(100 * seed + rank, lengths, size)
            out = attend(mine, lengths, size)
            alone.append((out.detach(), *torch.autograd.grad(out, mine, torch.ones_like(out))))
            torch.cuda.synchronize()
        for late in range(size):
            inputs = [leaves(100 * seed + rank, lengths, size) for seed in range(6)]
            if rank == late:
                torch.cuda._sleep(20_000_000)
            found = []
            for mine in inputs:
                out = attend(mine, lengths, size)
                found.append((out.detach(), *torch.autograd.grad(out, mine, torch.ones_like(out))))
            for seed, (one, other) in enumerate(zip(alone, found, strict=True)):
                names = ("out", "dq", "dk", "dv")
                for name, x, y in zip(names, one, other, strict=True):
                    close = torch.equal(x, y) if name == "out" else torch.allclose(x, y, atol=0.05, rtol=0.05)
                    if not close:
                        wrong.append(f"{name} of call {seed} of {lengths}, rank {late} late")
    return wrong


def test_calls_under_way_together_share_no_buffer(ranks: Ranks) -> None:
    assert ranks(calls_under_way) == [[]] * SIZE


def deterministic_calls(rank: int, size: int) -> list[str]:
    """Where gradients of calls with the same data differ in a bit, or from those of an ordinary call."""
    wrong = []
    for lengths in LENGTHS:
        mine = leaves(rank, lengths, size)
        found = []
        for deterministic in (False, True, True, True):
            out = attend(mine, lengths, size, deterministic=deterministic)
            found.append(torch.autograd.grad(out, mine, torch.ones_like(out)))
        ordinary, first, *others = found
        for n, name in enumerate(("dq", "dk", "dv")):
            if not all(torch.equal(first[n], other[n]) for other in others):
                wrong.append(f"{name} of {lengths}")
            if not torch.allclose(first[n], ordinary[n], atol=0.05, rtol=0.05):
                wrong.append(f"{name} of {lengths} beside an ordinary call")
    return wrong


def test_deterministic_gradients_have_the_same_bits(ranks: Ranks) -> None:
    assert ranks(deterministic_calls) == [[]] * SIZE


def unguarded(rank: int, size: int) -> int:
    """How many faults `calls_under_way` finds where no rank waits for another to have read a slot."""
    driver = copy_engines._driver()

    class Hasty:
        def __getattr__(self, name: str) -> Any:
            return getattr(driver, name)

        @staticmethod
        def cuStreamWaitValue32(stream: int, flag: int, value: int, _: int) -> Any:
            return (0,)

    hasty = Hasty()
    copy_engines._driver = lambda: hasty
    try:
        wrong = len(calls_under_way(rank, size))
    finally:
        copy_engines._driver = lambda: driver
    torch.cuda.synchronize()
    return wrong


def test_stale_buffers_are_found(ranks: Ranks) -> None:
    group = Ranks(SIZE, backend="nccl")  # whose mailboxes are not used again
    try:
        assert sum(group(unguarded)) > 0
    finally:
        group.close()


def memory(rank: int, size: int) -> tuple[int, int]:
    """Bytes that torch has given out after ten calls and after a thousand."""
    found = []
    mine = leaves(rank, (256 * size,), size)
    for n in range(1000):
        attend(mine, (256 * size,), size).sum().backward()
        for x in mine:
            x.grad = None
        if n in (9, 999):
            torch.cuda.synchronize()
            found.append(torch.cuda.memory_allocated())
    return found[0], found[1]


def test_a_thousand_calls_keep_no_memory(ranks: Ranks) -> None:
    assert all(before == after for before, after in ranks(memory))


def calls_without_end(rank: int, size: int, dies: int) -> None:
    mine = leaves(rank, LENGTHS[0], size)
    attend(mine, LENGTHS[0], size)
    torch.cuda.synchronize()
    if rank == dies:
        os.kill(os.getpid(), signal.SIGKILL)
    while True:
        attend(mine, LENGTHS[0], size)
        torch.cuda.synchronize()


def test_a_rank_that_is_killed_ends_all_others_in_time() -> None:
    group = Ranks(SIZE, timeout=TIMEOUT, backend="nccl")
    try:
        group.start(calls_without_end, SIZE - 1)
        group.processes[-1].join(60)
        begun = time.monotonic()
        for rank, process in enumerate(group.processes[:-1]):
            process.join(3 * TIMEOUT)
            assert process.exitcode not in (None, 0), f"rank {rank} runs on"
            assert "kvlab.errors.RankError" in group.said_by(rank)
        assert time.monotonic() - begun < 2 * TIMEOUT
    finally:
        group.close()

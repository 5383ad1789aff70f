"""A program: the functions of ring-flash-attn, unmodified, over processes on CPU or GPUs, against float64.

    python -m tests.integrations.ring_attention [nccl]

Everything is imported once, then the process forks four times: groups of 2 and of 4 processes each hold their
part of a sequence, exchange keys and gradients over gloo, and compare with attention over the whole sequence.
With `nccl` it forks once for each GPU, and one group of all of them exchanges over NCCL.
Where ring-flash-attn moves keys around a ring it takes for granted that tensors are 16-bit and gives dq in
bfloat16, so these functions run in bfloat16; the one that gathers keys runs in float32, to float32's limits.
Exits with 1, and a traceback, if any result is off.
"""

from __future__ import annotations

import os
import sys
import tempfile
import traceback
from collections.abc import Callable
from functools import partial
from typing import Any

os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

import numpy as np
import torch
import torch.distributed as dist
from transformers import modeling_flash_attention_utils

import kvlab
from kvlab.integrations import flash_attn
from kvlab.reference import attention as forward
from tests.gradients import each_sequence, exact_gradients

# transformers has dropped a name that ring-flash-attn 0.1.8 imports for its adapter, which is not used here.
modeling_flash_attention_utils.is_flash_attn_greater_or_equal_2_10 = True
flash_attn.install()

import ring_flash_attn  # noqa: E402

NCCL = "nccl" in sys.argv[1:]
DEVICE = "cuda" if NCCL else "cpu"
HEADS, KV_HEADS, HEAD_DIM, CHUNK = 4, 2, 16, 12
"""CHUNK: tokens of half a process; the zigzag functions split a part in two."""

CUTS = (0, 7, 8, 31, 48)
"""Bounds of the sequences of a variable-length call, a quarter of them to each of four processes."""

Order = Callable[[int, int, int], np.ndarray]
"""Which tokens a process holds: (rank, processes, tokens)."""


def contiguous(rank: int, world: int, tokens: int) -> np.ndarray:
    return np.arange(tokens).reshape(world, -1)[rank]


def zigzag(rank: int, world: int, tokens: int) -> np.ndarray:
    return np.arange(tokens).reshape(2 * world, -1)[[rank, 2 * world - 1 - rank]].ravel()


def striped(rank: int, world: int, tokens: int) -> np.ndarray:
    return np.arange(rank, tokens, world)


FIXED: dict[str, tuple[Any, Order, tuple[bool, ...]]] = {
    "ring": (ring_flash_attn.ring_flash_attn_func, contiguous, (False, True)),
    "zigzag_ring": (ring_flash_attn.zigzag_ring_flash_attn_func, zigzag, (True,)),
    "stripe": (ring_flash_attn.stripe_flash_attn_func, striped, (True,)),
}


def draw(tokens: int, batch: tuple[int, ...], dtype: torch.dtype) -> list[np.ndarray]:
    """Return dout, q, k and v of the whole sequence, numbers of `dtype`, the same in every process."""
    rng = np.random.default_rng(tokens)
    shapes = [(*batch, tokens, heads, HEAD_DIM) for heads in (HEADS, HEADS, KV_HEADS, KV_HEADS)]
    return [torch.from_numpy(rng.standard_normal(shape)).to(dtype).double().numpy() for shape in shapes]


def check(name: str, actual: list[torch.Tensor], expected: list[np.ndarray]) -> None:
    """Compare out, dq, dk and dv with 2 ulp of their dtype at the largest element."""
    for part, got, want in zip(("out", "dq", "dk", "dv"), actual, expected, strict=True):
        limit = 2.0**-6 if got.dtype == torch.bfloat16 else 4e-6
        error = np.abs(got.detach().double().cpu().numpy() - want).max() / np.abs(want).max()
        if not error <= limit:
            raise AssertionError(f"{name}: {part} is off by {error:.2g} of its largest element")


def forward_and_backward(
    call: Callable[..., torch.Tensor], whole: list[np.ndarray], own: np.ndarray, axis: int, dtype: torch.dtype
) -> list[torch.Tensor]:
    """Return out, dq, dk and dv of one process, which holds the tokens `own`."""
    dout, *inputs = (torch.from_numpy(x.take(own, axis)).to(DEVICE, dtype) for x in whole)
    leaves = [x.requires_grad_() for x in inputs]
    out = call(*leaves)
    out.backward(dout)
    return [out, *(x.grad for x in leaves if x.grad is not None)]


def try_fixed(name: str, group: Any, rank: int, world: int) -> None:
    function, order, masks = FIXED[name]
    tokens = 2 * CHUNK * world
    whole = draw(tokens, (2,), torch.bfloat16)
    own = order(rank, world, tokens)
    for causal in masks:
        call = partial(function, causal=causal, group=group)
        actual = forward_and_backward(call, whole, own, 1, torch.bfloat16)
        out = forward.attention(*whole[1:], causal=causal)
        expected = [x[:, own] for x in (out, *exact_gradients(*whole, causal=causal))]
        check(f"{name}, {world} processes, causal={causal}", actual, expected)
        try:  # the check must notice the rows of another process
            other = order((rank + 1) % world, world, tokens)
            check("", actual, [out[:, other], *expected[1:]])
        except AssertionError:
            continue
        raise RuntimeError(f"{name}: the check accepts anything")


def try_llama3(group: Any, rank: int, world: int) -> None:
    """Sequences of different lengths, cut anywhere by the borders of processes; one KV head at a time."""
    bounds = np.array(CUTS, np.int32)
    dout, q, k, v = whole = draw(CUTS[-1], (), torch.float32)
    own = contiguous(rank, world, CUTS[-1])
    for causal in (False, True):
        prepared = ring_flash_attn.llama3_flash_attn_prepare_cu_seqlens(
            torch.from_numpy(bounds).to(DEVICE), causal, rank, world
        )
        cu_q, cu_k, max_q, max_k, keys = prepared
        sequences = cu_q, cu_k, max_q, max_k

        def call(*x: torch.Tensor, rest: Any = sequences, keys: Any = keys, causal: bool = causal) -> Any:
            return ring_flash_attn.llama3_flash_attn_varlen_func(
                *x, *rest, heads_k_stride=1, local_k_slice=keys, causal=causal, group=group
            )

        actual = forward_and_backward(call, whole, own, 0, torch.float32)
        longest = int(np.diff(bounds).max())
        out = forward.attention_varlen(q, k, v, bounds, bounds, longest, longest, causal=causal)
        gradients = each_sequence(exact_gradients, dout, q, k, v, bounds, bounds, causal=causal)
        name = f"llama3, {world} processes, causal={causal}"
        check(name, actual, [x[own] for x in (out, *gradients)])


def work(rank: int, world: int, store: str) -> None:
    """What one of `world` processes does; the first two of more are a group of their own, too."""
    torch.set_num_threads(1)
    if NCCL:
        torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl" if NCCL else "gloo", init_method=f"file://{store}", rank=rank, world_size=world
    )
    groups = {world: None}
    if world > 2:
        groups[2] = dist.new_group([0, 1])
    for size, group in groups.items():
        if rank < size:
            for name in FIXED:
                try_fixed(name, group, rank, size)
            try_llama3(group, rank, size)
    if kvlab.last_backend() != DEVICE:
        raise RuntimeError(f"the last call ran on {kvlab.last_backend()}")
    dist.barrier()
    dist.destroy_process_group()


def main() -> int:
    """Fork the processes; 0 if all of them were right."""
    world = torch.cuda.device_count() if NCCL else 4
    with tempfile.TemporaryDirectory() as folder:
        children = []
        for rank in range(world):
            child = os.fork()
            if child == 0:
                try:
                    work(rank, world, os.path.join(folder, "store"))
                except BaseException:
                    traceback.print_exc()
                    sys.stderr.flush()
                    os._exit(1)
                os._exit(0)
            children.append(child)
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    if codes == [0] * world and world >= 2:
        where = f"{world} GPUs" if NCCL else "2 and 4 processes"
        print(f"{', '.join(FIXED)} and llama3 of ring-flash-attn agree with float64 over {where}")
        return 0
    return 1


if __name__ == "__main__":
    sys.exit(main())

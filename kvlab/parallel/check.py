"""Compare results of all ranks with those of one device.

    torchrun --nproc_per_node=N -m kvlab.parallel.check

Every rank draws the same whole input, computes its share with each function of kvlab.parallel, forward and
backward, and compares its rows with attention of the whole input on its own device. With GPUs, NCCL and
bfloat16; without, gloo and float32. The exit code is 0 if every error is within its limit.
"""

from __future__ import annotations

import argparse
import datetime
import sys
from typing import Any

from kvlab import parallel
from kvlab.arguments import positive
from kvlab.ops.attention import attention_varlen
from kvlab.ops.attention_backward import attention_varlen_backward
from kvlab.parallel.collectives import largest, on_device, process_group, random_inputs
from kvlab.parallel.layout import Shard

__all__ = ["main"]

FUNCTIONS = ("zigzag_llama3", "llama3", "ring", "zigzag_ring")
RESULTS = ("out", "dq", "dk", "dv")
LIMITS = {"float32": (1e-5, 1e-4), "float16": (1e-3, 1e-2), "bfloat16": (8e-3, 4e-2)}
"""Largest error of out, and of gradients, relative to the largest element or to 1."""


def main(arguments: list[str] | None = None) -> int:
    """Run the check from a shell; the exit code is 0 if all is right."""
    parser = argparse.ArgumentParser(
        prog="python -m kvlab.parallel.check",
        description="Compare attention on several ranks with attention on one device.",
        epilog="example: torchrun --nproc_per_node=2 -m kvlab.parallel.check --tokens 4096",
    )
    parser.add_argument("--tokens", type=positive, default=1024, help="tokens of a rank (1024)")
    parser.add_argument("--heads", type=positive, nargs=2, default=(8, 2), help="query and KV heads (8 2)")
    parser.add_argument("--head-dim", type=positive, default=64, help="channels of a head (64)")
    parser.add_argument("--stride", type=positive, default=1, help="KV heads that are gathered at once (1)")
    parser.add_argument(
        "--dtype", choices=sorted(LIMITS), nargs="+", help="one or more; bfloat16 on GPUs, float32 on CPUs"
    )
    parser.add_argument("--timeout", type=float, default=60, help="seconds until a silent rank ends all (60)")
    options = parser.parse_args(arguments)
    if options.heads[0] % options.heads[1]:
        parser.error(
            f"--heads {' '.join(map(str, options.heads))}: query heads must be a multiple of KV heads"
        )
    if options.stride > options.heads[1]:
        parser.error(f"--stride {options.stride}: there are {options.heads[1]} KV heads to gather")
    with process_group(datetime.timedelta(seconds=options.timeout)) as (rank, size, device):
        dtypes = options.dtype or ["bfloat16" if device.startswith("cuda") else "float32"]
        right = [_is_right(options, dtype, rank, size, device) for dtype in dtypes]
    return 0 if all(right) else 1


def _is_right(options: argparse.Namespace, dtype: str, rank: int, size: int, device: str) -> bool:
    """Check all functions with inputs of a dtype, and print what rank 0 finds."""
    chunk = max(1, options.tokens // 2)  # of which a rank holds two, and a third is of the first sequence
    total, third = 2 * size * chunk, chunk // 3
    # Chunks of a multiple of 8 tokens take a kernel that others do not.
    firsts = dict.fromkeys((third // 8 * 8, third))
    sets = [(total,), *((2 * size * first, total - 2 * size * first) for first in firsts)]
    heads_q, heads_kv = options.heads
    shapes = [(total, heads, options.head_dim) for heads in (heads_q, heads_kv, heads_kv, heads_q)]
    arrays = random_inputs(shapes, dtype, device)
    limits = (LIMITS[dtype][0], *[LIMITS[dtype][1]] * 3)
    fine = True
    for lengths in sets:
        wanted = _whole(arrays, lengths)
        for function in FUNCTIONS:
            errors = largest(_errors(function, arrays, wanted, lengths, options.stride, rank, size), device)
            right = all(error <= limit for error, limit in zip(errors, limits, strict=True))
            fine &= right
            if rank == 0:
                found = ", ".join(f"{name} {error:.1e}" for name, error in zip(RESULTS, errors, strict=True))
                verdict = f"{function:14}{'right' if right else 'WRONG'}: errors {found}"
                print(f"{verdict}, lengths {', '.join(map(str, lengths))}", flush=True)
    if rank == 0:
        print(f"{size} ranks, {total} tokens, {dtype}: {'all right' if fine else 'WRONG'}", flush=True)
    return fine


def _whole(arrays: list[Any], lengths: tuple[int, ...]) -> list[Any]:
    """Out, dq, dk and dv of all tokens on one device."""
    q, k, v, dout = arrays
    bounds = on_device(Shard(lengths, 0, 1, zigzag=False).cu_seqlens, q.device)
    sizes = (bounds, bounds, max(lengths), max(lengths))
    out, lse = attention_varlen(q, k, v, *sizes, causal=True, return_lse=True)
    return [out, *attention_varlen_backward(dout, q, k, v, out, lse, *sizes, causal=True)]


def _errors(
    function: str,
    arrays: list[Any],
    wanted: list[Any],
    lengths: tuple[int, ...],
    stride: int,
    rank: int,
    size: int,
) -> list[float]:
    """Largest errors of this rank's rows of out, dq, dk and dv."""
    bounds = Shard(lengths, 0, 1, zigzag=False).cu_seqlens

    def mine(x: Any) -> Any:
        if function == "llama3":
            return x.chunk(size)[rank]
        return parallel.extract_local(x, bounds, zigzag="zigzag" in function)

    q, k, v, dout = (mine(x).detach().clone() for x in arrays)
    for x in (q, k, v):
        x.requires_grad_()
    longest = max(lengths)
    if function == "zigzag_llama3":
        out = parallel.zigzag_llama3_flash_attn_varlen_func(
            q, k, v, bounds // size, bounds, longest // size, longest, stride, causal=True
        )
    elif function == "llama3":
        like = on_device(bounds, q.device)
        prepared = parallel.llama3_flash_attn_prepare_cu_seqlens(like, True, rank, size)
        out = parallel.llama3_flash_attn_varlen_func(q, k, v, *prepared[:4], stride, prepared[4], causal=True)
    else:
        ring = getattr(parallel, f"{function}_flash_attn_varlen_func")
        out = ring(q, k, v, bounds // size, longest // size, causal=True)
    out.backward(dout)
    found = [x.float() for x in (out.detach(), q.grad, k.grad, v.grad)]
    compared = zip(found, (mine(x).float() for x in wanted), strict=True)
    return [float((one - other).abs().max() / max(1.0, float(other.abs().max()))) for one, other in compared]


if __name__ == "__main__":
    sys.exit(main())

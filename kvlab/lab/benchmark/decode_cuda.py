"""`kvlab benchmark decode --device cuda`: a query token over packed pages, against dense bfloat16 attention.

The baseline is the fastest of cuDNN and FlashAttention SDPA on the same shape, on the same GPU, in the same
run. Pages are drawn and results checked by device_pages.py: before a case is timed, one sequence is compared
with float64 attention over its dequantised pages, and every sequence with a call of its own, which divides
the work differently. Times are medians over replays of a CUDA graph that rotates over as many sets of pages
as it takes to exceed the second-level cache four times, and holds 8 calls or more, as the step of a model has
one a layer; after them the results have to be the same bits.

The floor is the bytes of codes and scales at the read bandwidth of the GPU; positions and importance lie
behind them in a page and are not read.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from kvlab.lab.benchmark.baseline import Options, check
from kvlab.lab.benchmark.device_pages import Mixture, Shape, attended_apart, draw_pages, relative_error
from kvlab.lab.results import Row
from kvlab.lab.timing_gpu import time_in_succession
from kvlab.ops.cuda import packed as packed_cuda
from kvlab.pages import DevicePages

__all__ = [
    "CONTEXTS",
    "LADDERS",
    "NOTE",
    "PackedCase",
    "benchmark_decode",
    "prepare_packed",
    "read_bandwidth",
    "time_dense",
    "time_packed",
]

CONTEXTS = (4_096, 8_192, 16_384, 32_768, 65_536, 131_072)
LADDERS: dict[str, Mixture] = {
    "16": {16: 1.0}, "8": {8: 1.0}, "4": {4: 1.0}, "3": {3: 1.0}, "2": {2: 1.0},
    "8/4/2": {2: 0.4, 4: 0.4, 8: 0.2},
    "default": {2: 0.0, (3, 2): 0.0, (4, 3): 0.625, (8, 4): 0.332, 8: 0.043},
    "profiles": {
        ((4, 2, 2, 0), 2): 0.0, ((4, 4, 2, 2), 2): 0.0, ((8, 4, 2, 2), 3): 0.132, ((8, 4, 4, 4), 4): 0.825,
        ((8, 8, 8, 8), 8): 0.043,
    },
}  # fmt: skip
"""What pages of every sequence hold, by name. "default": widths as a cache holds 2,000 tokens of SmolLM2 in
0.3 of the bytes. "profiles": keys in blocks of channels, in as many bytes."""

NOTE = "speedup: over the faster of cuDNN and FlashAttention in bfloat16; of floor: bytes at read bandwidth"

_READ_BANDWIDTH = {"NVIDIA H200": 4.70e12}  # measured with bulk copies; what torch reaches is less
_ROTATED_BYTES = 240e6
_MAX_SETS = 128
_CHECKED_TOKENS = 32_768  # longer sequences are not compared: the float64 attention takes too long


def benchmark_decode(options: Options) -> list[Row]:
    """Time a decode step at batch 1, 32 query heads, 8 KV heads of 128 channels, by `repeats` replays.

    A row has ``context``, ``widths``; ``packed_us``, ``dense_us``: medians; ``dense``: which it was;
    ``speedup``; ``tb_per_s``, ``floor_us``, ``of_floor``; ``relative_error``: against float64, None if not
    compared.
    """
    import torch

    bandwidth = read_bandwidth()
    rows = []
    for context in (128,) if options.tiny else CONTEXTS:
        shape = Shape(1, context)
        dense = time_dense(shape, options.repeats)
        fastest = min(dense, key=lambda name: dense[name])
        for name, ladder in LADDERS.items():
            packed = time_packed(shape, ladder, options.repeats)
            floor = 1e6 * packed["bytes"] / bandwidth
            rows.append(
                {
                    "context": context,
                    "widths": name,
                    "packed_us": packed["us"],
                    "dense_us": dense[fastest],
                    "dense": fastest,
                    "speedup": dense[fastest] / packed["us"],
                    "tb_per_s": packed["bytes"] / packed["us"] / 1e6,
                    "floor_us": floor,
                    "of_floor": floor / packed["us"],
                    "relative_error": packed["relative_error"],
                }
            )
            torch.cuda.empty_cache()
    return rows


def read_bandwidth() -> float:
    """Return bytes a second that the current GPU reads: as measured on such a GPU, else what a sum reads."""
    import torch

    known = _READ_BANDWIDTH.get(torch.cuda.get_device_name())
    if known:
        return known
    data = torch.ones(2**30, device="cuda")
    return data.nbytes / time_in_succession([data.sum], 20).median


def time_dense(shape: Shape, repeats: int = 50) -> dict[str, float]:
    """Return microseconds of each dense attention that supports the shape, by name."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    kv = (2, shape.batch, shape.num_heads_kv, shape.tokens, shape.head_dim)
    sets = max(1, min(8, round(_ROTATED_BYTES / (2 * np.prod(kv)))))
    data = [torch.randn(kv, device="cuda", dtype=torch.bfloat16) for _ in range(sets)]
    q = torch.randn(shape.batch, shape.num_heads_q, 1, shape.head_dim, device="cuda", dtype=torch.bfloat16)
    grouped = shape.num_heads_q != shape.num_heads_kv
    times = {}
    for name in ("CUDNN_ATTENTION", "FLASH_ATTENTION"):

        def attend(kv: Any, name: str = name) -> None:
            with sdpa_kernel(getattr(SDPBackend, name)):
                scaled_dot_product_attention(q, kv[0], kv[1], enable_gqa=grouped)

        try:
            calls = [partial(attend, kv) for kv in data]
            times[name] = 1e6 * time_in_succession(calls, repeats).median
        except RuntimeError as error:
            if "No available kernel" not in str(error):
                raise
    return times


class PackedCase(NamedTuple):
    """Packed attention that is right and can be timed."""

    calls: list[Callable[[], None]]
    """One for each set of pages, to rotate over."""
    out: Any
    nbytes: int
    """Of codes and scales."""
    relative_error: float | None


def prepare_packed(
    shape: Shape,
    mixture: Mixture,
    warps: int = 0,
    backend: Any = packed_cuda,
    max_compared: int = _CHECKED_TOKENS,
) -> PackedCase:
    """Draw pages of a case and check what is attended.

    Arguments are those of `time_packed`; sequences longer than `max_compared` tokens are not compared with
    float64. A wrong result is a RuntimeError.
    """
    import torch

    pages = draw_pages(shape, mixture)
    needed = sum(layout.positions * int((pages.rung == r).sum()) for r, layout in enumerate(pages.layouts))
    sets = max(1, min(_MAX_SETS, round(_ROTATED_BYTES / needed)))
    every = [pages] + [draw_pages(shape, mixture) for _ in range(sets - 1)]
    group = shape.num_heads_q // shape.num_heads_kv
    q = torch.randn(shape.batch, 1, shape.num_heads_q, shape.head_dim, device="cuda", dtype=torch.bfloat16)
    out = torch.full_like(q, float("nan"))
    lse = torch.empty(shape.batch, shape.num_heads_q, 1, device="cuda")
    workspace = backend.make_workspace(q, shape.num_sequences, group, shape.head_dim)
    options = {"warps": warps} if warps else {}

    def attend(own: DevicePages) -> None:
        backend.attend(q, own, out, lse, workspace, scale=shape.head_dim**-0.5, **options)

    attend(pages)
    case, error = f"packed attention of {shape}, widths {dict(mixture)},", None
    if shape.tokens <= max_compared:
        error = relative_error(pages, q, out, 0)
        check(error < 1e-2, f"{case} relative error {error},")
    apart = attended_apart(pages, q, backend)
    differences = (out - apart).float().norm(dim=-1) / apart.float().norm(dim=-1)
    check(bool((differences < 1e-2).all()), f"{case} pairs attended together and alone,")
    return PackedCase([partial(attend, own) for own in every], out, needed, error)


def time_packed(
    shape: Shape,
    mixture: Mixture,
    repeats: int = 50,
    warps: int = 0,
    backend: Any = packed_cuda,
) -> dict[str, Any]:
    """Check and time one case.

    `mixture` is one of `LADDERS`, `repeats` counts the replays that are timed, `warps` those of a block of
    the CUDA C++ kernel (0: what the library takes), and `backend` is the launcher: `kvlab.ops.cuda.packed` or
    `kvlab.ops.numba.packed`. The result has ``us``; ``bytes`` of codes and scales; ``sets`` of pages rotated
    over; ``relative_error``.
    """
    import torch

    case = prepare_packed(shape, mixture, warps, backend)
    before = case.out.clone()
    us = 1e6 * time_in_succession(case.calls, repeats).median
    case.calls[0]()
    check(torch.equal(case.out, before), f"packed attention of {shape}, {dict(mixture)}, after timed calls,")
    return {
        "us": us,
        "bytes": case.nbytes,
        "sets": len(case.calls),
        "relative_error": case.relative_error,
    }

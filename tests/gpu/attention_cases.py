"""What GPU tests of attention share: drawn arrays and options, poisoned memory, results as NumPy arrays, and
gradients against float64."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import torch

import kvlab
from tests.gradients import Gradients, assert_gradients, exact_gradients, low_precision_gradients

DTYPES = {"float16": np.dtype(np.float16), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
HEAD_DIMS = (8, 20, 32, 40, 64, 72, 80, 96, 128, 160, 192, 256)
HEADS = ((1, 1), (4, 4), (8, 2), (6, 1), (9, 3), (7, 7))
LENGTHS = (0, 1, 2, 17, 63, 64, 65, 100, 128, 129, 200, 300)


def to_numpy(x: torch.Tensor) -> np.ndarray:
    if x.dtype == torch.bfloat16:
        return x.cpu().contiguous().view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return x.cpu().numpy()


def draw(rng: np.random.Generator, shape: tuple[int, ...], dtype: str, size: float = 1.0) -> torch.Tensor:
    """Normal numbers as a view into NaN: axes in one of two orders, rows on 16 bytes or off them."""
    *outer, dim = shape
    axes = list(range(len(outer)))
    if rng.integers(2):
        axes[-2:] = axes[:-3:-1]
    gap = int(rng.choice([0, 8, 3]))
    stored = torch.full((*(outer[a] for a in axes), dim + gap), float("nan"), device="cuda")
    stored = stored.to(getattr(torch, dtype)).permute(*np.argsort(axes).tolist(), len(axes))
    start = int(rng.integers(gap + 1)) if gap == 3 else 0
    view = stored[..., start : start + dim]
    view.copy_(torch.from_numpy(size * rng.standard_normal(shape)))
    return view


def draw_options(rng: np.random.Generator) -> dict[str, Any]:
    return {
        "causal": bool(rng.integers(2)),
        "window": (-1, -1) if rng.random() < 0.6 else tuple(map(int, rng.integers(-1, 90, 2))),
        "softcap": float(rng.choice([0.0, 0.0, 0.0, 2.0, 30.0])),
        "scale": [None, None, 0.3, 1.0, -0.2, 0.0][rng.integers(6)],
    }


def poison(like: torch.Tensor) -> None:
    """Leave NaN where the next arrays of this size will be allocated."""
    torch.full_like(like, float("nan"), memory_format=torch.contiguous_format)
    torch.full((like.numel() // max(like.shape[-1], 1),), float("nan"), device="cuda")


def with_noise(low: Gradients, dout: Any, q: Any, k: Any, v: Any, scale: float | None) -> Gradients:
    """Add to dq and dk what float32 makes of a probability's slope that is 0.

    Where a row sees one key, or all its keys are equal, the slope is the difference of two equal sums of
    head_dim products, and the tensor cores round otherwise than NumPy.
    """
    largest = [np.abs(x).max(initial=0).astype(np.float64) for x in (dout, q, k, v)]
    dim = q.shape[-1]
    slope = 2.0**-24 * dim * largest[0] * largest[3] * abs(dim**-0.5 if scale is None else scale)
    return low[0] + slope * largest[2], low[1] + slope * largest[1], low[2]


def gradients(dout: torch.Tensor, *qkv: torch.Tensor, **options: Any) -> list[torch.Tensor]:
    """Gradients of a call, in memory where NaN was."""
    out, lse = kvlab.attention(
        *qkv, return_lse=True, **{n: x for n, x in options.items() if n != "deterministic"}
    )
    for x in qkv:
        poison(x)
    torch.full((4 * qkv[0].numel() + 10**6,), float("nan"), device="cuda")
    return list(kvlab.attention_backward(dout, *qkv, out, lse, **options))


def check(dout: torch.Tensor, *qkv: torch.Tensor, deterministic: bool, **options: Any) -> None:
    """Gradients of a call against float64, and the same bits again."""
    got = gradients(dout, *qkv, deterministic=deterministic, **options)
    assert kvlab.last_backend() == "cuda"
    arrays = [to_numpy(x) for x in (dout, *qkv)]
    low = with_noise(low_precision_gradients(*arrays, **options), *arrays, options["scale"])
    assert_gradients(tuple(map(to_numpy, got)), exact_gradients(*arrays, **options), low)
    if deterministic:
        again = gradients(dout, *qkv, deterministic=True, **options)
        assert all(torch.equal(x, y) for x, y in zip(got, again, strict=True))

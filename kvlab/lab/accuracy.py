"""Errors of attention against float64, as `kvlab validate` prints them.

Errors of out over all elements: their mean (MAE), root of mean square (RMSE) and maximum, and the cosine of
the angle between result and float64 as vectors. float32 has fixed limits. With 16 bits the formula itself is
inexact, so the limit of the maximum comes from the data: twice the error of the same formula in NumPy with
scores, probabilities and out stored in that dtype, plus two units in the last place of the largest element.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

import kvlab
from kvlab.lab.results import Row
from kvlab.reference import attention as reference
from kvlab.registry import all_rows

__all__ = ["SHAPES", "Limits", "Shape", "errors", "validate_attention"]

Array = NDArray[Any]


class Shape(NamedTuple):
    """One call of attention."""

    batch: int
    seqlen_q: int
    seqlen_k: int
    heads: int
    kv_heads: int
    head_dim: int
    causal: bool

    def __str__(self) -> str:
        """Return it as a cell of a table."""
        causal = " causal" if self.causal else ""
        return (
            f"{self.batch} x {self.seqlen_q}/{self.seqlen_k}, {self.heads}/{self.kv_heads} heads, "
            f"d{self.head_dim}{causal}"
        )


SHAPES = tuple(
    Shape(*shape)
    for shape in (
        (2, 64, 64, 4, 4, 64, False),
        (1, 128, 128, 8, 4, 64, True),
        (1, 256, 256, 8, 1, 128, True),
        (1, 100, 700, 32, 8, 96, True),
        (1, 1, 1024, 64, 8, 128, True),
        (8, 77, 77, 4, 4, 32, False),
        (1, 2048, 2048, 4, 4, 64, True),
    )
)


class Limits(NamedTuple):
    """What errors must stay below, and the cosine above; infinity where there is no fixed limit."""

    mae: float
    rmse: float
    cosine: float


_FLOAT32 = {"cpu": Limits(1e-6, 1e-6, 0.9999), "cuda": Limits(1e-5, 1e-4, 0.999)}
_HALF = Limits(np.inf, np.inf, 0.999)
_DTYPES = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}


def errors(actual: Array, expected: Array) -> dict[str, float]:
    """Return MAE, RMSE, the largest error and the cosine; NaN where `actual` holds one.

    Examples
    --------
    >>> errors(np.array([3.0, 5.0]), np.array([3.0, 4.0]))
    {'mae': 0.5, 'rmse': 0.707..., 'max_error': 1.0, 'cosine': 0.994...}
    """
    got, want = np.asarray(actual, np.float64).ravel(), np.asarray(expected, np.float64).ravel()
    difference = np.abs(got - want)
    lengths = float(np.linalg.norm(got) * np.linalg.norm(want))
    return {
        "mae": float(difference.mean()),
        "rmse": float(np.sqrt((difference**2).mean())),
        "max_error": float(difference.max()),
        "cosine": float(got @ want) / lengths if lengths else 0.0,
    }


def validate_attention(device: str, shapes: tuple[Shape, ...]) -> tuple[list[Row], dict[str, str]]:
    """Compare attention with float64, and on a GPU with the CPU as well.

    A row has ``device``, ``dtype``, ``shape``; ``mae``, ``rmse``, ``max_error``, ``cosine``; ``limit`` of the
    largest error, None if it has none; ``from_cpu``: the largest difference to the CPU, None there;
    ``passed``: yes or NO. Beside the rows stand the dtypes that the device does not support, and why.

    Examples
    --------
    >>> measured, skipped = validate_attention("cpu", SHAPES[:1])
    >>> [(row["dtype"], row["passed"]) for row in measured]
    [('float32', 'yes'), ('float16', 'yes'), ('bfloat16', 'yes')]
    """
    measured: list[Row] = []
    skipped: dict[str, str] = {}
    for name, dtype in _DTYPES.items():
        row = next(r for r in all_rows() if (r.operation, r.device_kind) == ("attention", device))
        missing = row.unsupported({"dtype": name})
        if missing:
            skipped[f"attention of {name} on {device}"] = f"backend {row.backend!r}: {'; '.join(missing)}"
            continue
        measured += [_validate(device, name, dtype, shape) for shape in shapes]
    return measured, skipped


def _validate(device: str, name: str, dtype: np.dtype[Any], shape: Shape) -> Row:
    rng = np.random.default_rng(0)
    of_q = (shape.batch, shape.seqlen_q, shape.heads, shape.head_dim)
    of_k = (shape.batch, shape.seqlen_k, shape.kv_heads, shape.head_dim)
    q, k, v = (rng.standard_normal(size).astype(dtype) for size in (of_q, of_k, of_k))
    expected = np.asarray(reference.attention(q, k, v, causal=shape.causal))
    on_cpu = np.asarray(kvlab.attention(q, k, v, causal=shape.causal))
    out = on_cpu if device == "cpu" else _on_gpu(q, k, v, causal=shape.causal)
    found = errors(out, expected)
    fixed = _FLOAT32[device] if name == "float32" else _HALF
    limit = None
    if name != "float32":
        low = np.abs(_low_precision(q, k, v, shape.causal).astype(np.float64) - expected).max()
        limit = float(2 * low + 2 * np.spacing(np.abs(expected).max().astype(dtype)).astype(np.float64))
    passed = found["mae"] < fixed.mae and found["rmse"] < fixed.rmse and found["cosine"] > fixed.cosine
    passed = passed and (limit is None or found["max_error"] <= limit)
    beside = None if device == "cpu" else errors(out, on_cpu)["max_error"]
    return {
        "device": device, "dtype": name, "shape": str(shape), **found, "limit": limit, "from_cpu": beside,
        "passed": "yes" if passed else "NO",
    }  # fmt: skip


def _on_gpu(*arrays: Array, causal: bool) -> Array:
    import torch

    def tensor(x: Array) -> Any:
        if x.dtype == ml_dtypes.bfloat16:
            return torch.from_numpy(x.view(np.int16)).view(torch.bfloat16).cuda()
        return torch.from_numpy(x).cuda()

    out: Any = kvlab.attention(*(tensor(x) for x in arrays), causal=causal)
    return np.asarray(out.double().cpu().numpy())


def _low_precision(q: Array, k: Array, v: Array, causal: bool) -> Array:
    """Attention with scores, probabilities and out stored in the dtype of q, summed in float32."""

    def stored(x: Array) -> Array:
        return x.astype(q.dtype).astype(np.float32)

    group = q.shape[2] // k.shape[2]
    wide_k, wide_v = (np.repeat(x.astype(np.float32), group, axis=2) for x in (k, v))
    scores = np.einsum("bqhd,bkhd->bhqk", q.astype(np.float32), wide_k, optimize=True)
    scores = stored(scores * np.float32(q.shape[3] ** -0.5))
    visible = reference.visible_keys(q.shape[1], k.shape[1], causal=causal)
    weights = np.exp(np.where(visible, scores, -np.inf) - scores.max(axis=-1, keepdims=True))
    probabilities = stored(weights / weights.sum(axis=-1, keepdims=True))
    out = np.einsum("bhqk,bkhd->bqhd", probabilities, wide_v, optimize=True)
    return np.asarray(out.astype(q.dtype))

"""Arrays that callers hand to a cache on the CPU, checked and turned into what the cache computes with."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvlab.arrays import Array, dtype_name, to_numpy_view
from kvlab.cache.options import CacheOptions
from kvlab.shapes import match_shapes

__all__ = ["NewKeys", "new_keys", "queries", "row_numbers"]

Floats = NDArray[np.float32]


class NewKeys(NamedTuple):
    """New keys and values (B, S, Hkv, D), and which of them are no padding (B, S)."""

    k: Floats
    v: Floats
    valid: NDArray[np.bool_]


def _float32(x: Array, name: str) -> Floats:
    if dtype_name(x, name) not in ("float16", "bfloat16", "float32"):
        raise TypeError(
            f"{name} has dtype {dtype_name(x, name)}; float16, bfloat16 and float32 are supported"
        )
    return to_numpy_view(x, name).astype(np.float32, copy=False)


def queries(options: CacheOptions, q: Array) -> Floats:
    """Queries (B, S, Hq, D) as float32."""
    found = _float32(q, "q")
    match_shapes({"q": (found.shape, (options.batch, "S", options.num_heads_q, options.head_dim))})
    return found


def new_keys(
    options: CacheOptions, k: Array, v: Array, valid: Array | None, q: Floats | None = None
) -> NewKeys:
    """New keys and values as float32, as many as there are queries, if there are any."""
    keys, values = _float32(k, "k"), _float32(v, "v")
    pattern: tuple[str | int, ...] = (options.batch, "S", options.num_heads_kv, options.head_dim)
    shapes: dict[str, Any] = {"k": (keys.shape, pattern), "v": (values.shape, pattern)}
    if q is not None:
        shapes = {"q": (q.shape, ("B", "S", "Hq", "D")), **shapes}
    steps = match_shapes(shapes)["S"]
    mask = np.ones((options.batch, steps), bool)
    if valid is not None:
        mask = to_numpy_view(valid, "valid")
        match_shapes({"valid": (mask.shape, (options.batch, steps))})
        if mask.dtype != bool:
            raise TypeError(f"valid has dtype {mask.dtype}; it must be bool")
    if options.dtype == "float16":
        for name, given, x in (("k", k, keys), ("v", v, values)):
            if dtype_name(given, name) != "float16":
                _check_range(x if valid is None else x[mask], name)
    return NewKeys(keys, values, mask)


def _check_range(x: Floats, name: str) -> None:
    """Refuse finite numbers that would become infinite in float16, in which tokens wait for their pages."""
    limit = np.finfo(np.float16).max
    largest = np.abs(x, where=np.isfinite(x), out=np.zeros_like(x)).max(initial=0) if x.size else 0
    if largest > limit:
        raise ValueError(
            f"{name} reaches {largest:g}, which a cache of dtype 'float16' (up to {limit:g}) does not hold: "
            "make it with dtype='bfloat16' or 'float32'"
        )


def row_numbers(rows: Array, batch: int, keep_size: bool = False) -> NDArray[np.int64]:
    """Numbers of rows of a batch; with `keep_size` as many as it has."""
    numbers = np.asarray(to_numpy_view(rows, "rows"))
    if numbers.ndim != 1 or numbers.dtype.kind not in "iu":
        raise TypeError(f"rows must be a vector of integers, not {numbers.dtype} of shape {numbers.shape}")
    if keep_size and len(numbers) != batch:
        raise ValueError(
            f"rows has {len(numbers)} entries for a batch of {batch}; use select to change the batch"
        )
    outside = numbers[(numbers < 0) | (numbers >= batch)]
    if len(outside):
        raise ValueError(f"rows names row {outside[0]}; this batch has rows 0 to {batch - 1}")
    return numbers.astype(np.int64)

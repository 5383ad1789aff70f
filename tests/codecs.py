"""What tests of codecs have in common: a Quantized taken apart, in float64, and the error it may make."""

from __future__ import annotations

from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

import kvlab
from tests.strategies import CodecCase

Array = NDArray[Any]
Quantized = kvlab.Quantized[Any]


def quantize(case: CodecCase, **options: Any) -> Quantized:
    """Quantise as the case says."""
    return kvlab.quantize(case.x, case.bits, **{**case.options, **options})


def bit_patterns(x: Array) -> Array:
    """Return the bits of an array as integers from 1, and 0 for every NaN."""
    return np.where(np.isnan(x.astype(np.float32)), 0, x.view(f"u{x.itemsize}").astype(np.int64) + 1)


def codes_of(quantized: Quantized) -> Array:
    """Return the codes, one an element."""
    if quantized.codec == "ternary":
        return kvlab.unpack_ternary(quantized.packed, quantized.shape[-1])
    return kvlab.unpack(quantized.packed, int(quantized.bits), quantized.shape[-1])


class Words(NamedTuple):
    """Scale and offset of every element, and whether they are bfloat16."""

    scale: Array
    offset: Array
    wide: Array


def words_of(quantized: Quantized) -> Words:
    """Decode scale and offset with the types of NumPy and ml_dtypes; 0 where there is no offset."""
    scale = quantized.scale.view(np.uint16)
    offset = np.zeros_like(scale) if quantized.offset is None else quantized.offset.view(np.uint16)
    wide = scale & 0x8000 != 0
    decoded = [
        np.where(wide, word.view(ml_dtypes.bfloat16).astype(float), word.view(np.float16).astype(float))
        for word in (scale & 0x7FFF, offset)
    ]
    return Words(*(_spread(words, quantized) for words in (*decoded, wide)))


def _spread(words: Array, quantized: Quantized) -> Array:
    spread = np.repeat(words, quantized.group_size, axis=quantized.axis)
    return np.take(spread, range(quantized.shape[quantized.axis]), axis=quantized.axis)


def over_groups(function: Any, x: Array, quantized: Quantized) -> Array:
    """Apply a reduction to every group; the result has the shape of x."""
    moved = np.moveaxis(x, quantized.axis, -1)
    size, length = quantized.group_size, moved.shape[-1]
    out = np.empty(moved.shape)
    for start in range(0, length, size):
        out[..., start : start + size] = function(moved[..., start : start + size], axis=-1, keepdims=True)
    return np.moveaxis(out, -1, quantized.axis)


def ulps(x: Array, dtype: np.dtype[Any]) -> Array:
    """Return the distance to the next number of `dtype` above each |x|."""
    info = limits(dtype)
    exponent = np.frexp(np.abs(x))[1] - 1
    distance: Array = np.exp2(np.maximum(exponent, np.log2(float(info.smallest_normal))) - info.nmant)
    return distance


def limits(dtype: np.dtype[Any]) -> Any:
    """Return finfo of a dtype, bfloat16 among them."""
    return ml_dtypes.finfo(dtype)  # type: ignore[no-untyped-call]


def allowed_error(quantized: Quantized, x: Array, dtype: np.dtype[Any]) -> Array:
    """Return the bound that the documentation of `quantize` states, for affine, symmetric and ternary."""
    scale = words_of(quantized).scale
    step = scale / 2
    if quantized.codec == "ternary":
        step = np.maximum(step, np.abs(x) - scale)
    farthest = np.abs(x) + step
    saturation = np.maximum(0, farthest - float(limits(dtype).max))
    rounding = 2.0**-21 * over_groups(np.max, np.abs(x), quantized) + 2.0**-133
    allowed: Array = step + ulps(farthest, dtype) / 2 + saturation + rounding
    return allowed

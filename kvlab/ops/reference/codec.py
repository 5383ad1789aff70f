"""Codecs in NumPy: launchers of the backend "reference"."""

from __future__ import annotations

import numpy as np

from kvlab.arrays import ArrayT, numpy_dtype
from kvlab.new_arrays import like_first
from kvlab.ops.codec import Quantized, refuse_unrepresentable
from kvlab.ops.codec_layout import Layout
from kvlab.ops.cpu.codec import pack_codes, unpack_codes, views_of
from kvlab.reference import codec as reference
from kvlab.views import to_numpy_view

__all__ = ["dequantize", "quantize"]


def quantize(x: ArrayT, layout: Layout, nan: str) -> tuple[ArrayT, ArrayT, ArrayT | None]:
    """Launcher of backend "reference"; see `kvlab.ops.cpu.codec.quantize`."""
    view = to_numpy_view(x, "x")
    codes, scale, offset = reference.quantize(view, int(layout.bits), **layout.reference_options)
    if nan == "raise" and (scale.view(np.uint16) == reference.NAN_WORD).any():
        refuse_unrepresentable(view)
    packed = pack_codes(codes, layout, "reference")
    return like_first(packed, x), like_first(scale, x), None if offset is None else like_first(offset, x)


def dequantize(quantized: Quantized[ArrayT], layout: Layout, dtype: str, check: bool) -> ArrayT:
    """Launcher of backend "reference"; see `kvlab.ops.cpu.codec.dequantize`."""
    packed, scale, offset = views_of(quantized)
    codes = unpack_codes(packed, layout, "reference")
    values = reference.dequantize(codes, scale, offset, int(layout.bits), **layout.reference_options)
    return like_first(reference.saturate(values, numpy_dtype(dtype)), quantized.packed)

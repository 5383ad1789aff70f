"""Packing of low-bit codes in NumPy: launchers of the backend "reference".

Arguments are those of `kvlab.ops.bits`, checked; wrong values are always looked for.
"""

from __future__ import annotations

from kvlab.arrays import ArrayT
from kvlab.new_arrays import like_first
from kvlab.ops.bits import refuse_large, refuse_no_ternary_byte, refuse_other_than_ternary
from kvlab.reference import bits as reference
from kvlab.views import to_numpy_view

__all__ = ["pack", "pack_ternary", "unpack", "unpack_ternary"]


def pack(codes: ArrayT, bits: int, check: bool) -> ArrayT:
    view = to_numpy_view(codes, "codes")
    refuse_large(view, bits)
    return like_first(reference.pack(view, bits), codes)


def unpack(packed: ArrayT, bits: int, count: int) -> ArrayT:
    return like_first(reference.unpack(to_numpy_view(packed, "packed"), bits, count), packed)


def pack_ternary(values: ArrayT, check: bool) -> ArrayT:
    view = to_numpy_view(values, "values")
    refuse_other_than_ternary(view)
    return like_first(reference.pack_ternary(view), values)


def unpack_ternary(packed: ArrayT, count: int, check: bool) -> ArrayT:
    view = to_numpy_view(packed, "packed")
    refuse_no_ternary_byte(view)
    return like_first(reference.unpack_ternary(view, count), packed)

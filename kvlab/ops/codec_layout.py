"""How an array is cut into groups and how groups are coded: one layout for every backend."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from kvlab.arguments import whole_number
from kvlab.ops.bits import WIDTHS, packed_bytes

__all__ = ["CODECS", "FLOATS", "TERNARY_BITS", "Layout", "checked_layout", "half_levels"]

TERNARY_BITS = 1.6
"""Bits of a ternary value: five to a byte."""

CODECS = ("affine", "symmetric", "hadamard", "ternary")
"""By the numbers that kernels know them by."""

FLOATS = ("float16", "bfloat16", "float32")


class Layout(NamedTuple):
    """How an array is cut into groups and how these are coded."""

    shape: tuple[int, ...]
    axis: int
    group_size: int
    codec: str
    bits: float

    @property
    def along_rows(self) -> bool:
        """Whether groups run along the last axis."""
        return self.axis == len(self.shape) - 1

    @property
    def scale_shape(self) -> tuple[int, ...]:
        """Shape of scales: as the array, with groups for elements."""
        groups = -(-self.shape[self.axis] // self.group_size)
        return (*self.shape[: self.axis], groups, *self.shape[self.axis + 1 :])

    @property
    def packed_shape(self) -> tuple[int, ...]:
        """Shape of the packed codes."""
        count = self.shape[-1]
        size = -(-count // 5) if self.codec == "ternary" else packed_bytes(count, int(self.bits))
        return (*self.shape[:-1], size)

    @property
    def transposed(self) -> Layout:
        """The layout of the same array with `axis` moved to the end."""
        shape = (*self.shape[: self.axis], *self.shape[self.axis + 1 :], self.shape[self.axis])
        return self._replace(shape=shape, axis=len(shape) - 1)

    @property
    def reference_options(self) -> dict[str, Any]:
        """Keyword arguments of the oracle."""
        return {"axis": self.axis, "group_size": self.group_size, "codec": self.codec}


def checked_layout(
    shape: tuple[int, ...], bits: float, axis: int, group_size: int | None, codec: str
) -> Layout:
    """Return the layout that the options of a call ask for, or raise for the one that is wrong."""
    if codec not in CODECS:
        known = ", ".join(map(repr, CODECS))
        raise ValueError(f"codec={codec!r} is not supported; supported are {known}")
    widths = (TERNARY_BITS,) if codec == "ternary" else WIDTHS
    if bits not in widths or isinstance(bits, bool):
        supported = ", ".join(map(str, widths))
        raise ValueError(f"bits={bits!r} is not supported by codec={codec!r}; supported: {supported}")
    if not -len(shape) <= whole_number(axis, "axis") < len(shape):
        raise ValueError(f"axis={axis} is not an axis of an array of shape {shape}")
    axis = whole_number(axis, "axis") % len(shape)
    length = max(shape[axis], 1)
    elements = length if group_size is None else whole_number(group_size, "group_size", 1)
    return Layout(shape, axis, min(elements, length), codec, bits)


def half_levels(bits: int) -> np.float32:
    """Return what the symmetric codec divides the largest magnitude by to get a scale."""
    return np.float32(2 ** (bits - 1) if bits <= 4 else (2**bits - 1) / 2)

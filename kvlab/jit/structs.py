"""Structs that kernels take by value: named fields, packed as C lays them out.

`Struct.pack` makes a kernel argument of values. Calls that come again and again keep what does not change:
a `Template` all but the addresses, an array of `Struct.dtype` all that a `PreparedLaunch` reads.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

__all__ = ["ADDRESS", "TENSOR", "Struct", "Template"]

ADDRESS, TENSOR = "address", "tensor"
"""Formats of fields: an address, and an address with the strides of batch, position and head."""


class Struct:
    """A struct that kernels take by value, laid out as C does.

    Parameters
    ----------
    **fields : str or (Struct, int)
        Names of the fields, in order, and their formats: `ADDRESS`, `TENSOR`, a character of `struct`, or
        another struct and how many of it stand in a row.

    Attributes
    ----------
    dtype : numpy.dtype
        For arrays of it: those that a `PreparedLaunch` reads.

    Examples
    --------
    >>> call = Struct(out=ADDRESS, count="i", scale="f")
    >>> call.size, call.pack(out=256, count=3, scale=0.5).tobytes()[:12].hex(" ", 4)
    (16, '00010000 00000000 03000000')
    """

    def __init__(self, **fields: str | tuple[Struct, int]) -> None:
        self._formats = fields
        self.dtype = np.dtype([(name, *_dtype_of(form)) for name, form in fields.items()], align=True)

    @property
    def size(self) -> int:
        """Bytes."""
        return self.dtype.itemsize

    def offset(self, field: str) -> int:
        """Return where a field begins, in bytes."""
        fields: Any = self.dtype.fields
        return int(fields[field][1])

    def pack(self, **values: Any) -> Any:
        """Return the struct with these values, as one kernel argument; what is not named is 0."""
        record = np.zeros((), self.dtype)
        for name, value in values.items():
            record[name] = value
        return np.frombuffer(record.tobytes(), f"V{self.size}")[0]

    def template(self, values: Mapping[str, Any]) -> Template:
        """Pack the values of all fields but addresses; of a tensor its three strides."""
        record, begins = np.zeros((), self.dtype), [-8]
        for name, form in self._formats.items():
            if form in (ADDRESS, TENSOR):
                begins.append(self.offset(name))
            if form == TENSOR:
                record[name]["strides"] = values[name]
            elif form != ADDRESS:
                record[name] = values[name]
        known, ends = record.tobytes(), [*begins[1:], self.size]
        return Template([known[begin + 8 : end] for begin, end in zip(begins, ends, strict=True)])


def _dtype_of(form: str | tuple[Struct, int]) -> tuple[Any, ...]:
    if isinstance(form, tuple):
        return form[0].dtype, form[1]
    return ({ADDRESS: "u8", TENSOR: [("address", "u8"), ("strides", "i8", 3)]}.get(form, form),)


class Template:
    """A struct without its addresses: the bytes before the first of them, and behind each.

    A call fills in what alone has changed since the last one of its kind: the host must not take longer than
    a short kernel runs.
    """

    def __init__(self, between: Sequence[bytes]) -> None:
        self._struct = struct.Struct("<" + "q".join(f"{len(part)}s" for part in between))
        self._parts: list[Any] = [part for known in between for part in (known, 0)][:-1]
        self._dtype = np.dtype(f"V{self._struct.size}")

    def fill(self, addresses: Sequence[int]) -> Any:
        """Return the struct with these addresses, in the order of their fields, as one kernel argument."""
        return np.frombuffer(self.pack(addresses), self._dtype)[0]

    def pack(self, addresses: Sequence[int]) -> bytes:
        """Return the struct as bytes."""
        parts = self._parts.copy()
        parts[1::2] = addresses
        return self._struct.pack(*parts)

"""Structs that kernels take by value: named fields, packed as C lays them out.

`Struct.pack` makes a kernel argument of values. A call that is repeated keeps an array of it, which a
`PreparedLaunch` reads. Only addresses change from call to call: they are written into it as words of 8 bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["ADDRESS", "TENSOR", "Struct", "addresses_of", "words_of"]

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

    def word(self, field: str) -> int:
        """Return the number of the word of 8 bytes at which a field begins."""
        return self.offset(field) // 8

    def array(self, values: Mapping[str, Any]) -> NDArray[Any]:
        """Return an array of one struct with these values: of a tensor its three strides, no addresses."""
        record = np.zeros(1, self.dtype)
        for name, form in self._formats.items():
            if form == TENSOR:
                record[name]["strides"] = values[name]
            elif form != ADDRESS:
                record[name] = values[name]
        return record


def addresses_of(argument: NDArray[Any], words: Iterable[int]) -> list[int]:
    """Return the addresses of words of 8 bytes of an array."""
    return [argument.ctypes.data + 8 * word for word in words]


def words_of(argument: NDArray[Any]) -> memoryview:
    """Return the words of 8 bytes of an array; writing one takes a fifth of the time it takes NumPy."""
    return argument.view(np.uint64).data


def _dtype_of(form: str | tuple[Struct, int]) -> tuple[Any, ...]:
    if isinstance(form, tuple):
        return form[0].dtype, form[1]
    return ({ADDRESS: "u8", TENSOR: [("address", "u8"), ("strides", "i8", 3)]}.get(form, form),)

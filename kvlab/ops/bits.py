"""Packing of low-bit codes to bytes and back: the interchange bit stream, little-endian, along the last axis.

The stream is what files and other programs see: element i of a row is bits [i * bits, (i + 1) * bits), bit j
of the stream is bit j % 8 of byte j // 8, every row starts on a byte, unused bits at its end are written as
zero and ignored when read. Ternary values take five to a byte.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvlab.arguments import flag, whole_number
from kvlab.arrays import ArrayT, device_of, dtype_name
from kvlab.registry import ON_CUDA, ON_NUMBA, Implementation, choose, register, requirements_of
from kvlab.torch_compile import opaque

__all__ = ["WIDTHS", "pack", "pack_ternary", "packed_bytes", "unpack", "unpack_ternary"]

WIDTHS = (1, 2, 3, 4, 5, 6, 8)
"""Bits of one code."""

_LAST_TERNARY_BYTE = 3**5 - 1

_CPU, _GPU = "kvlab.ops.cpu.bits", "kvlab.ops.cuda.bits"
register(
    Implementation("pack", "cuda", f"{_GPU}:pack", {"bits": WIDTHS} | ON_CUDA),
    Implementation("pack", "numba", f"{_GPU}:pack_numba", {"bits": WIDTHS} | ON_NUMBA),
    Implementation("unpack", "cuda", f"{_GPU}:unpack", {"bits": WIDTHS} | ON_CUDA),
    Implementation("unpack", "numba", f"{_GPU}:unpack_numba", {"bits": WIDTHS} | ON_NUMBA),
    Implementation("pack_ternary", "cuda", f"{_GPU}:pack_ternary", ON_CUDA),
    Implementation("pack_ternary", "numba", f"{_GPU}:pack_ternary_numba", ON_NUMBA),
    Implementation("unpack_ternary", "cuda", f"{_GPU}:unpack_ternary", ON_CUDA),
    Implementation("unpack_ternary", "numba", f"{_GPU}:unpack_ternary_numba", ON_NUMBA),
    Implementation("pack", "cpu", f"{_CPU}:pack", {"bits": WIDTHS}),
    Implementation("pack", "reference", "kvlab.ops.reference.bits:pack", {"bits": WIDTHS}),
    Implementation("unpack", "cpu", f"{_CPU}:unpack", {"bits": WIDTHS}),
    Implementation("unpack", "reference", "kvlab.ops.reference.bits:unpack", {"bits": WIDTHS}),
    Implementation("pack_ternary", "cpu", f"{_CPU}:pack_ternary", {}),
    Implementation("pack_ternary", "reference", "kvlab.ops.reference.bits:pack_ternary", {}),
    Implementation("unpack_ternary", "cpu", f"{_CPU}:unpack_ternary", {}),
    Implementation("unpack_ternary", "reference", "kvlab.ops.reference.bits:unpack_ternary", {}),
)


@opaque
def pack(codes: ArrayT, bits: int, *, check: bool = True, backend: str | None = None) -> ArrayT:
    """Pack codes of a few bits to bytes, along the last axis.

    Parameters
    ----------
    codes : array, uint8, shape (..., n)
        Every code is below 2**bits. Any number of axes from one, any length, any strides.
    bits : int
        1, 2, 3, 4, 5, 6 or 8.
    check : bool
        On a GPU, finding a code that is too large means waiting for the result. False: do not wait; such a
        code then spoils codes beside it. The CPU always looks.
    backend : str, optional
        By default the best on the device of `codes`.

    Returns
    -------
    array, uint8, shape (..., ceil(n * bits / 8))
        New, of the kind of `codes`; unused bits at the end of a row are zero.

    Raises
    ------
    ValueError
        If `bits` is not one of those above, or a code is too large; the message names the first.
    TypeError
        If `codes` is no array of uint8.

    Examples
    --------
    >>> import kvlab
    >>> kvlab.pack(np.array([1, 2, 3], np.uint8), 4)
    array([33,  3], dtype=uint8)
    """
    _check_bits(bits)
    _check_array(codes, "codes", "uint8")
    row = _choose("pack", codes, backend, bits=bits)
    packed: ArrayT = row.launch(codes, bits, flag(check, "check"))
    return packed


@opaque
def unpack(packed: ArrayT, bits: int, count: int, *, backend: str | None = None) -> ArrayT:
    """Unpack what `pack` made: `count` codes a row.

    Parameters
    ----------
    packed : array, uint8, shape (..., ceil(count * bits / 8))
        Unused bits at the end of a row are ignored.
    bits : int
        1, 2, 3, 4, 5, 6 or 8.
    count : int
        Codes of a row.
    backend : str, optional
        By default the best on the device of `packed`.

    Returns
    -------
    array, uint8, shape (..., count)

    Raises
    ------
    ValueError
        If `bits` is not one of those above, `count` is negative, or the last axis has not the bytes that
        `count` codes take.
    TypeError
        If `packed` is no array of uint8 or `count` no integer.

    Examples
    --------
    >>> import kvlab
    >>> kvlab.unpack(np.array([33, 3], np.uint8), 4, 3)
    array([1, 2, 3], dtype=uint8)
    """
    _check_bits(bits)
    count = whole_number(count, "count", 0)
    _check_packed(packed, packed_bytes(count, bits), f"count={count} codes of {bits} bits")
    row = _choose("unpack", packed, backend, bits=bits)
    codes: ArrayT = row.launch(packed, bits, count)
    return codes


@opaque
def pack_ternary(values: ArrayT, *, check: bool = True, backend: str | None = None) -> ArrayT:
    """Pack values -1, 0, 1, five to a byte, along the last axis: 1.6 bits each.

    A byte is the number d0 + 3 d1 + 9 d2 + 27 d3 + 81 d4 with digits d = value + 1, d0 the first value.

    Parameters
    ----------
    values : array, int8, shape (..., n)
        Any number of axes from one, any length, any strides.
    check : bool
        On a GPU, finding a wrong value means waiting for the result. False: do not wait; such a value then
        spoils the values beside it. The CPU always looks.
    backend : str, optional
        By default the best on the device of `values`.

    Returns
    -------
    array, uint8, shape (..., ceil(n / 5))
        New, of the kind of `values`; missing digits at the end of a row are zero.

    Raises
    ------
    ValueError
        If a value is not -1, 0 or 1; the message names the first.
    TypeError
        If `values` is no array of int8.

    Examples
    --------
    >>> import kvlab
    >>> kvlab.pack_ternary(np.array([1, 0, -1, -1, -1, 1], np.int8))
    array([5, 2], dtype=uint8)
    """
    _check_array(values, "values", "int8")
    row = _choose("pack_ternary", values, backend)
    packed: ArrayT = row.launch(values, flag(check, "check"))
    return packed


@opaque
def unpack_ternary(packed: ArrayT, count: int, *, check: bool = True, backend: str | None = None) -> ArrayT:
    """Unpack what `pack_ternary` made: `count` values a row.

    Parameters
    ----------
    packed : array, uint8, shape (..., ceil(count / 5))
    count : int
        Values of a row.
    check : bool
        On a GPU, finding a byte above 242 means waiting for the result. False: do not wait; such a byte
        then gives any values. The CPU always looks.
    backend : str, optional
        By default the best on the device of `packed`.

    Returns
    -------
    array, int8, shape (..., count)

    Raises
    ------
    ValueError
        If `count` is negative, the last axis has not the bytes that `count` values take, or a byte is above
        242, which stands for no five values.
    TypeError
        If `packed` is no array of uint8 or `count` no integer.

    Examples
    --------
    >>> import kvlab
    >>> kvlab.unpack_ternary(np.array([5, 2], np.uint8), 6)
    array([ 1,  0, -1, -1, -1,  1], dtype=int8)
    """
    count = whole_number(count, "count", 0)
    _check_packed(packed, -(-count // 5), f"count={count} ternary values")
    row = _choose("unpack_ternary", packed, backend)
    values: ArrayT = row.launch(packed, count, flag(check, "check"))
    return values


def packed_bytes(count: int, bits: int) -> int:
    """Return the bytes that a row of `count` codes takes.

    Examples
    --------
    >>> packed_bytes(100, 3)
    38
    """
    return (count * bits + 7) // 8


def _choose(operation: str, x: Any, backend: str | None, **requirements: Any) -> Implementation:
    device = device_of(x)
    return choose(operation, device.kind, backend, **requirements, **requirements_of(device))


def _check_bits(bits: int) -> None:
    if whole_number(bits, "bits") not in WIDTHS:
        raise ValueError(f"bits={bits!r} is not supported; supported are {', '.join(map(str, WIDTHS))}")


def _check_array(x: Any, name: str, dtype: str) -> None:
    device_of(x, name)
    if dtype_name(x, name) != dtype:
        raise TypeError(f"{name} must have dtype {dtype}, got {dtype_name(x, name)}")
    if len(x.shape) == 0:
        raise ValueError(f"{name} must have at least one axis, got a scalar")


def _check_packed(packed: Any, expected: int, what: str) -> None:
    _check_array(packed, "packed", "uint8")
    if packed.shape[-1] != expected:
        raise ValueError(f"packed has {packed.shape[-1]} bytes on its last axis, but {what} take {expected}")


def _refuse(codes: NDArray[Any], wrong: NDArray[np.bool_], name: str, why: str) -> None:
    """Raise for the first wrong element, if there is one."""
    if wrong.any():
        index = tuple(int(i) for i in np.unravel_index(int(wrong.argmax()), wrong.shape))
        raise ValueError(f"{name}{list(index)} is {codes[index]}: {why}")


def refuse_large(codes: NDArray[np.uint8], bits: int) -> None:
    """Raise for the first code of 2**bits or more, if there is one."""
    if bits < 8:
        _refuse(codes, codes >= 2**bits, "codes", f"a code of {bits} bits is below {2**bits}")


def refuse_other_than_ternary(values: NDArray[np.int8]) -> None:
    """Raise for the first value other than -1, 0, 1, if there is one."""
    _refuse(values, (values < -1) | (values > 1), "values", "ternary values are -1, 0 and 1")


def refuse_no_ternary_byte(packed: NDArray[np.uint8]) -> None:
    """Raise for the first byte that stands for no ternary values, if there is one."""
    _refuse(packed, packed > _LAST_TERNARY_BYTE, "packed", "a byte of five ternary values is at most 242")

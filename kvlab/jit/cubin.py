"""Read from a cubin the registers, shared memory, local memory and parameter sizes of its kernels.

A cubin is an ELF file. ptxas writes these figures into ``.nv.info`` sections (attribute records) and section
sizes. This short reader replaces ``cuobjdump`` and the verbose log of ptxas: the figures belong to the very
bytes that will run, cached or not, and no CUDA toolkit is needed. Attribute numbers are those that
``cuobjdump -elf`` prints by name; a test holds the result against ptxas's own log for every gated
architecture.
"""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Iterator

from kvlab.errors import FormatError

__all__ = ["Resources", "read_resources"]

_FRAME_SIZE, _STACK_SIZE, _PARAMETER, _REGISTERS = 0x11, 0x12, 0x17, 0x2F  # EIATTR_* numbers
_PARAMETER_OF_MANY = 0x45  # where all parameters together have more than 4 KiB
_SIZED = (
    4  # record format whose 16-bit value is the length of a payload; in the others the value is all there is
)
_ENTRY = 0x10  # bit of a symbol's st_other: a __global__ function
_RESERVED_SHARED = 1024  # bytes the system takes of each block; sections count them from sm_90 on


@dataclasses.dataclass(frozen=True)
class Resources:
    """What one kernel takes.

    Attributes
    ----------
    registers : int
        Per thread.
    shared_bytes : int
        Static shared memory per block.
    local_bytes : int
        Stack per thread: spilled registers and arrays that are indexed at run time. A fast kernel has none.
    parameter_bytes : tuple of int
        Size of each parameter, in order.
    """

    registers: int
    shared_bytes: int
    local_bytes: int
    parameter_bytes: tuple[int, ...]


def read_resources(cubin: bytes) -> dict[str, Resources]:
    """Resources of every kernel in a cubin, by entry name.

    Parameters
    ----------
    cubin : bytes
        ELF image, as `kvlab.jit.build.build` gives it.

    Returns
    -------
    dict of str to Resources
        One item per ``__global__`` function.

    Raises
    ------
    kvlab.errors.FormatError
        If `cubin` is no cubin or is damaged.

    Examples
    --------
    >>> read_resources(b"not an image")
    Traceback (most recent call last):
        ...
    kvlab.errors.FormatError: not a cubin: 12 bytes that begin with b'not '
    """
    if cubin[:5] != b"\x7fELF\x02":
        raise FormatError(f"not a cubin: {len(cubin)} bytes that begin with {cubin[:4]!r}")
    try:
        return _read(cubin)
    except (struct.error, IndexError, KeyError, OverflowError, ValueError) as error:
        raise FormatError(f"damaged cubin: {error}") from error


def _read(cubin: bytes) -> dict[str, Resources]:
    sections = _sections(cubin)
    symbols = _symbols(sections[".symtab"], sections[".strtab"])
    of_function: dict[str, dict[int, int]] = {name: {} for name, _ in symbols}
    for attribute, payload in _records(sections[".nv.info"]):
        if attribute in (_FRAME_SIZE, _STACK_SIZE, _REGISTERS):
            index, value = struct.unpack("<II", payload)
            of_function[symbols[index][0]][attribute] = value
    reserved = _RESERVED_SHARED if any(name.startswith(".nv.shared.reserved") for name in sections) else 0
    found = {}
    for name in (name for name, other in symbols if other & _ENTRY):
        values, shared = of_function[name], sections.get(f".nv.shared.{name}", (0, b""))[0]
        parameters = {}
        for attribute, payload in _records(sections[f".nv.info.{name}"]):
            if attribute == _PARAMETER:
                _, ordinal, _, flags = struct.unpack("<IHHI", payload)
                parameters[ordinal] = flags >> 18
            elif attribute == _PARAMETER_OF_MANY:
                _, ordinal, _, size, _ = struct.unpack("<IHHHH", payload)
                parameters[ordinal] = size
        found[name] = Resources(
            registers=values[_REGISTERS],
            shared_bytes=max(0, shared - reserved),
            local_bytes=max(values.get(_FRAME_SIZE, 0), values.get(_STACK_SIZE, 0)),
            parameter_bytes=tuple(parameters[ordinal] for ordinal in range(len(parameters))),
        )
    return found


_Section = tuple[int, bytes]  # size, and contents (empty for sections that take no room in the file)


def _sections(image: bytes) -> dict[str, _Section]:
    (table,) = struct.unpack_from("<Q", image, 40)
    entry_bytes, count, names_index = struct.unpack_from("<HHH", image, 58)
    headers = [struct.unpack_from("<IIQQQQIIQQ", image, table + i * entry_bytes) for i in range(count)]
    found = {}
    names = _contents(image, headers[names_index])
    for header in headers:
        found[_text(names, header[0])] = (header[5], _contents(image, header))
    return found


def _contents(image: bytes, header: tuple[int, ...]) -> bytes:
    kind, start, size = header[1], header[4], header[5]
    if kind == 8:  # SHT_NOBITS
        return b""
    if start + size > len(image):
        raise ValueError(f"a section ends at byte {start + size} of {len(image)}")
    return image[start : start + size]


def _symbols(table: _Section, names: _Section) -> list[tuple[str, int]]:
    """Name and ``st_other`` of every symbol, in the table's order."""
    return [
        (_text(names[1], name), other) for name, _, other, _, _, _ in struct.iter_unpack("<IBBHQQ", table[1])
    ]


def _records(section: _Section) -> Iterator[tuple[int, bytes]]:
    """Attribute number and payload of every record of an ``.nv.info`` section."""
    blob, at = section[1], 0
    while at < len(blob):
        form, attribute, value = struct.unpack_from("<BBH", blob, at)
        at += 4
        size = value if form == _SIZED else 0
        yield attribute, blob[at : at + size]
        at += size


def _text(strings: bytes, start: int) -> str:
    return strings[start : strings.index(b"\0", start)].decode()

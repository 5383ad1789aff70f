"""Arrays as files: one safetensors file whose header describes them and names the checksum of its bytes.

Layout: 8 bytes length N of the header (little-endian), N bytes JSON header, then the buffers, as safetensors
has it, so that other tools can list and read them. The header's metadata holds

    kvlab     JSON: format version, and of a cache its arguments and per-layer state that is no array
    checksum  SHA-256 of everything behind the header and of the header's other fields

Nothing is executed, and nothing is allocated from a number in the file before the file is known to be whole:
size, checksum and every shape are checked first. Whatever the damage, `read` raises FormatError. All files of
kvlab that must be whole, of this kind or another, are written by `write_whole`.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import stat
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvlab.arrays import numpy_dtype
from kvlab.errors import FormatError

__all__ = [
    "FORMAT_VERSION",
    "checked_path",
    "parse",
    "read",
    "write",
    "write_whole",
]

FORMAT_VERSION = 10
MAX_HEADER = 64 << 20
_NAMES = {"uint8": "U8", "uint16": "U16", "uint32": "U32", "int32": "I32", "int64": "I64", "float16": "F16"}
_NAMES |= {"bfloat16": "BF16", "float32": "F32", "bool": "BOOL", "int8": "I8", "int16": "I16"}
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}

Arrays = dict[str, NDArray[Any]]


def write(path: str | os.PathLike[str], description: dict[str, Any], arrays: Arrays) -> None:
    """Write arrays and their description to a file, atomically; the version is added."""
    entries: dict[str, Any] = {}
    parts: list[bytes] = []
    offset = 0
    for name, array in arrays.items():
        data = np.ascontiguousarray(array).tobytes()
        entries[name] = {
            "dtype": _NAMES[array.dtype.name],
            "shape": list(array.shape),
            "data_offsets": [offset, offset + len(data)],
        }
        parts.append(data)
        offset += len(data)
    text = json.dumps({"version": FORMAT_VERSION, **description}, sort_keys=True)
    metadata = {"kvlab": text, "checksum": _checksum(entries, text, parts)}
    header = json.dumps({"__metadata__": metadata, **entries}).encode()
    header += b" " * (-len(header) % 8)
    target = Path(os.path.realpath(checked_path(path)))
    if target.is_dir():
        raise IsADirectoryError(f"path={os.fspath(path)!r} is a folder: name a file")
    if not target.parent.is_dir():
        raise FileNotFoundError(f"path={os.fspath(path)!r}: make the folder {target.parent} first")
    write_whole(target, len(header).to_bytes(8, "little") + header, *parts)


def write_whole(path: Path, *parts: bytes, durable: bool = True) -> None:
    """Write a file that is whole or as it was before, whatever ends the process and when.

    The bytes go to a temporary file of a name of its own in the same folder, which is then renamed, so two
    processes that write the same file leave the bytes of one of them. A file that is there keeps its
    permissions; a symbolic link stays, and the file that it names is replaced. `durable`: the bytes are on
    the disk before the name is theirs, and so is the name when this returns.
    """
    path = Path(os.path.realpath(path))
    temporary = path.with_name(f".kvlab-{secrets.token_hex(8)}.tmp")
    mode = stat.S_IMODE(path.stat().st_mode) if path.exists() else None
    try:
        with open(temporary, "xb", opener=partial(os.open, mode=0o666 if mode is None else 0o600)) as file:
            if mode is not None:
                os.chmod(temporary, mode)
            file.writelines(parts)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    if durable:
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def checked_path(path: str | os.PathLike[str]) -> Path:
    """The path, or TypeError."""
    if not isinstance(path, str | os.PathLike):
        raise TypeError(f"path={path!r} must be text or a path, not {type(path).__name__}")
    return Path(path)


def read(path: str | os.PathLike[str]) -> tuple[dict[str, Any], Arrays]:
    """Read what `write` wrote, or raise FormatError."""
    try:
        return parse(checked_path(path).read_bytes())
    except FormatError as error:
        raise FormatError(f"{os.fspath(path)}: {error}") from None


def parse(data: bytes) -> tuple[dict[str, Any], Arrays]:
    """Take the bytes of a file apart, or raise FormatError."""
    try:
        return _parse(data)
    except FormatError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError) as error:
        raise FormatError(f"damaged header ({error})") from None


def _parse(data: bytes) -> tuple[dict[str, Any], Arrays]:
    size = int.from_bytes(data[:8], "little")
    if len(data) < 8 or size > min(MAX_HEADER, len(data) - 8):
        raise FormatError("truncated, or not a kvlab cache")
    header = json.loads(data[8 : 8 + size].decode())
    metadata = header.pop("__metadata__")
    text, body = metadata["kvlab"], memoryview(data)[8 + size :]
    if set(metadata) != {"kvlab", "checksum"} or metadata["checksum"] != _checksum(header, text, [body]):
        raise FormatError("the checksum does not fit: the file is damaged")
    if header and data[8 : 8 + size].rstrip(b" ")[-1:] != b"}":
        raise FormatError("damaged header")
    arrays: Arrays = {}
    expected = 0
    for name, entry in header.items():
        start, stop = entry["data_offsets"]
        dtype = numpy_dtype(_DTYPES[entry["dtype"]])
        shape = tuple(entry["shape"])
        if (
            start != expected
            or stop > len(body)
            or stop - start != int(np.prod(shape, dtype=object)) * dtype.itemsize
        ):
            raise FormatError(f"entry {name!r} has a wrong place or shape")
        arrays[name] = np.frombuffer(body[start:stop], dtype).reshape(shape).copy()
        expected = stop
    if expected != len(body):
        raise FormatError("bytes behind the last entry")
    description = json.loads(text)
    if description["version"] != FORMAT_VERSION:
        raise FormatError(
            f"format version {description['version']}; this kvlab reads version {FORMAT_VERSION} alone: "
            "fill a cache with the text again, or measure frames again, and save that"
        )
    return description, arrays


def _checksum(entries: dict[str, Any], text: str, parts: list[Any]) -> str:
    digest = hashlib.sha256(json.dumps([entries, text], sort_keys=True).encode())
    for part in parts:
        digest.update(part)
    return digest.hexdigest()

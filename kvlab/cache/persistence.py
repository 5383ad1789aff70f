"""Caches as files: one safetensors file whose header describes the cache and names the checksum of its bytes.

Layout: 8 bytes length N of the header (little-endian), N bytes JSON header, then the buffers, as safetensors
has it, so that other tools can list and read them. The header's metadata holds

    kvlab     JSON: format version, arguments of the cache, per-layer state that is no array
    checksum  SHA-256 of everything behind the header and of the header's other fields

Nothing is executed, and nothing is allocated from a number in the file before the file is known to be whole:
size, checksum and every shape are checked first. Whatever the damage, `load` raises FormatError. Files are
written under a temporary name in the same folder, flushed to disk and renamed. A file that is there keeps its
permissions; a symbolic link stays, and the file that it names is replaced.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import stat
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kvlab.arrays import numpy_dtype
from kvlab.cache.frame import LAST, awaiting, key_mean
from kvlab.errors import FormatError
from kvlab.ops.cuda.pages import OPEN_PAGES
from kvlab.pages import TOKENS_PER_PAGE, PageLayout, encode_importance, rotate_vectors, write_tokens

if TYPE_CHECKING:
    from kvlab.cache.ladder import Layer, LayerFormat

__all__ = [
    "FORMAT_VERSION",
    "check_sizes",
    "checked_path",
    "parse",
    "read",
    "upgraded",
    "with_frames",
    "write",
]

FORMAT_VERSION = 3
MAX_HEADER = 64 << 20
_NAMES = {"uint8": "U8", "uint16": "U16", "uint32": "U32", "int32": "I32", "int64": "I64", "float16": "F16"}
_NAMES |= {"bfloat16": "BF16", "float32": "F32", "bool": "BOOL"}
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}

Arrays = dict[str, NDArray[Any]]


EARLIER = {"floor": 0.0}
"""Options that files did not always have, and what was done then."""


def write(path: str | os.PathLike[str], description: dict[str, Any], arrays: Arrays) -> None:
    """Write arrays and their description to a file, atomically."""
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
    text = json.dumps(description, sort_keys=True)
    metadata = {"kvlab": text, "checksum": _checksum(entries, text, parts)}
    header = json.dumps({"__metadata__": metadata, **entries}).encode()
    header += b" " * (-len(header) % 8)
    target = Path(os.path.realpath(checked_path(path)))  # a link stays one: what it names is replaced
    if target.is_dir():
        raise IsADirectoryError(f"path={os.fspath(path)!r} is a folder: name a file")
    if not target.parent.is_dir():
        raise FileNotFoundError(f"path={os.fspath(path)!r}: make the folder {target.parent} first")
    temporary = target.parent / f".kvlab-{secrets.token_hex(8)}"
    mode = stat.S_IMODE(target.stat().st_mode) if target.exists() else None
    try:
        with open(temporary, "xb", opener=partial(os.open, mode=0o666 if mode is None else 0o600)) as file:
            if mode is not None:
                os.chmod(temporary, mode)
            file.write(len(header).to_bytes(8, "little") + header)
            file.writelines(parts)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


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
    if description["version"] not in range(1, FORMAT_VERSION + 1):
        raise FormatError(
            f"format version {description['version']}; this kvlab reads versions 1 to {FORMAT_VERSION}"
        )
    return description, arrays


def _checksum(entries: dict[str, Any], text: str, parts: list[Any]) -> str:
    digest = hashlib.sha256(json.dumps([entries, text], sort_keys=True).encode())
    for part in parts:
        digest.update(part)
    return digest.hexdigest()


def check_sizes(description: dict[str, Any], arrays: Arrays) -> None:
    """Refuse numbers in the arguments that the arrays do not bear out, before a cache is made from them."""
    arguments = description["arguments"]
    layers, rows, heads = (arguments[name] for name in ("num_layers", "batch", "num_heads_kv"))
    if layers != len(description["layers"]):
        raise FormatError(f"state of {len(description['layers'])} layers for a cache of {layers}")
    if arrays["0.num_pages"].shape != (rows, heads):
        raise FormatError(f"0.num_pages has shape {arrays['0.num_pages'].shape}, not {(rows, heads)}")


# ---- files of versions 1 and 2 -----------------------------------------------------------------------------


def with_frames(arrays: Arrays, layers: int) -> Arrays:
    """Return what a file before version 3 holds, with frames that scale nothing."""
    found = dict(arrays)
    for number in range(layers):
        shape, has_mean = arrays[f"{number}.k_mean"].shape, arrays[f"{number}.has_mean"]
        waits = awaiting(has_mean, arrays[f"{number}.num_pages"])
        found[f"{number}.k_shift"] = np.zeros(shape, np.uint8)
        found[f"{number}.asked"] = np.zeros((int(waits.sum()), *shape[1:]), np.float32)
    return found


Layouts = tuple[PageLayout, ...]


def upgraded(
    layers: Sequence[Layer],
    layouts: list[Layouts],
    row_budget: int | None,
    states: list[dict[str, Any]],
    arrays: Arrays,
) -> tuple[list[dict[str, Any]], Arrays]:
    """Return what a file of version 1 holds as `kvlab.cache.contents` has it.

    Rows had windows of exact tokens outside pages, and no open pages. A window held the newest tokens
    (`residual`), the first ones until the mean of their keys was taken, or sinks for which bytes were few.
    They become pages: of width 16 behind those of the ladder, the same bits, or, sinks, of the highest width
    whose pages fit the budget.

    Parameters
    ----------
    layers : sequence of Layer
    layouts : list
        Pages of each layer that there is memory for, `DeviceStore.layouts`.
    row_budget : int or None
        Bytes that a row of a layer may take.
    states, arrays
        Of the file.
    """
    found, arrays = Arrays(), dict(arrays)
    for number, (layer, pages) in enumerate(zip(layers, layouts, strict=True)):
        prefix = f"{number}."
        mine = {
            name.removeprefix(prefix): arrays.pop(name) for name in list(arrays) if name.startswith(prefix)
        }
        found |= {prefix + name: x for name, x in _upgraded_layer(layer, pages, row_budget, mine).items()}
    if arrays:
        raise FormatError(f"unknown entries {sorted(arrays)[:3]}")
    return [state | {"room": 0, "tidy": False} for state in states], found


def _upgraded_layer(layer: Layer, layouts: Layouts, row_budget: int | None, mine: Arrays) -> Arrays:
    batch, heads = mine["num_pages"].shape
    waiting = len(layer.stored.layouts)
    bh = np.repeat(np.arange(batch * heads), mine["num_pages"].ravel())
    tables = {name: [mine[name]] for name in ("rung", "count", "base")}
    owners, pools = [bh], [[mine[f"pool{r}"]] for r in range(len(layer.store.layouts))]
    pools += [[] for _ in layouts[len(pools) :]]
    for row in range(batch):
        window = {name: mine.pop(f"window{row}.{name}") for name in ("k", "v", "position", "observed")}
        if not len(window["position"]):
            continue
        runs = _cut_into_pages(window["position"])
        if not mine["has_mean"][row] and waiting == len(layouts):  # bytes are too few to wait
            sample = window["k"][:LAST].astype(np.float32)
            mean = key_mean(sample, narrow=layer.stored.is_narrow)
            mine["k_mean"][row], mine["has_mean"][row] = mean, True
        rung = waiting if not mine["has_mean"][row] else waiting - 1
        if mine["has_mean"][row] and not layer.residual:
            rung = _widest_rung(layer.store, row_budget, mine["rung"][bh // heads == row], len(runs))
        for first, last in runs:
            pages = _window_pages(layouts[rung], layer.store.dtype, window, mine["k_mean"][row], first, last)
            owners.append(row * heads + np.arange(heads))
            for name, value in (
                ("rung", rung),
                ("count", last - first),
                ("base", window["position"][first] >> 16),
            ):
                tables[name].append(np.full(heads, value, mine[name].dtype))
            pools[rung].append(pages)
    owner = np.concatenate(owners)
    order, rungs = np.argsort(owner, kind="stable"), np.concatenate(tables["rung"])
    found = {name: np.concatenate(parts)[order] for name, parts in tables.items()}
    for r, parts in enumerate(pools):
        pool = np.concatenate([np.zeros((0, layouts[r].nbytes), np.uint8), *parts])
        found[f"pool{r}"] = pool[np.argsort(owner[rungs == r], kind="stable")]
    counts = np.bincount(owner, minlength=batch * heads).reshape(batch, heads)
    found["num_pages"] = counts.astype(np.int32)
    found["open"] = np.full((batch, heads, OPEN_PAGES), -1, np.int32)
    return found | {name: mine[name] for name in ("k_mean", "has_mean")}


def _window_pages(
    layout: PageLayout, dtype: str, window: Arrays, mean: NDArray[np.float16], first: int, last: int
) -> NDArray[np.uint8]:
    """A page for each head with tokens `first` to `last - 1` of a window."""
    heads, n = len(mean), last - first
    pool = np.zeros((heads, layout.nbytes), np.uint8)
    page, slot = np.repeat(np.arange(heads), n), np.tile(np.arange(n), heads)
    k, v = (
        window[side][first:last].swapaxes(0, 1).reshape(heads * n, -1).astype(np.float32) for side in "kv"
    )
    k = rotate_vectors(k, mean, page) if layout.bits_k < 16 else k
    v = rotate_vectors(v) if layout.bits_v < 16 else v
    write_tokens(pool, layout, dtype, page, slot, k, v)
    layout.positions_in(pool)[:, :n] = window["position"][first:last] & 0xFFFF
    layout.importance_in(pool)[:, :n] = encode_importance(window["observed"][:, first:last])
    return pool


def _widest_rung(store: LayerFormat, row_budget: int | None, rungs: NDArray[np.uint8], pages: int) -> int:
    """The highest rung of which a row with pages of these rungs can have so many more for each head."""
    if row_budget is None:
        return len(store.layouts) - 1
    left = row_budget - store.fixed_nbytes - sum(store.page_bytes(int(r)) for r in rungs)
    more = pages * store.num_heads_kv
    return max([r for r in range(len(store.layouts)) if more * store.page_bytes(r) <= left], default=0)


def _cut_into_pages(position: NDArray[np.int64]) -> list[tuple[int, int]]:
    """Cut tokens into pages: none has more than 64, or positions of two runs of 65,536."""
    found: list[tuple[int, int]] = []
    borders = [0, *(np.flatnonzero(np.diff(position >> 16)) + 1).tolist(), len(position)]
    for begin, end in pairwise(borders):
        starts = range(begin, end, TOKENS_PER_PAGE)
        found += [(start, min(start + TOKENS_PER_PAGE, end)) for start in starts]
    return found

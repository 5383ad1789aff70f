"""The list of tiles that persistent blocks of attention walk, made on the device from lengths alone.

A tile is a number of query positions of a number of query heads that read one KV head. `Tiling` says which;
kernels/cuda/attention/tiles.cuh says what a tile holds. A list takes 48 bytes a tile.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from threading import get_ident
from typing import Any, NamedTuple, Protocol

import numpy as np

from kvlab.jit.launch import PreparedLaunch, PreparedLaunches, cuda_kernel
from kvlab.jit.structs import ADDRESS, Struct, addresses_of
from kvlab.ops.array_kinds import Kind, allocator, device_of_kind
from kvlab.ops.attention_arguments import Lengths
from kvlab.ops.attention_call import MAX_GROUPS
from kvlab.ops.device_arrays import multiprocessors

__all__ = [
    "DIVISOR",
    "HEAD_BYTES",
    "PART_BYTES",
    "SEMAPHORE_OFFSET",
    "TILES_OF_BLOCK",
    "TILE_BYTES",
    "ListBuilder",
    "TileLists",
    "Tiling",
    "divisor",
    "heads_of_tile",
    "num_sections",
]

HEAD_BYTES, TILE_BYTES, PART_BYTES = 16, 48, 64
SEMAPHORE_OFFSET = 4

ROWS = 64
"""Rows of a warpgroup."""

_THREADS = 1024

SECTION_BYTES = 24 << 20  # of K and V, which half of an H100's L2 holds
TILES_OF_BLOCK = 4  # in a section, at least

_WAITED_TILES_OF_BLOCK = 2  # the same, where a call waits for its list

_MAX_STREAMS = 16  # for which a list is kept
_SEMAPHORES = 1024  # of launches in graphs that read one list; launches beyond make their own

_ADDRESSES = dict.fromkeys(("list", "cu_q", "cu_k"), ADDRESS)
DIVISOR = Struct(value="i", factor="I", shift="i")
"""A number that kernels divide by; see `divisor`."""

_NUMBERS: dict[str, Any] = {
    **dict.fromkeys(("capacity", "sequences", "seqlen_q", "seqlen_k", "heads_kv", "group", "pack"), "i"),
    **dict.fromkeys(("positions", "block_n", "packs"), (DIVISOR, 1)),
    **dict.fromkeys(("left", "right", "longest", "in_order", "num_groups"), "i"),
}
_CALL = Struct(**_ADDRESSES, **_NUMBERS)
_GROUPED_CALL = Struct(
    **_ADDRESSES,
    **{f"{name}{g}": ADDRESS for name in ("cu_rows", "prefix_lens") for g in range(MAX_GROUPS)},
    **_NUMBERS,
)


class Tiling(NamedTuple):
    """How a call is cut into tiles."""

    pack: int  # query heads of a tile
    positions: int  # query positions of a tile
    block_n: int  # keys that a tile is computed for at a time


def heads_of_tile(group: int, rows: int = ROWS) -> int:
    """Return how many query heads of a KV head to take into so many rows.

    The most that divide the group and fill the rows but for a sixteenth; where none do, those that fill most.

    Examples
    --------
    >>> [heads_of_tile(group) for group in (1, 3, 8, 11, 128)]
    [1, 3, 8, 1, 64]
    """
    divisors = [pack for pack in range(1, min(group, rows) + 1) if group % pack == 0]
    return max(divisors, key=lambda pack: (rows // pack * pack >= rows - rows // 16, pack))


def divisor(value: int) -> tuple[int, int, int]:
    """Return the fields of a `DIVISOR`, by which a division is a product and a shift (list_items.cuh).

    Examples
    --------
    >>> _, factor, shift = divisor(80)
    >>> 2 * 1_000_000_007 * factor >> 32 + shift, 1_000_000_007 // 80
    (12500000, 12500000)
    """
    shift = (value - 1).bit_length()
    return value, -(-(1 << 31 + shift) // value), shift


def num_sections(num_bh: int, bytes_of_keys: int, tiles: int, min_tiles: int) -> int:
    """Return into how many sections a list is divided.

    A section holds as many (sequence, KV head) pairs as have K and V that stay in L2, or as many as have
    enough tiles. Blocks go from a section to the next without waiting.

    Parameters
    ----------
    num_bh : int
        (sequence, KV head) pairs of all sections.
    bytes_of_keys : int
        Of K and V of all pairs.
    tiles : int
        Of all pairs.
    min_tiles : int
        Tiles that a section has at least, as long as there are more pairs.

    Examples
    --------
    >>> num_sections(64, 64 << 20, 4096, 132), num_sections(8, 256 << 20, 2048, 132)
    (3, 8)
    >>> num_sections(8, 256 << 20, 256, 132)
    2
    """
    fit = SECTION_BYTES * num_bh // max(bytes_of_keys, 1)
    fill = -(-min_tiles * num_bh // max(tiles, 1))
    return -(-num_bh // max(1, fit, fill))


class ListBuilder:
    """Makes the lists of calls of one kind.

    Parameters
    ----------
    tiling : Tiling
    lengths : tuple of int
        Sequences, and at least as many rows and keys as the longest has.
    total_q : int
        Rows of all sequences.
    heads_kv, group : int
        KV heads, and query heads to each.
    window : (int, int)
        Keys a row sees before and after its own position.
    bytes_of_keys : int
        Of K and V together, of all sequences.
    variable : bool
        Whether sequences have lengths of their own.
    device : int
    in_order : bool
        Whether tiles come in the order of their positions, not the longest first.
    sections : int, optional
        Of the list; if not given, what `num_sections` says.
    groups : int, optional
        If given, queries of the call have groups, and the list is that of the backward: its rows are the keys
        of all groups, and `lengths` ends with at least as many rows as all groups have of a sequence.

    Attributes
    ----------
    capacity : int
        Most tiles that a list can have; all have as many where lengths are not variable.
    nbytes : int
        Of a list.
    sections : int
        Into which (sequence, KV head) pairs are divided.
    """

    def __init__(
        self,
        tiling: Tiling,
        lengths: Lengths,
        total_q: int,
        heads_kv: int,
        group: int,
        window: tuple[int, int],
        bytes_of_keys: int,
        variable: bool,
        device: int,
        in_order: bool = False,
        sections: int | None = None,
        groups: int | None = None,
    ) -> None:
        number, longest_q, longest_k = lengths
        pack, positions, block_n = tiling
        blocks = number * -(-longest_q // positions)
        if variable:
            blocks = (total_q + number * (positions - 1)) // positions
        self.capacity = blocks * heads_kv * (group // pack)
        self.nbytes = HEAD_BYTES + (PART_BYTES * groups if groups else TILE_BYTES) * self.capacity
        num_bh = number * heads_kv
        if sections is None:
            min_tiles = TILES_OF_BLOCK * multiprocessors(device)
            sections = num_sections(num_bh, bytes_of_keys, self.capacity, min_tiles)
            if variable:  # each call waits for its list, and blocks make a section each
                min_tiles = _WAITED_TILES_OF_BLOCK * multiprocessors(device)
                sections = max(
                    sections, num_sections(num_bh, SECTION_BYTES * num_bh, self.capacity, min_tiles)
                )
        self.sections = sections
        call = _GROUPED_CALL if groups else _CALL
        argument = call.array({
            "capacity": self.capacity, "sequences": number, "seqlen_q": longest_q, "seqlen_k": longest_k,
            "heads_kv": heads_kv, "group": group, "pack": pack, "positions": divisor(positions),
            "block_n": divisor(block_n), "packs": divisor(group // pack),
            "left": window[0], "right": window[1], "longest": -(-longest_k // block_n), "in_order": in_order,
            "num_groups": groups or 1,
        })  # fmt: skip
        macros = (("QUERY_GROUPS", MAX_GROUPS),) if groups else ()
        kernel = cuda_kernel("attention/tile_list", "make_tile_list", macros, device)
        names = ("list", "cu_q", "cu_k") if variable else ("list",)
        of_groups = [f"{name}{g}" for name in ("cu_rows", "prefix_lens") for g in range(groups or 0)]
        self._launches = PreparedLaunches(
            [PreparedLaunch(kernel, (sections,), (_THREADS,), argument, early=True)],
            addresses_of(argument, map(call.word, (*names, *of_groups))),
        )

    def build(self, address: int, bounds: Sequence[int], stream: int) -> None:
        """Make a list at this address, on this stream; not by two threads at once.

        `bounds` are the addresses of cu_seqlens, none where lengths are not variable. Where there are groups,
        they are that of the keys, 0, and for each group that of the rows, then for each that of the prefixes.
        """
        self._launches.run(stream, address, *bounds)


class Builder(Protocol):
    """What makes lists of `nbytes`."""

    nbytes: int

    def build(self, address: int, bounds: Sequence[int], stream: int) -> None:
        """Make a list at an address, on a stream."""


class TileLists:
    """The lists of calls of one kind.

    Where lengths are not variable, a list is made once for each stream, by the first call there, and calls
    that a CUDA graph captures read the first of these, if it is complete: with a semaphore of their own, as
    graphs may be replayed at any time. Other captured calls make their own list, and so does each call of
    variable length.

    Parameters
    ----------
    builder : ListBuilder, or what has its `nbytes` and `build`
    variable : bool
        Whether lists differ from call to call, as sequences have lengths of their own.
    kind : Kind
        Of an array of the library from which memory comes that is not kept.
    """

    def __init__(self, builder: Builder, variable: bool, kind: Kind) -> None:
        self._builder, self._variable = builder, variable
        self._new = allocator(kind, ((builder.nbytes,), "uint8"))
        self._device = device_of_kind(kind, "q").index
        self._kept: dict[tuple[int, int], tuple[Any, int, int, bool]] = {}
        self._shared: _SharedList | None = None

    def get(self, bounds: Sequence[int], stream: int) -> tuple[Any, int, int, bool]:
        """Return the array that holds the list of a call, its address, the address of a semaphore, and
        whether the call before on the stream is the one that makes the list; not in two threads at once.

        Parameters
        ----------
        bounds : sequence of int
            Addresses of cu_seqlens, none where lengths are not variable.
        stream : int
            On which the list is made, if there is none.
        """
        key = stream, get_ident()  # one handle means another stream in every thread
        capturing = stream != 0 and _is_capturing(stream)
        if capturing:
            if self._shared is not None and (semaphore := self._shared.take_semaphore()):
                return *self._shared.made, semaphore, False
        elif (kept := self._kept.get(key)) is not None:
            return kept
        to_keep = None if capturing or self._variable else self._memory_to_keep(stream)
        made = next(zip(*self._new(), strict=True)) if to_keep is None else to_keep
        self._builder.build(made[1], bounds, stream)
        if to_keep is not None:
            if len(self._kept) >= _MAX_STREAMS:
                self._kept.clear()
            self._kept[key] = *made, made[1] + SEMAPHORE_OFFSET, False
            if self._shared is None:
                self._shared = _SharedList(made, made[1] + self._builder.nbytes, self._device, stream)
        elif capturing and not hasattr(made[0], "new_empty"):  # torch keeps a graph's memory, CuPy does not
            _CAPTURED.append(made)
        return *made, made[1] + SEMAPHORE_OFFSET, True

    def _memory_to_keep(self, stream: int) -> tuple[Any, int] | None:
        """Return memory for a list that outlives its call and for semaphores of graphs, None if the device
        has no more.

        It is CuPy's for all: what torch gives may belong to a CUDA graph that torch is about to capture
        (``torch.compile`` does so), and must not be kept.
        """
        import cupy

        streams = cupy.cuda.Stream
        with (
            cupy.cuda.Device(self._device),
            streams.from_external(_External(stream)) if stream else streams.null,
        ):
            try:
                made = cupy.empty(self._builder.nbytes + 4 * _SEMAPHORES, np.uint8)
            except cupy.cuda.memory.OutOfMemoryError:
                return None
        return made, made.data.ptr


class _SharedList:
    """A kept list that graphs read, and words of zeros, of which each captured launch takes one for good.

    Parameters
    ----------
    made : (array, int)
        The list and its address; it is being made on the stream.
    semaphores : int
        Address of the words, which are cleared here.
    device, stream : int
    """

    def __init__(self, made: tuple[Any, int], semaphores: int, device: int, stream: int) -> None:
        import cupy
        from cuda.bindings import driver

        self.made = made
        self._semaphores = iter(range(semaphores, semaphores + 4 * _SEMAPHORES, 4))
        self._is_complete = False
        with cupy.cuda.Device(device):
            _checked(driver.cuMemsetD32Async(semaphores, 0, _SEMAPHORES, stream))
            (self._event,) = _checked(driver.cuEventCreate(int(driver.CUevent_flags.CU_EVENT_DISABLE_TIMING)))
            _checked(driver.cuEventRecord(self._event, stream))

    def take_semaphore(self) -> int | None:
        """Return the address of a semaphore for one more launch; None where there is none left, or the list
        may not be complete yet: the graph may be replayed before it is."""
        if not self._is_complete:
            from cuda.bindings import driver

            # While a stream captures, a thread may ask for events only in this mode.
            relaxed = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
            (mode,) = _checked(driver.cuThreadExchangeStreamCaptureMode(relaxed))
            (error,) = driver.cuEventQuery(self._event)
            _checked(driver.cuThreadExchangeStreamCaptureMode(mode))
            if error:
                return None
            self._is_complete = True
            _CAPTURED.append(self.made)
        return next(self._semaphores, None)


def _checked(answer: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return what a function of the driver gives behind its error, which there must not be."""
    error, *rest = answer
    if error:
        raise RuntimeError(f"the CUDA driver answered {error.name} to a request for a list of tiles")
    return tuple(rest)


class _External:
    """A stream of another library, as libraries hand them to each other."""

    def __init__(self, stream: int) -> None:
        self._stream = stream

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self._stream


_CAPTURED: list[Any] = []
"""Lists that graphs read, and those that graphs of CuPy arrays make when they are replayed."""


def _is_capturing(stream: int) -> bool:
    """Whether a CUDA graph captures the stream, which is not the legacy default stream: that never is."""
    return bool(_runtime().streamIsCapturing(stream))


@cache  # an import statement takes longer than the question
def _runtime() -> Any:
    from cupy.cuda import runtime

    return runtime

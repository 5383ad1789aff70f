"""Rows that ranks of one host send each other by copy engines, which take no multiprocessor.

Attention fills a GPU, so the kernels of a collective would wait until it leaves them room. Instead a rank
copies into the memory of another, on a stream of its own, and then raises a flag there. The other's stream
waits for the flag. Neither takes a kernel. A *mailbox* is the memory that a rank receives into; all ranks of
a group have mapped it. It has two slots, which transfers use alternately. A rank writes into a slot after the
owner has reported that it has read the last transfer there. The owner reports this at the beginning of its
next transfer, on the stream of copies, so nothing comes between the kernels of the current stream.

A wait on a stream cannot end by itself. So a thread watches the transfers of a process and ends it, with the
name of the transfer, when one is not complete within the timeout of its group.
"""

from __future__ import annotations

import atexit
import math
import os
import platform
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from kvlab.ops.cuda.gathered import Arrival

__all__ = ["Mailbox", "mailbox"]

Tensor = torch.Tensor
_cuda: Any = torch.cuda

COPY_ENGINES = True
"""Whether to use them; tests and benchmarks of collectives turn it off."""

_SLOTS = 2
_ALIGNMENT = 512
_COME, _READ = 0, 1  # kinds of flags
_POLL_SECONDS = 0.2

_mailboxes: dict[tuple[Any, ...], Mailbox | None] = {}


def mailbox(like: Tensor, group: Any, what: str) -> Mailbox | None:
    """Return the mailbox of a group for one kind of transfer; None where collectives are to be used.

    These are needed where a rank has another host or no access to the memory of others, for captured graphs,
    whose flags would be those of the capture, and on CPUs. All ranks of a group decide the same.
    """
    if not (COPY_ENGINES and like.is_cuda) or torch.cuda.is_current_stream_capturing():
        return None
    group = group or dist.group.WORLD
    key = group, like.device, what
    if key not in _mailboxes:
        reached = dist.get_world_size(group) > 1 and _can_reach_all(group, like.device)
        _mailboxes[key] = Mailbox(group, like.device) if reached else None
    return _mailboxes[key]


def _can_reach_all(group: Any, device: torch.device) -> bool:
    """Whether all ranks of a group are processes of one host with a GPU each that reaches all others."""
    if dist.get_backend(group) != "nccl":
        return False
    mine = platform.node(), _boot_id(), str(torch.cuda.get_device_properties(device).uuid)
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, mine, group=group)
    here = {str(torch.cuda.get_device_properties(n).uuid): n for n in range(torch.cuda.device_count())}
    reached = all(
        other[:2] == mine[:2]
        and other[2] in here
        and (other == mine or torch.cuda.can_device_access_peer(device, here[other[2]]))
        for other in everyone
    ) and len(set(everyone)) == len(everyone)
    agreed = torch.tensor([reached], dtype=torch.int32, device=device)
    dist.all_reduce(agreed, dist.ReduceOp.MIN, group=group)
    return bool(agreed.item())


def _boot_id() -> str:
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read()
    except OSError:
        return ""


@cache
def _driver() -> Any:
    from cuda.bindings import driver

    return driver


def _check(outcome: tuple[Any, ...]) -> None:
    if outcome[0]:
        raise RuntimeError(f"copy engines: the driver says {outcome[0]!r}")


class Mailbox:
    """What a rank receives into, and where mailboxes of others lie.

    Parameters
    ----------
    group : process group
    device : torch.device
    """

    def __init__(self, group: Any, device: torch.device) -> None:
        self._group, self._device = group, device
        self._rank, self._size = dist.get_rank(group), dist.get_world_size(group)
        self._stream = _cuda.Stream(device)
        self._copy = _driver().CUDA_MEMCPY2D()
        memory = _driver().CUmemorytype.CU_MEMORYTYPE_DEVICE
        self._copy.srcMemoryType = self._copy.dstMemoryType = memory
        self._timeout = group._get_backend(device).options._timeout.total_seconds()
        # Flags count for each slot the pieces that have come from each rank, and the uses it has read.
        self._uses, self._pieces = 0, [0] * _SLOTS
        self._read: list[tuple[int, int, Any]] = []  # slots, their uses, and events behind what read them
        self._flags, self._flags_of = self._shared(4 * 2 * _SLOTS * self._size)
        self._nbytes = 0  # of a slot
        self._memory, self._remote = self._flags, self._flags_of
        self._views: dict[tuple[int, tuple[int, ...], torch.dtype], Tensor] = {}

    def _shared(self, nbytes: int) -> tuple[Tensor, list[int]]:
        """Return new memory that all ranks have mapped, zeros, and where it is on each rank."""
        import torch.distributed._symmetric_memory as symmetric_memory

        made = symmetric_memory.empty(nbytes, dtype=torch.uint8, device=self._device)
        handle = symmetric_memory.rendezvous(made, self._group)
        made.zero_()
        _cuda.synchronize(self._device)
        dist.barrier(group=self._group)
        _cuda.synchronize(self._device)
        return made, list(handle.buffer_ptrs)

    def all_to_all(
        self, outgoing: Sequence[Sequence[Tensor]], incoming: Sequence[int], begins: Sequence[int], most: int,
        what: str, width: int,
    ) -> tuple[Any, list[Any], str, Any, Callable[[], None], bool, Arrival]:  # fmt: skip
        """Start what `kvlab.parallel.collectives.all_to_all` says; return the fields of its `Pending`."""
        like, driver, rank = outgoing[0][0], _driver(), self._rank
        itemsize, columns = like.element_size(), like.shape[1]
        column_bytes = itemsize * math.prod(like.shape[2:])
        row_bytes = columns * column_bytes
        nbytes = -(-most * row_bytes // _ALIGNMENT) * _ALIGNMENT  # of an array, the same on all ranks
        self._reserve(len(outgoing) * nbytes)
        slot, use = self._uses % _SLOTS, self._uses // _SLOTS + 1
        cuts = range(0, columns, width)
        first = self._pieces[slot] + 1
        self._uses, self._pieces[slot] = self._uses + 1, self._pieces[slot] + len(cuts)
        begin, others = slot * self._nbytes, [n for n in range(self._size) if n != rank]
        self._stream.wait_stream(_cuda.current_stream(self._device))
        stream = self._stream.cuda_stream
        self._give_back(others, stream)
        kept = [_dense(array) for array in outgoing]
        for number, cut in enumerate(cuts):
            before, sent = cut * column_bytes, min(width, columns - cut) * column_bytes
            for step in range(self._size):
                other = (rank + step) % self._size  # so that ranks write to different ones
                if step and not number:
                    _check(
                        driver.cuStreamWaitValue32(stream, self._flag(rank, _READ, slot, other), use - 1, 0)
                    )
                to = self._remote[other] + begin + begins[other] * row_bytes
                for n, array in enumerate(kept):
                    self._send(array[other], to + n * nbytes, row_bytes, before, sent)
                if step:
                    flag = self._flag(other, _COME, slot, rank)
                    _check(driver.cuStreamWriteValue32(stream, flag, first + number, 0))
        over = self._over(slot, others)
        _watch(over, self._timeout, what)
        shape = (sum(incoming), *like.shape[1:])
        buffers = tuple(self._view(begin + n * nbytes, shape, like.dtype) for n in range(len(kept)))

        def free() -> None:
            event = _cuda.Event()
            event.record(_cuda.current_stream(self._device))
            self._read.append((slot, use, event))

        return (
            buffers,
            [_Work(lambda: _cuda.current_stream(self._device).wait_event(over))],
            what,
            kept,
            free,
            False,
            Arrival(self._flag(rank, _COME, slot, 0), first, width),
        )

    def _send(self, piece: Tensor, to: int, row_bytes: int, before: int, nbytes: int) -> None:
        """Copy `nbytes` of each row of a piece, from byte `before` on, to rows that begin at `to`."""
        if rows := piece.shape[0]:
            pitch, stream = piece.stride(0) * piece.element_size(), self._stream.cuda_stream
            self._push(piece.data_ptr() + before, pitch, to + before, row_bytes, rows, nbytes, stream)

    def _over(self, slot: int, others: Sequence[int]) -> Any:
        """An event: what was to come has come, and what was to be sent may be overwritten."""
        for other in others:
            flag = self._flag(self._rank, _COME, slot, other)
            _check(_driver().cuStreamWaitValue32(self._stream.cuda_stream, flag, self._pieces[slot], 0))
        over = _cuda.Event()
        over.record(self._stream)
        return over

    def _give_back(self, others: Sequence[int], stream: int) -> None:
        """Tell the other ranks which slots have been read."""
        for slot, use, event in self._read:
            self._stream.wait_event(event)
            for other in others:
                flag = self._flag(other, _READ, slot, self._rank)
                _check(_driver().cuStreamWriteValue32(stream, flag, use, 0))
        self._read.clear()

    def _view(self, begin: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Memory of this rank from a byte on as an array, which is remembered."""
        name = begin, shape, dtype
        if name not in self._views:
            nbytes = math.prod(shape) * dtype.itemsize
            self._views[name] = self._memory[begin : begin + nbytes].view(dtype).view(shape)
        return self._views[name]

    def _push(
        self, source: int, pitch: int, to: int, to_pitch: int, rows: int, nbytes: int, stream: int
    ) -> None:
        """Copy rows of so many bytes between addresses; a pitch is the distance of two rows."""
        if pitch == to_pitch == nbytes:  # all rows are one
            pitch = to_pitch = nbytes = rows * nbytes
            rows = 1
        copy = self._copy
        copy.srcDevice, copy.srcPitch, copy.dstDevice, copy.dstPitch = source, pitch, to, to_pitch
        copy.WidthInBytes, copy.Height = nbytes, rows
        _check(_driver().cuMemcpy2DAsync(copy, stream))

    def _flag(self, of: int, kind: int, slot: int, other: int) -> int:
        """Address of a flag of a rank."""
        return self._flags_of[of] + 4 * ((2 * slot + kind) * self._size + other)

    def _reserve(self, nbytes: int) -> None:
        """Make slots as large as this, on all ranks at once; this waits for the GPU."""
        if nbytes <= self._nbytes:
            return
        _cuda.synchronize(self._device)
        dist.barrier(group=self._group)
        _cuda.synchronize(self._device)
        self._memory, self._remote = self._shared(_SLOTS * nbytes)
        self._views.clear()
        self._nbytes = nbytes


class _Work(NamedTuple):
    """What `Pending` waits for."""

    wait: Callable[[], None]


def _dense(pieces: Sequence[Tensor]) -> list[Tensor]:
    """Rows of equal shape that are contiguous, each by itself."""
    shape = pieces[0].shape
    dense = tuple([math.prod(shape[axis + 1 :]) for axis in range(1, len(shape))])
    return [piece if piece.stride()[1:] == dense else piece.contiguous() for piece in pieces]


# ---- the watch over waits that cannot end by themselves

_watched: deque[tuple[Any, float, str]] = deque()
_is_watched, _ends = threading.Event(), threading.Event()


def _watch(done: Any, timeout: float, what: str) -> None:
    _start_to_watch()
    _watched.append((done, time.monotonic() + timeout, what))
    _is_watched.set()


@cache
def _start_to_watch() -> None:
    thread = threading.Thread(target=_keep_watch, name="kvlab-copy-engines", daemon=True)
    thread.start()
    atexit.register(_end_watch, thread)


def _end_watch(thread: threading.Thread) -> None:
    """Wait for the watch to end, as Python aborts where it stops a thread that is in C++."""
    _ends.set()
    _is_watched.set()
    thread.join()


def _keep_watch() -> None:
    # A query of an event must not disturb a capture of a graph by another thread.
    relaxed = _driver().CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    _check(_driver().cuThreadExchangeStreamCaptureMode(relaxed))
    while not _ends.is_set():
        _is_watched.wait()
        _is_watched.clear()
        while _watched:
            done, deadline, what = _watched[0]
            if done.query():
                _watched.popleft()
                continue
            if time.monotonic() > deadline:
                print(
                    f"kvlab.errors.RankError: {what}: a rank of the group died or did not answer within the "
                    "group's timeout (init_process_group(timeout=...)); this process ends",
                    file=sys.stderr,
                    flush=True,
                )
                os._exit(1)
            time.sleep(_POLL_SECONDS)

"""Mailboxes of several ranks on streams that run in any order: what is read is what was sent for that use.

A stream here is a queue of steps on memory of the CPU. Hosts put all their work into queues; then a step at a
time is taken from any stream whose next step need not wait.
"""

from __future__ import annotations

import ctypes
import random
import subprocess
import sys
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvlab.parallel import copy_engines

Step = Callable[[], bool]  # whether it has run; False if it has to wait


class Stream:
    """A queue of steps."""

    def __init__(self, *_: Any) -> None:
        self.steps: deque[Step] = deque()
        streams.append(self)

    @property
    def cuda_stream(self) -> Stream:
        return self

    def do(self, act: Callable[[], Any]) -> None:
        self.steps.append(lambda: act() or True)

    def wait_event(self, event: Event) -> None:
        self.steps.append(lambda: event.happened)

    def wait_stream(self, other: Stream) -> None:
        event = Event()
        event.record(other)
        self.wait_event(event)


class Event:
    happened = False

    def record(self, stream: Stream) -> None:
        stream.do(lambda: setattr(self, "happened", True))


streams: list[Stream] = []


class Driver:
    """What mailboxes ask of the driver, on memory of the CPU."""

    CUmemorytype = SimpleNamespace(CU_MEMORYTYPE_DEVICE=2)
    CUDA_MEMCPY2D = SimpleNamespace

    @staticmethod
    def _word(address: int) -> ctypes.c_int32:
        return ctypes.c_int32.from_address(address)

    def cuStreamWaitValue32(self, stream: Stream, address: int, value: int, _: int) -> tuple[int]:
        stream.steps.append(lambda: self._word(address).value >= value)
        return (0,)

    def cuStreamWriteValue32(self, stream: Stream, address: int, value: int, _: int) -> tuple[int]:
        stream.do(lambda: setattr(self._word(address), "value", value))
        return (0,)

    def cuMemcpy2DAsync(self, copy: Any, stream: Stream) -> tuple[int]:
        at = (copy.dstDevice, copy.dstPitch, copy.srcDevice, copy.srcPitch, copy.WidthInBytes, copy.Height)

        def run() -> None:
            to, to_pitch, source, pitch, width, rows = at
            for row in range(rows):
                ctypes.memmove(to + row * to_pitch, source + row * pitch, width)

        stream.do(run)
        return (0,)


class World:
    """Ranks of one process: the one whose host is at work, and memory that all of them share."""

    def __init__(self, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
        streams.clear()
        self.rank, self.size, driver = 0, size, Driver()
        self.current = [Stream() for _ in range(size)]
        shared: list[list[torch.Tensor]] = []

        def share(box: Any, nbytes: int) -> tuple[torch.Tensor, list[int]]:
            made = box.__dict__.setdefault("made", [])
            if len(shared) == len(made):
                shared.append([torch.zeros(nbytes, dtype=torch.uint8) for _ in range(size)])
            memory = shared[len(made)]
            made.append(memory)
            return memory[box._rank], [x.data_ptr() for x in memory]

        group = SimpleNamespace(
            _get_backend=lambda _: SimpleNamespace(
                options=SimpleNamespace(_timeout=SimpleNamespace(total_seconds=lambda: 1.0))
            )
        )
        monkeypatch.setattr(copy_engines, "_driver", lambda: driver)
        monkeypatch.setattr(copy_engines, "_watch", lambda *_: None)
        monkeypatch.setattr(copy_engines.Mailbox, "_shared", share)
        monkeypatch.setattr(
            copy_engines, "_cuda", SimpleNamespace(
                Stream=Stream, Event=Event, synchronize=lambda _: None,
                current_stream=lambda _: self.current[self.rank],
            ),
        )  # fmt: skip
        monkeypatch.setattr(
            copy_engines, "dist", SimpleNamespace(
                get_rank=lambda _: self.rank, get_world_size=lambda _: size, barrier=lambda **_: None,
            ),
        )  # fmt: skip
        self.boxes, self.kept = [], list[torch.Tensor]()
        for self.rank in range(size):
            self.boxes.append(copy_engines.Mailbox(group, torch.device("cpu")))

    def run(self, seed: int) -> bool:
        """Run all steps in an order; whether none is left that waits for ever."""
        choose = random.Random(seed)
        while any(stream.steps for stream in streams):
            ready = [stream for stream in streams if stream.steps]
            choose.shuffle(ready)
            for stream in ready:
                if stream.steps[0]():
                    stream.steps.popleft()
                    break
            else:
                return False
        return True


def send_and_read(world: World, uses: int, *, frees: bool = True, width: int = 3) -> list[bool]:
    """Swap different rows in every use, two under way at a time; whether each rank read what it should.

    Rank s sends 3 rows to the ranks before it and 2 to those behind, as parts of wider rows, `width` of their
    3 columns at a time. What a counter says has come is read without a wait for the rest, too.
    """
    size, right = world.size, []
    counts = [
        [0 if r == s else 3 if r < s else 2 for s in range(size)] for r in range(size)
    ]  # r takes from s

    def rows(sender: int, use: int) -> torch.Tensor:
        return torch.arange(4 * 6).view(4, 6) + 100 * sender + 1000 * use

    for rank in range(size):
        world.rank = rank
        stream, pending = world.current[rank], deque[Any]()
        begins = [sum(counts[r][:rank]) for r in range(size)]
        for use in range(uses + 1):
            if use < uses:
                mine = torch.zeros(4, 6, dtype=torch.int64)
                world.kept.append(mine)
                stream.do(lambda mine=mine, use=use, rank=rank: mine.copy_(rows(rank, use)) is None)
                arrays = [
                    [mine[: counts[r][rank], part] for r in range(size)]
                    for part in (slice(0, 3), slice(3, 6))
                ]
                most = max(map(sum, counts))
                sent = world.boxes[rank].all_to_all(arrays, counts[rank], begins, most, "rows", width)
                pending.append((use, sent))
            if use > 0:
                number, (buffers, works, _, _, free, _, arrival) = pending.popleft()
                expected = torch.cat([rows(s, number)[: counts[rank][s]] for s in range(size)])

                for cut in range(0, 3, width):
                    for s in [s for s in range(size) if s != rank]:
                        counter = arrival.counters + 4 * s
                        Driver().cuStreamWaitValue32(stream, counter, arrival.first + cut // width, 0)
                    columns = [c + n for n in (0, 3) for c in range(cut, min(3, cut + width))]

                    def read(
                        buffers: Any = buffers, expected: torch.Tensor = expected, columns: Any = columns
                    ) -> None:
                        right.append(torch.equal(torch.cat(buffers, 1)[:, columns], expected[:, columns]))

                    stream.do(read)
                for work in works:
                    work.wait()
                if frees:
                    free()
    return right


@pytest.mark.parametrize("size", [2, 3, 5])
@pytest.mark.parametrize(("width", "pieces"), [(3, 1), (2, 2), (1, 3)])
def test_a_rank_reads_what_was_sent_for_this_use(
    size: int, width: int, pieces: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for seed in range(20):
        world = World(size, monkeypatch)
        right = send_and_read(world, 7, width=width)
        assert world.run(seed)
        assert len(right) == 7 * size * pieces
        assert all(right)


def test_calls_with_pieces_of_several_widths_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(2, monkeypatch)
    rights = [send_and_read(world, 3, width=width) for width in (1, 3, 2)]
    assert world.run(5)
    assert [len(right) for right in rights] == [18, 6, 12]
    assert all(map(all, rights))


def test_a_counter_that_is_raised_too_early_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(2, monkeypatch)
    monkeypatch.setattr(
        Driver, "cuStreamWriteValue32",
        lambda self, stream, address, value, _: (0, stream.do(
            lambda: setattr(self._word(address), "value", value + 1))),
    )  # fmt: skip
    right = send_and_read(world, 7, width=1)
    world.run(3)
    assert not all(right)


def test_a_rank_that_does_not_give_a_slot_back_stops_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(2, monkeypatch)
    send_and_read(world, 7, frees=False)
    assert not world.run(0)


def test_a_slot_that_is_written_too_early_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(2, monkeypatch)
    monkeypatch.setattr(Driver, "cuStreamWaitValue32", lambda *_: (0,))
    right = send_and_read(world, 7)
    world.run(1)
    assert not all(right)


def test_rows_whose_parts_are_not_contiguous_are_copied() -> None:
    x = torch.zeros(6, 6)
    view, copy = copy_engines._dense([x[:4, :4], x.T[:4, :4]])
    assert view.data_ptr() == x.data_ptr()
    assert copy.is_contiguous()


def test_tensors_on_a_cpu_have_no_mailbox() -> None:
    assert copy_engines.mailbox(torch.zeros(2), None, "rows") is None


def test_the_watch_ends_with_the_process() -> None:
    """Not before the last transfer is over, and its thread is gone before the interpreter goes."""
    code = """
import atexit, threading, types
from kvlab.parallel import copy_engines
driver = types.SimpleNamespace(
    CUstreamCaptureMode=types.SimpleNamespace(CU_STREAM_CAPTURE_MODE_RELAXED=2),
    cuThreadExchangeStreamCaptureMode=lambda _: (0,),
)
copy_engines._driver = lambda: driver
asked = []
done = types.SimpleNamespace(query=lambda: asked.append(1) or len(asked) > 2)
atexit.register(lambda: print(len(asked), [thread.name for thread in threading.enumerate()]))
copy_engines._watch(done, 60.0, "rows")
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout == "3 ['MainThread']\n"

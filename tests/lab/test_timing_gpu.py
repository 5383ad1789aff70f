"""Timing by events and graphs, on a stand-in for a GPU whose clock advances by what calls take."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from kvlab.lab import timing_gpu

torch = pytest.importorskip("torch")


class Device:
    """A clock in milliseconds, and what graphs have recorded."""

    def __init__(self) -> None:
        self.now, self.slept = 0.0, 0
        self.recording: list[float] | None = None

    def call(self, ms: float) -> Callable[[], None]:
        """Return a call that takes so long, or is recorded."""

        def run() -> None:
            if self.recording is None:
                self.now += ms
            else:
                self.recording.append(ms)

        return run

    def sleep(self, cycles: int) -> None:
        self.slept += cycles
        self.now += 100.0  # nothing of a pause may count


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    found = Device()

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            self.at = float("nan")

        def record(self) -> None:
            self.at = found.now

        def elapsed_time(self, end: Event) -> float:
            return end.at - self.at

    class Graph:
        def __init__(self) -> None:
            self.recorded: list[float] = []

        def replay(self) -> None:
            found.now += sum(self.recorded)

    @contextmanager
    def capture(graph: Graph, stream: Any = None) -> Iterator[None]:
        found.recording = graph.recorded
        yield
        found.recording = None

    @contextmanager
    def on_stream(stream: Any) -> Iterator[None]:
        yield

    stand_in = {
        "Event": Event, "CUDAGraph": Graph, "graph": capture, "stream": on_stream, "_sleep": found.sleep,
        "synchronize": lambda: None,
    }  # fmt: skip
    for name, value in stand_in.items():
        monkeypatch.setattr(torch.cuda, name, value)
    return found


def test_a_call_takes_what_it_takes_beside_others_and_pauses(device: Device) -> None:
    calls = {"short": device.call(1.0), "long": device.call(4.0)}
    timings = timing_gpu.time_by_events(calls, repeats=3, each=5, pause=7)
    assert timings["short"].seconds == pytest.approx([1e-3] * 3)
    assert timings["long"].seconds == pytest.approx([4e-3] * 3)
    assert device.slept == 2 * 3 * 7 * (5 + 1)


def test_turns_without_warm_calls_are_exactly_those_asked_for(device: Device) -> None:
    timing_gpu.time_by_events({"it": device.call(1.0)}, repeats=3, each=2, warm=False)
    assert device.now == 6
    timing_gpu.time_by_events({"it": device.call(1.0)}, repeats=3, each=2)
    assert device.now == 6 + 3 + 3 * (1 + 2)


def test_graphs_hold_several_calls_and_the_time_is_of_one(device: Device) -> None:
    timings = timing_gpu.time_on_device({"one": device.call(2.0), "other": device.call(3.0)}, 4)
    assert timings["one"].seconds == pytest.approx([2e-3] * 4)
    assert timings["other"].seconds == pytest.approx([3e-3] * 4)


@pytest.mark.parametrize("number", [1, 3, 8, 20])
def test_calls_in_succession_are_averaged_over_all_of_a_graph(device: Device, number: int) -> None:
    calls = [device.call(float(i + 1)) for i in range(number)]
    timing = timing_gpu.time_in_succession(calls, 5)
    assert timing.seconds == pytest.approx([1e-3 * (number + 1) / 2] * 5)

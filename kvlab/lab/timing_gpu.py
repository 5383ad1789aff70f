"""Time calls on a GPU: all CUDA graphs and events of benchmarks are here.

`time_on_device` replays graphs of several calls in turns, so neither the host nor a change of the clock
decides. `time_by_events` makes the calls as a user would, so where a GPU waits for the host that is measured
too. `time_in_succession` runs one graph of calls that rotate over more memory than a cache holds.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

from kvlab.errors import needs_extra
from kvlab.lab.timing import Timing

__all__ = [
    "captured",
    "new_event",
    "recorded",
    "time_by_events",
    "time_graphs",
    "time_in_succession",
    "time_on_device",
]

Call = Callable[[], object]

_CALLS = 4  # of one graph, to time it beside others
_CALLS_IN_SUCCESSION = 8  # at least: the launch of a graph takes microseconds of its own
_WARM_UP, _MAX_CALLS = 3, 50


def recorded(call: Call, times: int = 1, stream: Any = None) -> Call:
    """Record `times` calls as a CUDA graph, behind one that is not, and return its replay.

    The call must not wait for the GPU, and the replay holds it, whose arrays the graph reads. `stream` is a
    torch.cuda.Stream to record on: autograd wants that of the forward.
    """
    with needs_extra("hf", "kvlab benchmark --device cuda"):
        import torch
    with torch.cuda.stream(stream):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(times):
            call()
    graph.replay()
    torch.cuda.synchronize()

    def replay(held: Call = call) -> None:
        graph.replay()

    return replay


def time_on_device(calls: Mapping[str, Call], repeats: int) -> dict[str, Timing]:
    """Time calls of torch's current GPU against each other, by graph replays in turns; seconds of one.

    No call may wait for the GPU.
    """
    return time_graphs(captured(calls), repeats)


def captured(calls: Mapping[str, Call]) -> dict[str, Call]:
    """Return replays of graphs of several calls each, for `time_graphs`."""
    return {name: recorded(call, _CALLS) for name, call in calls.items()}


def time_graphs(graphs: Mapping[str, Call], repeats: int) -> dict[str, Timing]:
    """Replay what `captured` made in turns; seconds of one call."""
    timings = time_by_events(graphs, repeats=repeats, warm=False)
    return {name: Timing(tuple(x / _CALLS for x in timing.seconds)) for name, timing in timings.items()}


def time_by_events(
    calls: Mapping[str, Call],
    *,
    repeats: int,
    each: int = 1,
    seconds: float = 0.0,
    pause: int = 0,
    warm: bool = True,
) -> dict[str, Timing]:
    """Time calls of torch's current GPU in turns, some of them between two events; the host does not wait.

    Contestants come in another order in every turn: the first, on a chip that has cooled, gains up to 3 %.
    Seconds are those of one call.

    In its turn a contestant is called `each` times, or as often, up to 50 times, as takes so many `seconds`.
    Before it the GPU sleeps `pause` cycles for each call, so that none waits for the host. If `warm`, calls
    are made that are not timed: three before the first turn, one in each.
    """
    import torch

    counts = dict.fromkeys(calls, each)
    for name, call in calls.items() if warm else ():
        for _ in range(_WARM_UP):
            torch.cuda.synchronize()
            start = time.perf_counter()
            call()
            torch.cuda.synchronize()
            elapsed = time.perf_counter() - start
        counts[name] = max(each, min(_MAX_CALLS, int(seconds / elapsed)))
    marks: dict[str, list[Any]] = {name: [] for name in calls}
    orders = random.Random(0)
    for _ in range(repeats):
        for name, call in orders.sample(list(calls.items()), len(calls)):
            first, last = new_event(), new_event()
            if pause:
                torch.cuda._sleep(pause * (counts[name] + 1))  # type: ignore[no-untyped-call]
            if warm:
                call()
            first.record()
            for _ in range(counts[name]):
                call()
            last.record()
            marks[name].append((first, last))
    torch.cuda.synchronize()
    return {
        name: Timing(tuple(1e-3 * first.elapsed_time(last) / counts[name] for first, last in events))
        for name, events in marks.items()
    }


def time_in_succession(calls: Sequence[Call], repeats: int) -> Timing:
    """Time one of `calls`, all of which one graph runs one after the other, several times if they are few."""
    import torch

    times = -(-_CALLS_IN_SUCCESSION // len(calls))
    replay = recorded(lambda: [call() for call in calls], times)
    for _ in range(_WARM_UP):
        replay()
    marks = [new_event()]
    marks[0].record()
    for _ in range(repeats):
        replay()
        marks.append(new_event())
        marks[-1].record()
    torch.cuda.synchronize()
    count = times * len(calls)
    return Timing(tuple(1e-3 * first.elapsed_time(last) / count for first, last in pairwise(marks)))


def new_event() -> Any:
    """A CUDA event that tells the time."""
    import torch

    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]

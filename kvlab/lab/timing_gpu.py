"""Time calls on a GPU: capture several calls in a CUDA graph, and replay graphs in turns.

So neither host time nor a change of the clock decides.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from kvlab.errors import needs_extra
from kvlab.lab.timing import Timing

__all__ = ["captured", "time_graphs", "time_on_device"]

_CALLS = 4  # of one graph


def time_on_device(calls: Mapping[str, Callable[[], object]], repeats: int) -> dict[str, Timing]:
    """Time calls of torch's current GPU against each other, by graph replays in turns.

    Parameters
    ----------
    calls : mapping of name to callable
        None may wait for the GPU.
    repeats : int

    Returns
    -------
    dict of name to Timing
        Seconds of one call.
    """
    return time_graphs(captured(calls), repeats)


def captured(calls: Mapping[str, Callable[[], object]]) -> dict[str, Any]:
    """Return CUDA graphs of several calls each, for `time_graphs`."""
    with needs_extra("hf", "kvlab benchmark --device cuda"):
        import torch
    graphs = {name: torch.cuda.CUDAGraph() for name in calls}
    for name, call in calls.items():
        call()
        torch.cuda.synchronize()
        with torch.cuda.graph(graphs[name]):
            for _ in range(_CALLS):
                call()
        graphs[name].replay()
    torch.cuda.synchronize()
    return graphs


def time_graphs(graphs: Mapping[str, Any], repeats: int) -> dict[str, Timing]:
    """Replay what `captured` made in turns; seconds of one call."""
    import torch

    marks: dict[str, list[Any]] = {name: [] for name in graphs}
    for _ in range(repeats):
        for name, graph in graphs.items():
            pair = [
                torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
                for _ in range(2)
            ]
            pair[0].record()
            graph.replay()
            pair[1].record()
            marks[name].append(pair)
    torch.cuda.synchronize()
    return {
        name: Timing(tuple(1e-3 * first.elapsed_time(last) / _CALLS for first, last in pairs))
        for name, pairs in marks.items()
    }

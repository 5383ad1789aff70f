"""Progress of a command: a bar on a terminal, plain lines in a log."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["bar"]

SECONDS_BETWEEN_LINES = 30.0


@contextmanager
def bar(name: str) -> Iterator[Callable[[int, int], None]]:
    """Show how far something is; yields what is to be told of steps done and their total.

    In a log there is a line every 30 seconds and one at the end, so that a long run is seen to live.
    """
    from rich.console import Console

    console = Console(stderr=True)
    if console.is_terminal:
        from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn
        from rich.progress import TimeRemainingColumn as TimeLeft

        text = TextColumn("{task.description}")
        columns = (text, BarColumn(), TaskProgressColumn(), TimeElapsedColumn(), TimeLeft())
        # Every drawing takes a little of the processors, which all may be at work.
        with Progress(*columns, console=console, transient=True, refresh_per_second=2) as drawn:
            task = drawn.add_task(name, total=None)
            yield lambda done, total: drawn.update(task, completed=done, total=total)
        return
    last = time.monotonic()

    def tick(done: int, total: int) -> None:
        nonlocal last
        if done == total or time.monotonic() - last >= SECONDS_BETWEEN_LINES:
            last = time.monotonic()
            console.print(f"{name}: {done}/{total}", highlight=False, soft_wrap=True)

    yield tick

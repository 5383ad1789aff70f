"""Progress of a command: a bar on a terminal, plain lines in a log."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["Tick", "bar"]

SECONDS_BETWEEN_LINES = 30.0


class Tick(Protocol):
    """A callback: steps done, their total, and a note beside the bar."""

    def __call__(self, done: int, total: int, note: str = "") -> None: ...


@contextmanager
def bar(name: str) -> Iterator[Tick]:
    """Show how far something is; yields what is to be told of steps done and their total.

    In a log there is a line every 30 seconds and one at the end, so that a long run is seen to live. Warnings
    are lines of their own, without the source that gave them, and leave the bar whole.
    """
    from rich.console import Console

    console = Console(stderr=True)
    with _plain_warnings(console), _drawn(name, console) as tick:
        yield tick


@contextmanager
def _plain_warnings(console: Console) -> Iterator[None]:
    with warnings.catch_warnings():

        def show(message: Warning | str, *_arguments: Any, **_options: Any) -> None:
            console.print(f"warning: {message}", markup=False, highlight=False, soft_wrap=True)

        warnings.showwarning = show
        yield


@contextmanager
def _drawn(name: str, console: Console) -> Iterator[Tick]:
    if console.is_terminal:
        from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn
        from rich.progress import TimeRemainingColumn as TimeLeft

        text, note_text = TextColumn("{task.description}"), TextColumn("{task.fields[note]}")
        columns = (text, BarColumn(), TaskProgressColumn(), note_text, TimeElapsedColumn(), TimeLeft())
        # Every drawing takes a little of the processors, which all may be at work.
        with Progress(*columns, console=console, transient=True, refresh_per_second=2) as drawn:
            task = drawn.add_task(name, total=None, note="")

            def advance(done: int, total: int, note: str = "") -> None:
                drawn.update(task, completed=done, total=total, note=note)

            yield advance
        return
    last = time.monotonic()

    def tick(done: int, total: int, note: str = "") -> None:
        nonlocal last
        if done == total or time.monotonic() - last >= SECONDS_BETWEEN_LINES:
            last = time.monotonic()
            line = f"{name}: {done}/{total} {note}".rstrip()
            console.print(line, markup=False, highlight=False, soft_wrap=True)

    yield tick

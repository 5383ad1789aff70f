"""Say on a terminal that kernels are compiled: a first call can take a minute, later ones find them."""

from __future__ import annotations

import functools
import sys

__all__ = ["say_compiling"]


@functools.cache
def say_compiling() -> None:
    """Print a line to stderr if that is a terminal, once in a process."""
    if getattr(sys.stderr, "isatty", bool)():  # a program may have no stderr, or one of its own
        print("kvlab compiles kernels; this happens once, later runs find them", file=sys.stderr)

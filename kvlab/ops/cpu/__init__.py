"""Launchers of the operations on the CPU."""

from kvlab.ops.cpu import first_use as _first_use  # noqa: F401, it listens

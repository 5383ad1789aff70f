"""Numba kernels for the CPU."""

from . import cache as _cache  # noqa: F401, before any kernel: it decides when a kept one is stale

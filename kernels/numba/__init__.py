"""Numba kernels (`cpu_*.py` for the CPU, `cuda_*.py` for CUDA), installed as `kvlab.numba_kernels`."""

from . import cpu_cache as _cpu_cache  # noqa: F401, before any kernel: it decides when a kept one is stale

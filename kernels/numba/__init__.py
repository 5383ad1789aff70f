"""Numba kernels (`cpu_*.py` for the CPU, `cuda_*.py` for CUDA), installed as `kvlab.numba_kernels`."""

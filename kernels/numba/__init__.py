"""Numba kernels, for the CPU in `cpu` and for CUDA in `cuda`, installed as `kvlab.numba_kernels`."""

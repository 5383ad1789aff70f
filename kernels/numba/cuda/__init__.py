"""Numba kernels for CUDA: each function makes the kernel for its options (`kvlab.jit.numba`)."""

"""Launchers of the operations in Numba CUDA."""

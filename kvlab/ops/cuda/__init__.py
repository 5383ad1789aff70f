"""Launchers of the operations in CUDA C++."""

"""Copy bytes with all threads in a plain loop: the baseline of CPU kernels that memory limits.

A loop iteration copies one word and stores it through the cache, as all other kernels here store results.
"""

from numba import prange

from .simd import kernel

_TASK = 8192
"""Words of one parallel task: 64 KiB."""


@kernel
def copy_words(source, target):
    """Copy uint64 words."""
    for task in prange((source.size + _TASK - 1) // _TASK):
        for i in range(task * _TASK, min(source.size, (task + 1) * _TASK)):
            target[i] = source[i]

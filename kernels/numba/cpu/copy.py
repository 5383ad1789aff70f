"""The yardstick of CPU kernels that are limited by memory: copy bytes with all threads, with a plain loop.

One word a step, stored through the cache like the results of every other kernel here.
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

"""How fast memory can be read on this machine at most: the limit that times are held against.

Bytes that a last-level cache holds may come at its rate, all others come at that of memory. A GPU's rates
follow from its clock and bus, as the driver reports them, else from a copy. No interface reports those of a
CPU, so its memory is measured by copies with all threads. A copy reads and writes, and a cache line that is
written is read first: reads alone are up to 1.5 times as fast as the bytes of a copy.
"""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np

from kvlab.device import Gpu, cpu, gpus
from kvlab.errors import needs_extra

__all__ = ["Limit", "cpu_limit", "gpu_limit", "limit_of"]

_SLACK = 3.0
"""On the copies of a CPU: 1.5 for reads alone, 2 for other work on the machine while they were measured."""
_COPIED, _MAX_COPIED, _COPIES = 32 << 20, 512 << 20, 5
"""Bytes of a copy of one thread, and of all threads at most; how often each copies."""
_CORE_CACHE = 64 * 5e9
"""Bytes a second that a core gets from caches behind the first: a line a cycle at 5 GHz."""
_UNKNOWN_CACHE = 64 << 20
_GPU_CACHE_FACTOR = 4.0
"""How much faster than memory the second-level cache of a GPU may answer."""


@dataclass(frozen=True, slots=True)
class Limit:
    """Rates in bytes a second that nothing exceeds, and the bytes that a cache may hold.

    Examples
    --------
    >>> Limit(memory=1e9, cache=4e9, cache_nbytes=10**6).min_seconds(3 * 10**6)
    0.00225...
    """

    memory: float
    cache: float
    cache_nbytes: int

    def min_seconds(self, nbytes: int) -> float:
        """Time that reading so many bytes takes at least."""
        held = min(nbytes, self.cache_nbytes)
        return held / self.cache + (nbytes - held) / self.memory


def limit_of(device: str) -> Limit:
    """The limit of a kind of device, ``"cpu"`` or ``"cuda"``: its first GPU."""
    return cpu_limit() if device == "cpu" else gpu_limit(gpus()[0])


def cpu_limit() -> Limit:
    """The limit of the CPUs that this process may use; measured at each call, some 50 ms."""
    threads = cpu().threads
    return Limit(_SLACK * _copy_rate(threads), threads * _CORE_CACHE, _last_level_cache())


def gpu_limit(gpu: Gpu) -> Limit:
    """The limit of a GPU, by its memory clock and bus; where they are unknown, by a copy in torch.

    Examples
    --------
    >>> h200 = Gpu(0, "NVIDIA H200", (9, 0), 132, 141 << 30, 3_201_000, 6144, 50 << 20)
    >>> gpu_limit(h200).memory / 1e12
    4.91...
    """
    memory = 2 * 1e3 * gpu.memory_clock_khz * gpu.memory_bus_bits / 8 or _gpu_copy_rate()
    return Limit(memory, _GPU_CACHE_FACTOR * memory, gpu.l2_nbytes or _UNKNOWN_CACHE)


def _copy_rate(threads: int) -> float:
    """Bytes a second, read and written, of the fastest copies in all threads at once."""

    nbytes = min(_COPIED, _MAX_COPIED // threads)

    def copy(_number: int) -> float:
        source, target = np.ones(nbytes, np.uint8), np.empty(nbytes, np.uint8)
        best = float("inf")
        for _ in range(_COPIES):
            start = time.perf_counter()
            np.copyto(target, source)
            best = min(best, time.perf_counter() - start)
        return 2 * nbytes / best

    with ThreadPoolExecutor(threads) as pool:
        return sum(pool.map(copy, range(threads)))


@lru_cache(maxsize=1)
def _last_level_cache() -> int:
    """Bytes of all last-level caches of the machine, since threads may run anywhere."""
    found: dict[str, int] = {}
    for folder in Path("/sys/devices/system/cpu").glob("cpu[0-9]*/cache/index3"):
        try:
            size, owners = (
                (folder / name).read_text("ascii").strip() for name in ("size", "shared_cpu_list")
            )
        except OSError:
            continue
        found[owners] = int(size.removesuffix("K")) << 10
    return sum(found.values()) or _UNKNOWN_CACHE * (os.cpu_count() or 1)


def _gpu_copy_rate() -> float:
    """Twice the bytes a second, read and written, of a copy on torch's current GPU: no read exceeds it."""
    with needs_extra("hf", "the rate of a GPU's memory"):
        import torch
    source = torch.zeros(256 << 20, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    best = float("inf")
    for _ in range(_COPIES):
        torch.cuda.synchronize()
        start = time.perf_counter()
        target.copy_(source)
        torch.cuda.synchronize()
        best = min(best, time.perf_counter() - start)
    return 2 * 2 * source.numel() / best

"""Resident memory of a cache beside what it counts: `nbytes` must be what the machine gives.

    python benchmarks/resident_memory/run.py OUT.json [--size 1152MiB]

A cache under a cap of `size` bytes takes tokens in four steps until, at about 4 bits each, the cap is full:
at first all are stored at 8 bits, later most are demoted, so that pages become free in every pool. What the
process has resident (VmRSS) is compared before and after, when the C library has given back what it keeps for
arrays to come. A small cache goes through all that first, for kernels and libraries to be loaded.
"""

import argparse
import ctypes
import gc
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from kvlab.cache.cache import MixedPrecisionCache
from kvlab.lab.benchmark import harness
from kvlab.sizes import parse_size

LAYERS, HEADS, HEAD_DIM, STEPS = 16, 8, 128, 4
FULL_AT = 4.5  # bits per element


def resident() -> int:
    """Bytes that this process has in memory."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS"))


def filled(size: int) -> MixedPrecisionCache:
    """A cache that has taken as many tokens as fill `size` bytes at FULL_AT bits per element."""
    cache = MixedPrecisionCache(LAYERS, HEADS, HEADS, HEAD_DIM, budget=size, importance="key_norm")
    tokens = int(8 * size / FULL_AT / (2 * LAYERS * HEADS * HEAD_DIM))
    rng = np.random.default_rng(0)
    for _ in range(STEPS):
        k, v = rng.standard_normal((2, 1, tokens // STEPS, HEADS, HEAD_DIM), np.float32)
        for layer in range(LAYERS):
            cache.append(layer, k, v)
    return cache


def measure(size: int) -> dict[str, Any]:
    filled(16 * 2**20)
    before = resident()
    cache = filled(size)
    row = {"nbytes": cache.nbytes, "reserved": cache.reserved_nbytes, "resident": resident() - before}
    return row | {
        "bits_per_element": cache.bits_per_element,
        "resident_over_nbytes": row["resident"] / row["nbytes"],
    }


def cases(given: argparse.Namespace) -> list[harness.Case]:
    return [harness.Case("resident memory", partial(measure, parse_size(given.size)))]


def main() -> int:
    parser = harness.options(__doc__, "cpu")
    parser.add_argument("--size", default="1152MiB", help="cap of the cache")
    return harness.run(parser, cases)


if __name__ == "__main__":
    raise SystemExit(main())

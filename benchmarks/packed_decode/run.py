"""Time packed decode attention against the fastest bfloat16 decode of this machine, shape by shape.

    python benchmarks/packed_decode/run.py OUT.json [--shapes ...] [--ladders ...] [--backends cuda,numba]

How a case is drawn, checked and timed is told in `kvlab.lab.benchmark.decode_cuda`.
"""

from __future__ import annotations

import argparse
import itertools
from functools import cache, partial
from typing import Any

from kvlab.lab.benchmark import harness
from kvlab.lab.benchmark.decode_cuda import LADDERS, read_bandwidth, time_dense, time_packed
from kvlab.lab.benchmark.device_pages import Shape
from kvlab.ops.cuda import packed as packed_cuda
from kvlab.ops.numba import packed as packed_numba

BACKENDS = {"cuda": packed_cuda, "numba": packed_numba}
SHAPES = {
    "gqa 1 x 32K": Shape(1, 32768), "mha 1 x 32K": Shape(1, 32768, 32, 32), "gqa 1 x 4K": Shape(1, 4096),
    "gqa 1 x 128K": Shape(1, 131072), "mha 1 x 128K": Shape(1, 131072, 32, 32),
    "gqa 8 x 32K": Shape(8, 32768), "mha 8 x 32K": Shape(8, 32768, 32, 32), "gqa 64 x 16K": Shape(64, 16384),
    "gqa 64/8 1 x 32K": Shape(1, 32768, 64), "gqa 64/8 8 x 32K": Shape(8, 32768, 64),
    "gqa 1 x 32K d64": Shape(1, 32768, head_dim=64), "gqa 1 x 32K d80": Shape(1, 32768, head_dim=80),
}  # fmt: skip


bandwidth = cache(read_bandwidth)


@cache
def dense_of(shape: str) -> dict[str, float]:
    """Time dense attention once for all cases of a shape."""
    dense = time_dense(SHAPES[shape])
    print(f"{shape}: dense {dense}", flush=True)
    return dense


def measure(name: str, ladder: str, backend: str, count: int) -> dict[str, Any]:
    read, dense = bandwidth(), dense_of(name)
    row = time_packed(SHAPES[name], LADDERS[ladder], warps=count, backend=BACKENDS[backend])
    row |= {"shape": name, "ladder": ladder, "backend": backend, "warps": count, "dense_us": dense}
    row |= {"tbs": row["bytes"] / row["us"] / 1e6, "ratio": min(dense.values()) / row["us"]}
    row["floor_share"] = 1e6 * row["bytes"] / read / row["us"]
    return row


def cases(given: argparse.Namespace) -> list[harness.Case]:
    return [
        harness.Case(f"{name} {ladder} {backend} w{count}", partial(measure, name, ladder, backend, count))
        for name in given.shapes
        for ladder, backend, count in itertools.product(given.ladders, given.backends, given.warps)
        if ladder != "profiles" or SHAPES[name].head_dim % 64 == 0  # profiles take multiples of 64
    ]


def main() -> int:
    parser = harness.options(__doc__)
    parser.add_argument("--shapes", type=harness.names(SHAPES), default=",".join(SHAPES))
    parser.add_argument("--ladders", type=harness.names(LADDERS), default=",".join(LADDERS))
    parser.add_argument("--backends", type=harness.names(BACKENDS), default="cuda")
    parser.add_argument(
        "--warps",
        type=harness.numbers,
        default="0",
        help="warps of a block to try; 0 is what the library takes",
    )
    return harness.run(parser, cases)


if __name__ == "__main__":
    raise SystemExit(main())

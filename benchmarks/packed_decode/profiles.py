"""Time decode over keys in blocks of channels beside widths of the same bytes, back and forth.

    python benchmarks/packed_decode/profiles.py OUT.json [--shapes ...] [--pairs ...] [--backend numba]

Cases are drawn and checked as `kvlab.lab.benchmark.decode_cuda` tells. A ratio below 1 says that profiles are
faster.
"""

from __future__ import annotations

import argparse
import itertools
from functools import partial
from typing import Any

import numpy as np

from kvlab.lab.benchmark import harness
from kvlab.lab.benchmark.decode_cuda import LADDERS, prepare_packed
from kvlab.lab.benchmark.device_pages import Mixture, Shape
from kvlab.lab.timing_gpu import time_in_succession
from kvlab.ops.cuda import packed as packed_cuda
from kvlab.ops.numba import packed as packed_numba

BACKENDS = {"cuda": packed_cuda, "numba": packed_numba}
SHAPES = {
    "gqa 1 x 32K": Shape(1, 32768), "gqa 8 x 32K": Shape(8, 32768), "gqa 1 x 4K": Shape(1, 4096),
    "gqa 1 x 32K d64": Shape(1, 32768, head_dim=64), "gqa 8 x 32K d64": Shape(8, 32768, head_dim=64),
    "gqa 64/8 1 x 32K": Shape(1, 32768, 64), "gqa 64/8 8 x 32K": Shape(8, 32768, 64),
    "gqa 64 x 16K": Shape(64, 16384),
}  # fmt: skip
PAIRS: dict[str, tuple[Mixture, Mixture]] = {
    "default": (LADDERS["default"], LADDERS["profiles"]),
    "k4v3": ({(4, 3): 1.0}, {((8, 4, 2, 2), 3): 1.0}),
    "2": ({2: 1.0}, {((4, 2, 2, 0), 2): 1.0}),
    "k3v2": ({(3, 2): 1.0}, {((4, 4, 2, 2), 2): 1.0}),
    "8": ({8: 1.0}, {((8, 8, 8, 8), 8): 1.0}),
}
TURNS = (0, 1, 1, 0, 0, 1)


def measure(shape: str, pair: str, backend: Any) -> dict[str, Any]:
    cases = [
        prepare_packed(SHAPES[shape], mixture, backend=backend, max_compared=4096) for mixture in PAIRS[pair]
    ]
    times: tuple[list[float], list[float]] = [], []
    for turn in TURNS:
        times[turn].append(1e6 * time_in_succession(cases[turn].calls, 20).median)
    us, nbytes = [float(np.median(x)) for x in times], [case.nbytes for case in cases]
    return {
        "shape": shape,
        "pair": pair,
        "us": us,
        "times_us": times,
        "bytes": nbytes,
        "ratio_at_equal_bytes": us[1] / us[0] * nbytes[0] / nbytes[1],
        "relative_errors": [case.relative_error for case in cases],
    }


def cases(given: argparse.Namespace) -> list[harness.Case]:
    return [
        harness.Case(f"{shape} {pair}", partial(measure, shape, pair, BACKENDS[given.backend]))
        for shape, pair in itertools.product(given.shapes, given.pairs)
    ]


def main() -> int:
    parser = harness.options(__doc__)
    parser.add_argument("--shapes", type=harness.names(SHAPES), default=",".join(SHAPES))
    parser.add_argument("--pairs", type=harness.names(PAIRS), default=",".join(PAIRS))
    parser.add_argument("--backend", choices=BACKENDS, default="cuda")
    parser.set_defaults(seconds=600.0)
    return harness.run(parser, cases)


if __name__ == "__main__":
    raise SystemExit(main())

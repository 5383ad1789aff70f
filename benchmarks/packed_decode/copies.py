"""Time bulk copies of pages into shared memory and nothing else, as packed attention asks for them.

    python benchmarks/packed_decode/copies.py OUT.json

About 1 GB of pages of every width, 64 sequences on 128 thread blocks; in random order and in the order of
memory; with targets that begin at lines of shared memory, and where in a line their sources do. Page lengths
are those of packed caches, and next to them some that are whole lines.
"""

from __future__ import annotations

import itertools
import json
import pathlib
import sys
from typing import Any

import cupy
import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).parents[2]))

from kvlab.jit.build import arch_of, build
from kvlab.jit.launch import load
from kvlab.lab.results import provenance
from kvlab.pages import PageLayout

BLOCKS, SEQUENCES, BYTES, REPEATS = 128, 64, 1_060_000_000, 20
CALL = np.dtype(
    [(name, "u8") for name in ("pool", "list", "sink")]
    + [(name, "i4") for name in ("pages", "items", "bytes", "stages")]
)
RINGS = {16: (8, 3, 4), 8: (12, 2, 2), 4: (12, 2, 1), 2: (12, 3, 1)}
"""Warps, slots of a warp and items of a page, by width: those of packed attention at head_dim 128."""


def lists(pages: int, warps: int, *, random: bool) -> np.ndarray:
    """Page numbers (blocks, warps, pages of a warp): each block every other page of a sequence."""
    order = np.random.default_rng(0).permutation(pages) if random else np.arange(pages)
    parts = BLOCKS // SEQUENCES
    by_block = order.reshape(SEQUENCES, -1, warps, parts).transpose(0, 3, 2, 1)
    return np.ascontiguousarray(by_block.reshape(BLOCKS, warps, -1))


def measure(pool: Any, bits: int, record: int, stages: int, *, random: bool, alike: bool) -> dict[str, Any]:
    """Median time of a launch that reads the codes and steps of every page once."""
    layout, (warps, _, items) = PageLayout(128, bits, bits, 2), RINGS[bits]
    bytes_ = layout.positions // items // 16 * 16
    pages = BYTES // record // (BLOCKS * warps) * BLOCKS * warps
    numbers = lists(pages, warps, random=random)
    listed = cupy.asarray((numbers * (record // 64)).astype(np.uint32))
    sink = cupy.zeros(1, np.uint32)
    call = np.array(
        [(pool.data.ptr, listed.data.ptr, sink.data.ptr, numbers.shape[2], items, bytes_, stages)], CALL
    )
    capability = cupy.cuda.Device().compute_capability
    arch = arch_of(int(capability[:-1]), int(capability[-1]))
    kernel = load(build("copies", {"ALIKE": int(alike)}, arch, root=pathlib.Path(__file__).parent))
    shared = warps * stages * (-(-(bytes_ + 64) // 128) * 128)
    marks = [cupy.cuda.Event() for _ in range(REPEATS + 4)]
    for mark in marks:
        mark.record()
        kernel((BLOCKS,), (32 * warps,), (call[0],), shared)
    marks[-1].synchronize()
    times = [cupy.cuda.get_elapsed_time(*pair) for pair in itertools.pairwise(marks[3:])]
    moved, us = pages * items * bytes_, 1e3 * float(np.median(times))
    case = {"bits": bits, "record": record, "random": random, "alike": alike, "ring_bytes": shared}
    return case | {"bytes": moved, "us": us, "tbs": moved / us / 1e6}


def main() -> None:
    pool = cupy.random.randint(0, 2**31, BYTES // 4, dtype=cupy.int32)
    rows = []
    for bits, (_, stages, _) in RINGS.items():
        record = PageLayout(128, bits, bits, 2).nbytes
        cases = [(record, stages, *how) for how in itertools.product((True, False), (False, True))]
        cases += [(record // 128 * 128, stages, True, False)]  # whole lines: the importance is cut
        cases += [(record, depth, True, True) for depth in range(1, stages)]
        for length, depth, random, alike in cases:
            rows.append(measure(pool, bits, length, depth, random=random, alike=alike))
            print(" ".join(f"{k} {v:.4g}" for k, v in rows[-1].items()), flush=True)
    pathlib.Path(sys.argv[1]).write_text(json.dumps(provenance() | {"rows": rows}, indent=1))


if __name__ == "__main__":
    main()

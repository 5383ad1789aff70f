"""Time packed decode attention against the fastest bfloat16 decode of this machine, shape by shape.

    python benchmarks/packed_decode/run.py OUT.json [--shapes ...] [--ladders ...] [--backends cuda,numba]

How a case is drawn, checked and timed is told in `kvlab.lab.benchmark.decode_cuda`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import pathlib

import torch

from kvlab.lab.benchmark.decode_cuda import LADDERS, read_bandwidth, time_dense, time_packed
from kvlab.lab.benchmark.device_pages import Shape
from kvlab.lab.results import provenance
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


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--ladders", default=",".join(LADDERS))
    parser.add_argument("--backends", default="cuda")
    parser.add_argument("--warps", default="0", help="warps of a block to try; 0 is what the library takes")
    options = parser.parse_args()
    bandwidth, rows = read_bandwidth(), []
    ladders, backends, warps = (
        value.split(",") for value in (options.ladders, options.backends, options.warps)
    )
    for name in options.shapes.split(","):
        dense = time_dense(SHAPES[name])
        print(f"{name}: dense {dense}", flush=True)
        for ladder, backend, count in itertools.product(ladders, backends, map(int, warps)):
            if ladder == "profiles" and SHAPES[name].head_dim % 64:
                continue  # profiles take multiples of 64
            row = time_packed(SHAPES[name], LADDERS[ladder], warps=count, backend=BACKENDS[backend])
            row |= {"shape": name, "ladder": ladder, "backend": backend, "warps": count, "dense_us": dense}
            row |= {"tbs": row["bytes"] / row["us"] / 1e6, "ratio": min(dense.values()) / row["us"]}
            row["floor_share"] = 1e6 * row["bytes"] / bandwidth / row["us"]
            rows.append(row)
            print(
                f"{name:16s} {ladder:6s} {backend} w{count:<2d} {row['us']:8.2f} us {row['tbs']:5.2f} TB/s "
                f"floor {row['floor_share']:.2f} ratio {row['ratio']:.2f} err {row['relative_error']}",
                flush=True,
            )
            torch.cuda.empty_cache()
        options.out.write_text(json.dumps(provenance() | {"rows": rows}, indent=1))


if __name__ == "__main__":
    main()

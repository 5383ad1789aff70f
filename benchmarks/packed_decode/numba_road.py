"""Time packed attention of backend "numba" beside that of backend "cuda", on pages of the same shapes.

    python benchmarks/packed_decode/numba_road.py OUT.json [--shapes ...] [--ladders ...]

Both are checked against float64 before they are timed, as `kvlab.lab.benchmark.decode_cuda` tells.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import sys

import torch

sys.path.insert(0, str(pathlib.Path(__file__).parents[2]))
sys.path.insert(0, str(pathlib.Path(__file__).parent))

from run import SHAPES, provenance

from kvlab.lab.benchmark.decode_cuda import LADDERS, time_packed
from kvlab.ops.cuda import packed as packed_cuda
from kvlab.ops.numba import packed as packed_numba

BACKENDS = {"cuda": packed_cuda, "numba": packed_numba}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("--shapes", default="gqa 8 x 32K,gqa 1 x 32K,gqa 1 x 4K")
    parser.add_argument("--ladders", default=",".join(LADDERS))
    parser.add_argument("--repeats", type=int, default=50)
    options = parser.parse_args()
    rows = []
    for shape in options.shapes.split(","):
        for ladder in options.ladders.split(","):
            timed = {
                name: time_packed(SHAPES[shape], LADDERS[ladder], options.repeats, backend=module)
                for name, module in BACKENDS.items()
            }
            share = timed["cuda"]["us"] / timed["numba"]["us"]
            rows.append({"shape": shape, "ladder": ladder, "share_of_cuda": share} | timed)
            print(
                f"{shape:12s} {ladder:6s} numba {timed['numba']['us']:8.1f} us  "
                f"cuda {timed['cuda']['us']:8.1f} us  share {share:.2f}",
                flush=True,
            )
            torch.cuda.empty_cache()
            options.out.write_text(json.dumps(provenance() | {"rows": rows}, indent=1))


if __name__ == "__main__":
    main()

"""Time packed attention of backend "numba" beside that of backend "cuda", on the same pages.

    python benchmarks/packed_decode/numba_road.py OUT.json [--shapes ...] [--ladders ...]

Shapes, pages and clock are those of `run.py`. Before a case is timed, both results are compared: each backend
is judged against float64 by tests/gpu/test_packed_attention.py, so here they have to agree within the
roundings of the CUDA C++ kernel to bfloat16.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import sys
from types import SimpleNamespace
from typing import Any

import torch

sys.path.insert(0, str(pathlib.Path(__file__).parents[2]))
sys.path.insert(0, str(pathlib.Path(__file__).parent))

from run import LADDERS, READ_BANDWIDTH, ROTATED_BYTES, SHAPES, draw_pages, median_us

from kvlab.environment import report
from kvlab.ops import packed_cuda, packed_numba

BACKENDS: dict[str, Any] = {"cuda": packed_cuda, "numba": packed_numba}


def case(shape: tuple[int, int, int, int, int], ladder: str) -> dict[str, Any]:
    batch, _, heads, kv_heads, d = shape
    pages = draw_pages(shape, LADDERS[ladder])
    needed = sum(layout.positions * int((pages.rung == r).sum()) for r, layout in enumerate(pages.layouts))
    sets = max(1, min(16, round(ROTATED_BYTES / needed)))
    every = [pages] + [draw_pages(shape, LADDERS[ladder]) for _ in range(sets - 1)]
    q = torch.randn(batch, 1, heads, d, device="cuda", dtype=torch.bfloat16)
    row: dict[str, Any] = {"bytes": needed, "sets": sets}
    outs = {}
    for name, module in BACKENDS.items():
        out, lse = torch.full_like(q, float("nan")), torch.empty(batch, heads, 1, device="cuda")
        workspace = module.make_workspace(q, batch * kv_heads, heads // kv_heads, d)

        def call(
            own: SimpleNamespace, module: Any = module, out: Any = out, rest: Any = (lse, workspace)
        ) -> None:
            module.attend(q, own, out, *rest, scale=d**-0.5)

        call(pages)
        outs[name] = out.clone().float()
        row[f"{name}_us"] = median_us([lambda own=own, call=call: call(own) for own in every])
    difference = (outs["numba"] - outs["cuda"]).norm() / outs["cuda"].norm()
    if not difference < 1e-2:
        raise SystemExit(f"{shape} {ladder}: the backends differ by {difference}")
    if needed / row["numba_us"] / 1e-6 > 1.02 * READ_BANDWIDTH and sets * needed > 2e8:
        raise SystemExit(f"{shape} {ladder}: {row['numba_us']} us is faster than the memory")
    return row | {"difference": float(difference), "share_of_cuda": row["cuda_us"] / row["numba_us"]}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("--shapes", default="gqa 8 x 32K,gqa 1 x 32K,gqa 1 x 4K")
    parser.add_argument("--ladders", default=",".join(LADDERS))
    options = parser.parse_args()
    rows = []
    for shape in options.shapes.split(","):
        for ladder in options.ladders.split(","):
            row = {"shape": shape, "ladder": ladder} | case(SHAPES[shape], ladder)
            rows.append(row)
            print(
                f"{shape:12s} {ladder:6s} numba {row['numba_us']:8.1f} us  cuda {row['cuda_us']:8.1f} us  "
                f"share {row['share_of_cuda']:.2f}  difference {row['difference']:.4f}",
                flush=True,
            )
            torch.cuda.empty_cache()
            options.out.write_text(json.dumps({"environment": report(), "rows": rows}, indent=1))


if __name__ == "__main__":
    main()

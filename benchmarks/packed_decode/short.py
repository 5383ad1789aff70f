"""Time packed decode attention where a launch counts more than its bytes: short contexts, one row and three.

    python benchmarks/packed_decode/short.py OUT.json

30 layers with pages of their own are one CUDA graph, as in a model. Before it is timed a call is compared
with float64 and with calls of one KV head each, and its bits with those of a second call.
"""

from __future__ import annotations

import argparse
import itertools
import json
import pathlib
import sys
from typing import Any

import torch

sys.path.insert(0, str(pathlib.Path(__file__).parents[2]))

from kvlab.lab.benchmark.device_pages import Shape, attended_apart, draw_pages, relative_error
from kvlab.lab.results import provenance
from kvlab.lab.timing_gpu import captured, time_graphs
from kvlab.ops.cuda import packed as packed_cuda

LAYERS, LIMIT = 30, 5e-3
HEADS = ((9, 3, 64), (32, 8, 128))  # query heads, KV heads, channels
TOKENS = (512, 1024, 2048, 4096, 8192)
LADDERS = {"4": {4: 1.0}, "mixed": {2: 0.25, 3: 0.25, 4: 0.25, 8: 0.25}}


def measure(shape: Shape, ladder: str) -> dict[str, Any]:
    """Microseconds of a call over full pages, once it is right."""
    layers = [draw_pages(shape, LADDERS[ladder]) for _ in range(LAYERS)]
    q = torch.randn(shape.batch, 1, shape.num_heads_q, shape.head_dim, device="cuda", dtype=torch.bfloat16)
    out, lse = torch.empty_like(q), torch.empty(shape.batch, shape.num_heads_q, 1, device="cuda")
    group = shape.num_heads_q // shape.num_heads_kv
    workspace = packed_cuda.make_workspace(q, shape.num_sequences, group, shape.head_dim)

    def call(pages: Any) -> None:
        packed_cuda.attend(q, pages, out, lse, workspace, scale=shape.head_dim**-0.5)

    call(layers[0])
    first = out.clone()
    error = max(relative_error(layers[0], q, first, pair) for pair in (0, shape.num_sequences - 1))
    apart = attended_apart(layers[0], q, packed_cuda).float() - first.float()
    call(layers[0])
    if error > LIMIT or apart.norm() > LIMIT * first.float().norm() or not torch.equal(first, out):
        raise RuntimeError(f"{shape}, {ladder}: error {error}, apart {apart.norm()}, or other bits each time")
    timing = time_graphs(captured({"layers": lambda: [call(pages) for pages in layers]}), 60)["layers"]
    names = {"num_heads": shape.num_heads_q, "num_heads_kv": shape.num_heads_kv, "head_dim": shape.head_dim}
    figures = {"p5_us": 1e6 * timing.percentile(5) / LAYERS, "us": 1e6 * timing.median / LAYERS}
    return (
        names | {"batch": shape.batch, "tokens": shape.tokens, "ladder": ladder} | figures | {"error": error}
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=pathlib.Path)
    options = parser.parse_args()
    rows = []
    for heads, batch, tokens, ladder in itertools.product(HEADS, (1, 3), TOKENS, LADDERS):
        rows.append(measure(Shape(batch, tokens, *heads), ladder))
        print(
            " ".join(
                f"{value:.3g}" if isinstance(value, float) else str(value) for value in rows[-1].values()
            )
        )
    options.out.write_text(json.dumps(provenance() | {"rows": rows}, indent=1))


if __name__ == "__main__":
    main()

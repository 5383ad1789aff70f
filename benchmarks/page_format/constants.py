"""Relative errors of constant, alternating, shifted and small vectors in the page format, without a kernel.

    python benchmarks/page_format/constants.py OUT.json [--head-dims 64,128,256]

Each pattern by head_dim and width, as the format has it and with fixed signs before the transform; then
Gaussian vectors of many scales.
"""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvlab.lab.benchmark import harness
from kvlab.reference.codec import hadamard_matrix
from kvlab.reference.pages import STEPS, encode, grid_values, rotate

Floats = NDArray[np.float64]
SCALES = (1e-8, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1.0, 1e4)


def error(x: Floats, bits: int, signs: Floats | float = 1.0) -> float:
    """Of vectors (n, head_dim) that are encoded and decoded."""
    codes, steps = encode(rotate((x * signs).astype(np.float32)), bits)
    rotated = grid_values(codes, STEPS[steps][:, None], bits).astype(np.float64)
    return float(np.linalg.norm(rotated @ hadamard_matrix(x.shape[1]) * signs - x) / np.linalg.norm(x))


def bent(head_dim: int) -> Floats:
    """Signs whose products with rows of the Hadamard matrix have transforms of one or two sizes."""
    bit = [np.arange(head_dim) >> i & 1 for i in range(8)]
    return 1.0 - 2.0 * (bit[0] & bit[1] ^ bit[2] & bit[3] ^ bit[4] & bit[5] ^ bit[6] & bit[7])


def patterns(head_dim: int, name: str, bits: int) -> dict[str, Any]:
    rng = np.random.default_rng(head_dim)
    rows, x = hadamard_matrix(head_dim) * np.sqrt(head_dim), rng.standard_normal((400, head_dim))
    signs = bent(head_dim) if name == "with signs" else 1.0
    return {
        "head_dim": head_dim,
        "signs": name,
        "bits": bits,
        "normal": error(x, bits, signs),
        "ones": error(np.ones((1, head_dim)), bits, signs),
        "rows_worst": max(error(row[None], bits, signs) for row in rows),
        "shifted": error(x + 2, bits, signs),
    }


def scales(bits: int) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    found = {scale: error(rng.standard_normal((400, 64)) * scale, bits) for scale in SCALES}
    return {"head_dim": 64, "bits": bits, "by_scale": found}


def cases(given: argparse.Namespace) -> list[harness.Case]:
    return [
        *(
            harness.Case(f"patterns, {d} channels, {name}, {bits} bits", partial(patterns, d, name, bits))
            for d in given.head_dims
            for name in ("now", "with signs")
            for bits in (8, 4, 3, 2)
        ),
        *(harness.Case(f"scales, {bits} bits", partial(scales, bits)) for bits in (8, 4, 2)),
    ]


def line(row: dict[str, Any]) -> str:
    figures = row.get("by_scale", row).items()
    return " ".join(f"{name} {x:.4f}" if isinstance(x, float) else f"{name} {x}" for name, x in figures)


def main() -> int:
    parser = harness.options(__doc__, "cpu")
    parser.add_argument("--head-dims", type=harness.numbers, default="64,128,256")
    return harness.run(parser, cases, line)


if __name__ == "__main__":
    raise SystemExit(main())

"""Relative errors of constant, alternating, shifted and small vectors in the page format, without a kernel.

    python benchmarks/page_format/constants.py

Each pattern by head_dim and width, as the format has it and with fixed signs before the transform; then
Gaussian vectors of many scales.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvlab.reference.codec import hadamard_matrix
from kvlab.reference.pages import STEP_SIZES, encode, grid_values, rotate

Floats = NDArray[np.float64]


def error(x: Floats, bits: int, signs: Floats | float = 1.0) -> float:
    """Of vectors (n, head_dim) that are encoded and decoded."""
    codes, steps = encode(rotate((x * signs).astype(np.float32)), bits)
    rotated = grid_values(codes, STEP_SIZES[steps][:, None], bits).astype(np.float64)
    return float(np.linalg.norm(rotated @ hadamard_matrix(x.shape[1]) * signs - x) / np.linalg.norm(x))


def bent(head_dim: int) -> Floats:
    """Signs whose products with rows of the Hadamard matrix have transforms of one or two sizes."""
    bit = [np.arange(head_dim) >> i & 1 for i in range(8)]
    return 1.0 - 2.0 * (bit[0] & bit[1] ^ bit[2] & bit[3] ^ bit[4] & bit[5] ^ bit[6] & bit[7])


def main() -> None:
    rng = np.random.default_rng(0)
    for head_dim in (64, 128, 256):
        rows, x = hadamard_matrix(head_dim) * np.sqrt(head_dim), rng.standard_normal((400, head_dim))
        for name, signs in (("now", 1.0), ("with signs", bent(head_dim))):
            for bits in (8, 4, 3, 2):
                worst = max(error(row[None], bits, signs) for row in rows)
                found = [error(x, bits, signs), error(np.ones((1, head_dim)), bits, signs), worst]
                found.append(error(x + 2, bits, signs))
                figures = " ".join(f"{figure:.4f}" for figure in found)
                print(f"head_dim {head_dim} {name} {bits} bits: normal, ones, rows, shifted {figures}")
    for bits in (8, 4, 2):
        scales = (1e-8, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1.0, 1e4)
        found = [error(rng.standard_normal((400, 64)) * scale, bits) for scale in scales]
        print(f"{bits} bits, scales {scales}:", " ".join(f"{figure:.4f}" for figure in found))


if __name__ == "__main__":
    main()

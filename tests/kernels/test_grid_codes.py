"""What packed_encode.cuh takes for granted: products with rounded reciprocals have the floors of quotients,
and the order of a sum of squares changes it by less than the margin of `best_step` in cache_write.cu.

A step has 4 significant bits, so 8 mantissas stand for all, and a product of two float32 numbers is exact in
float64. Quotients may only go wrong where they come near an integer, so all numbers next to the multiples of
a cell are tried, up to twice the largest code.
"""

from __future__ import annotations

import numpy as np
import pytest

from kvlab.reference.pages import STEPS, tree_sum

CELLS = 2 * STEPS[8 * 16 : 9 * 16]  # both exponents of 16 bytes: each mantissa twice


def reciprocals(cell: np.float32) -> tuple[np.float32, np.float32]:
    """1 / cell rounded up, and the number below it."""
    nearest = np.float32(1) / cell
    rest = np.float64(nearest) * np.float64(cell) - 1
    up = np.nextafter(nearest, np.float32(np.inf)) if rest < 0 else nearest
    return up, np.nextafter(up, np.float32(0))


def magnitudes(cell: np.float32) -> tuple[np.ndarray, np.ndarray]:
    """Float32 numbers next to multiples of the cell, and the floors of their quotients."""
    n = np.arange(1, 513)
    multiple = (n * np.float64(cell)).astype(np.float32)
    near = multiple.view(np.int32)[:, None] + np.arange(-4, 5, dtype=np.int32)
    floors = np.where(np.arange(-4, 5) < 0, n[:, None] - 1, n[:, None])
    return near.view(np.float32).astype(np.float64), floors


@pytest.mark.parametrize("cell", CELLS)
def test_floors(cell: np.float32) -> None:
    up, down = reciprocals(cell)
    size, floors = magnitudes(cell)
    assert np.array_equal(np.floor(size * np.float64(up)), floors)
    below = -floors - (size != floors * np.float64(cell))  # of the negative numbers
    assert np.array_equal(np.floor(-size * np.float64(down)), below)


def test_one_reciprocal_does_not_do() -> None:
    """Multiples of the cell fall short by the lower one, and below themselves, negative, by the upper one."""
    wrong = np.zeros(2, int)
    for cell in CELLS:
        size, floors = magnitudes(cell)
        up, down = reciprocals(cell)
        below = -floors - (size != floors * np.float64(cell))
        wrong += (
            (np.floor(size * np.float64(down)) != floors).any(),
            (np.floor(-size * np.float64(up)) != below).any(),
        )
    assert np.array_equal(wrong, (16, 14))  # 1 / cell is exact for the two powers of 2


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
def test_fused_sums_are_within_their_bound(head_dim: int) -> None:
    """Four lanes with two sums each, as in best_step, of distances as even and as uneven as they come."""
    rng = np.random.default_rng(head_dim)
    scale = np.exp2(rng.integers(-12, 1, (2000, head_dim)) * rng.integers(0, 2, (2000, 1)))
    distances = (rng.uniform(-0.5, 0.5, scale.shape) * scale).astype(np.float32)
    sums = np.zeros((2000, 8), np.float32)
    for eight in np.split(distances.astype(np.float64), head_dim // 8, axis=1):
        sums = (eight * eight + sums).astype(np.float32)
    lanes = sums[:, ::2] + sums[:, 1::2]
    pairs = lanes[:, :2] + lanes[:, 2:]
    rough, exact = pairs[:, 0] + pairs[:, 1], tree_sum(distances * distances)
    off = np.abs(rough.astype(np.float64) - exact) / exact
    assert 0 < off.max() <= 45 / 2**24
    assert 2 * 45 / 2**24 < 2.0**-17  # two errors are compared

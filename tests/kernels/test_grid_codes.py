"""What packed_encode.cuh and cache_encode.cuh take for granted.

Products with rounded reciprocals have the floors of quotients, errors of steps are as near to those of the
reference as `find_step` believes, and numbers that it scales stay normal.

A step has 4 significant bits, so 8 mantissas stand for all, and a product of two float32 numbers is exact in
float64. Quotients may only go wrong where they come near an integer, so all numbers next to the multiples of
a cell are tried, up to twice the largest code.
"""

from __future__ import annotations

import numpy as np
import pytest

from kvlab.reference.pages import STEPS, candidate_steps, grid_codes, grid_values, tree_sum

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


def scaled_errors(x: np.ndarray, step: np.ndarray, bits: int) -> np.ndarray:
    """The sums of find_step: four lanes with two each, every operation rounded once; `x` (n, head_dim)."""
    cell, last, size = 2 * step.astype(np.float64), 2 ** (bits - 1) - 1, np.abs(x).astype(np.float64)
    cells_left = np.maximum(last - np.floor(size / cell), 0)
    distance = (cells_left * cell + (size - (last + 0.5) * cell).astype(np.float32)).astype(np.float32)
    sums = np.zeros((len(x), 8), np.float32)
    for eight in np.split(distance.astype(np.float64), x.shape[1] // 8, axis=1):
        sums = (eight * eight + sums).astype(np.float32)
    lanes = sums[:, ::2] + sums[:, 1::2]
    pairs = lanes[:, :2] + lanes[:, 2:]
    return pairs[:, 0] + pairs[:, 1]


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
def test_scaled_errors_are_within_their_bound(head_dim: int, bits: int) -> None:
    """Half of find_step's margin for each of the two errors that it compares."""
    rng = np.random.default_rng(head_dim)
    kinds = [
        rng.standard_normal((300, head_dim)),
        rng.standard_t(2, (300, head_dim)),
        rng.choice([-1.0, 1.0], (300, head_dim)) * rng.choice([0.5, 1, 1.5, 2, 3], (300, head_dim)),
        rng.uniform(-1, 1, (300, head_dim)) ** 9,
    ]
    x = np.concatenate(kinds).astype(np.float32)
    off = []
    for byte in candidate_steps(x, bits).T:
        step = STEPS[byte][:, None]
        error = x - grid_values(grid_codes(x, step, bits), step, bits)
        exact, rough = tree_sum(error * error), scaled_errors(x, step, bits)
        judged = rough >= head_dim / 64 * (2 * step[:, 0]) ** 2  # the others are unsafe
        off.append((np.abs(rough.astype(np.float64) - exact) / exact)[judged])
    assert 0 < np.concatenate(off).max() <= (2.0**-13 if bits == 8 else 2.0**-16)
    assert sum(map(len, off[:2])) > 400


def test_scaled_steps_are_normal() -> None:
    step = STEPS[1:0xF8].astype(np.float64)
    least, most = 2.0**-126, np.finfo(np.float32).max
    up = np.array([reciprocals(cell)[0] for cell in 2 * STEPS[1:0xF8]]).astype(np.float64)
    for scaled in (up * 2.0**-109, up * 2.0**16, 2 * step * 2.0**109, 2 * step * 2.0**-40):
        assert (scaled >= least).all()
        assert (scaled <= most).all()

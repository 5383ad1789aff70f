"""Values that are constant, alternate or are shifted come back from codes as well as others."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from kvlab.reference.codec import hadamard_matrix
from kvlab.reference.pages import SCALES, encode, grid_values, rotate, rotate_values, value_signs

Floats = NDArray[np.float32]


def relative_error(v: Floats, bits: int, signs: bool = True) -> float:
    """The largest over vectors is of no interest: the root of mean squares over all of them."""
    codes, scale = encode(rotate_values(v) if signs else rotate(v), bits)
    turn = value_signs(v.shape[1]) if signs else 1
    back = grid_values(codes, SCALES[scale][:, None], bits) @ hadamard_matrix(v.shape[1]) * turn
    return float(np.sqrt(np.square(back - v).mean() / np.square(v).mean()))


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
def test_errors_are_those_of_normal_vectors(head_dim: int, bits: int) -> None:
    normal = np.random.default_rng(head_dim + bits).standard_normal((256, head_dim), np.float32)
    usual = relative_error(normal, bits)
    block = head_dim & -head_dim
    rows = np.tile(np.sign(hadamard_matrix(block)), head_dim // block).astype(np.float32)
    ones = np.ones((1, head_dim), np.float32)
    for vectors in (ones, -3 * ones, rows, 2 * ones + normal):
        assert relative_error(vectors, bits) <= 1.2 * usual
    if bits == 8:
        assert relative_error(ones, bits) < 0.01
    assert relative_error(ones, bits, signs=False) > 1.2 * usual or bits == 8

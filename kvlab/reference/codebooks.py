"""Lloyd-Max codebooks: the 2**b levels that represent a unit Gaussian with the least mean squared error.

A level is the mean of the values nearest to it, and the best border between two levels is their midpoint (S.
P. Lloyd, 1957, and J. Max, "Quantizing for minimum distortion", 1960, table I). Coordinates of a vector after
a Hadamard rotation are close to Gaussian, which is what makes one fixed table serve all vectors. Here the
levels are the solution of these equations, by Newton's method in float64; `kvlab.ops.codebooks` writes them
out.

Here a border is the whole number of units nearest to that midpoint. So the integer below a value in units
decides its code, and one look-up in a table of bytes finds it. How many units there are to 1 is chosen so
that borders come to stand next to the midpoints: 0, 0, 0.002, 0.037, 0.15, 0.14 and 0.16 percent are added to
the mean squared error of a unit Gaussian at 1, 2, 3, 4, 5, 6 and 8 bits.
"""

from __future__ import annotations

from functools import lru_cache
from math import erfc
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

__all__ = ["borders", "levels", "units"]

_UNITS = {1: 1, 2: 1.01875, 3: 20, 4: 50, 5: 106, 6: 223, 8: 1006}


@lru_cache(maxsize=8)
def _positive_levels(bits: int) -> NDArray[np.float32]:
    """Return the positive levels, ascending; the others are their negatives."""
    count = 2 ** (bits - 1)
    x = np.array([3**0.5 * NormalDist().inv_cdf((i + 0.5) / (2 * count)) for i in range(count, 2 * count)])
    for _ in range(8):
        ends = np.array([0, *(x[:-1] + x[1:]) / 2, np.inf])
        density = np.exp(-(ends**2) / 2) / np.sqrt(2 * np.pi)
        inside = -np.diff([erfc(end / 2**0.5) / 2 for end in ends])
        mean = -np.diff(density) / inside
        by_lower = density[:-1] * (mean - ends[:-1]) / inside
        by_upper = density[1:-1] * (ends[1:-1] - mean[:-1]) / inside[:-1]
        slope = np.diag(by_upper / 2, 1) + np.diag(by_lower[1:] / 2, -1)
        slope += np.diag([0, *by_lower[1:] / 2]) + np.diag([*by_upper / 2, 0])
        x = x - np.linalg.solve(np.eye(count) - slope, x - mean)
    return x.astype(np.float32)


def levels(bits: int) -> NDArray[np.float32]:
    """Return the 2**bits levels in ascending order; level c is what code c stands for.

    Examples
    --------
    >>> levels(2)
    array([-1.5104176 , -0.45278004,  0.45278004,  1.5104176 ], dtype=float32)
    """
    positive = _positive_levels(bits)
    return np.concatenate([-positive[::-1], positive])


def units(bits: int) -> np.float32:
    """Return how many units, in which `borders` counts, are as long as 1."""
    return np.float32(_UNITS[bits])


def borders(bits: int) -> NDArray[np.int32]:
    """Return the 2**bits - 1 borders between levels, in units, ascending; a value on a border lies above it.

    The positive ones are the float32 midpoints of the levels times `units`, rounded to nearest; zero is a
    border too, and the negative ones are the negatives of these.

    Examples
    --------
    >>> borders(2), borders(3)
    (array([-1,  0,  1], dtype=int32), array([-35, -21, -10,   0,  10,  21,  35], dtype=int32))
    """
    positive = _positive_levels(bits)
    middles = (positive[:-1] + positive[1:]) / np.float32(2)
    upper = np.rint(middles.astype(np.float64) * float(units(bits))).astype(np.int32)
    return np.concatenate([-upper[::-1], np.zeros(1, np.int32), upper])

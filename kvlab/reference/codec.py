"""Codecs in NumPy: the definition of the arithmetic that every backend repeats bit for bit.

Codes are stored and files outlive versions, so the codes are part of the contract: CPU, Numba CUDA and CUDA
C++ must give the same ones. Everything that decides a code is therefore float32, in the order written here,
with true division, round half to even and no fused multiply-add. Functions that only judge an error (the
tests) use float64 instead.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["hadamard", "hadamard_block"]


def hadamard_block(n: int) -> int:
    """Return the largest power of two that divides `n`: the block of a Hadamard rotation of length `n`.

    Examples
    --------
    >>> [hadamard_block(n) for n in (64, 80, 96, 128)]
    [64, 16, 32, 128]
    """
    if n < 1:
        raise ValueError(f"n must be a positive length, got {n}")
    return n & -n


def hadamard(x: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return the orthonormal (block) Hadamard transform of `x` along its last axis.

    Blocks of ``hadamard_block(n)`` elements are transformed on their own. The butterflies run with
    h = 1, 2, 4, ...; each replaces the pair (a, b) at distance h by (a + b, a - b); at the end every element
    is multiplied by float32(1 / sqrt(block)). Applied twice it gives `x` back, up to rounding.

    Parameters
    ----------
    x : float32, shape (..., n)

    Returns
    -------
    float32, shape (..., n)

    Examples
    --------
    >>> hadamard(np.array([1, 2, 3, 4], np.float32))
    array([ 5., -1., -2.,  0.], dtype=float32)
    """
    n = x.shape[-1]
    block = hadamard_block(n)
    y = np.array(x, np.float32, order="C")
    h = 1
    while h < block:
        pairs = y.reshape(*x.shape[:-1], n // (2 * h), 2, h)
        a, b = pairs[..., 0, :], pairs[..., 1, :]
        pairs[..., 0, :], pairs[..., 1, :] = a + b, a - b
        h *= 2
    y *= np.float32(1 / np.sqrt(block))
    return y

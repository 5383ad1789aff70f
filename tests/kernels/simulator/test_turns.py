"""The simulated blocks themselves: what barriers order, and what they refuse."""

from __future__ import annotations

import numpy as np
import pytest
from numba import cuda
from numpy.typing import NDArray

THREADS = 70  # two warps and a part of one


@cuda.jit
def turn_around(x: NDArray[np.int64], warps: bool) -> None:
    """Every thread takes what another one of its block, or of its warp, has written before the barrier."""
    i = cuda.threadIdx.x
    if i >= 68:
        return  # barriers do not wait for threads that have ended
    shared = cuda.shared.array(THREADS, np.int64)
    shared[i] = i
    if warps:
        cuda.syncwarp()
        x[i] = shared[i ^ 3]
    else:
        cuda.syncthreads()
        x[i] = shared[67 - i]


@pytest.mark.parametrize("warps", [False, True])
def test_a_barrier_shows_what_others_wrote(warps: bool) -> None:
    x = np.full(THREADS, -1, np.int64)
    turn_around[1, THREADS](x, warps)
    i = np.arange(68)
    assert (x[:68] == (i ^ 3 if warps else 67 - i)).all()
    assert (x[68:] == -1).all()


def test_one_thread_runs_at_a_time_in_an_order_that_stays() -> None:
    @cuda.jit
    def kernel(wrote: NDArray[np.int64], seen: NDArray[np.int64]) -> None:
        i = cuda.threadIdx.x
        wrote[i] = 1
        seen[i] = wrote.sum()

    seen = np.zeros((2, THREADS), np.int64)
    for row in seen:
        kernel[1, THREADS](np.zeros(THREADS, np.int64), row)
    assert sorted(seen[0]) == list(range(1, THREADS + 1)) != list(seen[0])
    assert (seen[0] == seen[1]).all()


def test_a_barrier_that_a_thread_never_reaches_is_an_error() -> None:
    @cuda.jit
    def kernel(x: NDArray[np.int64]) -> None:
        if cuda.threadIdx.x == 3:
            cuda.syncthreads()  # the others of its warp wait elsewhere
        else:
            cuda.syncwarp()

    with pytest.raises(RuntimeError, match="never reach"):
        kernel[1, THREADS](np.zeros(1, np.int64))


def test_what_a_thread_raises_reaches_the_caller() -> None:
    @cuda.jit
    def kernel(x: NDArray[np.int64]) -> None:
        cuda.syncthreads()
        if cuda.threadIdx.x == 5:
            raise ValueError("in thread 5")
        cuda.syncthreads()

    with pytest.raises(ValueError, match="in thread 5"):
        kernel[2, THREADS](np.zeros(1, np.int64))

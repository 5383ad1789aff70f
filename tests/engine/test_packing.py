"""The layout of weights: invertible, and what one warp's mma computes from it is the product."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvlab.engine import packing

DTYPES = (np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16))


def a_operand(fragment: NDArray[Any]) -> NDArray[Any]:
    """16 x 16 matrix of the A operand of mma.m16n8k16, from the registers of 32 lanes (PTX ISA, 9.7.14)."""
    matrix = np.empty((16, 16), fragment.dtype)
    for lane in range(32):
        g, t = divmod(lane, 4)
        for i in range(8):
            matrix[g + 8 * (i // 2 % 2), 2 * t + i % 2 + 8 * (i // 4)] = fragment[lane, i]
    return matrix


def b_operand(columns: NDArray[Any]) -> NDArray[Any]:
    """16 x 8 matrix of the B operand, from 4 values of each lane's row of x."""
    matrix = np.empty((16, 8), columns.dtype)
    for lane in range(32):
        g, t = divmod(lane, 4)
        for i in range(4):
            matrix[2 * t + i % 2 + 8 * (i // 2), g] = columns[lane, i]
    return matrix


@given(st.integers(1, 70), st.integers(1, 5), st.sampled_from(DTYPES), st.integers(0, 2**32 - 1))
def test_unpack_gives_the_weight_back(rows: int, blocks: int, dtype: np.dtype[Any], seed: int) -> None:
    """Bit for bit, NaN and infinities, too."""
    bits = np.random.default_rng(seed).integers(0, 2**16, (rows, 32 * blocks), np.uint16)
    packed = packing.pack(bits.view(dtype))
    assert packed.dtype == dtype
    assert packed.flags.c_contiguous
    assert np.array_equal(packing.unpack(packed, rows).view(np.uint16), bits)
    assert packed.size == -(-rows // 16) * 512 * blocks
    assert np.count_nonzero(packed.view(np.uint16)) == np.count_nonzero(bits)


def test_the_fragments_multiply_as_the_matrix_does() -> None:
    rng = np.random.default_rng(1)
    weight, x = (
        rng.integers(-8, 8, (48, 96)).astype(np.float16),
        rng.integers(-8, 8, (8, 96)).astype(np.float16),
    )
    packed, y = packing.pack(weight), np.zeros((48, 8))
    for tile, blocks in enumerate(packed):
        for block, fragments in enumerate(blocks):
            lanes = np.arange(32)
            columns = x[lanes // 4][:, 32 * block :].reshape(32, -1)
            held = np.stack([columns[lane, 8 * (lane % 4) :][:8] for lane in lanes])
            for h in range(2):
                product = a_operand(fragments[h]).astype(float) @ b_operand(held[:, 4 * h : 4 * h + 4])
                y[16 * tile : 16 * tile + 16] += product
    assert np.array_equal(y, weight.astype(float) @ x.T.astype(float))


@given(st.integers(1, 40), st.integers(0, 40))
def test_channels_that_rotate_together_are_neighbours(half_dim: int, half_rotary: int) -> None:
    half_rotary = min(half_rotary, half_dim)
    order = packing.rotary_pairs(2 * half_dim, 2 * half_rotary)
    assert sorted(order) == list(range(2 * half_dim))
    pairs = order.reshape(-1, 2)
    assert np.array_equal(pairs[:half_rotary, 1] - pairs[:half_rotary, 0], np.full(half_rotary, half_rotary))
    assert np.array_equal(order[2 * half_rotary :], np.arange(2 * half_rotary, 2 * half_dim))


@given(st.integers(1, 6), st.integers(1, 6), st.integers(1, 12), st.booleans())
def test_rows_of_queries_keys_and_values(groups: int, kv: int, half_dim: int, interleaved: bool) -> None:
    heads_q, dim = (kv if interleaved else groups * kv), 2 * half_dim
    order = packing.qkv_rows(heads_q, kv, dim, 2 * (half_dim // 2), interleaved=interleaved)
    pairs = packing.rotary_pairs(dim, 2 * (half_dim // 2))
    # Label every row of the weight by what it is, in the two ways of writing them down.
    labels = [
        (part, head, c)
        for part, n in (("q", heads_q), ("k", kv), ("v", kv))
        for head in range(n)
        for c in range(dim)
    ]
    if interleaved:
        labels = [(part, head, c) for head in range(kv) for part in "qkv" for c in range(dim)]
    found = [labels[row] for row in order]
    expected = [
        (part, head, c)
        for part, n in (("q", heads_q), ("k", kv), ("v", kv))
        for head in range(n)
        for c in (range(dim) if part == "v" else pairs.tolist())
    ]
    assert found == expected


def test_gate_and_up_rows_alternate() -> None:
    order = packing.gated_rows(5)
    assert np.array_equal(order[::2], np.arange(5))
    assert np.array_equal(order[1::2], np.arange(5, 10))


def test_what_cannot_be_packed_is_refused() -> None:
    with pytest.raises(ValueError, match=r"columns = 32, 64"):
        packing.pack(np.zeros((16, 40), np.float16))
    with pytest.raises(ValueError, match=r"\(rows, columns\)"):
        packing.pack(np.zeros(32, np.float16))
    with pytest.raises(TypeError, match="float16 or bfloat16"):
        packing.pack(np.zeros((16, 32), np.float32))
    with pytest.raises(ValueError, match="40 rows are packed as"):
        packing.unpack(packing.pack(np.zeros((32, 32), np.float16)), 40)
    with pytest.raises(ValueError, match="must be even"):
        packing.rotary_pairs(80, 19)
    with pytest.raises(ValueError, match="equal numbers"):
        packing.qkv_rows(8, 2, 64, 64, interleaved=True)

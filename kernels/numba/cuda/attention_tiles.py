"""What attention forward and backward in Numba CUDA have in common: rows, masks, tiles in shared memory.

A *row* of a (sequence, KV head) is one query of one head of the group: row = position * group + head. Tiles
hold TILE rows or keys as float32, a column longer than they are wide so that rows begin in different banks,
channels filled up with zeros. LANES threads share a row or key of a tile: thread LANES * r + x has row r.
"""

import math

import numpy as np
from numba import cuda, types

from .words import load_element

float32, int64 = np.float32, np.int64

LANES = 8
PIECE = 16
LOWEST = float32(-1e30)

STRIDES = types.UniTuple(types.int64, 3)  # of batch, position and head, in elements
POINTER_F32, POINTER_I32 = types.CPointer(types.float32), types.CPointer(types.int32)
SHAPE = (types.int64,) * 4  # longest rows and keys, query heads to a KV head, channels
SCORING = (types.int64, types.int64, types.float32, types.float32)  # window left and right, scale, softcap

device = cuda.jit(device=True)


@device
def sequence_of(bounds, ragged, longest):
    """Return (row of the batch, first position, length) of the sequence that the block works on."""
    z = int64(cuda.blockIdx.z)
    if ragged:
        return int64(0), int64(bounds[z]), int64(bounds[z + 1]) - int64(bounds[z])
    return z, int64(0), longest


@device
def sees(row, key, group, behind, keys, left, right):
    """Whether a row sees a key; `behind`, keys minus positions: the last row stands at the last key."""
    position = row // group + behind
    return position - left <= key and key <= position + right and key < keys


@device
def keys_of(row0, tile, rows, group, behind, keys, left, right):
    """Return (first, last): the keys first (where a tile begins) to last - 1 that a tile of rows sees."""
    first = max(row0 // group + behind - left, int64(0)) // tile * tile
    return first, min((min(row0 + tile, rows) - 1) // group + behind + right + 1, keys)


@device
def rows_of(key0, tile, rows, group, behind, keys, left, right):
    """Return (first, last): the rows first (where a tile begins) to last - 1 that see a tile of keys."""
    first = max(key0 - right - behind, int64(0)) * group // tile * tile
    return first, min((min(key0 + tile, keys) - 1 + left - behind + 1) * group, rows)


@device
def offset(strides, batch, position, head):
    """Return where a row of channels begins, in elements."""
    return batch * strides[0] + position * strides[1] + head * strides[2]


@device
def score_of(product, scale, softcap):
    score = product * scale
    if softcap > float32(0):
        score = softcap * math.tanh(score / softcap)
    return score


def make_copy(dtype, head_dim, tile):
    """Make the device function that copies rows [first, first + tile) to a tile; keys are rows of group 1."""
    load = load_element(dtype)

    @device
    def copy(to, x, strides, batch, start, head, group, first, rows, dim):
        base = offset(strides, batch, start, head)
        for i in range(cuda.threadIdx.x, tile * head_dim, LANES * tile):
            r, channel = i // head_dim, i % head_dim
            row = first + r
            value = float32(0)
            if row < rows and channel < dim:
                at = base + row // group * strides[1] + row % group * strides[2]
                value = load(x, at + channel)
            to[r, channel] = value

    return copy


def make_dot(head_dim):
    """Make the device function that multiplies two rows of tiles; sums of sums round less."""

    @device
    def dot(a, i, b, j):
        total = float32(0)
        for start in range(0, head_dim, PIECE):
            part = float32(0)
            for channel in range(start, start + PIECE):
                part += a[i, channel] * b[j, channel]
            total += part
        return total

    return dot

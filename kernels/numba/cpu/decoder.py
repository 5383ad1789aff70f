"""Products of packed weights with tokens: y = W x, W in the order of kvlab/engine/packing.py.

The unit is a block of 16 rows by 32 columns, 512 elements: for each half h of four columns, row g and quarter
t, eight elements with x[c], x[c + 1] for row g, the same for row g + 8, and both again for c + 2 and c + 3,
where c = 8 t + 4 h. So eight elements of W meet one vector of x that holds its four columns in that order,
and a row's sum lies in four of the eight lanes.

A thread takes tiles of 16 rows, widens a block once and multiplies it with all tokens, whose sums stay in
the cache: 8 vectors a token. A token's sums run over columns in one order, whatever the other tokens are, so
its bits do not depend on them.
"""

import math

import numpy as np

from .elements import FLOAT16
from .simd import LANES, helper, load, load_bfloat, load_half, multiply_add, splat, store
from .softmax import all_done, serial, take_number

MAX_TOKENS = 64
"""Tokens of a call: their sums take 16 KiB."""

_BLOCK, _TILES_AT_ONCE = 512, 4
_ZERO = np.float32(0)


@helper
def _widen(packed, first, dtype, block):
    if dtype == FLOAT16:
        for i in range(0, _BLOCK, LANES):
            store(block, i, load_half(packed, first + i))
    else:
        for i in range(0, _BLOCK, LANES):
            store(block, i, load_bfloat(packed, first + i))


@helper
def _add_block(block, x, column, sums, at):
    """Add the products of a block with one token: x from `column` on, sums from `at` on."""
    s0, s1, s2, s3 = load(sums, at), load(sums, at + 8), load(sums, at + 16), load(sums, at + 24)
    s4, s5, s6, s7 = load(sums, at + 32), load(sums, at + 40), load(sums, at + 48), load(sums, at + 56)
    for h in range(2):
        for t in range(4):
            first = 256 * h + 8 * t
            v = load(x, column + 16 * t + 8 * h)
            s0 = multiply_add(load(block, first), v, s0)
            s1 = multiply_add(load(block, first + 32), v, s1)
            s2 = multiply_add(load(block, first + 64), v, s2)
            s3 = multiply_add(load(block, first + 96), v, s3)
            s4 = multiply_add(load(block, first + 128), v, s4)
            s5 = multiply_add(load(block, first + 160), v, s5)
            s6 = multiply_add(load(block, first + 192), v, s6)
            s7 = multiply_add(load(block, first + 224), v, s7)
    store(sums, at, s0)
    store(sums, at + 8, s1)
    store(sums, at + 16, s2)
    store(sums, at + 24, s3)
    store(sums, at + 32, s4)
    store(sums, at + 40, s5)
    store(sums, at + 48, s6)
    store(sums, at + 56, s7)


@serial
def multiply(counter, packed, tiles, blocks, dtype, x, tokens, y):
    """Multiply all rows with up to `MAX_TOKENS` tokens: what one thread does, until no tiles are left.

    counter int64 (2,), 0 at first; packed uint16 (tiles * blocks * 512,), the bits of float16 or bfloat16;
    x float32 (tokens * blocks * 64,), each four columns as the eight elements above; y float32
    (tokens, tiles * 16). Returns whether all tiles are done.
    """
    block = np.empty(_BLOCK, np.float32)
    sums = np.empty(tokens * 64, np.float32)
    first, own = take_number(counter) * _TILES_AT_ONCE, 0
    while first < tiles:
        for tile in range(first, min(tiles, first + _TILES_AT_ONCE)):
            for i in range(0, tokens * 64, LANES):
                store(sums, i, splat(_ZERO))
            for b in range(blocks):
                _widen(packed, (tile * blocks + b) * _BLOCK, dtype, block)
                for n in range(tokens):
                    _add_block(block, x, (n * blocks + b) * 64, sums, n * 64)
            for n in range(tokens):
                for g in range(8):
                    s = n * 64 + 8 * g
                    y[n, tile * 16 + g] = (sums[s] + sums[s + 1]) + (sums[s + 4] + sums[s + 5])
                    y[n, tile * 16 + g + 8] = (sums[s + 2] + sums[s + 3]) + (sums[s + 6] + sums[s + 7])
        first, own = take_number(counter) * _TILES_AT_ONCE, own + min(tiles - first, _TILES_AT_ONCE)
    return all_done(counter, own, tiles)


@serial
def gelu(x):
    """Replace x, float32 (n,), by x times the normal distribution at x; erfc loses no digits far below 0."""
    for i in range(len(x)):
        wide = np.float64(x[i])
        x[i] = 0.5 * wide * math.erfc(-0.7071067811865476 * wide)

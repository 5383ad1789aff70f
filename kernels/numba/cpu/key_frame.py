"""Bring a query into the frame of a head's keys, so that it multiplies codes directly.

A coded key is H ((k / 2^exponent - mean) / powers), in blocks or not, so <q, k> = <H (q powers), coded key> +
<q, mean>, where powers, mean and H have the factors below in them. All of them are powers of two, but the
gains of blocks.
"""

import math

import numpy as np

from .simd import helper


@helper
def power_of_two(exponent):
    """Return 2^exponent as float32."""
    return np.float32(math.ldexp(1.0, exponent))


@helper
def exponent_of(exponent, bh, side):
    """Return by which power of two keys (side 0) or values (1) are divided."""
    return np.int64(exponent[bh, side])


@helper
def read_frame(keys, bh, block, mean, powers, order, factors):
    """Read the frame of a head; mean, powers, order and factors are (head_dim,).

    keys: mean (num_bh, head_dim) float32, shift (num_bh, head_dim / 2), exponent (num_bh, 2), order (num_bh,
    head_dim / 2) and gain (num_bh, 4), or (num_bh, 0) if keys are not in blocks.
    order[n] names the n-th channel of a coded key, factors[n] is what H is multiplied by there; block:
    channels that H rotates together. factors may be float64.
    """
    all_means, all_shifts, exponents, all_orders, all_gains = keys
    head_dim = mean.size
    half, each = head_dim // 2, head_dim // 4
    exponent = power_of_two(exponent_of(exponents, bh, 0))
    for pair in range(half):
        powers[pair] = powers[half + pair] = power_of_two(np.int64(all_shifts[bh, pair]))
    for channel in range(head_dim):
        mean[channel] = all_means[bh, channel] * exponent
    if all_gains.shape[1]:
        log = 0
        while 1 << log < block:
            log += 1
        rotation = power_of_two((log + 1) // 2 - log)
        for n in range(head_dim):
            part, i = n // each, n % each
            pair = np.int64(all_orders[bh, part * (each // 2) + i % (each // 2)])
            order[n] = pair if i < each // 2 else pair + half
            factors[n] = np.float64(rotation) / all_gains[bh, part] * exponent
    else:
        factor = 1 / math.sqrt(block) * exponent
        for n in range(head_dim):
            order[n], factors[n] = n, factor

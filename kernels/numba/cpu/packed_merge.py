"""Merge partial results of packed attention on the CPU, and turn saved scores into attention mass."""

import math

import numpy as np

from .doubles import add_scaled, hadamard64
from .fragments import QUAD
from .key_frame import exponent_of, power_of_two
from .packed_large import power, whole_of
from .page import PAGE, SLOTS
from .scales import SIGNS
from .simd import helper, load, splat, store
from .softmax import LOG2_E, exp2, serial, take_number

_MINUS_INFINITY = np.float32(-np.inf)


@serial
def merge_parts(parts, row_max, row_sum, block, exponent, out, lse, rest):
    """Merge the parts of each row, in order; rotate back the sums of coded values.

    parts, row_max, row_sum from `attend_pages`; block: channels of a rotation; exponent (num_bh, 2); out
    (batch, positions, heads, head_dim), lse (batch, heads, positions), natural: 0 and -inf where there is no
    token. rest, as lse: what lse lost when it was rounded.
    """
    batch, positions, heads, head_dim = out.shape
    _, num_bh, _, splits, rows, _ = parts.shape
    kv_heads = num_bh // batch
    group = heads // kv_heads
    line, signs = np.empty((2, head_dim), np.float64)
    signs[:] = SIGNS[:head_dim]
    for bh in range(num_bh):
        factor = 1 / math.sqrt(block) * power_of_two(exponent_of(exponent, bh, 1))
        for i in range(positions * group):
            own, row, head = i // rows, i % rows, bh % kv_heads * group + i % group
            new_max, whole = whole_of(row_max[bh], row_sum[bh], own, row)
            for channel in range(head_dim):
                line[channel] = 0
            for side in range(2):
                for part in range(splits):
                    if row_sum[bh, own, part, row] != 0:
                        weight = power(np.float64(row_max[bh, own, part, row] - new_max)) / whole
                        add_scaled(line, weight, parts[side, bh, own, part, row])
                if side == 0:
                    hadamard64(line, block)
                    for channel in range(head_dim):
                        line[channel] *= factor * signs[channel]
            own_out = out[bh // kv_heads, i // group, head]
            for channel in range(head_dim):
                own_out[channel] = line[channel]
            log = (new_max + math.log2(whole)) / np.float64(LOG2_E) if whole != 0 else _MINUS_INFINITY
            rounded = np.float32(log)
            lse[bh // kv_heads, head, i // group] = rounded
            rest[bh // kv_heads, head, i // group] = log - rounded if whole != 0 else 0.0


@serial
def sum_mass(counter, scores, lse, count, num_pages, group, mass):
    """mass[bh, quad, slot] = mean over the saved rows of exp(score - lse); 0 in unused slots.

    What one thread does: quads, by the counter. scores (num_bh, quads, rows * group, 64); lse (batch, heads,
    rows); count (num_bh, quads, 4); mass (num_bh, quads, 64).
    """
    num_bh, quads, _ = count.shape
    kv_heads = lse.shape[1] // group
    item = take_number(counter)
    while item < num_bh * quads:
        bh, quad = item // quads, item % quads
        live, head = QUAD * quad < num_pages[bh], bh % kv_heads * group
        _sum_quad(scores[bh, quad], lse[bh // kv_heads], head, group, live, count[bh, quad], mass[bh, quad])
        item = take_number(counter)


@helper
def _sum_quad(scores, lse, head, group, live, count, mass):
    rows = scores.shape[0]
    for slot in range(SLOTS):
        mass[slot] = 0
    for row in range(rows if live else 0):
        whole = lse[head + row % group, row // group]
        if not np.isinf(whole):  # +inf: a row that is left out, whose scores may be NaN
            for slot in range(0, SLOTS, 8):
                p = exp2((load(scores[row], slot) - splat(whole)) * splat(LOG2_E))
                store(mass, slot, load(mass, slot) + p)
    for slot in range(SLOTS):
        used = slot % PAGE < count[slot // PAGE]
        mass[slot] = mass[slot] / np.float32(rows) if used else np.float32(0)

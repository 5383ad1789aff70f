"""Merge partial results of packed attention on the CPU, and turn saved scores into attention mass."""

import math

import numpy as np

from .fragments import QUAD
from .groups import hadamard_run
from .key_frame import exponent_of, power_of_two
from .page import PAGE, SLOTS
from .simd import helper, load, splat, store
from .softmax import LOG2_E, exp2, serial, take_number
from .steps import SIGNS

_MINUS_INFINITY = np.float32(-np.inf)


@serial
def merge_parts(parts, row_max, row_sum, block, exponent, out, lse):
    """Merge the parts of each row, in order; rotate back the sums of coded values.

    parts, row_max, row_sum from `attend_pages`; block: channels of a rotation; exponent (num_bh, 2); out
    (batch, positions, heads, head_dim), lse (batch, heads, positions), natural: 0 and -inf where there is no
    token.
    """
    batch, positions, heads, head_dim = out.shape
    _, num_bh, _, splits, rows, _ = parts.shape
    kv_heads = num_bh // batch
    group = heads // kv_heads
    for bh in range(num_bh):
        factor = np.float32(1 / math.sqrt(block)) * power_of_two(exponent_of(exponent, bh, 1))
        for i in range(positions * group):
            own, row, head = i // rows, i % rows, bh % kv_heads * group + i % group
            line = out[bh // kv_heads, i // group, head]
            new_max = _MINUS_INFINITY
            for part in range(splits):
                new_max = max(new_max, row_max[bh, own, part, row])
            whole = np.float32(0)
            for part in range(splits):
                if row_sum[bh, own, part, row] != 0:
                    whole += row_sum[bh, own, part, row] * np.float32(2) ** (
                        row_max[bh, own, part, row] - new_max
                    )
            for channel in range(head_dim):
                line[channel] = 0
            for side in range(2):
                for part in range(splits):
                    if row_sum[bh, own, part, row] != 0:
                        weight = np.float32(2) ** (row_max[bh, own, part, row] - new_max) / whole
                        values = parts[side, bh, own, part, row]
                        for channel in range(head_dim):
                            line[channel] += weight * values[channel]
                if side == 0:
                    hadamard_run(line, 0, head_dim, block)
                    for channel in range(head_dim):
                        line[channel] *= factor * SIGNS[channel]
            log = (new_max + math.log2(whole)) / np.float64(LOG2_E) if whole != 0 else _MINUS_INFINITY
            lse[bh // kv_heads, head, i // group] = log


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

"""Work division of attention backward on Hopper: how many blocks share keys.

A block has 128 keys of one KV head (above 128 channels, a pair of blocks has them). It loops over the query
heads of the group and over all rows that see the keys, one tile of rows a step. A short call with
few KV heads has fewer such blocks than a GPU has multiprocessors. So up to eight blocks, a cluster, share the
steps of the same keys and add up their dk and dv through shared memory, in the order of their ranks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

__all__ = ["CLUSTER", "divide", "num_sections", "steps_of"]

CLUSTER = 8
"""Blocks of the largest cluster that every GPU with clusters takes."""

# Measured, in steps: what a block takes beside them, and what sharing adds to it.
_START, _REDUCE = 2.7, 0.9
# Measured on an H200: clusters of each size that run at once. Its multiprocessors lie in parts of the device
# that have no multiple of 4 or 8. Other devices are taken to hold as many in proportion.
_RESIDENT, _MEASURED_ON = {1: 132, 2: 66, 4: 30, 8: 14}, 132
_GAIN = 0.95  # of the time before, at most, for more blocks than needed

# In a section of a list, at least: pairs by head dimension, tiles to each block. Measured to be best on an
# H100 and an H200.
_BH_OF_SECTION = {64: 8, 96: 4, 128: 2, 256: 2}
_TILES_OF_BLOCK, _TILES_OF_BLOCK_IN_ORDER = 0.9, 1.9

# Of a deterministic call: rows of a run (LONGEST_RUN in kernels/cuda/attention/backward_steps_sm90.cuh), what
# runs of a section may take of L2, and blocks on a pair at least. Measured on an H100.
_ROWS_OF_RUN = {64: 256, 96: 512, 128: 512, 256: 512}
_RUN_BYTES, _BLOCKS_OF_PAIR = 16 << 20, 8


def num_sections(
    num_bh: int, tiles: int, group: int, head_dim: int, blocks: int, causal: bool, deterministic: bool
) -> int:
    """Return into how many sections the list of a call on Hopper is divided, no blocks of which share keys.

    While blocks work on few (sequence, KV head) pairs, Q, dout and dq of these stay in L2. On too few pairs,
    blocks that add to the same rows of dq slow each other down. Without a causal mask and in any order, all
    blocks walk the same rows together, which stay in L2 anyway. So do those of a pair in a deterministic
    call, where a block waits for all before it on the pair: there are as many pairs as runs of rows fit.

    Parameters
    ----------
    num_bh : int
    tiles : int
        Of a pair.
    group : int
        Query heads of a pair.
    head_dim : int
        Channels of the kernel.
    blocks : int
        That work at once, each on a tile of its own: above 128 channels pairs of blocks.
    causal : bool
        Whether rows see no key behind some place of their own.
    deterministic : bool

    Examples
    --------
    8 sequences of 2,048 tokens and 8 KV heads; one of them:

    >>> num_sections(64, 16, 4, 128, 132, True, False), num_sections(8, 16, 4, 128, 132, True, False)
    (8, 1)

    2 sequences of 8,192 tokens, 8 KV heads of 8 query heads each, in any order and deterministic:

    >>> [num_sections(16, 64, 8, 128, 132, True, deterministic) for deterministic in (False, True)]
    [8, 4]
    """
    if not causal and not deterministic:
        return 1
    of_block = _TILES_OF_BLOCK_IN_ORDER if deterministic else _TILES_OF_BLOCK
    min_bh = math.ceil(of_block * blocks / max(1, tiles))
    max_sections = max(1, num_bh // max(_BH_OF_SECTION[head_dim], min_bh))
    if not deterministic:
        return max_sections
    bytes_of_run = 8 * group * _ROWS_OF_RUN[head_dim] * head_dim  # Q, dout, and dq in float32
    fit = min(_RUN_BYTES // bytes_of_run, blocks // _BLOCKS_OF_PAIR)
    return min(max_sections, math.ceil(num_bh / max(1, fit)))


def steps_of(
    rows: int, keys: int, left: int, right: int, group: int, block_m: int, block_n: int
) -> list[int]:
    """Return how many steps the blocks of a sequence have, in the order of keys.

    Examples
    --------
    Causal, 300 tokens, 2 query heads to a KV head:

    >>> steps_of(300, 300, 1 << 30, 0, 2, 64, 128)
    [10, 6, 2]
    """
    behind, num_steps = keys - rows, []
    for key in range(0, keys, block_n):
        first = max(0, key - behind - right) // block_m * block_m
        last = min(rows, key + block_n - behind + left)
        num_steps.append(max(0, -(-(last - first) // block_m)) * group)
    return num_steps


def divide(
    num_steps: Sequence[int], heads: int, sequences: int, multiprocessors: int, blocks: int, largest: int
) -> int:
    """Choose how many blocks share keys.

    Parameters
    ----------
    num_steps : sequence of int
        From `steps_of`, for each KV head of each sequence.
    heads, sequences, multiprocessors : int
    blocks : int
        That work on the same keys if these are not shared: 1, or 2 of a pair.
    largest : int
        Most blocks of a cluster: `CLUSTER`, or 1 where there are none.

    Examples
    --------
    2,048 tokens, causal, 8 query heads on 2 of 128 channels, and 16 such sequences:

    >>> num_steps = steps_of(2048, 2048, 1 << 30, 0, 4, 64, 128)
    >>> divide(num_steps, 2, 1, 132, 1, CLUSTER), divide(num_steps, 2, 16, 132, 1, CLUSTER)
    (8, 1)
    """
    falling, copies = sorted(num_steps, reverse=True), heads * sequences
    resident = max(1, _RESIDENT[blocks] * multiprocessors // _MEASURED_ON)
    best, best_time = 1, _time(falling, copies, 1, resident)
    for cluster, measured in _RESIDENT.items():
        held = measured * multiprocessors // _MEASURED_ON
        if blocks < cluster <= largest and held:
            time = _time(falling, copies, cluster // blocks, held)
            if time < _GAIN * best_time:
                best, best_time = cluster // blocks, time
    return best


def _time(num_steps: Sequence[int], copies: int, cluster_split: int, resident: int) -> float:
    """Least time, in steps, of clusters in falling order, `copies` of each, `resident` at a time.

    Of any k resident + 1 clusters one place has k + 1, each of them as long as the last of these clusters.
    """
    times = [_START + (_REDUCE if cluster_split > 1 else 0.0) + -(-own // cluster_split) for own in num_steps]
    each = max(
        ((k + 1) * times[k * resident // copies] for k in range(-(-len(times) * copies // resident))),
        default=0.0,
    )
    return max(each, sum(times) * copies / resident)

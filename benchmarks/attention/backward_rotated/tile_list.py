"""List of tiles of attention backward, from lengths alone (experiment)."""

import numpy as np

FAR = 1 << 30
BLOCK_N, ALIGNED_ROWS = 128, 128


def tile_list(
    q_lengths, k_lengths, heads_kv, group, head_dim, left, right, variable, block_m, section_bytes, ordered
):
    q_lengths, k_lengths = np.asarray(q_lengths, np.int64), np.asarray(k_lengths, np.int64)
    q_starts = np.concatenate([[0], np.cumsum(q_lengths)])[:-1] * variable
    k_starts = np.concatenate([[0], np.cumsum(k_lengths)])[:-1] * variable
    blocks = -(-k_lengths // BLOCK_N)
    per = blocks * heads_kv
    seq = np.repeat(np.arange(len(per)), per)
    at = np.arange(per.sum()) - np.repeat(np.cumsum(per) - per, per)
    block, head = at % np.maximum(blocks[seq], 1), at // np.maximum(blocks[seq], 1)
    key, lq, lk = block * BLOCK_N, q_lengths[seq], k_lengths[seq]
    diagonal = lk - lq
    first = np.maximum(0, key - diagonal - right) // block_m * block_m
    last = np.minimum(lq, np.minimum(key + BLOCK_N, lk) - 1 - diagonal + left + 1)
    tiles = np.maximum(0, -(-(last - first) // block_m))
    aligned = -(-q_lengths // ALIGNED_ROWS) * ALIGNED_ROWS
    stored = (
        (q_starts // ALIGNED_ROWS + np.arange(len(per))) * ALIGNED_ROWS
        if variable
        else np.arange(len(per)) * aligned
    )
    t = np.zeros((len(seq), 12), np.int32)
    for i, x in enumerate(
        (seq, head, key, q_starts[seq], lq, k_starts[seq], lk, stored[seq], first, tiles, diagonal)
    ):
        t[:, i] = x
    rank = np.argsort(np.argsort(-q_lengths, kind="stable"), kind="stable")
    pair = rank[seq] * heads_kv + head
    sizes = np.repeat(np.sort(q_lengths)[::-1], heads_kv) * head_dim * group * 8
    section = ((np.cumsum(sizes) - sizes) // section_bytes)[pair] if len(seq) else pair
    order = np.lexsort((pair, block if ordered else -tiles, section))
    return t[order], tiles[order] * group

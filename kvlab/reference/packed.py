"""Attention over packed pages in float64: decode every token, then attend them as any others.

A page table says, for every (row, KV head), which pages hold its tokens (`kvlab.pages.LayerPages`).
Stored tokens are all older than the queries, so every query sees every token that its window reaches back
to, and their order does not matter. Keys below width 16 are stored as H((k - k_mean) / 2**k_shift), values as
H v, where H is the orthonormal block Hadamard matrix, its own inverse; k_mean and k_shift are vectors of the
(row, KV head), the frame of its keys. Both are divided by powers of 2 before (`exponent`); keys in blocks are
those of `kvlab.reference.blocks`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kvlab.reference.attention import attend_rows, softmax_rows
from kvlab.reference.blocks import KeyFrame, query_in_blocks
from kvlab.reference.codec import hadamard_matrix
from kvlab.reference.pages import TOKENS_PER_PAGE, value_signs
from kvlab.reference.records import decode_page

__all__ = [
    "element_channels",
    "mass_from_scores",
    "packed_attention",
    "scores_of_bytes",
    "stored_positions",
    "stored_tokens",
]

Float64 = NDArray[np.float64]

_QUAD = 4  # entries of a page table, all of one rung


def stored_tokens(pages: Any, row: int, head: int) -> list[tuple[Float64, Float64]]:
    """Decode the tokens of one (row, KV head): keys and values (count, head_dim) of each of its entries.

    `pages` is a `LayerPages`; where count is 0, index may name no page.
    """
    tokens = []
    for p in range(pages.num_pages[row, head]):
        at = row, head, p
        layout = pages.layouts[pages.rung[at]]
        if pages.count[at] == 0:
            tokens.append((np.zeros((0, layout.head_dim)), np.zeros((0, layout.head_dim))))
            continue
        record, count = pages.pools[pages.rung[at]][pages.index[at]], pages.count[at]
        with np.errstate(invalid="ignore"):  # slots without a token may hold anything
            page = decode_page(record, layout.head_dim, layout.bits_k, layout.bits_v, pages.dtype)
        k, v = page.k[:count].astype(np.float64), page.v[:count].astype(np.float64)
        rotation = hadamard_matrix(layout.head_dim)
        exponent_k, exponent_v = pages.exponent[row, head].astype(int)
        if layout.k_coded:
            if layout.in_blocks:
                k = k @ element_channels(pages, row, head)
            else:
                k = k @ rotation * np.exp2(np.tile(pages.k_shift[row, head], 2).astype(np.float64))
            k = np.ldexp(k + pages.k_mean[row, head].astype(np.float64), exponent_k)
        if layout.v_coded:
            v = np.ldexp(v @ rotation * value_signs(layout.head_dim), exponent_v)
        tokens.append((k, v))
    return tokens


def element_channels(pages: Any, row: int, head: int) -> Float64:
    """Return what elements of keys in blocks are multiplied by to be keys less their mean."""
    mean, shift, order, gain = (
        x[row, head] for x in (pages.k_mean, pages.k_shift, pages.k_order, pages.k_gain)
    )
    frame = KeyFrame(mean, shift, 0, order, gain)
    query, _ = query_in_blocks(np.eye(len(mean)), frame)
    return query.T


def stored_positions(pages: Any, row: int, head: int) -> NDArray[np.int64]:
    """Return the positions of the tokens of one (row, KV head), in the order of `stored_tokens`."""
    found = [np.zeros(0, np.int64)]
    for p in range(pages.num_pages[row, head]):
        at = row, head, p
        layout, count = pages.layouts[pages.rung[at]], pages.count[at]
        if count == 0:
            continue
        offsets = layout.positions_in(pages.pools[pages.rung[at]])[pages.index[at], :count]
        found.append((int(pages.base[at]) << 16) + offsets.astype(np.int64))
    return np.concatenate(found)


def packed_attention(
    q: ArrayLike,
    pages: Any,
    *,
    scale: float | None = None,
    softcap: float = 0.0,
    window: tuple[int, int] = (-1, -1),
    first_position: ArrayLike | None = None,
    keep_scores: int = 0,
) -> tuple[Float64, Float64, Float64]:
    """Attend all stored tokens of each row; see `kvlab.ops.packed.packed_attention`.

    Returns
    -------
    out : float64, (batch, seqlen_q, num_heads_q, head_dim)
        0 where a row holds no token.
    lse : float64, (batch, num_heads_q, seqlen_q)
        -inf where a row holds no token.
    scores : float64, (batch, num_heads_kv, quads, keep_scores * group, 64)
        Natural logarithms; last rows, positions first and heads of the group within; slot s of page q of a
        quad at 16 q + s; -inf in unused slots and for tokens before the window.
    """
    queries = np.asarray(q, np.float64)
    batch, seqlen_q, heads, head_dim = queries.shape
    kv_heads = pages.rung.shape[1]
    group = heads // kv_heads
    out, lse = np.zeros(queries.shape), np.full((batch, heads, seqlen_q), -np.inf)
    quads, kept_rows = pages.rung.shape[2] // _QUAD, keep_scores * group
    scores = np.full((batch, kv_heads, quads * _QUAD, kept_rows, TOKENS_PER_PAGE), -np.inf)
    for b in range(batch):
        for h in range(kv_heads):
            tokens = stored_tokens(pages, b, h)
            k, v = (
                (np.concatenate([np.zeros((0, head_dim)), *parts]) for parts in zip(*tokens, strict=True))
                if tokens
                else [np.zeros((0, head_dim))] * 2
            )
            own = slice(h * group, (h + 1) * group)
            visible = np.ones((seqlen_q, len(k)), np.bool_)
            if window[0] >= 0:
                lowest = np.asarray(first_position, np.int64)[b] + np.arange(seqlen_q) - window[0]
                visible = stored_positions(pages, b, h) >= lowest[:, None]
            options: dict[str, Any] = {"scale": scale, "softcap": softcap}
            out[b, :, own], lse[b, own] = attend_rows(
                queries[b, :, own], k[:, None], v[:, None], visible, **options
            )
            if keep_scores:
                probabilities, _ = softmax_rows(queries[b, :, own], k[:, None], visible, **options)
                with np.errstate(divide="ignore"):
                    logs = np.log(probabilities) + lse[b, own][..., None]  # (group, positions, tokens)
                rows = logs[:, seqlen_q - keep_scores :].swapaxes(0, 1).reshape(kept_rows, -1)
                start = 0
                for p, (page_k, _) in enumerate(tokens):
                    scores[b, h, p, :, : len(page_k)] = rows[:, start : start + len(page_k)]
                    start += len(page_k)
    by_quad = scores.reshape(batch, kv_heads, quads, _QUAD, kept_rows, TOKENS_PER_PAGE).swapaxes(3, 4)
    return out, lse, by_quad.reshape(batch, kv_heads, quads, kept_rows, _QUAD * TOKENS_PER_PAGE)


def mass_from_scores(scores: ArrayLike, lse: ArrayLike) -> Float64:
    """Return the mean probability of each slot over the kept rows, (batch, num_heads_kv, entries, 16).

    scores as from `packed_attention`; lse (batch, num_heads_q, seqlen_q) over all keys, stored or not, of
    which the last rows are read. A row with +inf gets no probability, whatever its scores are.
    """
    kept, total = np.asarray(scores, np.float64), np.asarray(lse, np.float64)
    batch, kv_heads, quads, rows, _ = kept.shape
    group = total.shape[1] // kv_heads
    last = total[..., total.shape[2] - rows // group :].reshape(batch, kv_heads, group, rows // group)
    whole = last.swapaxes(2, 3).reshape(batch, kv_heads, 1, rows, 1)
    probability = np.exp(np.where(whole == np.inf, -np.inf, kept) - np.where(np.isinf(whole), 0.0, whole))
    mass: Float64 = probability.mean(axis=3).reshape(batch, kv_heads, _QUAD * quads, TOKENS_PER_PAGE)
    return mass


def scores_of_bytes(kept: NDArray[np.uint8], rows: int) -> Float64:
    """Return the natural scores that a cache on a GPU keeps as bytes, (..., quads, rows, 64).

    kept (..., quads, nbytes): of each quad a code a row and token, then a float32 reference a row. A code c
    above 0 stands for (c - 255) / 8 above the reference of its row, in base 2; 0 for -inf. That of slot s of
    page q of the quad stands at 8 (s // 2) + 2 q + s % 2, and here at 16 q + s.

    Examples
    --------
    >>> quad = np.zeros(80, np.uint8)
    >>> quad[[0, 2, 8]], quad[64:68] = (255, 247, 239), np.float32([10]).view(np.uint8)
    >>> scores_of_bytes(quad[None], 1)[0, 0, [0, 16, 2]] / np.log(2)
    array([10.,  9.,  8.])
    """
    shape = *kept.shape[:-1], rows
    in_pairs = kept[..., : 64 * rows].reshape(*shape, TOKENS_PER_PAGE // 2, _QUAD, 2)
    codes = np.moveaxis(in_pairs, -2, -3).reshape(*shape, 64).astype(np.float64)
    references = np.ascontiguousarray(kept[..., 64 * rows : 68 * rows]).view("<f4")[..., None]
    with np.errstate(invalid="ignore"):  # a row that has met no token has no reference
        scores: Float64 = np.where(codes > 0, ((codes - 255) / 8 + references) * np.log(2), -np.inf)
    return scores

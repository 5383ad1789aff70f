"""The key frame of one (row, layer, KV head): the mean and the scales of channels that keys are packed with.

Keys have an offset in each channel. It costs the quantiser range and carries no information: it adds the same
q . mean to every score. Some models have channels many times larger than others; the transform would spread
them over all. These are scaled down by powers of 2. A frame is taken once, from the first tokens of the row;
attention pays nothing for it:

    stored = H((k - mean) / 2^shift)        q . k = H(q 2^shift) . stored + q . mean

Measured on SmolLM2-135M, mixed widths in pages of 64, 3.15 bits: KL divergence .0175 with it, .0255 without.
Keys that RoPE turns slowly have another mean later: `mean_factors` says how much of it is kept. The
first key, on which attention rests, lies far from that mean, so it must stay at a high width. A ladder
without a width of 8 for keys is narrow: there a channel has a mean only if that does not make the first key
longer (docs/performance/quality.md). Scaling ordinary channels, too, brought widths nothing more; keys in
blocks have an order of channels and gains of blocks. Values need no frame.

Channels may become large later than the first tokens. Where keys are kept in blocks, a row knows how much
larger keys of each pair are than queries lately (`kvlab.reference.blocks.follow_ratios`). An append of few
tokens, and a prefill behind others, look: the shift of a pair that has become large rises (`further_shift`),
and stored keys are encoded again, from their codes (`refit_codes` there).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvlab.pages import of_channels, placed_channels

__all__ = [
    "ASKING",
    "BLOCKS",
    "FIRST",
    "FITTED_TO",
    "FRAME",
    "FRAME_OF_BLOCKS",
    "LAST",
    "MAX_SHIFT",
    "MIN_EXPONENT",
    "MIN_TOKENS",
    "STEADY_OVER",
    "add_queries",
    "awaiting",
    "check_frames",
    "exponent_of",
    "further_shift",
    "key_gain",
    "key_mean",
    "key_order",
    "key_shift",
    "mean_factors",
]

FRAME = {"k_mean": "float16", "k_shift": "uint8", "exponent": "int8", "k_order": "uint8", "k_gain": "float32"}
"""Tables of the frame of a (row, KV head), and their types."""
FRAME_OF_BLOCKS = ("k_order", "k_gain")
"""Those that only keys in blocks have."""
FIRST, LAST = 4, 64
"""Tokens of a row, counted without padding, that make its mean; those before are sinks, not typical.

No more than a page takes: a prompt in parts of 64 under a tight budget cannot wait for more of them, and the
mean is to be the same however a prompt is cut.
"""
MIN_TOKENS = 16
"""With fewer tokens than this the mean stays 0, and so do the shifts."""
ASKING = 48
"""The first of these tokens whose queries count, too."""
MIN_RATIO, MIN_RATIO_ALONE = 9, 64
"""From which ratio on a pair is large, with queries and without; its power of 2 is next to the root."""
STEADY_OVER = 2048
"""Over how many tokens, at least, a mean is to hold: see `mean_factors`."""
_MIN_SEEN = 0.15
MAX_SHIFT = 14
"""The least power of 2 that float16 has with all its bits is 2**-14."""
FITTED_TO = 16
"""The newest tokens of a prefill that frames are fitted to."""
MAX_RATIO, JUMP = 16 << 8, 7 << 8
"""Two bounds of `kvlab.reference.blocks.follow_ratios`."""
MIN_GROWN, MIN_AGAIN = 800, 640
"""From which difference on a pair is large, 9 times, and one that has a shift, 5.7 times."""
MAX_FURTHER = 10
"""By how much a shift rises at a time."""
BLOCKS = 4
"""Blocks of channels of keys where a ladder has profiles."""
_GAIN, _MIN_GAIN_RATIO = 16.0, 2.0**-8
MIN_EXPONENT = -100
"""Nothing is multiplied by more than 2**100."""
_USUAL = range(-4, 12)
"""Exponents of the largest element for which a head has none."""


def exponent_of(x: NDArray[np.float32], last: int = LAST) -> NDArray[np.int8]:
    """Return the exponent e (Hkv,) of a row's keys or values (n, Hkv, D): packed ones are divided by 2**e.

    It brings the largest of the first tokens between 1 and 2, and is 0 where that is nearly so already.

    Examples
    --------
    >>> exponent_of(np.full((64, 1, 2), 3e-8, np.float32)), exponent_of(np.ones((64, 1, 2), np.float32))
    (array([-25], dtype=int8), array([0], dtype=int8))
    """
    sizes = np.abs(x[:last].astype(np.float64))
    largest = np.where(sizes < np.inf, sizes, 0).max((0, 2), initial=0)
    exponent = np.frexp(largest)[1] - 1
    usual = (largest == 0) | ((exponent >= _USUAL.start) & (exponent < _USUAL.stop))
    return np.where(usual, 0, np.maximum(exponent, MIN_EXPONENT)).astype(np.int8)


def key_mean(
    k: NDArray[np.float32],
    exponent: NDArray[np.int8] | None = None,
    *,
    narrow: bool = False,
    last: int = LAST,
    factor: NDArray[np.float32] | None = None,
) -> NDArray[np.float16]:
    """Return the mean (Hkv, D) of a row's keys.

    Parameters
    ----------
    k : (n, Hkv, D) float32
        Keys of the row's first tokens, all that are at hand.
    exponent : (Hkv,) int8, optional
        What `exponent_of` returned for them: the mean is divided by 2**exponent.
    narrow : bool
        No width of 8 is there for the first tokens: channels whose mean makes the first key longer have none.
    last : int
        The mean is that of tokens `FIRST` to last - 1.
    factor : (D,) float32, optional
        What `mean_factors` returned: the mean is multiplied by it.

    Examples
    --------
    >>> key_mean(np.full((64, 1, 2), 3, np.float32))
    array([[3., 3.]], dtype=float16)
    """
    sample = k[FIRST:last].astype(np.float64)
    mean = sample.mean(0) if len(sample) >= MIN_TOKENS else np.zeros(k.shape[1:])
    mean = mean if factor is None else mean * factor.astype(np.float64)
    if narrow:
        first = k[:1].astype(np.float64).sum(0)  # 0 if there is none
        mean = np.where(mean * mean <= 2 * mean * first, mean, 0)
    return _to_mean(_scaled(mean, exponent, -1))


def mean_factors(turns: Sequence[float], head_dim: int, length: int) -> NDArray[np.float32]:
    """Return what the mean of a row's first keys is multiplied by, a channel, (head_dim,).

    RoPE turns a pair of channels by an angle a token. One that turns slowly stands still over the first 64
    tokens: their mean is far from that of `length` tokens, and what is left of it would be a large error
    later. If keys were the same but for RoPE, the mean of all would be that of the first ones, shorter and
    turned. It is made as much shorter here, by a multiple of 1/256, and not turned.

    Parameters
    ----------
    turns : sequence of float
        Radians a token of the pairs of channels i and i + len(turns); channels beyond these do not turn.
    head_dim, length : int
        The mean is to hold over so many tokens.

    Examples
    --------
    >>> mean_factors([1.0, 0.01, 0.001, 0.0], 10, 2048)
    array([0.        , 0.0625    , 0.45703125, 1.        , 0.        ,
           0.0625    , 0.45703125, 1.        , 1.        , 1.        ],
          dtype=float32)
    """
    half = np.asarray(turns, np.float64) / 2

    def part(tokens: int) -> NDArray[np.float64]:
        """How much shorter the mean of so many neighbouring tokens is than each, with its sign."""
        return np.where(half == 0, 1, np.sin(tokens * half) / (tokens * np.sin(np.where(half == 0, 1, half))))

    seen = part(LAST - FIRST)
    ratio = part(length) * np.cos((length - FIRST - LAST) * half) / np.where(seen == 0, 1, seen)
    kept = np.where(np.abs(seen) > _MIN_SEEN, np.clip(ratio, 0, 1), 0)
    factors = np.ones(head_dim, np.float32)
    factors[: 2 * len(half)] = np.tile(np.rint(256 * kept) / 256, 2)
    return factors


def _to_mean(mean: NDArray[np.float64]) -> NDArray[np.float16]:
    """Round means; 0 where one is not finite, or too large for float16: that channel is left as it is."""
    return np.where(np.abs(mean) <= float(np.finfo(np.float16).max), mean, 0).astype(np.float16)


def _scaled(x: NDArray[np.float64], exponent: NDArray[np.int8] | None, sign: int) -> NDArray[np.float64]:
    """Multiply (Hkv, D) by 2**(sign exponent)."""
    scaled: NDArray[np.float64] = x if exponent is None else np.ldexp(x, sign * exponent.astype(int)[:, None])
    return scaled


def add_queries(query_sums: NDArray[np.float32], q: NDArray[Any]) -> None:
    """Add the sizes of queries (m, Hq, D) to `query_sums` (Hkv, D), one after the other."""
    heads, head_dim = query_sums.shape
    sizes = np.abs(q.astype(np.float32)).reshape(len(q), heads, q.shape[1] // heads, head_dim)
    for of_token in sizes:
        for i in range(sizes.shape[2]):
            query_sums += of_token[:, i]


def key_shift(
    k: NDArray[np.float32],
    mean: NDArray[np.float16],
    query_sums: NDArray[np.float32],
    exponent: NDArray[np.int8] | None = None,
    last: int = LAST,
) -> NDArray[np.uint8]:
    """Return by how many binary orders (Hkv, D / 2) the rotary pairs of a row's keys are scaled down.

    A pair of channels i and i + D / 2, which RoPE rotates into each other, is as large as its keys without
    their mean, over its queries. One that is `MIN_RATIO` times the median or more is multiplied, and its
    queries divided, by the power of 2 that brings it next to the median. Keys alone cannot tell which
    channels matter: without queries only those above 16 times the median are brought down, to twice it.

    Parameters
    ----------
    k : (n, Hkv, D) float32
        As for `key_mean`.
    mean : (Hkv, D) float16
        What it returned.
    query_sums : (Hkv, D) float32
        What `add_queries` has added up for tokens `ASKING` to `LAST - 1`; 0 without queries.
    exponent : (Hkv,) int8, optional
    last : int
        As for `key_mean`.

    Examples
    --------
    >>> k = np.random.default_rng(0).standard_normal((64, 1, 8), dtype=np.float32)
    >>> k[..., [1, 5]] *= 45
    >>> key_shift(k, key_mean(k), np.zeros((1, 8), np.float32))
    array([[0, 4, 0, 0]], dtype=uint8)
    >>> key_shift(k, key_mean(k), np.ones((1, 8), np.float32))
    array([[0, 3, 0, 0]], dtype=uint8)
    """
    sample, (heads, head_dim) = k[FIRST:last].astype(np.float64), k.shape[1:]
    if len(sample) < MIN_TOKENS:
        return np.zeros((heads, head_dim // 2), np.uint8)
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        sizes = np.abs(sample - _scaled(mean.astype(np.float64), exponent, 1)).sum(0)
        queries = query_sums.astype(np.float64)
        size, energy = (x[:, : head_dim // 2] + x[:, head_dim // 2 :] for x in (sizes, queries))
        has_queries = (energy > 0).any(1, keepdims=True)
        size = np.where(has_queries, size / energy, size)
        size = np.where(size < np.inf, size, np.inf)
        ratio = size / np.sort(size)[:, (head_dim // 2 - 1) // 2, None]
        ratio = np.where(has_queries, ratio, ratio * ratio / 4)
        large = (ratio >= np.where(has_queries, MIN_RATIO, MIN_RATIO_ALONE)) & (ratio < np.inf)
    orders = np.frexp(2 * np.where(large, ratio, 1))[1] - 1  # half of them, to the nearest
    return np.where(large, np.minimum(orders >> 1, MAX_SHIFT), 0).astype(np.uint8)


def further_shift(ratios: NDArray[np.int16], shift: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return by how many binary orders (..., D / 2) more than by `shift` rotary pairs are scaled down.

    As in `key_shift` a pair is large if its ratio, here in the frame that the row has, is 9 times the median
    or more; 5.7 times are enough for a pair that has a shift, since a mean that is on its way gives less than
    what is to come. It is brought next to the median, by at most `MAX_FURTHER` orders at a time.

    Examples
    --------
    >>> ratios = np.zeros(8, np.int16)
    >>> ratios[3] = 10 * 256
    >>> further_shift(ratios, np.zeros(8, np.uint8))
    array([0, 0, 0, 5, 0, 0, 0, 0], dtype=uint8)
    """
    half = ratios.shape[-1]
    old = shift.astype(np.int64)
    grown = ratios - (old << 9)
    grown -= np.sort(grown, axis=-1)[..., (half - 1) // 2, None]
    max_further = np.minimum(MAX_SHIFT - old, MAX_FURTHER)
    large = grown >= np.where(old > 0, MIN_AGAIN, MIN_GROWN)
    return np.where(large, np.minimum(grown + 256 >> 9, max_further), 0).astype(np.uint8)


def _sizes(
    k: NDArray[np.float32], mean: NDArray[np.float16], exponent: NDArray[np.int8] | None
) -> NDArray[np.float64]:
    """Sum the squares of keys less their mean, (Hkv, D), token by token; what is not finite counts 0."""
    with np.errstate(invalid="ignore", over="ignore"):
        squares = np.square(k.astype(np.float64) - _scaled(mean.astype(np.float64), exponent, 1))
    sums: NDArray[np.float64] = np.where(squares < np.inf, squares, 0).sum(0)
    return sums


def key_order(
    k: NDArray[np.float32],
    mean: NDArray[np.float16],
    query_sums: NDArray[np.float32],
    exponent: NDArray[np.int8] | None = None,
    last: int = LAST,
) -> NDArray[np.uint8]:
    """Return the rotary pairs in order, (Hkv, D / 2), where keys are kept in blocks.

    Pairs i and i + D / 2 are sorted by the energy of their keys times that of their queries, squares of
    `query_sums`; a quarter of them is a block (`kvlab.pages.placed_channels`). Arguments are those of
    `key_shift`.

    Examples
    --------
    >>> k = np.random.default_rng(0).standard_normal((64, 1, 16), dtype=np.float32)
    >>> k[..., [5, 13]] *= 9
    >>> key_order(k, key_mean(k), np.ones((1, 16), np.float32))[0, :2]
    array([5, 6], dtype=uint8)
    """
    sample, (heads, head_dim) = k[FIRST:last], k.shape[1:]
    half = head_dim // 2
    energy = np.zeros((heads, half))
    if len(sample) >= MIN_TOKENS:
        queries = np.square(query_sums.astype(np.float64))
        queries = np.where((query_sums > 0).any(1, keepdims=True), queries, 1)
        size = _sizes(sample, mean, exponent)
        with np.errstate(invalid="ignore", over="ignore"):
            energy = (size[:, :half] + size[:, half:]) * (queries[:, :half] + queries[:, half:])
        energy = np.where(energy < np.inf, energy, 0)
    return np.argsort(-energy, axis=1, kind="stable").astype(np.uint8)


def key_gain(
    k: NDArray[np.float32],
    mean: NDArray[np.float16],
    shift: NDArray[np.uint8],
    order: NDArray[np.uint8],
    exponent: NDArray[np.int8] | None = None,
    last: int = LAST,
) -> NDArray[np.float32]:
    """Return what blocks of rotated keys are multiplied by, (Hkv, 4): a root mean square of 16 remains.

    Numbers of 11 significant bits, so that products with sums of as many are exact. A block of almost
    nothing counts as a 256th of the largest; where that takes more than 2**100 its gain is 1. Too few tokens
    for a mean give all blocks one gain.

    Examples
    --------
    >>> k = np.random.default_rng(0).standard_normal((64, 1, 64), dtype=np.float32)
    >>> frame = key_mean(k), np.zeros((1, 32), np.uint8), np.arange(32, dtype=np.uint8)[None]
    >>> key_gain(k, *frame)
    array([[16.25     , 16.375    , 16.09375  , 15.7734375]], dtype=float32)
    """
    heads, head_dim = k.shape[1:]
    sample, each = k[FIRST:last], head_dim // BLOCKS
    few = len(sample) < MIN_TOKENS
    sample = k[:LAST] if few else sample
    down = of_channels(shift).astype(int) + (0 if exponent is None else exponent.astype(int)[:, None])
    size = np.ldexp(_sizes(sample, mean, exponent), -2 * down)
    in_order = np.take_along_axis(size, placed_channels(order).astype(int), 1).reshape(heads, BLOCKS, each)
    log = (each & -each).bit_length() - 1
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        sums = np.cumsum(in_order, axis=2)[..., -1]  # one after the other
        if few:
            sums = np.repeat(np.cumsum(sums, axis=1)[:, -1:] / BLOCKS, BLOCKS, axis=1)
        squares = np.ldexp(sums / max(len(sample) * each, 1), log - (log + 1) // 2 * 2)
        ratio = np.sqrt(np.where(squares < np.inf, squares, 0))
        gain = _GAIN / np.maximum(ratio, ratio.max(1, keepdims=True) * _MIN_GAIN_RATIO)
    part, power = np.frexp(np.where(gain <= 2.0**-MIN_EXPONENT, gain, 1))
    return np.ldexp(part.astype(np.float16).astype(np.float32), power)


def check_frames(tables: dict[str, NDArray[Any]]) -> None:
    """Raise ValueError if tables of frames, by name and of any number of heads, hold what no frame has."""
    gain, order = tables["k_gain"], tables["k_order"]
    if not np.isfinite(tables["k_mean"]).all():
        raise ValueError("k_mean is not finite")
    if (tables["k_shift"] > MAX_SHIFT).any():
        raise ValueError(f"k_shift is not within 0 to {MAX_SHIFT}")
    if (tables["exponent"] < MIN_EXPONENT).any():
        raise ValueError(f"exponent is below {MIN_EXPONENT}")
    if (np.sort(order) != np.arange(order.shape[-1])).any():
        raise ValueError("k_order does not have every rotary pair once")
    if not ((gain > 0) & (gain < np.inf)).all() or (gain.view(np.uint32) & 0x1FFF).any():
        raise ValueError("k_gain is not of positive numbers of 11 bits")


def awaiting(has_mean: NDArray[np.bool_], num_pages: NDArray[np.int32]) -> NDArray[np.bool_]:
    """Say of which rows tokens wait for their frame.

    Parameters
    ----------
    has_mean : bool, (batch,)
    num_pages : int32, (batch, Hkv)

    Examples
    --------
    >>> awaiting(np.array([True, False, False]), np.array([[2], [1], [0]], np.int32))
    array([False,  True, False])
    """
    return ~has_mean & (num_pages > 0).any(axis=1)

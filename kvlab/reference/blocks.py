"""Keys in blocks of channels, in NumPy: page format version 3 where a ladder has profiles.

A *profile* is four widths from 0, 2, 4 and 8 that do not increase, one for each *block*, a quarter of the
channels. Which channels a block has is the frame's `order`: rotary pairs i and i + d / 2, those with the most
energy first. A key is taken into its frame, put in order, and transformed within each block; then every block
is multiplied by its `gain`, which brings the frame's tokens to a root mean square of 16 in every block. So
blocks are alike, and a token has one scale for all of them. Its elements are

    value = (2 code + 1 - 2**width) * FACTORS[width] * scale

whole numbers below 256 times a scale, which keep the cells of a Gaussian in proportion: those of 2 bits are
32 times as wide as those of 8. A block of width 0 has no codes, and its elements are 0.

*The scale* is found as in one basis: a guess is made from the largest element of each block, and the two
bytes next to it are tried, at head_dim 64 or from codes then the next one on the better side. The one of
least error is kept, where errors of the first block count 8, then 2, 1 and 1. Elements are whole numbers of 8
bits for that, so sums are whole numbers, too. In a profile without 2 and 4 it is the least scale whose grid
reaches the largest element.

*Channels that become large later* are scaled down from then on. Stored codes are taken back to channels,
those are scaled, too, and the nearest codes taken; scales stay (`refit_codes`).

*The codes* of neighbouring blocks of one width are the code region of a page of as many channels; those of
the widest come first.
"""

from __future__ import annotations

from functools import reduce
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvlab.reference.codec import hadamard_matrix
from kvlab.reference.pages import (
    CODE_PARTS,
    LEAST_ABOVE,
    NAN_SCALE,
    SCALES,
    bit_address,
    code_words,
    exponent_above,
    grid_codes,
    grid_values,
    narrow,
    rotate_sums,
    sizes_of,
    times_power,
    to_units,
    widen,
)

__all__ = [
    "BLOCKS",
    "FACTORS",
    "RMS",
    "KeyFrame",
    "Run",
    "decode_blocks",
    "encode_blocks",
    "guess_block_scale",
    "placed_channels",
    "profile_bits",
    "profile_words",
    "query_in_blocks",
    "refit_codes",
    "rotate_in_blocks",
    "runs_of",
    "search_block_scale",
]

BLOCKS = 4
FACTORS = {0: 0, 2: 32, 4: 12, 8: 1}
"""Half a cell of each width, in scales."""
RMS = 16
"""Root mean square of elements: so large that scales of tokens far smaller have all their bits."""
GUESS = {2: np.float32(0.07), 4: np.float32(0.052), 8: np.float32(0.036)}
"""What the square of a block's largest element counts, by width, where the search for a scale begins."""
FIRST, FIRST_DECODED = np.float32(2.5), np.float32(1.77)
"""How often the square of the first block counts at least, in place of all, and where elements come from
codes: where it is far larger than the others, as that of the first key of a text, on which attention rests,
it would be clipped."""
MORE_CHANNELS = {64: np.float32(1), 128: np.float32(0.82), 192: np.float32(0.73), 256: np.float32(0.68)}
"""By head_dim, what `GUESS` is multiplied by: of more elements the largest says less."""
MAX_RATIO, JUMP = 16 << 8, 7 << 8
"""Of `follow_ratios`: 16 and 7 binary orders, in 256ths."""
WEIGHTS = np.array([8, 2, 1, 1])
"""What an error in each block counts."""
_TOP = 17  # the exponent of a vector that has been halved

Profile = tuple[int, ...]
Int64 = NDArray[np.int64]


class KeyFrame(NamedTuple):
    """The frame of the keys of one (row, KV head)."""

    mean: NDArray[np.float16]  # (d,), of keys divided by 2**exponent
    shift: NDArray[np.uint8]  # (d / 2,), of rotary pairs
    exponent: int
    order: NDArray[np.uint8]  # (d / 2,), rotary pairs
    gain: NDArray[np.float32]  # (4,), of 11 significant bits


def placed_channels(order: NDArray[Any]) -> Int64:
    """Return the channel at each place, (d,), of rotary pairs in order.

    A block, a quarter of the pairs, has their channels i before their channels i + d / 2.

    Examples
    --------
    >>> placed_channels(np.array([2, 0, 1, 3]))
    array([2, 6, 0, 4, 1, 5, 3, 7])
    """
    half = len(order)
    rotary_pairs = order.astype(np.int64).reshape(BLOCKS, -1)
    channels: Int64 = np.hstack([rotary_pairs, rotary_pairs + half]).reshape(-1)
    return channels


class Run(NamedTuple):
    """Neighbouring blocks of one width."""

    width: int
    first: int
    """The first channel, in order."""
    channels: int
    word: int
    """Where their words of 32 lanes begin in the code region."""


def runs_of(profile: Profile, head_dim: int) -> list[Run]:
    """Return the runs of a profile that have codes.

    Examples
    --------
    >>> [tuple(run) for run in runs_of((8, 4, 4, 0), 64)]
    [(8, 0, 16, 0), (4, 16, 32, 2)]
    """
    found, first, word = [], 0, 0
    for width, blocks in groupby(profile):
        channels = len(list(blocks)) * head_dim // BLOCKS
        if width:
            found.append(Run(width, first, channels, word))
            word += code_words(width, channels)
        first += channels
    return found


def profile_words(profile: Profile, head_dim: int) -> int:
    """Return how many words of 32 lanes the codes of a profile take.

    Examples
    --------
    >>> [profile_words(p, 64) for p in ((4, 2, 2, 0), (4, 4, 2, 2), (8, 4, 4, 4), (8, 8, 8, 8))]
    [2, 3, 5, 8]
    """
    return sum(code_words(run.width, run.channels) for run in runs_of(profile, head_dim))


def profile_bits(profile: Profile, head_dim: int) -> list[tuple[Run, Int64]]:
    """Say where each bit of each code is in a code region: by run, (16, channels, width)."""
    return [
        (run, bit_address(run.width, run.channels, "k") + 1024 * run.word)
        for run in runs_of(profile, head_dim)
    ]


def rotate_in_blocks(k: NDArray[np.float32], frame: KeyFrame, dtype: str) -> NDArray[np.float32]:
    """Take raw keys (n, head_dim) to the elements that pages keep, in order.

    Keys are divided by 2**shift, in the cache's dtype, then by 2**exponent, and put in order. `rotate_sums`
    transforms blocks as if each were a head, but with one unit, found from the largest element of the vector.
    A sum of 11 significant bits times a gain of 11 is exact.

    Examples
    --------
    >>> mean, shift = np.zeros(64, np.float16), np.zeros(32, np.uint8)
    >>> frame = KeyFrame(mean, shift, 0, np.arange(32, dtype=np.uint8), np.ones(4, np.float32))
    >>> rotate_in_blocks(np.ones((1, 64), np.float32), frame, "float16")[0, ::16]
    array([4., 4., 4., 4.], dtype=float32)
    """
    power = np.ldexp(np.float32(1), -np.tile(frame.shift, 2).astype(np.int32))
    with np.errstate(invalid="ignore"):
        scaled = widen(narrow(k * power, dtype), dtype)
    scaled, mean = np.ldexp(scaled, -frame.exponent), frame.mean.astype(np.float32) * power
    channels = placed_channels(frame.order)
    sums = rotate_sums(scaled[:, channels], mean[channels], BLOCKS)
    return sums * np.repeat(frame.gain, k.shape[1] // BLOCKS)


def query_in_blocks(q: NDArray[np.floating[Any]], frame: KeyFrame) -> tuple[NDArray[np.float64], Any]:
    """Return what queries (n, head_dim) are for elements, in float64, and their product with the mean.

    q . k = 2**exponent * (query . element + product), but for what is lost in codes.
    """
    scaled = np.ldexp(np.asarray(q, np.float64), np.tile(frame.shift, 2).astype(np.int64))
    n = q.shape[1] // BLOCKS
    blocks = scaled[:, placed_channels(frame.order)].reshape(len(q), BLOCKS, n) @ hadamard_matrix(n)
    log = (n & -n).bit_length() - 1
    gain = frame.gain.astype(np.float64) * np.sqrt(0.5) ** (log % 2)
    return (blocks / gain[:, None]).reshape(len(q), -1), np.asarray(q, np.float64) @ frame.mean.astype(
        np.float64
    )


def guess_block_scale(
    x: NDArray[np.float32],
    profile: Profile,
    largest: NDArray[np.float32],
    decoded: NDArray[np.bool_] | bool = False,
) -> NDArray[np.float32]:
    """Return where the search for the scale of elements (n, head_dim) begins.

    Arguments are those of `search_block_scale`. Every operation is one of float32, rounded once.
    """
    unit = exponent_above(largest) - 7
    sizes = np.abs(times_power(x, -unit)).reshape(len(x), BLOCKS, -1).max(2)
    part = MORE_CHANNELS[x.shape[1]]
    squares = [sizes[:, b] * sizes[:, b] * (GUESS[width] * part) for b, width in enumerate(profile) if width]
    least = np.where(decoded, FIRST_DECODED, FIRST) * squares[0]
    square = np.maximum(reduce(np.add, squares), least)
    guess = np.sqrt(square) * np.where(decoded, np.float32(19 / 16), np.float32(1))
    guesses: NDArray[np.float32] = np.ldexp(guess, unit - 6)
    return guesses


def search_block_scale(
    x: NDArray[np.float32],
    profile: Profile,
    largest: NDArray[np.float32],
    decoded: NDArray[np.bool_] | bool = False,
) -> Int64:
    """Return the scale byte of elements (n, head_dim).

    In a profile without 2 and 4 that is the least scale whose grid reaches the largest element, as at 8 bits
    in `kvlab.reference.pages.search_scale`. Else the bytes next to the guess are compared, under and above
    it, and at head_dim 64, or from codes, then the next one on the side of the lesser error. An error is the
    sum of squares of `sizes_of` elements, whole numbers below 256; scales are rounded down to whole ones, of
    which half a grid does not exceed 255. Blocks of 8 bits count 16 times what their largest size has beyond
    256 scales, or beyond 255. Of equal errors the lower byte counts, or the earlier one. A guess below half
    of the least scale gives 0; the byte below is 3 at least.

    `largest`, (n,), is that of the blocks that have codes, finite, above 0 and not too large; `decoded`, (n,)
    or for all, says which elements come from codes.
    """
    if set(profile) <= {0, 8}:
        wanted = largest * np.float32(2**-8)
        near = wanted.astype(np.float16).view(np.uint16).astype(np.int64)
        up = near.astype(np.uint16).view(np.float16).astype(np.float32) < wanted
        return np.where(exponent_above(largest) < LEAST_ABOVE, 0, (near + up + 127) >> 7)
    guess = guess_block_scale(x, profile, largest, decoded)
    near = guess.astype(np.float16).view(np.uint16).astype(np.int64)
    unit = exponent_above(largest) - 7
    sizes = sizes_of(x, unit).reshape(len(x), BLOCKS, -1)

    def error(byte: Int64) -> NDArray[np.float64]:
        sums = np.zeros(len(x))
        with np.errstate(over="ignore"):  # scales far above all elements
            scale = np.ldexp(SCALES[byte], -unit)[:, None]
            for b, width in enumerate(profile):
                if width == 8:
                    reach = np.minimum(np.floor(scale * np.float32(256)), 255)
                    sums += WEIGHTS[b] * 16 * np.maximum(sizes[:, b].max(1) - reach[:, 0], 0)
                elif width:
                    whole = np.minimum(np.floor(scale * np.float32(FACTORS[width])), 255 >> (width - 1))
                    codes = grid_codes(sizes[:, b], np.maximum(whole, np.float32(0.5)), width)
                    off = sizes[:, b] - grid_values(codes, whole, width)
                    sums += WEIGHTS[b] * np.square(off).sum(1, dtype=np.float64)
        return sums

    below = np.maximum(near >> 7, 3)
    low, high = error(below), error(below + 1)
    upwards = high < low
    best, least = below + upwards, np.minimum(low, high)
    beyond = best + np.where(upwards, 1, -1)
    walks = np.broadcast_to(decoded, len(x)) | (x.shape[1] < 128)
    best = np.where(walks & (error(beyond) < least), beyond, best)
    return np.where(near >= 64, best, 0)


def encode_blocks(
    x: NDArray[np.float32], profile: Profile, decoded: NDArray[np.bool_] | bool = False
) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Encode elements (n, head_dim), in order: codes (n, head_dim), 0 where there are none, and scale bytes.

    `decoded`, (n,) or for all: which of them come from codes.

    A vector that is too large for the highest scales, with elements of 2**18 or nearly so, is halved until it
    is not. One with NaN or infinity in blocks with codes has scale NaN; one that is zero there has scale 0.
    """
    width = np.repeat(profile, x.shape[1] // BLOCKS)
    codes = np.where(width > 0, 1 << np.maximum(width - 1, 0), 0) + np.zeros(x.shape, np.int64)
    byte = np.zeros(len(x), np.uint8)
    x = np.where(width > 0, x, np.float32(0))
    finite = np.isfinite(x).all(axis=1)
    byte[~finite] = NAN_SCALE
    usual = np.flatnonzero(finite & (x != 0).any(axis=1))
    if not len(usual):
        return codes.astype(np.uint8), byte
    x = x[usual]
    largest = np.abs(x).max(axis=1)
    down = np.minimum(_TOP - exponent_above(largest), 0)
    x, largest = times_power(x, down), np.ldexp(largest, down)
    found = search_block_scale(x, profile, largest, np.broadcast_to(decoded, len(codes))[usual])
    byte[usual] = found
    usual, x, scale = usual[found > 0], x[found > 0], SCALES[found[found > 0]]
    for run in runs_of(profile, x.shape[1]):
        own = slice(run.first, run.first + run.channels)
        half = scale * np.float32(FACTORS[run.width])
        unit = np.frexp(half)[1] - 1 - CODE_PARTS[run.width]
        whole = to_units(times_power(x[:, own], -unit))
        codes[usual, own] = grid_codes(whole, np.ldexp(half, -unit)[:, None], run.width)
    return codes.astype(np.uint8), byte


def decode_blocks(codes: NDArray[Any], scale: NDArray[np.uint8], profile: Profile) -> NDArray[np.float32]:
    """Return the elements (n, head_dim) that codes and scale bytes stand for: exact."""
    n = codes.shape[1] // BLOCKS
    parts = [
        grid_values(codes[:, b * n : (b + 1) * n], SCALES[scale][:, None] * np.float32(FACTORS[width]), width)
        for b, width in enumerate(profile)
    ]
    return np.concatenate(parts, axis=1)


def refit_codes(
    codes: NDArray[np.uint8], profile: Profile, order: NDArray[np.uint8], further: NDArray[np.uint8]
) -> NDArray[np.uint8]:
    """Return the codes (n, head_dim), in order, of keys with pairs scaled down by 2**further more.

    A block without such a pair keeps its codes. Scales and gains stay: both take elements and channels by
    the same factor. Of two codes that are equally near the upper one counts.

    Examples
    --------
    >>> order, further = np.arange(32, dtype=np.uint8), np.zeros(32, np.uint8)
    >>> further[[0, 16]] = 5
    >>> codes = np.full((1, 64), 200, np.uint8)  # elements are 145, all of the first channel of each block
    >>> refit_codes(codes, (8, 8, 8, 8), order, further)[0, ::16]
    array([130, 200, 130, 200], dtype=uint8)
    """
    n = codes.shape[1] // BLOCKS
    placed, found = np.tile(further, 2)[placed_channels(order)].astype(np.int64), codes.copy()
    for block, width in enumerate(profile):
        own = slice(block * n, (block + 1) * n)
        if not width or not placed[own].any():
            continue
        signs = np.sign(hadamard_matrix(n))  # every number is exact
        channels = grid_values(codes[:, own], np.ones(1, np.float32), width).astype(np.float64) @ signs
        halves = np.ldexp(channels, -placed[own]) @ signs / np.abs(signs[0]).sum()
        cells = np.floor(halves / 2) + (1 << (width - 1))
        found[:, own] = np.clip(cells, 0, (1 << width) - 1)
    return found


def follow_ratios(
    ratios: NDArray[np.int16], q: NDArray[Any], k: NDArray[Any], mean: NDArray[np.float32]
) -> None:
    """Let ratios (Hkv, D / 2) follow new queries (m, Hq, D), and keys (m, Hkv, D) less their mean (Hkv, D).

    A ratio is a running mean, an eighth of it the newest token, of how much larger the keys of a rotary pair
    are than its queries: binary orders in 256ths, between powers of 2 on a straight line, at most 16 orders.
    Where a KV head has several query heads, a token 7 orders above the mean counts alone: so far off no sum
    of queries is by chance. A token whose keys or queries are 0 or not finite there counts nothing.

    Examples
    --------
    >>> ratios = np.zeros((1, 2), np.int16)
    >>> follow_ratios(ratios, np.ones((1, 1, 4)), np.full((1, 1, 4), 4.0), np.zeros((1, 4), np.float32))
    >>> ratios
    array([[64, 64]], dtype=int16)
    """
    heads, head_dim = mean.shape
    half = head_dim // 2
    queries = np.abs(q.astype(np.float32)).reshape(len(q), heads, q.shape[1] // heads, head_dim)
    with np.errstate(invalid="ignore", over="ignore"):
        keys = np.abs(k.astype(np.float32) - mean)
        for of_queries, of_key in zip(queries, keys, strict=True):
            size, of_query = of_key[:, :half] + of_key[:, half:], np.zeros((heads, half), np.float32)
            for i in range(of_queries.shape[1]):
                of_query += of_queries[:, i, :half]
                of_query += of_queries[:, i, half:]
            counts = (size > 0) & (size < np.inf) & (of_query > 0) & (of_query < np.inf)
            now = (size.view(np.int32) >> 15) - (of_query.view(np.int32) >> 15)
            change = np.clip(now, -MAX_RATIO, MAX_RATIO) - ratios
            change = np.where((change >= JUMP) & (of_queries.shape[1] > 1), change, change >> 3)
            ratios += np.where(counts, change, 0).astype(np.int16)

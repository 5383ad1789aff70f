"""The page format, version 2, in NumPy: what every byte of a page means, written for reading.

A page keeps up to 16 tokens (slots) of one attention head, their keys at `bits_k` bits an element and their
values at `bits_v`. Its record is, in this order and without gaps (every part is a multiple of 16 bytes):

    codes of K | scales of K | codes of V | scales of V | positions   | importance
                 16 x uint8 (absent at 16)   16 x uint8   16 x uint16   16 x uint8

*Width 16* is the dtype of the cache, raw (a float32 cache stores 32 bits). *Widths 2, 3, 4 and 8* take
vectors that a Hadamard transform has rotated, which makes every element nearly Gaussian; values have signs
before, which are the same for all (`value_signs`). `rotate` works in whole numbers: a vector becomes integers
of 17 bits (at head_dim 128), whose sums are exact in any order; the mean of keys, transformed likewise, is
taken off the sums, which are rounded to 11 bits. The grid has no zero, it is symmetric, and only its scale is
kept, so a kernel multiplies once a token:

    value = (2 code + 1 - 2**bits) * scale       code = floor(x / (2 scale)) + 2**(bits - 1), clipped

*The scale* is a float16 without sign and without its low 7 mantissa bits: a byte, scales a factor 9/8 to
16/15 apart. At 8 bits it is the least whose grid reaches the largest element. Below, a guess is made from the
largest element and sums of sizes and of their squares. The two bytes next to it are tried, at 2 and 3 bits
then the next one on the better side, and the one of least squared error is kept (`search_scale`); sizes are
rounded to 8 bits for that, so that these sums are whole numbers too. At 2 and 3 bits a vector of 128 channels
or more takes the byte nearest to the guess instead, unless it comes from codes: those fit few scales well. A
vector of zeros has scale 0, and so has, below 8 bits, one whose guess is less than half of the least scale;
one with NaN or infinity has scale NaN.

*The order of the codes* is that of the operands of the tensor-core instruction mma.sync.m16n8k16 (PTX ISA,
"Matrix Fragments for mma.m16n8k16"), so a GPU loads a fragment with one instruction and expands it in
registers. The 16 x d matrix is cut into tiles of 16 x 16; K as it is, V transposed. `bit_address` says where
each bit is; everything else here goes through it. 16 d codes fill their region but for the last tile at 2
bits, where d / 16 is odd, and the last d / 16 % 4 tiles at 3 bits: unused bits there may hold anything.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvlab.reference.codec import butterflies, hadamard_block

Int64 = NDArray[np.int64]

__all__ = [
    "GUESS",
    "SCALES",
    "TOKENS_PER_PAGE",
    "bit_address",
    "code_words",
    "compared_channels",
    "encode",
    "grid_codes",
    "grid_values",
    "guess_scale",
    "is_searched",
    "narrow",
    "rotate",
    "rotate_keys",
    "rotate_sums",
    "rotate_values",
    "search_scale",
    "value_signs",
    "widen",
]

TOKENS_PER_PAGE = 16

GUESS = {2: np.float32(0.386), 3: np.float32(0.155), 4: np.float32(0.0592), 8: np.float32(2**-8)}
"""Where the search for a vector's scale begins, by width, and at 8 bits ends: in multiples of the largest
element at 4 and 8 bits, of the sum of squares over the sum of sizes at 2, and of the geometric mean of both
at 3. At 2 and 3 bits a vector that comes from codes begins 1/16 higher.

Fitted to rotated vectors of 64, 128 and 256 elements, Gaussian, heavy-tailed and with two outliers each, raw
or decoded from more bits (docs/performance/page_format.md): the fewer the bits, the more a scale cuts off
anyway, and the less the largest element says.
"""

SCALES = (np.arange(256, dtype=np.uint16) << 7).view(np.float16).astype(np.float32)
"""The scale that each byte stands for; 0xF8 to 0xFF are infinite or NaN and only 0xFF is ever written."""

NAN_SCALE = 0xFF
LEAST_ABOVE = -16
"""`exponent_above` the largest element from which on a vector has a scale at 8 bits: 2**-16, or nearly so."""
_MIN_EXPONENT = -39  # of the unit of `rotate`: what is 2**-40 and less counts as 0
_TOO_LARGE = np.float32(2**100)  # counts as infinite, so that no power of 2 in `rotate` is beyond float32
_ROOT_2 = np.float32(np.float16(np.sqrt(2)))
CODE_PARTS = {2: 6, 3: 5, 4: 4, 8: 4}  # log2 of the parts of a scale in which elements count, or less


def code_words(bits: int, head_dim: int) -> int:
    """Return how many words of 32 lanes, 128 bytes each, the codes of a side of a page take.

    Examples
    --------
    >>> code_words(2, 64), code_words(2, 80), code_words(3, 64), code_words(3, 80)
    (2, 3, 3, 4)
    """
    tiles = head_dim // 16
    if bits == 2:
        return (tiles + 1) // 2
    return tiles // 4 * 3 + tiles % 4 if bits == 3 else tiles * bits // 4


@lru_cache(maxsize=32)
def bit_address(bits: int, head_dim: int, side: str) -> Int64:
    """Say where each bit of each code is in the code region of a page.

    Parameters
    ----------
    bits : int
        Bits stored for an element: 2, 3, 4, 8, 16, or 32 for width 16 of a float32 cache.
    head_dim : int
        A multiple of 16.
    side : {"k", "v"}

    Returns
    -------
    int64, (16, head_dim, bits), read-only
        For (slot, channel, bit of the code, lowest first): its index among all bits of the region. Bit i is
        bit i % 8 of byte i // 8.

    Examples
    --------
    The first key's first elements at 4 bits: channels 0 and 1 are in the two halves of lane 0's word,
    channels 2 and 3 in those of lane 1, 32 bits later.

    >>> bit_address(4, 64, "k")[0, :4, 0]
    array([ 0, 16, 32, 48])
    """
    slot, channel = np.meshgrid(np.arange(TOKENS_PER_PAGE), np.arange(head_dim), indexing="ij")
    tile, token = channel // 16, slot // 2 + 8 * (slot % 2)
    row, column = (token, channel % 16) if side == "k" else (channel % 16, token)

    lane = 4 * (row % 8) + column % 8 // 2
    register = row // 8 + 2 * (column // 8)
    half = column % 2

    def address(word: Int64, bit: Int64) -> Int64:
        """Words are 32 bits and lane-parallel: a word of each of the 32 lanes stand side by side."""
        return 32 * (32 * word + lane) + bit

    def in_word(word: Int64, first_bit: Int64) -> Int64:
        return np.stack([address(word, first_bit + j) for j in range(bits)], axis=-1)

    if bits == 32:
        return _frozen(in_word(8 * tile + 2 * register + half, 0 * half))
    if bits in (4, 8, 16):
        per_word = 16 // bits  # registers
        word = bits // 4 * tile + register // per_word
        return _frozen(in_word(word, bits * (register % per_word) + 16 * half))
    if bits == 2:
        first_bit = 8 * (register // 2) + 4 * (tile % 2) + 2 * (register % 2)
        return _frozen(in_word(tile // 2, first_bit + 16 * half))
    # Of four tiles, five pairs to a word from bit 1 on; of the sixteenth pair, bit j is in bit 0 of word j.
    word, pair = tile // 4 * 3, 4 * (tile % 4) + register
    in_five = in_word(word + pair // 5, 1 + 3 * (pair % 5) + 16 * half)
    spread = np.stack([address(word + j, 16 * half) for j in range(3)], axis=-1)
    in_fours = np.where(pair[..., None] < 15, in_five, spread)
    alone = in_word(word + tile % 4, 4 * register + 16 * half)
    return _frozen(np.where((tile < head_dim // 64 * 4)[..., None], in_fours, alone))


def _frozen(x: Int64) -> Int64:
    """Make an array read-only, since callers share it."""
    x.setflags(write=False)
    return x


def _exponent(x: NDArray[np.float32]) -> NDArray[np.int32]:
    """Return floor(log2(x)) of positive finite numbers; what it returns for others means nothing."""
    exponent: NDArray[np.int32] = np.frexp(x)[1] - 1
    return exponent


def times_power(x: NDArray[np.float32], exponent: NDArray[np.int32]) -> NDArray[np.float32]:
    """Multiply vectors (n, d) by 2**exponent, (n,): exact but for what is too small or too large."""
    scaled: NDArray[np.float32] = np.ldexp(x, exponent[:, None])
    return scaled


def to_units(x: NDArray[np.float32]) -> NDArray[np.float32]:
    """Round to whole numbers, half to even, and those from 2048 on to 11 significant bits.

    This is a rounding to float16 where the unit is 2**-24, that of its subnormal numbers.
    """
    return np.ldexp(np.ldexp(x, -24).astype(np.float16).astype(np.float32), 24)


def _whole(
    x: NDArray[np.float32], largest: NDArray[np.float32], blocks: int
) -> tuple[NDArray[np.float32], NDArray[np.int32]]:
    """Transform each block of vectors in whole numbers: sums, and the exponent of their unit.

    A unit is such that `largest` has 24 bits less those of the order of the transform, so that no sum is
    more than 2**24.
    """
    log = hadamard_block(x.shape[-1] // blocks).bit_length() - 1
    exponent = np.maximum(_exponent(largest) - (23 - log), _MIN_EXPONENT)
    whole = np.rint(times_power(x, -exponent))
    return butterflies(whole.reshape(len(x), blocks, x.shape[1] // blocks)).reshape(x.shape), exponent


def rotate(x: NDArray[np.float32], mean: NDArray[Any] | None = None) -> NDArray[np.float32]:
    """Rotate vectors as pages keep them: the block Hadamard transform, in whole numbers.

    A vector is multiplied by the power of 2 that brings the largest element, of it or of the mean, to 24 bits
    less those of the order of the transform, and rounded to whole numbers. Their sums and differences are
    exact, in any order. The transform of the mean, found likewise, is taken off them, and what is left is
    rounded to multiples of 4 of 11 significant bits. The factor that makes the transform orthonormal follows:
    a power of 2, times the square root of 2 as float16 if the order is an odd power of 2.

    Parameters
    ----------
    x : float32, (n, head_dim)
        Raw vectors.
    mean : float16, (head_dim,) or (n, head_dim), optional
        What is to be taken off: the mean of keys (`kvlab.ops.frame`).

    Returns
    -------
    float32, (n, head_dim)
        Numbers of 11 significant bits times that factor, exact. A vector with NaN, infinity or an element of
        2**100 or more is NaN.

    Examples
    --------
    >>> rotate(np.array([[3, 1, 0, 0]], np.float32))
    array([[2., 1., 2., 1.]], dtype=float32)
    >>> rotate(np.array([[3, 1, 0, 0]], np.float32), np.array([1, 1, 0, 0], np.float16))
    array([[1., 1., 1., 1.]], dtype=float32)
    """
    log = hadamard_block(x.shape[1]).bit_length() - 1
    return rotate_sums(x, mean, 1) * (_ROOT_2 if log % 2 else np.float32(1))


def rotate_sums(x: NDArray[np.float32], mean: NDArray[Any] | None, blocks: int) -> NDArray[np.float32]:
    """Do what `rotate` does within each of `blocks` blocks, but for the square root of 2: 11 bits, exact."""
    log = hadamard_block(x.shape[1] // blocks).bit_length() - 1
    with np.errstate(invalid="ignore"):
        largest = np.abs(x).max(axis=1)
        fine = largest < _TOO_LARGE  # NaN is not, and the largest of a vector with NaN is NaN
    largest, x = np.where(fine, largest, 1), np.where(fine[:, None], x, 0)
    offset = None if mean is None else np.broadcast_to(mean.astype(np.float32), x.shape)
    if offset is not None:
        most = np.abs(offset).max(axis=1)
        sums, exponent = _whole(x, np.maximum(largest, most), blocks)
        of_mean, its_exponent = _whole(offset, most, blocks)
        sums = sums - times_power(of_mean, its_exponent - exponent)  # rounded once, to float32
    else:
        sums, exponent = _whole(x, largest, blocks)
    rotated = times_power(to_units(sums / np.float32(4)), exponent + 2 - (log + 1) // 2)
    rotated[~fine] = np.nan
    return rotated


def rotate_keys(
    k: NDArray[np.float32],
    mean: NDArray[np.float16],
    shift: NDArray[np.uint8],
    dtype: str,
    exponent: int = 0,
) -> NDArray[np.float32]:
    """Rotate keys (n, head_dim) in their frame: divided by 2**shift, in the cache's dtype, and less the mean.

    Channels i and i + head_dim / 2, a rotary pair, have one shift, (head_dim / 2,). Keys are divided by
    2**exponent, too.

    Examples
    --------
    >>> k, shift = np.array([[9, 8, 0, 0]], np.float32), np.array([3, 3], np.uint8)
    >>> rotate_keys(k, np.zeros(4, np.float16), shift, "float16")
    array([[1.0625, 0.0625, 1.0625, 0.0625]], dtype=float32)
    """
    power = np.ldexp(np.float32(1), -np.tile(shift, 2).astype(np.int32))
    with np.errstate(invalid="ignore"):
        scaled = widen(narrow(k * power, dtype), dtype)
    return rotate(np.ldexp(scaled, -exponent), mean.astype(np.float32) * power)


def value_signs(head_dim: int) -> NDArray[np.float32]:
    """Return what values are multiplied by before they are rotated: 1, or -1 for some channels, (head_dim,).

    A value is often constant, or alternates, over channels, and the rotation would gather it in one
    element. With bits b0 to b7 of the channel's number, the sign is -1 where b0 b1 + b2 b3 + b4 b5 + b6 b7 +
    b2 b3 b4 b5 b6 is odd. The products of two are a bent function, which spreads every row of a Hadamard
    matrix evenly. The last keeps half of the elements from being 0 at 128 channels, which the grid of 2 bits
    does not have.

    Examples
    --------
    >>> value_signs(16)
    array([ 1.,  1.,  1., -1.,  1.,  1.,  1., -1.,  1.,  1.,  1., -1., -1.,
           -1., -1.,  1.], dtype=float32)
    """
    channel = np.arange(head_dim)
    b = channel >> np.arange(8)[:, None] & 1
    odd = b[0] & b[1] ^ b[2] & b[3] ^ b[4] & b[5] ^ b[6] & b[7] ^ b[2] & b[3] & b[4] & b[5] & b[6]
    signs: NDArray[np.float32] = (1 - 2 * odd).astype(np.float32)
    return signs


def rotate_values(v: NDArray[np.float32], exponent: int = 0) -> NDArray[np.float32]:
    """Rotate values (n, head_dim) as pages keep them: with their signs, and divided by 2**exponent.

    Examples
    --------
    >>> rotate_values(np.ones((1, 16), np.float32))[0]
    array([ 1.,  1.,  1., -1.,  1.,  1.,  1., -1.,  1.,  1.,  1., -1., -1.,
           -1., -1.,  1.], dtype=float32)
    """
    return rotate(np.ldexp(v * value_signs(v.shape[1]), -exponent))


def grid_codes(x: NDArray[np.float32], scale: NDArray[np.float32], bits: int) -> NDArray[np.float32]:
    """Return the code of each element as a float; `scale` is finite, above 0, and broadcasts."""
    middle = np.float32(2 ** (bits - 1))
    return np.clip(np.floor(x / (scale + scale)) + middle, np.float32(0), middle + middle - np.float32(1))


def grid_values(codes: NDArray[Any], scale: NDArray[np.float32], bits: int) -> NDArray[np.float32]:
    """Return the value of each code: exact, because an odd number below 256 times a scale has 12 bits."""
    return (2 * codes.astype(np.float32) + np.float32(1 - 2**bits)) * scale


def guess_scale(
    x: NDArray[np.float32], bits: int, decoded: NDArray[np.bool_] | bool = False
) -> NDArray[np.float32]:
    """Return where the search for the scale of each vector begins; no vector may be zero or not finite.

    Every operation is one of float32, rounded once, but for sums over channels: those are of `sizes_of` of
    `compared_channels`, and so exact in any order. The largest element is added once more, so that there is
    something to go by if these channels are zero.
    """
    unit = exponent_above(np.abs(x).max(axis=1)) - 7
    guess = largest = np.ldexp(np.abs(x).max(axis=1), -unit)
    part: Any = GUESS[bits]
    if bits in (2, 3):
        part = np.where(decoded, part * np.float32(17 / 16), part)
        sizes = sizes_of(x[:, : compared_channels(x.shape[1])], unit)
        squares = np.square(sizes).sum(axis=1) + largest * largest
        guess = squares / (sizes.sum(axis=1) + largest)
        if bits == 3:
            guess = np.sqrt(largest * guess)
    guesses: NDArray[np.float32] = np.ldexp(guess * part, unit)
    return guesses


def exponent_above(largest: NDArray[np.float32]) -> NDArray[np.int32]:
    """Return the exponent of the largest elements of vectors and 2**-7 of them, for `sizes_of`."""
    return _exponent(largest * np.float32(0.5 + 2**-8)) + 1  # half: it may be the highest


def sizes_of(x: NDArray[np.float32], unit: NDArray[np.int32]) -> NDArray[np.float32]:
    """Return the sizes of elements in units of 2**unit, (n,), as whole numbers."""
    return np.rint(np.abs(times_power(x, -unit)))


def compared_channels(head_dim: int) -> int:
    """Return how many channels, the first, say which scale is best below 8 bits: rotated channels are alike.

    Examples
    --------
    >>> compared_channels(128), compared_channels(64)
    (96, 64)
    """
    return head_dim // 16 * 3 // 4 * 16 if head_dim >= 128 else head_dim


def is_searched(head_dim: int, bits: int, decoded: NDArray[np.bool_] | bool) -> NDArray[np.bool_] | bool:
    """Say whether errors of scales are compared for vectors, or the byte nearest to the guess is taken."""
    return decoded | (head_dim < 128 or bits == 4)


def search_scale(x: NDArray[np.float32], bits: int, decoded: NDArray[np.bool_] | bool = False) -> Int64:
    """Return the scale byte of each vector, (n, head_dim) -> (n,).

    At 8 bits the guess, rounded up, but 0 for vectors that are nearer to 0 than to the least scale. Below,
    the bytes next to the guess, under and above it; at 2 and 3 bits then the next one on the side of the
    lesser error; or the nearest byte, where `is_searched` says so.
    Errors are sums of squares of `sizes_of` of `compared_channels`, whole numbers below 256; scales are
    rounded down to whole ones, of which half a grid does not exceed 255. Of equal errors the lower byte
    counts, or the earlier one. A guess below half of the least scale gives 0; the byte below is 3 at least.
    As `guess_scale`, of vectors that are neither zero nor too large.
    """
    guess = guess_scale(x, bits, decoded)
    near = guess.astype(np.float16).view(np.uint16).astype(np.int64)
    if bits == 8:  # rounded up
        rounded = near.astype(np.uint16).view(np.float16).astype(np.float32)
        up: Int64 = (near + (rounded < guess) + 127) >> 7
        return np.where(exponent_above(np.abs(x).max(axis=1)) < LEAST_ABOVE, 0, up)
    below = np.maximum(near >> 7, 3)
    unit = exponent_above(np.abs(x).max(axis=1)) - 7
    sizes = sizes_of(x[:, : compared_channels(x.shape[1])], unit)

    def error(byte: Int64) -> NDArray[np.float32]:
        with np.errstate(over="ignore"):  # scales far above all elements
            scale = np.minimum(np.floor(times_power(SCALES[byte][:, None], -unit)), 255 >> (bits - 1))
        off = sizes - grid_values(grid_codes(sizes, scale, bits), scale, bits)
        sums: NDArray[np.float32] = np.square(off).sum(axis=1)
        return sums

    errors = error(below), error(below + 1)
    upwards = errors[1] < errors[0]
    best, least = below + upwards, np.minimum(*errors)
    if bits < 4:
        beyond = best + np.where(upwards, 1, -1)
        best = np.where(error(beyond) < least, beyond, best)
    searched = is_searched(x.shape[1], bits, decoded)
    return np.where(near >= 64, np.where(searched, best, (near + 64) >> 7), 0)


def encode(
    x: NDArray[np.float32], bits: int, decoded: NDArray[np.bool_] | bool = False
) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Encode rotated vectors: (n, head_dim) -> codes (n, head_dim) and scale bytes (n,).

    `decoded`, (n,) or for all: which of them come from codes.

    Elements become whole numbers of 1/16 to 1/120 of a scale before they become codes. A vector that is too
    large for the highest scales, with elements of 2**(bits + 14) or nearly so, is halved until it is not.

    Examples
    --------
    >>> codes, scale = encode(np.array([[-3, -2, 1, 3]], np.float32) / 4, bits=2)
    >>> codes, SCALES[scale]
    (array([[0, 0, 2, 3]], dtype=uint8), array([0.234375], dtype=float32))
    """
    codes, byte = np.full(x.shape, 2 ** (bits - 1), np.uint8), np.zeros(len(x), np.uint8)
    finite = np.isfinite(x).all(axis=1)
    byte[~finite] = NAN_SCALE
    usual = np.flatnonzero(finite & (x != 0).any(axis=1))
    if not len(usual):
        return codes, byte
    x = x[usual]
    x = times_power(x, np.minimum(bits + 13 - exponent_above(np.abs(x).max(axis=1)), 0))
    found = search_scale(x, bits, np.broadcast_to(decoded, len(codes))[usual])
    byte[usual] = found
    usual, x, scale = usual[found > 0], x[found > 0], SCALES[found[found > 0]]
    unit = _exponent(scale) - CODE_PARTS[bits]
    x, scale = to_units(times_power(x, -unit)), np.ldexp(scale, -unit)
    codes[usual] = grid_codes(x, scale[:, None], bits).astype(np.uint8)
    return codes, byte


def narrow(x: NDArray[np.float32], dtype: str) -> NDArray[Any]:
    """Return the bits of `x` in the dtype of a cache: uint16, or uint32 for float32.

    Rounded half to even; a NaN becomes quiet and keeps its sign and the upper bits of its payload.
    """
    rounded: NDArray[Any]
    bits = x.view(np.uint32)
    if dtype == "float32":
        return bits
    if dtype == "float16":
        with np.errstate(over="ignore", under="ignore", invalid="ignore"):
            rounded = x.astype(np.float16).view(np.uint16)
        quiet = bits >> 16 & 0x8000 | 0x7E00 | bits >> 13 & 0x1FF
    else:
        rounded = (bits.astype(np.uint64) + 0x7FFF + (bits >> 16 & 1)) >> 16
        quiet = bits >> 16 | 0x40
    return np.where(np.isnan(x), quiet, rounded).astype(np.uint16)


def widen(bits: NDArray[Any], dtype: str) -> NDArray[np.float32]:
    """Return the float32 values of what `narrow` made: exact."""
    if dtype == "float32":
        return bits.astype(np.uint32).view(np.float32)
    if dtype == "float16":
        return bits.astype(np.uint16).view(np.float16).astype(np.float32)
    return (bits.astype(np.uint32) << 16).view(np.float32)

"""Codecs in NumPy: the definition of the arithmetic that every backend repeats bit for bit.

Codes are stored and files outlive versions, so the codes are part of the contract: CPU, Numba CUDA and CUDA
C++ must give the same ones. Everything that decides a code is therefore float32, in the order written here,
with true division, round half to even and no fused multiply-add.

A group is the elements that share a scale s. With L = 2**bits - 1, c the code and x^ what it stands for:

    affine      x^ = c s + o               o = min x, s = (max x - o) / L
    symmetric   x^ = (c - L/2) s           s = max |x| / 2**(bits - 1); from 5 bits on max |x| / (L/2)
    hadamard    x^ = H (level[c] s)        H the orthonormal block Hadamard matrix, s = root mean square of x
    ternary     x^ = c s, c in -1, 0, 1    s = 1.224 times the root mean square of x

Up to 4 bits the outermost symmetric levels lie half a step inside max |x|, which lowers the mean error of
most data; from 5 bits on that gain is small and the levels reach max |x|, so that quantising again gives the
same codes. 1.224 is the level of the best 3-level quantiser of a Gaussian.

Scale and offset are 16-bit words. The offset is rounded down and the scale to nearest, or up where the
largest value would otherwise lie more than half a step outside the levels (affine, symmetric). The words are
float16 where that has the range, which is when the largest magnitude (affine) or the scale (others) lies in
[2**-14, 32752] or is 0, and bfloat16 otherwise; the sign bit of the scale, which has no other use, marks
bfloat16. Codes are computed from the rounded values. A group with a NaN, an infinity or a magnitude above
2**126 cannot be represented: its scale is NaN and its codes are 0.

A code of the hadamard codec is the number of borders at or below the value in units (`codebooks.borders`).
The value is y r, y the sums of the butterflies and r, a float32, the units of the codebook / sqrt(block) / s.
This product is exact, not rounded: a fused operation on a GPU, or float64, finds the integer below it.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvlab.reference import codebooks

__all__ = [
    "CODECS",
    "NAN_WORD",
    "dequantize",
    "hadamard",
    "hadamard_block",
    "hadamard_matrix",
    "half_levels",
    "quantize",
    "saturate",
]

Float32 = NDArray[np.float32]
Words = NDArray[np.uint16]

CODECS = ("affine", "symmetric", "hadamard", "ternary")

_NARROW_FROM, _NARROW_TO = np.float32(2.0**-14), np.float32(32752)
_LARGEST = np.float32(2.0**126)
_LARGEST_HALF = np.float32(65504)
_SMALL_SCALE = np.float32(2.0**-66)
_TERNARY_LEVEL = np.float32(1.2240064)
NAN_WORD = 0x7E00
"""Scale of a group that cannot be represented."""
_WIDE = 0x8000


def half_levels(bits: int) -> np.float32:
    """Return what the largest magnitude is divided by to get the scale of the symmetric codec."""
    return np.float32(2 ** (bits - 1) if bits <= 4 else (2**bits - 1) / 2)


def hadamard_block(n: int) -> int:
    """Return the largest power of two that divides `n`: the block of a Hadamard rotation of length `n`.

    Examples
    --------
    >>> [hadamard_block(n) for n in (64, 80, 96, 128)]
    [64, 16, 32, 128]
    """
    if n < 1:
        raise ValueError(f"n must be a positive length, got {n}")
    return n & -n


@lru_cache(maxsize=16)
def hadamard_matrix(n: int) -> NDArray[np.float64]:
    """Return the orthonormal block Hadamard matrix of `hadamard`, (n, n), read-only.

    Examples
    --------
    >>> hadamard_matrix(4) * 2
    array([[ 1.,  1.,  1.,  1.],
           [ 1., -1.,  1., -1.],
           [ 1.,  1., -1., -1.],
           [ 1., -1., -1.,  1.]])
    """
    block = hadamard_block(n)
    matrix = np.ones((1, 1))
    while len(matrix) < block:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    whole = np.kron(np.eye(n // block), matrix / np.sqrt(block))
    whole.setflags(write=False)
    return whole


def hadamard(x: Float32) -> Float32:
    """Return the orthonormal (block) Hadamard transform of `x` along its last axis.

    Blocks of ``hadamard_block(n)`` elements are transformed on their own. The butterflies run with
    h = 1, 2, 4, ...; each replaces the pair (a, b) at distance h by (a + b, a - b); at the end every element
    is multiplied by float32(1 / sqrt(block)). Applied twice it gives `x` back, up to rounding.

    Parameters
    ----------
    x : float32, shape (..., n)

    Returns
    -------
    float32, shape (..., n)

    Examples
    --------
    >>> hadamard(np.array([1, 2, 3, 4], np.float32))
    array([ 5., -1., -2.,  0.], dtype=float32)
    """
    y = butterflies(x)
    y *= _orthonormal_factor(x.shape[-1])
    return y


def butterflies(x: Float32) -> Float32:
    """Return the transform of `hadamard` without its factor: sums and differences of float32."""
    n = x.shape[-1]
    block = hadamard_block(n)
    y = np.array(x, np.float32, order="C")
    h = 1
    while h < block:
        halves = y.reshape(*x.shape[:-1], n // (2 * h), 2, h)
        a, b = halves[..., 0, :], halves[..., 1, :]
        halves[..., 0, :], halves[..., 1, :] = a + b, a - b
        h *= 2
    return y


def _orthonormal_factor(n: int) -> np.float32:
    return np.float32(1 / np.sqrt(hadamard_block(n)))


def quantize(
    x: NDArray[Any], bits: int, *, axis: int = -1, group_size: int | None = None, codec: str = "affine"
) -> tuple[NDArray[Any], NDArray[np.float16], NDArray[np.float16] | None]:
    """Return the codes of `x` and the words of its scales and offsets.

    Parameters
    ----------
    x : float16, bfloat16 or float32, any shape
    bits : int
        Ignored by the ternary codec.
    axis : int
        The axis along which elements share a scale.
    group_size : int, optional
        Elements of a group; the last group of an axis may be shorter. None: the whole axis.
    codec : str
        One of `CODECS`.

    Returns
    -------
    codes : uint8 (ternary: int8), shape of `x`
    scale : float16, shape of `x` with the number of groups on `axis`
        Words as the module's text says.
    offset : float16, shape of `scale`, or None
        For the affine codec.

    Examples
    --------
    >>> codes, scale, offset = quantize(np.array([1, 2, 4], np.float32), 2)
    >>> codes, scale, offset
    (array([0, 1, 3], dtype=uint8), array([1.], dtype=float16), array([1.], dtype=float16))
    """
    moved = np.moveaxis(x, axis, -1)
    *rows, n = moved.shape
    groups = list(_groups(n, group_size))
    codes = np.empty(moved.shape, np.int8 if codec == "ternary" else np.uint8)
    words = np.empty((2, *rows, len(groups)), np.uint16)
    with np.errstate(all="ignore"):
        for g, group in enumerate(groups):
            values = moved[..., group].astype(np.float32)
            codes[..., group], words[0, ..., g], words[1, ..., g] = _encode(values, bits, codec)
    scale, offset = np.moveaxis(words, -1, axis if axis < 0 else axis + 1).view(np.float16)
    return np.moveaxis(codes, -1, axis), scale.copy(), offset.copy() if codec == "affine" else None


def dequantize(
    codes: NDArray[Any],
    scale: NDArray[np.float16],
    offset: NDArray[np.float16] | None,
    bits: int,
    *,
    axis: int = -1,
    group_size: int | None = None,
    codec: str = "affine",
) -> Float32:
    """Return what codes stand for, as float32; arguments and shapes as `quantize` gives them.

    Examples
    --------
    >>> x = np.array([1, 2, 4], np.float32)
    >>> dequantize(*quantize(x, 2), 2)
    array([1., 2., 4.], dtype=float32)
    """
    moved = np.moveaxis(codes, axis, -1)
    scales = np.moveaxis(scale, axis, -1).astype(np.float16, copy=False).view(np.uint16)
    offsets = scales if offset is None else np.moveaxis(offset, axis, -1).view(np.uint16)
    out = np.empty(moved.shape, np.float32)
    with np.errstate(all="ignore"):
        for g, group in enumerate(_groups(moved.shape[-1], group_size)):
            wide = scales[..., g : g + 1] & _WIDE != 0
            s = _value(scales[..., g : g + 1] & ~np.uint16(_WIDE), wide)
            o = _value(offsets[..., g : g + 1], wide)
            out[..., group] = _decode(moved[..., group], s, o, bits, codec)
    return np.moveaxis(out, -1, axis)


def saturate(x: Float32, dtype: np.dtype[Any]) -> NDArray[Any]:
    """Round float32 to `dtype`; beyond the range of float16 to its largest number. NaN stays NaN."""
    if dtype == np.float16:
        x = np.clip(x, -_LARGEST_HALF, _LARGEST_HALF)
    with np.errstate(all="ignore"):
        return x.astype(dtype)


def _groups(n: int, group_size: int | None) -> Iterator[slice]:
    size = group_size or max(n, 1)
    return (slice(start, min(start + size, n)) for start in range(0, n, size))


def _encode(x: Float32, bits: int, codec: str) -> tuple[NDArray[Any], Words, Words]:
    """Encode groups of shape (..., n); words of shape (...)."""
    top = np.float32(2**bits - 1)
    low, high = x.min(-1) + np.float32(0), x.max(-1) + np.float32(0)
    largest = np.maximum(-low, high)
    known = largest <= _LARGEST  # False for NaN
    o = np.zeros_like(largest)
    if codec == "affine":
        wide = _is_wide(largest)
        o = -_round_up(-low, wide)
        step = (high - o) / top
        s = _round_scale(step, wide, reach=high - o, reachable=top + np.float32(0.5))
    elif codec == "symmetric":
        step = largest / half_levels(bits)
        wide = _is_wide(step)
        s = _round_scale(step, wide, reach=largest, reachable=(top + 1) / 2)
    else:
        step = _root_mean_square(x, largest) * (_TERNARY_LEVEL if codec == "ternary" else np.float32(1))
        wide = _is_wide(step)
        s = _round_to_nearest(step, wide)
    if codec == "symmetric":
        o = -(s * (top / 2))
    codes = _codes(x, s[..., None], o[..., None], bits, codec)
    codes[~known] = 0
    scale_word = _word(s, wide) | np.where(wide, _WIDE, 0).astype(np.uint16)
    return codes, np.where(known, scale_word, NAN_WORD), np.where(known, _word(o, wide), NAN_WORD)


def _codes(x: Float32, s: Float32, o: Float32, bits: int, codec: str) -> NDArray[Any]:
    if codec == "ternary":
        return (x > s / 2).astype(np.int8) - (x < -s / 2).astype(np.int8)
    if codec == "hadamard":
        codes: NDArray[Any] = np.searchsorted(codebooks.borders(bits), _in_units(x, s, bits), side="right")
    else:
        codes = np.rint(np.minimum(np.fmax((x - o) / s, 0), np.float32(2**bits - 1)))
    return codes.astype(np.uint8)


def _in_units(x: Float32, s: Float32, bits: int) -> NDArray[np.float64]:
    """Return the rotated x in units of the codebook, exactly; 0 where s is 0 or sums overflow to a NaN.

    A scale below 2**-66 and the sums are both multiplied by 2**60, so that the inverse of it is finite.
    """
    y = butterflies(x)
    factor = np.where(s < _SMALL_SCALE, np.float32(2.0**60), np.float32(1))
    y, s = y * factor, s * factor
    inverse = codebooks.units(bits) * _orthonormal_factor(x.shape[-1]) / s
    product = y.astype(np.float64) * np.where(s > 0, inverse, 0)
    return np.where(np.isnan(product), 0, product)


def _decode(codes: NDArray[Any], s: Float32, o: Float32, bits: int, codec: str) -> Float32:
    if codec == "ternary":
        return codes.astype(np.float32) * s
    if codec == "hadamard":
        return hadamard(codebooks.levels(bits)[codes] * s)
    if codec == "symmetric":
        o = -(s * np.float32((2**bits - 1) / 2))
    return codes.astype(np.float32) * s + o


def _root_mean_square(x: Float32, largest: Float32) -> Float32:
    """Return sqrt(mean of squares) over the last axis, without overflow or underflow.

    Values are divided by the power of two of the largest one. The squares, filled up with zeros to a power of
    two, are summed by adding the second half to the first until one is left.
    """
    n = x.shape[-1]
    exponent = np.maximum(largest.view(np.uint32) >> 23, 1)
    squares = np.zeros((*x.shape[:-1], 1 << (n - 1).bit_length()), np.float32)
    squares[..., :n] = (x * ((254 - exponent) << 23).astype(np.uint32).view(np.float32)[..., None]) ** 2
    while squares.shape[-1] > 1:
        half = squares.shape[-1] // 2
        squares = squares[..., :half] + squares[..., half:]
    power: Float32 = (exponent << 23).astype(np.uint32).view(np.float32)
    return np.sqrt(squares[..., 0] / np.float32(n)) * power


def _is_wide(size: Float32) -> NDArray[np.bool_]:
    """Say where float16 lacks the range for words of this size."""
    return (size > _NARROW_TO) | ((size < _NARROW_FROM) & (size > 0))


def _round_scale(step: Float32, wide: NDArray[np.bool_], reach: Float32, reachable: np.float32) -> Float32:
    """Round a scale to nearest; up, where `reach` is more than `reachable` times the nearest."""
    nearest = _round_to_nearest(step, wide)
    scale: Float32 = np.where(reach > reachable * nearest, _round_up(step, wide), nearest)
    return scale


def _round_to_nearest(value: Float32, wide: NDArray[np.bool_]) -> Float32:
    """Return the nearest float16, or bfloat16 where `wide`, ties to even, as float32."""
    bits = value.view(np.uint32)
    nearest = (bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000
    half = value.astype(np.float16).astype(np.float32)
    return np.where(wide, nearest.astype(np.uint32).view(np.float32), half)


def _round_up(value: Float32, wide: NDArray[np.bool_]) -> Float32:
    """Return the least float16, or bfloat16 where `wide`, that is not below `value`, as float32."""
    half = value.astype(np.float16)
    half = np.where(half < value, np.nextafter(half, np.float16(np.inf)), half)
    bits = value.view(np.uint32)
    cut = (bits & 0xFFFF0000) + np.where((value > 0) & (bits & 0xFFFF != 0), 0x10000, 0)
    return np.where(wide, cut.astype(np.uint32).view(np.float32), half.astype(np.float32))


def _word(value: Float32, wide: NDArray[np.bool_]) -> Words:
    """Return the bits of values that float16, or bfloat16 where `wide`, represents exactly."""
    bfloat = (value.view(np.uint32) >> 16).astype(np.uint16)
    return np.where(wide, bfloat, value.astype(np.float16).view(np.uint16))


def _value(word: Words, wide: NDArray[np.bool_]) -> Float32:
    """Return what the bits of a float16, or bfloat16 where `wide`, stand for."""
    bfloat = (word.astype(np.uint32) << 16).view(np.float32)
    return np.where(wide, bfloat, word.view(np.float16).astype(np.float32))

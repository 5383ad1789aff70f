"""The record of a page in NumPy, from tokens to bytes and back: one basis of keys, or keys in blocks."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvlab.reference import blocks
from kvlab.reference.pages import (
    SCALES,
    TOKENS_PER_PAGE,
    bit_address,
    code_words,
    encode,
    grid_values,
    narrow,
    widen,
)

__all__ = ["Page", "decode_page", "encode_page"]

Int64 = NDArray[np.int64]


class Page(NamedTuple):
    """The contents of a page; below width 16, `k` and `v` are rotated."""

    k: NDArray[np.float32]  # (16, head_dim)
    v: NDArray[np.float32]  # (16, head_dim)
    positions: NDArray[np.uint16]  # (16,), offsets from the page's base position
    importance: NDArray[np.uint8]  # (16,), codes


def _stored_bits(bits: int, dtype: str) -> int:
    return 32 if bits == 16 and dtype == "float32" else bits


def _region(codes: NDArray[Any], bits: int, side: str) -> NDArray[np.uint8]:
    """Put codes (n, head_dim) of `bits` bits each into a code region, zero where slots are unused."""
    n, head_dim = codes.shape
    stream = np.zeros(1024 * code_words(bits, head_dim), np.uint8)
    stream[bit_address(bits, head_dim, side)[:n]] = codes[..., None] >> np.arange(bits) & 1
    return np.packbits(stream, bitorder="little")


def _codes(region: NDArray[np.uint8], bits: int, head_dim: int, side: str) -> Int64:
    stream = np.unpackbits(region, bitorder="little").astype(np.int64)
    codes: Int64 = np.sum(stream[bit_address(bits, head_dim, side)] << np.arange(bits), axis=-1)
    return codes


def encode_page(
    k: NDArray[np.float32],
    v: NDArray[np.float32],
    bits_k: int | tuple[int, ...],
    bits_v: int,
    dtype: str,
    positions: NDArray[np.uint16],
    importance: NDArray[np.uint8],
) -> NDArray[np.uint8]:
    """Encode up to 16 tokens, the i-th into slot i, as the record of a page.

    Parameters
    ----------
    k, v : float32, (n, head_dim)
        As `rotate_keys` (`rotate_in_blocks` of `kvlab.reference.blocks`, where `bits_k` is a profile) and
        `rotate_values` return them where the width of that side is below 16, else raw.
    bits_k, bits_v : int
        2, 3, 4, 8 or 16; bits_k may be a profile.
    dtype : {"float16", "bfloat16", "float32"}
        Of the cache: what width 16 stores.
    positions : uint16, (n,)
    importance : uint8, (n,)

    Returns
    -------
    uint8, (bytes of a record,)
        Zero in unused slots.

    Examples
    --------
    >>> rng = np.random.default_rng(0)
    >>> k, v = rng.standard_normal((2, 16, 32), dtype=np.float32)
    >>> where, weight = np.arange(16, dtype=np.uint16), np.full(16, 200, np.uint8)
    >>> record = encode_page(k, v, 4, 2, "float16", where, weight)
    >>> record.size == 16 * 32 * (4 + 2) // 8 + 16 + 16 + 32 + 16
    True
    >>> page = decode_page(record, 32, 4, 2, "float16")
    >>> bool(np.square(page.k - k).mean() < 0.02), bool(np.square(page.v - v).mean() < 0.13)
    (True, True)
    """
    parts = []
    for x, bits, side in ((k, bits_k, "k"), (v, bits_v, "v")):
        if bits == 16:
            parts.append(_region(narrow(x, dtype), _stored_bits(16, dtype), side))
            continue
        if isinstance(bits, tuple):
            codes, byte = blocks.encode_blocks(x, bits)
            runs = blocks.runs_of(bits, x.shape[1])
            own = [_region(codes[:, run.first :][:, : run.channels], run.width, side) for run in runs]
            region = np.concatenate(own)
        else:
            codes, byte = encode(x, bits)
            region = _region(codes, bits, side)
        scales = np.zeros(TOKENS_PER_PAGE, np.uint8)
        scales[: len(byte)] = byte
        parts += [region, scales]
    tail = np.zeros(3 * TOKENS_PER_PAGE, np.uint8)
    tail[: 2 * len(positions)] = positions.astype("<u2").view(np.uint8)
    tail[2 * TOKENS_PER_PAGE :][: len(importance)] = importance
    return np.concatenate([*parts, tail])


def decode_page(
    record: NDArray[np.uint8], head_dim: int, bits_k: int | tuple[int, ...], bits_v: int, dtype: str
) -> Page:
    """Decode the record of a page, all 16 slots of it; the inverse of `encode_page`."""
    parts = iter(np.split(record, np.cumsum(_part_sizes(head_dim, bits_k, bits_v, dtype))[:-1]))
    values = []
    for bits, side in ((bits_k, "k"), (bits_v, "v")):
        region = next(parts)
        if isinstance(bits, tuple):
            codes = np.zeros((TOKENS_PER_PAGE, head_dim), np.int64)
            for run in blocks.runs_of(bits, head_dim):
                own = region[128 * run.word :][: 128 * code_words(run.width, run.channels)]
                codes[:, run.first :][:, : run.channels] = _codes(own, run.width, run.channels, side)
            values.append(blocks.decode_blocks(codes, next(parts), bits))
            continue
        codes = _codes(region, _stored_bits(bits, dtype), head_dim, side)
        if bits == 16:
            values.append(widen(codes, dtype))
        else:
            values.append(grid_values(codes, SCALES[next(parts)][:, None], bits))
    return Page(values[0], values[1], next(parts).view("<u2"), next(parts))


def _part_sizes(head_dim: int, bits_k: int | tuple[int, ...], bits_v: int, dtype: str) -> list[int]:
    """Bytes of the parts of a record, in order."""
    sizes = []
    for bits in (bits_k, bits_v):
        if isinstance(bits, tuple):
            words = blocks.profile_words(bits, head_dim)
        else:
            words = code_words(_stored_bits(bits, dtype), head_dim)
        sizes.append(128 * words)
        sizes += [TOKENS_PER_PAGE] if bits != 16 else []
    return [*sizes, 2 * TOKENS_PER_PAGE, TOKENS_PER_PAGE]

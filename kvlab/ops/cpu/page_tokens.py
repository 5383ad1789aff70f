"""Tokens into pages and out of them, by page and slot, on the CPU: what needs no cache."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvlab.pages import (
    ITEMSIZE,
    TOKENS_PER_PAGE,
    PageLayout,
    check_pool,
    of_channels,
    placed_channels,
    width_number,
)

__all__ = ["decode_tokens", "encode_tokens", "first_bits", "prepared_frames", "side_formats"]

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]

_PARALLEL_TOKENS = 1024  # fewer take less than about half a millisecond a side
_GUESS = {2: np.float32(0.386), 3: np.float32(0.155), 4: np.float32(0.0592), 8: np.float32(2**-8)}


@lru_cache(maxsize=64)
def side_formats(layout: PageLayout, dtype: str) -> tuple[tuple[Any, NDArray[np.int32]], ...]:
    """Return K and V as the kernels want them: numbers, and the address of every code."""
    from kvlab.numba_kernels.cpu.pages import BFLOAT16, FLOAT16, FLOAT32, Side

    if ITEMSIZE.get(dtype) != layout.itemsize:
        raise ValueError(
            f"dtype must be a cache dtype of {layout.itemsize} bytes, as the layout says, got {dtype!r}"
        )
    kind = {"float16": FLOAT16, "bfloat16": BFLOAT16, "float32": FLOAT32}[dtype]
    sides = []
    for side, width, codes, scales in (
        ("k", layout.bits_k, layout.k_codes, layout.k_scales),
        ("v", layout.bits_v, layout.v_codes, layout.v_scales),
    ):
        if isinstance(width, tuple):
            bits, guess = width_number(width), np.float32(0)
        else:
            bits, guess = layout.stored_bits(width), _GUESS.get(width, np.float32(0))
        addresses = np.zeros((TOKENS_PER_PAGE, layout.head_dim), np.int32)
        for run in layout.runs(width):
            own = addresses[:, run.first : run.first + run.channels]
            own[...] = first_bits(run.bits, run.channels, side)
            own[...] += np.where(own < 0, -1, 1) * 1024 * run.word
        sides.append((Side(layout.nbytes, codes, scales, bits, kind, guess), addresses))
    return tuple(sides)


def first_bits(bits: int, head_dim: int, side: str) -> NDArray[np.int32]:
    """Return the index of the lowest bit of every code of a side, (16, head_dim).

    ``~index`` says that the bits are in words of their own. `kvlab.reference.pages.bit_address` is the order.
    """
    slot, channel = np.indices((TOKENS_PER_PAGE, head_dim))
    tile, token = channel // 16, slot // 2 + slot % 2 * 8
    row, column = (token, channel % 16) if side == "k" else (channel % 16, token)
    lane, register, half = row % 8 * 4 + column % 8 // 2, row // 8 + column // 8 * 2, column % 2
    alone = np.zeros(tile.shape, np.bool_)
    if bits == 32:
        word, bit = 8 * tile + 2 * register + half, np.zeros_like(tile)
    elif bits == 2:
        word, bit = tile // 2, 8 * (register // 2) + 4 * (tile % 2) + 2 * (register % 2) + 16 * half
    elif bits == 3:
        shared, pair = tile < head_dim // 64 * 4, 4 * (tile % 4) + register
        alone = shared & (pair == 15)
        word = tile // 4 * 3 + np.where(shared, np.where(alone, 0, pair // 5), tile % 4)
        bit = np.where(shared, np.where(alone, 0, 3 * (pair % 5) + 1), 4 * register) + 16 * half
    else:
        per_word = 16 // bits
        word, bit = bits * tile // 4 + register // per_word, bits * (register % per_word) + 16 * half
    at = 32 * (32 * word + lane) + bit
    return np.where(alone, ~at, at).astype(np.int32)


def prepared_frames(
    k_mean: NDArray[np.float16],
    k_shift: NDArray[np.uint8],
    exponent: NDArray[np.int8],
    k_order: NDArray[np.uint8] | None = None,
    k_gain: NDArray[np.float32] | None = None,
) -> Any:
    """Return frames of keys, (..., tables of one), as kernels take them: a `scales.Frames` of the CPU's.

    Without `k_order` and `k_gain` keys are not kept in blocks.
    """
    from kvlab.numba_kernels.cpu.scales import Frames, prepare_frames

    mean = k_mean.astype(np.float32, order="C").reshape(-1, k_mean.shape[-1])
    sums, largest, powers = (
        np.empty(mean.size, np.float32),
        np.empty(len(mean), np.float32),
        np.empty_like(mean),
    )
    down = np.ldexp(np.float32(1), -exponent.reshape(-1, 2).astype(np.int32))
    order = np.empty(0, np.uint8) if k_order is None else placed_channels(k_order).reshape(-1)
    gain = np.empty(0, np.float32) if k_gain is None else np.ascontiguousarray(k_gain).reshape(-1)
    frames = Frames(sums, largest, powers.reshape(-1), np.empty(len(mean), np.bool_), down, order, gain)
    prepare_frames(mean, of_channels(k_shift).reshape(mean.shape), frames)
    return frames


def encode_tokens(
    pool: Bytes,
    layout: PageLayout,
    dtype: str,
    page: NDArray[np.integer[Any]],
    slot: NDArray[np.integer[Any]],
    k: Floats,
    v: Floats,
    scale_bytes: NDArray[np.int16] | None = None,
) -> None:
    """Encode tokens into slots: the codes and scales of K and V. Positions and importance stay as they are.

    Tokens of a page are written in the order of the list; different pages may be written at the same time.

    Parameters
    ----------
    pool : uint8, (pages, layout.nbytes), contiguous
    layout : PageLayout
    dtype : {"float16", "bfloat16", "float32"}
        Of the cache.
    page, slot : integers, (n,)
        Where token i goes.
    k, v : float32, (n, head_dim)
        Rotated (`rotate_keys`, `rotate_values` of `kvlab.reference.pages`, `rotate_in_blocks` of
        `kvlab.reference.blocks`) where that side's width is below 16, raw where it is 16.
    scale_bytes : int16, (2, n), optional
        Of keys and of values: the scale byte of one that was read from codes of this width, which stay as
        they are; DECODED of one read from codes of another width; RAW of others, and if it is left out
        (both in kernels/numba/cpu/scales.py).

    Raises
    ------
    ValueError
        If a shape or type is wrong, or a place is outside the pool. Nothing has been written then.

    Examples
    --------
    >>> layout = PageLayout(head_dim=16, bits_k=8, bits_v=16, itemsize=2)
    >>> pool = np.zeros((3, layout.nbytes), np.uint8)
    >>> k = np.linspace(-1, 1, 16, dtype=np.float32)[None]
    >>> where = np.array([2]), np.array([15])
    >>> encode_tokens(pool, layout, "float16", *where, k, k)
    >>> k_again, v_again = decode_tokens(pool, layout, "float16", *where)
    >>> bool(abs(k_again - k).max() < 0.01), bool(abs(v_again - k).max() < 0.0005)
    (True, True)
    """
    from kvlab.numba_kernels.cpu.pages import write_side, write_side_parallel
    from kvlab.numba_kernels.cpu.scales import RAW

    sides = side_formats(layout, dtype)
    check_pool(pool, layout)
    where = _check_slots({"page": page, "slot": slot})
    shape = len(where[0]), layout.head_dim
    for name, x in (("k", k), ("v", v)):
        if x.dtype != np.float32 or x.shape != shape:
            raise ValueError(f"{name} must be float32 of shape {shape}, got {x.dtype} {x.shape}")
    if scale_bytes is None:
        scale_bytes = np.full((2, shape[0]), RAW, np.int16)
    elif scale_bytes.dtype != np.int16 or scale_bytes.shape != (2, shape[0]):
        raise ValueError(
            f"scale_bytes must be int16 of shape {(2, shape[0])}, got {scale_bytes.dtype} {scale_bytes.shape}"
        )
    for side, x, known in zip(sides, (k, v), np.ascontiguousarray(scale_bytes), strict=True):
        arguments = pool.reshape(-1), *side, *where, np.ascontiguousarray(x).reshape(-1), known
        bad = _in_threads(write_side, write_side_parallel, len(x), *arguments)
        _check_bad(bad, pool, where)


def decode_tokens(
    pool: Bytes,
    layout: PageLayout,
    dtype: str,
    page: NDArray[np.integer[Any]],
    slot: NDArray[np.integer[Any]],
) -> tuple[Floats, Floats]:
    """Decode tokens: the inverse of `encode_tokens`, same arguments.

    Returns
    -------
    k, v : float32, (n, head_dim)
        Still rotated where that side's width is below 16.
    """
    from kvlab.numba_kernels.cpu.pages import read_side, read_side_parallel

    sides = side_formats(layout, dtype)
    check_pool(pool, layout)
    where = _check_slots({"page": page, "slot": slot})
    k, v = (np.empty((len(where[0]), layout.head_dim), np.float32) for _ in sides)
    for side, x in zip(sides, (k, v), strict=True):
        arguments = pool.reshape(-1), *side, *where, x.reshape(-1)
        bad = _in_threads(read_side, read_side_parallel, len(x), *arguments)
        _check_bad(bad, pool, where)
    return k, v


def _in_threads(
    serial: Callable[..., int], parallel: Callable[..., int], tokens: int, *arguments: Any
) -> int:
    """Call the kernel that is faster for so many tokens."""
    import numba

    threads = numba.get_num_threads()
    if tokens < _PARALLEL_TOKENS or threads == 1:
        return serial(*arguments)
    return parallel(*arguments, threads)


def _check_slots(lists: dict[str, NDArray[np.integer[Any]]]) -> list[NDArray[np.int64]]:
    sizes = {name: x.shape for name, x in lists.items()}
    if len(set(sizes.values())) != 1 or any(x.ndim != 1 or x.dtype.kind not in "iu" for x in lists.values()):
        raise ValueError(f"{', '.join(lists)} must be integers of one length, got shapes {sizes}")
    return [np.ascontiguousarray(x, np.int64) for x in lists.values()]


def _check_bad(bad: int, pool: Bytes, where: list[NDArray[np.int64]]) -> None:
    if bad >= 0:
        raise ValueError(
            f"pages and slots must be below {len(pool)} and {TOKENS_PER_PAGE}, "
            f"at index {bad} they are {', '.join(str(x[bad]) for x in where)}"
        )

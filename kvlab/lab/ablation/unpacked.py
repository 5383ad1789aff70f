"""Pages with one code a byte, to measure what packing saves.

The laboratory stores the codes of a packed cache once more with a byte for each, at the allocation that was
planned for packed storage. The page format makes this exact: its grid is (2 code + 1 - 2**bits) * scale, so
the code c of `bits` bits and the code c + 128 - 2**(bits - 1) of 8 bits stand for one value with one scale.
So a page of one code a byte is a page of 8 bits with the scale bytes of the narrow one, every kernel reads
it, and attention over it gives the same numbers. Raw pages (width 16) stay as they are.

It belongs to no cache: a budget does not cover it.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvlab.ops.frame import FRAME, FRAME_OF_BLOCKS
from kvlab.pages import NO_PAGE, PAGE_TABLE_BYTES, LayerPages, PageLayout, new_pool
from kvlab.reference.pages import bit_address

__all__ = ["page_nbytes", "unpack_pages"]

Bytes = NDArray[np.uint8]
_PAGES_AT_ONCE = 1024
_SHIFTS = np.arange(8, dtype=np.uint8)[:, None]


def unpack_pages(pages: LayerPages) -> LayerPages:
    """Return pages of the same tokens with one code a byte, on the CPU, in pools without slack.

    Examples
    --------
    >>> from kvlab.lab.benchmark.decode import make_pages
    >>> pages = make_pages(np.random.default_rng(0), (2, 4), 128)
    >>> bytes_a_code = unpack_pages(pages)
    >>> [layout.bits_k for layout in bytes_a_code.layouts], page_nbytes(bytes_a_code) / page_nbytes(pages)
    ([8, 8], 2.5...)
    """
    index, live = np.full_like(pages.index, NO_PAGE), _live(pages)
    layouts, pools = [], []
    for r, (layout, pool) in enumerate(zip(pages.layouts, pages.pools, strict=True)):
        mine = live & (pages.rung == r)
        if layout.in_blocks:
            raise NotImplementedError(
                f"pages of profile {layout.bits_k}: only widths can have one code a byte; "
                f"name some, such as bits=(2, 4, 8)"
            )
        wide = replace(layout, bits_k=_widened(layout.blocks[0]), bits_v=_widened(layout.bits_v))
        index[mine] = np.arange(mine.sum())
        layouts.append(wide)
        pools.append(_unpack_pool(pool[pages.index[mine]], layout, wide))
    return replace(pages, layouts=tuple(layouts), pools=tuple(pools), index=index)


def page_nbytes(pages: LayerPages) -> int:
    """Bytes that attention reads: the live pages of a layer, their entries in the page table, its key frame.

    A cache has more where keys are in blocks: what its frames follow, a ratio of 2 bytes a rotary pair.
    """
    live = _live(pages)
    sizes = np.array([layout.nbytes + PAGE_TABLE_BYTES for layout in pages.layouts])
    in_blocks = any(layout.in_blocks for layout in pages.layouts)
    tables = ["num_pages", *(name for name in FRAME if in_blocks or name not in FRAME_OF_BLOCKS)]
    nbytes: int = sum(getattr(pages, name).nbytes for name in tables)
    return nbytes + int(sizes[pages.rung[live]].sum())


def _live(pages: LayerPages) -> NDArray[np.bool_]:
    """Which entries of the page table name a page."""
    used = np.arange(pages.rung.shape[2]) < pages.num_pages[..., None]
    live: NDArray[np.bool_] = used & (pages.index != NO_PAGE)
    return live


def _widened(bits: int) -> int:
    return bits if bits == 16 else 8


def _unpack_pool(source: Bytes, layout: PageLayout, wide: PageLayout) -> Bytes:
    pool = new_pool(len(source), wide)
    pool[:, wide.k_scales : wide.v_codes] = source[:, layout.k_scales : layout.v_codes]
    pool[:, wide.v_scales :] = source[:, layout.v_scales :]
    for side, bits, start, end in (
        ("k", layout.blocks[0], (layout.k_codes, layout.k_scales), (wide.k_codes, wide.k_scales)),
        ("v", layout.bits_v, (layout.v_codes, layout.v_scales), (wide.v_codes, wide.v_scales)),
    ):
        if bits in (8, 16):
            pool[:, slice(*end)] = source[:, slice(*start)]
            continue
        from_bit = _first_bits(bits, layout.head_dim, side)
        for first in range(0, len(source), _PAGES_AT_ONCE):
            part = slice(first, first + _PAGES_AT_ONCE)
            # A row for every bit of the pages: a code is a sum of rows, which are copied faster than columns.
            narrow = np.ascontiguousarray(source[part, slice(*start)].T)
            stream = (narrow[:, None] >> _SHIFTS) & np.uint8(1)
            rows = stream.reshape(-1, narrow.shape[1])
            codes = np.full((len(from_bit), narrow.shape[1]), 128 - 2 ** (bits - 1), np.uint8)
            for j in range(bits):
                codes += rows[from_bit[:, j]] << np.uint8(j)
            pool[part, slice(*end)] = codes.T
    return pool


@lru_cache(maxsize=32)
def _first_bits(bits: int, head_dim: int, side: str) -> NDArray[Any]:
    """Bits of the code in a narrow page that each byte of an 8-bit page holds, lowest first."""
    narrow = bit_address(bits, head_dim, side).reshape(-1, bits)
    to_byte = bit_address(8, head_dim, side)[..., 0].ravel() // 8
    return narrow[np.argsort(to_byte)]

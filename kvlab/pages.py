"""Pages: the unit of storage of a compressed cache, as bytes in pools.

A page holds up to 16 tokens of one (batch row, layer, KV head), keys at `bits_k` and values at `bits_v` bits.
Pages of equal widths live in one pool, an array (capacity, bytes of a page), and are known by their index in
it. The cache alone decides which tokens a page holds: a page fills token by token, tokens move between slots,
and attention does not care for their order.

The bytes mean what `kvlab.reference.pages` says. Here are their offsets (`PageLayout`) and what an attention
call needs to know of the pages of one layer (`LayerPages`). Tokens are encoded and decoded by
`kvlab.ops.cpu.page_tokens`, and by the kernels of a cache.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby, pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "ALIGNMENT",
    "BLOCK_WIDTHS",
    "ITEMSIZE",
    "NO_PAGE",
    "PAGE_TABLE_BYTES",
    "QUAD",
    "TOKENS_PER_PAGE",
    "WIDTHS",
    "DevicePages",
    "LayerPages",
    "PageLayout",
    "Profile",
    "Run",
    "Width",
    "check_pool",
    "decode_importance",
    "encode_importance",
    "named_pages",
    "new_pool",
    "of_channels",
    "placed_channels",
    "profile_names",
    "width_number",
]

WIDTHS = (2, 3, 4, 8, 16)
"""Bits of an element; 16 is the cache's own dtype, unchanged."""

BLOCK_WIDTHS = (0, 2, 4, 8)
"""Bits of an element of a block of channels of K, in a profile: four widths, none above the one before."""

Profile = tuple[int, ...]
Width = int | Profile
"""Of a side of a page: bits of every element, or of K a profile (page format version 3)."""

TOKENS_PER_PAGE = 16

QUAD = 4
"""Entries of a page table that stand together, all of one rung: what an attention kernel takes at once."""

NO_PAGE = 0xFFFFFFFF
"""The index of an entry without a page, which fills up a quad; its count is 0."""

ALIGNMENT = 16
"""Bytes: the parts of a record, records and pools begin at multiples of it."""

PAGE_TABLE_BYTES = 8
"""Bytes charged for a page's entry in the page table: index 4, base 2, count 1, rung 1."""

ITEMSIZE = {"float16": 2, "bfloat16": 2, "float32": 4}
"""Bytes of an element, by the dtype of a cache."""

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]


class Run(NamedTuple):
    """Codes of neighbouring channels that have one width."""

    bits: int
    first: int
    """The first channel; where keys are kept in blocks, in their order."""
    channels: int
    word: int
    """Where their words begin in the codes of the side: words of 32 lanes, 128 bytes."""


def width_number(width: Width) -> int:
    """Return a width as kernels take it: a profile by its digits, hexadecimal.

    Examples
    --------
    >>> width_number(4), hex(width_number((8, 4, 2, 2)))
    (4, '0x8422')
    """
    return width if isinstance(width, int) else int("".join(map(str, width)), 16)


def profile_names(widths: Iterable[Width]) -> str:
    """Return the profiles among widths of K as macros of kernels name them.

    Examples
    --------
    >>> profile_names([(4, 2, 2, 0), (8, 8, 8, 8), 16])
    'k4220k8888'
    """
    profiles = dict.fromkeys(width for width in widths if isinstance(width, tuple))
    return "".join(f"k{width_number(profile):04x}" for profile in profiles)


def _check_profile(profile: Profile, head_dim: int) -> None:
    name = "k" + "".join(map(str, profile))
    if len(profile) != 4 or any(width not in BLOCK_WIDTHS for width in profile) or not any(profile):
        raise ValueError(
            f"bits_k: profile {profile} must have four widths from {BLOCK_WIDTHS}, the first not 0"
        )
    if any(low > high for high, low in pairwise(profile)):
        raise ValueError(
            f"bits_k: widths of profile {name} must not increase: blocks of most energy come first"
        )
    if head_dim % 64:
        raise ValueError(
            f"bits_k: profile {name} needs a head_dim that is a multiple of 64, got {head_dim}; name widths "
            f"instead, such as 4"
        )


@dataclass(frozen=True)
class PageLayout:
    """Where the parts of a page's record begin.

    Parameters
    ----------
    head_dim : int
        A multiple of 16 from 16 to 256; of 64 where `bits_k` is a profile.
    bits_k, bits_v : int
        2, 3, 4, 8 or 16; `bits_k` may be a profile, as (8, 4, 2, 0): widths of the four blocks of channels.
    itemsize : int
        Bytes of an element of the cache's dtype, 2 or 4: what width 16 stores.

    Raises
    ------
    ValueError
        If an argument is not supported.

    Examples
    --------
    >>> layout = PageLayout(head_dim=64, bits_k=4, bits_v=2, itemsize=2)
    >>> offsets = layout.k_codes, layout.k_scales, layout.v_codes, layout.v_scales
    >>> offsets, layout.positions, layout.importance
    ((0, 512, 528, 784), 800, 832)
    >>> layout.nbytes
    848
    """

    head_dim: int
    bits_k: Width
    bits_v: int
    itemsize: int

    def __post_init__(self) -> None:
        if self.head_dim not in range(16, 257, 16):
            raise ValueError(f"head_dim must be a multiple of 16 from 16 to 256, got {self.head_dim}")
        if isinstance(self.bits_k, tuple):
            _check_profile(self.bits_k, self.head_dim)
        elif self.bits_k not in WIDTHS:
            raise ValueError(f"bits_k must be one of {WIDTHS} or a profile, got {self.bits_k}")
        if self.bits_v not in WIDTHS:
            raise ValueError(f"bits_v must be one of {WIDTHS}, got {self.bits_v}")
        if self.itemsize not in (2, 4):
            raise ValueError(f"itemsize must be 2 or 4 bytes, got {self.itemsize}")

    def stored_bits(self, width: int) -> int:
        """Return the bits an element takes: `width`, or 32 for width 16 of a float32 cache."""
        return 8 * self.itemsize if width == 16 else width

    def code_bytes(self, width: Width) -> int:
        """Return the bytes of the codes of a side of this width: words of 4 bytes, each of 32 lanes."""
        return sum(128 * self._words(run) for run in self.runs(width))

    def runs(self, width: Width) -> list[Run]:
        """Return what codes a side of this width has: one run, or those of a profile."""
        if isinstance(width, int):
            return [Run(self.stored_bits(width), 0, self.head_dim, 0)]
        runs, first, word = [], 0, 0
        for bits, blocks in groupby(width):
            channels = len(list(blocks)) * self.head_dim // len(width)
            if bits:
                runs.append(Run(bits, first, channels, word))
                word += self._words(runs[-1])
            first += channels
        return runs

    @staticmethod
    def _words(run: Run) -> int:
        tiles, bits = run.channels // 16, run.bits
        return {2: (tiles + 1) // 2, 3: tiles // 4 * 3 + tiles % 4}.get(bits, tiles * bits // 4)

    @property
    def blocks(self) -> Profile:
        """Widths of K in each quarter of the channels."""
        return self.bits_k if isinstance(self.bits_k, tuple) else (self.bits_k,) * 4

    @property
    def in_blocks(self) -> bool:
        """Whether keys are kept in blocks of channels."""
        return isinstance(self.bits_k, tuple)

    @property
    def k_coded(self) -> bool:
        """Whether keys are packed, below width 16."""
        return self.bits_k != 16

    @property
    def v_coded(self) -> bool:
        """Whether values are packed, below width 16."""
        return self.bits_v != 16

    @property
    def k_codes(self) -> int:
        """Byte offset of the codes of K."""
        return 0

    @cached_property
    def k_scales(self) -> int:
        """Byte offset of the scales of K; no bytes are there at width 16."""
        return self.code_bytes(self.bits_k)

    @cached_property
    def v_codes(self) -> int:
        """Byte offset of the codes of V."""
        return self.k_scales + TOKENS_PER_PAGE * self.k_coded

    @cached_property
    def v_scales(self) -> int:
        """Byte offset of the scales of V; no bytes are there at width 16."""
        return self.v_codes + self.code_bytes(self.bits_v)

    @cached_property
    def positions(self) -> int:
        """Byte offset of the positions."""
        return self.v_scales + TOKENS_PER_PAGE * self.v_coded

    @cached_property
    def importance(self) -> int:
        """Byte offset of the importance codes."""
        return self.positions + 2 * TOKENS_PER_PAGE

    @cached_property
    def nbytes(self) -> int:
        """Bytes of the record."""
        return self.importance + TOKENS_PER_PAGE

    def positions_in(self, pool: Bytes) -> NDArray[np.uint16]:
        """Return the positions of all slots as a view (pages, 16) of a pool."""
        return pool[:, self.positions : self.importance].view("<u2")

    def importance_in(self, pool: Bytes) -> Bytes:
        """Return the importance codes of all slots as a view (pages, 16) of a pool."""
        return pool[:, self.importance : self.nbytes]


def encode_importance(x: NDArray[np.floating[Any]]) -> Bytes:
    """Encode importance, any shape, as bytes: 0 for 0, else eighths of a binary order around 1.

    From 2**-23.875 to 2**7.875, 9 % apart; what is beyond is clipped. Raises ValueError for negative values
    and NaN.

    Examples
    --------
    >>> encode_importance(np.array([0, 1e-9, 0.5, 1, 1e9]))
    array([  0,   1, 184, 192, 255], dtype=uint8)
    """
    values = np.asarray(x, np.float64)
    if not (values >= 0).all():
        raise ValueError(f"importance must be at least 0, got {values[~(values >= 0)].flat[0]}")
    with np.errstate(divide="ignore"):
        code = np.clip(np.round(8 * np.log2(values)) + 192, 1, 255)
    return np.where(values == 0, 0, code).astype(np.uint8)


def decode_importance(codes: Bytes) -> Floats:
    """Return the importance that each code stands for.

    Examples
    --------
    >>> decode_importance(np.array([0, 184, 192, 255], np.uint8))
    array([  0.    ,   0.5   ,   1.    , 234.75304], dtype=float32)
    """
    return _IMPORTANCE_OF[codes]


_IMPORTANCE_OF = np.concatenate([[0.0], 2.0 ** ((np.arange(1, 256) - 192) / 8)]).astype(np.float32)


def of_channels(of_pairs: NDArray[Any]) -> NDArray[Any]:
    """Return by channel, (..., head_dim), what a frame has by rotary pair: channels i and i + head_dim / 2.

    Examples
    --------
    >>> of_channels(np.array([3, 0]))
    array([3, 0, 3, 0])
    """
    return np.concatenate([of_pairs, of_pairs], axis=-1)


def placed_channels(k_order: NDArray[Any]) -> NDArray[Any]:
    """Return the channel at each place of keys in blocks, (..., head_dim), of rotary pairs in order.

    A block, a quarter of the pairs, has their channels i before their channels i + head_dim / 2.

    Examples
    --------
    >>> placed_channels(np.array([6, 7, 2, 3, 0, 1, 4, 5]))
    array([ 6,  7, 14, 15,  2,  3, 10, 11,  0,  1,  8,  9,  4,  5, 12, 13])
    """
    half = k_order.shape[-1]
    rows_and_heads = k_order.reshape(*k_order.shape[:-1], 4, half // 4)
    return np.concatenate([rows_and_heads, rows_and_heads + half], axis=-1).reshape(
        *k_order.shape[:-1], 2 * half
    )


@dataclass(frozen=True, eq=False)
class LayerPages:
    """What an attention call reads of one layer: its pools, and a page table of every (row, KV head).

    Entry p < num_pages[b, h] of the table says that row b, KV head h has `count` tokens in slots 0 to
    count - 1 of page `index` of pool `rung`, the positions of which are (base << 16) + offset. Entries 4 n to
    4 n + 3, a quad, are of one rung; one without a page has count 0 and index NO_PAGE. Entries from num_pages
    on, the index where count is 0, and slots from count on may hold anything.

    Parameters
    ----------
    layouts : tuple of PageLayout
        One a rung, in the order of the ladder.
    pools : tuple of uint8, (pages, layouts[r].nbytes)
        One a rung, contiguous, starting at a multiple of 16 bytes.
    rung, count : uint8, (batch, num_heads_kv, entries)
        Entries are a multiple of 4.
    index : uint32, (batch, num_heads_kv, entries)
    base : uint16, (batch, num_heads_kv, entries)
    num_pages : int32, (batch, num_heads_kv)
        Entries in use, a multiple of 4.
    k_mean : float16, (batch, num_heads_kv, head_dim)
    dtype : {"float16", "bfloat16", "float32"}
        Of the cache.
    k_shift : uint8, (batch, num_heads_kv, head_dim / 2), optional
        With `k_mean` the frame of keys: below width 16 they are stored as
        H((k / 2**exponent - k_mean) / 2**k_shift), channels i and i + head_dim / 2, a rotary pair, with one
        shift. Zeros if left out.
    exponent : int8, (batch, num_heads_kv, 2), optional
        Packed keys, and packed values, are divided by 2 to that. Zeros if left out.
    k_order : uint8, (batch, num_heads_kv, head_dim / 2), k_gain : float32, (batch, num_heads_kv, 4)
        Where K has profiles: rotary pairs in the order of their blocks (`placed_channels`), and what blocks
        are multiplied by. Pairs as they are and ones if left out.

    Raises
    ------
    ValueError
        If shapes, types or layouts do not fit together. The entries are not looked at: `check_entries` does.
    """

    layouts: tuple[PageLayout, ...]
    pools: tuple[Bytes, ...]
    rung: NDArray[np.uint8]
    count: NDArray[np.uint8]
    index: NDArray[np.uint32]
    base: NDArray[np.uint16]
    num_pages: NDArray[np.int32]
    k_mean: NDArray[np.float16]
    dtype: str
    k_shift: NDArray[np.uint8] = field(default_factory=lambda: np.zeros(0, np.uint8))
    exponent: NDArray[np.int8] = field(default_factory=lambda: np.zeros(0, np.int8))
    k_order: NDArray[np.uint8] = field(default_factory=lambda: np.zeros(0, np.uint8))
    k_gain: NDArray[np.float32] = field(default_factory=lambda: np.zeros(0, np.float32))

    def __post_init__(self) -> None:
        if self.dtype not in ITEMSIZE:
            raise ValueError(f"dtype must be one of {', '.join(ITEMSIZE)}, got {self.dtype!r}")
        if not self.layouts or len(self.layouts) != len(self.pools):
            raise ValueError(
                f"layouts and pools must be of equal length, at least 1, "
                f"got {len(self.layouts)} and {len(self.pools)}"
            )
        for layout, pool in zip(self.layouts, self.pools, strict=True):
            if layout.head_dim != self.head_dim or layout.itemsize != ITEMSIZE[self.dtype]:
                raise ValueError(
                    f"layouts must have one head_dim and the itemsize of {self.dtype}, got {self.layouts}"
                )
            check_pool(pool, layout, ALIGNMENT)
        if self.num_pages.ndim != 2 or self.num_pages.dtype != np.int32:
            raise ValueError(
                f"num_pages must be int32 (batch, num_heads_kv), "
                f"got {self.num_pages.dtype} {self.num_pages.shape}"
            )
        shape = (*self.num_pages.shape, *self.rung.shape[-1:])
        if self.rung.shape[-1] % QUAD:
            raise ValueError(f"entries must be a multiple of {QUAD}, got rung of shape {self.rung.shape}")
        for name, dtype in (("rung", "uint8"), ("count", "uint8"), ("index", "uint32"), ("base", "uint16")):
            table = getattr(self, name)
            if table.dtype != dtype or table.shape != shape:
                raise ValueError(f"{name} must be {dtype} {shape}, got {table.dtype} {table.shape}")

        rows_and_heads = self.num_pages.shape
        frame: dict[str, tuple[Any, ...]] = {
            "k_mean": ("float16", (self.head_dim,), None),
            "k_shift": ("uint8", (self.head_dim // 2,), 0),
            "exponent": ("int8", (2,), 0),
            "k_order": ("uint8", (self.head_dim // 2,), np.arange(self.head_dim // 2)),
            "k_gain": ("float32", (4,), 1),
        }
        for name, (dtype, own, usual) in frame.items():
            if usual is not None and not getattr(self, name).size:
                object.__setattr__(self, name, np.full((*rows_and_heads, *own), usual, dtype))
            of_frame, shape = getattr(self, name), (*rows_and_heads, *own)
            if of_frame.dtype != dtype or of_frame.shape != shape:
                raise ValueError(f"{name} must be {dtype} {shape}, got {of_frame.dtype} {of_frame.shape}")

    @property
    def head_dim(self) -> int:
        """Elements of a key or value."""
        return self.layouts[0].head_dim

    def check_entries(self) -> None:
        """Raise ValueError unless quads are of one rung and every used entry names a page that exists.

        Attention kernels trust the table; a wrong entry makes them read outside the pools.
        """
        entries = self.rung.shape[-1]
        if ((self.num_pages < 0) | (self.num_pages > entries) | (self.num_pages % QUAD != 0)).any():
            raise ValueError(
                f"num_pages must be multiples of {QUAD} from 0 to {entries}, got {np.unique(self.num_pages)}"
            )
        used = np.arange(entries) < self.num_pages[..., None]
        capacity = np.zeros(256, np.int64)
        capacity[: len(self.pools)] = [len(pool) for pool in self.pools]
        limits: dict[str, Any] = {"rung": len(self.pools), "count": TOKENS_PER_PAGE + 1}
        limits["index"] = np.where(self.count > 0, capacity[self.rung], NO_PAGE + 1)
        for name, limit in limits.items():
            table, limit = np.broadcast_arrays(getattr(self, name), limit)
            for at in np.argwhere(used & (table >= limit))[:1]:
                entry = tuple(at.tolist())
                raise ValueError(
                    f"{name} must be below {limit[entry]}, got {table[entry]} at (row, head, entry) {entry}"
                )
        for at in np.argwhere(used & (self.rung != np.repeat(self.rung[..., ::QUAD], QUAD, axis=-1)))[:1]:
            row, head, entry = at.tolist()
            quad = self.rung[row, head, entry // QUAD * QUAD :][:QUAD]
            raise ValueError(
                f"rung must be equal in entries 4 n to 4 n + 3, got {quad} at (row, head, entry) "
                f"{(row, head, entry // QUAD * QUAD)}"
            )


@dataclass
class DevicePages:
    """A layer's pages where a cache has them; attributes as of `LayerPages`, in arrays of one framework.

    NumPy's unsigned types may be signed ones of as many bits. `unit`: bytes that `index` counts from the
    beginning of pools, which may then be one; 0: it counts pages.
    """

    layouts: tuple[PageLayout, ...]
    pools: tuple[Any, ...]
    rung: Any
    count: Any
    index: Any
    base: Any
    num_pages: Any
    k_mean: Any
    k_shift: Any
    exponent: Any
    k_order: Any
    k_gain: Any
    dtype: str
    unit: int = 0


def named_pages(tables: dict[str, Any]) -> NDArray[np.bool_]:
    """Which entries of page tables on the host name a page: fillers, and those behind the end, do not."""
    index = tables["index"].view(np.uint32)
    held = np.arange(index.shape[-1]) < tables["num_pages"][..., None]
    named: NDArray[np.bool_] = held & (index != NO_PAGE)
    return named


def new_pool(pages: int, layout: PageLayout) -> Bytes:
    """Memory for pages, not initialised, that starts at a multiple of 64 bytes, as cache lines do."""
    raw = np.empty(pages * layout.nbytes + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + pages * layout.nbytes].reshape(pages, layout.nbytes)


def check_pool(pool: Bytes, layout: PageLayout, alignment: int = 4) -> None:
    """Raise ValueError unless an array can hold pages of a layout."""
    if pool.dtype != np.uint8 or pool.ndim != 2 or pool.shape[1] != layout.nbytes:
        raise ValueError(f"pool must be uint8 (pages, {layout.nbytes}), got {pool.dtype} {pool.shape}")
    if pool.size and (not pool.flags.c_contiguous or pool.ctypes.data % alignment):
        raise ValueError(f"pool must be contiguous and start at a multiple of {alignment} bytes")

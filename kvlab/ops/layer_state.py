"""Structs that describe a layer of a cache and its new tokens to kernels, on every device: sizes and names.

The structs are those of kernels/cuda/pages/state.cuh. A store (kvlab/cache/store.py) lays them down.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kvlab.ops.frame import FRAME
from kvlab.views import CudaView

__all__ = [
    "MAX_NEW",
    "MOVED",
    "NEW_TOKENS",
    "NUMBERS",
    "OBSERVED",
    "OPEN_PAGES",
    "POINTERS",
    "ROWS",
    "RUNGS",
    "STATE",
    "UNIT",
    "WAITING_ENTRIES",
    "WAITING_PAGES",
    "new_tokens",
]

UNIT = 16
"""Bytes that the `index` of the page table counts."""
OPEN_PAGES, WAITING_PAGES, WAITING_ENTRIES = 2, 5, 8
RUNGS = 16

_RUNG = np.dtype([("record", "u4"), ("per_slab", "u4"), ("bits_k", "u2"), ("bits_v", "u2"), ("tail", "u4")])
POINTERS = (
    "arena", "rung", "count", "index", "base", "num_pages", "k_mean", "k_shift", "exponent", "k_order",
    "k_gain", "k_ratio", "query_sums", "waits", "open", "seqlen", "used", "slab_count", "slabs", "free_slabs",
    "num_free", "entry_of", "slab_slot", "budget", "status", "waiting",
)  # fmt: skip
NUMBERS = (
    "batch", "heads", "entries", "num_rungs", "max_slabs", "max_pages", "slab_units", "evicts",
    "sliding_window",
)  # fmt: skip
STATE = np.dtype(
    [("rungs", _RUNG, RUNGS), *((name, "u8") for name in POINTERS), *((name, "i4") for name in NUMBERS)],
    align=True,
)
"""`LayerState` of pages/state.cuh."""
MAX_NEW = 16
"""Tokens of a row that one append can take."""
OBSERVED = {"mass": 0, "norm": 1, "one": 2}
"""What the importance of a new token is: attention mass, 1 / norm of its key, 1."""
ROWS = {"all": 0, "waiting": 1, "others": 2}
"""Which rows an append serves."""

MOVED = (
    "rung", "count", "index", "base", "num_pages", *FRAME, "k_ratio", "query_sums", "waits", "open", "seqlen",
)  # fmt: skip
"""Tables that say what a row holds; all of them lie before `used` in the memory of tables."""

_STRIDES = ("k_batch", "k_step", "k_head", "v_batch", "v_step", "v_head")
NEW_TOKENS = np.dtype(
    [
        *((name, "u8") for name in ("k", "v", "valid", "importance")),
        *((name, "i8") for name in _STRIDES),
        ("num_new", "i4"),
        ("first", "i4"),
        ("positions", "u8"),
    ]
)
"""`NewTokens` of pages/state.cuh."""


def new_tokens(
    k: CudaView, v: CudaView, valid: int, importance: int, num_new: int, first: int, positions: int = 0
) -> Any:
    """A `NewTokens` struct; without `positions`, an address, they are `first`, `first + 1` and so on."""
    struct = np.zeros(1, NEW_TOKENS)
    numbers = (k.pointer, v.pointer, valid, importance, *k.strides[:3], *v.strides[:3])
    struct.view(np.int64)[:10] = numbers
    struct["num_new"], struct["first"], struct["positions"] = num_new, first, positions
    return struct[0]

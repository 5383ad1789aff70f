"""Rows of a cache that take over the pages of other rows: beam search, other batches, copies, growth, files.

Row i becomes row `rows[i]`. In place, a row that is wanted keeps its pages, for the first row that wants it;
others get a copy, at places of rows that nobody wants. A store with other sizes gets copies of all. Only
pages in use are read and written, whole and unchanged (kernels/cuda/pages/rows.cu); the host sees none.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvlab.cache.store import MOVED, DeviceStore, PagesOfRows

__all__ = ["RowMove", "move_rows", "reorder_rows"]


@dataclass(frozen=True)
class RowMove:
    """Where rows come from.

    Attributes
    ----------
    source : PagesOfRows
    rows : int32 array (batch,)
        Rows of the source.
    origins : int32 array (batch,)
        -1: the row keeps pages. Else a row of the source or, in place, one that keeps those that are copied.
    kept : int32 array (batch of the source,)
        Whether a row keeps its pages for one that wants it.
    in_place : bool
    """

    source: PagesOfRows
    rows: NDArray[np.int32]
    origins: NDArray[np.int32]
    kept: NDArray[np.int32]
    in_place: bool


def move_rows(source: PagesOfRows, kernels: Any, rows: Any, stream: int) -> None:
    """Let the rows of an empty store become rows of a source; `kernels` are those of the store."""
    rows = np.asarray(rows, np.int32)
    kept = np.zeros(source.tables["waits"].shape[1], np.int32)
    kernels.take_rows(RowMove(source, rows, rows, kept, in_place=False), stream)


def reorder_rows(store: DeviceStore, kernels: Any, rows: Any, stream: int) -> None:
    """Let the rows of a store become others of it; as many as it has."""
    rows = np.asarray(rows, np.int32)
    wanted, first = np.unique(rows, return_index=True)
    kept, keeper = np.zeros((2, store.batch), np.int32)
    kept[wanted], keeper[wanted] = 1, first
    origins = keeper[rows]
    origins[first] = -1
    copied = store.executor.copied
    tables = {name: copied(store.tables[name]) for name in MOVED}
    waiting = [None if x is None else copied(x) for x in store.rows().waiting]
    source = PagesOfRows(tables, store.arenas, waiting)
    kernels.take_rows(RowMove(source, rows, origins, kept, in_place=True), stream)

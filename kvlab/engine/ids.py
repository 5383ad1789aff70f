"""Token numbers as callers have them: one row or several, lists or arrays, on the CPU or a GPU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvlab.arrays import device_of, to_host, to_numpy_view

__all__ = ["is_flat", "on_host", "rows_of"]


def rows_of(ids: Any, batch: int, vocabulary: int) -> list[NDArray[np.int64]]:
    """Return `ids` as rows of token numbers.

    Raises
    ------
    ValueError
        If there are not `batch` rows of at least one token, or a number is none of the vocabulary.
    TypeError
        If they are no whole numbers.

    Examples
    --------
    >>> rows_of([[1, 2], [3]], batch=2, vocabulary=4)
    [array([1, 2]), array([3])]
    """
    if isinstance(ids, str | bytes | Mapping) or hasattr(ids, "keys"):
        raise TypeError(
            f"ids is a {type(ids).__name__}; numbers of tokens are needed: pass tokenizer(text)['input_ids']"
        )
    rows = [on_host(part) for part in ([ids] if is_flat(ids) else ids)]
    if len(rows) != batch:
        raise ValueError(f"ids has {len(rows)} rows, the decoder has batch={batch}")
    for row in rows:
        if row.ndim != 1 or not len(row):
            raise ValueError(f"ids has a row of shape {row.shape}; each row is at least one token")
        if row.dtype.kind not in "iu":
            raise TypeError(f"ids are {row.dtype}; whole numbers are needed")
    every = rows[0] if batch == 1 else np.concatenate(rows)
    least, most = every.min(), every.max()
    if least < 0 or most >= vocabulary:
        raise ValueError(f"ids reach from {least} to {most}; the model has tokens 0 to {vocabulary - 1}")
    return rows


def on_host(ids: Any) -> NDArray[Any]:
    """Return a row as a NumPy array; waits for a GPU that it is on."""
    if not hasattr(ids, "__dlpack__"):
        return np.asarray(ids)
    return to_numpy_view(ids, "ids") if device_of(ids, "ids").kind == "cpu" else to_host(ids)


def is_flat(ids: Any) -> bool:
    """Whether ids are one row of numbers."""
    if hasattr(ids, "ndim"):
        return bool(ids.ndim == 1)
    return len(ids) == 0 or not hasattr(ids[0], "__len__")

"""Token numbers as callers have them: one row or several, lists or arrays, on the CPU or a GPU."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvlab.arguments import whole_number
from kvlab.arrays import device_of
from kvlab.new_arrays import to_host
from kvlab.views import to_numpy_view

__all__ = ["is_flat", "on_host", "rows_of", "stop_tokens"]


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
    if not hasattr(ids, "__getitem__") or getattr(ids, "ndim", 1) == 0:
        raise TypeError(
            f"ids is a {type(ids).__name__}; pass a list or an array of token numbers, such as [5, 3], or "
            "one for each row"
        )
    rows = [on_host(part) for part in ([ids] if is_flat(ids) else ids)]
    if len(rows) != batch:
        raise ValueError(
            f"ids has {len(rows)} rows, the decoder has batch={batch}: pass the token numbers of each row"
        )
    for row in rows:
        if row.ndim != 1 or not len(row):
            raise ValueError(f"ids has a row of shape {row.shape}; each row is at least one token")
    every = rows[0] if batch == 1 else np.concatenate(rows)
    least, most = every.min(), every.max()
    if least < 0 or most >= vocabulary:
        raise ValueError(
            f"ids reach from {least} to {most}; the model has tokens 0 to {vocabulary - 1}; "
            "take its own tokenizer"
        )
    return rows


def on_host(ids: Any) -> NDArray[Any]:
    """Return a row as a NumPy array of whole numbers; waits for a GPU that it is on."""
    if isinstance(ids, np.ndarray) or not hasattr(ids, "__dlpack__"):
        try:
            found = np.asarray(ids)
        except ValueError:
            raise ValueError("ids has a row whose parts differ in length; whole numbers are needed") from None
    else:
        found = to_numpy_view(ids, "ids") if device_of(ids, "ids").kind == "cpu" else to_host(ids)
    if found.size and found.dtype.kind not in "iu":
        raise TypeError(f"ids are {found.dtype}; whole numbers are needed")
    return found


def is_flat(ids: Any) -> bool:
    """Whether ids are one row of numbers."""
    if hasattr(ids, "ndim"):
        return bool(ids.ndim == 1)
    return len(ids) == 0 or not hasattr(ids[0], "__len__") or getattr(ids[0], "ndim", 1) == 0


def stop_tokens(stop: Any, vocabulary: int) -> set[int]:
    """Return the tokens that end a row, from one or a collection of them.

    Raises
    ------
    ValueError, TypeError
        If one is no token of the vocabulary.

    Examples
    --------
    >>> stop_tokens(3, 10), stop_tokens(np.array([3, 4]), 10) == {3, 4}
    ({3}, True)
    """
    is_one = not isinstance(stop, Iterable) or isinstance(stop, str | bytes) or getattr(stop, "ndim", 1) == 0
    return {whole_number(one, "stop", 0, vocabulary - 1) for one in ([stop] if is_one else stop)}

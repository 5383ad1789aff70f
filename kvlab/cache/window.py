"""The exact tokens of one row of one layer.

They are the residual window, and at first all tokens, until the key frame of the row can be made (frame.py).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvlab.arrays import numpy_dtype

__all__ = ["Window", "stack"]

Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Window:
    """The newest tokens of a row that lie in no page, oldest first; padding is not among them.

    Attributes
    ----------
    k, v : (n, Hkv, D) array
        In the dtype of the cache.
    position : (n,) int64
    observed : (Hkv, n) float32
        What the importance policy saw of each token last.
    """

    k: NDArray[np.generic]
    v: NDArray[np.generic]
    position: NDArray[np.int64]
    observed: Floats

    @staticmethod
    def empty(num_heads_kv: int, head_dim: int, dtype: str) -> Window:
        values = np.empty((0, num_heads_kv, head_dim), numpy_dtype(dtype))
        return Window(values, values, np.empty(0, np.int64), np.empty((num_heads_kv, 0), np.float32))

    def __len__(self) -> int:
        return len(self.position)

    @property
    def token_nbytes(self) -> int:
        """Bytes of one token."""
        heads, dim = self.k.shape[1:]
        values = 2 * heads * dim * self.k.dtype.itemsize
        return int(values + self.position.itemsize + heads * self.observed.itemsize)

    @property
    def nbytes(self) -> int:
        return self.token_nbytes * len(self)

    def extended(self, k: Floats, v: Floats, position: NDArray[np.int64], observed: Floats) -> Window:
        """With new tokens behind; `observed` (Hkv, n + new) is of the present tokens and the new ones."""
        dtype = self.k.dtype
        return Window(
            np.concatenate([self.k, k.astype(dtype)]),
            np.concatenate([self.v, v.astype(dtype)]),
            np.concatenate([self.position, position]),
            observed,
        )

    def part(self, start: int, stop: int) -> Window:
        """Tokens `start` to `stop`, copied, so that what is left out is freed."""
        return Window(
            self.k[start:stop].copy(),
            self.v[start:stop].copy(),
            self.position[start:stop].copy(),
            self.observed[:, start:stop].copy(),
        )

    def without(self, start: int, stop: int) -> Window:
        """All tokens but `start` to `stop`, copied."""
        first, last = self.part(0, start), self.part(stop, len(self))
        return Window(
            np.concatenate([first.k, last.k]),
            np.concatenate([first.v, last.v]),
            np.concatenate([first.position, last.position]),
            np.concatenate([first.observed, last.observed], 1),
        )


def stack(
    windows: list[Window], k: Floats, v: Floats, valid: NDArray[np.bool_]
) -> tuple[Floats, Floats, NDArray[np.bool_]]:
    """Exact keys and values of all rows, windows aligned before the new tokens, and which are visible.

    Parameters
    ----------
    windows : list of Window
        One a row.
    k, v : (B, S, Hkv, D) float32
        New tokens.
    valid : (B, S) bool

    Returns
    -------
    k, v : (B, W + S, Hkv, D) float32
        W is the length of the longest window.
    visible : (B, W + S) bool
    """
    longest = max((len(window) for window in windows), default=0)
    if longest == 0:
        return k, v, valid
    shape = (len(k), longest + k.shape[1], *k.shape[2:])
    keys, values, visible = (
        np.zeros(shape, np.float32),
        np.zeros(shape, np.float32),
        np.zeros(shape[:2], bool),
    )
    for row, window in enumerate(windows):
        keys[row, longest - len(window) : longest] = window.k
        values[row, longest - len(window) : longest] = window.v
        visible[row, longest - len(window) : longest] = True
    keys[:, longest:], values[:, longest:], visible[:, longest:] = k, v, valid
    return keys, values, visible

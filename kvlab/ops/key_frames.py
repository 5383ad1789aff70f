"""Key frames of a model, taken once from any text, for caches whose rows then need not wait for their own.

A row that takes its own frame takes it from its first 64 tokens, which say little of the mean of its keys. A
text of some 2,000 tokens says more, whatever it is about (docs/performance/quality.md).
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvlab import files
from kvlab.errors import FormatError
from kvlab.ops.frame import (
    FIRST,
    FRAME,
    FRAME_OF_BLOCKS,
    add_queries,
    check_frames,
    exponent_of,
    key_gain,
    key_mean,
    key_order,
    key_shift,
)

__all__ = ["KeyFrames", "frames_of_layer"]


@dataclass(frozen=True, eq=False, repr=False)
class KeyFrames:
    """The frame of every (layer, KV head) of a model; option `frames` of a cache.

    Parameters
    ----------
    k_mean : float16, (layers, num_heads_kv, head_dim)
        What is taken off keys, in units of 2**exponent.
    k_shift : uint8, (layers, num_heads_kv, head_dim / 2)
        By how many binary orders rotary pairs, channels i and i + head_dim / 2, are scaled down.
    exponent : int8, (layers, num_heads_kv, 2)
        Keys, and values, are divided by 2 to that.
    k_order : uint8, (layers, num_heads_kv, head_dim / 2)
        The rotary pairs in order, where keys are kept in blocks.
    k_gain : float32, (layers, num_heads_kv, 4)
        What blocks are multiplied by.

    Raises
    ------
    ValueError
        If shapes or types do not fit together, or a table holds what no frame has.
    TypeError
        If a table is no NumPy array.

    Examples
    --------
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 1, 80, 2, 64), dtype=np.float32)
    >>> frames = KeyFrames.measured([(q, k, v)])
    >>> frames.k_order.shape, frames.k_gain.shape
    ((1, 2, 32), (1, 2, 4))
    """

    k_mean: NDArray[np.float16]
    k_shift: NDArray[np.uint8]
    exponent: NDArray[np.int8]
    k_order: NDArray[np.uint8]
    k_gain: NDArray[np.float32]

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not isinstance(value, np.ndarray):
                raise TypeError(f"{field.name} must be a NumPy array, got {type(value).__name__}")
        if self.k_mean.ndim != 3:
            raise ValueError(f"k_mean must be (layers, heads, head_dim), got shape {self.k_mean.shape}")
        layers, heads, head_dim = self.k_mean.shape
        last = {"k_mean": head_dim, "exponent": 2, "k_gain": 4}
        for name, dtype in FRAME.items():
            table, shape = getattr(self, name), (layers, heads, last.get(name, head_dim // 2))
            if table.dtype != dtype or table.shape != shape:
                raise ValueError(f"{name} must be {dtype} {shape}, got {table.dtype} {table.shape}")
        check_frames({name: getattr(self, name) for name in FRAME})

    def __repr__(self) -> str:
        layers, heads, head_dim = self.k_mean.shape
        return f"KeyFrames: {layers} layers, {heads} KV heads of {head_dim} channels"

    @classmethod
    def measured(
        cls, layers: Iterable[tuple[NDArray[Any], NDArray[Any], NDArray[Any]]], *, narrow: bool = False
    ) -> KeyFrames:
        """Take frames from what a model has made of a text.

        Parameters
        ----------
        layers : iterable of (q, k, v)
            Of each layer queries (rows, tokens, num_heads_q, head_dim), and keys and values (rows, tokens,
            num_heads_kv, head_dim), as a cache takes them. The first four tokens of a row are left out.
        narrow : bool
            For ladders without a width of 8 for keys: see `kvlab.ops.frame.key_mean`.

        Returns
        -------
        KeyFrames
            Of as many layers.

        Raises
        ------
        ValueError
            If layers differ in shape, or there is none.

        Examples
        --------
        >>> q, k, v = np.random.default_rng(0).standard_normal((3, 1, 80, 2, 64), dtype=np.float32)
        >>> frames = KeyFrames.measured([(q, k + 3, v)] * 4)
        >>> frames.k_mean.shape, bool((abs(frames.k_mean - 3) < 1).all())
        ((4, 2, 64), True)
        """
        arrays = ([np.asarray(x, np.float32) for x in layer] for layer in layers)
        found = [frames_of_layer(*layer, narrow=narrow) for layer in arrays]
        if not found:
            raise ValueError("layers is empty: give (q, k, v) of every layer that a cache packs")
        return cls(*map(np.stack, zip(*found, strict=True)))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the frames to a file, atomically; see `kvlab.files` for the format.

        Parameters
        ----------
        path : path
            In a folder that is there.

        Raises
        ------
        OSError
            If the file cannot be written; one that was there is as it was.

        Examples
        --------
        >>> import tempfile
        >>> frames = KeyFrames.measured(np.ones((1, 3, 1, 80, 2, 64), np.float32))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     frames.save(f"{folder}/frames")
        ...     bool((KeyFrames.load(f"{folder}/frames").k_mean == frames.k_mean).all())
        True
        """
        arrays = {field.name: getattr(self, field.name) for field in fields(self)}
        files.write(path, {"holds": "frames"}, arrays)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> KeyFrames:
        """Read frames from a file that `save` wrote.

        Parameters
        ----------
        path : path

        Returns
        -------
        KeyFrames

        Raises
        ------
        FormatError
            If the file is damaged, truncated, of another version, or holds no frames.
        """
        description, arrays = files.read(path)
        names = {field.name for field in fields(cls)}
        if description.get("holds") != "frames" or set(arrays) != names:
            raise FormatError(f"{os.fspath(path)}: holds no frames; a cache is loaded by MixedPrecisionCache")
        try:
            return cls(**arrays)
        except ValueError as error:
            raise FormatError(f"{os.fspath(path)}: {error}") from None

    def of_layer(self, layer: int, *, in_blocks: bool) -> dict[str, NDArray[Any]]:
        """Return what a cache takes over for a layer.

        Parameters
        ----------
        layer : int
        in_blocks : bool
            Whether the layer keeps keys in blocks of channels.

        Returns
        -------
        dict of str to array (num_heads_kv, ...)
            Tables by name: all, or without blocks those that need none.
        """
        names = [name for name in FRAME if in_blocks or name not in FRAME_OF_BLOCKS]
        return {name: getattr(self, name)[layer] for name in names}


def frames_of_layer(
    q: NDArray[np.float32], k: NDArray[np.float32], v: NDArray[np.float32], *, narrow: bool
) -> tuple[NDArray[Any], ...]:
    """Take the tables of a layer from what a model has made of a text.

    Parameters
    ----------
    q : (rows, tokens, num_heads_q, head_dim) float32
    k, v : (rows, tokens, num_heads_kv, head_dim) float32
    narrow : bool
        As for `KeyFrames.measured`.

    Returns
    -------
    tuple of arrays (num_heads_kv, ...)
        The fields of `KeyFrames`, of one layer.
    """
    sinks, keys = k[0, :FIRST], k[:, FIRST:].reshape(-1, *k.shape[2:])
    sample, last = np.concatenate([sinks, keys]), len(sinks) + len(keys)
    query_sums = np.zeros(k.shape[2:], np.float32)
    add_queries(query_sums, q[:, FIRST:].reshape(-1, *q.shape[2:]))
    exponent = exponent_of(sample, last), exponent_of(v.reshape(-1, *v.shape[2:]), v.size)
    mean = key_mean(sample, exponent[0], narrow=narrow, last=last)
    shift = key_shift(sample, mean, query_sums, exponent[0], last)
    order = key_order(sample, mean, query_sums, exponent[0], last)
    gain = key_gain(sample, mean, shift, order, exponent[0], last)
    return mean, shift, np.stack(exponent, axis=1), order, gain

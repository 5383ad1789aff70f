"""What a cache is told once: its options, each listed here and nowhere else, and their checks.

The fields are the signature of `MixedPrecisionCache`, whose docstring says what they mean, and what a saved
cache is made from again.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import KW_ONLY, MISSING, dataclass, fields
from functools import wraps
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvlab.arguments import choice, number, whole_number
from kvlab.arrays import Array, dtype_name, to_numpy_view
from kvlab.cache.allocator import METHODS, Method
from kvlab.cache.importance import Importance
from kvlab.cache.ladder import Bits

__all__ = ["MOST", "CacheOptions", "check_device", "check_names", "row_numbers"]

DTYPES = ("float16", "bfloat16", "float32")
_ON_GPU = {"dtype": ("float16", "bfloat16"), "head_dim": (64, 80, 96, 128, 256)}
_LEAST = {
    "num_layers": 1,
    "num_heads_q": 1,
    "num_heads_kv": 1,
    "head_dim": 16,
    "batch": 0,
    "residual": 0,
    "sink": 0,
    "recent": 0,
    "plan_length": 1,
    "realloc_every": 1,
}
_ELSEWHERE = {
    "nbits": "bits",
    "residual_length": "residual",
    "batch_size": "batch",
    "max_batch_size": "batch",
    "max_cache_len": "max_seqlen",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads_q",
    "num_key_value_heads": "num_heads_kv",
}
"""Options of other libraries and what they are called here."""
_NOT_HERE = {"q_group_size": "there are no groups: every key and value of a token has a step size of its own"}
MOST = (1 << 31) - 1
"""Largest whole number that an option may be."""


def check_device(device: object) -> None:
    """Refuse what is neither None nor "cpu", "cuda" or "cuda:" and a number."""
    if device is not None and not isinstance(device, str):
        raise TypeError(f"device={device!r} must be 'cpu', 'cuda' or None, not {type(device).__name__}")
    if device is not None and not re.fullmatch(r"cpu|cuda(:\d+)?", device, re.ASCII):
        raise ValueError(f"device={device!r} is not supported; 'cpu', 'cuda' and 'cuda:0', 'cuda:1' ... are")


def _name_of_dtype(dtype: Any) -> str:
    """The name of a dtype of torch or NumPy; names as they are."""
    if isinstance(dtype, str):
        return dtype
    try:
        return dtype_name(np.dtype(dtype) if isinstance(dtype, type) else dtype, "dtype")
    except TypeError:
        supported = ", ".join(map(repr, DTYPES))
        raise TypeError(f"dtype={dtype!r} is not supported; {supported} or such dtypes are") from None


def check_names(options: Mapping[str, object], known: Collection[str], of: str) -> None:
    """Refuse options that are not known, and say which one is meant.

    Examples
    --------
    >>> check_names({"nbits": 4}, ["bits", "budget"], "the cache")
    Traceback (most recent call last):
        ...
    TypeError: nbits=4 is no option of the cache, bits is meant; bits, budget are
    """
    for name, value in options.items():
        if name in known:
            continue
        meant = [_ELSEWHERE[name]] if name in _ELSEWHERE else difflib.get_close_matches(name, known, 1)
        hint = f", {meant[0]} is meant" if meant and meant[0] in known else ""
        hint = f" ({_NOT_HERE[name]}: leave it out)" if name in _NOT_HERE else hint
        raise TypeError(f"{name}={value!r} is no option of {of}{hint}; {', '.join(known)} are")


def _refuses_by_name(kind: type[CacheOptions]) -> type[CacheOptions]:
    """Let errors about missing and unknown options speak of the class that was called."""
    plain, needed = kind.__init__, [field.name for field in fields(kind) if field.default is MISSING]

    @wraps(plain)
    def checked(self: CacheOptions, *args: Any, **options: Any) -> None:
        called = type(self).__name__
        check_names(options, [field.name for field in fields(kind)], called)
        missing = [name for name in needed[len(args) :] if name not in options]
        if missing:
            raise TypeError(
                f"{called} needs {', '.join(missing)}: {called}({', '.join(needed)}, ...), the geometry of "
                "the model"
            )
        plain(self, *args, **options)

    kind.__init__ = checked  # type: ignore[method-assign]
    return kind


@_refuses_by_name
@dataclass(eq=False)
class CacheOptions:
    """Options of a cache by name, checked; see `kvlab.MixedPrecisionCache`."""

    num_layers: int
    num_heads_q: int
    num_heads_kv: int
    head_dim: int
    _: KW_ONLY
    batch: int = 1
    budget: float | int | str | None = 0.35
    bits: Bits = (2, 3, 4, 8)
    importance: Importance = "attention"
    allocator: Method = "greedy"
    residual: int = 0
    sink: int = 4
    recent: int = 128
    plan_length: int = 2048
    max_seqlen: int | None = None
    realloc_every: int = 16
    ema_decay: float = 0.9
    device: str | None = None
    dtype: str = "float16"

    def __post_init__(self) -> None:
        for name, least in _LEAST.items():
            setattr(self, name, whole_number(getattr(self, name), name, least, MOST))
        if self.num_heads_q % self.num_heads_kv:
            raise ValueError(
                f"num_heads_q={self.num_heads_q} must be a multiple of num_heads_kv={self.num_heads_kv}"
            )
        if self.head_dim % 16 or self.head_dim > 256:
            raise ValueError(f"head_dim={self.head_dim} is not supported; a multiple of 16 from 16 to 256 is")
        if self.max_seqlen is not None:
            self.max_seqlen = whole_number(self.max_seqlen, "max_seqlen", 0, MOST)
        if isinstance(self.bits, Iterable) and not isinstance(self.bits, str):
            self.bits = tuple(self.bits)
        self.ema_decay = number(self.ema_decay, "ema_decay", 0, 1)
        choice(self.allocator, "allocator", METHODS)
        self.dtype = _name_of_dtype(self.dtype)
        choice(self.dtype, "dtype", DTYPES)
        check_device(self.device)
        self.device = self.device or "cpu"
        if self.on_gpu:
            self._check_gpu()

    def _check_gpu(self) -> None:
        """Refuse what a cache on a GPU does not do."""
        for name, supported in _ON_GPU.items():
            if getattr(self, name) not in supported:
                listed = ", ".join(map(repr, supported))
                raise NotImplementedError(
                    f"{name}={getattr(self, name)!r} is not supported on a GPU, {listed} is; "
                    f"use that or device='cpu'"
                )

    @property
    def on_gpu(self) -> bool:
        """Whether arrays and memory are on a GPU."""
        return str(self.device).split(":")[0] == "cuda"

    def saved(self) -> dict[str, Any]:
        """All options that go with the cache to another machine, as JSON has them."""
        found = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "device"}
        bits = self.bits
        return {**found, "bits": bits if isinstance(bits, (str, int)) else list(map(str, bits))}


def row_numbers(rows: Array, batch: int, keep_size: bool = False) -> NDArray[np.int64]:
    """Numbers of rows of a batch; with `keep_size` as many as it has."""
    numbers = np.asarray(to_numpy_view(rows, "rows"))
    if numbers.ndim != 1 or numbers.dtype.kind not in "iu":
        raise TypeError(f"rows must be a vector of integers, not {numbers.dtype} of shape {numbers.shape}")
    if keep_size and len(numbers) != batch:
        raise ValueError(
            f"rows has {len(numbers)} entries for a batch of {batch}; use select to change the batch"
        )
    outside = numbers[(numbers < 0) | (numbers >= batch)]
    if len(outside):
        raise ValueError(f"rows names row {outside[0]}; this batch has rows 0 to {batch - 1}")
    return numbers.astype(np.int64)

"""Options of a cache, each listed here and nowhere else, and their checks.

The fields are the signature of `MixedPrecisionCache`, whose docstring says what they mean, and what a saved
cache is made from again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, MISSING, dataclass, fields
from functools import wraps
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvlab.arguments import LONGEST, check_device, check_names, choice, number, whole_number
from kvlab.arrays import Array, dtype_name
from kvlab.cache.importance import Importance, UpdateFunction
from kvlab.ladder import BITS, Bits, default_bits, is_ample, plain_bits
from kvlab.ops.allocator import METHODS, Method
from kvlab.ops.key_frames import KeyFrames
from kvlab.ops.layer_state import WAITING_PAGES
from kvlab.pages import TOKENS_PER_PAGE
from kvlab.sizes import parse_budget
from kvlab.torch_compile import opaque
from kvlab.views import to_numpy_view

__all__ = ["CacheOptions", "Settings", "row_numbers"]

Rotary = Sequence[float] | Sequence[Sequence[float]] | None
DTYPES = ("float16", "bfloat16", "float32")
_ON_GPU = {"dtype": ("float16", "bfloat16"), "head_dim": (64, 80, 96, 128, 256)}
_MINIMUM = {
    "num_layers": 1,
    "num_heads_q": 1,
    "num_heads_kv": 1,
    "head_dim": 0,
    "batch": 0,
    "residual": 0,
    "sink": 0,
    "recent": 0,
    "rewind": 0,
    "plan_length": 1,
    "realloc_every": 1,
}


def _name_of_dtype(dtype: Any) -> str:
    """The name of a dtype of torch or NumPy; names as they are."""
    if isinstance(dtype, str):
        return dtype
    try:
        return dtype_name(np.dtype(dtype) if isinstance(dtype, type) else dtype, "dtype")
    except TypeError:
        supported = ", ".join(map(repr, DTYPES))
        raise TypeError(f"dtype={dtype!r} is not supported; {supported} or such dtypes are") from None


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

    kind.__init__ = opaque(checked)  # type: ignore[method-assign]
    return kind


@dataclass(frozen=True)
class Settings:
    """Options that plans and steps of a cache need; names as for `MixedPrecisionCache`.

    `function`: importance is one of attention mass, called on the host, and `importance` that of kernels
    which give the mass.
    """

    num_heads_q: int
    sink: int
    recent: int
    residual: int
    allocator: str
    realloc_every: int
    ema_decay: float
    floor: float
    rewind: int
    importance: str
    function: UpdateFunction | None


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
    bits: Bits = BITS
    importance: Importance = "attention"
    allocator: Method = "greedy"
    sliding_window: int | Sequence[int | None] | None = None
    rewind: int = 0
    residual: int = 0
    sink: int = 4
    recent: int = 20
    floor: float = 1.0
    plan_length: int = 2048
    max_seqlen: int | None = None
    realloc_every: int = 16
    ema_decay: float = 0.9
    device: str | None = None
    dtype: str = "float16"
    frames: KeyFrames | None = None
    rotary: Rotary = None

    def __post_init__(self) -> None:
        for name, least in _MINIMUM.items():
            setattr(self, name, whole_number(getattr(self, name), name, least, LONGEST))
        if self.num_heads_q % self.num_heads_kv:
            raise ValueError(
                f"num_heads_q={self.num_heads_q} must be a multiple of num_heads_kv={self.num_heads_kv}"
            )
        if self.head_dim not in range(16, 257, 16):
            raise ValueError(f"head_dim={self.head_dim} is not supported; a multiple of 16 from 16 to 256 is")
        if self.max_seqlen is not None:
            self.max_seqlen = whole_number(self.max_seqlen, "max_seqlen", 0, LONGEST)
        self.rotary = _rotary(self.rotary, self.num_layers, self.head_dim)
        if self.frames is not None:
            if not isinstance(self.frames, KeyFrames):
                raise TypeError(f"frames must be KeyFrames, got {type(self.frames).__name__}")
            geometry = self.num_layers, self.num_heads_kv, self.head_dim
            if self.frames.k_mean.shape != geometry:
                raise ValueError(
                    f"frames are of (layers, num_heads_kv, head_dim) {self.frames.k_mean.shape}, and the "
                    f"cache of {geometry}: measure them on its model"
                )
        self.sliding_window = _windows(self.sliding_window, self.num_layers)
        self.ema_decay = number(self.ema_decay, "ema_decay", 0, 1)
        self.floor = number(self.floor, "floor", 0, 1 << 20)
        choice(self.allocator, "allocator", METHODS)
        self.dtype = _name_of_dtype(self.dtype)
        choice(self.dtype, "dtype", DTYPES)
        if self.bits == BITS:
            frames_hold, ample = self._frames_hold(), self._is_ample()
            self.bits = default_bits(self.head_dim, frames_hold=frames_hold, is_ample=ample)
        else:
            self.bits = plain_bits(self.bits)
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

    @property
    def windows(self) -> tuple[int, ...]:
        """The sliding window of each layer; 0: it has none."""
        window = self.sliding_window
        of_layers = window if isinstance(window, Sequence) else [window] * self.num_layers
        return tuple(x or 0 for x in of_layers)

    @property
    def rotary_of_layers(self) -> tuple[tuple[float, ...], ...]:
        """By layer, how far RoPE turns pairs of channels of keys with each token; none: it is not known."""
        rotary: Any = self.rotary or ()
        return tuple(rotary) if rotary and isinstance(rotary[0], tuple) else (rotary,) * self.num_layers

    def _frames_hold(self) -> bool:
        """Whether frames are given, or taken from enough tokens where it is known how RoPE turns keys.

        Under a budget that never holds a row's first tokens in 16 bits, and a page beside them, no token
        waits: a frame of a few tokens costs far more than profiles bring.
        """
        if self.frames is not None or self.max_seqlen is None or not any(self.rotary_of_layers):
            return self.frames is not None or any(self.rotary_of_layers)
        budget, tokens = parse_budget(self.budget), (WAITING_PAGES + 1) * TOKENS_PER_PAGE
        if budget.fraction is not None:
            return budget.fraction * max(self.max_seqlen, self.plan_length) >= tokens
        token_nbytes = 2 * 2 * self.num_layers * self.num_heads_kv * self.head_dim
        return budget.nbytes is None or budget.nbytes >= max(self.batch, 1) * tokens * token_nbytes

    def _is_ample(self) -> bool:
        """Whether the default ladder has exact tokens, too."""
        budget, itemsize = parse_budget(self.budget), 4 if self.dtype == "float32" else 2
        tokens, windows = self.plan_length, [window for window in self.windows if window]
        if budget.fraction is not None:
            fraction = budget.fraction * 2 / itemsize
        elif budget.nbytes is None or not self.max_seqlen:
            return False
        else:
            tokens = self.max_seqlen
            of_layers = sum(min(tokens, window or tokens) for window in self.windows)
            of_token = 2 * itemsize * self.num_heads_kv * self.head_dim
            fraction = budget.nbytes / (max(self.batch, 1) * of_token * of_layers)
        return is_ample(fraction, min([tokens, *windows]))

    def settings(self) -> Settings:
        """The options that plans and steps need."""
        found: dict[str, Any] = {x.name: getattr(self, x.name, None) for x in fields(Settings)}
        if callable(self.importance):
            found |= {"function": self.importance, "importance": "attention"}
        return Settings(**found)

    def saved(self) -> dict[str, Any]:
        """All options that go with the cache to another machine, as JSON has them."""
        names = [field.name for field in fields(self) if field.name not in ("device", "frames")]
        found = {name: getattr(self, name) for name in names}
        bits = self.bits
        return {**found, "bits": bits if isinstance(bits, (str, int)) else list(bits)}


def _rotary(rotary: Any, num_layers: int, head_dim: int) -> Rotary:
    """Check the angles of RoPE of all layers, or those of each."""
    if rotary is None:
        return None
    if not isinstance(rotary, list | tuple | np.ndarray):
        raise TypeError(f"rotary must be a sequence of angles, not {type(rotary).__name__}")
    by_layer = any(isinstance(x, list | tuple | np.ndarray) for x in rotary)
    if by_layer and len(rotary) != num_layers:
        raise ValueError(f"rotary names {len(rotary)} layers of {num_layers}: give each its angles, or ()")
    found = []
    for angles in rotary if by_layer else [rotary]:
        found.append(tuple(number(x, "an angle of rotary", 0, 4) for x in angles))
        if 2 * len(found[-1]) > head_dim:
            raise ValueError(
                f"rotary has {len(found[-1])} angles; head_dim={head_dim} has {head_dim // 2} pairs at most"
            )
    return tuple(found) if by_layer else found[0]


def _windows(window: Any, num_layers: int) -> int | tuple[int | None, ...] | None:
    """Check the sliding window of all layers, or those of each."""
    if not isinstance(window, list | tuple):
        return None if window is None else whole_number(window, "sliding_window", 1, LONGEST)
    if len(window) != num_layers:
        raise ValueError(
            f"sliding_window names {len(window)} layers of {num_layers}: give each its window, or None for "
            "full attention"
        )
    return tuple(None if x is None else whole_number(x, "sliding_window", 1, LONGEST) for x in window)


def row_numbers(rows: Array | Sequence[int], batch: int, keep_size: bool = False) -> NDArray[np.int64]:
    """Numbers of rows of a batch; with `keep_size` as many as it has."""
    if isinstance(rows, list | tuple):
        numbers = np.asarray(rows) if rows else np.empty(0, np.int64)
    else:
        numbers = to_numpy_view(rows, "rows")
    if numbers.ndim != 1 or numbers.dtype.kind not in "iu":
        raise TypeError(f"rows must be a vector of integers, not {numbers.dtype} of shape {numbers.shape}")
    if keep_size and len(numbers) != batch:
        raise ValueError(
            f"rows has {len(numbers)} entries for a batch of {batch}; use select to change the batch"
        )
    outside = numbers[(numbers < 0) | (numbers >= batch)]
    if len(outside):
        there = f"rows 0 to {batch - 1}" if batch else "no rows"
        raise ValueError(f"rows names row {outside[0]}; this batch has {there}")
    return numbers.astype(np.int64)

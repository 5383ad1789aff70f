"""Options of a cache, each listed here and nowhere else, their checks, and the byte budget.

The fields are the signature of `MixedPrecisionCache`, whose docstring says what they mean, and what a saved
cache is made from again.

An absolute budget (`"6GiB"`, an int) is a cap on all live buffers of the cache. A relative one (`0.35`,
`"35%"`, `"4.25bpe"`) is a fraction of the bytes that a float16 cache would take at
`max(present length, plan_length)`, so that it grows with the sequence; 1 bpe is a sixteenth. Either way each
row owns 1/batch of it, so that a row never depends on its batch mates. Layers get equal shares, but one with
a sliding window counts no more tokens than it keeps. `Limit` is the budget of one cache: it says which
lengths fit, and refuses the others.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import KW_ONLY, MISSING, dataclass, fields
from functools import lru_cache, partial, wraps
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvlab.arguments import LONGEST, check_device, check_names, choice, number, shown, whole_number
from kvlab.arrays import Array, dtype_name, opaque, to_numpy_view
from kvlab.cache.importance import Importance, UpdateFunction
from kvlab.cache.layers import Layer
from kvlab.errors import BudgetError
from kvlab.ladder import BITS, Bits, default_bits, is_ample
from kvlab.ops.allocator import METHODS, Method
from kvlab.ops.key_frames import KeyFrames
from kvlab.ops.layer_state import WAITING_PAGES
from kvlab.ops.plan import reach_of
from kvlab.pages import TOKENS_PER_PAGE
from kvlab.sizes import parse_size

__all__ = [
    "Budget",
    "CacheOptions",
    "Limit",
    "RowBudgets",
    "Settings",
    "parse_budget",
    "row_numbers",
]

Rotary = Sequence[float] | Sequence[Sequence[float]] | None
DTYPES = ("float16", "bfloat16", "float32")
_ON_GPU = {"dtype": ("float16", "bfloat16"), "head_dim": (64, 80, 96, 128, 256)}
_MINIMUM = {
    "num_layers": 1,
    "num_heads_q": 1,
    "num_heads_kv": 1,
    "head_dim": 16,
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
        if self.head_dim % 16 or self.head_dim > 256:
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
        elif isinstance(self.bits, Iterable) and not isinstance(self.bits, str):
            self.bits = tuple(self.bits)
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
        return {**found, "bits": bits if isinstance(bits, (str, int)) else list(map(str, bits))}


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


# ---- the byte budget ---------------------------------------------------------------------------------------

_UNITS = {"bpe": (16, "bits per element"), "%": (100, "per cent of float16's bytes")}
MAX_FRACTION = 16
"""Larger ones were meant as bytes: pages of 32 bits take twice those of float16, open pages little more."""


@dataclass(frozen=True, slots=True)
class Budget:
    """A parsed budget; exactly one of `nbytes` and `fraction` is set, or neither: no limit."""

    nbytes: int | None = None
    fraction: float | None = None


def parse_budget(budget: float | int | str | None) -> Budget:
    """Parse a budget as users write it.

    Examples
    --------
    >>> parse_budget("6GiB").nbytes, parse_budget(0.35).fraction, parse_budget("4bpe").fraction
    (6442450944, 0.35, 0.25)
    >>> parse_budget("30%").fraction
    0.3
    >>> parse_budget(None)
    Budget(nbytes=None, fraction=None)
    """
    if budget is None:
        return Budget()
    number: Any = budget
    if isinstance(number, (np.integer, np.floating)):
        budget = number.item()
    if isinstance(budget, bool) or not isinstance(budget, (int, float, str)):
        raise TypeError(
            f"budget={shown(budget)} must be a fraction, bytes, a string such as '6GiB' or '4.25bpe', or None"
        )
    unit = re.search("(bpe|%)$", budget.strip().lower()) if isinstance(budget, str) else None
    if isinstance(budget, str) and unit:
        text, (whole, what) = budget.strip()[: unit.start()], _UNITS[unit[0]]
        try:
            fraction = float(text) / whole
        except ValueError:
            raise ValueError(f"budget={budget!r}: {text!r} is no number of {what}") from None
    elif isinstance(budget, float):
        fraction = budget
    else:
        try:
            nbytes = parse_size(budget, "budget")
        except ValueError as error:
            raise ValueError(
                f"{error}; or a fraction of float16's bytes, 0.35 or '35%', bits per element, '4.25bpe', "
                "or None"
            ) from None
        if nbytes <= 0:
            raise ValueError(f"budget={budget!r} must be positive")
        return Budget(nbytes=nbytes)
    if not 0 < fraction < float("inf"):
        raise ValueError(f"budget={budget!r} must be positive and finite")
    if fraction > MAX_FRACTION:
        raise ValueError(
            f"budget={budget!r} is a fraction of float16's bytes; no cache takes {MAX_FRACTION} times as "
            "many. Write a number of bytes as a whole number or with a unit: 500_000, '6GiB'"
        )
    return Budget(fraction=fraction)


RowBudgets = Sequence[int] | None
"""Bytes that a row may take in each layer; None: no limit."""
_FAR = 1024
"""Among so many more tokens a length that fits is looked for where not all from some length on do."""


@lru_cache(maxsize=64)  # layers are often the same
def _smallest_nbytes(layer: Layer, seqlen: int, rewind: int) -> int:
    return layer.smallest_nbytes(seqlen, rewind)


class Limit:
    """The budget of one cache, for rows of any length.

    A relative budget never gives a row less than an empty one takes; an absolute one that does is refused.
    Shares of an absolute one are in proportion to the tokens that layers keep, when there are `max_seqlen` of
    them, or else `plan_length`.

    Parameters
    ----------
    options : CacheOptions
    layers : sequence of Layer

    Raises
    ------
    BudgetError
        If not even an empty cache fits.
    """

    def __init__(self, options: CacheOptions, layers: Sequence[Layer]) -> None:
        self.budget = parse_budget(options.budget)
        self._layers, self.rewind, self._plan_length = layers, options.rewind, options.plan_length
        self._residual = options.residual
        self._fixed_nbytes = layers[0].store.fixed_nbytes  # of a row without tokens, in any layer
        self._fp16_token, self._windows = 2 * 2 * options.num_heads_kv * options.head_dim, options.windows
        longest = max(options.max_seqlen or options.plan_length, 1)
        self._layer_tokens = [min(longest, window or longest) for window in self._windows]
        if not self._holds_rows(options.batch):
            needed = self._empty_nbytes(options.batch)
            raise BudgetError(
                f"budget={options.budget!r} is {self.budget.nbytes} bytes and an empty cache takes {needed} "
                "already. Write a fraction of float16's bytes as 0.3 or '30%', bits per element as '4bpe', "
                "bytes with a unit, '8MiB'",
                needed_bytes=needed,
            )

    def row_budgets(self, seqlen: int, batch: int) -> RowBudgets:
        """Bytes that one row may take in each layer at a length; None: no limit."""
        if self.budget.nbytes is not None:
            of_row, whole = self.budget.nbytes // max(batch, 1), sum(self._layer_tokens)
            return [of_row * tokens // whole for tokens in self._layer_tokens]
        if self.budget.fraction is None:
            return None
        length, fraction = max(seqlen, self._plan_length), self.budget.fraction
        given = {}  # layers are often alike
        for window in set(self._windows):
            tokens = min(length, reach_of(window, self.rewind) or length)
            given[window] = max(int(fraction * (self._fp16_token * tokens)), self._fixed_nbytes)
        return [given[window] for window in self._windows]

    def smallest_nbytes(self, seqlen: int) -> int:
        """Bytes of a row, in all layers by their shares, with which so many tokens fit for certain."""
        return self._row_nbytes([self._smallest(layer, seqlen) for layer in range(len(self._layers))])

    def _row_nbytes(self, needed: Sequence[int]) -> int:
        """Bytes of which every layer's share is what it needs."""
        whole = sum(self._layer_tokens)
        return max(-(-n * whole // tokens) for n, tokens in zip(needed, self._layer_tokens, strict=True))

    def _smallest(self, layer: int, seqlen: int) -> int:
        """Bytes with which a row does, however its tokens come, at the lowest widths."""
        return _smallest_nbytes(self._layers[layer], seqlen, self.rewind)

    def check(self, seqlen: int, batch: int) -> None:
        """Refuse rows of a length that do not fit for certain, with BudgetError."""
        budgets = self.row_budgets(seqlen, batch) or ()
        kinds = set(zip(self._layers, budgets, strict=False))  # layers are often alike
        if any(_smallest_nbytes(layer, seqlen, self.rewind) > given for layer, given in kinds):
            raise self._refusal(seqlen, batch)

    def _short(self, seqlen: int, batch: int) -> list[tuple[int, int]]:
        """Layers that so many tokens do not fit, and the bytes that they have for a row."""
        budgets = self.row_budgets(seqlen, batch)
        return [
            (layer, given)
            for layer, given in enumerate(budgets or ())
            if self._smallest(layer, seqlen) > given
        ]

    def _refusal(self, seqlen: int, batch: int) -> BudgetError:
        """The error for a length that does not fit: it names lengths that do, and the bytes needed."""
        rows, fraction = max(batch, 1), self.budget.fraction
        needed, given = self.smallest_nbytes(seqlen) * rows, sum(self.row_budgets(seqlen, batch) or ()) * rows
        of_rows = "" if batch == 1 else f" in each of {batch} rows"
        fault = f"{seqlen} tokens{of_rows} need at least {needed} bytes at the lowest widths and the "
        if not self._holds_rows(batch):
            return BudgetError(
                f"{fault}budget gives {given}; so many rows take {self._empty_nbytes(batch)} without any "
                "token. Raise the budget or keep fewer rows",
                needed_bytes=needed,
            )
        low, budget = self._longest(seqlen, batch), "budget"
        longest = f"the longest length that fits is {low}"
        if fraction is not None:
            if enough := self._enough(seqlen, batch):
                budget = f"budget or plan_length (to {enough})"
            if high := self._shortest(seqlen, enough or seqlen + self._residual + _FAR, batch):
                longest = (
                    f"the longest length that fits below {seqlen} is {low}, the shortest above is {high}"
                )
        return BudgetError(
            f"{fault}budget gives {given}; {longest}. Raise the {budget}, add a lower width to bits (with a "
            "width 0 the least important tokens are dropped) or shorten the sequence",
            needed_bytes=needed,
            longest_length=low,
        )

    def _longest(self, seqlen: int, batch: int) -> int:
        """The longest length up to one that fits; what a relative budget gives it bounds all shorter ones."""
        while seqlen > 0 and (short := self._short(seqlen, batch)):
            seqlen = min(
                bisect_right(range(seqlen), given, key=partial(self._smallest, layer)) - 1
                for layer, given in short
            )
        return seqlen

    # A page takes the same bytes however full it is and a relative budget grows with each token, so a length
    # may be refused and longer ones fit.

    def _tokens_for(self, seqlen: int, layers: Iterable[int]) -> int:
        """How many tokens a relative budget counts where it gives layers what a length takes."""
        of_token = (self.budget.fraction or 0) * self._fp16_token
        return max(int(self._smallest(layer, seqlen) / of_token) for layer in layers)

    def _shortest(self, seqlen: int, end: int, batch: int) -> int:
        """The shortest length of `seqlen` to `end` that fits; 0: there is none."""
        while seqlen <= end and (short := self._short(seqlen, batch)):
            seqlen = max(seqlen + 1, self._tokens_for(seqlen, (layer for layer, _ in short)))
        return seqlen if seqlen <= end else 0

    def _enough(self, seqlen: int, batch: int) -> int:
        """The `plan_length` with which every length fits, where such a one does not; 0: there is none."""
        begins = range(self._residual + 1, LONGEST, TOKENS_PER_PAGE)  # of pages; there most bytes are missing
        if self._short(begins[-1], batch):
            return 0
        fitting = bisect_left(begins, True, key=lambda n: not self._short(n, batch))
        last = max(seqlen, self._residual, begins[fitting] - TOKENS_PER_PAGE)  # that is refused
        return self._tokens_for(last, range(len(self._layers))) + 1

    def _holds_rows(self, batch: int) -> bool:
        """Whether rows without tokens fit."""
        budgets = self.row_budgets(0, batch)
        return budgets is None or min(budgets) >= self._fixed_nbytes

    def _empty_nbytes(self, batch: int) -> int:
        return self._row_nbytes([self._fixed_nbytes] * len(self._layers)) * max(batch, 1)

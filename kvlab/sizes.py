"""Sizes as people write them, ``32K`` tokens or ``6GiB``, and budgets, ``30%``, in arguments and commands."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from kvlab.arguments import shown

__all__ = ["MAX_FRACTION", "Budget", "format_size", "parse_budget", "parse_size"]

_BINARY = {f"{prefix}{unit}": 1024**power for power, prefix in enumerate("kmgt", 1) for unit in ("", "ib")}
_DECIMAL = {f"{prefix}b": 1000**power for power, prefix in enumerate("kmgt", 1)}
_FACTORS = {"": 1, "b": 1, **_BINARY, **_DECIMAL}


def parse_size(text: str | int, name: str = "size") -> int:
    """Return the number that a size stands for.

    ``K``, ``M``, ``G``, ``T`` and ``KiB``, ``MiB``, ``GiB``, ``TiB`` are powers of 1024, ``kB``, ``MB``,
    ``GB``, ``TB`` powers of 1000; letter case does not matter.

    Parameters
    ----------
    text : str or int
        A number and an optional unit.
    name : str
        The caller's name of the argument, for the error.

    Raises
    ------
    ValueError
        If `text` is no such size, is negative or is no whole number.

    Examples
    --------
    >>> parse_size("32K"), parse_size("6GiB"), parse_size("1.5MB"), parse_size(4096)
    (32768, 6442450944, 1500000, 4096)
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", str(text), re.ASCII)
    if match is None or match[2].lower() not in _FACTORS:
        raise ValueError(
            f"{name}={text!r} is no size; write a number with an optional unit: 4096, 32K, 1.5GB, 6GiB"
        )
    value = Fraction(match[1]) * _FACTORS[match[2].lower()]
    if value.denominator != 1:
        raise ValueError(f"{name}={text!r} is {float(value)}, which is no whole number")
    return int(value)


def format_size(nbytes: int) -> str:
    """Return a number of bytes as a person reads it.

    Examples
    --------
    >>> format_size(512), format_size(3 << 20), format_size(6_442_450_944)
    ('512 B', '3.00 MiB', '6.00 GiB')
    """
    power = min(max(nbytes.bit_length() - 1, 0) // 10, 4)
    return f"{nbytes} B" if power == 0 else f"{nbytes / 1024**power:.2f} {' KMGT'[power]}iB"


# ---- the byte budget of a cache

_UNITS = {"bpe": (16, "bits per element"), "%": (100, "per cent of float16's bytes")}
MAX_FRACTION = 2.5
"""Larger ones were meant as bits or bytes: pages of 32 bits take twice those of float16, with all else little
more."""


@dataclass(frozen=True, slots=True)
class Budget:
    """A parsed budget; exactly one of `nbytes` and `fraction` is set, or neither: no limit."""

    nbytes: int | None = None
    fraction: float | None = None


def parse_budget(budget: float | int | str | None) -> Budget:
    """Parse a budget as users write it, in Python or in commands; numbers of NumPy are taken, too.

    Raises
    ------
    TypeError
        If it is no number or text; nor is an array or tensor: one on a GPU would have to be waited for.
    ValueError
        If it is not positive, or a fraction above `MAX_FRACTION`.

    Examples
    --------
    >>> parse_budget("6GiB").nbytes, parse_budget(0.35).fraction, parse_budget("4bpe").fraction
    (6442450944, 0.35, 0.25)
    >>> parse_budget("30%").fraction, parse_budget("0.3").fraction
    (0.3, 0.3)
    >>> parse_budget(None)
    Budget(nbytes=None, fraction=None)
    """
    if budget is None:
        return Budget()
    if isinstance(budget, np.generic):
        budget = budget.item()
    if isinstance(budget, bool) or not isinstance(budget, (int, float, str)):
        raise TypeError(
            f"budget={shown(budget)} must be a fraction, bytes, a string such as '6GiB' or '4.25bpe', or None"
        )
    if isinstance(budget, str) and re.fullmatch(r"\d*\.\d+", budget.strip(), re.ASCII):
        budget = float(budget)
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
            f"budget={budget!r} is a fraction of float16's bytes, and {MAX_FRACTION} is the largest: float32 "
            "takes twice those bytes. Write bits per element as '4.25bpe', bytes as a whole number or with a "
            "unit, 500_000 or '6GiB', and None for no limit"
        )
    return Budget(fraction=fraction)

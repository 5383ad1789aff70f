"""Sizes as people write them, ``32K`` tokens or ``6GiB``: one parser for arguments and command lines."""

from __future__ import annotations

import re
from fractions import Fraction

__all__ = ["format_size", "parse_size"]

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

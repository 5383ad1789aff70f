"""The shapes of a call's arguments, matched by symbol: the same letter is the same number everywhere."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

__all__ = ["check_heads", "match_shapes"]


def match_shapes(shapes: Mapping[str, tuple[Sequence[int], Sequence[str | int]]]) -> dict[str, int]:
    """Match the shapes of a call's arguments against symbols, and return the value of each symbol.

    Parameters
    ----------
    shapes : mapping of argument name to (shape, pattern)
        A pattern has one entry a dimension: a symbol, whose value must be the same wherever it stands, or a
        number, which the dimension must equal.

    Returns
    -------
    dict of str to int
        The value of every symbol.

    Raises
    ------
    ValueError
        If a number of dimensions or a value does not match; the message names the argument, the symbol,
        both values and the argument that set the first one.

    Examples
    --------
    >>> match_shapes({"q": ((2, 7, 64), ("B", "Sq", "D")), "k": ((2, 9, 64), ("B", "Sk", "D"))})
    {'B': 2, 'Sq': 7, 'D': 64, 'Sk': 9}
    >>> match_shapes({"q": ((2, 64), ("B", "D")), "k": ((2, 80), ("B", "D"))})
    Traceback (most recent call last):
        ...
    ValueError: k has D = 80 (axis 1: shape (2, 80), expected (B, D)), but q has D = 64 (shape (2, 64))
    """
    values: dict[str, int] = {}
    origin: dict[str, str] = {}
    for name, (shape, pattern) in shapes.items():
        if len(shape) != len(pattern):
            is_shape = _is_shape(shape, pattern)
            raise ValueError(f"{name} must have {len(pattern)} dimensions, got {len(shape)}: {is_shape}")
        for axis, (size, symbol) in enumerate(zip(shape, pattern, strict=True)):
            if isinstance(symbol, int):
                if size != symbol:
                    is_shape = _is_shape(shape, pattern)
                    raise ValueError(f"{name} must have {symbol} on axis {axis}, got {size}: {is_shape}")
            elif symbol not in values:
                values[symbol], origin[symbol] = int(size), name
            elif values[symbol] != size:
                first, is_shape = origin[symbol], _is_shape(shape, pattern)
                raise ValueError(
                    f"{name} has {symbol} = {size} (axis {axis}: {is_shape}), "
                    f"but {first} has {symbol} = {values[symbol]} (shape {_text(shapes[first][0])})"
                )
    return values


def check_heads(sizes: Mapping[str, int], name: str) -> None:
    """Check that the query heads Hq of an argument are a multiple of the heads Hk of k and v.

    Examples
    --------
    >>> check_heads({"Hq": 7, "Hk": 2}, "q")
    Traceback (most recent call last):
        ...
    ValueError: q has 7 heads: it must be a multiple of the 2 heads of k and v, which must be at least one
    """
    if sizes["Hk"] == 0 or sizes["Hq"] % sizes["Hk"]:
        raise ValueError(
            f"{name} has {sizes['Hq']} heads: it must be a multiple of the {sizes['Hk']} heads of k and v, "
            "which must be at least one"
        )


def _is_shape(shape: Sequence[int], pattern: Sequence[str | int]) -> str:
    return f"shape {_text(shape)}, expected {_text(pattern)}"


def _text(items: Sequence[str | int]) -> str:
    return f"({', '.join(map(str, items))}{',' if len(items) == 1 else ''})"

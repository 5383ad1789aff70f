"""Checks of plain arguments: integers, numbers, flags, choices. All of kvlab uses the same wording.

Every error names the argument, its value and what is supported. An integer is anything with `__index__`
except a bool. A number is anything real that `float` takes, except text. Scalars of NumPy and torch are
allowed.
"""

from __future__ import annotations

import difflib
import math
import operator
import re
import warnings
from collections.abc import Collection, Mapping
from typing import Any

LONGEST = 2**31 - 1
"""Largest length, window or number of anything: kernels count in 32 bits."""

__all__ = [
    "check_device",
    "check_names",
    "choice",
    "flag",
    "number",
    "positive",
    "refuse_unsupported",
    "renamed",
    "shown",
    "sides_of_window",
    "whole_number",
]

_ELSEWHERE = {
    "nbits": "bits",
    "residual_length": "residual",
    "batch_size": "batch",
    "max_batch_size": "batch",
    "max_cache_len": "max_seqlen",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads_q",
    "num_key_value_heads": "num_heads_kv",
    "eos_token_id": "stop",
    "max_length": "max_new_tokens",
    "is_causal": "causal",
    "softmax_scale": "scale",
    "sm_scale": "scale",
    "window_size": "window",
    "logits_soft_cap": "softcap",
    "return_attn_probs": "return_lse",
}
"""Options of other libraries and what they are called here."""
_NOT_HERE = {
    "q_group_size": "there are no groups: every key and value of a token has a step size of its own",
    "do_sample": "a temperature above 0 draws, 0 does not",
    "dropout_p": "there is no dropout",
    "alibi_slopes": "there are no biases that grow with distance",
    "attn_mask": "what rows see is said by causal, window and, in attention_varlen, the lengths of sequences",
    "enable_gqa": "q may have more heads than k and v in any case",
}


def shown(value: Any) -> str:
    """Return a value as errors show it: its repr, or of an array its dtype and shape.

    Examples
    --------
    >>> import numpy as np
    >>> shown("a"), shown(np.zeros((1, 8, 2, 64), np.float32))
    ("'a'", '<float32 array of shape (1, 8, 2, 64)>')
    """
    if not isinstance(value, type) and getattr(value, "shape", None) and hasattr(value, "dtype"):
        dtype = str(value.dtype).removeprefix("torch.")
        return f"<{dtype} array of shape {tuple(value.shape)}>"
    return repr(value)


def whole_number(value: Any, name: str, minimum: int | None = None, maximum: int | None = None) -> int:
    """Return an argument as an int.

    Parameters
    ----------
    value : object
        What the caller passed.
    name : str
        The caller's name of the argument, for the error.
    minimum, maximum : int, optional
        Limits, both allowed; an upper one needs a lower one.

    Raises
    ------
    TypeError
        If it is no whole number.
    ValueError
        If it lies outside the limits.

    Examples
    --------
    >>> whole_number(4, "sink", minimum=0)
    4
    >>> whole_number(-1, "sink", minimum=0)
    Traceback (most recent call last):
        ...
    ValueError: sink=-1 must be at least 0
    >>> whole_number(1.5, "sink")
    Traceback (most recent call last):
        ...
    TypeError: sink=1.5 must be a whole number, not float
    """
    try:
        # Of a value as it should be nothing more is asked: these checks stand before kernels of microseconds.
        if type(value) is int:
            found = value
        elif isinstance(value, bool):
            raise TypeError
        else:
            found = operator.index(value)
    except TypeError:
        raise TypeError(f"{name}={shown(value)} must be a whole number, not {type(value).__name__}") from None
    if (minimum is not None and found < minimum) or (maximum is not None and found > maximum):
        limits = f"be at least {minimum}" if maximum is None else f"lie between {minimum} and {maximum}"
        raise ValueError(f"{name}={shown(value)} must {f'be {minimum}' if minimum == maximum else limits}")
    return found


def positive(text: str) -> int:
    """Return a whole number from 1 on that is an option's value, for argparse, which names the option.

    Examples
    --------
    >>> positive("8")
    8
    """
    from argparse import ArgumentTypeError

    count = int(text)
    if count < 1:
        raise ArgumentTypeError(f"{count} is not supported: it must be 1 or more")
    return count


def number(value: Any, name: str, minimum: float = -math.inf, maximum: float = math.inf) -> float:
    """Return an argument as a float that is finite.

    Parameters
    ----------
    value : object
    name : str
    minimum, maximum : float
        Limits, both allowed.

    Raises
    ------
    TypeError
        If it is no number.
    ValueError
        If it is not finite or lies outside the limits.

    Examples
    --------
    >>> number(2, "softcap", minimum=0)
    2.0
    >>> number(float("nan"), "scale")
    Traceback (most recent call last):
        ...
    ValueError: scale=nan must be finite
    >>> number(1.5, "ema_decay", 0, 1)
    Traceback (most recent call last):
        ...
    ValueError: ema_decay=1.5 must lie between 0 and 1
    """
    if type(value) is float and minimum <= value <= maximum and -math.inf < value < math.inf:
        return value
    try:
        if isinstance(value, (bool, str, bytes)):
            raise TypeError
        found = float(value)
    except (TypeError, ValueError, RuntimeError):  # torch raises the last two for tensors of several elements
        raise TypeError(f"{name}={shown(value)} must be a number, not {type(value).__name__}") from None
    except OverflowError:
        found = math.inf
    if not math.isfinite(found):
        raise ValueError(f"{name}={shown(value)} must be finite")
    if not minimum <= found <= maximum:
        limits = (
            f"lie between {minimum:g} and {maximum:g}"
            if math.isfinite(maximum)
            else f"be at least {minimum:g}"
        )
        raise ValueError(f"{name}={shown(value)} must {limits}")
    return found


def flag(value: Any, name: str) -> bool:
    """Return an argument as a bool; 0 and 1, and those of NumPy, are taken as well.

    Raises
    ------
    TypeError
        If it is anything else: text, None or an array would pass for true without a word.

    Examples
    --------
    >>> flag(True, "causal"), flag(0, "causal")
    (True, False)
    >>> flag("no", "causal")
    Traceback (most recent call last):
        ...
    TypeError: causal='no' must be True or False, not str
    """
    if isinstance(value, bool):
        return value
    if type(value).__name__ in ("int", "bool", "bool_") and value in (0, 1):
        return bool(value)
    raise TypeError(f"{name}={shown(value)} must be True or False, not {type(value).__name__}")


def choice(value: Any, name: str, supported: Collection[str]) -> str:
    """Return an argument that is one of several words.

    Raises
    ------
    TypeError
        If it is no text.
    ValueError
        If it is another word.

    Examples
    --------
    >>> choice("greedy", "allocator", ("greedy", "dp"))
    'greedy'
    >>> choice("best", "allocator", ("greedy", "dp"))
    Traceback (most recent call last):
        ...
    ValueError: allocator='best' is not supported; supported are 'greedy', 'dp'
    """
    if isinstance(value, str) and value in supported:
        return value
    listed = ", ".join(map(repr, supported))
    if not isinstance(value, str):
        raise TypeError(f"{name}={shown(value)} must be one of {listed}, not {type(value).__name__}")
    raise ValueError(f"{name}={shown(value)} is not supported; supported are {listed}")


def sides_of_window(window: Any, name: str = "window") -> tuple[int, int]:
    """Return a window of attention as (left, right): -1, no limit, or a number of keys each.

    Raises
    ------
    TypeError
        If it is no pair of whole numbers.
    ValueError
        If a number is below -1, or larger than kernels count.

    Examples
    --------
    >>> sides_of_window([128, 0])
    (128, 0)
    >>> sides_of_window(128)
    Traceback (most recent call last):
        ...
    TypeError: window=128 must be two numbers of keys, left and right; -1 means no limit
    """
    if not isinstance(window, list | tuple) or len(window) != 2:
        raise TypeError(
            f"{name}={shown(window)} must be two numbers of keys, left and right; -1 means no limit"
        )
    left, right = window
    return whole_number(left, name, -1, LONGEST), whole_number(right, name, -1, LONGEST)


def refuse_unsupported(dropout_p: float = 0.0, alibi_slopes: Any = None) -> None:
    """Raise `NotImplementedError` for what functions of flash-attn have and kvlab has not."""
    if number(dropout_p, "dropout_p", 0, 1):
        raise NotImplementedError(f"dropout_p={dropout_p}: kvlab has no dropout inside attention; pass 0.0")
    if alibi_slopes is not None:
        raise NotImplementedError("alibi_slopes: kvlab has no ALiBi bias; pass None")


def check_device(device: object) -> None:
    """Refuse what is neither None nor "cpu", "cuda" or "cuda:" and a number."""
    if device is not None and not isinstance(device, str):
        raise TypeError(
            f"device={shown(device)} must be 'cpu', 'cuda', 'cuda:1' ... or None, not {type(device).__name__}"
        )
    if device is not None and not re.fullmatch(r"cpu|cuda(:\d+)?", device, re.ASCII):
        raise ValueError(f"device={device!r} is not supported; 'cpu', 'cuda' and 'cuda:0', 'cuda:1' ... are")


def check_names(options: Mapping[str, object], known: Collection[str], of: str) -> None:
    """Refuse options that are not known, and say which one is meant if one is called nearly so.

    Examples
    --------
    >>> check_names({"nbits": 4}, ["bits", "budget"], "the cache")
    Traceback (most recent call last):
        ...
    TypeError: nbits=4 is no option of the cache, bits is meant; options are bits, budget
    """
    for name, value in options.items():
        if name in known:
            continue
        meant = [_ELSEWHERE[name]] if name in _ELSEWHERE else difflib.get_close_matches(name, known, 1, 0.8)
        hint = f", {meant[0]} is meant" if meant and meant[0] in known else ""
        hint = f" ({_NOT_HERE[name]}: leave it out)" if name in _NOT_HERE else hint
        raise TypeError(f"{name}={shown(value)} is no option of {of}{hint}; options are {', '.join(known)}")


def renamed(value: int, older: dict[str, int], was: str, name: str, of: str) -> int:
    """Return the value of an argument that had another name before; `older` are all that are not known."""
    if was in older:
        message = f"{was}= is now called {name}=; the older name works for one version more"
        warnings.warn(message, DeprecationWarning, stacklevel=3)
        value = older.pop(was)
    check_names(older, [name], of)
    return value

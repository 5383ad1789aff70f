"""Checks of the arguments of flash-attn's functions, under flash-attn's names for them.

Shapes, dtypes and options are checked on every device before a function does anything. Values in tensors are
checked only on the CPU: a check on a GPU would have to wait for it, so there values are clamped into range
(flash_attn_cache.py).
"""

from __future__ import annotations

from typing import Any

import torch

from kvlab.arguments import LONGEST, flag, number, sides_of_window, whole_number

__all__ = ["check_index", "check_tensor", "score_options", "score_options_of_sides"]

Tensor = torch.Tensor


def score_options(
    causal: bool, softmax_scale: float | None, window_size: tuple[int, int], softcap: float
) -> dict[str, Any]:
    """Check the options of a public function; return keyword arguments of `kvlab.attention`."""
    return _options(causal, softmax_scale, sides_of_window(window_size, "window_size"), softcap)


def score_options_of_sides(
    causal: bool, softmax_scale: float | None, left: int, right: int, softcap: float
) -> dict[str, Any]:
    """`score_options` for a private function, which takes the sides of the window one by one."""
    window = (
        whole_number(left, "window_size_left", -1, LONGEST),
        whole_number(right, "window_size_right", -1, LONGEST),
    )
    return _options(causal, softmax_scale, window, softcap)


def _options(
    causal: bool, softmax_scale: float | None, window: tuple[int, int], softcap: float
) -> dict[str, Any]:
    return {
        "causal": flag(causal, "causal"),
        "scale": None if softmax_scale is None else number(softmax_scale, "softmax_scale"),
        "window": window,
        "softcap": number(softcap, "softcap", minimum=0),
    }


def check_index(index: Any, name: str, device: torch.device) -> None:
    """Refuse what is no tensor of 32-bit or 64-bit integers on this device.

    Raises
    ------
    TypeError, ValueError
        Naming the argument.

    Examples
    --------
    >>> check_index(torch.zeros(2), "cache_seqlens", torch.device("cpu"))
    Traceback (most recent call last):
        ...
    TypeError: cache_seqlens has dtype float32; it must be int32
    """
    check_tensor(index, name)
    if index.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{name} has dtype {str(index.dtype).removeprefix('torch.')}; it must be int32")
    if index.device != device:
        raise ValueError(f"{name} is on {index.device}, q on {device}: they must be on one device")


def check_tensor(x: Any, name: str) -> None:
    """Refuse what is no tensor of torch."""
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{name} must be a tensor of torch, got {type(x).__name__}")

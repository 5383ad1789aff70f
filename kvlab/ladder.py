"""Rungs and ladders: which widths a cache may use in each of its layers.

A rung is a pair of widths, `bits_k` and `bits_v`; a ladder is the list of rungs in use, from the fewest bytes
to the most. People write ladders in three forms, which this module turns into one tuple of rungs per layer:

* a sequence, `(2, 3, 4, 8)` or `("k3v2", 4, 8)`;
* a string, `"2,3,4,8"`;
* layer ranges, `"0-3:8,4-27:k4v2+4"`: rungs of one range are joined by `+`, every layer is named once.

Width 16 keeps the values as they are (in the cache's own dtype); width 0 evicts, and stands for both K and V.

A width of K may be a profile of four digits, as in `"k8422v3"`: widths 0, 2, 4 or 8 of the four quarters of
the channels, those of most energy first. Then all keys that the ladder packs are kept in such blocks: they
have one basis. Width 8 is the profile 8888 there, and is written 8 all the same. head_dim must be a multiple
of 64.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from kvlab.arguments import whole_number
from kvlab.pages import BLOCK_WIDTHS, Width

__all__ = [
    "BITS",
    "BITS_IN_BLOCKS",
    "BITS_OF_WIDTHS",
    "ENERGY_OF_BLOCKS",
    "ERRORS",
    "EXACT",
    "WIDTHS",
    "Bits",
    "Ladder",
    "Rung",
    "default_bits",
    "is_ample",
    "loss_of",
    "parse_bits",
    "plain_bits",
]

WIDTHS = (0, 2, 3, 4, 8, 16)
Bits = str | int | Sequence["int | str"]
BITS: Bits = "default"
"""The ladder of caches that name none: see `default_bits`."""
BITS_IN_BLOCKS: tuple[int | str, ...] = ("k4220v2", "k4422v2", "k8422v3", "k8444v4", 8)
BITS_OF_WIDTHS: tuple[int | str, ...] = (2, "k3v2", "k4v3", "k8v4", 8)


def default_bits(head_dim: int, *, frames_hold: bool, is_ample: bool = False) -> tuple[int | str, ...]:
    """Return the ladder of caches that name none.

    Keys are worth more bits than values, and their channels of most energy more than others. Which these are
    says the frame of a head: where it does not hold for later tokens, profiles cost more than they bring
    (docs/performance/quality.md). In blocks keys of 8 bits have twice the squared error of scores that they
    have in one basis (docs/performance/demo.md): where bytes are many, tokens that count most are exact.

    Parameters
    ----------
    head_dim : int
        Profiles are used at 64 and 128.
    frames_hold : bool
        Frames are given, or it is known how RoPE turns keys, and rows have bytes for their first tokens.
    is_ample : bool
        The budget is large, as `is_ample` says.

    Examples
    --------
    >>> default_bits(64, frames_hold=True)
    ('k4220v2', 'k4422v2', 'k8422v3', 'k8444v4', 8)
    >>> default_bits(64, frames_hold=True, is_ample=True)
    ('k4220v2', 'k4422v2', 'k8422v3', 'k8444v4', 8, 16)
    >>> default_bits(80, frames_hold=True), default_bits(64, frames_hold=False)
    ((2, 'k3v2', 'k4v3', 'k8v4', 8), (2, 'k3v2', 'k4v3', 'k8v4', 8))
    """
    if not frames_hold or head_dim not in (64, 128):
        return BITS_OF_WIDTHS
    return (*BITS_IN_BLOCKS, 16) if is_ample else BITS_IN_BLOCKS


def is_ample(fraction: float, tokens: int) -> bool:
    """Whether a budget is so large that the default ladder with profiles has a rung of 16.

    The newest tokens have pages of the highest rung, and others pay for them: rows have to have many bytes.
    With less than half of the bytes it brings less, and costs a GPU more time: pages without exact tokens are
    read by products of 8-bit integers (docs/performance/quality.md).

    Parameters
    ----------
    fraction : float
        The budget over the bytes of exact tokens.
    tokens : int
        A row never has fewer bytes than for this length.

    Examples
    --------
    >>> is_ample(0.5, 2048), is_ample(0.3, 2048), is_ample(0.5, 256)
    (True, False, False)
    """
    return fraction >= 0.5 and fraction * tokens >= 512


class Rung(NamedTuple):
    """Widths of one K element and one V element; that of K may be a profile."""

    bits_k: Width
    bits_v: int

    def __str__(self) -> str:
        widths = self.blocks
        same = len(set(widths)) == 1
        if same and widths[0] == self.bits_v:
            return str(self.bits_v)
        return f"k{widths[0] if same else ''.join(map(str, widths))}v{self.bits_v}"

    @property
    def blocks(self) -> tuple[int, ...]:
        """Widths of K in each quarter of the channels."""
        return self.bits_k if isinstance(self.bits_k, tuple) else (self.bits_k,) * 4

    @property
    def total(self) -> float:
        """Bits of an element of K, in the mean, and one of V."""
        return sum(self.blocks) / 4 + self.bits_v


Ladder = tuple[Rung, ...]
EXACT = Rung(16, 16)
ERRORS = {16: 0.0, 8: 5.0e-5, 4: 0.0090, 3: 0.0327, 2: 0.1115, 0: 1.0}
"""Relative mean squared error of a K or V vector at each width, as measured on SmolLM2-135M."""
ENERGY_OF_BLOCKS = (0.71, 0.19, 0.06, 0.04)
"""How far the error of each block counts in that of a profile: so four profiles come out as measured on the
same model, errors weighted by what queries ask (docs/performance/page_format.md)."""


def loss_of(rung: Rung) -> float:
    """Relative error of a token at a rung, of K and of V.

    Examples
    --------
    >>> round(loss_of(Rung(4, 2)), 4), round(loss_of(Rung((4, 4, 2, 2), 2)), 4)
    (0.1205, 0.1308)
    """
    if isinstance(rung.bits_k, int):
        return ERRORS[rung.bits_k] + ERRORS[rung.bits_v]
    of_k = sum(energy * ERRORS[width] for energy, width in zip(ENERGY_OF_BLOCKS, rung.bits_k, strict=True))
    return of_k + ERRORS[rung.bits_v]


def _rung(word: int | str) -> Rung:
    text = str(word).strip().lower()
    match = re.fullmatch(r"(\d+)|k(\d+)v(\d+)", text, re.ASCII)
    if match is None:
        raise ValueError(
            f"bits: {word!r} is no number of bits; write one as 4, several as (2, 4, 8) or '2,4,8', and "
            f"'k4v2' for keys of 4 bits with values of 2, 'k8422v3' for keys of 8, 4, 2 and 2 bits by block"
        )
    if match[2] and len(match[2]) == 4:
        return _with_profile(str(word), match[2], int(match[3]))
    if match[2] and len(match[2]) > 2:
        raise ValueError(
            f"bits: {word!r} has {len(match[2])} digits for K; a width for each quarter of its channels "
            "takes four, as k8422v3"
        )
    rung = Rung(int(match[1]), int(match[1])) if match[1] else Rung(int(match[2]), int(match[3]))
    for name, width in (("K", rung.bits_k), ("V", rung.bits_v)):
        if width not in WIDTHS:
            raise ValueError(f"bits: {word!r} has width {width} for {name}; supported are {WIDTHS}")
    if 0 in rung and rung != Rung(0, 0):
        raise ValueError(f"bits: {word!r} keeps only one of K and V; width 0 evicts both (write 0)")
    return rung


def _with_profile(word: str, digits: str, bits_v: int) -> Rung:
    """Return the rung of a profile, written as four digits."""
    profile = tuple(map(int, digits))
    if any(width not in BLOCK_WIDTHS for width in profile) or profile[0] == 0:
        raise ValueError(
            f"bits: {word!r} has profile {digits} for K; it takes four of {BLOCK_WIDTHS}, the first not 0"
        )
    if list(profile) != sorted(profile, reverse=True):
        raise ValueError(
            f"bits: {word!r} widens from one block to the next; those of most energy come first, so "
            f"write k{''.join(sorted(digits, reverse=True))}v{bits_v}"
        )
    if bits_v not in WIDTHS or bits_v == 0:
        raise ValueError(
            f"bits: {word!r} has width {bits_v} for V; supported beside a profile are {WIDTHS[1:]}"
        )
    return Rung(profile, bits_v)


def _in_blocks(rungs: list[Rung]) -> list[Rung]:
    """Let all packed keys of a ladder be kept in blocks if some are."""
    if all(isinstance(rung.bits_k, int) for rung in rungs):
        return rungs
    for rung in rungs:
        if rung.bits_k == 3:
            raise ValueError(
                f"bits: rung {rung} has 3 bits for K beside a profile; all keys are kept in blocks then, of "
                f"{BLOCK_WIDTHS} bits: write a profile, such as k4422, or 4"
            )
    return [rung if rung.bits_k in (0, 16) else Rung(rung.blocks, rung.bits_v) for rung in rungs]


def _ladder(words: Sequence[int | str]) -> Ladder:
    rungs = sorted(_in_blocks([_rung(word) for word in words]), key=lambda rung: rung.total)
    if not rungs:
        raise ValueError(f"bits={words!r} is empty; name at least one width")
    for low, high in pairwise(rungs):
        if low.total == high.total:
            raise ValueError(f"bits: rungs {low} and {high} take the same bytes; keep one of them")
        if any(a > b for a, b in zip(low.blocks, high.blocks, strict=True)) or low.bits_v > high.bits_v:
            raise ValueError(
                f"bits: a token demoted from {high} to {low} would get more bits for K or V than it has; "
                f"name rungs that narrow on both sides, or stay equal on one"
            )
    if rungs[-1].total == 0:
        raise ValueError(f"bits={words!r} would keep nothing; name a width other than 0 as well")
    return tuple(rungs)


def parse_bits(bits: Bits, num_layers: int) -> tuple[Ladder, ...]:
    """Return the ladder of every layer, lowest rung first.

    Parameters
    ----------
    bits : str, int or sequence
        Widths in one of the forms above.
    num_layers : int
        Number of layers.

    Raises
    ------
    TypeError
        If `bits` is in none of the forms.
    ValueError
        If a width is not supported, two rungs take the same bytes, a lower rung is wider for K or V than a
        higher one, or a range misses or repeats a layer.

    Examples
    --------
    >>> [str(rung) for rung in parse_bits((8, "k3v2", 4), 1)[0]]
    ['k3v2', '4', '8']
    >>> [len(ladder) for ladder in parse_bits("0-1:8,2-3:2+4+8", 4)]
    [1, 1, 3, 3]
    """
    if isinstance(bits, str) and ":" in bits:
        return _per_layer(bits, num_layers)
    return (_ladder(_words(bits)),) * num_layers


def plain_bits(bits: Any) -> Bits:
    """Return widths as files have them: numbers of Python and text."""
    if isinstance(bits, Iterable) and not isinstance(bits, str):
        return tuple(int(word) if hasattr(word, "__index__") else str(word) for word in bits)
    return int(bits) if hasattr(bits, "__index__") else bits


def _words(bits: Bits) -> list[int | str]:
    if isinstance(bits, str):
        return list(bits.split(","))
    try:
        return list(bits) if isinstance(bits, Iterable) else [whole_number(bits, "bits")]
    except TypeError:
        raise TypeError(
            f"bits={bits!r} must be a width, a sequence of widths such as (2, 4, 8), or text such as "
            f"'2,4,8' or 'k4v2'"
        ) from None


def _per_layer(bits: str, num_layers: int) -> tuple[Ladder, ...]:
    found: dict[int, Ladder] = {}
    for part in bits.split(","):
        match = re.fullmatch(r"\s*(\d+)(?:-(\d+))?\s*:(.+)", part, re.ASCII)
        if match is None:
            raise ValueError(
                f"bits: {part!r} is no layer range; write first-last:rungs, for example '0-3:8,4-27:k4v2+4'"
            )
        first, last = int(match[1]), int(match[2] or match[1])
        if first > last or last >= num_layers:
            raise ValueError(f"bits: range {first}-{last} does not lie within layers 0-{num_layers - 1}")
        for layer in range(first, last + 1):
            if layer in found:
                raise ValueError(f"bits: layer {layer} is named twice")
            found[layer] = _ladder(match[3].split("+"))
    missing = sorted(set(range(num_layers)) - set(found))
    if missing:
        raise ValueError(f"bits: layers {missing} of {num_layers} are in no range")
    return tuple(found[layer] for layer in range(num_layers))

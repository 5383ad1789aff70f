"""Prompts whose questions come late: many keys in a long text, chains of variables, a passage to copy.

The cache has packed the text before it is asked, so what its allocation thought unimportant is gone by then.
Numbers are drawn, so that only the cache can know them; the same seed gives the same prompts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

__all__ = ["KINDS", "Haystack", "Question", "copying", "many_keys", "variable_tracking"]

Encode = Callable[[str], Sequence[int]]
_SPELLED = """
Alder Birch Cedar Dogwood Elder Fennel Gorse Hazel Ivory Juniper Kestrel Laurel Maple Nettle Oakley Poplar
Quince Rowan Sorrel Thorne Umber Vetch Willow Yarrow Abbot Barker Cooper Draper Ellis Fisher Glover Harper
"""
NAMES = _SPELLED.split()
DIGITS = 5


@dataclass(frozen=True, slots=True)
class Question:
    """Tokens that ask, tokens that answer, and where in the text the answer stands, 0 to 1."""

    ask: tuple[int, ...]
    answer: tuple[int, ...]
    depth: float


@dataclass(frozen=True, slots=True)
class Haystack:
    """A text of tokens and the questions about it, each asked of a cache that has read the text alone."""

    tokens: tuple[int, ...]
    questions: tuple[Question, ...]


def many_keys(text: str, encode: Encode, length: int, *, keys: int = 10, seed: int = 0) -> Haystack:
    """Hide as many names with numbers in a text as there are questions.

    Of the text twelve characters a token are enough, and `length` counts tokens of the haystack. There are 32
    names. If text or length does not hold the keys, that is a ValueError.

    Examples
    --------
    >>> haystack = many_keys("words and words. " * 60, lambda s: list(s.encode()), 400, keys=3)
    >>> question = haystack.questions[0]
    >>> number = bytes(question.answer).decode()
    >>> len(haystack.tokens), number in bytes(haystack.tokens).decode(), question.depth
    (400, True, 0.0)
    """
    if not 1 <= keys <= len(NAMES):
        raise ValueError(f"keys={keys} must be 1 to {len(NAMES)}")
    rng = np.random.default_rng(seed)
    names = rng.choice(NAMES, keys, replace=False)
    numbers = [_number(rng) for _ in names]
    hidden = [f" The locker number of {name} is {x}." for name, x in zip(names, numbers, strict=True)]
    asked = [
        f"\n\nQuestion: What is the locker number of {name}? Answer: The locker number of {name} is"
        for name in names
    ]
    return _hide(text, encode, length, hidden, asked, [f" {number}" for number in numbers])


def variable_tracking(text: str, encode: Encode, length: int, *, seed: int = 0) -> Haystack:
    """Hide four chains of two assignments, `X = 12345` and `Y = X`, and ask for the value of each Y.

    Parameters as for `many_keys`.
    """
    rng = np.random.default_rng(seed)
    letters = rng.choice(list("ABCDEFGHIJKLMNOPQRSTUVWXYZ"), (4, 2), replace=False)
    numbers = [_number(rng) for _ in letters]
    hidden = [f" VAR {x} = {number}." for (x, _), number in zip(letters, numbers, strict=True)]
    hidden += [f" VAR {y} = VAR {x}." for x, y in letters]
    asked = [f"\n\nVAR {y} = VAR {x}, and VAR {x} =" for x, y in letters]
    return _hide(text, encode, length, hidden, asked, [f" {number}" for number in numbers])


def copying(text: str, encode: Encode, length: int, *, seed: int = 0) -> Haystack:
    """Hide a list of twelve random words and ask for all of it behind its first word."""
    chosen = np.random.default_rng(seed).choice(NAMES, 12, replace=False)
    listed = " ".join(chosen)
    hidden = [f" The list begins here: {listed}. The list ends here."]
    asked = [f"\n\nOnce more the same list. The list begins here: {chosen[0]}"]
    return _hide(text, encode, length, hidden, asked, [" " + " ".join(chosen[1:])], depths=[0.4])


KINDS: dict[str, Callable[..., Haystack]] = {
    "retrieval": many_keys,
    "tracking": variable_tracking,
    "copying": copying,
}
"""Kinds of prompts by the names of tasks."""


def _number(rng: np.random.Generator) -> str:
    return "".join(str(digit) for digit in rng.integers(0, 10, DIGITS))


def _hide(
    text: str,
    encode: Encode,
    length: int,
    hidden: Sequence[str],
    asked: Sequence[str],
    answers: Sequence[str],
    depths: Sequence[float] | None = None,
) -> Haystack:
    """Put sentences into a text at even distances; the first `len(asked)` of them hold the answers."""
    needles = [list(encode(sentence)) for sentence in hidden]
    size = length - sum(map(len, needles))
    body = list(encode(text[: 12 * max(length, 1)]))
    if size < len(needles) or len(body) < size:
        raise ValueError(
            f"a haystack of {length} tokens out of a text of {len(body)} does not hold {len(needles)} "
            f"sentences of {length - size} tokens: take a longer text or another length"
        )
    depths = depths or [number / max(1, len(needles) - 1) for number in range(len(needles))]
    tokens: list[int] = []
    last = 0
    for depth, needle in zip(depths, needles, strict=True):
        position = int((0.03 + 0.94 * depth) * size)
        tokens += [*body[last:position], *needle]
        last = position
    tokens += body[last:size]
    questions = [
        Question(tuple(encode(ask)), tuple(encode(answer)), depth)
        for ask, answer, depth in zip(asked, answers, depths, strict=False)
    ]
    return Haystack(tuple(tokens), tuple(questions))

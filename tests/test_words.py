"""Names say things with the words of the field: words that only this project used do not come back.

What stands for each is in the vocabulary: a position, an address or a slot for `place`, a work range or a
part for `share`, bytes left or a lookahead for `room`. Looked at are the names of `kvlab` and `kernels`,
whole or between underscores; prose may use what is English.
"""

from __future__ import annotations

import io
import re
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

NOWHERE = {
    "admission", "admit", "anew", "awaits", "bear", "births", "borrowed", "centre", "confirm", "deltas",
    "expectations", "facts", "journal", "lent", "lift", "meeting", "peaks", "road", "sight", "tidy",
    "trouble", "yardstick",
}  # fmt: skip
"""Not even as a part of a name."""
LEFT = {
    "place": (),
    "places": (),
    "room": (),
    "share": (),
    "shares": (),
    "steps": (),
    "pairs": (),
}  # fmt: skip
"""No whole names, and where they still are one."""


def names_in(path: str, text: str) -> set[str]:
    """Names in a source file, without those in comments and texts."""
    if path.endswith(".py"):
        tokens = tokenize.generate_tokens(io.StringIO(text).readline)
        return {token.string for token in tokens if token.type == tokenize.NAME}
    text = re.sub(r"//[^\n]*|/\*.*?\*/|\"[^\"\n]*\"", " ", text, flags=re.DOTALL)
    return set(re.findall(r"[A-Za-z_]\w*", text))


def plain_name(name: str) -> str:
    """Return a name in lower case, its words apart by underscores."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower().strip("_")


def private_words(path: str, text: str) -> list[str]:
    """Return the names of a source file that use a private word."""
    found = []
    for name in names_in(path, text):
        plain = plain_name(name)
        if NOWHERE & set(plain.split("_")) or path not in LEFT.get(plain, (path,)):
            found.append(f"{path}: {name}")
    return sorted(found)


def test_names_use_the_words_of_the_field() -> None:
    paths = [path for folder in ("kvlab", "kernels") for path in ROOT.glob(f"{folder}/**/*.*")]
    sources = [path for path in paths if path.suffix in (".py", ".cu", ".cuh")]
    assert len(sources) > 300
    assert [
        name
        for path in sources
        for name in private_words(path.relative_to(ROOT).as_posix(), path.read_text())
    ] == []


def test_what_is_left_is_needed() -> None:
    left = [(word, path) for word, paths in LEFT.items() for path in paths]
    assert [
        (word, path)
        for word, path in left
        if word not in map(plain_name, names_in(path, (ROOT / path).read_text()))
    ] == []


@pytest.mark.parametrize(
    ("path", "text", "found"),
    [
        ("kvlab/arrays.py", "def to_road(place): pass  # a place", ["place", "to_road"]),
        ("kvlab/arrays.py", "class BearPages:\n    'a road'", ["BearPages"]),
        ("kernels/cuda/plan/plan.cu", "int edge = births;  // no road", ["births"]),
        ("kvlab/cache/store.py", "in_place = displaced = 1", []),
    ],
)
def test_private_words_are_found(path: str, text: str, found: list[str]) -> None:
    assert private_words(path, text) == [f"{path}: {name}" for name in found]

"""What the scripts in `benchmarks/` share: options, the loop over cases, the record of a run and its file.

A script states its options and its cases; `run` measures them and prints a line for each row. The file
holds ``provenance`` (`kvlab.lab.results.provenance`: command, commit, time, versions, GPU with driver and
clocks) and ``rows``, one a line. It is written whole after every row, so a run that is stopped leaves what it
has. A case that fails stands under ``failed`` with its error, and the next one runs. Scripts time with
`kvlab.lab.timing` and `kvlab.lab.timing_gpu`, which take contestants in turns.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import sys
import time
import traceback
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any, NamedTuple

from kvlab.files import write_whole
from kvlab.lab.guard import gpu_state
from kvlab.lab.results import provenance
from kvlab.lab.targets import machine

__all__ = ["Case", "Row", "line", "names", "numbers", "options", "run", "shapes"]

Row = dict[str, Any]
_STATE = ("clocks.sm", "clocks.mem", "power.draw", "temperature.gpu")


class Case(NamedTuple):
    """A case of a script: its name, and a function that measures it and returns a row or several."""

    name: str
    measure: Callable[[], Row | Iterable[Row]]


def options(description: str | None, device: str = "cuda") -> argparse.ArgumentParser:
    """Return a parser with the options of every script; a script adds its own.

    `description` is the docstring of the script, `device` where it runs, ``"cuda"`` or ``"cpu"``; a script
    may have an option of that name.

    Examples
    --------
    >>> parser = options("Time something.", "cpu")
    >>> parser.parse_args(["OUT.json", "--seconds", "60"]).seconds
    60.0
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("output", type=_json_file, nargs="?", help="file of the result, .json")
    parser.add_argument("--list", action="store_true", help="print the names of the cases, measure nothing")
    parser.add_argument("--seconds", type=float, default=math.inf, help="no case begins later")
    parser.set_defaults(device=device)
    return parser


def run(
    parser: argparse.ArgumentParser,
    cases: Callable[[argparse.Namespace], Iterable[Case]],
    **head: Any,
) -> int:
    """Parse the command line, measure the cases, print a line for each row and write the file.

    `parser` comes from `options`. `cases` takes the parsed options and returns the cases; it measures nothing
    and needs no GPU. `head` is more entries of the file, such as ``schema``. The exit status is 1 if a case
    failed.
    """
    given = parser.parse_args()
    chosen = list(cases(given))
    if given.list:
        print("\n".join(case.name for case in chosen))
        return 0
    try:
        machine(given.device)
    except (NotImplementedError, ValueError) as error:
        parser.error(str(error))
    record = _Record(given, head)
    end = time.monotonic() + given.seconds
    for number, case in enumerate(chosen):
        if time.monotonic() > end:
            print(f"out of time: {len(chosen) - number} of {len(chosen)} cases are left")
            break
        try:
            found = case.measure()
            for row in [found] if isinstance(found, dict) else found:
                record.add(row)
                print(line(row), flush=True)
        except Exception as error:
            traceback.print_exc()
            record.failed[case.name] = f"{type(error).__name__}: {error}"
        found = ()
        record.finish(case.name)
        _free_memory()
    return 1 if record.failed else 0


def line(row: Row) -> str:
    """Return what is printed of a row: numbers to four digits, and no lists of more than eight values.

    Examples
    --------
    >>> line({"case": "one", "ms": {"kvlab": 1.23456}, "all": list(range(100))})
    'case one, ms (kvlab 1.235)'
    """
    return ", ".join(
        f"{name} {_short(x)}" for name, x in row.items() if not isinstance(x, list) or len(x) <= 8
    )


def _short(value: Any) -> str:
    if isinstance(value, dict):
        return f"({line(value)})"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_short, value))}]"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


class _Record:
    """The result of a run so far, and its file."""

    def __init__(self, given: argparse.Namespace, head: dict[str, Any]) -> None:
        settings = {
            name: x for name, x in vars(given).items() if name not in ("output", "list") and x != math.inf
        }
        self.path: Path | None = given.output
        self.head = head | {"provenance": provenance(**settings)}
        self.rows: list[str] = []
        self.failed: dict[str, str] = {}
        self.states: dict[str, dict[str, str]] = {}

    def add(self, row: Row) -> None:
        self.rows.append(_json(row))
        self.write()

    def finish(self, name: str) -> None:
        """Note how the GPU is after a case."""
        state = gpu_state()
        if state is not None:
            self.states[name] = {key: state[key] for key in _STATE}
        self.write()

    def write(self) -> None:
        if self.path is None:
            return
        found = self.head | {"failed": self.failed, "gpu_after": self.states}
        text = _json({name: x for name, x in found.items() if x}, indent=1)
        rows = ",\n".join(f"  {row}" for row in self.rows)
        write_whole(self.path, f'{text[:-2]},\n "rows": [\n{rows}\n ]\n}}\n'.encode())


def _json(value: Any, indent: int | None = None) -> str:
    """JSON of a value; of a path, which says where somebody keeps files, only the name."""
    return json.dumps(value, ensure_ascii=False, indent=indent, default=_name_of)


def _name_of(value: Any) -> str:
    if isinstance(value, Path):
        return value.name
    raise TypeError(f"{value!r} of {type(value).__name__} is no JSON")


def _free_memory() -> None:
    """Give back what the allocators of a GPU keep, for the next case."""
    gc.collect()
    if "torch" in sys.modules and sys.modules["torch"].cuda.is_available():
        sys.modules["torch"].cuda.empty_cache()
        if "cupy" in sys.modules:
            sys.modules["cupy"].get_default_memory_pool().free_all_blocks()


def _json_file(text: str) -> Path:
    if not text.endswith(".json"):
        raise argparse.ArgumentTypeError(f"{text!r} must end in .json")
    return Path(text)


def names(known: Collection[str]) -> Callable[[str], list[str]]:
    """Return the type of an option: names of `known`, separated by commas.

    Examples
    --------
    >>> names(("one", "two", "three"))("three,one")
    ['three', 'one']
    """

    def parse(text: str) -> list[str]:
        words = [word for word in text.split(",") if word]
        for word in words:
            if word not in known:
                raise argparse.ArgumentTypeError(f"{word!r} is unknown; known are {', '.join(known)}")
        return words

    return parse


def numbers(text: str) -> list[int]:
    """Parse whole numbers, separated by commas: the type of an option.

    Examples
    --------
    >>> numbers("32,1024"), numbers("")
    ([32, 1024], [])
    """
    return [int(word) for word in text.split(",") if word]


def shapes(text: str) -> list[tuple[str, int, int]]:
    """Parse names with a batch and a number of tokens, separated by commas: the type of an option.

    Examples
    --------
    >>> shapes("dense:1x2048,packed:8x32768")
    [('dense', 1, 2048), ('packed', 8, 32768)]
    """
    found = []
    for word in filter(None, text.split(",")):
        name, _, shape = word.partition(":")
        batch, _, tokens = shape.partition("x")
        found.append((name, int(batch), int(tokens)))
    return found

"""A sweep: many cases, a folder, one file for each result.

The folder holds the manifest, the list of cases, whose name carries its own hash, so it cannot change
unnoticed; `NAME.json` for every case that is done; and `NAME.error.json` for one that failed. That is all
there is: what is left to do is what has no file, so a sweep goes on after whatever ended it, and any number
of processes on any number of machines can work on one folder. Result files appear whole, under their final
name, and a case done twice leaves one file.

A failure is recorded with its class. Those that another try may mend (memory, the GPU, a process that died)
are tried again the next time the sweep runs, others are not until their file is removed.
"""

from __future__ import annotations

import errno
import hashlib
import json
import traceback
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvlab.errors import FormatError, MissingExtraError
from kvlab.files import write_whole
from kvlab.lab import guard
from kvlab.lab.ablation.grid import AblationCase

__all__ = [
    "ATTEMPTS",
    "Failure",
    "Manifest",
    "Status",
    "WorkerDied",
    "array_list",
    "classify",
    "closing",
    "failure_of",
    "parse_numbers",
    "record",
    "record_failure",
    "recorded",
    "status",
]

SCHEMA = "kvlab manifest 1"
ATTEMPTS = {"out_of_memory": 2, "gpu": 2, "died": 2, "throttled": 3, "timeout": 2}
"""How often a case is tried that fails so; once for every other class."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """The cases of a sweep, in their order.

    Examples
    --------
    >>> from tempfile import TemporaryDirectory
    >>> manifest = Manifest((AblationCase(0.3, "2,4", 512),))
    >>> with TemporaryDirectory() as folder:
    ...     path = manifest.write(Path(folder))
    ...     path.name == f"manifest-{manifest.digest}.json", Manifest.read(Path(folder)) == manifest
    (True, True)
    """

    cases: tuple[AblationCase, ...]

    @property
    def text(self) -> str:
        """What stands in the file: one case a line."""
        lines = ",\n".join(json.dumps(case.to_dict()) for case in self.cases)
        return f'{{"schema": "{SCHEMA}", "cases": [\n{lines}\n]}}\n'

    @property
    def digest(self) -> str:
        """Hash of the text: 12 hexadecimal digits."""
        return hashlib.sha256(self.text.encode()).hexdigest()[:12]

    def write(self, folder: Path) -> Path:
        """Write the manifest into a folder that has none, or this one.

        Raises
        ------
        ValueError
            If the folder holds another manifest: a manifest never changes.
        """
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"manifest-{self.digest}.json"
        if others := [other.name for other in folder.glob("manifest-*.json") if other != path]:
            raise ValueError(
                f"{folder} holds {others[0]}, another sweep; take another folder for {path.name}"
            )
        if not path.exists():
            write_whole(path, self.text.encode())
        return path

    @staticmethod
    def read(folder: Path) -> Manifest:
        """Read the manifest of a folder.

        Raises
        ------
        FormatError
            If there is none or more than one, or it is not what its name says.
        """
        paths = sorted(folder.glob("manifest-*.json"))
        if len(paths) != 1:
            raise FormatError(
                f"{folder} holds {len(paths)} manifests; kvlab sweep plan {folder} writes the one of a sweep"
            )
        try:
            text = paths[0].read_text(encoding="utf-8")
            manifest = Manifest(tuple(map(AblationCase.from_dict, json.loads(text)["cases"])))
        except (ValueError, KeyError, TypeError) as error:
            raise FormatError(f"{paths[0]} is no manifest: {error}") from None
        if paths[0].name != f"manifest-{manifest.digest}.json" or text != manifest.text:
            raise FormatError(f"{paths[0]} was changed: its content has the hash {manifest.digest}")
        return manifest


class WorkerDied(RuntimeError):
    """The process that worked on a case ended without a word."""


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a case has no result: class, message, traceback, tries so far."""

    kind: str
    message: str
    trace: str
    attempts: int

    @property
    def final(self) -> bool:
        """Whether the policy is to leave it."""
        return self.attempts >= ATTEMPTS.get(self.kind, 1)


@dataclass(frozen=True, slots=True)
class Status:
    """Numbers of cases: done, failed for good, and left to do (those to be tried again among them)."""

    done: tuple[int, ...]
    failed: tuple[int, ...]
    left: tuple[int, ...]


def status(folder: Path, manifest: Manifest) -> Status:
    """Look at the files of a sweep."""
    done, failed, left = [], [], []
    for number, case in enumerate(manifest.cases):
        if recorded(folder, case) is not None:
            done.append(number)
        elif (failure := failure_of(folder, case)) is not None and failure.final:
            failed.append(number)
        else:
            left.append(number)
    return Status(tuple(done), tuple(failed), tuple(left))


def closing(folder: Path, manifest: Manifest) -> str:
    """Say in a line how a sweep stands: what is done, what failed and why, and what to do next."""
    found = status(folder, manifest)
    failures = [failure_of(folder, manifest.cases[number]) for number in (*found.failed, *found.left)]
    failed = [failure for failure in failures if failure is not None]
    left = len(found.left) + len(found.failed) - len(failed)
    line = f"{len(manifest.cases)} cases: {len(found.done)} done, {len(failed)} failed"
    if failed:
        reasons = Counter(f"{failure.kind}: {_shortened(failure.message)}" for failure in failed)
        line += f" ({'; '.join(f'{count}x {reason}' for reason, count in reasons.most_common(3))})"
    if left:
        line += f", {left} left"
    return f"{line}; {'see' if failed else 'next:'} kvlab sweep {'status' if failed else 'collect'} {folder}"


def _shortened(message: str) -> str:
    """The first line of a message, up to 100 characters."""
    first = message.partition("\n")[0]
    return first if len(first) <= 100 else f"{first[:97]}..."


def recorded(folder: Path, case: AblationCase) -> dict[str, Any] | None:
    """The result of a case; None if there is none, or the file is damaged or of another case."""
    result = _read(_path(folder, case))
    try:
        return result if result is not None and result["provenance"]["case_id"] == case.id else None
    except (KeyError, TypeError):
        return None


def record(folder: Path, case: AblationCase, result: dict[str, Any]) -> None:
    """Write the result of a case, and forget its failures.

    A result without provenance or of another case is a ValueError. What cannot be written, as on a full disk,
    is an OSError, and nothing is there then.
    """
    guard.require_provenance(result)
    if result["provenance"]["case_id"] != case.id:
        raise ValueError(f"the result of case {result['provenance']['case_id']} is not that of {case.id}")
    text = json.dumps(result, ensure_ascii=False) + "\n"
    write_whole(_path(folder, case), text.encode())
    _error_path(folder, case).unlink(missing_ok=True)


def record_failure(folder: Path, case: AblationCase, error: BaseException) -> Failure:
    """Write why a case failed, and count the tries."""
    before = failure_of(folder, case)
    failure = Failure(
        classify(error),
        str(error) or type(error).__name__,
        "".join(traceback.format_exception(error)),
        1 + (before.attempts if before is not None else 0),
    )
    values = {"case_id": case.id, **{name: getattr(failure, name) for name in Failure.__slots__}}
    write_whole(_error_path(folder, case), (json.dumps(values, indent=1) + "\n").encode())
    return failure


def failure_of(folder: Path, case: AblationCase) -> Failure | None:
    """The recorded failure of a case."""
    values = _read(_error_path(folder, case))
    try:
        if values is None or values.pop("case_id") != case.id:
            return None
        return Failure(**values)
    except (KeyError, TypeError):
        return None


def classify(error: BaseException) -> str:
    """Name the class of an error, which decides whether the case is tried again.

    Examples
    --------
    >>> classify(MemoryError()), classify(RuntimeError("CUDA error: misaligned")), classify(KeyError())
    ('out_of_memory', 'gpu', 'KeyError')
    """
    if isinstance(error, guard.Refused):
        return error.kind
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return "out_of_memory"
    if isinstance(error, WorkerDied):
        return "died"
    if isinstance(error, TimeoutError):
        return "timeout"
    if isinstance(error, MissingExtraError):
        return "missing_package"
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "disk_full"
    if "CUDA" in str(error) or "CUDA" in type(error).__name__:
        return "gpu"
    return type(error).__name__


def array_list(numbers: Iterable[int]) -> str:
    """Numbers as Slurm's `--array` takes them.

    Examples
    --------
    >>> array_list([3, 17, 40, 41, 42])
    '3,17,40-42'
    """
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def parse_numbers(text: str, count: int) -> Sequence[int]:
    """Read what `array_list` writes: numbers of cases below `count`.

    Examples
    --------
    >>> parse_numbers("3,17,40-42", 180)
    [3, 17, 40, 41, 42]
    """
    found: list[int] = []
    for word in text.split(","):
        first, _, last = word.partition("-")
        try:
            found += range(int(first), int(last or first) + 1)
        except ValueError:
            raise ValueError(f"cases={text!r}: write numbers and ranges, for example 3,17,40-42") from None
    if not found or max(found) >= count:
        raise ValueError(f"cases={text!r} must name some of the cases 0 to {count - 1}")
    return found


def _path(folder: Path, case: AblationCase) -> Path:
    return folder / f"{case.name}.json"


def _error_path(folder: Path, case: AblationCase) -> Path:
    return folder / f"{case.name}.error.json"


def _read(path: Path) -> dict[str, Any] | None:
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None

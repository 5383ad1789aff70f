"""Scores saved as they come, so that an interrupted run loses nothing and can go on.

A checkpoint is a file of JSON lines, one for each batch of windows. Its name is a digest of everything that
scores depend on: the settings of the run, the source of kvlab, the versions of packages. So a run never
continues with scores of another cache; after a change of the source it starts again.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import asdict
from importlib import import_module
from pathlib import Path

from kvlab.environment import installed_versions
from kvlab.lab.quality.scores import Score

__all__ = ["Checkpoint"]


class Checkpoint:
    """Scores of batches of windows in a file of a folder; `settings` are all that the run was told.

    Examples
    --------
    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder:
    ...     checkpoint = Checkpoint(Path(folder), "chunks of 64")
    ...     checkpoint.add([Score("uniform 4", "uniform", None, [0])])
    ...     checkpoint.read()[0][0].name, Checkpoint(Path(folder), "chunks of 32").read()
    ('uniform 4', [])
    """

    def __init__(self, folder: Path, settings: str) -> None:
        self.path = folder / f"unfinished-{_digest(settings)}.jsonl"

    def read(self) -> list[list[Score]]:
        """Return what was saved; a line that was cut short is left out."""
        if not self.path.exists():
            return []
        parts = []
        for line in self.path.read_text(encoding="utf-8").splitlines():
            try:
                parts.append([Score(**score) for score in json.loads(line)])
            except ValueError:
                continue
        return parts

    def add(self, scores: list[Score]) -> None:
        """Append the scores of a batch, whole and at once."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        line = json.dumps([asdict(score) for score in scores])
        with self.path.open("a", encoding="utf-8") as file:
            # What a killed run left of a line ends here.
            file.write(("\n" if file.tell() else "") + line)
            file.flush()
            os.fsync(file.fileno())

    def remove(self) -> None:
        """Delete the file, if there is one."""
        self.path.unlink(missing_ok=True)


def _digest(settings: str) -> str:
    digest = hashlib.sha256(repr((settings, sorted(installed_versions().items()))).encode())
    for package in ("kvlab", "kvlab.numba_kernels"):
        origin = import_module(package).__file__
        for path in sorted(Path(str(origin)).parent.rglob("*.py")):
            digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:16]

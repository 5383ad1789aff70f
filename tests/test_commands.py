"""Commands of the documentation: scripts of benchmarks/ that they name exist and take the options shown."""

from __future__ import annotations

import argparse
import re
import runpy
import shlex
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = sorted(
    [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "notebooks").glob("*.md")],
)
START = "python benchmarks/"


def commands(page: str) -> list[str]:
    """Return the commands of a page that call scripts: lines of code blocks, and between backticks.

    Those of a block that begins with `git checkout` or `git worktree` are of scripts in the history and are
    left out. What is optional stands in brackets; a comment ends a line.

    >>> commands("    python benchmarks/a.py OUT.json [--b 1]  # what\\n`python benchmarks/c.py\\nOUT.json`")
    ['python benchmarks/a.py OUT.json --b 1', 'python benchmarks/c.py OUT.json']
    """
    page = re.sub(r"^    git (?:checkout|worktree) [^\n]*(\n    [^\n]*)*", "", page, flags=re.M)
    found = re.findall(rf"^    ({START}[^\n]*)", page, re.M) + re.findall(rf"`({START}[^`]*)`", page)
    lines = (re.sub(r"\s+#.*", "", command) for command in found)
    return [" ".join(line.replace("[", "").replace("]", "").split()) for line in lines]


COMMANDS = sorted({command for path in PAGES for command in commands(path.read_text(encoding="utf-8"))})


class Parsed(Exception):
    """The command line was accepted; nothing is run."""


def parse(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a script parse a command of its own."""
    _, script, *arguments = shlex.split(command)
    original = argparse.ArgumentParser.parse_args

    def accept(self: argparse.ArgumentParser, *given: object) -> None:
        original(self, arguments)
        raise Parsed

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", accept)
    monkeypatch.syspath_prepend(str((ROOT / script).parent))  # as Python does
    main = runpy.run_path(str(ROOT / script), run_name="script")["main"]
    with pytest.raises(Parsed):
        main()


def test_pages_name_commands() -> None:
    assert len(COMMANDS) > 25
    assert commands("    git checkout 0 -- benchmarks/a\n    python benchmarks/a/run.py") == []
    assert commands("    git worktree add ../a 0\n    python benchmarks/a/run.py") == []


@pytest.mark.parametrize("command", COMMANDS)
def test_a_script_takes_the_options_that_pages_show(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    parse(command, monkeypatch)


@pytest.mark.parametrize("script", sorted({command.split()[1] for command in COMMANDS}))
def test_a_script_refuses_an_option_that_it_does_not_have(
    script: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers")
    with pytest.raises(SystemExit, match="2"):
        parse(f"python {script} OUT.json --no-such-option", monkeypatch)


def test_every_script_has_a_page() -> None:
    """A file without `main` is a part of the scripts beside it."""
    files = {path for path in (ROOT / "benchmarks").rglob("*.py") if "\ndef main(" in path.read_text()}
    scripts = {str(path.relative_to(ROOT)) for path in files}
    assert scripts <= {command.split()[1] for command in COMMANDS}

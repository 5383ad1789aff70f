"""The `kvlab` command: one file here for each of its commands.

A command is a module of this folder with one function `command`, whose signature is the command line and
whose docstring is the help; several commands of one kind are a `group`, a typer.Typer of such functions. To
add one, write the module and name it in `COMMANDS`. Modules import what they need inside the function, so
that `kvlab --help` stays fast; a test watches that.

Errors that a user can correct (a bad value, a missing package, a full disk, too little memory) end with exit
code 1 and one line; `kvlab --traceback COMMAND` shows where it came from.
"""

from __future__ import annotations

import sys
import warnings
from importlib import import_module
from typing import Annotated

import typer

from kvlab.errors import MissingExtraError, OutOfMemory

__all__ = ["COMMANDS", "app", "main"]

COMMANDS = (
    "ablate",
    "benchmark",
    "chat",
    "clean",
    "demo",
    "engine",
    "env",
    "profile",
    "report",
    "sweep",
    "test",
    "validate",
)

_MENDABLE = (ValueError, NotImplementedError, OSError, MissingExtraError, OutOfMemory)


def app() -> typer.Typer:
    """Return the command line with every command of `COMMANDS`."""
    result = typer.Typer(
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode="markdown",
    )
    result.callback()(_group)
    for name in COMMANDS:
        module = import_module(f"kvlab.cli.{name}")
        if hasattr(module, "group"):
            result.add_typer(module.group, name=name)
        else:
            result.command(name)(module.command)
    return result


def _print_version(wanted: bool) -> None:
    if wanted:
        import kvlab

        typer.echo(f"kvlab {kvlab.__version__}")
        raise typer.Exit


def _group(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
    traceback: Annotated[bool, typer.Option("--traceback", help="Show where an error came from.")] = False,
) -> None:
    """Attention over compressed KV caches: a laboratory."""


def main() -> None:
    """Run the command line; the entry point of the package. Old names are warned of: Python hides that."""
    warnings.filterwarnings("default", category=DeprecationWarning, module=r"kvlab\.")
    try:
        app()()
    except _MENDABLE as error:
        if "--traceback" in sys.argv[1:]:
            raise
        typer.echo(f"kvlab: {error}", err=True)
        raise SystemExit(1) from None

"""The command line: help with examples, JSON and files, one line for what a user can mend."""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.main import get_command
from typer.testing import CliRunner

from kvlab import cli, device, environment
from kvlab.cli import options

RUNNER = CliRunner()


def test_help_names_exactly_the_commands_that_exist() -> None:
    modules = {path.stem for path in Path(cli.__file__).parent.glob("*.py")} - {"__init__", "options"}
    assert set(cli.COMMANDS) <= modules
    output = RUNNER.invoke(cli.app(), ["--help"]).output
    for name in cli.COMMANDS:
        assert f" {name} " in output


def calls() -> list[list[str]]:
    """Every command as it is called: `["env"]`, `["sweep", "plan"]`."""
    found = []
    for name in cli.COMMANDS:
        module = import_module(f"kvlab.cli.{name}")
        parts = (
            [c.callback.__name__.replace("_", "-") for c in module.group.registered_commands]
            if hasattr(module, "group")
            else [""]
        )
        found += [[name, part] if part else [name] for part in parts]
    return found


@pytest.mark.parametrize("call", calls(), ids=" ".join)
def test_every_command_shows_an_example_of_itself(call: list[str]) -> None:
    result = RUNNER.invoke(cli.app(), [*call, "--help"])
    assert result.exit_code == 0
    assert f"Example: kvlab {' '.join(call)}" in result.output
    assert "--json" in result.output
    assert "--output" in result.output


def test_the_docs_use_options_that_exist() -> None:
    root = Path(__file__).parents[2]
    pages = [*root.glob("*.md"), *root.glob("docs/**/*.md"), *root.glob("notebooks/*.md")]
    commands: Any = get_command(cli.app())
    seen = set()
    for line in itertools.chain.from_iterable(page.read_text().splitlines() for page in pages):
        for words in re.findall(r"\bkvlab ((?:[a-z][a-z-]* ?){1,2})([^`#]*)", line):
            command, options = commands, re.findall(r"(?<!\S)--[a-z-]+", words[1])
            for name in words[0].split():
                command = getattr(command, "commands", {}).get(name, command)
            known = {name for part in command.params for name in (*part.opts, *part.secondary_opts)}
            if command.name != "submit":  # which hands the rest to sbatch
                assert {*options} <= {*known, "--help"}, line
            seen |= {*options}
    assert {"--device", "--budgets", "--contexts"} <= seen


def test_env_prints_json_and_writes_it(tmp_path: Path) -> None:
    path = tmp_path / "env.json"
    result = RUNNER.invoke(cli.app(), ["env", "--json", "--output", str(path)])
    assert json.loads(result.output) == json.loads(path.read_text())
    assert json.loads(result.output)["packages"].keys() == environment.installed_versions().keys()


def test_env_table_shows_hardware_and_problems(monkeypatch: pytest.MonkeyPatch) -> None:
    report = environment.report()
    gpu = {
        "index": 0,
        "name": "A GPU",
        "compute_capability": (9, 0),
        "multiprocessors": 132,
        "memory_total": 1 << 30,
    }
    monkeypatch.setattr(
        environment, "report", lambda: {**report, "gpus": [gpu], "problems": ["[CUDA] mixed"]}
    )
    result = RUNNER.invoke(cli.app(), ["env"])
    assert result.exit_code == 1
    assert "A GPU, sm_90, 132 SMs, 1.00 GiB" in result.output
    assert "problem: [CUDA] mixed" in result.output
    absent = {**report, "gpus": [], "gpus_missing_because": "pip install 'kvlab[cu13]'", "problems": []}
    monkeypatch.setattr(environment, "report", lambda: absent)
    assert "pip install 'kvlab[cu13]'" in RUNNER.invoke(cli.app(), ["env"]).output


def test_what_a_user_can_mend_is_one_line_and_exit_code_1(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "kvlab.cli", "env", "--output", str(tmp_path / "absent" / "env.json")]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert result.stderr.count("\n") == 1
    assert "No such file or directory" in result.stderr
    command.insert(3, "--traceback")
    assert "Traceback" in subprocess.run(command, capture_output=True, text=True, check=False).stderr


@pytest.mark.skipif(device.gpus() != (), reason="needs a machine without a GPU")
@pytest.mark.parametrize("call", ["ablate", "demo", "benchmark attention", "profile", "test", "validate"])
def test_without_a_gpu_cuda_is_refused_with_the_reason(call: str) -> None:
    result = RUNNER.invoke(cli.app(), [*call.split(), "--device", "cuda"])
    assert isinstance(result.exception, NotImplementedError)
    assert f"device='cuda': {device.gpus_missing_because()}; --device cpu" in str(result.exception)


def test_size_option_names_the_units() -> None:
    assert options.size("6GiB") == 6 << 30
    with pytest.raises(typer.BadParameter, match="write a number with an optional unit: 4096, 32K"):
        options.size("six")

"""Importing kvlab is quick, loads no framework, and works where optional packages are missing."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import kvlab

OPTIONAL = ("torch", "transformers", "cupy", "cuda", "numba_cuda", "matplotlib")

# What a user calls, the package that is missing then, and the extra that brings it.
NEEDS_EXTRA = [
    ("from kvlab.jit.build import build; build('absent', {}, 'sm_90a', root=ROOT)", "cuda", "cu13"),
    ("import kvlab; kvlab.quantized(None).__enter__()", "torch", "hf"),
    ("import kvlab; kvlab.accelerate(None).__enter__()", "transformers", "hf"),
    ("import kvlab; kvlab.quantized(None).__enter__()", "transformers", "hf"),
]


def python(code: str, blocked: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    """Run code in a fresh process in which the modules `blocked` cannot be imported."""
    block = f"import sys; sys.modules.update(dict.fromkeys({blocked!r}))\n"
    return subprocess.run([sys.executable, "-c", block + code], capture_output=True, text=True, check=False)


def test_import_takes_less_than_300_ms() -> None:
    code = "import time; start = time.perf_counter(); import kvlab; print(time.perf_counter() - start)"
    assert min(float(python(code).stdout) for _ in range(5)) < 0.3


@pytest.mark.parametrize(
    "statement", ["import kvlab", "import kvlab.arrays, kvlab.registry, kvlab.device", "import kvlab.cli"]
)
def test_import_loads_no_framework(statement: str) -> None:
    heavy = (*OPTIONAL, "numba", "llvmlite", "scipy", "safetensors")
    result = python(f"{statement}; import sys; print([name for name in {heavy} if name in sys.modules])")
    assert result.stdout.strip() == "[]", result.stderr


def test_a_cache_of_flash_attn_may_be_the_first_call() -> None:
    code = """
        import torch
        from kvlab.integrations.flash_attn import flash_attn_with_kvcache
        q, cache = torch.zeros(1, 1, 2, 32), torch.zeros(1, 4, 1, 32)
        lengths = torch.ones(1, dtype=torch.int32)
        print(flash_attn_with_kvcache(q, cache, cache, cache_seqlens=lengths).shape)
    """
    assert python(inspect.cleandoc(code)).stdout == "torch.Size([1, 1, 2, 32])\n"


def test_import_works_without_any_optional_package() -> None:
    names = sorted(kvlab._HOME)
    result = python(f"import kvlab; print([getattr(kvlab, name) for name in {names}])", OPTIONAL)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("command", ["--help", "--version", "env --help", "env"])
def test_command_works_without_any_optional_package(command: str) -> None:
    argv = ["kvlab", *command.split()]
    result = python(f"sys.argv = {argv}; from kvlab.cli import main; main()", OPTIONAL)
    assert result.returncode == 0, result.stderr


def test_env_works_where_text_is_ascii(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("LC_ALL", "C"), ("PYTHONUTF8", "0"), ("PYTHONCOERCECLOCALE", "0")):
        monkeypatch.setenv(name, value)
    result = python("sys.argv = ['kvlab', 'env', '--json']; from kvlab.cli import main; main()")
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize(("code", "missing", "extra"), NEEDS_EXTRA)
def test_missing_extra_gives_one_line_that_says_what_to_install(
    code: str, missing: str, extra: str, tmp_path: Path
) -> None:
    (tmp_path / "absent.cu").write_text("")
    prepare = f"import pathlib; ROOT = pathlib.Path({str(tmp_path)!r})\n"
    last_line = python(prepare + code, (missing,)).stderr.strip().splitlines()[-1]
    pattern = rf"kvlab\.errors\.MissingExtraError: .+ needs {missing}, .*: pip install 'kvlab\[{extra}\]'"
    assert re.fullmatch(pattern, last_line), last_line


def test_public_names_resolve_and_match_what_type_checkers_see() -> None:
    tree = ast.parse(Path(kvlab.__file__).read_text())
    (guard,) = (node for node in tree.body if isinstance(node, ast.If))
    typed = {node.names[0].asname: node.module for node in guard.body if isinstance(node, ast.ImportFrom)}
    assert typed == kvlab._HOME
    for name, home in kvlab._HOME.items():
        assert getattr(kvlab, name) is getattr(importlib.import_module(home), name)
        assert name in dir(kvlab)


def test_unknown_public_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'kvlab' has no attribute 'attend_to_this'"):
        _ = kvlab.attend_to_this  # type: ignore[attr-defined]


def test_every_public_name_has_an_example() -> None:
    assert [name for name in kvlab._HOME if ">>> " not in (getattr(kvlab, name).__doc__ or "")] == []


def test_the_documentation_names_every_public_name_and_no_other() -> None:
    text = (Path(kvlab.__file__).parents[1] / "docs" / "api.md").read_text()
    named = re.findall(r"^\.\. auto\w+:: kvlab\.(\w+)$", text, re.MULTILINE)
    assert sorted(named) == sorted(kvlab._HOME)

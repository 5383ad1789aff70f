"""What is installed: the wheel holds all sources, and the three lists of versions agree."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from kvlab.environment import PACKAGES

ROOT = Path(__file__).parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())

# PyPI name to conda-forge name, where they differ.
CONDA_NAMES = {
    "torch": "pytorch",
    "nvidia-cuda-nvrtc": "cuda-nvrtc",
    "nvidia-cuda-runtime": "cuda-cudart-dev",
    "nvidia-nvvm": "cuda-nvvm-impl",
    "nvidia-nvjitlink": "libnvjitlink",
    "duckdb": "python-duckdb",
}


def requirements() -> dict[str, list[Requirement]]:
    """Return the requirements of the core (under "") and of each extra."""
    project = PYPROJECT["project"]
    groups = {"": project["dependencies"], **project["optional-dependencies"]}
    return {extra: [Requirement(line) for line in lines] for extra, lines in groups.items()}


def constraints() -> dict[str, Version]:
    lines = [line.partition("#")[0].strip() for line in (ROOT / "constraints.txt").read_text().splitlines()]
    pairs = (line.split("==") for line in lines if line)
    return {canonicalize_name(name): Version(version) for name, version in pairs}


def conda() -> dict[str, str]:
    """Return the version of each conda package of environment.yml."""
    dependencies = yaml.safe_load((ROOT / "environment.yml").read_text())["dependencies"]
    pairs = (re.fullmatch(r"([\w.-]+)\s*(.*)", line) for line in dependencies if isinstance(line, str))
    return {match[1]: match[2] for match in pairs if match}


def test_every_folder_of_the_package_is_listed() -> None:
    folders = {".".join(path.parent.relative_to(ROOT).parts) for path in ROOT.glob("kvlab/**/__init__.py")}
    assert set(PYPROJECT["tool"]["setuptools"]["packages"]) == folders | {
        "kvlab.cuda_kernels",
        "kvlab.numba_kernels",
        "kvlab.numba_kernels.cpu",
        "kvlab.numba_kernels.cuda",
    }
    for path in ROOT.glob("kvlab/**/*.py"):
        assert (path.parent / "__init__.py").exists(), f"{path.parent} has no __init__.py"


def test_wheel_holds_every_source_and_no_top_level_kernels(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, source)
    for name in ("kvlab", "kernels"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "-q",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        tmp_path,
        source,
    ]
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    (wheel,) = tmp_path.glob("kvlab-*.whl")
    installed = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    expected = {str(path.relative_to(ROOT)) for path in ROOT.glob("kvlab/**/*.py")} | {"kvlab/py.typed"}
    for folder in ("cuda", "numba"):
        for pattern in ("*.py", "*/*.py", "*/*.cu", "*/*.cuh"):
            for path in (ROOT / "kernels" / folder).glob(pattern):
                expected.add(f"kvlab/{folder}_kernels/{path.relative_to(ROOT / 'kernels' / folder)}")
    assert installed == expected


def test_constraints_are_versions_the_project_allows() -> None:
    pinned = constraints()
    for extra, wanted in requirements().items():
        for requirement in wanted:
            version = pinned.get(canonicalize_name(requirement.name))
            assert version is not None, f"{requirement.name} of extra {extra!r} is not in constraints.txt"
            assert requirement.specifier.contains(version, prereleases=True), (requirement, version)


def test_constraints_are_the_versions_these_tests_run_on() -> None:
    wrong = {}
    for name, version in constraints().items():
        try:
            installed = Version(metadata.version(name))
        except metadata.PackageNotFoundError:
            continue
        if installed.public != version.public:
            wrong[name] = f"{installed} is installed, {version} is pinned"
    assert wrong == {}


@pytest.mark.parametrize("extra", ["", "hf", "lab", "test"])
def test_conda_environment_has_the_same_pins(extra: str) -> None:
    pinned, environment = constraints(), conda()
    for requirement in requirements()[extra]:
        name = CONDA_NAMES.get(requirement.name, canonicalize_name(requirement.name))
        assert environment.get(name) == f"={pinned[canonicalize_name(requirement.name)]}", name


def test_conda_environment_names_nothing_else_and_python_agrees() -> None:
    known = {
        CONDA_NAMES.get(r.name, canonicalize_name(r.name)) for group in requirements().values() for r in group
    }
    assert set(conda()) - known == {"python", "pip", "make"}
    assert PYPROJECT["project"]["requires-python"] == conda()["python"].replace(" ", "")


def test_reports_name_the_version_of_every_package_results_depend_on() -> None:
    groups = requirements()
    wanted = {r.name for extra in ("", "hf", "lab", "cu12", "cu13") for r in groups[extra]}
    assert wanted <= set(PACKAGES)


def test_one_cuda_major_version_per_extra() -> None:
    for extra, other in (("cu12", "13"), ("cu13", "12")):
        text = str([str(requirement) for requirement in requirements()[extra]])
        assert f"cu{other}" not in text
        assert f"cuda{other}" not in text


def test_numpy_stays_below_what_numba_cuda_can_use() -> None:
    (numpy,) = (requirement for requirement in requirements()[""] if requirement.name == "numpy")
    assert not numpy.specifier.contains("2.5.0")


@pytest.mark.parametrize(
    "target", ["demo", "test", "lint", "clean", "demo-full", "test-compat", "compile-gate"]
)
def test_makefile_and_readme_name_the_same_targets(target: str) -> None:
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert f"`make {target}`" in (ROOT / "README.md").read_text()


def save_tiny_model(folder: Path) -> None:
    """Save a model of two layers and a tokenizer that takes bytes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={sign: code for code, sign in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    config = LlamaConfig(vocab_size=256, hidden_size=64, num_hidden_layers=2, num_attention_heads=2)
    LlamaForCausalLM(config).save_pretrained(folder)


def test_code_in_the_readme_runs(tmp_path: Path) -> None:
    save_tiny_model(tmp_path)
    text = (ROOT / "README.md").read_text().replace("HuggingFaceTB/SmolLM2-135M-Instruct", str(tmp_path))
    blocks = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    assert len(blocks) == 6
    alone = ["".join(blocks[:3]), *blocks[3:]]  # the second and the third go on from the first
    (tmp_path / "README.md").write_text(text)  # which is what the model reads
    each_alone = f"for block in {alone!r}: exec(block, {{}})"
    result = subprocess.run(
        [sys.executable, "-c", each_alone], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr


def expanded(path: str) -> list[str]:
    """`a/{b,c}/d` is `a/b/d` and `a/c/d`."""
    braces = re.search(r"\{([^}]*)\}", path)
    return [path.replace(braces[0], name) for name in braces[1].split(",")] if braces else [path]


def test_the_map_of_the_readme_leads_to_what_is_there() -> None:
    """Every path exists, and a name behind one stands in that file or folder."""
    section = (ROOT / "README.md").read_text().partition("## Map\n")[2]
    table = [line for line in section.splitlines() if line.startswith("| ")][1:]
    assert len(table) >= 7
    for line in table:
        latest = ""
        for item in re.findall(r"`([^`]+)`", line.split(" | ")[1]):
            paths = [ROOT / path for path in expanded(item)]
            if "/" in item:
                assert all(path.exists() for path in paths), item
                latest = "".join(
                    file.read_text()
                    for path in paths
                    for file in (path.rglob("*.*") if path.is_dir() else [path])
                    if file.suffix in (".py", ".cu", ".cuh")
                )
            else:
                assert item.split()[0] in latest, item

"""The batch scripts as text: short, valid shell, and set by the environment variables that users know."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

SCRIPTS = sorted((Path(__file__).parents[2] / "slurm").glob("*.sbatch"))
VARIABLES = (
    *("CONDA_ENV", "DEVICE", "NUM_LAYERS", "NUM_HEADS", "HEAD_DIM", "MEMORY_BUDGETS", "BIT_CONFIGS"),
    *("CONTEXT_LENGTHS", "USE_BIT_PACKING_MODES", "BASELINES", "NUM_ITERATIONS", "TEST_MODULES"),
    *("USE_FUSED_GPU", "RANKS_PER_NODE", "TOKENS", "SETS"),
)


def test_the_scripts_are_there() -> None:
    names = {path.stem for path in SCRIPTS}
    jobs = {"ablate_memory", "benchmark_gpu", "context_parallel"}
    assert names == {*jobs, "collect", "test_integration", "test_kernels"}


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_a_script_is_short_and_valid(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 40
    assert subprocess.run(["bash", "-n", str(path)], check=False).returncode == 0


@pytest.mark.parametrize("name", VARIABLES)
def test_every_variable_is_used_and_explained(name: str) -> None:
    texts = [path.read_text() for path in SCRIPTS]
    using = [text for text in texts if f"${{{name}" in text or f"${name}" in text]
    assert using
    for text in using:
        comments = "\n".join(line for line in text.splitlines() if line.startswith("# "))
        assert name in comments

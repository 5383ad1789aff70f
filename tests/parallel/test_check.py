"""`python -m kvlab.parallel.check`: right as it is, wrong when a function is."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest

from kvlab.parallel import check


def test_two_ranks_from_torchrun() -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    command += ["-m", "kvlab.parallel.check", "--tokens", "48", "--heads", "4", "2", "--head-dim", "16"]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=240)
    assert result.returncode == 0, result.stderr[-3000:]
    assert "2 ranks, 96 tokens, float32: all right" in result.stdout
    assert result.stdout.count("right: errors") == 8


def test_the_tests_of_ranks_run_under_torchrun() -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    command += [
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "tests/parallel/test_zigzag_llama3_grouped.py",
    ]
    command += ["-k", "large_inputs or under_way or windows or one_process_gives"]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=240)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-1000:]
    assert result.stdout.count("24 passed, 32 skipped") == 2


def test_a_wrong_function_is_seen(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ring = check.parallel.ring_flash_attn_varlen_func
    wrong: Any = lambda *arguments, **options: 1.1 * ring(*arguments, **options)  # noqa: E731
    monkeypatch.setattr(check.parallel, "ring_flash_attn_varlen_func", wrong)
    assert check.main(["--tokens", "16", "--head-dim", "8"]) == 1
    text = capsys.readouterr().out
    assert "ring          WRONG" in text
    assert "zigzag_llama3 right" in text


def test_several_dtypes_and_lengths(capsys: pytest.CaptureFixture[str]) -> None:
    """Chunks of a multiple of 8 tokens and others: a GPU has a kernel for the first alone."""
    assert check.main(["--tokens", "60", "--head-dim", "8", "--dtype", "float16", "bfloat16"]) == 0
    text = capsys.readouterr().out
    for dtype in ("float16", "bfloat16"):
        assert f"1 ranks, 60 tokens, {dtype}: all right" in text
    for lengths in ("60", "16, 44", "20, 40"):
        assert text.count(f"lengths {lengths}\n") == 2 * len(check.FUNCTIONS)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--tokens", "0"], "--tokens: 0 is not supported: it must be 1 or more"),
        (["--heads", "7", "2"], "--heads 7 2: query heads must be a multiple of KV heads"),
        (["--stride", "3"], "--stride 3: there are 2 KV heads to gather"),
    ],
)
def test_options_that_fit_no_input_are_refused(
    options: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        check.main(options)
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("is_late", [False, True])
def test_no_thread_of_a_group_outlives_it(is_late: bool) -> None:
    """Late: what `process_group` imports before it joins is imported behind; then threads stay, which shows
    that this sees them."""
    hidden = "collectives.import_module = lambda name: None" if is_late else ""
    code = f"""
import datetime, glob
from kvlab.parallel import collectives
{hidden}
with collectives.process_group(datetime.timedelta(seconds=60)):
    import torch.distributed.nn.functional
names = []
for name in glob.glob("/proc/self/task/*/comm"):
    try:
        names.append(open(name).read())
    except OSError:  # a thread that has ended since
        pass
print(sum("gloo" in name for name in names), flush=True)
import os
os._exit(0)
"""
    environment = {name: value for name, value in os.environ.items() if name != "RANK"}
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, env=environment
    )
    assert result.returncode == 0, result.stderr
    assert (int(result.stdout) > 0) == is_late

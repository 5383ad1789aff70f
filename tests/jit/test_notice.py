"""A terminal is told that kernels are compiled: once, not when they are found, and nobody else is."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from pathlib import Path

WORDS = "kvlab compiles kernels; this happens once, later runs find them"
CPU = """
import kvlab.ops.cpu
import numpy as np
from kvlab.numba_kernels.cpu.allocator import break_price
for dtype in (np.int64, np.int32):
    break_price(np.ones(3, np.int64), np.ones(3, dtype), 2)
"""
GENERATED = """
import sys
from numba import njit
import kvlab.ops.cpu
sys.stderr = None
names = {}
exec("def double(x): return 2 * x", names)
assert names["double"].__module__ is None
assert njit(names["double"])(2) == 4
"""
CUDA = """
from kvlab.jit.build import build
for arch in ("sm_80", "sm_90a"):
    build("fill", {"VALUE": 7}, arch, root=ROOT)
"""
SOURCE = 'extern "C" __global__ void fill(int* out) { *out = VALUE; }'


def said(code: str, folder: Path, *, terminal: bool = True) -> str:
    """Run code with its caches in a folder; return what it says to stderr."""
    caches = {"NUMBA_CACHE_DIR": str(folder / "numba"), "KVLAB_CACHE_DIR": str(folder / "cuda")}
    ours, theirs = pty.openpty() if terminal else os.pipe()
    try:
        subprocess.run([sys.executable, "-c", code], stderr=theirs, env=os.environ | caches, check=True)
    finally:
        os.close(theirs)
    text = b""
    with os.fdopen(ours, "rb", buffering=0) as file:
        while True:
            try:
                part = file.read(4096)
            except OSError:  # of a terminal that nobody has open any more
                part = b""
            if not part:
                return text.decode()
            text += part


def test_a_terminal_is_told_once_that_cpu_kernels_are_compiled(tmp_path: Path) -> None:
    assert said(CPU, tmp_path / "first", terminal=False) == ""
    assert said(CPU, tmp_path / "second").split("\r\n") == [WORDS, ""]
    assert said(CPU, tmp_path / "second") == ""


def test_code_of_others_compiles_and_a_program_may_have_no_stderr(tmp_path: Path) -> None:
    assert said(GENERATED, tmp_path) == ""
    assert said("import sys; sys.stderr = None\n" + CPU, tmp_path) == ""


def test_a_terminal_is_told_once_that_cuda_kernels_are_compiled(tmp_path: Path) -> None:
    (tmp_path / "fill.cu").write_text(SOURCE)
    code = CUDA.replace("ROOT", f"__import__('pathlib').Path({str(tmp_path)!r})")
    assert said(code, tmp_path / "first", terminal=False) == ""
    assert said(code, tmp_path / "second").split("\r\n") == [WORDS, ""]
    assert said(code, tmp_path / "second") == ""

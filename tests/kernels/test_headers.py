"""Every CUDA header includes what it needs: a source of that header alone compiles.

A header takes its macros from the sources that include it, so it is compiled with those of the specialisation
of them that has most, and with what that source itself defines.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kvlab.jit.build import kernel_root, with_included
from kvlab.jit.compile_gate import Specialisation, specialisations
from kvlab.jit.nvrtc import compile_cubin

ROOT = kernel_root()
INCLUDED = re.compile(r'^#include "(.+)"', re.MULTILINE)
HEADERS = [path.relative_to(ROOT).as_posix() for path in sorted(ROOT.glob("*/*.cuh"))]


def user_of(header: str) -> Specialisation:
    """The specialisation for sm_90a with most macros of the sources that include a header."""
    users = [
        item
        for item in specialisations()
        if item.arch == "sm_90a" and header in with_included(item.name, ROOT, INCLUDED.findall)
    ]
    assert users, f"no source includes {header}"
    return max(users, key=lambda item: len(item.macros))


@pytest.mark.parametrize("header", HEADERS)
def test_a_header_compiles_by_itself(header: str) -> None:
    user = user_of(header)
    defined = re.findall(r"^#define CODEC .*$", (ROOT / user.name).read_text(encoding="utf-8"), re.MULTILINE)
    source = "\n".join([*defined, f'#include "{header}"', 'extern "C" __global__ void nothing() {}', ""])
    assert compile_cubin(Path("alone.cu"), ROOT, source, user.macros, "sm_90a")

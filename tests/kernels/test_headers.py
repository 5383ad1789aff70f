"""Every CUDA header includes what it needs: a source of that header alone compiles.

A header takes its macros from the sources that include it, so it is compiled with those of the first
specialisation of one of them, and with what that source itself defines.
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
LATER = {"attention/forward_grouped.cuh"}  # a part of attention/forward_sm90.cuh, in the middle of it
HEADERS = [
    name
    for path in sorted(ROOT.glob("*/*.cuh"))
    if not {name := path.relative_to(ROOT).as_posix(), path.parent.name} & LATER
]


def user_of(header: str) -> Specialisation:
    """A specialisation for sm_90a of a source that includes a header."""
    for item in specialisations():
        if item.arch == "sm_90a" and header in with_included(item.name, ROOT, INCLUDED.findall):
            return item
    raise AssertionError(f"no source includes {header}")


@pytest.mark.parametrize("header", HEADERS)
def test_a_header_compiles_by_itself(header: str) -> None:
    user = user_of(header)
    defined = re.findall(r"^#define CODEC .*$", (ROOT / user.name).read_text(encoding="utf-8"), re.MULTILINE)
    source = "\n".join([*defined, f'#include "{header}"', 'extern "C" __global__ void nothing() {}', ""])
    assert compile_cubin(Path("alone.cu"), ROOT, source, user.macros, "sm_90a")

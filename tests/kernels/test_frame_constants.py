"""Numbers of `kvlab.ops.frame` that CUDA has, too."""

from __future__ import annotations

import re

import pytest

from kvlab.jit.build import kernel_root
from kvlab.ops import frame

NAMES = {
    "pages/state.cuh": ("LAST", "ASKING"),
    "pages/means.cu": (
        "FIRST", "MIN_TOKENS", "MIN_RATIO", "MIN_RATIO_ALONE", "MIN_EXPONENT", "FITTED_TO",
    ),
    "pages/refit.cuh": ("MAX_SHIFT", "MAX_FURTHER", "MIN_GROWN", "MIN_AGAIN", "MAX_RATIO", "JUMP"),
}  # fmt: skip


@pytest.mark.parametrize("source", NAMES)
def test_kernels_have_the_numbers_of_frames(source: str) -> None:
    text = (kernel_root() / source).read_text(encoding="utf-8")
    for name in NAMES[source]:
        (found,) = re.findall(rf"\b{name} = (-?\d+)(?: << (\d+))?\.?[,;]", text)
        assert int(found[0]) << int(found[1] or 0) == getattr(frame, name), name

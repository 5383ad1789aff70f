"""Numbers of `kvlab.ops.frame` that CUDA has, too."""

from __future__ import annotations

import re

import pytest

from kvlab.jit.build import kernel_root
from kvlab.ops import frame

NAMES = {
    "pages/state.cuh": {"LAST": "LAST", "ASKING": "ASKING"},
    "pages/means.cu": {
        "FIRST": "FIRST",
        "MIN_TOKENS": "FEWEST",
        "MIN_RATIO": "LEAST",
        "MIN_RATIO_ALONE": "LEAST_ALONE",
        "MIN_EXPONENT": "LEAST_EXPONENT",
        "FITTED_TO": "FITTED_TO",
    },
    "pages/refit.cuh": {
        "MAX_SHIFT": "MOST_SHIFT",
        "MAX_FURTHER": "MOST_FURTHER",
        "MIN_GROWN": "LEAST_GROWN",
        "MIN_AGAIN": "LEAST_AGAIN",
        "MAX_RATIO": "MOST_RATIO",
        "JUMP": "JUMP",
    },
}


@pytest.mark.parametrize("source", NAMES)
def test_kernels_have_the_numbers_of_frames(source: str) -> None:
    text = (kernel_root() / source).read_text(encoding="utf-8")
    for name, of_frame in NAMES[source].items():
        (found,) = re.findall(rf"\b{name} = (-?\d+)(?: << (\d+))?\.?[,;]", text)
        assert int(found[0]) << int(found[1] or 0) == getattr(frame, of_frame), name

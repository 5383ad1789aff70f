"""Layers of published widths against transformers: errors up to 1.1 times those of its 16 bits."""

from __future__ import annotations

import pytest

from kvlab.engine.geometry import PUBLISHED
from kvlab.lab.engine.check import ALLOWED, check

SMALL = ("pythia-70m", "smollm2-135m")


@pytest.mark.parametrize(
    "name",
    [name if name in SMALL else pytest.param(name, marks=pytest.mark.slow) for name in PUBLISHED],
)
def test_two_layers_of_published_widths(name: str) -> None:
    rows, _ = check(name, layers=[0, 1], seq_len=12, dtype="float16", seed=0, device="cpu")
    assert all(0 < row["ratio"] <= ALLOWED for row in rows), rows

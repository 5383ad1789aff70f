"""`kvlab benchmark engine`: figures that fit together, and a wrong decoder that is not timed."""

from __future__ import annotations

from typing import Any

import pytest

from kvlab.engine import Decoder
from kvlab.lab.benchmark import engine
from kvlab.lab.benchmark.baseline import Options


def test_figures_fit_together() -> None:
    (row,) = engine.benchmark_engine(Options(tiny=True))
    assert row["tokens/s"] == pytest.approx(row["batch"] / row["us"] * 1e6)
    read = row["GB/s"] * 1e9 * row["us"] / 1e6
    geometry = Decoder.from_config("pythia-14m", layers=1).geometry
    assert read > 2 * geometry.vocabulary * geometry.hidden


def test_a_wrong_decoder_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    right = Decoder.step

    def wrong(self: Decoder, ids: Any) -> Any:
        return right(self, [(token + 1) % 100 for token in ids])

    monkeypatch.setattr(Decoder, "step", wrong)
    with pytest.raises(RuntimeError, match="other logits"):
        engine.benchmark_engine(Options(tiny=True))

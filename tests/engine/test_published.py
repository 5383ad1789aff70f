"""Published widths against transformers: errors up to 1.1 times those of its 16 bits."""

from __future__ import annotations

import numpy as np
import pytest

from kvlab.engine import Decoder
from kvlab.engine.geometry import PUBLISHED, published
from kvlab.lab.engine.check import ALLOWED, check, states
from kvlab.lab.engine.models import load
from tests.engine.test_pythia_model import assert_no_worse

SMALL = ("pythia-14m", "pythia-31m")
NAMES = [name if name in SMALL else pytest.param(name, marks=pytest.mark.slow) for name in PUBLISHED]


def assert_logits(name: str, dtype: str, device: str) -> None:
    """Largest, root mean square error and divergence of a text's logits, token by token."""
    geometry, _ = published(name)
    depth = geometry.layers if geometry.hidden <= 768 else 3 if geometry.hidden <= 2048 else 2
    model = load(name, dtype, depth, 0)
    ids = np.random.default_rng(0).integers(0, model.config.vocab_size, 12)
    exact, low = states(model, ids, "float64")[-1], states(model, ids, dtype)[-1]
    decoder = Decoder.from_pretrained(model, dtype=dtype, device=device, max_seqlen=len(ids))
    got = np.stack([decoder.step([token])[0] for token in ids]).astype(float)
    assert_no_worse(got, low, exact, ALLOWED)


@pytest.mark.parametrize("name", NAMES)
def test_logits_of_published_widths(name: str) -> None:
    assert_logits(name, "float16", "cpu")


@pytest.mark.parametrize("name", NAMES)
def test_two_layers_of_published_widths(name: str) -> None:
    rows, _ = check(name, layers=[0, 1], seq_len=12, dtype="float16", seed=0, device="cpu")
    assert all(0 < row["ratio"] <= ALLOWED for row in rows), rows

"""A layer of Pythia with random weights against float64: error statistics over 100 draws."""

from __future__ import annotations

import dataclasses

import numpy as np

from kvlab.engine import Decoder
from kvlab.engine.geometry import Geometry
from kvlab.engine.weights import draw
from kvlab.reference.decoder import KeysValues, token_logits
from tests.engine.unpacked import oracle_of

LAYER = Geometry(1, 64, 160, 2, 2, 80, 20, 192, max_positions=32, parallel=True, layer_norm=True, gated=False)
"""Heads of 80 channels, of which 20 rotate, as in pythia-2.8b."""
RUNS, TOKENS = 100, 4


def mean_error(seed: int, **changes: float) -> float:
    """Mean absolute error of the logits of a text's last token, over their mean size."""
    tokens = np.random.default_rng(seed).integers(0, LAYER.vocabulary, TOKENS)
    oracle = oracle_of(draw(LAYER, 1e4, seed, "float16"))
    past = [KeysValues()]
    want = [token_logits(token, oracle, past) for token in tokens][-1]
    decoder = Decoder(draw(dataclasses.replace(LAYER, **changes), 1e4, seed, "float16"))
    got = decoder.prefill(tokens)[0]
    return float(np.abs(got - want).mean() / np.abs(want).mean())


def test_errors_of_random_layers() -> None:
    """What float16 keys and values cost: three decimal digits, in the worst of all draws."""
    errors = [mean_error(seed) for seed in range(RUNS)]
    assert max(errors) < 5e-4, (max(errors), min(errors), np.mean(errors))
    assert np.mean(errors) < 2e-4


def test_the_statistics_see_a_wrong_layer() -> None:
    assert mean_error(0, rotary_dim=80) > 1e-2
    assert mean_error(0, eps=0.1) > 1e-2
    assert mean_error(0, parallel=False) > 1e-2

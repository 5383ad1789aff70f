"""kvlab.measure_frames: frames of what attention of a model sees."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

import kvlab
from kvlab.errors import FormatError
from tests.integrations.models import tiny, tokens

SEEN: list[tuple[np.ndarray, ...]] = []


def note(module: Any, query: Any, key: Any, value: Any, *rest: Any, **options: Any) -> Any:
    SEEN.append(tuple(x.transpose(1, 2).numpy() for x in (query, key, value)))
    return sdpa_attention_forward(module, query, key, value, *rest, **options)


AttentionInterface.register("noted", note)
AttentionMaskInterface.register("noted", sdpa_mask)


@pytest.mark.parametrize("narrow", [False, True])
@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt-neox"])
def test_frames_are_those_of_keys_and_queries_behind_rope(
    name: str, narrow: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, ids = tiny(name), tokens(2, 90)
    found = kvlab.measure_frames(model, ids, narrow=narrow)
    SEEN.clear()
    monkeypatch.setattr(model.config, "_attn_implementation", "noted")
    model(ids, use_cache=False)
    wanted = kvlab.KeyFrames.measured(SEEN, narrow=narrow)
    assert len(SEEN) == model.config.num_hidden_layers
    for field in fields(found):
        mine, other = (getattr(x, field.name) for x in (found, wanted))
        if field.name in ("k_mean", "k_gain"):
            np.testing.assert_allclose(mine, other, rtol=1e-2, atol=1e-3)
        else:
            assert (mine == other).mean() > 0.95, field.name
    assert (found.k_order != np.arange(found.k_order.shape[-1])).any()
    assert "forward" not in vars(model)


def test_a_cache_takes_measured_frames_from_a_file(tmp_path: Path) -> None:
    model, ids = tiny("llama"), tokens(1, 120)
    frames = kvlab.measure_frames(model, ids)
    frames.save(tmp_path / "frames")
    loaded = kvlab.KeyFrames.load(tmp_path / "frames")
    outs = [
        kvlab.read(model, ids, chunk=16, budget=None, bits=(3, 8), frames=x).logits
        for x in (frames, loaded, None)
    ]
    assert torch.equal(outs[0], outs[1])
    assert not torch.equal(outs[0], outs[2])


def test_files_that_hold_no_frames_are_refused(tmp_path: Path) -> None:
    cache, path = kvlab.MixedPrecisionCache(1, 2, 1, 64, bits=4, budget=None), tmp_path / "file"
    cache.save(path)
    with pytest.raises(FormatError, match="file: holds no frames; a cache is loaded by MixedPrecisionCache"):
        kvlab.KeyFrames.load(path)
    q, k, v = np.random.default_rng(0).standard_normal((3, 1, 80, 2, 64), dtype=np.float32)
    frames = kvlab.KeyFrames.measured([(q, k, v)])
    frames.save(path)
    with pytest.raises(FormatError, match="what it describes is no cache"):
        kvlab.MixedPrecisionCache.load(path)
    data = bytearray(path.read_bytes())
    for place in (9, len(data) // 2, len(data) - 1):
        damaged = bytearray(data)
        damaged[place] ^= 1
        path.write_bytes(damaged)
        with pytest.raises(FormatError):
            kvlab.KeyFrames.load(path)
    frames.k_order[0, 0, 0] = frames.k_order[0, 0, 1]
    frames.save(path)
    with pytest.raises(FormatError, match="file: k_order does not have every rotary pair once"):
        kvlab.KeyFrames.load(path)


def test_what_cannot_be_measured_is_refused() -> None:
    with pytest.raises(ValueError, match="layers is empty"):
        kvlab.KeyFrames.measured([])
    model = tiny("llama")
    with pytest.raises(ValueError, match="ids has 19 tokens a row; frames need 20 or more"):
        kvlab.measure_frames(model, tokens(3, 19))
    with pytest.raises(TypeError, match="ids must be a tensor of token numbers"):
        kvlab.measure_frames(model, np.zeros((1, 90), int))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="model must be a transformers model"):
        kvlab.measure_frames(torch.nn.Linear(2, 2).eval(), tokens(1, 90))
    try:
        model.train()
        with pytest.raises(ValueError, match="model is in training mode"):
            kvlab.measure_frames(model, tokens(1, 90))
    finally:
        model.eval()

"""Which steps of a model CUDA graphs replay; the graphs themselves are in tests/gpu."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig

from kvlab.cache.cache import MixedPrecisionCache
from kvlab.integrations import decode_graph
from kvlab.integrations.decode_graph import DecodeGraph, replayed_steps
from kvlab.integrations.transformers import ATTENTION, KVLabCache, register
from tests.cache.host.cases import LAYERS, check_state, draw, make
from tests.cache.host.noted import install
from tests.integrations.models import tiny, tokens

register()


class Recorded(Exception):
    """A step would have been recorded or replayed."""


def test_only_masks_of_two_dimensions_are_replayed(attend: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps with other masks run as usual."""
    model, ids = tiny("llama"), tokens(2, 10)
    attend(model, ATTENTION)
    cache = KVLabCache(model.config, bits=16, budget=None)

    def refuse(*_: Any) -> None:
        raise Recorded

    monkeypatch.setattr(decode_graph, "DecodeGraph", refuse)
    step = {"input_ids": ids[:, 9:], "past_key_values": cache}
    with torch.no_grad(), replayed_steps(model):
        model(ids[:, :9], past_key_values=cache)
        monkeypatch.setattr(MixedPrecisionCache, "on_gpu", True)
        for mask in (None, torch.ones(2, 10)):
            with pytest.raises(Recorded):
                model(**step, attention_mask=mask)
        with pytest.raises(Recorded):
            model(ids[:, 9:], past_key_values=cache)
        found = model(**step, attention_mask=torch.ones(2, 1, 1, 10, dtype=torch.bool)).logits
    assert torch.allclose(found, model(ids).logits[:, 9:], atol=1e-4)


def test_graphs_of_memory_that_was_given_back_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sequence that grows moves its memory; graphs of before would keep theirs. Kernels are in NumPy."""
    install(monkeypatch)
    packed = make(batch=1, plan_length=64, budget="1MiB", realloc_every=8)
    rng = np.random.default_rng(0)
    recorded: weakref.WeakSet[Graph] = weakref.WeakSet()
    made, capturing = 0, False

    def step(steps: int = 1) -> None:
        for layer in range(LAYERS):
            packed.step(layer, *draw(rng, packed, steps))

    class Graph:
        def __init__(self) -> None:
            nonlocal made
            made += 1
            recorded.add(self)

        def replay(self) -> None:
            with packed.recording():
                step()

    @contextmanager
    def capture(graph: Graph) -> Iterator[None]:
        nonlocal capturing
        capturing = True
        yield
        capturing = False

    class Model:
        device = "cpu"

        def __call__(self, **_: Any) -> Any:
            if not capturing:
                step()
            return SimpleNamespace(logits=torch.zeros(1, 1, 8))

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", capture)
    step(50)
    heads = {"num_attention_heads": packed.num_heads_q, "num_key_value_heads": packed.num_heads_kv}
    config = LlamaConfig(num_hidden_layers=LAYERS, head_dim=packed.head_dim, **heads)
    cache = KVLabCache(config)
    cache.hold(packed)
    decode, most = DecodeGraph(Model(), cache), 0
    for _ in range(100):
        decode(torch.zeros(1, 1, dtype=torch.long))
        most = max(most, len(recorded))
    assert made > 4
    assert most == 2
    check_state(packed, [range(150)])

"""A cache on another device: the same pages, the same results, and how fast chunks are read there."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvlab.integrations.transformers import KVLabCache
from kvlab.lab.quality.cases import mixed
from kvlab.lab.quality.measure import full_precision
from kvlab.lab.quality.model import tiny_llama
from kvlab.lab.quality.replay import on_cpu, speeds


def test_a_copy_on_the_cpu_reads_the_same_pages() -> None:
    subject = tiny_llama()
    tokens = torch.from_numpy(np.array([subject.encode(subject.text[:160])]))
    case = mixed(subject.model.config, 160, [0.4])[0]
    cache = case.make()
    subject.model(tokens[:, :128], past_key_values=cache)
    copied = on_cpu(case, cache)
    assert isinstance(cache, KVLabCache)
    assert copied.packed is not cache.packed
    assert copied.packed.nbytes == cache.packed.nbytes
    want, got = (subject.model(tokens[:, 128:], past_key_values=held).logits for held in (cache, copied))
    assert torch.equal(got, want)
    rates = speeds(subject.model, tokens, case, 32, [32, 96])
    assert list(rates) == [32, 96]
    assert min(map(min, rates.values())) > 0
    with pytest.raises(ValueError, match="must make a KVLabCache"):
        on_cpu(full_precision(subject.model.config), cache)
    subject.model.config.num_hidden_layers = 3
    other = KVLabCache(subject.model.config)
    with pytest.raises(ValueError, match="packed has 2 layers, the model has 3"):
        other.hold(cache.packed)

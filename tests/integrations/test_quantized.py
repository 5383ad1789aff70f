"""kvlab.quantized: generate() packs inside the block, and everything is as before behind it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import BloomConfig, BloomForCausalLM, DynamicCache, GenerationConfig

import kvlab
from kvlab.integrations.transformers import ATTENTION, KVLabCache
from tests.integrations.models import CONFIGS, tiny, tokens

EXACT: dict[str, Any] = {"bits": (16,), "budget": None}
GREEDY: dict[str, Any] = {"max_new_tokens": 16, "do_sample": False}


def state(model: Any) -> tuple[Any, ...]:
    return model.config._attn_implementation, vars(model).get("generate"), model.generate


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_inside_the_block_generate_uses_packed_caches(name: str) -> None:
    model, prompt = tiny(name), tokens(2, 30)
    before = state(model)
    expected = model.generate(prompt, **GREEDY)
    with kvlab.quantized(model, **EXACT) as same:
        assert same is model
        assert model.config._attn_implementation == ATTENTION
        outs = [model.generate(prompt, return_dict_in_generate=True, **GREEDY) for _ in range(2)]
        by_position = model.generate(prompt, GenerationConfig(**GREEDY, pad_token_id=0))
    assert state(model) == before
    assert by_position.tolist() == expected.tolist()
    caches = [out.past_key_values for out in outs]
    assert all(isinstance(cache, KVLabCache) for cache in caches)
    assert caches[0] is not caches[1]
    assert all(out.sequences.tolist() == expected.tolist() for out in outs)
    assert not isinstance(
        model.generate(prompt, return_dict_in_generate=True, **GREEDY).past_key_values, KVLabCache
    )


def test_everything_is_restored_after_an_error() -> None:
    model = tiny("llama")
    before = state(model)
    with pytest.raises(ValueError, match="use_cache=False"), kvlab.quantized(model):
        model.generate(tokens(1, 9), use_cache=False)
    assert state(model) == before


def test_what_the_block_set_stays_set() -> None:
    model = tiny("llama")
    with kvlab.quantized(model):
        model.note = "kept"
    assert model.note == "kept"
    del model.note


def test_blocks_nest() -> None:
    model, prompt = tiny("llama"), tokens(1, 9)
    before = state(model)
    with kvlab.quantized(model, budget="2MiB"):
        with kvlab.quantized(model, budget="1MiB"):
            inner = model.generate(prompt, return_dict_in_generate=True, **GREEDY)
        outer = model.generate(prompt, return_dict_in_generate=True, **GREEDY)
    assert inner.past_key_values.packed.budget_nbytes == 2**20 // 3 * 3
    assert outer.past_key_values.packed.budget_nbytes == 2**21 // 3 * 3
    assert state(model) == before


def test_a_second_turn_goes_on_with_a_cache_of_the_first() -> None:
    model, prompt = tiny("llama"), tokens(1, 30)
    with kvlab.quantized(model, **EXACT):
        first = model.generate(prompt, return_dict_in_generate=True, **GREEDY)
        longer = torch.cat([first.sequences, tokens(1, 7, seed=3)], 1)
        second = model.generate(longer, past_key_values=first.past_key_values, **GREEDY)
    assert second.tolist() == model.generate(longer, **GREEDY).tolist()


@pytest.mark.parametrize("assistant", ["llama", "gemma3"])
def test_an_assistant_model_may_be_quantized(assistant: str) -> None:
    model, prompt = tiny("qwen2"), tokens(1, 40)
    expected = model.generate(prompt, **GREEDY)
    with kvlab.quantized(model, **EXACT), kvlab.quantized(tiny(assistant)):
        found = model.generate(prompt, assistant_model=tiny(assistant), **GREEDY)
    assert found.tolist() == expected.tolist()


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        (
            {"past_key_values": DynamicCache()},
            TypeError,
            r"DynamicCache; inside kvlab\.quantized pass a KVLabCache",
        ),
        ({"use_cache": False}, ValueError, "use_cache=False"),
        ({"cache_implementation": "static"}, ValueError, "cache_implementation"),
    ],
)
def test_generate_refuses_other_caches(options: Any, error: type[Exception], words: str) -> None:
    with kvlab.quantized(tiny("llama")) as model, pytest.raises(error, match=words):
        model.generate(tokens(1, 9), max_new_tokens=2, **options)


def test_bad_arguments_change_nothing() -> None:
    model = tiny("llama")
    before = state(model)
    with pytest.raises(ValueError, match="bits"), kvlab.quantized(model, bits=(7,)):
        pass
    with (
        pytest.raises(TypeError, match="model must be a transformers model"),
        kvlab.quantized(CONFIGS["llama"]),
    ):
        pass
    assert state(model) == before


def test_a_model_without_attention_functions_is_refused() -> None:
    model = BloomForCausalLM(BloomConfig(vocab_size=64, hidden_size=64, n_layer=2, n_head=2)).eval()
    before = state(model)
    with pytest.raises(NotImplementedError, match="BloomForCausalLM does not take"), kvlab.quantized(model):
        pass
    assert state(model) == before
    with pytest.raises(RuntimeError, match=r"needs a transformers\.DynamicCache"):
        model.generate(tokens(1, 9) % 64, past_key_values=KVLabCache(model.config), max_new_tokens=2)


def test_graphs_need_a_gpu() -> None:
    model = tiny("llama")
    with pytest.raises(ValueError, match="graph=True"), kvlab.quantized(model, graph=True):
        pass
    assert "forward" not in vars(model)

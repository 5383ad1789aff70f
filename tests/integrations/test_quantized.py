"""kvlab.quantized: generate() packs inside the block, and everything is as before behind it."""

from __future__ import annotations

import copy
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    DynamicCache,
    GenerationConfig,
    MambaConfig,
    MambaForCausalLM,
)

import kvlab
from kvlab import BudgetError
from kvlab.integrations.transformers import ATTENTION, KVLabCache
from tests.integrations.models import CONFIGS, tiny, tokens

EXACT: dict[str, Any] = {"bits": (16,), "budget": None}
GREEDY: dict[str, Any] = {"max_new_tokens": 16, "do_sample": False}


def state(model: Any) -> tuple[Any, ...]:
    methods = [vars(part).get(name) for part in (model, model.model) for name in ("generate", "forward")]
    return model.config._attn_implementation, methods, model.generate, model.forward, model.model.forward


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
        ({"cache_implementation": "static"}, ValueError, "cache_implementation='static' .* leave it out"),
        (
            {"generation_config": GenerationConfig(cache_implementation="dynamic")},
            ValueError,
            "cache_implementation='dynamic' .* leave it out",
        ),
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
    with pytest.raises(TypeError, match="entered by `with`"), kvlab.quantized(kvlab.quantized(model)):  # type: ignore[type-var]
        pass
    assert state(model) == before


def test_a_model_without_attention_functions_is_refused() -> None:
    model = BloomForCausalLM(BloomConfig(vocab_size=64, hidden_size=64, n_layer=2, n_head=2)).eval()
    with pytest.raises(NotImplementedError, match="BloomForCausalLM does not take"), kvlab.quantized(model):
        pass
    assert model.config._attn_implementation == "eager"
    assert "generate" not in vars(model)
    with pytest.raises(RuntimeError, match=r"needs a transformers\.DynamicCache"):
        model.generate(tokens(1, 9) % 64, past_key_values=KVLabCache(model.config), max_new_tokens=2)


# ---- model(...) inside the block


@pytest.mark.parametrize("call", [lambda m, ids: m(ids), lambda m, ids: m(input_ids=ids, use_cache=True)])
def test_inside_the_block_a_call_of_the_model_uses_a_packed_cache(call: Any) -> None:
    model, ids = tiny("llama"), tokens(2, 90)
    before, expected = state(model), model(ids).logits
    with torch.no_grad(), kvlab.quantized(model, bits=2, budget=None):
        out = call(model, ids[:, :-1])
        found = model(ids[:, -1:], past_key_values=out.past_key_values)
    assert isinstance(out.past_key_values, KVLabCache)
    assert found.past_key_values is out.past_key_values
    assert out.past_key_values.packed_length == 90
    assert torch.allclose(out.logits, expected[:, :-1], atol=1e-4)  # tokens of one call are exact
    assert not torch.allclose(found.logits, expected[:, -1:], atol=1e-2)  # 2 bits are not
    assert state(model) == before
    assert not isinstance(model(ids).past_key_values, KVLabCache)


def test_hidden_states_come_from_a_packed_cache_too() -> None:
    model = tiny("llama")
    with torch.no_grad(), kvlab.quantized(model, **EXACT):
        assert isinstance(model.model(tokens(1, 9)).past_key_values, KVLabCache)
        assert isinstance(model(tokens(1, 9), return_dict=False)[1], KVLabCache)


def test_a_configuration_without_caches_does_not_undo_the_block(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny("llama")
    monkeypatch.setattr(model.config, "use_cache", False)
    with torch.no_grad(), kvlab.quantized(model, **EXACT):
        assert isinstance(model(tokens(1, 9)).past_key_values, KVLabCache)


def test_inner_options_hold_in_an_inner_block() -> None:
    model, ids = tiny("llama"), tokens(1, 9)
    with torch.no_grad(), kvlab.quantized(model, budget="2MiB"):
        with kvlab.quantized(model, budget="1MiB"):
            inner = model(ids).past_key_values
        outer = model(ids).past_key_values
    assert inner.packed.budget_nbytes == 2**20 // 3 * 3
    assert outer.packed.budget_nbytes == 2**21 // 3 * 3


def test_two_models_in_two_blocks_in_two_threads() -> None:
    models, ids = [tiny("llama"), tiny("qwen2")], tokens(1, 30)
    meet = threading.Barrier(2, timeout=60)

    def read(model: Any) -> list[int]:
        with torch.no_grad(), kvlab.quantized(model, **EXACT):
            meet.wait()
            found = model.generate(ids, **GREEDY)
            meet.wait()
        return found.tolist()  # type: ignore[no-any-return]

    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(read, models))
    assert found == [model.generate(ids, **GREEDY).tolist() for model in models]


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"past_key_values": DynamicCache()}, TypeError, "past_key_values is a DynamicCache"),
        ({"use_cache": False}, ValueError, r"use_cache=False .* outside kvlab\.quantized"),
    ],
)
def test_a_call_refuses_other_caches(options: Any, error: type[Exception], words: str) -> None:
    model = tiny("llama")
    before = state(model)
    with torch.no_grad(), pytest.raises(error, match=words), kvlab.quantized(model):
        model(tokens(1, 9), **options)
    assert state(model) == before


def test_a_call_refuses_gradients() -> None:
    model = copy.deepcopy(tiny("llama")).requires_grad_(True)
    with kvlab.quantized(model):
        with pytest.raises(ValueError, match=r"gradients.* torch\.no_grad\(\)"):
            model.train()(tokens(1, 9))
        model.model.layers[0].gradient_checkpointing = True
        with torch.no_grad(), pytest.raises(ValueError, match=r"gradient checkpointing .* model\.eval\(\)"):
            model(tokens(1, 9))
        with torch.no_grad():
            assert isinstance(model.eval()(tokens(1, 9)).past_key_values, KVLabCache)


def test_a_model_that_does_not_use_the_cache_it_is_given_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny("llama")
    forward = model.model.forward
    monkeypatch.setattr(
        model.model,
        "forward",
        lambda past_key_values=None, **rest: forward(use_cache=False, input_ids=rest["input_ids"]),
    )
    with (
        torch.no_grad(),
        kvlab.quantized(model),
        pytest.raises(RuntimeError, match="stored nothing in the cache"),
    ):
        model(tokens(1, 9))


def test_a_compiled_model_is_refused_with_the_way_round() -> None:
    model = tiny("llama")
    with (
        pytest.raises(TypeError, match=r"torch\.compile, .*\(model\._orig_mod\)"),
        kvlab.quantized(torch.compile(model)),
    ):
        pass
    in_place = copy.deepcopy(model)
    in_place.compile()
    with pytest.raises(TypeError, match=r"load it again if model\.compile\(\)"), kvlab.quantized(in_place):
        pass


def test_a_model_with_states_is_refused() -> None:
    model = MambaForCausalLM(MambaConfig(vocab_size=64, hidden_size=64, num_hidden_layers=2, state_size=8))
    with pytest.raises(NotImplementedError, match="takes no past_key_values"), kvlab.quantized(model):
        pass


def test_graphs_need_a_gpu() -> None:
    model = tiny("llama")
    with pytest.raises(ValueError, match="graph=True"), kvlab.quantized(model, graph=True):
        pass
    assert "forward" not in vars(model)


def test_a_budget_that_ends_in_a_text_names_what_refuses_it_at_once() -> None:
    """The text up to there is lost; with `max_seqlen` none begins."""
    model, steps = tiny("llama"), []

    def counts(*_: Any, **__: Any) -> bool:
        steps.append(1)
        return False

    def generate(**options: Any) -> None:
        with kvlab.quantized(model, "40KiB", bits=(4,), **options):
            model.generate(tokens(1, 9), **{**GREEDY, "max_new_tokens": 400}, stopping_criteria=[counts])

    with pytest.raises(BudgetError, match="With max_seqlen it is refused before the first token"):
        generate()
    assert len(steps) > 9
    steps.clear()
    with pytest.raises(BudgetError, match=r"409 tokens need .* or shorten the sequence$"):
        generate(max_seqlen=409)
    assert not steps

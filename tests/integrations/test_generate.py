"""At width 16 every mode of generate() gives the tokens it gives with transformers' own cache."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import StoppingCriteriaList

from kvlab.cache.cache import MixedPrecisionCache
from kvlab.integrations.transformers import ATTENTION, KVLabCache, register
from kvlab.lab.quality.model import Subject
from tests.integrations.models import BASELINE, CONFIGS, tiny, tokens

register()
EXACT: dict[str, Any] = {"bits": (16,), "budget": None}

MODES: dict[str, dict[str, Any]] = {
    "sampling": {"do_sample": True, "top_k": 20},
    "beams": {"num_beams": 3},
    "several sequences": {"num_beams": 4, "num_return_sequences": 3},
    "sampled sequences": {"do_sample": True, "num_return_sequences": 3},
    "prompt lookup": {"prompt_lookup_num_tokens": 3},
    "chunked prefill": {"prefill_chunk_size": 11},
}


def both(
    name: str, attend: Any, prompt: Any, **options: Any
) -> tuple[torch.Tensor, torch.Tensor, KVLabCache]:
    """Generate with a DynamicCache and with an exact KVLabCache."""
    model, cache = tiny(name), KVLabCache(CONFIGS[name], **EXACT)
    options = {"max_new_tokens": 16, "do_sample": False, **options}
    prompt = prompt if isinstance(prompt, dict) else {"input_ids": prompt}
    attend(model, BASELINE.get(name, "sdpa"))
    torch.manual_seed(1)
    expected = model.generate(**prompt, **options)
    attend(model, ATTENTION)
    torch.manual_seed(1)
    return expected, model.generate(**prompt, past_key_values=cache, **options), cache


@pytest.mark.parametrize("name", CONFIGS)
def test_greedy_gives_the_same_tokens(name: str, attend: Any) -> None:
    expected, found, cache = both(name, attend, tokens(1, 70), max_new_tokens=40)
    assert found.tolist() == expected.tolist()
    assert len(set(expected[0, 70:].tolist())) > 4, "the model repeats itself and would not show an error"
    assert cache.get_seq_length() == 109


@pytest.mark.parametrize("name", ["llama", "gpt-neox", "gemma3"])
@pytest.mark.parametrize("mode", MODES)
def test_every_mode_gives_the_same_tokens(name: str, mode: str, attend: Any) -> None:
    prompt = tokens(1, 13).repeat(1, 3)  # repeats, so that prompt lookup finds something
    expected, found, _ = both(name, attend, prompt, **MODES[mode])
    assert found.tolist() == expected.tolist()


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_assisted_decoding_gives_the_same_tokens(name: str, attend: Any) -> None:
    expected, found, _ = both(name, attend, tokens(1, 30), assistant_model=tiny("llama", seed=1))
    assert found.tolist() == expected.tolist()


@pytest.mark.parametrize("name", ["llama", "gpt-neox", "gemma2", "gemma3", "lfm2"])
@pytest.mark.parametrize("mode", [{}, {"num_beams": 3}, {"prefill_chunk_size": 8}], ids=str)
def test_left_padded_batches_give_the_same_tokens(name: str, mode: dict[str, Any], attend: Any) -> None:
    prompt = tokens(3, 30)
    mask = torch.ones_like(prompt)
    mask[0, :9] = mask[1, :28] = 0
    expected, found, _ = both(name, attend, {"input_ids": prompt, "attention_mask": mask}, **mode)
    assert found.tolist() == expected.tolist()


def without_valid(step: Any) -> Any:
    return lambda cache, layer, q, k, v, scale, softcap, valid: step(
        cache, layer, q, k, v, scale, softcap, None
    )


def wrong_scale(step: Any) -> Any:
    return lambda cache, layer, q, k, v, scale, *rest: step(cache, layer, q, k, v, 1.05 * scale, *rest)


def nothing(_: Any) -> Any:
    return lambda *args: None


@pytest.mark.parametrize(
    ("method", "wrong", "mode"),
    [
        ("_step", wrong_scale, {}),
        ("_step", without_valid, {}),
        ("reorder", nothing, {"num_beams": 3}),
        ("crop", nothing, {"prompt_lookup_num_tokens": 3}),
    ],
)
def test_a_planted_error_changes_the_tokens(
    method: str, wrong: Any, mode: dict[str, Any], attend: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MixedPrecisionCache, method, wrong(getattr(MixedPrecisionCache, method)))
    prompt, mask = tokens(1, 13).repeat(1, 3), torch.ones(1, 39, dtype=torch.long)
    mask[0, :9] = 0
    expected, found, _ = both("llama", attend, {"input_ids": prompt, "attention_mask": mask}, **mode)
    assert found.tolist() != expected.tolist()


def test_padding_is_not_stored(attend: Any) -> None:
    prompt, mask = tokens(2, 150), torch.ones(2, 150, dtype=torch.long)
    mask[0, :149] = 0
    _, _, padded = both("llama", attend, {"input_ids": prompt, "attention_mask": mask}, max_new_tokens=1)
    _, _, full = both("llama", attend, prompt, max_new_tokens=1)
    assert padded.get_seq_length() == full.get_seq_length() == 150
    assert padded.packed is not None
    assert full.packed is not None
    assert padded.packed.nbytes < 0.7 * full.packed.nbytes


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_second_turn_goes_on_with_the_same_cache(name: str, attend: Any) -> None:
    first, found, cache = both(name, attend, tokens(2, 30))
    longer = torch.cat([found, tokens(2, 9, seed=2)], 1)
    held = cache.get_seq_length()
    second = tiny(name).generate(longer, past_key_values=cache, max_new_tokens=16, do_sample=False)
    attend(tiny(name), "sdpa")
    expected = tiny(name).generate(longer, max_new_tokens=16, do_sample=False)
    assert first.tolist() == found.tolist()
    assert second.tolist() == expected.tolist()
    assert cache.get_seq_length() == held + 1 + 9 + 15


def test_low_bits_are_read_and_the_budget_holds_at_every_step(attend: Any) -> None:
    prompt, model, checked = tokens(2, 200), tiny("llama"), []
    exact, _, _ = both("llama", attend, prompt, max_new_tokens=60)
    cache = KVLabCache(model.config, budget=0.4, bits=(2, 3, 4), plan_length=64)

    def check(*_: Any, **__: Any) -> torch.Tensor:
        assert cache.packed is not None
        assert cache.packed.budget_nbytes is not None
        checked.append(cache.packed.nbytes <= cache.packed.budget_nbytes)
        return torch.zeros(len(prompt), dtype=torch.bool)

    found = model.generate(
        prompt,
        past_key_values=cache,
        max_new_tokens=60,
        do_sample=False,
        stopping_criteria=StoppingCriteriaList([check]),
    )
    assert len(checked) >= 60
    assert all(checked)
    assert found.shape == exact.shape
    assert found.tolist() != exact.tolist(), "codes of 2 to 4 bits gave the very tokens of exact values"


@pytest.mark.parametrize(
    ("dtype", "rounding"), [("float32", 0.0), ("float16", 2.0**-10), ("bfloat16", 2.0**-7)]
)
def test_logits_differ_by_the_rounding_of_the_stored_type_only(
    dtype: str, rounding: float, attend: Any
) -> None:
    model, prompt = tiny("llama"), tokens(2, 90)
    attend(model, ATTENTION)
    cache = KVLabCache(model.config, dtype=dtype, **EXACT)
    model(prompt[:, :80], past_key_values=cache)
    found = model(prompt[:, 80:], past_key_values=cache).logits
    expected = model(prompt).logits[:, 80:]
    assert cache.packed is not None
    assert cache.packed.dtype == dtype
    error = (found - expected).abs().max() / expected.abs().max()
    assert error < rounding + 1e-5
    assert rounding == 0 or error > rounding / 1000, "the stored type made no difference"


def test_greedy_gives_the_same_tokens_on_a_real_model(smollm2: Subject, attend: Any) -> None:
    model = smollm2.model
    # "It is a truth universally acknowledged, that a single man in possession of", and no chat template
    prompt = torch.tensor([[1589, 314, 253, 4569, 21902, 14494, 28, 338, 253, 2244, 555, 281, 13932, 282]])
    attend(model, "sdpa")
    expected = model.generate(prompt, max_new_tokens=32, do_sample=False)
    attend(model, ATTENTION)
    cache = KVLabCache(model.config, **EXACT)
    found = model.generate(prompt, max_new_tokens=32, do_sample=False, past_key_values=cache)
    assert found.tolist() == expected.tolist()

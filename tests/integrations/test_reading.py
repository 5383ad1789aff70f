"""kvlab.read and kvlab.perplexity: parts of a text through a packed cache."""

from __future__ import annotations

import copy
import math
from typing import Any

import numpy as np
import pytest
import torch

import kvlab
from kvlab.integrations.transformers import ATTENTION, KVLabCache
from kvlab.lab.quality.measure import Case, evaluate
from kvlab.lab.quality.model import tiny_llama
from kvlab.lab.quality.plan import Protocol
from kvlab.lab.quality.text import Windows
from tests.integrations.models import tiny, tokens

EXACT: dict[str, Any] = {"bits": 16, "budget": None, "dtype": "float32"}
COARSE: dict[str, Any] = {"bits": 2, "budget": None}


@pytest.mark.parametrize("name", ["llama", "gemma3"])
@pytest.mark.parametrize("chunk", [7, 32, 500])
def test_exact_parts_give_the_logits_of_one_call(name: str, chunk: int) -> None:
    model, ids = tiny(name), tokens(2, 70)
    out = kvlab.read(model, ids, chunk=chunk, **EXACT)
    assert torch.allclose(out.logits, model(ids).logits, atol=1e-3)
    assert isinstance(out.past_key_values, KVLabCache)
    assert out.past_key_values.packed_length == 70
    assert not out.logits.requires_grad
    assert "forward" not in vars(model)
    assert model.config._attn_implementation != ATTENTION


def test_shorter_parts_read_more_from_pages() -> None:
    model, ids = tiny("llama"), tokens(1, 128)
    expected = model(ids).logits
    errors = [
        (kvlab.read(model, ids, chunk=chunk, **COARSE).logits - expected).abs().mean()
        for chunk in (128, 64, 8)
    ]
    assert errors[0] < 1e-4 < errors[1] < errors[2]


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", ["llama", "gpt-neox"])
def test_padding_changes_nothing(name: str, side: str) -> None:
    """Parts that are padding in one row, and in all rows."""
    model, ids, lengths = tiny(name), tokens(2, 40), (40 - 13, 40 - 9)
    mask = torch.zeros_like(ids)
    for row, length in enumerate(lengths):
        mask[row, 40 - length :] = 1
    if side == "right":
        mask = mask.flip(1)
    out = kvlab.read(model, ids, chunk=4, attention_mask=mask, **EXACT)
    scores = []
    for row in range(2):
        own = ids[row][mask[row].bool()][None]
        assert torch.allclose(out.logits[row][mask[row].bool()], model(own).logits[0], atol=1e-3)
        scores.append(math.log(kvlab.perplexity(model, own, **EXACT)) * (lengths[row] - 1))
    together = kvlab.perplexity(model, ids, chunk=4, attention_mask=mask, **EXACT)
    assert math.log(together) == pytest.approx(sum(scores) / (sum(lengths) - 2), rel=1e-4)


@pytest.mark.parametrize("context", [1, 2, 33, 69])
def test_perplexity_is_that_of_the_tokens_behind_the_context(context: int) -> None:
    model, ids = tiny("llama"), tokens(2, 70)
    logits = model(ids).logits[:, context - 1 : -1]
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, context:].flatten()).exp()
    found = kvlab.perplexity(model, ids, chunk=16, context=context, **EXACT)
    assert found == pytest.approx(float(expected), rel=1e-3)
    assert kvlab.perplexity(model, ids, chunk=16, context=context, **COARSE) != pytest.approx(found, rel=1e-3)


def test_perplexity_is_what_the_laboratory_measures() -> None:
    subject, protocol = tiny_llama(), Protocol(length=128, scored_from=64, chunk=32)
    text = np.array(subject.encode(subject.text)[:129], np.int64)[None]
    case = Case("mixed", "mixed", lambda: KVLabCache(subject.model.config, budget=0.3, plan_length=64))
    score = evaluate(subject.model, Windows(text, (0,)), [case], protocol)[1]
    found = kvlab.perplexity(
        subject.model, torch.from_numpy(text), chunk=32, context=65, budget=0.3, plan_length=64
    )
    assert found == pytest.approx(math.exp(np.mean(score.nll)), rel=1e-5)


def test_inside_a_block_its_options_hold() -> None:
    model, ids = tiny("llama"), tokens(1, 40)
    with kvlab.quantized(model, budget="2MiB"):
        outer = kvlab.read(model, ids).past_key_values
        inner = kvlab.read(model, ids, budget="1MiB").past_key_values
        again = kvlab.read(model, ids).past_key_values
        coarse = kvlab.perplexity(model, ids, chunk=8, **COARSE)
    assert [cache.packed.budget_nbytes // 3 * 3 for cache in (outer, inner, again)] == [
        2**21 // 3 * 3,
        2**20 // 3 * 3,
        2**21 // 3 * 3,
    ]
    with kvlab.quantized(model, **COARSE):
        assert kvlab.perplexity(model, ids, chunk=8) == coarse


def test_a_cache_that_was_read_goes_on() -> None:
    model, ids = tiny("llama"), tokens(1, 40)
    out = kvlab.read(model, ids, **EXACT)
    with kvlab.quantized(model):
        found = model.generate(
            torch.cat([ids, out.logits[:, -1:].argmax(-1)], 1),
            past_key_values=out.past_key_values,
            max_new_tokens=4,
        )
    assert found.tolist() == model.generate(ids, max_new_tokens=5).tolist()


IDS = tokens(2, 9)
WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"chunk": 0}, ValueError, "chunk=0"),
    ({"chunk": 1.5}, TypeError, r"chunk=1\.5"),
    ({"ids": IDS[0]}, ValueError, r"ids has shape \(9,\); .* ids\[None\]"),
    ({"ids": IDS[:, :0]}, ValueError, r"ids has shape \(2, 0\)"),
    ({"ids": IDS.float()}, TypeError, r"ids .* torch\.float32"),
    ({"ids": {"input_ids": IDS}}, TypeError, r"ids .* dict; .* ids=found\['input_ids'\]"),
    ({"ids": IDS + 9999}, ValueError, r"ids names token \d+; the model's vocabulary has \d+, 0 to \d+: take"),
    ({"ids": IDS - 9999}, ValueError, r"ids names token -\d+; the model's vocabulary"),
    ({"attention_mask": torch.ones(2, 8)}, ValueError, r"attention_mask is \(2, 8\); .* \(2, 9\)"),
    ({"attention_mask": [1]}, ValueError, "attention_mask is list"),
    ({"attention_mask": 2 * IDS}, ValueError, "must be of 0"),
    ({"bits": 7}, ValueError, "bits"),
    ({"pages": 3}, TypeError, "pages=3"),
    ({"model": 3}, TypeError, "model must be a transformers model"),
]


@pytest.mark.parametrize("function", [kvlab.read, kvlab.perplexity])
@pytest.mark.parametrize(("wrong", "error", "words"), WRONG)
def test_wrong_arguments_are_refused_by_name(
    function: Any, wrong: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        function(**{"model": tiny("llama"), "ids": IDS, **wrong})
    assert "forward" not in vars(tiny("llama"))


@pytest.mark.parametrize("function", [kvlab.read, kvlab.perplexity])
def test_training_mode_is_refused(function: Any) -> None:
    with pytest.raises(ValueError, match=r"call model\.eval\(\)"):
        function(copy.deepcopy(tiny("llama")).train(), IDS)


def test_something_must_be_scored() -> None:
    for context, error in ((9, "none is left"), (0, "context=0")):
        with pytest.raises(ValueError, match=error):
            kvlab.perplexity(tiny("llama"), IDS, context=context)
    with pytest.raises(ValueError, match="none is left"):
        kvlab.perplexity(tiny("llama"), IDS[:, :1])


def test_a_budget_that_does_not_hold_the_text_says_so() -> None:
    with pytest.raises(kvlab.BudgetError):
        kvlab.perplexity(tiny("llama"), tokens(1, 400), budget="10KiB")

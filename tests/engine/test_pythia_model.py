"""Whole models of every family against transformers: layers, logits at every position, keys and values, text.

The engine's errors are judged by those that transformers makes when it runs the same weights in 16 bits.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy.special import log_softmax

from kvlab.engine import Decoder
from kvlab.engine.weights import from_model
from kvlab.ops.cpu.page_tokens import decode_tokens
from tests.cache_contents import tokens_in
from tests.engine.models import FAMILIES, SIZES, family, in_dtype

TOKENS = np.random.default_rng(3).integers(0, SIZES["vocab_size"], (2, SIZES["max_position_embeddings"]))
"""Two texts of the longest length."""


def run(model: Any, dtype: str) -> tuple[NDArray[Any], list[NDArray[Any]]]:
    """Logits and the hidden states behind each layer of all positions, of `model` in a dtype."""
    with torch.no_grad():
        out = in_dtype(model, dtype)(torch.from_numpy(TOKENS), output_hidden_states=True)
    hidden = [layer.double().numpy() for layer in out.hidden_states[1:-1]]
    return out.logits.double().numpy(), hidden


def errors(got: NDArray[Any], want: NDArray[Any]) -> NDArray[np.float64]:
    """Largest of all positions, root mean square, divergence of the predictions."""
    log_p, log_q = log_softmax(want, axis=-1), log_softmax(got, axis=-1)
    divergence = (np.exp(log_p) * (log_p - log_q)).sum(-1).mean()
    return np.array([np.abs(got - want).max(), np.sqrt(np.square(got - want).mean()), divergence])


def assert_no_worse(got: NDArray[Any], low: NDArray[Any], exact: NDArray[Any], allowed: float = 1.1) -> None:
    """Errors up to 1.1 times those of transformers in 16 bits."""
    assert (errors(got, exact) <= allowed * errors(low, exact)).all(), errors(got, exact) / errors(low, exact)


def bound_of(low: NDArray[Any], exact: NDArray[Any], dtype: str) -> float:
    """Promise 2: twice the error of the same formula in 16 bits, and two units in the last place."""
    digits = 10 if dtype == "float16" else 7
    ulp = 2.0 ** (np.floor(np.log2(np.abs(exact).max())) - digits)
    return float(2 * np.abs(low - exact).max() + 2 * ulp)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", FAMILIES)
def test_token_by_token_is_the_whole_text(name: str, dtype: str) -> None:
    """No worse than transformers in 16 bits, at every position up to the last; behind each layer, too."""
    model = family(name, dtype)
    exact, exact_hidden = run(model, "float64")
    low, low_hidden = run(model, dtype)
    decoder = Decoder.from_pretrained(model, dtype=dtype, batch=len(TOKENS))
    seen: dict[int, list[NDArray[Any]]] = {}

    def watch(layer: int, what: str, x: NDArray[Any]) -> None:
        if what == "out":
            seen.setdefault(layer, []).append(x)

    steps = []
    for ids in TOKENS.T:
        decoder._executor.run(ids[:, None], np.ones((len(ids), 1), bool), watch)
        steps.append(decoder._executor.logits.astype(float))
    logits = np.stack(steps, 1)
    assert_no_worse(logits, low, exact)
    assert len(exact_hidden) == len(seen) - 1  # behind the last one transformers gives what is normed
    for layer, wanted in enumerate(exact_hidden):
        error = np.abs(np.stack(seen[layer], 1) - wanted).max()
        assert error <= 1.1 * np.abs(low_hidden[layer] - wanted).max()
    assert decoder.lengths.tolist() == [decoder.geometry.max_positions] * len(TOKENS)
    with pytest.raises(AssertionError):  # a shift is seen
        assert_no_worse(logits[:, 1:], low[:, :-1], exact[:, :-1])
    with pytest.raises(ValueError, match=f"would have {TOKENS.shape[1] + 1} tokens"):
        decoder.step(TOKENS[:, 0])


@pytest.mark.parametrize("name", ["neox-parallel", "llama"])
def test_a_mean_that_hides_what_matters(name: str) -> None:
    assert_means_are_taken_away(name, "cpu")


def assert_means_are_taken_away(name: str, device: str) -> None:
    """Channels whose mean is 64 of their deviations, which is what a norm has to take away."""
    model = family(name)
    with torch.no_grad():
        model.get_input_embeddings().weight.add_(62.0).copy_(model.get_input_embeddings().weight.half())
    exact, low = run(model, "float64")[0][:1], run(model, "float16")[0][:1]
    decoder = Decoder.from_pretrained(model, device=device)
    got = np.stack([decoder.step([token])[0] for token in TOKENS[0]])[None].astype(float)
    assert_no_worse(got, low, exact)


def keys_and_values(model: Any) -> dict[str, NDArray[np.float64]]:
    """What transformers stores of `TOKENS` in float64 and float16: (layers, 2, rows, heads, tokens, dim)."""
    stored = {}
    for dtype in ("float64", "float16"):
        with torch.no_grad():
            past = in_dtype(model, dtype)(torch.from_numpy(TOKENS)).past_key_values
        stored[dtype] = np.array([(x.keys.double().numpy(), x.values.double().numpy()) for x in past.layers])
    return stored


def assert_kept(found: NDArray[Any], stored: dict[str, NDArray[np.float64]]) -> None:
    """Keys and values of every layer within promise 2 of what transformers stores."""
    for layer in range(len(found)):
        for part in range(2):
            exact, low = (stored[dtype][layer, part] for dtype in ("float64", "float16"))
            bound = bound_of(low, exact, "float16")
            assert np.abs(found[layer, part] - exact).max() <= bound
            shifted = found[layer, part, ..., 1:, :] - exact[..., :-1, :]
            assert np.abs(shifted).max() > bound, "a shift is not seen"


@pytest.mark.parametrize("name", FAMILIES)
def test_keys_and_values_are_those_of_transformers(name: str) -> None:
    """What lies in the cache behind a prompt and steps."""
    model = family(name)
    decoder = Decoder.from_pretrained(model, batch=len(TOKENS))
    decoder.prefill(TOKENS[:, :40])
    for ids in TOKENS[:, 40:].T:
        decoder.step(ids)
    cache, found = decoder.cache, []
    assert cache is not None
    for layer in range(cache.num_layers):
        pages = cache.pages(layer)
        (layout,) = pages.layouts
        rows = []
        for row in range(len(TOKENS)):
            tokens = tokens_in(pages, row)
            order = np.lexsort((tokens.position, tokens.head))
            kept = decode_tokens(pages.pools[0], layout, pages.dtype, tokens.index, tokens.slot)
            shape = cache.num_heads_kv, TOKENS.shape[1], cache.head_dim
            rows.append([x[order].reshape(shape).astype(float) for x in kept])
        found.append(np.array(rows).swapaxes(0, 1))
    assert_kept(np.array(found), keys_and_values(model))


@pytest.mark.parametrize("name", ["neox-parallel", "llama"])
def test_greedy_text_is_that_of_transformers(name: str) -> None:
    model = family(name)
    decoder = Decoder.from_pretrained(model, max_seqlen=64)
    assert_same_text(decoder, model, TOKENS[0, :12].tolist(), 40)


def assert_same_text(decoder: Decoder, model: Any, prompt: list[int], length: int) -> None:
    """The same greedy text, but where the two likeliest tokens of transformers are as good as equal."""
    found = decoder.generate(prompt, length)
    with torch.no_grad():
        logits = model(torch.tensor([prompt + found])).logits[0, len(prompt) - 1 : -1].float()
    best = logits.topk(2).values
    for i, token in enumerate(found):
        gap, missed = float(best[i, 0] - best[i, 1]), float(best[i, 0] - logits[i, token])
        assert missed == 0 or gap < 5e-3 * float(logits[i].abs().max()), (i, gap, missed)


def test_the_text_of_a_real_model(smollm2: Any) -> None:
    assert_text_of(smollm2, "cpu")


def assert_text_of(real: Any, device: str) -> None:
    """64 greedy tokens of a real model are those of transformers in float32, with what float16 holds."""
    model = real.model
    weights = from_model(model, "float16")
    with torch.no_grad():
        held = {name: p.half().float() for name, p in model.named_parameters()}
        before = {name: p.clone() for name, p in model.named_parameters()}
        decoder = Decoder(weights, max_seqlen=256, device=device)
        try:
            for name, parameter in model.named_parameters():
                parameter.copy_(held[name])
            prompt = real.encode("In the beginning God created the heaven and the earth. And")
            assert_same_text(decoder, model, prompt, 64)
        finally:
            for name, parameter in model.named_parameters():
                parameter.copy_(before[name])

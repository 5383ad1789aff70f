"""A transformers model on several ranks: loss, gradients and training as on one."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

from kvlab import parallel

TOKENS = 32


def model_of(kind: str) -> Any:
    torch.manual_seed(0)
    sizes = {
        "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
    }  # fmt: skip
    if kind == "window":
        return MistralForCausalLM(MistralConfig(**sizes, sliding_window=9))
    return LlamaForCausalLM(LlamaConfig(**sizes, tie_word_embeddings=kind == "tied"))


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, 64, (2, TOKENS), generator=generator)
    labels = ids.clone()
    labels[0, :7] = -100
    return ids, labels


def train(rank: int, size: int, kind: str, enabled: bool, steps: int, options: dict[str, Any]) -> list[Any]:
    """Losses of some steps of gradient descent, the gradients of the first, and the last logits by place."""
    model, (ids, labels) = model_of(kind), batch()
    if options.pop("checkpointing", False):
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    handle = parallel.enable(model, **options) if enabled else None
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses, gradients = [], []
    for _ in range(steps):
        optimizer.zero_grad()
        result = model(input_ids=ids, labels=labels)
        result.loss.backward()
        gradients = gradients or [p.grad.numpy().copy() for p in model.parameters()]
        losses.append(result.loss.item())
        optimizer.step()
    logits = model(input_ids=ids).logits.detach()
    places = torch.arange(ids.numel())
    if handle is not None:
        places = parallel.extract_local(places, [0, TOKENS, 2 * TOKENS])
        handle.remove()
        assert model(input_ids=ids).logits.shape == (2, TOKENS, 64)
    return [losses, gradients, logits.flatten(0, 1).numpy(), places.numpy()]


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("llama", {}),
        ("tied", {"heads_k_stride": 1}),
        ("window", {}),
        ("llama", {"checkpointing": True}),
    ],
)
def test_loss_gradients_and_training_are_those_of_one_rank(
    ranks: Any, kind: str, options: dict[str, Any]
) -> None:
    ((losses, gradients, logits, _),) = ranks(1)(train, kind, False, 4, {})
    results = ranks(2)(train, kind, True, 4, options)
    whole = np.empty_like(logits)
    for mine, theirs, local, places in results:
        np.testing.assert_allclose(mine, losses, rtol=1e-5)
        for one, other in zip(theirs, gradients, strict=True):
            np.testing.assert_allclose(one, other, atol=2e-6)
        whole[places] = local
    np.testing.assert_allclose(whole, logits, atol=1e-4)
    assert losses[-1] < losses[0] - 0.1


def call(rank: int, size: int, change: dict[str, Any]) -> None:
    model, (ids, labels) = model_of("llama"), batch()
    parallel.enable(model)
    model(**({"input_ids": ids, "labels": labels} | change))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"attention_mask": torch.tensor([[0] + [1] * 31] * 2)}, "attention_mask has padding"),
        ({"input_ids": torch.zeros(1, 30, dtype=torch.int64)}, "input_ids has 30 tokens.*multiple of 4"),
        ({"position_ids": torch.zeros(2, 32, dtype=torch.int64)}, "position_ids: with context parallelism"),
    ],
)
def test_what_is_not_there_is_refused_by_name(ranks: Any, change: dict[str, Any], words: str) -> None:
    group = ranks(2)
    group.start(call, change)
    for fine, text in group.outcomes():
        assert not fine
        assert re.search(words, text), text


def test_only_models_of_transformers() -> None:
    with pytest.raises(TypeError, match=r"model is a Linear"):
        parallel.enable(torch.nn.Linear(2, 2))

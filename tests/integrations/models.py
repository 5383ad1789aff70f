"""Tiny models with random weights, whose greedy output depends on all that they have read."""

from __future__ import annotations

import functools
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    GPTNeoXConfig,
    Lfm2Config,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
)

VOCABULARY = 128
WINDOW = 24
MHA: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
GQA = {**MHA, "num_key_value_heads": 2}
GEMMA = {**GQA, "head_dim": 32, "query_pre_attn_scalar": 32}
MIXED = ["sliding_attention", "full_attention", "full_attention"]

CONFIGS = {
    "llama": LlamaConfig(**GQA),
    "qwen2": Qwen2Config(**GQA),
    "mistral": MistralConfig(**GQA, sliding_window=None),
    "mistral-sliding": MistralConfig(**GQA, sliding_window=WINDOW),
    "gemma": GemmaConfig(**{**GEMMA, "num_key_value_heads": 1}),
    "gpt-neox": GPTNeoXConfig(**MHA),
    "gemma2": Gemma2Config(**GEMMA, sliding_window=WINDOW, layer_types=MIXED, attn_logit_softcapping=2.0),
    "gemma3": Gemma3TextConfig(**GEMMA, sliding_window=WINDOW, layer_types=MIXED),
    "lfm2": Lfm2Config(**GQA, layer_types=["conv", "full_attention", "full_attention"]),
}
BASELINE = {"gemma2": "eager"}  # sdpa has no softcap
SPREAD = {"gpt-neox": 0.3}  # of the weights; with less it repeats itself


@functools.cache
def tiny(name: str, seed: int = 0) -> Any:
    """Return a model; weights, biases and norms are large enough that attention decides the next token."""
    torch.manual_seed(seed)
    spread = SPREAD.get(name, 0.15)
    model = AutoModelForCausalLM.from_config(CONFIGS[name]).eval().requires_grad_(False)
    for parameter in model.parameters():
        parameter.add_(torch.randn_like(parameter) * (spread if parameter.ndim > 1 else 0.3))
    return model


def tokens(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(1, VOCABULARY, shape, generator=torch.Generator().manual_seed(seed))

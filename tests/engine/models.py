"""Tiny models of every family that the engine decodes, with weights that tell mistakes apart."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import transformers

SIZES: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 64,
}  # fmt: skip
LLAMA = {**SIZES, "intermediate_size": 96, "num_key_value_heads": 2}
SCALED = {"rope_type": "llama3", "rope_theta": 100.0, "factor": 8.0, "low_freq_factor": 1.0,
          "high_freq_factor": 4.0, "original_max_position_embeddings": 16}  # fmt: skip
LINEAR = {"rope_type": "linear", "rope_theta": 100.0, "factor": 4.0}
YARN = {"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "original_max_position_embeddings": 16}


def neox(**options: Any) -> Any:
    rotary = {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": options.pop("part", 0.25)}
    sizes = {**SIZES, "intermediate_size": 160, "rope_parameters": rotary, **options}
    return transformers.GPTNeoXForCausalLM(transformers.GPTNeoXConfig(**sizes))


def llama(**options: Any) -> Any:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**LLAMA, **options}))


FAMILIES: dict[str, Callable[[], Any]] = {
    "neox-parallel": neox,
    "neox-sequential": lambda: neox(use_parallel_residual=False, part=0.5),
    "neox-head-80": lambda: neox(hidden_size=160, num_attention_heads=2),
    "neox-full-rotary": lambda: neox(part=1.0, attention_bias=False),
    "llama": llama,
    "llama-biases": lambda: llama(attention_bias=True, mlp_bias=True, head_dim=64),
    "llama-scaled-tied": lambda: llama(rope_parameters=SCALED, tie_word_embeddings=True),
    "llama-linear": lambda: llama(rope_parameters=LINEAR),
    "llama-yarn": lambda: llama(rope_parameters=YARN),
    "llama-head-256": lambda: llama(head_dim=256, num_attention_heads=2, num_key_value_heads=1),
    "qwen2": lambda: transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**LLAMA)),
    "qwen3": lambda: transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**LLAMA, head_dim=32)),
    "mistral": lambda: transformers.MistralForCausalLM(
        transformers.MistralConfig(**LLAMA, sliding_window=None)
    ),
}  # fmt: skip


def family(name: str, dtype: str = "float16") -> Any:
    """A model of a family in float32 whose weights are numbers of `dtype`.

    Weights let the softmax choose, norms and biases matter, one channel of the embedding is far from zero: a
    forgotten mean or bias is then seen.
    """
    generator = torch.Generator().manual_seed(5)
    model = FAMILIES[name]()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
            if "norm" in parameter_name and parameter_name.endswith("weight"):
                parameter.mul_(0.3).add_(1.0)
            elif parameter.dim() == 2 and "embed" not in parameter_name:
                parameter.mul_(1.5 / parameter.shape[1] ** 0.5)
        model.get_input_embeddings().weight.add_(2.0)[:, 3] *= 30.0
        for parameter in model.parameters():
            parameter.copy_(parameter.to(getattr(torch, dtype)))
    return model.eval()


def in_dtype(model: Any, dtype: str) -> Any:
    """A copy of a model in a dtype, as `from_pretrained` gives it: rotary frequencies stay in float32."""
    copied = copy.deepcopy(model).to(getattr(torch, dtype))
    for name, frequencies in model.base_model.rotary_emb.named_buffers():
        setattr(copied.base_model.rotary_emb, name, frequencies.clone())
    return copied

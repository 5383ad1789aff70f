"""The oracle of a decoder against transformers: token after token it gives the logits of the whole text.

Models are tiny and random, norm weights and biases are anything but ones and zeros, and one channel of the
embedding is far from zero: a mean that is forgotten or a bias left out is then seen. Transformers computes
angles and RMSNorm in float32 even in a float64 model, hence the tolerance.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from kvlab.reference import decoder as reference
from kvlab.reference.decoder import KeysValues, Layer, Linear, Model, Norm

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

TOLERANCE = 2e-6  # of the largest logit
SIZES = {"vocab_size": 97, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
LLAMA = {**SIZES, "intermediate_size": 96, "num_key_value_heads": 2, "max_position_embeddings": 64}
SCALED = {"rope_type": "llama3", "rope_theta": 100.0, "factor": 8.0, "low_freq_factor": 1.0,
          "high_freq_factor": 4.0, "original_max_position_embeddings": 16}  # fmt: skip


def neox(**options: Any) -> Any:
    rotary = {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": options.pop("part", 0.25)}
    config = transformers.GPTNeoXConfig(
        **{**SIZES, "intermediate_size": 160, "rope_parameters": rotary, **options}
    )
    return transformers.GPTNeoXForCausalLM(config)


MODELS: dict[str, Callable[[], Any]] = {
    "neox-parallel": neox,
    "neox-sequential": lambda: neox(use_parallel_residual=False, part=0.5),
    "neox-head-20": lambda: neox(hidden_size=80, part=0.5),
    "neox-full-rotary": lambda: neox(part=1.0),
    "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA)),
    "llama-scaled": lambda: transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**LLAMA, rope_parameters=SCALED, tie_word_embeddings=True)
    ),
    "qwen2": lambda: transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**LLAMA)),
    "qwen3": lambda: transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**LLAMA, head_dim=32)),
    "mistral": lambda: transformers.MistralForCausalLM(
        transformers.MistralConfig(**LLAMA, sliding_window=None)
    ),
}


def randomise(model: Any) -> Any:
    """Draw every parameter: weights that let the softmax choose, norms and biases that matter, an outlier."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype))
            if "norm" in name and name.endswith("weight"):
                parameter.mul_(0.3).add_(1.0)
            elif parameter.dim() == 2 and "embed" not in name:
                parameter.mul_(1.5 / parameter.shape[1] ** 0.5)
        model.get_input_embeddings().weight.add_(2.0)[:, 3] *= 30.0
    return model.double().eval()


def array(tensor: Any) -> NDArray[np.float64]:
    return np.asarray(tensor.detach().double().numpy())


def linear(module: Any) -> Linear:
    return Linear(array(module.weight), None if module.bias is None else array(module.bias))


def norm(module: Any, eps: float) -> Norm:
    bias = getattr(module, "bias", None)
    return Norm(array(module.weight), None if bias is None else array(bias), eps)


def neox_layer(layer: Any, config: Any) -> Layer:
    eps, attention = config.layer_norm_eps, layer.attention
    weights = reference.split_interleaved(array(attention.query_key_value.weight), config.num_attention_heads)
    biases = reference.split_interleaved(array(attention.query_key_value.bias), config.num_attention_heads)
    query, key, value = (Linear(w, b) for w, b in zip(weights, biases, strict=True))
    return Layer(
        norm(layer.input_layernorm, eps), norm(layer.post_attention_layernorm, eps), query, key, value,
        linear(attention.dense), linear(layer.mlp.dense_h_to_4h), linear(layer.mlp.dense_4h_to_h),
        parallel=config.use_parallel_residual,
    )  # fmt: skip


def llama_layer(layer: Any, config: Any) -> Layer:
    eps, attention, mlp = config.rms_norm_eps, layer.self_attn, layer.mlp
    has_norms = hasattr(attention, "q_norm")
    return Layer(
        norm(layer.input_layernorm, eps), norm(layer.post_attention_layernorm, eps),
        linear(attention.q_proj), linear(attention.k_proj), linear(attention.v_proj),
        linear(attention.o_proj), linear(mlp.up_proj), linear(mlp.down_proj), linear(mlp.gate_proj),
        norm(attention.q_norm, eps) if has_norms else None,
        norm(attention.k_norm, eps) if has_norms else None,
    )  # fmt: skip


def oracle_of(model: Any) -> Model:
    config, is_neox = model.config, model.config.model_type == "gpt_neox"
    body = model.gpt_neox if is_neox else model.model
    layers = tuple((neox_layer if is_neox else llama_layer)(layer, config) for layer in body.layers)
    final = (
        norm(body.final_layer_norm, config.layer_norm_eps)
        if is_neox
        else norm(body.norm, config.rms_norm_eps)
    )
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return Model(
        array(model.get_input_embeddings().weight), layers, final, linear(model.get_output_embeddings()),
        head_dim, body.rotary_emb.inv_freq.float().numpy(), body.rotary_emb.attention_scaling,
    )  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_token_by_token_is_the_whole_text(name: str) -> None:
    model = randomise(MODELS[name]())
    tokens = np.random.default_rng(3).integers(0, SIZES["vocab_size"], 24)
    with torch.no_grad():
        expected = array(model(torch.from_numpy(tokens)[None]).logits[0])
    oracle = oracle_of(model)
    past = [KeysValues() for _ in oracle.layers]
    found = np.stack([reference.token_logits(token, oracle, past) for token in tokens])
    assert np.abs(found - expected).max() <= TOLERANCE * np.abs(expected).max()


@pytest.mark.parametrize("change", ["eps", "rotation", "order", "residual"])
def test_the_comparison_sees_a_wrong_model(change: str) -> None:
    model = randomise(neox())
    tokens = np.random.default_rng(3).integers(0, SIZES["vocab_size"], 24)
    with torch.no_grad():
        expected = array(model(torch.from_numpy(tokens)[None]).logits[0])
    if change == "eps":
        model.config.layer_norm_eps = 0.1
    elif change == "rotation":
        model.gpt_neox.rotary_emb.inv_freq = model.gpt_neox.rotary_emb.inv_freq * 1.001
    elif change == "residual":
        model.config.use_parallel_residual = False
    else:
        model.config.num_attention_heads, model.config.head_dim = 2, 16
    oracle = oracle_of(model)
    past = [KeysValues() for _ in oracle.layers]
    found = np.stack([reference.token_logits(token, oracle, past) for token in tokens])
    assert np.abs(found - expected).max() > 10 * TOLERANCE * np.abs(expected).max()


def test_the_mean_is_subtracted_before_the_variance() -> None:
    """E[x^2] - E[x]^2 would lose every digit here."""
    x = 1e8 + np.array([-1.0, 1.0])
    assert np.array_equal(Norm(np.ones(2), np.zeros(2), 0.0)(x), [-1.0, 1.0])

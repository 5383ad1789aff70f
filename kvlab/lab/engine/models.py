"""Models for checks of the decode engine: of this machine, or of known sizes with random weights.

Random weights are numbers of the engine's 16-bit type, so that engine and transformers have the same ones.
They tell mistakes apart: norms and biases matter, one channel of the embedding is 30 times as large as the
others, and its mean is far from zero.
"""

from __future__ import annotations

from typing import Any

from kvlab.engine import folder
from kvlab.engine.geometry import PUBLISHED, Geometry, published
from kvlab.errors import needs_extra
from kvlab.lab.quality.model import without_progress_bars

__all__ = ["load", "random_model", "sizes_of"]

SMALL_VOCABULARY = 1024
"""Tokens of a random model, whose head is cut: it is as wide as the layers, and larger than many of them."""


def load(name_or_path: str, dtype: str, layers: int | None, seed: int) -> Any:
    """Return a transformers model in float32 whose weights are numbers of `dtype`.

    `name_or_path` is a name of `kvlab.engine.geometry.PUBLISHED`, the folder of a model, or its name in the
    Hugging Face cache of this machine. `layers`, the first so many, and `seed` are of random models. Errors
    are those of `kvlab.engine.folder.load_model`.
    """
    if name_or_path in PUBLISHED:
        return random_model(*published(name_or_path), dtype=dtype, layers=layers, seed=seed)
    with without_progress_bars():
        return folder.load_model(name_or_path, dtype).float()


def sizes_of(name_or_path: str) -> Geometry:
    """Return the sizes of a model that `load` would load, without its weights."""
    known = name_or_path in PUBLISHED
    return published(name_or_path)[0] if known else folder.sizes_of(name_or_path)


def random_model(
    geometry: Geometry, base: float, *, dtype: str, layers: int | None = None, seed: int = 0
) -> Any:
    """Return a transformers model of these sizes with random weights, in float32; see the module.

    Examples
    --------
    >>> from kvlab.engine.geometry import published
    >>> model = random_model(*published("pythia-14m"), dtype="float16", layers=1)
    >>> type(model).__name__, model.config.head_dim if hasattr(model.config, "head_dim") else 32
    ('GPTNeoXForCausalLM', 32)
    """
    with needs_extra("hf", "a model of transformers"):
        import torch
        import transformers
    sizes: dict[str, Any] = {
        "vocab_size": min(geometry.vocabulary, SMALL_VOCABULARY),
        "hidden_size": geometry.hidden,
        "num_hidden_layers": geometry.layers if layers is None else min(layers, geometry.layers),
        "num_attention_heads": geometry.heads_q,
        "intermediate_size": geometry.ffn,
        "max_position_embeddings": geometry.max_positions,
    }
    rotary: dict[str, Any] = {"rope_type": "default", "rope_theta": base}
    if geometry.layer_norm:
        rotary["partial_rotary_factor"] = geometry.rotary_dim / geometry.head_dim
        config: Any = transformers.GPTNeoXConfig(
            **sizes, rope_parameters=rotary, layer_norm_eps=geometry.eps,
            use_parallel_residual=geometry.parallel,
        )  # fmt: skip
    else:
        kind = transformers.Qwen3Config if geometry.head_norms else transformers.LlamaConfig
        config = kind(
            **sizes, rope_parameters=rotary, rms_norm_eps=geometry.eps, head_dim=geometry.head_dim,
            num_key_value_heads=geometry.heads_kv,
        )  # fmt: skip
    automatic: Any = transformers.AutoModelForCausalLM
    model = automatic.from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(generator=generator)
            if "norm" in name and name.endswith("weight"):
                parameter.mul_(0.3).add_(1.0)
            elif parameter.dim() == 2 and "embed_in" not in name and "embed_tokens" not in name:
                parameter.mul_(parameter.shape[1] ** -0.5)
        model.get_input_embeddings().weight.add_(2.0)[:, 3] *= 30.0
        for parameter in model.parameters():
            parameter.copy_(parameter.to(getattr(torch, dtype)))
    return model.eval().requires_grad_(False)

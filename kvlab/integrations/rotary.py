"""How far RoPE turns the keys of a transformers model with each token, as its configuration says.

With it, frames that rows take from their first tokens hold for later ones, too (`mean_factors` of
kvlab/ops/frame.py). This module knows models that rotate channels i and i + n of every head, in all layers;
caches of other models take frames without it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

__all__ = ["KNOWN", "head_dim_of", "rotary_of"]

KNOWN = (
    "gemma", "gemma2", "gemma3_text", "gpt_neox", "granite", "llama", "mistral", "mixtral", "olmo2", "phi",
    "phi3", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "stablelm", "starcoder2",
)  # fmt: skip
"""Types of models whose keys turn so; tests look at the keys of each."""


def rotary_of(config: Any, layers: Iterable[int]) -> tuple[tuple[float, ...], ...] | tuple[float, ...] | None:
    """Return the angles of some layers, or those of all if they are equal; None if they are not known.

    Examples
    --------
    >>> from transformers import LlamaConfig
    >>> rotary_of(LlamaConfig(hidden_size=64, num_attention_heads=8), [0, 1])
    (1.0, 0.1, 0.01, 0.001)
    """
    parameters = getattr(config, "rope_parameters", None)
    if config.model_type not in KNOWN or not parameters:
        return None
    kinds = getattr(config, "layer_types", None) if "rope_type" not in parameters else None
    found = [
        _angles(config, parameters[kinds[i]] if kinds else parameters, kinds and kinds[i]) for i in layers
    ]
    return found[0] if len(set(found)) == 1 else tuple(found) or None


def head_dim_of(config: Any) -> int:
    """Channels of a head, which not every configuration names."""
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def _angles(config: Any, parameters: dict[str, Any], layer_type: str | None) -> tuple[float, ...]:
    """The angles of one layer."""
    kind = parameters.get("rope_type", "default")
    if kind != "default":
        angles, _ = ROPE_INIT_FUNCTIONS[kind](config, "cpu", layer_type=layer_type)
        return tuple(map(float, angles))
    turning = int(head_dim_of(config) * parameters.get("partial_rotary_factor", 1.0))
    return tuple(parameters["rope_theta"] ** (-i / turning) for i in range(0, turning, 2))

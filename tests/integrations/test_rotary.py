"""Models turn their keys as `rotary_of` says."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

from kvlab.integrations.rotary import KNOWN, rotary_of
from kvlab.integrations.transformers import KVLabCache
from kvlab.ladder import BITS_IN_BLOCKS, BITS_OF_WIDTHS

LAYERS, TOKENS = 6, 40
SCALED = {"rope_type": "linear", "factor": 3.0, "rope_theta": 10000.0}


def config_of(kind: str, **more: Any) -> Any:
    return AutoConfig.for_model(
        kind, vocab_size=99, hidden_size=128, num_attention_heads=4, num_key_value_heads=2, head_dim=32,
        num_hidden_layers=LAYERS, intermediate_size=64, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        **more,
    )  # fmt: skip


@pytest.mark.parametrize("kind", [*KNOWN, "llama scaled"])
def test_keys_of_one_token_differ_by_their_turn_alone(kind: str) -> None:
    """Where all tokens are the same, so is all that a model makes of them, but for RoPE."""
    name, *scaled = kind.split()
    config = config_of(name, **({"rope_parameters": SCALED} if scaled else {}))
    torch.manual_seed(0)
    model, cache = AutoModelForCausalLM.from_config(config).eval(), DynamicCache(config=config)
    with torch.no_grad():
        model(torch.full((1, TOKENS), 7), past_key_values=cache)
    found: Any = rotary_of(config, range(LAYERS))
    for layer in range(LAYERS):
        angles = np.array(found[layer] if isinstance(found[0], tuple) else found)
        k, n = cache.layers[layer].keys[0].double().numpy(), len(angles)
        pairs = k[..., :n] + 1j * k[..., n : 2 * n]
        turned = pairs[:, :1] * np.exp(1j * np.arange(TOKENS)[:, None] * angles)
        assert np.abs(turned - pairs).max() < 1e-4 * np.abs(pairs).max()
        rest = k[..., 2 * n :]
        assert np.abs(rest - rest[:, :1]).max(initial=0) < 1e-4 * np.abs(k).max()
        assert np.abs(np.roll(turned, 1, -1) - pairs).max() > 0.1 * np.abs(pairs).max(), "others do not fit"


def test_other_models_are_not_known() -> None:
    for kind in ("gptj", "gpt2"):
        assert rotary_of(AutoConfig.for_model(kind), [0]) is None
    assert KVLabCache(AutoConfig.for_model("gpt2"))._shared.rotary is None


def test_a_cache_has_the_angles_of_its_model() -> None:
    config = config_of("gemma3_text")
    config._attn_implementation = "kvlab_packed"
    model, cache = AutoModelForCausalLM.from_config(config).eval(), KVLabCache(config, budget=None)
    with torch.no_grad():
        model(torch.arange(30)[None], past_key_values=cache)
    turns = cache.packed.rotary_of_layers  # type: ignore[union-attr]
    local = [kind == "sliding_attention" for kind in config.layer_types]
    assert [angles[1] for angles in turns] == [1e4**-0.0625 if near else 1e6**-0.0625 for near in local]
    assert 0 < sum(local) < LAYERS
    with pytest.raises(TypeError, match="is no option of the cache"):
        KVLabCache(config, rotary=(0.1,))


@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "gpt2"])
@pytest.mark.parametrize("head_dim", [64, 128, 32])
def test_the_default_ladder_has_profiles_where_frames_hold(kind: str, head_dim: int) -> None:
    config = AutoConfig.for_model(
        kind, num_hidden_layers=1, hidden_size=2 * head_dim, num_attention_heads=2, num_key_value_heads=1,
        head_dim=head_dim, vocab_size=99, intermediate_size=64, pad_token_id=0,
    )  # fmt: skip
    cache = KVLabCache(config)
    q, k, v = torch.randn(3, 1, 2, 8, head_dim).half()
    cache._shared.step(0, q, k[:, :1], v[:, :1], None, None, 0.0)
    wanted = BITS_IN_BLOCKS if kind != "gpt2" and head_dim > 32 else BITS_OF_WIDTHS
    assert cache.packed is not None
    assert cache.packed.bits == wanted

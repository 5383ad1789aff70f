"""`KVLabCache` on a GPU: the logits of a model are those with a dense cache, in all kinds of steps."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache, Gemma3TextConfig, LlamaConfig

import kvlab
from kvlab.integrations.decode_graph import DecodeGraph
from kvlab.integrations.transformers import ATTENTION, KVLabCache, register
from tests.cache_contents import pages_of

CONFIG = LlamaConfig(
    vocab_size=128, hidden_size=256, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    intermediate_size=128, max_position_embeddings=2048, pad_token_id=0, bos_token_id=None, eos_token_id=None,
)  # fmt: skip


WINDOWED = Gemma3TextConfig(
    vocab_size=128, hidden_size=256, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=1,
    head_dim=256, intermediate_size=128, max_position_embeddings=2048, sliding_window=48, pad_token_id=0,
    bos_token_id=None, eos_token_id=None,
    layer_types=["sliding_attention", "full_attention", "sliding_attention"],
)  # fmt: skip


@pytest.fixture(scope="module", params=[CONFIG, WINDOWED], ids=["llama", "gemma3"])
def model(request: pytest.FixtureRequest) -> Any:
    """A model with full attention, and one with sliding windows besides."""
    register()
    torch.manual_seed(0)
    made = AutoModelForCausalLM.from_config(request.param)
    return made.to("cuda", torch.bfloat16).eval().requires_grad_(False)


def ids(*shape: int) -> torch.Tensor:
    return torch.randint(1, 128, shape, generator=torch.Generator().manual_seed(1)).cuda()


def logits(model: Any, cache: Any, tokens: torch.Tensor, splits: list[int], mask: Any = None) -> torch.Tensor:
    model.set_attn_implementation(ATTENTION if isinstance(cache, KVLabCache) else "sdpa")
    found, start = [], 0
    for n in splits:
        seen = None if mask is None else mask[:, : start + n]
        part = model(tokens[:, start : start + n], past_key_values=cache, attention_mask=seen, use_cache=True)
        found.append(part.logits.float())
        start += n
    return torch.cat(found, 1)


@pytest.mark.parametrize("padded", [False, True])
def test_logits(model: Any, padded: bool) -> None:
    """At 16 bits only roundings differ: a prefill, decode steps over a plan, a chunk."""
    splits = [100, *[1] * 20, 5, 40]
    tokens, mask = ids(2, sum(splits)), None
    if padded:
        mask = torch.ones_like(tokens)
        mask[0, :30] = 0
    packed = KVLabCache(model.config, budget=None, bits=16)
    got = logits(model, packed, tokens, splits, mask)
    want = logits(model, DynamicCache(config=model.config), tokens, splits, mask)
    seen = torch.ones_like(tokens, dtype=torch.bool) if mask is None else mask.bool()
    assert (got - want)[seen].abs().max() < 0.03 * want[seen].abs().max()
    assert packed.get_seq_length() == sum(splits)


def test_wrong_tokens_show(model: Any) -> None:
    """The comparison above tells another past from this one."""
    splits, tokens = [100, *[1] * 5], ids(2, 105)
    other = tokens.clone()
    other[:, 10:60] = other[:, 10:60].flip(1)
    want, wrong = (logits(model, DynamicCache(config=model.config), x, splits) for x in (tokens, other))
    assert (want - wrong)[:, 100:].abs().max() > 0.03 * want.abs().max()


@pytest.mark.parametrize("how", [{}, {"num_beams": 3}, {"do_sample": True}])
def test_generate_under_a_budget(model: Any, how: dict[str, Any]) -> None:
    model.set_attn_implementation(ATTENTION)
    cache = KVLabCache(model.config, budget=0.5, bits=(2, 4, 8), plan_length=512)
    out = model.generate(ids(2, 200), past_key_values=cache, max_new_tokens=40, **how)
    assert out.shape == (2, 240)
    assert cache.packed.nbytes <= cache.packed.budget_nbytes
    assert cache.packed.seqlen == 239


@pytest.mark.parametrize("padded", [False, True])
def test_replayed_steps(model: Any, padded: bool) -> None:
    """Steps from graphs, over several plans and collections, are those of the model called as usual."""
    model.set_attn_implementation(ATTENTION)
    prompt, mask = ids(2, 100), torch.ones(2, 100, dtype=torch.long, device="cuda")
    mask[0, :30] = 1 - padded
    positions = (mask.cumsum(1) - 1).clamp(0)
    options: dict[str, Any] = {"budget": 0.6, "bits": (2, 4, 8), "plan_length": 256, "max_seqlen": 200}
    caches = [KVLabCache(model.config, **options) for _ in range(2)]
    for cache in caches:
        model(prompt, past_key_values=cache, attention_mask=mask, position_ids=positions)
    graph, step = DecodeGraph(model, caches[1]), positions[:, -1:]
    for token in ids(70, 2, 1):
        mask, step = torch.cat([mask, mask[:, -1:]], 1), step + 1
        want = model(token, past_key_values=caches[0], attention_mask=mask, position_ids=step).logits
        got = graph(token, step)
        assert (got - want).abs().max() < 0.01 * want.abs().max()
        assert caches[0].get_seq_length() == caches[1].get_seq_length() == mask.shape[1]
    assert (got - got.roll(1, 0)).abs().max() > 0.01 * want.abs().max()
    packed = [cache.packed for cache in caches]
    assert packed[0].nbytes == packed[1].nbytes <= packed[1].budget_nbytes
    first, second = (pages_of(cache) for cache in packed)
    assert all(np.array_equal(a.count, b.count) for a, b in zip(first, second, strict=True))


def test_generate_with_graphs(model: Any) -> None:
    """Greedy text is the same with graphs and without, also in a second turn and after a longer prompt."""
    prompt, options = ids(2, 200), {"max_new_tokens": 40, "do_sample": False}
    found = []
    for graph in (False, True):
        with kvlab.quantized(model, budget=0.5, bits=(2, 4, 8), graph=graph):
            first = model.generate(prompt, return_dict_in_generate=True, **options)
            longer = torch.cat([first.sequences, prompt[:, :60]], 1)
            second = model.generate(longer, past_key_values=first.past_key_values, **options)
        found.append(second)
    assert torch.equal(*found)


def test_graphs_need_a_prompt_on_a_gpu(model: Any) -> None:
    with pytest.raises(ValueError, match="prompt"):
        DecodeGraph(model, KVLabCache(model.config))

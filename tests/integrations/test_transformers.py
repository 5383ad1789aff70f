"""KVLabCache as a transformers.Cache: operations on rows and lengths, and what it refuses."""

from __future__ import annotations

import copy
import gc
import inspect
import io
import pickle
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    AutoModelForCausalLM,
    BartConfig,
    BartForCausalLM,
    DeepseekV3Config,
    DynamicCache,
    GptOssConfig,
    GptOssForCausalLM,
)
from transformers.cache_utils import DynamicSlidingWindowLayer

from kvlab import BudgetError, MixedPrecisionCache
from kvlab.integrations.packed_layer import PackedLayer
from kvlab.integrations.quantized import quantized
from kvlab.integrations.transformers import ATTENTION, KVLabCache, register
from kvlab.sizes import format_size
from tests.integrations.models import CONFIGS, MHA, WINDOW, tiny, tokens

register()
EXACT: dict[str, Any] = {"bits": (16,), "budget": None}


@pytest.fixture
def llama(attend: Any) -> Any:
    attend(tiny("llama"), ATTENTION)
    return tiny("llama")


# ---- the same as a DynamicCache

rows = st.integers(0, 5)
OPERATIONS = st.one_of(
    st.tuples(st.just("feed"), st.integers(1, 9), st.sampled_from([0.0, 0.4])),
    st.tuples(st.just("crop"), st.integers(0, 4)),
    st.tuples(st.just("reorder_cache"), st.lists(rows, min_size=6, max_size=6)),
    st.tuples(st.just("batch_select_indices"), st.lists(rows, min_size=1, max_size=4)),
    st.tuples(st.just("batch_repeat_interleave"), st.integers(1, 2)),
    st.tuples(st.just("copy")),
    st.tuples(st.just("reset")),
)


class Pair:
    """A KVLabCache and a DynamicCache that go through the same operations."""

    def __init__(self) -> None:
        self.model, self.fed = tiny("llama"), 0
        self.caches: list[Any] = [
            KVLabCache(self.model.config, **EXACT),
            DynamicCache(config=self.model.config),
        ]
        self.mask = torch.zeros(2, 0, dtype=torch.bool)

    def feed(self, count: int, padding: float) -> None:
        """Feed tokens, of which a share is padding, and compare the logits of the others."""
        self.fed += 1
        generator = torch.Generator().manual_seed(self.fed)
        valid = torch.rand(len(self.mask), count, generator=generator) >= padding
        self.mask = torch.cat([self.mask, valid], 1)
        ids = tokens(len(self.mask), count, seed=self.fed)
        found, expected = (
            self.model(ids, past_key_values=cache, attention_mask=self.mask.long()).logits
            for cache in self.caches
        )
        assert ((found - expected)[valid].abs() < 1e-4 * expected.abs().max()).all()

    def change(self, name: str, *arguments: Any) -> None:
        held = self.mask.shape[1]
        if name == "feed":
            self.feed(*arguments)
        elif name == "crop":
            n = min(*arguments, held)
            self.mask = self.mask[:, : held - n]
            self.each("crop", -n)
        elif name == "reset":
            self.mask = self.mask[:, :0]
            self.caches[0].reset()
            self.caches[1] = DynamicCache(config=self.model.config)  # in 5.17 its reset keeps the length
        elif name == "copy":
            self.caches = copy.deepcopy(self.caches)
        else:
            self.change_rows(name, *arguments)

    def change_rows(self, name: str, argument: Any) -> None:
        if not self.mask.shape[1]:
            return
        if name == "batch_repeat_interleave":
            if len(self.mask) <= 4:
                self.mask = self.mask.repeat_interleave(argument, 0)
                self.each(name, argument)
            return
        length = len(self.mask) if name == "reorder_cache" else len(argument)
        index = torch.tensor([row % len(self.mask) for row in argument[:length]])
        if len(index) == length:
            self.mask = self.mask[index]
            self.each(name, index)

    def each(self, name: str, *arguments: Any) -> None:
        for cache in self.caches:
            getattr(cache, name)(*arguments)


@settings(max_examples=25, deadline=None)
@given(st.lists(OPERATIONS, max_size=8))
def test_operations_do_what_they_do_to_a_dynamic_cache(operations: list[tuple[Any, ...]]) -> None:
    model, pair = tiny("llama"), Pair()
    before = model.config._attn_implementation
    model.set_attn_implementation(ATTENTION)
    try:
        pair.feed(12, 0.2)
        for operation in operations:
            pair.change(*operation)
            pair.feed(1, 0.0)
            assert pair.caches[0].get_seq_length() == pair.caches[1].get_seq_length() == pair.mask.shape[1]
    finally:
        model.set_attn_implementation(before)


def test_layers_with_full_attention_and_with_windows_are_packed() -> None:
    cache = KVLabCache(CONFIGS["gemma3"])
    assert [type(layer) for layer in cache.layers] == 3 * [PackedLayer]
    assert (cache.is_sliding, cache.is_compileable, cache.is_croppable) == ([True, False, False], False, True)
    assert cache.get_max_length(1) == -1
    assert cache.get_mask_sizes(5, 1) == (5, 0)


@pytest.mark.parametrize("name", ["gemma3", "mistral-sliding"])
def test_masks_have_the_sizes_that_they_have_with_a_dynamic_cache(name: str, attend: Any) -> None:
    model, cache = tiny(name), KVLabCache(CONFIGS[name], **EXACT)
    dynamic = DynamicCache(config=CONFIGS[name])
    attend(model, ATTENTION)
    for n in (5, WINDOW - 6, 1, 1, 1, 40):
        for held in (cache, dynamic):
            model(tokens(1, n), past_key_values=held)
        for layer in range(3):
            assert cache.get_mask_sizes(7, layer) == dynamic.get_mask_sizes(7, layer)


def test_chunked_attention_stays_that_of_transformers() -> None:
    """Its masks are others, though transformers keeps it in layers of the same class."""
    config = copy.deepcopy(CONFIGS["gemma3"])
    config.layer_types, config.attention_chunk_size = ["chunked_attention", *config.layer_types[1:]], 16
    cache = KVLabCache(config)
    assert [type(layer) for layer in cache.layers] == [DynamicSlidingWindowLayer, PackedLayer, PackedLayer]


def test_defaults_are_those_of_the_cache_inside() -> None:
    inside = inspect.signature(MixedPrecisionCache).parameters
    outside = inspect.signature(KVLabCache).parameters
    assert all(outside[name].default == inside[name].default for name in ("budget", "bits"))


def test_max_seqlen_is_judged_by_the_true_geometry() -> None:
    """The smallest geometry, which checks the options, needs more bytes an element than a model's own."""
    KVLabCache(tiny("llama").config, budget=0.3, bits=(4, 8), max_seqlen=4096)
    with pytest.raises(BudgetError):
        MixedPrecisionCache(2, 1, 1, 16, budget=0.3, bits=(4, 8), max_seqlen=4096)


def test_the_cache_is_freed_with_its_last_reference(llama: Any) -> None:
    cache = KVLabCache(llama.config)
    llama(tokens(1, 9), past_key_values=cache)
    inside = weakref.ref(cache.packed)
    gc.disable()
    try:
        del cache
        assert inside() is None, "a circle of references keeps the pages alive"
    finally:
        gc.enable()


def test_reset_allows_another_batch(llama: Any) -> None:
    cache = KVLabCache(llama.config, **EXACT)
    llama(tokens(2, 9), past_key_values=cache)
    with pytest.raises(ValueError, match=r"the batch has 3 rows, this cache 2: reset\(\)"):
        llama(tokens(3, 1), past_key_values=cache)
    cache.reset()
    assert cache.get_seq_length() == 0
    found = llama(tokens(3, 9), past_key_values=cache).logits
    assert torch.allclose(found, llama(tokens(3, 9)).logits, atol=1e-4)


# ---- never silently wrong


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_another_attention_function_is_refused(attention: str, attend: Any) -> None:
    model = tiny("llama")
    attend(model, attention)
    cache = KVLabCache(model.config, **EXACT)
    with pytest.raises(RuntimeError, match=r"call model\.set_attn_implementation\('kvlab_packed'\)"):
        model(tokens(1, 9), past_key_values=cache)
    assert cache.get_seq_length() == 0
    attend(model, ATTENTION)
    found = model(tokens(1, 9), past_key_values=cache).logits
    assert torch.allclose(found, model(tokens(1, 9)).logits, atol=1e-4)


def test_without_packed_layers_the_attention_function_is_sdpa(attend: Any) -> None:
    model, prompt = tiny("llama"), tokens(2, 30)
    attend(model, "sdpa")
    expected = model(prompt).logits
    attend(model, ATTENTION)
    assert torch.equal(model(prompt).logits, expected)


def test_gradients_are_refused(llama: Any) -> None:
    llama.requires_grad_(True)
    try:
        with pytest.raises(TypeError, match=r"under torch\.no_grad"):
            llama(tokens(1, 9), past_key_values=KVLabCache(llama.config))
    finally:
        llama.requires_grad_(False)


def test_sinks_are_refused(attend: Any) -> None:
    config = GptOssConfig(**{**MHA, "num_key_value_heads": 2, "head_dim": 32, "num_local_experts": 2})
    model = GptOssForCausalLM(config).eval()
    attend(model, ATTENTION)
    with pytest.raises(NotImplementedError, match="does not compute s_aux"):
        model.generate(tokens(1, 9), past_key_values=KVLabCache(config), max_new_tokens=2)


def test_training_is_refused(llama: Any) -> None:
    dropped = copy.deepcopy(llama).train()
    for layer in dropped.model.layers:
        layer.self_attn.attention_dropout = 0.1
    with pytest.raises(NotImplementedError, match=r"dropout=0\.1: call model\.eval\(\)"):
        dropped(tokens(1, 9), past_key_values=KVLabCache(llama.config))


def test_training_with_softcap_is_refused_without_a_cache(attend: Any) -> None:
    model = copy.deepcopy(tiny("gemma2")).train()
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.5
    attend(model, ATTENTION)
    with pytest.raises(NotImplementedError, match=r"dropout=0\.5: call model\.eval\(\)"):
        model(tokens(1, 9), use_cache=False)


def test_attention_weights_are_refused(llama: Any) -> None:
    with pytest.raises(NotImplementedError, match="output_attentions=True: use a transformers"):
        llama(tokens(1, 9), past_key_values=KVLabCache(llama.config), output_attentions=True)


@pytest.mark.parametrize("how", ["select", "crop"])
def test_once_no_padding_is_left_masks_need_not_be_there(llama: Any, how: str) -> None:
    """transformers makes no mask for one token without padding, and one for the chunk behind it."""
    cache, seen = KVLabCache(llama.config, **EXACT), tokens(2, 16)
    mask = torch.ones_like(seen)
    if how == "select":
        mask[0, :5] = 0
    else:
        mask[:, 12:] = 0
    llama(seen, attention_mask=mask, past_key_values=cache)
    if how == "select":
        cache.batch_select_indices(torch.tensor([1]))
        seen = seen[1:]
    else:
        cache.crop(-4)
        seen = seen[:, :12]
    for new in (1, 3):
        cache.check_step(torch.ones(len(seen), seen.shape[1] + 1))
        seen = torch.cat([seen, tokens(len(seen), new, seed=new)], 1)
        mask = torch.ones_like(seen)
        found = llama(seen[:, -new:], attention_mask=mask, past_key_values=cache).logits
    assert torch.allclose(found, llama(seen).logits[:, -3:], atol=1e-4)


# ---- errors say what to do


@pytest.mark.parametrize(
    ("config", "options", "error", "words"),
    [
        ("llama", {"bits": (5,)}, ValueError, "bits"),
        ("llama", {"budget": "much"}, ValueError, "budget"),
        ("llama", {"dtype": "int8"}, ValueError, "dtype"),
        (
            "llama",
            {"pages": 3},
            TypeError,
            "pages=3 is no option of the cache; options are budget, bits, importance",
        ),
        ("llama", {"batch": 2}, TypeError, "batch"),
        (tiny("llama"), {}, TypeError, r"model\.config"),
        (BartConfig(), {}, NotImplementedError, "encoder-decoder"),
        ("llama", {"nbits": 4}, TypeError, "nbits=4 is no option of the cache, bits is meant"),
        ("llama", {"residual_length": 128}, TypeError, "residual_length=128 .*, residual is meant"),
        ("llama", {"q_group_size": 64}, TypeError, "q_group_size=64 .*a step size of its own"),
        ("llama", {"bugdet": 1}, TypeError, "bugdet=1 .*, budget is meant"),
        (
            DeepseekV3Config(),
            {},
            NotImplementedError,
            r"multi-head latent attention .* transformers\.DynamicCache, outside",
        ),
    ],
)
def test_bad_options_show_at_once(config: Any, options: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        KVLabCache(CONFIGS.get(config, config) if isinstance(config, str) else config, **options)


def test_a_budget_may_stand_second(llama: Any) -> None:
    cache = KVLabCache(llama.config, "3MiB")
    llama(tokens(1, 9), past_key_values=cache)
    assert cache.packed is not None
    assert cache.packed.budget_nbytes == 3 << 20


@pytest.mark.parametrize(("encoder", "decoder"), [(12, 2), (2, 4)])
def test_a_decoder_alone_has_the_layers_of_the_decoder(encoder: int, decoder: int) -> None:
    sizes = {"d_model": 64, "encoder_attention_heads": 4, "decoder_attention_heads": 4, "decoder_ffn_dim": 64}
    special = dict.fromkeys(("bos_token_id", "eos_token_id", "forced_eos_token_id"), None)
    torch.manual_seed(0)
    model = BartForCausalLM(
        BartConfig(vocab_size=128, encoder_layers=encoder, decoder_layers=decoder, **sizes, **special)
    ).eval()
    ids = tokens(1, 38)
    with torch.no_grad(), quantized(model, **EXACT):
        cache = model(ids[:, :-1]).past_key_values
        found = model(ids[:, -1:], past_key_values=cache).logits
    assert cache.packed.num_layers == decoder
    assert torch.allclose(found, model(ids, use_cache=False).logits[:, -1:], atol=1e-3)


def test_a_model_may_be_loaded_with_the_attention_function() -> None:
    """In a process of its own: here it is registered."""
    code = """if True:
        import kvlab.integrations.transformers
        from transformers import AutoModelForCausalLM, LlamaConfig
        config = LlamaConfig(vocab_size=9, hidden_size=32, intermediate_size=32, num_hidden_layers=1,
                             num_attention_heads=2)
        AutoModelForCausalLM.from_config(config, attn_implementation="kvlab_packed")
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert AutoModelForCausalLM.from_config(copy.deepcopy(CONFIGS["llama"]), attn_implementation=ATTENTION)


@pytest.mark.parametrize("importance", ["attention", "recency"])
def test_caches_can_be_pickled(llama: Any, importance: str) -> None:
    cache = KVLabCache(llama.config, budget=0.3, importance=importance)
    llama(tokens(1, 90), past_key_values=cache)
    file = io.BytesIO()
    torch.save(cache, file)
    file.seek(0)
    copies = [pickle.loads(pickle.dumps(cache)), torch.load(file, weights_only=False)]
    for n in (1, 5):
        found = [llama(tokens(1, n), past_key_values=held).logits for held in (cache, *copies)]
        assert torch.equal(found[0], found[1])
        assert torch.equal(found[0], found[2])


def test_a_cache_says_what_it_holds(llama: Any) -> None:
    cache = KVLabCache(llama.config, "1MiB", bits=(4, 8))
    assert (repr(cache), cache.nbytes) == ("KVLabCache: 3 layers, empty", 0)
    llama(tokens(2, 100), past_key_values=cache)
    packed = cache.packed
    assert packed is not None
    assert cache.nbytes == packed.nbytes
    assert packed.budget_nbytes is not None
    float16 = 2 * 3 * 2 * 100 * 2 * 16 * 2  # K and V, layers, rows, tokens, heads, channels, bytes
    assert repr(cache) == (
        f"KVLabCache: 3 layers, 2 rows of 100 tokens, {packed.nbytes / 1024:.2f} KiB of "
        f"{format_size(packed.budget_nbytes)}, {16 * packed.nbytes / float16:.1f} bits an element (float16 "
        f"{float16 / 1024:.2f} KiB)"
    )
    cache.reset()
    assert "empty" in repr(cache)


def test_bytes_of_layers_that_are_not_packed_count(attend: Any) -> None:
    model, cache = tiny("lfm2"), KVLabCache(CONFIGS["lfm2"], None)
    attend(model, ATTENTION)
    model(tokens(1, 9), past_key_values=cache)
    assert cache.packed is not None
    others = 64 * 3 * 4  # of 64 channels, 3 inputs of their convolution, in float32
    assert others <= cache.nbytes - cache.packed.nbytes < others + 64
    assert "3 layers (1 not packed), 9 tokens" in repr(cache)


def test_a_model_without_layers_to_pack_is_warned_of() -> None:
    config = copy.deepcopy(CONFIGS["lfm2"])
    config.layer_types = 3 * ["conv"]
    with pytest.warns(UserWarning, match=r"nothing is packed .*LinearAttentionLayer"):
        cache = KVLabCache(config)
    assert cache.packed is None
    cache.reset()


def test_hold_refuses_models_with_layers_that_are_not_packed() -> None:
    """They would stay empty, and positions begin anew."""
    cache, packed = KVLabCache(CONFIGS["lfm2"], **EXACT), MixedPrecisionCache(2, 4, 2, 32, **EXACT)
    with pytest.raises(NotImplementedError, match="nothing of 1 of the model's 3 layers"):
        cache.hold(packed)
    assert cache.packed is None


def test_a_model_with_windows_goes_on_from_a_file(attend: Any, tmp_path: Path) -> None:
    model, ids = tiny("gemma3"), tokens(1, 60)
    attend(model, ATTENTION)
    cache, other = KVLabCache(CONFIGS["gemma3"], **EXACT), KVLabCache(CONFIGS["gemma3"], **EXACT)
    model(ids[:, :50], past_key_values=cache)
    assert cache.packed is not None
    cache.packed.save(tmp_path / "cache")
    other.hold(MixedPrecisionCache.load(tmp_path / "cache"))
    found = model(ids[:, 50:], past_key_values=other).logits
    assert torch.allclose(found, model(ids).logits[:, 50:], atol=1e-4)
    with pytest.raises(
        ValueError, match=r"sliding windows of \[0, 0, 0\] tokens, the model has \[24, 0, 0\]"
    ):
        other.hold(MixedPrecisionCache(3, 4, 2, 32, **EXACT))


@pytest.mark.parametrize("options", [EXACT, {"bits": "0-1:0+8,2:16", "budget": 0.9}], ids=["exact", "drops"])
def test_rows_with_padding_go_on_from_a_file_with_their_mask(
    llama: Any, tmp_path: Path, options: Any
) -> None:
    """Without it positions of the next token would count the padding, which no file holds."""
    ids, mask = tokens(2, 40), torch.ones(2, 41, dtype=torch.long)
    mask[0, :13] = 0
    step, next_position = tokens(2, 1, seed=1), mask.sum(1, keepdim=True) - 1
    cache, other = KVLabCache(llama.config, **options), KVLabCache(llama.config)
    llama(ids, past_key_values=cache, attention_mask=mask[:, :40], position_ids=mask[:, :40].cumsum(1) - 1)
    assert cache.packed is not None
    cache.packed.save(tmp_path / "cache")
    other.hold(MixedPrecisionCache.load(tmp_path / "cache"))
    for call in (lambda: llama(step, past_key_values=other), lambda: other.check_step(None)):
        with pytest.raises(ValueError, match="rows with padding: pass the attention_mask of all tokens"):
            call()
    found, expected = (
        llama(step, past_key_values=x, attention_mask=mask, position_ids=next_position).logits
        for x in (other, cache)
    )
    assert torch.equal(found, expected)


def test_hold_refuses_padding_that_no_layer_shows(llama: Any) -> None:
    options: dict[str, Any] = {"bits": (0, 8), "budget": 0.9}
    cache, other = KVLabCache(llama.config, **options), KVLabCache(llama.config)
    mask = torch.ones(2, 40, dtype=torch.long)
    mask[1, :13] = 0
    llama(tokens(2, 40), past_key_values=cache, attention_mask=mask)
    assert cache.packed is not None
    with pytest.raises(ValueError, match="first token of row 1 in no layer: the row began with padding"):
        other.hold(cache.packed)
    assert other.packed is None


def test_a_cache_that_has_dropped_tokens_goes_on_without_a_mask(llama: Any) -> None:
    options: dict[str, Any] = {"bits": (0, 8), "budget": 0.1, "plan_length": 1}
    cache, other = KVLabCache(llama.config, **options), KVLabCache(llama.config)
    llama(tokens(2, 300), past_key_values=cache)
    assert cache.packed is not None
    assert cache.packed.pages(0).count.sum() < 2 * 2 * 300
    other.hold(cache.packed)
    llama(tokens(2, 1), past_key_values=other)


@pytest.mark.parametrize(
    ("geometry", "words"),
    [
        ((3, 8, 2, 32), "packed has num_heads_q=8, num_heads_kv=2, head_dim=32, the model num_heads_q=4"),
        ((3, 4, 4, 32), "num_heads_kv=4, head_dim=32, the model .*num_heads_kv=2"),
        ((3, 4, 2, 64), "head_dim=64, the model .*head_dim=16: load the cache of this model"),
    ],
)
def test_hold_refuses_the_cache_of_another_geometry(geometry: tuple[int, ...], words: str) -> None:
    cache = KVLabCache(CONFIGS["llama"], **EXACT)
    with pytest.raises(ValueError, match=words):
        cache.hold(MixedPrecisionCache(*geometry, **EXACT))
    with pytest.raises(TypeError, match="packed must be a MixedPrecisionCache, not str"):
        cache.hold("x")  # type: ignore[arg-type]
    assert cache.packed is None


WRONG_CALLS: dict[str, tuple[str, list[Any]]] = {
    "crop": ("tokens_to_remove", ["a", None, [1], 1, -10, torch.tensor([0.5])]),
    "reorder_cache": ("beam_idx", ["a", None, [0], 1, torch.tensor([0.5]), torch.tensor([[0]])]),
    "batch_repeat_interleave": ("repeats", ["a", None, [1], 0, 1.5]),
    "batch_select_indices": ("indices", ["a", None, [0], torch.tensor([0.5]), torch.tensor([9])]),
}


@pytest.mark.parametrize("method", WRONG_CALLS)
def test_arguments_of_wrong_kinds_are_refused_by_name(llama: Any, method: str) -> None:
    cache = KVLabCache(llama.config, **EXACT)
    llama(tokens(1, 9), past_key_values=cache)
    argument, values = WRONG_CALLS[method]
    for wrong in values:
        with pytest.raises((TypeError, ValueError), match=argument):
            getattr(cache, method)(wrong)
    assert cache.get_seq_length() == 9


def test_layers_alone_do_not_change(llama: Any) -> None:
    cache = KVLabCache(llama.config, **EXACT)
    llama(tokens(1, 9), past_key_values=cache)
    for change in ("reset", "offload", "prefetch"):
        with pytest.raises(NotImplementedError, match="KVLabCache"):
            getattr(cache.layers[0], change)()


def test_a_full_budget_leaves_the_cache_as_it_was(llama: Any) -> None:
    cache = KVLabCache(llama.config, budget="40KiB", bits=(2, 8))
    llama(tokens(1, 200), past_key_values=cache)
    with pytest.raises(BudgetError) as error:
        llama(tokens(1, 2000), past_key_values=cache)
    assert cache.get_seq_length() == 200
    assert error.value.longest_length is not None
    llama(tokens(1, error.value.longest_length - 200), past_key_values=cache)
    assert cache.get_seq_length() == error.value.longest_length


@pytest.mark.parametrize(("name", "refusal"), [("gemma3", "rewind"), ("lfm2", "does not track past states")])
def test_a_refused_crop_leaves_the_cache_as_it_was(name: str, refusal: str, attend: Any) -> None:
    """Whether packed layers refuse it or those of transformers, which forget what a window has passed."""
    model, cache = tiny(name), KVLabCache(CONFIGS[name], budget=0.9, bits=(2,), plan_length=1)
    attend(model, ATTENTION)
    model(tokens(1, 20), past_key_values=cache)
    cache.activate_past_recording()
    model(tokens(1, 2), past_key_values=cache)
    same = copy.deepcopy(cache)
    with pytest.raises(BudgetError):
        cache.crop(-21)  # a page for one token is more than its share
    step = tokens(1, 1)
    found, expected = (model(step, past_key_values=held).logits for held in (cache, same))
    assert torch.equal(found, expected)

    forgetful = KVLabCache(CONFIGS[name], **EXACT)
    model(tokens(1, 30), past_key_values=forgetful)
    with pytest.raises((ValueError, RuntimeError), match=refusal):
        forgetful.crop(-3)
    assert forgetful.get_seq_length(2) == 30


def test_a_step_that_failed_between_two_layers_is_remembered(llama: Any, monkeypatch: Any) -> None:
    cache = KVLabCache(llama.config, **EXACT)
    llama(tokens(1, 9), past_key_values=cache)
    step = MixedPrecisionCache.step_heads_first

    def fail(self: Any, layer: int, *arguments: Any, **options: Any) -> Any:
        if layer == 1:
            raise KeyboardInterrupt
        return step(self, layer, *arguments, **options)

    monkeypatch.setattr(MixedPrecisionCache, "step_heads_first", fail)
    with pytest.raises(KeyboardInterrupt):
        llama(tokens(1, 3), past_key_values=cache)
    monkeypatch.undo()
    with pytest.raises(RuntimeError, match=r"now hold 12 and 9 tokens: reset\(\) this cache"):
        llama(tokens(1, 3), past_key_values=cache)
    cache.reset()
    llama(tokens(1, 3), past_key_values=cache)

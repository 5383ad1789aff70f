"""`kvlab.accelerate`: what a model generates on a decoder is what it generates itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers import GenerationConfig

import kvlab
from kvlab.integrations import accelerate as module
from tests.engine.models import FAMILIES, family, llama
from tests.integrations.models import tokens as random_tokens

GREEDY = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
WITH_LOGITS = {**GREEDY, "return_dict_in_generate": True, "output_logits": True}


def half(name: str = "llama", dtype: str = "float16") -> Any:
    """A model of a family in a 16-bit type; rotary frequencies stay in float32."""
    model = family(name, dtype)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(getattr(torch, dtype))
    return model


def prompt(*shape: int, seed: int = 0) -> torch.Tensor:
    return random_tokens(*shape, seed=seed) % 96 + 1


def padded(lengths: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Prompts of some lengths and their mask, with padding on the left."""
    ids = prompt(len(lengths), max(lengths))
    mask = torch.arange(max(lengths)) >= max(lengths) - torch.tensor(lengths)[:, None]
    return ids * mask, mask.long()


def logits_of(model: Any, ids: torch.Tensor, **options: Any) -> tuple[torch.Tensor, torch.Tensor, Any]:
    """Generated text, logits of every new token (rows, tokens, vocabulary), and the cache."""
    out = model.generate(ids, **{**WITH_LOGITS, **options})
    return out.sequences, torch.stack(out.logits, 1), out.past_key_values


def within_promise_2(got: torch.Tensor, want: torch.Tensor, stock: torch.Tensor) -> bool:
    """Whether errors against float64 are at most twice those of the 16-bit model, and 2 ulp of float32."""
    error, allowed = (got - want).abs().max(), (stock - want).abs().max()
    return bool(error <= 2 * allowed + 2 * np.spacing(np.float32(want.abs().max())))


def assert_generates(name: str, dtype: str, device: str) -> None:
    """Logits and text are the model's, along the text that float64 gives; prompt, then token by token."""
    exact, model = family(name, dtype).double(), half(name, dtype).to(device)
    ids = prompt(2, 9)
    text, want, _ = logits_of(exact, ids, max_new_tokens=8)
    with torch.no_grad():
        stock = torch.cat([model(text[:, :tail].to(device)).logits[:, -1:].cpu() for tail in range(9, 17)], 1)
    steps = iter(text[:, 9:].to(device).unbind(1))

    def forced(_: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(scores).scatter(1, next(steps)[:, None], 1.0)

    on_device = ids.to(device)
    with kvlab.accelerate(model):
        _, got, _ = logits_of(
            model, on_device, max_new_tokens=8, logits_processor=transformers.LogitsProcessorList([forced])
        )
        free = model.generate(on_device, max_new_tokens=8, **GREEDY).cpu()
    assert got.dtype == torch.float32
    assert got.device == on_device.device
    got = got.cpu()
    assert within_promise_2(got, want, stock)
    for wrong in (torch.zeros_like(got), got.roll(1, 0), got.roll(1, 1), got.roll(1, 2)):
        assert not within_promise_2(wrong, want, stock)
    top = want.topk(2).values
    for row, gaps in enumerate(top[..., 0] - top[..., 1]):
        sure = int(torch.cumprod(gaps > 2 * (got - want).abs().max(), 0).sum())
        assert torch.equal(free[row, : 9 + sure], text[row, : 9 + sure])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", FAMILIES)
def test_logits_and_text_are_those_of_the_model(name: str, dtype: str) -> None:
    assert_generates(name, dtype, "cpu")


@pytest.mark.parametrize("name", ["neox-parallel", "qwen3"])
def test_rows_of_a_padded_batch_are_those_alone(name: str) -> None:
    model, lengths = half(name), [3, 12, 7]
    ids, mask = padded(lengths)
    with kvlab.accelerate(model):
        text, together, _ = logits_of(model, ids, attention_mask=mask, max_new_tokens=6)
        for row, length in enumerate(lengths):
            alone_text, alone, _ = logits_of(model, ids[row : row + 1, -length:], max_new_tokens=6)
            assert torch.equal(text[row, -6:], alone_text[0, -6:])
            assert (together[row] - alone[0]).abs().max() <= 1e-4 * alone.abs().max()


def test_sixteen_rows_and_samples() -> None:
    """With one seed the same tokens are drawn as from the model in float32."""
    exact, model = family("llama"), half("llama")
    ids = prompt(8, 5)
    options = {"do_sample": True, "top_k": 5, "num_return_sequences": 2, "max_new_tokens": 6}
    torch.manual_seed(3)
    want = exact.generate(ids, **{**GREEDY, **options})
    with kvlab.accelerate(model):
        torch.manual_seed(3)
        got = model.generate(ids, **{**GREEDY, **options})
    assert got.shape == (16, 11)
    assert (got == want).all(1).float().mean() >= 0.75  # a draw near a border may fall on the other side


def test_a_second_turn_reads_what_is_new() -> None:
    """Padded rows, the second turn padded nowhere; equal to the whole text read at once."""
    model = half()
    ids, mask = padded([4, 8])
    read = []
    with kvlab.accelerate(model):
        text, _, cache = logits_of(model, ids, attention_mask=mask, max_new_tokens=5)
        assert cache.get_seq_length() == 8 + 4  # the newest token is not read yet
        more = torch.cat([text, prompt(2, 3, seed=1)], 1)
        whole = torch.cat([mask, torch.ones(2, 8, dtype=torch.long)], 1)
        decoder = cache.decoders.of(cache, 2)
        prefill = decoder.prefill
        decoder.prefill = lambda rows: read.append([len(row) for row in rows]) or prefill(rows)
        again, got, same = logits_of(
            model, more, attention_mask=whole, max_new_tokens=4, past_key_values=cache
        )
        assert read == [[4, 4], [1, 1], [1, 1], [1, 1]]
        assert same is cache
        want_text, want, _ = logits_of(model, more, attention_mask=whole, max_new_tokens=4)
        assert torch.equal(again, want_text)
        assert (got - want).abs().max() <= 1e-4 * want.abs().max()
        with pytest.raises(ValueError, match="another call of generate has begun"):
            model.generate(again, past_key_values=cache, max_new_tokens=1, **GREEDY)


def test_rows_that_end_early_and_a_streamer() -> None:
    exact, model = family("llama"), half("llama")
    ids = prompt(2, 6)
    end = int(exact.generate(ids, max_new_tokens=8, **GREEDY)[0, 8])
    options = {**GREEDY, "eos_token_id": end, "max_new_tokens": 8}
    streamed: list[int] = []

    class Streamer(transformers.generation.streamers.BaseStreamer):
        def put(self, value: torch.Tensor) -> None:
            streamed.extend(value.reshape(-1).tolist())

        def end(self) -> None:
            streamed.append(-1)

    with kvlab.accelerate(model):
        assert torch.equal(model.generate(ids, **options), exact.generate(ids, **options))
        one = model.generate(ids[:1], streamer=Streamer(), **options)
    assert streamed == [*one[0].tolist(), -1]


def test_the_model_is_as_before() -> None:
    model, ids = half(), prompt(1, 5)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    attributes = set(vars(model))
    with torch.no_grad():
        want = model(ids).logits

    def stop(_: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        raise KeyError("stop")

    def fails() -> None:
        with kvlab.accelerate(model):
            with torch.no_grad():
                assert torch.equal(model(ids).logits, want)  # every token's, by the model itself
            with pytest.raises(KeyError):
                model.generate(ids, logits_processor=[stop], max_new_tokens=3)
            assert "forward" not in vars(model)
            model.generate(ids, logits_processor=[stop], max_new_tokens=3)

    with pytest.raises(KeyError, match="stop"):
        fails()
    assert set(vars(model)) == attributes
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    with torch.no_grad():
        assert torch.equal(model(ids).logits, want)


def test_weights_are_packed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model, packed, once = half(), [], 0
    pack = kvlab.engine.weights.pack
    monkeypatch.setattr(kvlab.engine.weights, "pack", lambda weight: packed.append(1) or pack(weight))
    with kvlab.accelerate(model):
        for rows in (1, 3, 3, 2):
            assert model.generate(prompt(rows, 4), max_new_tokens=2, **GREEDY).shape == (rows, 6)
            once = once or len(packed)
    assert len(packed) == once >= 2 * 4 + 1


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"num_beams": 2}, NotImplementedError, "num_beams=2: a decoder cannot move its rows"),
        (
            {"prompt_lookup_num_tokens": 3},
            NotImplementedError,
            "prompt_lookup_num_tokens=3: .*take tokens back",
        ),
        ({"output_attentions": True}, NotImplementedError, "output_attentions=True"),
        ({"output_hidden_states": True}, NotImplementedError, "output_hidden_states=True"),
        ({"guidance_scale": 2.0}, NotImplementedError, "guidance_scale=2.0"),
        ({"prefill_chunk_size": 2}, NotImplementedError, "prefill_chunk_size=2"),
        ({"cache_implementation": "static"}, NotImplementedError, "cache_implementation='static'"),
        ({"use_cache": False}, NotImplementedError, "use_cache=False"),
        ({"generation_config": GenerationConfig(num_beams=3)}, NotImplementedError, "num_beams=3"),
        (
            {"past_key_values": transformers.DynamicCache()},
            TypeError,
            "DynamicCache; inside kvlab.accelerate",
        ),
        ({"attention_mask": torch.tensor([[1, 1, 0]])}, ValueError, "pad on the left"),
        ({"attention_mask": torch.tensor([[0, 0, 0]])}, ValueError, "pad on the left"),
        ({"position_ids": torch.tensor([[4, 5, 6]])}, ValueError, "position_ids must count"),
        ({"max_new_tokens": 200}, ValueError, "max_seqlen=20: a row would have 21 tokens.*up to 64"),
    ],
)
def test_settings_that_are_refused(options: dict[str, Any], error: type[Exception], message: str) -> None:
    model, ids = half(), prompt(1, 3)
    with kvlab.accelerate(model, max_seqlen=20):
        want = model.generate(ids, max_new_tokens=4, **GREEDY)
        with pytest.raises(error, match=message):
            model.generate(ids, **{"max_new_tokens": 4, **options})
        assert torch.equal(model.generate(ids, max_new_tokens=4, **GREEDY), want)


def test_a_text_that_will_be_too_long_is_refused_before_its_first_token(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Refused at the limit, all that was generated would be lost; a text that may stop is not refused."""
    (ids, mask), read = padded([3, 8]), kvlab.engine.Decoder.prefill
    counted: list[int] = []
    monkeypatch.setattr(
        kvlab.engine.Decoder, "prefill", lambda self, rows: counted.append(1) or read(self, rows)
    )
    with kvlab.accelerate(half(), max_seqlen=20) as model:
        fits = model.generate(ids, attention_mask=mask, max_new_tokens=13, **GREEDY)
        assert fits.shape == (2, 21)
        counted.clear()
        config = GenerationConfig(max_new_tokens=14)
        for options in ({"max_new_tokens": 14}, {"generation_config": config}):
            with pytest.raises(ValueError, match="max_seqlen=20: a row would have 21 tokens"):
                model.generate(ids, attention_mask=mask, **GREEDY, **options)
        assert not counted
        stop = int(fits[1, 9])
        stopped = model.generate(ids[1:], **{**GREEDY, "eos_token_id": stop}, max_new_tokens=200)
        assert stopped[0, -1] == stop


@pytest.mark.parametrize("ids", [[5, 3, 8], [[5, 3, 8]], np.array([[5, 3, 8]])])
def test_token_numbers_that_are_no_tensor_are_refused(ids: Any) -> None:
    with kvlab.accelerate(half(), max_seqlen=32) as model:
        for call in (lambda: model.generate(ids), lambda: model.generate(input_ids=ids)):
            with pytest.raises(
                TypeError, match=r"^input(s|_ids) is a (list|ndarray); .* tensor .*\(\[ids\]\)"
            ):
                call()


def test_a_text_longer_than_the_model_takes() -> None:
    model = half()
    with kvlab.accelerate(model), pytest.raises(ValueError, match="102 tokens; the model takes no more"):
        model.generate(prompt(1, 3), max_new_tokens=100, **GREEDY)


def test_blocks_do_not_nest() -> None:
    model = half()
    with kvlab.accelerate(model), kvlab.accelerate(model), pytest.raises(TypeError, match="do not nest"):
        model.generate(prompt(1, 3), max_new_tokens=2, **GREEDY)


def test_rows_assistants_embeddings_and_strange_calls_are_refused() -> None:
    model, ids = half(), prompt(1, 3)
    with kvlab.accelerate(model):
        with pytest.raises(NotImplementedError, match="17 rows: a decoder has 1 to 16"):
            model.generate(prompt(17, 3), max_new_tokens=2, **GREEDY)
        with pytest.raises(NotImplementedError, match="assistant_model=LlamaForCausalLM"):
            model.generate(ids, assistant_model=half(), max_new_tokens=2)
        with pytest.raises(NotImplementedError, match="inputs_embeds"):
            model.generate(inputs_embeds=model.get_input_embeddings()(ids), max_new_tokens=2, **GREEDY)
        cache = logits_of(model, ids, max_new_tokens=3)[2]
        with torch.no_grad(), pytest.raises(NotImplementedError, match="lie in a Decoder"):
            model(ids, past_key_values=cache)
        with pytest.raises(NotImplementedError, match="lie in a Decoder"):
            cache.crop(-1)
        mask = torch.tensor([[0, 1, 1, 1, 1, 1]])
        with pytest.raises(ValueError, match="the old ones differ"):
            model.generate(
                prompt(1, 6), attention_mask=mask, past_key_values=cache, max_new_tokens=1, **GREEDY
            )
        assert repr(cache) == "DecoderCache: 1 rows, 5 columns"
    with kvlab.accelerate(model), pytest.raises(TypeError, match="in the same block"):
        model.generate(prompt(1, 6), past_key_values=cache, max_new_tokens=1, **GREEDY)


def adapted() -> Any:
    class Adapter(torch.nn.Linear):
        pass

    model = half()
    model.model.layers[0].self_attn.q_proj.__class__ = Adapter
    return model


def gpt2() -> Any:
    config = transformers.GPT2Config(n_layer=1, n_embd=64, n_head=2, vocab_size=8)
    return transformers.GPT2LMHeadModel(config)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: None, TypeError, "NoneType"),
        (lambda: half().model, TypeError, "LlamaModel"),
        (lambda: family("llama"), NotImplementedError, "weights are float32: .*torch.float16"),
        (lambda: half().train(), ValueError, "model.eval"),
        (adapted, NotImplementedError, "model.layers.0.self_attn.q_proj is a .*Adapter"),
        (lambda: llama(num_attention_heads=8, num_key_value_heads=8), ValueError, "head_dim=16"),
        (
            gpt2,
            NotImplementedError,
            "model_type='gpt2' is not supported; gpt_neox, llama",
        ),
    ],
)  # fmt: skip
def test_models_that_are_refused(make: Callable[[], Any], error: type[Exception], message: str) -> None:
    model = make()
    with pytest.raises(error, match=message), kvlab.accelerate(model):
        pass
    assert model is None or "generate" not in vars(model)


@pytest.mark.parametrize("wrong", [0, 97, 1.5, "long", [4]])
def test_a_wrong_max_seqlen_is_refused(wrong: Any) -> None:
    with (
        pytest.raises((ValueError, TypeError), match="max_seqlen"),
        kvlab.accelerate(half(), max_seqlen=wrong),
    ):
        pass
    assert module.accelerate is kvlab.accelerate

"""`Decoder` as its users call it: rows, lengths, sampling, stops, budgets, errors."""

from __future__ import annotations

import re
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from kvlab.engine import Decoder
from kvlab.engine.geometry import PUBLISHED, Geometry, published
from kvlab.engine.ids import stop_tokens
from kvlab.engine.sampling import Sampling
from kvlab.engine.weights import Weights, draw, from_model
from kvlab.errors import BudgetError, FormatError
from kvlab.ladder import BITS_IN_BLOCKS, BITS_OF_WIDTHS
from tests.engine.models import LLAMA, family, llama, neox

DYNAMIC = {"rope_type": "dynamic", "rope_theta": 100.0, "factor": 2.0}
LONGROPE = {"rope_type": "longrope", "rope_theta": 100.0, "factor": 2.0, "short_factor": [1.0] * 16,
            "long_factor": [2.0] * 16, "original_max_position_embeddings": 16}  # fmt: skip
SMALL = Geometry(2, 97, 64, 2, 1, 32, 32, 96, max_positions=200)


def small(**options: Any) -> Decoder:
    return Decoder(draw(SMALL, 1e4, 1, "float16"), **options)


def prompt(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, SMALL.vocabulary, length).tolist()


def test_a_prompt_in_parts_is_the_prompt() -> None:
    tokens, whole = prompt(100), small()
    want = whole.prefill(tokens)
    parts = small()
    parts.prefill(tokens[:70])
    parts.prefill(tokens[70:99])
    got = parts.step(tokens[99:])
    assert np.abs(got - want).max() <= 1e-4 * np.abs(want).max()
    assert parts.lengths.tolist() == [100]
    assert np.abs(parts.hidden - whole.hidden).max() <= 1e-4 * np.abs(whole.hidden).max()


def test_logits_on_a_gpu_are_of_decoders_there() -> None:
    with pytest.raises(ValueError, match="device='cpu': logits of this decoder are arrays of NumPy"):
        small().prefill_tensor([1])


def test_rows_of_a_ragged_batch_are_those_alone() -> None:
    """Tokens of the shorter rows stand at their own positions, and logits are the row's own."""
    rows = [prompt(3, 1), prompt(80, 2), prompt(17, 3)]
    together = small(batch=3)
    got = [together.prefill(rows)]
    got += [together.step([5, 6, 7]), together.step(np.array([8, 9, 10]))]
    for i, row in enumerate(rows):
        alone = small()
        want = [alone.prefill(row), alone.step([5 + i]), alone.step(torch.tensor([8 + i]))]
        for a, b in zip(got, want, strict=True):
            assert np.abs(a[i] - b[0]).max() <= 1e-4 * np.abs(b).max()
    assert together.lengths.tolist() == [5, 82, 19]
    assert together.generate(rows, 6) == [small().generate(row, 6) for row in rows]


def test_products_do_not_depend_on_the_batch() -> None:
    """A first token attends itself alone, so nothing of it is summed in another order."""
    alone, together = small(), small(batch=3)
    assert np.array_equal(alone.prefill([7]), together.prefill([[7], [8], [9]])[:1])


def test_the_same_input_gives_the_same_bits() -> None:
    first, second = small(), small()
    assert np.array_equal(first.prefill(prompt(50)), second.prefill(prompt(50)))
    first.reset()
    assert np.array_equal(first.prefill(prompt(9)), small().prefill(prompt(9)))


def test_stops_end_rows_one_by_one() -> None:
    rows = [prompt(4, 1), prompt(6, 2)]
    free = small(batch=2).generate(rows, 12)
    stop = free[0][4]
    ended = small(batch=2).generate(rows, 12, stop=[stop])
    assert ended[0] == free[0][: free[0].index(stop) + 1]
    assert ended[1] == (free[1][: free[1].index(stop) + 1] if stop in free[1] else free[1])
    assert small().generate(rows[0], 12, stop=stop) == ended[0]
    assert small().generate(rows[0], 0) == []


def test_a_stream_goes_on_where_it_ended() -> None:
    whole, parts = small().generate(prompt(5), 9), small()
    parts.prefill(prompt(5))
    first = [tokens[0] for tokens in parts.stream(4)]
    parts.prefill(first[-1:])
    assert first + [tokens[0] for tokens in parts.stream(5)] == whole


def test_a_stream_left_half_way_ends() -> None:
    whole, decoder = small().generate(prompt(5), 9), small()
    decoder.prefill(prompt(5))
    left = decoder.stream(9)
    first = [next(left)[0] for _ in range(4)]
    assert decoder.lengths.tolist() == [8]
    decoder.prefill(first[-1:])
    assert first + [tokens[0] for tokens in decoder.stream(5)] == whole
    want = decoder.hidden
    with pytest.raises(RuntimeError, match=r"this stream has ended: .* call stream again"):
        next(left)
    assert np.array_equal(decoder.hidden, want)
    decoder.reset()
    decoder.prefill(prompt(5))
    for i, tokens in enumerate(decoder.stream(3)):
        if i == 2:  # the last one
            decoder.prefill(tokens)


@pytest.mark.parametrize("stop", [np.int64(3), np.array(3), torch.tensor(3), [3], torch.tensor([3]), {3}])
def test_stop_tokens_of_any_kind(stop: Any) -> None:
    assert stop_tokens(stop, SMALL.vocabulary) == {3}


def test_tokens_in_a_list_of_tensors() -> None:
    want = small().prefill([1, 2])
    assert np.array_equal(small().prefill([torch.tensor(1), torch.tensor(2)]), want)


def test_a_call_of_generate_that_is_refused_changes_nothing() -> None:
    decoder = small()
    decoder.prefill(prompt(5))
    for ids, new, options in (
        ([97], 3, {}), (prompt(190), 12, {}), ([1], -1, {}), ([1], 3, {"temperature": -1}),
        ([1], 3, {"stop": 97}),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=r"token|temperature|stop"):
            decoder.generate(ids, new, **options)
    assert decoder.lengths.tolist() == [5]


def test_the_smallest_temperature_takes_the_likeliest() -> None:
    assert small().generate(prompt(6), 9, temperature=5e-324) == small().generate(prompt(6), 9)


def test_draws_depend_on_the_seed_and_the_row_alone() -> None:
    options = {"temperature": 1.5, "top_k": 20, "top_p": 0.9}
    row = prompt(6)
    first = small().generate(row, 20, seed=3, **options)
    assert small().generate(row, 20, seed=3, **options) == first
    assert small().generate(row, 20, seed=4, **options) != first
    assert small(batch=2).generate([row, prompt(9, 5)], 20, seed=3, **options)[0] == first
    assert small().generate(row, 20, temperature=1e-6) == small().generate(row, 20)
    assert small().generate(row, 20, temperature=2.0, top_k=1) == small().generate(row, 20)


def test_draws_are_distributed_as_asked() -> None:
    p = np.array([0.5, 0.25, 0.15, 0.06, 0.04])
    logits = np.log(p).astype(np.float32)[None].repeat(4000, 0)
    for sampling, kept in (
        (Sampling(temperature=1.0), 5),
        (Sampling(temperature=1.0, top_k=3), 3),
        (Sampling(temperature=1.0, top_p=0.7), 2),
        (Sampling(temperature=1.0, top_k=4, top_p=0.9), 3),
        (Sampling(temperature=1.0, top_p=0.0), 1),
    ):
        drawn = sampling.choose(logits, np.arange(4000))
        want = p[:kept] / p[:kept].sum()
        assert np.abs(np.bincount(drawn, minlength=5) / 4000 - np.pad(want, (0, 5 - kept))).max() < 0.03
    sharp = Sampling(temperature=0.5).choose(logits, np.arange(4000))
    assert abs((sharp == 0).mean() - 0.25 / np.square(p).sum()) < 0.03


def test_a_budget_holds_and_costs_little() -> None:
    tokens = prompt(150)
    exact, packed = small(), small(cache_budget=0.6)
    want, got = exact.prefill(tokens), packed.prefill(tokens)
    assert packed.cache.nbytes <= 0.6 * 200 * 2 * 2 * 32 * 2 < exact.cache.nbytes / 0.7
    assert 0 < np.abs(got - want).max() < 0.3 * np.abs(want).max()


HEADS_OF_64 = Geometry(1, 97, 64, 2, 1, 64, 64, 96, max_positions=1024)


@pytest.mark.parametrize(
    ("max_seqlen", "budget", "bits"),
    [(1024, 0.3, BITS_IN_BLOCKS), (330, 0.3, BITS_IN_BLOCKS), (300, 0.3, BITS_OF_WIDTHS),
     (64, "64KiB", BITS_IN_BLOCKS), (64, "16KiB", BITS_OF_WIDTHS)],
)  # fmt: skip
def test_profiles_are_for_rows_whose_first_tokens_can_wait(max_seqlen: int, budget: Any, bits: Any) -> None:
    """96 tokens of 256 bytes: a frame of fewer tokens, in a short text, cost 7 to 90 times the divergence."""
    decoder = Decoder(draw(HEADS_OF_64, 1e4, 1, "float16"), max_seqlen=max_seqlen, cache_budget=budget)
    assert decoder.cache is not None
    assert decoder.cache.bits == bits


def test_options_of_the_cache_reach_it() -> None:
    given = {"bits": (2, 4), "recent": 8, "floor": 0.0, "sink": 2}
    cache = small(cache_budget=0.5, **given).cache
    assert cache is not None
    assert {name: getattr(cache, name) for name in given} == given


def test_a_model_keeps_its_weights_and_a_folder_is_read(tmp_path: Any) -> None:
    model = family("llama-scaled-tied")
    model.save_pretrained(tmp_path)
    of_folder = Decoder.from_pretrained(tmp_path, dtype="float16")
    of_model = Decoder.from_pretrained(model)
    assert np.array_equal(of_folder.prefill([1, 2, 3]), of_model.prefill([1, 2, 3]))
    assert all(not p.is_meta for p in model.parameters())


@pytest.mark.parametrize("make", [llama, neox])
def test_packing_takes_the_memory_of_a_layer(make: Callable[..., Any]) -> None:
    """Beside the model: a packed layer and a few rows; products that were packed are gone from the model."""
    model = make(num_hidden_layers=4, hidden_size=768, intermediate_size=3072, num_key_value_heads=4)
    weights = from_model(model, consume=True)
    nbytes = 2 * sum(rows * columns for rows, columns in weights.geometry.products().values())
    tracemalloc.start()
    try:
        while next(weights.layers, None) is not None:  # a layer is gone before the next one is packed
            assert tracemalloc.get_traced_memory()[1] < 1.2 * nbytes
    finally:
        tracemalloc.stop()
    assert all(parameter.is_meta for layer in model.base_model.layers for parameter in layer.parameters())


def test_known_sizes_are_those_of_transformers() -> None:
    import transformers

    for name in ("pythia-160m", "llama-3.2-1b", "qwen3-0.6b"):
        geometry, _ = published(name)
        sizes = {"hidden_size": geometry.hidden, "num_hidden_layers": 1, "vocab_size": 16,
                 "num_attention_heads": geometry.heads_q, "intermediate_size": geometry.ffn}  # fmt: skip
        with torch.device("meta"):
            if geometry.layer_norm:
                model: Any = transformers.GPTNeoXForCausalLM(transformers.GPTNeoXConfig(**sizes))
            else:
                sizes |= {"num_key_value_heads": geometry.heads_kv, "head_dim": geometry.head_dim}
                kind = "Qwen3" if geometry.head_norms else "Llama"
                config = getattr(transformers, f"{kind}Config")(**sizes)
                model = getattr(transformers, f"{kind}ForCausalLM")(config)
        products = sum(p.numel() for n, p in model.base_model.layers.named_parameters() if p.dim() == 2)
        assert products == sum(rows * columns for rows, columns in geometry.products().values())
    assert round(published("pythia-2.8b")[0].parameters / 1e9, 2) == 2.65
    assert all(geometry.parameters > 0 for geometry, _ in PUBLISHED.values())


def test_weights_of_a_seed() -> None:
    def bits(weights: Weights) -> Any:
        return next(weights.layers).products[0].packed.view(np.uint16)

    first = bits(draw(SMALL, 1e4, 1, "float16"))
    assert np.array_equal(first, bits(draw(SMALL, 1e4, 1, "float16")))
    assert not np.array_equal(first, bits(draw(SMALL, 1e4, 2, "float16")))
    decoder = Decoder.from_config("pythia-14m", layers=1, dtype="bfloat16", max_seqlen=8)
    assert np.isfinite(decoder.prefill([1, 2, 3])).all()


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda: small(batch=17),
            ValueError,
            "batch=17: a decoder has 1 to 16 rows; decode more of them 16 at a",
        ),
        (
            lambda: small(max_seqlen=201),
            ValueError,
            "max_seqlen=201: .* 1 to 200 tokens .* take max_seqlen=200",
        ),
        (lambda: small(max_seqlen=0), ValueError, "max_seqlen=0: .* 1 to 200 tokens"),
        (lambda: Decoder("a folder"), TypeError, r"weights is a str; .* Decoder.from_pretrained"),  # type: ignore[arg-type]
        (lambda: small(device="tpu"), ValueError, "device='tpu'"),
        (lambda: small(cache_budget="x"), ValueError, "^cache_budget='x'"),
        (lambda: small(cache_budget=[1]), TypeError, r"^cache_budget=\[1\]"),
        (lambda: small(cache_budget="1B"), BudgetError, "^cache_budget='1B'"),
        (lambda: small(cache_budget=0.4, bits=7), ValueError, "7"),
        (lambda: small(cache_budget=0.4, recent=-1), ValueError, "recent=-1"),
        (lambda: small(plan="fast"), ValueError, "plan='fast'.*ops"),
        (lambda: small(plan="ops"), NotImplementedError, "plan='ops'.* device='cuda'"),
        (lambda: small(bits=4), ValueError, "bits=4 .* without cache_budget"),
        (lambda: small(floor=0.5), ValueError, "floor=0.5 .* without cache_budget"),
        (lambda: small(max_cache_len=9), TypeError, "max_cache_len=9 .* max_seqlen is meant"),
        (lambda: Decoder.from_config("pythia-14m", batches=2), TypeError, "batches=2 .* batch is meant"),
        (lambda: small().prefill([]), ValueError, "at least one token"),
        (lambda: small().prefill([[1], [2]]), ValueError, "2 rows, the decoder has batch=1"),
        (lambda: small().prefill("text"), TypeError, r"ids is a str.*tokenizer\(text\)\['input_ids'\]"),
        (lambda: small().prefill({"input_ids": [1]}), TypeError, "ids is a dict"),
        (lambda: small().prefill(None), TypeError, r"ids is a NoneType; pass a list .* \[5, 3\]"),
        (lambda: small().prefill(5), TypeError, "ids is a int; pass a list"),
        (lambda: small().prefill(np.array(5)), TypeError, "ids is a ndarray; pass a list"),
        (lambda: small().prefill({5, 3}), TypeError, "ids is a set; pass a list"),
        (lambda: small().prefill(["a"]), TypeError, "whole numbers"),
        (lambda: small().prefill([1, [2]]), ValueError, "whose parts differ in length"),
        (lambda: small(batch=2).step([[1], [2, 3]]), ValueError, "whose parts differ in length"),
        (lambda: small().step(None), TypeError, "whole numbers"),
        (lambda: small(batch=2).step([[1, 2]]), ValueError, r"shape \(1, 2\), the decoder has batch=2"),
        (lambda: small().step([1, 2]), ValueError, "step takes one token"),
        (lambda: small(batch=2).step(1), ValueError, "step takes one token"),
        (lambda: small().generate([1], 3, topk=5), TypeError, "topk=5 .* Decoder.generate, top_k is meant"),
        (lambda: small().generate([1], 3, eos_token_id=5), TypeError, "eos_token_id=5 .* stop is meant"),
        (lambda: small().generate([1], 3, do_sample=True), TypeError, "a temperature above 0 draws"),
        (lambda: small().generate([1], 3, stop=None), TypeError, "stop=None"),
        (lambda: small().generate([1], 3, stop=1.5), TypeError, "stop=1.5"),
        (lambda: small().generate([1], 3, stop=97), ValueError, "stop=97 must lie between 0 and 96"),
        (lambda: small().prefill([97]), ValueError, "tokens 0 to 96"),
        (lambda: small().prefill([-1]), ValueError, "tokens 0 to 96"),
        (lambda: small().prefill([0.5]), TypeError, "whole numbers"),
        (lambda: small().prefill(prompt(201)), ValueError, "would have 201 tokens"),
        (
            lambda: small().generate(prompt(190), 12),
            ValueError,
            "201 tokens, 190 held and 11 new; the model takes",
        ),
        (
            lambda: small(max_seqlen=50).prefill(prompt(51)),
            ValueError,
            "51 tokens, 0 held and 51 new; .* max_seqlen, up to 200",
        ),
        (lambda: next(small().stream(3)), ValueError, "call prefill"),
        (lambda: small().generate([1], 3, temperature=-1), ValueError, "temperature"),
        (lambda: small().generate([1], 3, top_p=1.5), ValueError, "top_p"),
        (
            lambda: small().generate([1], 3, temperature=1, seed=1 << 64),
            ValueError,
            "seed=18446744073709551616",
        ),
        (lambda: Decoder.from_config("pythia-3b"), ValueError, "pythia-2.8b"),
        (lambda: Decoder.from_config("pythia-14m", dtype="float32"), ValueError, "float16"),
        (lambda: Decoder.from_pretrained("/nowhere/at/all"), OSError, "nowhere.* nothing is downloaded"),
        (lambda: Decoder.from_pretrained("nobody/has-it"), OSError, "'hf download NAME' first"),
        (lambda: Decoder.from_pretrained("pythia-14m"), OSError, "which Decoder.from_config draws"),
        (
            lambda: Decoder.from_config("EleutherAI/pythia-14m"),
            ValueError,
            "Decoder.from_pretrained reads a folder",
        ),
        (lambda: Decoder.from_pretrained(None), TypeError, "model_or_path=None must be a model"),
        (
            lambda: Decoder.from_pretrained(llama().to("meta")),
            ValueError,
            "on the device 'meta'.* load its weights",
        ),
        (lambda: Decoder.from_pretrained(neox(hidden_act="gelu_new")), NotImplementedError, "gelu_new"),
        (lambda: Decoder.from_pretrained(neox(hidden_size=80)), ValueError, "head_dim=20"),
        (lambda: Decoder.from_pretrained(llama(rope_parameters=DYNAMIC)), NotImplementedError, "dynamic"),
        (lambda: Decoder.from_pretrained(llama(rope_parameters=LONGROPE)), NotImplementedError, "longrope"),
    ],
)
def test_what_is_refused(call: Callable[[], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize("options", [{"max_seqlen": 100}, {"max_seqlen": 40, "batch": 3}])
@pytest.mark.parametrize("budget", [0.1, "20%", "2bpe", "7KiB"])
def test_a_budget_that_is_too_small_says_what_would_do(budget: Any, options: dict[str, int]) -> None:
    with pytest.raises(BudgetError, match=r"^cache_budget=.*Raise cache_budget") as refused:
        small(cache_budget=budget, bits=(4, 8), **options)
    said = str(refused.value)
    assert "plan_length" not in said
    assert "width 0: tokens may be evicted" in said
    share = re.search(r"bytes even at the lowest widths, ([\d.]+) of what 16 bits take", said)
    assert share
    small(cache_budget=float(share[1]), bits=(4, 8), **options)
    small(cache_budget=f"{refused.value.needed_bytes}B", bits=(4, 8), **options)
    with pytest.raises(BudgetError):
        small(cache_budget=float(share[1]) - 0.002, bits=(4, 8), **options)
    shorter = re.search(r"max_seqlen=(\d+)$", said)
    assert bool(shorter) == (budget == "7KiB")
    if shorter:
        small(cache_budget=budget, bits=(4, 8), **{**options, "max_seqlen": int(shorter[1])})


def test_other_models_are_refused_by_name() -> None:
    import transformers

    gpt2 = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=1, n_embd=64, n_head=2, vocab_size=8))
    with pytest.raises(NotImplementedError, match="gpt2"):
        Decoder.from_pretrained(gpt2)

    class Adapter(torch.nn.Linear):
        pass

    adapted = llama()
    adapted.model.layers[1].mlp.up_proj.__class__ = Adapter
    with pytest.raises(NotImplementedError, match=r"model.layers.1.mlp.up_proj is a .*Adapter, .* merge"):
        Decoder.from_pretrained(adapted)
    large = llama()
    with torch.no_grad():
        large.lm_head.weight[0, 0] = 1e6
    with pytest.raises(ValueError, match=r"lm_head.weight has weights beyond its range; .*bfloat16"):
        Decoder.from_pretrained(large, dtype="float16")
    with torch.no_grad():
        large.lm_head.weight[0, 0] = torch.inf
    with pytest.raises(FormatError, match=r"^lm_head.weight is damaged: 1 of its \d+ numbers are NaN or inf"):
        Decoder.from_pretrained(large, dtype="float16")


def test_a_sliding_window_is_read_as_a_whole_and_no_further() -> None:
    import transformers

    torch.manual_seed(0)
    model = transformers.MistralForCausalLM(transformers.MistralConfig(**LLAMA, sliding_window=8)).eval()
    ids = np.arange(9) + 1
    decoder = Decoder.from_pretrained(model)
    got = decoder.prefill(ids[:8])[0]
    with torch.no_grad():
        want = model(torch.from_numpy(ids[None, :8])).logits[0, -1].numpy()
        model.config.sliding_window = 3  # is seen
        narrow = model(torch.from_numpy(ids[None, :8])).logits[0, -1].numpy()
    size = np.abs(want).max()
    assert np.abs(got - want).max() < 5e-3 * size < np.abs(narrow - want).max()
    with pytest.raises(ValueError, match="max_seqlen=8: a row would have 9 tokens"):
        decoder.step([1])
    with pytest.raises(ValueError, match="max_seqlen=9"):
        Decoder.from_pretrained(model, max_seqlen=9)


def test_values_within_layers_are_those_behind_them() -> None:
    decoder = small()
    values, outputs = decoder.layer_values(prompt(70)), decoder.layer_outputs(prompt(70))
    for layer, out in enumerate(outputs):
        assert np.array_equal(values[f"{layer}.out"], out)
        assert values[f"{layer}.k_rotated"].shape == (70, SMALL.heads_kv, SMALL.head_dim)
    assert decoder.lengths.tolist() == [0]
    with pytest.raises(ValueError, match="batch=2: layer_values"):
        small(batch=2).layer_values(prompt(3))


def test_a_failed_prefill_changes_nothing() -> None:
    decoder = small()
    want = decoder.prefill(prompt(5))
    for wrong in ([97], prompt(300)):
        with pytest.raises(ValueError, match="tokens"):
            decoder.prefill(wrong)
    assert decoder.lengths.tolist() == [5]
    assert np.array_equal(decoder._executor.logits, want)

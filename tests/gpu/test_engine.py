"""The decoder on a GPU: pieces of a layer against float64, long contexts against the CPU, the same bits."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from kvlab.device import compute_capability
from kvlab.engine import Decoder
from kvlab.engine.geometry import Geometry, published
from kvlab.engine.gpu import GpuExecutor, settings_of
from kvlab.engine.gpu_packed import PackedGpuExecutor
from kvlab.engine.operations import Operations
from kvlab.engine.packing import unpack
from kvlab.engine.sampling import Sampling
from kvlab.engine.weights import draw
from kvlab.errors import BudgetError
from kvlab.jit.launch import PreparedLaunch
from kvlab.ladder import BITS, Bits
from kvlab.reference.decoder import KeysValues, token_logits
from tests.engine.unpacked import oracle_of

pytestmark = pytest.mark.skipif(compute_capability(0) != (9, 0), reason="the kernel is for 9.0 alone")

PIECES = {
    "parallel-80": Geometry(
        2, 131, 160, 2, 2, 80, 20, 192, parallel=True, layer_norm=True, gated=False, max_positions=1024
    ),
    "sequential": Geometry(2, 131, 128, 4, 4, 32, 16, 160, layer_norm=True, gated=False, max_positions=1024),
    "gated-group-4": Geometry(2, 131, 128, 8, 2, 64, 64, 96, max_positions=1024),
    "group-7": Geometry(2, 131, 448, 7, 1, 64, 64, 96, max_positions=1024),
    "head-256": Geometry(2, 131, 128, 2, 1, 256, 64, 96, max_positions=1024),
    "head-norms": Geometry(2, 131, 128, 4, 2, 128, 128, 96, head_norms=True, eps=1e-6, max_positions=1024),
    "head-96": Geometry(2, 131, 96, 3, 3, 96, 96, 96, max_positions=1024),
}
WIDTHS = {
    (name, batch): dataclasses.replace(published(name)[0], layers=1, vocabulary=4096, max_positions=64)
    for name, batch in (("pythia-2.8b", 1), ("pythia-2.8b", 8), ("llama-3.2-1b", 1), ("llama-3.2-1b", 16),
                        ("llama-3.1-8b", 1), ("qwen3-0.6b", 2))
}  # fmt: skip


def decoder(geometry: Geometry, device: str, dtype: str = "float16", **options: Any) -> Decoder:
    return Decoder(draw(geometry, 1e4, 1, dtype), device=device, **options)


def texts(geometry: Geometry, *lengths: int) -> list[list[int]]:
    rng = np.random.default_rng(7)
    return [rng.integers(0, geometry.vocabulary, length).tolist() for length in lengths]


def of_oracle(geometry: Geometry, dtype: str, text: list[int]) -> list[NDArray[np.float64]]:
    """Logits behind every token of a text."""
    oracle = oracle_of(draw(geometry, 1e4, 1, dtype))
    past = [KeysValues() for _ in oracle.layers]
    return [token_logits(token, oracle, past) for token in text]


def assert_close(got: NDArray[Any], want: NDArray[Any], dtype: str, loose: float = 1.0) -> None:
    bound = (4e-3 if dtype == "float16" else 3e-2) * loose
    assert np.abs(got - want).max() <= bound * np.abs(want).max()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", PIECES)
def test_every_piece_is_that_of_the_oracle(name: str, dtype: str) -> None:
    """A prompt of more than one chunk, then token by token; both rows, of different lengths."""
    geometry = PIECES[name]
    rows = texts(geometry, 40, 23)
    on_gpu = decoder(geometry, "cuda", dtype, batch=2)
    got = [on_gpu.prefill([row[:-3] for row in rows])]
    got += [on_gpu.step([row[i] for row in rows]) for i in (-3, -2, -1)]
    for i, row in enumerate(rows):
        want = of_oracle(geometry, dtype, row)
        for have, expected in zip(got, want[-4:], strict=True):
            assert_close(have[i], expected, dtype)
            assert np.abs(have[i] - want[-5]).max() > 0.1 * np.abs(expected).max(), "a shift is not seen"
    assert on_gpu.lengths.tolist() == [40, 23]


@pytest.mark.parametrize("plan", ["ops", "operations in a graph"])
@pytest.mark.parametrize("name", PIECES)
def test_operations_give_the_bits_of_the_kernel(
    name: str, plan: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While all keys are new; behind others they are divided otherwise. In a graph, as on older GPUs, too."""
    geometry, rows = PIECES[name], texts(PIECES[name], 12, 5)
    whole = decoder(geometry, "cuda", batch=2)
    if plan == "ops":
        ops = decoder(geometry, "cuda", batch=2, plan="ops")
    else:
        monkeypatch.setattr("kvlab.engine.gpu.compute_capability", lambda _: (8, 0))
        ops = decoder(geometry, "cuda", batch=2)
    assert isinstance(ops._executor, GpuExecutor)
    assert isinstance(ops._executor._decode, Operations)
    logits = ops.prefill(rows)
    assert np.array_equal(logits, whole.prefill(rows))
    chosen = []
    for _ in range(20):
        chosen.append(logits.argmax(-1))
        logits = ops.step(chosen[-1])
    assert ops.generate(rows, 20) == np.array(chosen).T.tolist()
    longer = texts(geometry, 300, 77)
    for one in (ops, whole):
        one.reset()
    assert_close(ops.prefill(longer), whole.prefill(longer), "float16")
    assert_close(ops.step([1, 2]), whole.step([1, 2]), "float16")
    text = texts(geometry, 40)[0]
    alone = [decoder(geometry, "cuda", plan=one).layer_outputs(text) for one in ("ops", "graph")]
    for have, expected in zip(*alone, strict=True):
        assert_close(have, expected, "float16")


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", PIECES)
def test_values_within_layers_are_those_of_the_cpu(name: str, dtype: str) -> None:
    geometry, (text,) = PIECES[name], texts(PIECES[name], 37)
    exact = decoder(geometry, "cpu", dtype)
    have, want = decoder(geometry, "cuda", dtype, plan="ops").layer_values(text), exact.layer_values(text)
    other = exact.layer_values(text[::-1])
    assert list(have) == list(want)
    for value, expected in want.items():
        assert have[value].shape == expected.shape
        assert_close(have[value], expected, dtype)
        with pytest.raises(AssertionError):
            assert_close(other[value], expected, dtype)
    with pytest.raises(NotImplementedError, match="plan='ops'"):
        decoder(geometry, "cuda", dtype).layer_values(text)


@pytest.mark.parametrize("size", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("name", [name for name in PIECES if name != "head-norms"])
def test_operations_of_clusters(name: str, size: int) -> None:
    """Of every size within rounding of the kernel, with few keys and with many; the same bits again."""
    geometry, (text,) = PIECES[name], texts(PIECES[name], 900)
    whole, clusters = (decoder(geometry, "cuda", plan=plan) for plan in ("graph", f"cluster-{size}"))
    for length in (1, 9, 300, 900):
        for one in (whole, clusters):
            one.reset()
            if length > 1:
                one.prefill(text[: length - 1])
        for token in (text[length - 1], 3, 4):
            assert_close(clusters.step([token]), whole.step([token]), "float16")
    assert np.abs(clusters.step([5]) - whole.step([6])).max() > 0.1 * np.abs(whole.step([6])).max()
    found = clusters.generate(text[:20], 30)
    assert clusters.generate(text[:20], 30) == found


def test_what_clusters_do_not_have_is_refused() -> None:
    with pytest.raises(NotImplementedError, match="batch=2"):
        decoder(PIECES["head-96"], "cuda", batch=2, plan="cluster")
    with pytest.raises(NotImplementedError, match="head_norms=True"):
        decoder(PIECES["head-norms"], "cuda", plan="cluster")


@pytest.mark.parametrize(("name", "batch"), WIDTHS)
def test_operations_of_published_widths(name: str, batch: int) -> None:
    geometry = WIDTHS[name, batch]
    rows = texts(geometry, *range(7, 7 + batch))
    ops, whole = (decoder(geometry, "cuda", batch=batch, plan=plan) for plan in ("ops", "graph"))
    assert_close(ops.prefill(rows), whole.prefill(rows), "float16")
    assert_close(ops.step([5] * batch), whole.step([5] * batch), "float16")


@pytest.mark.parametrize(("name", "batch"), WIDTHS)
def test_published_widths_are_those_of_the_oracle(name: str, batch: int) -> None:
    geometry = WIDTHS[name, batch]
    text = texts(geometry, 6)[0]
    on_gpu = decoder(geometry, "cuda", batch=batch)
    got = [on_gpu.prefill([text[:4]] * batch), on_gpu.step([text[4]] * batch), on_gpu.step([text[5]] * batch)]
    for have, expected in zip(got, of_oracle(geometry, "float16", text)[-3:], strict=True):
        for row in have:
            assert_close(row, expected, "float16")
        assert (have == have[0]).all(), "rows of one text differ"


@pytest.mark.parametrize("name", ["parallel-80", "gated-group-4", "head-norms"])
def test_long_contexts_are_those_of_the_cpu(name: str) -> None:
    """Blocks have whole readers or parts, of one or of two rows; a prompt's tokens have fresh keys of 16."""
    geometry = PIECES[name]
    both = [decoder(geometry, device, batch=3) for device in ("cuda", "cpu")]
    for lengths in ((4, 70, 33), (100, 300, 900)):
        rows, found = texts(geometry, *lengths), []
        for one in both:
            one.reset()
            found.append([one.prefill([row[:-1] for row in rows]), one.step([row[-1] for row in rows])])
        for have, expected in zip(*found, strict=True):
            assert_close(have, expected, "float16")


@pytest.mark.parametrize("name", ["parallel-80", "gated-group-4"])
def test_texts_from_graphs_are_those_of_steps(name: str) -> None:
    geometry, rows = PIECES[name], texts(PIECES[name], 30, 9)
    on_gpu = decoder(geometry, "cuda", batch=2)
    found = on_gpu.generate(rows, 300)
    again = on_gpu.generate(rows, 300)
    assert found == again
    steps = decoder(geometry, "cuda", batch=2)
    logits = steps.prefill(rows)
    for i in range(300):
        chosen = logits.argmax(-1)
        assert chosen.tolist() == [row[i] for row in found]
        logits = steps.step(chosen)
    drawn = on_gpu.generate(rows, 20, temperature=1.0, top_p=0.9, seed=2)
    assert (
        drawn == on_gpu.generate(rows, 20, temperature=1.0, top_p=0.9, seed=2) != [row[:20] for row in found]
    )


SAMPLINGS = [
    Sampling(temperature=1.0), Sampling(temperature=0.7, top_k=40), Sampling(temperature=1.3, top_p=0.9),
    Sampling(temperature=0.9, top_k=1), Sampling(temperature=1e-6), Sampling(temperature=2.0, top_p=0.0),
    Sampling(temperature=1.0, top_k=300, top_p=0.5, seed=123456789), Sampling(temperature=1.0, top_k=10**6),
]  # fmt: skip


@pytest.mark.parametrize("blocks", [8, 1])
@pytest.mark.parametrize("vocabulary", [131, 50_304, 151_936])
def test_draws_are_those_of_the_host(vocabulary: int, blocks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The host's random number falls into the interval of the device's token, within rounding."""
    if blocks == 1:
        monkeypatch.setattr("kvlab.engine.kernels._DRAWING_BLOCKS", 1)
    geometry = dataclasses.replace(PIECES["head-96"], layers=1, vocabulary=vocabulary)
    on_gpu = decoder(geometry, "cuda", batch=16)
    executor: Any = on_gpu._executor
    token, cupy = executor._decode, executor._cupy
    rng = np.random.default_rng(3)
    logits = (3 * rng.standard_normal((16, vocabulary))).astype(np.float32)
    logits[3] = np.round(logits[3])  # many equals
    logits[4] = 1.0
    logits[5, rng.integers(vocabulary, size=vocabulary // 2)] = -np.inf
    same, rows = 0, np.arange(16)
    with executor._current():
        token.arrays["logits"][:, :vocabulary] = cupy.asarray(logits)
        for sampling in SAMPLINGS:
            for position in (1, 30):
                positions = position + rows
                token.set(positions=positions - 1)
                executor._settings.set(settings_of(sampling))
                executor._choices[True](executor._stream.ptr)
                executor._stream.synchronize()
                got = executor._history[positions, rows]
                assert np.array_equal(token.arrays["ids"].get(), got)
                assert np.array_equal(token.arrays["positions"].get(), positions)
                want = sampling.choose(logits, positions)
                same += int((got == want).sum())
                for row in np.flatnonzero(got != want):
                    assert_neighbours(logits[row], sampling, int(row), int(positions[row]), int(got[row]))
        assert same >= 0.95 * 16 * 2 * len(SAMPLINGS)


def assert_neighbours(
    logits: NDArray[Any], sampling: Sampling, row: int, position: int, token: int
) -> None:  # fmt: skip
    """A token whose interval is as good as that in which the random number lies."""
    scaled = logits.astype(float) / sampling.temperature
    order = np.argsort(-scaled, kind="stable")[: sampling.top_k or None]
    total = np.cumsum(np.exp(scaled[order] - scaled[order[0]]))
    total = total[: int(np.searchsorted(total, sampling.top_p * total[-1])) + 1]
    drawn = np.random.Generator(np.random.Philox(key=[sampling.seed, row], counter=position)).random()
    (at,) = np.flatnonzero(order == token)
    slack = 1e-4 * total[-1]
    assert at <= len(total), "a token that is not kept"
    end = total[min(at, len(total) - 1)]
    assert (total[at - 1] if at else 0) - slack <= drawn * total[-1] <= end + slack


def test_a_stream_that_ends_early_leaves_the_decoder_where_it_was_read() -> None:
    geometry, (row,) = PIECES["gated-group-4"], texts(PIECES["gated-group-4"], 20)
    whole = decoder(geometry, "cuda").generate(row, 12)
    parts = decoder(geometry, "cuda")
    parts.prefill(row)
    stream = parts.stream(12)
    first = [next(stream)[0] for _ in range(5)]
    stream.close()
    assert parts.lengths.tolist() == [24]
    parts.prefill([first[-1]])
    assert first + [tokens[0] for tokens in parts.stream(7)] == whole


def test_logits_are_those_of_what_was_read_while_the_device_is_ahead() -> None:
    geometry, (row,) = PIECES["gated-group-4"], texts(PIECES["gated-group-4"], 20)
    steps, on_gpu = decoder(geometry, "cuda"), decoder(geometry, "cuda")
    want = steps.prefill(row)
    on_gpu.prefill(row)
    executor = on_gpu._executor
    assert isinstance(executor, GpuExecutor)
    for i, (token,) in enumerate(on_gpu.stream(9)):
        assert token == want.argmax()
        if i in (0, 3, 4, 8):
            assert np.array_equal(executor.logits, want)
        want = steps.step(token)


def test_launches_have_the_same_bits_and_leave_counters_at_zero() -> None:
    geometry = WIDTHS["pythia-2.8b", 1]
    on_gpu, text = decoder(geometry, "cuda"), texts(geometry, 5)[0]
    first = on_gpu.prefill(text)
    for _ in range(20):
        on_gpu.reset()
        assert np.array_equal(on_gpu.prefill(text), first)
    executor = on_gpu._executor
    assert isinstance(executor, GpuExecutor)
    for token in (executor._decode, executor._prompt):
        for name in ("partials", "kv_parts", "barrier"):
            assert not token.arrays[name].any()


@pytest.mark.parametrize(
    ("name", "batch", "plan"),
    [("pythia-2.8b", 1, "graph"), ("pythia-2.8b", 8, "graph"), ("llama-3.2-1b", 16, "graph"),
     ("pythia-2.8b", 1, "cluster-8"), ("llama-3.1-8b", 1, "cluster-4")],
)  # fmt: skip
def test_a_thousand_replays_have_the_same_bits(name: str, batch: int, plan: str) -> None:
    geometry = WIDTHS[name, batch]
    on_gpu = decoder(geometry, "cuda", batch=batch, plan=plan)
    on_gpu.prefill(texts(geometry, *range(30, 30 + batch)))
    executor: Any = on_gpu._executor
    token, cupy = executor._decode, executor._cupy
    ids, positions, first, same = np.arange(batch), on_gpu.lengths, None, True
    with executor._stream:
        for _ in range(1000):
            executor._replay_given(ids, positions)
            bits = token.arrays["logits"].view(np.uint32)
            first = bits.copy() if first is None else first
            same = same & (bits == first).all()
        assert bool(same)
        executor._replay_given(ids + 1, positions)
        assert not bool((bits == first).all()), "other tokens are not seen"
    assert cupy.isfinite(token.arrays["logits"]).all()


def test_a_grid_that_is_not_on_the_device_as_a_whole_is_refused() -> None:
    """One that waits for blocks that cannot come would never end."""
    from cupy.cuda import driver

    executor: Any = decoder(PIECES["head-96"], "cuda")._executor
    launch = executor._decode._token
    larger = PreparedLaunch(
        launch.kernel, (2 * launch.grid[0],), launch.block, launch._argument, launch.shared_bytes,
        cooperative=True,
    )  # fmt: skip
    with pytest.raises(driver.CUDADriverError):
        larger(0)


# ---- prompts of many tokens


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", PIECES)
def test_a_long_prompt_is_that_of_the_oracle(name: str, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of different lengths in products, on top of tokens that are there, and a token behind them."""
    monkeypatch.setattr("kvlab.engine.gpu.LAYER_SECONDS", 0.0)
    geometry = PIECES[name]
    rows = texts(geometry, 180, 40)
    on_gpu = decoder(geometry, "cuda", dtype, batch=2)
    on_gpu.prefill([row[:5] for row in rows])
    got = [on_gpu.prefill([row[5:-1] for row in rows]), on_gpu.step([row[-1] for row in rows])]
    executor = on_gpu._executor
    assert isinstance(executor, GpuExecutor)
    assert executor._prompts is not None
    for i, row in enumerate(rows):
        want = of_oracle(geometry, dtype, row)
        for have, expected in zip(got, want[-2:], strict=True):
            assert_close(have[i], expected, dtype)
            assert np.abs(have[i] - want[-3]).max() > 0.1 * np.abs(expected).max(), "a shift is not seen"
    assert on_gpu.lengths.tolist() == [180, 40]


@pytest.mark.parametrize("name", ["parallel-80", "gated-group-4", "head-norms"])
def test_products_give_the_prompt_of_the_token_kernel(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    geometry, rows = PIECES[name], texts(PIECES[name], 500, 77, 130)
    found = []
    for seconds in (0.0, 1.0):
        monkeypatch.setattr("kvlab.engine.gpu.LAYER_SECONDS", seconds)
        monkeypatch.setattr("kvlab.engine.gpu.MAX_TOKENS", 3 * 100)  # five passes, of which rows have some
        on_gpu = decoder(geometry, "cuda", batch=3)
        found.append([on_gpu.prefill([row[:-1] for row in rows]), on_gpu.hidden])
        found[-1].append(on_gpu.step([row[-1] for row in rows]))
        again = decoder(geometry, "cuda", batch=3)
        assert np.array_equal(again.prefill([row[:-1] for row in rows]), found[-1][0])
    for have, expected in zip(*found, strict=True):
        assert_close(have, expected, "float16")


def test_unpacked_rows_are_those_that_were_packed() -> None:
    import torch

    geometry = WIDTHS["pythia-2.8b", 1]
    weights = draw(geometry, 1e4, 1, "float16")
    on_gpu = decoder(geometry, "cuda")
    executor = on_gpu._executor
    assert isinstance(executor, GpuExecutor)
    with executor._current():
        prompts = executor._model.prompts()
        for matrix, shape, packed in zip(
            prompts._layers[0].products,
            geometry.products().values(),
            next(weights.layers).products,
            strict=True,
        ):
            rows = prompts._unpacked(matrix)
            torch.cuda.synchronize()
            assert np.array_equal(rows.cpu().numpy(), unpack(packed.packed, shape[0]))


# ---- a packed cache


PACKED = [name for name in PIECES if PIECES[name].head_dim in (64, 80, 96, 128, 256)]
EXACT: dict[str, Any] = {"cache_budget": "1GiB", "bits": 16}
BUDGET: dict[str, Any] = {"cache_budget": 0.4, "bits": (2, 3, 4, 8)}


def packed_executor(one: Decoder) -> PackedGpuExecutor:
    assert isinstance(one._executor, PackedGpuExecutor)
    return one._executor


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", PACKED)
def test_pages_of_16_bits_are_the_oracle(name: str, dtype: str) -> None:
    """Prompts of different lengths, and steps of which the later ones are replayed."""
    geometry, rows = PIECES[name], texts(PIECES[name], 70, 53)
    on_gpu = decoder(geometry, "cuda", dtype, batch=2, **EXACT)
    got = [on_gpu.prefill([row[:-40] for row in rows])]
    got += [on_gpu.step([row[i] for row in rows]) for i in range(-40, 0)]
    assert any(packed_executor(on_gpu)._recorded.values()), "no step was replayed"
    for i, row in enumerate(rows):
        want = of_oracle(geometry, dtype, row)
        for have, expected in zip(got, want[-41:], strict=True):
            assert_close(have[i], expected, dtype)
        assert np.abs(got[-1][i] - want[-2]).max() > 0.1 * np.abs(want[-1]).max(), "a shift is not seen"
    assert on_gpu.lengths.tolist() == [70, 53]
    assert on_gpu.cache is not None
    assert on_gpu.cache.seqlen == 70


@pytest.mark.parametrize(
    ("name", "bits"),
    [("parallel-80", BUDGET["bits"]), ("gated-group-4", BUDGET["bits"]), ("gated-group-4", BITS),
     ("head-norms", BITS)],
)  # fmt: skip
def test_a_budget_on_a_gpu_is_that_of_the_cpu(name: str, bits: Bits) -> None:
    """The same cache: they differ by less than half of what its widths, or profiles, cost."""
    geometry, rows, budget = PIECES[name], texts(PIECES[name], 400, 390), {"cache_budget": 0.3, "bits": bits}

    def run(device: str, **options: Any) -> tuple[list[NDArray[np.float32]], Decoder]:
        one = decoder(geometry, device, batch=2, max_seqlen=512, **options)
        logits = [one.prefill([row[:60] for row in rows])]  # what the CPU takes at a time
        logits += [one.step([row[i] for row in rows]) for i in range(60, 390)]
        return logits[-100:], one

    (exact, _), (cpu, of_cpu), (gpu, of_gpu) = (
        run(device, **options) for device, options in (("cpu", {}), ("cpu", budget), ("cuda", budget))
    )
    cost, apart = (np.sqrt(np.mean(np.square(np.array(a) - np.array(cpu)))) for a in (exact, gpu))
    assert 0 < apart < 0.5 * cost, (apart, cost)
    for one in (of_cpu, of_gpu):
        assert one.cache is not None
        assert one.cache.budget_nbytes is not None
        assert one.cache.nbytes <= one.cache.budget_nbytes


@pytest.mark.parametrize(
    ("name", "bits"),
    [("parallel-80", BUDGET["bits"]), ("gated-group-4", BUDGET["bits"]), ("gated-group-4", BITS)],
)
def test_replayed_tokens_have_the_bits_of_launched_ones(name: str, bits: Bits) -> None:
    """Of the default ladder a row gets its frame, at 64 tokens, within the replays."""
    geometry, rows = PIECES[name], texts(PIECES[name], 90, 30)
    replayed, launched = (
        decoder(geometry, "cuda", batch=2, **{**BUDGET, "bits": bits}) for _ in range(2)
    )  # fmt: skip
    executor: Any = launched._executor
    executor._replay_on_torch = executor._step
    for one in (replayed, launched):
        one.prefill(rows)
    for i in range(100):
        ids = [i % geometry.vocabulary, 3 * i % geometry.vocabulary]
        assert np.array_equal(replayed.step(ids), launched.step(ids)), i
    assert len([graph for graph in packed_executor(replayed)._recorded.values() if graph]) >= 2
    for name in ("partials", "barrier"):
        assert not packed_executor(replayed)._decode.arrays[name].any()


def test_texts_from_a_packed_cache() -> None:
    """A text in one stream, in two, again, and after a reset; drawn ones, too."""
    geometry, rows = PIECES["gated-group-4"], texts(PIECES["gated-group-4"], 30, 9)
    whole = decoder(geometry, "cuda", batch=2, **BUDGET)
    found = whole.generate(rows, 80)
    assert whole.generate(rows, 80) == found
    parts = decoder(geometry, "cuda", batch=2, **BUDGET)
    parts.prefill(rows)
    stream = parts.stream(80)
    first = [next(stream) for _ in range(5)]
    stream.close()
    assert parts.lengths.tolist() == [34, 13]
    parts.step([tokens[-1] for tokens in zip(*first, strict=True)])
    rest = [*first, *parts.stream(75)]
    assert [list(row) for row in zip(*rest, strict=True)] == found
    drawn = whole.generate(rows, 20, temperature=1.0, seed=2)
    assert drawn == whole.generate(rows, 20, temperature=1.0, seed=2) != [row[:20] for row in found]


def test_first_tokens_need_no_prompt() -> None:
    geometry, (text,) = PIECES["gated-group-4"], texts(PIECES["gated-group-4"], 30)
    on_gpu = decoder(geometry, "cuda", **EXACT)
    for turn in range(2):
        for token, want in zip(text, of_oracle(geometry, "float16", text), strict=True):
            assert_close(on_gpu.step(token)[0], want, "float16")
        on_gpu.reset()
        assert on_gpu.lengths.tolist() == [0], turn


def test_layers_with_a_packed_cache_are_those_of_the_cpu() -> None:
    geometry, (text,) = PIECES["parallel-80"], texts(PIECES["parallel-80"], 50)
    on_gpu, on_cpu = decoder(geometry, "cuda", **EXACT), decoder(geometry, "cpu")
    for have, want in zip(on_gpu.layer_outputs(text), on_cpu.layer_outputs(text), strict=True):
        assert_close(have, want, "float16")
    assert on_gpu.lengths.tolist() == [0]


def test_what_a_packed_cache_cannot_hold_is_refused() -> None:
    geometry = PIECES["head-96"]
    with pytest.raises(BudgetError):
        decoder(geometry, "cuda", cache_budget="1KiB")
    with pytest.raises(NotImplementedError, match="head_dim=32"):
        decoder(PIECES["sequential"], "cuda", **BUDGET)
    on_gpu = decoder(geometry, "cuda", max_seqlen=64, **EXACT)
    want = on_gpu.prefill(texts(geometry, 64)[0])
    with pytest.raises(ValueError, match="would have 65 tokens"):
        on_gpu.step([1])
    assert np.array_equal(packed_executor(on_gpu).logits, want)

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
from kvlab.engine.gpu import GpuExecutor
from kvlab.engine.weights import draw
from kvlab.jit.launch import PreparedLaunch
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
    """Blocks have parts of readers, of one or of two rows; a prompt's tokens have fresh keys of 16."""
    geometry, rows = PIECES[name], texts(PIECES[name], 100, 300, 900)
    got, want = (
        [one.prefill([row[:-1] for row in rows]), one.step([row[-1] for row in rows])]
        for one in (decoder(geometry, device, batch=3) for device in ("cuda", "cpu"))
    )
    for have, expected in zip(got, want, strict=True):
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
        for name in ("arrivals", "barrier", "kv_arrivals"):
            assert not token.arrays[name].any()


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


def test_a_budget_is_refused_on_a_gpu() -> None:
    with pytest.raises(NotImplementedError, match="cache_budget"):
        decoder(PIECES["head-96"], "cuda", cache_budget=0.5)

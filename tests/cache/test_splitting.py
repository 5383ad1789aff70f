"""Splitting a prefill: what it may change and what not (promise 8).

At a fixed allocation, here one width and no budget, the stored tokens are the same bit for bit however they
came. What a step returns is exact for its own tokens, so at width 16 no output row depends on the splitting
beyond rounding; at lower widths a later part reads the earlier ones as they are stored. Under a budget the
parts decide when which token is demoted: the bytes stay equal to a page a head (they were equal to the byte),
and the real model shows what it costs. A cache on a GPU, here its kernels in NumPy, takes the same mean off
its keys as one on a CPU, whatever the parts.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from safetensors.numpy import load_file
from transformers import DynamicCache

from kvlab import MixedPrecisionCache
from kvlab.cache.layers import Layer
from kvlab.integrations.transformers import KVLabCache
from kvlab.lab.quality.model import Subject
from kvlab.lab.quality.text import cut_windows
from kvlab.ops.cpu.page_tokens import decode_tokens
from kvlab.ops.frame import key_mean
from kvlab.pages import PAGE_TABLE_BYTES, TOKENS_PER_PAGE, PageLayout, of_channels
from kvlab.reference.attention import attention
from kvlab.reference.codec import hadamard
from kvlab.reference.pages import value_signs
from tests.cache.host.noted import Kernels
from tests.cache_contents import tokens_in
from tests.compare import (
    assert_accurate,
    low_precision_attention,
    low_precision_in_bases,
    wrong_attention,
)

HEADS_Q, HEADS, DIM, LENGTH = 4, 2, 32, 150
SPLITTINGS = st.lists(st.integers(1, LENGTH - 1), unique=True, max_size=6).map(
    lambda cuts: list(pairwise([0, *sorted(cuts), LENGTH]))
)


def random_tokens(seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    q = 2 * rng.standard_normal((1, LENGTH, HEADS_Q, DIM), dtype=np.float32)
    k, v = rng.standard_normal((2, 1, LENGTH, HEADS, DIM), dtype=np.float32)
    return q, k + np.float32(0.5), v


def fed(parts: list[tuple[int, int]], seed: int, **options: Any) -> tuple[MixedPrecisionCache, np.ndarray]:
    """A cache that got its tokens in parts, and what the steps returned."""
    q, k, v = random_tokens(seed)
    cache = MixedPrecisionCache(1, HEADS_Q, HEADS, DIM, budget=None, **options)
    outs = [cache.step(0, q[:, i:j], k[:, i:j], v[:, i:j]) for i, j in parts]
    return cache, np.concatenate(outs, 1)


def stored(cache: MixedPrecisionCache) -> tuple[np.ndarray, np.ndarray]:
    """K and V of all tokens as they are stored, (1, LENGTH, heads, DIM), in the order of their positions."""
    pages = cache.pages(0)
    tokens, layout = tokens_in(pages, 0), pages.layouts[0]
    k, v = decode_tokens(pages.pools[0], layout, pages.dtype, tokens.index, tokens.slot)
    if layout.bits_k < 16:
        k = np.ldexp(hadamard(k), of_channels(pages.k_shift[0, tokens.head])) + pages.k_mean[0, tokens.head]
        k = k.astype(np.float32)
    v = v if layout.bits_v == 16 else (hadamard(v) * value_signs(v.shape[1])).astype(np.float32)
    order = np.lexsort((tokens.head, tokens.position))
    shape = (1, LENGTH, HEADS, DIM)
    return k[order].reshape(shape), v[order].reshape(shape)


@given(parts=SPLITTINGS, bits=st.sampled_from([16, 8, 4, 3, 2, "k4v2"]), seed=st.integers(0, 99))
@example(parts=[(0, LENGTH)], bits=3, seed=85)  # one key dominates a row
def test_at_a_fixed_allocation_the_stored_tokens_are_the_same(
    parts: list[tuple[int, int]], bits: int | str, seed: int
) -> None:
    at_once, _ = fed([(0, LENGTH)], seed, bits=(bits,))
    in_parts, _ = fed(parts, seed, bits=(bits,))
    k, v = stored(at_once)
    for x, y in zip((k, v), stored(in_parts), strict=True):
        np.testing.assert_array_equal(x, y)
    layout = at_once.pages(0).layouts[0]  # a page of each head waits for the next tokens
    assert abs(in_parts.nbytes - at_once.nbytes) <= HEADS * (layout.nbytes + 8)
    q = random_tokens(seed + 1)[0][:, :5]
    expected, low = attention(q, k, v), low_precision_in_bases(q, k, v)
    assert_accurate(in_parts.attend(0, q), expected, low)
    for wrong in wrong_attention(q, k, v).values():
        with pytest.raises(AssertionError):
            assert_accurate(wrong, expected, low)


@given(parts=SPLITTINGS, seed=st.integers(0, 99))
def test_at_width_16_no_output_row_depends_on_the_splitting(parts: list[tuple[int, int]], seed: int) -> None:
    q, k, v = random_tokens(seed)
    _, out = fed(parts, seed, bits=(16,), dtype="float32")
    expected, low = attention(q, k, v, causal=True), low_precision_attention(q, k, v, causal=True)[0]
    assert_accurate(out, expected, low)
    _, packed = fed(parts, seed, bits=(4,))
    if len(parts) > 1 and parts[0][1] >= 16:
        with pytest.raises(AssertionError):
            assert_accurate(packed, expected, low)


@pytest.mark.parametrize("bits", [2, 3, 4, 8, "k4v2", "3,4", "2,3,4,8"])
def test_a_constant_in_channels_of_keys_costs_nothing(bits: int | str, monkeypatch: Any) -> None:
    """Softmax does not see it, and neither do codes, whatever the widths: the mean is taken off."""
    rng = np.random.default_rng(4)
    q = rng.standard_normal((1, 1, HEADS_Q, 64), dtype=np.float32)
    k, v = rng.standard_normal((2, 1, 256, HEADS, 64), dtype=np.float32)
    shifted = k.copy()
    shifted[..., [30, 62]] += 100
    wanted = attention(q, k, v)

    def error(keys: np.ndarray) -> float:
        cache = MixedPrecisionCache(1, HEADS_Q, HEADS, 64, bits=bits, budget=0.6, dtype="float32")
        cache.append(0, keys, v)
        return float(np.square(cache.attend(0, q) - wanted).mean() ** 0.5)

    plain = error(k)
    assert error(shifted) < 1.3 * plain
    monkeypatch.setattr(Layer, "takes_mean", False)
    assert error(shifted) > 2 * plain


TOKENS = 512
SINKS = 4


def filled(size: int, budget: float, plan_length: int, length: int = TOKENS) -> MixedPrecisionCache:
    """A cache that got tokens in parts of a size; its bytes hold after each. Sinks are long keys."""
    rng = np.random.default_rng(7)
    q, k, v = rng.standard_normal((3, 1, TOKENS, HEADS, 64), dtype=np.float32)
    k += np.float32(0.5)
    k[:, :SINKS] *= 3
    cache = MixedPrecisionCache(1, HEADS, HEADS, 64, budget=budget, plan_length=plan_length)
    for start in range(0, length, size):
        part = slice(start, start + size)
        cache.step(0, q[:, part], k[:, part], v[:, part])
        assert cache.nbytes <= int(budget * 2 * 2 * HEADS * 64 * max(cache.seqlen, plan_length))
    return cache


def key_mean_of(cache: MixedPrecisionCache, folder: Path) -> np.ndarray:
    """The mean that is taken off keys, as the file of the cache has it."""
    cache.save(folder / "cache")
    mean: np.ndarray = load_file(folder / "cache")["0.k_mean"]
    return mean


def error_of_sinks(cache: MixedPrecisionCache) -> np.ndarray:
    """Relative error of the value of each sink: what a query returns that sees that token alone."""
    rng = np.random.default_rng(7)
    _, k, v = rng.standard_normal((3, 1, TOKENS, HEADS, 64), dtype=np.float32)
    k += np.float32(0.5)
    out = cache.attend(0, 9 * k[:, :SINKS])
    error: np.ndarray = np.linalg.norm(out - v[:, :SINKS], axis=-1) / np.linalg.norm(v[:, :SINKS], axis=-1)
    return error.max((0, 2))


@pytest.mark.parametrize(
    ("budget", "plan_length", "sizes"),
    [
        (0.27, TOKENS, (1, 10, 16, 64)),
        (0.3, TOKENS, (64, 100, 128)),
        (0.22, TOKENS, (64, 128)),
        (0.3, 1, (64, 100, 128)),
        (0.27, 1, (64, 128)),
        (0.22, 1, (128,)),
    ],
)
def test_sinks_keep_their_width_and_keys_their_mean_in_parts_of_any_size(
    budget: float, plan_length: int, sizes: tuple[int, ...], tmp_path: Path
) -> None:
    """A page of the highest width for each head is more than the first parts of a prompt may take."""
    at_once = filled(TOKENS, budget, plan_length)
    wanted = error_of_sinks(at_once)
    assert (wanted < 0.015).all(), "8 bits; 4 bits have .1, 3 bits .2, 2 bits .35"
    mean = key_mean_of(at_once, tmp_path)
    assert np.abs(mean - 0.5).max() < 0.5
    for size in sizes:
        cache = filled(size, budget, plan_length)
        np.testing.assert_array_equal(key_mean_of(cache, tmp_path), mean)
        assert (error_of_sinks(cache) < 0.015).all()


@pytest.mark.parametrize("budget", [0.19, 0.22])
def test_where_no_page_of_the_highest_width_fits_sinks_have_the_highest_of_their_head(budget: float) -> None:
    """What sinks lose in a first part of few bytes they have lost for good."""
    first, later = (filled(64, budget, 1, length=length) for length in (64, TOKENS))
    lowest, *_, highest = (layout.nbytes + PAGE_TABLE_BYTES for layout in first.pages(0).layouts)
    needed = HEADS * (highest + (64 // TOKENS_PER_PAGE - 1) * lowest)
    assert needed > (first.budget_nbytes or 0), "each head could hold its sinks at the highest width"
    top = len(first.pages(0).layouts) - 1
    listed, then = tokens_in(first.pages(0), 0), tokens_in(later.pages(0), 0)
    rungs = []
    for head in range(HEADS):
        mine = listed.rung[listed.head == head]
        sinks = listed.rung[(listed.head == head) & (listed.position < SINKS)]
        assert (sinks == mine.max()).all()
        rungs.append(mine.max())
        np.testing.assert_array_equal(then.rung[(then.head == head) & (then.position < SINKS)], sinks)
    assert min(rungs) < top
    assert then.rung.max() == top


def test_sinks_survive_files_crops_and_other_rows(tmp_path: Path) -> None:
    cache = filled(64, 0.27, TOKENS, length=192)
    cache.crop(64)
    assert cache.nbytes <= (cache.budget_nbytes or 0)
    wanted = error_of_sinks(cache)
    assert (wanted < 0.015).all()
    cache.save(tmp_path / "cache")
    loaded = MixedPrecisionCache.load(tmp_path / "cache")
    assert loaded.nbytes == cache.nbytes
    loaded.repeat(2)
    assert loaded.nbytes <= 2 * cache.nbytes
    loaded.select(np.array([1]))
    np.testing.assert_array_equal(error_of_sinks(loaded), wanted)


def test_a_function_is_asked_once_for_new_tokens() -> None:
    calls = []

    def equal(previous: Any, observed: Any, positions: Any, seqlen: int) -> Any:
        calls.append(previous is None)
        return np.ones(observed.shape)

    rng = np.random.default_rng(7)
    cache = MixedPrecisionCache(1, HEADS, HEADS, 64, budget=0.27, plan_length=1, importance=equal)
    for n in range(1, 4):
        cache.step(0, *rng.standard_normal((3, 1, 64, HEADS, 64), dtype=np.float32))
        assert sum(calls) == n


GPU_DIM, OFFSET = 64, 3


def fed_to_gpu(size: int) -> tuple[MixedPrecisionCache, np.ndarray, float]:
    """A cache on a GPU that got keys with an offset in parts, their mean, and the error of attention."""
    rng = np.random.default_rng(0)
    q = rng.standard_normal((1, LENGTH, HEADS_Q, GPU_DIM)).astype(np.float16)
    k, v = rng.standard_normal((2, 1, LENGTH, HEADS, GPU_DIM)).astype(np.float16)
    k += np.float16(OFFSET) * rng.choice([-1, 1], GPU_DIM).astype(np.float16)
    cache = MixedPrecisionCache(1, HEADS_Q, HEADS, GPU_DIM, budget=None, bits=(8,), device="cuda")
    for i in range(0, LENGTH, size):
        cache.step(0, *(x[:, i : i + size] for x in (q, k, v)))
    found, wanted = cache.attend(0, q[:, -5:]).astype(np.float32), attention(q[:, -5:], k, v)
    return cache, key_mean(k[0].astype(np.float32)), float(np.linalg.norm(found - wanted))


@pytest.mark.parametrize("size", [1, 10, 16, 17, 64])
def test_parts_give_the_mean_and_accuracy_of_one_shot_on_a_gpu(kernels: Kernels, size: int) -> None:
    _, mean, at_once = fed_to_gpu(LENGTH)
    cache, _, in_parts = fed_to_gpu(size)
    assert in_parts <= MAX_COST * at_once
    assert np.array_equal(cache.pages(0).k_mean[0], mean)


PREFILL, SCORED, CHUNK = 640, 512, 64
MAX_COST = 1.2
"""Divergence after a prefill in parts against that after one shot, of any size of part."""


class Splittings:
    """KL divergence and bytes of one budgeted cache after prefills in parts, on one window of the book."""

    def __init__(self, subject: Subject) -> None:
        self.model = subject.model
        self.ids = torch.from_numpy(cut_windows(subject.text, subject.encode, 2, PREFILL + SCORED).tokens[1:])
        self.truth = self._predictions(DynamicCache(config=self.model.config), PREFILL)

    def measure(self, size: int) -> tuple[float, int]:
        cache = KVLabCache(self.model.config, dtype="float16", budget=0.2, plan_length=PREFILL + SCORED)
        found = self._predictions(cache, size)
        assert cache.packed is not None
        return float((self.truth.exp() * (self.truth - found)).sum(-1).mean()), cache.packed.nbytes

    @torch.inference_mode()
    def _predictions(self, cache: Any, size: int) -> torch.Tensor:
        for part in self.ids[:, :PREFILL].split(size, dim=1):
            self.model(part, past_key_values=cache, logits_to_keep=1)
        rest = self.ids[:, PREFILL:].split(CHUNK, dim=1)
        logits = [self.model(part, past_key_values=cache).logits[0] for part in rest]
        return torch.cat(logits).log_softmax(-1)


@pytest.fixture(scope="module")
def splittings(smollm2: Subject) -> tuple[Splittings, float, int]:
    found = Splittings(smollm2)
    return found, *found.measure(PREFILL)


@pytest.mark.slow  # half a minute for one shot and as much for each size
@pytest.mark.parametrize("size", [512, 128, 64, 7])
def test_parts_of_a_real_prefill_take_equal_bytes_and_cost_little(
    splittings: tuple[Splittings, float, int], size: int
) -> None:
    measured, at_once, nbytes = splittings
    kl, nbytes_in_parts = measured.measure(size)
    page = PageLayout(measured.model.config.head_dim, 8, 8, 2).nbytes + PAGE_TABLE_BYTES
    heads = measured.model.config.num_hidden_layers * measured.model.config.num_key_value_heads
    assert abs(nbytes_in_parts - nbytes) <= page * heads
    assert 0 < at_once < 0.02
    assert kl <= MAX_COST * at_once

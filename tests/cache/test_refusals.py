"""What a cache refuses, by name and before anything changes, and what just fits."""

import re

import numpy as np
import pytest

from kvlab.cache.cache import MixedPrecisionCache
from kvlab.errors import BudgetError
from kvlab.ops.key_frames import KeyFrames
from tests.cache.plain_model import DIM, HEADS, HEADS_Q, LAYERS, held, make, tokens


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"bits": (5,)}, ValueError, "width 5"),
        ({"bits": ("k4v2", 3)}, ValueError, "same bytes"),
        ({"bits": ("k16v2", "k8v16")}, ValueError, "more bits for K or V than it has"),
        ({"bits": "0-0:8"}, ValueError, r"layers \[1\] of 2"),
        ({"budget": -1.0}, ValueError, "budget=-1.0"),
        ({"budget": 524288.0}, ValueError, "is a fraction of float16's bytes"),
        ({"budget": "6 parsecs"}, ValueError, "budget="),
        ({"allocator": "random"}, ValueError, "allocator='random'"),
        ({"importance": "vibes"}, ValueError, "importance='vibes'"),
        ({"dtype": "int8"}, ValueError, "dtype='int8'"),
        ({"device": "tpu"}, ValueError, "device='tpu'"),
        ({"device": "cuda:x"}, ValueError, "device='cuda:x'"),
        ({"device": "cuda"}, NotImplementedError, "head_dim=32"),
        ({"residual": -1}, ValueError, "residual=-1"),
    ],
)
def test_bad_options_name_themselves(options, error, text):
    with pytest.raises(error, match=text):
        make(**options)


@pytest.mark.parametrize("budget", [np.int64(200_000), np.float32(0.5), np.float64(0.5)])
def test_a_budget_may_be_a_number_of_numpy(budget):
    assert make(budget=budget).budget_nbytes == make(budget=budget.item()).budget_nbytes


def test_bad_arrays_name_themselves():
    cache, rng = make(), np.random.default_rng(11)
    q, k, v = tokens(rng, 1, 4)
    with pytest.raises(ValueError, match="layer=2"):
        cache.step(2, q, k, v)
    with pytest.raises(ValueError, match="v"):
        cache.step(0, q, k, v[:, :3])
    with pytest.raises(TypeError, match="q has dtype float64"):
        cache.step(0, q.astype(np.float64), k, v)
    with pytest.raises(TypeError, match="valid"):
        cache.step(0, q, k, v, valid=np.ones((1, 4)))
    with pytest.raises(ValueError, match="n=1"):
        cache.crop(1)
    with pytest.raises(ValueError, match="row 3"):
        cache.select(np.array([3]))
    with pytest.raises(
        TypeError, match=r"k is on cpu, the cache is on cuda: .* make the cache with device='cpu'"
    ):
        MixedPrecisionCache(1, 2, 2, 64, device="cuda").append(0, *np.ones((2, 1, 3, 2, 64), np.float16))


@pytest.mark.parametrize("bits", [(8,), (16,), (2, 4, 8)])
@pytest.mark.parametrize("side", ["k", "v"])
@pytest.mark.parametrize("n", [3, 100])
def test_what_float16_cannot_hold_is_refused_by_name(bits, side, n):
    rng = np.random.default_rng(0)
    q, k, v = tokens(rng, 1, n)
    new = {"k": k, "v": v}
    cache = make(bits=bits, budget=None)
    new[side][0, -1, 0, 0] = -65_504
    cache.step(0, q, **new)
    held = cache.nbytes
    new[side][0, -1, 0, 0] = -70_000
    for call in (lambda: cache.step(0, q, **new), lambda: cache.append(0, **new)):
        with pytest.raises(ValueError, match=rf"{side} reaches 70000, .*dtype='bfloat16' or 'float32'"):
            call()
    assert (cache.seqlen, cache.nbytes) == (n, held)
    padding = np.ones((1, n), bool)
    padding[0, -1] = False
    assert np.isfinite(cache.step(0, q, **new, valid=padding)).all()
    for dtype in ("bfloat16", "float32"):
        wide = make(bits=bits, budget=None, dtype=dtype)
        wide.step(0, q, **new)
        assert np.isfinite(wide.attend(0, q)).all()


def test_a_budget_that_cannot_hold_is_refused_unchanged():
    cache, rng = make(bits=(4, 8), budget=12_000 * LAYERS), np.random.default_rng(9)
    cache.step(0, *tokens(rng, 1, 64))
    before = cache.nbytes, held(cache, 0, 0)
    with pytest.raises(BudgetError, match="longest length that fits") as caught:
        cache.step(0, *tokens(rng, 1, 400))
    assert (cache.nbytes, cache.seqlen) == (before[0], 64)
    assert all(set(a) == set(b) for a, b in zip(before[1], held(cache, 0, 0), strict=True))
    longest, needed = caught.value.longest_length, caught.value.needed_bytes
    MixedPrecisionCache(LAYERS, HEADS_Q, HEADS, DIM, bits=(4, 8), budget=12_000 * LAYERS, max_seqlen=longest)
    MixedPrecisionCache(LAYERS, HEADS_Q, HEADS, DIM, bits=(4, 8), budget=needed, max_seqlen=464)
    for budget, length in ((12_000 * LAYERS, longest + 1), (needed - LAYERS, 464)):
        with pytest.raises(BudgetError):
            MixedPrecisionCache(LAYERS, HEADS_Q, HEADS, DIM, bits=(4, 8), budget=budget, max_seqlen=length)


@pytest.mark.parametrize("widths", [(2, 3, 4, 8, 16), (2, 8)])
def test_the_longest_length_is_reached(widths):
    """A budget that just holds 258 tokens holds them, at the lowest width, however they come."""
    rng = np.random.default_rng(31)
    with pytest.raises(BudgetError) as refused:
        make(bits=widths, budget=5000, max_seqlen=258)
    cache = make(bits=widths, budget=refused.value.needed_bytes)
    for count in [230, *[1] * 28]:
        q, k, v = tokens(rng, 1, count)
        for layer in range(LAYERS):
            cache.step(layer, q, k, v)
        assert cache.nbytes <= refused.value.needed_bytes
    assert cache.seqlen == 258


def test_a_file_is_as_readable_as_others_and_errors_name_the_path(tmp_path):
    make().save(tmp_path / "cache")
    (tmp_path / "other").write_bytes(b"")
    assert (tmp_path / "cache").stat().st_mode == (tmp_path / "other").stat().st_mode
    with pytest.raises(IsADirectoryError, match="is a folder: name a file"):
        make().save(tmp_path)
    with pytest.raises(FileNotFoundError, match="make the folder"):
        make().save(tmp_path / "none" / "cache")
    with pytest.raises(ValueError, match="device='gpu' is not supported"):
        MixedPrecisionCache.load(tmp_path / "cache", device="gpu")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cache", "other"]


def test_a_cache_and_frames_say_what_they_hold() -> None:
    cache = MixedPrecisionCache(2, 2, 1, 16, budget=None, bits=(2, 8), batch=3)
    assert repr(cache) == "MixedPrecisionCache: 2 layers, empty"
    keys = np.random.default_rng(0).standard_normal((3, 100, 1, 16), np.float32)
    for layer in range(2):
        cache.append(layer, keys, keys)
    assert re.fullmatch(
        r"MixedPrecisionCache: 2 layers, 3 rows of 100 tokens, [\d.]+ KiB, [\d.]+ bits an element "
        r"\(float16 37.50 KiB\)",
        repr(cache),
    )
    frames = KeyFrames.measured([(keys, keys, keys)] * 2)
    assert repr(frames) == "KeyFrames: 2 layers, 1 KV heads of 16 channels"

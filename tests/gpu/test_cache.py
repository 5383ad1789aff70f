"""`MixedPrecisionCache` on a GPU: every step against float64 over what the pages hold, the budget, and state.

The pages are read back through the layers of the CPU, whose decoding has tests of its own.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import kvlab
from kvlab.cache.cuda import GPU
from kvlab.cache.reallocation import LOOKAHEAD
from kvlab.errors import BudgetError
from kvlab.ops.cuda import attention as attention_cuda
from kvlab.ops.cuda import packed as packed_cuda
from kvlab.ops.cuda import plan
from kvlab.ops.frame import LAST, key_mean
from kvlab.pages import encode_importance
from kvlab.reference import packed as reference
from tests.cache_contents import entries_with_tokens, failures_of_cache, pages_of, positions, seen_of
from tests.compare import assert_accurate
from tests.gpu.packed_cases import DTYPES, low_precision, to_numpy, to_torch
from tests.gpu.test_cache_kernels import exact

LAYERS, HEADS, GROUP = 2, 2, 4


def make(head_dim: int = 64, dtype: str = "bfloat16", **options: Any) -> kvlab.MixedPrecisionCache:
    options = {"batch": 2, "plan_length": 512, "bits": (2, 4, 8), "budget": 0.5, "device": "cuda", **options}
    return kvlab.MixedPrecisionCache(LAYERS, HEADS * GROUP, HEADS, head_dim, dtype=dtype, **options)


def draw(rng: np.random.Generator, cache: Any, steps: int) -> tuple[np.ndarray, ...]:
    shape = (cache.batch, steps, HEADS, cache.head_dim)
    kind = DTYPES[cache.dtype]
    q = rng.standard_normal((cache.batch, steps, HEADS * GROUP, cache.head_dim)).astype(kind)
    k, v = ((rng.standard_normal(shape) + 0.5).astype(kind) for _ in range(2))
    return q, k, v


def check_state(cache: Any, held: list[list[int]]) -> None:
    """The budget holds, and every row of every head holds its tokens, each once."""
    assert cache.nbytes <= (cache.budget_nbytes or cache.nbytes)
    assert cache.nbytes <= cache.reserved_nbytes
    assert not any(cache._device.reallocator.status(layer) for layer in range(LAYERS))
    for pages in pages_of(cache):
        pages.check_entries()
        for row in range(cache.batch):
            for head in range(HEADS):
                assert positions(pages, row, head) == held[row]


def step(
    cache: Any,
    rng: np.random.Generator,
    steps: int,
    valid: np.ndarray | None = None,
    *,
    compared: bool = True,
) -> list[np.ndarray]:
    """One step of all layers; one of them is compared with float64."""
    results = []
    device = cache._device
    if device is not None and steps <= 16:  # a step of few tokens that lacks room plans before it attends
        for layer in range(LAYERS):
            device.ensure_open_pages(layer, steps)
    judged = int(rng.integers(LAYERS)) if compared else -1
    for layer in range(LAYERS):
        # Where bytes are few, a layer may close up the pages of all.
        before = pages_of(cache) if device is not None and layer == judged else None
        visible, window = seen_of(cache, layer), cache.windows[layer]
        q, k, v = draw(rng, cache, steps)
        mask = None if valid is None else to_torch(valid)
        out = to_numpy(cache.step(layer, *map(to_torch, (q, k, v)), valid=mask))
        results.append(out)
        if layer != judged:
            continue
        seen = np.ones(q.shape[:2], bool) if valid is None else valid
        if before is None:
            stored = low = (np.zeros(q.shape), np.full((q.shape[0], q.shape[2], steps), -np.inf))
        else:
            stored, low = (
                f(q, before[layer], **visible) for f in (reference.packed_attention, low_precision)
            )
        want = exact(q, k, v, seen, stored[0], stored[1], window)[0]
        rounded = exact(q, k, v, seen, low[0], low[1], window)[0].astype(q.dtype)
        assert not out[~seen].any()
        assert_accurate(out[seen], want[seen], rounded[seen])
    return results


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize(
    ("bits", "budget"),
    [((2, 4, 8), 0.35), ((2, 3, 4, 8), 0.45), ((0, 4), 0.2), ((4, 16), 0.75), ((8,), None)],
)
def test_steps(bits: Any, budget: Any, head_dim: int, dtype: str) -> None:
    """A prefill, decode steps over several plans, a chunk, a long chunk over stored tokens."""
    cache = make(head_dim, dtype, bits=bits, budget=budget)
    rng = np.random.default_rng(0)
    length = 0
    for steps in [300, *[1] * 20, 5, *[1] * 15, 16, 130, *[1] * 3]:
        step(cache, rng, steps, compared=steps > 1 or length % 5 == 0)
        length += steps
        assert cache.seqlen == length
        if 0 not in bits and steps > 1:
            check_state(cache, [list(range(length))] * cache.batch)
    assert cache.nbytes <= (cache.budget_nbytes or cache.nbytes)


@pytest.mark.parametrize(
    "options",
    [
        {"allocator": "dp"},
        {"allocator": "uniform"},
        {"residual": 40, "budget": 0.7},
        {"residual": 16, "bits": (4,), "budget": None},
    ],
)
def test_what_the_cpu_plans(options: dict[str, Any]) -> None:
    """Other allocators and a residual window: planned by the CPU, attended by the GPU."""
    cache, rng = make(**options), np.random.default_rng(11)
    for steps in [150, *[1] * 50, 70, 5]:
        step(cache, rng, steps, compared=steps > 1)
    check_state(cache, [list(range(275))] * 2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
@pytest.mark.parametrize(
    "options",
    [
        {"sliding_window": [100, None], "bits": (2, 4, 8), "budget": 0.5},
        {"sliding_window": 40, "bits": (4, 16), "budget": 1.2},
        {"sliding_window": [None, 8], "bits": (8,), "budget": None},
    ],
)
def test_sliding_windows(options: dict[str, Any], head_dim: int, dtype: str) -> None:
    """Steps see no token that has left the window, and layers keep few of those."""
    cache = make(head_dim, dtype, **options)
    rng, length = np.random.default_rng(12), 0
    for steps in [300, *[1] * 20, 5, *[1] * 15, 16, 130, *[1] * 3]:
        step(cache, rng, steps, compared=steps > 1 or length % 3 == 0)
        length += steps
        assert cache.nbytes <= (cache.budget_nbytes or cache.nbytes)
    for layer, pages in enumerate(pages_of(cache)):
        window = cache.windows[layer] or length
        for row in range(cache.batch):
            for head in range(HEADS):
                held = positions(pages, row, head)
                assert held[-(window - 1) :] == list(range(max(length - window + 1, 0), length))
                assert len(held) <= window + LOOKAHEAD


@pytest.mark.parametrize("importance", ["attention", "forecast", "recency", "key_norm", "uniform"])
def test_policies_and_an_empty_cache(importance: str) -> None:
    """Decoding may begin with nothing stored."""
    cache = make(importance=importance)
    rng = np.random.default_rng(1)
    for _ in range(3):
        step(cache, rng, 1)
    for i in range(40):
        step(cache, rng, 4, compared=i % 8 == 7)
    check_state(cache, [list(range(163))] * 2)


def test_importance_as_a_function() -> None:
    """The host calls it, and what it says of every token lies in the pages."""
    seen = []

    def by_place(previous: Any, observed: Any, positions: Any, seqlen: int) -> Any:
        if previous is not None:
            seen.append(float(observed.sum()))
        return np.exp2(-(positions % 7.0))

    cache, rng = make(bits=(2, 4, 8), importance=by_place), np.random.default_rng(5)
    for steps in (130, 1, 3, 70):
        step(cache, rng, steps)
    check_state(cache, [list(range(204))] * 2)
    assert len(seen) == 2 * 2 * LAYERS
    assert min(seen) > 0.1
    for pages in pages_of(cache):
        for at in map(tuple, entries_with_tokens(pages)):
            layout, count = pages.layouts[pages.rung[at]], int(pages.count[at])
            pool, index = pages.pools[pages.rung[at]], pages.index[at]
            position = layout.positions_in(pool)[index, :count].astype(int)
            wanted = encode_importance(np.exp2(-(position % 7.0)))
            assert np.array_equal(layout.importance_in(pool)[index, :count], wanted)


@pytest.mark.parametrize("parts", [[1] * 70 + [80], [10] * 15, [20, 43, 1, 86], [17] * 8 + [14], [64, 86]])
@pytest.mark.parametrize("bits", [(2, 4, 8), (4,), ("k3v2", 4)])
def test_the_mean_of_keys_does_not_depend_on_the_parts(parts: list[int], bits: tuple[int | str, ...]) -> None:
    """First calls of few tokens, and a row that is shorter than the other: each has the mean of its own."""
    cache, rng = make(bits=bits), np.random.default_rng(3)
    tokens, first = draw(rng, cache, sum(parts)), 0
    valid = np.ones((2, sum(parts)), bool)
    valid[1, :50] = False
    for steps in parts:
        now = slice(first, first + steps)
        mask = None if valid[:, now].all() else to_torch(np.ascontiguousarray(valid[:, now]))
        for layer in range(LAYERS):
            cache.step(layer, *(to_torch(np.ascontiguousarray(x[:, now])) for x in tokens), valid=mask)
        first += steps
        assert cache.nbytes <= cache.budget_nbytes
    step(cache, rng, 1)
    check_state(cache, [[*range(first + 1)], [*range(50, first + 1)]])
    assert not cache._device.read("waits")[0].any()
    for pages in pages_of(cache):
        for row in range(2):
            sample = tokens[1][row][valid[row]].astype(np.float32)[:LAST]
            wanted = key_mean(sample, narrow=8 not in bits)
            assert np.array_equal(pages.k_mean[row], wanted)


def test_graphs_of_waiting_and_of_other_steps() -> None:
    """Decode from nothing by graphs, recorded as soon as a step of their kind has run, is that without."""
    results = []
    for with_graphs in (False, True):
        cache, outs = make(max_seqlen=200), []
        new, graphs = tensors(cache, 1, 0), dict[Any, Any]()
        for number in range(110):
            for mine, x in zip(new, tensors(cache, 1, number), strict=True):
                mine.copy_(x)
            key = cache.prepare()
            if not with_graphs or not key or key not in graphs:
                graphs[key] = None
                outs.append(torch.stack([cache.step(layer, *new) for layer in range(LAYERS)]))
                continue
            if graphs[key] is None:
                graphs[key] = torch.cuda.CUDAGraph(), []
                with cache.recording(), torch.cuda.graph(graphs[key][0]):
                    graphs[key][1].extend(cache.step(layer, *new) for layer in range(LAYERS))
            graphs[key][0].replay()
            cache.replayed()
            outs.append(torch.stack(graphs[key][1]))
        check_state(cache, [list(range(110))] * 2)
        results.append(torch.stack(outs))
    assert torch.equal(*results)


def test_ladders_of_different_lengths() -> None:
    """The grid of a plan is that of the longest ladder."""
    cache, rng, total = make(bits="0:2+3+4+8,1:8", budget=0.6, plan_length=300), np.random.default_rng(8), 0
    for steps in (7, 150, 1, 1, 140):
        step(cache, rng, steps)
        total += steps
    check_state(cache, [list(range(total))] * 2)


@pytest.mark.parametrize("bits", [(2, 4, 8), ("k4422v3", "k8444v4", 16)])
def test_a_prompt_behind_a_crop_of_all(bits: Any) -> None:
    """Or behind attention of an empty cache, which opens a page: a plan may drop that."""
    cache, rng = make(bits=bits, budget=1.2), np.random.default_rng(9)
    for tokens in (72, 20, 300):
        for steps in (tokens, 1):
            step(cache, rng, steps)
        check_state(cache, [list(range(tokens + 1))] * 2)
        cache.crop(tokens + 1)
        assert not any(pages.num_pages.any() for pages in pages_of(cache))
    attend, _ = cache.decode(0)
    q, _, _ = draw(rng, cache, 1)
    attend(to_torch(q), to_torch(np.ones_like(q)))
    step(cache, rng, 100)
    check_state(cache, [list(range(100))] * 2)


def test_padding() -> None:
    cache = make(bits=(2, 4, 8))
    rng = np.random.default_rng(2)
    valid = np.ones((2, 100), bool)
    valid[0, :37] = False
    step(cache, rng, 100, valid)
    step(cache, rng, 1)
    two = np.array([[True, False], [True, True]])
    step(cache, rng, 2, two)
    held = [[*range(37, 102)], [*range(103)]]
    held[0] = [*range(37, 100), 100, 101]
    check_state(cache, held)


def test_demotion_under_an_absolute_budget() -> None:
    """A full cache takes a long prompt in pieces: stored tokens go down until all fits."""
    share = 2 * 2 * LAYERS * HEADS * 64 * 1200
    cache = make(budget=int(0.22 * share) * 2, bits=(2, 4, 8))
    rng = np.random.default_rng(3)
    for _ in range(4):
        step(cache, rng, 300)
    check_state(cache, [list(range(1200))] * 2)
    counts = cache.allocation()
    assert counts["2"].sum() > 0 < counts["8"].sum()


@pytest.mark.parametrize("splits", [[64, 128, 64, 44], [190, *[1] * 20, 90], [7, 16, 100, 9, 16, 152]])
def test_the_promised_budget_suffices_however_tokens_come(splits: list[int]) -> None:
    options = {"bits": (2, 4, 8), "recent": 20}
    budget = make(**options).smallest_nbytes(300)
    cache, rng = make(budget=budget, max_seqlen=300, **options), np.random.default_rng(10)
    for steps in splits:
        step(cache, rng, steps, compared=steps > 60)
        assert cache.nbytes <= cache.budget_nbytes
    check_state(cache, [list(range(300))] * 2)
    with pytest.raises(BudgetError, match="longest length"):
        make(budget=budget - 1, max_seqlen=300, **options)


def test_refusal_changes_nothing() -> None:
    cache = make(budget=600_000, bits=(4, 8))
    rng = np.random.default_rng(4)
    step(cache, rng, 200)
    before = pages_of(cache)
    q, k, v = map(to_torch, draw(rng, cache, 4000))
    with pytest.raises(BudgetError, match="longest length"):
        cache.step(0, q, k, v)
    after = pages_of(cache)
    assert cache.seqlen == 200
    for old, new in zip(before, after, strict=True):
        assert all(np.array_equal(a, b) for a, b in zip(old.pools, new.pools, strict=True))
    step(cache, rng, 1)


def test_same_bits_again() -> None:
    def run() -> list[np.ndarray]:
        cache, rng = make(), np.random.default_rng(5)
        return [out for steps in [200, *[1] * 40] for out in step(cache, rng, steps, compared=False)]

    assert all(np.array_equal(a.view(np.int16), b.view(np.int16)) for a, b in zip(run(), run(), strict=True))


def test_append_and_attend() -> None:
    cache = make(bits=(4, 8))
    rng = np.random.default_rng(6)
    for steps in (150, 3, 1):
        _, k, v = draw(rng, cache, steps)
        for layer in range(LAYERS):
            cache.append(layer, to_torch(k), to_torch(v))
    check_state(cache, [list(range(154))] * 2)
    q = draw(rng, cache, 2)[0]
    for layer, pages in enumerate(pages_of(cache)):
        out = to_numpy(cache.attend(layer, to_torch(q)))
        assert_accurate(out, reference.packed_attention(q, pages)[0], low_precision(q, pages)[0])


def test_rows_and_lengths(tmp_path: Any) -> None:
    """crop, reorder, select, repeat, save and load, each followed by steps."""
    cache = make()
    rng = np.random.default_rng(7)
    step(cache, rng, 200)
    for _ in range(5):
        step(cache, rng, 1)
    cache.crop(12)
    step(cache, rng, 1)
    check_state(cache, [list(range(194))] * 2)
    cache.reorder(np.array([1, 1]))
    step(cache, rng, 3)
    pages = pages_of(cache)[0]
    assert positions(pages, 0, 0) == list(range(197))
    cache.repeat(2)
    assert cache.batch == 4
    step(cache, rng, 2)
    cache.select(np.array([0, 3, 1]))
    step(cache, rng, 1)
    check_state(cache, [list(range(200))] * 3)
    cache.save(tmp_path / "cache")
    again = kvlab.MixedPrecisionCache.load(tmp_path / "cache", device="cuda")
    q = draw(rng, cache, 1)[0]
    for layer in range(LAYERS):
        one, two = (to_numpy(x.attend(layer, to_torch(q))).astype(np.float32) for x in (cache, again))
        assert abs(one - two).max() < 0.02 * abs(one).max()
    on_cpu = kvlab.MixedPrecisionCache.load(tmp_path / "cache")
    assert on_cpu.seqlen == 200
    cache.reset()
    assert cache.seqlen == 0
    step(cache, rng, 100)
    check_state(cache, [list(range(100))] * 3)


def test_growth_beyond_the_plan_length() -> None:
    cache = make(plan_length=300, budget=0.5, bits=(2, 4, 8))
    rng = np.random.default_rng(8)
    for steps in (100, 200, *[1] * 20, 400):
        step(cache, rng, steps, compared=steps > 1)
    check_state(cache, [list(range(720))] * 2)


def test_bad_arguments() -> None:
    cache = make()
    q, k, v = map(to_torch, draw(np.random.default_rng(9), cache, 2))
    with pytest.raises(TypeError, match="q is on cpu"):
        cache.step(0, q.cpu(), k.cpu(), v.cpu())
    cache.step(0, q, k, v)
    with pytest.raises(TypeError, match="float16"):
        cache.step(0, q.half(), k.half(), v.half())
    with pytest.raises(ValueError, match="k "):
        cache.step(0, q, k[:, :, :1], v)
    with pytest.raises(ValueError, match="contiguous"):
        cache.step(0, q, k.transpose(2, 3).contiguous().transpose(2, 3), v)


@pytest.mark.parametrize(("batch", "length"), [(1, 4000), (8, 2000)])
def test_reserved_memory_is_what_torch_gave(batch: int, length: int) -> None:
    """Within 1 % of the device memory that steps of all kinds asked for, and all of it comes back.

    What torch rounds up, at most 1 MiB an allocation, would count in a cache as small as this.
    """
    options = {"batch": batch, "max_seqlen": length + 100, "plan_length": length, "budget": 0.6}
    rng = np.random.default_rng(3)

    def requested() -> int:
        return torch.cuda.memory_stats()["requested_bytes.all.current"]

    def used(cache: Any) -> int:
        for steps in (length, *[1] * 20):
            for layer in range(LAYERS):
                cache.step(layer, *map(to_torch, draw(rng, cache, steps)))
        return requested()

    torch.cuda.init()  # without it there are no statistics before the first allocation
    attention_cuda._prepare.cache_clear()  # attention keeps lists of tiles for calls of the same shape
    before = requested()
    cache = make(128, **options)
    taken = used(cache) - before
    assert abs(taken - cache.reserved_nbytes) <= 0.01 * taken
    assert cache.nbytes <= cache.reserved_nbytes
    del cache
    attention_cuda._prepare.cache_clear()
    assert requested() == before


def test_lack_of_memory_at_any_allocation() -> None:
    cache, rng = make(max_seqlen=600, plan_length=600), np.random.default_rng(8)
    step(cache, rng, 100)
    new, many = (list(map(to_torch, draw(rng, cache, steps))) for steps in (2, 90))
    modules: list[Any] = [packed_cuda, plan, GPU]  # attention takes its memory before pages change
    found = failures_of_cache(cache, new, many, modules, torch.OutOfMemoryError("CUDA out of memory"))
    assert found[0] > 0
    assert min(found[2:]) > 0
    assert (cache.batch, cache._device.lengths) == (4, [192, 192])


@pytest.mark.parametrize(
    ("options", "way_round"),
    [
        ({"dtype": "float32"}, "device='cpu'"),
        ({"head_dim": 48}, "device='cpu'"),
    ],
)
def test_what_is_not_there_says_so(options: Any, way_round: str) -> None:
    with pytest.raises(NotImplementedError, match=way_round):
        make(**options)


def tensors(cache: Any, steps: int, seed: int, device: str = "cuda") -> list[torch.Tensor]:
    torch.manual_seed(seed)
    shapes = [(cache.batch, steps, heads, cache.head_dim) for heads in (HEADS * GROUP, HEADS, HEADS)]
    return [torch.randn(shape).to(getattr(torch, cache.dtype)).to(device) for shape in shapes]


def assert_same_pages(one: Any, other: Any) -> None:
    for a, b in zip(pages_of(one), pages_of(other), strict=True):
        assert np.array_equal(a.num_pages, b.num_pages)
        assert all(np.array_equal(x, y) for x, y in zip(a.pools, b.pools, strict=True))


@pytest.mark.parametrize("importance", ["attention", "forecast"])
@pytest.mark.parametrize("chunks", [(100, 8, 1), (20, 40), (16, 16, 90)])
def test_queries_of_padding_are_not_looked_at(importance: str, chunks: tuple[int, ...]) -> None:
    caches = []
    for query in (0.0, float("nan")):
        cache = make(importance=importance, realloc_every=1)
        for number, n in enumerate((80, *chunks)):
            torch.manual_seed(number)
            valid = torch.rand(2, n, device="cuda") < 0.7
            valid[:, 0] = True
            for layer in range(LAYERS):
                q, k, v = tensors(cache, n, 10 * number + layer)
                q[~valid] = query
                out = cache.step(layer, q, k, v, valid=valid)
                assert bool(out[valid].isfinite().all())
        caches.append(cache)
    assert_same_pages(*caches)


def test_new_tokens_may_be_overwritten_behind_their_step() -> None:
    """Though there was no room for them yet, and a later plan reads them again."""
    caches = []
    for reused in (False, True):
        cache = make(budget=int(0.3 * 4 * LAYERS * HEADS * 64 * 1200) * 2, bits=(2, 8), importance="recency")
        own = tensors(cache, 300, 0)
        for number in range(4):
            for layer in range(LAYERS):
                new = tensors(cache, 300, 10 * number + layer)
                if reused:
                    new = [mine.copy_(x) for mine, x in zip(own, new, strict=True)]
                cache.step(layer, *new)
        caches.append(cache)
    assert_same_pages(*caches)


def test_an_append_leaves_the_result_of_the_step_before() -> None:
    cache = make(importance="key_norm")
    for layer in range(LAYERS):
        cache.step(layer, *tensors(cache, 80, layer))
    outs = [cache.step(layer, *tensors(cache, 1, 5 + layer), scale=1.0) for layer in range(LAYERS)]
    before = [out.clone() for out in outs]
    for layer in range(LAYERS):
        cache.append(layer, *tensors(cache, 1, 7 + layer)[1:])
    assert all(torch.equal(out, kept) for out, kept in zip(outs, before, strict=True))
    check_state(cache, [list(range(82))] * 2)


@pytest.mark.parametrize("steps", [40, 3])
def test_arrays_that_lie_anyhow(steps: int) -> None:
    """Vectors at multiples of 4 bytes; a mask of one row that is part of a longer one."""
    results = []
    for anyhow in (False, True):
        cache = make(batch=1)
        mask = torch.ones(1, 400, dtype=torch.bool, device="cuda")
        mask[0, 361] = False
        mask = mask[:, 360 : 360 + steps] if anyhow else mask[:, 360 : 360 + steps].clone()
        for layer in range(LAYERS):
            cache.step(layer, *tensors(cache, 80, layer))
            new = tensors(cache, steps, 5 + layer)
            if anyhow:
                wide = [torch.zeros(*x.shape[:3], 68, dtype=x.dtype, device="cuda") for x in new]
                new = [y[..., 2:66].copy_(x) for x, y in zip(new, wide, strict=True)]
            results.append(cache.step(layer, *new, valid=mask).float())
        check_state(cache, [[p for p in range(80 + steps) if p != 81]])
    assert all(float((results[i] - results[i + LAYERS]).abs().max()) < 0.02 for i in range(LAYERS))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("importance", ["attention", "key_norm"])
def test_a_gpu_that_is_not_the_current_one(importance: str) -> None:
    caches, results = [], []
    for device in ("cuda:0", "cuda:1"):
        cache = make(device=device, importance=importance, realloc_every=4)
        for number, steps in enumerate((80, 40, *[1] * 30, 3)):
            for layer in range(LAYERS):
                results.append(cache.step(layer, *tensors(cache, steps, 10 * number + layer, device)))
        results += [cache.attend(layer, tensors(cache, 5, layer, device)[0]) for layer in range(LAYERS)]
        caches.append(cache)
        assert torch.cuda.current_device() == 0
    half = len(results) // 2
    assert all(torch.equal(a.cpu(), b.cpu()) for a, b in zip(results[:half], results[half:], strict=True))
    assert_same_pages(*caches)


@pytest.mark.parametrize("most", [70, 100])
def test_more_queries_than_a_launch_takes(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_cuda, "max_query_tokens", lambda pages, group, device: most)
    cache, rng = make(realloc_every=1), np.random.default_rng(11)
    for steps in (100, 230, 100):
        step(cache, rng, steps)
    check_state(cache, [list(range(430))] * 2)

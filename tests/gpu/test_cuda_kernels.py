"""Packed attention on a GPU against float64 over the same pages, and what a launch must leave alone.

Pages are drawn as bytes: any codes are valid codes. Unused slots hold NaN, unused table entries name pages
that do not exist, and memory around the results holds a canary.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

import kvlab
from kvlab.cache.pages import LayerPages, PageLayout
from kvlab.ops import packed_cuda, packed_numba
from kvlab.ops.packed import Sight, packed_attention
from kvlab.reference import packed as reference
from kvlab.reference.pages import bit_address
from tests.compare import assert_accurate, low_precision_attention

WIDTHS = (2, 3, 4, 8, 16)
MIXED = ((2, 2), (3, 3), (4, 4), (8, 8), (16, 16))
DTYPES = {"float16": np.dtype(np.float16), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
BACKENDS = {"cuda": packed_cuda, "numba": packed_numba}
NAN_BITS = {"float16": 0x7E00, "bfloat16": 0x7FC0}


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> Any:
    """The module that launches a backend."""
    return BACKENDS[request.param]


@dataclass
class DevicePages:
    """A `LayerPages` on the GPU."""

    layouts: tuple[PageLayout, ...]
    pools: tuple[torch.Tensor, ...]
    rung: torch.Tensor
    count: torch.Tensor
    index: torch.Tensor
    base: torch.Tensor
    num_pages: torch.Tensor
    k_mean: torch.Tensor
    dtype: str


def on_device(pages: LayerPages) -> DevicePages:
    put = lambda x: torch.from_numpy(np.array(x)).cuda()  # noqa: E731
    tables = (
        put(pages.rung),
        put(pages.count),
        put(pages.index.view(np.int32)),
        put(pages.base.view(np.int16)),
        put(pages.num_pages),
    )
    return DevicePages(pages.layouts, tuple(map(put, pages.pools)), *tables, put(pages.k_mean), pages.dtype)


def to_torch(x: np.ndarray) -> torch.Tensor:
    if x.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(x.view(np.int16)).view(torch.bfloat16).cuda()
    return torch.from_numpy(x).cuda()


def to_numpy(x: torch.Tensor) -> np.ndarray:
    if x.dtype == torch.bfloat16:
        return x.cpu().view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return x.cpu().numpy()


def draw_pool(rng: np.random.Generator, layout: PageLayout, dtype: str, pages: int) -> np.ndarray:
    """Pages of random codes, values of about unit size."""
    pool = rng.integers(0, 256, (pages, layout.nbytes), np.uint8)
    parts = {
        "k": (layout.bits_k, layout.k_codes, layout.v_codes, layout.k_steps),
        "v": (layout.bits_v, layout.v_codes, layout.k_steps, layout.v_steps),
    }
    for bits, begin, end, steps in parts.values():
        if bits == 16:
            values = rng.standard_normal((pages, (end - begin) // 2)).astype(DTYPES[dtype])
            pool[:, begin:end] = values.view(np.uint8)
        else:
            step = np.float16(1.7 / 2**bits) * np.exp(0.3 * rng.standard_normal((pages, 64))).astype(
                np.float16
            )
            pool[:, steps : steps + 64] = (step.view(np.uint16) >> 7).astype(np.uint8)
    return pool


def poison(record: np.ndarray, layout: PageLayout, dtype: str, count: int) -> None:
    """Make the unused slots of a page NaN."""
    for side, bits, begin, end, steps in (
        ("k", layout.bits_k, layout.k_codes, layout.v_codes, layout.k_steps),
        ("v", layout.bits_v, layout.v_codes, layout.k_steps, layout.v_steps),
    ):
        if bits < 16:
            record[steps + count : steps + 64] = 0xFF
        else:
            elements = record[begin:end].view(np.uint16)
            elements[bit_address(16, layout.head_dim, side)[count:, :, 0] // 16] = NAN_BITS[dtype]


def aligned(pool: np.ndarray) -> np.ndarray:
    """A copy that starts at a multiple of 64 bytes."""
    memory = np.zeros(pool.size + 64, np.uint8)
    start = -memory.ctypes.data % 64
    memory[start : start + pool.size] = pool.reshape(-1)
    return memory[start : start + pool.size].reshape(pool.shape)


def draw_pages(
    seed: int,
    dtype: str,
    head_dim: int,
    rungs: tuple[tuple[int, int], ...],
    lengths: np.ndarray,
    *,
    full: bool = False,
) -> LayerPages:
    """Draw pages: lengths (batch, KV heads) are numbers of pages, rungs and counts random unless `full`."""
    rng = np.random.default_rng(seed)
    layouts = tuple(PageLayout(head_dim, k, v, 2) for k, v in rungs)
    entries = max(1, lengths.max()) + 2
    shape = (*lengths.shape, entries)
    rung = rng.integers(0, len(rungs), shape).astype(np.uint8)
    count = np.full(shape, 64) if full else np.where(rng.random(shape) < 0.6, 64, rng.integers(0, 64, shape))
    index = np.zeros(shape, np.uint32)
    used = np.arange(entries) < lengths[..., None]
    pools = []
    for r, layout in enumerate(layouts):
        mine = np.argwhere(used & (rung == r))
        pool = draw_pool(rng, layout, dtype, len(mine) + 1)
        places = rng.permutation(len(mine) + 1)[: len(mine)]
        for at, place in zip(map(tuple, mine), places, strict=True):
            index[at] = place
            poison(pool[place], layout, dtype, int(count[at]))
        pools.append(aligned(pool))
    rung[~used], count[~used], index[~used] = 200, 77, 0xFFFFFFFF
    mean = rng.standard_normal((*lengths.shape, head_dim)).astype(np.float16)
    base = np.zeros(shape, np.uint16)
    return LayerPages(
        layouts,
        tuple(pools),
        rung,
        count.astype(np.uint8),
        index,
        base,
        lengths.astype(np.int32),
        mean,
        dtype,
    )


def draw_queries(seed: int, dtype: str, batch: int, seqlen: int, heads: int, head_dim: int) -> np.ndarray:
    rng = np.random.default_rng(seed + 1)
    return rng.standard_normal((batch, seqlen, heads, head_dim)).astype(DTYPES[dtype])


def low_precision(
    q: np.ndarray,
    pages: LayerPages,
    window: tuple[int, int] = (-1, -1),
    first_position: np.ndarray | None = None,
    **options: Any,
) -> tuple[np.ndarray, np.ndarray]:
    """The same attention with keys, values, scores and probabilities in the dtype of q."""
    batch, seqlen, heads, head_dim = q.shape
    kv_heads = pages.rung.shape[1]
    group = heads // kv_heads
    out, lse = np.zeros(q.shape, q.dtype), np.full((batch, heads, seqlen), -np.inf, np.float32)
    for b in range(batch):
        for h in range(kv_heads):
            tokens = reference.stored_tokens(pages, b, h)
            k, v = (np.concatenate([np.zeros((0, head_dim)), *(t[i] for t in tokens)]) for i in (0, 1))
            own = slice(h * group, (h + 1) * group)
            blocks = [(slice(0, seqlen), np.ones(len(k), np.bool_))]
            if first_position is not None:
                position = reference.stored_positions(pages, b, h)
                lowest = first_position[b] + np.arange(seqlen) - window[0]
                blocks = [(slice(s, s + 1), position >= lowest[s]) for s in range(seqlen)]
            for rows, seen in blocks:
                out[b : b + 1, rows, own], lse[b : b + 1, own, rows] = low_precision_attention(
                    q[b : b + 1, rows, own],
                    k[seen].astype(q.dtype)[None, :, None],
                    v[seen].astype(q.dtype)[None, :, None],
                    **options,
                )
    return out, lse


def attend(backend: Any, q: np.ndarray, pages: LayerPages, **options: Any) -> Any:
    group = q.shape[2] // pages.rung.shape[1]
    arguments = {"scale": q.shape[3] ** -0.5, "softcap": 0.0, "keep_scores": 0} | options
    if "window" in arguments:
        left, _ = arguments.pop("window")
        arguments["sight"] = Sight(left, to_torch(arguments.pop("first_position")))
    return backend.launch(to_torch(q), on_device(pages), group, **arguments)


def check(
    backend: Any, q: np.ndarray, pages: LayerPages, hostile: LayerPages | None = None, **options: Any
) -> np.ndarray:
    """Compare with float64; the backend gets `hostile`, the same but for what must not matter."""
    actual = attend(backend, q, hostile or pages, **options)
    out, lse, scores = reference.packed_attention(q, pages, **options)
    options.pop("keep_scores", None)
    low_out, low_lse = low_precision(q, pages, **options)
    got = to_numpy(actual.out)
    assert_accurate(got, out, low_out)
    assert_accurate(to_numpy(actual.lse), lse, low_lse, "lse")
    if actual.scores is not None:
        used = np.arange(pages.rung.shape[2]) < pages.num_pages[..., None]
        kept = to_numpy(actual.scores)
        assert np.array_equal(np.isneginf(kept[used]), np.isneginf(scores[used]))
        finite = np.isfinite(scores) & used[..., None, None]
        assert np.abs(kept[finite] - scores[finite]).max() < 0.05
    return got


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", WIDTHS)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_one_width(backend: Any, dtype: str, bits: int, head_dim: int) -> None:
    pages = draw_pages(bits, dtype, head_dim, ((bits, bits),), np.array([[3, 20], [1, 0]]))
    check(backend, draw_queries(bits, dtype, 2, 1, 8, head_dim), pages)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
def test_all_widths_in_one_sequence(backend: Any, dtype: str, head_dim: int) -> None:
    pages = draw_pages(head_dim, dtype, head_dim, MIXED, np.array([[40, 7], [0, 200]]))
    check(backend, draw_queries(7, dtype, 2, 1, 8, head_dim), pages)


def test_unequal_widths_of_keys_and_values(backend: Any) -> None:
    rungs = ((2, 16), (16, 2), (4, 2), (2, 4), (8, 4), (3, 8), (16, 3), (8, 16))
    pages = draw_pages(5, "bfloat16", 128, rungs, np.array([[60, 30]]))
    check(backend, draw_queries(5, "bfloat16", 1, 1, 6, 128), pages)


@pytest.mark.parametrize("group", [*range(1, 10), 12, 16])
def test_group_sizes(backend: Any, group: int) -> None:
    pages = draw_pages(group, "bfloat16", 128, MIXED, np.array([[20, 30]]))
    check(backend, draw_queries(group, "bfloat16", 1, 1, 2 * group, 128), pages)


@pytest.mark.parametrize(("seqlen", "group"), [(4, 1), (2, 4), (3, 5), (7, 3), (8, 1), (13, 2), (16, 16)])
def test_several_query_tokens_see_all_pages(backend: Any, seqlen: int, group: int) -> None:
    pages = draw_pages(11, "bfloat16", 128, MIXED, np.array([[20, 9], [0, 33]]))
    check(backend, draw_queries(11, "bfloat16", 2, seqlen, 2 * group, 128), pages)


def test_softcap_scale_and_kept_scores(backend: Any) -> None:
    pages = draw_pages(3, "bfloat16", 128, MIXED, np.array([[20, 9], [0, 33]]))
    check(backend, draw_queries(3, "bfloat16", 2, 3, 8, 128), pages, softcap=5.0, scale=0.2, keep_scores=2)


@pytest.mark.parametrize("group", [1, 4, 11])
def test_scores_kept_in_float16_are_those_of_float32_rounded(group: int) -> None:
    pages = draw_pages(18, "bfloat16", 128, MIXED, np.array([[20, 9], [0, 33]]))
    q = draw_queries(18, "bfloat16", 2, 3, 2 * group, 128)
    whole = attend(packed_cuda, q, pages, keep_scores=2)
    assert whole.scores is not None
    kept = torch.full(whole.scores.shape, float("nan"), dtype=torch.float16, device="cuda")
    out, lse = torch.empty_like(whole.out), torch.empty_like(whole.lse)
    workspace = packed_cuda.make_workspace(out, 4, 3 * group, 128)
    packed_cuda.attend(to_torch(q), on_device(pages), out, lse, workspace, scale=128**-0.5, scores=kept)
    assert torch.equal(out, whole.out)
    assert torch.equal(lse, whole.lse)
    used = torch.from_numpy(np.arange(pages.rung.shape[2]) < pages.num_pages[..., None])
    assert torch.equal(kept.cpu()[used], whole.scores.cpu()[used].half())


WINDOW_STARTS = (1 << 16) + 30_000


def spread(pages: LayerPages, seed: int) -> LayerPages:
    """Give tokens positions, those of a page near each other: a third of the pages about WINDOW_STARTS."""
    rng = np.random.default_rng(seed)
    for at in map(tuple, np.argwhere(np.arange(pages.rung.shape[2]) < pages.num_pages[..., None])):
        near = rng.random() < 0.3
        pages.base[at] = 1 if near else rng.integers(0, 3)
        start = 29_980 if near else rng.integers(0, 65_000)
        record = pages.pools[pages.rung[at]][pages.index[at]]
        layout = pages.layouts[pages.rung[at]]
        layout.positions_in(record[None])[0] = start + rng.integers(0, 50 if near else 500, 64)
    return pages


def unread(pages: LayerPages, first_position: np.ndarray, left: int) -> LayerPages:
    """The same pages, all NaN but for the positions where the window of no query reaches."""
    hostile = dataclasses.replace(pages, pools=tuple(map(aligned, pages.pools)))
    hidden = 0
    for at in map(tuple, np.argwhere(np.arange(pages.rung.shape[2]) < pages.num_pages[..., None])):
        layout, pool = pages.layouts[pages.rung[at]], hostile.pools[pages.rung[at]]
        offsets = layout.positions_in(pool)[pages.index[at], : pages.count[at]].astype(int)
        if ((int(pages.base[at]) << 16) + offsets < first_position[at[0]] - left).all():
            pool[pages.index[at], : layout.positions] = 0xFF
            hidden += 1
    assert hidden
    return hostile


@pytest.mark.parametrize(
    ("dtype", "head_dim", "seqlen", "group"),
    [
        ("float16", 64, 1, 1),
        ("bfloat16", 128, 1, 4),
        ("bfloat16", 128, 16, 1),
        ("bfloat16", 128, 16, 16),
        ("float16", 80, 4, 7),
        ("bfloat16", 96, 2, 9),
        ("float16", 256, 3, 16),
    ],
)
def test_a_window_reads_no_page_before_it(
    backend: Any, dtype: str, head_dim: int, seqlen: int, group: int
) -> None:
    lengths = np.array([[40, 7], [0, 200]])
    pages = spread(draw_pages(head_dim, dtype, head_dim, MIXED, lengths), seqlen)
    first = np.array([100_000, 99_993], np.int32)
    left = 100_000 - WINDOW_STARTS
    q = draw_queries(21, dtype, 2, seqlen, 2 * group, head_dim)
    options = {"window": (left, 0), "first_position": first}
    check(backend, q, pages, unread(pages, first, left), **options)


def test_a_window_with_softcap_and_kept_scores(backend: Any) -> None:
    pages = spread(draw_pages(22, "bfloat16", 128, MIXED, np.array([[40, 7], [0, 200]])), 22)
    first, left = np.array([100_000, 99_993], np.int32), 100_000 - WINDOW_STARTS
    q = draw_queries(22, "bfloat16", 2, 9, 8, 128)
    options = {"window": (left, -1), "first_position": first, "softcap": 5.0, "keep_scores": 3}
    check(backend, q, pages, unread(pages, first, left), **options)


@pytest.mark.parametrize("rungs", [((2, 2),), ((4, 4),), ((16, 16),)], ids=str)
def test_a_window_over_one_width(backend: Any, rungs: tuple[tuple[int, int], ...]) -> None:
    """Many sequences: lists that thread blocks share, with pages of several sequences."""
    lengths = np.random.default_rng(23).integers(0, 9, (30, 8))
    pages = spread(draw_pages(23, "bfloat16", 128, rungs, lengths), 23)
    first, left = np.full(30, 100_000, np.int32) - np.arange(30, dtype=np.int32), 100_000 - WINDOW_STARTS
    q = draw_queries(23, "bfloat16", 30, 3, 32, 128)
    check(backend, q, pages, unread(pages, first, left), window=(left, 0), first_position=first)


def test_a_window_that_reaches_no_stored_token(backend: Any) -> None:
    pages = spread(draw_pages(24, "bfloat16", 128, MIXED, np.array([[40, 7]])), 24)
    first = np.array([1 << 18], np.int32)
    q = draw_queries(24, "bfloat16", 1, 2, 8, 128)
    actual = attend(backend, q, unread(pages, first, 3), window=(3, 0), first_position=first)
    assert not to_numpy(actual.out).any()
    assert np.isneginf(to_numpy(actual.lse)).all()


def test_many_sequences_share_blocks(backend: Any) -> None:
    """More sequences than thread blocks, of one to a few pages and some empty."""
    lengths = np.random.default_rng(0).integers(0, 4, (50, 8))
    pages = draw_pages(9, "bfloat16", 64, ((2, 2), (8, 8)), lengths)
    check(backend, draw_queries(9, "bfloat16", 50, 1, 16, 64), pages)


@pytest.mark.parametrize(("heads", "entries"), [(1, 150), (4, 40), (12, 15), (40, 5)])
def test_equal_lengths(backend: Any, heads: int, entries: int) -> None:
    """Few sequences and many, with more and with fewer blocks each than a block has warps."""
    pages = draw_pages(12, "bfloat16", 64, MIXED, np.full((1, heads), entries))
    check(backend, draw_queries(12, "bfloat16", 1, 1, 2 * heads, 64), pages)


@pytest.mark.parametrize("batch", [1, 2, 3])
@pytest.mark.parametrize("heads", [1, 2, 4, 8, 16, 24, 32])
def test_every_head_is_written_and_no_counter_is_left(backend: Any, batch: int, heads: int) -> None:
    """Equal lengths from which every thread block finds its share alone, three calls with one workspace."""
    blocks = torch.cuda.get_device_properties(0).multi_processor_count
    for entries in (-(-blocks // (batch * heads)), -(-blocks // (batch * heads)) + 5):
        pages = draw_pages(19, "bfloat16", 64, ((2, 2), (8, 8)), np.full((batch, heads), entries), full=True)
        q = draw_queries(19, "bfloat16", batch, 1, 2 * heads, 64)
        expected, low = reference.packed_attention(q, pages), low_precision(q, pages)
        device, queries = on_device(pages), to_torch(q)
        workspace = backend.make_workspace(queries, batch * heads, 2, 64)
        for _ in range(3):
            out = torch.full_like(queries, float("nan"))
            lse = torch.full((batch, 2 * heads, 1), float("nan"), device="cuda")
            backend.attend(queries, device, out, lse, workspace, scale=0.125)
            assert_accurate(to_numpy(out), expected[0], low[0])
            assert_accurate(to_numpy(lse), expected[1], low[1], "lse")
            if backend is packed_cuda:
                assert not workspace.arrivals.any()


@pytest.mark.parametrize(
    ("dtype", "size"), [("float16", 1e-3), ("float16", 1e3), ("bfloat16", 1e-12), ("bfloat16", 1e12)]
)
def test_queries_of_any_size(backend: Any, dtype: str, size: float) -> None:
    """Coded keys meet float16 queries: neither their size matters, nor heads of another size in the group."""
    pages = draw_pages(13, dtype, 128, ((2, 2), (8, 8), (16, 16)), np.array([[20, 30]]), full=True)
    q = draw_queries(13, dtype, 1, 1, 8, 128).astype(np.float64)
    q[:, :, 1::2] *= 1e-3
    check(backend, (q * size).astype(DTYPES[dtype]), pages, scale=0.1 / size)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("order", ["rising", "falling", "random", "tiny"])
def test_values_of_any_size(backend: Any, dtype: str, order: str) -> None:
    """Steps of V from 0 to 1 or 300 in one sequence, raw values among them; or none above 1e-4."""
    rungs = ((2, 2), (4, 4), (8, 8)) + ((16, 16),) * (order != "tiny")
    pages = draw_pages(14, dtype, 64, rungs, np.array([[60, 90]]), full=True)
    rng = np.random.default_rng(14)
    for head, n in enumerate(pages.num_pages[0]):
        rising = np.linspace(0, 180 if dtype == "bfloat16" else 110, n).astype(np.uint8)
        orders = {"falling": rising[::-1], "random": rng.permutation(rising), "tiny": np.full_like(rising, 8)}
        steps = orders.get(order, rising)
        for rung, index, step in zip(pages.rung[0, head], pages.index[0, head], steps, strict=False):
            layout = pages.layouts[rung]
            if layout.bits_v < 16:
                noise = rng.integers(0, 8, 64, np.uint8)
                pages.pools[rung][index, layout.v_steps : layout.v_steps + 64] = step + noise * (step > 0)
    check(backend, draw_queries(14, dtype, 1, 1, 4, 64), pages)


def test_a_million_tokens(backend: Any) -> None:
    """64 pages again and again: the same output, and a log-sum-exp larger by the logarithm of the repeats."""
    repeats = 250
    pages = draw_pages(15, "bfloat16", 64, ((2, 2), (4, 4)), np.array([[64]]), full=True)
    q = draw_queries(15, "bfloat16", 1, 1, 4, 64)
    names = ("rung", "count", "index", "base")
    tiled = {name: np.tile(getattr(pages, name)[..., :64], repeats) for name in names}
    million = LayerPages(**(vars(pages) | tiled | {"num_pages": pages.num_pages * repeats}))
    actual = attend(backend, q, million)
    out, lse, _ = reference.packed_attention(q, pages)
    low_out, low_lse = low_precision(q, pages)
    assert_accurate(to_numpy(actual.out), out, low_out)
    assert_accurate(to_numpy(actual.lse), lse + np.log(repeats), low_lse + np.log(repeats), "lse")


def test_pages_beyond_four_gibibytes(backend: Any) -> None:
    pages = draw_pages(16, "bfloat16", 128, ((8, 8),), np.array([[30, 20]]))
    q = draw_queries(16, "bfloat16", 1, 1, 8, 128)
    device, record = on_device(pages), pages.layouts[0].nbytes
    first = (5 << 30) // record
    pool = torch.empty((first + len(pages.pools[0]), record), dtype=torch.uint8, device="cuda")
    pool[first:] = device.pools[0]
    device.pools, device.index = (pool,), device.index + first
    actual = backend.launch(to_torch(q), device, 4, scale=128**-0.5, softcap=0.0, keep_scores=0)
    assert_accurate(to_numpy(actual.out), reference.packed_attention(q, pages)[0], low_precision(q, pages)[0])


def test_the_public_function_takes_torch_and_cupy() -> None:
    cupy = pytest.importorskip("cupy")
    pages = draw_pages(17, "float16", 64, MIXED, np.array([[20, 9]]))
    q = draw_queries(17, "float16", 1, 2, 4, 64)
    out, _, scores = reference.packed_attention(q, pages, keep_scores=1)
    device = on_device(pages)
    actual = packed_attention(to_torch(q), device, keep_scores=1)
    assert kvlab.last_backend() == "cuda"
    assert actual.out.is_cuda
    assert_accurate(to_numpy(actual.out), out, low_precision(q, pages)[0])
    assert actual.scores is not None
    assert tuple(actual.scores.shape) == scores.shape
    again = packed_attention(cupy.asarray(q), device)
    assert isinstance(again.out, cupy.ndarray)
    assert np.array_equal(cupy.asnumpy(again.out), to_numpy(actual.out))
    assert np.array_equal(cupy.asnumpy(again.lse), to_numpy(actual.lse))


def test_only_empty_pages(backend: Any) -> None:
    pages = draw_pages(1, "float16", 64, ((2, 2),), np.array([[2, 0]]))
    pages.count[:] = 0
    actual = attend(backend, draw_queries(1, "float16", 1, 1, 4, 64), pages)
    assert not to_numpy(actual.out).any()
    assert np.isneginf(to_numpy(actual.lse)).all()


def test_nan_of_a_live_token_shows(backend: Any) -> None:
    pages = draw_pages(2, "bfloat16", 128, ((4, 4),), np.array([[9, 9]]), full=True)
    pages.pools[0][pages.index[0, 1, 4], pages.layouts[0].v_steps + 17] = 0xFF
    out = to_numpy(attend(backend, draw_queries(2, "bfloat16", 1, 1, 8, 128), pages).out).astype(np.float32)
    assert np.isnan(out[0, 0, 4:]).all()
    assert np.isfinite(out[0, 0, :4]).all()


def test_comparison_refuses_wrong_answers() -> None:
    pages = draw_pages(4, "bfloat16", 128, MIXED, np.array([[12, 9]]))
    q = draw_queries(4, "bfloat16", 1, 1, 8, 128)
    out = reference.packed_attention(q, pages)[0]
    low_out, _ = low_precision(q, pages)
    shifted = LayerPages(**(vars(pages) | {"k_mean": np.zeros_like(pages.k_mean)}))
    fewer = LayerPages(**(vars(pages) | {"num_pages": pages.num_pages - 1}))
    for wrong in (
        np.zeros_like(out),
        out[:, :, ::-1],
        out[..., ::-1],
        reference.packed_attention(q, shifted)[0],
        reference.packed_attention(q, fewer)[0],
    ):
        with pytest.raises(AssertionError):
            assert_accurate(wrong.astype(q.dtype), out, low_out)


def test_same_bits_again_and_in_a_graph_that_follows_the_lengths(backend: Any) -> None:
    pages = draw_pages(6, "bfloat16", 128, MIXED, np.array([[300, 41]]))
    q = draw_queries(6, "bfloat16", 1, 1, 8, 128)
    first = to_numpy(attend(backend, q, pages).out)
    device, queries = on_device(pages), to_torch(q)
    out = torch.full_like(queries, float("nan"))
    lse = torch.empty((1, 8, 1), device="cuda")
    workspace = backend.make_workspace(queries, 2, 4, 128)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        backend.attend(queries, device, out, lse, workspace, scale=128**-0.5)
    for _ in range(3):
        out.fill_(float("nan"))
        graph.replay()
        assert np.array_equal(to_numpy(out).view(np.int16), first.view(np.int16))
    if backend is packed_cuda:
        assert not workspace.arrivals.any()
    shorter = LayerPages(**(vars(pages) | {"num_pages": np.array([[17, 0]], np.int32)}))
    device.num_pages.copy_(torch.from_numpy(shorter.num_pages))
    graph.replay()
    assert_accurate(to_numpy(out), reference.packed_attention(q, shorter)[0], low_precision(q, shorter)[0])


def test_strided_queries_and_canaries_around_the_results(backend: Any) -> None:
    pages = draw_pages(8, "float16", 64, MIXED, np.array([[30, 12], [5, 9]]))
    q = draw_queries(8, "float16", 2, 2, 4, 64)
    hostile = torch.full((2, 4, 2, 70), float("nan"), dtype=torch.float16, device="cuda")
    hostile[..., 2:66] = to_torch(q).transpose(1, 2)
    around = torch.full((q.size + 128,), 7.0, dtype=torch.float16, device="cuda")
    out = around[64:-64].view(q.shape)
    lse = torch.empty((2, 4, 2), device="cuda")
    workspace = backend.make_workspace(out, 4, 4, 64)
    backend.attend(hostile[..., 2:66].transpose(1, 2), on_device(pages), out, lse, workspace, scale=0.125)
    assert bool((around[:64] == 7).all())
    assert bool((around[-64:] == 7).all())
    assert_accurate(to_numpy(out), reference.packed_attention(q, pages)[0], low_precision(q, pages)[0])


@pytest.mark.parametrize("head_dim", [64, 80])
def test_float32_caches(head_dim: int) -> None:
    """Backend "numba" alone takes them, and is as exact as float32 arithmetic."""
    from tests.ops.test_packed import SAME_WIDTHS, PackedCase, make_pages
    from tests.ops.test_packed import low_precision as low_precision_in_several_bases

    rng = np.random.default_rng(head_dim)
    pages = make_pages(rng, SAME_WIDTHS, head_dim, "float32", np.array([[30, 0], [5, 21]]))
    q = rng.standard_normal((2, 1, 4, head_dim)).astype(np.float32)
    case = PackedCase(q, pages, {"scale": None, "softcap": 0.0, "keep_scores": 0})
    actual = attend(packed_numba, q, pages)
    out, lse, _ = reference.packed_attention(q, pages)
    low_out, low_lse = low_precision_in_several_bases(case)
    assert_accurate(to_numpy(actual.out), out, low_out)
    assert_accurate(to_numpy(actual.lse), lse, low_lse, "lse")

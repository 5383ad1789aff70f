"""Packed attention on a GPU against float64 over the same pages, and what a launch must leave alone.

Pages are drawn as `packed_cases` tells; memory around the results holds a canary.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import kvlab
from kvlab.ops.cuda import packed as packed_cuda
from kvlab.ops.numba import packed as packed_numba
from kvlab.ops.packed import packed_attention
from kvlab.pages import LayerPages
from kvlab.reference import packed as reference
from tests.compare import assert_accurate
from tests.gpu import packed_cases
from tests.gpu.packed_cases import (
    DTYPES,
    LADDERS,
    MIXED,
    attend,
    check,
    check_scores_as_bytes,
    draw_pages,
    draw_queries,
    low_precision,
    on_device,
    to_numpy,
    to_torch,
    used_quads,
)

WIDTHS = (2, 3, 4, 8, 16)
backend = packed_cases.each_backend


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", WIDTHS)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_one_width(backend: Any, dtype: str, bits: int, head_dim: int) -> None:
    pages = draw_pages(bits, dtype, head_dim, ((bits, bits),), np.array([[3, 20], [1, 0]]))
    check(backend, draw_queries(bits, dtype, 2, 1, 8, head_dim), pages)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 192, 256])
def test_all_widths_in_one_sequence(backend: Any, dtype: str, head_dim: int) -> None:
    pages = draw_pages(head_dim, dtype, head_dim, MIXED, np.array([[40, 7], [0, 200]]))
    check(backend, draw_queries(7, dtype, 2, 1, 8, head_dim), pages)


@pytest.mark.parametrize(
    "rungs",
    [
        ((2, 16), (16, 2), (4, 2), (2, 4), (8, 4), (3, 8), (16, 3), (8, 16)),
        ((16, 4), (16, 8)),
        ((16, 3), (16, 16)),
        ((4, 16), (8, 16)),
    ],
    ids=str,
)
def test_unequal_widths_of_keys_and_values(backend: Any, rungs: tuple[tuple[int, int], ...]) -> None:
    pages = draw_pages(5, "bfloat16", 128, rungs, np.array([[60, 30]]))
    check(backend, draw_queries(5, "bfloat16", 1, 1, 6, 128), pages)


@pytest.mark.parametrize("power", [-60, 60])
@pytest.mark.parametrize("ladder", LADDERS)
def test_heads_of_any_size(backend: Any, power: int, ladder: str) -> None:
    """Keys of a head are 2**power times as large as usual, its queries as much smaller; other values, too."""
    pages = draw_pages(4, "bfloat16", 128, LADDERS[ladder][:-1], np.array([[20, 30]]))
    pages.exponent[0, 0, 0], pages.exponent[0, 1, 1] = power, power
    q = draw_queries(4, "bfloat16", 1, 1, 8, 128)
    q[:, :, :4] = np.ldexp(q[:, :, :4].astype(np.float32), -power)
    actual = attend(backend, q, pages)
    out, lse, _ = reference.packed_attention(q, pages)
    low_out, low_lse = low_precision(q, pages)
    assert_accurate(to_numpy(actual.lse), lse, low_lse, "lse")
    for heads in (slice(0, 4), slice(4, 8)):  # their values are of different sizes
        assert_accurate(to_numpy(actual.out)[:, :, heads], out[:, :, heads], low_out[:, :, heads])


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
@pytest.mark.parametrize("softcap", [0.0, 3.0])
@pytest.mark.parametrize("ladder", LADDERS)
def test_scores_kept_as_bytes_are_those_of_float32_rounded(group: int, softcap: float, ladder: str) -> None:
    pages = draw_pages(18, "bfloat16", 128, LADDERS[ladder], np.array([[20, 9], [0, 33]]))
    if ladder == "widths":
        pages.exponent[...] = 0  # to these scores the sizes of queries are fitted
    queries, used = draw_queries(18, "bfloat16", 2, 3, 2 * group, 128), used_quads(pages)
    for larger in (1, 2):  # without a cap, few scores are then too small to be kept, and many
        size = np.float32(larger * (2 if ladder == "widths" else 0.125)).astype(DTYPES["bfloat16"])
        scores, exact, found = check_scores_as_bytes(queries * size, pages, softcap)
        of_all = np.where(used[..., None, None], scores, -np.inf)
        least = of_all.max(axis=(2, 4), keepdims=True) - 23.8 * np.log(2)
        kept, finite = np.isfinite(found), np.isfinite(exact)
        lost = finite & ~kept
        assert (exact <= np.broadcast_to(least, scores.shape)[used])[lost].all()
        assert kept.sum() > 0.9 * finite.sum() or larger == 2
        if softcap > 0:
            assert not lost.any()
        elif larger == 2:
            assert lost.sum() > 0.05 * finite.sum()


def test_many_sequences_share_blocks(backend: Any) -> None:
    """More sequences than thread blocks, of one to a few quads and some empty."""
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
                assert not workspace.semaphores.any()


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
    """Scales of V from 0 to 1 or 300 in one sequence, raw values among them; or none above 1e-4."""
    rungs = ((2, 2), (4, 4), (8, 8)) + ((16, 16),) * (order != "tiny")
    pages = draw_pages(14, dtype, 64, rungs, np.array([[60, 90]]), full=True)
    rng = np.random.default_rng(14)
    for head, n in enumerate(pages.num_pages[0]):
        rising = np.linspace(0, 180 if dtype == "bfloat16" else 110, n).astype(np.uint8)
        orders = {"falling": rising[::-1], "random": rng.permutation(rising), "tiny": np.full_like(rising, 8)}
        scales = orders.get(order, rising)
        for rung, index, scale in zip(pages.rung[0, head], pages.index[0, head], scales, strict=False):
            layout = pages.layouts[rung]
            if layout.bits_v < 16:
                noise = rng.integers(0, 8, 16, np.uint8)
                pages.pools[rung][index, layout.v_scales : layout.v_scales + 16] = scale + noise * (scale > 0)
    check(backend, draw_queries(14, dtype, 1, 1, 4, 64), pages)


def test_lengths_that_differ_a_little(backend: Any) -> None:
    """One quad or none, and 29 to 31: few enough apart for the division that reads no other length."""
    for seed, lengths in enumerate((np.ones((4, 8), int), np.arange(32).reshape(4, 8) % 3 + 29)):
        lengths[1, 3] -= 1
        pages = draw_pages(seed, "bfloat16", 64, MIXED, lengths)
        check(backend, draw_queries(seed, "bfloat16", 4, 1, 16, 64), pages)


@pytest.mark.parametrize("begin", [16, 48, 64])
@pytest.mark.parametrize("widths", [MIXED, MIXED[:4]], ids=["16", "8"])
def test_pools_may_begin_anywhere(begin: int, widths: tuple[tuple[int, int], ...]) -> None:
    """At odd multiples of 16 and 64 bytes, to which pages in shared memory are laid alike."""
    pages = draw_pages(12, "bfloat16", 128, widths, np.array([[60, 33]]))
    q, device = draw_queries(12, "bfloat16", 1, 1, 8, 128), on_device(pages)
    expected = attend(packed_cuda, q, pages).out
    pools = []
    for pool in device.pools:
        room = torch.full((pool.numel() + 128,), 255, dtype=torch.uint8, device="cuda")
        pools.append(room[begin : begin + pool.numel()].view(pool.shape))
        pools[-1].copy_(pool)
    device.pools = tuple(pools)
    options = {"scale": 128**-0.5, "softcap": 0.0, "keep_scores": 0}
    assert torch.equal(packed_cuda.launch(to_torch(q), device, 4, **options).out, expected)


def test_a_million_tokens(backend: Any) -> None:
    """64 pages again and again: the same output, and a log-sum-exp larger by the logarithm of the repeats."""
    repeats = 1000
    pages = draw_pages(15, "bfloat16", 64, ((2, 2), (4, 4)), np.array([[16]]), full=True)
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
    pages.pools[0][pages.index[0, 1, 4], pages.layouts[0].v_scales + 7] = 0xFF
    out = to_numpy(attend(backend, draw_queries(2, "bfloat16", 1, 1, 8, 128), pages).out).astype(np.float32)
    assert np.isnan(out[0, 0, 4:]).all()
    assert np.isfinite(out[0, 0, :4]).all()


def test_comparison_refuses_wrong_answers() -> None:
    pages = draw_pages(4, "bfloat16", 128, MIXED, np.array([[12, 9]]))
    pages.exponent[...] = 0  # or packed keys get all attention, or none: then their mean changes nothing
    q = draw_queries(4, "bfloat16", 1, 1, 8, 128)
    out = reference.packed_attention(q, pages)[0]
    low_out, _ = low_precision(q, pages)
    shifted = LayerPages(**(vars(pages) | {"k_mean": np.zeros_like(pages.k_mean)}))
    fewer = LayerPages(**(vars(pages) | {"num_pages": pages.num_pages - 4}))
    larger = [
        LayerPages(**(vars(pages) | {"exponent": pages.exponent + np.int8(one)})) for one in ([1, 0], [0, 1])
    ]
    for wrong in (
        np.zeros_like(out),
        out[:, :, ::-1],
        out[..., ::-1],
        reference.packed_attention(q, shifted)[0],
        reference.packed_attention(q, fewer)[0],
        *(reference.packed_attention(q, x)[0] for x in larger),
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
    given, results = queries.clone(), [torch.empty_like(out) for _ in range(3)]
    with torch.cuda.graph(graph):  # launches may come early, but read what the one before has written
        for result in results:
            queries.copy_(given)
            for _ in range(2):
                backend.attend(queries, device, out, lse, workspace, scale=128**-0.5)
            result.copy_(out)
            out.fill_(float("nan"))
            queries.zero_()
    for _ in range(3):
        graph.replay()
        for result in results:
            assert np.array_equal(to_numpy(result).view(np.int16), first.view(np.int16))
            result.zero_()
    if backend is packed_cuda:
        assert not workspace.semaphores.any()
    shorter = LayerPages(**(vars(pages) | {"num_pages": np.array([[68, 0]], np.int32)}))
    device.num_pages.copy_(torch.from_numpy(shorter.num_pages))
    graph.replay()
    expected, low = reference.packed_attention(q, shorter)[0], low_precision(q, shorter)[0]
    assert_accurate(to_numpy(results[-1]), expected, low)


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

"""Packed attention by 8-bit integer products: widths below 16, up to 4 and 8 rows (packed/int8_mma.cuh).

`test_cuda_kernels.py` asks the same where width 16 occurs as well, which is multiplied in float16.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from kvlab.ops.cuda import packed as packed_cuda
from kvlab.reference import packed as reference
from tests.compare import assert_accurate
from tests.gpu.packed_cases import (
    DTYPES,
    MIXED_PROFILES,
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
from tests.gpu.test_cuda_kernels_window import WINDOW_STARTS, spread, unread

WIDTHS = ((2, 2), (3, 3), (4, 4), (8, 8))
LADDERS = {"widths": WIDTHS, "profiles": MIXED_PROFILES[:-1]}
each_size = pytest.mark.parametrize("size", [1, 2])  # times up to 4 query rows
each_ladder = pytest.mark.parametrize("ladder", LADDERS)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("head_dim", "ladder"), [*((d, "widths") for d in (64, 80, 96, 128)), (64, "profiles"), (128, "profiles")]
)
@each_size
def test_pages_of_all_widths(dtype: str, head_dim: int, ladder: str, size: int) -> None:
    pages = draw_pages(head_dim, dtype, head_dim, LADDERS[ladder], np.array([[40, 7], [0, 200]]))
    check(packed_cuda, draw_queries(7, dtype, 2, 1, 8 * size, head_dim), pages)


@pytest.mark.parametrize(
    ("seqlen", "group"),
    [(1, 1), (2, 1), (3, 1), (2, 2), (1, 4), (1, 5), (3, 2), (1, 7), (8, 1), (2, 5), (1, 16), (16, 3)],
)
@each_ladder
def test_rows(seqlen: int, group: int, ladder: str) -> None:
    pages = draw_pages(11, "bfloat16", 128, LADDERS[ladder], np.array([[20, 9], [0, 33]]))
    check(packed_cuda, draw_queries(11, "bfloat16", 2, seqlen, 2 * group, 128), pages)


@each_size
def test_unequal_widths_of_keys_and_values(size: int) -> None:
    pages = draw_pages(5, "float16", 128, ((2, 4), (4, 3), (8, 2), (3, 8), (8, 4)), np.array([[60, 30]]))
    check(packed_cuda, draw_queries(5, "float16", 1, 1, 6 * size, 128), pages)


@pytest.mark.parametrize(
    ("dtype", "unit"), [("float16", 1e-3), ("float16", 1e3), ("bfloat16", 1e-12), ("bfloat16", 1e12)]
)
@each_size
@each_ladder
def test_queries_of_any_size(dtype: str, unit: float, size: int, ladder: str) -> None:
    """Also with one channel far above all others, and with rows of zeros."""
    pages = draw_pages(13, dtype, 128, LADDERS[ladder], np.array([[20, 30]]), full=True)
    q = draw_queries(13, dtype, 1, 1, 8 * size, 128).astype(np.float64)
    q[:, :, 1::2] *= 1e-3
    q[:, :, 2, 17] = 40
    q[:, :, 6] = 0
    check(packed_cuda, (q * unit).astype(DTYPES[dtype]), pages, scale=0.1 / unit)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("order", ["rising", "falling", "random", "within"])
@each_size
@each_ladder
def test_values_of_any_size(dtype: str, order: str, size: int, ladder: str) -> None:
    """Scales of V from 0 to 1 or 300 in one sequence, page by page or in every page."""
    pages = draw_pages(14, dtype, 64, LADDERS[ladder], np.array([[60, 90]]), full=True)
    rng, most = np.random.default_rng(14), 180 if dtype == "bfloat16" else 110
    for head, n in enumerate(pages.num_pages[0]):
        rising = np.linspace(0, most, n).astype(np.uint8)
        scales = {"falling": rising[::-1], "random": rng.permutation(rising)}.get(order, rising)
        for rung, index, scale in zip(pages.rung[0, head], pages.index[0, head], scales, strict=False):
            layout = pages.layouts[rung]
            own = (
                rng.integers(0, most, 16)
                if order == "within"
                else scale + rng.integers(0, 8, 16) * (scale > 0)
            )
            pages.pools[rung][index, layout.v_scales : layout.v_scales + 16] = own
    check(packed_cuda, draw_queries(14, dtype, 1, 1, 8 * size, 64), pages)


@each_size
@each_ladder
def test_one_token_takes_all(size: int, ladder: str) -> None:
    """A key along the query, 10 binary orders above the others."""
    pages = draw_pages(15, "float16", 64, LADDERS[ladder], np.array([[33]]), full=True)
    layout, index = pages.layouts[pages.rung[0, 0, 21]], pages.index[0, 0, 21]
    pages.pools[pages.rung[0, 0, 21]][index, layout.k_scales + 9] += 32  # 16 times as long
    check(packed_cuda, draw_queries(15, "float16", 1, 1, 4 * size, 64), pages)


@pytest.mark.parametrize("softcap", [0.0, 3.0])
@each_size
@each_ladder
def test_kept_scores(softcap: float, size: int, ladder: str) -> None:
    pages = draw_pages(18, "bfloat16", 128, LADDERS[ladder], np.array([[20, 9], [0, 33]]))
    size_of_scores = np.float32(0.5 if ladder == "widths" else 1).astype(DTYPES["bfloat16"])
    q = draw_queries(18, "bfloat16", 2, 2, 4 * size, 128) * size_of_scores
    check(packed_cuda, q, pages, keep_scores=1, softcap=softcap)
    scores, exact, found = check_scores_as_bytes(q, pages, softcap)
    used = used_quads(pages)
    of_all = np.where(used[..., None, None], scores, -np.inf)
    near = (of_all > of_all.max(axis=(2, 4), keepdims=True) - 23 * np.log(2))[used]
    assert np.isfinite(found[near]).all()
    assert near.sum() > 0.4 * np.isfinite(exact).sum()


@pytest.mark.parametrize("options", [{}, {"softcap": 5.0, "keep_scores": 1}], ids=str)
@each_size
@each_ladder
def test_a_window(options: dict[str, Any], size: int, ladder: str) -> None:
    pages = spread(draw_pages(22, "bfloat16", 128, LADDERS[ladder], np.array([[40, 7], [0, 200]])), 22)
    first, left = np.array([100_000, 99_993], np.int32), 100_000 - WINDOW_STARTS
    q = draw_queries(22, "bfloat16", 2, 2, 4 * size, 128)
    whole = {"window": (left, -1), "first_position": first, **options}
    check(packed_cuda, q, pages, unread(pages, first, left), **whole)


@pytest.mark.parametrize("wrong", [np.nan, np.inf])
@each_size
@each_ladder
def test_a_query_that_is_no_number_shows(wrong: float, size: int, ladder: str) -> None:
    pages = draw_pages(2, "bfloat16", 128, LADDERS[ladder], np.array([[9, 9]]), full=True)
    q = draw_queries(2, "bfloat16", 1, 1, 8 * size, 128)
    expected, low = reference.packed_attention(q, pages)[0], low_precision(q, pages)[0]
    q[0, 0, 5, 77] = wrong
    out = to_numpy(attend(packed_cuda, q, pages).out)
    assert np.isnan(out[0, 0, 5].astype(np.float32)).all()
    others = [i for i in range(8 * size) if i != 5]
    assert_accurate(out[:, :, others], expected[:, :, others], low[:, :, others])


@each_size
@each_ladder
def test_the_same_bits_again_and_in_a_graph_that_follows_the_lengths(size: int, ladder: str) -> None:
    pages = draw_pages(6, "bfloat16", 128, LADDERS[ladder], np.array([[300, 41]]))
    q = draw_queries(6, "bfloat16", 1, 1, 8 * size, 128)
    first = to_numpy(attend(packed_cuda, q, pages).out)
    device, queries = on_device(pages), to_torch(q)
    out, lse = torch.full_like(queries, float("nan")), torch.empty((1, 8 * size, 1), device="cuda")
    workspace = packed_cuda.make_workspace(queries, 2, 4 * size, 128)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(2):
            packed_cuda.attend(queries, device, out, lse, workspace, scale=128**-0.5)
    for _ in range(2):
        graph.replay()
        assert np.array_equal(to_numpy(out).view(np.int16), first.view(np.int16))
    assert not workspace.semaphores.any()
    device.num_pages.copy_(torch.tensor([[68, 0]]))
    graph.replay()
    shorter = type(pages)(**(vars(pages) | {"num_pages": np.array([[68, 0]], np.int32)}))
    assert_accurate(to_numpy(out), reference.packed_attention(q, shorter)[0], low_precision(q, shorter)[0])

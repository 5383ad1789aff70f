"""Windows of packed attention on a GPU: the same results as float64, and no page read that no query sees."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from kvlab.pages import NO_PAGE, LayerPages
from tests.gpu import packed_cases
from tests.gpu.packed_cases import (
    LADDERS,
    MIXED,
    attend,
    check,
    draw_pages,
    draw_queries,
    own_pool,
    to_numpy,
)

backend = packed_cases.each_backend

WINDOW_STARTS = (1 << 16) + 30_000


def pages_of(pages: LayerPages) -> list[tuple[int, ...]]:
    """Entries that have a page."""
    used = np.arange(pages.rung.shape[2]) < pages.num_pages[..., None]
    return list(map(tuple, np.argwhere(used & (pages.index != NO_PAGE))))


def spread(pages: LayerPages, seed: int) -> LayerPages:
    """Give tokens positions, those of a page near each other: a third of the pages about WINDOW_STARTS."""
    rng = np.random.default_rng(seed)
    for at in pages_of(pages):
        near = rng.random() < 0.3
        pages.base[at] = 1 if near else rng.integers(0, 3)
        start = 29_980 if near else rng.integers(0, 65_000)
        record = pages.pools[pages.rung[at]][pages.index[at]]
        layout = pages.layouts[pages.rung[at]]
        layout.positions_in(record[None])[0] = start + rng.integers(0, 50 if near else 500, 16)
    return pages


def unread(pages: LayerPages, first_position: np.ndarray, left: int) -> LayerPages:
    """The same pages, all NaN but for the positions where the window of no query reaches."""
    hostile = dataclasses.replace(pages, pools=tuple(map(own_pool, pages.pools, pages.layouts)))
    hidden = 0
    for at in pages_of(pages):
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


@pytest.mark.parametrize("ladder", LADDERS)
def test_a_window_with_softcap_and_kept_scores(backend: Any, ladder: str) -> None:
    pages = spread(draw_pages(22, "bfloat16", 128, LADDERS[ladder], np.array([[40, 7], [0, 200]])), 22)
    first, left = np.array([100_000, 99_993], np.int32), 100_000 - WINDOW_STARTS
    q = draw_queries(22, "bfloat16", 2, 9, 8, 128)
    options = {"window": (left, -1), "first_position": first, "softcap": 5.0, "keep_scores": 3}
    check(backend, q, pages, unread(pages, first, left), **options)


@pytest.mark.parametrize("rungs", [((2, 2),), ((4, 4),), ((16, 16),), (((8, 4, 2, 2), 3),)], ids=str)
def test_a_window_over_one_rung(backend: Any, rungs: tuple[tuple[Any, int], ...]) -> None:
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

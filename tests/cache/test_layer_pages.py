"""What an attention call is given of a layer: tables that do not fit, or point nowhere, are refused."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from kvlab.pages import NO_PAGE, LayerPages, PageLayout, new_pool


def good_layer() -> LayerPages:
    layouts = PageLayout(32, 2, 2, 2), PageLayout(32, 4, 2, 2)
    shape = 2, 3, 8
    return LayerPages(
        layouts=layouts,
        pools=(new_pool(5, layouts[0]), new_pool(2, layouts[1])),
        rung=np.ones(shape, np.uint8),
        count=np.full(shape, 16, np.uint8),
        index=np.ones(shape, np.uint32),
        base=np.zeros(shape, np.uint16),
        num_pages=np.full((2, 3), 4, np.int32),
        dtype="bfloat16",
        k_mean=np.zeros((2, 3, 32), np.float16),
    )


def test_a_table_that_is_right() -> None:
    layer = good_layer()
    layer.check_entries()
    assert layer.head_dim == 32
    layer.rung[..., 4:], layer.count[..., 4:], layer.index[..., 4:] = 200, 255, 2**32 - 1  # unused entries
    layer.count[..., 1], layer.index[..., 1] = 0, NO_PAGE
    layer.check_entries()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dtype": "float64"}, "dtype must be one of float16, bfloat16, float32, got 'float64'"),
        ({"dtype": "float32"}, "layouts must have one head_dim and the itemsize of float32"),
        (
            {"layouts": (PageLayout(32, 2, 2, 2),)},
            "layouts and pools must be of equal length, .* got 1 and 2",
        ),
        ({"layouts": (), "pools": ()}, "at least 1, got 0 and 0"),
        ({"layouts": (PageLayout(32, 2, 2, 2), PageLayout(48, 4, 2, 2))}, "layouts must have one head_dim"),
        ({"layouts": (PageLayout(32, 2, 2, 2),) * 2}, "pool must be uint8"),
        ({"num_pages": np.zeros((2, 3), np.int64)}, "num_pages must be int32"),
        ({"num_pages": np.zeros(2, np.int32)}, r"num_pages must be int32 .* got int32 \(2,\)"),
        ({"rung": np.zeros((2, 8), np.uint8)}, "rung must be uint8"),
        ({"rung": np.zeros((2, 3, 6), np.uint8)}, r"entries must be a multiple of 4, got .* \(2, 3, 6\)"),
        ({"count": np.zeros((2, 3, 8), np.int32)}, "count must be uint8"),
        (
            {"index": np.zeros((2, 3, 4), np.uint32)},
            r"index must be uint32 \(2, 3, 8\), got uint32 \(2, 3, 4\)",
        ),
        ({"base": np.zeros((2, 3, 8), np.uint32)}, "base must be uint16"),
        ({"k_mean": np.zeros((2, 3, 32), np.float32)}, "k_mean must be float16"),
        ({"k_mean": np.zeros((2, 1, 32), np.float16)}, r"k_mean must be float16 \(2, 3, 32\)"),
    ],
)
def test_tables_that_do_not_fit_together(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(good_layer(), **change)


def test_pools_that_are_not_aligned() -> None:
    layer = good_layer()
    shifted = new_pool(6, layer.layouts[0]).reshape(-1)[8:][: layer.pools[0].size]
    with pytest.raises(ValueError, match="start at a multiple of 16 bytes"):
        dataclasses.replace(layer, pools=(shifted.reshape(layer.pools[0].shape), layer.pools[1]))


@pytest.mark.parametrize(
    ("name", "wrong", "message"),
    [
        ("rung", 2, r"rung must be below 2, got 2 at \(row, head, entry\) \(1, 2, 3\)"),
        ("rung", 0, r"entries 4 n to 4 n \+ 3, got \[1 1 1 0\] at \(row, head, entry\) \(1, 2, 0\)"),
        ("count", 17, r"count must be below 17, got 17 at \(row, head, entry\) \(1, 2, 3\)"),
        ("index", 2, r"index must be below 2, got 2 at \(row, head, entry\) \(1, 2, 3\)"),
        ("index", NO_PAGE, r"index must be below 2, got 4294967295 at \(row, head, entry\) \(1, 2, 3\)"),
    ],
)
def test_entries_that_name_no_page(name: str, wrong: int, message: str) -> None:
    layer = good_layer()
    getattr(layer, name)[1, 2, 3] = wrong
    with pytest.raises(ValueError, match=message):
        layer.check_entries()


@pytest.mark.parametrize("wrong", [-4, 3, 12])
def test_numbers_of_entries_that_a_table_cannot_have(wrong: int) -> None:
    layer = good_layer()
    layer.num_pages[1, 1] = wrong
    with pytest.raises(ValueError, match="num_pages must be multiples of 4 from 0 to 8"):
        layer.check_entries()

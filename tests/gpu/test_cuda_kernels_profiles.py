"""Packed attention on a GPU over keys in blocks of channels, against float64 over the same pages."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

from kvlab.ops.numba import packed as packed_numba
from kvlab.reference import packed as reference
from tests.compare import assert_accurate
from tests.gpu import packed_cases
from tests.gpu.packed_cases import (
    DTYPES,
    MIXED_PROFILES,
    PROFILES,
    attend,
    check,
    draw_pages,
    draw_queries,
    low_precision,
    on_device,
    to_numpy,
    to_torch,
)
from tests.ops import test_packed

OTHERS = ((2, 0, 0, 0), (2, 2, 2, 2), (4, 0, 0, 0), (4, 4, 4, 4), (8, 0, 0, 0), (8, 8, 4, 2), (8, 8, 8, 0))
backend = packed_cases.each_backend


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("profile", PROFILES, ids=str)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_one_profile(backend: Any, dtype: str, profile: tuple[int, ...], head_dim: int) -> None:
    pages = draw_pages(sum(profile), dtype, head_dim, ((profile, 4),), np.array([[3, 20], [1, 0]]))
    check(backend, draw_queries(1, dtype, 2, 1, 8, head_dim), pages)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [64, 128, 192, 256])
def test_all_profiles_in_one_sequence(backend: Any, dtype: str, head_dim: int) -> None:
    pages = draw_pages(head_dim, dtype, head_dim, MIXED_PROFILES, np.array([[40, 7], [0, 200]]))
    check(backend, draw_queries(7, dtype, 2, 1, 8, head_dim), pages)


def test_other_profiles_and_raw_sides(backend: Any) -> None:
    rungs = (*zip(OTHERS, (16, 2, 3, 4, 8, 16, 2), strict=True), (16, 4))
    pages = draw_pages(5, "bfloat16", 128, rungs, np.array([[60, 30]]))
    check(backend, draw_queries(5, "bfloat16", 1, 1, 6, 128), pages)


@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 8, 9, 16])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_group_sizes(backend: Any, group: int, head_dim: int) -> None:
    pages = draw_pages(group, "bfloat16", head_dim, MIXED_PROFILES[:5], np.array([[20, 30]]))
    check(backend, draw_queries(group, "bfloat16", 1, 1, 2 * group, head_dim), pages)


@pytest.mark.parametrize(("seqlen", "group"), [(4, 1), (2, 4), (3, 5), (8, 1), (16, 16)])
def test_several_query_tokens_see_all_pages(backend: Any, seqlen: int, group: int) -> None:
    pages = draw_pages(11, "float16", 64, MIXED_PROFILES, np.array([[20, 9], [0, 33]]))
    check(backend, draw_queries(11, "float16", 2, seqlen, 2 * group, 64), pages)


def test_softcap_scale_and_kept_scores(backend: Any) -> None:
    pages = draw_pages(3, "bfloat16", 128, MIXED_PROFILES, np.array([[20, 9], [0, 33]]))
    check(backend, draw_queries(3, "bfloat16", 2, 3, 8, 128), pages, softcap=5.0, scale=0.2, keep_scores=2)


def test_comparison_refuses_wrong_answers() -> None:
    pages = draw_pages(4, "bfloat16", 128, MIXED_PROFILES, np.array([[12, 9]]))
    q = draw_queries(4, "bfloat16", 1, 1, 8, 128)
    out = reference.packed_attention(q, pages)[0]
    low_out, _ = low_precision(q, pages)
    mistakes = test_packed.wrong_pages(pages)
    for name in (
        *("channels in no order", "blocks of the next one's gain", "channels of keys not scaled"),
        *("exponent of K one too large", "exponent of V one too large", "codes of K one lane off"),
    ):
        with pytest.raises(AssertionError, match="out: "):
            assert_accurate(reference.packed_attention(q, mistakes[name])[0].astype(q.dtype), out, low_out)


def test_same_bits_in_any_place_of_memory(backend: Any) -> None:
    """Pools begin at odd multiples of 16 bytes, and tables between canaries."""
    pages = draw_pages(12, "bfloat16", 64, MIXED_PROFILES, np.array([[60, 33]]))
    q, device = draw_queries(12, "bfloat16", 1, 1, 8, 64), on_device(pages)
    options = {"scale": 64**-0.5, "softcap": 0.0, "keep_scores": 0}
    expected = backend.launch(to_torch(q), device, 4, **options).out

    def moved(x: torch.Tensor) -> torch.Tensor:
        room = torch.full((x.numel() * x.element_size() + 128,), 255, dtype=torch.uint8, device="cuda")
        copy = room[48 : 48 + x.numel() * x.element_size()].view(x.dtype).view(x.shape)
        return copy.copy_(x)

    tables = {name: moved(getattr(device, name)) for name in ("exponent", "k_order", "k_gain")}
    other = dataclasses.replace(device, pools=tuple(map(moved, device.pools)), **tables)
    assert torch.equal(backend.launch(to_torch(q), other, 4, **options).out, expected)


@pytest.mark.parametrize("head_dim", [64, 192])
def test_float32_caches(head_dim: int) -> None:
    """Backend "numba" alone takes them."""
    rng = np.random.default_rng(head_dim)
    rungs = test_packed.RUNGS_IN_BLOCKS[::4]
    pages = test_packed.make_pages(rng, rungs, head_dim, "float32", np.array([[30, 0], [5, 21]]))
    q = rng.standard_normal((2, 1, 4, head_dim)).astype(np.float32)
    case = test_packed.PackedCase(q, pages, {"scale": None, "softcap": 0.0, "keep_scores": 0})
    actual = attend(packed_numba, q, pages)
    out, lse, _ = reference.packed_attention(q, pages)
    low_out, low_lse = test_packed.low_precision(case)
    assert_accurate(to_numpy(actual.out), out, low_out)
    assert_accurate(to_numpy(actual.lse), lse, low_lse, "lse")

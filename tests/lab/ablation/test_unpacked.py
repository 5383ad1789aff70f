"""One code a byte: attention is the same as over packed pages, and the bytes are those of 8 bits."""

from __future__ import annotations

import numpy as np
import pytest

from kvlab import MixedPrecisionCache
from kvlab.lab.ablation.unpacked import page_nbytes, unpack_pages
from kvlab.ops.packed import packed_attention
from kvlab.pages import LayerPages
from kvlab.reference.packed import packed_attention as oracle


def filled(bits: str, dtype: str = "float16", tokens: int = 200) -> MixedPrecisionCache:
    cache = MixedPrecisionCache(
        1, 4, 2, 32, batch=2, bits=bits, budget=0.5, plan_length=tokens, dtype=dtype, recent=16
    )
    rng = np.random.default_rng(0)
    for _ in range(4):
        q = rng.standard_normal((2, tokens // 4, 4, 32), dtype=np.float32)
        cache.step(0, q, *rng.standard_normal((2, 2, tokens // 4, 2, 32), dtype=np.float32))
    return cache


def attend(pages: LayerPages, backend: str | None = None) -> np.ndarray:
    q = np.random.default_rng(1).standard_normal((2, 3, 4, 32), dtype=np.float32)
    return np.asarray(packed_attention(q, pages, backend=backend).out)


@pytest.mark.parametrize("bits", ["2,3,4,8", "k4v2,8", "2,16", "3,4"])
def test_attention_is_that_over_packed_pages(bits: str) -> None:
    pages = filled(bits).pages(0)
    wide = unpack_pages(pages)
    assert {layout.bits_k for layout in wide.layouts} <= {8, 16}
    np.testing.assert_allclose(attend(wide), attend(pages), rtol=0, atol=1e-6)
    q = np.random.default_rng(1).standard_normal((2, 3, 4, 32), dtype=np.float32)
    options = {"scale": 0.2, "softcap": 0.0, "keep_scores": 0}
    with np.errstate(invalid="ignore"):  # unused slots hold anything
        found, expected = (oracle(q, each, **options)[0] for each in (wide, pages))
    np.testing.assert_array_equal(found, expected)  # every code stands for the very same value


def test_a_changed_code_is_noticed() -> None:
    pages = filled("2,3,4,8").pages(0)
    wide = unpack_pages(pages)
    rung = int(wide.rung[0, 0, 0])
    wide.pools[rung][wide.index[0, 0, 0], :512] ^= 7
    assert np.abs(attend(wide) - attend(pages)).max() > 1e-4


def test_bytes_are_those_of_the_arrays_and_need_no_slack() -> None:
    cache = filled("2,3,4,8")
    pages = cache.pages(0)
    wide = unpack_pages(pages)
    assert page_nbytes(pages) == cache.nbytes
    live = sum(int(counts.sum()) for counts in cache.allocation().values())
    assert sum(len(pool) for pool in wide.pools) == live
    records = sum(pool.nbytes for pool in wide.pools)
    tables = pages.k_mean, pages.k_shift, pages.exponent, pages.num_pages
    assert page_nbytes(wide) == records + 8 * live + sum(table.nbytes for table in tables)
    assert page_nbytes(wide) > 1.2 * page_nbytes(pages)


def test_an_empty_layer_unpacks() -> None:
    cache = MixedPrecisionCache(1, 4, 2, 32, bits="2,4")
    assert page_nbytes(unpack_pages(cache.pages(0))) == cache.nbytes


def test_bytes_of_profiles_are_those_of_the_cache() -> None:
    cache = MixedPrecisionCache(1, 4, 2, 64, budget=None, bits="k4422v2,k8444v4")
    cache.append(0, *np.random.default_rng(0).standard_normal((2, 1, 200, 2, 64), dtype=np.float32))
    ratios = 2 * 2 * 64 // 2  # bytes, heads, rotary pairs: attention does not read them
    assert page_nbytes(cache.pages(0)) + ratios == cache.nbytes

"""Packed attention of backend "numba" in Numba's CUDA simulator against float64, on tiny shapes.

Needs `NUMBA_ENABLE_CUDASIM=1` before Numba is imported, so it runs in a process of its own (`make test`). The
simulator has no `syncwarp`; here it is a barrier of the 32 threads of a warp.
"""

from __future__ import annotations

import dataclasses
import threading
from collections import defaultdict
from typing import Any

import numpy as np
import pytest
from kvlab.numba_kernels import cuda_packed, cuda_packed_merge
from numba import cuda
from numba.cuda.simulator.kernelapi import FakeCUDAModule
from numpy.typing import NDArray

from kvlab.arrays import numpy_dtype
from kvlab.cache.pages import LayerPages
from kvlab.numba_cuda import build_numba
from kvlab.ops import packed_numba
from kvlab.reference import packed as reference
from tests.compare import assert_accurate
from tests.ops.test_packed import RUNGS, SAME_WIDTHS, PackedCase, low_precision, make_pages, wrong_pages
from tests.strategies import random_floats

Array = NDArray[Any]


@pytest.fixture(autouse=True)
def _warp_barriers(monkeypatch: pytest.MonkeyPatch) -> None:
    barriers: dict[Any, threading.Barrier] = defaultdict(lambda: threading.Barrier(32))
    lock = threading.Lock()

    def syncwarp(module: FakeCUDAModule) -> None:
        thread = threading.current_thread()
        with lock:
            barrier = barriers[id(thread._manager), thread.threadIdx.x // 32]  # type: ignore[attr-defined]
        barrier.wait(timeout=60)

    monkeypatch.setattr(FakeCUDAModule, "syncwarp", syncwarp, raising=False)


def simulate(case: PackedCase, shares: int = 1, warps: int = 1) -> tuple[Array, Array, Array]:
    """Run both kernels as `packed_numba.attend` launches them, with so many parts a sequence."""
    q, pages, options = case.q, case.pages, case.options
    batch, seqlen_q, heads, head_dim = q.shape
    kv_heads, entries = pages.rung.shape[1:]
    group = heads // kv_heads
    query_rows, kept = seqlen_q * group, options["keep_scores"] * group
    words = np.concatenate([pool.reshape(-1).view(np.uint32) for pool in pages.pools])
    starts = np.cumsum([0, *(pool.size for pool in pages.pools[:-1])])
    places, bits_k, bits_v = packed_numba.table_arguments(tuple(pages.layouts), starts.tolist())
    common = packed_numba.options_of(tuple(pages.layouts), pages.dtype, query_rows)
    rows = common["rows"]
    parts, row_blocks = shares * warps, -(-query_rows // rows)
    bits = np.uint32 if pages.dtype == "float32" else np.uint16
    partial = np.full(batch * kv_heads * row_blocks * parts * 2 * rows * (head_dim + 2), np.nan, np.float32)
    scores = np.full(batch * kv_heads * entries * max(kept, 1) * 64, np.nan, np.float32)
    out, lse = np.full(q.size, 7, bits), np.full(batch * heads * seqlen_q, 7, np.float32)

    attend, _, _ = cuda_packed.attend_pages(
        **common, softcap=int(options["softcap"] > 0), kept=int(kept > 0), blocks=6
    )
    flat = [
        np.ascontiguousarray(x).reshape(-1) for x in (pages.rung, pages.count, pages.index, pages.num_pages)
    ]
    scale = head_dim**-0.5 if options["scale"] is None else options["scale"]
    with np.errstate(all="ignore"):
        cuda.jit(attend)[(row_blocks * shares, kv_heads, batch), 32 * warps](
            words, tuple(places), 0, bits_k, bits_v, *flat, pages.k_mean.reshape(-1).view(np.uint16),
            q.reshape(-1).view(bits), *(np.int64(step // q.itemsize) for step in q.strides[:3]),
            partial, scores, shares, entries, query_rows, group, kept, np.float32(scale),
            np.float32(options["softcap"]),
        )  # fmt: skip
        merging = {name: common[name] for name in common if name != "widths_k"}
        merge, _, _ = cuda_packed_merge.merge_parts(**merging)
        cuda.jit(merge)[(query_rows, kv_heads, batch), cuda_packed.MERGE_THREADS](
            partial, out, lse, parts, query_rows, group
        )
    kept_scores = scores[: batch * kv_heads * entries * kept * 64].reshape(batch, kv_heads, entries, kept, 64)
    return out.view(q.dtype).reshape(q.shape), lse.reshape(batch, heads, seqlen_q), kept_scores


def case_of(
    rungs: tuple[tuple[int, int], ...],
    num_pages: list[list[int]],
    *,
    head_dim: int = 16,
    dtype: str = "float32",
    seqlen_q: int = 1,
    group: int = 1,
    **options: Any,
) -> PackedCase:
    rng = np.random.default_rng(head_dim + len(rungs) + seqlen_q + group)
    pages = make_pages(rng, rungs, head_dim, dtype, np.array(num_pages), counts=(1, 37, 63, 64, 0, 64))
    shape = (len(num_pages), seqlen_q, len(num_pages[0]) * group, head_dim)
    q = random_floats(rng, shape, numpy_dtype(dtype), (-4, 1))
    return PackedCase(q, pages, {"scale": None, "softcap": 0.0, "keep_scores": 0} | options)


def assert_right(case: PackedCase, **grid: int) -> None:
    out, lse, kept = simulate(case, **grid)
    expected, expected_lse, scores = reference.packed_attention(case.q, case.pages, **case.options)
    low_out, low_lse = low_precision(case)
    assert_accurate(out, expected, low_out)
    assert_accurate(lse, expected_lse, low_lse, "lse")
    if case.options["keep_scores"]:
        used = (np.arange(scores.shape[2]) < case.pages.num_pages[..., None])[..., None, None]
        close = np.isclose(kept, scores, rtol=1e-4, atol=1e-4)
        assert (close | ~used).all()


@pytest.mark.parametrize("bits", [2, 3, 4, 8, 16])
@pytest.mark.parametrize("head_dim", [16, 64, 80])
def test_one_width(bits: int, head_dim: int) -> None:
    """At 64 the tiles that share words lie side by side, at 16 and 80 they go over to the next tokens."""
    assert_right(case_of(((bits, bits),), [[1 if head_dim > 16 else 3]], head_dim=head_dim))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_all_widths_ragged_rows_and_several_queries(dtype: str) -> None:
    case = case_of(
        SAME_WIDTHS, [[4, 0], [2, 1]], dtype=dtype, seqlen_q=2, group=3, keep_scores=1, softcap=2.0
    )
    assert_right(case, shares=2)


def test_unequal_widths_and_warps_that_share_a_block() -> None:
    case = case_of(RUNGS[1:24:6], [[7]], group=2)
    assert_right(case, warps=2, shares=2)
    once, again = simulate(case, warps=2), simulate(case, shares=2)
    assert all(np.array_equal(a, b) for a, b in zip(once, again, strict=True)), "parts decide, not blocks"


def test_the_comparison_rejects_what_mistakes_would_give() -> None:
    case = case_of(((2, 4), (16, 3)), [[5, 6]], group=2)
    expected, _, _ = reference.packed_attention(case.q, case.pages)
    low, _ = low_precision(case)
    for name, wrong in wrong_pages(case.pages).items():
        if name in ("last page missed", "codes of K one lane off", "codes of V one word off"):
            out, _, _ = simulate(dataclasses.replace(case, pages=wrong))
            with pytest.raises(AssertionError, match="out: "):
                assert_accurate(np.nan_to_num(out), expected, low)


def test_nan_of_a_live_token_shows_and_infinite_keys_have_their_limits() -> None:
    case = case_of(((4, 4),), [[2, 2]])
    layout, pages = case.pages.layouts[0], case.pages
    live = int(pages.count[0, 1, 0]) - 1
    pages.pools[0][pages.index[0, 1, 0], layout.v_steps + live] = 0xFF
    out, lse, _ = simulate(case)
    assert np.isnan(out[0, 0, 1]).all()
    assert np.isfinite(out[0, 0, 0]).all()
    assert np.isfinite(lse).all()


def test_the_kernel_cannot_be_compiled_in_the_simulator() -> None:
    """Nothing of the launch road may be mistaken for having run here."""
    with pytest.raises(Exception, match="cuda_packed"):
        build_numba("cuda_packed", "attend_pages", {"head_dim": 16}, "sm_90a")


def test_pages_type_is_the_caches() -> None:
    assert isinstance(case_of(((2, 2),), [[1]]).pages, LayerPages)

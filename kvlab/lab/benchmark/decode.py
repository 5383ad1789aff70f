"""`kvlab benchmark decode`: one query token over packed pages, against dense attention of torch.

The model is one layer with 32 query heads and 8 KV heads of 128 channels. The baseline is torch's
`scaled_dot_product_attention` over the same keys and values, decoded to float32 or bfloat16, with the query
heads of a group as rows of one head: 3 to 4 times faster than `enable_gqa=True`. Both run on the same
threads, in turns. The threads of torch wait asleep (``OMP_WAIT_POLICY=PASSIVE``, unless that is set): by
default they spin for milliseconds after a call, on processors that the next call in turn should have.

Two floors stand beside every time: the bytes of the pages at the speed at which torch sums 256 MiB, and the
multiplications at the speed of its float32 matrix product, which nothing that multiplies in float32 can beat.
"""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvlab.arrays import numpy_dtype
from kvlab.errors import needs_extra
from kvlab.lab.benchmark.baseline import Options
from kvlab.lab.results import Row
from kvlab.lab.timing import limited_threads, time_in_turns
from kvlab.ops.cpu.page_tokens import decode_tokens
from kvlab.ops.packed import packed_attention
from kvlab.pages import QUAD, TOKENS_PER_PAGE, LayerPages, PageLayout, Width, new_pool, width_number
from kvlab.reference.blocks import RMS
from kvlab.reference.codec import hadamard
from kvlab.reference.packed import element_channels
from kvlab.reference.pages import SCALES, value_signs

__all__ = ["NOTE", "WIDTHS", "Mixed", "benchmark_decode"]

NOTE = "speedup: median over turns of the time of torch's scaled_dot_product_attention, heads grouped"

NUM_HEADS_Q, NUM_HEADS_KV, HEAD_DIM = 32, 8, 128
CONTEXTS = (2_048, 8_192, 32_768)
Mixed = Sequence[int | tuple[Width, int]]
"""Widths, or pairs of a width or profile of keys and a width of values, that pages have in turn."""
WIDTHS: dict[str, Mixed] = {
    "2": (2,),
    "3": (3,),
    "4": (4,),
    "8": (8,),
    "mixed, average 4": (2, 3, 3, 4, 8),
    "profiles, average 4.1": (
        ((4, 2, 2, 0), 2), ((4, 4, 2, 2), 2), ((8, 4, 2, 2), 3), ((8, 4, 4, 4), 4), ((8, 8, 8, 8), 8),
    ),
}  # fmt: skip
"""What pages hold, by name."""


def benchmark_decode(options: Options) -> list[Row]:
    """Time one decode step per context length, widths and dtype of the query and of what torch attends.

    A row has ``context``, ``widths``, ``dtype``, ``threads``; ``packed_ms``, ``torch_ms``: medians;
    ``speedup``: median over turns of torch's time over ours; ``bytes_floor_ms``, ``flops_floor_ms``;
    ``of_floor``: the higher floor over packed_ms, at most about 1. Two sides that do not agree are a
    RuntimeError.

    Examples
    --------
    >>> rows = benchmark_decode(Options(repeats=1, tiny=True))
    >>> rows[0]["context"], rows[0]["widths"], rows[0]["speedup"] > 0
    (128, '2', True)
    """
    if "torch" not in sys.modules:
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    with needs_extra("hf", "kvlab benchmark decode"):
        import torch  # noqa: F401
    contexts, count, rng = (128,) if options.tiny else CONTEXTS, options.threads, np.random.default_rng(0)
    rows = []
    with limited_threads(count):
        for context, name, dtype in itertools.product(contexts, WIDTHS, ("float32", "bfloat16")):
            row: Row = {"context": context, "widths": name, "dtype": dtype, "threads": count}
            rows.append(row | _time(make_pages(rng, WIDTHS[name], context), dtype, rng, options.repeats))
    return rows


def make_pages(rng: np.random.Generator, widths: Mixed, tokens: int) -> LayerPages:
    """Return full pages of random codes for one row, their widths taken in turn, scattered over the pools."""
    if tokens <= 0 or tokens % (QUAD * TOKENS_PER_PAGE):
        raise ValueError(f"contexts must be multiples of {QUAD * TOKENS_PER_PAGE} tokens, got {tokens}")
    sides: list[tuple[Width, int]] = [(x, x) if isinstance(x, int) else x for x in widths]
    ladder = sorted(set(sides), key=lambda rung: (width_number(rung[0]), rung[1]))
    of_quads = (1, NUM_HEADS_KV, tokens // (QUAD * TOKENS_PER_PAGE))
    rung = np.resize([ladder.index(rung) for rung in sides], of_quads).repeat(QUAD, axis=-1)
    index = np.zeros(rung.shape, np.uint32)
    layouts = [PageLayout(HEAD_DIM, *rung, 4) for rung in ladder]
    pools = []
    for r, layout in enumerate(layouts):
        mine = rung == r
        index[mine] = rng.permutation(mine.sum())
        pool = new_pool(int(mine.sum()), layout)
        pool[:] = rng.integers(0, 256, pool.shape, np.uint8)
        # Uniform codes with this scale lie within 2, so values have about the variance 4 / 3; keys in blocks,
        # multiplied by RMS, have about that of 1.
        for begin, bits in ((layout.k_scales, layout.bits_k), (layout.v_scales, layout.bits_v)):
            scale = 0.16 if isinstance(bits, tuple) else 2.0 ** (1 - bits)
            pool[:, begin : begin + TOKENS_PER_PAGE] = np.abs(SCALES[:0xF8] - np.float32(scale)).argmin()
        pools.append(pool)
    return LayerPages(
        layouts=tuple(layouts),
        pools=tuple(pools),
        rung=rung.astype(np.uint8),
        count=np.full(rung.shape, TOKENS_PER_PAGE, np.uint8),
        index=index,
        base=np.zeros(rung.shape, np.uint16),
        num_pages=np.full(rung.shape[:2], rung.shape[2], np.int32),
        k_mean=np.zeros((1, NUM_HEADS_KV, HEAD_DIM), np.float16),
        k_gain=np.full((1, NUM_HEADS_KV, 4), RMS, np.float32),
        dtype="float32",
    )


def decode(pages: LayerPages) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Return keys and values (1, KV heads, tokens, head_dim), page by page."""
    shape = (*pages.rung.shape, TOKENS_PER_PAGE, pages.head_dim)
    keys, values = np.empty(shape, np.float32), np.empty(shape, np.float32)
    channels = element_channels(pages, 0, 0).astype(np.float32)  # all heads have the frame of `make_pages`
    for r, (pool, layout) in enumerate(zip(pages.pools, pages.layouts, strict=True)):
        mine = pages.rung == r
        page = np.repeat(pages.index[mine].astype(np.int64), TOKENS_PER_PAGE)
        slot = np.tile(np.arange(TOKENS_PER_PAGE), mine.sum())
        k, v = decode_tokens(pool, layout, pages.dtype, page, slot)
        keys[mine] = (k @ channels if layout.in_blocks else hadamard(k)).reshape(-1, *shape[-2:])
        values[mine] = (hadamard(v) * value_signs(pages.head_dim)).reshape(-1, *shape[-2:])
    joined = (*pages.num_pages.shape, -1, pages.head_dim)
    return keys.reshape(joined), values.reshape(joined)


def _time(pages: LayerPages, dtype: str, rng: np.random.Generator, repeats: int) -> Row:
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    kind = getattr(torch, dtype)
    group = NUM_HEADS_Q // NUM_HEADS_KV
    q = rng.standard_normal((1, 1, NUM_HEADS_Q, HEAD_DIM), np.float32).astype(numpy_dtype(dtype))
    grouped = torch.from_numpy(q.astype(np.float32)).to(kind).reshape(1, NUM_HEADS_KV, group, HEAD_DIM)
    k, v = (torch.from_numpy(x).to(kind) for x in decode(pages))
    expected = scaled_dot_product_attention(grouped.float(), k.float(), v.float()).reshape(q.shape).numpy()
    error = np.abs(packed_attention(q, pages).out.astype(np.float32) - expected).max()
    allowed = 2e-5 if dtype == "float32" else 2e-2
    if not error <= allowed * np.abs(expected).max():
        raise RuntimeError(
            f"packed attention is off by {error} where torch gives up to {np.abs(expected).max()}"
        )

    timings = time_in_turns(
        {
            "packed": lambda: packed_attention(q, pages),
            "torch": lambda: scaled_dot_product_attention(grouped, k, v),
        },
        repeats=repeats,
    )
    sample, square = torch.ones(2**26), torch.ones(1024, 1024)
    floors = time_in_turns({"sum": lambda: sample.sum(), "product": lambda: square @ square}, repeats=repeats)
    read = sum(
        pool.shape[0] * layout.positions for pool, layout in zip(pages.pools, pages.layouts, strict=True)
    )
    multiplications = 2 * k.shape[2] * NUM_HEADS_Q * HEAD_DIM
    bytes_floor = floors["sum"].median * read / sample.nbytes
    flops_floor = floors["product"].median * multiplications / len(square) ** 3
    packed = timings["packed"]
    return {
        "packed_ms": 1e3 * packed.median,
        "torch_ms": 1e3 * timings["torch"].median,
        "speedup": packed.ratio_to(timings["torch"]),
        "bytes_floor_ms": 1e3 * bytes_floor,
        "flops_floor_ms": 1e3 * flops_floor,
        "of_floor": max(bytes_floor, flops_floor) / packed.median,
    }

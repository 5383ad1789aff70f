"""What GPU tests of packed attention share: pages and queries, calls of both backends, the comparison.

Pages are drawn as bytes: any codes are valid codes. The counts of a quad's pages have nothing to do with each
other. Unused slots hold NaN; unused table entries, and half of those without a token, name pages that do not
exist.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

from kvlab.ops.cuda import packed as packed_cuda
from kvlab.ops.numba import packed as packed_numba
from kvlab.ops.packed import Window
from kvlab.pages import NO_PAGE, QUAD, TOKENS_PER_PAGE, DevicePages, LayerPages, PageLayout, new_pool
from kvlab.reference import packed as reference
from kvlab.reference.pages import bit_address
from tests.compare import assert_accurate, low_precision_attention

MIXED = ((2, 2), (3, 3), (4, 4), (8, 8), (16, 16))
PROFILES = ((4, 2, 2, 0), (4, 4, 2, 2), (8, 4, 2, 2), (8, 4, 4, 4), (8, 8, 8, 8))
MIXED_PROFILES = (*zip(PROFILES, (2, 2, 3, 4, 8), strict=True), (16, 16))
LADDERS = {"widths": MIXED, "profiles": MIXED_PROFILES}
DTYPES = {"float16": np.dtype(np.float16), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
BACKENDS = {"cuda": packed_cuda, "numba": packed_numba}
NAN_BITS = {"float16": 0x7E00, "bfloat16": 0x7FC0}


@pytest.fixture(params=BACKENDS)
def each_backend(request: pytest.FixtureRequest) -> Any:
    """The module that launches a backend."""
    return BACKENDS[request.param]


def on_device(pages: LayerPages) -> DevicePages:
    put = lambda x: torch.from_numpy(np.array(x)).cuda()  # noqa: E731
    tables = (
        put(pages.rung),
        put(pages.count),
        put(pages.index.view(np.int32)),
        put(pages.base.view(np.int16)),
        put(pages.num_pages),
    )
    frame = map(put, (pages.k_mean, pages.k_shift, pages.exponent, pages.k_order, pages.k_gain))
    return DevicePages(pages.layouts, tuple(map(put, pages.pools)), *tables, *frame, pages.dtype)


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
    for bits, begin, end in sides_of(layout).values():
        if bits == 16:
            values = rng.standard_normal((pages, (end - begin) // 2)).astype(DTYPES[dtype])
            pool[:, begin:end] = values.view(np.uint8)
        else:
            noise = np.exp(0.3 * rng.standard_normal((pages, TOKENS_PER_PAGE))).astype(np.float16)
            scale = np.float16(0.25 if isinstance(bits, tuple) else 1.7 / 2**bits) * noise
            pool[:, end : end + TOKENS_PER_PAGE] = (scale.view(np.uint16) >> 7).astype(np.uint8)
    return pool


def sides_of(layout: PageLayout) -> dict[str, tuple[Any, int, int]]:
    """Of K and V: bits, and where codes begin and end; scales follow."""
    return {
        "k": (layout.bits_k, layout.k_codes, layout.k_scales),
        "v": (layout.bits_v, layout.v_codes, layout.v_scales),
    }


def poison(record: np.ndarray, layout: PageLayout, dtype: str, count: int) -> None:
    """Make the unused slots of a page NaN."""
    for side, (bits, begin, end) in sides_of(layout).items():
        if bits != 16:
            record[end + count : end + TOKENS_PER_PAGE] = 0xFF
        else:
            elements = record[begin:end].view(np.uint16)
            elements[bit_address(16, layout.head_dim, side)[count:, :, 0] // 16] = NAN_BITS[dtype]


def own_pool(pool: np.ndarray, layout: PageLayout) -> np.ndarray:
    """A copy that lies as pools do."""
    copy = new_pool(len(pool), layout)
    copy[...] = pool
    return copy


def draw_pages(
    seed: int,
    dtype: str,
    head_dim: int,
    rungs: tuple[tuple[Any, int], ...],
    lengths: np.ndarray,
    *,
    full: bool = False,
) -> LayerPages:
    """Draw pages: lengths (batch, KV heads) are numbers of quads, rungs and counts random unless `full`."""
    rng = np.random.default_rng(seed)
    layouts = tuple(PageLayout(head_dim, k, v, 2) for k, v in rungs)
    quads = max(1, lengths.max()) + 2
    shape = (*lengths.shape, QUAD * quads)
    rung = rng.integers(0, len(rungs), (*lengths.shape, quads)).astype(np.uint8).repeat(QUAD, axis=-1)
    count = np.where(
        full | (rng.random(shape) < 0.7), TOKENS_PER_PAGE, rng.integers(0, TOKENS_PER_PAGE, shape)
    )
    index = np.full(shape, NO_PAGE, np.uint32)
    used = np.arange(shape[2]) < QUAD * lengths[..., None]
    with_page = used & ((count > 0) | (rng.random(shape) < 0.5))
    pools = []
    for r, layout in enumerate(layouts):
        mine = np.argwhere(with_page & (rung == r))
        pool = draw_pool(rng, layout, dtype, len(mine) + 1)
        places = rng.permutation(len(mine) + 1)[: len(mine)]
        for at, place in zip(map(tuple, mine), places, strict=True):
            index[at] = place
            poison(pool[place], layout, dtype, int(count[at]))
        pools.append(own_pool(pool, layout))
    rung[~used], count[~used] = 200, 77
    mean = rng.standard_normal((*lengths.shape, head_dim)).astype(np.float16)
    base = np.zeros(shape, np.uint16)
    return LayerPages(
        layouts,
        tuple(pools),
        rung,
        count.astype(np.uint8),
        index,
        base,
        QUAD * lengths.astype(np.int32),
        mean,
        dtype,
        draw_shifts(rng, mean.shape),
        **draw_scales(rng, mean.shape, in_blocks=any(layout.in_blocks for layout in layouts)),
    )


def draw_scales(
    rng: np.random.Generator, shape: tuple[int, ...], *, in_blocks: bool
) -> dict[str, np.ndarray]:
    """Exponents of heads, and what keys in blocks have besides: elements of about 16 are of unit size."""
    gain = 16 * np.exp2(rng.uniform(-0.5, 2, (*shape[:2], 4)))
    exponent = {"exponent": rng.integers(-3, 4, (*shape[:2], 2)).astype(np.int8)}
    if not in_blocks:
        return exponent
    return exponent | {
        "k_order": np.argsort(rng.random((*shape[:2], shape[2] // 2)), axis=-1).astype(np.uint8),
        "k_gain": gain.astype(np.float16).astype(np.float32),
    }


def draw_shifts(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Binary orders by which a few rotary pairs of keys are scaled down."""
    half = *shape[:2], shape[2] // 2
    return (rng.integers(1, 3, half) * (rng.random(half) < 0.1)).astype(np.uint8)


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


def used_quads(pages: LayerPages) -> np.ndarray:
    """Which quads of the tables are used."""
    used: np.ndarray = np.arange(pages.rung.shape[2] // QUAD) < pages.num_pages[..., None] // QUAD
    return used


def attend(backend: Any, q: np.ndarray, pages: LayerPages, **options: Any) -> Any:
    group = q.shape[2] // pages.rung.shape[1]
    arguments = {"scale": q.shape[3] ** -0.5, "softcap": 0.0, "keep_scores": 0} | options
    if "window" in arguments:
        left, _ = arguments.pop("window")
        arguments["window"] = Window(left, to_torch(arguments.pop("first_position")))
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
        used = used_quads(pages)
        kept = to_numpy(actual.scores[torch.from_numpy(used).cuda()])  # others may be uninitialised
        assert np.array_equal(np.isneginf(kept), np.isneginf(scores[used]))
        finite = np.isfinite(scores[used])
        assert np.abs(kept[finite] - scores[used][finite]).max(initial=0) < 0.05
    return got


def check_scores_as_bytes(
    q: np.ndarray, pages: LayerPages, softcap: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Compare scores of the last two tokens that are kept as bytes with those kept in float32.

    Returns float32 scores of all quads, those of used ones, and what bytes say of these; -inf: not kept.
    """
    whole = attend(packed_cuda, q, pages, keep_scores=2, softcap=softcap)
    used, (_, seqlen, heads, head_dim) = used_quads(pages), q.shape
    group = heads // used.shape[1]
    nbytes = packed_cuda.saved_quad_bytes(2 * group)
    kept = torch.full((*used.shape, nbytes), 77, dtype=torch.uint8, device="cuda")
    out, lse = torch.empty_like(whole.out), torch.empty_like(whole.lse)
    workspace = packed_cuda.make_workspace(out, 4, seqlen * group, head_dim)
    options = {"scale": head_dim**-0.5, "softcap": softcap, "scores": kept}
    packed_cuda.attend(to_torch(q), on_device(pages), out, lse, workspace, **options)
    assert torch.equal(out, whole.out)
    assert torch.equal(lse, whole.lse)
    scores, bytes_ = whole.scores.double().cpu().numpy(), kept.cpu().numpy()
    assert (bytes_[~used] == 77).all()
    exact, found = scores[used], reference.scores_of_bytes(bytes_, 2 * group)[used]
    of_kept = np.isfinite(found)
    assert np.abs(found[of_kept] - exact[of_kept]).max() <= 0.08 * np.log(2)
    shifted = np.roll(found, 1, -1)[of_kept]  # negative control; what was not kept is infinitely far away
    assert (np.abs(shifted - exact[of_kept]) > 0.08).mean() > 0.5
    return scores, exact, found

"""Importance on the GPU against float64: from queries and keys, from kept scores, from norms.

Codes are eighths of a binary order apart, so one step of difference is what rounding may cost; the share of
codes that differ at all is bounded too.
"""

from __future__ import annotations

from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
import torch
from kvlab.numba_kernels.cpu.cache_write import follow_mass

from kvlab import last_backend
from kvlab.cache.importance import MAX_TOKENS, SPAN, weight_of_collection
from kvlab.ops.cpu.scores import scale_of_importance
from kvlab.ops.cuda.packed import saved_quad_bytes
from kvlab.ops.cuda.scores import score_new, score_norms, score_stored
from kvlab.ops.packed import mass_from_scores
from kvlab.pages import decode_importance, encode_importance
from kvlab.reference import packed as reference
from kvlab.reference.cache_layer import PAGE, QUAD, UNIT, Layer
from kvlab.reference.importance import updated_scores
from kvlab.views import cuda_view
from tests.gpu.test_cache_plan import Device
from tests.planner_simulation import Simulation, draw_tokens, empty_layer, tables_of

TOKENS = 40  # since the last collection
QUADS = 20
ENTRIES = QUAD * QUADS
DTYPES = {torch.float16: np.dtype(np.float16), torch.bfloat16: np.dtype(ml_dtypes.bfloat16)}


def stream() -> int:
    return torch.cuda.current_stream().cuda_stream


def assert_close(codes: np.ndarray, expected: np.ndarray) -> None:
    """Codes equal what they should be, but for a step where a value lies at an edge."""
    difference = np.abs(codes.astype(int) - expected.astype(int))
    assert difference.max(initial=0) <= 1
    assert (difference > 0).mean() < 0.1


def column_mass(
    q: np.ndarray, k: np.ndarray, window: int, scale: float, softcap: float
) -> tuple[np.ndarray, np.ndarray]:
    """Mean attention of the last rows (batch, heads_kv, keys) in float64, and lse (batch, heads_q, rows)."""
    batch, n, heads_q, _ = q.shape
    heads = k.shape[2]
    keys = np.repeat(k.astype(np.float64), heads_q // heads, 2)
    scores = np.einsum("bqhd,bkhd->bhqk", q.astype(np.float64), keys) * scale
    if softcap:
        scores = softcap * np.tanh(scores / softcap)
    scores = np.where(np.tril(np.ones((n, n), bool)), scores, -np.inf)
    lse = np.log(np.exp(scores).sum(-1))
    mass = np.exp(scores - lse[..., None])[:, :, n - window :].mean(2)
    return mass.reshape(batch, heads, heads_q // heads, n).mean(2), np.ascontiguousarray(lse)


def draw(seed: int, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[torch.Tensor, np.ndarray]:
    x = torch.from_numpy(np.random.default_rng(seed).standard_normal(shape)).to(dtype)
    return x.cuda(), x.double().numpy()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize(("n", "group", "softcap"), [(300, 4, 0.0), (17, 1, 0.0), (65, 7, 5.0), (1, 2, 0.0)])
def test_attention_of_the_last_rows(
    dtype: torch.dtype, head_dim: int, n: int, group: int, softcap: float
) -> None:
    q, exact_q = draw(n, (2, n, 3 * group, head_dim), dtype)
    k, exact_k = draw(n + 1, (2, n, 3, head_dim), dtype)
    scale = head_dim**-0.5
    mass, lse = column_mass(exact_q, exact_k, min(n, 64), scale, softcap)
    codes = torch.zeros((6, n), dtype=torch.uint8, device="cuda")
    whole = torch.from_numpy(lse.astype(np.float32)).cuda()
    score_new(
        cuda_view(q, "q"),
        cuda_view(k, "k"),
        whole,
        codes,
        rows=MAX_TOKENS,
        scale=scale,
        softcap=softcap,
        stream=stream(),
    )
    found = codes.cpu().numpy()
    expected = encode_importance(mass.reshape(6, n))
    assert_close(found, expected)
    if n < 60:
        return
    for wrong in (np.zeros_like(expected), expected[::-1], np.roll(expected, 1, 1)):
        with pytest.raises(AssertionError):
            assert_close(found, wrong)


def test_strided_rows_without_keys_and_keys_that_are_padding() -> None:
    """Views of a fused projection; rows of padding have lse -inf; a key of NaN spoils itself alone."""
    n, head_dim = 130, 128
    fused, exact = draw(0, (2, n, 6 + 2 + 2, head_dim), torch.bfloat16)
    mass, lse = column_mass(exact[:, :, :6], exact[:, :, 6:8], 64, 0.1, 0.0)
    q, k = fused[:, :, :6], fused[:, :, 6:8]
    codes = torch.zeros((4, n), dtype=torch.uint8, device="cuda")
    whole = torch.from_numpy(lse.astype(np.float32)).cuda()
    score_new(cuda_view(q, "q"), cuda_view(k, "k"), whole, codes, rows=MAX_TOKENS, scale=0.1, stream=stream())
    assert_close(codes.cpu().numpy(), encode_importance(mass.reshape(4, n)))
    k[:, 3] = float("nan")
    again = torch.zeros_like(codes)
    score_new(cuda_view(q, "q"), cuda_view(k, "k"), whole, again, rows=MAX_TOKENS, scale=0.1, stream=stream())
    assert bool((again[:, 3] == 0).all())
    again[:, 3] = codes[:, 3]
    assert torch.equal(again, codes)
    whole[1] = float("-inf")
    score_new(cuda_view(q, "q"), cuda_view(k, "k"), whole, again, rows=MAX_TOKENS, scale=0.1, stream=stream())
    assert not bool(again[2:].any())
    assert bool(again[:2].any())
    whole[1], q[1] = float("inf"), float("nan")  # the same of padding whose queries are anything
    score_new(cuda_view(q, "q"), cuda_view(k, "k"), whole, codes, rows=MAX_TOKENS, scale=0.1, stream=stream())
    assert torch.equal(again, codes)


def test_vectors_between_16_bytes_are_refused() -> None:
    q = torch.zeros((1, 4, 2, 132), dtype=torch.float16, device="cuda")[..., 4:]
    lse, codes = torch.zeros((1, 2, 4), device="cuda"), torch.zeros((2, 4), dtype=torch.uint8, device="cuda")
    with pytest.raises(ValueError, match="multiples of 16 bytes"):
        score_new(
            cuda_view(q, "q"), cuda_view(q, "k"), lse, codes, rows=MAX_TOKENS, scale=1.0, stream=stream()
        )
    q, lse = q.contiguous(), torch.zeros((1, 2, 8), device="cuda")[..., ::2]
    with pytest.raises(ValueError, match="lse must be contiguous"):
        score_new(
            cuda_view(q, "q"), cuda_view(q, "k"), lse, codes, rows=MAX_TOKENS, scale=1.0, stream=stream()
        )


def stored_layer() -> tuple[Simulation, Device, torch.Tensor, np.ndarray, torch.Tensor, np.ndarray]:
    rng = np.random.default_rng(5)
    layer = empty_layer("2348", 2, 2, ENTRIES, 400_000, 800)
    simulation = Simulation(layer, "2348")
    simulation.change(draw_tokens(rng, 2, 2, 900, 0, "padded"))
    scores = rng.normal(-9, 3, (2, 2, QUADS, 6, 64)).astype(np.float32)
    lse = rng.normal(-3, 1, (2, 6, 5)).astype(np.float32)
    lse[0, 3, 4], lse[1, 0, 3] = np.inf, -np.inf
    held = np.arange(ENTRIES) < layer.num_pages.reshape(2, 2, 1)
    count = np.where(held, layer.count.reshape(2, 2, ENTRIES), 0)
    unused = (np.arange(PAGE) >= count[..., None]).reshape(2, 2, QUADS, 64)
    hostile = np.where(unused[:, :, :, None], np.nan, scores).astype(np.float32)
    hostile[0, 1, :, 3] = np.nan  # the row whose lse is infinite
    exact = np.where(unused[:, :, :, None], -np.inf, scores)
    kept, whole = torch.from_numpy(hostile).cuda(), torch.from_numpy(lse).cuda()
    return simulation, Device([layer]), kept, exact, whole, lse


def test_mass_of_kept_scores() -> None:
    simulation, _, scores, exact, lse, exact_lse = stored_layer()
    layer = simulation.layer
    shape = (2, 2, ENTRIES)
    count = np.where(np.arange(ENTRIES) < layer.num_pages.reshape(2, 2, 1), layer.count.reshape(shape), 77)
    pages = SimpleNamespace(
        rung=torch.from_numpy(layer.rung.reshape(shape)).cuda(),
        count=torch.from_numpy(count.astype(np.uint8)).cuda(),
        num_pages=torch.from_numpy(layer.num_pages.reshape(2, 2)).cuda(),
    )
    found = mass_from_scores(scores, lse, pages).cpu().numpy()
    assert last_backend() == "cuda"
    expected = reference.mass_from_scores(exact, exact_lse)
    assert np.abs(found - expected).max() <= 2e-6 * expected.max()
    assert np.array_equal(found == 0, expected == 0)
    assert np.abs(found - np.roll(expected, 1, 3)).max() > 1e-3 * expected.max()


def in_order(codes: np.ndarray) -> np.ndarray:
    """Codes (..., 64) by page and slot as bytes stand: of slot s of page q at 8 (s // 2) + 2 q + s % 2."""
    return np.moveaxis(codes.reshape(*codes.shape[:-1], QUAD, PAGE // 2, 2), -3, -2).reshape(codes.shape)


def kept_bytes(scores: np.ndarray, unused: np.ndarray) -> np.ndarray:
    """Scores (..., rows, 64) as attention keeps them, with anything in slots that are not used."""
    log2 = scores / np.log(2)
    reference = log2.max(-1, initial=-60.0, where=np.isfinite(log2)).astype(np.float32)
    codes = np.where(
        unused[..., None, :], 77, np.clip(np.rint(255 + 8 * (log2 - reference[..., None])), 0, 255)
    )
    rows = scores.shape[-2]
    kept = np.full((*scores.shape[:-2], saved_quad_bytes(rows)), 255, np.uint8)
    kept[..., : 64 * rows] = in_order(codes).reshape(*kept.shape[:-1], -1)
    kept[..., 64 * rows : 68 * rows] = reference.view(np.uint8)
    return kept


@pytest.mark.parametrize("importance", ["attention", "forecast"])
@pytest.mark.parametrize("tokens", [1, 5, 64])
def test_codes_are_those_of_the_cpu_for_the_same_mass(importance: str, tokens: int) -> None:
    """Bit for bit: masses are powers of 2, which the kernel's exponentials give exactly."""
    simulation, *_ = stored_layer()
    rng, layer = np.random.default_rng(tokens), simulation.layer
    simulation.observe(rng)
    orders = rng.integers(-20, 1, (4, ENTRIES, PAGE))
    kept = np.full((1, 2, 2, QUADS, saved_quad_bytes(1)), 255, np.uint8)
    kept[0, ..., :64] = in_order((255 + 8 * orders).clip(0).reshape(2, 2, QUADS, 64))
    kept[0, ..., 64:68] = np.zeros(4, np.uint8)  # the reference of the row
    device = Device([layer])
    take, span = weight_of_collection(0.75, tokens)
    score_stored(
        device.states.data_ptr(), torch.from_numpy(kept).cuda(), torch.zeros((1, 2, 2, 1), device="cuda"),
        importance=importance, take=take, span=span, counted=0, stream=stream(),
    )  # fmt: skip
    follow_mass(
        tables_of(layer), np.exp2(orders).astype(np.float32), layer.seqlen, np.float32(take), span,
        importance == "forecast", *scale_of_importance(),
    )  # fmt: skip
    assert np.array_equal(device.table(0, "arena"), layer.arena)


@pytest.mark.parametrize("importance", ["attention", "forecast"])
@pytest.mark.parametrize("own", [0, 3])
def test_stored_tokens_follow_what_they_receive(importance: str, own: int) -> None:
    """Two layers in one launch; the newest `own` tokens came with the call and received nothing yet."""
    simulation, _, hostile, exact, lse, exact_lse = stored_layer()
    device = Device([simulation.layer, simulation.layer])
    unused = np.isnan(hostile.cpu().numpy()[:, :, :, 0])
    kept = np.stack([kept_bytes(exact, unused), kept_bytes(exact - 2, unused)])
    kept[:, 0, 1, :, 64 * 6 + 4 * 3 :][..., :4] = np.float32([np.nan]).view(np.uint8)
    take, span = weight_of_collection(0.75, TOKENS)
    score_stored(
        device.states.data_ptr(),
        torch.from_numpy(kept).cuda(),
        torch.stack([lse, lse]),
        importance=importance,
        take=take,
        span=span,
        counted=own,
        stream=stream(),
    )
    for number in range(2):
        rounded = np.where(np.isneginf(exact), exact, reference.scores_of_bytes(kept[number], 6))
        mass = reference.mass_from_scores(rounded, exact_lse).reshape(4, ENTRIES, PAGE).astype(np.float32)
        check_following(simulation.layer, device.table(number, "arena"), mass, importance, own)


def check_following(layer: Layer, after: np.ndarray, mass: np.ndarray, importance: str, own: int) -> None:
    """The codes of an arena are those of `layer` after an observation."""
    length, before = layer.seqlen - own, layer.arena
    seen, young = np.zeros(len(before), bool), 0
    for pair in range(4):
        for e in np.flatnonzero(layer.count[pair, : layer.num_pages[pair]]):
            r, n = int(layer.rung[pair, e]), int(layer.count[pair, e])
            at = int(layer.index[pair, e]) * UNIT + layer.rungs[r].tail
            positions = before[at : at + 2 * n].view(np.uint16) + (int(layer.base[pair, e]) << 16)
            stored = positions < length
            at = at + 2 * PAGE + np.flatnonzero(stored)
            old, received = decode_importance(before[at]), mass[pair, e, :n][stored]
            new = updated_scores(
                importance, old, received, positions[stored], length, *weight_of_collection(0.75, TOKENS)
            )
            assert_close(after[at], encode_importance(new))
            seen[at] = True
            young += int((positions[stored] >= length - 3 * SPAN).sum())
    assert young > 100
    assert np.array_equal(before[~seen], after[~seen])
    assert (before[seen] != after[seen]).any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_norms_ages_and_ones(dtype: torch.dtype) -> None:
    k, exact = draw(2, (2, 70, 3, 96), dtype)
    k, exact = k.clone(), exact.copy()
    k[0, 0], exact[0, 0] = 0, 0
    codes = torch.zeros((6, 70), dtype=torch.uint8, device="cuda")
    score_norms(k, codes, "key_norm", stream())
    norm = np.sqrt((exact**2).sum(-1)).swapaxes(1, 2).reshape(6, 70)
    assert np.array_equal(
        codes.cpu().numpy(), encode_importance(1 / np.maximum(norm.astype(np.float32), 1e-6))
    )
    score_norms(k, codes, "recency", stream())
    assert np.array_equal(codes.cpu().numpy()[3], encode_importance(1 / np.arange(70, 0, -1)))
    score_norms(k, codes, "uniform", stream())
    assert bool((codes == 192).all())

"""packed_attention on every backend against decoded pages in float64, and attention mass from kept scores.

Pages are random bytes, since every code is valid; only scales and raw numbers have to be sensible. Whatever
must not matter is hostile: scales and raw numbers of unused slots are NaN, entries without tokens name pages
of NaN or none, unused entries of the page table name pages, rungs and counts that do not exist.
"""

import copy
import dataclasses
import itertools
from dataclasses import dataclass
from typing import Any

import numba
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kvlab.numba_kernels.cpu.simd import load, store
from kvlab.numba_kernels.cpu.softmax import exp2
from numpy.typing import NDArray

from kvlab.arrays import numpy_dtype
from kvlab.ops.packed import mass_from_scores, packed_attention
from kvlab.pages import NO_PAGE, QUAD, TOKENS_PER_PAGE, LayerPages, PageLayout, new_pool
from kvlab.reference import packed as reference
from kvlab.reference.codec import hadamard_matrix
from kvlab.reference.pages import SCALES, bit_address
from kvlab.registry import last_backend, rows
from tests.compare import assert_accurate, low_precision_attention
from tests.strategies import FLOATS, SEEDS, hostile_view, random_floats

Array = NDArray[Any]

BACKENDS = [row.backend for row in rows("packed_attention") if row.device_kind == "cpu"]
WIDTHS = (2, 3, 4, 8, 16)
SAME_WIDTHS = tuple((bits, bits) for bits in WIDTHS)
RUNGS = tuple((bits_k, bits_v) for bits_k in WIDTHS for bits_v in WIDTHS)
SOME_RUNGS = ((2, 4), (8, 3), (16, 8), (4, 16))
FRAME = ("k_mean", "k_shift", "exponent", "k_order", "k_gain")
PROFILES = ((4, 2, 2, 0), (4, 4, 2, 2), (8, 4, 2, 2), (8, 4, 4, 4), (8, 8, 8, 8), (8, 0, 0, 0), (2, 2, 2, 2))
RUNGS_IN_BLOCKS = tuple((bits_k, bits_v) for bits_k in (*PROFILES, 16) for bits_v in WIDTHS)
# About what vectors of unit variance get.
SCALE_OF_WIDTH = {2: np.float32(0.4978), 3: np.float32(0.293), 4: np.float32(0.1676), 8: np.float32(0.0135)}


def pool_of(rng: np.random.Generator, layout: PageLayout, pages: int) -> Array:
    """Return random records."""
    pool = new_pool(pages, layout)
    pool[:] = rng.integers(0, 256, pool.shape, np.uint8)
    return pool


def fill_side(
    rng: np.random.Generator, record: Array, layout: PageLayout, side: str, dtype: str, count: int
) -> None:
    """Make K or V of a record sensible in slots below `count`, and NaN in the others."""
    kind, size = numpy_dtype(dtype), layout.itemsize
    bits, codes, scales = (
        (layout.bits_k, layout.k_codes, layout.k_scales)
        if side == "k"
        else (layout.bits_v, layout.v_codes, layout.v_scales)
    )
    if bits != 16:
        wanted = (0.25 if isinstance(bits, tuple) else SCALE_OF_WIDTH[bits]) * rng.lognormal(
            0, 0.4, TOKENS_PER_PAGE
        )
        record[scales : scales + TOKENS_PER_PAGE] = np.abs(SCALES[:0xF8, None] - wanted).argmin(axis=0)
        record[scales + count : scales + TOKENS_PER_PAGE] = 0xFF
        return
    raw = record[codes : codes + TOKENS_PER_PAGE * layout.head_dim * size].view(kind)
    raw[:] = rng.standard_normal(raw.size).astype(kind)
    raw[bit_address(8 * size, layout.head_dim, side)[count:, :, 0] // (8 * size)] = np.nan


def make_pages(
    rng: np.random.Generator,
    rungs: tuple[tuple[Any, int], ...],
    head_dim: int,
    dtype: str,
    quads: Array,
    counts: tuple[int, ...] = (0, 1, 9, 15, 16, 16, 16),
) -> LayerPages:
    """Return pages for quads (batch, KV heads) of entries, scattered over the pools.

    The counts of a quad's pages have nothing to do with each other; of those without a token half have a
    page.
    """
    layouts = tuple(PageLayout(head_dim, *rung, numpy_dtype(dtype).itemsize) for rung in rungs)
    num_pages = QUAD * quads
    table = (*quads.shape, QUAD * (int(quads.max(initial=0)) + 1))
    used = np.arange(table[-1]) < num_pages[..., None]
    of_quads = rng.choice(len(rungs), (*quads.shape, table[-1] // QUAD))
    rung, count = (
        np.where(used, x, 255).astype(np.uint8)
        for x in (np.repeat(of_quads, QUAD, axis=-1), rng.choice(counts, table))
    )
    with_page = used & ((count > 0) | (rng.random(table) < 0.5))
    index = np.full(table, NO_PAGE, np.uint32)
    pools = []
    for r, layout in enumerate(layouts):
        mine = with_page & (rung == r)
        pools.append(pool_of(rng, layout, int(mine.sum()) + 1))
        index[mine] = rng.permutation(len(pools[r]))[: mine.sum()]
        for page, tokens in zip(index[mine], count[mine], strict=True):
            for side in "kv":
                fill_side(rng, pools[r][page], layout, side, dtype, int(tokens))
    mean = rng.standard_normal((*quads.shape, head_dim)).astype(np.float16)
    base = rng.integers(0, 2**16, table, np.uint16)
    half = *quads.shape, head_dim // 2
    shift = (rng.integers(1, 3, half) * (rng.random(half) < 0.1)).astype(np.uint8)
    order = np.argsort(rng.random(half), axis=-1).astype(np.uint8)
    gain = (16 * np.exp2(rng.uniform(-0.5, 2, (*quads.shape, 4)))).astype(np.float16).astype(np.float32)
    exponent = rng.integers(-2, 2, (*quads.shape, 2)).astype(np.int8)
    frame = {"k_shift": shift, "exponent": exponent}
    if any(layout.in_blocks for layout in layouts):
        frame |= {"k_order": order, "k_gain": gain}
    return LayerPages(
        layouts, tuple(pools), rung, count, index, base, num_pages.astype(np.int32), mean, dtype, **frame
    )


@dataclass(frozen=True, repr=False)
class PackedCase:
    """A call of `packed_attention`; prints as shapes."""

    q: Array
    pages: LayerPages
    options: dict[str, Any]

    def __repr__(self) -> str:
        rungs = [(layout.bits_k, layout.bits_v) for layout in self.pages.layouts]
        table = f"{self.pages.dtype} {rungs} {self.pages.num_pages.tolist()}"
        return f"PackedCase(q: {self.q.dtype} {self.q.shape}, pages: {table}, {self.options})"


@st.composite
def packed_cases(draw: st.DrawFn) -> PackedCase:
    """Draw any widths, mixed rungs, ragged rows, empty heads, windows, queries of another dtype."""
    rng = np.random.default_rng(draw(SEEDS))
    in_blocks = draw(st.booleans())
    offered = RUNGS_IN_BLOCKS if in_blocks else RUNGS
    rungs = draw(st.lists(st.sampled_from(offered), min_size=1, max_size=4, unique=True))
    head_dim = draw(st.sampled_from((64, 128, 192, 256) if in_blocks else (16, 32, 64, 80, 96, 128)))
    batch, kv_heads, group = draw(
        st.tuples(st.integers(0, 2), st.integers(1, 2), st.sampled_from((1, 2, 3, 4, 5, 7, 16)))
    )
    quads = rng.integers(0, draw(st.integers(1, 5)), (batch, kv_heads))
    pages = make_pages(rng, tuple(rungs), head_dim, draw(st.sampled_from(FLOATS)).name, quads)
    seqlen_q = draw(st.sampled_from((0, 1, 1, 2, 3, 9)))
    q = random_floats(
        rng, (batch, seqlen_q, kv_heads * group, head_dim), draw(st.sampled_from(FLOATS)), (-4, 1)
    )
    options = {
        "scale": draw(st.none() | st.sampled_from((0.05, 0.3))),
        "softcap": draw(st.sampled_from((0.0, 0.0, 2.0, 30.0))),
        "keep_scores": draw(st.integers(0, seqlen_q)),
    }
    if draw(st.booleans()):
        pages.base[...] %= 2
        left, right = draw(st.tuples(st.integers(0, 1 << 17), st.integers(-1, 3)))
        first = rng.integers(0, 1 << 18, batch).astype(np.int32)
        options |= {"window": (left, right), "first_position": first}
    return PackedCase(hostile_view(rng, q) if draw(st.booleans()) else q, pages, options)


def seen_keys(case: PackedCase, b: int, h: int) -> list[tuple[slice, Array]]:
    """Return which stored tokens of a (row, KV head) its query rows see: all rows, or one by one."""
    seqlen_q, position = case.q.shape[1], reference.stored_positions(case.pages, b, h)
    if "window" not in case.options:
        return [(slice(0, seqlen_q), np.full(len(position), True))]
    lowest = case.options["first_position"][b] + np.arange(seqlen_q) - case.options["window"][0]
    return [(slice(s, s + 1), position >= lowest[s]) for s in range(seqlen_q)]


def low_precision(case: PackedCase, bases: int = 32) -> tuple[Array, Array]:
    """Return the same attention over decoded keys and values in the dtype of q.

    In float32 a single key that dominates a row may be lucky, so the sums are formed in several orthonormal
    bases, of which the answer farthest from the first is taken, element by element.
    """
    q, pages = case.q, case.pages
    batch, seqlen_q, heads, head_dim = q.shape
    group = heads // pages.rung.shape[1]
    options = {name: case.options[name] for name in ("scale", "softcap")}
    signs = np.random.default_rng(0).choice([-1, 1], (bases if q.dtype == np.float32 else 1, head_dim, 1))
    outs = np.zeros((len(signs), *q.shape), q.dtype)
    lses = np.full((len(signs), batch, heads, seqlen_q), -np.inf, np.float32)
    for b, h in np.ndindex(pages.num_pages.shape):
        parts = zip(*[(np.zeros((0, head_dim)),) * 2, *reference.stored_tokens(pages, b, h)], strict=True)
        k, v = (np.concatenate(part)[None, :, None] for part in parts)
        own = (slice(b, b + 1), slice(None), slice(h * group, (h + 1) * group))
        for tokens, seen in seen_keys(case, b, h):
            part = (own[0], tokens, own[2])
            for i, sign in enumerate(signs):
                basis = sign * hadamard_matrix(head_dim) if i else np.eye(head_dim)
                qkv = [(x @ basis).astype(q.dtype) for x in (q[part], k[:, seen], v[:, seen])]
                out, lses[i, b, own[2], tokens] = low_precision_attention(*qkv, **options)
                outs[(i, *part)] = out @ basis.T.astype(np.float32)
    with np.errstate(invalid="ignore"):  # -inf - -inf
        far = [np.abs(np.nan_to_num(x - x[0])).argmax(axis=0)[None] for x in (outs, lses)]
    return tuple(np.take_along_axis(x, i, 0)[0] for x, i in zip((outs, lses), far, strict=True))


def call(case: PackedCase, backend: str | None = None) -> Any:
    return packed_attention(case.q, case.pages, **case.options, backend=backend)


def assert_right(case: PackedCase, backend: str) -> None:
    before = [x.tobytes() for x in (case.q, *case.pages.pools)]
    result = call(case, backend)
    assert last_backend() == backend
    assert result.out.dtype == case.q.dtype
    assert result.lse.dtype == np.float32
    out, lse, scores = reference.packed_attention(case.q, case.pages, **case.options)
    low_out, low_lse = low_precision(case)
    assert_accurate(result.out, out, low_out)
    assert_accurate(result.lse, lse, low_lse, "lse")
    assert [x.tobytes() for x in (case.q, *case.pages.pools)] == before

    if not case.options["keep_scores"]:
        assert result.scores is None
        return
    used = (QUAD * np.arange(scores.shape[2]) < case.pages.num_pages[..., None])[..., None, None]
    finite = np.isfinite(scores)
    assert np.array_equal(np.isfinite(np.where(used, result.scores, -np.inf)), finite)
    worst = np.abs(np.where(finite, result.scores, 0) - np.where(finite, scores, 0)).max(initial=0)
    assert worst <= 2e-6 * np.abs(scores[finite]).max(initial=1)
    more = np.logaddexp(lse, 0.5).astype(np.float32)  # as if other keys had been seen too
    mass = mass_from_scores(result.scores, more, case.pages, backend=backend)
    assert mass.dtype == np.float32
    np.testing.assert_allclose(mass, reference.mass_from_scores(scores, more), rtol=2e-5, atol=1e-9)


@pytest.mark.parametrize("backend", BACKENDS)
@given(case=packed_cases())
def test_agrees_with_the_reference(backend: str, case: PackedCase) -> None:
    assert_right(case, backend)


@pytest.mark.parametrize("rungs", [*((rung,) for rung in SAME_WIDTHS), RUNGS[3:24:5]], ids=str)
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_head_dim_256_and_many_pages(rungs: tuple[tuple[int, int], ...], dtype: str) -> None:
    rng = np.random.default_rng(3)
    pages = make_pages(rng, rungs, 256, dtype, np.array([[13, 2]]))
    # Several rows, so that the error of low precision is that of many sums and not of a lucky one.
    q = random_floats(rng, (1, 8, 4, 256), numpy_dtype("float32"), (-4, 1))
    assert_right(PackedCase(q, pages, {"scale": None, "softcap": 0.0, "keep_scores": 1}), "cpu")


@pytest.mark.parametrize(("seqlen_q", "group"), [(64, 1), (70, 4), (5, 16), (1, 13)])
def test_many_query_rows(seqlen_q: int, group: int) -> None:
    """A chunk of a prompt, with scores of only its last rows kept."""
    rng = np.random.default_rng(4)
    pages = make_pages(rng, ((4, 2), (16, 16)), 64, "bfloat16", np.array([[7, 0], [2, 9]]))
    q = random_floats(rng, (2, seqlen_q, 2 * group, 64), numpy_dtype("bfloat16"), (-4, 1))
    keep = min(seqlen_q, 27)
    assert_right(PackedCase(q, pages, {"scale": None, "softcap": 0.0, "keep_scores": keep}), "cpu")


@pytest.mark.parametrize("seqlen_q", [1, 3, 70])
def test_new_memory_does_not_matter(seqlen_q: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not in rows that fill up the last block, either; a cast of a signalling NaN is a warning of NumPy."""
    rng, empty = np.random.default_rng(5), np.empty
    pages = make_pages(rng, ((4, 2), (16, 16)), 64, "float32", np.array([[7, 0]]))
    q = random_floats(rng, (1, seqlen_q, 10, 64), numpy_dtype("float32"), (-4, 1))
    case = PackedCase(q, pages, {"scale": None, "softcap": 0.0, "keep_scores": 0})
    expected = call(case, "cpu")  # kernels compile, and the compiler knows NumPy's own functions alone

    def hostile(shape: Any, dtype: Any = np.float64) -> Array:
        array = empty(shape, dtype)
        if array.dtype == np.float32:
            array.view(np.uint32)[...] = 0x7FA00000
        return array

    monkeypatch.setattr(np, "empty", hostile)
    found = call(case, "cpu")
    monkeypatch.undo()
    assert found.out.tobytes() == expected.out.tobytes()
    assert found.lse.tobytes() == expected.lse.tobytes()


def small_case(seed: int = 11, dtype: str = "float16", rungs: Any = SOME_RUNGS) -> PackedCase:
    rng = np.random.default_rng(seed)
    pages = make_pages(rng, rungs, 64, dtype, np.full((2, 2), 6), counts=(11, 16))
    q = random_floats(rng, (2, 2, 8, 64), numpy_dtype(dtype), (-4, 0))
    return PackedCase(q, pages, {"scale": None, "softcap": 0.0, "keep_scores": 0})


def wrong_pages(pages: LayerPages) -> dict[str, LayerPages]:
    """Return what typical mistakes would read, by name."""

    def with_rolled(first: str, last: str, shift: int) -> LayerPages:
        """Roll the bytes of one part of all records."""
        pools = []
        for layout, pool in zip(pages.layouts, pages.pools, strict=True):
            copy = new_pool(len(pool), layout)
            copy[:] = pool
            part = slice(getattr(layout, first), getattr(layout, last))
            copy[:, part] = np.roll(pool[:, part], shift, axis=1)
            pools.append(copy)
        return dataclasses.replace(pages, pools=tuple(pools))

    swapped = {name: getattr(pages, name)[:, ::-1].copy() for name in ("rung", "count", "index", *FRAME)}
    in_blocks = {
        "channels in no order": dataclasses.replace(pages, k_order=np.zeros(0, np.uint8)),
        "blocks of the next one's gain": dataclasses.replace(pages, k_gain=np.roll(pages.k_gain, 1, axis=2)),
    }
    return (in_blocks if any(layout.in_blocks for layout in pages.layouts) else {}) | {
        "exponent of K one too large": dataclasses.replace(
            pages, exponent=pages.exponent + np.array([1, 0], np.int8)
        ),
        "exponent of V one too large": dataclasses.replace(
            pages, exponent=pages.exponent + np.array([0, 1], np.int8)
        ),
        "key mean left out": dataclasses.replace(pages, k_mean=np.zeros_like(pages.k_mean)),
        "channels of keys not scaled": dataclasses.replace(pages, k_shift=np.zeros_like(pages.k_shift)),
        "KV heads swapped": dataclasses.replace(pages, **swapped),
        "last slot missed": dataclasses.replace(pages, count=np.maximum(pages.count, 1) - np.uint8(1)),
        "last quad missed": dataclasses.replace(pages, num_pages=pages.num_pages - np.int32(QUAD)),
        "first page of a quad taken four times": dataclasses.replace(
            pages,
            count=np.repeat(pages.count[..., ::QUAD], QUAD, axis=-1),
            index=np.repeat(pages.index[..., ::QUAD], QUAD, axis=-1),
        ),
        "counts of a quad taken for one another": dataclasses.replace(
            pages,
            count=pages.count.reshape(*pages.count.shape[:2], -1, QUAD)[..., ::-1].reshape(pages.count.shape),
        ),
        "codes of K one lane off": with_rolled("k_codes", "k_scales", 4),
        "codes of V one lane off": with_rolled("v_codes", "v_scales", 4),
        "codes of V one word off": with_rolled("v_codes", "v_scales", 128),
        "scales of K one slot off": with_rolled("k_scales", "v_codes", 1),
        "scales of V one slot off": with_rolled("v_scales", "positions", 1),
    }


@pytest.mark.parametrize(
    "rungs", [SOME_RUNGS, (((8, 4, 2, 0), 4), ((4, 4, 2, 2), 3), (16, 8), ((8,) * 4, 16))]
)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_the_comparison_rejects_what_mistakes_would_give(dtype: str, rungs: Any) -> None:
    case = small_case(dtype=dtype, rungs=rungs)
    expected, _, _ = reference.packed_attention(case.q, case.pages)
    low, _ = low_precision(case)
    assert_accurate(call(case).out, expected, low)
    for wrong in wrong_pages(case.pages).values():
        out, _, _ = reference.packed_attention(case.q, wrong)
        with pytest.raises(AssertionError, match="out: "):
            assert_accurate(np.nan_to_num(out).astype(case.q.dtype), expected, low)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("side", ["k", "v"])
@pytest.mark.parametrize("rung", [(4, 4), (16, 16)])
def test_a_nan_token_shows_in_its_head_alone(backend: str, side: str, rung: tuple[int, int]) -> None:
    rng = np.random.default_rng(6)
    pages = make_pages(rng, (rung,), 32, "float32", np.full((1, 2), 3), counts=(16,))
    layout, page = pages.layouts[0], pages.pools[0][pages.index[0, 1, 2]]
    if rung == (4, 4):
        page[(layout.k_scales if side == "k" else layout.v_scales) + 7] = 0xFF
    else:
        place = bit_address(32, 32, side)[7, :, 0] // 32
        page[: layout.positions].view(np.float32)[place + (layout.v_codes // 4 if side == "v" else 0)] = (
            np.nan
        )
    q = rng.standard_normal((1, 1, 4, 32)).astype(np.float32)
    out, lse, _ = packed_attention(q, pages, backend=backend)
    assert np.isnan(out[:, :, 2:]).all()
    assert np.isfinite(out[:, :, :2]).all()
    assert np.isnan(lse).tolist() == [[[False], [False], [side == "k"], [side == "k"]]]


@pytest.mark.parametrize("backend", BACKENDS)
def test_infinite_raw_keys(backend: str) -> None:
    """Keys of -inf have no weight, even if there is no other key; one of +inf leaves no number."""
    rng = np.random.default_rng(7)
    pages = make_pages(rng, ((16, 16),), 16, "float32", np.full((1, 3), 1), counts=(16,))
    places = bit_address(32, 16, "k")[:, :, 0] // 32
    for head, (value, slots) in enumerate([(-np.inf, slice(3)), (-np.inf, slice(None)), (np.inf, slice(1))]):
        for index in pages.index[0, head, :QUAD]:
            pages.pools[0][index][: 16 * 16 * 4].view(np.float32)[places[slots]] = value
    out, lse, _ = packed_attention(np.ones((1, 1, 3, 16), np.float32), pages, backend=backend)
    expected, expected_lse, _ = reference.packed_attention(np.ones((1, 1, 3, 16)), pages)
    np.testing.assert_allclose(out, expected, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-6)
    assert np.isfinite(out[0, 0, 0]).all()
    assert not out[0, 0, 1].any()
    assert np.isnan(out[0, 0, 2]).all()


@pytest.mark.parametrize("seqlen_q", [1, 12])
def test_same_bits_whatever_the_number_of_threads(seqlen_q: int) -> None:
    rng = np.random.default_rng(8)
    pages = make_pages(rng, SAME_WIDTHS, 64, "bfloat16", np.array([[40, 3], [11, 0]]))
    q = rng.standard_normal((2, seqlen_q, 8, 64)).astype(np.float32)
    threads = numba.get_num_threads()
    results = []
    for number in (1, threads, threads, 1):
        numba.set_num_threads(number)
        results.append([x.tobytes() for x in packed_attention(q, pages, keep_scores=1)[:2]])
    numba.set_num_threads(threads)
    assert all(result == results[0] for result in results)


def test_batch_mates_and_splitting_the_queries_do_not_matter() -> None:
    case = small_case(9, "float32")
    whole = call(case)
    pages = case.pages
    only = {
        name: getattr(pages, name)[1:] for name in ("rung", "count", "index", "base", "num_pages", *FRAME)
    }
    alone = packed_attention(case.q[1:, 1:], dataclasses.replace(pages, **only))
    np.testing.assert_allclose(alone.out[0, 0], whole.out[1, 1], rtol=2e-5, atol=1e-6)
    np.testing.assert_allclose(alone.lse[0, :, 0], whole.lse[1, :, 1], rtol=1e-6)


@pytest.mark.parametrize("seqlen_q", [2, 40])
def test_pages_before_a_window_are_not_read(seqlen_q: int) -> None:
    """Every other page is old, and NaN but for its positions: same bits as without those pages' NaN."""
    rng = np.random.default_rng(6)
    pages = make_pages(rng, ((4, 2), (16, 16)), 64, "float16", np.array([[6, 5]]), (16,))
    entry = np.arange(pages.base.shape[-1])
    hidden = (entry % 3 == 0) | (entry // QUAD == 2)  # pages of quads, and one quad as a whole
    pages.base[...] = ~hidden
    q = random_floats(rng, (1, seqlen_q, 4, 64), numpy_dtype("float32"), (-4, 1))
    options = {"window": (1 << 15, 0), "first_position": np.array([3 << 15], np.int32), "keep_scores": 1}
    expected = packed_attention(q, pages, **options)
    for pair, p in itertools.product(range(2), np.flatnonzero(hidden[: 5 * QUAD])):
        layout, index = pages.layouts[pages.rung[0, pair, p]], pages.index[0, pair, p]
        pages.pools[pages.rung[0, pair, p]][index, : layout.positions] = 0xFF
    actual = packed_attention(q, pages, **options)
    assert np.isfinite(actual.out).all()
    assert actual.out.tobytes() == expected.out.tobytes()
    assert actual.lse.tobytes() == expected.lse.tobytes()
    by_page = (
        actual.scores[:, :, :5].reshape(1, 2, 5, 2, QUAD, 16).swapaxes(3, 4).reshape(1, 2, 5 * QUAD, 2, 16)
    )
    assert (np.isneginf(by_page) == hidden[: 5 * QUAD, None, None]).all()
    assert actual.scores[:, :, :5].tobytes() == expected.scores[:, :, :5].tobytes()


def test_torch_queries_give_torch_results() -> None:
    torch = pytest.importorskip("torch")
    case = small_case()
    q = torch.from_numpy(case.q.astype(np.float32)).to(torch.bfloat16)
    result: Any = packed_attention(q, case.pages, keep_scores=2)
    assert (result.out.dtype, result.lse.dtype) == (torch.bfloat16, torch.float32)
    mass = mass_from_scores(result.scores, result.lse, case.pages)
    assert isinstance(mass, torch.Tensor)
    np.testing.assert_allclose(mass.sum((2, 3)), 1, rtol=1e-5)
    expected = packed_attention(q.float().numpy(), case.pages)
    np.testing.assert_allclose(result.out.float(), expected.out, rtol=2**-8)


def test_refuses_calls_that_make_no_sense() -> None:
    case = small_case()
    q, pages = case.q, case.pages
    result: Any = packed_attention(q, pages, keep_scores=1)
    with pytest.raises(ValueError, match="q has head_dim 32, but the pages hold tokens of head_dim 64"):
        packed_attention(q[..., :32], pages)
    with pytest.raises(ValueError, match="q has 3 heads: it must be a multiple of the 2 KV heads"):
        packed_attention(q[:, :, :3], pages)
    with pytest.raises(ValueError, match="B"):
        packed_attention(q[:1], pages)
    wrong = copy.copy(pages)
    object.__setattr__(wrong, "exponent", pages.exponent[..., :0])
    with pytest.raises(ValueError, match=r"pages\.exponent"):
        packed_attention(q, wrong)
    mixed = small_case(rungs=((4, 4), ((8, 4, 2, 2), 4), (16, 16)))
    with pytest.raises(ValueError, match=r"keys in profiles and in widths, \[4, \(8, 4, 2, 2\)\]"):
        call(mixed)
    with pytest.raises(ValueError, match="softcap must be 0"):
        packed_attention(q, pages, softcap=float("nan"))
    with pytest.raises(ValueError, match="keep_scores must be from 0 to the 2 query rows, got 3"):
        packed_attention(q, pages, keep_scores=3)
    with pytest.raises(ValueError, match="needs first_position"):
        packed_attention(q, pages, window=(5, 0))
    with pytest.raises(ValueError, match="comes with first_position"):
        packed_attention(q, pages, first_position=np.zeros(len(q), np.int32))
    with pytest.raises(ValueError, match="window=-2"):
        packed_attention(q, pages, window=(-2, 0))
    with pytest.raises(TypeError, match=r"first_position must be int32 of shape \(2,\)"):
        packed_attention(q, pages, window=(5, 0), first_position=np.zeros(len(q)))
    with pytest.raises(NotImplementedError, match="float64"):
        packed_attention(q.astype(np.float64), pages)
    with pytest.raises(TypeError, match="q must be an array"):
        packed_attention(q.tolist(), pages)
    with pytest.raises(TypeError, match="lse must be float32"):
        mass_from_scores(result.scores, result.lse.astype(np.float64), pages)
    with pytest.raises(ValueError, match="Hkv"):
        mass_from_scores(result.scores[:, :1], result.lse, pages)
    with pytest.raises(ValueError, match="scores keeps 4 rows of heads"):
        mass_from_scores(result.scores, result.lse[..., :0], pages)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("rung", 4),
        ("count", 17),
        ("index", 99),
        ("index", NO_PAGE),
        ("num_pages", 32),
        ("num_pages", -4),
        ("num_pages", 3),
    ],
)
def test_refuses_a_table_that_leads_outside_the_pools(name: str, value: int) -> None:
    case = small_case()
    table = getattr(case.pages, name).copy()
    table[(1, 1, 5)[: table.ndim]] = value
    with pytest.raises(ValueError, match="page table"):
        packed_attention(case.q, dataclasses.replace(case.pages, **{name: table}), backend="cpu")


def test_refuses_a_quad_of_two_rungs() -> None:
    case = small_case()
    case.pages.rung[1, 1, 5] ^= 1
    case.pages.index[1, 1, 5] = 0
    with pytest.raises(ValueError, match="page table"):
        call(case, "cpu")


def _exp2_of_eights(x: Array, out: Array) -> None:
    for i in range(0, x.size, 8):
        store(out, i, exp2(load(x, i)))


@given(seed=SEEDS)
@settings(max_examples=20)
def test_exp2(seed: int) -> None:
    x = np.random.default_rng(seed).uniform(-126, 127, 8000).astype(np.float32)
    x[:100], x[100:110] = (
        np.arange(-50, 50),
        (0, -0.0, 0.5, -0.5, 1e-30, -126, 127, 0.49999997, -0.50000006, 1e-8),
    )
    compute: Any = numba.njit(_exp2_of_eights)
    out = np.empty_like(x)
    compute(x, out)
    exact = np.exp2(x.astype(np.float64))
    assert (np.abs(out - exact) / np.spacing(exact.astype(np.float32))).max() < 1.1
    special = np.array([-np.inf, np.nan, -126.1, -1e30, -3e38, 0, 1, -1], np.float32)
    compute(special, out)
    np.testing.assert_array_equal(out[:8], [0, np.nan, 0, 0, 0, 1, 2, 0.5])

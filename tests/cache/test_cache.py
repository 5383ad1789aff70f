"""The cache against a plain model: a list of tokens per row, and float64 attention over what is held."""

import math
import re
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvlab.cache.cache import MixedPrecisionCache
from kvlab.errors import BudgetError
from kvlab.ladder import ERRORS
from kvlab.ops.allocator import METHODS
from kvlab.ops.cpu.page_tokens import decode_tokens
from kvlab.ops.key_frames import KeyFrames
from kvlab.ops.layer_state import WAITING_PAGES
from kvlab.pages import of_channels
from kvlab.reference.attention import attend_rows
from kvlab.reference.codec import hadamard
from kvlab.reference.pages import bit_address, value_signs
from tests.cache_contents import entries_with_tokens, pages_of, tokens_in

LAYERS, HEADS_Q, HEADS, DIM = 2, 4, 2, 32


def make(**options):
    options = {"plan_length": 256, "bits": (2, 4, 8), "budget": 0.5, **options}
    return MixedPrecisionCache(LAYERS, HEADS_Q, HEADS, DIM, **options)


def tokens(rng, batch, n):
    q = rng.standard_normal((batch, n, HEADS_Q, DIM), dtype=np.float32) * 2
    k, v = rng.standard_normal((2, batch, n, HEADS, DIM), dtype=np.float32)
    return q, k + 0.5, v


def held(cache, layer, row):
    """What a row holds: position -> (k, v), one dict a head, decoded without the attention kernel."""
    pages, found = cache.pages(layer), [{} for _ in range(HEADS)]
    listed = tokens_in(pages, row)
    for r, rung in enumerate(pages.layouts):
        mine = listed.rung == r
        head = listed.head[mine]
        k, v = decode_tokens(pages.pools[r], rung, pages.dtype, listed.index[mine], listed.slot[mine])
        if rung.bits_k < 16:
            k = np.ldexp(hadamard(k), of_channels(pages.k_shift[row, head])) + pages.k_mean[row, head]
        v = v if rung.bits_v == 16 else hadamard(v) * value_signs(v.shape[1])
        for h, position, key, value in zip(head, listed.position[mine], k, v, strict=True):
            assert position not in found[h], "a token is stored twice"
            found[h][int(position)] = (key, value)
    return found


def attention_over(cache, layer, row, q, k, v, valid):
    """float64 attention of one row's new queries over what is held and, causally, the valid new tokens."""
    out = np.zeros(q.shape)
    for head, old in enumerate(held(cache, layer, row)):
        keys = np.array([key for key, _ in old.values()]).reshape(-1, DIM)
        values = np.array([value for _, value in old.values()]).reshape(-1, DIM)
        visible = np.concatenate([np.ones((len(q), len(keys)), bool), np.tri(len(q), dtype=bool) & valid], 1)
        lines = slice(head * HEADS_Q // HEADS, (head + 1) * HEADS_Q // HEADS)
        everything = (np.concatenate(pair)[:, None] for pair in ((keys, k[:, head]), (values, v[:, head])))
        result, _ = attend_rows(q[:, lines], *everything, visible, scale=1 / math.sqrt(DIM), softcap=0.0)
        out[:, lines] = result
    return out


def live_nbytes(cache):
    """The sum of all live buffers, counted from the tables alone; pages that wait for tokens aside."""
    total = 0
    for pages in pages_of(cache):
        for at in map(tuple, entries_with_tokens(pages)):
            total += pages.layouts[pages.rung[at]].nbytes
            total += sum(t.itemsize for t in (pages.rung, pages.count, pages.index, pages.base))
        total += pages.num_pages.nbytes + pages.k_mean.nbytes + pages.k_shift.nbytes
    return total


def check(cache):
    layouts = cache.pages(0).layouts
    top = max(layout.nbytes for layout in layouts) + 8
    open_pages = 2 if len(layouts) == len(cache.allocation()) else WAITING_PAGES  # for the next tokens
    assert 0 <= cache.nbytes - live_nbytes(cache) <= open_pages * LAYERS * cache.batch * HEADS * top
    assert cache.nbytes <= cache.reserved_nbytes
    assert cache.budget_nbytes is None or cache.nbytes <= cache.budget_nbytes
    for pages in pages_of(cache):
        pages.check_entries()


@pytest.mark.parametrize(
    ("bits", "side", "budget"),
    [(("k4v2", "k4v8"), "k", 0.3), (("k2v4", "k8v4"), "v", 0.3), (("k8v3", 8), "k", 0.4)],
)
def test_a_side_whose_width_stays_keeps_its_codes(bits, side, budget):
    """Of tokens that lose bits of the other side: to find a step once more would change what was stored."""
    cache, rng = make(bits=bits, budget=budget, plan_length=1024), np.random.default_rng(0)

    def codes(pages):
        """(head, position) -> rung, and all bits of the side with its step byte."""
        found, listed = {}, tokens_in(pages, 0)
        for head, index, slot, rung, position in zip(
            listed.head, listed.index, listed.slot, listed.rung, listed.position, strict=True
        ):
            layout = pages.layouts[rung]
            if 16 in (layout.bits_k, layout.bits_v):
                continue
            record = pages.pools[rung][index]
            first, width, steps = {
                "k": (layout.k_codes, layout.bits_k, layout.k_step_sizes),
                "v": (layout.v_codes, layout.bits_v, layout.v_step_sizes),
            }[side]
            stream = np.unpackbits(record[first:], bitorder="little")
            bits_of = stream[bit_address(width, DIM, side)[slot]]
            found[int(head), int(position)] = rung, (*bits_of.ravel(), int(record[steps + slot]))
        return found

    before, moved = {}, 0
    for _ in range(12):
        for layer in range(LAYERS):
            cache.step(layer, *tokens(rng, 1, 64))
        now = codes(cache.pages(0))
        for token in before.keys() & now.keys():
            if before[token][0] != now[token][0]:
                moved += 1
                assert before[token][1] == now[token][1]
        before = now
    assert moved > 50


class Growth(RuleBasedStateMachine):
    """Random sequences of all operations, on a cache and on lists of tokens."""

    @initialize(
        batch=st.integers(1, 3),
        bits=st.sampled_from([(2, 4, 8), (8,), (4, 16), ("k4v2", 8), (2, 3, 4, 8, 16)]),
        residual=st.sampled_from([0, 5]),
        dtype=st.sampled_from(["float16", "float32"]),
        importance=st.sampled_from(["attention", "forecast", "recency", "key_norm", "uniform"]),
        seed=st.integers(0, 1000),
    )
    def start(self, batch, bits, residual, dtype, importance, seed):
        budget = None if bits == (8,) else 1.5 if 16 in bits else 0.6
        self.cache = make(
            batch=batch, bits=bits, residual=residual, dtype=dtype, importance=importance, budget=budget
        )
        self.rng = np.random.default_rng(seed)
        self.rows = [{} for _ in range(batch)]
        self.length = 0

    def add(self, n, padded, attends):
        q, k, v = tokens(self.rng, len(self.rows), n)
        valid = self.rng.random((len(self.rows), n)) < 0.7 if padded else np.ones((len(self.rows), n), bool)
        k[~valid], v[~valid] = np.nan, np.nan
        for layer in range(LAYERS):
            if not attends:
                self.cache.append(layer, k, v, valid=valid)
                continue
            new = [self.clean(k, v, valid, row) for row in range(len(q))]
            wants = [attention_over(self.cache, layer, row, q[row], *new[row]) for row in range(len(q))]
            wants = np.where(valid[..., None, None], wants, 0)  # a query of padding sees nothing
            got = self.cache.step(layer, q, k, v, valid=valid)
            np.testing.assert_allclose(got, wants, atol=3e-5)
        for row, known in enumerate(self.rows):
            known.update({self.length + i: (k[row, i], v[row, i]) for i in np.flatnonzero(valid[row])})
        self.length += n

    @staticmethod
    def clean(k, v, valid, row):
        return np.nan_to_num(k[row]), np.nan_to_num(v[row]), valid[row]

    @rule(n=st.sampled_from([1, 2, 30, 64, 90]), padded=st.booleans())
    @precondition(lambda self: self.length < 400)
    def step(self, n, padded):
        self.add(n, padded, attends=True)

    @rule(n=st.sampled_from([1, 70]))
    @precondition(lambda self: self.length < 400)
    def append(self, n):
        self.add(n, False, attends=False)

    @rule(data=st.data())
    def crop(self, data):
        n = data.draw(st.integers(0, self.length))
        self.cache.crop(n)
        self.length -= n
        self.rows = [{p: t for p, t in known.items() if p < self.length} for known in self.rows]

    @rule(data=st.data())
    def reorder(self, data):
        rows = data.draw(
            st.lists(st.integers(0, len(self.rows) - 1), min_size=len(self.rows), max_size=len(self.rows))
        )
        self.cache.reorder(np.array(rows))
        self.rows = [dict(self.rows[row]) for row in rows]

    @rule(data=st.data())
    def select(self, data):
        rows = data.draw(st.lists(st.integers(0, len(self.rows) - 1), min_size=1, max_size=3))
        self.cache.select(np.array(rows))
        self.rows = [dict(self.rows[row]) for row in rows]

    @rule()
    @precondition(lambda self: len(self.rows) < 2)
    def repeat(self):
        self.cache.repeat(2)
        self.rows = [dict(known) for known in self.rows for _ in range(2)]

    @rule(layer=st.integers(0, LAYERS - 1))
    @precondition(lambda self: self.length > 0)
    def attend(self, layer):
        q, k, v = tokens(self.rng, len(self.rows), 1)
        nothing = np.zeros_like(k[0]), np.zeros_like(v[0]), np.zeros(1, bool)
        wants = [attention_over(self.cache, layer, row, q[row], *nothing) for row in range(len(q))]
        np.testing.assert_allclose(self.cache.attend(layer, q), wants, atol=3e-5)

    @rule()
    def save_and_load(self):
        with tempfile.TemporaryDirectory() as folder:
            self.cache.save(Path(folder) / "cache")
            self.cache = MixedPrecisionCache.load(Path(folder) / "cache")

    @rule()
    @precondition(lambda self: self.length > 200)
    def reset(self):
        self.cache.reset()
        self.rows, self.length = [{} for _ in self.rows], 0

    @invariant()
    def agrees(self):
        if not hasattr(self, "cache"):
            return
        check(self.cache)
        assert (self.cache.seqlen, self.cache.batch) == (self.length, len(self.rows))
        lowest = self.cache.pages(0).layouts[0]
        worst = max(ERRORS[lowest.bits_k], ERRORS[lowest.bits_v], 1e-5)
        for row, known in enumerate(self.rows):
            for layer in range(LAYERS):
                for head, found in enumerate(held(self.cache, layer, row)):
                    assert set(found) == set(known)
                    if not known:
                        continue
                    for side in range(2):
                        want = np.array([known[p][side][head] for p in known])
                        got = np.array([found[p][side] for p in known])
                        # Twice the mean error of the lowest rung, as tokens are re-encoded on their way down,
                        # and 2 % of one token: the grid may cut the largest element of one in a few hundred.
                        energy = (want**2).sum(1)
                        allowed = 2 * worst * energy.sum() + 0.02 * energy.max() + 1e-6
                        assert ((got - want) ** 2).sum() <= allowed


TestGrowth = Growth.TestCase
TestGrowth.settings = settings(
    max_examples=12, stateful_step_count=12, deadline=None, phases=[Phase.generate]
)


@pytest.mark.parametrize("budget", [0.32, 20_000 * LAYERS])
def test_the_budget_holds_token_by_token(budget):
    cache, rng = make(budget=budget), np.random.default_rng(0)
    rungs = {}
    for _ in range(300):
        for layer in range(LAYERS):
            cache.step(layer, *tokens(rng, 1, 1))
        check(cache)
        listed = tokens_in(cache.pages(0), 0)
        for head, p, rung in zip(listed.head, listed.position, listed.rung, strict=True):
            assert rung <= rungs.get((head, p), rung), "a token was promoted"
            rungs[head, p] = rung
    top = len(cache.pages(0).layouts) - 1
    assert (listed.rung[listed.position < cache.sink] == top).all()
    assert set(listed.rung) == {0, 1, 2}, "the test must reach every width"


def test_all_widths_16_is_plain_attention():
    cache, rng = make(bits=16, budget=None, dtype="float32", batch=2), np.random.default_rng(1)
    keys, values = np.empty((2, 0, HEADS, DIM)), np.empty((2, 0, HEADS, DIM))
    for n in (1, 130, 64, 1):
        q, k, v = tokens(rng, 2, n)
        keys, values = np.concatenate([keys, k], 1), np.concatenate([values, v], 1)
        seen = np.arange(keys.shape[1]) <= np.arange(n)[:, None] + keys.shape[1] - n
        want = [
            attend_rows(*row, seen, scale=1 / math.sqrt(DIM), softcap=0.0)[0]
            for row in zip(q, keys, values, strict=True)
        ]
        np.testing.assert_allclose(cache.step(0, q, k, v), want, atol=2e-6)
    np.testing.assert_array_equal(np.stack([held(cache, 0, b)[0][150][0] for b in range(2)]), keys[:, 150, 0])


def test_attend_sees_everything_held():
    cache, rng = make(residual=9), np.random.default_rng(2)
    cache.step(0, *tokens(rng, 1, 150))
    q, k, v = tokens(rng, 1, 4)
    nothing = k[0, :0], v[0, :0], np.ones(0, bool)
    want = np.concatenate([attention_over(cache, 0, 0, q[0, i : i + 1], *pad(nothing)) for i in range(4)])
    np.testing.assert_allclose(cache.attend(0, q)[0], want, atol=3e-5)


def test_attend_where_no_token_is_exact():
    cache, rng = make(), np.random.default_rng(3)
    q, k, v = tokens(rng, 1, 100)
    cache.step(0, q, k, v)
    assert len(cache.pages(0).layouts) == 3 or 3 not in cache.pages(0).rung
    nothing = k[0, :0], v[0, :0], np.ones(0, bool)
    want = attention_over(cache, 0, 0, q[0, :1], *pad(nothing))
    np.testing.assert_allclose(cache.attend(0, q[:, :1])[0], want, atol=3e-5)


def pad(new):
    """One invisible new token, so that a causal row sees only what is held."""
    k, v, _ = new
    return np.zeros((1, *k.shape[1:])), np.zeros((1, *v.shape[1:])), np.zeros(1, bool)


def test_batch_mates_and_padding_change_nothing():
    rng = np.random.default_rng(3)
    alone, among = make(budget=0.4), make(budget=0.4, batch=2)
    for n, left in ((200, 30), (64, 0), (1, 0), (64, 0)):
        q, k, v = tokens(rng, 2, n)
        valid = np.ones((2, n), bool)
        valid[1, :left] = False
        for layer in range(LAYERS):
            one = alone.step(layer, *(x[:1] for x in (q, k, v)))
            both = among.step(layer, q, k, v, valid=valid)
            np.testing.assert_allclose(one, both[:1], atol=1e-6)
    for name, pages in alone.allocation().items():
        np.testing.assert_array_equal(pages[:, 0], among.allocation()[name][:, 0])


@pytest.mark.parametrize("chunk", [1, 20, 90])
def test_queries_of_padding_are_not_looked_at(chunk):
    held = []
    for query in (0, 30, np.nan):
        cache, rng = make(budget=0.3, batch=2, bits=(2, 8), realloc_every=1), np.random.default_rng(0)
        cache.step(0, *tokens(rng, 2, 120))
        q, k, v = tokens(rng, 2, chunk)
        valid = np.ones((2, chunk), bool)
        valid[0, -3:] = False
        q[0, -3:] = query
        cache.step(0, q, k, v, valid=valid)
        held.append((tokens_in(cache.pages(0), 0).code, cache.step(0, *tokens(rng, 2, 90))))
    for other in held[1:]:
        assert all(np.array_equal(a, b) for a, b in zip(held[0], other, strict=True))


@pytest.mark.parametrize("stored", [0, 40, 120])
@pytest.mark.parametrize("chunk", [1, 2, 16, 17, 64, 90])
def test_rows_of_padding_give_0(chunk, stored):
    cache, rng = make(batch=2), np.random.default_rng(3)
    cache.step(0, *tokens(rng, 2, stored))
    q, k, v = tokens(rng, 2, chunk)
    valid = np.arange(chunk) % 3 > 0  # at the ends and between
    q[0, ~valid] = np.nan
    out = cache.step(0, q, k, v, valid=np.stack([valid, np.ones(chunk, bool)]))
    assert (out[0, ~valid] == 0).all()
    assert (out[0, valid] != 0).all()
    assert (out[1] != 0).all()


@pytest.mark.parametrize("bits", [(8,), (16,), (2, 4, 8)])
@pytest.mark.parametrize("side", ["k", "v"])
@pytest.mark.parametrize("n", [3, 100])
def test_what_float16_cannot_hold_is_refused_by_name(bits, side, n):
    rng = np.random.default_rng(0)
    q, k, v = tokens(rng, 1, n)
    new = {"k": k, "v": v}
    cache = make(bits=bits, budget=None)
    new[side][0, -1, 0, 0] = -65_504
    cache.step(0, q, **new)
    held = cache.nbytes
    new[side][0, -1, 0, 0] = -70_000
    for call in (lambda: cache.step(0, q, **new), lambda: cache.append(0, **new)):
        with pytest.raises(ValueError, match=rf"{side} reaches 70000, .*dtype='bfloat16' or 'float32'"):
            call()
    assert (cache.seqlen, cache.nbytes) == (n, held)
    padding = np.ones((1, n), bool)
    padding[0, -1] = False
    assert np.isfinite(cache.step(0, q, **new, valid=padding)).all()
    for dtype in ("bfloat16", "float32"):
        wide = make(bits=bits, budget=None, dtype=dtype)
        wide.step(0, q, **new)
        assert np.isfinite(wide.attend(0, q)).all()


def test_same_calls_same_bits():
    results = []
    for _ in range(2):
        cache, rng = make(), np.random.default_rng(4)
        results.append([cache.step(0, *tokens(rng, 1, n)) for n in (100, 64, 1, 64)])
    for one, other in zip(*results, strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_nan_token_spoils_its_row_only():
    cache, rng = make(batch=2), np.random.default_rng(5)
    q, k, v = tokens(rng, 2, 150)
    k[0, 140] = np.nan
    cache.step(0, q, k, v)
    out = cache.step(0, *tokens(rng, 2, 64))
    assert np.isnan(out[0]).all()
    assert np.isfinite(out[1]).all()


def test_important_tokens_keep_their_width():
    """Tokens that every query attends must end up above tokens that none does."""
    cache, rng = make(budget=0.3, sink=0, recent=0, floor=0), np.random.default_rng(6)
    q, k, v = tokens(rng, 1, 256)
    k[0, 100:140] = 4 * np.abs(k[0, 100:140])
    q = np.abs(q)
    for start in range(0, 256, 64):
        part = slice(start, start + 64)
        cache.step(0, q[:, part], k[:, part], v[:, part])
    listed = tokens_in(cache.pages(0), 0)
    wanted = (listed.position >= 100) & (listed.position < 140)
    assert listed.rung[wanted].mean() > listed.rung[~wanted].mean() + 0.5


@pytest.mark.parametrize("allocator", METHODS)
@pytest.mark.parametrize(
    ("head_dim", "bits", "budget", "worse"),
    [
        (16, "default", 0.5, ("2", "k3v2")),
        (16, (2, 3, 4, 8), "tight", ("2", "3")),
        (32, (2, 3, 4, 8), 0.35, ("3",)),
        (48, (0, 2, 3, 4, 8), 0.3, ("3",)),
        (64, ("k8882v2", "k8884v2", 8), 0.5, ("k8882v2",)),
    ],
)
def test_no_page_is_at_a_rung_of_the_bytes_of_a_higher_one(allocator, head_dim, bits, budget, worse):
    """Words of pages are shared by tiles, so pages of few channels take the same bytes at several widths."""
    if budget == "tight":
        free = MixedPrecisionCache(1, 2, 1, head_dim, budget=None, bits=bits)
        budget = free.smallest_nbytes(230)
    cache = MixedPrecisionCache(
        1, 2, 1, head_dim, budget=budget, bits=bits, allocator=allocator, plan_length=230
    )
    rng = np.random.default_rng(0)
    for length in (200, 20, *[1] * 10):
        q, k, v = (rng.normal(size=(1, length, n, head_dim)).astype(np.float16) for n in (2, 1, 1))
        cache.step(0, q, k, v)
    cache.crop(40)
    pages = {name: n.sum() for name, n in cache.allocation().items()}
    assert sum(pages.values()) > 0
    assert not any(pages[name] for name in worse)


def test_a_floor_keeps_tokens_readable_that_nobody_attends():
    """Bytes that would go to tokens with all the attention go to the others instead."""
    lowest = []
    for floor in (0, 1, 1000):
        cache, rng = make(budget=0.3, sink=0, recent=0, floor=floor), np.random.default_rng(6)
        q, k, v = tokens(rng, 1, 256)
        k[0, 100:140] = 4 * np.abs(k[0, 100:140])
        for start in range(0, 256, 64):
            part = slice(start, start + 64)
            cache.step(0, np.abs(q[:, part]), k[:, part], v[:, part])
        lowest.append(int((tokens_in(cache.pages(0), 0).rung == 0).sum()))
    assert lowest[0] > lowest[1] >= lowest[2]
    with pytest.raises(ValueError, match="floor"):
        make(floor=-1)


def test_user_importance_is_called():
    seen = []

    def newest(previous, mass, positions, seqlen):
        seen.append((previous is None, mass.shape == positions.shape))
        return positions.astype(np.float32)

    cache, rng = make(importance=newest), np.random.default_rng(7)
    for n in (100, 64):
        cache.step(0, *tokens(rng, 1, n))
    assert {first for first, _ in seen} == {True, False}
    assert all(fits for _, fits in seen)


@pytest.mark.parametrize(
    "scores", [lambda mass: -mass - 1, lambda mass: mass * np.nan, lambda mass: mass[:1], lambda mass: "a"]
)
def test_what_a_user_importance_gives_is_checked(scores):
    cache, rng = (
        make(importance=lambda previous, mass, positions, seqlen: scores(mass)),
        np.random.default_rng(7),
    )
    with pytest.raises(ValueError, match="importance: the function"):
        cache.step(0, *tokens(rng, 1, 100))
    assert cache.seqlen == 0


def test_eviction_only_where_0_is_listed():
    rng = np.random.default_rng(8)
    cache = make(bits=(0, 4, 8), budget=8_000 * LAYERS)
    for _ in range(6):
        cache.step(0, *tokens(rng, 1, 64))
        check(cache)
    assert 0 < len(tokens_in(cache.pages(0), 0).head) < 6 * 64 * HEADS


def test_a_budget_that_cannot_hold_is_refused_unchanged():
    cache, rng = make(bits=(4, 8), budget=12_000 * LAYERS), np.random.default_rng(9)
    cache.step(0, *tokens(rng, 1, 64))
    before = cache.nbytes, held(cache, 0, 0)
    with pytest.raises(BudgetError, match="longest length that fits") as caught:
        cache.step(0, *tokens(rng, 1, 400))
    assert (cache.nbytes, cache.seqlen) == (before[0], 64)
    assert all(set(a) == set(b) for a, b in zip(before[1], held(cache, 0, 0), strict=True))
    longest, needed = caught.value.longest_length, caught.value.needed_bytes
    MixedPrecisionCache(LAYERS, HEADS_Q, HEADS, DIM, bits=(4, 8), budget=12_000 * LAYERS, max_seqlen=longest)
    MixedPrecisionCache(LAYERS, HEADS_Q, HEADS, DIM, bits=(4, 8), budget=needed, max_seqlen=464)
    for budget, length in ((12_000 * LAYERS, longest + 1), (needed - LAYERS, 464)):
        with pytest.raises(BudgetError):
            MixedPrecisionCache(LAYERS, HEADS_Q, HEADS, DIM, bits=(4, 8), budget=budget, max_seqlen=length)


@pytest.mark.parametrize("widths", [(2, 3, 4, 8, 16), (2, 8)])
def test_the_longest_length_is_reached(widths):
    """A budget that just holds 258 tokens holds them, at the lowest width, however they come."""
    rng = np.random.default_rng(31)
    with pytest.raises(BudgetError) as refused:
        make(bits=widths, budget=5000, max_seqlen=258)
    cache = make(bits=widths, budget=refused.value.needed_bytes)
    for count in [230, *[1] * 28]:
        q, k, v = tokens(rng, 1, count)
        for layer in range(LAYERS):
            cache.step(layer, q, k, v)
        assert cache.nbytes <= refused.value.needed_bytes
    assert cache.seqlen == 258


def test_repeat_under_an_absolute_budget_demotes():
    cache, rng = make(budget=90_000 * LAYERS), np.random.default_rng(10)
    for layer in range(LAYERS):
        cache.step(layer, *tokens(rng, 1, 400))
    cache.repeat(2)
    check(cache)
    assert len(tokens_in(cache.pages(1), 1).head) == 400 * HEADS
    with pytest.raises(BudgetError):
        cache.repeat(40)
    check(cache)
    assert cache.batch == 2


def test_what_a_crop_leaves_fits_the_smaller_budget():
    """The first tokens are the important ones, at high widths: a third of the length, most of the bytes."""
    rng = np.random.default_rng(5)
    k, v = rng.standard_normal((2, 1, 1024, 1, 32), dtype=np.float32)
    k[:, :300] *= 0.1  # keys of small norm count as important
    cache = MixedPrecisionCache(1, 2, 1, 32, budget=0.3, plan_length=1, importance="key_norm", recent=0)
    cache.append(0, k, v)
    wide = 1024 * 4 * 32 * 0.3
    assert wide / 2 < cache.nbytes <= wide
    cache.crop(724)
    assert cache.seqlen == 300
    assert len(tokens_in(cache.pages(0), 0).head) == 300
    assert cache.nbytes <= cache.budget_nbytes < wide / 2
    before = cache.nbytes
    with pytest.raises(BudgetError, match="at least"):
        cache.crop(299)  # a page for one token is more than its share
    assert (cache.seqlen, cache.nbytes, len(tokens_in(cache.pages(0), 0).head)) == (300, before, 300)


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"bits": (5,)}, ValueError, "width 5"),
        ({"bits": ("k4v2", 3)}, ValueError, "same bytes"),
        ({"bits": ("k16v2", "k8v16")}, ValueError, "more bits for K or V than it has"),
        ({"bits": "0-0:8"}, ValueError, r"layers \[1\] of 2"),
        ({"budget": -1.0}, ValueError, "budget=-1.0"),
        ({"budget": 524288.0}, ValueError, "is a fraction of float16's bytes"),
        ({"budget": "6 parsecs"}, ValueError, "budget="),
        ({"allocator": "random"}, ValueError, "allocator='random'"),
        ({"importance": "vibes"}, ValueError, "importance='vibes'"),
        ({"dtype": "int8"}, ValueError, "dtype='int8'"),
        ({"device": "tpu"}, ValueError, "device='tpu'"),
        ({"device": "cuda:x"}, ValueError, "device='cuda:x'"),
        ({"device": "cuda"}, NotImplementedError, "head_dim=32"),
        ({"residual": -1}, ValueError, "residual=-1"),
    ],
)
def test_bad_options_name_themselves(options, error, text):
    with pytest.raises(error, match=text):
        make(**options)


@pytest.mark.parametrize("budget", [np.int64(200_000), np.float32(0.5), np.float64(0.5)])
def test_a_budget_may_be_a_number_of_numpy(budget):
    assert make(budget=budget).budget_nbytes == make(budget=budget.item()).budget_nbytes


def test_a_file_is_as_readable_as_others_and_errors_name_the_path(tmp_path):
    make().save(tmp_path / "cache")
    (tmp_path / "other").write_bytes(b"")
    assert (tmp_path / "cache").stat().st_mode == (tmp_path / "other").stat().st_mode
    with pytest.raises(IsADirectoryError, match="is a folder: name a file"):
        make().save(tmp_path)
    with pytest.raises(FileNotFoundError, match="make the folder"):
        make().save(tmp_path / "none" / "cache")
    with pytest.raises(ValueError, match="device='gpu' is not supported"):
        MixedPrecisionCache.load(tmp_path / "cache", device="gpu")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cache", "other"]


def test_bad_arrays_name_themselves():
    cache, rng = make(), np.random.default_rng(11)
    q, k, v = tokens(rng, 1, 4)
    with pytest.raises(ValueError, match="layer=2"):
        cache.step(2, q, k, v)
    with pytest.raises(ValueError, match="v"):
        cache.step(0, q, k, v[:, :3])
    with pytest.raises(TypeError, match="q has dtype float64"):
        cache.step(0, q.astype(np.float64), k, v)
    with pytest.raises(TypeError, match="valid"):
        cache.step(0, q, k, v, valid=np.ones((1, 4)))
    with pytest.raises(ValueError, match="n=1"):
        cache.crop(1)
    with pytest.raises(ValueError, match="row 3"):
        cache.select(np.array([3]))
    with pytest.raises(TypeError, match="k is on cpu, the cache is on cuda: pass arrays on that GPU"):
        MixedPrecisionCache(1, 2, 2, 64, device="cuda").append(0, *np.ones((2, 1, 3, 2, 64), np.float16))


def test_a_cache_and_frames_say_what_they_hold() -> None:
    cache = MixedPrecisionCache(2, 2, 1, 16, budget=None, bits=(2, 8), batch=3)
    assert repr(cache) == "MixedPrecisionCache: 2 layers, empty"
    keys = np.random.default_rng(0).standard_normal((3, 100, 1, 16), np.float32)
    for layer in range(2):
        cache.append(layer, keys, keys)
    assert re.fullmatch(
        r"MixedPrecisionCache: 2 layers, 3 rows of 100 tokens, [\d.]+ KiB, [\d.]+ bits an element "
        r"\(float16 37.50 KiB\)",
        repr(cache),
    )
    frames = KeyFrames.measured([(keys, keys, keys)] * 2)
    assert repr(frames) == "KeyFrames: 2 layers, 1 KV heads of 16 channels"

"""A small cache, and float64 attention over the tokens that it holds."""

import math

import numpy as np

from kvlab.cache.cache import MixedPrecisionCache
from kvlab.ops.cpu.page_tokens import decode_tokens
from kvlab.ops.layer_state import WAITING_PAGES
from kvlab.pages import of_channels
from kvlab.reference.attention import attend_rows
from kvlab.reference.codec import hadamard
from kvlab.reference.pages import value_signs
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


def pad(new):
    """One invisible new token, so that a causal row sees only what is held."""
    k, v, _ = new
    return np.zeros((1, *k.shape[1:])), np.zeros((1, *v.shape[1:])), np.zeros(1, bool)

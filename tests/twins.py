"""Two caches that are told the same random calls: one on a CPU, one with another executor.

What they hold must be the same after every call, token by token, bit for bit: pages and their widths, what is
stored of each token, bytes, and what is refused. Importance comes from keys, positions or equal attention:
queries are 0, so every visible token receives the same.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvlab.cache.cache import MixedPrecisionCache
from kvlab.errors import BudgetError
from kvlab.ops.frame import FRAME
from tests.cache_contents import contents_of, pages_of

LAYERS, HEADS, GROUP, LONGEST = 2, 2, 2, 600
LADDERS = {
    (2, 4, 8): 0.6,
    (2, 3, 4, 8): 0.5,
    (4,): None,
    (8,): None,
    ("k3v2", 4): 0.4,
    (4, 16): 1.2,
    ("k4v2", 8): 0.7,
    (0, 2, 8): 0.4,
    ("k4220v2", "k4422v2", "k8422v3", "k8444v4", 8): 0.4,
    ("k4422v3", "k8444v4", 16): 1.2,
    "0:k4422v2+8,1:4+8": 0.5,
}
"""Ladders, and of each a budget that takes some tokens down."""
IN_BLOCKS = [bits for bits in LADDERS if "44" in str(bits)]


@st.composite
def options_of_twins(draw: st.DrawFn) -> dict[str, Any]:
    bits = draw(st.sampled_from(list(LADDERS)))
    return {
        "bits": bits,
        "budget": LADDERS[bits],
        "batch": draw(st.integers(1, 2)),
        "allocator": draw(st.sampled_from(["greedy", "greedy", "dp", "uniform"])),
        "plan_length": draw(st.sampled_from([256, 512])),
        "recent": draw(st.sampled_from([0, 20, 128])),
        "floor": draw(st.sampled_from([0, 0.5, 1, 40])),
        "realloc_every": draw(st.sampled_from([1, 4, 16])),
        "sliding_window": draw(st.sampled_from([None, None, 100, [40, None]])),
        "rewind": draw(st.sampled_from([0, 20])),
    }


def padding(rng: np.random.Generator, shape: tuple[int, int], windows: tuple[int, ...]) -> np.ndarray:
    """Which tokens are no padding: a window beyond which steps reach takes padding at their ends alone."""
    if not any(window and shape[1] > window for window in windows):
        return rng.random(shape) < 0.7
    first, last = np.sort(rng.integers(0, shape[1] + 1, (2, shape[0], 1)), axis=0)
    return (first <= np.arange(shape[1])) & (np.arange(shape[1]) < last)


def assert_same(first: Any, second: Any) -> None:
    """Two caches hold the same tokens in pages of the same widths."""
    assert (first.seqlen, first.batch, first.nbytes) == (second.seqlen, second.batch, second.nbytes)
    for name, counts in first.allocation().items():
        assert np.array_equal(counts, second.allocation()[name])
    for one, other in zip(pages_of(first), pages_of(second), strict=True):
        for name in ("num_pages", "rung", "count", "base", *FRAME):
            assert np.array_equal(getattr(one, name), getattr(other, name))
    assert contents_of(first) == contents_of(second)


class Twins(RuleBasedStateMachine):
    """Subclasses give `devices`, of both caches, and `put`, which takes an array to a device."""

    devices = "cpu", "cuda"
    policies = "key_norm", "recency", "uniform", "attention", "forecast"
    head_dims = 64, 96, 128

    @staticmethod
    def put(x: np.ndarray, device: str) -> Any:
        return x

    @initialize(options=options_of_twins(), seed=st.integers(0, 2**31))
    def start(self, options: dict[str, Any], seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        dims = [dim for dim in self.head_dims if dim % 64 == 0 or options["bits"] not in IN_BLOCKS]
        self.dim = int(self.rng.choice(dims))
        options["importance"] = str(self.rng.choice(self.policies))
        self.scale = np.float16(self.rng.choice([1, 2**-9]))
        self.caches = [
            MixedPrecisionCache(LAYERS, HEADS * GROUP, HEADS, self.dim, device=device, **options)
            for device in self.devices
        ]

    def both(self, call: Any, refusals: Any = BudgetError) -> None:
        """Do the same with both, or have both refuse it in the same words."""
        refused = []
        for cache, device in zip(self.caches, self.devices, strict=True):
            try:
                call(cache, device)
            except refusals as error:
                refused.append(str(error))
        assert len(refused) in (0, 2)
        assert len(set(refused)) < 2

    def new(self, n: int) -> list[np.ndarray]:
        shape = (self.caches[0].batch, n, HEADS, self.dim)
        q = np.zeros((*shape[:2], HEADS * GROUP, self.dim), np.float16)
        k, v = (self.rng.standard_normal(shape).astype(np.float16) + np.float16(0.5) for _ in "kv")
        return [q, k * self.scale, v * self.scale]

    @rule(n=st.sampled_from([1, 2, 16, 17, 64, 130]), padded=st.booleans())
    @precondition(lambda self: self.caches[0].seqlen < LONGEST)
    def step(self, n: int, padded: bool) -> None:
        new = [self.new(n) for _ in range(LAYERS)]
        cache = self.caches[0]
        valid = padding(self.rng, (cache.batch, n), cache.windows) if padded else None

        def call(cache: Any, device: str) -> None:
            mask = None if valid is None else self.put(valid, device)
            for layer, arrays in enumerate(new):
                cache.step(layer, *(self.put(x, device) for x in arrays), valid=mask)

        self.both(call)

    @rule(n=st.integers(2, 40))
    @precondition(lambda self: 0 < self.caches[0].seqlen < LONGEST)
    def decode(self, n: int) -> None:
        for _ in range(n):
            self.step(1, False)

    @rule(n=st.sampled_from([1, 3, 70]))
    @precondition(lambda self: self.caches[0].seqlen < LONGEST)
    def append(self, n: int) -> None:
        new = [self.new(n)[1:] for _ in range(LAYERS)]

        def call(cache: Any, device: str) -> None:
            for layer, arrays in enumerate(new):
                cache.append(layer, *(self.put(x, device) for x in arrays))

        self.both(call)

    @rule(data=st.data())
    def crop(self, data: st.DataObject) -> None:
        n = data.draw(st.integers(0, self.caches[0].seqlen))
        self.both(lambda cache, device: cache.crop(n), (BudgetError, ValueError))

    @rule(data=st.data())
    def reorder(self, data: st.DataObject) -> None:
        batch = self.caches[0].batch
        rows = np.array(data.draw(st.lists(st.integers(0, batch - 1), min_size=batch, max_size=batch)), int)
        self.both(lambda cache, device: cache.reorder(rows))

    @rule(data=st.data())
    def select(self, data: st.DataObject) -> None:
        row = st.integers(0, self.caches[0].batch - 1)
        rows = np.array(data.draw(st.lists(row, min_size=1, max_size=3)))
        self.both(lambda cache, device: cache.select(rows))

    @rule()
    @precondition(lambda self: self.caches[0].seqlen > 0)
    def exchange(self) -> None:
        """Each goes on from the file of the other."""
        with tempfile.TemporaryDirectory() as folder:
            for number, cache in enumerate(self.caches):
                cache.save(Path(folder, str(number)))
            self.caches = [
                MixedPrecisionCache.load(Path(folder, str(1 - number)), device=device)
                for number, device in enumerate(self.devices)
            ]
        q = self.new(1)[0]
        for cache, device in zip(self.caches, self.devices, strict=True):
            cache.attend(0, self.put(q, device))  # what was loaded comes to its device

    @invariant()
    def same(self) -> None:
        if hasattr(self, "caches"):
            assert_same(*self.caches)

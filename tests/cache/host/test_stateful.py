"""Random calls of a cache on kernels in NumPy: what the host decides around them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import Phase, settings

from kvlab.ops.packed import packed_attention
from tests.cache.host.cases import draw, make, step
from tests.cache.host.noted import install
from tests.cache_contents import pages_of, seen_of
from tests.stateful_cache import StatefulCache


class Machine(StatefulCache):
    step_all, draw, put = staticmethod(step), staticmethod(draw), staticmethod(np.asarray)

    def __init__(self) -> None:
        super().__init__()
        self.patch = pytest.MonkeyPatch()
        install(self.patch)

    def teardown(self) -> None:
        self.patch.undo()

    def make(self, head_dim: int, **options: Any) -> Any:
        return make(**options | {"dtype": "float16"})

    def attend_checked(self, cache: Any, rng: np.random.Generator) -> None:
        q = draw(rng, cache, 2)[0]
        for layer, pages in enumerate(pages_of(cache)):
            wanted = packed_attention(q.astype(np.float32), pages, **seen_of(cache, layer)).out
            assert np.abs(cache.attend(layer, q) - wanted).max() < 4e-3


TestStateful = Machine.TestCase
TestStateful.settings = settings(
    max_examples=15, stateful_step_count=12, deadline=None, phases=[Phase.generate]
)

"""Random calls of a cache on a GPU: every operation in any order, each step against float64."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import Phase, settings

from kvlab.reference import packed as reference
from tests.cache_contents import pages_of, seen_of
from tests.compare import assert_accurate
from tests.gpu.packed_cases import low_precision, to_numpy, to_torch
from tests.gpu.test_cache import draw, make, step
from tests.stateful_cache import StatefulCache


class Machine(StatefulCache):
    make, step_all = staticmethod(make), staticmethod(step)
    draw, put = staticmethod(draw), staticmethod(to_torch)

    def attend_checked(self, cache: Any, rng: np.random.Generator) -> None:
        q = draw(rng, cache, int(rng.integers(1, 5)))[0]
        for layer, pages in enumerate(pages_of(cache)):
            out = to_numpy(cache.attend(layer, to_torch(q)))
            visible = seen_of(cache, layer)
            wanted, low = (f(q, pages, **visible)[0] for f in (reference.packed_attention, low_precision))
            assert_accurate(out, wanted, low)


TestStateful = Machine.TestCase
TestStateful.settings = settings(
    max_examples=40, stateful_step_count=15, deadline=None, phases=[Phase.generate]
)

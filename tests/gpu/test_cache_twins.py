"""A cache on a CPU and one on a GPU, told the same random calls, compared after every call."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import Phase, settings

from tests.gpu.packed_cases import to_torch
from tests.twins import Twins


class OnBoth(Twins):
    policies = "key_norm", "recency", "uniform"  # what tokens receive is rounded otherwise on a GPU

    @staticmethod
    def put(x: np.ndarray, device: str) -> Any:
        return x if device == "cpu" else to_torch(x)


TestTwins = OnBoth.TestCase
TestTwins.settings = settings(max_examples=30, stateful_step_count=12, deadline=None, phases=[Phase.generate])

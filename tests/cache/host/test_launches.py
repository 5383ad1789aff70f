"""What the host writes into the arguments of launches."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvlab.ladder import Rung
from kvlab.ops.cuda import pages as kernels
from kvlab.ops.layer_state import STATE
from kvlab.views import CudaView


def test_an_append_without_queries_has_none_of_a_step_before(monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[tuple[int, ...]] = []

    class Launch:
        def __init__(self, kernel: Any, grid: Any, block: Any, call: Any, **options: Any) -> None:
            self.call = call

        def __call__(self, stream: int) -> None:
            launched.append(tuple(int(self.call[0][name]) for name in ("q", "out", "lse")))

    monkeypatch.setattr(kernels, "PreparedLaunch", Launch)
    monkeypatch.setattr(kernels, "_append_kernel", lambda *args: None)
    state = np.zeros((), STATE)
    state["heads"], state["batch"] = 2, 1
    call = kernels.AppendCall(
        state, Rung(8, 8), 64, "float16", 0, num_new=1, group=2, scale=1.0, softcap=0.0, observed=1
    )
    q, k, v = (CudaView(address, (1, 1, 2, 64), (128, 128, 64, 1), "float16", 0) for address in (16, 32, 48))
    call(q, k, v, 0, 64, 80, True, 0)
    call(None, k, v, 0, 0, 0, False, 0)
    assert launched == [(16, 64, 80), (0, 0, 0)]

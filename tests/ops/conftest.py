"""What tests of launches share: a GPU that records them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    from tests.stand_in_gpu import StandInGpu

    made = StandInGpu(monkeypatch)
    yield made
    monkeypatch.undo()
    made.forget()

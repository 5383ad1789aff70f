"""The GPU in NumPy as a fixture, for tests of what the host does around kernels."""

from __future__ import annotations

import pytest

from tests.cache.host.noted import Kernels, install


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Kernels:
    return install(monkeypatch)

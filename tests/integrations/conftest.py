"""Integration tests use models so small that a second thread only costs time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numba
import pytest
import torch


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads(), numba.get_num_threads()
    torch.set_num_threads(1)
    numba.set_num_threads(1)
    yield
    torch.set_num_threads(before[0])
    numba.set_num_threads(before[1])


@pytest.fixture
def attend() -> Iterator[Any]:
    """Return a function that lets a model run an attention function until the end of the test."""
    used = []

    def switch(model: Any, attention: str) -> None:
        used.append((model, model.config._attn_implementation))
        model.set_attn_implementation(attention)

    yield switch
    for model, attention in reversed(used):
        model.set_attn_implementation(attention)

"""Attention of an ablation case on a GPU, with the CPU in its place: who computes, and who is named."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvlab.cache.cache import MixedPrecisionCache
from kvlab.lab.ablation import page_attention
from kvlab.lab.ablation import run as ablation
from kvlab.lab.ablation.grid import AblationCase, Geometry
from kvlab.lab.timing import Timing
from kvlab.ops.frame import FRAME
from kvlab.ops.packed import packed_attention

torch = pytest.importorskip("torch")


def test_the_backend_is_the_one_that_the_registry_chose(monkeypatch: pytest.MonkeyPatch) -> None:
    case = AblationCase(0.4, "2,4,8", 256, model=None, geometry=Geometry(2, 4, 2, 64))
    pages = ablation.pages_of(ablation._evaluated(case, lambda done, total: None).cache)
    called: list[int] = []

    def captured(calls: dict[str, Any]) -> dict[str, Any]:
        called.append(len(calls["layers"]()))
        return calls

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.Tensor, "cuda", lambda self: self)
    monkeypatch.setattr(page_attention, "to_gpu", lambda layer: layer)
    monkeypatch.setattr(page_attention, "shared_gpu", lambda device: nullcontext())
    monkeypatch.setattr(page_attention, "gpu_lock", lambda: SimpleNamespace(exclusive=nullcontext))
    monkeypatch.setattr(page_attention, "captured", captured)
    monkeypatch.setattr(
        page_attention, "time_graphs", lambda graphs, repeats: {"layers": Timing((1.0,) * repeats)}
    )
    q = ablation.query(case)
    timing, found, backend = page_attention._time_on_gpu(pages, q, 3)
    assert (backend, called, timing.seconds) == ("cpu", [2], (1.0,) * 3)
    expected = packed_attention(q, pages[0], backend="reference").out
    assert np.linalg.norm(found - expected) <= 2e-3 * np.linalg.norm(expected)


def test_all_of_a_layer_goes_to_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys in profiles need every table of their frame."""
    cache = MixedPrecisionCache(1, 4, 2, 64, budget=None, bits="k4422v2,k8444v4")
    cache.append(0, *np.random.default_rng(0).standard_normal((2, 1, 200, 2, 64), dtype=np.float32))
    monkeypatch.setattr(torch.Tensor, "cuda", lambda self: self)
    pages = cache.pages(0)
    found = page_attention.to_gpu(pages)
    assert (found.layouts, found.dtype, found.unit) == (pages.layouts, pages.dtype, 0)
    for name in ("rung", "count", "index", "base", "num_pages", *FRAME):
        assert getattr(found, name).numpy().tobytes() == getattr(pages, name).tobytes(), name
    assert all(np.array_equal(a.numpy(), b) for a, b in zip(found.pools, pages.pools, strict=True))

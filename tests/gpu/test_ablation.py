"""Ablation cases on a GPU: attention over packed and unpacked pages is the same, and a model reads."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from kvlab.lab.ablation import run as ablation
from kvlab.lab.ablation.grid import MODELS, AblationCase, Geometry
from kvlab.lab.ablation.page_attention import _time_on_gpu
from kvlab.lab.ablation.unpacked import unpack_pages
from kvlab.lab.benchmark.baseline import Options
from kvlab.lab.benchmark.cache import benchmark_cache
from kvlab.ops.packed import packed_attention

SMALL = AblationCase(0.4, "2,4,8", 256, model=None, geometry=Geometry(2, 8, 2, 64), device="cuda")


@pytest.mark.parametrize("bits", ["2,3,4,8", "4,8", "2,16", "k4422v2,k8444v4"])
def test_attention_over_both_layouts_is_that_of_the_cpu(bits: str) -> None:
    case = replace(SMALL, bits=bits, budget=0.95)
    cache = ablation._evaluated(case, lambda done, total: None).cache
    q = ablation.query(case)
    pages = ablation.pages_of(cache)
    expected = packed_attention(q, pages[0], backend="reference").out
    has_profiles = any(layout.in_blocks for layout in pages[0].layouts)  # which have no other layout
    for layers in [pages] if has_profiles else [pages, [unpack_pages(layer) for layer in pages]]:
        timing, found, backend = _time_on_gpu(layers, q, 3)
        assert backend == "cuda"
        assert np.linalg.norm(found - expected) <= 2e-3 * np.linalg.norm(expected)
        assert min(timing.seconds) > 0


@pytest.mark.parametrize("packed", [True, False])
def test_a_model_reads_and_its_case_has_all_figures(packed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVLAB_TINY", "1")
    case = AblationCase(0.45, "2,4,8", 512, packed, "tiny", MODELS["tiny"].geometry, "cuda", 2)
    result = ablation.run(case)
    assert result["status"] == "ok"
    assert result["provenance"]["backend"] == "cuda"
    assert result["provenance"]["gpu_state"]["driver_version"]
    assert (result["memory"]["memory_ratio"] <= case.budget) == packed
    assert result["quality"]["kl"] < 1


def test_benchmark_of_caches() -> None:
    rows = benchmark_cache(Options(contexts="512,2048", repeats=5, device="cuda", tiny=True))
    assert [row["backend"] for row in rows] == 2 * ["torch", "cuda", "cuda", "cuda"]

"""What a grid will cost: memory of the texts that are read at once, on a CPU and a GPU, and refusals."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kvlab.device import Gpu
from kvlab.errors import OutOfMemory
from kvlab.lab.ablation import memory, quality
from kvlab.lab.ablation.grid import MODELS, AblationCase, Geometry
from kvlab.lab.quality.plan import Protocol
from kvlab.lab.sweep import estimate

TINY = AblationCase(0.5, "2,4,8", 512, True, "tiny", MODELS["tiny"].geometry)


@pytest.mark.parametrize(("device", "at_once"), [("cpu", 4), ("cuda", 36)])
def test_memory_is_that_of_the_texts_that_are_read_at_once(device: str, at_once: int) -> None:
    case = AblationCase(0.5, "2,4,8", 512, device=device)
    fewer = replace(case, num_samples=1)
    assert case.texts_at_once == at_once
    one = memory._read_nbytes([fewer]) / fewer.texts_at_once
    assert memory._read_nbytes([case]) == pytest.approx(at_once * one)
    fp16 = case.geometry.fp16_nbytes(512)
    filling = 90 * memory._FILLING_NBYTES
    two = memory._read_nbytes([case, replace(case, budget=0.7)])
    assert two - memory._read_nbytes([case]) == pytest.approx(at_once * (0.7 * fp16 + filling), abs=1)
    assert one >= 2 * fp16 + 0.5 * fp16


@pytest.mark.parametrize(("samples", "at_once"), [(1, [4, 1]), (4, [4, 4])])
def test_an_evaluation_takes_as_many_texts_at_once_as_its_case_says(
    samples: int, at_once: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Seen(Exception):
        pass

    def look(_model: object, windows: Any, _cases: object, protocol: Protocol, **_options: object) -> None:
        count = len(windows.tokens)
        raise Seen([min(protocol.rows, count - first) for first in range(0, count, protocol.rows)])

    monkeypatch.setattr(quality, "evaluate", look)
    case = replace(TINY, num_samples=samples)
    with pytest.raises(Seen) as seen:
        quality.measure_quality([case], lambda done, total: None)
    assert seen.value.args[0] == at_once
    assert case.texts_at_once == at_once[0]
    assert case.texts == sum(at_once)


@pytest.mark.parametrize(
    ("device", "context", "budgets", "measured"),
    [
        ("cuda", 512, (0.3, 0.4, 0.5, 0.6, 0.7), 7098 << 20),
        ("cuda", 2048, (0.3, 0.5), 4252 << 20),
        ("cpu", 512, (0.5,), 1487 << 20),
        ("cpu", 512, (0.3, 0.5, 0.6, 0.7), 1623 << 20),
    ],
)
def test_estimates_are_near_what_was_measured(
    device: str, context: int, budgets: tuple[float, ...], measured: int
) -> None:
    """Peaks of a process that read with SmolLM2: docs/performance/sweep.md."""
    group = [AblationCase(budget, "2,3,4,8", context, device=device) for budget in budgets]
    found = memory.gpu_nbytes(group) if device == "cuda" else memory.nbytes(group)
    assert measured <= found <= 1.35 * measured


def test_a_gpu_holds_what_is_read_and_the_process_beside_it_one_row() -> None:
    on_cpu = [AblationCase(budget, "2,4,8", 2048) for budget in (0.3, 0.5)]
    on_gpu = [replace(case, device="cuda") for case in on_cpu]
    here, there = estimate.estimate(on_cpu), estimate.estimate(on_gpu)
    assert here.gpu_nbytes == 0
    assert "of a GPU" not in here.lines()[0]
    assert there.gpu_nbytes > memory._read_nbytes(on_gpu) > 2.9 * memory._read_nbytes(on_cpu)
    assert there.nbytes < here.nbytes + memory._GPU_LIBRARIES
    assert "of a GPU" in there.lines()[0]


def test_a_gpu_that_is_too_small_is_refused_with_what_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "gpus", lambda: (Gpu(0, "small", (9, 0), 8, 2 << 30),))
    cases = [AblationCase(0.5, "4,8", 512, device="cuda"), AblationCase(0.5, "4,8", 8192, device="cuda")]
    with pytest.raises(OutOfMemory, match=r"b0\.5_bits4_8_ctx\d+_packed needs about .* of GPU memory .* 2"):
        estimate.estimate(cases)
    assert estimate.estimate([replace(case, device="cpu") for case in cases]).cases == 2


def test_synthetic_data_take_a_layer_of_float32_beside_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    case = AblationCase(0.5, "4,8", 1 << 16, model=None, geometry=Geometry(32, 32, 8, 128))
    layer = 4 * (1 << 16) * 128 * (2 * 8 + 32)
    filling = 32 * 8 * memory._FILLING_NBYTES
    assert memory._read_nbytes([case]) == case.geometry.fp16_nbytes(1 << 16) // 2 + filling + layer
    monkeypatch.setattr(memory, "memory_available", lambda: 6 << 30)
    with pytest.raises(OutOfMemory, match=r"needs about .* of memory"):
        estimate.estimate([case])


def test_cases_too_large_to_be_read_together_are_planned_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    cases = [replace(TINY, budget=budget) for budget in (0.3, 0.5)]
    together = estimate.estimate(cases)
    monkeypatch.setattr(memory, "memory_available", lambda: memory.nbytes(cases) - 1)
    apart = estimate.estimate(cases)
    assert (together.split, apart.split) == (0, 2)
    assert apart.nbytes < together.nbytes
    assert apart.seconds > together.seconds
    assert "2 cases are too large to be read together here" in apart.lines()[-1]


def test_what_is_infeasible_costs_nothing_however_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "memory_available", lambda: 1)
    cost = estimate.estimate([replace(TINY, budget=0.01)])
    assert (cost.infeasible, cost.seconds, cost.nbytes) == (1, 0, 0)
    assert cost.lines() == ["1 case is infeasible: recorded as such, at no cost"]

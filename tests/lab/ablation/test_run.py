"""Ablation cases: identity, grids, measured figures, infeasible budgets, and what guards refuse."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kvlab.device import Gpu, cpu
from kvlab.errors import BudgetError, MissingExtraError, OutOfMemory
from kvlab.lab import guard
from kvlab.lab.ablation import memory, page_attention
from kvlab.lab.ablation import run as ablation
from kvlab.lab.ablation.grid import BITS, BUDGETS, MODELS, AblationCase, Geometry, make_grid, within_model
from kvlab.lab.ablation.quality import hide_needles
from kvlab.lab.limits import Limit, cpu_limit, gpu_limit
from kvlab.lab.quality.model import tiny_llama
from kvlab.lab.quality.text import cut_windows, read_book
from kvlab.lab.timing import Timing

SMALL = AblationCase(0.4, "2,4,8", 256, model=None, geometry=Geometry(2, 4, 2, 64))


@pytest.fixture(autouse=True)
def _tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVLAB_TINY", "1")


# ---- cases -------------------------------------------------------------------------------------------------


def test_the_id_is_of_the_content_and_survives_a_file() -> None:
    again = AblationCase.from_dict(json.loads(json.dumps(SMALL.to_dict())))
    assert again == SMALL
    assert again.id == SMALL.id
    changed = [
        replace(SMALL, budget=0.5),
        replace(SMALL, bits="2,4"),
        replace(SMALL, context_length=384),
        replace(SMALL, use_packing=False),
        replace(SMALL, seed=1),
        replace(SMALL, geometry=Geometry(2, 4, 2, 32)),
    ]
    assert len({case.id for case in [SMALL, *changed]}) == 7


def test_the_default_grid_is_180_cases_with_names_users_know() -> None:
    grid = make_grid(AblationCase(0.2, "4,8", 512))
    names = [case.name for case in grid]
    assert len(set(names)) == len({case.id for case in grid}) == 180
    assert "b0.2_bits2_3_4_8_ctx512_packed" in names
    assert "b0.7_bits4_8_ctx8192_unpacked" in names
    assert {case.budget for case in grid} == set(BUDGETS)
    assert {case.bits for case in grid} == set(BITS)


def test_beyond_the_model_data_are_synthetic_with_its_shape() -> None:
    case = within_model(AblationCase(0.2, "2,4", 8192), 16384)
    assert case.model is None
    assert case.geometry == Geometry(30, 9, 3, 64)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"budget": 0.0}, "budget=0.0"),
        ({"budget": 2.6}, r"budget=2\.6 .* at most 2\.5"),
        ({"bits": "2,5"}, "width 5"),
        ({"context_length": 200}, "context_length=200"),
        ({"device": "tpu"}, "device='tpu'"),
        ({"geometry": Geometry(2, 5, 2, 64)}, "KV heads must divide"),
        ({"geometry": Geometry(2, 4, 2, 60)}, "head_dim=60"),
        ({"model": "gpt"}, "model='gpt'"),
        ({"model": "tiny"}, "model='tiny' has"),
        ({"model": "tiny", "geometry": Geometry(2, 2, 1, 64), "context_length": 128}, "reads 256 to 4096"),
        ({"num_samples": -1}, "num_samples=-1"),
    ],
)
def test_wrong_cases_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(SMALL, **values)
    with pytest.raises(ValueError, match="twice"):
        make_grid(SMALL, budgets=(0.3, 0.3))
    with pytest.raises(ValueError, match="a case has the values"):
        AblationCase.from_dict({"budget": 0.3})


@pytest.mark.parametrize("context", [256, 512, 1152, 2048, 4096])
def test_the_tiny_text_holds_the_windows_and_needles_of_every_case(context: int) -> None:
    model, subject = MODELS["tiny"], tiny_llama()
    case = AblationCase(0.5, "2,4", context, True, "tiny", model.geometry)
    most = model.max_windows(context)
    assert 1 <= case.windows <= most
    assert len(cut_windows(subject.text, subject.encode, most, context + 1).starts) == most
    hide_needles(subject, context + 1)
    with pytest.raises(ValueError, match=f"num_samples={most + 1}: .* take {most} at most"):
        replace(case, num_samples=most + 1)


def test_the_texts_are_as_long_as_the_models_say() -> None:
    assert _text(tiny_llama().text) == MODELS["tiny"].text[:2]
    try:
        book = read_book()
    except MissingExtraError as error:
        pytest.skip(str(error))
    assert _text(book) == MODELS["smollm2"].text[:2]


def _text(text: str) -> tuple[int, int]:
    return len(text), max(map(len, text.split("\n")))


# ---- results -----------------------------------------------------------------------------------------------


def test_packing_is_measured_not_computed() -> None:
    packed, unpacked = (ablation.run(replace(SMALL, use_packing=mode)) for mode in (True, False))
    assert packed["memory"]["memory_ratio"] <= SMALL.budget < unpacked["memory"]["memory_ratio"]
    for name in ("avg_bits", "precision_distribution"):
        assert packed["memory"][name] == unpacked["memory"][name]
    assert packed["quality"] == unpacked["quality"]
    assert packed["compression"]["theoretical_ratio"] == pytest.approx(16 / packed["memory"]["avg_bits"])
    # One code a byte is half of float16, and scales, positions and importance come on top.
    assert 1.5 < unpacked["compression"]["actual_vs_fp16"] < 2
    for result in (packed, unpacked):
        assert result["compression"]["actual_vs_fp16"] < result["compression"]["theoretical_ratio"]
        speed = result["performance"]
        assert speed["p5_latency_ms"] <= speed["p50_latency_ms"] <= speed["p95_latency_ms"]
        assert speed["throughput_tps"] == pytest.approx(1e3 / speed["avg_latency_ms"])
        assert result["provenance"]["case_id"] == AblationCase.from_dict(result["config"]).id
        assert result["provenance"]["backend"] == "cpu"
        json.dumps(result)


def test_less_budget_gives_fewer_bits_and_larger_errors() -> None:
    results = [ablation.run(replace(SMALL, budget=budget)) for budget in (0.25, 0.4, 0.7)]
    bits = [result["memory"]["avg_bits"] for result in results]
    errors = [result["quality"]["attention_error"] for result in results]
    assert bits == sorted(bits)
    assert errors == sorted(errors, reverse=True)
    assert bits[0] < bits[-1]


def test_an_infeasible_budget_is_a_result_that_names_the_smallest_that_fits() -> None:
    case = replace(SMALL, budget=0.2, bits="4,8")
    result = ablation.run(case)
    assert (result["status"], result["memory"]) == ("infeasible", None)
    least = result["smallest_feasible_budget"]
    assert ablation.run(replace(case, budget=least))["status"] == "ok"
    assert ablation.run(replace(case, budget=least - 2e-4))["status"] == "infeasible"


def test_every_device_does_with_the_same() -> None:
    assert ablation.feasible_budget(replace(SMALL, device="cuda")) == ablation.feasible_budget(SMALL)


def test_a_budget_that_fails_on_the_way_is_infeasible_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(case: AblationCase, progress: Any) -> Any:
        raise BudgetError("258 tokens need more")

    monkeypatch.setattr(ablation, "_evaluated", refuse)
    result = ablation.run(SMALL)
    assert (result["status"], result["reason"]) == ("infeasible", "258 tokens need more")
    assert result["memory"] is None
    assert result["smallest_feasible_budget"] == ablation.feasible_budget(SMALL)


def test_a_model_gives_all_figures_of_quality() -> None:
    case = within_model(replace(SMALL, model="tiny", geometry=Geometry(2, 2, 1, 64), num_samples=2), 512)
    result = ablation.run(case)
    quality = result["quality"]
    assert quality["scored_tokens"] == 2 * 256
    assert 0 < quality["kl"] < 10
    assert 0 <= quality["top1_agreement"] <= 1
    assert 0 <= quality["needle_retrieval"] <= 1
    change = quality["perplexity"] / quality["perplexity_full_precision"] - 1
    assert quality["perplexity_change"] == pytest.approx(change)
    assert result["memory"]["memory_ratio"] <= case.budget
    assert ablation.run(replace(case, use_packing=False))["quality"] == quality


def test_cases_that_are_read_together_have_the_figures_of_cases_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    like = within_model(replace(SMALL, model="tiny", geometry=Geometry(2, 2, 1, 64), num_samples=2), 512)
    cases = make_grid(like, (0.1, 0.45, 0.7), ("2,4,8",), (512,))
    ablation._latest.clear()
    alone = [ablation.run(case) for case in cases]
    assert [result["status"] for result in alone] == ["infeasible"] * 2 + ["ok"] * 4
    ablation.read_ahead(cases)
    assert len(ablation._latest) == 2
    first = next(iter(ablation._latest.values())).seconds
    monkeypatch.setattr(ablation, "_read", None)  # nothing is read again
    together = [ablation.run(case) for case in cases]
    for part in ("status", "memory", "quality", "compression"):
        assert [result[part] for result in together] == [result[part] for result in alone]
    # The seconds of an evaluation were given to the first of each pair.
    assert [found.seconds for found in ablation._latest.values()] == [0, 0]
    seconds = [result["provenance"]["seconds"] for result in together]
    assert seconds[2] >= first > 0


def test_what_does_not_fit_into_memory_is_refused_before_anything_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case = within_model(replace(SMALL, model="tiny", geometry=Geometry(2, 2, 1, 64)), 512)
    ablation._latest.clear()
    monkeypatch.setattr(ablation, "_read", None)
    monkeypatch.setattr(memory, "memory_available", lambda: 100 << 20)
    for cases in ([SMALL], [case]):
        with pytest.raises(OutOfMemory, match=r"needs about .* of memory and 100.00 MiB are available"):
            ablation.run(cases[0])
    with pytest.raises(OutOfMemory, match="with 1 more read beside it"):
        ablation.read_ahead([case, replace(case, budget=0.5)])


# ---- guards ------------------------------------------------------------------------------------------------


def test_a_wrong_kernel_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(pages: Any, q: Any, repeats: int) -> Any:
        return Timing((1.0,) * repeats), np.zeros_like(q), "cpu"

    monkeypatch.setattr(page_attention, "_time_on_cpu", wrong)
    with pytest.raises(RuntimeError, match="relative error 1, allowed"):
        ablation.run(SMALL)


def test_a_call_that_does_nothing_is_too_fast_to_be_true(monkeypatch: pytest.MonkeyPatch) -> None:
    right = page_attention._time_on_cpu

    def empty(pages: Any, q: Any, repeats: int) -> Any:
        return Timing((1e-9,) * repeats), *right(pages, q, 1)[1:]

    monkeypatch.setattr(page_attention, "_time_on_cpu", empty)
    with pytest.raises(RuntimeError, match="did not do the work"):
        ablation.run(SMALL)


@pytest.mark.parametrize("missing", ["case_id", "git", "gpu_state", "backend"])
def test_no_result_without_provenance(missing: str) -> None:
    result = ablation.run(replace(SMALL, budget=0.2, bits="4,8"))
    guard.require_provenance(result)
    del result["provenance"][missing]
    with pytest.raises(ValueError, match=f"without provenance is not written; missing: {missing}"):
        guard.require_provenance(result)
    with pytest.raises(ValueError, match="missing: case_id, "):
        guard.require_provenance({"memory": {}})


def test_a_throttled_gpu_is_refused() -> None:
    cool = {f"clocks_throttle_reasons.{reason}": "Not Active" for reason in ("hw_slowdown", "sw_power_cap")}
    guard.refuse_throttled(cool)
    guard.refuse_throttled(None)
    with pytest.raises(RuntimeError, match="hardware slowdown"):
        guard.refuse_throttled({**cool, "clocks_throttle_reasons.hw_slowdown": "Active"})


def test_a_result_of_a_throttled_gpu_gets_no_provenance(monkeypatch: pytest.MonkeyPatch) -> None:
    case = replace(SMALL, device="cuda")
    hot = {"clocks_throttle_reasons.sw_thermal_slowdown": "Active"}
    monkeypatch.setattr(guard, "gpu_state", lambda: hot)
    with pytest.raises(guard.Refused, match="temperature"):
        ablation._provenance(case, "cuda", 1.0)
    monkeypatch.setattr(guard, "gpu_state", dict)
    assert ablation._provenance(case, "cuda", 1.0)["gpu_state"] == {}


H100 = Gpu(0, "NVIDIA H100 80GB HBM3", (9, 0), 132, 80 << 30, 2_619_000, 5120, 50 << 20)
H200 = Gpu(0, "NVIDIA H200", (9, 0), 132, 141 << 30, 3_201_000, 6144, 60 << 20)


@pytest.mark.parametrize(("gpu", "memory"), [(H100, 3.35e12), (H200, 4.92e12)])
def test_figures_at_twice_the_limit_of_a_gpu_are_refused(gpu: Gpu, memory: float) -> None:
    limit = gpu_limit(gpu)
    assert limit.memory == pytest.approx(memory, rel=2e-3)
    nbytes = 4 << 30
    guard.refuse_impossible(nbytes, nbytes / (0.95 * memory), lambda: limit)
    with pytest.raises(guard.Refused, match="the hardware takes at least"):
        guard.refuse_impossible(nbytes, nbytes / (2 * memory), lambda: limit)
    small = gpu.l2_nbytes // 2  # may come from the cache
    guard.refuse_impossible(small, small / (2 * memory), lambda: limit)
    with pytest.raises(guard.Refused):
        guard.refuse_impossible(small, small / (8.1 * memory), lambda: limit)


def test_figures_at_twice_the_limit_of_this_cpu_are_refused() -> None:
    limit = cpu_limit()
    for nbytes in (1 << 20, 8 * limit.cache_nbytes):
        least = limit.min_seconds(nbytes)
        guard.refuse_impossible(nbytes, 1.01 * least, lambda: limit)
        with pytest.raises(guard.Refused, match="did not do the work"):
            guard.refuse_impossible(nbytes, least / 2, lambda: limit)


def test_a_limit_is_a_few_times_what_memory_was_seen_to_give() -> None:
    """A limit far from what the hardware does would let everything through."""
    limit, data = cpu_limit(), np.ones(16 << 20)
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        data.max()
        seconds.append(time.perf_counter() - start)
    rate = cpu().threads * data.nbytes / min(seconds)
    assert limit.memory < 30 * rate


def test_a_measured_limit_is_asked_again_before_a_refusal() -> None:
    limits = [Limit(1e9, 1e9, 0), Limit(1e10, 1e10, 0)]
    guard.refuse_impossible(10**9, 0.5, lambda: limits.pop(0))
    assert limits == []


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan")])
def test_times_that_are_none_are_refused(seconds: float) -> None:
    with pytest.raises(guard.Refused):
        guard.refuse_impossible(1, seconds)


def test_an_error_that_is_no_number_is_refused() -> None:
    with pytest.raises(RuntimeError, match="relative error nan"):
        guard.refuse_wrong(np.full(3, np.nan), np.ones(3), 0.1, "attention")

"""Quality by tasks on a tiny model: divergence by schedule, late questions, stress, free-running."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from scipy.special import log_softmax
from transformers import DynamicCache

from kvlab.lab.quality.cases import held, opponents, uniform
from kvlab.lab.quality.divergence import diverge, floor
from kvlab.lab.quality.measure import Case
from kvlab.lab.quality.model import Subject, tiny_llama
from kvlab.lab.quality.plan import Schedule
from kvlab.lab.quality.prompts import copying, many_keys, variable_tracking
from kvlab.lab.quality.recall import recall
from kvlab.lab.quality.stress import large_channels, shifted_keys
from kvlab.lab.quality.tasks import run_tasks
from kvlab.lab.quality.text import Windows, cut_windows
from kvlab.lab.quality.writing import free_run
from kvlab.ops.frame import LAST

SCHEDULE = Schedule(prefill=96, scored=16)


@pytest.fixture(scope="module")
def subject() -> Subject:
    return tiny_llama()


@pytest.fixture(scope="module")
def windows(subject: Subject) -> Windows:
    return cut_windows(subject.text, subject.encode, 2, SCHEDULE.length)


def dense(subject: Subject) -> Case:
    return Case("dense", "dense", lambda: DynamicCache(config=subject.model.config))


def test_divergence_is_that_of_an_independent_computation(subject: Subject, windows: Windows) -> None:
    case = uniform(subject.model.config, [3])[0]
    (found,) = diverge(subject.model, windows, [case], SCHEDULE)
    for row, kl in zip(windows.tokens, found.kl, strict=True):
        logits = []
        for cache in (DynamicCache(config=subject.model.config), case.make()):
            tokens = torch.from_numpy(row[None])
            with torch.no_grad():
                subject.model(tokens[:, :96], past_key_values=cache)
                ones = [
                    subject.model(tokens[:, i : i + 1], past_key_values=cache).logits for i in range(96, 112)
                ]
            logits.append(log_softmax(torch.cat(ones, 1)[0].double().numpy(), axis=-1))
        np.testing.assert_allclose(
            kl, (np.exp(logits[0]) * (logits[0] - logits[1])).sum(-1), rtol=1e-3, atol=1e-6
        )


def test_chunks_hide_what_single_tokens_lose(subject: Subject, windows: Windows) -> None:
    case = uniform(subject.model.config, [2])
    (single,) = diverge(subject.model, windows, case, SCHEDULE)
    (chunk,) = diverge(subject.model, windows, case, Schedule(prefill=96, scored=16, chunk=16))
    assert np.mean(single.kl) > np.mean(chunk.kl)


def test_a_dense_cache_is_at_the_floor_whatever_the_schedule(subject: Subject, windows: Windows) -> None:
    lowest = floor(subject.model, windows, SCHEDULE)
    assert np.mean(lowest.kl) < 1e-6
    for schedule in (SCHEDULE, Schedule(prefill=96, part=10, scored=16, chunk=5)):
        (found,) = diverge(subject.model, windows, [dense(subject)], schedule)
        assert np.mean(found.kl) < 1e-6
        assert found.bits == (32, 32)


def test_a_held_budget_holds_at_the_first_and_the_last_token(subject: Subject, windows: Windows) -> None:
    (found,) = diverge(subject.model, windows, held(subject.model.config, [0.4]), SCHEDULE)
    assert max(found.bits) <= 16 * 0.4
    assert found.summary()["bits_first"] == found.bits[0]


def test_schedules_read_everything_once() -> None:
    for schedule in (
        Schedule(),
        Schedule(100, 64, 50, 7),
        Schedule(64, 64, 64, 64),
        Schedule(99, 20, first=10),
    ):
        calls = list(schedule.calls())
        assert calls[0][0] == 0
        assert calls[-1][1] == schedule.length
        assert all(before[1] == after[0] for before, after in pairwise(calls))
        assert any(begin == schedule.prefill for begin, _ in calls)
    with pytest.raises(ValueError, match="prefill"):
        Schedule(prefill=0)


@pytest.mark.parametrize("kind", [many_keys, variable_tracking, copying])
def test_prompts_hold_their_answers_and_are_drawn_by_seed(subject: Subject, kind: object) -> None:
    make = kind  # type: ignore[assignment]
    haystack = make(subject.text, subject.encode, 600)  # type: ignore[operator]
    text = subject.decode(haystack.tokens)
    assert len(haystack.tokens) == 600
    for question in haystack.questions:
        assert subject.decode(question.answer) in text
    assert haystack == make(subject.text, subject.encode, 600)  # type: ignore[operator]
    assert haystack != make(subject.text, subject.encode, 600, seed=1)  # type: ignore[operator]
    with pytest.raises(ValueError, match="does not hold"):
        make(subject.text, subject.encode, 40)  # type: ignore[operator]


def test_recall_is_that_of_one_call_and_questions_do_not_see_each_other(subject: Subject) -> None:
    haystack = many_keys(subject.text, subject.encode, 300, keys=3)
    full, same, coarse = recall(
        subject.model, [haystack], [dense(subject), uniform(subject.model.config, [2])[0]]
    )
    assert same.log_p == full.log_p
    assert same.summary(full)["log_p_change"] == 0
    assert coarse.log_p != full.log_p
    assert coarse.bits < 4 < full.bits
    for question, log_p in zip(haystack.questions, full.log_p, strict=True):
        ids = torch.tensor([[*haystack.tokens, *question.ask, *question.answer]])
        with torch.no_grad():
            logits = subject.model(ids).logits[0].double().log_softmax(-1)
        count = len(question.answer)
        at = range(ids.shape[1] - count, ids.shape[1])
        assert math.isclose(log_p, sum(float(logits[i - 1, ids[0, i]]) for i in at), rel_tol=1e-4)


def test_stress_leaves_full_precision_and_packed_caches_bear_it(subject: Subject, windows: Windows) -> None:
    model, tokens = subject.model, torch.from_numpy(windows.tokens)
    case, factors = uniform(model.config, [4]), {29: 45.0, 4: 11.0}
    (before,) = diverge(model, windows, case, SCHEDULE)

    def cost() -> float:
        (after,) = diverge(model, windows, case, SCHEDULE)
        return float(np.mean(after.kl) / np.mean(before.kl))

    with torch.no_grad():
        plain, costs = model(tokens).logits, []
        for change in (large_channels(model, factors), shifted_keys(model, [31, 63], 100.0)):
            with change:
                torch.testing.assert_close(model(tokens).logits, plain, atol=2e-2, rtol=0)
                costs.append(cost())
        torch.testing.assert_close(model(tokens).logits, plain, atol=0, rtol=0)
        with large_channels(model, factors, begin=LAST):  # behind the tokens that make the frame of keys
            late = cost()
    assert costs[0] < 1.5  # the frame of keys scales them down
    assert costs[1] < 1.1  # the mean of keys is taken off
    assert late > 2


def test_large_channels_may_begin_late(subject: Subject, windows: Windows) -> None:
    model, tokens = subject.model, torch.from_numpy(windows.tokens[:1])
    with torch.no_grad():
        plain = model(tokens).logits
        with large_channels(model, {3: 45.0}, begin=100):
            whole = model(tokens).logits
            cache = DynamicCache(config=model.config)
            model(tokens[:, :96], past_key_values=cache)
            rest = model(tokens[:, 96:], past_key_values=cache).logits
    torch.testing.assert_close(whole[:, :100], plain[:, :100])
    assert (whole[:, 100:] - plain[:, 100:]).abs().max() > 1e-3
    torch.testing.assert_close(rest, whole[:, 96:], atol=1e-4, rtol=1e-4)
    with pytest.raises(ValueError, match="pairs"), large_channels(model, {32: 2.0}):
        model(tokens)


def test_a_dense_cache_writes_what_full_precision_writes(subject: Subject, windows: Windows) -> None:
    prompt = windows.tokens[0].tolist()
    same = free_run(subject.model, prompt, dense(subject), 8)
    assert same.until == len(same.tokens) == 8
    assert max(same.kl) < 1e-6
    coarse = free_run(subject.model, prompt, uniform(subject.model.config, [2])[0], 8)
    assert coarse.until <= 8
    assert np.mean(coarse.kl) > np.mean(same.kl)
    assert coarse.tokens[: coarse.until] == same.tokens[: coarse.until]


def test_all_tasks_give_figures_for_all_caches(subject: Subject) -> None:
    cases = [*held(subject.model.config, [0.5]), *opponents(subject.model.config, 0.5)[:1]]
    tasks = ["parts-64", "tracking", "outliers", "shifted", "free", "floor"]
    found = run_tasks(subject, cases, tasks, length=256, scored=8, windows=1)
    assert list(found) == tasks
    names = {case.name for case in cases}
    for task in tasks[:-1]:
        assert names <= set(found[task])
    with pytest.raises(ValueError, match="neddle not known"):
        run_tasks(subject, cases, ["neddle"])


def test_a_text_that_is_too_short_for_a_task_is_refused_before_anything_is_read(subject: Subject) -> None:
    read: list[str] = []
    cases = held(subject.model.config, [0.5])
    with pytest.raises(ValueError, match="haystack of 96 tokens"):
        run_tasks(
            subject, cases, ["single", "retrieval"], length=96, scored=8, windows=1, progress=read.append
        )
    assert read == []

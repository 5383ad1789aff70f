"""Models of transformers on a GPU, token by token to their last position, by every plan."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import numpy as np
import pytest

from kvlab.device import compute_capability
from kvlab.engine import Decoder
from tests.engine.models import FAMILIES, family
from tests.engine.test_published import NAMES, assert_logits
from tests.engine.test_pythia_model import (
    TOKENS,
    assert_kept,
    assert_means_are_taken_away,
    assert_no_worse,
    assert_text_of,
    bound_of,
    keys_and_values,
    run,
)
from tests.integrations.test_accelerate import assert_generates

pytestmark = pytest.mark.skipif(compute_capability(0) != (9, 0), reason="the kernel is for 9.0 alone")

CLUSTERS = ("cluster-1", "cluster-2", "cluster-4", "cluster-8", "cluster-16")


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", FAMILIES)
def test_every_plan_is_the_whole_text_and_every_other(name: str, dtype: str) -> None:
    """No worse than transformers in 16 bits at every position; plans within promise 2 of each other."""
    model = family(name, dtype)
    exact, _ = run(model, "float64")
    low, _ = run(model, dtype)
    found = {}
    for plan in ("graph", "ops", *(CLUSTERS if dtype == "float16" and name != "qwen3" else ())):
        batch = len(TOKENS) if plan in ("graph", "ops") else 1
        decoder = Decoder.from_pretrained(model, dtype=dtype, device="cuda", plan=plan, batch=batch)
        steps = [decoder.step(ids).astype(float) for ids in TOKENS[:batch].T]
        found[plan] = np.stack(steps, 1)
        assert_no_worse(found[plan], low[:batch], exact[:batch])
        with pytest.raises(ValueError, match=f"would have {TOKENS.shape[1] + 1} tokens"):
            decoder.step(TOKENS[:batch, 0])
    for a, b in combinations(found.values(), 2):
        rows = min(len(a), len(b))
        apart = np.abs(a[:rows] - b[:rows]).max()
        assert apart <= bound_of(low, exact, dtype)
        with pytest.raises(AssertionError):  # a shift is seen
            assert np.abs(a[:rows, 1:] - b[:rows, :-1]).max() <= bound_of(low, exact, dtype)


@pytest.mark.parametrize("name", FAMILIES)
def test_keys_and_values_are_those_of_transformers(name: str) -> None:
    """What a prompt, and steps behind it, leave; within promise 2 of what the model itself stores."""
    model = family(name)
    decoder = Decoder.from_pretrained(model, device="cuda", batch=len(TOKENS))
    decoder.prefill(TOKENS[:, :40])
    for ids in TOKENS[:, 40:].T:
        decoder.step(ids)
    executor: Any = decoder._executor
    executor._stream.synchronize()
    found = executor._kv[..., : TOKENS.shape[1], :].get().view(np.float16).swapaxes(0, 1).astype(float)
    assert_kept(found, keys_and_values(model))


@pytest.mark.parametrize("name", ["neox-parallel", "llama"])
def test_a_mean_that_hides_what_matters(name: str) -> None:
    assert_means_are_taken_away(name, "cuda")


@pytest.mark.parametrize("name", ["neox-head-80", "qwen3"])
def test_batch_mates_change_no_bit_of_products(name: str) -> None:
    """A first token attends itself alone, so nothing of it is summed in another order."""
    decoder = Decoder.from_pretrained(family(name), device="cuda", batch=5)
    found = []
    for row, mates in ((0, [1, 2, 3, 4]), (3, [1, 2, 3, 4]), (3, [50, 60, 70, 80])):
        decoder.reset()
        found.append(decoder.prefill([[id_] for id_ in (*mates[:row], 7, *mates[row:])])[row])
    assert np.array_equal(found[0], found[1])
    assert np.array_equal(found[0], found[2])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", NAMES)
def test_logits_of_published_widths(name: str, dtype: str) -> None:
    assert_logits(name, dtype, "cuda")


def test_the_text_of_a_real_model(smollm2: Any) -> None:
    assert_text_of(smollm2, "cuda")


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", ["neox-parallel", "llama", "qwen2", "qwen3"])
def test_generate_of_an_accelerated_model(name: str, dtype: str) -> None:
    assert_generates(name, dtype, "cuda")

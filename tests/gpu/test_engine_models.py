"""Models of transformers on a GPU, token by token to their last position, by every plan."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest

from kvlab.device import compute_capability
from kvlab.engine import Decoder
from tests.engine.models import FAMILIES, family
from tests.engine.test_pythia_model import TOKENS, assert_no_worse, bound_of, run

pytestmark = pytest.mark.skipif(compute_capability(0) != (9, 0), reason="the kernel is for 9.0 alone")

CLUSTERS = ("cluster-1", "cluster-2", "cluster-4", "cluster-8", "cluster-16")


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", FAMILIES)
def test_every_plan_is_the_whole_text_and_every_other(name: str, dtype: str) -> None:
    """No worse than transformers in 16 bits at every position; plans within promise 2 of each other."""
    model = family(name, dtype)
    exact, _ = run(model, "float64")
    low, _ = run(model, dtype)
    model, found = model.float(), {}
    for plan in ("graph", "ops", *(CLUSTERS if dtype == "float16" and name != "qwen3" else ())):
        batch = len(TOKENS) if plan in ("graph", "ops") else 1
        decoder = Decoder.from_pretrained(model, dtype=dtype, device="cuda", plan=plan, batch=batch)
        steps = [decoder.step(ids).astype(float) for ids in TOKENS[:batch].T]
        found[plan] = np.stack(steps, 1)
        assert_no_worse(found[plan], low[:batch], exact[:batch], dtype)
        with pytest.raises(ValueError, match=f"would have {TOKENS.shape[1] + 1} tokens"):
            decoder.step(TOKENS[:batch, 0])
    for a, b in combinations(found.values(), 2):
        rows = min(len(a), len(b))
        apart = np.abs(a[:rows] - b[:rows]).max()
        assert apart <= bound_of(low, exact, dtype)
        with pytest.raises(AssertionError):  # a shift is seen
            assert np.abs(a[:rows, 1:] - b[:rows, :-1]).max() <= bound_of(low, exact, dtype)

"""What a plan takes at least, against the oracle of plans; budgets as small as a GPU cache promises."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvlab.errors import BudgetError
from kvlab.ops.plan import smallest_nbytes
from tests.cache.host.noted import Kernels
from tests.cache.host.test_runner import DIM, GROUP, HEADS, LAYERS, check_state, step


def tight_cache(length: int, bits: Any, short: int = 0) -> Any:
    """A cache whose budget is what a GPU promises to hold `length` tokens in, or `short` bytes less."""
    from kvlab import MixedPrecisionCache

    shape = (LAYERS, HEADS * GROUP, HEADS, DIM)
    options: dict[str, Any] = {"batch": 2, "bits": bits, "device": "cuda", "recent": 20}
    store = MixedPrecisionCache(*shape, **options)._layers[0].store
    share = smallest_nbytes(length, HEADS, store.levels, store.fixed_nbytes)
    return MixedPrecisionCache(*shape, budget=share * LAYERS * 2 - short, max_seqlen=length, **options)


@pytest.mark.parametrize(
    ("bits", "splits"),
    [
        ((2, 4, 8), [64, 128, 64, 44]),
        ((2, 4, 8), [7, 16, 100, 9, 16, 16, 16, 120]),
        ((2, 16), [190, *[1] * 20, 90]),
        ((8,), [200, *[1] * 3, 97]),
    ],
)
def test_the_promised_budget_suffices_however_tokens_come(
    kernels: Kernels, bits: Any, splits: list[int]
) -> None:
    cache, rng = tight_cache(300, bits), np.random.default_rng(0)
    for steps in splits:
        step(cache, rng, steps)
        assert cache.nbytes <= cache.budget_nbytes
    check_state(cache, [range(300)] * 2)
    with pytest.raises(BudgetError, match=r"longest length that fits is 3\d\d"):
        step(cache, rng, 200)
    check_state(cache, [range(300)] * 2)


@pytest.mark.parametrize("bits", [(0, 4), (2, 16)])
def test_64_steps_of_which_some_are_padding_fill_no_page(kernels: Kernels, bits: Any) -> None:
    """They take an open page at the top rung where 64 tokens would take none (0 bits) or a low one."""
    cache, rng = tight_cache(300, bits), np.random.default_rng(3)
    step(cache, rng, 1)
    valid = np.arange(64) >= np.array([[0], [20]])
    for _ in range(3):
        step(cache, rng, 64, valid)
        assert cache.nbytes <= cache.budget_nbytes
    assert not any(cache._device.reallocator.status(layer) for layer in range(LAYERS))


def test_padding_and_layers_apart(kernels: Kernels) -> None:
    """Rows that hold less than others, and a layer that runs ahead while bytes are few."""
    cache, rng = tight_cache(300, (2, 4, 8)), np.random.default_rng(1)
    valid = np.ones((2, 230), bool)
    valid[0, :50] = False
    step(cache, rng, 230, valid)
    for _ in range(20):
        step(cache, rng, 1)
    check_state(cache, [range(50, 250), range(250)])


def test_one_byte_less_is_refused(kernels: Kernels) -> None:
    with pytest.raises(BudgetError, match="longest length that fits"):
        tight_cache(300, (2, 4, 8), short=1)


def test_a_cache_that_was_cropped_goes_on(kernels: Kernels) -> None:
    """Pages that the CPU has left partly filled are closed up where bytes are few."""
    cache, rng = tight_cache(300, (2, 4, 8)), np.random.default_rng(2)
    for steps in (100, 137, 33):
        step(cache, rng, steps)
    cache.crop(25)
    for steps in (1, 3, 51):
        step(cache, rng, steps)
    check_state(cache, [range(300)] * 2)

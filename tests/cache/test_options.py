"""Options of a cache as users of other libraries write them: taken where clear, else refused with a hint."""

from __future__ import annotations

import copy
import pickle
import re
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

from kvlab import BudgetError, MixedPrecisionCache
from kvlab.integrations.transformers import KVLabCache
from kvlab.sizes import parse_budget
from tests.integrations.models import CONFIGS


def make(**options: Any) -> MixedPrecisionCache:
    return MixedPrecisionCache(1, 2, 2, 64, **options)


@pytest.mark.parametrize(
    ("dtype", "name"),
    [
        (torch.float16, "float16"),
        (torch.bfloat16, "bfloat16"),
        (np.float32, "float32"),
        (np.dtype("float16"), "float16"),
        (ml_dtypes.bfloat16, "bfloat16"),
    ],
)
def test_dtypes_of_frameworks_are_taken(dtype: Any, name: str) -> None:
    assert make(dtype=dtype).dtype == name


@pytest.mark.parametrize("dtype", [torch.int8, torch.float64, np.int64, int, 16, ["float16"]])
def test_other_dtypes_are_refused_by_name(dtype: Any) -> None:
    with pytest.raises((TypeError, ValueError), match=r"dtype=.*'float16', 'bfloat16', 'float32'"):
        make(dtype=dtype)


@pytest.mark.parametrize(
    ("text", "fraction"), [("30%", 0.3), (" 12.5 % ", 0.125), ("150%", 1.5), ("0.5", 0.5), (".25", 0.25)]
)
def test_a_budget_may_be_a_fraction_in_text(text: str, fraction: float) -> None:
    assert parse_budget(text).fraction == fraction
    assert make(budget=text).budget_nbytes == make(budget=fraction).budget_nbytes


@pytest.mark.parametrize("text", ["%", "a%", "-3%", "0%", "nan%", "3000%"])
def test_a_percentage_that_is_none_is_refused_by_name(text: str) -> None:
    with pytest.raises(ValueError, match=f"budget='{text}'"):
        make(budget=text)


@pytest.mark.parametrize("budget", [30, "8", "100 B"])
def test_a_few_bytes_were_meant_as_something_else(budget: Any) -> None:
    with pytest.raises(BudgetError, match=r"is \d+ bytes and an empty cache takes 332.*'30%'"):
        make(budget=budget)


@pytest.mark.parametrize("bits", ["int4", "2 4 8", ("four",)])
def test_widths_that_are_none_are_explained_without_jargon(bits: Any) -> None:
    with pytest.raises(ValueError, match=r"bits: .* is no number of bits; write .*'2,4,8'") as refused:
        make(bits=bits)
    assert "rung" not in str(refused.value)


@pytest.mark.parametrize(
    ("option", "text"),
    [
        ("nbits", "bits is meant"),
        ("residual_length", "residual is meant"),
        ("q_group_size", "a step size of its own: leave it out"),
        ("budgets", "budget is meant"),
        ("alocator", "allocator is meant"),
        ("nonsense", "no option of [A-Za-z ]+; .*budget, bits"),
    ],
)
def test_unknown_options_say_what_is_meant(option: str, text: str) -> None:
    for call in (make, partial(KVLabCache, CONFIGS["llama"])):
        with pytest.raises(TypeError, match=f"{option}=4 is no option") as refused:
            call(**{option: 4})
        assert re.search(text, str(refused.value))


def test_missing_options_are_named_in_terms_of_the_class() -> None:
    text = (
        r"^MixedPrecisionCache needs num_heads_kv, head_dim: MixedPrecisionCache\(num_layers, num_heads_q, "
    )
    with pytest.raises(TypeError, match=text):
        MixedPrecisionCache(1, num_heads_q=4)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"^MixedPrecisionCache needs num_layers"):
        MixedPrecisionCache()  # type: ignore[call-arg]


@pytest.mark.parametrize("copied", [lambda cache: pickle.loads(pickle.dumps(cache)), copy.deepcopy])
@pytest.mark.parametrize("importance", ["attention", "forecast"])
def test_a_pickled_cache_goes_on_as_the_other_would(copied: Any, importance: str) -> None:
    cache, rng = make(budget=0.3, plan_length=256, importance=importance), np.random.default_rng(0)
    for n in (100, 64):
        cache.step(0, *rng.standard_normal((3, 1, n, 2, 64), dtype=np.float32))
    other = copied(cache)
    assert other.nbytes == cache.nbytes
    for n in (90, 1):
        new = rng.standard_normal((3, 1, n, 2, 64), dtype=np.float32)
        np.testing.assert_array_equal(cache.step(0, *new), other.step(0, *new))
    assert other.allocation().keys() == cache.allocation().keys()


@pytest.mark.parametrize("function", [lambda mass: mass, lambda: 1, lambda a, b, c, d, e: a])
def test_an_importance_function_of_other_arguments_is_refused_by_name(function: Any) -> None:
    with pytest.raises(
        TypeError, match=r"importance: the function .*\(previous, observed, positions, seqlen\)"
    ):
        make(importance=function)


def test_an_importance_function_may_have_defaults() -> None:
    make(importance=lambda previous, observed, positions, seqlen, more=1: observed)
    make(importance=lambda *arrays: arrays[1])


def test_more_pages_than_tables_can_name_are_refused_before_memory_is_taken() -> None:
    with pytest.raises(NotImplementedError, match=r"70284067776 bytes .* name 68719476720"):
        MixedPrecisionCache(1, 8, 8, 256, budget=None, bits=(16,), max_seqlen=1 << 23)

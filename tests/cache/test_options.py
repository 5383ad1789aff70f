"""Options of a cache as users of other libraries write them: taken where clear, else refused with a hint."""

from __future__ import annotations

import copy
import pickle
import re
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

from kvlab import BudgetError, MixedPrecisionCache
from kvlab.cache import runner
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


@pytest.mark.parametrize("budget", [2.6, 4.25, 12.0, "300%", "41bpe", np.float32(3)])
def test_more_than_any_cache_takes_was_meant_as_bits_or_bytes(budget: Any) -> None:
    with pytest.raises(ValueError, match=r"2\.5 is the largest: .* Write bits per element as '4\.25bpe'"):
        parse_budget(budget)


def test_budgets_are_numbers_of_python_or_numpy_alone() -> None:
    assert parse_budget(np.float32(0.5)).fraction == 0.5
    assert parse_budget(np.int64(5000)).nbytes == parse_budget(5000).nbytes == 5000
    wrongs: list[Any] = [np.array(0.5), np.array(5000), torch.tensor(0.5)]
    for wrong in wrongs:
        with pytest.raises(TypeError, match=r"budget=.* must be a fraction, bytes"):
            parse_budget(wrong)


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


@pytest.mark.parametrize("bits", [(2, "k3v2", 8), np.int64(4), [np.int64(2), 8], "0:2+8", "default"])
def test_a_loaded_cache_has_the_bits_that_were_given(bits: Any, tmp_path: Path) -> None:
    cache = make(bits=bits)
    cache.save(tmp_path / "cache")
    assert MixedPrecisionCache.load(tmp_path / "cache").bits == cache.bits
    assert cache.bits == (tuple(bits) if isinstance(bits, list) else bits) or bits == "default"


def test_a_profile_has_four_digits() -> None:
    with pytest.raises(ValueError, match=r"'k842v3' has 3 digits for K; .* takes four, as k8422v3"):
        make(bits=("k842v3",))


@pytest.mark.parametrize("rows", [[1, 0], (1, 0), np.array([1, 0]), torch.tensor([1, 0])])
def test_rows_may_be_a_list(rows: Any) -> None:
    cache = make(batch=2, budget=None, bits=(16,), dtype="float32")
    cache.append(0, *np.random.default_rng(0).standard_normal((2, 2, 5, 2, 64), np.float32))
    q = np.ones((2, 1, 2, 64), np.float32)
    before = cache.attend(0, q)
    cache.reorder(rows)
    assert (cache.attend(0, q) == before[::-1]).all()
    cache.select([])
    assert cache.batch == 0
    with pytest.raises(ValueError, match="this batch has no rows"):
        cache.select([0])


@pytest.mark.parametrize("rows", [[0.5], [True], ["a"], [[0]], (0, None)])
def test_a_list_that_has_no_rows_is_refused_by_name(rows: Any) -> None:
    with pytest.raises(TypeError, match="rows must be a vector of integers, not"):
        make().select(rows)


def test_an_array_of_the_cpu_is_told_that_there_is_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "gpus_missing_because", lambda: "no driver")
    x = np.ones((1, 3, 2, 64), np.float16)
    with pytest.raises(
        TypeError, match=r"there is no GPU here \(no driver\): make the cache with device='cpu'"
    ):
        make(device="cuda").append(0, x, x)


@pytest.mark.parametrize("head_dim", [0, 8, 24, 272])
def test_head_dims_are_multiples_of_16(head_dim: int) -> None:
    with pytest.raises(ValueError, match=f"head_dim={head_dim} is not supported; a multiple of 16"):
        MixedPrecisionCache(1, 2, 2, head_dim)


def test_the_only_layer_is_named() -> None:
    x = np.ones((1, 3, 2, 64), np.float16)
    with pytest.raises(ValueError, match="layer=1 must be 0"):
        make().append(1, x, x)


def test_the_older_name_of_new_tokens_warns() -> None:
    with (
        pytest.warns(DeprecationWarning, match="steps= is now called num_new="),
        pytest.raises(NotImplementedError, match="device='cuda'"),
    ):
        make().prepare(steps=1)
    with (
        pytest.warns(DeprecationWarning, match="steps= is now called num_new="),
        pytest.raises(NotImplementedError, match="device='cuda'"),
    ):
        make().replayed(steps=1)

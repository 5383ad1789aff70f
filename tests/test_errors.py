"""kvlab.errors: what each exception is, and that it survives a process boundary."""

from __future__ import annotations

import importlib
import pickle

import pytest

from kvlab.errors import BudgetError, FormatError, MissingExtraError, OutOfMemory, needs_extra


@pytest.mark.parametrize(
    ("error", "builtin"),
    [
        (OutOfMemory, MemoryError),
        (BudgetError, ValueError),
        (FormatError, ValueError),
        (MissingExtraError, ImportError),
    ],
)
def test_each_error_is_caught_as_its_builtin(error: type[Exception], builtin: type[Exception]) -> None:
    with pytest.raises(builtin, match="what and why"):
        raise error("what and why")


def test_budget_error_keeps_its_numbers_through_pickle() -> None:
    error = pickle.loads(pickle.dumps(BudgetError("too long", needed_bytes=4096, longest_length=60)))
    assert (str(error), error.needed_bytes, error.longest_length) == ("too long", 4096, 60)


def test_needs_extra_names_package_and_extra_in_one_line() -> None:
    with pytest.raises(MissingExtraError) as caught, needs_extra("hf", "kvlab.quantized"):
        importlib.import_module("a_missing_package.part")
    expected = "kvlab.quantized needs a_missing_package, which is not installed: pip install 'kvlab[hf]'"
    assert str(caught.value) == expected
    assert caught.value.name == "a_missing_package"


def test_needs_extra_keeps_the_innermost_message() -> None:
    with (
        pytest.raises(MissingExtraError, match=r"kvlab\[lab\]"),
        needs_extra("hf", "outer"),
        needs_extra("lab", "inner"),
    ):
        importlib.import_module("a_missing_package")


@pytest.mark.parametrize("error", [ImportError("broken library"), ValueError("other")])
def test_needs_extra_passes_other_errors_on(error: Exception) -> None:
    with pytest.raises(type(error)) as caught, needs_extra("hf", "kvlab.quantized"):
        raise error
    assert caught.value is error


def test_needs_extra_does_nothing_when_all_is_there() -> None:
    with needs_extra("hf", "kvlab.quantized"):
        assert importlib.import_module("json")

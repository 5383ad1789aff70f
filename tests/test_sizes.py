"""kvlab.sizes: sizes as people write them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlab.sizes import format_size, parse_size

UNITS = {
    "": 1,
    "B": 1,
    "K": 2**10,
    "KiB": 2**10,
    "kB": 10**3,
    "M": 2**20,
    "MB": 10**6,
    "GiB": 2**30,
    "T": 2**40,
}


@given(st.integers(0, 10**6), st.sampled_from(sorted(UNITS)), st.booleans(), st.sampled_from(["", " "]))
def test_number_times_unit_in_any_letter_case(number: int, unit: str, upper: bool, space: str) -> None:
    text = f"{number}{space}{unit.upper() if upper else unit.lower()}"
    assert parse_size(text) == number * UNITS[unit]


def test_fractions_that_are_whole_bytes() -> None:
    assert parse_size("1.5GiB") == 3 << 29
    assert parse_size(" 0.1kB ") == 100


@pytest.mark.parametrize(
    "text", ["", "GiB", "-1", "1e3", "6 GiBs", "6.5", "0.3KiB", "1_000", "٣", "nan", "1.K", None]
)
def test_what_is_no_size_is_refused_by_name(text: object) -> None:
    with pytest.raises(ValueError, match="budget="):
        parse_size(text, "budget")  # type: ignore[arg-type]


@given(st.integers(0, 2**60))
def test_format_is_close_and_short(nbytes: int) -> None:
    number, unit = format_size(nbytes).split()
    factor = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}[unit]
    assert abs(float(number) * factor - nbytes) <= 0.005 * factor * 1.0001
    assert float(number) <= 1024 or unit == "TiB"

"""kvlab.shapes: one wrong dimension is found, and errors name it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlab.shapes import match_shapes


@given(st.lists(st.integers(0, 9), min_size=1, max_size=5), st.data())
def test_one_wrong_dimension_is_found_and_named(shape: list[int], data: st.DataObject) -> None:
    symbols = [f"N{axis}" for axis in range(len(shape))]
    good = match_shapes({"q": (shape, symbols), "k": (shape, symbols)})
    assert good == dict(zip(symbols, shape, strict=True))
    axis = data.draw(st.integers(0, len(shape) - 1))
    wrong = list(shape)
    wrong[axis] += data.draw(st.integers(1, 5))
    with pytest.raises(
        ValueError, match=f"^k has N{axis} = {wrong[axis]} .*but q has N{axis} = {shape[axis]} "
    ):
        match_shapes({"q": (shape, symbols), "k": (wrong, symbols)})


def test_shape_errors_name_dimensions_and_numbers() -> None:
    with pytest.raises(
        ValueError, match=r"q must have 3 dimensions, got 1: shape \(2,\), expected \(B, S, 64\)"
    ):
        match_shapes({"q": ((2,), ("B", "S", 64))})
    with pytest.raises(ValueError, match="q must have 64 on axis 1, got 80"):
        match_shapes({"q": ((2, 80), ("B", 64))})
    with pytest.raises(ValueError, match=r"q has S = 3 .*but q has S = 2"):
        match_shapes({"q": ((2, 3), ("S", "S"))})

"""The reference of packing, against one big integer a row and, for short rows, without exception."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from numpy.typing import NDArray

from kvlab.reference import bits as reference
from tests.oracles import every_string, pack_ternary_with_integers, pack_with_one_integer
from tests.strategies import WIDTHS, code_arrays, ternary_arrays


@pytest.mark.parametrize(("bits", "length"), [(b, n) for b in WIDTHS for n in range(13) if b * n <= 12])
def test_every_short_string(bits: int, length: int) -> None:
    codes = every_string(2**bits, length).astype(np.uint8)
    packed = reference.pack(codes, bits)
    # The string with number k is k itself, written in `bits` bits a digit.
    numbers = np.arange(len(codes), dtype="<u2")[:, None].view(np.uint8)
    assert np.array_equal(packed, numbers[:, : packed.shape[1]])
    assert np.array_equal(reference.unpack(packed, bits, length), codes)


@pytest.mark.parametrize("length", range(8))
def test_every_short_ternary_string(length: int) -> None:
    values = (every_string(3, length) - 1).astype(np.int8)
    packed = reference.pack_ternary(values)
    assert np.array_equal(packed, pack_ternary_with_integers(values))
    assert np.array_equal(reference.unpack_ternary(packed, length), values)


@given(code_arrays())
def test_any_codes(case: tuple[NDArray[Any], int]) -> None:
    codes, bits = case
    packed = reference.pack(codes, bits)
    assert np.array_equal(packed, pack_with_one_integer(codes, bits))
    assert np.array_equal(reference.unpack(packed, bits, codes.shape[-1]), codes)


@given(ternary_arrays())
def test_any_ternary_values(values: NDArray[np.int8]) -> None:
    packed = reference.pack_ternary(values)
    assert np.array_equal(packed, pack_ternary_with_integers(values))
    assert np.array_equal(reference.unpack_ternary(packed, values.shape[-1]), values)


def test_the_oracle_tells_orders_apart() -> None:
    """Packing from the other end, or with the last element first, is not what the oracle expects."""
    codes = np.array([[1, 2, 3, 0, 1]], np.uint8)
    expected = pack_with_one_integer(codes, 3)
    every_bit = np.unpackbits(codes[..., None], axis=-1, count=3, bitorder="little").reshape(1, -1)
    assert not np.array_equal(np.packbits(every_bit, axis=-1, bitorder="big"), expected)
    assert not np.array_equal(reference.pack(codes[:, ::-1], 3), expected)

"""Tables that production modules and their oracles state apart: they must be equal, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest

from kvlab.ops import codebooks
from kvlab.ops.codec_layout import CODECS, half_levels
from kvlab.ops.cpu.page_tokens import first_bits, side_formats
from kvlab.pages import TOKENS_PER_PAGE, WIDTHS, PageLayout
from kvlab.reference import codebooks as reference_codebooks
from kvlab.reference import codec as reference_codec
from kvlab.reference import pages as reference_pages
from tests.strategies import WIDTHS as CODE_WIDTHS


def test_codecs() -> None:
    assert CODECS == reference_codec.CODECS
    assert all(half_levels(bits) == reference_codec.half_levels(bits) for bits in CODE_WIDTHS)


@pytest.mark.parametrize("bits", CODE_WIDTHS)
def test_codebooks(bits: int) -> None:
    assert codebooks.levels(bits).tobytes() == reference_codebooks.levels(bits).tobytes()
    assert np.array_equal(codebooks.borders(bits), reference_codebooks.borders(bits))
    assert codebooks.units(bits) == reference_codebooks.units(bits)


@pytest.mark.parametrize("width", WIDTHS)
def test_guesses_of_steps(width: int) -> None:
    numbers = side_formats(PageLayout(64, width, width, 2), "float16")[0][0]
    assert numbers.guess == reference_pages.GUESS.get(width, 0)
    assert reference_pages.TOKENS_PER_PAGE == TOKENS_PER_PAGE


def test_signs_of_values() -> None:
    from kvlab.numba_kernels.cpu.scales import SIGNS

    assert np.array_equal(SIGNS, reference_pages.value_signs(256))


@pytest.mark.parametrize("bits", [2, 3, 4, 8, 16, 32])
@pytest.mark.parametrize("side", ["k", "v"])
def test_the_order_of_codes_in_a_page(side: str, bits: int) -> None:
    for head_dim in range(16, 257, 16):
        address = reference_pages.bit_address(bits, head_dim, side)
        in_one_word = address[..., -1] - address[..., 0] == bits - 1
        expected = np.where(in_one_word, address[..., 0], ~address[..., 0])
        assert np.array_equal(first_bits(bits, head_dim, side), expected)

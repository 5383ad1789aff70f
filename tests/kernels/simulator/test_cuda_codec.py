"""Numba kernels of codecs in the simulator: the bits of the reference, for every codec, type and axis."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kvlab
from kvlab.ops.codec_layout import checked_layout
from kvlab.ops.cuda import codec as codec_cuda
from tests.codecs import bit_patterns, quantize
from tests.kernels.simulator.simulated import simulate
from tests.strategies import CODEC_CONTENTS, CODECS, FLOATS, SEEDS, WIDTHS, CodecCase, codec_content

# NumPy warns of divisions by zero, which threads of the simulator cannot switch off.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.fixture(autouse=True, scope="module")
def _simulated() -> object:
    with pytest.MonkeyPatch.context() as patch:
        simulate(patch)
        yield


@st.composite
def small_cases(draw: st.DrawFn) -> CodecCase:
    shape = (draw(st.integers(1, 3)), draw(st.integers(1, 24)))
    codec, content = draw(st.sampled_from(CODECS)), draw(st.sampled_from(CODEC_CONTENTS))
    x = codec_content(np.random.default_rng(draw(SEEDS)), shape, content, draw(st.sampled_from(FLOATS)))
    axis = draw(st.integers(0, 1))
    options = {"axis": axis, "group_size": draw(st.none() | st.integers(1, shape[axis])), "codec": codec}
    return CodecCase(x, 1.6 if codec == "ternary" else draw(st.sampled_from(WIDTHS)), options)


def assert_bits_of_the_reference(case: CodecCase, dtype: np.dtype[Any]) -> None:
    expected = quantize(case, nan="propagate", backend="reference")
    layout = checked_layout(case.x.shape, case.bits, **case.options)
    packed, scale, offset = codec_cuda.quantize_numba(case.x, layout, "propagate")
    assert np.array_equal(packed, expected.packed)
    assert np.array_equal(scale.view(np.uint16), expected.scale.view(np.uint16))
    assert (offset is None) == (expected.offset is None)
    if offset is not None and expected.offset is not None:
        assert np.array_equal(offset.view(np.uint16), expected.offset.view(np.uint16))
    decoded = codec_cuda.dequantize_numba(expected, layout, str(dtype), True)
    reference = kvlab.dequantize(expected, str(dtype), backend="reference")
    assert np.array_equal(bit_patterns(decoded), bit_patterns(reference))


@settings(max_examples=30)
@given(small_cases(), st.sampled_from(FLOATS))
def test_the_bits_of_the_reference(case: CodecCase, dtype: np.dtype[Any]) -> None:
    assert_bits_of_the_reference(case, dtype)


@pytest.mark.parametrize("codec", CODECS)
def test_values_so_small_that_the_scale_is_0(codec: str) -> None:
    x = codec_content(np.random.default_rng(0), (3, 40), "least numbers", FLOATS[2])
    bits = 1.6 if codec == "ternary" else 6
    assert_bits_of_the_reference(CodecCase(x, bits, {"axis": 1, "group_size": 4, "codec": codec}), FLOATS[2])


@pytest.mark.parametrize("codec", CODECS)
def test_values_of_large_groups_stand_in_global_memory(codec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec_cuda, "_SHARED_FLOATS", 16)
    monkeypatch.setattr(codec_cuda, "_SCRATCH_BLOCKS", 2)
    x = codec_content(np.random.default_rng(0), (3, 40), "normal", FLOATS[0])
    bits = 1.6 if codec == "ternary" else 4
    assert_bits_of_the_reference(CodecCase(x, bits, {"axis": 1, "group_size": 24, "codec": codec}), FLOATS[2])


def test_what_no_scale_can_represent_is_named() -> None:
    x = np.ones((2, 6), np.float32)
    x[1, 4] = np.inf
    layout = checked_layout(x.shape, 4, axis=1, group_size=None, codec="affine")
    with pytest.raises(ValueError, match=r"x\[1, 4\] is inf, which cannot be quantised"):
        codec_cuda.quantize_numba(x, layout, "raise")

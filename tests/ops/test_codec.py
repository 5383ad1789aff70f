"""Codecs on every CPU backend: the same bits, groups on their own, what is refused; see also the accuracy."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

import kvlab
from kvlab.ops.cpu import bits as bits_cpu
from tests.codecs import bit_patterns, codes_of, over_groups, quantize
from tests.strategies import CODECS, FINITE_CONTENTS, FLOATS, CodecCase, codec_cases, codec_content

BACKENDS = ("cpu", "reference")


@given(codec_cases(), st.sampled_from(FLOATS), st.sampled_from((bits_cpu._BLOCK_BYTES, 256, 1)))
def test_backends_give_the_same_bits(case: CodecCase, dtype: np.dtype[Any], block_bytes: int) -> None:
    before = case.x.copy()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bits_cpu, "_BLOCK_BYTES", block_bytes)
        ours, theirs = (quantize(case, nan="propagate", backend=backend) for backend in BACKENDS)
        decoded = [kvlab.dequantize(ours, str(dtype), backend=backend) for backend in BACKENDS]
    assert np.array_equal(ours.packed, theirs.packed)
    assert np.array_equal(ours.scale.view(np.uint16), theirs.scale.view(np.uint16))
    if case.options["codec"] == "affine":
        assert ours.offset is not None
        assert theirs.offset is not None
        assert np.array_equal(ours.offset.view(np.uint16), theirs.offset.view(np.uint16))
    else:
        assert ours.offset is theirs.offset is None
    assert np.array_equal(bit_patterns(decoded[0]), bit_patterns(decoded[1]))
    assert np.array_equal(bit_patterns(case.x), bit_patterns(before))


@given(codec_cases(contents=FINITE_CONTENTS))
def test_groups_do_not_know_of_each_other(case: CodecCase) -> None:
    """Each group, taken alone, gives the same codes and words."""
    whole = quantize(case)
    codes, axis = codes_of(whole), whole.axis
    for g, start in enumerate(range(0, whole.shape[axis], whole.group_size)):
        part = (slice(None),) * axis + (slice(start, start + whole.group_size),)
        alone = kvlab.quantize(case.x[part], case.bits, axis=axis, codec=whole.codec)
        assert np.array_equal(codes_of(alone), codes[part])
        assert np.array_equal(alone.scale.view(np.uint16), np.take(whole.scale.view(np.uint16), [g], axis))


@given(codec_cases(contents=("normal",)), st.integers(0, 2**32 - 1), st.sampled_from(BACKENDS))
def test_what_no_scale_can_represent(case: CodecCase, seed: int, backend: str) -> None:
    rng = np.random.default_rng(seed)
    index = tuple(int(rng.integers(0, n)) for n in case.x.shape)
    bad = [np.nan, np.inf, -np.inf] + ([-3e38, 1.1 * 2.0**126] if case.x.dtype != np.float16 else [])
    x = case.x.copy()
    x[index] = rng.choice(bad)
    with pytest.raises(ValueError, match="which cannot be quantised") as error:
        kvlab.quantize(x, case.bits, **case.options, backend=backend)
    assert f"x{list(index)} is " in str(error.value)
    spread = kvlab.quantize(x, case.bits, **case.options, nan="propagate", backend=backend)
    clean = quantize(case)
    marked = np.zeros(x.shape)
    marked[index] = 1
    in_group = over_groups(np.max, marked, spread) > 0
    decoded = kvlab.dequantize(spread, backend=backend)
    assert np.array_equal(np.isnan(decoded.astype(float)), in_group)
    assert np.array_equal(bit_patterns(decoded)[~in_group], bit_patterns(kvlab.dequantize(clean))[~in_group])
    assert (codes_of(spread)[in_group] == 0).all()


def test_bytes_are_those_of_the_arrays() -> None:
    x = np.ones((3, 5, 128), np.float16)
    for codec, words in (("affine", 2), ("symmetric", 1), ("hadamard", 1)):
        quantized = kvlab.quantize(x, 4, codec=codec, group_size=64)
        assert quantized.nbytes == 15 * (64 + 2 * words * 2)
        assert quantized.bits_per_element == 4 + words * 0.25
    assert kvlab.quantize(x, 1.6, codec="ternary").nbytes == 15 * (26 + 2)
    assert kvlab.quantize(x[:0], 4).bits_per_element == 0


@pytest.mark.parametrize(("shape", "axis"), [((0,), 0), ((3, 0), 0), ((3, 0), 1), ((0, 8), -1), ((0, 8), 0)])
def test_empty_arrays(shape: tuple[int, ...], axis: int) -> None:
    for codec, backend in product(CODECS, BACKENDS):
        bits = 1.6 if codec == "ternary" else 3
        quantized = kvlab.quantize(np.zeros(shape, np.float16), bits, axis=axis, codec=codec, backend=backend)
        assert kvlab.dequantize(quantized, backend=backend).shape == shape


@pytest.mark.parametrize("backend", BACKENDS)
def test_results_are_of_the_kind_of_the_argument(backend: str) -> None:
    x = torch.randn(2, 3, 32, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16).transpose(0, 1)
    for codec, axis in product(CODECS, (0, 2)):
        bits = 1.6 if codec == "ternary" else 8
        quantized = kvlab.quantize(x, bits, codec=codec, axis=axis, backend=backend)
        assert kvlab.last_backend() == backend
        assert quantized.dtype == "bfloat16"
        assert all(isinstance(part, torch.Tensor) for part in (quantized.packed, quantized.scale))
        decoded = kvlab.dequantize(quantized, backend=backend)
        assert isinstance(decoded, torch.Tensor)
        assert decoded.dtype == torch.bfloat16
        wide = kvlab.dequantize(quantized, torch.float32, backend=backend)
        assert wide.dtype == torch.float32
        assert torch.allclose(wide.to(torch.bfloat16), decoded)
        if codec != "ternary":
            assert torch.allclose(wide, x.float(), atol=0.3)


def test_arguments_are_checked() -> None:
    x = np.zeros((2, 8), np.float32)
    with pytest.raises(ValueError, match="codec='log' is not supported; supported are 'affine', 'symmetric'"):
        kvlab.quantize(x, 4, codec="log")
    with pytest.raises(ValueError, match="bits=7 is not supported by codec='affine'; supported: 1, 2, 3, 4"):
        kvlab.quantize(x, 7)
    with pytest.raises(ValueError, match=r"bits=2 is not supported by codec='ternary'; supported: 1\.6"):
        kvlab.quantize(x, 2, codec="ternary")
    with pytest.raises(ValueError, match=r"axis=2 is not an axis of an array of shape \(2, 8\)"):
        kvlab.quantize(x, 4, axis=2)
    with pytest.raises(ValueError, match="axis=-1 is not an axis"):
        kvlab.quantize(np.array(1.0, np.float32), 4)
    with pytest.raises(ValueError, match="group_size=0 must be at least 1"):
        kvlab.quantize(x, 4, group_size=0)
    with pytest.raises(ValueError, match="nan='ignore' is not supported"):
        kvlab.quantize(x, 4, nan="ignore")
    with pytest.raises(TypeError, match="x must be one of float16, bfloat16, float32, got float64"):
        kvlab.quantize(x.astype(float), 4)
    with pytest.raises(TypeError, match="x must be an array"):
        kvlab.quantize([1.0], 4)  # type: ignore[type-var]
    quantized = kvlab.quantize(x, 4)
    with pytest.raises(TypeError, match="dtype must be one of float16, bfloat16, float32, got int8"):
        kvlab.dequantize(quantized, "int8")


@pytest.mark.parametrize("backend", BACKENDS)
def test_inconsistent_parts_are_refused(backend: str) -> None:
    quantized = kvlab.quantize(np.ones((2, 16), np.float32), 4, group_size=8)
    wrong: dict[str, Any] = {
        "packed": np.zeros((2, 7), np.uint8),
        "scale": quantized.scale.astype(np.float32),
        "offset": None,
        "shape": (2, 17),
        "group_size": 4,
    }
    for name, value in wrong.items():
        with pytest.raises(ValueError, match=r"quantized\.\w+ is .* ask for"):
            kvlab.dequantize(replace(quantized, **{name: value}), backend=backend)
    ternary = kvlab.quantize(np.ones((2, 16), np.float32), 1.6, codec="ternary")
    ternary.packed[1, 2] = 243
    with pytest.raises(ValueError, match=r"packed\[1, 2\] is 243"):
        kvlab.dequantize(ternary, backend=backend)


@pytest.mark.parametrize(
    ("codec", "axis"), [(codec, 1) for codec in CODECS] + [("affine", 0), ("symmetric", 0)]
)
@pytest.mark.parametrize("count", [1, 7, 8, 33])
def test_kernels_write_nothing_around_their_output(
    codec: str, axis: int, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Outputs allocated in the midst of canaries; the canaries survive, and the result is the same."""
    margin, canary, buffers = 64, 0xA5, []

    def empty_in_canaries(shape: Any, dtype: Any) -> NDArray[Any]:
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        buffers.append(np.full(margin + size + margin, canary, np.uint8))
        inside: NDArray[Any] = buffers[-1][margin : margin + size].view(dtype).reshape(shape)
        return inside

    x = codec_content(np.random.default_rng(count), (5, count), "normal", FLOATS[0])
    bits = 1.6 if codec == "ternary" else 3
    expected = kvlab.quantize(x, bits, codec=codec, axis=axis, backend="reference")
    monkeypatch.setattr("numpy.empty", empty_in_canaries)
    quantized = kvlab.quantize(x, bits, codec=codec, axis=axis, backend="cpu")
    decoded = kvlab.dequantize(quantized, backend="cpu")
    monkeypatch.undo()
    assert len(buffers) >= 3
    assert all((buffer[:margin] == canary).all() for buffer in buffers)
    assert all((buffer[-margin:] == canary).all() for buffer in buffers)
    assert np.array_equal(quantized.packed, expected.packed)
    assert np.array_equal(decoded, kvlab.dequantize(expected, backend="reference"))

"""Codecs on a GPU, both backends: the bits of the reference, whichever kernel runs; what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import kvlab
from tests.codecs import bit_patterns, quantize
from tests.gpu.device import LIBRARIES, canaries_around_results, on_device, to_numpy
from tests.strategies import (
    CODEC_CONTENTS,
    CODECS,
    FLOATS,
    WIDTHS,
    CodecCase,
    codec_content,
    hostile_view,
)

both = pytest.mark.parametrize("backend", ["cuda", "numba"])
every_codec = pytest.mark.parametrize("codec", CODECS)
every_dtype = pytest.mark.parametrize("dtype", FLOATS, ids=str)

# shape, axis, group_size: one pass along rows; one pass across rows (affine, symmetric); any groups.
LAYOUTS = (
    ((23, 128), -1, None),
    ((2, 70, 3, 32), 1, 64),
    ((9, 80), -1, None),
    ((3, 10, 33), 1, 4),
)


def widths_of(codec: str, dtype: np.dtype[Any], backend: str) -> tuple[float, ...]:
    """All widths; Numba, which takes a second for each kernel, has them all for one type of element."""
    if codec == "ternary":
        return (1.6,)
    return WIDTHS if backend == "cuda" or dtype == FLOATS[0] else (3, 8)


def assert_bits_of_the_reference(case: CodecCase, backend: str, library: str) -> None:
    expected = quantize(case, nan="propagate", backend="reference")
    reference = kvlab.dequantize(expected, backend="reference")
    x = on_device(case.x, library)
    with canaries_around_results():
        found = kvlab.quantize(x, case.bits, **case.options, nan="propagate", backend=backend)
        assert kvlab.last_backend() == backend
        decoded = kvlab.dequantize(found, backend=backend)
    assert type(found.packed) is type(decoded) is type(x)
    assert np.array_equal(to_numpy(found.packed), expected.packed)
    assert np.array_equal(to_numpy(found.scale).view(np.uint16), expected.scale.view(np.uint16))
    assert (found.offset is None) == (expected.offset is None)
    if expected.offset is not None:
        assert np.array_equal(to_numpy(found.offset).view(np.uint16), expected.offset.view(np.uint16))
    assert np.array_equal(bit_patterns(to_numpy(decoded)), bit_patterns(reference))


@both
@every_codec
@every_dtype
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_the_bits_of_the_reference(
    layout: tuple[tuple[int, ...], int, int | None], dtype: np.dtype[Any], codec: str, backend: str
) -> None:
    shape, axis, group_size = layout
    for number, bits in enumerate(widths_of(codec, dtype, backend)):
        for content in CODEC_CONTENTS:
            rng = np.random.default_rng(number)
            x = codec_content(rng, shape, content, dtype)
            if content == "any scale":
                x = hostile_view(rng, x)
            options = {"axis": axis, "group_size": group_size, "codec": codec}
            library = LIBRARIES[number % 2]
            assert_bits_of_the_reference(CodecCase(x, bits, options), backend, library)


@every_codec
@pytest.mark.parametrize("group_size", [32, 64, 256, 512, 1024])
def test_groups_of_one_pass(group_size: int, codec: str) -> None:
    for bits in (1.6,) if codec == "ternary" else (3, 4):
        for rows, n in ((1, group_size), (7, group_size), (5, 1024)):
            x = codec_content(np.random.default_rng(0), (rows, n), "normal", FLOATS[0])
            options = {"axis": -1, "group_size": group_size, "codec": codec}
            assert_bits_of_the_reference(CodecCase(x, bits, options), "cuda", "torch")


@pytest.mark.parametrize("codec", ["affine", "symmetric"])
@pytest.mark.parametrize("group_size", [1, 7, 8, 100, 128, 129, 700])
def test_groups_across_rows(group_size: int, codec: str) -> None:
    x = codec_content(np.random.default_rng(0), (2, 700, 96), "normal", FLOATS[0])
    options = {"axis": 1, "group_size": group_size, "codec": codec}
    assert_bits_of_the_reference(CodecCase(x, 4, options), "cuda", "torch")


@both
@every_codec
def test_large_groups(codec: str, backend: str) -> None:
    x = codec_content(np.random.default_rng(0), (3, 20_000), "normal", FLOATS[0])
    bits = 1.6 if codec == "ternary" else 4
    options = {"axis": -1, "group_size": 9_500, "codec": codec}
    assert_bits_of_the_reference(CodecCase(x, bits, options), backend, "torch")


@both
@every_codec
@pytest.mark.parametrize("shape", [(6, 128), (6, 33)])
def test_what_no_scale_can_represent(shape: tuple[int, int], codec: str, backend: str) -> None:
    bits = 1.6 if codec == "ternary" else 4
    for bad in (np.nan, np.inf, -np.inf, 1.1 * 2.0**126):
        x = torch.randn(shape, device="cuda")
        x[4, 31] = bad
        with pytest.raises(ValueError, match=r"x\[4, 31\] is .*, which cannot be quantised"):
            kvlab.quantize(x, bits, codec=codec, backend=backend)
        quantized = kvlab.quantize(x, bits, codec=codec, nan="propagate", backend=backend)
        lost = torch.isnan(kvlab.dequantize(quantized, backend=backend))
        assert bool(lost[4].all())
        assert int(lost.sum()) == shape[1]


@both
def test_a_byte_that_is_no_ternary_values_is_named(backend: str) -> None:
    for n in (64, 33):
        quantized = kvlab.quantize(torch.ones(2, n, device="cuda"), 1.6, codec="ternary", backend=backend)
        quantized.packed[1, 2] = 243
        with pytest.raises(ValueError, match=r"packed\[1, 2\] is 243"):
            kvlab.dequantize(quantized, backend=backend)
        assert kvlab.dequantize(quantized, check=False, backend=backend).shape == (2, n)


@both
@every_codec
def test_calls_that_do_not_wait_can_be_captured(codec: str, backend: str) -> None:
    bits = 1.6 if codec == "ternary" else 4
    x = torch.randn(16, 128, device="cuda", dtype=torch.float16)

    def there_and_back() -> torch.Tensor:
        quantized = kvlab.quantize(x, bits, codec=codec, nan="propagate", backend=backend)
        return kvlab.dequantize(quantized, check=False, backend=backend)

    there_and_back()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = there_and_back()
    x.normal_()
    graph.replay()
    assert torch.equal(captured, there_and_back())


@both
def test_work_runs_on_the_current_stream(backend: str) -> None:
    x = torch.zeros(1 << 20, 64, device="cuda", dtype=torch.float16)
    kvlab.quantize(x, 4, nan="propagate", backend=backend)
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        x.fill_(1.5)
        quantized = kvlab.quantize(x, 4, nan="propagate", backend=backend)
        decoded = kvlab.dequantize(quantized, backend=backend)
    assert not stream.query()  # the host came back before the stream was done
    stream.synchronize()
    assert bool((decoded == 1.5).all())


@both
@pytest.mark.parametrize(
    ("shape", "axis"), [((0,), 0), ((3, 0), 0), ((3, 0), 1), ((0, 64), -1), ((0, 64), 0)]
)
def test_empty_arrays(shape: tuple[int, ...], axis: int, backend: str) -> None:
    for codec in CODECS:
        bits = 1.6 if codec == "ternary" else 3
        x = torch.zeros(shape, device="cuda")
        quantized = kvlab.quantize(x, bits, axis=axis, codec=codec, backend=backend)
        assert kvlab.dequantize(quantized, backend=backend).shape == shape


def test_arrays_of_more_than_2_31_bytes() -> None:
    rows, tail = 2**31 // 256 + 64, 64
    x = torch.full((rows, 128), 0.25, device="cuda", dtype=torch.float16)
    x[-tail:] = torch.randn(tail, 128, device="cuda", dtype=torch.float16)
    for axis, group_size in ((-1, None), (0, 32)):
        quantized = kvlab.quantize(x, 8, axis=axis, group_size=group_size)
        expected = kvlab.quantize(x[-tail:].cpu(), 8, axis=axis, group_size=group_size, backend="reference")
        assert torch.equal(quantized.packed[-tail:].cpu(), expected.packed)
        decoded = kvlab.dequantize(quantized)
        assert torch.equal(decoded[-tail:].cpu(), kvlab.dequantize(expected, backend="reference"))
        assert bool((decoded[:-tail] == 0.25).all())


def test_the_comparison_rejects_wrong_answers() -> None:
    """Negative control: one code changed by one, one scale by its last bit."""
    case = CodecCase(
        codec_content(np.random.default_rng(0), (3, 128), "normal", FLOATS[0]), 4, {"codec": "affine"}
    )
    right, wrong = (quantize(case, backend="reference") for _ in range(2))
    wrong.packed[1, 7] ^= 1
    wrong.scale.view(np.uint16)[2, 0] ^= 1
    assert not np.array_equal(right.packed, wrong.packed)
    decoded = (kvlab.dequantize(part, backend="reference") for part in (wrong, right))
    assert np.not_equal(*map(bit_patterns, decoded)).any(axis=1).tolist() == [False, True, True]

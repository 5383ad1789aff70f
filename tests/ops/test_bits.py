"""Packing on every CPU backend: the stream, bit for bit; what is refused; memory that does not matter."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

import kvlab
from kvlab.ops.cpu import bits as bits_cpu
from tests.oracles import every_string, pack_ternary_with_integers, pack_with_one_integer
from tests.strategies import WIDTHS, code_arrays, ternary_arrays

BACKENDS = ("cpu", "reference")

# Copy arrays with gaps in parts of this many bytes, so that small arrays have several.
small_blocks = st.sampled_from((bits_cpu._BLOCK_BYTES, 64, 1))


@pytest.mark.parametrize(("bits", "length"), [(b, n) for b in WIDTHS for n in range(13) if b * n <= 12])
def test_every_short_string(bits: int, length: int) -> None:
    codes = every_string(2**bits, length).astype(np.uint8)
    packed = kvlab.pack(codes, bits, backend="cpu")
    assert np.array_equal(packed, kvlab.pack(codes, bits, backend="reference"))
    assert np.array_equal(kvlab.unpack(packed, bits, length, backend="cpu"), codes)


@pytest.mark.parametrize("length", range(8))
def test_every_short_ternary_string(length: int) -> None:
    values = (every_string(3, length) - 1).astype(np.int8)
    packed = kvlab.pack_ternary(values, backend="cpu")
    assert np.array_equal(packed, kvlab.pack_ternary(values, backend="reference"))
    assert np.array_equal(kvlab.unpack_ternary(packed, length, backend="cpu"), values)


@given(code_arrays(), st.sampled_from(BACKENDS), small_blocks)
def test_any_codes(case: tuple[NDArray[Any], int], backend: str, block_bytes: int) -> None:
    codes, bits = case
    before = codes.copy()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bits_cpu, "_BLOCK_BYTES", block_bytes)
        packed = kvlab.pack(codes, bits, backend=backend)
        assert kvlab.last_backend() == backend
        again = kvlab.unpack(packed, bits, codes.shape[-1], backend=backend)
    assert np.array_equal(packed, pack_with_one_integer(codes, bits))
    assert np.array_equal(again, codes)
    assert np.array_equal(codes, before)


@given(ternary_arrays(), st.sampled_from(BACKENDS), small_blocks)
def test_any_ternary_values(values: NDArray[np.int8], backend: str, block_bytes: int) -> None:
    before = values.copy()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bits_cpu, "_BLOCK_BYTES", block_bytes)
        packed = kvlab.pack_ternary(values, backend=backend)
        assert kvlab.last_backend() == backend
        again = kvlab.unpack_ternary(packed, values.shape[-1], backend=backend)
    assert np.array_equal(packed, pack_ternary_with_integers(values))
    assert np.array_equal(again, values)
    assert np.array_equal(values, before)


@given(st.sampled_from(WIDTHS), st.integers(1, 40), st.sampled_from(BACKENDS))
def test_unused_bits_are_ignored(bits: int, count: int, backend: str) -> None:
    codes = (np.arange(count) % 2**bits).astype(np.uint8)
    packed = kvlab.pack(codes, bits)
    used = count * bits % 8 or 8
    packed[-1] |= 0xFF << used & 0xFF
    assert np.array_equal(kvlab.unpack(packed, bits, count, backend=backend), codes)


@given(code_arrays(), st.integers(0, 2**32 - 1), st.sampled_from(BACKENDS))
def test_the_first_code_that_is_too_large_is_named(
    case: tuple[NDArray[Any], int], seed: int, backend: str
) -> None:
    codes, bits = case[0].copy(), case[1]
    if codes.size == 0 or bits == 8:
        return
    rng = np.random.default_rng(seed)
    wrong = np.sort(rng.integers(0, codes.size, 3))
    codes.ravel()[wrong] = rng.integers(2**bits, 256, 3)
    index = [int(i) for i in np.unravel_index(wrong[0], codes.shape)]
    message = f"codes{index} is {codes[tuple(index)]}: a code of {bits} bits is below {2**bits}"
    with pytest.raises(ValueError, match=re.escape(message)):
        kvlab.pack(codes, bits, backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_other_than_ternary_is_refused(backend: str) -> None:
    with pytest.raises(ValueError, match=r"values\[1, 2\] is 2: "):
        kvlab.pack_ternary(np.array([[0, 0, 0], [1, -1, 2]], np.int8), backend=backend)
    with pytest.raises(ValueError, match=r"values\[0\] is -128: "):
        kvlab.pack_ternary(np.array([-128, 0, 0, 0, 0, 5], np.int8), backend=backend)
    for byte in range(256):
        packed = np.array([[0, 0], [byte, 0]], np.uint8)
        if byte <= 242:
            assert kvlab.unpack_ternary(packed, 10, backend=backend).shape == (2, 10)
        else:
            with pytest.raises(ValueError, match=rf"packed\[1, 0\] is {byte}: "):
                kvlab.unpack_ternary(packed, 10, backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_cpu_always_looks(backend: str) -> None:
    with pytest.raises(ValueError, match=r"codes\[1\] is 9: "):
        kvlab.pack(np.array([1, 9], np.uint8), 3, check=False, backend=backend)
    with pytest.raises(ValueError, match=r"values\[0\] is 3: "):
        kvlab.pack_ternary(np.array([3], np.int8), check=False, backend=backend)
    with pytest.raises(ValueError, match=r"packed\[0\] is 250: "):
        kvlab.unpack_ternary(np.array([250], np.uint8), 5, check=False, backend=backend)


def test_arguments_are_checked() -> None:
    codes = np.zeros((2, 4), np.uint8)
    for bits in (0, 7, 9, -1):
        with pytest.raises(ValueError, match=r"bits=.* is not supported; supported are 1, 2, 3, 4, 5, 6, 8"):
            kvlab.pack(codes, bits)
        with pytest.raises(ValueError, match=r"bits=.* is not supported"):
            kvlab.unpack(codes, bits, 4)
    with pytest.raises(TypeError, match="codes must have dtype uint8, got int32"):
        kvlab.pack(codes.astype(np.int32), 4)
    with pytest.raises(TypeError, match="values must have dtype int8, got uint8"):
        kvlab.pack_ternary(codes)
    with pytest.raises(TypeError, match="packed must have dtype uint8, got int8"):
        kvlab.unpack(codes.view(np.int8), 4, 8)
    with pytest.raises(TypeError, match="codes must be an array"):
        kvlab.pack([1, 2], 4)  # type: ignore[type-var]
    with pytest.raises(ValueError, match="codes must have at least one axis"):
        kvlab.pack(np.array(1, np.uint8), 4)
    with pytest.raises(ValueError, match=r"packed has 4 bytes on .* but count=9 codes of 4 bits take 5"):
        kvlab.unpack(codes, 4, 9)
    with pytest.raises(ValueError, match=r"packed has 4 bytes on .* but count=15 ternary values take 3"):
        kvlab.unpack_ternary(codes, 15)
    with pytest.raises(ValueError, match="count=-1 must be at least 0"):
        kvlab.unpack(codes, 4, -1)
    with pytest.raises(TypeError):
        kvlab.unpack(codes, 4, 8.0)  # type: ignore[arg-type]
    with pytest.raises(NotImplementedError, match="backend='cuda' works on cuda arrays"):
        kvlab.pack(codes, 4, backend="cuda")


@pytest.mark.parametrize("backend", BACKENDS)
def test_results_are_of_the_kind_of_the_argument(backend: str) -> None:
    codes = torch.arange(32, dtype=torch.uint8).reshape(4, 8).T % 8
    packed = kvlab.pack(codes, 3, backend=backend)
    assert isinstance(packed, torch.Tensor)
    assert np.array_equal(packed.numpy(), pack_with_one_integer(codes.numpy(), 3))
    again = kvlab.unpack(packed, 3, 4, backend=backend)
    assert isinstance(again, torch.Tensor)
    assert torch.equal(again, codes)
    values = codes.to(torch.int8) % 3 - 1
    again = kvlab.unpack_ternary(kvlab.pack_ternary(values, backend=backend), 4, backend=backend)
    assert isinstance(again, torch.Tensor)
    assert torch.equal(again, values)


def test_read_only_arrays_are_taken() -> None:
    codes = np.arange(16, dtype=np.uint8)
    codes.flags.writeable = False
    assert np.array_equal(kvlab.pack(codes, 4), pack_with_one_integer(codes, 4))


@pytest.mark.parametrize("bits", WIDTHS)
@pytest.mark.parametrize("count", [1, 7, 8, 31, 32, 33, 100])
def test_kernels_write_nothing_around_their_output(bits: int, count: int) -> None:
    """Neither the bytes before and after a row nor what stands behind the input make a difference."""
    from kvlab.numba_kernels.cpu.bits import pack_runs, unpack_runs

    codes = (np.arange(count) % 2**bits).astype(np.uint8)
    size, margin = -(-count * bits // 8), 64
    for canary in (0x00, 0xFF):
        source, target = np.full((2, margin + count + margin), canary, np.uint8)
        source[margin : margin + count] = codes
        pack_runs(source[margin : margin + count], count, bits, target[margin : margin + size], size)
        assert np.array_equal(target[margin : margin + size], pack_with_one_integer(codes, bits))
        assert (np.delete(target, slice(margin, margin + size)) == canary).all()
        back = np.full(margin + count + margin, canary, np.uint8)
        unpack_runs(target[margin : margin + size], size, bits, back[margin : margin + count], count)
        assert np.array_equal(back, source)


@pytest.mark.parametrize("count", [1, 4, 5, 6, 64])
def test_ternary_kernels_write_nothing_around_their_output(count: int) -> None:
    from kvlab.numba_kernels.cpu.bits import pack_ternary_runs, unpack_ternary_runs

    values = np.arange(count, dtype=np.int8) % 3 - 1
    size, margin = -(-count // 5), 64
    target = np.full(margin + size + margin, 0xEE, np.uint8)
    pack_ternary_runs(values, count, target[margin : margin + size], size)
    assert np.array_equal(target[margin : margin + size], pack_ternary_with_integers(values))
    assert (np.delete(target, slice(margin, margin + size)) == 0xEE).all()
    back = np.full(margin + count + margin, 77, np.int8)
    unpack_ternary_runs(target[margin : margin + size], size, back[margin : margin + count], count)
    assert np.array_equal(back[margin : margin + count], values)
    assert (np.delete(back, slice(margin, margin + count)) == 77).all()

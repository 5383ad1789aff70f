"""Structs of kernels: laid out as C does, arrays of them that take addresses."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

from kvlab.jit.structs import ADDRESS, TENSOR, Struct, words_of

INNER = Struct(pool=ADDRESS, bits="H")


class _Inner(ctypes.Structure):
    _fields_ = (("pool", ctypes.c_uint64), ("bits", ctypes.c_uint16))


class _Outer(ctypes.Structure):
    _fields_ = (
        ("flag", ctypes.c_int8), ("inner", _Inner * 3), ("n", ctypes.c_int32), ("scale", ctypes.c_float),
        ("small", ctypes.c_int16), ("out", ctypes.c_uint64), ("last", ctypes.c_int32),
    )  # fmt: skip


OUTER = Struct(flag="b", inner=(INNER, 3), n="i", scale="f", small="h", out=ADDRESS, last="i")


def test_fields_lie_where_a_c_compiler_puts_them() -> None:
    assert OUTER.size == ctypes.sizeof(_Outer)
    for name, _ in _Outer._fields_:
        assert OUTER.offset(name) == getattr(_Outer, name).offset, name


def test_a_packed_struct_is_one_argument_of_its_size() -> None:
    packed = OUTER.pack(n=-3, scale=0.5, out=1 << 47, last=9)
    assert isinstance(packed, np.void)
    found = _Outer.from_buffer_copy(packed.tobytes())
    assert (found.n, found.scale, found.out, found.last, found.flag) == (-3, 0.5, 1 << 47, 9, 0)
    with pytest.raises(ValueError, match="no field of name absent"):
        OUTER.pack(absent=1)


def test_an_array_of_a_struct_lacks_addresses_alone() -> None:
    form = Struct(n="i", x=TENSOR, small="h", lse=ADDRESS, last="i")
    made = form.array({"n": 8, "x": (2, 3, 1 << 40), "small": -1, "last": 5})
    words = words_of(made)
    for x, lse in ((1 << 47, 6), (7, 0)):
        words[form.word("x")], words[form.word("lse")] = x, lse
        whole = form.pack(n=8, x=(x, (2, 3, 1 << 40)), small=-1, lse=lse, last=5)
        assert made.tobytes() == whole.tobytes()

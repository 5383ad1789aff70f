"""Quantisation: floating-point arrays to packed codes with a scale for each group, and back.

What a codec computes is defined in `kvlab/reference/codec.py`, down to the last bit; here calls are checked
and sent to a backend. Codes are packed along the last axis, whatever axis groups run along, so that
``unpack(quantized.packed, quantized.bits, quantized.shape[-1])`` always gives the codes. Caches do not use
these codecs: their pages have a format that attention reads in place (`kvlab/pages.py`). They serve weights,
activations and files, and the comparison of schemes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Generic

import numpy as np
from numpy.typing import NDArray

from kvlab.arguments import flag
from kvlab.arrays import Array, ArrayT, device_of, dtype_name, numpy_dtype
from kvlab.ops.bits import WIDTHS
from kvlab.ops.codec_layout import CODECS, FLOATS, TERNARY_BITS, Layout, checked_layout
from kvlab.registry import ON_CUDA, ON_NUMBA, Implementation, choose, register, requirements_of
from kvlab.torch_compile import opaque

__all__ = ["Quantized", "dequantize", "quantize"]

_REQUIREMENTS: dict[str, Any] = {"codec": CODECS, "bits": (TERNARY_BITS, *WIDTHS), "dtype": FLOATS}

register(
    Implementation("quantize", "cuda", "kvlab.ops.cuda.codec:quantize", _REQUIREMENTS | ON_CUDA),
    Implementation("quantize", "numba", "kvlab.ops.cuda.codec:quantize_numba", _REQUIREMENTS | ON_NUMBA),
    Implementation("dequantize", "cuda", "kvlab.ops.cuda.codec:dequantize", _REQUIREMENTS | ON_CUDA),
    Implementation("dequantize", "numba", "kvlab.ops.cuda.codec:dequantize_numba", _REQUIREMENTS | ON_NUMBA),
    Implementation("quantize", "cpu", "kvlab.ops.cpu.codec:quantize", _REQUIREMENTS),
    Implementation("quantize", "reference", "kvlab.ops.reference.codec:quantize", _REQUIREMENTS),
    Implementation("dequantize", "cpu", "kvlab.ops.cpu.codec:dequantize", _REQUIREMENTS),
    Implementation("dequantize", "reference", "kvlab.ops.reference.codec:dequantize", _REQUIREMENTS),
)


@dataclass(frozen=True, eq=False)
class Quantized(Generic[ArrayT]):
    """Packed codes, their scales, and what is needed to read them; made by `quantize`.

    Parameters
    ----------
    packed : array, uint8
        Codes of `shape`, packed along the last axis as by `pack` (codec ternary: `pack_ternary`).
    scale : array, float16
        `shape`, with the number of groups on `axis`. A set sign bit marks a group whose scale and offset are
        the bits of bfloat16; the NaN 0x7E00, one that held a NaN, an infinity or a magnitude above 2**126.
    offset : array, float16, or None
        As `scale`; codec affine only.
    shape : tuple of int
    bits : int, or 1.6 for the codec ternary
    codec : str
    axis : int
        The axis along which groups run, from 0.
    group_size : int
        Elements of a group; the last group of an axis may be shorter.
    dtype : str
        Element type of what was quantised.

    Examples
    --------
    >>> quantized = quantize(np.linspace(0, 1, 128, dtype=np.float32), 4)
    >>> quantized.packed.shape, quantized.nbytes, quantized.bits_per_element
    ((64,), 68, 4.25)
    """

    packed: ArrayT
    scale: ArrayT
    offset: ArrayT | None
    shape: tuple[int, ...]
    bits: float
    codec: str
    axis: int
    group_size: int
    dtype: str

    @property
    def nbytes(self) -> int:
        """Bytes of codes, scales and offsets."""
        arrays = [array for array in (self.packed, self.scale, self.offset) if array is not None]
        return sum(math.prod(_shape(array)) * numpy_dtype(dtype_name(array)).itemsize for array in arrays)

    @property
    def bits_per_element(self) -> float:
        """Bits per element with everything counted; 0 if there is no element."""
        return 8 * self.nbytes / (math.prod(self.shape) or 1)


@opaque
def quantize(
    x: ArrayT,
    bits: float,
    *,
    axis: int = -1,
    group_size: int | None = None,
    codec: str = "affine",
    nan: str = "raise",
    backend: str | None = None,
) -> Quantized[ArrayT]:
    r"""Quantise an array to codes of a few bits, with one scale for each group of elements.

    With c a code, s the scale of its group and L = 2**bits - 1, an element becomes

    - ``"affine"``: c s + o, with offset o just below the lowest value of the group. s is the range of the
      group / L.
    - ``"symmetric"``: (c - L/2) s. s is the largest magnitude of the group / 2**(bits - 1), and / (L/2) from
      5 bits on.
    - ``"hadamard"``: the orthonormal Hadamard transform of the level number c of the Lloyd-Max codebook [1]_
      of a unit Gaussian, times s, the root mean square of the group. The group is transformed in blocks of
      the largest power of two that divides its length.
    - ``"ternary"``: c s with c one of -1, 0, 1. s is 1.224 times the root mean square of the group.

    Scale and offset take 16 bits each. Groups along the last axis of keys or values are "per token", groups
    along the axis of tokens "per channel".

    Parameters
    ----------
    x : array, float16, bfloat16 or float32
        Any number of axes from one, any strides.
    bits : int or float
        1, 2, 3, 4, 5, 6 or 8; for the codec ternary 1.6.
    axis : int
        The axis along which elements share a scale.
    group_size : int, optional
        Elements of a group; the last group of an axis may be shorter. By default the whole axis.
    codec : str
        ``"affine"``, ``"symmetric"``, ``"hadamard"`` or ``"ternary"``.
    nan : str
        What a NaN, an infinity or a magnitude above 2**126 does: ``"raise"``, or ``"propagate"``: all
        elements of its group come back as NaN. On a GPU, ``"raise"`` waits for the result, ``"propagate"``
        does not.
    backend : str, optional
        By default the best on the device of `x`. All backends give the same bits.

    Returns
    -------
    Quantized
        Arrays of the kind of `x`.

    Raises
    ------
    ValueError
        If an option is not one of those above, or `nan` is ``"raise"`` and there is cause.
    TypeError
        If `x` is no array, or has another element type.

    Notes
    -----
    Let u be the distance between neighbouring numbers of the output type of `dequantize`, at the element. An
    element x comes back as x^ with

    - affine, symmetric: \|x^ - x\| <= s/2 + u/2 + r, with r = 2**-21 M + 2**-133, M the largest magnitude of
      its group (r is rounding in float32, and the smallest bfloat16);
    - ternary: \|x^ - x\| <= max(s/2, \|x\| - s) + u/2 + r;
    - hadamard: \|x^ - x\| <= 1.01 sqrt(w**2 + max(0, 1 - t/sqrt(n))**2) times the Euclidean norm of the
      group, for n elements, t the highest level and w the largest distance of a number between -t and t from
      the level of its code. The Euclidean error of groups that the rotation turns into a single spike, such
      as constant ones, comes close to that. Without such structure the mean squared error is 0.363, 0.117,
      0.0345, 0.0095, 0.0025, 0.00064 and 0.00004 of the mean square at 1, 2, 3, 4, 5, 6 and 8 bits.

    Of normal numbers in groups of 128 the mean squared error is 0.25, 0.046, 0.010 and 0.000035 of the mean
    square at 2, 3, 4 and 8 bits with affine, 0.17, 0.043, 0.011 and 0.000042 with symmetric, and 0.19 with
    ternary.

    A constant group comes back exactly from the affine codec if float16 (or, out of its range, bfloat16)
    represents the constant. Quantising what `dequantize` gave leads to the same codes with the symmetric
    codec where the scale is a normal number and at least one ulp of the group's largest output, up to 4 bits
    2**bits of them (which only subnormal numbers may miss); and with the affine one where it is at least one
    ulp and the lowest code of the group is 0, too (and, if the words are bfloat16, the highest in use). The
    lowest code is 0 wherever the offset is exact: for float16 and bfloat16 inputs unless the words are
    bfloat16.

    References
    ----------
    .. [1] J. Max, "Quantizing for minimum distortion", IRE Trans. Inf. Theory 6, 1960.

    Examples
    --------
    >>> import kvlab
    >>> x = np.array([[0.0, 0.5, 1.0, 1.5], [-8.0, 0.0, 8.0, 16.0]], np.float32)
    >>> quantized = kvlab.quantize(x, 2)
    >>> quantized.packed, quantized.scale.ravel(), quantized.offset.ravel()
    (array([[228], [228]], dtype=uint8), array([0.5, 8. ], dtype=float16), array([ 0., -8.], dtype=float16))
    >>> bool((kvlab.dequantize(quantized) == x).all()), quantized.bits_per_element
    (True, 10.0)
    """
    device, dtype = device_of(x, "x"), dtype_name(x, "x")
    _check_float(dtype, "x")
    layout = checked_layout(_shape(x), bits, axis, group_size, codec)
    if nan not in ("raise", "propagate"):
        raise ValueError(f"nan={nan!r} is not supported; supported are 'raise' and 'propagate'")
    requirements = {"codec": codec, "bits": layout.bits, "dtype": dtype, **requirements_of(device)}
    row = choose("quantize", device.kind, backend, **requirements)
    packed, scale, offset = row.launch(x, layout, nan)
    return Quantized(
        packed, scale, offset, layout.shape, layout.bits, codec, layout.axis, layout.group_size, dtype
    )


@opaque
def dequantize(
    quantized: Quantized[ArrayT], dtype: Any = None, *, check: bool = True, backend: str | None = None
) -> ArrayT:
    """Return what the codes of `quantize` stand for.

    Parameters
    ----------
    quantized : Quantized
    dtype : optional
        float16, bfloat16 or float32, as a name or a dtype of any library; by default what was quantised.
        Results beyond the range of float16 become its largest number.
    check : bool
        On a GPU, finding a byte of ternary codes above 242 means waiting for the result. False: do not wait;
        such a byte then gives any values. The CPU always looks; other codecs have nothing to find.
    backend : str, optional
        By default the best on the device of the codes. All backends give the same bits.

    Returns
    -------
    array, shape ``quantized.shape``
        Of the kind of ``quantized.packed``.

    Raises
    ------
    ValueError
        If the arrays do not have the shapes and types that the other fields ask for, or a byte of ternary
        codes is above 242.
    TypeError
        If `dtype` is another type.

    Examples
    --------
    >>> import kvlab
    >>> quantized = kvlab.quantize(np.array([1, 2, 4], np.float32), 2)
    >>> kvlab.dequantize(quantized, "float16")
    array([1., 2., 4.], dtype=float16)
    """
    if not isinstance(quantized, Quantized):
        raise TypeError(f"quantized must be what kvlab.quantize returned, not {type(quantized).__name__}")
    target = quantized.dtype if dtype is None else dtype_name(dtype, "dtype")
    _check_float(target, "dtype")
    layout = checked_layout(
        quantized.shape, quantized.bits, quantized.axis, quantized.group_size, quantized.codec
    )
    _check_arrays(quantized, layout)
    device = device_of(quantized.packed)
    requirements = {"codec": layout.codec, "bits": layout.bits, "dtype": target, **requirements_of(device)}
    row = choose("dequantize", device.kind, backend, **requirements)
    result: ArrayT = row.launch(quantized, layout, target, flag(check, "check"))
    return result


def _shape(x: Any) -> tuple[int, ...]:
    return tuple(x.shape)


def _check_float(dtype: str, name: str) -> None:
    if dtype not in FLOATS:
        raise TypeError(f"{name} must be one of {', '.join(FLOATS)}, got {dtype}")


def _check_arrays(quantized: Quantized[Any], layout: Layout) -> None:
    expected: dict[str, tuple[Array | None, str, tuple[int, ...]]] = {
        "packed": (quantized.packed, "uint8", layout.packed_shape),
        "scale": (quantized.scale, "float16", layout.scale_shape),
    }
    if layout.codec == "affine":
        expected["offset"] = (quantized.offset, "float16", layout.scale_shape)
    for name, (array, dtype, shape) in expected.items():
        found = f"{dtype_name(array)} {_shape(array)}" if array is not None else "None"
        if found != f"{dtype} {shape}":
            raise ValueError(
                f"quantized.{name} is {found}; codec={layout.codec!r}, bits={layout.bits} and shape="
                f"{layout.shape} ask for {dtype} {shape}"
            )


def refuse_unrepresentable(x: NDArray[Any]) -> None:
    """Raise for the first element that no scale can represent."""
    wrong = ~(np.abs(x.astype(np.float32)) <= np.float32(2.0**126))
    index = tuple(int(i) for i in np.unravel_index(int(wrong.argmax()), x.shape))
    raise ValueError(
        f"x{list(index)} is {x[index]}, which cannot be quantised: magnitudes are at most 2**126; "
        "pass nan='propagate' to make its whole group NaN"
    )

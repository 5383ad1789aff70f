"""`kvlab benchmark codec`: quantise and dequantise, against a copy and, for affine, against NumPy.

Arrays are rows of 128 elements, as keys and values of one token and head: one group a row ("per token"), or
groups of 64 tokens ("per channel"). Before it is timed, a codec's error on these normal numbers must be what
theory says.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

import kvlab
from kvlab.lab.benchmark.baseline import Options, against_copy, check
from kvlab.lab.benchmark.packing import numpy_pack, numpy_unpack
from kvlab.lab.results import Row

__all__ = ["CODECS", "HEAD_DIM", "NOTE", "TOKENS_OF_GROUP", "benchmark_codec"]

HEAD_DIM = 128
TOKENS_OF_GROUP = 64
_NUMPY_PART = 16

NOTE = """NumPy, affine per token: o = x.min(-1), s = (x.max(-1) - o) / (2**bits - 1), rint((x - o) / s) in
float32, packed by shifts as in the packing case;  codes * s + o, unpacked likewise"""
"""The expressions NumPy is timed with."""

# codec, bits, mean squared error of normal numbers that must not be exceeded (groups of 64 or 128)
CODECS = (
    ("affine", 2, 0.26),
    ("affine", 3, 0.048),
    ("affine", 4, 0.0105),
    ("affine", 8, 3.7e-5),
    ("symmetric", 4, 0.0111),
    ("hadamard", 2, 0.119),
    ("hadamard", 3, 0.035),
    ("hadamard", 4, 0.0097),
    ("hadamard", 8, 4.3e-5),
    ("ternary", 1.6, 0.193),
)


def benchmark_codec(options: Options) -> list[Row]:
    """Measure quantize and dequantize of float16 and float32 arrays; two rows a codec, width and type.

    A row has ``operation``, ``codec``, ``bits``, ``groups``: per token or per channel; ``dtype``;
    ``bits_per_element``; figures of `against_copy`.
    """
    rows: list[Row] = []
    for dtype in ("float16", "float32"):
        tokens = options.size // (HEAD_DIM * np.dtype(dtype).itemsize)
        tokens = max(tokens // (_NUMPY_PART * TOKENS_OF_GROUP), 1) * _NUMPY_PART * TOKENS_OF_GROUP
        rng = np.random.default_rng(0)
        x = rng.standard_normal((tokens, HEAD_DIM), np.float32).astype(dtype)
        for codec, bits, most in CODECS:
            for axis in (-1, 0) if codec == "affine" else (-1,):
                rows += _measure(x, codec, bits, axis, most, options)
    return rows


def _measure(x: NDArray[Any], codec: str, bits: float, axis: int, most: float, options: Options) -> list[Row]:
    settings: dict[str, Any] = {"codec": codec, "axis": axis}
    if axis == 0:
        settings["group_size"] = TOKENS_OF_GROUP
    quantized = kvlab.quantize(x, bits, **settings)
    decoded = kvlab.dequantize(quantized)
    sample = slice(0, 64 * TOKENS_OF_GROUP)
    error = float(np.mean((decoded[sample].astype(np.float64) - x[sample].astype(np.float64)) ** 2))
    check(error <= most, f"{codec}, {bits} bits, {x.dtype}: a mean squared error of {error:.3g}")
    del decoded
    part = x[: len(x) // _NUMPY_PART]
    calls = {
        "quantize": (lambda: kvlab.quantize(x, bits, **settings), lambda: _numpy_quantize(part, int(bits))),
        "dequantize": (lambda: kvlab.dequantize(quantized), _numpy_dequantizer(part, int(bits))),
    }
    rows: list[Row] = []
    for name, (call, numpy_call) in calls.items():
        what: Row = {
            "operation": name,
            "codec": codec,
            "bits": bits,
            "groups": "per channel" if axis == 0 else "per token",
            "dtype": str(x.dtype),
            "bits_per_element": quantized.bits_per_element,
        }
        numpy_too = numpy_call if codec == "affine" and axis == -1 else None
        nbytes = x.nbytes + quantized.nbytes
        rows.append(what | against_copy(call, nbytes, options, numpy_too, 1 / _NUMPY_PART))
    return rows


def _numpy_quantize(x: NDArray[Any], bits: int) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
    """Affine quantisation as one writes it in NumPy, packing included."""
    values = x.astype(np.float32)
    offset = values.min(-1, keepdims=True)
    scale = (values.max(-1, keepdims=True) - offset) / np.float32(2**bits - 1)
    codes = np.rint((values - offset) / scale).astype(np.uint8)
    return numpy_pack(codes.reshape(-1), bits), scale.astype(np.float16), offset.astype(np.float16)


def _numpy_dequantizer(x: NDArray[Any], bits: int) -> Any:
    packed, scale, offset = _numpy_quantize(x, bits)

    def dequantize() -> NDArray[Any]:
        codes = numpy_unpack(packed, bits).reshape(x.shape)
        return (codes * scale.astype(np.float32) + offset.astype(np.float32)).astype(x.dtype)

    return dequantize

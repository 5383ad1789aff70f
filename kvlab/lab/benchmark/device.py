"""`kvlab benchmark packing|codec --device cuda`: against a copy of as many bytes on the same GPU.

The baseline is torch's copy of half the bytes that a call must touch, because a copy reads and writes each.
Arrays exceed the second-level cache. Before it is timed, a result must equal the reference bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

import kvlab
from kvlab.lab.benchmark.baseline import Options, check
from kvlab.lab.benchmark.codec import CODECS, HEAD_DIM, TOKENS_OF_GROUP
from kvlab.lab.results import Row
from kvlab.lab.timing_gpu import time_on_device
from kvlab.ops.bits import WIDTHS

__all__ = ["NOTE", "codec_on_device", "packing_on_device"]

NOTE = "of copy: speed relative to a copy on the GPU of the bytes that the call must read and write"

_BACKENDS = ("cuda", "numba")
_SAMPLE = 16 * TOKENS_OF_GROUP  # rows that are compared with the reference


def _against_copy(call: Callable[[], object], nbytes: int, options: Options) -> Row:
    import torch

    half = max(nbytes // 2**22, 1) * 2**21  # copies of other sizes are slower
    source = torch.empty(half, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    timings = time_on_device({"call": call, "copy": lambda: target.copy_(source)}, options.repeats)
    timing, copied = timings["call"], timings["copy"]
    return {
        "us": 1e6 * timing.median,
        "p5_us": 1e6 * timing.percentile(5),
        "p95_us": 1e6 * timing.percentile(95),
        "gb_per_s": nbytes / timing.median / 1e9,
        "copy_gb_per_s": 2 * half / copied.median / 1e9,
        "of_copy": timing.ratio_to(copied) * nbytes / (2 * half),
    }


def packing_on_device(options: Options) -> list[Row]:
    """Measure pack and unpack at every width and of ternary values, flat and, ternary, in rows of 128.

    A row has ``operation``; ``bits``; ``backend``; figures against the copy.
    """
    import torch

    rng, rows = np.random.default_rng(0), []
    count = max(options.size // 10240, 1) * 10240
    for bits in (*WIDTHS, 1.6):
        lowest, end, dtype = (-1, 2, np.int8) if bits == 1.6 else (0, 2 ** int(bits), np.uint8)
        sample = rng.integers(lowest, end, 10240, dtype=dtype)
        codes = torch.from_numpy(sample).cuda().repeat(count // 10240)
        shapes = ((count,), (count // HEAD_DIM, HEAD_DIM)) if bits == 1.6 else ((count,),)
        for shape in shapes:
            for backend in _BACKENDS:
                rows += _pack_and_unpack(codes.reshape(shape), bits, backend, options)
    return rows


def _pack_and_unpack(codes: Any, bits: float, backend: str, options: Options) -> list[Row]:
    n = codes.shape[-1]
    common: dict[str, Any] = {"check": False, "backend": backend}
    if bits == 1.6:
        pack: Callable[[], Any] = lambda: kvlab.pack_ternary(codes, **common)  # noqa: E731
        packed = pack()
        unpack: Callable[[], Any] = lambda: kvlab.unpack_ternary(packed, n, **common)  # noqa: E731
        expected = kvlab.pack_ternary(codes[:10240].cpu().numpy(), backend="reference")
    else:
        width = int(bits)
        pack = lambda: kvlab.pack(codes, width, **common)  # noqa: E731
        packed = pack()
        unpack = lambda: kvlab.unpack(packed, width, n, backend=backend)  # noqa: E731
        expected = kvlab.pack(codes[:10240].cpu().numpy(), width, backend="reference")
    found = packed[: len(expected)].cpu().numpy()
    check(np.array_equal(found, expected), f"pack, {bits} bits, {backend}")
    check(bool((unpack() == codes).all()), f"unpack, {bits} bits, {backend}")
    nbytes = codes.numel() + packed.numel()
    return [
        {"operation": name, "bits": bits, "row": n, "backend": backend} | _against_copy(call, nbytes, options)
        for name, call in (("pack", pack), ("unpack", unpack))
    ]


def codec_on_device(options: Options) -> list[Row]:
    """Measure quantize and dequantize of rows of 128 elements; two rows a codec, width, type and backend.

    A row has ``operation``, ``codec``, ``bits``, ``groups``: per token or per channel; ``dtype``;
    ``backend``; figures against the copy. Backend "numba" only has float16.
    """
    import torch

    rows: list[Row] = []
    for dtype in ("float16", "bfloat16", "float32"):
        kind = getattr(torch, dtype)
        tokens = max(options.size // (HEAD_DIM * kind.itemsize * _SAMPLE), 1) * _SAMPLE
        generator = torch.Generator("cuda").manual_seed(0)
        x = torch.randn(tokens, HEAD_DIM, generator=generator, device="cuda").to(kind)
        for codec, bits, _ in CODECS:
            for axis in (-1, 0) if codec in ("affine", "symmetric") else (-1,):
                for backend in _BACKENDS if dtype == "float16" else _BACKENDS[:1]:
                    rows += _quantize_and_back(x, codec, bits, axis, backend, options)
    return rows


def _quantize_and_back(
    x: Any, codec: str, bits: float, axis: int, backend: str, options: Options
) -> list[Row]:
    settings: dict[str, Any] = {"codec": codec, "axis": axis, "nan": "propagate"}
    if axis == 0:
        settings["group_size"] = TOKENS_OF_GROUP
    quantized = kvlab.quantize(x, bits, **settings, backend=backend)
    expected = kvlab.quantize(x[:_SAMPLE].cpu(), bits, **settings, backend="reference")
    what = f"{codec}, {bits} bits, {x.dtype}, {backend}"
    packed, words = expected.packed.numpy(), expected.scale.numpy().view(np.uint16)
    check(np.array_equal(quantized.packed[:_SAMPLE].cpu().numpy(), packed), f"quantize: {what}")
    scale = quantized.scale[: len(words)].cpu().numpy().view(np.uint16)
    check(np.array_equal(scale, words), f"quantize: scales of {what}")
    decoded = kvlab.dequantize(quantized, check=False, backend=backend)[:_SAMPLE].cpu()
    check(bool((decoded == kvlab.dequantize(expected, backend="reference")).all()), f"dequantize: {what}")
    calls: dict[str, Callable[[], object]] = {
        "quantize": lambda: kvlab.quantize(x, bits, **settings, backend=backend),
        "dequantize": lambda: kvlab.dequantize(quantized, check=False, backend=backend),
    }
    nbytes = math.prod(x.shape) * x.element_size() + quantized.nbytes
    described: Row = {
        "codec": codec,
        "bits": bits,
        "groups": "per channel" if axis == 0 else "per token",
        "dtype": str(x.dtype).removeprefix("torch."),
        "backend": backend,
    }
    return [
        {"operation": name} | described | _against_copy(call, nbytes, options) for name, call in calls.items()
    ]

"""`kvlab validate`: check the machine, compile and run kernels of every kind, measure the error of attention.

Every check is small: it answers whether things work here, not how fast they are. Checks that are
impossible here are skipped with the reason, for example all GPU checks on a machine without a GPU.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from typing import Any

import numpy as np

import kvlab
from kvlab import environment
from kvlab.lab.ablation.page_attention import to_gpu
from kvlab.lab.accuracy import SHAPES, validate_attention
from kvlab.lab.results import Row, provenance
from kvlab.lab.targets import Machine, is_tiny, resolve
from kvlab.ops.packed import packed_attention
from kvlab.registry import BACKENDS, all_rows

__all__ = ["run"]

Check = Callable[[str, Callable[[Any], Any]], bool]
"""Given a backend and what puts an array where it is wanted, whether the backend gives the reference's."""

_CLOCKS = "name,driver_version,clocks.sm,clocks.mem,clocks.max.sm,memory.used"


def run(target: str, where: Machine, *, release: bool = False, repeats: int = 1) -> dict[str, Any]:
    """Validate a part of the library on this machine.

    Each kernel runs `repeats` times and must be right each time. Long shapes are checked with `release`
    alone, and ``KVLAB_TINY=1`` leaves two shapes.

    The result has ``target``, ``provenance``; ``machine``: GPUs, CUDA versions, clocks; ``problems`` with
    them; ``kernels``: one of each kind; ``rows``: accuracy; ``skipped``: by part, why; ``passed``.

    Examples
    --------
    >>> from kvlab.lab.targets import machine
    >>> result = run("ternary", machine("cpu"))
    >>> [(kernel["backend"], kernel["result"]) for kernel in result["kernels"]], result["passed"]
    ([('reference', 'right'), ('cpu', 'right')], True)
    """
    parts = resolve(target)
    report = environment.report()
    skipped = {f"everything on {device}": reason for device, reason in where.skipped.items()}
    kernels = [
        {"backend": backend, "operation": operation, "result": _try(check, backend, repeats)}
        for part in parts
        for operation, check in _CHECKS[part].items()
        for backend in _backends(operation)
        if BACKENDS[backend] in where.devices
    ]
    rows: list[Row] = []
    if "attention" in parts:
        for device in where.devices:
            measured, left_out = validate_attention(device, _shapes(release))
            rows += measured
            skipped |= left_out
    right = all(kernel["result"] == "right" for kernel in kernels)
    return {
        "target": target,
        "provenance": provenance(target=target, release=release, repeats=repeats),
        "machine": {name: report[name] for name in ("gpus", "cuda", "packages")} | {"clocks": _clocks()},
        "problems": report["problems"],
        "kernels": kernels,
        "rows": rows,
        "skipped": skipped,
        "passed": right and all(row["passed"] == "yes" for row in rows) and not report["problems"],
    }


def _shapes(release: bool) -> Any:
    if is_tiny():
        return SHAPES[:2]
    return SHAPES if release else SHAPES[:-1]


def _backends(operation: str) -> list[str]:
    present = {row.backend for row in all_rows() if row.operation == operation}
    return [backend for backend in BACKENDS if backend in present]


def _try(check: Check, backend: str, repeats: int) -> str:
    """Compile a kernel and run it so many times: "right", "wrong", or the error in one line."""
    like: Callable[[Any], Any] = _to_gpu if BACKENDS[backend] == "cuda" else lambda x: x
    try:
        return "right" if all(check(backend, like) for _ in range(repeats)) else "wrong"
    except Exception as error:  # whatever it is, the report must say it and go on
        return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"


def _check_attention(backend: str, like: Callable[[Any], Any]) -> bool:
    x = np.random.default_rng(1).standard_normal((1, 9, 2, 32)).astype(np.float16)
    out = kvlab.attention(like(x), like(x), like(x), backend=backend)
    return _near(out, kvlab.attention(x, x, x, backend="reference"))


def _check_backward(backend: str, like: Callable[[Any], Any]) -> bool:
    q, k, v, dout = np.random.default_rng(4).standard_normal((4, 1, 9, 2, 32)).astype(np.float16)
    out, lse = kvlab.attention(q, k, v, return_lse=True, backend="reference")
    arguments = (dout, q, k, v, out, lse)
    found = kvlab.attention_backward(*map(like, arguments), backend=backend)
    return all(map(_near, found, kvlab.attention_backward(*arguments, backend="reference")))


def _check_quantize(backend: str, like: Callable[[Any], Any]) -> bool:
    x = np.random.default_rng(2).standard_normal((4, 128)).astype(np.float32)
    quantized = kvlab.quantize(like(x), 4, backend=backend)
    return np.array_equal(_to_host(quantized.packed), kvlab.quantize(x, 4, backend="reference").packed)


def _check_packed(backend: str, like: Callable[[Any], Any]) -> bool:
    k, v = np.random.default_rng(5).standard_normal((2, 1, 200, 1, 64)).astype(np.float16)
    cache = kvlab.MixedPrecisionCache(1, 2, 1, 64, budget=0.5, bits=(2, 4, 8), plan_length=256)
    cache.append(0, k, v)
    q, pages = np.repeat(k[:, :1], 2, 2), cache.pages(0)
    there = to_gpu(pages) if BACKENDS[backend] == "cuda" else pages
    out = packed_attention(like(q), there, backend=backend).out
    return _near(out, packed_attention(q, pages, backend="reference").out)


def _check_ternary(backend: str, like: Callable[[Any], Any]) -> bool:
    values = np.random.default_rng(3).integers(-1, 2, (3, 100)).astype(np.int8)
    packed = kvlab.pack_ternary(like(values), backend=backend)
    return np.array_equal(_to_host(kvlab.unpack_ternary(packed, 100, backend=backend)), values)


_CHECKS: dict[str, dict[str, Check]] = {
    "attention": {"attention": _check_attention, "attention_backward": _check_backward},
    "packed": {"quantize": _check_quantize, "packed_attention": _check_packed},
    "ternary": {"pack_ternary": _check_ternary},
}
"""Of every part, what is run of each kind of kernel: operations of the registry."""


def _near(found: Any, expected: Any) -> bool:
    """Whether float16 results differ by no more than their rounding does."""
    found, expected = (np.asarray(_to_host(x), np.float64) for x in (found, expected))
    return bool(np.linalg.norm(found - expected) < 4e-3 * np.linalg.norm(expected))


def _to_gpu(x: Any) -> Any:
    import torch

    return torch.from_numpy(x).cuda()


def _to_host(x: Any) -> Any:
    return np.asarray(x.cpu().numpy() if hasattr(x, "cpu") else x)


def _clocks() -> list[str]:
    """Driver, clocks and memory of each GPU as nvidia-smi says them; empty without it."""
    try:
        answer = subprocess.run(
            ["nvidia-smi", f"--query-gpu={_CLOCKS}", "--format=csv,noheader"],
            capture_output=True, text=True, timeout=20, check=True,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return []
    return answer.stdout.strip().splitlines()

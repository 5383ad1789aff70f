"""`kvlab validate`: is this machine fit, do kernels of every kind compile and run, how exact is attention.

Every check is small: it answers whether things work here, not how fast they are. What cannot be checked is
skipped, with the reason; on a machine without a GPU everything that concerns one.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from typing import Any

import numpy as np

import kvlab
from kvlab import environment
from kvlab.lab.accuracy import SHAPES, validate_attention
from kvlab.lab.results import Row, provenance
from kvlab.lab.targets import Machine, resolve
from kvlab.registry import BACKENDS, all_rows

__all__ = ["run"]

_CLOCKS = "name,driver_version,clocks.sm,clocks.mem,clocks.max.sm,memory.used"


def run(target: str, where: Machine, *, release: bool = False) -> dict[str, Any]:
    """Validate a part of the library on this machine.

    Parameters
    ----------
    target : str
        A name that `kvlab.lab.targets.resolve` knows.
    where : Machine
    release : bool
        Every shape; otherwise the long ones are left out. ``KVLAB_TINY=1`` leaves two.

    Returns
    -------
    dict
        ``target``, ``provenance``; ``machine``: GPUs, CUDA versions, clocks; ``problems`` with them;
        ``kernels``: one of each kind; ``rows``: accuracy; ``skipped``: by part, why; ``passed``.

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
        {"backend": backend, "operation": _OPERATIONS[part], "result": _try(part, backend)}
        for part in parts
        for backend in _backends(part)
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
        "provenance": provenance(target=target, release=release),
        "machine": {name: report[name] for name in ("gpus", "cuda", "packages")} | {"clocks": _clocks()},
        "problems": report["problems"],
        "kernels": kernels,
        "rows": rows,
        "skipped": skipped,
        "passed": right and all(row["passed"] == "yes" for row in rows) and not report["problems"],
    }


def _shapes(release: bool) -> Any:
    if os.environ.get("KVLAB_TINY") == "1":
        return SHAPES[:2]
    return SHAPES if release else SHAPES[:-1]


def _backends(part: str) -> list[str]:
    present = {row.backend for row in all_rows() if row.operation == _OPERATIONS[part]}
    return [backend for backend in BACKENDS if backend in present]


def _try(part: str, backend: str) -> str:
    """Compile and run one kernel: "right", "wrong", or the error in one line."""
    like: Callable[[Any], Any] = _to_gpu if BACKENDS[backend] == "cuda" else lambda x: x
    try:
        return "right" if _CHECKS[part](backend, like) else "wrong"
    except Exception as error:  # whatever it is, the report must say it and go on
        return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"


def _check_attention(backend: str, like: Callable[[Any], Any]) -> bool:
    x = np.random.default_rng(1).standard_normal((1, 9, 2, 32)).astype(np.float16)
    out = _to_host(kvlab.attention(like(x), like(x), like(x), backend=backend))
    expected = kvlab.attention(x, x, x, backend="reference")
    return bool(np.abs(out.astype(np.float64) - np.asarray(expected, np.float64)).max() < 4e-3)


def _check_packed(backend: str, like: Callable[[Any], Any]) -> bool:
    x = np.random.default_rng(2).standard_normal((4, 128)).astype(np.float32)
    quantized = kvlab.quantize(like(x), 4, backend=backend)
    return np.array_equal(_to_host(quantized.packed), kvlab.quantize(x, 4, backend="reference").packed)


def _check_ternary(backend: str, like: Callable[[Any], Any]) -> bool:
    values = np.random.default_rng(3).integers(-1, 2, (3, 100)).astype(np.int8)
    packed = kvlab.pack_ternary(like(values), backend=backend)
    return np.array_equal(_to_host(kvlab.unpack_ternary(packed, 100, backend=backend)), values)


_OPERATIONS = {"attention": "attention", "packed": "quantize", "ternary": "pack_ternary"}
_CHECKS = {"attention": _check_attention, "packed": _check_packed, "ternary": _check_ternary}


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

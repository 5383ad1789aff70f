"""Refuse figures that are without provenance, physically impossible, of wrong answers, or throttled.

Every figure of the laboratory passes this module before it is written. A refusal is an error, never a
warning: a wrong figure in a table costs more than a missing one.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvlab.lab.limits import Limit, cpu_limit

__all__ = [
    "Refused",
    "gpu_state",
    "refuse_impossible",
    "refuse_throttled",
    "refuse_wrong",
    "require_provenance",
]

PROVENANCE = (
    *("case_id", "seed", "git", "packages", "kvlab", "python", "platform", "cpu", "gpus", "gpu_state"),
    *("backend", "command", "time"),
)
"""What must stand beside every result; `git` may be None outside a repository, `gpu_state` without a GPU."""

_BAD_REASONS = {
    "hw_slowdown": "hardware slowdown",
    "hw_thermal_slowdown": "temperature (hardware)",
    "hw_power_brake_slowdown": "power brake",
    "sw_thermal_slowdown": "temperature (driver)",
}
_QUERY = ("name", "uuid", "driver_version", "clocks.sm", "clocks.mem", "power.draw", "temperature.gpu")


class Refused(RuntimeError):
    """A figure that may not become a result; `kind` says why: "wrong_answer", "impossible" or "throttled"."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind

    def __reduce__(self) -> tuple[type[Refused], tuple[str, str]]:
        return Refused, (self.kind, str(self))


def require_provenance(result: Mapping[str, Any]) -> None:
    """Refuse, as a ValueError, a result without ``provenance`` or without a part of it."""
    found = result.get("provenance")
    missing = [name for name in PROVENANCE if not isinstance(found, dict) or name not in found]
    if missing:
        raise ValueError(f"a result without provenance is not written; missing: {', '.join(missing)}")


def refuse_impossible(nbytes: int, seconds: float, limit: Callable[[], Limit] = cpu_limit) -> None:
    """Refuse a time in which so many bytes cannot have been read, or one that is not positive.

    `limit` says how fast the hardware is at most; it is asked again before a refusal, since measured limits
    vary.

    Examples
    --------
    >>> refuse_impossible(10**9, 1e-6)
    Traceback (most recent call last):
    kvlab.lab.guard.Refused: 1000000000 bytes in 1e-06 s are 1e+15 bytes a second; the hardware takes at ...
    """
    min_seconds = limit().min_seconds(nbytes)
    if seconds < min_seconds:
        min_seconds = min(min_seconds, limit().min_seconds(nbytes))
    if seconds < min_seconds or not seconds > 0:
        rate = nbytes / seconds if seconds > 0 else float("inf")
        raise Refused(
            "impossible",
            f"{nbytes} bytes in {seconds:.3g} s are {rate:.3g} bytes a second; the hardware takes at least "
            f"{min_seconds:.3g} s for them, so what was timed did not do the work",
        )


def refuse_wrong(found: NDArray[Any], expected: NDArray[Any], tolerance: float, what: str) -> float:
    """Return the relative error of an answer; refuse to time one above `tolerance` or that is no number."""
    scale = float(np.linalg.norm(expected.astype(np.float64)))
    error = float(np.linalg.norm(found.astype(np.float64) - expected)) / (scale or 1.0)
    if not error <= tolerance or found.shape != expected.shape:
        message = f"{what}: relative error {error:.3g}, allowed {tolerance:.3g}; it was not timed"
        raise Refused("wrong_answer", message)
    return error


def gpu_state() -> dict[str, str] | None:
    """Return driver, clocks, power, temperature and reasons for slower clocks; None without a GPU.

    It is the first GPU that this process may use (CUDA_VISIBLE_DEVICES).
    """
    if shutil.which("nvidia-smi") is None:
        return None
    names = (*_QUERY, *(f"clocks_throttle_reasons.{reason}" for reason in _BAD_REASONS))
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0].strip()
    command = ["nvidia-smi", f"--id={first}", f"--query-gpu={','.join(names)}", "--format=csv,noheader"]
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    if answer.returncode:
        return None
    return dict(zip(names, (word.strip() for word in answer.stdout.split(",")), strict=True))


def refuse_throttled(state: Mapping[str, str] | None) -> None:
    """Refuse figures of a GPU that had slowed down to protect itself; the message names the reason."""
    for reason, meaning in _BAD_REASONS.items():
        if state is not None and state.get(f"clocks_throttle_reasons.{reason}") == "Active":
            raise Refused("throttled", f"the GPU ran at lower clocks ({meaning}): cool it and measure again")

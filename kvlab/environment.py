"""Hardware, package versions, and whether the CUDA packages of this environment fit together.

`kvlab env` prints them, and every recorded result contains them. Versions come from the metadata of
installed packages, so nothing is imported to name its version; a part that is not there is None.

CUDA libraries of two major versions in one environment fail in ways that do not name the cause (a compiler of
one version reads the headers of the other), so this module detects a mix and reports it.
"""

from __future__ import annotations

import importlib.util
import platform
import re
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

import kvlab
from kvlab import device

__all__ = ["PACKAGES", "cuda_problems", "installed_versions", "report"]

PACKAGES = (
    *("numpy", "scipy", "numba", "ml_dtypes", "safetensors", "typer", "rich"),
    *("torch", "transformers", "matplotlib", "gguf", "accelerate", "duckdb", "hqq", "optimum-quanto"),
    *("cupy", "cupy-cuda12x", "cupy-cuda13x", "numba-cuda", "cuda-core", "cuda-bindings"),
    *("nvidia-cuda-nvrtc", "nvidia-cuda-nvrtc-cu12", "nvidia-cuda-runtime", "nvidia-cuda-runtime-cu12"),
)
"""What results depend on: the core, the extras hf, lab, cu12 and cu13, and the compiler."""

_CUDA_BY_NAME = {
    "cupy-cuda12x": 12,
    "cupy-cuda13x": 13,
    "nvidia-cuda-nvrtc-cu12": 12,
    "nvidia-cuda-runtime-cu12": 12,
}
_CUDA_BY_VERSION = ("cuda-bindings", "nvidia-cuda-nvrtc", "nvidia-cuda-runtime")


def report() -> dict[str, Any]:
    """Return everything as data that JSON can hold.

    Returns
    -------
    dict
        ``kvlab``, ``python``, ``platform``: str. ``cpu``: name, threads, features. ``memory``: total and
        available bytes. ``gpus``: one dict each; ``gpus_missing_because``: str or None. ``cuda``: versions of
        driver, NVRTC, headers and torch's CUDA. ``packages``: version or None by name. ``problems``: list of
        str, empty if all is well.

    Examples
    --------
    >>> report()["cpu"]["threads"] >= 1
    True
    """
    packages = installed_versions()
    cuda = _cuda_versions()
    gpus = device.gpus()
    return {
        "kvlab": kvlab.__version__,
        "python": platform.python_version(),
        # The kernel by its number: what its builder called it means nothing elsewhere.
        "platform": re.sub(r"(Linux-[\d.]+\d)-.*?(?=-(x86_64|aarch64)\b)", r"\1", platform.platform()),
        "cpu": asdict(device.cpu()),
        "memory": {"total": device.memory_total(), "available": device.memory_available()},
        "gpus": [asdict(gpu) for gpu in gpus],
        "gpus_missing_because": device.gpus_missing_because(),
        "cuda": cuda,
        "packages": packages,
        "problems": cuda_problems(packages, cuda, has_gpu=bool(gpus)),
    }


def installed_versions() -> dict[str, str | None]:
    """Return the version of each package of `PACKAGES`, None where it is not installed.

    Examples
    --------
    >>> installed_versions()["numpy"] is not None
    True
    """
    return {name: _version(name) for name in PACKAGES}


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def cuda_problems(
    packages: dict[str, str | None], cuda: dict[str, str | None], *, has_gpu: bool
) -> list[str]:
    """Return what keeps the CUDA parts from working together, each as one line with the way out.

    Parameters
    ----------
    packages : dict of name to version
        As `installed_versions` gives it.
    cuda : dict of part to version
        CUDA versions of ``driver``, ``nvrtc``, ``headers`` and ``torch``, as ``"13.0"`` or None.
    has_gpu : bool
        Whether the driver sees a GPU; without one only a mix of versions is a problem.

    Examples
    --------
    >>> cuda_problems({"cupy-cuda12x": "14.2.0"}, {"nvrtc": "13.0"}, has_gpu=False)
    ['CUDA 12 (cupy-cuda12x 14.2.0) and CUDA 13 (NVRTC 13.0) are mixed: keep one, in a new environment ...']
    """
    found: dict[int, list[str]] = {}
    for name, version in packages.items():
        if version is not None and (name in _CUDA_BY_NAME or name in _CUDA_BY_VERSION):
            found.setdefault(_CUDA_BY_NAME.get(name, _major(version)), []).append(f"{name} {version}")
    for part, label in (("nvrtc", "NVRTC"), ("headers", "headers"), ("torch", "torch's CUDA")):
        if part_version := cuda.get(part):
            found.setdefault(_major(part_version), []).append(f"{label} {part_version}")
    problems = []
    if len(found) > 1:
        parts = " and ".join(f"CUDA {major} ({', '.join(names)})" for major, names in sorted(found.items()))
        problems.append(f"{parts} are mixed: keep one, in a new environment with kvlab[cu12] or kvlab[cu13]")
    driver, nvrtc = cuda.get("driver"), cuda.get("nvrtc")
    if driver and nvrtc and _major(driver) < _major(nvrtc):
        problems.append(
            f"the driver supports CUDA up to {driver} and cannot load what NVRTC {nvrtc} compiles: "
            f"update the driver, or install kvlab[cu{_major(driver)}]"
        )
    if has_gpu and not any(packages.get(name) for name in ("cupy-cuda12x", "cupy-cuda13x", "cupy")):
        problems.append(
            "there is a GPU and no CuPy: pip install 'kvlab[cu12]' or 'kvlab[cu13]', as torch's CUDA"
        )
    return problems


def _major(version: str) -> int:
    return int(version.partition(".")[0])


def _cuda_versions() -> dict[str, str | None]:
    """Return the CUDA versions of the driver, NVRTC, its headers and torch, without importing torch."""
    driver = device.driver_cuda_version()
    return {
        "driver": None if driver is None else f"{driver[0]}.{driver[1]}",
        "nvrtc": _nvrtc_version(),
        "headers": _headers_version(),
        "torch": _torch_cuda_version(),
    }


def _nvrtc_version() -> str | None:
    try:
        from cuda.bindings import nvrtc

        _, major, minor = nvrtc.nvrtcVersion()
    except (ImportError, RuntimeError):  # RuntimeError: the bindings are installed, the library is not
        return None
    return f"{major}.{minor}"


def _headers_version() -> str | None:
    try:
        from cuda.pathfinder import find_nvidia_header_directory
    except ImportError:
        return None
    folder = find_nvidia_header_directory("cudart")
    header = Path(folder or "") / "cuda.h"
    match = re.search(rb"#define CUDA_VERSION (\d+)", header.read_bytes()) if header.is_file() else None
    return f"{int(match[1]) // 1000}.{int(match[1]) % 1000 // 10}" if match else None


def _torch_cuda_version() -> str | None:
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    version_file = Path(spec.origin).with_name("version.py")
    match = re.search(r"^cuda\b[^=]*= '([\d.]+)'", version_file.read_text(encoding="utf-8"), re.MULTILINE)
    return match[1] if match else None

"""`kvlab benchmark`: the cases, and one record of a run.

A case checks every result before it times it, and states its figures beside a baseline that ran at the
same moment (`kvlab.lab.benchmark.baseline`).
"""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from typing import Any

from kvlab import environment
from kvlab.device import cpu
from kvlab.lab import targets
from kvlab.lab.benchmark.baseline import Options
from kvlab.lab.results import provenance

__all__ = ["CASES", "cases_of", "run"]


CASES: dict[str, dict[str, str]] = {
    "packing": {"cpu": "packing:benchmark_packing", "cuda": "device:packing_on_device"},
    "codec": {"cpu": "codec:benchmark_codec", "cuda": "device:codec_on_device"},
    "allocator": {"cpu": "allocator:benchmark_allocator"},
    "decode": {"cpu": "decode:benchmark_decode", "cuda": "decode_cuda:benchmark_decode"},
    "attention": dict.fromkeys(("cpu", "cuda"), "attention:benchmark_attention"),
    "cache": dict.fromkeys(("cpu", "cuda"), "cache:benchmark_cache"),
    "engine": dict.fromkeys(("cpu", "cuda"), "engine:benchmark_engine"),
    "grouped": dict.fromkeys(("cpu", "cuda"), "grouped:benchmark_grouped"),
}
"""Each case: by device the function that takes `Options` and returns rows, in a module with a ``NOTE``."""

_TARGETS = {
    "flash_attention": ("attention",),
    "packed": ("decode", "codec", "cache"),
    "ternary": ("packing",),
}


def cases_of(target: str) -> tuple[str, ...]:
    """Return the cases that a word names: a case itself, a part of the library, or all of them.

    Examples
    --------
    >>> cases_of("decode"), cases_of("ternary")
    (('decode',), ('packing',))
    """
    if target == "all":
        return tuple(CASES)
    if target not in _TARGETS:
        _check_case(target)
    return _TARGETS.get(target, (target,))


def _check_case(case: str) -> None:
    if case not in CASES:
        parts = ", ".join(_TARGETS)
        raise ValueError(
            f"case={case!r} is unknown; known are {', '.join(CASES)}, and for several of them {parts}, all"
        )


def run(case: str, options: Options) -> dict[str, Any]:
    """Measure one case.

    ``KVLAB_TINY=1`` shrinks arrays to 1 MiB, contexts to 128 tokens, instances to 64 pages and repeats to 1:
    for tests, not for figures.

    The result has ``case``, ``provenance``, ``rows`` and ``note``. Options that are out of range are a
    ValueError, a device on which the case does not run a NotImplementedError, a wrong result a RuntimeError.
    """
    _check_case(case)
    for name in ("size", "threads", "repeats"):
        if getattr(options, name) < 1:
            raise ValueError(f"{name}={getattr(options, name)} must be at least 1")
    if options.device == "cpu" and options.threads > cpu().threads:
        raise ValueError(f"threads={options.threads}: this process may use {cpu().threads} at most")
    if options.device not in CASES[case]:
        supported = " and ".join(CASES[case])
        raise NotImplementedError(f"device={options.device!r}: the case {case} runs on {supported}")
    if options.device == "cuda":
        targets.machine("cuda")
    if targets.is_tiny():
        size = min(options.size, 2**20)
        options = replace(options, size=size, repeats=1, contexts="128", seqlens="256", tiny=True)
    name, _, function = CASES[case][options.device].partition(":")
    module = import_module(f"kvlab.lab.benchmark.{name}")
    rows = getattr(module, function)(options)
    source = provenance(**vars(options))
    if options.device == "cuda":
        source |= {name: environment.report()[name] for name in ("gpus", "cuda")}
    return {"case": case, "provenance": source, "rows": rows, "note": module.NOTE}

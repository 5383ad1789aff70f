"""`kvlab benchmark`: the cases, and one record of a run.

A case checks every result before it times it, and states its figures beside a baseline that ran at the
same moment (`kvlab.lab.benchmark.baseline`).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from kvlab import environment
from kvlab.device import cpu
from kvlab.lab import targets
from kvlab.lab.benchmark.baseline import Options
from kvlab.lab.results import Row, provenance
from kvlab.sizes import parse_size

__all__ = ["CASES", "DEVICES", "cases_of", "run"]

_TINY_SIZE, _TINY_CONTEXT, _TINY_PAGES = 2**20, 128, 64


@dataclass(frozen=True)
class Measured:
    """What a case gives: rows, and a note to print below their table."""

    rows: list[Row]
    note: str = ""


def _packing(options: Options) -> Measured:
    if options.device == "cuda":
        from kvlab.lab.benchmark import device

        return Measured(device.packing_on_device(options), device.NOTE)
    from kvlab.lab.benchmark import packing as module

    return Measured(module.benchmark_packing(options), module.NOTE)


def _codec(options: Options) -> Measured:
    if options.device == "cuda":
        from kvlab.lab.benchmark import device

        return Measured(device.codec_on_device(options), device.NOTE)
    from kvlab.lab.benchmark import codec as module

    return Measured(module.benchmark_codec(options), module.NOTE)


def _allocator(options: Options) -> Measured:
    from kvlab.lab.benchmark import allocator as module

    pages = _TINY_PAGES if _tiny() else module.PAGES
    return Measured(module.benchmark_allocator(pages=pages, repeats=options.repeats), module.NOTE)


def _decode(options: Options) -> Measured:
    if options.device == "cuda":
        from kvlab.lab.benchmark import decode_cuda

        rows = decode_cuda.benchmark_decode(
            contexts=(_TINY_CONTEXT,) if _tiny() else decode_cuda.CONTEXTS, repeats=options.repeats
        )
        return Measured(rows, decode_cuda.NOTE)
    from kvlab.lab.benchmark import decode as module

    contexts = (_TINY_CONTEXT,) if _tiny() else module.CONTEXTS
    rows = module.benchmark_decode(contexts=contexts, repeats=options.repeats, threads=options.threads)
    return Measured(rows, module.NOTE)


def _cache(options: Options) -> Measured:
    from kvlab.lab.benchmark import cache as module

    baselines = tuple(module.BASELINES) if options.baseline == "all" else (options.baseline,)
    contexts = [parse_size(word, "contexts") for word in options.contexts.split(",")]
    layers = 2 if _tiny() else module.NUM_LAYERS
    rows = module.benchmark_cache(
        baselines,
        [_TINY_CONTEXT] if _tiny() else contexts,
        repeats=options.repeats,
        device=options.device,
        num_layers=layers,
    )
    return Measured(rows, module.NOTE)


def _attention(options: Options) -> Measured:
    from kvlab.lab.benchmark import attention as module

    cases = module.release_cases(options.device) if options.release else module.CASES
    cases = module.TINY_CASES if _tiny() else cases
    return Measured(module.benchmark_attention(cases, options), module.NOTE)


def _engine(options: Options) -> Measured:
    from kvlab.lab.benchmark import engine as module

    cases = module.TINY if _tiny() else module.CASES[options.device]
    tokens = 3 if _tiny() else 200 if options.device == "cuda" else 32
    return Measured(module.benchmark_engine(cases, device=options.device, tokens=tokens), module.NOTE)


def _grouped(options: Options) -> Measured:
    from kvlab.lab.benchmark import grouped as module

    options = replace(options, seqlens="256") if _tiny() else options
    return Measured(module.benchmark_grouped(options), module.NOTE)


def _tiny() -> bool:
    return os.environ.get("KVLAB_TINY") == "1"


CASES: dict[str, Callable[[Options], Measured]] = {
    "packing": _packing,
    "codec": _codec,
    "allocator": _allocator,
    "decode": _decode,
    "attention": _attention,
    "cache": _cache,
    "engine": _engine,
    "grouped": _grouped,
}
"""Each case and the function that measures it."""

DEVICES = {"allocator": ("cpu",)} | dict.fromkeys(
    ("packing", "codec", "decode", "attention", "cache", "engine", "grouped"), ("cpu", "cuda")
)
"""Where each case runs."""

_TARGETS = {
    "flash_attention": ("attention",),
    "packed": ("decode", "codec", "cache"),
    "ternary": ("packing",),
}


def cases_of(target: str) -> tuple[str, ...]:
    """Return the cases that a word names: a case itself, a part of the library, or all of them.

    Raises
    ------
    ValueError
        If it names none.

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

    Parameters
    ----------
    case : str
        A name in `CASES`.
    options : Options

    Returns
    -------
    dict
        ``case``, ``provenance``, ``rows`` and ``note``.

    Raises
    ------
    ValueError
        If the case is unknown, or size, threads or repeats are not positive, or threads are too many.
    NotImplementedError
        If the case does not run on that device, or there is no GPU that can be used.
    RuntimeError
        If a result is wrong.
    """
    _check_case(case)
    for name in ("size", "threads", "repeats"):
        if getattr(options, name) < 1:
            raise ValueError(f"{name}={getattr(options, name)} must be at least 1")
    if options.device == "cpu" and options.threads > cpu().threads:
        raise ValueError(f"threads={options.threads}: this process may use {cpu().threads} at most")
    if options.device not in DEVICES[case]:
        supported = " and ".join(DEVICES[case])
        raise NotImplementedError(f"device={options.device!r}: the case {case} runs on {supported}")
    if options.device == "cuda":
        targets.machine("cuda")
    if _tiny():
        options = replace(options, size=min(options.size, _TINY_SIZE), repeats=1)
    measured = CASES[case](options)
    source = provenance(**vars(options))
    if options.device == "cuda":
        source |= {name: environment.report()[name] for name in ("gpus", "cuda")}
    return {
        "case": case,
        "provenance": source,
        "rows": measured.rows,
        "note": measured.note,
    }

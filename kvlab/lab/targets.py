"""Targets and devices of the commands `test`, `benchmark`, `profile` and `validate`.

A target is a part of the library. Each command works on the CPU parts of a target everywhere, and on its GPU
parts where there is a GPU that can be used; where not, it says why and goes on, unless the GPU was asked for.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

from kvlab import device
from kvlab.sizes import format_size

__all__ = ["DEVICES", "PARTS", "TARGETS", "Machine", "is_tiny", "machine", "resolve"]

ROOT = Path(__file__).parents[2]
DEVICES = ("auto", "cpu", "cuda")

TARGETS = ("attention", "packed", "ternary")
"""Parts of the library; `all` is every one of them, `flash_attention` another word for attention."""

PARTS = ("grouped", "engine")
"""Further words of `kvlab test` and `kvlab profile`: a part of attention, and the engine."""


@dataclass(frozen=True)
class Machine:
    """What a command runs on: `devices`, and for each that it leaves out the reason."""

    devices: tuple[str, ...]
    skipped: dict[str, str] = field(default_factory=dict)


def is_tiny() -> bool:
    """Whether ``KVLAB_TINY=1`` shrinks every job, for tests."""
    return os.environ.get("KVLAB_TINY") == "1"


def resolve(target: str, more: tuple[str, ...] = ()) -> tuple[str, ...]:
    """Return the parts that a target names; `more` are those that a command has beside `TARGETS`.

    Examples
    --------
    >>> resolve("flash_attention"), resolve("all")
    (('attention',), ('attention', 'packed', 'ternary'))
    """
    if target == "all":
        return TARGETS
    target = "attention" if target == "flash_attention" else target
    known = (*TARGETS, *more)
    if target not in known:
        raise ValueError(f"target={target!r} is unknown; known are flash_attention, {', '.join(known)}, all")
    return (target,)


def machine(wanted: str, min_vram: float = 0.0) -> Machine:
    """Decide where to run.

    It is `wanted`: ``"cpu"``, ``"cuda"``, or ``"auto"``: the CPU, and a GPU if there is one with `min_vram`
    GiB. If ``"cuda"`` is wanted and no GPU can be used, a NotImplementedError says why.

    Examples
    --------
    >>> machine("cpu").devices
    ('cpu',)
    """
    if wanted not in DEVICES:
        raise ValueError(f"device={wanted!r} is unknown; known are {', '.join(DEVICES)}")
    if not min_vram >= 0:
        raise ValueError(f"min_vram={min_vram} must be a number of GiB, at least 0")
    if wanted == "cpu":
        return Machine(("cpu",), {"cuda": "--device cpu"})
    reason = _no_gpu_because(min_vram)
    if wanted == "cuda":
        if reason is not None:
            raise NotImplementedError(f"device='cuda': {reason}; --device cpu runs what needs no GPU")
        return Machine(("cuda",), {"cpu": "--device cuda"})
    return Machine(("cpu", "cuda")) if reason is None else Machine(("cpu",), {"cuda": reason})


def _no_gpu_because(min_vram: float) -> str | None:
    if not device.gpus():
        return device.gpus_missing_because()
    gpu = device.gpus()[0]
    if gpu.memory_total < min_vram * 2**30:
        return f"{gpu.name} has {format_size(gpu.memory_total)}, --min-vram asks for {min_vram:g} GiB"
    try:
        import torch
    except ImportError:
        return "torch is not installed: pip install 'kvlab[hf]'"
    return None if torch.cuda.is_available() else "torch sees no GPU: install it with CUDA libraries"

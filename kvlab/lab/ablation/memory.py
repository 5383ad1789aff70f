"""Memory that ablation cases take, and the refusal of those that do not fit: for plans and runs alike.

`kvlab sweep plan`, `kvlab ablate` and every evaluation of a sweep ask the same function, so a run
starts what a plan has accepted, unless available memory has changed in between.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvlab.device import gpus, memory_available
from kvlab.errors import OutOfMemory
from kvlab.lab.ablation.grid import CHUNK, MODELS, AblationCase
from kvlab.sizes import format_size

__all__ = ["Group", "gpu_nbytes", "nbytes", "refuse_too_large"]

_MODEL_BYTES = {"smollm2": 3 << 29, "tiny": 300 << 20, None: 300 << 20}
_GPU_MODEL_BYTES = {"smollm2": 2 << 30, "tiny": 1 << 30, None: 1 << 30}
_GPU_LIBRARIES = 1 << 29
"""Weights and libraries: on a CPU, on a GPU, and what those of a GPU take of the CPU's memory."""
_FILLING_NBYTES, _CHUNKS = 94 << 10, 4.5
"""Pages that a layer and KV head of a cache is filling; chunks of predictions (docs/performance/sweep.md)."""

Group = Sequence[AblationCase]
"""Cases that are read together: they differ in budget, ladder and packing alone."""


def refuse_too_large(group: Group) -> None:
    """Refuse cases, read together, that need more memory than is available here or than the GPU has.

    Examples
    --------
    >>> refuse_too_large([AblationCase(0.5, "4,8", 1 << 26, model=None)])
    Traceback (most recent call last):
        ...
    kvlab.errors.OutOfMemory: b0.5_bits4_8_ctx67108864_packed needs about ... of memory and ...
    """
    _refuse(group, nbytes, memory_available(), "memory")
    if group[0].device == "cuda" and gpus():
        _refuse(group, gpu_nbytes, min(gpu.memory_total for gpu in gpus()), "GPU memory")


def _refuse(group: Group, needed: Callable[[Group], int], available: int, kind: str) -> None:
    if needed(group) > available:
        others = f" with {len(group) - 1} more read beside it" if len(group) > 1 else ""
        raise OutOfMemory(
            f"{group[0].name} needs about {format_size(needed(group))} of {kind}{others} and "
            f"{format_size(available)} are available; take a shorter context or fewer layers"
        )


def nbytes(group: Group) -> int:
    """Bytes of a process on the CPU: the model; what is read, or a row of each cache; one code a byte."""
    like = group[0]
    fp16 = like.geometry.fp16_nbytes(like.context_length)
    if like.device == "cpu":
        held = _read_nbytes(group)
    else:
        held = int(fp16 * sum(case.budget for case in group)) + _synthetic_nbytes(like) + _GPU_LIBRARIES
    return _MODEL_BYTES[like.model] + held + fp16 // 2


def gpu_nbytes(group: Group) -> int:
    """Bytes of a process on its GPU; 0 for cases of the CPU."""
    like = group[0]
    if like.device == "cpu":
        return 0
    fp16 = like.geometry.fp16_nbytes(like.context_length)
    return _GPU_MODEL_BYTES[like.model] + _read_nbytes(group) + fp16 // 2


def _read_nbytes(group: Group) -> int:
    """Of all texts that are read at once: float32 keys and values, packed caches, predictions of a chunk."""
    like = group[0]
    fp16 = like.geometry.fp16_nbytes(like.context_length)
    packed = fp16 * sum(case.budget for case in group)
    packed += len(group) * like.geometry.num_layers * like.geometry.num_kv_heads * _FILLING_NBYTES
    if like.model is None:
        return int(packed) + _synthetic_nbytes(like)
    predictions = _CHUNKS * 4 * CHUNK * MODELS[like.model].vocabulary
    return int(like.texts_at_once * (2 * fp16 + packed + predictions))


def _synthetic_nbytes(case: AblationCase) -> int:
    """Float32 keys and values of a layer, and as many queries as its heads take."""
    if case.model is not None:
        return 0
    shape = case.geometry
    return 4 * case.context_length * shape.head_dim * (2 * shape.num_kv_heads + shape.num_heads)

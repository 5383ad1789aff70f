"""Options of a `kvlab.engine.Decoder`, checked against the sizes of its model before any weight is read."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from kvlab.arguments import check_device, check_names, choice, whole_number
from kvlab.device import gpus, gpus_missing_because
from kvlab.engine.geometry import Geometry
from kvlab.engine.gpu import PLANS
from kvlab.sizes import parse_budget

__all__ = ["MAX_ROWS", "Options", "cache_budget_named", "check_max_seqlen", "check_options"]

MAX_ROWS = 16
_USUAL_SEQLEN = 4096
_OPTIONS = ("batch", "max_seqlen", "device", "plan", "cache_budget")
_CACHE_OPTIONS = ("bits", "residual", "sink", "recent", "floor", "importance", "allocator", "realloc_every",
                  "ema_decay")  # fmt: skip


@dataclass(frozen=True)
class Options:
    """What `check_options` has found right."""

    batch: int
    max_seqlen: int
    device: str
    index: int  # of the GPU
    plan: str


def check_options(
    geometry: Geometry,
    *,
    batch: int = 1,
    max_seqlen: int | None = None,
    device: str | None = None,
    plan: str = "graph",
    cache_budget: float | int | str | None = None,
    **cache_options: Any,
) -> Options:
    """Check the options of a `Decoder`; errors and defaults are as there.

    Whether a budget holds `max_seqlen` tokens is the cache's to say.
    """
    check_names(cache_options, (*_OPTIONS, *_CACHE_OPTIONS), "Decoder")
    if cache_budget is None and cache_options:
        name, value = next(iter(cache_options.items()))
        raise ValueError(
            f"{name}={value!r} is of a packed cache, and without cache_budget there is none: give "
            f"cache_budget=0.3, or leave {name} out"
        )
    rows = whole_number(batch, "batch")
    if not 1 <= rows <= MAX_ROWS:
        raise ValueError(
            f"batch={batch}: a decoder has 1 to {MAX_ROWS} rows; decode more of them {MAX_ROWS} at a time"
        )
    check_device(device)
    device = device or "cpu"
    index = int(device.partition(":")[2] or 0)
    if device != "cpu":
        _check_gpu(device, index)
    plan = choice(plan, "plan", PLANS)
    if plan != "graph" and (device == "cpu" or cache_budget is not None):
        raise NotImplementedError(
            f"plan={plan!r}: the CPU and packed caches have the plan 'graph' alone; leave plan out, or "
            "take device='cuda' and no cache_budget"
        )
    with cache_budget_named():
        parse_budget(cache_budget)
    return Options(rows, check_max_seqlen(max_seqlen, geometry), device, index, plan)


def check_max_seqlen(max_seqlen: int | None, geometry: Geometry) -> int:
    """Return the tokens that a row may have; None: what is usual."""
    longest = geometry.max_positions
    if max_seqlen is None:
        return min(longest, _USUAL_SEQLEN)
    tokens = whole_number(max_seqlen, "max_seqlen")
    if not 1 <= tokens <= longest:
        raise ValueError(
            f"max_seqlen={max_seqlen}: a row of this model has 1 to {longest} tokens (max_position_embeddings"
            f", or its sliding window); take max_seqlen={longest} or less, or a model for longer texts"
        )
    return tokens


def _check_gpu(device: str, index: int) -> None:
    if reason := gpus_missing_because():
        raise NotImplementedError(
            f"device={device!r}: {reason}; device='cpu' needs no GPU, and 'kvlab env' says what is here"
        )
    if index >= (count := len(gpus())):
        raise ValueError(
            f"device={device!r}: this process sees {count} GPUs, 'cuda:0' to 'cuda:{count - 1}'; take one of "
            "them, or let CUDA_VISIBLE_DEVICES name more"
        )


@contextmanager
def cache_budget_named() -> Iterator[None]:
    """Let errors of a cache call its budget as a `Decoder` does."""
    try:
        yield
    except (TypeError, ValueError) as error:
        error.args = (str(error).replace("budget=", "cache_budget=", 1), *error.args[1:])
        raise

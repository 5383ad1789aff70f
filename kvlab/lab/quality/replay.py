"""Read the pages of a GPU cache on a CPU as well, to compare results and speed on equal pages.

A copy of the model on the CPU continues from a copy of the cache that holds the same pages.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence
from typing import Any

from kvlab.errors import needs_extra
from kvlab.lab.quality.measure import Case

with needs_extra("hf", "kvlab.lab.quality.replay"):
    import torch
    from transformers import PreTrainedModel

    from kvlab.integrations.transformers import KVLabCache

__all__ = ["on_cpu", "speeds"]


def on_cpu(case: Case, cache: KVLabCache) -> KVLabCache:
    """Return a cache for a model on the CPU that holds the pages of another one of the same case."""
    packed, copied = cache.packed, _packed(case)
    if packed is None:
        raise ValueError(f"the cache of {case.name!r} is empty: let a model read with it first")
    copied.hold(packed.to_cpu())
    return copied


def _packed(case: Case) -> KVLabCache:
    cache = case.make()
    if not isinstance(cache, KVLabCache):
        raise ValueError(f"{case.name!r} must make a KVLabCache, not a {type(cache).__name__}")
    return cache


def speeds(
    model: PreTrainedModel, tokens: torch.Tensor, case: Case, chunk: int, lengths: Sequence[int]
) -> dict[int, tuple[float, float]]:
    """How fast a model reads a chunk behind so many tokens, on its device and on the CPU.

    Lengths are multiples of `chunk` and below the number of tokens, (rows, tokens). By length there are the
    tokens a second on the model's device, a GPU, and on the CPU, the better of two chunks each. A model on
    the CPU is compared with itself.
    """
    host: Any = copy.deepcopy(model)
    host.to("cpu")
    found: dict[int, tuple[float, float]] = {}
    cache = _packed(case)
    with torch.inference_mode():
        for begin in range(0, max(lengths), chunk):
            model(tokens[:, begin : begin + chunk].to(model.device), past_key_values=cache, logits_to_keep=1)
            if begin + chunk in lengths:
                part, times = tokens[:, begin + chunk : begin + 2 * chunk], []
                copies = [(host, on_cpu(case, cache)) for _ in range(2)]
                for reader, held in copies:
                    times.append(_seconds(reader, part, held))
                own = [_seconds(model, part, cache)]
                cache.crop(-part.shape[1])
                own.append(_seconds(model, part, cache))
                cache.crop(-part.shape[1])
                found[begin + chunk] = part.numel() / min(own), part.numel() / min(times)
    return found


def _seconds(model: PreTrainedModel, part: torch.Tensor, cache: KVLabCache) -> float:
    part = part.to(model.device)
    if part.is_cuda:
        torch.cuda.synchronize()
    start = time.perf_counter()
    logits = model(part, past_key_values=cache, logits_to_keep=1).logits
    if logits.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - start

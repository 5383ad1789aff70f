"""Divergence of a cache from full precision, token by token, under a schedule of calls.

All caches and a dense one advance together, call by call. Every scored token is kept, because the mean over
a window hides the last quarter, the median and the worst tokens. Bytes are read at the first and at the last
scored token, so a budget that still grew while tokens were scored is seen.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kvlab.errors import needs_extra
from kvlab.lab.quality.measure import Case, full_precision, held_bytes
from kvlab.lab.quality.plan import Schedule
from kvlab.lab.quality.scores import mean_and_error
from kvlab.lab.quality.text import Windows

with needs_extra("hf", "kvlab.lab.quality.divergence"):
    import torch
    from transformers import Cache, PreTrainedModel

    from kvlab.integrations.cache_bytes import tensors
    from kvlab.integrations.transformers import KVLabCache

__all__ = ["Divergence", "bits_per_element", "diverge", "floor", "token_divergence", "unused_part"]

BLOCK = 32
"""Neighbouring tokens are not independent: standard errors come from means of so many."""


@dataclass(slots=True)
class Divergence:
    """What reading windows through one cache cost."""

    name: str
    kind: str
    bits: tuple[float, float] = (0.0, 0.0)
    """Of an element of K and V at the first and at the last scored token, everything counted."""
    unused: float = 0.0  # part of the budget that is left behind the last token; 0 without a budget
    kl: list[list[float]] = field(default_factory=list)
    """KL(full precision || cache) of every scored token of every window."""
    agreement: list[list[float]] = field(default_factory=list)
    """Whether the most probable token is the same, of every scored token of every window."""

    def summary(self) -> dict[str, float]:
        """Mean with its standard error, last quarter, median, 99.9 % and agreement.

        Examples
        --------
        >>> kl, same = [[0.0] * 96 + [1.0] * 32], [[1.0] * 128]
        >>> found = Divergence("u4", "uniform", (4.3, 4.3), kl=kl, agreement=same)
        >>> summary = found.summary()
        >>> summary["kl"], summary["kl_last_quarter"], summary["kl_median"], summary["kl_99.9"]
        (0.25, 1.0, 0.0, 1.0)
        """
        tokens = np.asarray(self.kl)
        block = min(BLOCK, tokens.shape[1])
        whole = tokens[:, : tokens.shape[1] // block * block].reshape(len(tokens), -1, block)
        _, error = mean_and_error(whole.mean(-1).tolist())
        return {
            "bits_first": self.bits[0],
            "bits_last": self.bits[1],
            "unused": self.unused,
            "kl": float(tokens.mean()),
            "kl_error": error,
            "kl_last_quarter": float(tokens[:, -max(1, tokens.shape[1] // 4) :].mean()),
            "kl_median": float(np.median(tokens)),
            "kl_99.9": float(np.quantile(tokens, 0.999)),
            "top1_agreement": float(np.mean(self.agreement)),
        }


def diverge(
    model: PreTrainedModel,
    windows: Windows,
    cases: Sequence[Case],
    schedule: Schedule,
    *,
    progress: Callable[[str], None] = lambda name: None,
) -> list[Divergence]:
    """Read windows through every cache and through a dense one, window after window.

    The model has an attention function that reads the caches of all cases ("kvlab_packed"), and windows have
    `schedule.length` tokens or more. `progress` is told the name of a case after each window. The results
    stand in the order of the cases. A budget that does not hold a window is a BudgetError.
    """
    if windows.tokens.shape[1] < schedule.length:
        raise ValueError(f"windows have {windows.tokens.shape[1]} tokens; {schedule} needs {schedule.length}")
    found = [Divergence(case.name, case.kind) for case in cases]
    sizes = np.zeros((len(cases), 3))
    with torch.inference_mode():
        for row in windows.tokens:
            tokens = torch.from_numpy(row[None, : schedule.length]).to(model.device)
            sizes += _read_window(model, tokens, cases, schedule, found)
            for case in cases:
                progress(case.name)
    for divergence, (first, last, unused) in zip(found, sizes / len(windows.tokens), strict=True):
        divergence.bits, divergence.unused = (float(first), float(last)), float(unused)
    return found


def _read_window(
    model: PreTrainedModel,
    tokens: torch.Tensor,
    cases: Sequence[Case],
    schedule: Schedule,
    found: list[Divergence],
) -> NDArray[np.float64]:
    """Add the tokens of a window to what was found; return bits of each cache, first and last, and what is
    left of its budget."""
    dense = full_precision(model.config).make()
    caches = [case.make() for case in cases]
    bits = np.zeros((len(cases), 3))
    kl: list[list[torch.Tensor]] = [[] for _ in cases]
    same: list[list[torch.Tensor]] = [[] for _ in cases]
    for begin, end in schedule.calls():
        scored = begin >= schedule.prefill
        options = {"use_cache": True, "logits_to_keep": 0 if scored else 1}
        truth = model(tokens[:, begin:end], past_key_values=dense, **options).logits
        for number, cache in enumerate(caches):
            logits = model(tokens[:, begin:end], past_key_values=cache, **options).logits
            if not scored:
                continue
            new_kl, new_same = token_divergence(truth[0], logits[0])
            kl[number].append(new_kl)
            same[number].append(new_same)
            if begin == schedule.prefill or end == schedule.length:
                at = int(end == schedule.length)
                bits[number, at] = bits_per_element(cache, dense)
    for number, divergence in enumerate(found):
        divergence.kl.append(torch.cat(kl[number]).tolist())
        divergence.agreement.append(torch.cat(same[number]).tolist())
    if schedule.scored <= schedule.chunk:  # one call: the first and the last at once
        bits[:, 0] = bits[:, 1]
    bits[:, 2] = [unused_part(cache) for cache in caches]
    return bits


def token_divergence(truth: torch.Tensor, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """KL(truth || found) of every token, and whether the most probable token is the same.

    Both arguments are logits, (tokens, vocabulary).
    """
    log_p, log_q = truth.float().log_softmax(-1), logits.float().log_softmax(-1)
    same = (log_p.argmax(-1) == log_q.argmax(-1)).float()
    return (log_p.exp() * (log_p - log_q)).sum(-1), same


def bits_per_element(cache: Cache, dense: Cache) -> float:
    """Bits of all that a cache holds, for each element of K and V that a dense cache of the same text has."""
    elements = sum(tensor.numel() for layer in dense.layers for tensor in tensors(vars(layer)))
    return 8 * held_bytes(cache) / elements


def unused_part(cache: Cache) -> float:
    """Part of a budget that a cache does not take; 0 without one."""
    packed = cache.packed if isinstance(cache, KVLabCache) else None
    limit = None if packed is None else packed.budget_nbytes
    return 0.0 if packed is None or not limit else 1 - packed.nbytes / limit


def floor(model: PreTrainedModel, windows: Windows, schedule: Schedule) -> Divergence:
    """What the model's own arithmetic costs: a dense cache whose prompt comes in parts, against one of these.

    A divergence near it cannot be told from none. In float32 it is about 1e-9, in bfloat16 about .001.
    Parameters as for `diverge`.
    """
    found = Divergence("floor of the dtype", "floor", (16.0, 16.0))
    other = Schedule(schedule.prefill, 7, schedule.scored, schedule.chunk)
    with torch.inference_mode():
        for row in windows.tokens:
            tokens = torch.from_numpy(row[None, : schedule.length]).to(model.device)
            truth, logits = (_dense_logits(model, tokens, calls) for calls in (schedule, other))
            kl, same = token_divergence(truth, logits)
            found.kl.append(kl.tolist())
            found.agreement.append(same.tolist())
    return found


def _dense_logits(model: PreTrainedModel, tokens: torch.Tensor, schedule: Schedule) -> torch.Tensor:
    cache, parts = full_precision(model.config).make(), []
    for begin, end in schedule.calls():
        logits = model(tokens[:, begin:end], past_key_values=cache, use_cache=True, logits_to_keep=0).logits
        if begin >= schedule.prefill:
            parts.append(logits[0])
    return torch.cat(parts)

"""Groups of cases that share a reading: what one worker of a sweep takes at a time.

Packed and unpacked pages of one allocation come from one reading, and cases of one context and ladder are
read together, so that full precision is read once for all their budgets (kvlab.lab.ablation.quality). The
more workers there are, the smaller the groups; a worker takes at least one group.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import replace

from kvlab.lab.ablation.grid import CHUNK, MODELS, AblationCase

__all__ = ["in_groups", "seconds"]

MAX_TOGETHER = 6
"""Caches that are read together; each takes its memory."""
SYNTHETIC_ELEMENTS_PER_S = 3e6
GPU_CHUNK_S, GPU_DENSE_CHUNK_S, GPU_ELEMENTS_PER_S = 0.037 / 30, 0.018 / 30, 1.5e7
"""Seconds of a chunk are for each layer of a model."""


def in_groups(cases: Sequence[AblationCase], numbers: Sequence[int], min_groups: int = 1) -> list[list[int]]:
    """Return numbers of cases of a sweep in groups, the costliest first.

    There should be `min_groups` at least, so that as many workers have something to do.

    Examples
    --------
    >>> from kvlab.lab.ablation.grid import make_grid
    >>> cases = make_grid(AblationCase(0.2, "4,8", 512))
    >>> groups = in_groups(cases, range(180))
    >>> len(groups), groups[0], {cases[number].context_length for number in groups[0]}
    (15, [144, 145, 146, 147, 148, 149, 150, 151, 152, 153, 154, 155], {8192})
    >>> len(in_groups(cases, range(180), 32)), len(in_groups(cases, range(180), 1000))
    (32, 90)
    """
    evaluations: dict[AblationCase, list[int]] = {}
    for number in numbers:
        evaluations.setdefault(replace(cases[number], use_packing=True), []).append(number)
    pools: dict[AblationCase, list[AblationCase]] = {}
    for case in evaluations:
        # Synthetic data have no full precision to share.
        pools.setdefault(case if case.model is None else replace(case, budget=1.0), []).append(case)
    groups = [
        pool[first : first + MAX_TOGETHER]
        for pool in pools.values()
        for first in range(0, len(pool), MAX_TOGETHER)
    ]

    def priority(group: list[AblationCase]) -> tuple[float, int]:
        return -seconds(group), evaluations[group[0]][0]

    heap = [(priority(group), group) for group in groups if len(group) > 1]
    groups = [group for group in groups if len(group) == 1]
    heapq.heapify(heap)
    while heap and len(heap) + len(groups) < min_groups:
        _, large = heapq.heappop(heap)
        for half in (large[: len(large) // 2], large[len(large) // 2 :]):
            if len(half) == 1:
                groups.append(half)
            else:
                heapq.heappush(heap, (priority(half), half))
    groups += [group for _, group in heap]
    groups.sort(key=priority)
    return [[number for case in group for number in evaluations[case]] for group in groups]


def seconds(group: Sequence[AblationCase]) -> float:
    """About how long one process takes to fill the caches of cases that are read together.

    Times are for two processors as the demo was measured on: an evaluation takes so many tokens a second and
    cache as the model says (`MODELS`), synthetic data 3 million elements of K a second. On a GPU the host
    decides: a chunk of 64 tokens takes it so long for each layer through a packed cache, however many windows
    are read at once.
    """
    like = group[0]
    on_gpu = like.device == "cuda"
    if like.model is None:
        speed = GPU_ELEMENTS_PER_S if on_gpu else SYNTHETIC_ELEMENTS_PER_S
        return len(group) * like.geometry.fp16_nbytes(like.context_length) / 4 / speed
    if on_gpu:
        chunks = -(-like.texts // like.texts_at_once) * like.context_length / CHUNK
        return chunks * like.geometry.num_layers * (GPU_DENSE_CHUNK_S + len(group) * GPU_CHUNK_S)
    return (1 + len(group)) * like.context_length * like.texts / MODELS[like.model].tokens_per_s

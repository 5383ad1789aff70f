"""Launcher of the planner on a CPU: what `kvlab.ops.cuda.plan` is for a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvlab.ops.cpu.layer import HostLayer, array_at
from kvlab.ops.layer_state import UNIT
from kvlab.ops.plan import Ladder, PlanShape, choose_optimum, first_seen, hulls_of, reach_of
from kvlab.pages import TOKENS_PER_PAGE
from kvlab.threads import run_parallel

__all__ = ["Workspace", "chunks_of", "launch_plan", "levels_of"]

Floats = NDArray[np.float32]


@dataclass
class Workspace:
    """Moves of both phases and page copies that the last plan has decided, by layer."""

    shape: PlanShape
    layers: int
    max_new_pages: int
    max_dropped: int
    moves: list[Any] = field(default_factory=list)
    copies: list[Any] = field(default_factory=list)
    nbytes: int = 0

    def move_lists(self, phase: int) -> tuple[Workspace, int]:
        """What `write_tokens` and `copy_pages` take."""
        return self, phase

    def max_groups(self, phase: int) -> int:
        """Most destination pages of a layer in a phase."""
        return self.max_dropped * TOKENS_PER_PAGE if phase else self.max_new_pages


def launch_plan(
    layers: Sequence[HostLayer], workspace: Workspace, ladder: Ladder, *, sink: int, recent: int,
    lookahead: int, fixed_nbytes: int, by_position: bool = False, cropped: bool = False, window: int = 0,
    floor: int = 0, rewind: int = 0, allocator: str = "greedy", codes: int = 0, valid: int = 0,
    positions: int = 0, num_new: int = 0, first_position: int = 0,
) -> None:  # fmt: skip
    """Plan layers side by side, always as if `cropped`; arguments as of `kvlab.ops.cuda.plan.launch_plan`."""
    from kvlab.numba_kernels.cpu.cache_groups import NewTokens, Rules
    from kvlab.numba_kernels.cpu.cache_plan import choose_levels, count_tokens, finish_plan

    batch, heads, _ = layers[0].shape
    mask = array_at(valid, (batch, num_new), "bool") if valid else np.ones((batch, num_new), bool)
    at, levels = layers[0].positions(positions, num_new, first_position), levels_of(ladder)
    workspace.moves, workspace.copies = [None] * len(layers), [None] * len(layers)
    waiting = list(range(len(layers)))

    def plan() -> None:
        while waiting:
            i = waiting.pop()
            layer = layers[i]
            seqlen = first_position + num_new if num_new else layer.seqlen
            new = NewTokens(array_at(codes, (batch * heads, num_new), "uint8"), mask, at)
            rules = Rules(
                heads, int(layer.evicts), layer.slab // UNIT, workspace.shape.segments, seqlen, sink, recent,
                lookahead, by_position, fixed_nbytes, workspace.max_new_pages, window, floor,
                first_seen(seqlen, reach_of(layer.sliding_window, rewind)),
            )  # fmt: skip
            tables, status = layer.planned, 0
            groups, weights, bytes_left = count_tokens(tables, levels, rules, new)
            if allocator == "dp":
                chunks = chunks_of(groups, weights, batch)
                groups.chosen[:], status = choose_optimum(ladder, rules.evicts, window, *chunks, bytes_left)
            else:
                status = choose_levels(levels, rules, groups, weights, bytes_left, allocator == "uniform")
            *lists, copies, _, _, _ = finish_plan(tables, rules, new, groups, status)
            workspace.moves[i], workspace.copies[i] = lists, copies

    run_parallel(plan, alone=len(layers) == 1)


def chunks_of(groups: Any, weights: Floats, batch: int) -> tuple[NDArray[np.int64], Floats]:
    """Chunks of every class, (batch, groups, classes), and the weights of all, in that order."""
    first, n = groups.chunk.ravel(), groups.chunks.ravel()
    at = np.arange(n.sum()) + np.repeat(first - (np.cumsum(n) - n), n)
    shape = batch, len(groups.chunks) // max(batch, 1), groups.chunks.shape[1]
    return groups.chunks.reshape(shape), weights[at]


@lru_cache(maxsize=64)
def levels_of(ladder: Ladder) -> Any:
    """A ladder as the planner's kernels take it."""
    from kvlab.numba_kernels.cpu.cache_groups import Levels

    hulls = hulls_of(ladder)
    levels, edges = (hulls[name].astype(np.int64) for name in ("level", "edges"))
    return Levels(np.array(ladder.cost, np.int64), np.ascontiguousarray(hulls["rate"]), levels, edges)

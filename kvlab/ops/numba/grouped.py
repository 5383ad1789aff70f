"""Attention of groups of queries on a GPU through Numba: a call for each group.

The kernels are for reading; what the groups of a call share is shown by the kernels of CUDA C++.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kvlab.arrays import ArrayT
from kvlab.ops.cuda.grouped import separately
from kvlab.ops.numba.attention import attend

if TYPE_CHECKING:
    from kvlab.ops.attention import Scores
    from kvlab.ops.grouped import Groups

__all__ = ["attend_separately"]


def attend_separately(
    q_groups: Sequence[ArrayT], k: Any, v: Any, groups: Groups, scores: Scores, *_: Any
) -> tuple[list[ArrayT], list[ArrayT]]:
    """Launcher of backend "numba"; arguments and results as `kvlab.ops.cpu.grouped.attend`."""
    results = [
        attend(q, k, v, sequences, scores)
        for q, sequences in zip(q_groups, separately(q_groups, groups), strict=True)
    ]
    return [out for out, _ in results], [lse for _, lse in results]

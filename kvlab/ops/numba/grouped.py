"""Attention of groups of queries on a GPU through Numba, and gradients: a call for each group.

These kernels are for reading; what groups share is shown by the kernels of CUDA C++.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kvlab.ops.cuda.grouped_separate import attend_backward_with, attend_with

if TYPE_CHECKING:
    from kvlab.ops.grouped import GroupedArrays, GroupedCall
    from kvlab.ops.grouped_backward import Results

__all__ = ["attend_backward", "attend_separately"]


def attend_separately(
    call: GroupedCall, arrays: GroupedArrays, addresses: Sequence[int]
) -> tuple[list[Any], list[Any]]:
    """Launcher of backend "numba": outs and lses, lists with one array a group."""
    return attend_with("numba", call, arrays, addresses)


def attend_backward(
    call: GroupedCall,
    arrays: GroupedArrays,
    addresses: Sequence[int],
    results: Results,
    deterministic: bool,
    float32_dk_dv: bool,
) -> tuple[list[Any], Any, Any]:
    """Launcher of backend "numba": dq of each group, dk and dv."""
    return attend_backward_with("numba", call, arrays, addresses, results, deterministic, float32_dk_dv)

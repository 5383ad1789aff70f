"""Gradients of attention of groups of queries on Hopper: one list of tiles of keys, with rows of all groups.

The three launches of ``attention_backward.py``, and before them the one that makes the list. A tile of keys
goes through the rows of one group after the other, those of the group that sees most keys first, so dk and dv
of all groups are summed in registers, and K and V are read once. What these kernels do not take is computed
by separate calls.

The launches can be made one by one (``query_gradients.py``).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from threading import Lock
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from kvlab.jit.launch import PreparedLaunch, PreparedLaunches
from kvlab.jit.structs import ADDRESS, TENSOR, Struct, addresses_of, words_of
from kvlab.ops.array_kinds import Kind, allocator, splitter, stream_of, view_of
from kvlab.ops.attention_arguments import (
    MAP_WORDS,
    TensorMaps,
    can_be_mapped,
    contiguous_strides,
    encoder_of,
    fields_of,
    is_aligned,
    is_capped,
    strides_of,
)
from kvlab.ops.attention_call import MAX_GROUPS
from kvlab.ops.cuda.attention_backward import (
    FIELDS,
    PREPOST_ROWS,
    PREPOST_THREADS,
    Plan,
    has_long_steps,
    plan_of,
    tiles_of,
)
from kvlab.ops.cuda.attention_backward_split import CLUSTER, divide, num_sections, steps_of
from kvlab.ops.cuda.grouped_separate import attend_backward as attend_separately
from kvlab.ops.cuda.grouped_separate import check_lengths, check_separate
from kvlab.ops.cuda.tile_list import ListBuilder, TileLists, Tiling
from kvlab.ops.device_arrays import multiprocessors
from kvlab.ops.grouped_backward import names_of_results

if TYPE_CHECKING:
    from kvlab.ops.grouped import GroupedArrays, GroupedCall
    from kvlab.ops.grouped_backward import Results
    from kvlab.views import CudaView

__all__ = ["FEW_GROUPS", "ListedCall", "attend_backward", "listed_call"]

_GROUP = Struct(
    dout=TENSOR, out=TENSOR, lse=ADDRESS, lse_head="q", cu_q=ADDRESS, first_row="q", workspace_row="q"
)
FEW_GROUPS = 2
"""Most groups of kernels with long steps."""
_CALLS = {
    max_groups: Struct(**FIELDS, groups=(_GROUP, max_groups), num_groups="i", sequences="i")
    for max_groups in (FEW_GROUPS, MAX_GROUPS)
}
_CALL = _CALLS[MAX_GROUPS]
_NEW_WORDS = [
    _CALL.word(name)
    for name in (
        "dq",
        "dk",
        "dv",
        "lse_log2",
        "dpsum",
        "dq_accum",
        "dq_semaphore",
        "cu_q",
        "cu_k",
        "list",
        "semaphore",
    )
]


def attend_backward(
    call: GroupedCall,
    arrays: GroupedArrays,
    addresses: Sequence[int],
    results: Results,
    deterministic: bool,
    float32_dk_dv: bool,
) -> tuple[list[Any], Any, Any]:
    """Launcher of backend "cuda" for Hopper: dq of each group, dk and dv."""
    listed = listed_call(call, results.kinds, deterministic, float32_dk_dv)
    if listed is None:
        return attend_separately(call, arrays, addresses, results, deterministic, float32_dk_dv)
    return listed(addresses, results.addresses)


@lru_cache(maxsize=1024)
def listed_call(
    call: GroupedCall,
    kinds: tuple[Kind, ...],
    deterministic: bool,
    wide: bool,
    dq_kind: Kind | None = None,
    name: Any = None,
    long_steps: bool | None = None,
) -> ListedCall | None:
    """Prepare a call, of a sum into dq if its kind is given; None if it is to be computed separately."""
    count, names = call.groups, names_of_results(call.groups)
    present = [g for g in range(count) if call.rows[g]]
    of_results = [view_of(kind, name) for kind, name in zip(kinds, names, strict=True)]
    mapped = [call.views[g] for g in present] + [*call.views[count : count + 2]]
    if not present or mapped[-1].shape[0] == 0:
        return None
    mapped += [of_results[g] for g in present]
    aligned = [*mapped, *(of_results[count + g] for g in present)]
    suits = all(map(is_aligned, aligned)) and all(map(can_be_mapped, mapped)) and not is_capped(call.scores)
    dq = None if dq_kind is None else view_of(dq_kind, "dq")
    if suits and (dq is None or is_aligned(dq)):
        return ListedCall(call, of_results, present, deterministic, wide, dq, name, long_steps)
    check_separate(call)
    return None


class _Views(NamedTuple):
    """Arrays of a call: lists have one entry for each group that has rows."""

    q: list[CudaView]
    k: CudaView
    v: CudaView
    dout: list[CudaView]
    out: list[CudaView]
    lse: list[CudaView]


def _views_of(call: GroupedCall, results: list[Any], present: list[int]) -> _Views:
    count = call.groups
    dout, out, lse = ([results[at + g] for g in present] for at in (0, count, 2 * count))
    q, (k, v) = [call.views[g] for g in present], call.views[count : count + 2]
    return _Views(q, k, v, dout, out, lse)


class ListedCall:
    """All calls of one kind, of arrays that tensor copies can read.

    Parameters
    ----------
    call : GroupedCall
    results : list of CudaView
        douts, outs and lses of all groups.
    present : list of int
        The groups that have rows.
    deterministic, wide : bool
        Whether dq has the same bits every time, and dk and dv are float32.
    dq : CudaView, optional
        Where dq of all groups is to be written; in a new array if it is not given.
    name : hashable, optional
        Of the values of its lengths, which are the same in every call then.
    long_steps : bool, optional
        Whether steps have more rows, which decides where dq lies in the workspace; chosen if it is not given.
    """

    def __init__(
        self,
        call: GroupedCall,
        results: list[Any],
        present: list[int],
        deterministic: bool,
        wide: bool,
        dq: CudaView | None,
        name: Any,
        long_steps: bool | None,
    ) -> None:
        check_lengths(call)
        x = _views_of(call, results, present)
        longest = [min(call.longest[0], call.rows[g]) for g in present]
        fields = fields_of(x.q[0], x.k, (call.sizes["batch"], *call.longest), call.scores)
        tiling = tiles_of(fields["dim"], x.k.dtype, True, x.k.device)
        cluster_split = self._divide(call, fields, longest, tiling[:2])
        if long_steps is None:
            lengths = call.sizes["batch"], sum(longest), call.longest[1]
            long_steps = cluster_split == 1 and len(present) <= FEW_GROUPS
            long_steps = long_steps and has_long_steps(fields["dim"], False, deterministic, lengths, fields)
        if long_steps:
            cluster_split = 1
        self.long_steps, self._max_groups = long_steps, FEW_GROUPS if long_steps else MAX_GROUPS
        plan = plan_of(
            fields["dim"], x.k.dtype, False, True, True, cluster_split, deterministic, x.k.device,
            self._max_groups, long_steps,
        )  # fmt: skip
        # The workspace has the rows of one group after the other.
        aligned = plan.aligned_rows
        in_workspace = [(call.rows[g] // aligned + call.sizes["batch"]) * aligned for g in present]
        all_rows = sum(in_workspace)
        self._reserve(call, x, plan, all_rows, deterministic, wide)
        fields |= self._strides(call, x, dq)
        fields |= {
            "groups": self._groups(call, x, present, in_workspace),
            "num_groups": len(present),
            "sequences": call.sizes["batch"],
            "rows": all_rows,
            "deterministic": deterministic,
            "float32_dk_dv": wide and x.k.dtype != "float32",
        }
        argument, of_call = self._argument(x, plan, fields)
        builder = self._list_builder(
            call, plan, fields, longest, tiling[1], cluster_split == 1, deterministic, len(present)
        )
        self._lists = TileLists(builder, name is None, call.kinds[0])
        blocks = builder.capacity * cluster_split
        if cluster_split == 1:
            blocks = min(blocks, max(1, multiprocessors(x.k.device) - call.sm_margin))
        aligned_rows = -(-call.longest[0] // aligned) * aligned
        grid = aligned_rows // PREPOST_ROWS, x.q[0].shape[1], len(present) * call.sizes["batch"]
        launches = (
            PreparedLaunch(plan.preprocess, grid, (PREPOST_THREADS,), of_call),
            PreparedLaunch(plan.main, (blocks,), (plan.threads,), argument, plan.shared_bytes),
            PreparedLaunch(plan.postprocess, grid, (PREPOST_THREADS,), of_call),
        )
        of_groups = self._find_addresses(call.groups, present)
        written = addresses_of(argument, self._maps.begins) + addresses_of(of_call, [*_NEW_WORDS, *of_groups])
        self._launch_all, *self._launch_one = (
            PreparedLaunches(some, written) for some in (launches, *([one] for one in launches))
        )

    def _reserve(
        self, call: GroupedCall, x: _Views, plan: Plan, all_rows: int, deterministic: bool, wide: bool
    ) -> None:
        """Prepare what makes new arrays: dq of all groups, dk, dv, and a workspace of so many rows."""
        kind, heads, dtype = call.kinds[0], x.q[0].shape[1], x.k.dtype
        num_rows, semaphores = heads * all_rows, heads * all_rows // 16 if deterministic else 0
        accum_nbytes = 4 * num_rows * plan.head_dim
        self._offsets = accum_nbytes, accum_nbytes + 4 * num_rows, 0, accum_nbytes + 8 * num_rows
        of_keys = "float32" if wide else dtype
        workspace = (num_rows * (plan.head_dim + 2) + semaphores,)
        dq = (sum(call.rows), *x.q[0].shape[1:]), dtype
        new = dq, (x.k.shape, of_keys), (x.v.shape, of_keys), (workspace, "float32")
        self._new = allocator(kind, *new)
        self._new_of_keys, self._new_workspace = allocator(kind, *new[1:3]), allocator(kind, new[3])
        self._split_dq = splitter(call.rows, 0, kind)
        self._stream, self._lock = stream_of(kind), Lock()

    def _strides(self, call: GroupedCall, x: _Views, dq: CudaView | None) -> dict[str, Any]:
        """Return strides of what a call has once; those of dout, out and lse are in its groups."""
        total = sum(call.rows), *x.q[0].shape[1:]
        return {
            "k": strides_of("k", x.k), "v": strides_of("v", x.v),
            "dq": contiguous_strides(total) if dq is None else strides_of("dq", dq),
            "dk": contiguous_strides(x.k.shape), "dv": contiguous_strides(x.v.shape),
            **dict.fromkeys(("dout", "out"), (0, 0, 0)), **dict.fromkeys(("lse_batch", "lse_head"), 0),
        }  # fmt: skip

    def _groups(
        self, call: GroupedCall, x: _Views, present: list[int], in_workspace: list[int]
    ) -> np.ndarray[Any, Any]:
        """Describe the groups: strides of results, first rows in arrays and in the workspace."""
        starts, first_rows = np.cumsum([0, *in_workspace]).tolist(), np.cumsum([0, *call.rows]).tolist()
        groups = np.zeros(self._max_groups, _GROUP.dtype)
        for i, (g, dout, out, lse) in enumerate(zip(present, x.dout, x.out, x.lse, strict=True)):
            groups[i]["dout"]["strides"] = strides_of(f"douts[{g}]", dout)
            groups[i]["out"]["strides"] = strides_of(f"outs[{g}]", out)
            groups[i]["lse_head"] = _head_stride(f"lses[{g}]", lse)
            groups[i]["first_row"], groups[i]["workspace_row"] = first_rows[g], starts[i]
        return groups

    def _argument(self, x: _Views, plan: Plan, fields: dict[str, Any]) -> tuple[Any, Any]:
        """Return the argument of the main kernel, tensor maps and the call, and that call alone."""
        max_groups, each = self._max_groups, range(len(x.q))
        first_word = MAP_WORDS * (2 * max_groups + 2)  # of q of each group, k, v, then dout of each
        argument = np.zeros(first_word + _CALLS[max_groups].size // 8, np.uint64)
        argument[first_word:] = _CALLS[max_groups].array(fields).view(np.uint64)
        of_q, of_dout = ([encoder_of(y, plan.box) for y in arrays] for arrays in (x.q, x.dout))
        self._maps = TensorMaps(
            words_of(argument), *of_q, encoder_of(x.k, plan.keys), encoder_of(x.v, plan.keys), *of_dout,
            indices=[*each, max_groups, max_groups + 1, *(max_groups + 2 + i for i in each)],
        )  # fmt: skip
        return argument, argument[first_word:]

    @staticmethod
    def _list_builder(
        call: GroupedCall,
        plan: Plan,
        fields: dict[str, Any],
        longest: list[int],
        block_n: int,
        persistent: bool,
        deterministic: bool,
        num_groups: int,
    ) -> ListBuilder:
        """Return what makes the list of tiles of keys, in sections if blocks are `persistent`."""
        k, sequences, longest_k = call.views[call.groups], call.sizes["batch"], call.longest[1]
        sections = 1
        if persistent:
            sections = num_sections(
                sequences * k.shape[1], -(-longest_k // block_n), fields["group"], plan.head_dim,
                multiprocessors(k.device), call.scores.right == 0, deterministic,
            )  # fmt: skip
        max_rows = sum(-(-rows // plan.box) * plan.box for rows in longest)
        return ListBuilder(
            Tiling(1, block_n, plan.box), (sequences, longest_k, max_rows), k.shape[0], k.shape[1], 1,
            (fields["right"], fields["left"]), 0, True, k.device, deterministic, sections, num_groups,
        )  # fmt: skip

    def _find_addresses(self, count: int, present: list[int]) -> list[int]:
        """Note which addresses of arrays a launch takes; return the words of those of groups in a call."""
        # Indices of addresses: of the call q, k, v; cu_seqlens, prefixes; of the results dout, out, lse.
        self._mapped = [*present, count, count + 1]
        self._douts = present
        self._cu_q, self._prefixes = [count + 2 + g for g in present], [2 * count + 2 + g for g in present]
        self._of_groups = [at + g for g in present for at in (0, count, 2 * count)]  # dout, out, lse
        words = [_CALL.word("groups") + i * (_GROUP.size // 8) for i in range(len(present))]
        of_results = [at + _GROUP.word(name) for at in words for name in ("dout", "out", "lse")]
        return of_results + [at + _GROUP.word("cu_q") for at in words]

    @staticmethod
    def _divide(
        call: GroupedCall, fields: dict[str, Any], longest: list[int], tiling: tuple[int, int]
    ) -> int:
        """Divide tiles of keys among blocks as if every prefix were as long as the longest sequence."""
        num_steps = [
            steps_of(rows, call.longest[1], fields["left"], fields["right"], fields["group"], *tiling)
            for rows in longest
        ]
        largest = 1 if call.sm_margin else CLUSTER  # blocks of clusters do not persist
        heads_kv, device = call.sizes["Hk"], call.views[0].device
        of_tile = [sum(x) for x in zip(*num_steps, strict=True)]
        return divide(of_tile, heads_kv, call.sizes["batch"], multiprocessors(device), 1, largest)

    def __call__(self, addresses: Sequence[int], results: Sequence[int]) -> tuple[list[Any], Any, Any]:
        """Launch on the current stream of the arrays' library, given the addresses of both."""
        (dq, dk, dv, _workspace), (dq_at, dk_at, dv_at, start) = self._new()
        self._launch(self._launch_all, addresses, results, (dq_at, dk_at, dv_at), start)
        # The workspace goes; what takes its memory comes after these launches on the stream.
        return self._split_dq(dq), dk, dv

    def new_workspace(self) -> tuple[Any, int]:
        """Return memory for a workspace, and its address."""
        (workspace,), (at,) = self._new_workspace()
        return workspace, at

    def around(
        self, which: int, addresses: Sequence[int], results: Sequence[int], dq: int, workspace: int
    ) -> None:
        """Make the launch before (0) or after (2) those that add to the workspace."""
        self._launch(self._launch_one[which], addresses, results, (dq, 0, 0), workspace)

    def add(self, addresses: Sequence[int], results: Sequence[int], workspace: int) -> tuple[Any, Any]:
        """Add to dq in the workspace; return dk and dv."""
        (dk, dv), (dk_at, dv_at) = self._new_of_keys()
        self._launch(self._launch_one[1], addresses, results, (0, dk_at, dv_at), workspace)
        return dk, dv

    def _launch(
        self,
        launch: PreparedLaunches,
        addresses: Sequence[int],
        results: Sequence[int],
        gradients: Sequence[int],
        workspace: int,
    ) -> None:
        stream = self._stream()
        cu_q = [addresses[index] for index in self._cu_q]
        prefixes = [addresses[index] for index in self._prefixes]
        mapped = [addresses[index] for index in self._mapped] + [results[index] for index in self._douts]
        at, semaphore = 0, 0
        with self._lock:
            if launch in (self._launch_all, self._launch_one[1]):
                bounds = addresses[-1], 0, *cu_q, *prefixes
                _kept, at, semaphore, _ = self._lists.get(bounds, stream)
            launch.run(
                stream, *self._maps.first_words(mapped), *gradients, *[workspace + x for x in self._offsets],
                cu_q[0], addresses[-1], at, semaphore, *[results[index] for index in self._of_groups], *cu_q,
            )  # fmt: skip


def _head_stride(name: str, lse: Any) -> int:
    if lse.shape[-1] > 1 and lse.strides[-1] != 1:
        raise NotImplementedError(
            f"{name} has strides {lse.strides}: its last axis must be contiguous on a GPU"
        )
    return int(lse.strides[0])

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
from typing import TYPE_CHECKING, Any

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
        count, rows, kind = call.groups, call.rows, call.kinds[0]
        q_groups, (k, v) = [call.views[g] for g in present], call.views[count : count + 2]
        douts, outs, lses = ([results[at + g] for g in present] for at in (0, count, 2 * count))
        sequences, device = call.sizes["batch"], k.device
        longest_q, longest_k = call.longest
        first, heads = q_groups[0], q_groups[0].shape[1]
        fields = fields_of(first, k, (sequences, longest_q, longest_k), call.scores)
        block_m, block_n, _ = tiles_of(fields["dim"], first.dtype, True, device)
        longest = [min(longest_q, rows[g]) for g in present]
        cluster_split = self._divide(call, fields, longest, (block_m, block_n))
        if long_steps is None:
            lengths = sequences, sum(longest), longest_k
            long_steps = cluster_split == 1 and len(present) <= FEW_GROUPS
            long_steps = long_steps and has_long_steps(fields["dim"], False, deterministic, lengths, fields)
        if long_steps:
            cluster_split = 1
        self.long_steps, max_groups = long_steps, FEW_GROUPS if long_steps else MAX_GROUPS
        plan = plan_of(
            fields["dim"], first.dtype, False, True, True, cluster_split, deterministic, device, max_groups,
            long_steps,
        )  # fmt: skip
        block_m = plan.box

        # The workspace has the rows of one group after the other.
        aligned = plan.aligned_rows
        in_workspace = [(rows[g] // aligned + sequences) * aligned for g in present]
        all_rows, total = sum(in_workspace), (sum(rows), heads, fields["dim"])
        starts, first_rows = np.cumsum([0, *in_workspace]).tolist(), np.cumsum([0, *rows]).tolist()
        self._split_dq = splitter(rows, 0, kind)
        num_rows, semaphores = heads * all_rows, heads * all_rows // 16 if deterministic else 0
        accum_nbytes = 4 * num_rows * plan.head_dim
        self._offsets = accum_nbytes, accum_nbytes + 4 * num_rows, 0, accum_nbytes + 8 * num_rows
        of_keys = "float32" if wide else first.dtype
        workspace = (num_rows * (plan.head_dim + 2) + semaphores,)
        new = (total, first.dtype), (k.shape, of_keys), (v.shape, of_keys), (workspace, "float32")
        self._new = allocator(kind, *new)
        self._new_of_keys, self._new_workspace = allocator(kind, *new[1:3]), allocator(kind, new[3])
        self._stream, self._lock = stream_of(kind), Lock()

        groups = np.zeros(max_groups, _GROUP.dtype)
        for i, (g, dout, out, lse) in enumerate(zip(present, douts, outs, lses, strict=True)):
            groups[i]["dout"]["strides"] = strides_of(f"douts[{g}]", dout)
            groups[i]["out"]["strides"] = strides_of(f"outs[{g}]", out)
            groups[i]["lse_head"] = _head_stride(f"lses[{g}]", lse)
            groups[i]["first_row"], groups[i]["workspace_row"] = first_rows[g], starts[i]
        fields |= {"k": strides_of("k", k), "v": strides_of("v", v)}
        of_dq = contiguous_strides(total) if dq is None else strides_of("dq", dq)
        fields |= {"dq": of_dq, "dk": contiguous_strides(k.shape), "dv": contiguous_strides(v.shape)}
        fields |= dict.fromkeys(("dout", "out"), (0, 0, 0)) | dict.fromkeys(("lse_batch", "lse_head"), 0)
        fields |= {
            "rows": all_rows,
            "deterministic": deterministic,
            "float32_dk_dv": wide and first.dtype != "float32",
        }
        fields |= {"groups": groups, "num_groups": len(present), "sequences": sequences}
        first_word = MAP_WORDS * (2 * max_groups + 2)  # of q of each group, k, v, then dout of each
        argument = np.zeros(first_word + _CALLS[max_groups].size // 8, np.uint64)
        argument[first_word:] = _CALLS[max_groups].array(fields).view(np.uint64)
        of_call = argument[first_word:]
        of_rows = [[encoder_of(x, plan.box) for x in arrays] for arrays in (q_groups, douts)]
        each = range(len(present))
        self._maps = TensorMaps(
            words_of(argument), *of_rows[0], encoder_of(k, plan.keys), encoder_of(v, plan.keys), *of_rows[1],
            indices=[*each, max_groups, max_groups + 1, *(max_groups + 2 + i for i in each)],
        )  # fmt: skip

        # Indices of addresses: of the call q, k, v; cu_seqlens, prefixes; of the results dout, out, lse.
        self._mapped = [*present, count, count + 1]
        self._douts = present
        self._cu_q, self._prefixes = [count + 2 + g for g in present], [2 * count + 2 + g for g in present]
        group_words = [_CALL.word("groups") + i * (_GROUP.size // 8) for i in each]
        self._of_groups = [at + g for g in present for at in (0, count, 2 * count)]  # dout, out, lse
        of_groups = [at + _GROUP.word(name) for at in group_words for name in ("dout", "out", "lse")]
        of_groups += [at + _GROUP.word("cu_q") for at in group_words]

        num_bh, of_pair = sequences * k.shape[1], -(-longest_k // block_n)
        causal, persistent = call.scores.right == 0, cluster_split == 1
        sections = 1
        if persistent:
            blocks, group = multiprocessors(device), fields["group"]
            sections = num_sections(num_bh, of_pair, group, plan.head_dim, blocks, causal, deterministic)
        max_rows = sum(-(-rows // block_m) * block_m for rows in longest)
        builder = ListBuilder(
            Tiling(1, block_n, block_m), (sequences, longest_k, max_rows), k.shape[0], k.shape[1], 1,
            (fields["right"], fields["left"]), 0, True, device, deterministic, sections, len(present),
        )  # fmt: skip
        self._lists = TileLists(builder, name is None, kind)
        blocks = builder.capacity * cluster_split
        if persistent:
            blocks = min(blocks, max(1, multiprocessors(device) - call.sm_margin))
        aligned_rows = -(-longest_q // aligned) * aligned
        around = (aligned_rows // PREPOST_ROWS, heads, len(present) * sequences), (PREPOST_THREADS,), of_call
        launches = (
            PreparedLaunch(plan.preprocess, *around),
            PreparedLaunch(plan.main, (blocks,), (plan.threads,), argument, plan.shared_bytes),
            PreparedLaunch(plan.postprocess, *around),
        )
        written = addresses_of(argument, self._maps.begins) + addresses_of(of_call, [*_NEW_WORDS, *of_groups])
        self._launch_all, *self._launch_one = (
            PreparedLaunches(some, written) for some in (launches, *([one] for one in launches))
        )

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

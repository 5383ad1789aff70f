"""The executor of caches on a GPU: memory of the caller's framework, and launches for one store.

The host's side of a cache decides what happens and has an executor carry it out. `kvlab.cache.cpu.CPU` has
the same methods for arrays of NumPy. What does not depend on a store (memory, copies, streams) is of the
executor; `kernels(store)` gives the launches for one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kvlab.new_arrays import empty, overwrite, to_device, to_host
from kvlab.ops.cuda import packed, plan, scores
from kvlab.ops.cuda import pages as kernels
from kvlab.ops.device_arrays import contiguous, copied
from kvlab.ops.layer_state import STATE
from kvlab.ops.plan import Ladder, PlanShape
from kvlab.pages import DevicePages, profile_names
from kvlab.views import CudaView, cuda_view, current_stream, pointer_of

if TYPE_CHECKING:
    from kvlab.cache.store import DeviceStore, RowMove
    from kvlab.ladder import Rung

__all__ = ["GPU", "GpuExecutor", "GpuKernels"]


class GpuKernels:
    """Launches for one store on a GPU; none waits for the device.

    Parameters
    ----------
    store : DeviceStore
    """

    def __init__(self, store: DeviceStore) -> None:
        self.store = store
        self.device = cuda_view(store.states, "states").device
        self._of_store = store.head_dim, store.stores[0].dtype, self.device

    def _states(self, first: int) -> int:
        return self.store.states_pointer + first * STATE.itemsize

    # ---- plans ---------------------------------------------------------------------------------------------

    def make_workspace(
        self, shape: PlanShape, layers: int, max_new_pages: int, max_dropped: int
    ) -> plan.Workspace:
        """Memory for plans; see `kvlab.ops.cuda.plan.make_workspace`."""
        return plan.make_workspace(self.store.like, shape, layers, max_new_pages, max_dropped)

    def launch_plan(
        self, first: int, layers: int, workspace: plan.Workspace, ladder: Ladder, stream: int,
        **rules: Any,
    ) -> None:  # fmt: skip
        """Plan layers of one ladder; rules as for `kvlab.ops.cuda.plan.launch_plan`."""
        states = self.store.states_pointer
        plan.launch_plan(states, first, layers, workspace, ladder, STATE.itemsize, stream, **rules)

    def write_tokens(self, first: int, layers: int, lists: int, groups: int, new: Any, stream: int) -> None:
        """Carry out the moves of a plan; see `kvlab.ops.cuda.pages.write_tokens`."""
        kernels.write_tokens(
            *self._of_store, self._states(first), lists, layers, groups, new, stream,
            profiles=profile_names(rung.bits_k for rung in self.store.stores[first].ladder),
        )  # fmt: skip

    def copy_pages(self, first: int, layers: int, lists: int, copies: int, stream: int) -> None:
        """Carry out the page copies of a plan."""
        kernels.copy_pages(*self._of_store, self._states(first), lists, layers, copies, stream)

    def freeze_means(
        self, layer: int, new: Any, addresses: Sequence[int], before: int, stream: int, *,
        lookahead: int, force: bool, queries: CudaView | None = None,
    ) -> None:  # fmt: skip
        """Take the means that are due; see `kvlab.ops.cuda.pages.freeze_means`."""
        factor = pointer_of(self.store.mean_factors) + 4 * self.store.head_dim * layer
        kernels.freeze_means(
            *self._of_store, self._states(layer), self.store.batch, new, addresses, before, factor, stream,
            lookahead=lookahead, force=force, queries=queries, in_blocks=self.store.stores[layer].in_blocks,
        )  # fmt: skip

    def refit_frames(self, layer: int, new: Any, queries: CudaView, stream: int) -> None:
        """Fit frames to the newest tokens; see `kvlab.ops.cuda.pages.refit_frames`."""
        num_bh, heads = self.store.num_bh, self.store.heads
        kernels.refit_frames(*self._of_store, self._states(layer), num_bh, heads, new, queries, stream)

    def crop_rows(self, end: int, stream: int) -> None:
        """Give all rows another length; see `kvlab.ops.cuda.pages.crop_rows`."""
        layers, batch = len(self.store.stores), self.store.batch
        kernels.crop_rows(*self._of_store, self._states(0), layers, batch, end, stream)

    def take_rows(self, move: RowMove, stream: int) -> None:
        """Let rows become others; takes its memory before anything changes."""
        store, layers, like = self.store, len(self.store.stores), self.store.like
        pages = store.num_bh * store.entries
        copied_rows = _copied_rows(move)
        numbers = to_device(np.concatenate([move.rows, move.origins, move.kept, copied_rows]), like)
        memory = empty((layers * (20 * pages + 4),), "uint8", like)
        rows, copies = pointer_of(numbers), pointer_of(memory)
        origins = rows + 4 * len(move.rows)
        kept = origins + 4 * len(move.origins)
        free_numbers = copies + 16 * pages * layers
        there, here = move.source.states_pointer, store.states_pointer
        addresses = [
            there, here, here if move.in_place else there, rows, origins, kept, free_numbers, copies,
            free_numbers + 4 * pages * layers, kept + 4 * len(move.kept),
        ]  # fmt: skip
        kernels.take_rows(
            *self._of_store, addresses, pages, len(copied_rows), layers, stream,
            in_place=move.in_place, in_blocks=any(one.in_blocks for one in store.stores),
        )  # fmt: skip

    # ---- steps ---------------------------------------------------------------------------------------------

    def append_call(self, layer: int, top: Rung, **options: Any) -> kernels.AppendCall:
        """A prepared append; options as of `kvlab.ops.cuda.pages.AppendCall`."""
        in_blocks = self.store.stores[layer].in_blocks
        return kernels.AppendCall(
            self.store.host_states[layer], top, *self._of_store, in_blocks=in_blocks, **options
        )

    def attend_call(self, q: Any, pages: DevicePages, workspace: Any, **options: Any) -> packed.AttendCall:
        """Prepared attention over the pages of a layer; options as of `kvlab.ops.cuda.packed.AttendCall`."""
        return packed.AttendCall(q, pages, workspace, **options)

    def attention_workspace(self, rows: int, semaphores: Any = None) -> packed.Workspace:
        """Memory of attention calls with so many query rows of a KV head."""
        store = self.store
        return packed.make_workspace(store.like, store.num_bh, rows, store.head_dim, semaphores)

    def max_query_tokens(self, group: int) -> int:
        """How many query tokens an attention call takes."""
        return packed.max_query_tokens(self.store.num_bh * self.store.entries, group, self.device)

    saved_quad_bytes = staticmethod(packed.saved_quad_bytes)

    def merge_rows(self, addresses: Sequence[int], shape: tuple[int, int, int], stream: int) -> None:
        """Merge attention over other keys into the first; see `kvlab.ops.cuda.pages.merge_rows`."""
        kernels.merge_rows(*self._of_store, addresses, shape, stream)

    # ---- importance ----------------------------------------------------------------------------------------

    def score_stored(self, first: int, saved: Any, lse: Any, **options: Any) -> None:
        """Update the importance of stored tokens; options as of `kvlab.ops.cuda.scores.score_stored`."""
        scores.score_stored(self._states(first), saved, lse, **options)

    score_new = staticmethod(scores.score_new)
    score_norms = staticmethod(scores.score_norms)


def _copied_rows(move: RowMove) -> NDArray[np.int32]:
    """`Rows.copied_rows` of pages/rows.cu: each row once, two neighbours that get the same pages together."""
    wanted, copied_rows, row = [*zip(move.rows.tolist(), move.origins.tolist(), strict=True)], [], 0
    while row < len(wanted):
        two = wanted[row : row + 1] == wanted[row + 1 : row + 2]
        copied_rows.append(2 * row + two)
        row += 1 + two
    return np.array(copied_rows, np.int32)


class GpuExecutor:
    """Memory and kernels of GPUs; arrays are those of torch or CuPy, without copies."""

    max_group = kernels.MAX_GROUP
    """Query heads of a KV head that an append can take."""
    kernels: Any = GpuKernels

    empty = staticmethod(empty)
    view, pointer, stream = staticmethod(cuda_view), staticmethod(pointer_of), staticmethod(current_stream)
    to_host, to_device, overwrite = staticmethod(to_host), staticmethod(to_device), staticmethod(overwrite)
    contiguous, copied = staticmethod(contiguous), staticmethod(copied)

    alignment = 4
    """Bytes that arrays begin at a multiple of."""

    def arena(self, nbytes: int, like: Any) -> Any:
        """Memory for pages."""
        return self.empty((nbytes,), "uint8", like)

    def copied_arenas(self, store: DeviceStore) -> Any:
        """A copy of all arenas as a whole: the device copies them while the host goes on."""
        return self.copied(store.memory_of_arenas)

    def as_input(self, x: Any, name: str, dtype: str, mask: Any = None) -> Any:
        """An argument as kernels take it: as it is."""
        return x

    def as_mask(self, valid: Any) -> Any:
        """What tokens are no padding, as kernels take it."""
        return valid

    def as_output(self, out: Any, q: Any) -> Any:
        """A result for the caller whose queries were `q`."""
        return out

    def check_layout(self, view: CudaView, name: str, dtype: str) -> None:
        """Refuse an argument of another dtype, or with strides that kernels do not take."""
        if view.dtype != dtype:
            raise TypeError(f"{name} has dtype {view.dtype}; on a GPU it must be that of the cache, {dtype}")
        a, b, c, last = view.strides
        if view.shape[1] and (last != 1 or a & 1 or b & 1 or c & 1):
            raise ValueError(
                f"{name} must be contiguous in its last axis and even in the others, got strides "
                f"{view.strides}; pass {name}.contiguous()"
            )

    def check_device(self, wanted: str | None, device: int) -> None:
        """Refuse a GPU that is not the cache's, or that the kernels do not run on."""
        if wanted not in ("cuda", f"cuda:{device}"):
            raise ValueError(f"the arrays are on cuda:{device}, the cache is on {wanted}")
        packed.check_capability(device)

    def input_dtype(self, dtype: str) -> str:
        """The dtype of new keys and values of a cache of this one."""
        return dtype

    def aligned(self, view: CudaView) -> bool:
        """Whether `score_new` can read the vectors of an array."""
        return scores.lies_in_units(view)

    def score_memory(self, shape: Sequence[int], like: Any) -> Any:
        """Memory for kept scores: `score_stored` asks for those of all pages before it knows which live."""
        scores = self.empty(shape, "uint8", like)
        scores[...] = 0
        return scores

    def fill_zero(self, array: Any) -> None:
        """Write zeros over an array."""
        array[...] = 0


GPU = GpuExecutor()

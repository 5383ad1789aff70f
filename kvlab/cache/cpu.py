"""The executor of caches in CPU memory: arrays of NumPy, and launches for one store.

It has the methods of `kvlab.cache.cuda.GPU`; its launchers are in `kvlab.ops.cpu`. What a plan decides is
`kvlab.reference.cache_plan` on both; same tokens and same importance give the same pages. A launch has ended
when it returns, so there are no streams.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kvlab.arrays import dtype_name, numpy_dtype
from kvlab.new_arrays import like_first
from kvlab.ops.cpu import pages, plan, scores
from kvlab.ops.cpu.layer import HostLayer
from kvlab.ops.cpu.packed import AttendCall, LseRest
from kvlab.ops.cpu.refit import refit_frames
from kvlab.ops.cpu.rows import copy_pages_to, take_rows
from kvlab.ops.layer_state import UNIT
from kvlab.ops.plan import Ladder, PlanShape
from kvlab.pages import QUAD, TOKENS_PER_PAGE, DevicePages
from kvlab.views import CudaView, meant_strides, to_numpy_view

if TYPE_CHECKING:
    from kvlab.cache.store import DeviceStore, RowMove

__all__ = ["CPU", "CpuExecutor", "CpuKernels", "host_layers"]

Floats = NDArray[np.float32]
_NOTHING = SimpleNamespace(partial=np.zeros(0), semaphores=np.zeros(0))
_MAPPED = 1 << 18  # bytes from which on memory for pages is mapped by itself


def host_layers(store: DeviceStore) -> list[HostLayer]:
    """The layers of a store in host memory."""
    return [
        HostLayer(
            {name: table[number] for name, table in store.tables.items()}, store.arenas[number],
            store.waiting[number], of.layouts, store.widest, of.dtype, store.slab[number],
            store.num_slabs[number], of.evicts, of.in_blocks, of.is_narrow, layer.sliding_window,
            store.mean_factors[number],
        )
        for number, (layer, of) in enumerate(zip(store.layers, store.stores, strict=True))
    ]  # fmt: skip


class CpuKernels:
    """Launches for one store in host memory; methods and arguments as those of `GpuKernels`.

    Parameters
    ----------
    store : DeviceStore
        Whose arrays are NumPy arrays.
    """

    def __init__(self, store: DeviceStore) -> None:
        self.store, self.layers, self._rest = store, host_layers(store), LseRest()

    # ---- plans ---------------------------------------------------------------------------------------------

    def make_workspace(
        self, shape: PlanShape, layers: int, max_new_pages: int, max_dropped: int
    ) -> plan.Workspace:
        """Where plans leave their moves."""
        return plan.Workspace(shape, layers, max_new_pages, max_dropped)

    def launch_plan(
        self, first: int, layers: int, workspace: plan.Workspace, ladder: Ladder, stream: int, **rules: Any
    ) -> None:
        """Plan layers of one ladder; rules as for `kvlab.ops.cuda.plan.launch_plan`."""
        plan.launch_plan(self.layers[first : first + layers], workspace, ladder, **rules)

    def write_tokens(
        self, first: int, layers: int, lists: tuple[plan.Workspace, int], groups: int, new: Any, stream: int
    ) -> None:
        """Carry out the moves of a plan."""
        workspace, phase = lists
        moves = [of_layer[phase] for of_layer in workspace.moves]
        pages.write_tokens(self.layers[first : first + layers], moves, new)

    def copy_pages(
        self, first: int, layers: int, lists: tuple[plan.Workspace, int], copies: int, stream: int
    ) -> None:
        """Carry out the page copies of a plan."""
        pages.copy_pages(self.layers[first : first + layers], lists[0].copies)

    def freeze_means(
        self, layer: int, new: Any, addresses: Sequence[int], before: int, stream: int, **options: Any
    ) -> None:
        """Take the frames that are due."""
        pages.freeze_means(self.layers[layer], new, addresses, before, **options)

    def refit_frames(self, layer: int, new: Any, queries: CudaView, stream: int) -> None:
        """Fit frames to the newest tokens."""
        refit_frames(self.layers[layer], new, queries)

    def crop_rows(self, end: int, stream: int) -> None:
        """Give all rows another length."""
        pages.crop_rows(self.layers, end)

    def take_rows(self, move: RowMove, stream: int) -> None:
        """Let rows become others."""
        for layer, source in zip(self.layers, host_layers(move.source), strict=True):
            take_rows(layer, source, move.rows, move.origins, move.in_place)

    # ---- steps ---------------------------------------------------------------------------------------------

    def append_call(
        self, layer: int, top: Any, *, num_new: int, group: int, **options: Any
    ) -> pages.AppendCall:
        """A prepared append."""
        return pages.AppendCall(self.layers[layer], rest=self._rest, **options)

    def attend_call(self, q: Any, pages: DevicePages, workspace: Any, **options: Any) -> AttendCall:
        """Prepared attention over the pages of a layer."""
        return AttendCall(pages, rest=self._rest, **options)

    def attention_workspace(self, rows: int, semaphores: Any = None) -> Any:
        """Nothing: `kvlab.packed_attention` takes its own memory."""
        return _NOTHING

    def max_query_tokens(self, group: int) -> int:
        """How many query tokens an attention call takes."""
        return 1 << 20

    @staticmethod
    def saved_quad_bytes(rows: int) -> int:
        """Bytes that the kept scores of a quad take for so many query rows of a KV head: float32."""
        return 4 * QUAD * TOKENS_PER_PAGE * rows

    def merge_rows(self, addresses: Sequence[int], shape: tuple[int, int, int], stream: int) -> None:
        """Merge attention over other keys into the first."""
        pages.merge_rows(self.store.head_dim, addresses, shape, self._rest)

    # ---- importance ----------------------------------------------------------------------------------------

    def score_stored(self, first: int, saved: Any, lse: Any, *, stream: int, **options: Any) -> None:
        """Update the importance of stored tokens."""
        numbers = range(first, first + len(saved))
        stored = [self.store.pages(number, waiting=True) for number in numbers]
        scores.score_stored([self.layers[number] for number in numbers], stored, saved, lse, **options)

    score_new = staticmethod(scores.score_new)
    score_norms = staticmethod(scores.score_norms)


def _check_range(x: Floats, name: str) -> None:
    """Refuse finite numbers that would become infinite in float16, the dtype of the cache."""
    limit = np.finfo(np.float16).max
    largest = np.abs(x, where=np.isfinite(x), out=np.zeros_like(x)).max(initial=0) if x.size else 0
    if largest > limit:
        raise ValueError(
            f"{name} reaches {largest:g}, which a cache of dtype 'float16' (up to {limit:g}) does not hold: "
            "make it with dtype='bfloat16' or 'float32'"
        )


class CpuExecutor:
    """Memory and kernels of the CPU: arrays of NumPy."""

    kernels: Any = CpuKernels
    max_group = 1 << 30
    """Query heads of a KV head that an append can take."""

    @staticmethod
    def empty(shape: Sequence[int], dtype: str, like: Any) -> Any:
        """An array that is not initialised."""
        return np.empty(tuple(shape), numpy_dtype(dtype))

    @staticmethod
    def view(x: Any, name: str) -> CudaView:
        """Address, shape and strides of an array."""
        # Without an element NumPy's strides are 0, those of other frameworks are not.
        like = x if x.size else np.empty([max(n, 1) for n in x.shape], x.dtype)
        strides = meant_strides(like.shape, tuple(step // x.itemsize for step in like.strides))
        return CudaView(x.ctypes.data, x.shape, strides, dtype_name(x), 0)

    @staticmethod
    def pointer(x: Any) -> int:
        """The address of an array."""
        return int(x.ctypes.data)

    @staticmethod
    def stream(x: Any) -> int:
        """There are no streams."""
        return 0

    to_host = copied = staticmethod(np.array)

    @staticmethod
    def to_device(host: Any, like: Any) -> Any:
        """A copy."""
        return np.array(host)

    @staticmethod
    def contiguous(x: Any, name: str) -> Any:
        """A contiguous array: itself, or a copy."""
        return np.ascontiguousarray(x)

    overwrite = staticmethod(np.copyto)

    alignment = 1
    """Bytes that arrays begin at a multiple of."""

    def arena(self, nbytes: int, like: Any) -> Any:
        """Memory for pages, full of zeros, of which none is taken before it is written."""
        if nbytes < _MAPPED:
            raw = np.zeros(nbytes + UNIT, np.uint8)
            start = -raw.ctypes.data % UNIT
            return raw[start : start + nbytes]
        try:
            mapped = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise MemoryError(f"no {nbytes} bytes for pages: {error}") from None
        if hasattr(mmap, "MADV_HUGEPAGE"):
            mapped.madvise(mmap.MADV_HUGEPAGE)
        return np.frombuffer(mapped, np.uint8)

    def copied_arenas(self, store: DeviceStore) -> Any:
        """A copy of the pages that are live; others take no memory."""
        memory = self.arena(int(store.memory_of_arenas.nbytes), store.like)
        for layer, arena in zip(host_layers(store), store.arenas_in(memory), strict=True):
            copy_pages_to(arena, layer)
        return memory

    def score_memory(self, shape: Sequence[int], like: Any) -> Any:
        """Memory for kept scores; of pages that are not live nothing is read."""
        return self.empty(shape, "uint8", like)

    def fill_zero(self, arena: Any) -> None:
        """Write zeros over memory for pages; what was mapped goes back to the system."""
        mapped = getattr(arena.base, "obj", None)
        if isinstance(mapped, mmap.mmap):
            mapped.madvise(mmap.MADV_DONTNEED)
        else:
            arena[...] = 0

    def as_input(self, x: Any, name: str, dtype: str, mask: Any = None) -> Any:
        """An argument as kernels take it: float32, of NumPy, contiguous in its last axis.

        New keys and values have the `dtype` of the cache, in which they must be finite.
        """
        kind = dtype_name(x, name)
        if kind not in ("float16", "bfloat16", "float32"):
            raise TypeError(f"{name} has dtype {kind}; float16, bfloat16 and float32 are supported")
        found = to_numpy_view(x, name).astype(np.float32, copy=False)
        if dtype == "float16" and kind != "float16":
            whole = mask is None or mask.shape != found.shape[:2]
            _check_range(found if whole else found[mask], name)
        strides = found.strides
        plain = found.ndim == 4 and strides[3] == 4 and min(strides) >= 0
        return found if plain else np.ascontiguousarray(found)

    def as_mask(self, valid: Any) -> Any:
        """What tokens are no padding, as kernels take it."""
        mask = to_numpy_view(valid, "valid")
        if mask.dtype != bool:
            raise TypeError(f"valid has dtype {mask.dtype}; it must be bool")
        return np.ascontiguousarray(mask)

    def as_output(self, out: Any, q: Any) -> Any:
        """A result for the caller whose queries were `q`."""
        return like_first(out.astype(numpy_dtype(dtype_name(q, "q")), copy=False), q)

    def check_layout(self, view: CudaView, name: str, dtype: str) -> None:
        """`as_input` has seen to that."""

    def check_device(self, wanted: str | None, device: int) -> None:
        """Any CPU will do."""

    def input_dtype(self, dtype: str) -> str:
        """The dtype of new keys and values of a cache of this one."""
        return "float32"

    def aligned(self, view: CudaView) -> bool:
        """Whether `score_new` can read the vectors of an array."""
        return True


CPU = CpuExecutor()

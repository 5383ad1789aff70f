"""Packed attention on a GPU: choose the specialisation of ``packed/packed_attention.cu`` and launch it.

One kernel does the whole call, whatever mixture of widths the pages have. It is specialised for properties
that a cache never changes: head dimension, dtype and the widths or profiles of its ladder; and for whether a
call has up to 4 query rows a KV head, whose codes are multiplied as 8-bit integers. Lengths and page tables
are read on the device, so a captured CUDA graph follows them. A call allocates its results and a workspace in
the caller's framework; callers who capture graphs or count microseconds make both once (`Workspace`,
`attend`).
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

import numpy as np

from kvlab.arrays import dtype_name, numpy_dtype
from kvlab.device import compute_capability
from kvlab.jit.launch import Kernel, PreparedLaunch, cuda_kernel
from kvlab.jit.structs import ADDRESS, Struct
from kvlab.new_arrays import empty, on_device_of
from kvlab.ops.device_arrays import dense_pointer, multiprocessors, shared_memory_per_block
from kvlab.ops.packed_gpu import MAX_RUNGS, allocate_and_attend
from kvlab.pages import QUAD, PageLayout, profile_names, width_number
from kvlab.views import CudaView, cuda_view, current_stream, pointer_of

if TYPE_CHECKING:
    from kvlab.ops.packed import Pages, Window

__all__ = [
    "SAVED_ROW_BYTES", "AttendCall", "Workspace", "attend", "check_capability", "make_workspace",
    "max_query_tokens", "saved_quad_bytes",
]  # fmt: skip

SAVED_ROW_BYTES = 64 + 4
"""Of a row of a quad, saved as bytes: a code for each slot, and what they are relative to."""

_ROWS = 8  # query rows of a sequence of the kernel: the columns of its matrix products
_INT8_ROWS, _INT8_WIDTHS, _INT8_HEAD_DIMS = 4, {2, 3, 4, 8}, (64, 80, 96, 128)  # of 8-bit integer products
_MERGE_ROWS, _ENOUGH_STAGES, _MAX_STAGES = 4, 3, 6
_SHIFT = 112  # how far a page may be from the place in its slot where it has room
_FLAG = {2: 1, 3: 2, 4: 4, 8: 8, 16: 16}
_INTEGERS = (
    "num_bh",
    "heads_kv",
    "entries",
    "num_rungs",
    "rows",
    "group",
    "saved",
    "slot_bytes",
    "stages",
    "merge_rows",
)
_TABLES = ("rung", "count", "index", "num_pages", "k_mean", "k_shift", "exponent")
_TABLES_OF_BLOCKS = ("k_order", "k_gain")  # which keys in blocks have besides
_RUNG = Struct(pool=ADDRESS, record="I", bits_k="H", bits_v="H")
_CALL = Struct(
    rungs=(_RUNG, MAX_RUNGS),
    **dict.fromkeys(_TABLES, ADDRESS),
    **dict.fromkeys(("q", "out", "lse", "partial", "semaphores", "scores"), ADDRESS),
    **dict.fromkeys(("q_batch", "q_position", "q_head"), "q"),
    **dict.fromkeys(_INTEGERS, "i"),
    scale="f", softcap="f", base=ADDRESS, first=ADDRESS, left="i",
    **dict.fromkeys(_TABLES_OF_BLOCKS, ADDRESS),
)  # fmt: skip

_GIVEN_AS = {
    "partial": "workspace", "semaphores": "workspace", "scores": "scores", "first": "first_position"
}  # fmt: skip
"""What the caller calls an array that `_CALL` points to, if it is none of `pages`."""

_Q, _STRIDES = _CALL.offset("q"), _CALL.offset("q_batch")
_POINTERS_OF_CALL, _STRIDES_OF_CALL = struct.Struct("3Q").pack_into, struct.Struct("3q").pack_into


@dataclass(frozen=True)
class Workspace:
    """Device memory that a call needs between its thread blocks; calls that overlap in time need one each.

    Attributes
    ----------
    partial : float32 array
        Parts of sequences that several thread blocks share.
    semaphores : int32 array
        How many blocks have delivered their part; zero between calls.
    """

    partial: Any
    semaphores: Any


def make_workspace(
    like: Any, num_bh: int, query_rows: int, head_dim: int, semaphores: Any = None
) -> Workspace:
    """Allocate the workspace of calls with so many (row, KV head) pairs and query rows (seqlen_q * group).

    `semaphores` may be those of another workspace, whose calls do not overlap in time with these.
    """
    sequences = num_bh * -(-query_rows // _ROWS)
    blocks = multiprocessors(cuda_view(like, "q").device)
    if semaphores is None or len(semaphores) < sequences:
        semaphores = empty((max(sequences, 1),), "int32", like)
        with on_device_of(semaphores):
            semaphores[...] = 0
    return Workspace(empty((blocks + sequences, _ROWS, head_dim + 2), "float32", like), semaphores)


def max_query_tokens(pages: int, group: int, device: int) -> int:
    """Return how many query tokens a call may have, whose work the kernel counts with 32 bits.

    `pages` are the entries of the page tables of all (row, KV head) pairs.
    """
    blocks = ((1 << 32) - 1) // max(pages // QUAD * multiprocessors(device), 1)  # of _ROWS query rows
    return blocks * _ROWS // group


def saved_quad_bytes(rows: int) -> int:
    """Return the bytes that the scores of so many query rows of a KV head take for each quad, saved as bytes.

    `kvlab.reference.packed.scores_of_bytes` reads them.
    """
    return -(-SAVED_ROW_BYTES * rows // 16) * 16


def check_capability(device: int) -> tuple[int, int]:
    """Return the compute capability of a device, or refuse one that lacks bulk copies."""
    capability = compute_capability(device)
    if capability < (9, 0):
        raise NotImplementedError(
            f"packed_attention copies pages in bulk, which takes compute capability 9.0; device {device} has "
            f"{capability[0]}.{capability[1]}: keep the cache on the CPU"
        )
    return capability


@dataclass(frozen=True)
class _Plan:
    kernel: Kernel
    grid: int
    warps: int
    slot_bytes: int
    stages: int
    merge_rows: int
    shared_bytes: int


def item_bytes(layout: PageLayout) -> int:
    """Return the most shared memory that an item of the ring takes: a quad, K or V, or half of K or V."""
    if sum(layout.blocks) + len(layout.blocks) * layout.bits_v <= 32:
        return QUAD * (layout.positions + _SHIFT)
    sides = (layout.bits_k, layout.v_codes), (layout.bits_v, layout.positions - layout.v_codes)
    return max(QUAD // (2 if bits == 16 else 1) * (size + _SHIFT) for bits, size in sides)


@lru_cache(maxsize=256)
def _plan(
    layouts: tuple[PageLayout, ...],
    dtype: str,
    rows: int,
    softcap: bool,
    windowed: bool,
    saved: int,
    device: int,
    warps: int = 0,
) -> _Plan:
    head_dim = layouts[0].head_dim
    of_keys, of_values = {w for x in layouts for w in x.blocks if w}, {layout.bits_v for layout in layouts}
    widths = [sum(_FLAG[w] for w in found) for found in (of_keys, of_values)]
    profiles = profile_names(layout.bits_k for layout in layouts)
    capability = check_capability(device)
    # 12 warps leave 168 registers a thread, too few for larger heads, for windows, for scores of 8 rows
    # (saved as float32, or at all beside profiles), and for all widths beyond sm_90. Raw pages take few
    # instructions, and the ring is deeper with 8.
    raw = all(bits == _FLAG[16] for bits in widths)
    int8_mma = 0
    if of_keys | of_values <= _INT8_WIDTHS and head_dim in _INT8_HEAD_DIMS:
        int8_mma = 1 if rows <= _INT8_ROWS else 2
    crowded = head_dim > 128 or windowed or (int8_mma == 2 and (saved == 4 or (profiles and saved > 0)))
    warps = warps or (12 if capability[0] == 9 and not raw and not crowded else 8)
    macros: dict[str, int | str] = {
        "HEAD_DIM": head_dim, "BF16": int(dtype == "bfloat16"), "WIDTHS_K": widths[0], "WIDTHS_V": widths[1],
        "WARPS": warps, "SOFTCAP": int(softcap), "WINDOW": int(windowed), "SAVED_SCORE_BYTES": saved,
        "INT8_MMA": int8_mma,
    } | ({"PROFILES": profiles} if profiles else {})  # fmt: skip
    kernel = cuda_kernel("packed/packed_attention", None, tuple(macros.items()), device)
    slot, row, merged = max(map(item_bytes, layouts)), 4 * warps * (head_dim + 2), min(rows, _MERGE_ROWS)
    free = shared_memory_per_block(device) - kernel.resources.shared_bytes
    stages, merge_rows = max(
        ((min(_MAX_STAGES, (free - row * count) // (warps * slot)), count) for count in range(1, merged + 1)),
        key=lambda chosen: (min(chosen[0], _ENOUGH_STAGES), chosen[1]),
    )
    if stages < 1:
        raise NotImplementedError(
            f"packed_attention needs {row + warps * slot} bytes of shared memory a block for head_dim "
            f"{head_dim} and these widths; device {device} has {free}. Use narrower pages"
        )
    shared_bytes = warps * stages * slot + row * merge_rows
    return _Plan(kernel, multiprocessors(device), warps, slot, stages, merge_rows, shared_bytes)


def attend(
    q: Any,
    pages: Pages,
    out: Any,
    lse: Any,
    workspace: Workspace,
    *,
    scale: float,
    softcap: float = 0.0,
    scores: Any = None,
    window: Window | None = None,
    warps: int = 0,
) -> None:
    """Attend all tokens of `pages`; allocates nothing, waits for nothing, launches one kernel.

    Parameters
    ----------
    q : array, (batch, seqlen_q, num_heads_q, head_dim)
        float16 or bfloat16, of the dtype of the cache; the last axis contiguous.
    pages : Pages
        On the device of `q`; `k_mean` is float16, `k_shift` uint8, `exponent` int8, and where K has profiles
        `k_order` uint8, `k_gain` float32. Tables contiguous.
    out : array, shape and dtype of `q`, contiguous
    lse : float32 array, (batch, num_heads_q, seqlen_q), contiguous
    workspace : Workspace
        From `make_workspace` for at least this many sequences.
    scale, softcap : float
        As in `kvlab.ops.packed.packed_attention`.
    scores : array, optional
        Receives the scores of the last rows; contiguous. float32 (batch, num_heads_kv, entries / 4,
        keep_scores * group, 64), or what `kvlab.ops.cuda.scores.score_stored` reads: uint8 (batch,
        num_heads_kv, entries / 4, saved_quad_bytes(keep_scores * group)).
    window : Window, optional
        How far queries see back; its positions are read on the device, contiguous. `pages` has `base` then.
    warps : int
        Warps of a thread block; 0 chooses.
    """
    options = {"scale": scale, "softcap": softcap, "scores": scores, "window": window, "warps": warps}
    call = AttendCall(q, pages, workspace, **options)
    to, lse_to = dense_pointer(cuda_view(out, "out"), "out"), dense_pointer(cuda_view(lse, "lse"), "lse")
    call(cuda_view(q, "q"), to, lse_to, current_stream(q))


class AttendCall:
    """`attend` with all arguments but queries and results laid down, for those who call it again and again.

    Parameters
    ----------
    q : array
        As the queries of the calls will be: shape, dtype and device.
    pages, workspace, scale, softcap, scores, window, warps
        As for `attend`.
    """

    def __init__(
        self,
        q: Any,
        pages: Pages,
        workspace: Workspace,
        *,
        scale: float,
        softcap: float = 0.0,
        scores: Any = None,
        window: Window | None = None,
        warps: int = 0,
    ) -> None:
        batch, seqlen_q, heads, _ = q.shape
        kv_heads, entries = pages.rung.shape[1:]
        group, device = heads // kv_heads, cuda_view(q, "q").device
        max_tokens = max_query_tokens(batch * kv_heads * entries, group, device)
        if seqlen_q > max_tokens:
            raise NotImplementedError(
                f"q has {seqlen_q} tokens; with room for {batch * kv_heads * entries} pages in the page "
                f"table a call takes {max_tokens}: attend fewer query tokens or rows of the batch at a time"
            )
        rows, saved_bytes, saved = seqlen_q * group, 0, 0
        if scores is not None:
            saved_bytes = numpy_dtype(dtype_name(scores, "scores")).itemsize
            saved = scores.shape[3] // (SAVED_ROW_BYTES if saved_bytes == 1 else 1)
        traits = dtype_name(q), min(rows, _ROWS), softcap > 0, window is not None, saved_bytes, device, warps
        plan = _plan(tuple(pages.layouts), *traits)
        call = np.zeros(1, _CALL.dtype)
        _write_rungs(call["rungs"][0], pages)
        for name, array in _arrays_of(pages, workspace, scores, window).items():
            given_as = _GIVEN_AS.get(name, f"pages.{name}")
            call[name] = dense_pointer(cuda_view(array, given_as), given_as)
        if window:
            call["left"] = window.left
        sizes = (batch * kv_heads, kv_heads, entries, len(pages.layouts))
        numbers = (*sizes, rows, group, saved, plan.slot_bytes, plan.stages, plan.merge_rows)
        for name, value in zip(_INTEGERS, numbers, strict=True):
            call[name] = value
        call["scale"], call["softcap"] = scale, softcap
        self._call, self._bytes = call[0], call.view(np.uint8).data
        self._launch = PreparedLaunch(
            plan.kernel, (plan.grid,), (32 * plan.warps,), call, plan.shared_bytes, early=True
        )

    def use(self, workspace: Workspace, scores: Any) -> None:
        """Work in other memory from now on, of the shapes of the first."""
        self._call["partial"], self._call["semaphores"] = map(
            pointer_of, (workspace.partial, workspace.semaphores)
        )
        self._call["scores"] = 0 if scores is None else pointer_of(scores)

    def __call__(self, q: CudaView, out: int, lse: int, stream: int) -> None:
        """Launch; `out` and `lse` are the addresses of contiguous arrays."""
        batch, position, head, last = q.strides
        if last != 1 or (batch | position | head) & 1 or q.pointer & 3:
            raise ValueError(
                "q must be contiguous in its last axis, even in the others and at a multiple of 4 bytes, "
                f"got strides {q.strides} at {q.pointer:#x}; pass a contiguous copy"
            )
        _POINTERS_OF_CALL(self._bytes, _Q, q.pointer, out, lse)
        _STRIDES_OF_CALL(self._bytes, _STRIDES, batch, position, head)
        self._launch(stream)


def _write_rungs(rungs: Any, pages: Pages) -> None:
    unit = getattr(pages, "unit", 0)  # bytes that `index` counts, if it does not count pages
    for rung, layout, pool in zip(rungs, pages.layouts, pages.pools, strict=False):
        rung["pool"], rung["record"] = cuda_view(pool, "pages.pools").pointer, unit or layout.nbytes
        rung["bits_k"], rung["bits_v"] = width_number(layout.bits_k), layout.bits_v


def _arrays_of(pages: Pages, workspace: Workspace, scores: Any, window: Window | None) -> dict[str, Any]:
    """Return the arrays of a call, by the names of their addresses in it."""
    tables = _TABLES + (_TABLES_OF_BLOCKS if any(layout.in_blocks for layout in pages.layouts) else ())
    arrays = {name: getattr(pages, name) for name in tables}
    arrays |= {"partial": workspace.partial, "semaphores": workspace.semaphores}
    if scores is not None:
        arrays["scores"] = scores
    if window:
        arrays |= {"base": pages.base, "first": window.first}
    return arrays


launch = partial(allocate_and_attend, make_workspace, attend)
"""Launcher of backend "cuda" for `kvlab.ops.packed.packed_attention`."""

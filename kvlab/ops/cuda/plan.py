"""Launchers of the planner: five kernels decide what becomes of the pages of any number of layers.

``kvlab.reference.cache_plan`` says what is decided, ``kernels/cuda/plan/plan.cu``, ``plan/moves.cu`` and
``plan/tables.cu`` do it on `LayerState` structs in device memory. A call waits for nothing and allocates
nothing. What it decided is in the tables, in the lists of moves (`Workspace.move_lists`) and in each layer's
status. The caller has the moves carried out before anything else reads the pages.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np

from kvlab.device import compute_capability
from kvlab.jit.build import arch_of, build
from kvlab.jit.launch import Kernel, PreparedLaunch, load
from kvlab.new_arrays import empty, on_device_of, overwrite, to_device, to_host
from kvlab.ops.device_arrays import shared_memory_per_block
from kvlab.ops.layer_state import RUNGS
from kvlab.ops.plan import HULL, Ladder, PlanShape, choose_optimum, hulls_of
from kvlab.pages import TOKENS_PER_PAGE
from kvlab.views import cuda_view

__all__ = [
    "Workspace",
    "launch_plan",
    "make_workspace",
    "workspace_nbytes",
]

_PAGE, _KEYS = TOKENS_PER_PAGE, 256
_STATIC = 8 << 10  # bytes of shared memory that choose_rungs has beside the weights of chunks, or fewer
_FIELDS = (
    "starts", "tokens", "kinds", "weight", "runs", "bytes_left", "chosen", "extra", "new_pages", "first",
    "list", "sequence", "keys", "stay", "after", "role", "role_after", "table", "freed", "holes",
    "beyond_end", "head", "moves0", "moves1", "begins0", "begins1", "copies",
)  # fmt: skip
_NUMBERS = (
    "segments", "chunks", "max_new_pages", "max_dropped",
    "num_new", "first_position", "sink", "recent", "lookahead", "by_position", "window", "choice",
    "held", "cropped", "rewind",
)  # fmt: skip
_CALL = np.dtype(
    [
        ("hulls", HULL, RUNGS + 1),
        ("cost", "i4", RUNGS + 1),
        *((name, "u8") for name in ("layers", "codes", "valid", "positions", *_FIELDS)),
        ("fixed_bytes", "i8"),
        ("floor", "u8"),
        *((name, "i4") for name in _NUMBERS),
    ],
    align=True,
)
_CHOICES = ("greedy", "uniform", "dp")
"""`Choice` of plan.cuh."""
_LIST = np.dtype([(name, "u8") for name in ("moves", "begins", "num_groups", "copies", "num_copies")])


@dataclass(frozen=True)
class Workspace:
    """Device memory that plans work in, and the moves that the last one has decided; from `make_workspace`.

    Attributes
    ----------
    shape : PlanShape
    layers : int
        Most layers of a call.
    max_new_pages, max_dropped : int
        Most pages of a layer that a call may add and drop.
    memory, lists : uint8 arrays
        The memory, and the MoveList structs of both phases.
    call : structured array, (1,)
        The argument of the kernels; its addresses are laid down.
    lists_pointer : int
        Address of `lists`.
    sizes, offsets : dict
        Bytes of an array of one layer, and where it begins in `memory`, by name.
    launches : dict
        By number of layers, what `launch_plan` launches.
    """

    shape: PlanShape
    layers: int
    max_new_pages: int
    max_dropped: int
    memory: Any
    lists: Any
    call: Any
    lists_pointer: int
    sizes: dict[str, int]
    offsets: dict[str, int]
    launches: dict[int, list[PreparedLaunch]] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return int(self.memory.shape[0] + self.lists.shape[0])

    def move_lists(self, phase: int) -> int:
        """Return the address of MoveList[layers] of a phase; entry i is of the last call's i-th layer."""
        return self.lists_pointer + phase * self.layers * _LIST.itemsize

    def max_groups(self, phase: int) -> int:
        """Most destination pages of a layer in a phase."""
        return self.max_dropped * _PAGE if phase else self.max_new_pages


def make_workspace(
    like: Any, shape: PlanShape, layers: int, max_new_pages: int, max_dropped: int
) -> Workspace:
    """Allocate what calls for `layers` layers need, in the framework and on the device of `like`.

    A call adds at most `max_new_pages` pages to a layer and drops at most `max_dropped`; see
    `kvlab.ops.plan.decode_bounds`. A prefill of n tokens adds at most
    ``batch * heads * (n // 16 + 1 + segments)`` pages and as many as stored ones that it demotes.
    """
    sizes = _sizes(shape, max_new_pages, max_dropped)
    offsets, total = {}, 0
    for name, size in sizes.items():
        offsets[name] = total
        total += -(-layers * size // 256) * 256
    memory = empty((total,), "uint8", like)
    if not shape.batch:  # no plan is launched, and what carries out its moves must find none
        with on_device_of(memory):
            memory[...] = 0
    view = cuda_view(memory, "memory")
    start, held = view.pointer, _held(shape, view.device)
    call = np.zeros(1, _CALL)
    for name in _FIELDS:
        call[name] = start + offsets[name]
    call["segments"], call["chunks"] = shape.segments, shape.chunks
    call["max_new_pages"], call["max_dropped"], call["held"] = max_new_pages, max_dropped, held
    lists = np.zeros((2, layers), _LIST)
    for phase in range(2):
        fields = (f"moves{phase}", 0), (f"begins{phase}", 0), ("head", 4 * phase), ("copies", 0), ("head", 8)
        for name, (array, after) in zip(_LIST.names or (), fields, strict=True):
            lists[name][phase] = start + offsets[array] + after + np.arange(layers) * sizes[array]
    on_device = to_device(lists.reshape(-1).view(np.uint8), like)
    return Workspace(
        shape,
        layers,
        max_new_pages,
        max_dropped,
        memory,
        on_device,
        call,
        cuda_view(on_device, "x").pointer,
        sizes,
        offsets,
    )


def workspace_nbytes(shape: PlanShape, max_new_pages: int, max_dropped: int) -> int:
    """Return the bytes of a workspace for one layer; arguments as of `make_workspace`."""
    return sum(_sizes(shape, max_new_pages, max_dropped).values())


def _held(shape: PlanShape, device: int) -> int:
    """Chunks of a row, 4 bytes each, that a block holds in shared memory; 0 if they are too many."""
    chunks = shape.heads * shape.segments * shape.chunks
    return chunks if 4 * chunks <= shared_memory_per_block(device) - _STATIC else 0


def _sizes(shape: PlanShape, max_new_pages: int, max_dropped: int) -> dict[str, int]:
    """Bytes of every array of the workspace for one layer."""
    num_bh = shape.batch * shape.heads
    groups, rungs, classes = num_bh * shape.segments, shape.num_rungs, shape.num_rungs + 1
    levels, entries = rungs + shape.evicts, num_bh * shape.entries
    return {
        "starts": 4 * groups * classes * _KEYS, "tokens": 4 * groups * classes, "kinds": 12 * groups * rungs,
        "weight": 4 * groups * shape.chunks, "runs": 16 * groups * classes,
        "bytes_left": 8 * shape.batch,
        "chosen": 4 * groups * classes * levels,
        "extra": 4 * groups, "new_pages": 4 * groups * rungs, "first": 4 * groups * rungs,
        "list": 4 * groups * rungs, "sequence": 4 * groups * rungs, "keys": _PAGE * entries,
        "stay": 2 * entries, "after": entries,
        "role": 8 * groups, "role_after": 8 * groups, "table": 8 * entries,
        "freed": 4 * max_dropped, "holes": 4 * max_dropped, "beyond_end": max_dropped, "head": 24,
        "moves0": 16 * max_new_pages * _PAGE, "moves1": 16 * max_dropped * _PAGE,
        "begins0": 4 * (max_new_pages + 1), "begins1": 4 * (max_dropped * _PAGE + 1),
        "copies": 16 * max_dropped,
    }  # fmt: skip


@lru_cache(maxsize=16)
def _kernels(device: int) -> dict[str, Kernel]:
    arch = arch_of(*compute_capability(device))
    sources = {
        "plan/plan": ("count_keys", "choose_rungs", "allocate_pages"),
        "plan/moves": ("plan_moves",),
        "plan/tables": ("make_tables",),
    }
    return {
        entry: load(build(name, {"BF16": 0}, arch), entry, device=device)
        for name, entries in sources.items()
        for entry in entries
    }


def launch_plan(
    states: int,
    first: int,
    layers: int,
    workspace: Workspace,
    ladder: Ladder,
    state_nbytes: int,
    stream: int,
    *,
    sink: int,
    recent: int,
    lookahead: int,
    fixed_nbytes: int,
    by_position: bool = False,
    cropped: bool = False,
    window: int = 0,
    floor: int = 0,
    rewind: int = 0,
    allocator: str = "greedy",
    codes: int = 0,
    valid: int = 0,
    positions: int = 0,
    num_new: int = 0,
    first_position: int = 0,
) -> None:
    """Plan layers `first` to `first + layers - 1`: five launches on a stream of the workspace's device.

    Parameters
    ----------
    states : int
        Address of the layers' LayerState structs, `state_nbytes` each; they share `ladder` and the shape.
    workspace : Workspace
        For at least so many layers. Its move lists are valid until its next call.
    ladder : Ladder
    sink, recent, lookahead : int
        As in `kvlab.reference.cache_plan.plan`; lookahead at most 16.
    fixed_nbytes : int
        Bytes of a row beside pages and their table entries.
    by_position : bool
        Importance follows from the position alone.
    cropped : bool
        Pages may hold tokens at or beyond the end of their rows, which the plan drops.
    window : int
        Newest positions that stay at the top rung, which is theirs alone.
    floor : int
        What the weights of all tokens have more than their importance, together, in units of 2**-32.
    rewind : int
        Tokens that layers with a sliding window keep beyond those that the next query sees.
    allocator : {"greedy", "dp", "uniform"}
        "dp" chooses on the host: the call waits for the device.
    codes, valid, positions, num_new, first_position : int
        New tokens: addresses of their importance (num_bh, num_new) uint8, of what is no padding
        (batch, num_new) uint8 or 0, of their positions (batch, num_new) int32 or 0 if these follow each
        other, their number and first position. The rows have `first_position + num_new` tokens with them.

    Raises
    ------
    ValueError
        If the workspace is too small for the call.
    """
    shape = workspace.shape
    if layers > workspace.layers or num_new > shape.new_tokens:
        raise ValueError(
            f"the workspace serves {workspace.layers} layers and {shape.new_tokens} new tokens; "
            f"{layers} and {num_new} were asked for: make a larger one"
        )
    call = workspace.call[0]
    call["hulls"], call["cost"][: len(ladder.cost)] = hulls_of(ladder), ladder.cost
    call["layers"], call["codes"], call["valid"] = states + first * state_nbytes, codes, valid
    call["positions"] = positions
    call["fixed_bytes"], call["num_new"], call["first_position"] = fixed_nbytes, num_new, first_position
    call["cropped"], call["floor"], call["rewind"] = cropped, floor, rewind
    call["sink"], call["recent"], call["lookahead"] = sink, recent, lookahead
    call["by_position"], call["window"], call["choice"] = by_position, window, _CHOICES.index(allocator)
    if layers not in workspace.launches:
        workspace.launches[layers] = _launches(workspace, layers)
    for number, launch in enumerate(workspace.launches[layers]):
        launch(stream)
        if number == 1 and allocator == "dp":
            _choose_on_host(workspace, layers, ladder, window)


def _choose_on_host(workspace: Workspace, layers: int, ladder: Ladder, window: int) -> None:
    """Choose levels on the host, from the weights of chunks; waits for the device."""
    shape, classes = workspace.shape, workspace.shape.num_rungs + 1
    groups = shape.batch * shape.heads * shape.segments

    def array(name: str) -> Any:
        start = workspace.offsets[name]
        return workspace.memory[start : start + layers * workspace.sizes[name]]

    weight = to_host(array("weight")).view(np.float32).reshape(layers, groups, shape.chunks)
    runs = to_host(array("runs")).view(np.int32).reshape(layers, shape.batch, -1, classes, 4)
    bytes_left = to_host(array("bytes_left")).view(np.int64).reshape(layers, shape.batch)
    chosen = np.empty((layers, groups, classes, len(ladder.cost)), np.int32)
    for layer in range(layers):
        chunks = runs[layer, ..., 0].reshape(groups, classes)
        parts = [
            weight[layer, g, start : start + n]
            for g in range(groups)
            for n, start in zip(chunks[g], runs[layer, ..., 2].reshape(groups, classes)[g], strict=True)
        ]
        chosen[layer], _ = choose_optimum(
            ladder, shape.evicts, window,
            chunks.reshape(shape.batch, -1, classes).astype(np.int64),
            np.concatenate(parts), bytes_left[layer],
        )  # fmt: skip
    overwrite(array("chosen"), chosen.reshape(-1).view(np.uint8))


def _launches(workspace: Workspace, layers: int) -> list[PreparedLaunch]:
    """The launches of a plan of so many layers, in their order."""
    shape = workspace.shape
    groups = shape.batch * shape.heads * shape.segments
    if not groups:
        return []
    kernels = _kernels(cuda_view(workspace.memory, "memory").device)
    counters = 4 * (shape.num_rungs + 1) * _KEYS
    return [
        PreparedLaunch(kernels[entry], (blocks, layers), (threads,), workspace.call, shared_bytes, early=True)
        for entry, blocks, threads, shared_bytes in (
            ("count_keys", groups, 256, counters),
            ("choose_rungs", shape.batch, 1024, 4 * int(workspace.call["held"][0])),
            ("allocate_pages", 1, 256, 0),
            ("plan_moves", groups * (shape.num_rungs + (shape.new_tokens > 0)), 256, 0),
            ("make_tables", shape.batch * shape.heads, 512, 0),
        )
    ]

"""Attention of one token over the packed pages of all layers, checked and timed, on a CPU or a GPU.

On a GPU the pages are copied there, and all layers are one CUDA graph, which runs while no other process of
the laboratory uses the GPU. `packed_attention` chooses the backend.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvlab.errors import needs_extra
from kvlab.lab import guard
from kvlab.lab.ablation.unpacked import page_nbytes
from kvlab.lab.gpu_lock import gpu_lock, shared_gpu
from kvlab.lab.limits import limit_of
from kvlab.lab.timing import Timing, time_in_turns
from kvlab.lab.timing_gpu import captured, time_graphs
from kvlab.ops.frame import FRAME
from kvlab.ops.packed import packed_attention
from kvlab.pages import DevicePages, LayerPages
from kvlab.registry import last_backend

__all__ = ["TimedLayers", "time_layers", "to_gpu"]

_TOLERANCE = {"cpu": 1e-5, "cuda": 1e-2}
"""Of attention against float64: float32 on a CPU, 16 bits on a GPU."""
Floats = NDArray[np.float32]


class TimedLayers(NamedTuple):
    """Seconds of all layers together, the bytes that they read, the error of the first, and who computed."""

    timing: Timing
    nbytes: int
    error: float
    backend: str


def time_layers(
    pages: list[LayerPages], q: Floats, expected: Floats, *, device: str, repeats: int, what: str
) -> TimedLayers:
    """Time all layers together, once the first is right.

    `pages` are those of a layer each, on the CPU; `q`, (1, 1, num_heads_q, head_dim), is the query of every
    layer, and `expected` what attention in float64 gives for the first one. `what` names the call in errors.
    Wrong answers are refused, and times in which the bytes cannot have been read; a RuntimeError says that
    torch sees no GPU.
    """
    time_on = _time_on_gpu if device == "cuda" else _time_on_cpu
    timing, found, backend = time_on(pages, q, repeats)
    error = guard.refuse_wrong(found, expected, _TOLERANCE[device], what)
    nbytes = sum(map(page_nbytes, pages))
    guard.refuse_impossible(nbytes, min(timing.seconds), partial(limit_of, device))
    return TimedLayers(timing, nbytes, error, backend)


def _time_on_cpu(pages: list[LayerPages], q: Floats, repeats: int) -> tuple[Timing, Floats, str]:
    """Seconds of each repeat, the output of the first layer, and the backend that ran."""
    found = packed_attention(q, pages[0]).out
    backend = str(last_backend())
    calls = {"layers": lambda: [packed_attention(q, layer) for layer in pages]}
    return time_in_turns(calls, repeats=repeats)["layers"], found, backend


def _time_on_gpu(pages: list[LayerPages], q: Floats, repeats: int) -> tuple[Timing, Floats, str]:
    """The same on torch's current GPU."""
    with needs_extra("hf", "an ablation on a GPU"):
        import torch
    if not torch.cuda.is_available():
        raise RuntimeError("device='cuda': torch sees no GPU; kvlab env says what is here. Use --device cpu")
    with shared_gpu("cuda"):
        query = torch.from_numpy(q).cuda().to(torch.float16)
        layers = [to_gpu(layer) for layer in pages]
        found = packed_attention(query, layers[0]).out.float().cpu().numpy()
        backend = str(last_backend())
        graphs = captured({"layers": lambda: [packed_attention(query, layer) for layer in layers]})
    with gpu_lock().exclusive():
        timing = time_graphs(graphs, repeats)["layers"]
    return timing, found, backend


def to_gpu(pages: LayerPages) -> DevicePages:
    """Return the pages of a layer with their arrays on torch's current GPU."""
    import torch

    def copy(x: NDArray[Any]) -> Any:
        signed = {"uint32": np.int32, "uint16": np.int16}.get(x.dtype.name)
        return torch.from_numpy(np.ascontiguousarray(x if signed is None else x.view(signed))).cuda()

    tables = "rung", "count", "index", "base", "num_pages", *FRAME
    copies = {name: copy(getattr(pages, name)) for name in tables}
    return DevicePages(pages.layouts, tuple(map(copy, pages.pools)), **copies, dtype=pages.dtype)

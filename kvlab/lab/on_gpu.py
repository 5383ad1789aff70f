"""Attention of a token over all layers of an ablation case, timed on a GPU.

Pages of either kind, packed or with one code a byte, are copied to the GPU. `packed_attention` chooses the
backend.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvlab.errors import needs_extra
from kvlab.lab.gpu_lock import gpu_lock, shared_gpu
from kvlab.lab.timing import Timing
from kvlab.lab.timing_gpu import captured, time_graphs
from kvlab.ops.frame import FRAME
from kvlab.ops.packed import packed_attention
from kvlab.pages import DevicePages, LayerPages
from kvlab.registry import last_backend

__all__ = ["attend_layers", "to_gpu"]


def attend_layers(
    pages: list[LayerPages], q: NDArray[np.float32], repeats: int
) -> tuple[Timing, NDArray[np.float32], str]:
    """Time all layers as one CUDA graph, while no other process of the laboratory uses the GPU.

    Parameters
    ----------
    pages : list of LayerPages
        One a layer, on the CPU.
    q : (1, 1, num_heads_q, head_dim) float32
    repeats : int

    Returns
    -------
    timing : Timing
        Seconds of all layers together.
    out : (1, 1, num_heads_q, head_dim) float32
        Of the first layer.
    backend : str
        The one that the registry chose for this GPU.

    Raises
    ------
    RuntimeError
        If torch sees no GPU.
    """
    with needs_extra("hf", "an ablation on a GPU"):
        import torch
    if not torch.cuda.is_available():
        raise RuntimeError("device='cuda': torch sees no GPU; kvlab env says what is here. Use --device cpu")
    with shared_gpu("cuda"):
        query = torch.from_numpy(q).cuda().to(torch.float16)
        layers = [to_gpu(layer) for layer in pages]
        first = packed_attention(query, layers[0]).out.float().cpu().numpy()
        backend = str(last_backend())
        graphs = captured({"layers": lambda: [packed_attention(query, layer) for layer in layers]})
    with gpu_lock().exclusive():
        timing = time_graphs(graphs, repeats)["layers"]
    return timing, first, backend


def to_gpu(pages: LayerPages) -> DevicePages:
    """Return the pages of a layer with their arrays on torch's current GPU."""
    import torch

    def copy(x: NDArray[Any]) -> Any:
        signed = {"uint32": np.int32, "uint16": np.int16}.get(x.dtype.name)
        return torch.from_numpy(np.ascontiguousarray(x if signed is None else x.view(signed))).cuda()

    tables = "rung", "count", "index", "base", "num_pages", *FRAME
    copies = {name: copy(getattr(pages, name)) for name in tables}
    return DevicePages(pages.layouts, tuple(map(copy, pages.pools)), **copies, dtype=pages.dtype)

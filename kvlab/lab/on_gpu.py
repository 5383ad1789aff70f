"""What an ablation case does on a GPU beside reading: copies, and attention of a token over all layers.

A cache that was filled on the GPU is copied to the CPU, where its pages are counted and unpacked: codes are
the same bits on both. Pages of either kind are copied to the GPU for the attention that is timed.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvlab.cache.pages import LayerPages
from kvlab.errors import needs_extra
from kvlab.lab.timing import Timing
from kvlab.lab.timing_gpu import captured, time_graphs
from kvlab.lab.turns import beside_others, gpu_turns
from kvlab.ops.cuda import packed as packed_cuda

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

    Raises
    ------
    RuntimeError
        If torch sees no GPU.
    """
    with needs_extra("hf", "an ablation on a GPU"):
        import torch
    if not torch.cuda.is_available():
        raise RuntimeError("device='cuda': torch sees no GPU; kvlab env says what is here. Use --device cpu")
    num_heads_kv, head_dim = pages[0].num_pages.shape[1], q.shape[3]
    with beside_others("cuda"):
        query = torch.from_numpy(q).cuda().to(torch.float16)
        layers = [to_gpu(layer) for layer in pages]
        out = torch.empty_like(query)
        lse = torch.empty(1, q.shape[2], 1, device="cuda")
        workspace = packed_cuda.make_workspace(query, num_heads_kv, q.shape[2] // num_heads_kv, head_dim)

        def attend(layer: SimpleNamespace) -> None:
            packed_cuda.attend(query, layer, out, lse, workspace, scale=head_dim**-0.5)

        attend(layers[0])
        first = out.float().cpu().numpy()

        def attend_all() -> None:
            for layer in layers:
                attend(layer)

        graphs = captured({"layers": attend_all})
    with gpu_turns().alone():
        timing = time_graphs(graphs, repeats)["layers"]
    return timing, first, "cuda"


def to_gpu(pages: LayerPages) -> SimpleNamespace:
    """Return the pages of a layer with their arrays on torch's current GPU."""
    import torch

    def copy(x: NDArray[Any]) -> Any:
        signed = {"uint32": np.int32, "uint16": np.int16}.get(x.dtype.name)
        return torch.from_numpy(np.ascontiguousarray(x if signed is None else x.view(signed))).cuda()

    return SimpleNamespace(
        layouts=pages.layouts,
        pools=tuple(copy(pool) for pool in pages.pools),
        rung=copy(pages.rung),
        index=copy(pages.index),
        count=copy(pages.count),
        num_pages=copy(pages.num_pages),
        k_mean=copy(pages.k_mean),
        dtype=pages.dtype,
    )

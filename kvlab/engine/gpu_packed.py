"""A decoder on a GPU whose keys and values are in a `MixedPrecisionCache`: attention is the cache's.

The token kernel does what lies between one layer's attention and the next, in a launch; then the cache
attends its packed pages and adds the new token (`MixedPrecisionCache.decode`), in two. All launches of a
token are one CUDA graph. Every kind of step that the cache has (`MixedPrecisionCache.prepare`) is run once
and then recorded; between replays the host lets it make room.

Prompts go through a layer together, as rows side by side that end where the longest ends. Arrays that the
cache sees are tensors of torch, whose memory pool its pages come from.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvlab.cache.cache import MixedPrecisionCache
from kvlab.engine.gpu import Decoding
from kvlab.engine.prompt import Attend, on_torch
from kvlab.engine.token_kernel import TokenKernel
from kvlab.engine.token_launch import Model, Token
from kvlab.engine.weights import Weights

__all__ = ["PackedGpuExecutor"]


class PackedGpuExecutor(Decoding):
    """Carries out the tokens of a `kvlab.engine.Decoder` with a packed cache on a GPU.

    Parameters
    ----------
    weights : Weights
    cache : MixedPrecisionCache
        Empty, for the device.
    max_seqlen, device : int
    """

    def __init__(self, weights: Weights, cache: MixedPrecisionCache, max_seqlen: int, device: int) -> None:
        self._cache = cache
        self._recorded: dict[tuple[Hashable, ...], Any] = {}
        super().__init__(weights, cache.batch, max_seqlen, device)

    def _make_token(self, model: Model, max_seqlen: int, bfloat16: bool, count: int) -> Token:
        geometry = self.geometry
        kernel = TokenKernel.fitting(geometry, self._batch, bfloat16, count, packed=True)
        self._use_torch()
        token = Token(kernel, model, None, self._device, count)
        arrays = (token.arrays["q"], *token.arrays["newest"], token.arrays["attended"])
        shape = self._batch, 1, -1, geometry.head_dim
        self._q, self._k, self._v, self._out = (on_torch(x, model.dtype).reshape(shape) for x in arrays)
        self._halves = [self._cache.decode(layer) for layer in range(geometry.layers)]
        return token

    def reset(self) -> None:
        """Forget all tokens."""
        super().reset()
        with self._current(), self._torch_current():
            self._cache.reset()

    def layer_outputs(self, ids: NDArray[np.int64]) -> list[NDArray[np.float32]]:
        """Run one row from its beginning; what each layer leaves of its tokens, (tokens, hidden)."""
        found: list[NDArray[np.float32]] = []
        self.reset()
        self._run_prompts([ids], self._attend, lambda x: found.append(x.cpu().numpy()))
        return found

    def _replay(self) -> None:
        with self._torch_current():
            self._replay_on_torch()

    def _replay_on_torch(self) -> None:
        kind, recorded = self._cache.prepare(), self._recorded
        if not kind:  # the cache has not met its GPU
            self._step()
            return
        kind = *kind, self._draws
        if kind not in recorded:
            # Graphs for memory that the cache has given back serve no step any more.
            self._recorded = {other: graph for other, graph in recorded.items() if other[:1] == kind[:1]}
            self._recorded[kind] = None
            self._step()
            return
        if recorded[kind] is None:
            recorded[kind] = self._record()
        recorded[kind].replay()
        self._cache.replayed()

    def _record(self) -> Any:
        torch = self._use_torch()
        graph = torch.cuda.CUDAGraph()
        with self._cache.recording(), torch.cuda.graph(graph, stream=self._torch_stream):
            self._step()
        return graph

    def _step(self) -> None:
        """Launch one token of every row and the choice of the next."""
        token, stream, begin, phases = self._decode, self._stream.ptr, 0, self._decode.kernel.phases
        for layer, (attend, append) in enumerate(self._halves):
            token.launch_phases(begin, layer * phases + 1, stream)
            attend(self._q, self._out)
            append(self._q, self._k, self._v, self._out)
            begin = layer * phases + 2  # behind attention
        at_once = self._chooses_at_once()
        token.launch_phases(begin, self.geometry.layers * phases + 1, stream, chooses=at_once)
        if not at_once:
            self._choose(stream)

    def _read_long(self, rows: Sequence[NDArray[np.int64]]) -> None:
        self._run_prompts(rows, self._attend)

    def _attend(self, counts: NDArray[np.int64]) -> Attend:
        """Let the cache attend and store so many tokens of each row."""
        torch, width, cache = self._use_torch(), int(counts.max()), self._cache
        shape, valid = (len(counts), width), None
        if counts.min() < width:
            valid = torch.from_numpy(np.arange(width) >= width - counts[:, None]).to(self._q.device)

        def attend(layer: int, q: Any, k: Any, v: Any) -> Any:
            if valid is None:
                return cache.step(layer, *(x.unflatten(0, shape) for x in (q, k, v))).flatten(0, 1)
            padded = [x.new_zeros((*shape, *x.shape[1:])) for x in (q, k, v)]
            for to, x in zip(padded, (q, k, v), strict=True):
                to[valid] = x
            return cache.step(layer, *padded, valid=valid)[valid]

        return attend

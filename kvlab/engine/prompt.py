"""Prompts on a GPU: all their tokens go through a layer together, in products of torch.

The matrices of a layer are unpacked into rows first (kernels/cuda/engine/unpack.cu), which takes as long as
reading them twice: many tokens pay for it. Products have 16-bit operands and float32 sums, as in the token
kernel; what is between them (norms, rotation, activations, the residual) is float32, too. Who attends, and
where keys and values go, is the caller's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from kvlab.engine.packing import BLOCK_COLUMNS, TILE_ROWS
from kvlab.engine.weights import Layer, Matrix, Weights
from kvlab.errors import needs_extra
from kvlab.jit.launch import cuda_kernel
from kvlab.jit.structs import ADDRESS, Struct

__all__ = ["MAX_TOKENS", "Attend", "Prompts", "load_torch", "on_torch"]

MAX_TOKENS = 65_536
"""Tokens of all rows that go through the model together: 1 GiB of hidden states at a width of 4,096."""
_PRODUCT_TOKENS = 4096  # that are multiplied together: 450 MiB of float32 at 28,672 rows

Tensor = Any
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""From a layer's index, q (tokens, heads_q, head_dim), k and v (tokens, heads_kv, head_dim) to the result."""

UNPACK = Struct(packed=ADDRESS, rows=ADDRESS, blocks="i")
_WARPS = 8  # of a block


class Prompts:
    """What a prompt needs of a model.

    Parameters
    ----------
    weights : Weights
        Whose layers are not asked for: `layers` has them.
    layers : sequence of Layer
        On the device, as tensors of torch: packed weights in 16 bits, biases and norms in float32. Norms of
        heads have their channels in the order of `kvlab.engine.packing.rotary_pairs`.
    embedding : (vocabulary, hidden) tensor
    angles : (positions, rotary_dim / 2, 2) float32 tensor
        Cosine and sine.
    """

    def __init__(self, weights: Weights, layers: list[Layer], embedding: Tensor, angles: Tensor) -> None:
        self._torch, self._geometry = load_torch(), weights.geometry
        self._kind = getattr(self._torch, weights.dtype)
        self._layers, self._embedding, self._angles = layers, embedding, angles

    def run(
        self, ids: Tensor, positions: Tensor, attend: Attend, watch: Callable[[Tensor], None] | None = None
    ) -> Tensor:
        """Take tokens through all layers.

        Parameters
        ----------
        ids, positions : (tokens,) int64 tensors
        attend : callable
            `Attend`.
        watch : callable, optional
            Is called with what each layer leaves; the next one writes over it.

        Returns
        -------
        float32, (tokens, hidden)
            What the last layer leaves, before the final norm.
        """
        with self._torch.no_grad():
            x = self._embedding[ids].float()
            cosine, sine = self._angles[positions][:, None].unbind(-1)
            for index, layer in enumerate(self._layers):
                q, k, v = self._heads(layer, x, cosine, sine)
                attended = attend(index, q, k, v).reshape(len(x), -1)
                self._rest(layer, x, attended)
                if watch is not None:
                    watch(x)
            return x

    def _heads(self, layer: Layer, x: Tensor, cosine: Tensor, sine: Tensor) -> list[Tensor]:
        """Queries, keys and values, rotated, in 16 bits."""
        geometry, matrix = self._geometry, layer.products[0]
        counts = geometry.heads_q, geometry.heads_kv, geometry.heads_kv
        results = [x.new_empty((len(x), heads, geometry.head_dim), dtype=self._kind) for heads in counts]
        weight = self._unpacked(matrix)
        for part in _parts(len(x)):
            heads = self._product(self._normed(x[part], matrix), weight, matrix).unflatten(
                1, (-1, geometry.head_dim)
            )
            q, k, v = heads.split(counts, 1)
            if layer.head_norms is not None:
                norm, shape = self._torch.nn.functional.rms_norm, (geometry.head_dim,)
                q, k = (
                    norm(y, shape, w, geometry.eps) for y, w in zip((q, k), layer.head_norms, strict=True)
                )
            rotated = (self._rotated(y, cosine[part], sine[part]) for y in (q, k))
            for result, y in zip(results, (*rotated, v), strict=True):
                result[part] = y
        return results

    def _rotated(self, y: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        rotated = self._geometry.rotary_dim
        first, second = y[..., 0:rotated:2], y[..., 1:rotated:2]  # rows of weights are packed in pairs
        turned = first * cosine - second * sine, second * cosine + first * sine
        return self._torch.cat([*turned, y[..., rotated:]], -1)

    def _rest(self, layer: Layer, x: Tensor, attended: Tensor) -> None:
        """Add the output of attention and the MLP to x."""
        silu, gelu = self._torch.nn.functional.silu, self._torch.nn.functional.gelu
        *outputs, up, down = layer.products[1:]
        weights = [self._unpacked(matrix) for matrix in layer.products[1:]]
        for part in _parts(len(x)):
            own = x[part]
            for output in outputs:
                own += self._product(attended[part], weights[0], output)
            y = self._product(self._normed(own, up), weights[-2], up)
            active = silu(y[:, ::2]) * y[:, 1::2] if self._geometry.gated else gelu(y)
            columns = active.to(self._kind)
            if self._geometry.parallel:
                columns = self._torch.cat([attended[part], columns], 1)
            own += self._product(columns, weights[-1], down)

    def _normed(self, x: Tensor, matrix: Matrix) -> Tensor:
        """A norm of x, in 16 bits."""
        eps, functions, weight = self._geometry.eps, self._torch.nn.functional, matrix.norm_weight
        if self._geometry.layer_norm:
            y = functions.layer_norm(x, x.shape[1:], weight, matrix.norm_bias, eps)
        else:
            y = functions.rms_norm(x, x.shape[1:], weight, eps)
        return y.to(self._kind)

    def _product(self, x: Tensor, weight: Tensor, matrix: Matrix) -> Tensor:
        y = self._torch.mm(x, weight.T, out_dtype=self._torch.float32)
        bias: Tensor = matrix.bias
        return y if bias is None else y.add_(bias)

    def _unpacked(self, matrix: Matrix) -> Tensor:
        """The rows of a packed matrix, (rows, columns)."""
        packed: Tensor = matrix.packed
        tiles, blocks = packed.shape[:2]
        rows = packed.new_empty((tiles * TILE_ROWS, blocks * BLOCK_COLUMNS))
        argument = UNPACK.pack(packed=packed.data_ptr(), rows=rows.data_ptr(), blocks=blocks)
        kernel = cuda_kernel("engine/unpack", None, (), packed.device.index)
        stream = self._torch.cuda.current_stream(packed.device).cuda_stream
        grid = tiles, -(-blocks // (4 * _WARPS))
        kernel(grid, (32 * _WARPS,), (np.void(argument),), stream_pointer=stream)
        return rows


def on_torch(array: Any, dtype: str) -> Tensor:
    """A tensor of torch that shares the memory of a CuPy array; 16-bit types are there as their bits."""
    torch = load_torch()
    kind = getattr(torch, dtype)
    if kind.itemsize == 2:
        return torch.from_dlpack(array.view(np.int16)).view(kind)
    return torch.from_dlpack(array)


def load_torch() -> Any:
    """Return torch, which a decoder on a GPU needs for long prompts and packed caches alone."""
    with needs_extra("hf", "prompts and packed caches on a GPU"):
        import torch
    return torch


def _parts(tokens: int) -> Iterator[slice]:
    yield from (slice(first, first + _PRODUCT_TOKENS) for first in range(0, tokens, _PRODUCT_TOKENS))

"""A model on a GPU and the launches of a token: `embed` and `token` of kernels/cuda/engine.

`token` begins with the embedding of the tokens. What chooses the next tokens embeds them, too, so between
tokens `embed` is launched for those alone that the host gives.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvlab.arrays import numpy_dtype
from kvlab.engine.kernels import matrix_table, prepare_embed, prepare_token
from kvlab.engine.packing import rotary_pairs
from kvlab.engine.prompt import Prompts, on_torch
from kvlab.engine.token_kernel import TokenKernel
from kvlab.engine.weights import Layer, Matrix, Weights

__all__ = ["Model", "Token"]


class Model:
    """A model on the device: the table of its matrices and what that points to.

    Attributes
    ----------
    matrices, head_norms, embedding, angles : int
        Addresses; `head_norms` is 0 without.
    dtype : {"float16", "bfloat16"}
    """

    def __init__(self, weights: Weights, angles: NDArray[np.float32], cupy: Any) -> None:
        self._cupy, self._weights, self.dtype = cupy, weights, weights.dtype
        order = rotary_pairs(weights.geometry.head_dim, weights.geometry.rotary_dim)
        self._layers: list[Layer] = []
        norms = []
        for layer in weights.layers:
            self._layers.append(Layer(tuple(map(self._on_device, layer.products))))
            if layer.head_norms is not None:
                norms.append(layer.head_norms[:, order])
        head = self._on_device(weights.head())
        self._head_norms = self._uploaded(np.stack(norms)) if norms else None
        self._embedding, self._angles = self._uploaded(weights.embedding), self._uploaded(angles)
        products = [matrix for layer in self._layers for matrix in layer.products]
        table = matrix_table([self._addresses(matrix) for matrix in (*products, head)])
        self._table, self._head = self._uploaded(table.view(np.uint8)), head
        self.matrices, self.embedding = _address(self._table), _address(self._embedding)
        self.head_norms, self.angles = _address(self._head_norms), _address(self._angles)

    def heads_of(self, layer: int) -> tuple[NDArray[np.float32] | None, NDArray[np.float32] | None]:
        """Biases of the QKV rows of a layer and weights of its norms of query and key heads, as packed."""
        bias, norms = self._layers[layer].products[0].bias, self._head_norms
        return (
            None if bias is None else self._cupy.asnumpy(bias),
            None if norms is None else self.numbers(norms[layer]),
        )

    def numbers(self, bits: Any) -> NDArray[np.float32]:
        """Numbers of the model's 16-bit type, from their bits on the device."""
        found: NDArray[np.float32] = self._cupy.asnumpy(bits).view(numpy_dtype(self.dtype)).astype(np.float32)
        return found

    def prompts(self) -> Prompts:
        """The same weights for prompts."""

        def matrix(x: Matrix) -> Matrix:
            half, bias = self.dtype, None if x.bias is None else on_torch(x.bias, "float32")
            norms = (None if y is None else on_torch(y, half).float() for y in (x.norm_weight, x.norm_bias))
            return Matrix(on_torch(x.packed, half), bias, *norms)

        norms = None if self._head_norms is None else on_torch(self._head_norms, self.dtype).float()
        layers = [
            Layer(tuple(map(matrix, layer.products)), None if norms is None else norms[i])
            for i, layer in enumerate(self._layers)
        ]
        embedding = on_torch(self._embedding, self.dtype)
        return Prompts(self._weights, layers, embedding, on_torch(self._angles, "float32"))

    def _uploaded(self, array: NDArray[Any]) -> Any:
        """A copy on the device: of 16-bit types their bits."""
        raw = np.ascontiguousarray(array)
        return self._cupy.asarray(raw.view(np.uint16) if raw.itemsize == 2 else raw)

    def _on_device(self, matrix: Matrix) -> Matrix:
        parts = (matrix.packed, matrix.bias, matrix.norm_weight, matrix.norm_bias)
        uploaded: Any = (None if part is None else self._uploaded(part) for part in parts)
        return Matrix(*uploaded)

    @staticmethod
    def _addresses(matrix: Matrix) -> tuple[int, int, int, int]:
        return (
            _address(matrix.packed), _address(matrix.bias), _address(matrix.norm_weight),
            _address(matrix.norm_bias),
        )  # fmt: skip


class Token:
    """The launches of one token of a batch, and the arrays that they share.

    Parameters
    ----------
    kernel : TokenKernel
    model : Model
    kv : uint16 array, (2, layers, batch, heads_kv, positions, head_dim), optional
        Keys and values; without one, those of the new tokens alone are there, in ``newest``.
    device, count : int
        Ordinal and multiprocessors of the device.
    neighbours : bool
        The tokens are of one sequence, at positions one after the other.
    """

    can_choose = True
    """Whether `run` can choose the next tokens."""

    def __init__(
        self, kernel: TokenKernel, model: Model, kv: Any, device: int, count: int, *, neighbours: bool = False
    ) -> None:  # fmt: skip
        import cupy

        self.kernel, self._cupy = kernel, cupy
        sizes = {"float32": np.float32, "int32": np.int32, "float16": np.uint16, "bfloat16": np.uint16}
        self.arrays = {
            name: cupy.zeros(shape, sizes[dtype]) for name, (shape, dtype) in kernel.workspace(count).items()
        }
        self.arrays["ids"] = cupy.zeros(kernel.batch, np.int32)
        for name in ("hidden", "statistics"):
            self.arrays[f"embedded_{name}"] = cupy.zeros_like(self.arrays[name])
        at = {name: int(array.data.ptr) for name, array in self.arrays.items()}
        strides = [0] * 3 if kv is None else [stride // 2 for stride in kv.strides[1:4]]
        if neighbours:
            strides[1] = 0
        own: dict[str, Any] = {name: at[name] for name in kernel.workspace(count)}
        self._embed, own["embed"] = prepare_embed(
            kernel,
            {
                "embedding": model.embedding, "angles": model.angles,
                **{name: at[name] for name in ("ids", "positions", "rotation")},
                **{name: at[f"embedded_{name}"] for name in ("hidden", "statistics")},
            },
            device,
        )  # fmt: skip
        k, v = (0, 0) if kv is None else (int(one.data.ptr) for one in kv)
        others = {"matrices": model.matrices, "head_norms": model.head_norms, "k": k, "v": v}
        self._call = self._prepare({**own, **others}, strides, device, count)

    def _prepare(
        self, pointers: dict[str, Any], strides: list[int], device: int, count: int
    ) -> NDArray[np.void]:  # fmt: skip
        """Make the launches ready; return the `CALL` that they read."""
        sizes: Any = {"device": device, "multiprocessors": count}
        self._token, call = prepare_token(self.kernel, pointers, strides, **sizes)
        return call

    def set(self, **values: NDArray[Any]) -> None:
        """Write ids and positions on the device."""
        for name, value in values.items():
            self.arrays[name].set(np.ascontiguousarray(value, np.int32), self._cupy.cuda.get_current_stream())

    def take_row(self, kv: Any, row: int) -> None:
        """Let launches read and write keys and values of this row."""
        self._call["k"], self._call["v"] = kv[0, :, row].data.ptr, kv[1, :, row].data.ptr

    def run_layers(self, depth: int) -> None:
        """Let launches run the first so many layers; logits are made with all of them alone."""
        whole = depth == self.kernel.geometry.layers
        self._call["layers"], self._call["vocabulary"] = depth, self.kernel.vocabulary if whole else 16
        self._call["end_phase"] = depth * self.kernel.phases + 1

    def let_choose(self, best: int, history: int) -> None:
        """Say where choices go: addresses as of `CHOOSE`."""
        self._call["best"], self._call["history"] = best, history

    def launch(self, stream: int) -> None:
        """Embed the tokens and run them."""
        self.launch_embed(stream)
        self.run(stream)

    def run(self, stream: int, *, chooses: bool = False) -> None:
        """Run the tokens, which are embedded; with `chooses` choose and embed the next ones, too."""
        self.launch_phases(0, int(self._call["end_phase"][0]), stream, chooses=chooses)

    def launch_embed(self, stream: int) -> None:
        """Embed the tokens."""
        self._embed(stream)

    def launch_phases(self, first: int, end: int, stream: int, *, chooses: bool = False) -> None:
        """Run phases `first` to `end` - 1 of `TokenKernel.phases` a layer; `chooses` as of `run`."""
        call, before = self._call, int(self._call["end_phase"][0])
        call["first_phase"], call["end_phase"], call["chooses"] = first, end, chooses
        self._token(stream)
        call["first_phase"], call["end_phase"], call["chooses"] = 0, before, False

    def launch_head(self, stream: int) -> None:
        """Make logits of hidden states that are there with their statistics."""
        last = self.kernel.geometry.layers * self.kernel.phases
        self.launch_phases(last, last + 1, stream)


def _address(array: Any) -> int:
    return 0 if array is None else int(array.data.ptr)

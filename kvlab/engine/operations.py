"""A token in a launch for each operation: for debugging, and for GPUs before Hopper.

`kernels/cuda/engine/ops.cu` has the operations. Between two of them all that they have made can be read from
`Token.arrays`: the normed hidden state (``normed``), a product (``sums``), queries, keys and values (``q``,
``newest``), what attention gives (``attended``).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvlab.engine.kernels import prepare_operations
from kvlab.engine.token_launch import Token

__all__ = ["Operations"]


class Operations(Token):
    """The launches of one token of a batch, one an operation; parameters as of `Token`."""

    def _prepare(
        self, pointers: dict[str, int], strides: list[int], device: int, count: int
    ) -> NDArray[np.void]:  # fmt: skip
        sizes = {"float32": np.float32, "int32": np.int32}
        for name, (shape, dtype) in self.kernel.between().items():
            self.arrays[name] = self._cupy.zeros(shape, sizes[dtype])
            pointers[name] = int(self.arrays[name].data.ptr)
        self._launches, self._argument = prepare_operations(
            self.kernel, pointers, strides, device=device, multiprocessors=count
        )
        self._depth = self.kernel.geometry.layers
        call: Any = self._argument["call"][0]
        return call  # type: ignore[no-any-return]

    def run_layers(self, depth: int) -> None:
        """Let launches run the first so many layers; logits are made with all of them alone."""
        self._depth = depth

    def launch(self, stream: int) -> None:
        """Embed the tokens and run them."""
        self.launch_embed(stream)
        for _ in self.steps(stream):
            pass

    def steps(self, stream: int) -> Iterator[tuple[int, str]]:
        """Launch the operations behind `launch_embed`, one for each step; gives layer and name of each."""
        for layer in range(self._depth):
            for name, product in self._operations():
                self._run(name, layer, product, stream)
                yield layer, name
        if self._depth == self.kernel.geometry.layers:
            self.launch_head(stream)
            yield self._depth, "multiply_head"

    def launch_head(self, stream: int) -> None:
        """Make logits of hidden states that are there with their statistics."""
        for name in ("norm_tokens", "multiply_head"):
            self._run(name, self.kernel.geometry.layers, 0, stream)

    def _operations(self) -> tuple[tuple[str, int], ...]:
        """Of a layer: entries of engine/ops.cu, and the product to which their weights or biases belong."""
        first = (("norm_tokens", 0), ("multiply_qkv", 0), ("rotate_heads", 0), ("attend_tokens", 0))
        if self.kernel.geometry.parallel:
            return (*first, ("norm_tokens", 1), ("multiply_up", 1), ("activate_rows", 1),
                    ("multiply_out", 2), ("add_rows", 2))  # fmt: skip
        return (*first, ("multiply_o", 1), ("add_rows", 1), ("norm_tokens", 2), ("multiply_up", 2),
                ("activate_rows", 2), ("multiply_down", 3), ("add_rows", 3))  # fmt: skip

    def _run(self, name: str, layer: int, product: int, stream: int) -> None:
        self._argument["layer"], self._argument["product"] = layer, product
        self._launches[name](stream)

"""A token in a launch for each operation: to debug, for GPUs before Hopper, and to compare with clusters.

`kernels/cuda/engine/ops.cu` has the operations. Between two of them all that they have made can be read from
`Token.arrays`: the normed hidden state (``normed``), a product (``sums``), queries, keys and values (``q``,
``newest``), what attention gives (``attended``). With `cluster`, the attention block of a layer is one launch
of kernels/cuda/engine/cluster.cu.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvlab.engine.cpu import rms_normed
from kvlab.engine.kernels import prepare_operations
from kvlab.engine.packing import unpaired
from kvlab.engine.token_kernel import TokenKernel
from kvlab.engine.token_launch import Model, Token

__all__ = ["Operations"]


class _Operation(NamedTuple):
    """An entry of ops.cu, the product of the layer whose weights or biases it has, and what it adds up."""

    name: str
    product: int
    takes_heads: bool = False
    takes_sums: bool = True


class Operations(Token):
    """The launches of one token of a batch, one an operation; parameters as of `Token`.

    Parameters
    ----------
    cluster : int
        Not 0: blocks of a cluster that has a KV head's attention block in one launch; for a batch of 1.
    """

    can_choose = False

    def __init__(
        self, kernel: TokenKernel, model: Model, kv: Any, device: int, count: int, *,
        neighbours: bool = False, cluster: int = 0,
    ) -> None:  # fmt: skip
        self._cluster = cluster
        geometry = kernel.geometry
        if cluster and (kernel.batch > 1 or geometry.head_norms or kernel.readers > geometry.heads_kv):
            raise NotImplementedError(
                f"plan='cluster': batch={kernel.batch}, head_norms={geometry.head_norms}: clusters have one "
                "row and no norms of heads; take plan='graph'"
            )
        self._model = model
        super().__init__(kernel, model, kv, device, count, neighbours=neighbours)

    def _prepare(
        self, pointers: dict[str, Any], strides: list[int], device: int, count: int
    ) -> NDArray[np.void]:  # fmt: skip
        sizes = {"float32": np.float32, "int32": np.int32}
        for name, (shape, dtype) in self.kernel.between().items():
            self.arrays[name] = self._cupy.zeros(shape, sizes[dtype])
            pointers[name] = int(self.arrays[name].data.ptr)
        self._launches, self._argument = prepare_operations(
            self.kernel, pointers, strides, device=device, multiprocessors=count, cluster=self._cluster
        )
        geometry = self.kernel.geometry
        shape = geometry.heads_kv, geometry.hidden
        self.arrays["head_sums"] = self._cupy.zeros(shape if self._cluster else 0, np.float32)
        self._depth = geometry.layers
        call: NDArray[np.void] = self._argument["call"][0]
        return call

    def run_layers(self, depth: int) -> None:
        """Let launches run the first so many layers; logits are made with all of them alone."""
        self._depth = depth

    def run(self, stream: int, *, chooses: bool = False) -> None:
        """Run the tokens, which are embedded; `chooses` is not for operations."""
        for layer in range(self._depth):
            self.launch_layer(layer, stream)
        if self._depth == self.kernel.geometry.layers:
            self.launch_head(stream)

    def launch_layer(self, layer: int, stream: int, most: int | None = None) -> None:
        """Launch the operations of a layer, or the first so many of them."""
        for operation in self._operations()[:most]:
            self._run(layer, operation, stream)

    def layer_values(self, layer: int, stream: int) -> dict[str, NDArray[np.float32]]:
        """Launch a layer; what its operations leave, a token a row, by the names of `Decoder.layer_values`.

        Products are float32, the rest is rounded to 16 bits. Queries and keys before rotation are the product
        with its bias, and their norms, where the model has some, are of the host.
        """
        geometry, kernel, model = self.kernel.geometry, self.kernel, self._model
        self.launch_layer(layer, stream, 4)
        of = {name: self._cupy.asnumpy(self.arrays[name]) for name in ("normed", "sums")}
        rows = geometry.products()["qkv"][0]
        heads = of["sums"].reshape(-1)[: kernel.batch * rows].reshape(kernel.batch, rows)
        bias, norms = model.heads_of(layer)
        if bias is not None:
            heads = heads + bias[:rows]
        heads = heads.reshape(kernel.batch, -1, geometry.head_dim)[:, : geometry.heads_q + geometry.heads_kv]
        straight = unpaired(heads, geometry.rotary_dim)
        if norms is not None:
            weight = np.repeat(
                unpaired(norms, geometry.rotary_dim), (geometry.heads_q, geometry.heads_kv), axis=0
            )
            straight = rms_normed(straight, geometry.eps) * weight
        keys, values = model.numbers(self.arrays["newest"])
        found = {
            "normed": model.numbers(of["normed"].view(np.uint16)[:, : geometry.hidden]),
            "q": straight[:, : geometry.heads_q], "k": straight[:, geometry.heads_q :],
            "q_rotated": model.numbers(self.arrays["q"]), "k_rotated": keys, "v": values,
            "attended": model.numbers(self.arrays["attended"]),
        }  # fmt: skip
        self.launch_layer(layer, stream)
        return {**found, "out": self._cupy.asnumpy(self.arrays["hidden"])}

    def launch_head(self, stream: int) -> None:
        """Make logits of hidden states that are there with their statistics."""
        for name in ("norm_tokens", "multiply_head"):
            self._run(self.kernel.geometry.layers, _Operation(name, 0), stream)

    def block_operations(self) -> int:
        """How many operations of a layer that is not parallel are its attention block, residual included."""
        return 2 if self._cluster else 6

    def _operations(self) -> tuple[_Operation, ...]:
        parallel, cluster = self.kernel.geometry.parallel, bool(self._cluster)
        names = ("norm_tokens", "multiply_qkv", "rotate_heads", "attend_tokens")
        first = tuple(_Operation(name, 0) for name in names)
        if cluster:
            first = (_Operation("attend_block", 2 if parallel else 1, True),)
        mlp = 1 if parallel else 2
        mlp_in = tuple(_Operation(name, mlp) for name in ("norm_tokens", "multiply_up", "activate_rows"))
        if parallel:
            return (
                *first,
                *mlp_in,
                _Operation("multiply_out", 2, cluster),
                _Operation("add_rows", 2, cluster),
            )
        output = () if cluster else (_Operation("multiply_o", 1),)
        after = _Operation("add_rows", 1, cluster, not cluster)
        return (*first, *output, after, *mlp_in, _Operation("multiply_down", 3), _Operation("add_rows", 3))

    def _run(self, layer: int, operation: _Operation, stream: int) -> None:
        argument, heads = self._argument, self.arrays["head_sums"].data.ptr
        argument["layer"], argument["product"] = layer, operation.product
        argument["head_sums"] = heads if operation.takes_heads else 0
        argument["first_column"] = self.kernel.geometry.attended if operation.takes_heads else 0
        argument["takes_sums"] = operation.takes_sums
        self._launches[operation.name](stream)

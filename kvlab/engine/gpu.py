"""A decoder on a GPU: a token is three launches in one CUDA graph, whose choice feeds the next one.

The graph holds `embed`, `token` and `choose` (kernels/cuda/engine). Token numbers and positions lie on the
device, so a replay goes on where the last one ended and the host need not be asked; chosen tokens arrive in a
list in the host's memory. A greedy stream keeps one token ahead of who reads it, so the device does not wait
for the host; who asks for logits meanwhile has the last token that was read run again. Prompts take the same
kernel, 16 tokens of a row at a launch: with 0 as stride from row to row its tokens are neighbours of one
sequence, which see each other because keys and values are stored before attention.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvlab.device import translated_out_of_memory
from kvlab.engine.cpu import rotation
from kvlab.engine.kernels import matrix_table, prepare_choose, prepare_embed, prepare_token
from kvlab.engine.packing import rotary_pairs
from kvlab.engine.sampling import Sampling
from kvlab.engine.token_kernel import TokenKernel
from kvlab.engine.weights import Matrix, Weights
from kvlab.errors import needs_extra
from kvlab.ops.device_arrays import multiprocessors

__all__ = ["GpuExecutor"]

CHUNK = 16
"""Tokens of a prompt at a launch."""
_EMPTY = -1  # in the list of chosen tokens


class GpuExecutor:
    """Carries out the tokens of a `kvlab.engine.Decoder` on a GPU of compute capability 9.0.

    Attributes
    ----------
    lengths : int64, (batch,)
        Tokens of each row so far.
    """

    def __init__(self, weights: Weights, batch: int, max_seqlen: int, device: int) -> None:
        with needs_extra("cu13", "a decoder on a GPU"):
            import cupy
        self._cupy, self._device = cupy, device
        self.geometry, self._batch = weights.geometry, batch
        self.lengths = np.zeros(batch, np.int64)
        with cupy.cuda.Device(device), translated_out_of_memory("the decoder"):
            self._stream = cupy.cuda.Stream(non_blocking=True)
            with self._stream:
                self._load(weights, max_seqlen)
            self._stream.synchronize()

    def _load(self, weights: Weights, max_seqlen: int) -> None:
        geometry, cupy = self.geometry, self._cupy
        count, bfloat16 = multiprocessors(self._device), weights.dtype == "bfloat16"
        kernels = [TokenKernel.fitting(geometry, n, bfloat16, count) for n in (self._batch, CHUNK)]
        model = self._model = _Model(weights, cupy)
        angles = np.stack(
            rotation(np.arange(max_seqlen + CHUNK), weights.inverse_frequencies, weights.rotary_scale), -1
        )
        shape = (geometry.layers, self._batch, geometry.heads_kv, max_seqlen + CHUNK, geometry.head_dim)
        self._kv = cupy.zeros((2, *shape), np.uint16)
        common = model, int(model.upload(angles).data.ptr), self._kv, self._device, count, cupy
        self._decode = _Token(kernels[0], *common, neighbours=False)
        self._prompt = _Token(kernels[1], *common, neighbours=True)
        self._history = _pinned(cupy, (max_seqlen + 1, self._batch), np.int32)
        self._best, self._arrivals = cupy.zeros(self._batch, np.uint64), cupy.zeros(self._batch, np.int32)
        arrays = self._decode.arrays
        self._choose = prepare_choose(
            self._decode.kernel,
            {
                **{name: arrays[name].data.ptr for name in ("logits", "ids", "positions")},
                "best": self._best.data.ptr,
                "arrivals": self._arrivals.data.ptr,
                "history": self._history.ctypes.data,
            },
            self._device,
        )
        self._graph: Any = None
        self._ahead: NDArray[np.int64] | None = None  # the tokens of `lengths`, if the device has later ones

    # ---- what a decoder asks -------------------------------------------------------------------------------

    @property
    def logits(self) -> NDArray[np.float32]:
        """Of each row's newest token, (batch, vocabulary); waits for the device."""
        return self._read("logits")[:, : self.geometry.vocabulary]

    @property
    def hidden(self) -> NDArray[np.float32]:
        """What the last layer left of each row's newest token, (batch, hidden); waits for the device."""
        return self._read("hidden")

    def reset(self) -> None:
        """Forget all tokens."""
        self.lengths[:], self._ahead = 0, None

    def read(self, rows: Sequence[NDArray[np.int64]]) -> None:
        """Take new tokens, at least one for each row, through the model."""
        self._ahead = None
        with self._cupy.cuda.Device(self._device), self._stream:
            if all(len(row) == 1 for row in rows):
                self._decode.set(ids=np.array([row[0] for row in rows]), positions=self.lengths)
                self._replay()
                self.lengths += 1
            else:
                for i, row in enumerate(rows):
                    self._read_row(i, row)

    def layer_outputs(self, ids: NDArray[np.int64]) -> list[NDArray[np.float32]]:
        """Run one row from its beginning; what each layer leaves of its tokens, (tokens, hidden)."""
        found = []
        with self._cupy.cuda.Device(self._device), self._stream:
            for depth in range(1, self.geometry.layers + 1):
                chunks: list[NDArray[np.float32]] = []
                self.reset()
                self._prompt.run_layers(depth)
                self._read_row(0, ids, chunks)
                found.append(np.concatenate(chunks)[: len(ids)])
        return found

    def tokens(self, sampling: Sampling, most: int) -> Iterator[NDArray[np.int64]]:
        """Choose up to `most` tokens for each row, one after the other; all but the last are run."""
        if sampling.temperature == 0:
            yield from self._likeliest(most)
            return
        for i in range(most):
            ids = sampling.choose(self.logits, self.lengths)
            yield ids
            if i < most - 1:
                self.read(list(ids[:, None]))

    # ---- launches ------------------------------------------------------------------------------------------

    def _replay(self) -> None:
        """One token of every row, and the choice of the next."""
        if self._graph is None:
            self._stream.synchronize()
            self._stream.begin_capture()
            self._decode.launch(self._stream.ptr)
            self._choose(self._stream.ptr)
            self._graph = self._stream.end_capture()
        self._graph.launch(self._stream)

    def _read_row(
        self, row: int, ids: NDArray[np.int64], hidden: list[NDArray[np.float32]] | None = None
    ) -> None:
        """Run tokens of a row; what the last layer leaves of every chunk goes to `hidden`."""
        prompt = self._prompt
        prompt.take_row(self._kv, row)
        for start in range(0, len(ids), CHUNK):
            part = ids[start : start + CHUNK]
            # What fills the last chunk up comes to positions that later tokens write again.
            prompt.set(
                ids=np.pad(part, (0, CHUNK - len(part))), positions=self.lengths[row] + np.arange(CHUNK)
            )
            prompt.launch(self._stream.ptr)
            self.lengths[row] += len(part)
            if hidden is not None:
                hidden.append(self._cupy.asnumpy(prompt.arrays["hidden"]))
        for name in ("hidden", "logits"):
            self._decode.arrays[name][row] = prompt.arrays[name][len(part) - 1]

    def _likeliest(self, most: int) -> Iterator[NDArray[np.int64]]:
        ids = None
        for i in range(most):
            with self._cupy.cuda.Device(self._device), self._stream:
                if i == 0:
                    self._settle()
                    self._decode.set(positions=self.lengths - 1)
                    self._expect(0)
                    self._choose(self._stream.ptr)
                else:  # the device has the tokens and their positions
                    self.lengths += 1
                    if self._ahead is None:
                        self._expect(0)
                        self._replay()
                    self._ahead = None
                    if i < most - 1:
                        self._expect(1)
                        self._replay()
                        self._ahead = ids
                ids = self._chosen()
            yield ids

    def _settle(self) -> None:
        """Let the device have what `lengths` say, if it is ahead: run the last of those tokens again."""
        if self._ahead is not None:
            self._decode.set(ids=self._ahead, positions=self.lengths - 1)
            self._ahead = None
            self._replay()

    def _expect(self, ahead: int) -> None:
        """Empty the cells where a choice of tokens for the positions so far behind `lengths` will come."""
        self._history[self.lengths + ahead, np.arange(self._batch)] = _EMPTY

    def _chosen(self) -> NDArray[np.int64]:
        """Wait for the tokens chosen for the positions behind `lengths`."""
        rows = np.arange(self._batch)
        while (found := self._history[self.lengths, rows]).min() == _EMPTY:
            if self._stream.done:
                self._stream.synchronize()  # raises if a launch has failed
                found = self._history[self.lengths, rows]
                break
        return found.astype(np.int64)

    def _read(self, name: str) -> NDArray[np.float32]:
        with self._cupy.cuda.Device(self._device), self._stream:
            self._settle()
            found: NDArray[np.float32] = self._cupy.asnumpy(self._decode.arrays[name])
        return found


class _Model:
    """Weights on the device: a table of matrices and what it points to."""

    def __init__(self, weights: Weights, cupy: Any) -> None:
        self._cupy, self._held = cupy, []  # type: Any, list[Any]
        table: list[tuple[int, int, int, int]] = []
        norms, order = [], rotary_pairs(weights.geometry.head_dim, weights.geometry.rotary_dim)
        for layer in weights.layers:
            table += [self._row(matrix) for matrix in layer.products]
            if layer.head_norms is not None:
                norms.append(layer.head_norms[:, order])
        table.append(self._row(weights.head()))
        self.matrices = self._address(matrix_table(table))
        self.head_norms = self._address(np.stack(norms)) if norms else 0
        self.embedding = self._address(weights.embedding)

    def upload(self, array: NDArray[Any]) -> Any:
        """A copy on the device: of 16-bit types their bits."""
        raw = np.ascontiguousarray(array)
        self._held.append(self._cupy.asarray(raw.view(np.uint16) if raw.itemsize == 2 else raw))
        return self._held[-1]

    def _address(self, array: NDArray[Any] | None) -> int:
        if array is None:
            return 0
        raw = np.ascontiguousarray(array)
        return int(self.upload(raw.view(np.uint8) if raw.dtype.names else raw).data.ptr)

    def _row(self, matrix: Matrix) -> tuple[int, int, int, int]:
        return (
            self._address(matrix.packed), self._address(matrix.bias), self._address(matrix.norm_weight),
            self._address(matrix.norm_bias),
        )  # fmt: skip


class _Token:
    """The launches of one token of a batch, and the arrays that they share."""

    def __init__(
        self, kernel: TokenKernel, model: _Model, angles: int, kv: Any, device: int, count: int, cupy: Any,
        *, neighbours: bool,
    ) -> None:  # fmt: skip
        self.kernel, self._cupy = kernel, cupy
        sizes = {"float32": np.float32, "int32": np.int32, "float16": np.uint16, "bfloat16": np.uint16}
        self.arrays = {
            name: cupy.zeros(shape, sizes[dtype]) for name, (shape, dtype) in kernel.workspace(count).items()
        }
        self.arrays["ids"] = cupy.zeros(kernel.batch, np.int32)
        at = {name: int(array.data.ptr) for name, array in self.arrays.items()}
        strides = [stride // 2 for stride in kv.strides[1:4]]
        if neighbours:
            strides[1] = 0
        own = {name: at[name] for name in kernel.workspace(count)}
        others = {"matrices": model.matrices, "head_norms": model.head_norms,
                  "k": int(kv[0].data.ptr), "v": int(kv[1].data.ptr)}  # fmt: skip
        self._token, self._call = prepare_token(
            kernel, {**own, **others}, strides, device=device, multiprocessors=count
        )
        shared = ("ids", "positions", "hidden", "statistics", "rotation")
        self._embed = prepare_embed(
            kernel, {"embedding": model.embedding, "angles": angles, **{name: at[name] for name in shared}},
            device,
        )  # fmt: skip

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

    def launch(self, stream: int) -> None:
        """Embed the tokens and run them."""
        self._embed(stream)
        self._token(stream)


def _pinned(cupy: Any, shape: tuple[int, ...], dtype: Any) -> NDArray[Any]:
    """Memory of the host that kernels write to."""
    count = int(np.prod(shape))
    memory = cupy.cuda.alloc_pinned_memory(count * np.dtype(dtype).itemsize)
    return np.frombuffer(memory, dtype, count).reshape(shape)

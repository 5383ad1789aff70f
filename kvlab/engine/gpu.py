"""A decoder on a GPU: a token is one launch in a CUDA graph, whose choice feeds the next one.

`token` (kernels/cuda/engine) runs embedded tokens, chooses the next ones and embeds them; for a draw `draw`
and `embed` come behind it. So a replay goes on where the last one ended and the host need not be asked;
chosen tokens arrive in a list in the host's memory. A stream keeps one token ahead of who reads it, so the
device does not wait for the host; who asks for logits meanwhile has the last token that was read run again.

Short prompts take the same kernel, 16 tokens of a row at a launch: with 0 as stride from row to row its
tokens are neighbours of one sequence, which see each other because keys and values are stored before
attention. Long ones go through a layer together (prompt.py), and the kernel has only the head to do.

`kvlab.engine.gpu_packed` has keys and values in a packed cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvlab.arguments import LONGEST
from kvlab.device import compute_capability, translated_out_of_memory
from kvlab.engine.cpu import rotation
from kvlab.engine.kernels import SETTINGS, prepare_choose, prepare_draw
from kvlab.engine.operations import Operations
from kvlab.engine.prompt import MAX_TOKENS, Attend, Prompts, load_torch, on_torch
from kvlab.engine.sampling import Sampling
from kvlab.engine.token_kernel import TokenKernel
from kvlab.engine.token_launch import Model, Token
from kvlab.engine.weights import Weights
from kvlab.errors import needs_extra
from kvlab.ops.attention import attention
from kvlab.ops.device_arrays import multiprocessors

__all__ = ["CLUSTERS", "PLANS", "Decoding", "GpuExecutor"]

CLUSTERS = {"cluster": 4, **{f"cluster-{size}": size for size in (1, 2, 4, 8, 16)}}
PLANS = ("graph", "ops", *CLUSTERS)
"""How a token is launched; see `kvlab.engine.Decoder`."""

CHUNK = 16
"""Tokens of a prompt at a launch."""
LAYER_SECONDS = 0.9e-3
"""What the products of a layer take at least: the host launches some fifty kernels of torch."""
_EMPTY = -1  # in the list of chosen tokens


class Decoding:
    """What decoding on a GPU is, wherever keys and values lie.

    Attributes
    ----------
    lengths : int64, (batch,)
        Tokens of each row so far.
    """

    runs_ahead = False
    """Whether a stream may run a token that nobody has asked for yet."""

    def __init__(self, weights: Weights, batch: int, max_seqlen: int, device: int) -> None:
        with needs_extra("cu13", "a decoder on a GPU"):
            import cupy
        self._cupy, self._device = cupy, device
        self.geometry, self._batch = weights.geometry, batch
        self.lengths = np.zeros(batch, np.int64)
        self._on_torch: Any = None
        self._logits: Any = None  # on torch
        self._prompts: Prompts | None = None
        self._ahead: NDArray[np.int64] | None = None  # the tokens of `lengths`, if the device has later ones
        with cupy.cuda.Device(device), translated_out_of_memory("the decoder"):
            self._stream = cupy.cuda.Stream(non_blocking=True)
            with self._stream:
                self._load(weights, max_seqlen)
            self._stream.synchronize()

    def _load(self, weights: Weights, max_seqlen: int) -> None:
        cupy, count = self._cupy, multiprocessors(self._device)
        angles = np.concatenate(
            rotation(np.arange(max_seqlen + CHUNK), weights.inverse_frequencies, weights.rotary_scale), 1
        ).swapaxes(1, 2)  # (positions, rotary_dim / 2, 2)
        model = self._model = Model(weights, angles, cupy)
        self._decode = self._make_token(model, max_seqlen, weights.dtype == "bfloat16", count)
        self._history = _pinned(cupy, (max_seqlen + 1, self._batch), np.int32)
        self._best, self._arrivals = cupy.zeros(self._batch, np.uint64), cupy.zeros(self._batch, np.int32)
        arrays = self._decode.arrays
        self._settings = cupy.zeros(SETTINGS.size, np.uint8)
        common = {
            **{name: arrays[name].data.ptr for name in ("logits", "ids", "positions")},
            "history": self._history.ctypes.data,
        }
        cells = {"best": self._best.data.ptr, "arrivals": self._arrivals.data.ptr}
        self._decode.let_choose(cells["best"], common["history"])
        settings = {"settings": self._settings.data.ptr}
        self._choices = {
            False: prepare_choose(self._decode.kernel, {**common, **cells}, self._device),
            True: prepare_draw(self._decode.kernel, {**common, **settings}, self._device),
        }
        self._draws = False

    def _make_token(self, model: Model, max_seqlen: int, bfloat16: bool, count: int) -> Token:
        """Take memory for keys and values, and return the launches of a token of every row."""
        raise NotImplementedError

    def _replay(self) -> None:
        """One token of every row, and the choice of the next."""
        raise NotImplementedError

    def _read_long(self, rows: Sequence[NDArray[np.int64]]) -> None:
        """Take prompts through the model."""
        raise NotImplementedError

    # ---- what a decoder asks -------------------------------------------------------------------------------

    @property
    def logits(self) -> NDArray[np.float32]:
        """Of each row's newest token, (batch, vocabulary); waits for the device."""
        return self._fetched("logits")[:, : self.geometry.vocabulary]

    @property
    def hidden(self) -> NDArray[np.float32]:
        """What the last layer left of each row's newest token, (batch, hidden); waits for the device."""
        return self._fetched("hidden")

    def logits_tensor(self) -> Any:
        """`logits` as a tensor of torch, whose current stream waits for this decoder's; the host does not."""
        torch = self._use_torch()
        if self._ahead is not None:
            with self._current():
                self._drop_ahead()
        if self._logits is None:
            self._logits = on_torch(self._decode.arrays["logits"], "float32")[:, : self.geometry.vocabulary]
        asking = torch.cuda.current_stream(self._device)
        asking.wait_stream(self._torch_stream)
        found = self._logits.clone()
        self._torch_stream.wait_stream(asking)  # the next token writes them again
        return found

    def reset(self) -> None:
        """Forget all tokens."""
        self.lengths[:], self._ahead = 0, None

    def read(self, rows: Sequence[NDArray[np.int64]]) -> None:
        """Take new tokens, at least one for each row, through the model."""
        self._ahead = None
        with self._current():
            if all(len(row) == 1 for row in rows):
                self._replay_given(np.array([row[0] for row in rows]), self.lengths)
                self.lengths += 1
            else:
                self._read_long(rows)

    def run_again(self) -> None:
        """Launch the newest token of each row again, kernel by kernel; to time it."""
        with self._current(), self._torch_current():
            self._decode.set(positions=self.lengths - 1)
            self._decode.launch(self._stream.ptr)

    def tokens(self, sampling: Sampling, most: int) -> Iterator[NDArray[np.int64]]:
        """Choose up to `most` tokens for each row, one after the other; all but the last are run."""
        with self._current():
            self._drop_ahead()
            self._draws = sampling.temperature > 0
            if self._draws:
                self._settings.set(settings_of(sampling), self._cupy.cuda.get_current_stream())
        yield from self._fed_back(most)

    # ---- launches ------------------------------------------------------------------------------------------

    @contextmanager
    def _current(self) -> Iterator[None]:
        """Inside, CuPy launches on the stream of this decoder."""
        with self._cupy.cuda.Device(self._device), self._stream:
            yield

    @contextmanager
    def _torch_current(self) -> Iterator[Any]:
        """Inside, torch launches there, too; it takes the host 20 us, so not all tokens do."""
        torch = self._use_torch()
        with torch.cuda.stream(self._torch_stream):
            yield torch

    def _use_torch(self) -> Any:
        if self._on_torch is None:
            self._on_torch = load_torch()
            self._torch_stream = self._on_torch.cuda.ExternalStream(self._stream.ptr, device=self._device)
        return self._on_torch

    def _run_prompts(
        self, rows: Sequence[NDArray[np.int64]], attend_of: Callable[[NDArray[np.int64]], Attend],
        watch: Callable[[Any], None] | None = None,
    ) -> None:  # fmt: skip
        """Take prompts through the layers, and the last token of each through the head.

        `attend_of(counts)` gives the `Attend` of so many tokens of each row; `watch` as of `Prompts.run`.
        """
        with self._current(), self._torch_current() as torch:
            if self._prompts is None:
                self._prompts = self._model.prompts()
            width, step = max(len(row) for row in rows), max(MAX_TOKENS // len(rows), 1)
            hidden = on_torch(self._decode.arrays["hidden"], "float32")
            for begin in range(0, width, step):  # a row ends where the longest ends
                spans = [np.clip(np.array([begin, begin + step]) + len(row) - width, 0, None) for row in rows]
                parts = [row[first:end] for row, (first, end) in zip(rows, spans, strict=True)]
                counts = np.array([len(part) for part in parts])
                positions = np.concatenate(
                    [first + np.arange(count) for first, count in zip(self.lengths, counts, strict=True)]
                )
                ids, positions = (
                    torch.from_numpy(x).to(hidden.device) for x in (np.concatenate(parts), positions)
                )
                x = self._prompts.run(ids, positions, attend_of(counts), watch)
                self.lengths += counts
                present = torch.from_numpy(counts > 0).to(hidden.device)
                hidden[present] = x[torch.from_numpy(np.cumsum(counts)).to(hidden.device)[present] - 1]
            groups = hidden.unflatten(1, (-1, 16))  # what norms merge, as the kernel leaves it
            mean = groups.mean(-1, keepdim=True)
            squares = (groups - mean).square().sum(-1, keepdim=True)
            on_torch(self._decode.arrays["statistics"], "float32")[...] = torch.cat([mean, squares], -1)
            self._decode.launch_head(self._stream.ptr)

    def _choose(self, stream: int) -> None:
        """Choose and embed each row's next token, the likeliest or, if `tokens` said so, by a draw."""
        self._choices[self._draws](stream)
        self._decode.launch_embed(stream)

    def _replay_given(self, ids: NDArray[np.int64], positions: NDArray[np.int64]) -> None:
        """One token of every row that is not the device's own choice, and the choice of the next."""
        self._decode.set(ids=ids, positions=positions)
        self._decode.launch_embed(self._stream.ptr)
        self._replay()

    def _chooses_at_once(self) -> bool:
        """Whether the launch that makes logits makes the choice, too."""
        return self._decode.can_choose and not self._draws

    def _fed_back(self, most: int) -> Iterator[NDArray[np.int64]]:
        ids = None
        for i in range(most):
            with self._current():
                if i == 0:
                    self._drop_ahead()
                    self._decode.set(positions=self.lengths - 1)
                    self._expect(0)
                    self._choose(self._stream.ptr)
                else:  # the device has the tokens and their positions
                    if self._ahead is None:
                        self._expect(1)
                        self._replay()
                    self.lengths += 1
                    self._ahead = None
                    if self.runs_ahead and i < most - 1:
                        self._expect(1)
                        self._replay()
                        self._ahead = ids
                ids = self._chosen()
            yield ids

    def _drop_ahead(self) -> None:
        """Drop the token that the device has ahead of `lengths`, if any: run the one before it again."""
        if self._ahead is not None:
            ids, self._ahead = self._ahead, None
            self._replay_given(ids, self.lengths - 1)

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

    def _fetched(self, name: str) -> NDArray[np.float32]:
        with self._current():
            self._drop_ahead()
            found: NDArray[np.float32] = self._cupy.asnumpy(self._decode.arrays[name])
        return found


class GpuExecutor(Decoding):
    """Carries out the tokens of a `kvlab.engine.Decoder` on a GPU.

    Keys and values lie in plain arrays: what a token leaves behind `lengths` is written again. With plan
    "ops", and but on compute capability 9.0, tokens take a launch for each operation (`Operations`).
    """

    runs_ahead = True

    def __init__(self, weights: Weights, batch: int, max_seqlen: int, device: int, plan: str) -> None:
        self._plan = plan
        super().__init__(weights, batch, max_seqlen, device)

    def _make_token(self, model: Model, max_seqlen: int, bfloat16: bool, count: int) -> Token:
        geometry = self.geometry
        kernels = [TokenKernel.fitting(geometry, n, bfloat16, count) for n in (self._batch, CHUNK)]
        shape = (geometry.layers, self._batch, geometry.heads_kv, max_seqlen + CHUNK, geometry.head_dim)
        self._kv = self._cupy.zeros((2, *shape), np.uint16)
        common = model, self._kv, self._device, count
        whole = self._plan == "graph" and compute_capability(self._device) == (9, 0)
        kind = Token if whole else Operations
        self._prompt = kind(kernels[1], *common, neighbours=True)
        self._graphs: dict[bool, Any] = {}  # of greedy choices and of draws
        if self._plan in CLUSTERS:
            return Operations(kernels[0], *common, cluster=CLUSTERS[self._plan])
        return kind(kernels[0], *common)

    def layer_outputs(self, ids: NDArray[np.int64]) -> list[NDArray[np.float32]]:
        """Run one row from its beginning; what each layer leaves of its tokens, (tokens, hidden)."""
        found = []
        with self._current():
            for depth in range(1, self.geometry.layers + 1):
                chunks: list[NDArray[np.float32]] = []
                self.reset()
                self._prompt.run_layers(depth)
                self._read_row(0, ids, chunks)
                found.append(np.concatenate(chunks)[: len(ids)])
        return found

    def layer_values(self, ids: NDArray[np.int64]) -> dict[str, NDArray[np.float32]]:
        """Run one row from its beginning; what every layer computes on the way, a token a row."""
        prompt, found = self._prompt, dict[str, list[NDArray[np.float32]]]()
        if not isinstance(prompt, Operations):
            raise NotImplementedError(
                f"plan={self._plan!r}: one kernel keeps no values within a layer; take plan='ops'"
            )
        self.reset()
        with self._current():
            prompt.take_row(self._kv, 0)
            for start in range(0, len(ids), CHUNK):
                part = ids[start : start + CHUNK]
                self._set_chunk(part, start)
                prompt.launch_embed(self._stream.ptr)
                for layer in range(self.geometry.layers):
                    for name, x in prompt.layer_values(layer, self._stream.ptr).items():
                        found.setdefault(f"{layer}.{name}", []).append(x[: len(part)])
        return {name: np.concatenate(parts) for name, parts in found.items()}

    def _set_chunk(self, part: NDArray[np.int64], position: int) -> None:
        """Give the prompt's launches up to CHUNK tokens of a row, from a position on."""
        # What fills the last chunk up comes to positions that later tokens write again.
        self._prompt.set(ids=np.pad(part, (0, CHUNK - len(part))), positions=position + np.arange(CHUNK))

    def _replay(self) -> None:
        if self._plan == "ops":
            self._step()
            return
        if self._draws not in self._graphs:
            self._stream.synchronize()
            self._stream.begin_capture()
            self._step()
            self._graphs[self._draws] = self._stream.end_capture()
        self._graphs[self._draws].launch(self._stream)

    def _step(self) -> None:
        """Launch one token of every row and the choice of the next."""
        at_once = self._chooses_at_once()
        self._decode.run(self._stream.ptr, chooses=at_once)
        if not at_once:
            self._choose(self._stream.ptr)

    def _read_long(self, rows: Sequence[NDArray[np.int64]]) -> None:
        geometry, chunks = self.geometry, sum(-(-len(row) // CHUNK) for row in rows)
        launch = 2 * geometry.parameters / 3.4e12 + 12e-6 * geometry.layers  # seconds, as an H200 takes
        if chunks * launch > LAYER_SECONDS * geometry.layers:
            self._run_prompts(rows, self._attend)
        else:
            for i, row in enumerate(rows):
                self._read_row(i, row)

    def _attend(self, counts: NDArray[np.int64]) -> Attend:
        """Store keys and values of so many tokens of each row and attend, row by row."""
        kv, first, ends = on_torch(self._kv, self._model.dtype), self.lengths.copy(), np.cumsum(counts)

        def attend(layer: int, q: Any, k: Any, v: Any) -> Any:
            out = q.new_empty(q.shape)
            for row in np.flatnonzero(counts):
                part, end = slice(ends[row] - counts[row], ends[row]), first[row] + counts[row]
                for stored, new in zip(kv[:, layer, row], (k, v), strict=True):
                    stored[:, first[row] : end] = new[part].transpose(0, 1)
                keys, values = kv[:, layer, row, :, :end].transpose(1, 2)[:, None]
                out[part] = attention(q[None, part], keys, values, causal=True)[0]
            return out

        return attend

    def _read_row(
        self, row: int, ids: NDArray[np.int64], hidden: list[NDArray[np.float32]] | None = None
    ) -> None:
        """Run tokens of a row; what the last layer leaves of every chunk goes to `hidden`."""
        prompt = self._prompt
        prompt.take_row(self._kv, row)
        for start in range(0, len(ids), CHUNK):
            part = ids[start : start + CHUNK]
            self._set_chunk(part, self.lengths[row])
            prompt.launch(self._stream.ptr)
            self.lengths[row] += len(part)
            if hidden is not None:
                hidden.append(self._cupy.asnumpy(prompt.arrays["hidden"]))
        for name in ("hidden", "logits"):
            self._decode.arrays[name][row] = prompt.arrays[name][len(part) - 1]


def settings_of(sampling: Sampling) -> NDArray[np.uint8]:
    """What engine/draw.cu reads."""
    found = np.zeros(1, SETTINGS.dtype)
    found["inverse_temperature"] = min(1 / sampling.temperature, np.finfo(np.float32).max)
    found["top_k"], found["top_p"] = min(sampling.top_k, LONGEST), sampling.top_p
    found["seed"] = sampling.seed
    return found.view(np.uint8)


def _pinned(cupy: Any, shape: tuple[int, ...], dtype: Any) -> NDArray[Any]:
    """Memory of the host that kernels write to."""
    count = int(np.prod(shape))
    memory = cupy.cuda.alloc_pinned_memory(count * np.dtype(dtype).itemsize)
    return np.frombuffer(memory, dtype, count).reshape(shape)

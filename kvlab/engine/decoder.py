"""`Decoder`: a language model that decodes from packed weights, on the CPU or in one kernel a token on a GPU.

This file knows what a user passes and gets back: rows of token numbers, logits, limits. What a token takes is
an executor's: `kvlab.engine.cpu` computes in Numba and NumPy, `kvlab.engine.gpu` launches a CUDA graph.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvlab.arguments import check_names, whole_number
from kvlab.cache.cache import MixedPrecisionCache
from kvlab.engine.cpu import CpuExecutor
from kvlab.engine.folder import config_of, load_model, sizes_of
from kvlab.engine.geometry import Geometry, published
from kvlab.engine.gpu import GpuExecutor
from kvlab.engine.gpu_packed import PackedGpuExecutor
from kvlab.engine.ids import is_flat, on_host, rows_of, stop_tokens
from kvlab.engine.options import cache_budget_named, check_options
from kvlab.engine.sampling import Sampling
from kvlab.engine.weights import Weights, from_model, from_seed
from kvlab.errors import BudgetError
from kvlab.sizes import parse_budget

__all__ = ["Decoder"]

_SAMPLING = ("temperature", "top_k", "top_p", "seed", "stop")


class Decoder:
    """A decoder of the GPT-NeoX or Llama family, ready to read and continue texts.

    `from_pretrained` takes a model of transformers, `from_config` draws weights for known sizes. Arithmetic
    is exact: LayerNorm in two passes, GELU with erf, rotary angles and all sums in float32. Same input, same
    device: same bits; a row's result does not depend on the others but for the order in which attention
    sums.

    Parameters
    ----------
    weights : kvlab.engine.weights.Weights
    batch : int
        Rows, 1 to 16.
    max_seqlen : int, optional
        Tokens that a row may have; by default what the model is made for (its sliding window, if it has one),
        up to 4,096.
    device : str, optional
        "cpu", the default, or "cuda", "cuda:1", ...: a GPU of compute capability 8.0 or more, counted among
        those that CUDA_VISIBLE_DEVICES shows.
    plan : {"graph", "ops", "cluster", "cluster-1", ..., "cluster-16"}
        How a GPU takes a token: in one CUDA graph, of one kernel on compute capability 9.0; to debug, in a
        launch for each operation; or, to compare, with the attention block of a layer in a kernel that has a
        cluster of 1, 2, 4, 8 or 16 blocks for each KV head, for one row from 9.0 on. They differ by rounding
        alone.
    cache_budget : float, int, str, optional
        Budget of the KV cache, as of `kvlab.MixedPrecisionCache`; by default keys and values stay in 16 bits.
        On a GPU this takes torch.
    **cache_options
        Of a cache with a budget, as of `kvlab.MixedPrecisionCache`: bits, residual, sink, recent, floor,
        importance, allocator, realloc_every, ema_decay.

    Attributes
    ----------
    geometry : Geometry
    device, plan : str
    batch, max_seqlen : int
    cache : MixedPrecisionCache or None
        On a GPU None without a budget: keys and values lie in plain arrays there.

    Raises
    ------
    ValueError, TypeError
        If an argument is none of those, or options of a cache are given without a budget.
    BudgetError
        If the budget does not hold `max_seqlen` tokens of every row.
    NotImplementedError
        On a GPU that is not there or has another compute capability, or with a budget and a head_dim that
        packed caches do not take there.
    OutOfMemory
        If weights, keys and values do not fit the GPU.

    Examples
    --------
    >>> decoder = Decoder.from_config("pythia-14m", layers=1, max_seqlen=64)
    >>> decoder.prefill([3, 1, 4, 1, 5]).shape
    (1, 50304)
    >>> len(decoder.generate([3, 1, 4], max_new_tokens=8, temperature=0.8, seed=1))
    8
    """

    def __init__(
        self,
        weights: Weights,
        *,
        batch: int = 1,
        max_seqlen: int | None = None,
        device: str | None = None,
        plan: str = "graph",
        cache_budget: float | int | str | None = None,
        **cache_options: Any,
    ) -> None:
        if not isinstance(weights, Weights):
            raise TypeError(
                f"weights is a {type(weights).__name__}; make a decoder with Decoder.from_pretrained(model "
                "or folder) or Decoder.from_config(name)"
            )
        geometry = weights.geometry
        self.geometry: Geometry = geometry
        checked = check_options(
            geometry, batch=batch, max_seqlen=max_seqlen, device=device, plan=plan,
            cache_budget=cache_budget, **cache_options,
        )  # fmt: skip
        self.batch, self.max_seqlen = checked.batch, checked.max_seqlen
        self.device, self.plan = checked.device, checked.plan
        self.cache: MixedPrecisionCache | None = None
        self._executor: CpuExecutor | GpuExecutor | PackedGpuExecutor
        self._texts = 0  # counts what begins or goes on with a text
        if self.device != "cpu" and cache_budget is None:
            self._executor = GpuExecutor(weights, self.batch, self.max_seqlen, checked.index, self.plan)
            return
        if cache_budget is None:
            cache_options = {"bits": 16}
        with self._named(cache_budget):
            self.cache = MixedPrecisionCache(
                geometry.layers, geometry.heads_q, geometry.heads_kv, geometry.head_dim,
                batch=self.batch, budget=cache_budget, max_seqlen=self.max_seqlen,
                plan_length=self.max_seqlen, dtype=weights.dtype, device=self.device,
                rotary=weights.inverse_frequencies.tolist(), **cache_options,
            )  # fmt: skip
        if self.device == "cpu":
            self._executor = CpuExecutor(weights, self.cache)
        else:
            self._executor = PackedGpuExecutor(weights, self.cache, self.max_seqlen, checked.index)

    @classmethod
    def from_pretrained(
        cls, model_or_path: Any, *, dtype: Any = None, **options: Any
    ) -> Decoder:  # fmt: skip
        """Make a decoder from a model of transformers.

        Parameters
        ----------
        model_or_path : transformers.PreTrainedModel, str or path
            GPT-NeoX (Pythia), Llama (SmolLM2), Mistral, Qwen2 or Qwen3 with a head for causal language; or
            the folder of one, or its name in the Hugging Face cache of this machine. Nothing is downloaded. A
            model keeps its weights; of a folder each layer is let go once it is packed. A model with a
            sliding window is decoded up to as many tokens.
        dtype : {"float16", "bfloat16"} or such a dtype of torch or NumPy, optional
            Of weights, keys and values; by default the model's own, for a float32 model "float16".
        **options
            As of `Decoder`; of a folder they are checked before any weight is read.

        Raises
        ------
        NotImplementedError
            If the model has a piece that the engine does not compute, or a format, such as GGUF, that it does
            not read; the message names it.
        ValueError, TypeError
            If an argument is none of those, a weight is beyond the range of `dtype`, or a size is not
            supported.
        OSError
            If there is no model at the path, or a file of it is missing.
        FormatError
            If a file is damaged or lacks weights of the model, or a weight is NaN or infinite.
        """
        is_model = hasattr(model_or_path, "get_output_embeddings")
        if is_model:
            model = model_or_path
        else:
            config = config_of(model_or_path)
            check_options(sizes_of(config), **options)
            model = load_model(config, dtype)
        return cls(from_model(model, dtype, consume=not is_model), **options)

    @classmethod
    def from_config(
        cls, name: str, *, seed: int = 0, layers: int | None = None, dtype: Any = "float16", **options: Any
    ) -> Decoder:
        """Make a decoder of random weights in the sizes of a known model.

        Parameters
        ----------
        name : str
            Of `kvlab.engine.geometry.PUBLISHED`, for example "pythia-2.8b" or "llama-3.1-8b".
        seed : int
            The same weights for a seed on every machine.
        layers : int, optional
            The first so many layers alone.
        dtype : {"float16", "bfloat16"} or such a dtype of torch or NumPy
        **options
            As of `Decoder`.

        Raises
        ------
        ValueError
            If the name is unknown; the message lists the names.
        """
        check_options(published(name)[0], **options)
        return cls(from_seed(name, seed, dtype, layers=layers), **options)

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens of each row so far, (batch,)."""
        return self._executor.lengths.copy()

    @property
    def hidden(self) -> NDArray[np.float32]:
        """What the last layer left of each row's newest token, before the final norm, (batch, hidden)."""
        return np.array(self._executor.hidden)

    def layer_outputs(self, ids: Any) -> list[NDArray[np.float32]]:
        """Forget all tokens, read a row, and forget it again; to compare layers with those of other programs.

        Parameters
        ----------
        ids
            As of `prefill`, one row; a decoder of one row.

        Returns
        -------
        list of float32, (tokens, hidden)
            What each layer leaves of every token, before the final norm.

        Raises
        ------
        ValueError, TypeError
            As of `prefill`.
        """
        found = self._executor.layer_outputs(self._one_row(ids, "layer_outputs"))
        self.reset()
        return found

    def layer_values(self, ids: Any) -> dict[str, NDArray[np.float32]]:
        """Forget all tokens, read a row, and forget it again; to look at what layers compute on the way.

        Parameters
        ----------
        ids
            As of `prefill`, one row; a decoder of one row on the CPU, or on a GPU with ``plan="ops"``.

        Returns
        -------
        dict of float32 arrays, a token a row
            By layer and name: "0.normed", "0.q", "0.k", "0.q_rotated", "0.k_rotated", "0.v", "0.attended" and
            "0.out".

        Raises
        ------
        NotImplementedError
            On a GPU with another plan.
        ValueError, TypeError
            As of `prefill`.
        """
        if isinstance(self._executor, PackedGpuExecutor):
            raise NotImplementedError(
                "cache_budget: on a GPU a packed cache's launches keep no values within a layer; leave it "
                "out and take plan='ops'"
            )
        found = self._executor.layer_values(self._one_row(ids, "layer_values"))
        self.reset()
        return found

    def _one_row(self, ids: Any, of: str) -> NDArray[np.int64]:
        """The row of a decoder of one, which has forgotten all others."""
        if self.batch > 1:
            raise ValueError(f"batch={self.batch}: {of} reads one row; make a decoder with batch=1")
        self.reset()
        (row,) = rows_of(ids, self.batch, self.geometry.vocabulary)
        self._check_room(np.array([len(row)]))
        return row

    def reset(self) -> None:
        """Forget all tokens."""
        self._texts += 1
        self._executor.reset()

    def prefill(self, ids: Any) -> NDArray[np.float32]:
        """Read tokens behind those that are there.

        Parameters
        ----------
        ids : sequence of int, of sequences of int, or integer array
            One row, or `batch` rows, which may differ in length; each has at least one token.

        Returns
        -------
        float32, (batch, vocabulary)
            Logits of what follows each row's last token.

        Raises
        ------
        ValueError, TypeError
            If `ids` are not that, or would make a row longer than `max_seqlen`.
        BudgetError
            If the cache's budget does not hold them.
        """
        self._read(ids)
        return np.array(self._executor.logits)

    def prefill_tensor(self, ids: Any) -> Any:
        """`prefill` on a GPU whose logits stay there: a tensor of torch, on its current stream."""
        if isinstance(self._executor, CpuExecutor):
            raise ValueError("device='cpu': logits of this decoder are arrays of NumPy; call prefill")
        self._read(ids)
        return self._executor.logits_tensor()

    def _read(self, ids: Any) -> None:
        rows = rows_of(ids, self.batch, self.geometry.vocabulary)
        self._check_room(np.array([len(row) for row in rows]))
        self._texts += 1
        self._executor.read(rows)

    def step(self, ids: Any) -> NDArray[np.float32]:
        """Read one token for each row: `prefill` of ``(batch,)`` tokens.

        Returns
        -------
        float32, (batch, vocabulary)

        Raises
        ------
        ValueError, TypeError, BudgetError
            As of `prefill`, and if there is not one token for each row.
        """
        tokens = on_host(ids)
        tokens = tokens.reshape(1) if tokens.ndim == 0 else tokens
        if tokens.shape not in ((self.batch,), (self.batch, 1)):
            raise ValueError(
                f"ids has shape {tokens.shape}, the decoder has batch={self.batch}: step takes one token for "
                "each row, prefill any number"
            )
        return self.prefill(tokens.reshape(-1, 1))

    def stream(
        self,
        max_new_tokens: int,
        *,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        seed: int = 0,
        stop: int | Collection[int] = (),
    ) -> Iterator[list[int | None]]:
        """Continue what was read, one token a row at a time, until every row has met a stop token.

        The last tokens that it gives have not been read: to go on behind them, begin the next `prefill` with
        them. A stream that was left half-way ends with the next call of `prefill`, `step`, `stream`,
        `generate` or `reset`.

        Parameters
        ----------
        max_new_tokens : int
        temperature : float
            0: the likeliest token. Otherwise tokens are drawn, with logits divided by it.
        top_k : int
            Draw among so many of the likeliest tokens; 0: among all.
        top_p : float
            Then among the fewest whose probabilities reach this together.
        seed : int
            The same draws for a seed, whatever the other rows are.
        stop : int or collection of int
            Tokens of the vocabulary that end a row; they are given, too.

        Yields
        ------
        list of int or None
            A token for each row, None for rows that have ended.

        Raises
        ------
        ValueError, TypeError
            If an argument is none of those, nothing was read, or the tokens would not fit `max_seqlen`.
        RuntimeError
            If the stream has ended because another call has read or forgotten tokens since.
        """
        sampling = Sampling(temperature, top_k, top_p, seed)
        most = whole_number(max_new_tokens, "max_new_tokens", 0)
        ends = stop_tokens(stop, self.geometry.vocabulary)
        if not self._executor.lengths.all():
            raise ValueError(f"lengths={self.lengths.tolist()}: every row needs a token first; call prefill")
        self._check_room(max(most - 1, 0))
        self._texts += 1
        return self._continue(sampling, most, ends, self._texts)

    def _continue(
        self, sampling: Sampling, most: int, ends: set[int], text: int
    ) -> Iterator[list[int | None]]:  # fmt: skip
        running, tokens = [True] * self.batch, self._executor.tokens(sampling, most)
        for _ in range(most):
            if not any(running):
                return
            if self._texts != text:
                raise RuntimeError(
                    "this stream has ended: the decoder has read or forgotten tokens since; call stream again"
                )
            ids = next(tokens)
            yield [int(one) if goes_on else None for one, goes_on in zip(ids, running, strict=True)]
            running = [on and int(one) not in ends for one, on in zip(ids, running, strict=True)]

    def generate(self, ids: Any, max_new_tokens: int, **options: Any) -> list[Any]:
        """Forget all tokens, read `ids` and continue them.

        Parameters
        ----------
        ids
            As of `prefill`.
        max_new_tokens : int
        **options
            As of `stream`: temperature, top_k, top_p, seed, stop.

        Returns
        -------
        list of int, or list of such lists
            The new tokens of one row, or of each row if `ids` has rows. A stop token is the last of its row.

        Raises
        ------
        ValueError, TypeError
            As of `prefill` and `stream`; nothing was changed then.
        """
        check_names(options, (*_SAMPLING, "max_new_tokens"), "Decoder.generate")
        Sampling(**{name: value for name, value in options.items() if name != "stop"})
        stop_tokens(options.get("stop", ()), self.geometry.vocabulary)
        most = whole_number(max_new_tokens, "max_new_tokens", 0)
        rows = rows_of(ids, self.batch, self.geometry.vocabulary)
        self._check_room(max(most - 1, 0), held=[len(row) for row in rows])
        self.reset()
        self.prefill(rows)
        found: list[list[int]] = [[] for _ in range(self.batch)]
        for tokens in self.stream(max_new_tokens, **options):
            for row, token in zip(found, tokens, strict=True):
                if token is not None:
                    row.append(token)
        return found[0] if is_flat(ids) else found

    def _check_room(self, new: Any, held: Any = None) -> None:
        """Refuse more tokens, of each row or of all, behind those that are held, than a row may have."""
        held = self._executor.lengths if held is None else np.asarray(held)
        new = np.broadcast_to(new, held.shape)
        fullest = int((held + new).argmax())
        before, more = int(held[fullest]), int(new[fullest])
        if before + more > self.max_seqlen:
            longest = self.geometry.max_positions
            advice = (
                f"make the decoder with a larger max_seqlen, up to {longest}, or"
                if self.max_seqlen < longest
                else "the model takes no more, so read or generate fewer, or"
            )
            raise ValueError(
                f"max_seqlen={self.max_seqlen}: a row would have {before + more} tokens, {before} held and "
                f"{more} new; {advice} call reset"
            )

    @contextmanager
    def _named(self, cache_budget: float | int | str | None) -> Iterator[None]:
        """Let errors of the cache name what a decoder's user can change."""
        try:
            with cache_budget_named():
                yield
        except BudgetError as error:
            longest = error.longest_length
            if error.needed_bytes is None or longest is None:
                raise
            geometry, needed = self.geometry, error.needed_bytes
            tokens = geometry.layers * self.batch * self.max_seqlen
            ratio = math.ceil(1e3 * needed / (tokens * 4 * geometry.heads_kv * geometry.head_dim)) / 1e3
            shorter = (
                f", or take max_seqlen={longest}" if longest and parse_budget(cache_budget).nbytes else ""
            )
            raise BudgetError(
                f"cache_budget={cache_budget!r}: {self.batch} x {self.max_seqlen} tokens need {needed} bytes "
                f"even at the lowest widths, {ratio} of what 16 bits take. Raise cache_budget to that, add a "
                f"lower width to bits (width 0: tokens may be evicted){shorter}",
                needed_bytes=needed, longest_length=longest,
            ) from None  # fmt: skip

"""Calls of a model (`step`, `append`, `attend`) on any device: checks of arguments, first use of memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from typing import Any

import numpy as np

from kvlab.arguments import LONGEST, number, renamed, whole_number
from kvlab.arrays import Array, ArrayT, device_of
from kvlab.cache import prefill
from kvlab.cache.budget import Limit
from kvlab.cache.contents import contents_of, fill
from kvlab.cache.cpu import CPU
from kvlab.cache.cuda import GPU
from kvlab.cache.importance import observed_by
from kvlab.cache.launches import keep_launches, launch_again
from kvlab.cache.layers import Layer, LayerFormat
from kvlab.cache.options import CacheOptions
from kvlab.cache.step import DeviceCache
from kvlab.device import gpus_missing_because, translated_out_of_memory
from kvlab.ladder import Ladder, parse_bits
from kvlab.ops.device_arrays import dense_strides
from kvlab.ops.frame import STEADY_OVER, mean_factors
from kvlab.ops.layer_state import MAX_NEW
from kvlab.shapes import match_shapes
from kvlab.torch_compile import opaque
from kvlab.views import CudaView

__all__ = ["EXECUTORS", "Runner"]

EXECUTORS: dict[str, Any] = {"cpu": CPU, "cuda": GPU}
"""Who carries out the operations of a cache, by the kind of its device."""


class Runner(CacheOptions):
    """The layers of a cache and its steps; see `kvlab.MixedPrecisionCache`.

    On a GPU, memory is taken when the first array comes, whose framework then gives it; until then the pages
    of a cache that was loaded lie in host memory.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        ladders, observed = parse_bits(self.bits, self.num_layers), observed_by(self.importance)

        @cache  # layers are often alike, and then they are one
        def layer_of(ladder: Ladder, window: int, turns: tuple[float, ...]) -> Layer:
            pages = LayerFormat(ladder, self.num_heads_kv, self.head_dim, self.dtype)
            length = max(STEADY_OVER, self.plan_length)
            factor = mean_factors(turns, self.head_dim, length) if turns else None
            return Layer(pages, self.residual, observed, window, mean_factor=factor)

        layers = [*map(layer_of, ladders, self.windows, self.rotary_of_layers)]
        if self.frames is not None:
            layers = [
                replace(layer, frame=self.frames.of_layer(i, in_blocks=layer.store.in_blocks))
                for i, layer in enumerate(layers)
            ]
        limit = Limit(
            self.budget, layers, batch=self.batch, plan_length=self.plan_length, max_seqlen=self.max_seqlen,
            rewind=self.rewind,
        )  # fmt: skip
        if self.max_seqlen is not None:
            limit.check(self.max_seqlen, self.batch)
        self._layers, self._limit = layers, limit
        self._executor: Any = EXECUTORS["cuda" if self.on_gpu else "cpu"]
        self._has_memory = not self.on_gpu  # arrays of the device
        self._accepted: set[Any] = set()  # layouts of arguments that were found to be right
        self._fitting: tuple[int, int] = (0, 0)  # tokens of a row and rows that were found to fit
        self._device = self._make(EXECUTORS["cpu"], np.empty(0, np.uint8), 0)
        self._copies_nothing = self.on_gpu

    # ---- what a model calls --------------------------------------------------------------------------------

    @opaque
    def step(
        self,
        layer: int,
        q: ArrayT,
        k: Array,
        v: Array,
        *,
        scale: float | None = None,
        softcap: float = 0.0,
        valid: Array | None = None,
    ) -> ArrayT:
        """Attend with new queries, then store the new keys and values.

        Parameters
        ----------
        layer : int
            Layers are stepped in any order, each once per time step.
        q : (B, Sq, Hq, D) array
            New queries; they see all stored tokens and, causally and exactly, the new ones.
        k, v : (B, Sq, Hkv, D) arrays
            New keys (already rotated by position) and values.
        scale : float, optional
            Default: 1 / sqrt(head_dim).
        softcap : float
            If positive, scores are `softcap * tanh(score / softcap)`.
        valid : (B, Sq) bool array, optional
            False: padding. Its keys and values are neither attended nor stored, and its query sees nothing:
            the row of the result is 0 whatever stands before it, for any number of new tokens (its
            log-sum-exp is -inf), as is any row that sees no token.

        Returns
        -------
        (B, Sq, Hq, D) array
            Of the kind and dtype of `q`.

        Notes
        -----
        On a GPU a step of up to 16 tokens only launches kernels, unless a budget is so tight that plans may
        have to be repeated, or allocator "dp" or a function as importance takes it to the CPU. A step of
        more tokens waits for the device behind the last layer, and behind each layer if `valid` is given,
        whose tokens the host counts.

        Raises
        ------
        BudgetError
            If the tokens do not fit; the cache is as it was.
        ValueError
            If a float16 cache on the CPU is to keep a finite key or value of float32 or bfloat16 beyond
            65,504, the largest number of float16; the cache is as it was.
        """
        layer, (scale, softcap) = self._layer(layer), self._scores(scale, softcap)
        out: ArrayT = self._step(layer, q, k, v, scale, softcap, valid)
        return out

    def _step(self, layer: int, q: Any, k: Any, v: Any, scale: float, softcap: float, valid: Any) -> Any:
        given, executor = q, self._executor
        valid = None if valid is None else executor.as_mask(valid)
        q, k, v = executor.as_input(q, "q", ""), *self._as_inputs(k, v, valid)
        device, views, mask = self._ready(layer, {"q": q, "k": k, "v": v}, valid)
        num_new = views[0].shape[1]
        if num_new == 0:
            out = executor.empty(views[0].shape, views[0].dtype, q)
        elif device.is_decode(num_new) and device.ensure_open_pages(layer, num_new):
            try:
                out = device.step(layer, q, views, mask, scale, softcap)
            except (
                Exception
            ):  # a block around the call would take longer than these lines, which cost nothing
                with translated_out_of_memory(f"a step of {num_new} tokens"):
                    raise
        else:
            with translated_out_of_memory(f"a step of {num_new} tokens"):
                out = prefill.step(device, layer, [q, k, v], views, valid, scale, softcap)
        return executor.as_output(out, given)

    def _as_inputs(self, k: Any, v: Any, valid: Any) -> list[Any]:
        """New keys and values as the executor takes them."""
        as_input, dtype = self._executor.as_input, self.dtype
        return [as_input(x, name, dtype, valid) for x, name in ((k, "k"), (v, "v"))]

    @opaque
    def append(self, layer: int, k: Array, v: Array, *, valid: Array | None = None) -> None:
        """Store keys and values without queries; importance, where it is attention, starts from the key norm.

        Parameters
        ----------
        layer : int
        k, v : (B, S, Hkv, D) arrays
            New keys (already rotated by position) and values.
        valid : (B, S) bool array, optional
            False: padding, which is not stored.

        Raises
        ------
        BudgetError, ValueError
            As in `step`, which also says what waits for a GPU.
        """
        layer = self._layer(layer)
        valid = None if valid is None else self._executor.as_mask(valid)
        k, v = self._as_inputs(k, v, valid)
        device, views, mask = self._ready(layer, {"k": k, "v": v}, valid)
        num_new = views[0].shape[1]
        if device.is_decode(num_new) and device.ensure_open_pages(layer, num_new):
            device.append(layer, k, views, mask)
        elif num_new:
            with translated_out_of_memory(f"{num_new} new tokens"):
                prefill.append(device, layer, [k, v], views, valid)

    @opaque
    def attend(self, layer: int, q: ArrayT, *, scale: float | None = None, softcap: float = 0.0) -> ArrayT:
        """Attend over everything stored; nothing is added.

        On a GPU it waits for the device where steps of more than 16 tokens have come to some layers and not
        to the last.

        Parameters
        ----------
        layer : int
        q : (B, Sq, Hq, D) array
            Queries; each sees all stored tokens, or those in the layer's sliding window.
        scale, softcap : float
            As in `step`.

        Returns
        -------
        (B, Sq, Hq, D) array
            Of the kind and dtype of `q`.
        """
        layer, (scale, softcap) = self._layer(layer), self._scores(scale, softcap)
        given, q = q, self._executor.as_input(q, "q", "")
        device, (view,), _ = self._ready(layer, {"q": q}, None)
        if view.shape[1] == 0:
            out: Any = self._executor.empty(view.shape, view.dtype, q)
        else:
            with translated_out_of_memory(f"attention with {view.shape[1]} queries a row"):
                out = device.attend(layer, q, scale, softcap)
        found: ArrayT = self._executor.as_output(out, given)
        return found

    def decode(
        self, layer: int, *, scale: float | None = None, softcap: float = 0.0
    ) -> tuple[Callable[[Any, Any], None], Callable[[Any, Any, Any, Any], None]]:
        """The two halves of a step of few tokens, for engines and integrations; on a GPU, one launch each.

        Memory lies where it lay in the last step, so with `prepare` and `recording` a CUDA graph can hold
        both. Arguments are not converted: on a GPU they are of the cache's dtype, on a CPU of float32.

        Returns
        -------
        attend : callable
            ``attend(q, out)`` attends the stored tokens with (B, S, Hq, D) queries. `out`, of the shape of q
            and contiguous, is written, but for a cache that holds no token.
        append : callable
            ``append(q, k, v, out)``, always the next call for this layer, adds attention over the new tokens,
            causally, to `out` and stores them.

        Examples
        --------
        >>> from kvlab import MixedPrecisionCache
        >>> rng = np.random.default_rng(0)
        >>> cache = MixedPrecisionCache(1, 4, 2, 64, budget=None, bits=(8,))
        >>> cache.append(0, *rng.standard_normal((2, 1, 100, 2, 64), dtype=np.float32))
        >>> attend, append = cache.decode(0)
        >>> q, out = rng.standard_normal((1, 1, 4, 64), dtype=np.float32), np.empty((1, 1, 4, 64), np.float32)
        >>> k, v = rng.standard_normal((2, 1, 1, 2, 64), dtype=np.float32)
        >>> attend(q, out)
        >>> append(q, k, v, out)
        >>> cache.seqlen
        101
        """
        layer, (scale, softcap) = self._layer(layer), self._scores(scale, softcap)

        def attend(q: Any, out: Any) -> None:
            device, (query, target), _ = self._ready(layer, {"q": q, "out": out}, None)
            num_new = query.shape[1]
            if not device.is_decode(num_new):
                raise NotImplementedError(
                    f"q has {num_new} tokens a row: attend and append serve steps of 1 to {MAX_NEW} tokens "
                    "and importance by name; call step()"
                )
            self._check_out(target)
            if device.lookahead[layer] < num_new:
                self._reserve(device.lengths[layer] + num_new)
                if not device.ensure_open_pages(layer, num_new):
                    raise self._holds_no_open_page(layer, num_new)
            device.attend_stored(layer, q, query, target.pointer, scale, softcap)

        def append(q: Any, k: Any, v: Any, out: Any) -> None:
            arrays = {"q": q, "k": k, "v": v, "out": out}
            device, (*views, target), _ = self._ready(layer, arrays, None)
            self._check_out(target)
            device.add_new(layer, q, views, 0, target.pointer, scale, softcap)

        return attend, append

    def _check_out(self, out: CudaView) -> None:
        dtype = self._executor.input_dtype(self.dtype)
        if out.dtype != dtype or out.strides != dense_strides(out.shape):
            raise ValueError(f"out must be a contiguous array of {dtype}, got {out.dtype} {out.strides}")

    def step_heads_first(
        self, layer: int, q: Any, k: Any, v: Any, scale: float | None, softcap: float, valid: Any
    ) -> Any:
        """`step` on torch tensors (B, H, S, D), as transformers has them; the result is (B, S, H, D).

        For integrations, which call it once a layer and token from functions that are `opaque`. Checks and
        Python's other work take longer than the launches of a decode step, so on a GPU a step like the last
        one of its layer does without them (launches.py).
        """
        device, layout = self._device, None
        plain = valid is None and not (q.requires_grad or k.requires_grad or v.requires_grad)
        if self._copies_nothing and self._has_memory and plain:
            layout = (
                q.shape, q.stride(), k.shape, k.stride(), v.shape, v.stride(),
                q.dtype, k.dtype, v.dtype, q.device, k.device, v.device, scale, softcap,
            )  # fmt: skip
            try:
                out = launch_again(device, layer, layout, q, k, v)
            except Exception:
                with translated_out_of_memory("a step"):
                    raise
            if out is not None:
                return out
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        scale = self.head_dim**-0.5 if scale is None else scale
        out = self._step(layer, q, k, v, scale, softcap, valid)
        if layout is not None and device.is_decode(q.shape[1]):
            keep_launches(device, layer, layout, [q, k, v], scale, softcap)
        return out

    # ---- CUDA graphs ---------------------------------------------------------------------------------------

    def prepare(self, num_new: int = 1, **older: int) -> tuple[Hashable, ...]:
        """Make room for the next tokens, so that the next step of every layer only launches kernels.

        With `recording` and `replayed` this lets a CUDA graph hold a step of all layers: lengths and page
        tables are read on the device, so a graph goes on where the cache is.

        Parameters
        ----------
        num_new : int
            New tokens of a row, 1 to 16.
        **older
            ``steps=``, the older name of `num_new`, with a warning; the next version does without it.

        Returns
        -------
        tuple
            What a recording depends on: first where memory lies, then what the step has to do (every
            `realloc_every` tokens it collects attention mass). A graph serves steps for which this is equal,
            and none any more once the first part is another. A step of each kind must have run once before
            it is recorded. Empty before the first step.

        Raises
        ------
        BudgetError
            If the tokens do not fit; the cache is as it was.
        NotImplementedError
            If the cache is not on a GPU.

        Examples
        --------
        With a step of all layers in ``work``, and ``graphs``, a dict::

            key = cache.prepare()
            if key not in graphs:
                graphs[key] = None
                work()  # runs, and loads what it needs
            elif graphs[key] is None:
                graphs[key] = torch.cuda.CUDAGraph()
                with cache.recording(), torch.cuda.graph(graphs[key]):
                    work()
            if graphs[key] is not None:
                graphs[key].replay()
                cache.replayed()
        """
        num_new = whole_number(renamed(num_new, older, "steps", "num_new", "prepare"), "num_new", 1, LONGEST)
        self._refuse_cpu("prepare")
        device = self._device
        if not self._has_memory:
            return ()
        if device.settings.function is not None:
            raise NotImplementedError(
                "importance as a function runs on the host at every step, which a graph cannot: name a policy"
            )
        if not device.is_decode(num_new):
            raise NotImplementedError(
                f"steps of {num_new} tokens, {device.group} query heads a KV head, are planned by the host; "
                f"graphs take {MAX_NEW} tokens and {self._executor.max_group} heads at most"
            )
        if len(set(device.lengths)) > 1:
            raise ValueError(f"layers hold different numbers of tokens, {sorted(set(device.lengths))}")
        if min(device.lookahead) < num_new:
            self._reserve(device.lengths[0] + num_new)
            row_budgets = device.row_budgets(0, num_new)
            for layer in range(len(device.lengths)):
                if not device.opens_pages(layer, num_new, row_budgets):
                    raise self._holds_no_open_page(layer, num_new)
            device.reallocate(num_new, row_budgets)
        layers = range(len(device.lengths))
        collects = tuple([device.collects(layer, num_new) for layer in layers])
        return device.memory_epoch, device.lengths[0] > 0, collects, device.waiting.modes()

    def _holds_no_open_page(self, layer: int, num_new: int) -> NotImplementedError:
        row_budgets = self._device.row_budgets(layer, num_new) or [0] * len(self._layers)
        return NotImplementedError(
            f"{row_budgets[layer]} bytes a row of layer {layer} hold no open page, so the host plans each "
            "step, which a graph cannot: raise the budget or call step() without one"
        )

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Inside this block steps are recorded by a CUDA graph: nothing runs, so nothing is counted."""
        self._refuse_cpu("recording")
        device = self._device
        if not self._has_memory:
            raise RuntimeError("a step must run once before a graph records it")
        counters = device.lengths, device.since, device.lookahead
        before, collected = [counter.copy() for counter in counters], dict(vars(device.collector))
        device.waiting.recording = True
        try:
            yield
        finally:
            device.waiting.recording = False
            vars(device.collector).update(collected)
            for counter, values in zip(counters, before, strict=True):
                counter[:] = values

    def replayed(self, num_new: int = 1, **older: int) -> None:
        """Count a step of all layers that a CUDA graph has replayed; `prepare` made room for it."""
        num_new = renamed(num_new, older, "steps", "num_new", "replayed")
        self._refuse_cpu("replayed")
        device = self._device
        if not self._has_memory or min(device.lookahead) < num_new:
            raise RuntimeError("prepare() was not called before a graph was replayed")
        for layer in range(len(device.lengths)):
            device.count(layer, num_new, device.collects(layer, num_new))

    def _refuse_cpu(self, method: str) -> None:
        if not self.on_gpu:
            raise NotImplementedError(f"{method}() is for caches with device='cuda'; call step() here")

    # ---- arguments and memory ------------------------------------------------------------------------------

    def _layer(self, layer: int) -> int:
        return whole_number(layer, "layer", 0, self.num_layers - 1)

    def _scores(self, scale: float | None, softcap: float) -> tuple[float, float]:
        scale = 1 / math.sqrt(self.head_dim) if scale is None else number(scale, "scale")
        return scale, number(softcap, "softcap", minimum=0)

    def _ready(
        self, layer: int, arrays: dict[str, Any], valid: Any
    ) -> tuple[DeviceCache, list[CudaView], int]:
        """Check the arguments of a call and make room for it, or raise before anything changes.

        Returns the device's side, views of the arrays and the address of `valid`, or 0.
        """
        views = self._views(arrays)
        layout = self.batch, *[view[1:] for view in views]
        device = self._device
        if layout not in self._accepted or not self._has_memory:
            device = self._check(arrays, views)
            self._accepted.add(layout)
        num_new = views[0].shape[1]
        for name, view in zip(arrays, views, strict=True):
            if view.pointer % self._executor.alignment and num_new:
                raise ValueError(f"{name} must begin at a multiple of 4 bytes: pass a copy of it")
        mask = 0 if valid is None else self._mask(valid, num_new)
        if "k" in arrays and device.lookahead[layer] < num_new:
            self._reserve(device.lengths[layer] + num_new)
        return device, views, mask

    def _views(self, arrays: dict[str, Any]) -> list[CudaView]:
        try:
            return [self._executor.view(x, name) for name, x in arrays.items()]
        except TypeError:
            for name, x in arrays.items() if self.on_gpu else ():
                device = device_of(x, name)
                if device.kind != "cuda":
                    missing = gpus_missing_because()
                    way = f"there is no GPU here ({missing}):" if missing else "pass arrays on that GPU, or"
                    raise TypeError(
                        f"{name} is on {device}, the cache is on {self.device}: {way} make the cache with "
                        "device='cpu'"
                    ) from None
            raise

    def _check(self, arrays: dict[str, Any], views: list[CudaView]) -> DeviceCache:
        """Refuse arrays that no step can take; return the device's side, made at the first call."""
        num_new = views[0].shape[1] if len(views[0].shape) == 4 else 0
        kv = (self.batch, num_new, self.num_heads_kv, self.head_dim)
        queries = (self.batch, num_new, self.num_heads_q, self.head_dim)
        for name, view in zip(arrays, views, strict=True):
            if view.shape != (queries if name in ("q", "out") else kv):
                heads = self.num_heads_q if name in ("q", "out") else self.num_heads_kv
                match_shapes({name: (view.shape, (self.batch, "S", heads, self.head_dim))})
                raise ValueError(f"{name} has {view.shape[1]} tokens, but {next(iter(arrays))} has {num_new}")
            self._executor.check_layout(view, name, self.dtype)
        if not self._has_memory:
            self._take_memory(views[0], next(iter(arrays.values())), num_new)
        device = self._device
        for name, view in zip(arrays, views, strict=True):
            if view.device != device.device:
                raise ValueError(f"{name} is on cuda:{view.device}, the cache is on cuda:{device.device}")
        return device

    def _mask(self, valid: Any, num_new: int) -> int:
        """Check which tokens are no padding and return the address."""
        match_shapes({"valid": (valid.shape, (self.batch, num_new))})
        view: CudaView = self._executor.view(valid, "valid")
        if view.dtype != "bool" or (view.strides != (num_new, 1) and num_new and self.batch):
            raise TypeError(f"valid must be a contiguous array of bool, got {view.dtype} {view.strides}")
        return view.pointer

    def _reserve(self, length: int) -> None:
        """Make sure that rows of so many tokens fit the budget and the tables."""
        batch, device = self.batch, self._device
        if (length, batch) != self._fitting:
            self._limit.check(length, batch)
            self._fitting = length, batch  # the same for every layer of a step
        if length > device.store.capacity:
            device.grow(self._capacity(length))

    def _take_memory(self, view: CudaView, like: Any, num_new: int) -> None:
        """Take memory on the GPU of an array, and move there what the cache holds."""
        self._executor.check_device(self.device, view.device)
        # Of the caller's framework, and without the caller's memory.
        nothing, held = self._executor.empty((0,), "uint8", like), self._device
        device = self._make(self._executor, nothing, max(held.lengths) + num_new)
        if any(held.lengths):
            with translated_out_of_memory("moving a cache to its GPU"):
                fill(device, *contents_of(held))
        self._device, self._has_memory = device, True

    def _make(self, executor: Any, like: Any, length: int) -> DeviceCache:
        """Take memory for an empty cache, with room for rows of a length."""
        settings, capacity = self.settings(), self._capacity(length)
        row_budgets_of = partial(self._limit.row_budgets, batch=self.batch)
        return DeviceCache(self._layers, self.batch, settings, executor, like, capacity, row_budgets_of)

    def _capacity(self, length: int) -> int:
        """Tokens of a row to have room for: a quarter more than asked, unless the longest is known."""
        longest = self.max_seqlen
        if longest is not None and length <= longest:
            return longest
        return max(self.plan_length, length + length // 4)

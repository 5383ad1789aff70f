"""What `MixedPrecisionCache` calls, on any device: checks of arguments, sizes, and when memory is taken."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kvlab.arguments import LONGEST, whole_number
from kvlab.arrays import CudaView
from kvlab.cache.contents import Arrays, contents_of, fill
from kvlab.cache.cpu import CPU
from kvlab.cache.cuda import GPU
from kvlab.cache.launches import keep_launches, launch_again
from kvlab.cache.layers import Layer
from kvlab.cache.step import DeviceCache
from kvlab.device import translated_out_of_memory
from kvlab.errors import FormatError
from kvlab.ops.device_arrays import dense_strides
from kvlab.ops.layer_state import MAX_NEW
from kvlab.pages import LayerPages, named_pages
from kvlab.shapes import match_shapes

if TYPE_CHECKING:
    from kvlab.cache.options import CacheOptions, Limit

__all__ = ["EXECUTORS", "Runner"]

EXECUTORS: dict[str, Any] = {"cpu": CPU, "cuda": GPU}
"""Who carries out the operations of a cache, by the kind of its device."""


class Runner:
    """What a cache calls: checks of arguments, sizes, and when memory is taken.

    On a GPU, memory is taken when the first array comes, whose framework then gives it; until then the pages
    of a cache that was loaded lie in host memory.

    Parameters
    ----------
    options : CacheOptions
        The cache itself, whose batch may change; it is not kept alive.
    layers : sequence of Layer
    limit : Limit
    """

    def __init__(self, options: CacheOptions, layers: Sequence[Layer], limit: Limit) -> None:
        # A cycle would keep device memory until it is collected.
        self._options: CacheOptions = weakref.proxy(options)
        self._layers, self.limit = layers, limit
        self._executor: Any = EXECUTORS["cuda" if options.on_gpu else "cpu"]
        self._met = not options.on_gpu  # arrays of the device
        self._accepted: set[Any] = set()  # layouts of arguments that were found to be right
        self._fitting: tuple[int, int] = (0, 0)  # tokens of a row and rows that were found to fit
        self._device = self._make(EXECUTORS["cpu"], np.empty(0, np.uint8), 0)

    # ---- sizes ---------------------------------------------------------------------------------------------

    def seqlen(self, layer: int) -> int:
        """Time steps that a layer has seen."""
        return self._device.lengths[layer]

    def nbytes(self) -> int:
        """Bytes in live pages and tables; waits for the device."""
        used = self._device.used()
        return sum(self._device.store.nbytes(layer, used[layer]) for layer in range(len(used)))

    def reserved_nbytes(self) -> int:
        """Bytes of memory on the device; of host memory as long as a cache has not met its GPU."""
        return self._device.reserved_nbytes

    def tokens(self) -> int:
        """Tokens held, over layers, rows and heads; waits for the device."""
        count, num_pages = self._device.read("count", "num_pages")
        live = np.arange(count.shape[-1]) < num_pages[..., None]
        return int(count[live].sum(dtype=np.int64))

    def allocation(self) -> dict[str, NDArray[np.int64]]:
        """`MixedPrecisionCache.allocation`."""
        names = "rung", "index", "num_pages"
        tables = dict(zip(names, self._device.read(*names), strict=True))
        named, ladders = named_pages(tables), [layer.store.ladder for layer in self._layers]
        rungs = sorted({rung for ladder in ladders for rung in ladder}, key=lambda rung: rung.total)
        found = {str(rung): np.zeros(named.shape[:3], np.int64) for rung in rungs}
        for layer, ladder in enumerate(ladders):
            for r, rung in enumerate(ladder):
                found[str(rung)][layer] = (named[layer] & (tables["rung"][layer] == r)).sum(-1)
        return found

    def pages(self, layer: int) -> LayerPages:
        """`MixedPrecisionCache.pages`."""
        self._device.reallocator.synchronize()
        return self._device.store.host_pages(layer)

    # ---- what a model calls --------------------------------------------------------------------------------

    def step(self, layer: int, q: Any, k: Any, v: Any, scale: float, softcap: float, valid: Any) -> Any:
        """`MixedPrecisionCache.step`."""
        asked, taken = q, self._executor.taken
        valid = None if valid is None else self._executor.taken_mask(valid)
        q, k, v = taken(q, "q", ""), *self._taken(k, v, valid)
        return self._executor.given(self._step(layer, q, k, v, scale, softcap, valid), asked)

    def _taken(self, k: Any, v: Any, valid: Any) -> list[Any]:
        """New keys and values as the executor takes them."""
        taken, dtype = self._executor.taken, self._options.dtype
        return [taken(x, name, dtype, valid) for x, name in ((k, "k"), (v, "v"))]

    def _step(self, layer: int, q: Any, k: Any, v: Any, scale: float, softcap: float, valid: Any) -> Any:
        device, views, mask = self._ready(layer, {"q": q, "k": k, "v": v}, valid)
        num_new = views[0].shape[1]
        if num_new == 0:
            return self._executor.empty(views[0].shape, views[0].dtype, q)
        if device.is_decode(num_new) and device.make_room(layer, num_new):
            try:
                return device.step(layer, q, views, mask, scale, softcap)
            except (
                Exception
            ):  # a block around the call would take longer than these lines, which cost nothing
                with translated_out_of_memory(f"a step of {num_new} tokens"):
                    raise
        with translated_out_of_memory(f"a step of {num_new} tokens"):
            from kvlab.cache import prefill

            return prefill.step(device, layer, [q, k, v], views, valid, scale, softcap)

    def step_heads_first(
        self, layer: int, q: Any, k: Any, v: Any, scale: float | None, softcap: float, valid: Any
    ) -> Any:
        """`MixedPrecisionCache.step` on tensors (B, H, S, D), as transformers has them; the result as there.

        Checks and Python's other work would take longer than the launches of a decode step, so a step like
        the last one of its layer does without them (launches.py).
        """
        device, layout = self._device, None
        plain = valid is None and not (q.requires_grad or k.requires_grad or v.requires_grad)
        if self._met and plain:
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
        scale = self._options.head_dim**-0.5 if scale is None else scale
        out = self.step(layer, q, k, v, scale, softcap, valid)
        if layout is not None and device.is_decode(q.shape[1]):
            keep_launches(device, layer, layout, [q, k, v], scale, softcap)
        return out

    def decode(
        self, layer: int, scale: float, softcap: float
    ) -> tuple[Callable[[Any, Any], None], Callable[[Any, Any, Any, Any], None]]:
        """`MixedPrecisionCache.decode`."""

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
                if not device.make_room(layer, num_new):
                    raise self._holds_no_open_page(layer, num_new)
            device.attend_stored(layer, q, query, target.pointer, scale, softcap)

        def append(q: Any, k: Any, v: Any, out: Any) -> None:
            arrays = {"q": q, "k": k, "v": v, "out": out}
            device, (*views, target), _ = self._ready(layer, arrays, None)
            self._check_out(target)
            device.add_new(layer, q, views, 0, target.pointer, scale, softcap)

        return attend, append

    def _check_out(self, out: CudaView) -> None:
        dtype = self._executor.input_dtype(self._options.dtype)
        if out.dtype != dtype or out.strides != dense_strides(out.shape):
            raise ValueError(f"out must be a contiguous array of {dtype}, got {out.dtype} {out.strides}")

    def append(self, layer: int, k: Any, v: Any, valid: Any) -> None:
        """`MixedPrecisionCache.append`."""
        valid = None if valid is None else self._executor.taken_mask(valid)
        k, v = self._taken(k, v, valid)
        device, views, mask = self._ready(layer, {"k": k, "v": v}, valid)
        num_new = views[0].shape[1]
        if device.is_decode(num_new) and device.make_room(layer, num_new):
            device.append(layer, k, views, mask)
        elif num_new:
            with translated_out_of_memory(f"{num_new} new tokens"):
                from kvlab.cache import prefill

                prefill.append(device, layer, [k, v], views, valid)

    def attend(self, layer: int, q: Any, scale: float, softcap: float) -> Any:
        """`MixedPrecisionCache.attend`."""
        asked, q = q, self._executor.taken(q, "q", "")
        device, (view,), _ = self._ready(layer, {"q": q}, None)
        if view.shape[1] == 0:
            return self._executor.given(self._executor.empty(view.shape, view.dtype, q), asked)
        with translated_out_of_memory(f"attention with {view.shape[1]} queries a row"):
            return self._executor.given(device.attend(layer, q, scale, softcap), asked)

    def _ready(
        self, layer: int, arrays: dict[str, Any], valid: Any
    ) -> tuple[DeviceCache, list[CudaView], int]:
        """Check the arguments of a call and make room for it, or raise before anything changes.

        Returns the device's side, views of the arrays and the address of `valid`, or 0.
        """
        cache = self._options
        views = [self._executor.view(x, name) for name, x in arrays.items()]
        layout = cache.batch, *[view[1:] for view in views]
        device = self._device
        if layout not in self._accepted or not self._met:
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

    def _check(self, arrays: dict[str, Any], views: list[CudaView]) -> DeviceCache:
        """Refuse arrays that no step can take; return the device's side, made at the first call."""
        cache = self._options
        num_new = views[0].shape[1] if len(views[0].shape) == 4 else 0
        kv = (cache.batch, num_new, cache.num_heads_kv, cache.head_dim)
        queries = (cache.batch, num_new, cache.num_heads_q, cache.head_dim)
        for name, view in zip(arrays, views, strict=True):
            if view.shape != (queries if name in ("q", "out") else kv):
                heads = cache.num_heads_q if name in ("q", "out") else cache.num_heads_kv
                match_shapes({name: (view.shape, (cache.batch, "S", heads, cache.head_dim))})
                raise ValueError(f"{name} has {view.shape[1]} tokens, but {next(iter(arrays))} has {num_new}")
            self._executor.check_layout(view, name, cache.dtype)
        if not self._met:
            self._meet(views[0], next(iter(arrays.values())), num_new)
        device = self._device
        for name, view in zip(arrays, views, strict=True):
            if view.device != device.device:
                raise ValueError(f"{name} is on cuda:{view.device}, the cache is on cuda:{device.device}")
        return device

    def _mask(self, valid: Any, num_new: int) -> int:
        """Check which tokens are no padding and return the address."""
        batch = self._options.batch
        match_shapes({"valid": (valid.shape, (batch, num_new))})
        view: CudaView = self._executor.view(valid, "valid")
        if view.dtype != "bool" or (view.strides != (num_new, 1) and num_new and batch):
            raise TypeError(f"valid must be a contiguous array of bool, got {view.dtype} {view.strides}")
        return view.pointer

    def _reserve(self, length: int) -> None:
        """Make sure that rows of so many tokens fit the budget and the tables."""
        batch, device = self._options.batch, self._device
        if (length, batch) != self._fitting:
            if not self.limit.fits(length, batch):
                raise self.limit.refusal(length, batch)
            self._fitting = length, batch  # the same for every layer of a step
        if length > device.capacity:
            capacity = self._capacity(length)
            device.grow(capacity)

    def _meet(self, view: CudaView, like: Any, num_new: int) -> None:
        """Take memory on the GPU of an array, and move there what the cache holds."""
        self._executor.check_device(self._options.device, view.device)
        # Of the caller's framework, and without the caller's memory.
        nothing, held = self._executor.empty((0,), "uint8", like), self._device
        device = self._make(self._executor, nothing, max(held.lengths) + num_new)
        if any(held.lengths):
            with translated_out_of_memory("moving a cache to its GPU"):
                fill(device, *contents_of(held))
        self._device, self._met = device, True

    def _make(self, executor: Any, like: Any, length: int) -> DeviceCache:
        """Take memory for an empty cache, with room for rows of a length."""
        cache = self._options
        settings = cache.settings(self.limit.rewind)
        row_budgets_of = partial(self.limit.row_budgets, batch=cache.batch)
        capacity = self._capacity(length)
        return DeviceCache(self._layers, cache.batch, settings, executor, like, capacity, row_budgets_of)

    def _capacity(self, length: int) -> int:
        """Tokens of a row to have room for: a quarter more than asked, unless the longest is known."""
        longest = self._options.max_seqlen
        if longest is not None and length <= longest:
            return longest
        return max(self._options.plan_length, length + length // 4)

    # ---- CUDA graphs ---------------------------------------------------------------------------------------

    def prepare(self, num_new: int) -> tuple[Hashable, ...]:
        """`MixedPrecisionCache.prepare`."""
        self._refuse_cpu("prepare")
        device = self._device
        if not self._met:
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
        return device.generation, device.lengths[0] > 0, collects, tuple(map(device.waiting.mode, layers))

    def _holds_no_open_page(self, layer: int, num_new: int) -> NotImplementedError:
        row_budgets = self._device.row_budgets(layer, num_new) or [0] * len(self._layers)
        return NotImplementedError(
            f"{row_budgets[layer]} bytes a row of layer {layer} hold no open page, so the host plans each "
            "step, which a graph cannot: raise the budget or call step() without one"
        )

    @contextmanager
    def recording(self) -> Iterator[None]:
        """`MixedPrecisionCache.recording`."""
        self._refuse_cpu("recording")
        device = self._device
        if not self._met:
            raise RuntimeError("a step must run once before a graph records it")
        before, kept = [counter.copy() for counter in device.counters], device.collector.state
        device.waiting.recording = True
        try:
            yield
        finally:
            device.waiting.recording = False
            device.collector.state = kept
            for counter, values in zip(device.counters, before, strict=True):
                counter[:] = values

    def replayed(self, num_new: int) -> None:
        """`MixedPrecisionCache.replayed`."""
        self._refuse_cpu("replayed")
        device = self._device
        if not self._met or min(device.lookahead) < num_new:
            raise RuntimeError("prepare() was not called before a graph was replayed")
        for layer in range(len(device.lengths)):
            device.count(layer, num_new, device.collects(layer, num_new))

    def _refuse_cpu(self, method: str) -> None:
        if not self._options.on_gpu:
            raise NotImplementedError(f"{method}() is for caches with device='cuda'; call step() here")

    # ---- rare operations -----------------------------------------------------------------------------------

    def crop(self, end: int) -> None:
        """Forget the time steps from `end` on."""
        device, batch = self._device, self._options.batch
        if end and not self.limit.fits(end, batch):
            raise self.limit.refusal(end, batch)
        if end < max(device.lengths):
            device.check_crop(end)
            device.crop(end, self.limit.row_budgets(end, batch))

    def allow_rewind(self, tokens: int) -> None:
        """`MixedPrecisionCache.allow_rewind`."""
        limit, device, batch = copy(self.limit), self._device, self._options.batch
        limit.rewind, length = tokens, max(device.lengths)
        if not limit.fits(length, batch):
            raise limit.refusal(length, batch)
        with translated_out_of_memory(f"{batch} rows of {length} tokens"):
            device.allow_rewind(tokens, partial(limit.row_budgets, batch=batch))
        self.limit = limit

    def take_rows(self, rows: NDArray[np.int64]) -> None:
        """Let row i become row `rows[i]`."""
        device, batch = self._device, len(rows)
        length = device.lengths[0]
        if batch > self._options.batch and not self.limit.fits(length, batch):
            raise self.limit.refusal(length, batch)
        with translated_out_of_memory(f"{batch} rows of {length} tokens"):
            device.take_rows(rows, device.capacity, partial(self.limit.row_budgets, batch=batch))

    def copy(self, options: CacheOptions) -> Runner:
        """Return a runner that holds the same, for a copy of the cache."""
        other = object.__new__(Runner)
        vars(other).update(vars(self))
        other._options, other._accepted = weakref.proxy(options), set()
        with translated_out_of_memory("a copy of a cache"):
            other._device = self._device.copy()
        return other

    def contents(self) -> tuple[list[dict[str, Any]], Arrays]:
        """What the cache holds, on the host; waits for the device."""
        with translated_out_of_memory("the pages of a cache on the host"):
            return contents_of(self._device)

    def fill(self, states: list[dict[str, Any]], arrays: Arrays) -> None:
        """Hold contents in an empty cache that has not met its GPU."""
        length = max(whole_number(state["seqlen"], "seqlen", 0, LONGEST) for state in states)
        if length > self._device.capacity:
            self._device = self._make(self._device.executor, self._device.like, length)
        batch = self._options.batch
        fill(self._device, states, arrays)
        store, used = self._device.store, self._device.used()
        for layer, most in enumerate(self.limit.row_budgets(length, batch) or ()):
            if store.nbytes(layer, used[layer]) > most * batch:
                raise FormatError("the budget does not hold what it has stored")

    def clear(self) -> None:
        """Forget everything."""
        self._device.clear()

"""MixedPrecisionCache: keys and values of a decoder, packed at mixed widths, under a byte budget that holds.

A model calls `step` once a layer: the new queries attend every stored token, straight from its packed page,
and the new tokens exactly and causally; then the new tokens are stored. While the bytes last, tokens stay at
the highest rung; when a page is needed that does not fit, the least important tokens of the row are demoted.

What lies where: ladder.py (widths), budget.py (bytes a row may take), importance.py (scores), frame.py (the
mean taken off keys), allocator.py (which page gets which rung), plan.py (which token), pools.py (memory of
pages), store.py (the pages of a layer, and moves between them), pages.py (a page, byte by byte), window.py
and exact.py (exact tokens), layer.py (one layer in all). On a GPU the same calls go through cuda_road.py to
cuda_cache.py (steps), cuda_changes.py (plans and moves), cuda_calls.py and cuda_kernels.py (launches),
cuda_store.py (memory) and cuda_exchange.py (to the CPU and back, for rare operations and files).
"""

from __future__ import annotations

import math
import os
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvlab.arrays import Array, ArrayT, dtype_name, like_first, match_shapes, to_numpy_view
from kvlab.cache import persistence
from kvlab.cache.allocator import METHODS, Method
from kvlab.cache.budget import parse_budget
from kvlab.cache.cuda_road import GpuRoad, check_gpu
from kvlab.cache.exact import attend_exact
from kvlab.cache.importance import Importance, make_policy
from kvlab.cache.ladder import Bits, parse_bits
from kvlab.cache.layer import Arrival, Layer
from kvlab.cache.window import stack
from kvlab.errors import BudgetError, FormatError
from kvlab.ops.attention import merge_attention
from kvlab.ops.packed import mass_from_scores, packed_attention

__all__ = ["MixedPrecisionCache"]

Floats = NDArray[np.float32]
MASS_ROWS = 64
"""Query rows, the last of a step, over which attention mass is collected."""


class MixedPrecisionCache:
    """Packed mixed-precision KV cache for all layers of a model.

    Parameters
    ----------
    num_layers, num_heads_q, num_heads_kv, head_dim : int
        Geometry of the model; `head_dim` is a multiple of 16 up to 256.
    batch : int
        Number of rows.
    budget : float, int, str or None
        Bytes that all live buffers may take: a fraction of float16 (`0.35`), `"4.25bpe"`, `"6GiB"`, bytes, or
        None for no limit.
    bits : str, int or sequence
        Widths in use, for example `(2, 3, 4, 8)`, `"k4v2"` or `"0-3:8,4-29:2+4"`; 16 is the cache's dtype
        unchanged, 0 evicts.
    importance : str or callable
        "attention", "forecast", "key_norm", "recency", "uniform", or an update function (see
        `kvlab.cache.importance`).
    allocator : {"greedy", "dp", "uniform"}
        How widths are chosen under the budget.
    residual : int
        Number of newest tokens that stay exact, outside pages.
    sink, recent : int
        Number of first and of newest tokens that are kept at the highest width as long as other tokens can
        make room.
    plan_length : int
        A relative budget counts a shorter sequence as this long.
    max_seqlen : int, optional
        Longest sequence; a budget that cannot hold it is refused at once.
    realloc_every : int
        Query tokens between two collections of attention mass.
    ema_decay : float
        Weight of the old importance at each collection.
    device : str, optional
        "cpu", the default, or "cuda": arrays are on the GPU then (torch, CuPy), and so is the memory, which
        is taken at the first call from their framework.
    dtype : {"float16", "bfloat16", "float32"}
        Type of width 16 and of the residual window. On a GPU queries, keys and values have it, too.

    Raises
    ------
    BudgetError
        If `max_seqlen` tokens cannot fit the budget even at the lowest rung.
    NotImplementedError
        On a GPU: for a residual window, dtype "float32", an allocator other than "greedy", an importance that
        is a function, or a head dimension for which there is no kernel.

    Examples
    --------
    >>> import numpy as np
    >>> cache = MixedPrecisionCache(1, 4, 2, 32, budget=0.5, plan_length=64, bits=(2, 4, 8))
    >>> rng = np.random.default_rng(0)
    >>> k, v = rng.standard_normal((2, 1, 100, 2, 32), dtype=np.float32)
    >>> out = cache.step(0, rng.standard_normal((1, 100, 4, 32), dtype=np.float32), k, v)
    >>> out.shape, cache.seqlen, cache.nbytes <= cache.budget_nbytes
    ((1, 100, 4, 32), 100, True)
    """

    def __init__(
        self,
        num_layers: int,
        num_heads_q: int,
        num_heads_kv: int,
        head_dim: int,
        *,
        batch: int = 1,
        budget: float | int | str | None = 0.35,
        bits: Bits = (2, 3, 4, 8),
        importance: Importance = "attention",
        allocator: Method = "greedy",
        residual: int = 0,
        sink: int = 4,
        recent: int = 128,
        plan_length: int = 2048,
        max_seqlen: int | None = None,
        realloc_every: int = 16,
        ema_decay: float = 0.9,
        device: str | None = None,
        dtype: str = "float16",
    ) -> None:
        for name, value, least in (
            ("num_layers", num_layers, 1),
            ("num_heads_kv", num_heads_kv, 1),
            ("batch", batch, 0),
            ("residual", residual, 0),
            ("sink", sink, 0),
            ("recent", recent, 0),
            ("plan_length", plan_length, 1),
            ("realloc_every", realloc_every, 1),
        ):
            if value < least:
                raise ValueError(f"{name}={value} must be at least {least}")
        if num_heads_q < 1 or num_heads_q % num_heads_kv:
            raise ValueError(
                f"num_heads_q={num_heads_q} must be a positive multiple of num_heads_kv={num_heads_kv}"
            )
        if head_dim % 16 or not 16 <= head_dim <= 256:
            raise ValueError(f"head_dim={head_dim} is not supported; a multiple of 16 from 16 to 256 is")
        if allocator not in METHODS:
            raise ValueError(f"allocator={allocator!r} is not known; choose one of {METHODS}")
        if dtype not in ("float16", "bfloat16", "float32"):
            raise ValueError(f"dtype={dtype!r} is not supported; float16, bfloat16 and float32 are")
        on_gpu = device is not None and device.split(":")[0] == "cuda"
        if device not in (None, "cpu") and not on_gpu:
            raise ValueError(f"device={device!r} is not supported; 'cpu' and 'cuda' are")
        if on_gpu:
            check_gpu(residual, dtype, allocator, importance, head_dim)
        self.device = device or "cpu"
        self._gpu: GpuRoad | None = None
        self.num_layers, self.batch = num_layers, batch
        self.num_heads_q, self.num_heads_kv, self.head_dim = num_heads_q, num_heads_kv, head_dim
        self.residual, self.sink, self.recent, self.dtype = residual, sink, recent, dtype
        self.plan_length, self.max_seqlen, self.realloc_every = plan_length, max_seqlen, realloc_every
        self.allocator, self.bits, self.importance = allocator, bits, importance
        self.ema_decay = ema_decay
        self._budget = parse_budget(budget)
        self._policy = make_policy(importance, ema_decay)
        self._arguments = {
            "num_layers": num_layers,
            "num_heads_q": num_heads_q,
            "num_heads_kv": num_heads_kv,
            "head_dim": head_dim,
            "batch": batch,
            "budget": budget,
            "bits": bits if isinstance(bits, (str, int)) else list(bits),
            "importance": importance,
            "allocator": allocator,
            "residual": residual,
            "sink": sink,
            "recent": recent,
            "plan_length": plan_length,
            "max_seqlen": max_seqlen,
            "realloc_every": realloc_every,
            "ema_decay": ema_decay,
            "dtype": dtype,
        }
        self.layers = [
            Layer(
                ladder,
                batch,
                num_heads_kv,
                head_dim,
                dtype,
                residual=residual,
                sink=sink,
                recent=recent,
                policy=self._policy,
                allocator=allocator,
            )
            for ladder in parse_bits(bits, num_layers)
        ]
        if on_gpu:
            self._gpu = GpuRoad(self)
        if max_seqlen is not None and not self._fits(max_seqlen, batch):
            raise self._refusal(max_seqlen, batch)

    # ---- sizes ---------------------------------------------------------------------------------------------

    @property
    def seqlen(self) -> int:
        """Number of time steps seen, padding included."""
        return self.layers[0].seqlen if self._gpu is None else self._gpu.seqlen(0)

    @property
    def nbytes(self) -> int:
        """Bytes in live buffers: pages, page table, key frames, exact tokens. On a GPU, waits for it."""
        if self._gpu is not None:
            return self._gpu.nbytes()
        return sum(layer.nbytes() for layer in self.layers)

    @property
    def reserved_nbytes(self) -> int:
        """Bytes of the pools and tables that hold them; on a GPU all device memory of the cache."""
        if self._gpu is not None:
            return self._gpu.reserved_nbytes()
        return sum(layer.reserved_nbytes() for layer in self.layers)

    @property
    def budget_nbytes(self) -> int | None:
        """Bytes that `nbytes` may reach at the present length; None: no limit."""
        share = self._share(self.seqlen, self.batch)
        return None if share is None else share * self.num_layers * self.batch

    @property
    def bits_per_element(self) -> float:
        """Bits in live buffers per stored K and V element; 0 for an empty cache."""
        tokens = sum(layer.tokens() for layer in self.layers) if self._gpu is None else self._gpu.tokens()
        return 8 * self.nbytes / (2 * self.head_dim * tokens) if tokens else 0.0

    def allocation(self) -> dict[str, NDArray[np.int64]]:
        """Number of pages of each rung, as arrays (layers, batch, heads) by the name of the rung."""
        stores = [layer.store for layer in self.layers]
        names = sorted({rung for store in stores for rung in store.ladder}, key=lambda rung: rung.total)
        shape = (self.num_layers, self.batch, self.num_heads_kv)
        found = {str(rung): np.zeros(shape, np.int64) for rung in names}
        for number, store in enumerate(stores):
            counts = store.page_counts() if self._gpu is None else self._gpu.page_counts(number)
            for r, rung in enumerate(store.ladder):
                found[str(rung)][number] = counts[..., r]
        return found

    def _share(self, seqlen: int, batch: int) -> int | None:
        """Bytes that one row of one layer may take at a length."""
        fp16 = 2 * 2 * self.num_heads_kv * self.head_dim * max(seqlen, self.plan_length)
        return self._budget.share(self.num_layers, max(batch, 1), fp16)

    def _need(self, seqlen: int) -> int:
        """Bytes that one row of the neediest layer takes at least."""
        if self._gpu is not None:
            return self._gpu.smallest_nbytes(seqlen)
        return max(layer.smallest_nbytes(seqlen) for layer in self.layers)

    def _fits(self, seqlen: int, batch: int) -> bool:
        share = self._share(seqlen, batch)
        return share is None or self._need(seqlen) <= share

    def _refusal(self, seqlen: int, batch: int) -> BudgetError:
        low, high = 0, seqlen
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self._fits(middle, batch) else (low, middle)
        parts = self.num_layers * max(batch, 1)
        needed, given = self._need(seqlen) * parts, (self._share(seqlen, batch) or 0) * parts
        return BudgetError(
            f"{seqlen} tokens in {batch} rows need at least {needed} bytes at the lowest widths and the "
            f"budget gives {given}; the longest length that fits is {low}. Raise the budget, add a lower "
            f"width to bits (0 evicts) or shorten the sequence",
            needed_bytes=needed,
            longest_length=low,
        )

    # ---- what a model calls --------------------------------------------------------------------------------

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
            False: padding, neither attended nor stored. A query row that sees nothing gives 0.

        Returns
        -------
        (B, Sq, Hq, D) array
            Of the kind and dtype of `q`.

        Raises
        ------
        BudgetError
            If the tokens do not fit; the cache is as it was.
        """
        if self._gpu is not None:
            self._check_layer(layer)
            return self._gpu.step(layer, q, k, v, scale, softcap, valid)  # type: ignore[no-any-return]
        queries = _float32(q, "q")
        shape = ("B", "S", self.num_heads_q, "D")
        keys, values, mask = self._checked(layer, k, v, valid, {"q": (queries.shape, shape)})
        scale = 1.0 / math.sqrt(self.head_dim) if scale is None else scale
        state, rows = self.layers[layer], queries.shape[1]
        kept = min(rows, MASS_ROWS) if state.observes == "mass" else 0
        collect = kept > 0 and state.since_collection + rows >= self.realloc_every
        view = state.store.view()
        stored = packed_attention(
            queries, view, scale=scale, softcap=softcap, keep_scores=kept if collect else 0
        )
        exact_k, exact_v, visible = stack(state.windows, keys, values, mask)
        exact = attend_exact(queries, exact_k, exact_v, visible, scale=scale, softcap=softcap, keep_rows=kept)
        out, lse = merge_attention([stored.out, exact.out], [stored.lse, exact.lse])
        self._commit(
            layer,
            Arrival(
                keys,
                values,
                mask,
                exact.mass(lse) if kept else None,
                None if stored.scores is None else mass_from_scores(stored.scores, lse, view),
            ),
        )
        return like_first(out.astype(to_numpy_view(q, "q").dtype, copy=False), q)

    def append(self, layer: int, k: Array, v: Array, *, valid: Array | None = None) -> None:
        """Store keys and values without queries; importance, where it is attention, starts from the key norm.

        Parameters and errors as in `step`.
        """
        if self._gpu is not None:
            self._check_layer(layer)
            self._gpu.append(layer, k, v, valid)
            return
        keys, values, mask = self._checked(layer, k, v, valid, {})
        self._commit(layer, Arrival(keys, values, mask))

    def attend(self, layer: int, q: ArrayT, *, scale: float | None = None, softcap: float = 0.0) -> ArrayT:
        """Attend over everything stored; nothing is added.

        Parameters and result as in `step`.
        """
        self._check_layer(layer)
        if self._gpu is not None:
            return self._gpu.attend(layer, q, scale, softcap)  # type: ignore[no-any-return]
        queries = _float32(q, "q")
        match_shapes({"q": (queries.shape, (self.batch, "S", self.num_heads_q, self.head_dim))})
        scale = 1.0 / math.sqrt(self.head_dim) if scale is None else scale
        state, rows = self.layers[layer], queries.shape[1]
        stored = packed_attention(queries, state.store.view(), scale=scale, softcap=softcap)
        # Every row sees the whole window: invisible keys behind it, one a row but the last, align them.
        behind = np.zeros((self.batch, max(rows - 1, 0), self.num_heads_kv, self.head_dim), np.float32)
        exact_k, exact_v, visible = stack(state.windows, behind, behind, np.zeros(behind.shape[:2], bool))
        exact = attend_exact(queries, exact_k, exact_v, visible, scale=scale, softcap=softcap, keep_rows=0)
        out, _ = merge_attention([stored.out, exact.out], [stored.lse, exact.lse])
        return like_first(out.astype(to_numpy_view(q, "q").dtype, copy=False), q)

    def _check_layer(self, layer: int) -> None:
        if not 0 <= layer < self.num_layers:
            raise ValueError(f"layer={layer} does not lie within 0..{self.num_layers - 1}")

    def _checked(
        self, layer: int, k: Array, v: Array, valid: Array | None, more: dict[str, Any]
    ) -> tuple[Floats, Floats, NDArray[np.bool_]]:
        self._check_layer(layer)
        keys, values = _float32(k, "k"), _float32(v, "v")
        kv = ("B", "S", self.num_heads_kv, "D")
        sizes = match_shapes({**more, "k": (keys.shape, kv), "v": (values.shape, kv)})
        match_shapes({"k": (keys.shape, (self.batch, "S", "H", self.head_dim))})
        if valid is None:
            return keys, values, np.ones((self.batch, sizes["S"]), bool)
        mask = to_numpy_view(valid, "valid")
        match_shapes({"valid": (mask.shape, (self.batch, sizes["S"]))})
        if mask.dtype != bool:
            raise TypeError(f"valid has dtype {mask.dtype}; it must be bool")
        return keys, values, mask

    def _commit(self, layer: int, arrival: Arrival) -> None:
        seqlen = self.layers[layer].seqlen + arrival.k.shape[1]
        try:
            self.layers[layer].commit(arrival, self._share(seqlen, self.batch))
        except BudgetError:
            raise self._refusal(seqlen, self.batch) from None

    # ---- rows and lengths ----------------------------------------------------------------------------------

    def crop(self, n: int) -> None:
        """Forget the newest `n` time steps.

        Parameters
        ----------
        n : int
            0 to `seqlen`.

        Raises
        ------
        BudgetError
            If a relative budget falls so far that what stays does not fit; the cache is as it was.
        """
        if not 0 <= n <= self.seqlen:
            raise ValueError(f"n={n} must lie between 0 and the {self.seqlen} time steps seen")
        end = self.seqlen - n
        with self._on_host():
            try:
                share = self._share(end, self.batch)
                plans = [layer.plan_crop(end, share) for layer in self.layers]
            except BudgetError:
                raise self._refusal(end, self.batch) from None
            for layer, plan in zip(self.layers, plans, strict=True):
                layer.crop(end, plan)

    def reset(self) -> None:
        """Forget everything."""
        for layer in self.layers:
            layer.clear()
        if self._gpu is not None:
            self._gpu.clear()

    def reorder(self, rows: Array) -> None:
        """Make row i a copy of the present row `rows[i]`, as beam search does; the batch keeps its size."""
        self._take_rows(_row_numbers(rows, self.batch, keep_size=True))

    def select(self, rows: Array) -> None:
        """Keep the given rows, in the given order; the batch becomes as long as `rows`."""
        self._take_rows(_row_numbers(rows, self.batch))

    def repeat(self, n: int) -> None:
        """Repeat each row `n` times, copies side by side."""
        if n < 1:
            raise ValueError(f"n={n} must be at least 1")
        self._take_rows(np.repeat(np.arange(self.batch), n))

    # ---- files ---------------------------------------------------------------------------------------------

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the cache to a file, atomically; see `kvlab.cache.persistence` for the format.

        Raises
        ------
        NotImplementedError
            If the importance is a user's function, which no file can hold.
        """
        if callable(self.importance):
            raise NotImplementedError(
                "a cache whose importance is a function cannot be saved; choose a policy by name"
            )
        with self._on_host(changes=False):
            states, arrays = persistence.arrays_of(self)
        arguments = {**self._arguments, "batch": self.batch}
        description = {"version": persistence.FORMAT_VERSION, "arguments": arguments, "layers": states}
        persistence.write(path, description, arrays)

    @classmethod
    def load(cls, path: str | os.PathLike[str], *, device: str | None = None) -> MixedPrecisionCache:
        """Read a cache from a file.

        Parameters
        ----------
        path : path
        device : str, optional
            As for a new cache; files are the same for all devices.

        Raises
        ------
        FormatError
            If the file is damaged, truncated, of another version, or no saved cache.
        """
        description, arrays = persistence.read(path)
        try:
            cache = cls(**description["arguments"], device=device)
            persistence.load_into(cache, description["layers"], arrays)
        except FormatError:
            raise
        except (KeyError, TypeError, ValueError, NotImplementedError, AttributeError) as error:
            raise FormatError(f"{os.fspath(path)}: what it describes is no cache ({error})") from None
        return cache

    def _on_host(self, changes: bool = True) -> AbstractContextManager[None]:
        return nullcontext() if self._gpu is None else self._gpu.on_host(changes)

    def _take_rows(self, rows: NDArray[np.int64]) -> None:
        with self._on_host():
            self._take_rows_on_host(rows)

    def _take_rows_on_host(self, rows: NDArray[np.int64]) -> None:
        if len(rows) > self.batch and self._budget.nbytes is not None:
            share = self._share(self.seqlen, len(rows))
            try:
                plans = [layer.shrink(np.unique(rows), share) for layer in self.layers]
            except BudgetError:
                raise self._refusal(self.seqlen, len(rows)) from None
            for layer, changes in zip(self.layers, plans, strict=True):
                layer.carry_out(changes)
        for layer in self.layers:
            layer.take_rows(rows)
        self.batch = len(rows)


def _float32(x: Array, name: str) -> Floats:
    if dtype_name(x, name) not in ("float16", "bfloat16", "float32"):
        raise TypeError(
            f"{name} has dtype {dtype_name(x, name)}; float16, bfloat16 and float32 are supported"
        )
    return to_numpy_view(x, name).astype(np.float32, copy=False)


def _row_numbers(rows: Array, batch: int, keep_size: bool = False) -> NDArray[np.int64]:
    numbers = np.asarray(to_numpy_view(rows, "rows"))
    if numbers.ndim != 1 or numbers.dtype.kind not in "iu":
        raise TypeError(f"rows must be a vector of integers, not {numbers.dtype} of shape {numbers.shape}")
    if keep_size and len(numbers) != batch:
        raise ValueError(
            f"rows has {len(numbers)} entries for a batch of {batch}; use select to change the batch"
        )
    if len(numbers) and (numbers.min() < 0 or numbers.max() >= batch):
        raise ValueError(f"rows names row {numbers.max()} or {numbers.min()} of a batch of {batch}")
    return numbers.astype(np.int64)

"""MixedPrecisionCache: keys and values of a decoder, packed at mixed widths, under a byte budget that holds.

A model calls `step` once a layer: the new queries attend every stored token, straight from its packed page,
and the new tokens exactly and causally; then the new tokens are stored. While the bytes last, tokens stay at
the highest rung; when a page is needed that does not fit, the least important tokens of the row are demoted.

What lies where: options.py, budget.py (bytes a row may take), layers.py (what is fixed of a layer; widths:
kvlab/ladder.py, frames of keys: kvlab/ops/frame.py, key_frames.py), importance.py (scores),
runner.py (steps and their checks), step.py and prefill.py (steps of few and of many tokens), waiting.py
(tokens that wait for their frame), launches.py (a step's launches), store.py (pages and tables, beams,
copies), reallocation.py (plans, moves), contents.py (what files get). Executors, cpu.py and cuda.py, launch
what `kvlab.ops.cpu` and `kvlab.ops.cuda` have; what a plan may take is in `kvlab.ops.plan`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from copy import copy
from dataclasses import fields
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvlab import files
from kvlab.arguments import LONGEST, check_device, whole_number
from kvlab.arrays import Array
from kvlab.cache.contents import Arrays, check_sizes, contents_of, fill
from kvlab.cache.options import row_numbers
from kvlab.cache.runner import Runner
from kvlab.device import translated_out_of_memory
from kvlab.errors import FormatError
from kvlab.pages import LayerPages, named_pages
from kvlab.sizes import format_size
from kvlab.torch_compile import opaque

__all__ = ["MixedPrecisionCache"]


class MixedPrecisionCache(Runner):
    """Packed mixed-precision KV cache for all layers of a model.

    `copy.deepcopy` gives a cache that goes its own way, for example after a prompt that continuations share.

    Parameters
    ----------
    num_layers, num_heads_q, num_heads_kv, head_dim : int
        Geometry of the model; `head_dim` is a multiple of 16 up to 256.
    batch : int
        Number of rows.
    budget : float, int, str or None
        Bytes that all live buffers may take: a fraction of float16 (`0.35`), `"35%"`, `"4.25bpe"`, `"6GiB"`,
        bytes, or None for no limit. A fraction never gives less than an empty cache takes.
    bits : str, int or sequence
        Widths in use, for example `(2, 3, 4, 8)`, `"k4v2"` or `"0-3:8,4-29:2+4"`; 16 is the cache's dtype
        unchanged, 0 evicts. Keys are worth more bits than values. `"k8422v3"` has widths of its own for each
        quarter of a key's channels, those of most energy first. "default": see `kvlab.ladder.default_bits`.
    importance : str or callable
        What keeps a token wide: "attention", what it received of late, then on average; "forecast", the same
        a collection ahead; "key_norm", 1 / the norm of its key; "recency", 1 / its age; "uniform", nothing,
        so all are alike. Or an update function (see `kvlab.cache.importance`).
    allocator : {"greedy", "dp", "uniform"}
        How widths are chosen under the budget. "dp" is the optimum, and its time grows as the square of the
        length: a plan of 32K tokens takes about as long as with "greedy", one of 100K four times as long.
    sliding_window : int or sequence, optional
        How many tokens a query sees, itself the last one: in all layers, or in each of them, None for full
        attention. Such a layer keeps no other tokens. A relative budget counts no more than those of it, an
        absolute one is divided as layers keep tokens of `max_seqlen` (or `plan_length`).
    rewind : int
        Most tokens that `crop` may remove once tokens have left sliding windows: so many more are kept, and
        counted by a relative budget.
    residual : int
        Number of newest tokens that stay exact, in pages of width 16 of their own.
    sink, recent : int
        Number of first and of newest tokens that are kept at the highest width as long as other tokens can
        make room; of the newest at most one in 16 of all.
    floor : float
        What the importance of every token is more than what it collects, in even shares of attention: 1 adds
        1 / length. With 0 widths follow attention alone, and what is asked later may be lost; the more, the
        more alike are all widths.
    plan_length : int
        A relative budget counts a shorter sequence as this long.
    max_seqlen : int, optional
        Longest sequence to expect: a budget that cannot hold it is refused at once, and memory of a GPU is
        taken for so many tokens. Longer ones are no error as long as the budget holds them; a GPU takes
        memory anew for them.
    realloc_every : int
        Query tokens between two collections of attention mass.
    ema_decay : float
        Weight of the old importance after 64 tokens, once a token is no longer young.
    device : str, optional
        "cpu", the default, or "cuda": arrays are on the GPU then (torch, CuPy), and so is the memory, which
        is taken at the first call from their framework. Allocator "dp" runs on the CPU, and every plan, one
        in 48 tokens, waits for it; a function as importance does so too, and all steps wait for it, so no
        CUDA graph can hold them.
    dtype : {"float16", "bfloat16", "float32"}
        Or such a dtype of torch or NumPy: type of width 16 and of the residual window. On a GPU queries, keys
        and values have it, too.
    frames : KeyFrames, optional
        In what mean, order and scale keys are packed, from `kvlab.KeyFrames.measured`. Without it every row
        takes them from its first 64 tokens, which wait for that. A saved cache has those of its rows alone.
    rotary : sequence of float, or of such sequences by layer, optional
        How many radians RoPE turns channels i and i + len(rotary) of keys with each token (`inv_freq` of a
        model): then what rows take from their first tokens holds for later ones, too
        (`kvlab.ops.frame.mean_factors`). Empty or None: nothing is known of that.

    Raises
    ------
    BudgetError
        If an empty cache does not fit the budget, or `max_seqlen` tokens do not, even at the lowest rung.
    NotImplementedError
        On a GPU: for dtype "float32", or a head dimension for which there is no kernel.

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

    def __repr__(self) -> str:
        return f"{type(self).__name__}: {self.num_layers} layers, {self.describe()}"

    def describe(self) -> str:
        """Return tokens, bytes and bits an element in words.

        Examples
        --------
        >>> cache = MixedPrecisionCache(1, 2, 1, 16, bits=8, budget=None)
        >>> cache.describe()
        'empty'
        """
        if not self.seqlen:
            return "empty"
        rows = "" if self.batch == 1 else f"{self.batch} rows of "
        of, bits = self.nbytes, self.bits_per_element
        limit = "" if self.budget_nbytes is None else f" of {format_size(self.budget_nbytes)}"
        dense = format_size(round(of * 16 / bits)) if bits else "0 B"
        taken = f"{format_size(of)}{limit}, {bits:.1f} bits an element (float16 {dense})"
        return f"{rows}{self.seqlen} tokens, {taken}"

    def __reduce__(self) -> tuple[Any, ...]:
        """What pickles are made of: what the cache holds, on the host."""
        return _made_of, (type(self), self._options(), self._contents())

    def _options(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def __deepcopy__(self, memo: dict[int, Any]) -> MixedPrecisionCache:
        other = object.__new__(type(self))
        vars(other).update(vars(self))
        other._accepted = set()
        with translated_out_of_memory("a copy of a cache"):
            other._device = self._device.copy()
        return other

    def to_cpu(self) -> MixedPrecisionCache:
        """Return a copy on the CPU that holds the very same pages; of a cache on a GPU, waits for it.

        Examples
        --------
        >>> cache = MixedPrecisionCache(1, 4, 2, 32, budget=None, bits=(4,))
        >>> cache.append(0, *np.ones((2, 1, 100, 2, 32), np.float32))
        >>> copy = cache.to_cpu()
        >>> cache.crop(10)
        >>> copy.seqlen, copy.device
        (100, 'cpu')
        """
        return _made_of(type(self), self._options() | {"device": "cpu"}, self._contents())

    # ---- sizes ---------------------------------------------------------------------------------------------

    @property
    def seqlen(self) -> int:
        """Number of time steps seen, padding included."""
        return self._device.lengths[0]

    @property
    def nbytes(self) -> int:
        """Bytes in live buffers: pages, page table, key frames, exact tokens. On a GPU, waits for it."""
        self._device.reallocator.synchronize()
        return sum(self._device.store.nbytes())

    @property
    def reserved_nbytes(self) -> int:
        """Bytes of pools and tables that hold them; on a GPU, from the first step on, all device memory."""
        return self._device.reserved_nbytes

    @property
    def budget_nbytes(self) -> int | None:
        """Bytes that `nbytes` may reach at the present length; None: no limit."""
        row_budgets = self._limit.row_budgets(self.seqlen, self.batch)
        return None if row_budgets is None else sum(row_budgets) * self.batch

    @property
    def bits_per_element(self) -> float:
        """Bits in live buffers per stored K and V element; 0 for an empty cache. On a GPU, waits for it."""
        count, num_pages = self._device.read("count", "num_pages")
        live = np.arange(count.shape[-1]) < num_pages[..., None]
        tokens = int(count[live].sum(dtype=np.int64))
        return 8 * self.nbytes / (2 * self.head_dim * tokens) if tokens else 0.0

    def smallest_nbytes(self, seqlen: int) -> int:
        """Bytes that hold so many tokens in every row for certain, at the lowest widths; no budget is asked.

        Raises
        ------
        ValueError, TypeError
            If `seqlen` is no whole number of at least 0.

        Examples
        --------
        >>> cache = MixedPrecisionCache(1, 4, 2, 64, budget=None, bits=(2, 4))
        >>> cache.smallest_nbytes(1024) / (2 * 2 * 2 * 64 * 1024) < 0.16
        True
        """
        seqlen = whole_number(seqlen, "seqlen", 0, LONGEST)
        return self._limit.smallest_nbytes(seqlen) * self.batch

    @opaque
    def allocation(self) -> dict[str, NDArray[np.int64]]:
        """Number of pages of each rung; on a GPU, waits for it.

        Returns
        -------
        dict of str to int64 array (layers, batch, KV heads)
            By the name of the rung, as "k4v3".
        """
        names = "rung", "index", "num_pages"
        tables = dict(zip(names, self._device.read(*names), strict=True))
        named, ladders = named_pages(tables), [layer.store.ladder for layer in self._layers]
        rungs = sorted({rung for ladder in ladders for rung in ladder}, key=lambda rung: rung.total)
        found = {str(rung): np.zeros(named.shape[:3], np.int64) for rung in rungs}
        for layer, ladder in enumerate(ladders):
            for r, rung in enumerate(ladder):
                found[str(rung)][layer] = (named[layer] & (tables["rung"][layer] == r)).sum(-1)
        return found

    @opaque
    def pages(self, layer: int) -> LayerPages:
        """Return a copy of the pages of a layer in host memory; on a GPU, waits for it.

        Parameters
        ----------
        layer : int

        Returns
        -------
        kvlab.pages.LayerPages
            As `kvlab.ops.packed.packed_attention` takes them: first pages of the ladder, then those of exact
            tokens, if there are any.
        """
        layer = self._layer(layer)
        self._device.reallocator.synchronize()
        return self._device.store.host_pages(layer)

    # ---- rows and lengths ----------------------------------------------------------------------------------

    @opaque
    def crop(self, n: int) -> None:
        """Forget the newest `n` time steps. On a GPU, waits for it only where the budget falls, too.

        Parameters
        ----------
        n : int
            0 to `seqlen`.

        Raises
        ------
        BudgetError
            If a relative budget falls so far that what stays does not fit; the cache is as it was.
        ValueError
            If tokens that left a sliding window would be seen again; the cache is as it was. See `rewind`.
        """
        end = self.seqlen - whole_number(n, "n", 0, self.seqlen)
        if end:
            self._limit.check(end, self.batch)
        if end < max(self._device.lengths):
            self._device.check_crop(end)
            self._device.crop(end, self._limit.row_budgets(end, self.batch))

    def allow_rewind(self, n: int) -> None:
        """Let `crop` remove up to `n` tokens that come from now on, also where layers have a sliding window.

        Parameters
        ----------
        n : int
            As the option `rewind`, which is never lowered.

        Raises
        ------
        BudgetError
            If so many more tokens do not fit; the cache is as it was.

        Examples
        --------
        >>> cache = MixedPrecisionCache(1, 4, 2, 64, budget=None, sliding_window=32)
        >>> cache.allow_rewind(8)
        >>> cache.append(0, *np.ones((2, 1, 100, 2, 64), np.float32))
        >>> cache.crop(8)
        >>> cache.seqlen
        92
        """
        n = whole_number(n, "n", 0, LONGEST)
        if n <= self.rewind:
            return
        limit, length = copy(self._limit), max(self._device.lengths)
        limit.rewind = n
        limit.check(length, self.batch)
        with translated_out_of_memory(f"{self.batch} rows of {length} tokens"):
            self._device.allow_rewind(n, partial(limit.row_budgets, batch=self.batch))
        self._limit, self.rewind, self._fitting = limit, n, (0, 0)

    @opaque
    def reset(self) -> None:
        """Forget everything."""
        self._device.clear()

    @opaque
    def reorder(self, rows: Array | Sequence[int]) -> None:
        """Make row i a copy of the present row `rows[i]`, as beam search does; the batch keeps its size.

        Parameters
        ----------
        rows : (batch,) integer array, or list
            Numbers of rows, 0 to batch - 1.

        Raises
        ------
        TypeError, ValueError
            If `rows` is no vector of integers, has another length, or names a row that does not exist.
        """
        self._take_rows(row_numbers(rows, self.batch, keep_size=True))

    @opaque
    def select(self, rows: Array | Sequence[int]) -> None:
        """Keep the given rows, in the given order; the batch becomes as long as `rows`.

        Parameters
        ----------
        rows : (n,) integer array, or list
            Numbers of rows, 0 to batch - 1; a row may occur several times. None of them leaves a batch of 0.

        Raises
        ------
        BudgetError
            If so many rows do not fit the budget; the cache is as it was.
        TypeError, ValueError
            If `rows` is no vector of integers, or names a row that does not exist.
        """
        self._take_rows(row_numbers(rows, self.batch))

    @opaque
    def repeat(self, n: int) -> None:
        """Repeat each row `n` times, copies side by side.

        Parameters
        ----------
        n : int
            1 or more.

        Raises
        ------
        BudgetError
            If so many rows do not fit the budget; the cache is as it was.
        """
        n = whole_number(n, "n", 1, LONGEST // max(self.batch, 1))
        self._take_rows(np.repeat(np.arange(self.batch), n))

    # ---- files ---------------------------------------------------------------------------------------------

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the cache to a file, atomically; see `kvlab.files` for the format.

        A file that is there keeps its permissions; a symbolic link stays, and what it names is replaced. On a
        GPU, waits for it.

        Raises
        ------
        NotImplementedError
            If the importance is a user's function, which no file can hold.
        ValueError
            If layers hold different numbers of tokens: one was stepped more often than another.
        """
        if callable(self.importance):
            raise NotImplementedError(
                "a cache whose importance is a function cannot be saved; choose a policy by name"
            )
        if len(lengths := set(self._device.lengths)) > 1:
            raise ValueError(
                f"layers hold different numbers of tokens, {sorted(lengths)}: step every layer once per time "
                "step, then save"
            )
        files.checked_path(path)
        states, arrays = self._contents()
        files.write(path, {"arguments": self.saved(), "layers": states}, arrays)

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
        NotImplementedError
            As for a new cache, if a GPU does not do what the file holds.
        """
        check_device(device)
        description, arrays = files.read(path)
        try:
            check_sizes(description, arrays)
            cache = cls(**description["arguments"], device=device)
            cache._fill(description["layers"], arrays)
        except FormatError:
            raise
        except NotImplementedError:
            cls.load(path)  # a file that is none is none on the CPU, too
            raise
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            raise FormatError(f"{os.fspath(path)}: what it describes is no cache ({error})") from None
        return cache

    def _contents(self) -> tuple[list[dict[str, Any]], Arrays]:
        with translated_out_of_memory("the pages of a cache on the host"):
            return contents_of(self._device)

    def _fill(self, states: list[dict[str, Any]], arrays: Arrays) -> None:
        """Hold contents in an empty cache that has not met its GPU."""
        length = max(whole_number(state["seqlen"], "seqlen", 0, LONGEST) for state in states)
        if length > self._device.store.capacity:
            self._device = self._make(self._device.executor, self._device.like, length)
        fill(self._device, states, arrays)
        row_budgets = self._limit.row_budgets(length, self.batch)
        if row_budgets is not None:
            for held, row_budget in zip(self._device.store.nbytes(), row_budgets, strict=True):
                if held > row_budget * self.batch:
                    raise FormatError("the budget does not hold what it has stored")

    def _take_rows(self, rows: NDArray[np.int64]) -> None:
        """Let row i become row `rows[i]`."""
        device, batch = self._device, len(rows)
        length = device.lengths[0]
        if batch > self.batch:
            self._limit.check(length, batch)
        with translated_out_of_memory(f"{batch} rows of {length} tokens"):
            device.take_rows(rows, device.store.capacity, partial(self._limit.row_budgets, batch=batch))
        self.batch = batch


def _made_of(
    kind: type[MixedPrecisionCache], options: dict[str, Any], contents: tuple[Any, Any]
) -> MixedPrecisionCache:
    cache = kind(**options)
    cache._fill(*contents)
    return cache

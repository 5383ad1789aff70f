"""Prepared launches of the steps of a cache, and the memory that launches share.

A decode step repeats the same two launches a layer, token after token. Their arguments are laid down once and
kept for as long as the store's memory stays where it is. Memory for the scores of a collecting step and for
parts of results serves all layers, which run one after the other on one stream. A prefill is rare and needs
more of it, so it takes its own for the call alone; of its launches those of the last shape are kept.

Checks and Python's other work take longer than the two launches. So a step whose arrays lie as those of the
last step of its layer is not checked again (`keep_launches`, `launch_again`). It takes three addresses, an
allocation and two launches.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from kvlab.ladder import EXACT
from kvlab.ops.layer_state import OBSERVED, ROWS
from kvlab.views import CudaView

if TYPE_CHECKING:
    from kvlab.cache.importance import Collector
    from kvlab.cache.waiting import Waiting

__all__ = ["KnownStep", "StepCalls", "keep_launches", "launch_again"]


class Lse(NamedTuple):
    """Log-sum-exp of a step, (batch, num_heads_q, num_new), and its address."""

    array: Any
    pointer: int


@dataclass(frozen=True, slots=True)
class KnownStep:
    """A step of a layer that has run: its result's shape, its launches, and how q, k and v lay."""

    layout: Hashable
    num_new: int
    shape: tuple[int, ...]
    views: list[Any]  # CudaViews without their addresses
    calls: tuple[Any, Any, Lse]


@dataclass(frozen=True, slots=True)
class _BothAppends:
    """The append of rows whose tokens go to pages of the ladder, and that of rows whose tokens wait."""

    others: Any
    waiting: Any

    def __call__(self, *arguments: Any) -> None:
        """Launch both; arguments of `AppendCall`."""
        self.others(*arguments)
        self.waiting(*arguments)


class StepCalls:
    """Launches for one `DeviceStore`.

    Parameters
    ----------
    kernels : Kernels
        Of the store.
    num_heads_q : int
    collector : Collector
        Keeps scores.
    waiting : Waiting
        Knows which rows have tokens that wait.
    """

    def __init__(self, kernels: Any, num_heads_q: int, collector: Collector, waiting: Waiting) -> None:
        store = kernels.store
        self._kernels, self._store, self._num_heads_q = kernels, store, num_heads_q
        self._executor = store.executor
        self._collector, self._waiting = collector, waiting
        self._num_bh, self._group = store.batch * store.heads, num_heads_q // store.heads
        self._step_launches: dict[Any, tuple[Any, Any, Lse]] = {}
        self._appends: dict[Any, Any] = {}
        self._lse: dict[int, Lse] = {}
        self._workspaces: dict[int, Any] = {}
        # Of the last call of `attend`, whose launches are kept: the next one is often like it.
        self._last_shape: Any = None
        self._attends: dict[tuple[int, str, int], tuple[Any, Any]] = {}  # with the windows that they read
        self._semaphores: Any = None
        self._memory: tuple[Any, Any, Any, Any] | None = None  # for the layers of a prefill

    @property
    def nbytes(self) -> int:
        """Bytes of device memory that is kept."""
        arrays = [lse.array for lse in self._lse.values()]
        arrays += [] if self._semaphores is None else [self._semaphores]
        if self._memory is not None:
            arrays += [x for x in (*self._memory[:3], self._memory[3].partial) if x is not None]
        arrays += [
            x for workspace in self._workspaces.values() for x in (workspace.partial, workspace.semaphores)
        ]
        return sum(int(x.nbytes) for x in arrays)

    def step(
        self, layer: int, q: Any, num_new: int, scale: float, softcap: float, collects: bool
    ) -> tuple[Any, Any, Lse]:
        """Attention over stored tokens (keeping scores if it `collects`), the append, log-sum-exp."""
        mode = self._waiting.mode(layer)
        key = (layer, num_new, scale, softcap, collects, mode)
        found = self._step_launches.get(key)
        if found is None:
            if num_new not in self._workspaces:
                self._workspaces[num_new] = self._new_workspace(num_new)
            scores, lse = None, None
            if collects:
                scores, memory = self._collector.memory_of(layer, num_new)
                lse = Lse(memory, self._executor.view(memory, "lse").pointer)
            pages, workspace = self._store.pages(layer, waiting=mode != "none"), self._workspaces[num_new]
            attend = self._kernels.attend_call(
                q, pages, workspace, scale=scale, softcap=softcap, scores=scores,
                window=self._store.window(layer),
            )  # fmt: skip
            append = self.append(layer, num_new, scale, softcap)
            found = self._step_launches[key] = attend, append, lse or self._lse_of(num_new)
        return found

    def append(
        self, layer: int, num_new: int, scale: float, softcap: float, *, has_queries: bool = True
    ) -> Any:
        """The append of a number of tokens; without queries that follows key norms, not attention mass."""
        mode = self._waiting.mode(layer)
        observes = self._store.layers[layer].observes
        observed = "norm" if observes == "mass" and not has_queries else observes
        key = (layer, num_new, scale, softcap, observed, mode)
        if key not in self._appends:
            options = {"num_new": num_new, "group": self._group, "scale": scale, "softcap": softcap}
            append_call = partial(self._kernels.append_call, layer, observed=OBSERVED[observed], **options)
            top = self._store.stores[layer].ladder[-1]
            if mode == "some":
                others, waiting = (
                    append_call(top, rows=ROWS["others"]),
                    append_call(EXACT, rows=ROWS["waiting"]),
                )
                self._appends[key] = _BothAppends(others, waiting)
            else:
                self._appends[key] = append_call(EXACT if mode == "all" else top, rows=ROWS["all"])
        return self._appends[key]

    def _lse_of(self, num_new: int) -> Lse:
        if num_new not in self._lse:
            shape = self._store.batch, self._num_heads_q, num_new
            lse = self._executor.empty(shape, "float32", self._store.like)
            self._lse[num_new] = Lse(lse, self._executor.view(lse, "lse").pointer)
        return self._lse[num_new]

    def attend(
        self,
        layer: int,
        q: Any,
        view: CudaView,
        scale: float,
        softcap: float,
        score_rows: int,
        after: int = 0,
    ) -> tuple[Any, Any, Any]:
        """Attend stored tokens with any number of queries: out, lse, scores of the last `score_rows` rows.

        The first query stands `after` tokens behind the stored ones. The next call for as many queries gives
        the same arrays again, until `forget`.
        """
        num_new, max_tokens, executor = view.shape[1], self.max_query_tokens, self._executor
        if num_new > max_tokens > 0:
            out, lse = (
                executor.empty(view.shape, view.dtype, q),
                executor.empty((view.shape[0], view.shape[2], num_new), "float32", q),
            )
            # The last part is a whole one.
            for end in range((num_new - 1) % max_tokens + 1, num_new + 1, max_tokens):
                part = slice(max(end - max_tokens, 0), end)
                of_part, last = q[:, part], score_rows if end == num_new else 0
                own = executor.view(of_part, "q"), scale, softcap, last, after + part.start
                found = self.attend(layer, of_part, *own)
                out[:, part], lse[:, :, part], scores = found
            return out, lse, scores
        shape = view.shape, scale, softcap, score_rows
        if shape != self._last_shape:
            self._last_shape, self._attends = shape, {}
            self.forget()
        if self._memory is None:
            self._memory = self._for_attend(q, view, score_rows)
        out, lse, scores, workspace = self._memory
        mode = self._waiting.mode(layer)
        known = layer, mode, after if self._store.layers[layer].sliding_window else 0
        if known not in self._attends:
            pages, window = self._store.pages(layer, waiting=mode != "none"), self._store.window(layer, after)
            rules = {"scale": scale, "softcap": softcap, "scores": scores, "window": window}
            self._attends[known] = self._kernels.attend_call(q, pages, workspace, **rules), window
        call, _ = self._attends[known]
        call.use(workspace, scores)
        call(view, executor.pointer(out), executor.pointer(lse), executor.stream(q))
        return out, lse, scores

    def _for_attend(self, q: Any, view: CudaView, score_rows: int) -> tuple[Any, Any, Any, Any]:
        (batch, num_new, heads, _), empty = view.shape, self._executor.empty
        out, lse = empty(view.shape, view.dtype, q), empty((batch, heads, num_new), "float32", q)
        scores = self._new_scores(score_rows) if score_rows else None
        workspace = self._new_workspace(num_new, self._semaphores)
        self._semaphores = workspace.semaphores
        return out, lse, scores, workspace

    @property
    def max_query_tokens(self) -> int:
        """How many a launch takes, and `attend` with scores kept of the last of them."""
        return int(self._kernels.max_query_tokens(self._group))

    def forget(self) -> None:
        """Give back what `attend` has used."""
        self._memory = None

    def _new_scores(self, score_rows: int) -> Any:
        return self._executor.score_memory(self._collector.shape(score_rows), self._store.like)

    def _new_workspace(self, num_new: int, semaphores: Any = None) -> Any:
        return self._kernels.attention_workspace(num_new * self._group, semaphores)


def keep_launches(
    cache: Any, layer: int, layout: Hashable, arrays: list[Any], scale: float, softcap: float
) -> None:
    """Let `launch_again` serve arrays that lie as these (B, S, H, D), given with the same `layout`."""
    last = cache.known_steps[layer]
    if last is not None and last.layout == layout:
        return
    num_new, views = arrays[0].shape[1], [cache.executor.view(x, "x") for x in arrays]
    calls = cache.calls.step(layer, arrays[0], num_new, scale, softcap, False)
    cache.known_steps[layer] = KnownStep(layout, num_new, views[0].shape, [view[1:] for view in views], calls)


def launch_again(cache: Any, layer: int, layout: Hashable, q: Any, k: Any, v: Any) -> Any:
    """A step like one before, on tensors of torch without padding; None: it is none, so call `step`.

    Steps that lack room or that collect attention mass are none.
    """
    last = cache.known_steps[layer]
    if last is None or last.layout != layout or cache.has_pending:
        return None
    num_new = last.num_new
    if cache.lookahead[layer] < num_new or cache.collects(layer, num_new) or not cache.lengths[layer]:
        return None
    (attend, append, lse), (of_q, of_k, of_v) = last.calls, last.views
    query = CudaView(q.data_ptr(), *of_q)
    key, value = CudaView(k.data_ptr(), *of_k), CudaView(v.data_ptr(), *of_v)
    if (query.pointer | key.pointer | value.pointer) & 3:
        return None
    out, stream = q.new_empty(last.shape), cache.executor.stream(q)
    address = out.data_ptr()
    attend(query, address, lse.pointer, stream)
    append(query, key, value, 0, address, lse.pointer, True, stream)
    cache.lengths[layer] += num_new
    cache.since[layer] += num_new
    cache.lookahead[layer] -= num_new
    return out

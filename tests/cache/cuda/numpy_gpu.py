"""The kernels of a cache on a GPU in NumPy and Numba, for tests of what the host does around them.

`install` puts them in place of the launchers, and arrays of NumPy in place of those of a GPU. Addresses are
real ones of host memory, looked up among the arrays whose address was asked for. Each kernel does what its
source says, token by token; the plan is its oracle in `kvlab.reference.cache_plan`.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvlab.arrays import CudaView, dtype_name, meant_strides
from kvlab.cache.cuda import (
    calls,
    changes,
    collect,
    exchange,
    function,
    host,
    layers,
    long,
    repeat,
    road,
    state,
    store,
)
from kvlab.cache.cuda import kernels as launchers
from kvlab.cache.cuda.store import STATE, UNIT, DeviceStore
from kvlab.cache.exact import attend_exact
from kvlab.cache.frame import key_mean
from kvlab.cache.ladder import Rung
from kvlab.cache.pages import DECODED, RAW, encode_importance, read_tokens, write_tokens
from kvlab.cache.store import LayerStore
from kvlab.ops.packed import packed_attention
from kvlab.reference import cache_layer, cache_plan
from kvlab.reference.pages import rotate

NEW = cache_layer.NEW_TOKEN


class Kernels:
    """All launchers, and the arrays they know by address."""

    def __init__(self) -> None:
        self.arrays: dict[int, np.ndarray] = {}
        self.by_shape: dict[tuple[int, tuple[int, ...]], np.ndarray] = {}  # parts begin where the whole does
        self.store: DeviceStore
        self.plans: list[tuple[int, int, int]] = []  # (layer, new tokens, status) of every plan so far
        self.most_births: list[int] = []  # of the next plans, in place of what their workspace has room for
        self.most_query_tokens = 1 << 20
        self.scored: list[list[tuple[int, int]]] = []  # of every launch: (layer, tokens before the step)

    def view(self, x: np.ndarray, name: str) -> CudaView:
        address, like = x.ctypes.data, x if x.size else np.empty([max(n, 1) for n in x.shape], x.dtype)
        self.arrays[address] = self.by_shape[address, x.shape] = x
        # Without an element NumPy's strides are 0, those of GPU arrays are not.
        strides = meant_strides(like.shape, tuple(s // x.itemsize for s in like.strides))
        return CudaView(address, x.shape, strides, dtype_name(x), 0)

    def score_stored(self, states: int, scores: Any, lse: Any, *, counted: int, **rest: Any) -> None:
        """Importance itself stays as it is; what is checked is when a launch serves which layers."""
        first = (states - self.store.states_pointer) // STATE.itemsize
        assert len(scores) == len(lse)
        lengths = self.store.tables["seqlen"][first : first + len(scores)]
        self.scored.append([(first + i, int(x.max(initial=0)) - counted) for i, x in enumerate(lengths)])

    # ---- plans and moves

    def make_workspace(self, like: Any, shape: Any, layers: int, births: int, dropped: int) -> Any:
        plan = SimpleNamespace(nbytes=0, shape=shape, most_births=births, most_dropped=dropped, changes={})
        plan.move_lists = lambda phase: (plan, phase)
        plan.max_groups = lambda phase: births
        return plan

    def layer(self, number: int) -> cache_layer.Layer:
        store, host = self.store, self.store.stores[number]
        tables = {name: table[number] for name, table in store.tables.items()}
        pairs = store.batch * store.heads
        by_pair = {
            name: tables[name].reshape(pairs, tables[name].shape[2])
            for name in ("rung", "count", "index", "base", "open")
        }
        rungs = tuple(
            cache_layer.Rung(x.nbytes // UNIT, store.slab[number] // x.nbytes, x.positions)
            for x in host.layouts
        )
        return cache_layer.Layer(
            store.batch, store.heads, rungs, host.evicts, store.slab[number] // UNIT, store.arenas[number],
            by_pair["rung"], by_pair["count"], by_pair["index"].view(np.uint32),
            by_pair["base"].view(np.uint16), tables["num_pages"].reshape(pairs), by_pair["open"],
            tables["used"][: len(rungs)], tables["slab_count"][: len(rungs)], tables["slabs"],
            tables["free_slabs"], int(tables["num_free"][0]), tables["owner"].view(np.uint32),
            tables["place"], int(tables["seqlen"].max(initial=0)), tables["budget"],
        )  # fmt: skip

    def launch_plan(
        self, states: int, first: int, n: int, workspace: Any, ladder: Any, nbytes: int, stream: int, *,
        codes: int = 0, valid: int = 0, steps: int = 0, first_position: int = 0, **rules: Any,
    ) -> None:  # fmt: skip
        assert states == self.store.states_pointer
        workspace.changes = {}
        for number in range(first, first + n):
            layer, new = self.layer(number), None
            if steps:
                mask = self.arrays[valid] if valid else np.ones((self.store.batch, steps), bool)
                new = cache_layer.Tokens(self.arrays[codes], mask, first_position)
            most = self.most_births.pop(0) if self.most_births else workspace.most_births
            change = cache_plan.plan(layer, ladder, new, most_births=most, **rules)
            self.store.tables["num_free"][number] = layer.num_free
            self.store.tables["status"][number] |= change.status
            workspace.changes[number] = change
            self.plans.append((number, steps, change.status))

    def page(self, arena: np.ndarray, number: int, address: int, rung: int) -> np.ndarray:
        layout = self.store.stores[number].layouts[rung]
        return arena[address * UNIT : address * UNIT + layout.nbytes][None]

    def write_slot(
        self, number: int, page: np.ndarray, rung: int, slot: int, k: Any, v: Any, steps: Any = (RAW, RAW)
    ) -> None:
        store = self.store.stores[number]
        where, known = (np.array([0]), np.array([slot])), np.array(steps, np.int16)[:, None]
        write_tokens(page, store.layouts[rung], store.dtype, *where, k[None], v[None], known)

    def encoded(self, number: int, pair: int, rung: int, k: Any, v: Any) -> tuple[np.ndarray, np.ndarray]:
        bits = self.store.stores[number].ladder[rung]
        mean = self.store.tables["k_mean"][number].reshape(-1, len(k))[pair]
        k, v = k.astype(np.float32), v.astype(np.float32)
        k = k if bits.bits_k == 16 else rotate(k[None], mean)[0]
        return k, v if bits.bits_v == 16 else rotate(v[None])[0]

    def tail(self, number: int, page: np.ndarray, rung: int, slot: int) -> tuple[Any, Any]:
        layout = self.store.stores[number].layouts[rung]
        return layout.positions_in(page)[0, slot : slot + 1], layout.importance_in(page)[0, slot : slot + 1]

    def write_tokens(self, *args: Any) -> None:
        (plan, phase), fresh = args[-5], args[-2]
        steps = int(fresh["steps"])
        for number, change in plan.changes.items():
            store, arena = self.store.stores[number], self.store.arenas[number]
            before = arena.copy()
            for source, to, from_slot, to_slot, from_rung, to_rung, token in change.phases[phase]:
                page = self.page(arena, number, to, to_rung)
                position, importance = self.tail(number, page, to_rung, to_slot)
                if from_rung == NEW:
                    row, step = divmod(token, steps)
                    head = source - row * self.store.heads
                    k, v = (self.arrays[int(fresh[side])][row, step, head] for side in "kv")
                    pair = source
                    position[:] = (int(fresh["first"]) + step) & 0xFFFF
                    importance[:] = self.arrays[int(fresh["importance"])].reshape(-1, steps)[pair, step]
                    k, v = self.encoded(number, pair, to_rung, k, v)
                    steps_of = [RAW, RAW]
                else:
                    old = self.page(before, number, source, from_rung)
                    for new, kept in zip(
                        (position, importance), self.tail(number, old, from_rung, from_slot), strict=True
                    ):
                        new[:] = kept
                    where = np.array([0]), np.array([from_slot])
                    k, v = (x[0] for x in read_tokens(old, store.layouts[from_rung], store.dtype, *where))
                    present, wanted = store.ladder[from_rung], store.ladder[to_rung]
                    raw_k, raw_v = self.encoded(number, token, to_rung, k, v)
                    k = raw_k if present.bits_k == 16 else k
                    v = raw_v if present.bits_v == 16 else v
                    layout = store.layouts[from_rung]
                    steps_of = [
                        RAW if bits == 16 else int(old[0, first + from_slot]) if bits == to_bits else DECODED
                        for bits, to_bits, first in (
                            (present.bits_k, wanted.bits_k, layout.k_steps),
                            (present.bits_v, wanted.bits_v, layout.v_steps),
                        )
                    ]
                    assert wanted.bits_k <= present.bits_k
                    assert wanted.bits_v <= present.bits_v
                self.write_slot(number, page, to_rung, to_slot, k, v, steps_of)
            if steps:
                self.store.tables["seqlen"][number] = int(fresh["first"]) + steps

    def copy_pages(self, *args: Any) -> None:
        plan, _ = args[4]
        for number, change in plan.changes.items():
            arena = self.store.arenas[number]
            before = arena.copy()
            for source, to, rung in change.copies:
                self.page(arena, number, to, rung)[:] = self.page(before, number, source, rung)

    # ---- steps

    def mean_of_keys(self, dim: int, dtype: str, device: int, fresh: Any, *args: Any) -> None:
        k, mean = self.arrays[int(fresh["k"])], self.arrays[args[2]]
        valid = self.arrays[int(fresh["valid"])] if int(fresh["valid"]) else np.ones(k.shape[:2], bool)
        for row in range(len(k)):
            mean[row] = key_mean(k[row][valid[row]].astype(np.float32)[:64])

    def merge_rows(self, dim: int, dtype: str, device: int, addresses: Any, shape: Any, stream: int) -> None:
        out, lse, other, other_lse = (self.arrays[address] for address in addresses)
        merge(out, lse, other, other_lse)

    def append_call(self, state: Any, *args: Any, steps: int, observed: int, **options: Any) -> Any:
        arenas = [int(other["arena"]) for other in self.store.host_states]
        number = arenas.index(int(state["arena"]))

        def append(q: Any, k: Any, v: Any, valid: int, out: int, lse: int, stored: bool, stream: int) -> None:
            keys, values = self.arrays[k.pointer], self.arrays[v.pointer]
            mask = self.arrays[valid] if valid else np.ones(keys.shape[:2], bool)
            mass = None
            if q is not None:
                mass = self.finish(self.arrays[q.pointer], keys, values, mask, out, lse, stored, options)
            self.store_tokens(number, keys, values, mask, mass if observed == 0 else None)

        return append

    def finish(
        self, q: Any, k: Any, v: Any, valid: Any, out: int, lse: int, stored: bool, options: Any
    ) -> np.ndarray:
        q = np.where(valid[..., None, None], q, np.float16(0))
        wide = [x.astype(np.float32) for x in (q, k, v)]
        exact = attend_exact(
            *wide, valid, scale=options["scale"], softcap=options["softcap"], keep_rows=q.shape[1]
        )
        result, total = self.arrays[out], self.arrays[lse]
        if not stored:
            result[...], total[...] = 0, -np.inf
        merge(result, total, exact.out, exact.lse)
        total.swapaxes(1, 2)[~valid] = np.inf
        return exact.mass(total)

    def store_tokens(self, number: int, k: Any, v: Any, valid: Any, mass: Any) -> None:
        tables = {name: table[number] for name, table in self.store.tables.items()}
        top = len(self.store.stores[number].ladder) - 1
        for row in range(self.store.batch):
            for head in range(self.store.heads):
                start = int(tables["seqlen"][row, head])
                for step in np.flatnonzero(valid[row]):
                    entry = self.open_entry(tables, row, head, (start + int(step)) >> 16)
                    at = (row, head, entry)
                    assert tables["rung"][at] == top
                    page = self.page(self.store.arenas[number], number, int(tables["index"][at]), top)
                    slot = int(tables["count"][at])
                    pair = row * self.store.heads + head
                    vectors = self.encoded(number, pair, top, k[row, step, head], v[row, step, head])
                    self.write_slot(number, page, top, slot, *vectors)
                    position, importance = self.tail(number, page, top, slot)
                    position[:] = (start + step) & 0xFFFF
                    importance[:] = 192 if mass is None else encode_importance(mass[row, head, step])
                    tables["count"][at] += 1
                tables["seqlen"][row, head] += valid.shape[1]

    @staticmethod
    def open_entry(tables: dict[str, np.ndarray], row: int, head: int, segment: int) -> int:
        for entry in map(int, tables["open"][row, head]):
            at = (row, head, entry)
            if entry >= 0 and tables["count"][at] < 64 and tables["base"][at] == segment:
                return entry
        raise AssertionError(f"no room for a token of row {row}, head {head}")

    def attend_call(self, q: Any, pages: Any, workspace: Any, **options: Any) -> Any:
        number = next(i for i, arena in enumerate(self.store.arenas) if arena is pages.pools[0])
        used = [options.pop("scores", None)]

        def use(workspace: Any, scores: Any) -> None:
            used[0] = scores

        def attend(view: CudaView, out: int, lse: int, stream: int) -> None:
            host = self.store.stores[number]
            ladder = (Rung(0, 0), *host.ladder) if host.evicts else host.ladder
            held = LayerStore(ladder, host.batch, host.num_heads_kv, host.head_dim, host.dtype)
            tables = {name: self.store.tables[name][number] for name in ("rung", "count", "index", "base")}
            tables["index"], tables["base"] = tables["index"].view(np.uint32), tables["base"].view(np.uint16)
            arena = self.store.arenas[number].reshape(-1, UNIT)
            others = (self.store.tables[name][number] for name in ("num_pages", "k_mean"))
            exchange._fill(held, arena, tables, *others)
            queries = self.by_shape[view.pointer, view.shape]
            found = packed_attention(queries, held.view(), **options)
            self.arrays[out][...], self.arrays[lse][...] = found.out, found.lse
            if used[0] is not None:
                used[0][...] = 0

        attend.use = use  # type: ignore[attr-defined]
        return attend


@np.errstate(invalid="ignore")  # queries of padding may be NaN
def merge(out: np.ndarray, lse: np.ndarray, other: np.ndarray, other_lse: np.ndarray) -> None:
    total = np.logaddexp(lse, other_lse)
    base = np.where(np.isneginf(total), 0, total)
    keep, take = (np.exp(part - base).swapaxes(1, 2)[..., None] for part in (lse, other_lse))
    out[...] = out.astype(np.float32) * keep + other.astype(np.float32) * take
    lse[...] = total


def score_new(q: Any, k: Any, lse: Any, codes: Any, *, scale: float, softcap: float, stream: int) -> None:
    counts = np.isfinite(lse).swapaxes(1, 2)
    q, lse = np.where(counts[..., None], q, 0), np.where(np.isfinite(lse), lse, np.inf)
    exact = attend_exact(
        *(x.astype(np.float32) for x in (q, k, k)), np.ones(k.shape[:2], bool), scale=scale, softcap=softcap,
        keep_rows=min(64, q.shape[1]),
    )  # fmt: skip
    codes[...] = encode_importance(np.nan_to_num(exact.mass(lse))).reshape(codes.shape)


def score_norms(k: Any, codes: Any, importance: str, stream: int) -> None:
    norm = np.sqrt((k.astype(np.float64) ** 2).sum(-1)).transpose(0, 2, 1)
    codes[...] = encode_importance(1 / np.maximum(norm, 1e-6)).reshape(codes.shape)


def install(monkeypatch: pytest.MonkeyPatch) -> Kernels:
    """Put NumPy in place of the GPU for one test."""
    kernels = Kernels()
    for module in (store, state, layers, calls, long, road, repeat):
        monkeypatch.setattr(module, "cuda_view", kernels.view)
    for module in (calls, long):
        monkeypatch.setattr(module, "pointer_of", lambda x: kernels.view(x, "x").pointer)
    for module in (store, exchange, changes, function, host, long):
        for name, stand_in in (("to_device", lambda host, like: np.array(host)), ("to_host", np.array)):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, stand_in)
    for module in (exchange, function, store):
        monkeypatch.setattr(module, "overwrite", np.copyto)
    made = changes.DeviceStore

    def device_store(*args: Any) -> DeviceStore:
        kernels.store = made(*args)
        return kernels.store

    def by_view(q: CudaView, k: CudaView, *rest: Any, **options: Any) -> None:
        score_new(*(kernels.by_shape[x.pointer, x.shape] for x in (q, k)), *rest, **options)

    scores = SimpleNamespace(score_new=by_view, score_norms=score_norms, score_stored=kernels.score_stored)
    workspace = SimpleNamespace(partial=np.zeros(1), arrivals=np.zeros(1))
    for module, names in (
        (changes, {"DeviceStore": device_store, "make_workspace": kernels.make_workspace,
                        "launch_plan": kernels.launch_plan}),
        (layers, {"current_stream": lambda x: 0}),
        (long, {"current_stream": lambda x: 0, "score": scores,
                     "contiguous": lambda x, name: np.ascontiguousarray(x)}),
        (road, {"check_capability": lambda device: (9, 0)}),
        (collect, {"score": scores}),
        (host, {"current_stream": lambda x: 0}),
        (repeat, {"current_stream": lambda x: 0}),
        (calls, {"current_stream": lambda x: 0, "AttendCall": kernels.attend_call,
                      "make_workspace": lambda *args: workspace,
                      "most_query_tokens": lambda pages, group, device: kernels.most_query_tokens}),
        (launchers, {"write_tokens": kernels.write_tokens, "copy_pages": kernels.copy_pages,
                        "mean_of_keys": kernels.mean_of_keys, "merge_rows": kernels.merge_rows,
                        "AppendCall": kernels.append_call}),
    ):  # fmt: skip
        for name, stand_in in names.items():
            monkeypatch.setattr(module, name, stand_in)
    return kernels

"""The launches of a cache in host memory, against tokens moved and scored one by one in NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kvlab.numba_kernels.cpu.scales import DECODED, RAW

from kvlab.arrays import numpy_dtype
from kvlab.cache.cpu import CpuKernels
from kvlab.cache.importance import weight_of_collection
from kvlab.cache.layers import Layer, LayerFormat
from kvlab.cache.store import DeviceStore
from kvlab.ladder import parse_bits
from kvlab.ops.attention import attention
from kvlab.ops.cpu.page_tokens import decode_tokens, encode_tokens
from kvlab.ops.frame import FRAME
from kvlab.ops.layer_state import NEW_TOKENS, OBSERVED, UNIT, new_tokens
from kvlab.ops.packed import packed_attention
from kvlab.ops.plan import PlanShape, ample_nbytes
from kvlab.pages import QUAD, TOKENS_PER_PAGE, decode_importance, encode_importance, named_pages
from kvlab.reference.blocks import KeyFrame, rotate_in_blocks
from kvlab.reference.importance import updated_scores
from kvlab.reference.pages import rotate_keys, rotate_values
from tests.cache.host.noted import Kernels, view

LADDERS = ("2,3,4,8", "k3v2,k4v2,8", "0,4", "4,16", "k2v4,k8v16")
IN_BLOCKS = ("k4220v2,k4422v2,k8422v3,k8444v4,8", "0,k8420v4", "k8422v8,16")
BATCH, HEADS, GROUP = 2, 2, 2


class Page:
    """A token's slot in the arena of a layer."""

    def __init__(self, store: DeviceStore, arena: np.ndarray, address: int, rung: int, slot: int) -> None:
        host = store.stores[0]
        self.layout, self.dtype, self.slot = host.layouts[rung], host.dtype, slot
        self.record = arena[address * UNIT : address * UNIT + self.layout.nbytes][None]
        self.where = np.array([0]), np.array([slot])

    def read(self) -> tuple[np.ndarray, np.ndarray]:
        k, v = decode_tokens(self.record, self.layout, self.dtype, *self.where)
        return k[0], v[0]

    def scale(self, first: int) -> int:
        return int(self.record[0, first + self.slot])

    def write(self, k: Any, v: Any, scales: tuple[int, int], position: int, code: int) -> None:
        known = np.array(scales, np.int16)[:, None]
        encode_tokens(self.record, self.layout, self.dtype, *self.where, k[None], v[None], known)
        self.layout.positions_in(self.record)[0, self.slot] = position & 0xFFFF
        self.layout.importance_in(self.record)[0, self.slot] = code


def encoded(layout: Any, frame: Any, dtype: str, k: Any, v: Any) -> tuple[Any, Any]:
    k, v = k.astype(np.float32), v.astype(np.float32)
    exponents = [int(x) for x in frame["exponent"]]
    if layout.in_blocks:
        mean, shift, order, gain = (frame[name] for name in ("k_mean", "k_shift", "k_order", "k_gain"))
        k = rotate_in_blocks(k[None], KeyFrame(mean, shift, exponents[0], order, gain), dtype)[0]
    elif layout.k_coded:
        k = rotate_keys(k[None], frame["k_mean"], frame["k_shift"], dtype, exponents[0])[0]
    return k, rotate_values(v[None], exponents[1])[0] if layout.v_coded else v


def carry_out(store: DeviceStore, arena: np.ndarray, moves: np.ndarray, new: dict[str, Any]) -> None:
    """Moves one by one, all reads from what was there before any of them."""
    before, dtype = arena.copy(), store.stores[0].dtype
    tables = {name: store.tables[name][0].reshape(BATCH * HEADS, -1) for name in FRAME}
    frames = [{name: x[bh] for name, x in tables.items()} for bh in range(BATCH * HEADS)]
    for source, to, slots, token in moves.tolist():
        from_slot, to_slot, a, b = slots & 255, slots >> 8 & 255, slots >> 16 & 255, slots >> 24
        target = Page(store, arena, to, b, to_slot)
        if a == 255:
            row, step = divmod(token, new["k"].shape[1])
            head = source - row * store.heads
            k, v = (new[side][row, step, head] for side in "kv")
            x = encoded(target.layout, frames[source], dtype, k, v)
            target.write(*x, (RAW, RAW), new["first"] + step, new["codes"][source, step])
            continue
        old = Page(store, before, source, a, from_slot)
        (k, v), present, wanted = old.read(), old.layout, target.layout
        raw, scales = encoded(wanted, frames[token], dtype, k, v), []
        for had, has, first in (
            (present.bits_k, wanted.bits_k, present.k_scales),
            (present.bits_v, wanted.bits_v, present.v_scales),
        ):
            assert np.all(np.less_equal(has, had))
            scales.append(RAW if had == 16 else old.scale(first) if had == has else DECODED)
        k, v = raw[0] if present.bits_k == 16 else k, raw[1] if present.bits_v == 16 else v
        position = int(present.positions_in(old.record)[0, from_slot])
        target.write(k, v, (scales[0], scales[1]), position, present.importance_in(old.record)[0, from_slot])


class Driver:
    """One layer, its kernels, and what a host does with them."""

    def __init__(self, kernels: Kernels, bits: str, dim: int, dtype: str, row_budget: int | None) -> None:
        host = LayerFormat(parse_bits(bits, 1)[0], HEADS, dim, dtype)
        self.ladder, self.host = host.levels, host
        self.kinds: set[tuple[int, int]] = set()  # of moves so far: rung from, rung to
        row_budgets = None if row_budget is None else [row_budget + (1 << 20)]  # so no plan lacks memory
        layers, like = [Layer(host, 0, "mass", frame={})], np.zeros(1, np.uint8)
        self.store = DeviceStore(layers, BATCH, kernels, like, 2000, row_budgets, [False])
        self.kernels = kernels.kernels(self.store)
        self.store.tables["budget"][...] = row_budget or 1 << 62
        self.shape = PlanShape(BATCH, HEADS, self.store.entries, len(host.ladder), host.evicts, 2, 1000)

    def draw(self, rng: np.random.Generator, n: int) -> dict[str, Any]:
        kind = numpy_dtype(self.host.dtype)
        shape = (BATCH, n, HEADS, self.host.head_dim)
        # Strided, as transformers has keys and values.
        k, v = (
            rng.standard_normal((BATCH, HEADS, n, shape[3])).astype(kind).astype(np.float32).swapaxes(1, 2)
            for _ in "kv"
        )
        codes = rng.integers(0, 254, (BATCH * HEADS, n)).astype(np.uint8)
        first = int(self.store.tables["seqlen"][0].max())
        return {"k": k, "v": v, "codes": codes, "first": first, "valid": rng.random((BATCH, n)) < 0.9}

    def plan(self, new: dict[str, Any] | None) -> list[np.ndarray]:
        """Plan and move; return arenas as kernels and as one by one."""
        store = self.store
        workspace = self.kernels.make_workspace(self.shape, 1, 1 << 20, 1 << 20)
        n, rules = 0 if new is None else new["k"].shape[1], {}
        if new is not None:
            rules = {"codes": new["codes"].ctypes.data, "valid": new["valid"].ctypes.data}
        self.kernels.launch_plan(
            0, 1, workspace, self.ladder, 0, sink=4, recent=8, lookahead=16,
            fixed_nbytes=self.host.fixed_nbytes, num_new=n, first_position=new["first"] if new else 0,
            **rules,
        )  # fmt: skip
        assert not store.tables["status"].any()
        fresh = np.zeros(1, NEW_TOKENS)[0]
        if new is not None:
            fresh = new_tokens(
                view(new["k"], "k"), view(new["v"], "v"), new["valid"].ctypes.data, new["codes"].ctypes.data,
                n, new["first"],
            )  # fmt: skip
        expected = store.arenas[0].copy()
        for phase in range(2):
            carry_out(store, expected, workspace.moves[0][phase], new or {})
            self.kernels.write_tokens(0, 1, workspace.move_lists(phase), 0, fresh, 0)
            fresh = np.zeros(1, NEW_TOKENS)[0]
            self.kinds |= {
                (slots >> 16 & 255, slots >> 24) for _, _, slots, _ in workspace.moves[0][phase].tolist()
            }
        for source, to, rung in workspace.copies[0].tolist():
            n = self.host.layouts[rung].nbytes
            expected[to * UNIT : to * UNIT + n] = expected[source * UNIT : source * UNIT + n]
        self.kernels.copy_pages(0, 1, workspace.move_lists(1), 0, 0)
        return [store.arenas[0].copy(), expected]


def budget_of(bits: str, dim: int, dtype: str, tokens: int, fraction: float) -> int:
    """Bytes of a row between all pages at the lowest and all at the highest rung."""
    host = LayerFormat(parse_bits(bits, 1)[0], HEADS, dim, dtype)
    ladder = host.levels
    more = fraction * HEADS * (tokens // TOKENS_PER_PAGE) * (ladder.cost[-1] - ladder.cost[0])
    return ample_nbytes(tokens, HEADS, ladder, host.fixed_nbytes) + int(more)


@given(
    ladder=st.tuples(st.sampled_from(LADDERS), st.sampled_from([16, 64, 80]))
    | st.tuples(st.sampled_from(IN_BLOCKS), st.sampled_from([64, 128])),
    dtype=st.sampled_from(["float16", "bfloat16", "float32"]),
    lengths=st.lists(st.integers(1, 300), min_size=1, max_size=3),
    fraction=st.floats(0, 0.9),
    seed=st.integers(0, 2**32 - 1),
)
@settings(deadline=None, max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_moves_are_those_of_tokens_one_by_one(
    kernels: Kernels, ladder: tuple[str, int], dtype: str, lengths: list[int], fraction: float, seed: int
) -> None:
    rng, (bits, dim) = np.random.default_rng(seed), ladder
    driver = Driver(kernels, bits, dim, dtype, budget_of(bits, dim, dtype, sum(lengths), fraction))
    driver.store.tables["k_mean"][...] = rng.standard_normal((HEADS, dim))
    shifted = rng.random((HEADS, 1)) < 0.7
    driver.store.tables["k_shift"][...] = rng.integers(0, 15, (HEADS, dim // 2)) * shifted
    driver.store.tables["exponent"][...] = rng.integers(-9, 9, (BATCH, HEADS, 2)) * (rng.random() < 0.5)
    if bits in IN_BLOCKS:
        driver.store.tables["k_order"][...] = np.argsort(rng.random((BATCH, HEADS, dim // 2)))
        driver.store.tables["k_gain"][...] = np.exp2(rng.uniform(1, 9, (BATCH, HEADS, 4))).astype(np.float16)
    for n in lengths:
        assert np.array_equal(*driver.plan(driver.draw(rng, n)))
        assert np.array_equal(*driver.plan(None))


def test_tokens_move_between_all_rungs(kernels: Kernels) -> None:
    """The comparison above sees new tokens, demoted ones and such that close up."""
    for bits in ("2,4,16", "k4220v2,k8444v4,16"):
        _move_between_all(kernels, bits)


def _move_between_all(kernels: Kernels, bits: str) -> None:
    rng = np.random.default_rng(0)
    driver = Driver(kernels, bits, 64, "float16", budget_of(bits, 64, "float16", 1500, 0.3))
    for n in (300, 200, 600, 400):
        assert np.array_equal(*driver.plan(driver.draw(rng, n)))
    assert driver.kinds >= {(255, 2), (2, 1), (2, 0), (1, 0), (2, 2)}


def attend_stored(driver: Driver, q: np.ndarray) -> Any:
    return packed_attention(q, driver.store.pages(0), backend="cpu")


@pytest.mark.parametrize("observed", ["mass", "norm", "one"])
def test_an_append_attends_and_stores(kernels: Kernels, observed: str) -> None:
    rng, n, dim = np.random.default_rng(1), 5, 64
    driver = Driver(kernels, "4,8", dim, "float16", None)
    driver.plan(driver.draw(rng, 100))
    new = driver.draw(rng, n)
    new["valid"][...] = True
    new["valid"][1, 2] = False
    q = rng.standard_normal((BATCH, n, HEADS * GROUP, dim)).astype(np.float32)
    stored = attend_stored(driver, q)
    out, lse = stored.out.copy(), stored.lse.copy()
    append = driver.kernels.append_call(
        0, driver.host.ladder[-1], num_new=n, group=GROUP,
        scale=dim**-0.5, softcap=0.0, observed=OBSERVED[observed],
    )  # fmt: skip
    before = driver.store.tables["count"].sum()
    k, v = view(new["k"], "k"), view(new["v"], "v")
    append(view(q, "q"), k, v, new["valid"].ctypes.data, out.ctypes.data, lse.ctypes.data, True, 0)
    assert not out[1, 2].any()
    assert np.isposinf(lse[1, :, 2]).all()
    row = attention(q[:1], new["k"][:1], new["v"][:1], causal=True, return_lse=True)
    both, total = stored.out[:1].copy(), stored.lse[:1].copy()
    addresses = [x.ctypes.data for x in (both, total, *row)]
    driver.kernels.merge_rows(addresses, (1, n, HEADS * GROUP), 0)
    assert np.abs(out[:1].astype(np.float32) - both).max() < 2e-3
    assert np.abs(lse[:1] - total).max() < 1e-3
    assert driver.store.tables["count"].sum() == before + HEADS * (2 * n - 1)
    assert (driver.store.tables["seqlen"] == 105).all()
    assert not driver.store.tables["status"].any()
    norms = np.linalg.norm(new["k"][0, :, 0].astype(np.float64), axis=-1).astype(np.float32)
    wanted = {"norm": encode_importance(1 / norms), "one": np.full(n, 192, np.uint8)}
    tables = {
        name: x[0, 0, 0] for name, x in driver.store.tables.items() if name in ("open", "count", "index")
    }
    appended = {}
    for entry in tables["open"]:
        page = Page(driver.store, driver.store.arenas[0], int(tables["index"][entry]), 1, 0)
        lists = page.layout.positions_in(page.record)[0], page.layout.importance_in(page.record)[0]
        appended |= dict(zip(*(x[: tables["count"][entry]].tolist() for x in lists), strict=True))
    for i in range(n):
        code = appended[100 + i]
        assert 0 < code < 192 if observed == "mass" else code == wanted[observed][i]


@pytest.mark.parametrize("importance", ["attention", "forecast"])
@pytest.mark.parametrize("tokens", [16, 64])
def test_importance_follows_what_tokens_receive(kernels: Kernels, importance: str, tokens: int) -> None:
    rng, rows, dim = np.random.default_rng(2), 3, 64
    driver = Driver(kernels, "4,8", dim, "float16", None)
    driver.plan(driver.draw(rng, 400))
    store, tables = driver.store, {name: x[0] for name, x in driver.store.tables.items()}
    q = rng.standard_normal((BATCH, rows, HEADS * GROUP, dim)).astype(np.float32)
    found = packed_attention(q, store.pages(0), keep_scores=rows, backend="cpu")
    scores = found.scores.view(np.uint8).reshape(1, *found.scores.shape[:3], -1)
    before = store.arenas[0].copy()
    take, span = weight_of_collection(0.8, tokens)
    driver.kernels.score_stored(
        0, scores, found.lse[None], importance=importance, take=take, span=span, counted=2, stream=0,
    )  # fmt: skip
    changed = 0
    total = found.lse.reshape(BATCH, HEADS, GROUP, rows).swapaxes(2, 3).reshape(BATCH, HEADS, -1, 1)
    for at in np.argwhere(named_pages(tables)):
        row, head, entry = map(int, at)
        rung, count = int(tables["rung"][row, head, entry]), int(tables["count"][row, head, entry])
        old, new = (
            Page(store, arena, int(tables["index"][row, head, entry]), rung, 0)
            for arena in (before, store.arenas[0])
        )
        position = old.layout.positions_in(old.record)[0, :count].astype(np.int64)
        codes = [page.layout.importance_in(page.record)[0, :count] for page in (old, new)]
        previous = decode_importance(codes[0])
        first = TOKENS_PER_PAGE * (entry % QUAD)
        received = found.scores[row, head, entry // QUAD, :, first : first + count]
        mass = np.exp(received - total[row, head]).mean(0)
        score = updated_scores(importance, previous, mass, np.minimum(position, 397), 398, take, span)
        wanted = np.where(position < 398, encode_importance(score), codes[0])
        difference = np.abs(wanted.astype(int) - codes[1])
        assert difference.max(initial=0) <= 1  # mass is summed in another order
        changed += int((difference == 0).sum())
    assert changed > 0.98 * tables["count"].sum(dtype=np.int64)


def test_new_tokens_are_scored_by_what_they_receive() -> None:
    rng, n, dim = np.random.default_rng(3), 90, 64
    q, k = (rng.standard_normal((1, n, heads, dim)).astype(np.float16) for heads in (4, 2))
    lse = attention(q, k, k, causal=True, return_lse=True)[1]
    lse[0, :, 80] = np.inf  # padding
    codes = np.zeros((2, n), np.uint8)
    CpuKernels.score_new(view(q, "q"), view(k, "k"), lse, codes, rows=64, scale=dim**-0.5, stream=0)
    keys = np.repeat(k.astype(np.float64), 2, 2)
    scores = np.einsum("shd,thd->hst", q[0].astype(np.float64), keys[0]) / np.sqrt(dim)
    probability = np.exp(np.where(np.tri(n, dtype=bool), scores, -np.inf) - lse[0][..., None])[:, 26:]
    wanted = encode_importance(probability.reshape(2, 2, 64, n).mean((1, 2)))
    assert np.abs(wanted.astype(int) - codes).max() <= 1
    CpuKernels.score_norms(k, codes, "key_norm", 0)
    norms = np.linalg.norm(k[0].astype(np.float64), axis=-1).T
    assert np.abs(encode_importance(1 / norms).astype(int) - codes).max() <= 1
    for importance, value in (("uniform", np.ones(n)), ("recency", 1 / (n - np.arange(n)))):
        CpuKernels.score_norms(k, codes, importance, 0)
        assert np.array_equal(codes, np.broadcast_to(encode_importance(value), (2, n)))

"""Kernels that store tokens, byte for byte against the page format in NumPy.

An arena of random bytes is compared whole after each launch, so what a kernel must not touch is a canary, and
unused slots hold codes and steps of any kind, NaN among them.
"""

from __future__ import annotations

from itertools import product
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from kvlab.cache.cuda import GPU
from kvlab.cache.layers import Layer, LayerFormat
from kvlab.cache.store import DeviceStore
from kvlab.ladder import parse_bits
from kvlab.new_arrays import to_device
from kvlab.ops.cuda import pages as kernels
from kvlab.ops.frame import (
    ASKING,
    FRAME,
    FRAME_OF_BLOCKS,
    LAST,
    MAX_SHIFT,
    add_queries,
    exponent_of,
    key_gain,
    key_mean,
    key_order,
    key_shift,
)
from kvlab.ops.layer_state import OBSERVED, UNIT, WAITING_ENTRIES, WAITING_PAGES, new_tokens
from kvlab.pages import NO_PAGE, TOKENS_PER_PAGE, PageLayout, encode_importance, profile_names
from kvlab.reference.blocks import KeyFrame, decode_blocks, encode_blocks, profile_bits, rotate_in_blocks
from kvlab.reference.pages import (
    SCALES,
    bit_address,
    encode,
    grid_values,
    narrow,
    rotate_keys,
    rotate_values,
    widen,
)
from kvlab.views import cuda_view
from tests.gpu.packed_cases import DTYPES, to_numpy, to_torch

BATCH, HEADS, GROUP, PAGE = 2, 2, 4, TOKENS_PER_PAGE
MIXED = ("2,3,4,8,16", "k2v3,k4v8,k16v8", "8", "k3v16,16")
PROFILES = ("k4220v2,k4422v2,k8422v3,k8444v4,8,16", "k2220v3,k4222v3,k8882v4", "k2000v16,k8800v16,k16v16")
MOVE = np.dtype(
    [
        *((name, "u4") for name in ("from", "to")),
        *((name, "u1") for name in ("from_slot", "to_slot", "from_rung", "to_rung")),
        ("token", "u4"),
    ]
)
LIST = np.dtype([(name, "u8") for name in ("moves", "begins", "num_groups", "copies", "num_copies")])
NEW = 255


def device_store(bits: str, head_dim: int, dtype: str, capacity: int = 512) -> DeviceStore:
    """One layer whose arena holds random bytes and finite steps."""
    store = LayerFormat(parse_bits(bits, 1)[0], HEADS, head_dim, dtype)
    like = torch.empty(1, device="cuda")
    layers = [Layer(store, 0, "mass", frame={})]
    device = DeviceStore(layers, BATCH, GPU, like, capacity, None, [False])
    rng = np.random.default_rng(head_dim)
    arena = rng.integers(0, 256, device.arenas[0].shape, np.uint8)
    device.arenas[0][...] = to_device(arena, like)
    mean = rng.standard_normal((1, BATCH, HEADS, head_dim)).astype(np.float16)
    half = *mean.shape[:-1], head_dim // 2
    shift = rng.integers(1, 15, half) * (rng.random(half) < [[0], [0.5]])  # heads without and with
    device.tables["k_mean"][...] = to_device(mean, like)
    device.tables["k_shift"][...] = to_device(shift.astype(np.uint8), like)
    exponent = rng.integers(-14, 16, (1, BATCH, HEADS, 2)) * (rng.random((BATCH, HEADS, 2)) < 0.5)
    device.tables["exponent"][...] = to_device(exponent.astype(np.int8), like)
    if store.in_blocks:
        order = np.argsort(rng.random(half), axis=-1)
        gain = np.exp2(rng.uniform(-3, 8, (1, BATCH, HEADS, 4))).astype(np.float16)
        device.tables["k_order"][...] = to_device(order.astype(np.uint8), like)
        device.tables["k_gain"][...] = to_device(gain.astype(np.float32), like)
    return device


class Frame(NamedTuple):
    """What keys and values of a pair are rotated in; without `order` not in blocks."""

    mean: np.ndarray
    shift: np.ndarray
    exponent: np.ndarray
    order: np.ndarray | None = None
    gain: np.ndarray | None = None

    def keys(self, x: np.ndarray, dtype: str) -> np.ndarray:
        if self.order is None:
            return rotate_keys(x, self.mean, self.shift, dtype, int(self.exponent[0]))
        frame = KeyFrame(self.mean, self.shift, int(self.exponent[0]), self.order, self.gain)
        return rotate_in_blocks(x, frame, dtype)

    def values(self, x: np.ndarray) -> np.ndarray:
        return rotate_values(x, int(self.exponent[1]))


def frames_of(device: DeviceStore, head_dim: int) -> list[Frame]:
    """The frame of each pair."""
    in_blocks = device.stores[0].in_blocks
    names = [name for name in FRAME if in_blocks or name not in FRAME_OF_BLOCKS]
    tables = (to_numpy(device.tables[name])[0] for name in names)
    return [Frame(*frame) for frame in zip(*(x.reshape(-1, x.shape[-1]) for x in tables), strict=True)]


class Record:
    """A page in a host copy of an arena, slot by slot."""

    def __init__(self, arena: np.ndarray, address: int, layout: PageLayout) -> None:
        self.bytes = arena[address * UNIT : address * UNIT + layout.nbytes]
        self.layout = layout

    def _side(self, side: str) -> tuple[Any, slice, int]:
        layout = self.layout
        if side == "k":
            return layout.bits_k, slice(layout.k_codes, layout.k_scales), layout.k_scales
        return layout.bits_v, slice(layout.v_codes, layout.v_scales), layout.v_scales

    def _places(self, side: str) -> list[tuple[slice, np.ndarray]]:
        """Channels of one width, in order, and where the bits of their codes are, (16, channels, width)."""
        bits, head_dim = self._side(side)[0], self.layout.head_dim
        if isinstance(bits, int):
            return [(slice(None), bit_address(bits, head_dim, side))]
        runs = profile_bits(bits, head_dim)
        return [(slice(run.first, run.first + run.channels), address) for run, address in runs]

    def get(self, side: str, slot: int) -> tuple[np.ndarray, int]:
        bits, codes, steps = self._side(side)
        stream = np.unpackbits(self.bytes[codes], bitorder="little").astype(np.int64)
        code = np.zeros(self.layout.head_dim, np.int64)
        for own, address in self._places(side):
            code[own] = (stream[address[slot]] << np.arange(address.shape[2])).sum(-1)
        return code, int(self.bytes[steps + slot]) if bits != 16 else 0

    def put(self, side: str, slot: int, code: np.ndarray, step: int) -> None:
        bits, codes, steps = self._side(side)
        stream = np.unpackbits(self.bytes[codes], bitorder="little")
        for own, address in self._places(side):
            width = np.arange(address.shape[2])
            stream[address[slot]] = code[own, None].astype(np.int64) >> width & 1
        self.bytes[codes] = np.packbits(stream, bitorder="little")
        if bits != 16:
            self.bytes[steps + slot] = step

    def take_unused(self, other: Record, used: list[int]) -> None:
        """Take codes and steps of slots that are not used, and bits of no code, from another record."""
        for side in "kv":
            for slot in set(range(PAGE)) - set(used):
                self.put(side, slot, *other.get(side, slot))
            _, codes, _ = self._side(side)
            mine, its = (np.unpackbits(x.bytes[codes], bitorder="little") for x in (self, other))
            free = np.ones(len(mine), bool)
            for _, address in self._places(side):
                free[address] = False
            mine[free] = its[free]
            self.bytes[codes] = np.packbits(mine, bitorder="little")

    def tail(self, slot: int) -> tuple[slice, int]:
        at = self.layout.positions + 2 * slot
        return slice(at, at + 2), self.layout.importance + slot

    def write(self, slot: int, sides: dict[str, np.ndarray], frame: Frame, dtype: str) -> None:
        """Store raw vectors, float32."""
        for side, x in sides.items():
            bits = self._side(side)[0]
            if bits == 16:
                self.put(side, slot, narrow(x, dtype), 0)
            else:
                rotated = frame.keys(x[None], dtype) if side == "k" else frame.values(x[None])
                code, step = encoded(rotated, bits)
                self.put(side, slot, code[0], int(step[0]))


def encoded(x: np.ndarray, bits: Any, decoded: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """Codes and step bytes of rotated vectors."""
    return encode(x, bits, decoded) if isinstance(bits, int) else encode_blocks(x, bits, decoded)


def draw_vectors(
    rng: np.random.Generator, shape: tuple[int, ...], dtype: str, odd: bool = True
) -> np.ndarray:
    """Vectors of many kinds: usual, tiny, huge, zero, of one element, of few values, not finite.

    Without `odd`, usual ones alone: a kernel goes another way if one of those side by side is not.
    """
    if not odd:
        return (rng.standard_normal(shape) * np.exp2(rng.integers(-3, 3, shape[:-1]))[..., None]).astype(
            DTYPES[dtype]
        )
    x = rng.standard_normal(shape) * np.exp2(rng.integers(-20, 12, shape[:-1]))[..., None]
    kind = rng.integers(0, 12, shape[:-1])
    x[kind == 0] = 0
    x[kind == 1, 1:] = 0
    x[kind == 2, 3] = np.inf
    x[kind == 3, 5] = np.nan
    x[kind == 4] = rng.choice([-2.0, -1.0, 1.0], x[kind == 4].shape)  # sums are multiples of cells
    x[kind == 5] = rng.integers(-15, 16, x[kind == 5].shape) * 2.0**-13
    x[kind == 5, 0] = 1  # the unit of whole numbers is 2**-10, and among the others are ties
    x[kind == 6] *= np.exp2(rng.choice([-30, -15, 15, 80, 96, 120], x[kind == 6].shape[:1]))[:, None]
    with np.errstate(over="ignore"):
        return x.astype(DTYPES[dtype])


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning", "ignore:overflow:RuntimeWarning")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("head_dim", "bits"),
    [*product([64, 80, 128, 256], MIXED), *product([64, 128, 256], PROFILES)],
)
def test_moves(monkeypatch: pytest.MonkeyPatch, bits: str, head_dim: int, dtype: str) -> None:
    """New tokens, demotions and moves within a rung give the bytes that NumPy gives."""
    device = device_store(bits, head_dim, dtype)
    store, rng = device.stores[0], np.random.default_rng(1)
    steps, layouts, top = 7, store.layouts, len(store.layouts) - 1
    shape, odd = (BATCH, steps, HEADS, head_dim), dtype == "float16"
    k, v = draw_vectors(rng, shape, dtype, odd), draw_vectors(rng, shape, dtype, not odd)
    importance = rng.integers(0, 256, (BATCH * HEADS, steps), np.uint8)
    before = to_numpy(device.arenas[0])
    slab = device.slab[0] // UNIT
    places = []  # (slab, rung, address)
    for s in range(12):
        r, record = s % (top + 1), layouts[s % (top + 1)].nbytes
        places += [(s, r, s * slab + p * record // UNIT) for p in range(min(3, device.slab[0] // record))]
    for _, r, address in places:  # steps of stored tokens are finite
        record = before[address * UNIT :]
        for at in (layouts[r].k_scales, layouts[r].v_scales):
            record[at : at + PAGE] = rng.integers(0x50, 0xA0, PAGE)
    device.arenas[0][...] = to_device(before, device.like)
    frames = frames_of(device, head_dim)
    rows, after = [], before.copy()
    sources, targets = places[: len(places) // 2], places[len(places) // 2 :]
    for _, r, to in targets:
        taken = rng.choice(PAGE, rng.choice([PAGE, rng.integers(1, PAGE)]), replace=False)
        pair = rng.integers(BATCH * HEADS)
        for slot in map(int, taken):
            record = Record(after, to, layouts[r])
            if rng.random() < 0.4:
                step = rng.integers(steps)
                row, head = divmod(int(pair), HEADS)
                rows.append((pair, to, 0, slot, NEW, r, row * steps + step))
                raw = {"k": k[row, step, head].astype(np.float32), "v": v[row, step, head].astype(np.float32)}
                record.write(slot, raw, frames[pair], dtype)
                position, code = record.tail(slot)
                record.bytes[position] = np.array([(1 << 16) - 3 + step], np.uint32).view(np.uint8)[:2]
                record.bytes[code] = importance[pair, step]
            else:
                fits = [place for place in sources if place[1] >= r]
                if not fits:
                    continue
                _, source, address = fits[rng.integers(len(fits))]
                old, at = Record(before, address, layouts[source]), rng.integers(PAGE)
                rows.append((address, to, at, slot, source, r, pair))
                move_reference(old, at, record, slot, frames[pair], dtype)
                for part_old, part_new in zip(old.tail(at), record.tail(slot), strict=True):
                    record.bytes[part_new] = old.bytes[part_old]
    few_warps(monkeypatch)
    run_moves(device, rows, k, v, importance, steps, (1 << 16) - 3)
    got = to_numpy(device.arenas[0])
    for _, r, to in targets:
        Record(after, to, layouts[r]).take_unused(Record(got, to, layouts[r]), list(range(PAGE)))
    wrong = np.flatnonzero(got != after)
    assert len(wrong) == 0, f"{len(wrong)} bytes differ, the first at {wrong[:5]}"
    assert (got != before).any()
    assert (to_numpy(device.tables["seqlen"]) == (1 << 16) - 3 + steps).all()


def few_warps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let one block write all pages, of few warps where it has many, so that each takes several in turn."""
    monkeypatch.setattr(kernels, "multiprocessors", lambda device: 1)
    monkeypatch.setattr(kernels, "_BLOCKS", 1)
    monkeypatch.setattr(kernels, "shared_memory_per_block", lambda device: 16_000)


def move_reference(old: Record, at: int, new: Record, slot: int, frame: Frame, dtype: str) -> None:
    for side in "kv":
        code, step = old.get(side, at)
        bits_old, bits_new = (record._side(side)[0] for record in (old, new))
        if bits_old == bits_new:
            new.put(side, slot, code, step)
            continue
        if bits_old == 16:
            raw = widen(code, dtype)[None]
            x = (frame.keys(raw, dtype) if side == "k" else frame.values(raw))[0]
        elif isinstance(bits_old, int):
            x = grid_values(code, SCALES[step], bits_old)
        else:
            x = decode_blocks(code[None], np.array([step]), bits_old)[0]
        codes, steps = encoded(x[None], bits_new, bits_old != 16)
        new.put(side, slot, codes[0], int(steps[0]))


def run_moves(
    device: DeviceStore,
    rows: list[Any],
    k: np.ndarray,
    v: np.ndarray,
    importance: np.ndarray,
    steps: int,
    first: int,
) -> None:
    moves = np.array(rows, MOVE)
    to = moves["to"]
    begins = np.r_[np.flatnonzero(np.r_[True, to[1:] != to[:-1]]), len(to)].astype(np.uint32)
    on = lambda x: to_device(np.ascontiguousarray(x).view(np.uint8), device.like)  # noqa: E731
    parts = [on(moves), on(begins), on(np.array([len(begins) - 1], np.int32)), on(np.zeros(4, np.uint32))]
    parts.append(on(np.zeros(1, np.int32)))
    lists = on(np.array([tuple(part.data_ptr() for part in parts)], LIST))
    keys, values, codes = to_torch(k), to_torch(v), to_torch(importance)
    fresh = new_tokens(cuda_view(keys, "k"), cuda_view(values, "v"), 0, codes.data_ptr(), steps, first)
    store = device.stores[0]
    kernels.write_tokens(
        store.head_dim,
        store.dtype,
        0,
        device.states_pointer,
        lists.data_ptr(),
        1,
        len(begins) - 1,
        fresh,
        0,
        profiles=profile_names(rung.bits_k for rung in store.ladder),
    )
    torch.cuda.synchronize()


TOPS = ["2", "3", "4", "8", "16", "k4v2", "k16v3"]
TOPS_IN_BLOCKS = ["8", "k8444v4", "k8422v3", "k4422v2", "k4220v8", "k8880v16", "k16v8", "16"]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("head_dim", "top"),
    [(d, (top,)) for d in (64, 80, 96, 128, 256) for top in TOPS]
    + [(d, ("k4220v2", top)) for d in (64, 128, 192, 256) for top in TOPS_IN_BLOCKS],
    ids=lambda x: ",".join(x) if isinstance(x, tuple) else str(x),
)
@pytest.mark.parametrize("steps", [1, 5, 16])
def test_append(head_dim: int, top: tuple[str, ...], dtype: str, steps: int) -> None:
    """Codes bit for bit, the finished attention against float64, nothing else touched."""
    device = device_store(",".join(top), head_dim, dtype)
    store, rng = device.stores[0], np.random.default_rng(steps)
    if store.in_blocks:  # shifts at their bound cannot rise: tests/gpu/test_cache_refit.py lets others do
        device.tables["k_shift"][...] = MAX_SHIFT
    layout, pairs = store.layouts[-1], BATCH * HEADS
    start = (1 << 16) - 2 if steps == 5 else 900
    slab = device.slab[0] // UNIT
    # Entry 3 has room for 2 tokens of the first segment; entry 1 takes the rest.
    tables = {name: to_numpy(table)[0].reshape(pairs, -1) for name, table in device.tables.items()
              if name in ("rung", "count", "index", "base", "open", "seqlen")}  # fmt: skip
    for pair in range(pairs):
        for i, (entry, count, base) in enumerate([(3, PAGE - 2, 0), (1, 2, (start + 4) >> 16)]):
            tables["count"][pair, entry], tables["base"][pair, entry] = count, base
            tables["index"][pair, entry] = (2 * pair + i) * slab
            tables["open"][pair, i] = entry
    tables["seqlen"][...] = start
    for name, table in tables.items():
        device.tables[name][...] = to_device(table.reshape(device.tables[name].shape), device.like)
    k, v = (draw_vectors(rng, (BATCH, steps, HEADS, head_dim), dtype) for _ in range(2))
    k, v = (
        np.where(np.isfinite(x.astype(np.float32)) & (abs(x.astype(np.float32)) < 30), x, 1).astype(x.dtype)
        for x in (k, v)
    )
    q = rng.standard_normal((BATCH, steps, HEADS * GROUP, head_dim)).astype(DTYPES[dtype])
    valid = rng.random((BATCH, steps)) < 0.7
    valid[0] = True
    out0 = rng.standard_normal(q.shape).astype(q.dtype)
    lse0 = rng.standard_normal((BATCH, HEADS * GROUP, steps)).astype(np.float32) + 1
    before = to_numpy(device.arenas[0])
    after, counts = before.copy(), tables["count"].copy()
    out, lse, mass = exact(q, k, v, valid, out0, lse0)
    q[~valid] = np.nan  # padding: nobody's importance depends on it
    frames = frames_of(device, head_dim)
    close = []
    for pair in range(pairs):
        row, head = divmod(pair, HEADS)
        room, place = 2, 0
        for step in np.flatnonzero(valid[row]):
            if place == 0 and (room == 0 or (start + step) >> 16 != 0):
                place = 1
            entry = (3, 1)[place]
            record = Record(after, int(tables["index"][pair, entry]), layout)
            slot = int(counts[pair, entry])
            raw = {"k": k[row, step, head].astype(np.float32), "v": v[row, step, head].astype(np.float32)}
            record.write(slot, raw, frames[pair], dtype)
            position, code = record.tail(slot)
            record.bytes[position] = np.array([start + step], np.uint32).view(np.uint8)[:2]
            record.bytes[code] = encode_importance(mass[row, head, step])
            close.append(int(tables["index"][pair, entry]) * UNIT + code)
            counts[pair, entry] += 1
            room -= place == 0
    got_out, got_lse = run_append(device, q, k, v, valid, out0, lse0)
    got = to_numpy(device.arenas[0])
    # The mass is a sum of rounded probabilities: its byte may be the neighbouring one.
    assert (abs(got[close].astype(int) - after[close]) <= 1).all()
    got[close] = after[close]
    wrong = np.flatnonzero(got != after)
    assert len(wrong) == 0, f"{len(wrong)} bytes differ, the first at {wrong[:5]}"
    assert np.array_equal(to_numpy(device.tables["count"])[0].reshape(pairs, -1), counts)
    assert (to_numpy(device.tables["seqlen"]) == start + steps).all()
    assert to_numpy(device.tables["status"]).max() == 0
    unit = np.float64(2.0 ** (-8 if dtype == "bfloat16" else -11)) * abs(out).max()
    assert abs(got_out.astype(np.float64) - out)[valid].max() < 2 * unit
    assert not got_out[~valid].any()
    got_lse, lse = got_lse.swapaxes(1, 2), lse.swapaxes(1, 2)
    assert abs(got_lse - lse)[valid].max() < 1e-4 * abs(lse).max()
    assert (got_lse[~valid] == np.inf).all()


def exact(
    q: Any, k: Any, v: Any, valid: Any, out0: Any, lse0: Any, window: int = 0
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Merge attention over stored tokens with the new ones, in float64; and the mass of these.

    Queries of padding give none. `window`: how many tokens a query sees, if not all.
    """
    steps, group = q.shape[1], q.shape[2] // k.shape[2]
    wide = lambda x: x.astype(np.float64)  # noqa: E731
    keys, values = (np.repeat(wide(x), group, axis=2) for x in (k, v))
    score = np.einsum("bshd,bthd->bhst", wide(q), keys) * q.shape[3] ** -0.5
    square = np.ones((steps, steps), bool)
    seen = np.tril(square) & np.triu(square, 1 - (window or steps)) & valid[:, None, None, :]
    score = np.where(seen, score, -np.inf)
    lse = np.logaddexp(np.logaddexp.reduce(score, axis=-1), wide(lse0))
    finite = np.where(np.isneginf(lse), 0, lse)  # a row that sees nothing: out 0
    p = np.exp(score - finite[..., None])
    old = np.exp(lse0 - finite).transpose(0, 2, 1)[..., None]
    out = np.einsum("bhst,bthd->bshd", p, values) + old * wide(out0)
    batch, heads = p.shape[:2]
    p = np.where(valid[:, None, :, None], p, 0).reshape(batch, heads // group, group, steps, steps)
    return out, lse, p.mean((2, 3)).astype(np.float32)


def run_append(
    device: DeviceStore, q: Any, k: Any, v: Any, valid: Any, out0: Any, lse0: Any
) -> tuple[np.ndarray, np.ndarray]:
    store = device.stores[0]
    call = kernels.AppendCall(
        device.host_states[0],
        store.ladder[-1],
        store.head_dim,
        store.dtype,
        0,
        num_new=q.shape[1],
        group=GROUP,
        scale=store.head_dim**-0.5,
        softcap=0.0,
        observed=OBSERVED["mass"],
        in_blocks=store.in_blocks,
    )
    queries, keys, values, out, lse = map(to_torch, (q, k, v, out0.copy(), lse0.copy()))
    mask = to_torch(valid.view(np.uint8))
    views = [cuda_view(x, "x") for x in (queries, keys, values)]
    call(*views, mask.data_ptr(), out.data_ptr(), lse.data_ptr(), True, 0)
    torch.cuda.synchronize()
    return to_numpy(out), to_numpy(lse)


def freeze(device: Any, dtype: str, part: list[np.ndarray], first: int, before: int) -> list[np.ndarray]:
    """Launch `freeze_means` for keys, values, mask, codes and queries; what the plan is given."""
    steps = part[0].shape[1]
    k, v, mask, codes, q = (to_torch(x.view(np.uint8) if x.dtype == bool else x) for x in part)
    wide = [torch.zeros(BATCH, before + steps, HEADS, 64, dtype=k.dtype, device="cuda") for _ in range(2)]
    wide += [torch.zeros(n, before + steps, dtype=torch.uint8, device="cuda") for n in (BATCH, len(codes))]
    wide.append(torch.zeros(BATCH, before + steps, dtype=torch.int32, device="cuda"))
    views = cuda_view(k, "k"), cuda_view(v, "v")
    fresh = new_tokens(*views, mask.data_ptr(), codes.data_ptr(), steps, first)
    kernels.freeze_means(
        64, dtype, 0, device.states_pointer, BATCH, fresh, [x.data_ptr() for x in wide], before,
        device.mean_factors.data_ptr(), 0, lookahead=1, force=False, queries=cuda_view(q, "q"),
        in_blocks=device.stores[0].in_blocks,
    )  # fmt: skip
    return [to_numpy(x) for x in wide]


def frame_of(
    store: LayerFormat, k: np.ndarray, v: np.ndarray, query_sums: np.ndarray, factor: np.ndarray
) -> dict[str, np.ndarray]:
    """The frame of a row from its first keys and values, (tokens, HEADS, head_dim), by names of tables."""
    exponent = exponent_of(k)
    mean = key_mean(k, exponent, narrow=store.is_narrow, factor=factor)
    shift = key_shift(k, mean, query_sums, exponent)
    found = {"k_mean": mean, "k_shift": shift, "exponent": np.stack([exponent, exponent_of(v)], 1)}
    if store.in_blocks:
        order = key_order(k, mean, query_sums, exponent)
        gain = key_gain(k, mean, shift, order, exponent)
        found |= {"k_order": order, "k_gain": gain}
    return found


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("parts", [(30, 40, 60), (63, 1), (64,), (200,), (1, 62, 900)])
@pytest.mark.parametrize("bits", ["4,8", "3,4", "k4422v2,8", "k4220v2,k8444v4"])
def test_freeze_means(dtype: str, parts: tuple[int, ...], bits: str) -> None:
    """Rows of unequal length: tokens wait until their row has 64, and go when it has its mean."""
    store = LayerFormat(parse_bits(bits, 1)[0], HEADS, 64, dtype)
    factor = np.tile(np.random.default_rng(1).integers(0, 257, 32) / 256, 2).astype(np.float32)
    layers = [Layer(store, 0, "mass", mean_factor=factor)]
    device = DeviceStore(layers, BATCH, GPU, torch.empty(1, device="cuda"), 2048, None, [True])
    total, rng = sum(parts), np.random.default_rng(len(parts))
    k, v = (rng.standard_normal((BATCH, total, HEADS, 64)).astype(DTYPES[dtype]) for _ in range(2))
    k[:, :, :, 10:] += 1
    if dtype == "bfloat16":
        k[:, :, 0] = (k[:, :, 0].astype(np.float32) * np.float32(1e-38)).astype(DTYPES[dtype])
    k[:, :, 0, 7] = 60000
    q = rng.standard_normal((BATCH, total, HEADS * GROUP, 64)).astype(DTYPES[dtype])
    k[:, :, 1, [3, 35]] *= 45
    q[:, :, GROUP:, [3, 35]] /= 45
    codes = rng.integers(0, 256, (BATCH * HEADS, total), np.uint8)
    valid = np.ones((BATCH, total), bool)
    valid[1] = rng.random(total) < 0.8
    waits, first = [True] * BATCH, 0
    for steps in parts:
        now, before = slice(first, first + steps), WAITING_PAGES * PAGE if first else 0
        part = [np.ascontiguousarray(x[:, now]) for x in (k, v, valid, codes, q)]
        got_k, got_v, got_valid, got_codes, positions = freeze(device, dtype, part, first, before)
        tables = {name: to_numpy(table)[0] for name, table in device.tables.items()}
        assert (tables["seqlen"] == first + steps).all()
        for row in range(BATCH):
            old, use = np.flatnonzero(valid[row, :first]), valid[row, now]
            goes = waits[row] and len(old) + use.sum() >= LAST
            moved = len(old) if goes else 0
            wanted = np.concatenate([np.arange(before) < moved, use & (goes or not waits[row])])
            assert np.array_equal(got_valid[row] > 0, wanted)
            for got, x in ((got_k, k), (got_v, v)):
                assert np.array_equal(got[row, :moved].view(np.int16), x[row, old[:moved]].view(np.int16))
            mine = slice(row * HEADS, (row + 1) * HEADS)
            assert np.array_equal(got_codes[mine, :moved], codes[mine][:, old[:moved]])
            assert np.array_equal(positions[row, :moved], old[:moved])
            if before:
                assert np.array_equal(positions[row, before:], np.arange(first, first + steps))
            if goes:
                tokens = np.flatnonzero(valid[row])[:LAST]
                query_sums = np.zeros((HEADS, 64), np.float32)
                add_queries(query_sums, q[row, tokens[ASKING:]])
                assert np.array_equal(tables["query_sums"][row], query_sums)
                keys, values = (x[row, tokens].astype(np.float32) for x in (k, v))
                for name, wanted in frame_of(store, keys, values, query_sums, factor).items():
                    assert np.array_equal(tables[name][row], wanted), name
                assert np.flatnonzero(tables["k_shift"][row, 1]).tolist() == [3]
            waits[row] &= not goes
            assert tables["waits"][row] == waits[row]
            assert (tables["num_pages"][row] == WAITING_ENTRIES * waits[row]).all()
            if waits[row]:
                held, every = len(old) + int(use.sum()), np.arange(WAITING_PAGES)
                assert (tables["count"][row][:, every] == np.clip(held - PAGE * every, 0, PAGE)).all()
                assert (tables["open"][row] == [held // PAGE, held // PAGE + 1]).all()
                assert (tables["rung"][row, :, every] == 2).all()
                fillers = slice(WAITING_PAGES, WAITING_ENTRIES)
                assert (tables["index"][row, :, fillers].view(np.uint32) == NO_PAGE).all()
                assert (tables["count"][row, :, fillers] == 0).all()
        first += steps


def test_importance_bytes() -> None:
    """The device's bytes are those of `encode_importance` at all ends of its cells, and decode alike."""
    from kvlab.pages import decode_importance

    edges = np.float32(2.0) ** np.float32((np.arange(-300, 200) + 0.5) / 8)
    x = np.concatenate([np.nextafter(edges, np.float32(0)), edges, np.nextafter(edges, np.float32(9e9))])
    x = np.concatenate([x, np.float32([0, 1e-40, 1e30, np.inf, 1, 0.5])]).astype(np.float32)
    codes, values = importance_on_device(x)
    assert np.array_equal(codes, encode_importance(np.minimum(x, np.float32(1e30))))
    assert np.array_equal(values, decode_importance(np.arange(256, dtype=np.uint8)))


def importance_on_device(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    import tempfile
    from pathlib import Path

    from kvlab.device import compute_capability
    from kvlab.jit.build import arch_of, build, kernel_root
    from kvlab.jit.launch import load

    root = Path(tempfile.mkdtemp())
    (root / "pages").symlink_to(kernel_root() / "pages")
    (root / "common").symlink_to(kernel_root() / "common")
    (root / "probe.cu").write_text(
        '#include "pages/codes.cuh"\n#include "pages/state.cuh"\n'
        'extern "C" __global__ void probe(const float* x, u8* codes, float* values, int n) {\n'
        "    for (int i = threadIdx.x; i < n; i += blockDim.x) codes[i] = encode_importance(x[i]);\n"
        "    if (threadIdx.x < 256) values[threadIdx.x] = decode_importance((u8)threadIdx.x);\n}\n"
    )
    kernel = load(build("probe", {"HEAD_DIM": 64, "BF16": 1}, arch_of(*compute_capability(0)), root=root))
    given, values = to_torch(x), torch.empty(256, device="cuda")
    codes = torch.empty(len(x), dtype=torch.uint8, device="cuda")
    kernel((1,), (256,), (given.data_ptr(), codes.data_ptr(), values.data_ptr(), np.int32(len(x))))
    return to_numpy(codes), to_numpy(values)

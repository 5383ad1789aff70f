"""Attention touches nothing beyond its arrays: they begin or end where mapped memory does.

An allocator gives every array mapped memory of its own with unmapped memory on both sides, so that the first
byte read or written beyond it is an illegal address, whatever else the process has allocated. Hardware asks
more than that of tensor copies: the base of a tensor map must be mapped memory, too.
"""

from __future__ import annotations

import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvlab
from kvlab.ops.cuda import attention as attention_cuda
from kvlab.ops.cuda import attention_backward as attention_backward_cuda
from tests.gpu.attention_cases import HEAD_DIMS, HEADS, LENGTHS, draw_options

cupy = pytest.importorskip("cupy")
driver = pytest.importorskip("cuda.bindings.driver")


def check(answer: tuple[Any, ...]) -> Any:
    assert int(answer[0]) == 0, answer[0]
    return answer[1] if len(answer) > 1 else None


class Area:
    """Mapped memory between two unmapped pieces; goes back to where it came from when nobody holds it."""

    def __init__(self, start: int, size: int, idle: list[int]) -> None:
        self.start, self.size, self._idle = start, size, idle

    def __del__(self) -> None:
        self._idle.append(self.start)


class Edges:
    """Allocator for CuPy; arrays begin at the first byte of an area, or end at its last."""

    def __init__(self, first: bool) -> None:
        self._first, self._idle = first, defaultdict[int, list[int]](list)
        cupy.cuda.Device().synchronize()  # there is a context then
        self._kind = driver.CUmemAllocationProp()
        self._kind.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        self._kind.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        self._kind.location.id = cupy.cuda.runtime.getDevice()
        flags = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        self._piece = int(check(driver.cuMemGetAllocationGranularity(self._kind, flags)))
        self._mapped: list[tuple[int, int, Any]] = []

    def allocate(self, size: int) -> Any:
        whole = self._piece
        while whole < size:
            whole *= 2
        idle = self._idle[whole]
        area = Area(idle.pop() if idle else self._map(whole), whole, idle)
        at = area.start if self._first else area.start + whole - -(-size // 16) * 16
        device = self._kind.location.id
        return cupy.cuda.MemoryPointer(cupy.cuda.UnownedMemory(at, size, area, device), 0)

    def _map(self, size: int) -> int:
        reserved = int(check(driver.cuMemAddressReserve(size + 2 * self._piece, 0, 0, 0)))
        start = reserved + self._piece
        handle = check(driver.cuMemCreate(size, self._kind, 0))
        check(driver.cuMemMap(start, size, 0, handle, 0))
        access = driver.CUmemAccessDesc()
        access.location = self._kind.location
        access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        check(driver.cuMemSetAccess(start, size, [access], 1))
        self._mapped.append((start, size, handle))
        return start

    def close(self) -> None:
        cupy.cuda.Device().synchronize()
        for start, size, handle in self._mapped:
            check(driver.cuMemUnmap(start, size))
            check(driver.cuMemRelease(handle))
            check(driver.cuMemAddressFree(start - self._piece, size + 2 * self._piece))


@pytest.fixture(params=["first", "last"])
def edges(request: pytest.FixtureRequest) -> Iterator[Edges]:
    edges = Edges(request.param == "first")
    forget_calls()
    yield edges
    forget_calls()  # lists of tiles that calls keep lie in memory that goes now
    edges.close()


def forget_calls() -> None:
    attention_cuda._prepare.cache_clear()
    attention_backward_cuda._prepare.cache_clear()


class Drawn:
    """Normal numbers in NaN, axes in one of two orders, rows on 16 bytes or off them; on the host."""

    def __init__(
        self, rng: np.random.Generator, shape: tuple[int, ...], gaps: tuple[int, ...] = (0, 0, 8, 3)
    ) -> None:
        axes = list(range(len(shape)))
        if rng.integers(2):
            axes[-3], axes[-2] = axes[-2], axes[-3]
        self.axes, self.dim, gap = axes, shape[-1], int(rng.choice(gaps))
        outer = [shape[axis] for axis in axes[:-1]]
        self.stored = np.full((*outer, shape[-1] + gap), np.nan, np.float16)
        self.view(self.stored)[...] = rng.standard_normal(shape)

    def view(self, stored: Any) -> Any:
        return stored.transpose(self.axes)[..., : self.dim]  # an exchange of two axes undoes itself

    def placed(self) -> Any:
        """On the GPU, in memory of CuPy's allocator."""
        return self.view(uploaded(self.stored))


def uploaded(host: np.ndarray) -> Any:
    array = cupy.empty(host.shape, host.dtype)
    array.set(host)
    return array


def draw_call(rng: np.random.Generator, variable: bool) -> tuple[list[Drawn], list[np.ndarray], list[int]]:
    """Return q, k, v and dout, and of variable length the bounds and longest sequences."""
    heads, kv_heads = HEADS[rng.integers(len(HEADS))]
    dim, number = int(rng.choice(HEAD_DIMS)), int(rng.integers(1, 5))
    if variable:
        bounds = [np.cumsum([0, *rng.choice(LENGTHS, number)]).astype(np.int32) for _ in range(2)]
        outer: list[tuple[int, ...]] = [(int(x[-1]),) for x in bounds]
        longest = [int(np.diff(x).max()) for x in bounds]
    else:
        bounds, longest = [], []
        outer = [(number, int(length)) for length in rng.choice(LENGTHS, 2)]
    shapes = [(*outer[i], heads if i == 0 else kv_heads, dim) for i in (0, 1, 1, 0)]
    return [Drawn(rng, shape) for shape in shapes], bounds, longest


def results(
    drawn: list[Drawn], bounds: list[np.ndarray], longest: list[int], options: dict[str, Any]
) -> list[np.ndarray]:
    """out, lse and the gradients of a call whose arrays lie where CuPy's allocator puts them."""
    q, k, v, dout = (x.placed() for x in drawn)
    lengths = [*map(uploaded, bounds), *longest]
    forward = kvlab.attention_varlen if bounds else kvlab.attention
    backward = kvlab.attention_varlen_backward if bounds else kvlab.attention_backward
    out, lse = forward(q, k, v, *lengths, return_lse=True, **options)
    found = [out, lse, *backward(dout, q, k, v, out, lse, *lengths, deterministic=True, **options)]
    cupy.cuda.Device().synchronize()
    return [x.get() for x in found]


@pytest.mark.parametrize("variable", [True, False])
@pytest.mark.parametrize("seed", range(4))
def test_nothing_beyond_the_arrays_is_touched(edges: Edges, seed: int, variable: bool) -> None:
    rng = np.random.default_rng(seed)
    for _ in range(30):
        call, options = draw_call(rng, variable), draw_options(rng)
        with cupy.cuda.using_allocator(edges.allocate):
            found = results(*call, options)
        for x, y in zip(found, results(*call, options), strict=True):
            assert x.tobytes() == y.tobytes()  # as in ordinary memory


def grouped_results(
    drawn: list[Drawn], lengths: list[np.ndarray], prefixes: list[np.ndarray], options: dict[str, Any]
) -> list[np.ndarray]:
    """outs, lses and the gradients of groups, whose arrays lie where CuPy's allocator puts them."""
    count = len(prefixes)
    *q, k, v = (x.placed() for x in drawn[: count + 2])
    own = {
        "cu_seqlens_q_groups": [uploaded(x) for x in lengths[:count]], "cu_seqlens_k": uploaded(lengths[-1]),
        "prefix_lens": [uploaded(x) for x in prefixes],
    } | options  # fmt: skip
    outs, lses = kvlab.grouped_attention_varlen(q, k, v, return_lse=True, **own)
    douts = [x.placed() for x in drawn[count + 2 :]]
    dq, dk, dv = kvlab.grouped_attention_varlen_backward(
        douts, q, k, v, outs, lses, deterministic=True, **own
    )
    cupy.cuda.Device().synchronize()
    return [x.get() for x in (*outs, *lses, *dq, dk, dv)]


@pytest.mark.parametrize("seed", range(4))
def test_groups_touch_nothing_beyond_their_arrays(edges: Edges, seed: int) -> None:
    rng = np.random.default_rng(seed)
    for _ in range(20):
        heads, kv_heads = HEADS[rng.integers(len(HEADS))]
        dim, number, count = int(rng.choice(HEAD_DIMS)), int(rng.integers(1, 4)), int(rng.integers(1, 4))
        own = rng.choice(LENGTHS, (count + 1, number))  # rows of each group, and keys
        prefixes = [rng.integers(0, own[-1] + 1).astype(np.int32) for _ in range(count)]
        lengths = [np.cumsum([0, *x]).astype(np.int32) for x in own]
        of_q = [(int(x[-1]), heads, dim) for x in lengths[:count]]
        shapes = [*of_q, *[(int(lengths[-1][-1]), kv_heads, dim)] * 2, *of_q]
        call = [Drawn(rng, shape) for shape in shapes], lengths, prefixes
        options = {"causal": bool(rng.integers(2))}
        with cupy.cuda.using_allocator(edges.allocate):
            found = grouped_results(*call, options)
        for x, y in zip(found, grouped_results(*call, options), strict=True):
            assert x.tobytes() == y.tobytes()  # as in ordinary memory


CANARY = 7.0


class Result:
    """A result over other keys, float32, in the midst of canaries; `first` is what it holds at first."""

    def __init__(self, first: np.ndarray, after: tuple[int, ...]) -> None:
        before = tuple(min(1, n) for n in after)
        self.wide = cupy.full([b + n + a for b, n, a in zip(before, first.shape, after, strict=True)], CANARY)
        self.wide = self.wide.astype(np.float32)
        self.own = tuple(slice(b, b + n) for b, n in zip(before, first.shape, strict=True))
        self.view = self.wide[self.own]
        self.view[...] = cupy.asarray(first)

    def taken(self) -> np.ndarray:
        """What it holds now, on the host; raises if a canary is dead."""
        around: np.ndarray = self.wide.get()
        found = around[self.own].copy()
        around[self.own] = CANARY
        assert (around == CANARY).all()
        return found


Segments = tuple[list[Drawn], list[np.ndarray], list[np.ndarray], np.ndarray, int]


def draw_segments(rng: np.random.Generator) -> tuple[Segments, tuple[int, int]]:
    """Return a call whose keys lie in segments out of order, NaN between them, and its numbers of heads.

    Behind the last key of the last segment lies nothing, and unused places of the table name no segment.
    """
    heads, kv_heads = HEADS[rng.integers(len(HEADS))]
    dim, number, count = 8 * int(rng.integers(1, 33)), int(rng.integers(1, 4)), int(rng.integers(1, 4))
    own = rng.choice(LENGTHS, (count + 1, number))  # rows of each group, and keys
    prefixes = [rng.integers(0, own[-1] + 1).astype(np.int32) for _ in range(count)]
    lengths = [np.cumsum([0, *x]).astype(np.int32) for x in own]
    segment_len = int(rng.choice([8, 16, 24, 64, 136]))
    used = -(-own[-1] // segment_len)
    table = np.full((number, max(1, used.max())), 2**30 // segment_len, np.int32)
    places, at, ends = rng.permutation(used.sum() + 2), 0, [1]
    rows = np.zeros(len(places) * segment_len, bool)
    for b, (segments, keys) in enumerate(zip(used, own[-1], strict=True)):
        table[b, :segments] = places[at : at + segments]
        at += segments
        for j, place in enumerate(table[b, :segments]):
            begin = place * segment_len
            ends.append(begin + min(segment_len, keys - j * segment_len))
            rows[begin : ends[-1]] = True
    of_q = [(int(x[-1]), heads, dim) for x in lengths[:count]]
    drawn = [Drawn(rng, shape, (0, 0, 8)) for shape in [*of_q, *[(max(ends), kv_heads, dim)] * 2]]
    for x in drawn[count:]:
        x.view(x.stored)[~rows[: max(ends)]] = np.nan
    return (drawn, lengths, prefixes, table, segment_len), (heads, kv_heads)


def segmented_results(
    call: Segments, first: list[np.ndarray] | None, options: dict[str, Any]
) -> list[np.ndarray]:
    """outs and lses of groups, merged into results that hold `first`, or new where there is none."""
    drawn, lengths, prefixes, table, segment_len = call
    count = len(prefixes)
    *q, k, v = (x.placed() for x in drawn)
    own = {
        "cu_seqlens_q_groups": [uploaded(x) for x in lengths[:count]], "cu_seqlens_k": uploaded(lengths[-1]),
        "prefix_lens": [uploaded(x) for x in prefixes], "segment_table": uploaded(table),
        "segment_len": segment_len,
    } | options  # fmt: skip
    if first is None:
        outs, lses = kvlab.grouped_attention_varlen(q, k, v, return_lse=True, **own)
        cupy.cuda.Device().synchronize()
        return [x.get() for x in (*outs, *lses)]
    results = [Result(x, (2, 2, 8)[: x.ndim]) for x in first]
    into = [x.view[..., : q[0].shape[-1]] for x in results[:count]], [x.view for x in results[count:]]
    kvlab.grouped_attention_varlen(q, k, v, into=into, **own)
    cupy.cuda.Device().synchronize()
    return [x.taken() for x in results]


@pytest.mark.parametrize("implementation", ["listed", "paired"])
@pytest.mark.parametrize("merges", [False, True])
@pytest.mark.parametrize("seed", range(2))
def test_groups_in_segments_touch_nothing_beyond_them(
    edges: Edges, seed: int, merges: bool, implementation: str
) -> None:
    """What lies between and behind segments is NaN, and around results that others are merged into 7."""
    rng = np.random.default_rng(seed)
    for _ in range(20):
        call, (heads, _) = draw_segments(rng)
        shapes = [(int(x[-1]), heads) for x in call[1][:-1]]
        first = None
        if merges:
            first = [rng.standard_normal((*shape, call[0][0].dim)).astype(np.float32) for shape in shapes]
            first += [rng.standard_normal(shape[::-1]).astype(np.float32) for shape in shapes]
        options = {"causal": bool(rng.integers(2)), "implementation": implementation}
        with cupy.cuda.using_allocator(edges.allocate):
            found = segmented_results(call, first, options)
        for x, y in zip(found, segmented_results(call, first, options), strict=True):
            assert x.tobytes() == y.tobytes()  # as in ordinary memory
            assert not np.isnan(x).any()


def test_a_key_that_is_nan_and_a_dead_canary_would_be_noticed() -> None:
    """The last key of all that is seen, and a number beside a result."""
    rng = np.random.default_rng(0)
    call, (heads, kv_heads) = draw_segments(rng)
    while any(prefix[-1] != np.diff(call[1][-1])[-1] or prefix[-1] == 0 for prefix in call[2][:1]) or (
        np.diff(call[1][0])[-1] == 0
    ):
        call, (heads, kv_heads) = draw_segments(rng)
    drawn, lengths, _, table, segment_len = call
    last = int(np.diff(lengths[-1])[-1]) - 1
    place = table[-1, last // segment_len] * segment_len + last % segment_len
    assert not any(np.isnan(x).any() for x in segmented_results(call, None, {}))
    values = drawn[-1]
    values.view(values.stored)[place] = np.nan
    assert any(np.isnan(x).any() for x in segmented_results(call, None, {}))
    result = Result(np.zeros((3, heads, 8 * kv_heads), np.float32), (2, 2, 8))
    result.taken()
    for at in ((0, 1, 1), (1, heads + 1, 1), (1, 1, 8 * kv_heads + 1)):
        whole = result.wide[at].copy()
        result.wide[at] = 8
        with pytest.raises(AssertionError):
            result.taken()
        result.wide[at] = whole


@pytest.mark.parametrize("first", [True, False])
def test_a_number_beyond_an_array_would_be_noticed(first: bool) -> None:
    """In a process of its own, which an illegal address ends."""
    code = f"""if True:
        import sys, cupy, numpy as np
        from tests.gpu.test_attention_edges import Edges
        edges = Edges({first})
        with cupy.cuda.using_allocator(edges.allocate):
            x = cupy.zeros(64, np.float32)
        text = 'extern "C" __global__ void add(float* x) {{ atomicAdd(x, 1.f); }}'
        at = x.data.ptr + int(sys.argv[1])
        cupy.RawKernel(text, "add")((1,), (1,), (np.uint64(at),))
        cupy.cuda.Device().synchronize()
        print("sum", float(x.sum()), flush=True)
        sys.stdout.close(); import os; os._exit(0)
    """
    beyond, inside = (-4, 0) if first else (256, 252)
    root = Path(__file__).parents[2]
    for at, is_right in ((inside, True), (beyond, False)):
        found = subprocess.run(
            [sys.executable, "-c", code, str(at)], capture_output=True, text=True, cwd=root, check=False
        )
        assert ("sum 1.0" in found.stdout) is is_right, found
        assert ("illegal" in found.stderr.lower()) is not is_right, found

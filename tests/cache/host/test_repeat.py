"""Decode steps that repeat: recorded by CUDA graphs, or taken the short way of the host; kernels in NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvlab.cache import runner
from kvlab.cache.cache import MixedPrecisionCache
from tests.cache.host.cases import LAYERS, check_state, draw, make, step
from tests.cache.host.noted import Kernels
from tests.cache_contents import pages_of


def test_recorded_steps(kernels: Kernels) -> None:
    """Steps that a graph replays are counted once, whatever was counted while they were recorded."""
    rng = np.random.default_rng(3)
    usual = make(max_seqlen=200)
    tokens = [draw(rng, usual, steps) for steps in [80, *[1] * 34]]
    want = [[usual.step(layer, *qkv) for layer in range(LAYERS)] for qkv in tokens]
    cache = make(max_seqlen=200)
    assert cache.prepare() == ()
    for layer in range(LAYERS):
        cache.step(layer, *tokens[0])
    kinds = []
    for qkv, wanted in zip(tokens[1:], want[1:], strict=True):
        kinds.append(cache.prepare())
        before = cache.seqlen
        with cache.recording():  # kernels in NumPy run at once, as those of a graph do when it is replayed
            got = [cache.step(layer, *qkv) for layer in range(LAYERS)]
        assert cache.seqlen == before
        cache.replayed()
        assert np.array_equal(got, wanted)
    assert cache.seqlen == usual.seqlen == 114
    # Every 16th step collects attention mass, beginning with the first, which the prompt made due.
    assert [i for i, kind in enumerate(kinds) if kind != kinds[1]] == [0, 16, 32]
    check_state(cache, [range(114)] * 2)


class Tensor(np.ndarray):
    """What `kvlab.cache.launches` asks of tensors of torch, on arrays that the kernels in NumPy know."""

    kernels: Kernels
    requires_grad, heads_first = False, False
    device = "cuda:0"

    def stride(self) -> tuple[int, ...]:
        return tuple(step // self.itemsize for step in self.strides)

    def data_ptr(self) -> int:
        return self.kernels.view(self.swapaxes(1, 2) if self.heads_first else self, "x").pointer

    def new_empty(self, shape: Any) -> Any:
        return np.empty(shape, self.dtype).view(type(self))

    def transpose(self, first: int, second: int) -> Any:  # type: ignore[override]
        return self.swapaxes(first, second)


def test_repeated_steps(kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    """The short way of a decode step gives what the long one does; only steps like the last one take it."""
    monkeypatch.setattr(Tensor, "kernels", kernels, raising=False)
    rng, took = np.random.default_rng(10), []
    whole = runner.launch_again

    def repeat(*args: Any) -> Any:
        took.append(whole(*args))
        return took[-1]

    monkeypatch.setattr(runner, "launch_again", repeat)
    usual = make()
    steps = [80, *[1] * 30, 2, 2, 2, 1, 1]
    tokens = [[x.astype(np.float32) for x in draw(rng, usual, n)] for n in steps]
    want = [[usual.step(layer, *qkv, softcap=5.0) for layer in range(LAYERS)] for qkv in tokens]
    cache, short = make(), []
    for qkv, wanted in zip(tokens, want, strict=True):
        took.clear()
        turned = [np.ascontiguousarray(x.swapaxes(1, 2)).view(Tensor) for x in qkv]
        for x in turned:
            x.heads_first = True
        got = [cache.step_heads_first(layer, *turned, None, 5.0, None) for layer in range(LAYERS)]
        assert np.array_equal(got, wanted)
        short.append(sum(out is not None for out in took) // LAYERS)
    # Not: the prompt, steps of another shape than the last one, every 16th, which collects or lacks room.
    assert short == [0, 0, *[1] * 15, 0, *[1] * 13, 0, 0, 1, 0, 1]
    check_state(cache, [range(118)] * 2)
    for old, new in zip(pages_of(usual), pages_of(cache), strict=True):
        assert all(np.array_equal(a, b) for a, b in zip(old.pools, new.pools, strict=True))
    turned[0].requires_grad = True
    took.clear()
    cache.step_heads_first(0, *turned, None, 5.0, None)
    assert not took


def test_graphs_tell_steps_that_collect_in_any_layer(kernels: Kernels) -> None:
    """Layer 0 has one width, so nobody asks what its tokens receive."""
    cache, rng = make(bits="0:8,1:2+8", budget=0.75, max_seqlen=200), np.random.default_rng(0)
    step(cache, rng, 80)
    device, kinds = cache._device, dict[Any, set[bool]]()
    for _ in range(40):
        kinds.setdefault(cache.prepare(), set()).add(device.collects(1, 1))
        step(cache, rng, 1)
    assert {collects for found in kinds.values() for collects in found} == {False, True}
    assert all(len(found) == 1 for found in kinds.values())


def test_graphs_follow_memory_and_refuse(kernels: Kernels) -> None:
    cache, rng = make(plan_length=64, budget=None, bits=(8,)), np.random.default_rng(4)
    with pytest.raises(RuntimeError, match="run once"), cache.recording():
        pass
    step(cache, rng, 40)
    kinds = []
    for _ in range(45):
        kinds.append(cache.prepare())
        step(cache, rng, 1)
    assert len({kind[0] for kind in kinds}) > 1  # more tokens than there was room for: other memory
    for _ in range(cache._device.lookahead[0]):
        cache.replayed()
    with pytest.raises(RuntimeError, match="prepare"):
        cache.replayed()
    q, k, v = draw(rng, cache, 1)
    cache.step(0, q, k, v)
    with pytest.raises(ValueError, match="layers hold"):
        cache.prepare()
    with pytest.raises(NotImplementedError, match="device='cuda'"):
        MixedPrecisionCache(1, 1, 1, 16).prepare()

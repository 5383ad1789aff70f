"""When importance is brought up to date on a GPU: every collection once, before anything changes pages."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvlab.cache import importance
from kvlab.cache.cache import MixedPrecisionCache
from tests.cache.host.noted import Kernels

LAYERS, HEADS, DIM = 5, 2, 64


def make() -> MixedPrecisionCache:
    options = {"batch": 1, "plan_length": 256, "bits": (2, 8), "budget": 0.6, "realloc_every": 4}
    cache = MixedPrecisionCache(LAYERS, HEADS, HEADS, DIM, device="cuda", **options)
    for layer in range(LAYERS):
        cache.step(layer, *draw(20))
    return cache


def draw(steps: int) -> list[np.ndarray]:
    rng = np.random.default_rng(steps)
    return [rng.standard_normal((1, steps, HEADS, DIM)).astype(np.float16) for _ in range(3)]


@pytest.mark.parametrize(("group", "launches"), [(8, [5]), (2, [2, 2, 1]), (1, [1] * 5)])
def test_layers_of_a_group_share_a_launch(
    kernels: Kernels, monkeypatch: pytest.MonkeyPatch, group: int, launches: list[int]
) -> None:
    monkeypatch.setattr(importance, "_MAX_LAYERS", group)
    cache = make()
    kernels.scored.clear()
    for _ in range(8):
        for layer in range(LAYERS):
            cache.step(layer, *draw(1))
    assert [len(launch) for launch in kernels.scored] == 2 * launches
    found = [entry for launch in kernels.scored for entry in launch]
    assert found == [(layer, length) for length in (20, 24) for layer in range(LAYERS)]


def other_layer(cache: MixedPrecisionCache) -> None:
    cache.step(4, *draw(1))


def same_layer(cache: MixedPrecisionCache) -> None:
    cache.step(1, *draw(1))


def other_steps(cache: MixedPrecisionCache) -> None:
    cache.step(2, *draw(2))


def append(cache: MixedPrecisionCache) -> None:
    cache.append(0, *draw(1)[1:])


def long_step(cache: MixedPrecisionCache) -> None:
    cache.step(0, *draw(30))


def crop(cache: MixedPrecisionCache) -> None:
    for layer in range(2, LAYERS):
        cache.step(layer, *draw(1))
    cache.crop(10)


@pytest.mark.parametrize("change", [other_layer, same_layer, other_steps, append, long_step, crop])
def test_what_is_kept_settles_before_pages_change(kernels: Kernels, change: Any) -> None:
    """Layers 0 and 1 of 5 have kept scores; whatever comes next, they are brought up to date as they are."""
    cache = make()
    for _ in range(4):
        for layer in range(LAYERS):
            cache.step(layer, *draw(1))
    kernels.scored.clear()
    cache.step(0, *draw(1))
    cache.step(1, *draw(1))
    assert not kernels.scored
    change(cache)
    found = [entry for launch in kernels.scored for entry in launch]
    assert found[:2] == [(0, 24), (1, 24)]


def test_a_recording_that_fails_leaves_nothing_to_score(kernels: Kernels) -> None:
    cache = make()
    for _ in range(3):
        for layer in range(LAYERS):
            cache.step(layer, *draw(1))
    kernels.scored.clear()
    recording = cache.recording()
    recording.__enter__()
    cache.step(0, *draw(1))
    cache.step(1, *draw(1))
    recording.__exit__(None, None, None)  # as after an error
    cache._device.collector.flush(0)
    assert not kernels.scored


def test_clearing_forgets(kernels: Kernels) -> None:
    cache = make()
    for _ in range(4):
        for layer in range(LAYERS):
            cache.step(layer, *draw(1))
    kernels.scored.clear()
    cache.step(0, *draw(1))
    cache.reset()
    for layer in range(LAYERS):
        cache.step(layer, *draw(1))
    assert not kernels.scored

"""Files of version 2, which know no frame but the mean of keys: they are those of now without the rest."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from kvlab.cache import persistence
from kvlab.cache.cache import MixedPrecisionCache
from tests.cache.test_persistence import filled, go_on


def as_version_2(path: Path, budget: int | None = None) -> None:
    """Make a file one of version 2, whose budget may be another."""
    description, arrays = persistence.read(path)
    description["version"] = 2
    if budget is not None:
        description["arguments"]["budget"] = budget
    for name in [name for name in arrays if name.endswith((".k_shift", ".asked"))]:
        del arrays[name]
    persistence.write(path, description, arrays)


@pytest.mark.parametrize("options", [{}, {"bits": (4,), "budget": None}, {"dtype": "bfloat16"}])
def test_a_cache_goes_on_as_it_would(tmp_path: Path, options: dict[str, object]) -> None:
    cache, path = filled(**options), tmp_path / "cache"
    cache.save(path)
    as_version_2(path)
    loaded = MixedPrecisionCache.load(path)
    assert loaded.nbytes == cache.nbytes
    for one, other in zip(go_on(cache), go_on(loaded), strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_budget_that_was_full_makes_room_for_frames(tmp_path: Path) -> None:
    """Frames take bytes that version 2 did not count."""
    cache, path = filled(budget=60_000), tmp_path / "cache"
    frames = sum(cache.pages(layer).k_shift.nbytes for layer in range(2))
    cache.save(path)
    as_version_2(path, cache.nbytes - frames)
    loaded = MixedPrecisionCache.load(path)
    assert loaded.seqlen == cache.seqlen
    assert loaded.nbytes <= cache.nbytes - frames
    q = np.ones((2, 1, 4, 32), np.float32)
    assert np.abs(loaded.attend(0, q) - cache.attend(0, q)).max() < 0.2

"""Groups of gloo processes for the tests of this folder.

Under torchrun they use its ranks: ``torchrun --nproc_per_node=2 -m pytest tests/parallel/...``.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import pytest

from tests.parallel.ranks import Ranks, StartedRanks


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[[int], Ranks | StartedRanks]]:
    """Return the group of so many processes, which is started once."""
    groups: dict[int, Ranks | StartedRanks] = {}
    started = StartedRanks() if "RANK" in os.environ else None
    if started:
        groups[started.size] = started

    def group(size: int) -> Ranks | StartedRanks:
        if started and size != started.size:
            pytest.skip(f"torchrun started {started.size} ranks, not {size}")
        if size not in groups:
            groups[size] = Ranks(size)
        return groups[size]

    yield group
    for one in groups.values():
        one.close()

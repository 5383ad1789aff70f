"""Groups of gloo processes for the tests of this folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.parallel.ranks import Ranks


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[[int], Ranks]]:
    """Return the group of so many processes, which is started once."""
    groups: dict[int, Ranks] = {}

    def group(size: int) -> Ranks:
        if size not in groups:
            groups[size] = Ranks(size)
        return groups[size]

    yield group
    for one in groups.values():
        one.close()

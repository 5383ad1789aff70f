"""Allocators that fail at a chosen call, to show that lack of memory changes nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any

import pytest

from kvlab.errors import OutOfMemory

MAX_ALLOCATIONS = 100


def fail_everywhere(
    modules: Iterable[ModuleType],
    error: BaseException,
    work: Callable[[], Any],
    unchanged: Callable[[], None],
) -> int:
    """Let every allocation of `work` in these modules fail once, the first, the second, ...; count them.

    `unchanged` must hold after each failure. When no allocation is left to fail, the work is done.
    """
    for failing in range(MAX_ALLOCATIONS):
        left = failing
        with pytest.MonkeyPatch.context() as patch:

            def guarded(allocate: Any) -> Any:
                def empty(*args: Any) -> Any:
                    nonlocal left
                    left -= 1
                    if left < 0:
                        raise error
                    return allocate(*args)

                return empty

            for module in modules:
                patch.setattr(module, "empty", guarded(module.empty))
            try:
                work()
            except OutOfMemory:
                pass
            else:
                assert left >= 0, "an allocation failed and nobody noticed"
                return failing
        unchanged()
    raise AssertionError(f"more than {MAX_ALLOCATIONS} allocations")

"""Functions of kvlab inside `torch.compile`: it calls them as they are."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar, cast

__all__ = ["opaque"]

P = ParamSpec("P")
T = TypeVar("T")


def opaque(function: Callable[P, T]) -> Callable[P, T]:
    """Decorate a function that `torch.compile` is to call as it is, outside of its graphs.

    Launchers ask arrays for their memory, which a trace does not have, and their NumPy numbers would be
    arrays in it. With ``fullgraph=True`` torch refuses the call by the function's name.
    """
    plain: Callable[P, T] | None = None

    @wraps(function)
    def call(*arguments: P.args, **options: P.kwargs) -> T:
        nonlocal plain
        if "torch._dynamo" not in sys.modules:  # nobody has compiled anything
            return function(*arguments, **options)
        if plain is None:
            dynamo = sys.modules["torch"]._dynamo
            skip_code = getattr(dynamo.eval_frame, "skip_code", None)  # not part of what torch documents
            if skip_code is not None:
                skip_code(cast(Any, call).__code__)  # not traced for each kind of arguments
            plain = cast(Callable[P, T], dynamo.disable(function))
        return plain(*arguments, **options)

    call._torchdynamo_disable = True  # type: ignore[attr-defined]
    return call

"""Functions of kvlab inside `torch.compile`: it calls them as they are. Errors say which option was meant."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from inspect import signature
from typing import Any, ParamSpec, TypeVar, cast

from kvlab.arguments import check_names

__all__ = ["opaque"]

P = ParamSpec("P")
T = TypeVar("T")


def opaque(function: Callable[P, T]) -> Callable[P, T]:
    """Decorate a function that `torch.compile` is to call as it is, outside of its graphs.

    Launchers ask arrays for their memory, which a trace does not have, and their NumPy numbers would be
    arrays in it. With ``fullgraph=True`` torch refuses the call by the function's name.

    transformers loads `torch._dynamo`, and what its `disable` makes of a function takes most of a microsecond
    a call. So where torch traces nothing, the function is called at once. An option that it does not have is
    refused as `kvlab.arguments.check_names` does it.
    """
    plain: Callable[P, T] | None = None
    is_traced: Callable[[], bool]
    watcher: Callable[[], object]  # of the frames of this thread

    @wraps(function)
    def call(*arguments: P.args, **options: P.kwargs) -> T:
        nonlocal plain, is_traced, watcher
        if "torch._dynamo" in sys.modules:  # else nobody has compiled anything
            if plain is None:
                torch = sys.modules["torch"]
                is_traced, frames = torch.compiler.is_dynamo_compiling, torch._C._dynamo.eval_frame
                # These two are not part of what torch documents.
                skip_code = getattr(torch._dynamo.eval_frame, "skip_code", None)
                watcher = getattr(frames, "get_eval_frame_callback", lambda: frames)
                if skip_code is not None:
                    skip_code(cast(Any, call).__code__)  # not traced for each kind of arguments
                plain = cast(Callable[P, T], torch._dynamo.disable(function))
            if is_traced() or watcher() is not None:
                return plain(*arguments, **options)
        try:  # takes no time
            return function(*arguments, **options)
        except TypeError as error:
            _check_options(function, options, error)
            raise

    call._torchdynamo_disable = True  # type: ignore[attr-defined]
    return call


def _check_options(function: Callable[..., Any], options: dict[str, Any], error: TypeError) -> None:
    """Refuse options that a function does not have, if that is why its call failed."""
    if error.__traceback__ is None or error.__traceback__.tb_next is not None:  # it comes from inside
        return
    parameters = signature(function).parameters
    if any(x.kind is x.VAR_KEYWORD for x in parameters.values()):
        return
    try:
        check_names(options, [name for name in parameters if name != "self"], function.__name__)
    except TypeError as named:
        raise named from None

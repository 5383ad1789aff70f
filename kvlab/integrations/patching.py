"""Methods of a model replaced inside a `with` block, and their arguments by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from inspect import Signature
from typing import Any

__all__ = ["by_name", "no_model", "replaced"]


def no_model(model: object) -> TypeError:
    """What refuses anything but a transformers model that generates."""
    hint = (
        "; kvlab.quantized and kvlab.accelerate are entered by `with`, and their blocks do not nest"
        if isinstance(model, AbstractContextManager)
        else ""
    )
    return TypeError(f"model must be a transformers model that generates, not {type(model)}{hint}")


@contextmanager
def replaced(model: Any, name: str, make: Callable[[Any], Any]) -> Iterator[None]:
    """Inside this block a method of a model is what `make` returns for it.

    Only this object changes, not its class; blocks nest.

    Parameters
    ----------
    model : object
    name : str
        Of the method.
    make : callable
        Takes the bound method, returns what is called instead.
    """
    before = vars(model).get(name)  # set on the object itself by another such block, or by accelerate
    setattr(model, name, make(getattr(model, name)))
    try:
        yield
    finally:
        delattr(model, name)
        if before is not None:
            setattr(model, name, before)


def by_name(signature: Signature, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return positional and keyword arguments of a call as keyword arguments.

    Raises
    ------
    TypeError
        As Python does, if they do not fit the signature.

    Examples
    --------
    >>> import inspect
    >>> by_name(inspect.signature(lambda a, b=0, **more: a), (1,), {"c": 2})
    {'a': 1, 'c': 2}
    """
    if not args:
        return kwargs
    signature.bind(*args, **kwargs)
    return dict(zip(signature.parameters, args, strict=False)) | kwargs

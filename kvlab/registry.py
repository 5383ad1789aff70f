"""One table of implementations: operation x backend, what each supports, and how it is called.

An operation's file registers its rows, best first, and asks `choose` for the first row that supports a call
on the device its arguments are on. A row says what it supports as data, so dispatch, error messages, the
table in the docs and the grid of the tests cannot disagree. Its launcher is named by an import string and
loaded at the first call, so that a table of GPU kernels costs a machine without GPU nothing.

No call is moved to another device. `last_backend` says which backend ran.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Container, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

from kvlab.arrays import Device
from kvlab.device import compute_capability

__all__ = [
    "ANY",
    "BACKENDS",
    "ON_CUDA",
    "ON_NUMBA",
    "AtLeast",
    "Implementation",
    "all_rows",
    "check_backend",
    "choose",
    "describe",
    "last_backend",
    "note_backend",
    "register",
    "requirements_of",
    "rows",
]

BACKENDS: dict[str, str] = {"reference": "cpu", "cpu": "cpu", "numba": "cuda", "cuda": "cuda"}
"""Each backend and the kind of device it runs on."""

_rows: dict[str, list[Implementation]] = {}
_last_backend: ContextVar[str | None] = ContextVar("kvlab_last_backend", default=None)
note_backend = _last_backend.set
"""Tell `last_backend` which backend ran, after a call of what is not reached by `Implementation.launch`."""


class AtLeast:
    """The values from a lower bound up, for the `supports` of a row.

    Examples
    --------
    >>> (9, 0) in AtLeast((8, 0)), (7, 5) in AtLeast((8, 0)), AtLeast(16)
    (True, False, at least 16)
    """

    def __init__(self, lowest: Any) -> None:
        self.lowest = lowest

    def __contains__(self, value: Any) -> bool:
        return bool(value >= self.lowest)

    def __repr__(self) -> str:
        return f"at least {self.lowest}"


class _Any:
    """Every value; the entry of a row that sets no limit."""

    def __contains__(self, value: object) -> bool:
        return True

    def __repr__(self) -> str:
        return "any"


ANY = _Any()
"""Every value: for the `supports` of a row without a limit there."""

ON_CUDA: dict[str, Any] = {"compute_capability": AtLeast((8, 0))}
"""GPUs that CUDA C++ kernels are for, unless a row says otherwise: part of its `supports`."""

ON_NUMBA: dict[str, Any] = {"compute_capability": AtLeast((7, 5))}
"""The same for kernels in Numba CUDA."""


@cache
def requirements_of(device: Device) -> Mapping[str, Any]:
    """Return what rows ask of a device, for `choose`: of a GPU its compute capability.

    Examples
    --------
    >>> requirements_of(Device("cpu", 0))
    {}
    """
    return {"compute_capability": compute_capability(device.index)} if device.kind == "cuda" else {}


@dataclass(frozen=True)
class Implementation:
    """One implementation of one operation.

    Parameters
    ----------
    operation : str
        For example ``"pack"``.
    backend : str
        One of `BACKENDS`.
    launcher : str
        ``"module:function"``, imported at the first call.
    supports : mapping of fact name to container
        What the row can do: ``{"dtype": ("float16",), "bits": (2, 3, 4), "features": {"causal"}}``. A fact
        is one value, which must be in the container, or a set of values (``features``), which must all be.
    """

    operation: str
    backend: str
    launcher: str
    supports: Mapping[str, Container[Any]]

    @property
    def device_kind(self) -> str:
        """The kind of device this row runs on, ``"cpu"`` or ``"cuda"``."""
        return BACKENDS[self.backend]

    def unsupported(self, requirements: Mapping[str, Any]) -> list[str]:
        """Return what of a call this row does not support, in words; empty if it supports all of it."""
        missing = []
        for name, value in requirements.items():
            allowed = self.supports.get(name, ANY)
            refused = [item for item in _items(value) if item not in allowed]
            if refused:
                missing.append(f"{name}={', '.join(map(str, refused))} (supported: {describe(allowed)})")
        return missing

    @cached_property
    def function(self) -> Callable[..., Any]:
        """The implementation itself, of which `last_backend` does not know."""
        return _resolve(self.launcher)

    def launch(self, *args: Any) -> Any:
        """Call the implementation; afterwards `last_backend` names this row's backend."""
        result = self.function(*args)
        note_backend(self.backend)
        return result


def _items(value: Any) -> list[Any]:
    return sorted(value, key=str) if isinstance(value, set | frozenset) else [value]


def describe(allowed: Container[Any]) -> str:
    """Return a container of a row's `supports` as words for a table or an error message.

    Examples
    --------
    >>> describe((2, 3, 4)), describe(range(16, 257, 16)), describe({"window", "causal"}), describe(ANY)
    ('2, 3, 4', '16 to 256 in steps of 16', 'causal, window', 'any')
    """
    if isinstance(allowed, range) and len(allowed) > 1:
        apart = "" if allowed.step == 1 else f" in steps of {allowed.step}"
        return f"{allowed[0]} to {allowed[-1]}{apart}"
    if isinstance(allowed, set | frozenset):
        allowed = _items(allowed)
    if isinstance(allowed, tuple | list | range):
        return ", ".join(map(str, allowed)) or "none"
    return repr(allowed)


@cache
def _resolve(launcher: str) -> Callable[..., Any]:
    module, _, function = launcher.partition(":")
    resolved: Callable[..., Any] = getattr(importlib.import_module(module), function)
    return resolved


def register(*new: Implementation) -> None:
    """Add rows to the table, best first; called once by the file of an operation.

    Raises
    ------
    ValueError
        If a backend is unknown, or rows of one operation for one kind of device state different
        requirements: then a call could pass a row unseen.
    """
    for row in new:
        if row.backend not in BACKENDS:
            raise ValueError(_unknown_backend(row.backend))
        table = _rows.setdefault(row.operation, [])
        for other in table:
            if other.device_kind == row.device_kind and set(other.supports) != set(row.supports):
                raise ValueError(
                    f"rows of {row.operation!r} on {row.device_kind} must state the same requirements: "
                    f"{sorted(other.supports)} and {sorted(row.supports)}; use ANY where there is no limit"
                )
        table.append(row)


def rows(operation: str) -> tuple[Implementation, ...]:
    """Return the rows of one operation, best first."""
    return tuple(_rows.get(operation, ()))


def all_rows() -> tuple[Implementation, ...]:
    """Return every row of every operation, after importing all operations; for docs and tests."""
    operations = importlib.import_module("kvlab.ops")
    for module in pkgutil.iter_modules(operations.__path__, "kvlab.ops."):
        importlib.import_module(module.name)
    return tuple(row for table in _rows.values() for row in table)


def last_backend() -> str | None:
    """Return the backend that ran the last call of this thread (or asynchronous task), None before the first.

    Examples
    --------
    >>> import threading
    >>> thread = threading.Thread(target=lambda: print(last_backend()))
    >>> thread.start(); thread.join()
    None
    """
    return _last_backend.get()


def check_backend(backend: str | None) -> None:
    """Refuse what is no backend; None, for the best one, is welcome.

    Raises
    ------
    ValueError, TypeError
        Naming the backends there are.

    Examples
    --------
    >>> check_backend("cpu")
    """
    if backend is not None and (not isinstance(backend, str) or backend not in BACKENDS):
        raise (ValueError if isinstance(backend, str) else TypeError)(_unknown_backend(backend))


def choose(
    operation: str, device_kind: str, backend: str | None = None, **requirements: Any
) -> Implementation:
    """Return the best row that supports a call on the device its arguments are on.

    Parameters
    ----------
    operation : str
        A registered operation.
    device_kind : str
        ``"cpu"`` or ``"cuda"``: where the arguments are. Never another device is chosen.
    backend : str, optional
        Take this backend or fail; by default the first row that supports the call.
    **requirements
        What the call needs: the names that the rows' `supports` state, each one value or a set of values.

    Returns
    -------
    Implementation
        Call it with ``row.launch(...)``.

    Raises
    ------
    ValueError, TypeError
        If the backend is unknown.
    NotImplementedError
        If no row supports the call; the message says what is not supported, and which rows would support it.
    """
    check_backend(backend)
    here = [row for row in rows(operation) if row.device_kind == device_kind]
    if here and set(requirements) != set(here[0].supports):
        raise TypeError(
            f"choose({operation!r}) needs the requirements {sorted(here[0].supports)}, "
            f"got {sorted(requirements)}"
        )
    for row in here:
        if (backend is None or row.backend == backend) and not row.unsupported(requirements):
            return row
    raise NotImplementedError(_why_none(operation, device_kind, backend, requirements))


def _unknown_backend(backend: str) -> str:
    return f"backend={backend!r} is unknown; known are {', '.join(map(repr, BACKENDS))}, or None for the best"


def _why_none(operation: str, device_kind: str, backend: str | None, requirements: Mapping[str, Any]) -> str:
    """Say why no row supports a call: the reason of each candidate, and the rows that would."""
    if backend is not None and BACKENDS[backend] != device_kind:
        return (
            f"{operation}: backend={backend!r} works on {BACKENDS[backend]} arrays, "
            f"the arguments are on {device_kind}; move them, or leave backend=None"
        )
    reasons, would, dtype_refused = [], [], False
    for row in rows(operation):
        missing = row.unsupported(requirements)
        if row.device_kind == device_kind and (backend is None or row.backend == backend):
            dtype_refused |= any(what.startswith("dtype=") for what in missing)
            reasons.append(f"backend {row.backend!r} does not support {'; '.join(missing)}")
        elif not missing:
            would.append(f"backend {row.backend!r} on {row.device_kind} arrays")
    named = "" if backend is None else f" with backend={backend!r}"
    reason = ". ".join(reasons) or f"there is no implementation{named} for {device_kind} arrays"
    way = f". Supported by: {', '.join(would)}" if would else ""
    other = "; convert the arrays to a supported dtype" if dtype_refused else ""
    return f"{operation}: {reason}{way}{other}"

"""Say on a terminal that CPU kernels are compiled."""

from __future__ import annotations

from numba.core.event import Event, Listener, register

from kvlab.jit.notice import say_compiling

__all__: list[str] = []


class _Listener(Listener):
    """Numba sends no event for a kernel that it finds in its cache."""

    def on_start(self, event: Event) -> None:
        module = getattr(event.data["dispatcher"].py_func, "__module__", None)  # generated code has none
        if (module or "").startswith("kvlab."):
            say_compiling()

    def on_end(self, event: Event) -> None:
        pass


register("numba:compile", _Listener())  # type: ignore[no-untyped-call]

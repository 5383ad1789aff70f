"""What every test starts from: no network, hypothesis profiles, the size of jobs, a share of the CPU.

`KVLAB_TINY=1` shrinks jobs (default in tests). Properties are tried on the same 50 examples everywhere, at
every run: a change then fails for what it changes. `HYPOTHESIS_PROFILE=thorough` draws 2,000 others at each
run, `KVLAB_EXAMPLES=N` draws N.
"""

from __future__ import annotations

import os
import socket
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from kvlab.device import cpu
from tests.browser import MISSING, browser

os.environ.setdefault("KVLAB_TINY", "1")
os.environ["HF_HUB_OFFLINE"] = "1"

# No deadline: the first call of a property compiles kernels.
_COMMON: dict[str, Any] = {
    "deadline": None,
    "print_blob": True,
    "suppress_health_check": [HealthCheck.too_slow],
}
# "default" last: what is registered after it would take over that it is not random.
settings.register_profile("thorough", max_examples=2_000, derandomize=False, **_COMMON)
settings.register_profile("default", max_examples=50, derandomize=True, **_COMMON)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))
if examples := os.environ.get("KVLAB_EXAMPLES"):
    settings.register_profile("asked", settings.get_profile("thorough"), max_examples=int(examples))
    settings.load_profile("asked")


def pytest_configure(config: pytest.Config) -> None:
    """Let processes of pytest-xdist share the threads of the CPU: 16 of 16 each take ten times as long.

    This runs in the process that starts them. In each of them it would be late: a plugin may have loaded
    NumPy, whose OpenBLAS has its threads from then on.
    """
    if processes := getattr(config.option, "numprocesses", None):
        for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS"):
            os.environ.setdefault(name, str(max(cpu().threads // processes, 1)))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Name the check that a machine without a browser leaves out."""
    if browser() is None:
        terminalreporter.write_line(f"not checked: {MISSING}")


@pytest.fixture(scope="session")
def smollm2() -> Any:
    """The real model, its tokenizer and a book; skips where their packages are not installed."""
    from kvlab.errors import MissingExtraError
    from kvlab.lab.quality.model import load_smollm2

    try:
        return load_smollm2()
    except MissingExtraError as error:
        pytest.skip(str(error))


@pytest.fixture(autouse=True)
def _no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Refuse connections to other machines: nothing is downloaded unless the user asked for it."""
    connect = socket.socket.connect

    def guarded(self: socket.socket, address: Any) -> None:
        host = address[0] if isinstance(address, tuple) else "localhost"
        if host not in ("127.0.0.1", "::1", "localhost"):
            raise AssertionError(f"a test tried to connect to {address}")
        connect(self, address)

    monkeypatch.setattr(socket.socket, "connect", guarded)

"""A folder of files named by the hash of what they were made from.

``FileCache.get(key, produce)`` returns the bytes stored under ``key``. If there are none, it stores and
returns the bytes of ``produce()``. Three things can go wrong on a cluster and none of them may break a run:

- Many processes start cold at once. A lock file per key lets one of them produce while the others wait
  and then read. The lock is a ``flock``, which the operating system drops when its owner dies. Waiting
  ends after `LOCK_TIMEOUT_S`: then a process produces the bytes itself, twice the work for the same result.
- A file is cut short or altered. Every entry carries its length and SHA-256; one that does not match is
  produced again. Entries are written by `kvlab.files.write_whole`, so nobody reads half a file.
- The folder cannot be created or written (read-only home, full disk). The bytes are produced in memory
  and one warning names the folder and the environment variable that moves it.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

from kvlab.files import write_whole

LOCK_TIMEOUT_S = 300.0
_POLL_S = 0.02
_MAGIC = b"kvlab-1\n"
_HEADER_BYTES = len(_MAGIC) + 8 + 32  # magic, payload length (little-endian), SHA-256 of the payload


def cache_folder() -> Path:
    """Folder of kvlab's caches: ``KVLAB_CACHE_DIR``, ``XDG_CACHE_HOME/kvlab`` or ``~/.cache/kvlab``."""
    if chosen := os.environ.get("KVLAB_CACHE_DIR"):
        return Path(chosen)
    if xdg := os.environ.get("XDG_CACHE_HOME"):
        return Path(xdg) / "kvlab"
    return Path(os.path.expanduser("~")) / ".cache" / "kvlab"


class FileCache:
    """Bytes by content key in `folder`, whatever other processes, disks and permissions do."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._warned = False

    def get(self, key: str, produce: Callable[[], bytes]) -> bytes:
        """The bytes of `key`: from the folder if a sound entry is there, else ``produce()``, and stored."""
        path = self.folder / key
        if (stored := _read(path)) is not None:
            return stored
        with contextlib.ExitStack() as stack:
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
                stack.enter_context(_locked(path.with_name(f"{key}.lock")))
            except OSError as error:
                self._warn(error)
                return produce()
            if (stored := _read(path)) is not None:  # by the last holder of the lock
                return stored
            made = produce()
            try:
                write_whole(path, _header(made), made, durable=False)
            except OSError as error:
                self._warn(error)
            return made

    def _warn(self, error: OSError) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"cannot use the kernel cache {self.folder} ({error}), so kernels are compiled again "
                "in every process. Set KVLAB_CACHE_DIR to a folder that can be written.",
                RuntimeWarning,
                stacklevel=2,
            )


def _read(path: Path) -> bytes | None:
    """Payload of the entry at ``path``; None if there is none or it is not what was written."""
    try:
        blob = path.read_bytes()
    except OSError:
        return None
    header, payload = blob[:_HEADER_BYTES], blob[_HEADER_BYTES:]
    return payload if header == _header(payload) else None


def _header(payload: bytes) -> bytes:
    return _MAGIC + len(payload).to_bytes(8, "little") + hashlib.sha256(payload).digest()


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold an exclusive ``flock`` on ``path``, or go on without it when `LOCK_TIMEOUT_S` have passed."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        deadline = time.monotonic() + LOCK_TIMEOUT_S
        while time.monotonic() < deadline:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(_POLL_S)
            except OSError:  # a file system without locks: work is done twice at worst
                break
        yield
    finally:
        os.close(descriptor)  # also drops the lock

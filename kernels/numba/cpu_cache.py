"""Compiled CPU kernels are kept by Numba from process to process; here is what makes a kept one stale.

Numba looks at the file that a kernel stands in, and at no other. Kernels here are made of functions of
several files, so after an edit of one of those a process that loads kernels and one that compiles them could
differ in bits. This module, imported by all files whose functions others use, lets an edit of any `cpu_*.py`
make all kept kernels of this folder stale. Where they are kept is Numba's choice, as ever: NUMBA_CACHE_DIR,
or beside the source, or in the user's cache folder.
"""

import hashlib
from pathlib import Path

from numba.core.caching import CacheImpl

FOLDER = Path(__file__).resolve().parent


def digest_of_sources(folder):
    """Return a hash of the names and texts of all CPU kernels in a folder."""
    digest = hashlib.sha256()
    for path in sorted(folder.glob("cpu_*.py")):
        digest.update(f"{path.name} {path.stat().st_size}\n".encode() + path.read_bytes())
    return digest.digest()


_STAMP = digest_of_sources(FOLDER)


class KernelLocator:
    """Locator of a kernel of this folder: that of Numba, but for the stamp."""

    def __init__(self, locator):
        self._locator = locator

    def __getattr__(self, name):
        return getattr(self._locator, name)

    def get_source_stamp(self):
        """Return what must not have changed since a kernel was kept."""
        return _STAMP

    @classmethod
    def from_function(cls, py_func, py_file):
        """Return the locator of a function of this folder, None for any other, as Numba wants it."""
        if Path(py_file).resolve().parent != FOLDER or not Path(py_file).name.startswith("cpu_"):
            return None
        found = (other.from_function(py_func, py_file) for other in _STANDARD)
        return next((cls(locator) for locator in found if locator is not None), None)


_STANDARD = tuple(CacheImpl._locator_classes)
CacheImpl._locator_classes = [KernelLocator, *_STANDARD]

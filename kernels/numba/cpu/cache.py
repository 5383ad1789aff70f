"""Compiled CPU kernels are kept by Numba from process to process; here is what makes a kept one stale.

Numba looks at the file that a kernel stands in, and at no other. Kernels here are made of functions of
several files, so after an edit of one of those a process that loads kernels and one that compiles them could
differ in bits. This module, imported before any kernel, makes a kept one stale when its file, or any file
of this folder that it imports, itself or through another, has changed. Where kernels are kept is Numba's
choice: NUMBA_CACHE_DIR, or beside the source, or in the user's cache folder.
"""

import hashlib
import re
from pathlib import Path

from numba.core.caching import CacheImpl

_FOLDER = Path(__file__).resolve().parent
_IMPORT = re.compile(rb"^from \.(\w+) import", re.MULTILINE)


def stamp_of(path):
    """Return a hash of the names and texts of a kernel's file and of all kernel files it is made of."""
    found, waiting = {}, [path.name]
    while waiting:
        name = waiting.pop()
        if name not in found:
            found[name] = (path.parent / name).read_bytes()
            waiting += [f"{module.decode()}.py" for module in _IMPORT.findall(found[name])]
    digest = hashlib.sha256()
    for name, text in sorted(found.items()):
        digest.update(f"{name} {len(text)}\n".encode() + text)
    return digest.digest()


class KernelLocator:
    """Locator of a kernel of this folder: that of Numba, but for the stamp."""

    def __init__(self, locator, stamp):
        self._locator, self._stamp = locator, stamp

    def __getattr__(self, name):
        return getattr(self._locator, name)

    def get_source_stamp(self):
        """Return what must not have changed since a kernel was kept."""
        return self._stamp

    @classmethod
    def from_function(cls, py_func, py_file):
        """Return the locator of a function of this folder, None for any other, as Numba wants it."""
        path = Path(py_file).resolve()
        if path.parent != _FOLDER:
            return None
        found = (other.from_function(py_func, py_file) for other in _STANDARD)
        return next((cls(locator, stamp_of(path)) for locator in found if locator is not None), None)


_STANDARD = tuple(CacheImpl._locator_classes)
CacheImpl._locator_classes = [KernelLocator, *_STANDARD]

"""Invalidate compiled CPU kernels in Numba's cache when a source that they use has changed.

Numba checks only the file that defines a kernel. Kernels here use functions of several files. After an edit
of one of these, a process that loads a kernel and one that compiles it could differ in bits. This module is
imported before any kernel. It makes a cached kernel stale when its file has changed, or any file of this
folder that it imports, directly or indirectly. Numba chooses where kernels are cached: NUMBA_CACHE_DIR, or
beside the source, or in the user's cache folder.

Numba reads the whole index of what is kept before it compares stamps. An index of an older version may name
modules and classes that have other names now; it counts as empty.
"""

import hashlib
import re
from pathlib import Path

from numba.core.caching import CacheImpl, IndexDataCacheFile

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

_load_index = IndexDataCacheFile._load_index


def load_index(index):
    """Return what is kept under the stamp of an index, nothing if it is a kernel's and cannot be read."""
    try:
        return _load_index(index)
    except (ImportError, AttributeError):
        if isinstance(index._source_stamp, bytes):  # of `stamp_of`; those of Numba are tuples
            return {}
        raise


IndexDataCacheFile._load_index = load_index  # type: ignore[method-assign]

"""Call kernels that run on all threads, from any Python thread and after a fork.

Numba's threads have two limits, which end the process. The layer "workqueue", which Numba takes where it
finds neither TBB nor OpenMP, runs one parallel kernel at a time: there, callers take turns. GNU's OpenMP does
not survive a fork of a process whose threads have begun, which pools of `multiprocessing` and torch's
DataLoader do: Numba kills the child at its first parallel kernel. A child that uses one thread is safe, since
it never asks the threads that it has inherited by name only. So one thread is what it gets.
"""

import ctypes
import os
import sys
import threading
from functools import wraps

import numba
from numba import njit

_lock = threading.Lock()
_needs_lock = True  # until a first kernel has shown which layer Numba has taken


def parallel_kernel(**options):
    """Return a decorator of functions that Python calls and that run on all threads; options are Numba's."""

    def decorate(function):
        compiled = njit(parallel=True, cache=True, **options)(function)

        @wraps(compiled, updated=())
        def launch(*args):
            return _launch_locked(compiled, args) if _needs_lock else compiled(*args)

        return launch

    return decorate


def _launch_locked(compiled, args):
    global _needs_lock
    with _lock:
        result = compiled(*args)
        _needs_lock = numba.threading_layer() == "workqueue"
    return result


def _after_fork():
    """Make kernels safe in a child: a lock that nobody holds, and with GNU's OpenMP one thread."""
    global _lock
    _lock = threading.Lock()
    pool = sys.modules.get("numba.np.ufunc.omppool")
    if pool is None or getattr(pool, "openmp_vendor", "") != "GNU":
        return
    call = ctypes.CFUNCTYPE(None, ctypes.c_int)
    # No more threads are launched, but Numba takes this process for the one that did.
    call(pool.launch_threads)(0)
    call(pool.set_num_threads)(1)  # of this thread; others of the child have teams of their own


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)

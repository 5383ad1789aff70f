"""Launches without Python between them: a function of the host, compiled by LLVM when it is first needed.

Python takes longer to write a call's addresses into the arguments of its kernels, and to ask the driver for
launches one by one, than the driver takes for the launches. A `Table` says what
to write and to launch, and compiled code does it.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Sequence
from functools import cache, partial

import numpy as np

__all__ = ["Table", "launch_function"]

_CONFIG_STREAM = 32
"""Where a ``CUlaunchConfig`` has its stream, in bytes."""

_VALUES = 6
"""Word of a table at which a call's values begin; the word before is the stream."""

# A table is words of 8 bytes: the driver's cuLaunchKernelEx; numbers of writes and launches; where these are;
# the stream; the values of the call. A write is the word's address and the place of its value in the table; a
# launch is the address of its CUlaunchConfig, the kernel, and the address of the addresses of its parameters.
_SOURCE = f"""
define i32 @run(ptr %table) {{
begin:
  %driver = load ptr, ptr %table
  %writes_at = getelementptr i64, ptr %table, i64 1
  %writes = load i64, ptr %writes_at
  %launches_at = getelementptr i64, ptr %table, i64 2
  %launches = load i64, ptr %launches_at
  %first_write_at = getelementptr i64, ptr %table, i64 3
  %first_write = load ptr, ptr %first_write_at
  %first_launch_at = getelementptr i64, ptr %table, i64 4
  %first_launch = load ptr, ptr %first_launch_at
  %stream_at = getelementptr i64, ptr %table, i64 {_VALUES - 1}
  %stream = load i64, ptr %stream_at
  br label %more_writes

more_writes:
  %i = phi i64 [0, %begin], [%next_i, %write]
  %is_write = icmp ult i64 %i, %writes
  br i1 %is_write, label %write, label %more_launches

write:
  %pair = getelementptr [2 x i64], ptr %first_write, i64 %i
  %target = load ptr, ptr %pair
  %place_at = getelementptr i64, ptr %pair, i64 1
  %place = load i64, ptr %place_at
  %value_at = getelementptr i64, ptr %table, i64 %place
  %value = load i64, ptr %value_at
  store i64 %value, ptr %target
  %next_i = add i64 %i, 1
  br label %more_writes

more_launches:
  %j = phi i64 [0, %more_writes], [%next_j, %launch]
  %is_launch = icmp ult i64 %j, %launches
  br i1 %is_launch, label %launch, label %done

launch:
  %config_at = getelementptr [3 x i64], ptr %first_launch, i64 %j
  %config = load ptr, ptr %config_at
  %kernel_at = getelementptr i64, ptr %config_at, i64 1
  %kernel = load ptr, ptr %kernel_at
  %parameters_at = getelementptr i64, ptr %config_at, i64 2
  %parameters = load ptr, ptr %parameters_at
  %config_stream = getelementptr i8, ptr %config, i64 {_CONFIG_STREAM}
  store i64 %stream, ptr %config_stream
  %error = call i32 %driver(ptr %config, ptr %kernel, ptr %parameters, ptr null)
  %next_j = add i64 %j, 1
  %is_error = icmp ne i32 %error, 0
  br i1 %is_error, label %failed, label %more_launches

done:
  ret i32 0

failed:
  ret i32 %error
}}
"""


class Table:
    """What to write and to launch.

    Parameters
    ----------
    launches : sequence of (int, int, int)
        Addresses of the ``CUlaunchConfig``, the kernel and the addresses of its parameters.
    writes : sequence of (int, int)
        Address of a word, and which of the values of a call is written there.
    values : int
        How many there are.
    """

    def __init__(
        self, launches: Sequence[tuple[int, int, int]], writes: Sequence[tuple[int, int]], values: int
    ) -> None:
        self._writes = np.array([(target, _VALUES + value) for target, value in writes], np.uint64)
        self._launches = np.array(launches, np.uint64)
        words = np.zeros(_VALUES + values, np.uint64)
        words[:5] = (
            launch_function(), len(writes), len(launches), self._writes.ctypes.data,
            self._launches.ctypes.data,
        )  # fmt: skip
        self.write = partial(struct.Struct(f"{1 + values}Q").pack_into, words.data, 8 * (_VALUES - 1))
        """Set the stream and the values of the next run."""
        self.run = partial(_compiled(), words.ctypes.data)
        """Write, launch, and return the driver's error, 0 if there is none."""


def launch_function() -> int:
    """Return the address of the driver's ``cuLaunchKernelEx``."""
    return ctypes.cast(ctypes.CDLL("libcuda.so.1").cuLaunchKernelEx, ctypes.c_void_p).value or 0


@cache
def _compiled() -> Callable[[int], int]:
    """Return the function: given the address of a table it returns the driver's error, 0 for none.

    It runs without Python's lock: a full queue of the GPU may wait for what another thread launches.
    """
    import llvmlite.binding as llvm

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    library = (
        llvm.JITLibraryBuilder()
        .add_ir(_SOURCE)
        .export_symbol("run")
        .link(llvm.create_lljit_compiler(), "kvlab_launches")
    )
    found = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_uint64)(library["run"])
    found.library = library  # type: ignore[attr-defined]  # which holds the code
    return found

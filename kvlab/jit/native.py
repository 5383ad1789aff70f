"""Launches without Python between them: a host function that LLVM compiles when it is first needed.

Python takes longer to write a call's addresses into the arguments of its kernels, and to ask the driver for
launches one by one, than the driver takes for the launches. A `Table` says what to write and to launch;
compiled code does it.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Sequence
from functools import cache, partial

import numpy as np

__all__ = ["Table", "allows_cluster", "launch_function"]

_CONFIG_STREAM = 32
"""Where a ``CUlaunchConfig`` has its stream, in bytes."""

_INVALID_CLUSTER_SIZE = 912  # CUDA_ERROR_

_VALUES = 6
"""Word of a table at which a call's values begin; the word before is the stream."""

# A table is words of 8 bytes: the driver's cuLaunchKernelEx; numbers of values and launches; where their
# addresses and the launches are; the stream; the values. A launch is the address of its CUlaunchConfig, the
# kernel, and the address of the addresses of its parameters.
_SOURCE = f"""
define i64 @run(ptr %table, i64 %first) {{
begin:
  %driver = load ptr, ptr %table
  %values_at = getelementptr i64, ptr %table, i64 1
  %values = load i64, ptr %values_at
  %launches_at = getelementptr i64, ptr %table, i64 2
  %launches = load i64, ptr %launches_at
  %addresses_at = getelementptr i64, ptr %table, i64 3
  %addresses = load ptr, ptr %addresses_at
  %first_launch_at = getelementptr i64, ptr %table, i64 4
  %first_launch = load ptr, ptr %first_launch_at
  %stream_at = getelementptr i64, ptr %table, i64 {_VALUES - 1}
  %stream = load i64, ptr %stream_at
  %first_value = getelementptr i64, ptr %table, i64 {_VALUES}
  br label %more_values

more_values:
  %i = phi i64 [0, %begin], [%next_i, %write]
  %is_value = icmp ult i64 %i, %values
  br i1 %is_value, label %write, label %more_launches

write:
  %address_at = getelementptr ptr, ptr %addresses, i64 %i
  %address = load ptr, ptr %address_at
  %value_at = getelementptr i64, ptr %first_value, i64 %i
  %value = load i64, ptr %value_at
  store i64 %value, ptr %address
  %next_i = add i64 %i, 1
  br label %more_values

more_launches:
  %j = phi i64 [%first, %more_values], [%next_j, %launch]
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
  ret i64 0

failed:
  %wide = zext i32 %error to i64
  %high = shl i64 %j, 32
  %both = or i64 %high, %wide
  ret i64 %both
}}
"""


class Table:
    """What to write and to launch.

    Parameters
    ----------
    launches : sequence of (int, int, int)
        Addresses of the ``CUlaunchConfig``, the kernel and the addresses of its parameters.
    addresses : sequence of int
        Addresses of words of 8 bytes: one for each value of a run, which is written there.
    """

    def __init__(self, launches: Sequence[tuple[int, int, int]], addresses: Sequence[int]) -> None:
        self._addresses, self._launches = np.array(addresses, np.uint64), np.array(launches, np.uint64)
        words = np.zeros(_VALUES + len(addresses), np.uint64)
        words[:5] = (
            launch_function(), len(addresses), len(launches), self._addresses.ctypes.data,
            self._launches.ctypes.data,
        )  # fmt: skip
        self._words = words
        self.write = partial(struct.Struct(f"{1 + len(addresses)}Q").pack_into, words.data, 8 * (_VALUES - 1))
        """Set the stream and the values of the next run."""
        self.run_from = partial(_compiled(), words.ctypes.data)
        """Write, launch from a number on, and return 0, or which launch failed << 32 | the driver's error."""
        self.run = partial(self.run_from, 0)

    def written(self) -> list[int]:
        """Return the stream and the values of the next run."""
        found: list[int] = self._words[_VALUES - 1 :].tolist()
        return found


def launch_function() -> int:
    """Return the address of the driver's ``cuLaunchKernelEx``."""
    return ctypes.cast(ctypes.CDLL("libcuda.so.1").cuLaunchKernelEx, ctypes.c_void_p).value or 0


def allows_cluster(kernel: int, config: int) -> bool:
    """Return whether the device has clusters as a launch wants them; True if the driver does not say."""
    count = ctypes.c_int(0)
    ask = ctypes.CDLL("libcuda.so.1").cuOccupancyMaxActiveClusters
    failed = ask(ctypes.byref(count), ctypes.c_void_p(kernel), ctypes.c_void_p(config))
    return count.value > 0 if failed == 0 else failed != _INVALID_CLUSTER_SIZE


@cache
def _compiled() -> Callable[[int, int], int]:
    """Return the function of a table's address and its first launch; see `Table.run_from`.

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
    found = ctypes.CFUNCTYPE(ctypes.c_uint64, ctypes.c_uint64, ctypes.c_uint64)(library["run"])
    found.library = library  # type: ignore[attr-defined]  # which holds the code
    return found

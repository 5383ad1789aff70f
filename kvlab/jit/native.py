"""Launches without Python between them: a function that LLVM compiles when it is first needed.

Python takes longer to write a call's addresses into the arguments of its kernels, and to ask the driver for
launches one by one, than the driver takes for the launches. A `Table` says what to write and to launch;
compiled code does it. Python calls that code as one of its own functions: a call by ctypes takes longer than
all that the code does.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np

__all__ = ["HELD", "Table", "Target", "allows_cluster", "hold", "launch_function"]

_CONFIG_STREAM = 32
"""Where a ``CUlaunchConfig`` has its stream, in bytes."""

_INVALID_CLUSTER_SIZE = 912  # CUDA_ERROR_

_STREAM = 6
"""Word of a table that is the stream; the values of a call follow."""

HELD = (1 << 64) - 1
"""What a run says that has launched nothing, see `hold`."""

_held = np.zeros(1, np.uint64)

Target = int | Sequence[tuple[int, int]]
"""Where a value is written: the address of a word of 8 bytes, or several and what is added at each."""

# A table is words of 8 bytes: the driver's cuLaunchKernelEx; numbers of values, targets and launches; where
# targets and launches are; the stream; the values. A target is the address of a word, the number of its
# value, and what is added to it. A launch is the address of its CUlaunchConfig, the kernel, and the address
# of the addresses of its parameters.
_SOURCE = """
declare ptr @PyTuple_GetItem(ptr, i64)
declare i64 @PyLong_AsUnsignedLongLong(ptr)
declare ptr @PyLong_FromUnsignedLongLong(i64)
declare ptr @PyErr_Occurred()
declare ptr @PyErr_Format(ptr, ptr, ...)
declare ptr @PyEval_SaveThread()
declare void @PyEval_RestoreThread(ptr)
declare ptr @PyObject_CallFunctionObjArgs(ptr, ...)
declare void @Py_IncRef(ptr)
declare void @Py_DecRef(ptr)

@wrong_number = private constant [45 x i8] c"a run takes a stream and %zd values, got %zd\\00"

define i64 @run_from(ptr %table, i64 %first) {{
begin:
  %driver = load ptr, ptr %table
  %num_targets_at = getelementptr i64, ptr %table, i64 2
  %num_targets = load i64, ptr %num_targets_at
  %num_launches_at = getelementptr i64, ptr %table, i64 3
  %num_launches = load i64, ptr %num_launches_at
  %targets_at = getelementptr i64, ptr %table, i64 4
  %targets = load ptr, ptr %targets_at
  %launches_at = getelementptr i64, ptr %table, i64 5
  %launches = load ptr, ptr %launches_at
  %stream_at = getelementptr i64, ptr %table, i64 {stream}
  %stream = load i64, ptr %stream_at
  %values = getelementptr i64, ptr %stream_at, i64 1
  br label %more_targets

more_targets:
  %i = phi i64 [0, %begin], [%next_i, %write]
  %is_target = icmp ult i64 %i, %num_targets
  br i1 %is_target, label %write, label %more_launches

write:
  %target = getelementptr [3 x i64], ptr %targets, i64 %i
  %address = load ptr, ptr %target
  %which_at = getelementptr i64, ptr %target, i64 1
  %which = load i64, ptr %which_at
  %added_at = getelementptr i64, ptr %target, i64 2
  %added = load i64, ptr %added_at
  %value_at = getelementptr i64, ptr %values, i64 %which
  %value = load i64, ptr %value_at
  %sum = add i64 %value, %added
  store i64 %sum, ptr %address
  %next_i = add i64 %i, 1
  br label %more_targets

more_launches:
  %j = phi i64 [%first, %more_targets], [%next_j, %launch]
  %is_launch = icmp ult i64 %j, %num_launches
  br i1 %is_launch, label %launch, label %done

launch:
  %config_at = getelementptr [3 x i64], ptr %launches, i64 %j
  %config = load ptr, ptr %config_at
  %kernel_at = getelementptr i64, ptr %config_at, i64 1
  %kernel = load ptr, ptr %kernel_at
  %parameters_at = getelementptr i64, ptr %config_at, i64 2
  %parameters = load ptr, ptr %parameters_at
  %config_stream = getelementptr i8, ptr %config, i64 {config_stream}
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

; A function of Python: of a stream and values. Its self is a tuple: a table's address, and what goes on.
define ptr @run(ptr %self, ptr %arguments, i64 %given) {{
begin:
  %address = call ptr @PyTuple_GetItem(ptr %self, i64 0)
  %word = call i64 @PyLong_AsUnsignedLongLong(ptr %address)
  %table = inttoptr i64 %word to ptr
  %num_values_at = getelementptr i64, ptr %table, i64 1
  %num_values = load i64, ptr %num_values_at
  %wanted = add i64 %num_values, 1
  %stream_at = getelementptr i64, ptr %table, i64 {stream}
  %fits = icmp eq i64 %wanted, %given
  br i1 %fits, label %more, label %does_not_fit

does_not_fit:
  %values_given = sub i64 %given, 1
  %raised = call ptr (ptr, ptr, ...) @PyErr_Format(
    ptr inttoptr (i64 {type_error} to ptr), ptr @wrong_number, i64 %num_values, i64 %values_given)
  ret ptr null

more:
  %i = phi i64 [0, %begin], [%next_i, %read], [%next_i, %may_be_error]
  %is_value = icmp ult i64 %i, %given
  br i1 %is_value, label %read, label %all_read

read:
  %argument_at = getelementptr ptr, ptr %arguments, i64 %i
  %argument = load ptr, ptr %argument_at
  %value = call i64 @PyLong_AsUnsignedLongLong(ptr %argument)
  %value_at = getelementptr i64, ptr %stream_at, i64 %i
  store i64 %value, ptr %value_at
  %next_i = add i64 %i, 1
  %looks_wrong = icmp eq i64 %value, -1
  br i1 %looks_wrong, label %may_be_error, label %more

may_be_error:
  %error = call ptr @PyErr_Occurred()
  %is_error = icmp ne ptr %error, null
  br i1 %is_error, label %is_wrong, label %more

is_wrong:
  ret ptr null

all_read:
  %held = load i64, ptr inttoptr (i64 {held} to ptr)
  %is_held = icmp ne i64 %held, 0
  br i1 %is_held, label %did_not_run, label %launch

launch:
  %thread = call ptr @PyEval_SaveThread()
  %failed = call i64 @run_from(ptr %table, i64 0)
  call void @PyEval_RestoreThread(ptr %thread)
  %ran = icmp eq i64 %failed, 0
  br i1 %ran, label %done, label %did_not_run

done:
  call void @Py_IncRef(ptr inttoptr (i64 {none} to ptr))
  ret ptr inttoptr (i64 {none} to ptr)

did_not_run:
  %code = phi i64 [-1, %all_read], [%failed, %launch]
  %number = call ptr @PyLong_FromUnsignedLongLong(i64 %code)
  %go_on = call ptr @PyTuple_GetItem(ptr %self, i64 1)
  %result = call ptr (ptr, ...) @PyObject_CallFunctionObjArgs(ptr %go_on, ptr %number, ptr null)
  call void @Py_DecRef(ptr %number)
  ret ptr %result
}}
"""


class Table:
    """What to write and to launch.

    Parameters
    ----------
    launches : sequence of (int, int, int)
        Addresses of the ``CUlaunchConfig``, the kernel and the addresses of its parameters.
    targets : sequence of Target
        One for each value of a run.
    go_on : function
        Called where a launch failed, with its number << 32 | the driver's error, or with `HELD`; what it
        raises, the run does.

    Attributes
    ----------
    run : function
        Write and launch, given the stream and the values; not in two threads at once.
    run_from : function
        Write what was given last, launch from a number on, and return 0, or what `go_on` is called with.
    """

    def __init__(
        self,
        launches: Sequence[tuple[int, int, int]],
        targets: Sequence[Target],
        go_on: Callable[[int], None],
    ) -> None:
        rows = [
            (address, number, added)
            for number, target in enumerate(targets)
            for address, added in ([(target, 0)] if isinstance(target, int) else target)
        ]
        written, launched = np.array(rows, np.uint64), np.array(launches, np.uint64)
        words = np.zeros(_STREAM + 1 + len(targets), np.uint64)
        words[:_STREAM] = (
            launch_function(), len(targets), len(rows), len(launches), written.ctypes.data,
            launched.ctypes.data,
        )  # fmt: skip
        self._words, compiled = words, _compiled()
        self.run_from = partial(compiled.run_from, words.ctypes.data)
        self.run = compiled.function_of((words.ctypes.data, go_on, words, written, launched, compiled))

    def written(self) -> list[int]:
        """Return the stream and the values that a run was given last."""
        found: list[int] = self._words[_STREAM:].tolist()
        return found


@contextmanager
def hold() -> Iterator[None]:
    """Let no run of any table launch: `go_on` is called with `HELD` instead."""
    _held[0] += 1
    try:
        yield
    finally:
        _held[0] -= 1


def launch_function() -> int:
    """Return the address of the driver's ``cuLaunchKernelEx``."""
    return ctypes.cast(ctypes.CDLL("libcuda.so.1").cuLaunchKernelEx, ctypes.c_void_p).value or 0


def allows_cluster(kernel: int, config: int) -> bool:
    """Return whether the device has clusters as a launch wants them; True if the driver does not say."""
    count = ctypes.c_int(0)
    ask = ctypes.CDLL("libcuda.so.1").cuOccupancyMaxActiveClusters
    failed = ask(ctypes.byref(count), ctypes.c_void_p(kernel), ctypes.c_void_p(config))
    return count.value > 0 if failed == 0 else failed != _INVALID_CLUSTER_SIZE


class _Compiled(NamedTuple):
    run_from: Callable[[int, int], int]
    function_of: Callable[[tuple[Any, ...]], Callable[..., None]]
    """Returns the run of a table, given its self, which must hold this object."""
    library: Any  # which holds the code


class _MethodDef(ctypes.Structure):
    """``PyMethodDef``."""

    _fields_ = (
        ("name", ctypes.c_char_p), ("function", ctypes.c_void_p), ("flags", ctypes.c_int),
        ("doc", ctypes.c_char_p),
    )  # fmt: skip


_FASTCALL = 0x0080  # METH_FASTCALL: arguments in an array


@cache
def _compiled() -> _Compiled:
    """Return what LLVM makes of the source.

    Launches are made without Python's lock: a full queue of the GPU may wait for what another thread
    launches.
    """
    import re

    import llvmlite.binding as llvm

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    source = _SOURCE.format(
        stream=_STREAM, config_stream=_CONFIG_STREAM, type_error=id(TypeError), none=id(None),
        held=_held.ctypes.data,
    )  # fmt: skip
    builder = llvm.JITLibraryBuilder().add_ir(source).export_symbol("run_from").export_symbol("run")
    for name in re.findall(r"^declare .*@(\w+)", source, re.MULTILINE):
        builder.import_symbol(name, ctypes.cast(getattr(ctypes.pythonapi, name), ctypes.c_void_p).value)
    library = builder.link(llvm.create_lljit_compiler(), "kvlab_launches")
    run_from = ctypes.CFUNCTYPE(ctypes.c_uint64, ctypes.c_uint64, ctypes.c_uint64)(library["run_from"])
    definition = _MethodDef(b"run", library["run"], _FASTCALL, None)
    new = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.py_object, ctypes.c_void_p)(
        ("PyCFunction_NewEx", ctypes.pythonapi)
    )

    def function_of(self: tuple[Any, ...]) -> Callable[..., None]:
        made: Callable[..., None] = new(ctypes.addressof(definition), self, None)
        return made

    return _Compiled(run_from, function_of, library)

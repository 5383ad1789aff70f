"""Launches without a GPU: which arguments fit, what reaches the driver, which kernels there are."""

from __future__ import annotations

import ctypes
import gc
import struct
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvlab.errors import MissingExtraError
from kvlab.jit import launch, native
from kvlab.jit.build import build
from kvlab.jit.cubin import Resources
from kvlab.jit.launch import Kernel, PreparedLaunch, PreparedLaunches, load
from kvlab.jit.structs import ADDRESS, Struct, addresses_of

SOURCE = 'extern "C" __global__ void fill(float* out) { out[threadIdx.x] = VALUE; }\n'
MACROS = {"VALUE": 7}


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of sources, with an empty cache of its own."""
    monkeypatch.setenv("KVLAB_CACHE_DIR", str(tmp_path / "cache"))
    (tmp_path / "fill.cu").write_text(SOURCE)
    return tmp_path


class RecordingFunction:
    """Stands for CuPy's function: keeps the arguments of every launch."""

    def __init__(self) -> None:
        self.launches: list[tuple[Any, ...]] = []

    def __call__(self, grid: Any, block: Any, args: Sequence[Any], shared_bytes: int, stream: Any) -> None:
        self.launches.append((grid, block, tuple(args), shared_bytes, stream.ptr))


@pytest.fixture
def recorded() -> tuple[Kernel, RecordingFunction]:
    function = RecordingFunction()
    resources = Resources(registers=32, shared_bytes=0, local_bytes=0, parameter_bytes=(8, 4, 2, 128))
    return Kernel(function, "kernel", 0, resources), function


ARGUMENTS = (0x7F00_0000_0000, np.int32(3), np.float16(0.5), np.zeros(1, "V128")[0])


def test_a_launch_hands_everything_on(recorded: tuple[Kernel, RecordingFunction]) -> None:
    kernel, function = recorded
    kernel((3, 2), (128,), ARGUMENTS, 1024, 77)
    assert function.launches == [((3, 2), (128,), ARGUMENTS, 1024, 77)]


@pytest.mark.parametrize("grid", [(0,), (4, 0), (0, 1, 1)])
def test_an_empty_grid_launches_nothing(
    recorded: tuple[Kernel, RecordingFunction], grid: tuple[int, ...]
) -> None:
    kernel, function = recorded
    kernel(grid, (128,), ARGUMENTS)
    assert function.launches == []


@pytest.mark.parametrize(
    ("position", "wrong"),
    [(0, np.int32(1)), (0, True), (0, 1.0), (0, None), (1, 3), (1, np.int64(3)), (1, "3"), (2, 0.5), (3, 7)],
)
def test_arguments_that_do_not_fit_are_type_errors(
    recorded: tuple[Kernel, RecordingFunction], position: int, wrong: object
) -> None:
    kernel, function = recorded
    kernel((1,), (32,), ARGUMENTS)
    arguments = [*ARGUMENTS[:position], wrong, *ARGUMENTS[position + 1 :]]
    for _ in range(2):
        with pytest.raises(TypeError, match=rf"kernel: args\[{position}\]=.* does not fit"):
            kernel((1,), (32,), arguments)
    assert len(function.launches) == 1


@pytest.mark.parametrize("count", [0, 3, 5])
def test_a_wrong_number_of_arguments_is_a_type_error(
    recorded: tuple[Kernel, RecordingFunction], count: int
) -> None:
    with pytest.raises(TypeError, match=f"kernel has 4 parameters, {count} arguments were given"):
        recorded[0]((1,), (32,), (ARGUMENTS * 2)[:count])


def test_load_says_which_kernels_there_are(root: Path) -> None:
    built = build("fill", MACROS, "sm_90a", root=root)
    with pytest.raises(ValueError, match=r"entry='full': fill\.cu has the kernels fill"):
        load(built, "full")
    (root / "fill.cu").write_text(SOURCE + SOURCE.replace("fill", "also"))
    with pytest.raises(ValueError, match=r"entry=None: fill\.cu has the kernels also, fill"):
        load(build("fill", MACROS, "sm_90a", root=root))


def test_load_without_cupy_or_device_says_so(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built = build("fill", MACROS, "sm_90a", root=root)
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(MissingExtraError, match=r"^a CUDA kernel needs cupy.* pip install 'kvlab\[cu13\]'$"):
        load(built)
    no_device = types.SimpleNamespace(cuda=types.SimpleNamespace(is_available=lambda: False))
    monkeypatch.setitem(sys.modules, "cupy", no_device)
    with pytest.raises(RuntimeError, match="no CUDA device was found; the backends 'cpu' and 'reference'"):
        load(built)


# ---- prepared launches -------------------------------------------------------------------------------------

CALL = Struct(out=ADDRESS, count="i")


CONFIG = struct.Struct("7I4xQQI4x")  # CUlaunchConfig
ATTRIBUTE = struct.Struct("I4x3I52x")  # CUlaunchAttribute
LAUNCH = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_void_p] * 4)


class Driver(types.SimpleNamespace):
    """Stands for CuPy's driver and for cuLaunchKernelEx: keeps launches and what kernels are allowed."""

    class CUDADriverError(Exception):
        """As CuPy's."""

    def __init__(self) -> None:
        super().__init__(configured=[], arguments=[], allowed=[], error=0, fails_from=0)
        self.launch = LAUNCH(self.configure)

    def funcSetAttribute(self, function: int, attribute: int, value: int) -> None:
        self.allowed.append((attribute, value))

    def configure(self, config: int, function: int, arguments: int, extra: int | None) -> int:
        assert (function, extra) == (5, None)
        *grid, x, y, z, shared, stream, first, count = CONFIG.unpack(ctypes.string_at(config, CONFIG.size))
        assert (y, z) == (1, 1)
        attributes = ATTRIBUTE.iter_unpack(ctypes.string_at(first, count * ATTRIBUTE.size))
        names = {bindings_name(which): value for which, *value in attributes}
        cluster = names.get("CLUSTER_DIMENSION")
        early = names.get("PROGRAMMATIC_STREAM_SERIALIZATION") == [1, 0, 0]
        together = names.get("COOPERATIVE") == [1, 0, 0]
        self.configured.append((tuple(grid), x, shared, stream, early, cluster, together))
        (argument,) = (ctypes.c_uint64 * 1).from_address(arguments)
        self.arguments.append(ctypes.string_at(argument, CALL.size))
        return self.error if len(self.arguments) > self.fails_from else 0


def bindings_name(attribute: int) -> str:
    """The driver's name of an attribute of launches."""
    from cuda.bindings.driver import CUlaunchAttributeID

    return CUlaunchAttributeID(attribute).name.removeprefix("CU_LAUNCH_ATTRIBUTE_")


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    pytest.importorskip("cuda.bindings.driver")
    made = Driver()
    cuda = types.SimpleNamespace(driver=made)
    monkeypatch.setitem(sys.modules, "cupy", types.SimpleNamespace(cuda=cuda))
    monkeypatch.setitem(sys.modules, "cupy.cuda", cuda)
    address = ctypes.cast(made.launch, ctypes.c_void_p).value
    monkeypatch.setattr(native, "launch_function", lambda: address)
    monkeypatch.setattr(launch, "compute_capability", lambda device: (9, 0))
    monkeypatch.setattr(launch, "allows_cluster", lambda kernel, config: True)
    launch._driver_error.cache_clear()
    yield made
    launch._driver_error.cache_clear()


def prepared(argument: Any = None, **options: Any) -> PreparedLaunch:
    resources = Resources(registers=32, shared_bytes=0, local_bytes=0, parameter_bytes=(CALL.size,))
    kernel = Kernel(types.SimpleNamespace(ptr=5), "kernel", 0, resources)
    argument = np.zeros(1, CALL.dtype) if argument is None else argument
    return PreparedLaunch(kernel, (32, 2), (128,), argument, 512, **options)


def test_a_prepared_launch_reads_its_argument_when_it_is_made(driver: Driver) -> None:
    argument = np.zeros(1, CALL.dtype)
    run = prepared(argument)
    for count in (3, 4):
        argument["count"] = count
        run(77)
    assert driver.configured == [((32, 2, 1), 128, 512, 77, False, None, False)] * 2
    assert driver.arguments == [CALL.pack(count=count).tobytes() for count in (3, 4)]


@pytest.mark.parametrize("held", [False, True])
def test_launches_in_turn_come_behind_the_values_of_the_call(driver: Driver, held: bool) -> None:
    arguments = [np.zeros(1, CALL.dtype) for _ in range(2)]
    addresses = [address for x in arguments for address in addresses_of(x, [CALL.word("out")])]
    both = PreparedLaunches(
        [prepared(x, early=early) for x, early in zip(arguments, (False, True), strict=True)], addresses
    )
    for stream, values in ((77, (1 << 40, 5)), (78, (6, 7))):
        driver.configured.clear()
        driver.arguments.clear()
        with native.hold() if held else nullcontext():
            both.run(stream, *values)
        assert [(row[3], row[4]) for row in driver.configured] == [(stream, False), (stream, True)]
        assert driver.arguments == [CALL.pack(out=value).tobytes() for value in values]


def test_a_value_is_written_to_several_targets_and_more_is_added(driver: Driver) -> None:
    arguments = [np.zeros(1, CALL.dtype) for _ in range(3)]
    first, second, third = (addresses_of(x, [CALL.word("out")])[0] for x in arguments)
    run = PreparedLaunches(list(map(prepared, arguments)), [[(first, 0), (third, 64)], second, []]).run
    run(77, 1 << 40, 5, 9)
    assert driver.arguments == [CALL.pack(out=value).tobytes() for value in (1 << 40, 5, (1 << 40) + 64)]


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ((77,), TypeError), ((), TypeError), ((77, 1, 2), TypeError), ((77, "1"), TypeError),
        ((77, None), TypeError), ((77, -1), OverflowError), ((77, 1 << 64), OverflowError),
    ],
)  # fmt: skip
def test_wrong_values_launch_nothing(driver: Driver, given: tuple[Any, ...], error: type[Exception]) -> None:
    argument = np.zeros(1, CALL.dtype)
    run = PreparedLaunches([prepared(argument)], addresses_of(argument, [CALL.word("out")])).run
    for _ in range(2):
        with pytest.raises(error):
            run(*given)
    assert driver.arguments == []
    run(77, (1 << 64) - 1)
    assert driver.arguments == [CALL.pack(out=(1 << 64) - 1).tobytes()]


def leaks(act: Callable[[], None], *objects: object) -> bool:
    """Whether every thousand calls leave references behind; a collection of garbage moves counts once."""
    drifts = []
    for _ in range(3):
        gc.collect()
        before = [sys.getrefcount(x) for x in objects]
        for _ in range(1000):
            act()
        drifts.append(max(abs(sys.getrefcount(x) - y) for x, y in zip(objects, before, strict=True)))
    return min(drifts) >= 500


def test_launches_leave_no_reference_behind(driver: Driver) -> None:
    argument = np.zeros(1, CALL.dtype)
    run = PreparedLaunches([prepared(argument)], addresses_of(argument, [CALL.word("out")])).run
    value, wrong = 1 << 50, object()

    def calls() -> None:
        run(77, value)
        driver.arguments.clear()
        driver.configured.clear()
        with pytest.raises(TypeError):
            run(77, wrong)

    assert not leaks(calls, value, wrong, None, run)
    kept: list[object] = []
    assert leaks(lambda: kept.append(wrong), value, wrong, None, run)


def test_a_grid_of_nothing_is_left_out(driver: Driver) -> None:
    none = PreparedLaunch(prepared().kernel, (0, 2), (128,), np.zeros(1, CALL.dtype))
    none(77)
    rest = PreparedLaunches([none, prepared()], [])
    rest.run(78)
    assert [row[3] for row in driver.configured] == [78]


@pytest.mark.parametrize(
    ("options", "early", "cluster", "together"),
    [
        ({"early": True}, True, None, False),
        ({"cooperative": True}, False, None, True),
        ({"cooperative": True, "cluster": 2}, False, [2, 1, 1], True),
        ({"cluster": 4}, False, [4, 1, 1], False),
        ({"early": True, "cluster": 16}, True, [16, 1, 1], False),
    ],
)
def test_attributes_of_launches_reach_the_driver(
    driver: Driver, options: dict[str, Any], early: bool, cluster: list[int] | None, together: bool
) -> None:
    run = prepared(**options)
    run(77)
    run(78)
    assert driver.configured == [
        ((32, 2, 1), 128, 512, stream, early, cluster, together) for stream in (77, 78)
    ]
    assert driver.allowed == ([(14, 1)] if cluster == [16, 1, 1] else [])  # more than 8 are not portable


def test_an_error_of_the_driver_is_raised(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "_current", lambda device: nullcontext())
    driver.error = 1
    with pytest.raises(Driver.CUDADriverError):
        prepared(cluster=2)(0)
    assert len(driver.configured) == 2  # the second time on the kernel's device


def test_launches_go_on_with_the_one_that_failed(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """None is made twice: a second append would append twice."""

    @contextmanager
    def mended(device: int) -> Iterator[None]:
        driver.error = 0
        yield

    monkeypatch.setattr(launch, "_current", mended)
    monkeypatch.setattr(driver, "fails_from", 2)
    arguments = [np.zeros(1, CALL.dtype) for _ in range(4)]
    for x, count in zip(arguments, range(4), strict=True):
        x["count"] = count
    run = PreparedLaunches([prepared(x) for x in arguments], [])
    for _ in range(2):
        driver.arguments.clear()
        driver.error = 1
        run.run(77)
        assert driver.arguments == [CALL.pack(count=count).tobytes() for count in (0, 1, 2, 2, 3)]


def test_before_hopper_nothing_is_early_and_clusters_are_refused(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "compute_capability", lambda device: (8, 9))
    prepared(early=True)(0)
    assert [row[4] for row in driver.configured] == [False]
    with pytest.raises(ValueError, match=r"cluster=2 takes compute capability 9\.0, which device 0 lacks"):
        prepared(cluster=2)


def test_large_clusters_that_the_device_lacks_are_refused(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "allows_cluster", lambda kernel, config: False)
    prepared(cluster=8)
    with pytest.raises(NotImplementedError, match="cluster=16: device 0 has no clusters of so many; take 8"):
        prepared(cluster=16)


@pytest.mark.parametrize("cluster", [-1, 0, 3, 17, 32])
def test_clusters_that_do_not_fit_the_grid_are_refused(driver: Driver, cluster: int) -> None:
    with pytest.raises(
        ValueError, match=f"kernel: cluster={cluster} must be 1 to 16 and divide the 32 blocks"
    ):
        prepared(cluster=cluster)


def test_an_argument_of_another_size_is_refused(driver: Driver) -> None:
    with pytest.raises(TypeError, match="an argument of 8 bytes does not fit parameters of 16 bytes"):
        prepared(np.zeros(1, Struct(out=ADDRESS).dtype))


# ---- getters -----------------------------------------------------------------------------------------------


def test_getters_build_for_the_device_and_remember(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(launch, "compute_capability", lambda device: (9, 0))
    monkeypatch.setattr(launch, "build", lambda *request: ("cuda", *request))
    monkeypatch.setattr(launch, "build_numba", lambda *request: ("numba", *request))
    monkeypatch.setattr(launch, "load", lambda *what, device: asked.append((*what, device)))
    for _ in range(2):
        launch.cuda_kernel("test/none", None, (("WARPS", 4),), 1)
        launch.numba_kernel("none", "entry", (("bits", 3),), 1)
    assert asked == [
        (("cuda", "test/none", {"WARPS": 4}, "sm_90a"), None, 1),
        (("numba", "none", "entry", {"bits": 3}, "sm_90a"), "entry", 1),
    ]

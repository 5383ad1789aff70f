"""Results on a GPU that is not the current one, by a stand-in for CuPy, whose arrays know where they lie."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvlab.arrays import Device
from kvlab.ops import device_arrays
from kvlab.ops.cuda import grouped, packed


class FakeCupy:
    """CuPy as far as new arrays need it: an array is made and written on the current device alone."""

    current = 0

    class Device:
        def __init__(self, index: int) -> None:
            self.index = index

        def __enter__(self) -> None:
            self.before, FakeCupy.current = FakeCupy.current, self.index

        def __exit__(self, *_: Any) -> None:
            FakeCupy.current = self.before

    class ndarray:
        def __init__(self, shape: Any, dtype: Any) -> None:
            self.held, self.device = np.full(shape, 77, dtype), FakeCupy.Device(FakeCupy.current)
            self.data = SimpleNamespace(ptr=self.held.ctypes.data)

        def __setitem__(self, where: Any, value: Any) -> None:
            assert FakeCupy.current == self.device.index
            self.held[where] = value

        def __len__(self) -> int:
            return len(self.held)

        def __dlpack__(self, **_: Any) -> Any:
            raise BufferError

        def __dlpack_device__(self) -> tuple[int, int]:
            return 2, self.device.index


@pytest.fixture
def on_second(monkeypatch: pytest.MonkeyPatch) -> Any:
    """An array on GPU 1, while GPU 0 is current."""
    cuda = SimpleNamespace(Device=FakeCupy.Device)
    cupy = SimpleNamespace(cuda=cuda, ndarray=FakeCupy.ndarray, empty=FakeCupy.ndarray)
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setitem(sys.modules, "cupy.cuda", cuda)
    with FakeCupy.Device(1):
        return FakeCupy.ndarray((4, 2, 8), np.float16)


def test_groups_that_see_nothing_are_filled_on_their_own_device(on_second: Any) -> None:
    kind = (4, 2, 8), (16, 8, 1), np.dtype("float16"), Device("cuda", 1), 0
    call: Any = SimpleNamespace(sizes={"Hq": 2, "D": 8}, rows=[4, 0], groups=2, dtype="float16", kinds=[kind])
    outs, lses = grouped._nothing_seen(call)
    assert [x.device.index for x in outs + lses] == [1] * 4
    assert (outs[0].held == 0).all()
    assert (lses[0].held == -np.inf).all()


def test_words_of_kernels_are_cleared_on_their_own_device(
    on_second: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed, "multiprocessors", lambda device: 3)
    monkeypatch.setattr(packed, "cuda_view", lambda x, name: SimpleNamespace(device=x.device.index))
    made = packed.make_workspace(on_second, 2, 16, 8).semaphores
    assert made.device.index == 1
    assert not made.held.any()
    assert not device_arrays.Flag(on_second, True, "cuda")._word.held.any()

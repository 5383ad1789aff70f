"""What GPU tests of packing and codecs share: arrays to the GPU and back, canaries around results."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import cupy
import ml_dtypes
import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from kvlab import arrays, new_arrays
from kvlab.ops.cuda import bits as bits_cuda
from kvlab.ops.cuda import codec as codec_cuda

LIBRARIES = ("torch", "cupy")

_MARGIN, _CANARY = 256, 0xA5


def on_device(x: NDArray[Any], library: str) -> Any:
    """Return a copy on the GPU with the strides of `x`, gaps and all."""
    base = x
    while isinstance(base.base, np.ndarray):
        base = base.base
    start = x.__array_interface__["data"][0] - base.__array_interface__["data"][0]
    owner = np.asarray(base)
    if x.size == 0 or start < 0 or not owner.flags.c_contiguous:
        owner, start = np.ascontiguousarray(x), 0
        x = owner
    flat = cupy.asarray(owner.reshape(-1).view(np.uint8))
    view = cupy.ndarray(x.shape, x.dtype, flat.data + start, x.strides)
    if library == "cupy":
        return view
    if x.dtype == ml_dtypes.bfloat16:
        return torch.from_dlpack(view.view(cupy.int16)).view(torch.bfloat16)
    return torch.from_dlpack(view)


def to_numpy(x: Any) -> NDArray[Any]:
    """Return a copy in CPU memory, bfloat16 as `ml_dtypes.bfloat16`."""
    if not isinstance(x, torch.Tensor):
        return np.asarray(x.get())
    if x.dtype == torch.bfloat16:
        return x.cpu().view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return x.cpu().numpy()


@contextmanager
def canaries_around_results() -> Iterator[None]:
    """Let calls allocate in the midst of canaries, which must be alive afterwards."""
    buffers = []

    def empty(shape: Sequence[int], dtype: str, like: Any) -> Any:
        count = int(np.prod(shape)) * arrays.numpy_dtype(dtype).itemsize
        buffer = new_arrays.empty((count + 2 * _MARGIN,), "uint8", like)
        buffer[...] = _CANARY
        buffers.append(buffer)
        inside = buffer[_MARGIN : _MARGIN + count]
        if isinstance(buffer, torch.Tensor):
            return inside.view(getattr(torch, dtype)).reshape(tuple(shape))
        return inside.view(arrays.numpy_dtype(dtype)).reshape(tuple(shape))

    with pytest.MonkeyPatch.context() as patch:
        for module in (bits_cuda, codec_cuda):
            patch.setattr(module, "empty", empty)
        yield
    assert buffers
    for buffer in buffers:
        assert bool((buffer[:_MARGIN] == _CANARY).all())
        assert bool((buffer[-_MARGIN:] == _CANARY).all())

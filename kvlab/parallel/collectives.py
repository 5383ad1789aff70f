"""What ranks tell each other, through torch.distributed alone (NCCL on GPUs, gloo on CPUs).

Each function starts a transfer and returns something to wait for, so that a rank computes meanwhile. A rank
that died, or that does not answer within the timeout of its process group, ends the call on all others with
`RankError`, which names the transfer.
"""

from __future__ import annotations

import datetime
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch.distributed.device_mesh import DeviceMesh

from kvlab.errors import RankError

__all__ = [
    "Pending",
    "all_gather",
    "exchange",
    "filled",
    "group_of",
    "largest",
    "on_device",
    "place_of",
    "process_group",
    "random_inputs",
    "reduce_scatter",
    "with_gradients",
]

Tensor = torch.Tensor


class Pending(NamedTuple):
    """A transfer under way: `result` holds its outcome once `wait` has returned it."""

    result: Any
    works: tuple[Any, ...]
    what: str
    keeps: Any  # tensors that the transfer reads

    def wait(self) -> Any:
        """Return the outcome; on a GPU the current stream waits for it, not the host.

        Raises
        ------
        RankError
            If a rank of the group does not answer.
        """
        for work in self.works:
            _told(work.wait, self.what)
        return self.result


@contextmanager
def process_group(timeout: datetime.timedelta) -> Iterator[tuple[int, int, str]]:
    """Join the group of all ranks that torchrun started, and leave it: rank, ranks and the device to use."""
    rank, here = (int(os.environ.get(name, 0)) for name in ("RANK", "LOCAL_RANK"))
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.set_device(here)
    alone: dict[str, Any] = {"rank": 0, "world_size": 1, "store": torch._C._distributed_c10d.HashStore()}
    started = {} if "RANK" in os.environ else alone
    dist.init_process_group("nccl" if on_gpu else "gloo", timeout=timeout, **started)
    try:
        yield rank, dist.get_world_size(), f"cuda:{here}" if on_gpu else "cpu"
    finally:
        dist.destroy_process_group()


def random_inputs(shapes: Sequence[tuple[int, ...]], dtype: str, device: str) -> list[Tensor]:
    """Return normally distributed tensors, the same on every rank."""
    generator = torch.Generator().manual_seed(0)
    kind = getattr(torch, dtype)
    return [torch.randn(shape, generator=generator).to(device, kind) for shape in shapes]


def largest(values: Sequence[float], device: str) -> list[float]:
    """Return the largest of each value on any rank of the group of all."""
    numbers = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(numbers, dist.ReduceOp.MAX)
    return list(numbers.tolist())


def group_of(group: Any) -> Any:
    """Return the process group of a mesh of one axis; a group, or None, as it is.

    Raises
    ------
    ValueError
        If the mesh has several axes.
    """
    if not (dist.is_available() and isinstance(group, DeviceMesh)):
        return group
    if group.ndim != 1:
        axes = ", ".join(map(str, group.mesh_dim_names or range(group.ndim)))
        raise ValueError(f"group is a mesh of {group.ndim} axes ({axes}): pass one of them, as in mesh['cp']")
    return group.get_group()


def place_of(group: Any) -> tuple[int, int]:
    """Return rank and size of a process group or a mesh of one axis, None for the group of all ranks.

    Raises
    ------
    RuntimeError
        If torch.distributed has not been initialised.
    ValueError
        If this process is not in the group.
    """
    group = group_of(group)
    if not (dist.is_available() and dist.is_initialized()):
        raise RuntimeError(
            "no process group: call torch.distributed.init_process_group first; torchrun starts processes"
        )
    rank = dist.get_rank(group)
    if rank < 0:
        raise ValueError(f"group={group}: this process is not one of its ranks")
    return rank, dist.get_world_size(group)


def all_gather(x: Tensor, out: Tensor, group: Any) -> Pending:
    """Gather x of all ranks into out, (ranks * len(x), ...), rank after rank; both contiguous."""
    return _start(lambda: _quiet(dist.all_gather_into_tensor, out, x, group), out, "all-gather", x)


def reduce_scatter(x: Tensor, group: Any) -> Pending:
    """Add x of all ranks, (ranks * rows, ...), and give each rank its rows of the sum."""
    out = x.new_empty(len(x) // dist.get_world_size(group), *x.shape[1:])
    return _start(lambda: _quiet(dist.reduce_scatter_tensor, out, x, group), out, "reduce-scatter", x)


def exchange(tensors: tuple[Tensor, ...], group: Any) -> Pending:
    """Send tensors to the next rank of the ring and receive the same from the one before."""
    rank, size = place_of(group)
    to, source = ((rank + step) % size for step in (1, -1))
    if group is not None:
        to, source = (dist.get_global_rank(group, r) for r in (to, source))
    received = tuple(torch.empty_like(x) for x in tensors)
    operations = [dist.P2POp(dist.isend, x, to, group) for x in tensors]
    operations += [dist.P2POp(dist.irecv, x, source, group) for x in received]
    return _start(lambda: dist.batch_isend_irecv(operations), received, "exchange with neighbours", tensors)


def _start(begin: Callable[[], Any], result: Any, what: str, keeps: Any) -> Pending:
    works = _told(begin, what)
    return Pending(result, tuple(works) if isinstance(works, list) else (works,), what, keeps)


def _quiet(function: Callable[..., Any], out: Tensor, x: Tensor, group: Any) -> Any:
    """Call a collective under the name that all supported versions of torch have."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return function(out, x, group=group, async_op=True)


def _told(call: Callable[[], Any], what: str) -> Any:
    try:
        return call()
    except (RuntimeError, dist.DistBackendError) as error:
        raise RankError(
            f"{what}: a rank of the group died or did not answer within the group's timeout "
            f"(init_process_group(timeout=...)); the backend says: {str(error).splitlines()[0]}"
        ) from error


@lru_cache(maxsize=256)
def _copy_on_device(data: bytes, dtype: str, device: torch.device) -> Tensor:
    with torch.inference_mode(False):  # a later call may want gradients through the same indices
        return torch.from_numpy(np.frombuffer(data, dtype).copy()).to(device)


def on_device(numbers: NDArray[Any], like: Tensor) -> Tensor:
    """Return indices or prefix sums on the device of a tensor; the same numbers are copied there once."""
    return _copy_on_device(numbers.tobytes(), numbers.dtype.str, like.device)


def filled(shape: tuple[int, ...], value: float, like: Tensor) -> Tensor:
    """Return a float32 tensor of one value on the device of another tensor."""
    return torch.full(shape, value, dtype=torch.float32, device=like.device)


@cache
def _function() -> Any:
    class ContextParallelAttention(torch.autograd.Function):
        """Attention whose `call` knows how to go forward and back."""

        @staticmethod
        def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, call: Any) -> Any:
            out, lse = call.forward(q, k, v)
            ctx.save_for_backward(q, k, v, out, lse)
            ctx.call = call
            ctx.mark_non_differentiable(lse)
            return out, lse

        @staticmethod
        def backward(ctx: Any, dout: Tensor, _: Tensor) -> Any:
            return *ctx.call.backward(dout, *ctx.saved_tensors), None

    return ContextParallelAttention


def with_gradients(call: Any, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return out and lse of ``call.forward(q, k, v)``; autograd goes back through ``call.backward``."""
    result: tuple[Tensor, Tensor] = _function().apply(q, k, v, call)
    return result

"""What ranks tell each other, through torch.distributed alone (NCCL on GPUs, gloo on CPUs).

Each function starts a transfer and returns something to wait for, so that a rank computes meanwhile.
`all_to_all` goes by copy engines where it can (kvlab/parallel/copy_engines.py), for they leave all
multiprocessors to attention. A rank that died, or that does not answer within the timeout of its process
group, ends the call on all others with `RankError`, which names the transfer; where a GPU waits for it, it
ends their processes.
"""

from __future__ import annotations

import datetime
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, lru_cache, partial
from importlib import import_module
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch.distributed.device_mesh import DeviceMesh

from kvlab.errors import RankError
from kvlab.ops.cuda.gathered import Arrival
from kvlab.parallel.copy_engines import mailbox

__all__ = [
    "Pending",
    "all_to_all",
    "check_tensors",
    "device_of",
    "exchange",
    "filled",
    "group_of",
    "joined",
    "largest",
    "on_device",
    "process_group",
    "put_sum",
    "random_inputs",
    "rank_and_size",
    "with_gradients",
]

Tensor = torch.Tensor


class Pending(NamedTuple):
    """A transfer under way: `result` holds its outcome once `wait` has returned it.

    The outcome of `all_to_all` is to be given back by `free` when all work that reads it is on the current
    stream.
    """

    result: Any
    works: list[Any]
    what: str
    keeps: Any  # tensors that the transfer reads
    free: Callable[[], None] = lambda: None
    is_over: bool = False  # once the host has waited, as on CPUs: on a GPU every stream that reads it waits
    arrival: Arrival | None = None  # where a kernel may wait for the outcome instead

    def wait(self) -> Any:
        """Return the outcome; on a GPU the current stream waits for it, not the host.

        Raises
        ------
        RankError
            If a rank of the group does not answer.
        """
        for work in self.works:
            _ending_in_rank_error(work.wait, self.what)
        if self.is_over:
            self.works.clear()
        return self.result


@contextmanager
def process_group(timeout: datetime.timedelta) -> Iterator[tuple[int, int, str]]:
    """Join the group of all ranks that torchrun started, and leave it: rank, ranks and the device to use."""
    rank, here = (int(os.environ.get(name, 0)) for name in ("RANK", "LOCAL_RANK"))
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.set_device(here)
    # Functions there have the group of all ranks as a default if it exists at their import: then its threads,
    # which are in C++, would outlive the group, and Python may abort when it stops them.
    import_module("torch.distributed.nn.functional")
    alone: dict[str, Any] = {"rank": 0, "world_size": 1, "store": torch._C._distributed_c10d.HashStore()}
    started = {} if "RANK" in os.environ else alone
    dist.init_process_group("nccl" if on_gpu else "gloo", timeout=timeout, **started)
    try:
        yield rank, dist.get_world_size(), f"cuda:{here}" if on_gpu else "cpu"
    finally:
        dist.destroy_process_group()


def random_inputs(shapes: Sequence[tuple[int, ...]], dtype: str, device: str) -> list[Tensor]:
    """Return normally distributed tensors, the same on every rank with a GPU of the same model."""
    generator = torch.Generator(device).manual_seed(0)
    kind = getattr(torch, dtype)
    return [torch.randn(shape, generator=generator, device=device).to(kind) for shape in shapes]


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


def rank_and_size(group: Any) -> tuple[int, int]:
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


def all_to_all(
    outgoing: Sequence[Sequence[Tensor]],
    incoming: Sequence[int],
    begins: Sequence[int],
    most: int,
    group: Any,
    what: str,
    width: int | None = None,
) -> Pending:
    """Send rows to every rank and take rows from every rank.

    Parameters
    ----------
    outgoing : sequence of sequences of tensors
        For each array, such as keys and values of equal shape, rows for each rank, maybe none.
    incoming : sequence of int
        Rows of each array that come from each rank.
    begins : sequence of int
        Where in the buffer of each rank this rank's rows begin.
    most : int
        Rows of the largest buffer of any rank.
    group : process group, or None
    what : str
        Its name in errors.
    width : int, optional
        Of the arrays' second axis so much is sent at a time by copy engines; all if it is not given.

    Returns
    -------
    Pending
        Of a buffer for each array that holds what came, rank after rank.
    """
    box = mailbox(outgoing[0][0], group, what)
    if box is not None:
        return Pending(
            *box.all_to_all(outgoing, incoming, begins, most, what, width or outgoing[0][0].shape[1])
        )
    rank, _ = rank_and_size(group)
    ends = np.cumsum(incoming).tolist()
    buffers, operations, keeps = [], [], []
    for pieces in outgoing:
        buffer = pieces[0].new_empty(ends[-1], *pieces[0].shape[1:])
        buffers.append(buffer)
        for other, (piece, end, rows) in enumerate(zip(pieces, ends, incoming, strict=True)):
            into = buffer[end - rows : end]
            if other == rank:
                into.copy_(piece)
                continue
            at = other if group is None else dist.get_global_rank(group, other)
            if len(piece):
                keeps.append(piece.contiguous())
                operations.append(dist.P2POp(dist.isend, keeps[-1], at, group))
            if rows:
                operations.append(dist.P2POp(dist.irecv, into, at, group))
    begin = partial(dist.batch_isend_irecv, operations) if operations else list
    return _start(begin, tuple(buffers), what, keeps)


def exchange(tensors: tuple[Tensor, ...], group: Any) -> Pending:
    """Send tensors to the next rank of the ring and receive the same from the one before."""
    rank, size = rank_and_size(group)
    to, source = ((rank + step) % size for step in (1, -1))
    if group is not None:
        to, source = (dist.get_global_rank(group, r) for r in (to, source))
    received = tuple(torch.empty_like(x) for x in tensors)
    operations = [dist.P2POp(dist.isend, x, to, group) for x in tensors]
    operations += [dist.P2POp(dist.irecv, x, source, group) for x in received]
    return _start(lambda: dist.batch_isend_irecv(operations), received, "exchange with neighbours", tensors)


def _start(begin: Callable[[], Any], result: Any, what: str, keeps: Any) -> Pending:
    works = _ending_in_rank_error(begin, what)
    return Pending(result, works, what, keeps, is_over=not result[0].is_cuda)


def _ending_in_rank_error(call: Callable[[], Any], what: str) -> Any:
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


def check_tensors(**tensors: Any) -> None:
    """Check what a rank sends before another one waits for it."""
    first = next(iter(tensors))
    for name, x in tensors.items():
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"{name} is a {type(x).__name__}: ranks exchange torch tensors alone")
        if not x.ndim:
            raise ValueError(f"{name} is one number: it must have tokens")
        like = tensors[first]
        if x.dtype != like.dtype or x.device != like.device:
            raise TypeError(
                f"{name} is {x.dtype} on {x.device}, {first} {like.dtype} on {like.device}: they must agree"
            )


def device_of(x: Any) -> torch.device:
    """Return where a tensor lies; a sequence of numbers lies on the host."""
    return x.device if isinstance(x, torch.Tensor) else torch.device("cpu")


def on_device(numbers: NDArray[Any], device: torch.device) -> Tensor:
    """Return indices or prefix sums on a device; the same numbers are copied there once."""
    return _copy_on_device(numbers.tobytes(), numbers.dtype.str, device)


def filled(shape: tuple[int, ...], value: float, like: Tensor) -> Tensor:
    """Return a float32 tensor of one value on the device of another tensor."""
    return torch.full(shape, value, dtype=torch.float32, device=like.device)


def joined(pieces: Sequence[Tensor], axis: int) -> Tensor:
    """Return pieces side by side: a single one as it is, else a copy."""
    return pieces[0] if len(pieces) == 1 else torch.cat(tuple(pieces), axis)


def put_sum(result: Tensor, x: Tensor, rows: slice, addend: Tensor) -> None:
    """Write x, with something added to some rows, into a tensor that may be of another dtype."""
    first, last, _ = rows.indices(len(x))
    if (first, last) == (0, len(x)):
        torch.add(x, addend, out=result)
        return
    torch.add(x[first:last], addend, out=result[first:last])
    for rest in (slice(0, first), slice(last, len(x))):
        if rest.start < rest.stop:
            result[rest] = x[rest]


@cache
def _function() -> Any:
    class ContextParallelAttention(torch.autograd.Function):
        """Attention whose `call` knows how to go forward and back."""

        @staticmethod
        def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, call: Any) -> Any:
            out, lse = call.forward(q, k, v)
            ctx.save_for_backward(q, k, v, out, lse)
            ctx.call = call
            ctx.set_materialize_grads(False)  # of lse, which has none
            ctx.mark_non_differentiable(lse)
            return out, lse

        @staticmethod
        def backward(ctx: Any, dout: Tensor, _: Tensor) -> Any:
            return *ctx.call.backward(dout.contiguous(), *ctx.saved_tensors), None  # it may be one number

    return ContextParallelAttention


def with_gradients(call: Any, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return out and lse of ``call.forward(q, k, v)``; autograd goes back through ``call.backward``."""
    result: tuple[Tensor, Tensor] = _function().apply(q, k, v, call)
    return result

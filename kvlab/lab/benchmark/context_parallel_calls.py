"""What the benchmark of context parallelism times: kvlab's calls on several ranks and on one, and peers."""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch.distributed.device_mesh import init_device_mesh

from kvlab import parallel
from kvlab.ops.attention import attention_varlen
from kvlab.ops.attention_backward import attention_varlen_backward
from kvlab.ops.cuda.gathered import Arrival
from kvlab.parallel.arguments import NO_WINDOW
from kvlab.parallel.collectives import Pending, on_device, random_inputs
from kvlab.parallel.copy_engines import mailbox
from kvlab.parallel.gathered import GatheredAttention
from kvlab.parallel.layout import Shard, zigzag_llama3_plan
from kvlab.parallel.parts import Options

__all__ = ["PEERS", "Case", "Contestant"]

PEERS = ("ring-flash-attn", "torch")


@dataclass(frozen=True)
class _Silent(GatheredAttention):
    """The forward of a call whose keys of other ranks are there before it begins."""

    buffers: tuple[Any, ...] = ()
    arrival: Arrival | None = None

    def gather(self, k: Any, v: Any, first: int, stride: int, width: int | None = None) -> Pending:
        heads = slice(0, min(stride, k.shape[1] - first))
        return Pending(tuple(x[:, heads] for x in self.buffers), [], "", None, arrival=self.arrival)


class Contestant(NamedTuple):
    """A call that is timed, and the context that it is to be made in."""

    call: Callable[[], Any]
    context: Callable[[], AbstractContextManager[Any]] = nullcontext


class Case:
    """One pattern of lengths on this rank, and what is timed of it; `options`: those of the command."""

    def __init__(
        self, lengths: tuple[int, ...], options: argparse.Namespace, rank: int, ranks: int, device: str
    ):
        heads_q, heads_kv = options.heads
        shapes = [(sum(lengths), heads, options.head_dim) for heads in (heads_q, heads_kv, heads_kv, heads_q)]
        whole = random_inputs(shapes, options.dtype, device)
        self.shard, self.options = Shard(lengths, rank, ranks), options
        self.cu = Shard(lengths, 0, 1, zigzag=False).cu_seqlens
        self.longest = max(lengths)
        *mine, self.dout = (parallel.extract_local(x, self.cu) for x in whole)
        self.mine, self.whole = [x.requires_grad_() for x in mine], whole
        self.plan = zigzag_llama3_plan(self.shard, True)
        self.device = device

    def together(self) -> Any:
        """Attention over all ranks."""
        size, (q, k, v) = self.shard.world_size, self.mine
        return parallel.zigzag_llama3_flash_attn_varlen_func(
            q, k, v, self.cu // size, self.cu, self.longest // size, self.longest, self.options.stride,
            causal=True, implementation=self.options.implementation,
        )  # fmt: skip

    def one_device(self, *, backward: bool) -> None:
        """The whole attention on this device."""
        q, k, v, dout = self.whole
        bounds = on_device(self.cu, q.device)
        sizes = (bounds, bounds, self.longest, self.longest)
        out, lse = attention_varlen(q, k, v, *sizes, causal=True, return_lse=True)
        if backward:
            attention_varlen_backward(dout, q, k, v, out, lse, *sizes, causal=True)

    def silent(self) -> Callable[[], Any]:
        """The forward without communication."""
        options = Options(None, NO_WINDOW, False, self.options.implementation)
        q, k, v = (x.detach() for x in self.mine)
        rows = int(self.plan.takes[self.shard.rank].sum())
        buffers = tuple(x[:rows].contiguous() for x in self.whole[1:3])
        counters, arrival = torch.zeros(self.shard.world_size, dtype=torch.int32, device=self.device), None
        if mailbox(k, None, "gather of keys and values"):  # so that the same kernels run
            arrival = Arrival(counters.data_ptr(), 0, k.shape[1])
        call = _Silent(self.plan, None, self.shard.rank, self.options.stride, options, buffers, arrival)

        def forward() -> Any:
            return counters, call.forward(q, k, v)

        return forward

    def gathers(self) -> None:
        """All gathers of a forward, and nothing else."""
        call = GatheredAttention(
            self.plan, None, self.shard.rank, self.options.stride, Options(None, NO_WINDOW, False)
        )
        k, v = (x.detach() for x in self.mine[1:])
        stride = call.forward_stride(k.shape[1])
        for first in range(0, k.shape[1], stride):
            one = call.gather(k, v, first, stride, call.stride)
            one.wait()
            one.free()

    def calls(self) -> dict[str, Contestant]:
        """What is timed, by name."""
        calls: dict[str, Callable[[], Any]] = {
            "one device, forward": lambda: self.one_device(backward=False),
            "forward": lambda: self.together().detach(),
            "one device, both": lambda: self.one_device(backward=True),
            "both": lambda: torch.autograd.grad(self.together(), self.mine, self.dout),
            "forward without communication": self.silent(),
            "gathers alone": self.gathers,
        }
        found = {name: Contestant(call) for name, call in calls.items()}
        if self.shard.world_size == 1:
            return found
        peers = self.options.peers
        if "ring-flash-attn" in peers and importlib.util.find_spec("ring_flash_attn"):
            self._add_peer(found, "ring-flash-attn", self._ring(), self.mine, self.dout)
        if "torch" in peers and self.device.startswith("cuda") and len(self.shard.lengths) == 1:
            batched = [x.detach().transpose(0, 1)[None].contiguous() for x in (*self.mine, self.dout)]
            leaves = [x.requires_grad_() for x in batched[:3]]
            attend, context = self._torch()
            self._add_peer(found, "torch", attend, leaves, batched[3], context)
        return found

    @staticmethod
    def _add_peer(
        found: dict[str, Contestant], name: str, attend: Any, leaves: Any, dout: Any,
        context: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:  # fmt: skip
        found[f"{name}, forward"] = Contestant(lambda: attend(*leaves).detach(), context)
        found[f"{name}, both"] = Contestant(
            lambda: torch.autograd.grad(attend(*leaves), leaves, dout), context
        )

    def _ring(self) -> Callable[..., Any]:
        """ring-flash-attn's zigzag ring over kvlab's attention."""
        from transformers import modeling_flash_attention_utils as utils

        from kvlab.integrations import flash_attn

        flash_attn.install()
        # transformers has dropped a name that ring-flash-attn 0.1.8 imports for an adapter that is not used.
        utils.__dict__.setdefault("is_flash_attn_greater_or_equal_2_10", None)
        ring = import_module("ring_flash_attn")
        if len(self.shard.lengths) == 1:
            one = ring.zigzag_ring_flash_attn_func
            return lambda *mine: one(*(x[None] for x in mine), causal=True)[0]
        size = self.shard.world_size
        cu, longest = on_device(self.cu // size, self.dout.device), self.longest // size
        return lambda *mine: ring.zigzag_ring_flash_attn_varlen_func(*mine, cu, longest, causal=True)

    def _torch(self) -> tuple[Callable[..., Any], Callable[[], AbstractContextManager[Any]]]:
        """torch's context_parallel over cuDNN, which gathers, and the context to call it in."""
        from torch.distributed.tensor.experimental._attention import context_parallel, set_rotate_method
        from torch.nn.attention import SDPBackend, sdpa_kernel

        set_rotate_method("allgather")
        mesh = init_device_mesh("cuda", (self.shard.world_size,))

        def attend(q: Any, k: Any, v: Any) -> Any:
            attention = torch.nn.functional.scaled_dot_product_attention  # which the context replaces
            return attention(q, k, v, is_causal=True, enable_gqa=True)

        @contextmanager
        def context() -> Iterator[None]:
            divided = torch.zeros(
                2 * self.shard.world_size, device=self.device
            )  # it wants something to divide
            with (
                context_parallel(mesh, buffers=[divided], buffer_seq_dims=[0]),
                sdpa_kernel(SDPBackend.CUDNN_ATTENTION),
            ):
                yield

        return attend, context

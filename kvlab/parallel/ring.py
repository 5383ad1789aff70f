"""Attention of a sequence over several ranks that passes keys and values round: ring and zigzag ring.

In step s rank r holds the keys of rank r - s, while those of the next step are under way. Partial results are
merged in float32. Backward passes dk and dv round with the keys they belong to, in float32: each rank adds
its part, and after the last step they are where they belong.

Memory beside the result: keys and values of two ranks, and backward their gradients in float32.

Source: Liu, Zaharia, Abbeel, "Ring Attention with Blockwise Transformers", arXiv:2310.01889, 2023.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvlab.parallel.collectives import exchange, filled
from kvlab.parallel.layout import Shard, ring_parts
from kvlab.parallel.parts import Options, add_gradients, attend, empty_result

__all__ = ["RingAttention"]


@dataclass(frozen=True)
class RingAttention:
    """Forward and backward of one call.

    Parameters
    ----------
    shard : Shard
        Tokens of this rank.
    group : process group, or None
    causal : bool
    options : Options
    """

    shard: Shard
    group: Any
    causal: bool
    options: Options

    def _sources(self) -> list[int]:
        """Whose keys a rank has in each step."""
        return [(self.shard.rank - step) % self.shard.world_size for step in range(self.shard.world_size)]

    def forward(self, q: Any, k: Any, v: Any) -> tuple[Any, Any]:
        """Return out, dtype of q, and lse of a rank's queries."""
        result = empty_result(q)
        held = k.contiguous(), v.contiguous()
        for step, source in enumerate(self._sources(), 1):
            pending = exchange(held, self.group) if step < self.shard.world_size else None
            attend(result, q, *held, ring_parts(self.shard, source, self.causal), self.options)
            held = pending.wait() if pending else held
        return result[0].to(q.dtype), result[1]

    def backward(self, dout: Any, q: Any, k: Any, v: Any, out: Any, lse: Any) -> tuple[Any, Any, Any]:
        """Return dq, dk and dv of a rank's tokens, dtype of q."""
        dq, dk, dv = (filled(tuple(x.shape), 0.0, x) for x in (q, k, v))
        held = k.contiguous(), v.contiguous()
        for step, source in enumerate(self._sources(), 1):
            pending = exchange(held, self.group) if step < self.shard.world_size else None
            parts = ring_parts(self.shard, source, self.causal)
            add_gradients((dq, dk, dv), (dout, q, out, lse, *held), parts, self.options)
            held = pending.wait() if pending else held
            if self.shard.world_size > 1:
                dk, dv = exchange((dk, dv), self.group).wait()
        return dq.to(q.dtype), dk.to(q.dtype), dv.to(q.dtype)

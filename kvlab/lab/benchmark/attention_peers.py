"""Public implementations of attention beside which kvlab is timed: torch's and FlashAttention 4.

On a GPU torch has two, that of cuDNN and FlashAttention 2. FlashAttention 4 is the package flash-attn-4; the
name `flash_attn` must be its own then, not kvlab's (`kvlab.integrations.flash_attn.install`).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

__all__ = ["Peer", "backward_of", "peers"]

Peer = Callable[..., Any]
"""(q, k, v, causal, deterministic) -> out; tensors (batch, tokens, heads, head_dim)."""


def peers(device: str) -> dict[str, Peer]:
    """Return the implementations on a kind of device, ``"cpu"`` or ``"cuda"``, by name.

    Examples
    --------
    >>> list(peers("cpu"))
    ['torch']
    """
    if device == "cpu":
        return {"torch": _torch(nullcontext)}
    from torch.nn.attention import SDPBackend, sdpa_kernel

    found = {
        "cudnn": _torch(lambda: sdpa_kernel(SDPBackend.CUDNN_ATTENTION)),
        "fa2": _torch(lambda: sdpa_kernel(SDPBackend.FLASH_ATTENTION)),
    }
    try:
        from flash_attn.cute import flash_attn_func  # type: ignore[import-not-found]
    except ImportError:
        return found

    def flash_attention_4(q: Any, k: Any, v: Any, causal: bool, deterministic: bool) -> Any:
        return flash_attn_func(q, k, v, causal=causal, deterministic=deterministic)[0]

    return found | {"fa4": flash_attention_4}


def _torch(context: Callable[[], AbstractContextManager[None]]) -> Peer:
    def attend(q: Any, k: Any, v: Any, causal: bool, deterministic: bool) -> Any:
        import torch

        if deterministic:
            raise NotImplementedError("torch's attention is deterministic by a setting of the process alone")
        with context():
            out = torch.nn.functional.scaled_dot_product_attention(
                q.transpose(1, 2),
                k.transpose(1, 2),
                v.transpose(1, 2),
                is_causal=causal,
                enable_gqa=q.shape[2] != k.shape[2],
            )
        return out.transpose(1, 2)

    return attend


def backward_of(
    peer: Peer, dout: Any, q: Any, k: Any, v: Any, causal: bool, deterministic: bool = False
) -> Callable[[], Any]:
    """Return what computes dq, dk and dv of a forward call, which it makes once."""
    import torch

    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out = peer(*leaves, causal, deterministic)
    return lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True)

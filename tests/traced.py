"""Public functions as torch.compile meets them in a program: calls of each, and what they must equal."""

from __future__ import annotations

from typing import Any

import torch

import kvlab
from kvlab.integrations import flash_attn, torch_grouped


def _attention(q: Any, k: Any, v: Any, scale: float) -> Any:
    return kvlab.attention(q[None], k[None], v[None], causal=True, scale=scale)


def _varlen(q: Any, k: Any, v: Any, scale: float) -> Any:
    bounds = _bounds(q)
    return kvlab.attention_varlen(q, k, v, bounds, _bounds(k), len(q), len(k), scale=scale, softcap=3 * scale)


def _into(q: Any, k: Any, v: Any, scale: float) -> Any:
    out, lse = (
        torch.zeros_like(q, dtype=torch.float32),
        torch.full(q.shape[1::-1], -torch.inf, device=q.device),
    )
    options = _bounds(q), _bounds(k), len(q), len(k)
    return kvlab.attention_varlen(q, k, v, *options, scale=scale, into=(out, lse))


def _gradients(q: Any, k: Any, v: Any, scale: float) -> Any:
    out, lse = kvlab.attention(q[None], k[None], v[None], return_lse=True, scale=scale)
    return kvlab.attention_backward(out, q[None], k[None], v[None], out, lse, scale=scale, deterministic=True)


def _lengths(q: Any, k: Any) -> dict[str, Any]:
    return {
        "cu_seqlens_q_groups": [_bounds(q)] * 2, "cu_seqlens_k": _bounds(k),
        "prefix_lens": [_bounds(k)[1:] - 3, _bounds(k)[1:]],
    }  # fmt: skip


def _grouped(q: Any, k: Any, v: Any, scale: float) -> Any:
    return kvlab.grouped_attention_varlen([q, 2 * q], k, v, scale=scale, **_lengths(q, k))


def _grouped_gradients(q: Any, k: Any, v: Any, scale: float) -> Any:
    outs, lses = kvlab.grouped_attention_varlen([q, q], k, v, scale=scale, return_lse=True, **_lengths(q, k))
    dq, dk, dv = kvlab.grouped_attention_varlen_backward(
        outs, [q, q], k, v, outs, lses, scale=scale, deterministic=True, **_lengths(q, k)
    )
    return *dq, dk, dv


def _merged(q: Any, k: Any, v: Any, scale: float) -> Any:
    parts = [kvlab.attention(q[None], x[None], v[None], return_lse=True, scale=scale) for x in (k, 2 * k)]
    return kvlab.merge_attention([out for out, _ in parts], [lse for _, lse in parts])


def _recorded_groups(q: Any, k: Any, v: Any, scale: float) -> Any:
    return torch_grouped.grouped_attention_varlen(
        [q, 2 * q], k, v, scale=scale, deterministic=True, **_lengths(q, k)
    )


def _flash_cache(q: Any, k: Any, v: Any, scale: float) -> Any:
    cache_k, cache_v = (torch.cat([x, torch.zeros_like(x)])[None] for x in (k, v))
    out = flash_attn.flash_attn_with_kvcache(
        q[None], cache_k, cache_v, k[None, :2], v[None, :2], cache_seqlens=len(k), softmax_scale=scale
    )
    return out, cache_k, cache_v


def _flash_pages(q: Any, k: Any, v: Any, scale: float) -> Any:
    pages = torch.arange(len(k) // 8 + 1, dtype=torch.int32, device=q.device)[None]
    of_pages = [torch.cat([x, x])[: 8 * pages.shape[1]].unflatten(0, (-1, 8)) for x in (k, v)]
    lengths = _bounds(q), _bounds(k), len(q), len(k)
    return flash_attn.flash_attn_varlen_func(q, *of_pages, *lengths, softmax_scale=scale, block_table=pages)


def _codec(q: Any, k: Any, v: Any, scale: float) -> Any:
    return kvlab.dequantize(kvlab.quantize(k, 4))


def _cache(q: Any, k: Any, v: Any, scale: float) -> Any:
    cache = kvlab.MixedPrecisionCache(
        num_layers=1, num_heads_q=q.shape[1], num_heads_kv=k.shape[1], head_dim=k.shape[2], budget=0.4,
        device=q.device.type, dtype=q.dtype,
    )  # fmt: skip
    out = cache.step(0, q[None], k[None], v[None], scale=scale)
    cache.reorder(torch.tensor([0]))
    return out, cache.attend(0, q[None, -1:], scale=scale), torch.tensor(cache.seqlen)


CALLS = {
    function.__name__[1:]: function
    for function in (
        _attention, _varlen, _into, _gradients, _grouped, _grouped_gradients, _merged, _recorded_groups,
        _flash_cache, _flash_pages, _codec, _cache,
    )
}  # fmt: skip


def _bounds(x: Any) -> Any:
    return torch.tensor([0, len(x)], dtype=torch.int32, device=x.device)


def _results(function: Any, tensors: list[Any], scale: float) -> list[Any]:
    found = function(*tensors, scale)
    found = list(found) if isinstance(found, list | tuple) else [found]
    if not found[0].requires_grad:
        return found
    loss = sum((x.float() ** 2).sum() for x in found)
    return [*(x.detach() for x in found), *torch.autograd.grad(loss, tensors)]


def assert_traced_alike(name: str, device: str, dtype: torch.dtype, **options: Any) -> None:
    """Compile a program with a call in its middle; run it with other lengths and scales, and compare."""
    call = CALLS[name]

    def program(q: Any, k: Any, v: Any, scale: float) -> Any:
        found = call(q + q, k, v + 1, scale)
        return [x * 2 for x in found] if isinstance(found, list | tuple) else found * 2

    torch._dynamo.reset()
    compiled = torch.compile(program, **options)
    generator = torch.Generator(device).manual_seed(0)
    for length, scale in ((24, 0.3), (31, 0.3), (31, 0.7), (40, 0.7)):
        shapes = (length, 4, 64), (length, 2, 64), (length, 2, 64)
        tensors = [torch.randn(x, generator=generator, device=device, dtype=dtype) for x in shapes]
        if name == "recorded_groups":
            tensors = [x.requires_grad_() for x in tensors]
        plain, made = (_results(x, tensors, scale) for x in (program, compiled))
        for a, b in zip(plain, made, strict=True):
            torch.testing.assert_close(b, a, atol=0, rtol=0)

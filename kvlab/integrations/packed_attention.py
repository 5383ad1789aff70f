"""The attention function that reads packed caches.

transformers passes the result of `Cache.update` to an attention function. For packed layers of a `KVLabCache`
this is a placeholder (packed_layer.py). "kvlab_packed" recognises it and lets the cache attend and store in
one step. Dense keys are treated as "sdpa" treats them.
"""

from __future__ import annotations

from typing import Any

from kvlab.errors import needs_extra
from kvlab.torch_compile import opaque

with needs_extra("hf", "kvlab.integrations.transformers"):
    import torch
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import sdpa_mask

    from kvlab.integrations.packed_layer import ATTENTION, PackedLayer, Placeholder

__all__ = ["packed_attention_forward", "register"]

UNKNOWN_TO_SDPA = ("s_aux", "sinks", "block_indices")
"""Arguments of attention functions that change the result and that "sdpa" ignores."""


def register() -> None:
    """Make the attention function known to transformers, under the name "kvlab_packed".

    Examples
    --------
    >>> register()
    >>> "kvlab_packed" in AttentionInterface().valid_keys()
    True
    """
    AttentionInterface.register(ATTENTION, packed_attention_forward)
    # Without a mask function transformers passes no mask at all, and padding would be attended.
    AttentionMaskInterface.register(ATTENTION, sdpa_mask)


@opaque
def packed_attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention as transformers calls it: packed for the layers of a `KVLabCache`, else like "sdpa".

    Parameters
    ----------
    module : torch.nn.Module
        The attention module that calls.
    query : (B, Hq, S, D) tensor
    key, value : (B, Hkv, T, D) tensors
        Keys already rotated; placeholders, if they come from a `KVLabCache`.
    attention_mask : (B, 1, S, T) bool tensor or None
        True: attend. None: causal.
    dropout, scaling, softcap, **kwargs
        As in `transformers`; "sdpa" has no `softcap`, here it works for dense keys, too.

    Returns
    -------
    out : (B, S, Hq, D) tensor
    weights : None

    Raises
    ------
    NotImplementedError
        If the model asks for what is not computed here.
    """
    if not isinstance(key, Placeholder):
        _refuse_unknown(kwargs)
        if softcap:
            _refuse_dropout(dropout)
            return _softcapped(query, key, value, attention_mask, scaling, softcap), None
        options = {"dropout": dropout, "scaling": scaling, **kwargs}
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    if kwargs or dropout or query.shape[2] > 1:
        _check_packed(module, key.layer, query, attention_mask, dropout, kwargs)
    if value is not key or key.pending is None:
        raise NotImplementedError(
            "layers that share keys with another layer need a transformers.DynamicCache, not a KVLabCache"
        )
    (k, v), key.pending = key.pending, None
    return key.layer.attend(query, k, v, attention_mask, scaling, softcap or 0.0), None


def _check_packed(
    module: torch.nn.Module,
    layer: PackedLayer,
    query: torch.Tensor,
    mask: torch.Tensor | None,
    dropout: float,
    kwargs: dict[str, Any],
) -> None:
    """Refuse what packed layers do not compute; a decode step of a plain model asks for none of it."""
    _refuse_unknown(kwargs)
    is_causal = kwargs.get("is_causal", getattr(module, "is_causal", True))
    window = kwargs.get("sliding_window") or layer.sliding_window
    _refuse(
        f"sliding_window={window} in a layer whose cache has {layer.sliding_window}",
        layer.is_sliding and window != layer.sliding_window,
    )
    _refuse("position_bias", kwargs.get("position_bias") is not None)
    _refuse("is_causal=False", mask is None and query.shape[2] > 1 and is_causal is False)
    _refuse("output_attentions=True", bool(kwargs.get("output_attentions")))
    _refuse_dropout(dropout)


def _refuse_dropout(dropout: float) -> None:
    _refuse(f"dropout={dropout}", dropout > 0, "call model.eval()")


def _refuse_unknown(kwargs: dict[str, Any]) -> None:
    for name in UNKNOWN_TO_SDPA:
        _refuse(name, kwargs.get(name) is not None)


def _refuse(
    name: str, given: bool, way_round: str = "use a transformers.DynamicCache and 'eager' attention"
) -> None:
    if given:
        raise NotImplementedError(
            f"the attention function {ATTENTION!r} does not compute {name}: {way_round}"
        )


def _softcapped(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float | None,
    softcap: float,
) -> torch.Tensor:
    """Dense attention with `softcap * tanh(score / softcap)`, which sdpa does not have; (B, S, Hq, D)."""
    (batch, heads, rows, dim), (heads_kv, keys) = query.shape, key.shape[1:3]
    grouped = query.reshape(batch, heads_kv, -1, rows, dim).float()
    scores = grouped @ key[:, :, None].float().mT * (dim**-0.5 if scaling is None else scaling)
    scores = softcap * torch.tanh(scores / softcap)
    if mask is None:
        mask = torch.ones(rows, keys, dtype=torch.bool, device=query.device).tril(keys - rows)
    else:
        mask = mask[:, :, None]
    weights = scores.masked_fill(~mask, -torch.inf).softmax(-1).nan_to_num()  # a row that sees nothing: 0
    out = (weights @ value[:, :, None].float()).reshape(batch, heads, rows, -1)
    return out.transpose(1, 2).to(query.dtype).contiguous()

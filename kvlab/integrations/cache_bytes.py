"""Bytes of the tensors that caches of transformers hold, whatever their class."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from kvlab.errors import needs_extra

with needs_extra("hf", "kvlab.integrations.transformers"):
    import torch

__all__ = ["layer_nbytes", "tensors"]


def layer_nbytes(layers: Iterable[Any]) -> int:
    """Bytes of all tensors that layers of a cache hold; one that several hold counts once.

    Examples
    --------
    >>> from transformers import DynamicCache
    >>> cache = DynamicCache()
    >>> k, v = cache.update(torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 3, 4), 0)
    >>> layer_nbytes(cache.layers)
    192
    """
    found = {id(tensor): tensor for layer in layers for tensor in tensors(vars(layer))}
    return sum(tensor.numel() * tensor.element_size() for tensor in found.values())


def tensors(value: Any) -> Iterator[torch.Tensor]:
    """Plain tensors inside attributes, containers and the tensor subclasses of quantisation libraries."""
    if isinstance(value, torch.Tensor):
        flatten = getattr(value, "__tensor_flatten__", None)
        if flatten is None:
            yield value
        else:
            for name in flatten()[0]:
                yield from tensors(getattr(value, name))
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors(item)

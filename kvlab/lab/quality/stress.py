"""Keys as some models have them: channels many times larger than others, and channels with a constant.

Both leave full precision as it is. Where a rotary pair of keys is multiplied by c and that of queries divided
by it, every product stays. A constant added to all keys behind RoPE moves all scores of a query alike, which
softmax does not see. The change is made where the model applies RoPE, so it holds for every cache.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from kvlab.errors import needs_extra

with needs_extra("hf", "kvlab.lab.quality.stress"):
    import torch
    from transformers import PreTrainedModel

__all__ = ["large_channels", "shifted_keys"]

_ROTATION = "apply_rotary_pos_emb"
Change = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


@contextmanager
def large_channels(model: PreTrainedModel, factors: Mapping[int, float], *, begin: int = 0) -> Iterator[None]:
    """Multiply rotary pairs of all keys and divide those of the queries, within a block.

    `factors` are by pair. The model's RoPE pairs channel i with channel i + head_dim / 2, as that of the
    Llama family does; of a model that applies it otherwise there is a NotImplementedError. Positions from
    `begin` on have the factors. From 1 on full precision changes, too, since later queries meet earlier keys
    without a factor: read both within the block.

    Examples
    --------
    >>> import torch
    >>> from kvlab.lab.quality.model import tiny_llama
    >>> model, ids = tiny_llama().model, torch.arange(20)[None]
    >>> with large_channels(model, {3: 45.0}):
    ...     changed = model(ids).logits
    >>> bool((changed - model(ids).logits).abs().max() < 1e-3)
    True
    """

    def change(
        q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        half = k.shape[-1] // 2
        if wrong := [pair for pair in factors if not 0 <= pair < half]:
            raise ValueError(f"factors: pairs {wrong} do not exist; heads of {2 * half} have 0 to {half - 1}")
        factor = torch.ones(len(positions), 2 * half, dtype=k.dtype, device=k.device)
        for pair, value in factors.items():
            factor[positions >= begin, pair] = value
            factor[positions >= begin, pair + half] = value
        return q / factor, k * factor

    with _changed(model, change):
        yield


@contextmanager
def shifted_keys(model: PreTrainedModel, channels: Sequence[int], constant: float) -> Iterator[None]:
    """Add a constant to some channels of all keys, behind RoPE, within a block.

    A model that applies RoPE in another way than the Llama family is a NotImplementedError.
    """

    def change(
        q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        shift = torch.zeros(k.shape[-1], dtype=k.dtype, device=k.device)
        shift[list(channels)] = constant
        return q, k + shift

    with _changed(model, change):
        yield


@contextmanager
def _changed(model: PreTrainedModel, change: Change) -> Iterator[None]:
    """Let the modules of a model's attention change queries and keys where they have applied RoPE."""
    attention = [module for module in model.modules() if hasattr(module, "q_proj")]
    sources: set[Any] = {sys.modules[type(module).__module__] for module in attention}
    if not sources or not all(hasattr(source, _ROTATION) for source in sources):
        raise NotImplementedError(
            f"{type(model).__name__} does not rotate its keys by a function {_ROTATION}; models of the Llama "
            f"family do"
        )
    past = 0

    def count(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        nonlocal past
        cache = kwargs.get("past_key_values")
        past = 0 if cache is None else int(cache.get_seq_length())

    def changing(rotate: Callable[..., Any]) -> Callable[..., Any]:
        def rotated(*args: Any, **kwargs: Any) -> Any:
            q, k = rotate(*args, **kwargs)
            return change(q, k, past + torch.arange(k.shape[-2], device=k.device))

        return rotated

    originals = {source: getattr(source, _ROTATION) for source in sources}
    hook = model.register_forward_pre_hook(count, with_kwargs=True)
    for source, rotate in originals.items():
        setattr(source, _ROTATION, changing(rotate))
    try:
        yield
    finally:
        hook.remove()
        for source, rotate in originals.items():
            setattr(source, _ROTATION, rotate)

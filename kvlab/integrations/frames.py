"""kvlab.measure_frames: measure the key frames of a transformers model on a text that it reads.

This module loads neither torch nor transformers before `measure_frames` is used.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kvlab.integrations.patching import replaced
from kvlab.integrations.quantized import cache_maker, quantized
from kvlab.integrations.reading import check_ids, read_chunks
from kvlab.ops.frame import FIRST, MIN_TOKENS
from kvlab.ops.key_frames import KeyFrames, frames_of_layer

if TYPE_CHECKING:
    import torch

__all__ = ["measure_frames"]


def measure_frames(model: Any, ids: torch.Tensor, *, narrow: bool = False) -> KeyFrames:
    """Take the key frames of a model from tokens that it reads.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        As for `kvlab.quantized`, in evaluation mode.
    ids : (batch, tokens) integer tensor
        Any text without padding, read in one call: 2,000 tokens of prose will do.
    narrow : bool
        For ladders without a width of 8 for keys: see `kvlab.ops.frame.key_mean`.

    Returns
    -------
    KeyFrames
        Of the layers that a `KVLabCache` packs; for its option `frames`.

    Raises
    ------
    TypeError, ValueError
        If an argument is not valid, the model is in training mode, or a row has fewer than 20 tokens.
    NotImplementedError
        As for `kvlab.quantized`.

    Examples
    --------
    >>> import kvlab, torch
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> config = LlamaConfig(vocab_size=99, hidden_size=64, num_hidden_layers=2, num_attention_heads=4,
    ...                      num_key_value_heads=2, intermediate_size=64)
    >>> model = LlamaForCausalLM(config).eval()
    >>> frames = kvlab.measure_frames(model, torch.arange(90)[None])
    >>> frames.k_mean.shape
    (2, 2, 16)
    >>> out = kvlab.read(model, torch.arange(90)[None], budget=None, bits=(2, 4), frames=frames)
    """
    check_ids(model, ids, None)
    if ids.shape[1] < FIRST + MIN_TOKENS:
        raise ValueError(
            f"ids has {ids.shape[1]} tokens a row; frames need {FIRST + MIN_TOKENS} or more, and are good "
            "from 2,000 on"
        )
    layers: list[tuple[NDArray[Any], ...]] = []

    def noted(step: Callable[..., Any]) -> Callable[..., Any]:
        def noted_step(number: int, q: Any, k: Any, v: Any, *rest: Any) -> Any:
            heads_last = [x.transpose(1, 2).float().cpu().numpy() for x in (q, k, v)]
            layers.append(frames_of_layer(*heads_last, narrow=narrow))
            return step(number, q, k, v, *rest)

        return noted_step

    # What is measured has the model's dtype; the attention of a GPU does not take float32.
    on_gpu = str(getattr(model, "device", "cpu")).startswith("cuda")  # what is no model is refused below
    dtype = "bfloat16" if on_gpu and str(model.dtype) == "torch.float32" else None
    with quantized(model, budget=None, bits=16, dtype=dtype):
        cache = cache_maker(model)()  # type: ignore[misc]
        with replaced(cache._shared, "step", noted):
            for _ in read_chunks(model, ids, cache, chunk=ids.shape[1], logits_from=ids.shape[1]):
                pass
    if not layers:
        raise NotImplementedError(
            f"{type(model).__name__} has no layer that is packed, so there are no frames"
        )
    return KeyFrames(*map(np.stack, zip(*layers, strict=True)))

"""kvlab.read and kvlab.perplexity: a model reads a text in parts, through a packed cache.

A model that reads a whole text in one call attends all of it exactly, since tokens are packed after the call.
The cost of a packed cache shows only when a text is read in parts: then all tokens but those of the running
part are read from their pages.

This module loads neither torch nor transformers before one of its functions is used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from inspect import signature
from typing import TYPE_CHECKING, Any

from kvlab.arguments import LONGEST, whole_number
from kvlab.errors import needs_extra
from kvlab.integrations.quantized import cache_maker, quantized

if TYPE_CHECKING:
    import torch
    from transformers import Cache
    from transformers.modeling_outputs import CausalLMOutputWithPast

    from kvlab.integrations.transformers import KVLabCache

__all__ = ["check_ids", "perplexity", "read", "read_chunks"]


def read(
    model: Any,
    ids: torch.Tensor,
    *,
    chunk: int = 64,
    attention_mask: torch.Tensor | None = None,
    **options: Any,
) -> CausalLMOutputWithPast:
    """Let a model read tokens in parts through a packed cache.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        As for `kvlab.quantized`, in evaluation mode.
    ids : (batch, tokens) integer tensor
    chunk : int
        Tokens of a part: these are attended exactly, all before them as they are packed.
    attention_mask : (batch, tokens) tensor of 0 and 1, optional
        0: padding, left or right. Positions are counted without it, as `generate` does.
    **options
        As for `kvlab.quantized` (`budget`, `bits`, ...). Inside such a block those of the block hold if none
        is given here. A fraction as budget is of `plan_length` tokens, 2,048 unless it is given: for a
        shorter text pass its length, else it has more bytes than the fraction says.

    Returns
    -------
    transformers.modeling_outputs.CausalLMOutputWithPast
        `logits`, (batch, tokens, vocabulary), where position i predicts token i + 1, and `past_key_values`,
        the `KVLabCache` that holds all tokens. For long texts take `perplexity`, or
        `kvlab.integrations.reading.read_chunks`, which keep the logits of one part only.

    Raises
    ------
    TypeError, ValueError
        If an argument is not valid, or the model is in training mode.
    BudgetError
        If the budget does not hold the tokens.

    Examples
    --------
    >>> import kvlab, torch
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> config = LlamaConfig(vocab_size=99, hidden_size=64, num_hidden_layers=2, num_attention_heads=4,
    ...                      num_key_value_heads=2, intermediate_size=64)
    >>> model = LlamaForCausalLM(config).eval()
    >>> out = kvlab.read(model, torch.arange(90)[None], chunk=32, budget=None, bits=(2, 4))
    >>> out.logits.shape, out.past_key_values.packed.seqlen
    (torch.Size([1, 90, 99]), 90)
    """
    with needs_extra("hf", "kvlab.read"):
        import torch
        from transformers.modeling_outputs import CausalLMOutputWithPast
    with _caches(model, options) as make_cache:
        mask = check_ids(model, ids, attention_mask)
        cache = make_cache()
        parts = read_chunks(model, ids, cache, chunk=chunk, attention_mask=mask)
        logits = torch.cat([logits for _, logits in parts], 1)
    return CausalLMOutputWithPast(logits=logits, past_key_values=cache)


def perplexity(
    model: Any,
    ids: torch.Tensor,
    *,
    chunk: int = 64,
    context: int = 1,
    attention_mask: torch.Tensor | None = None,
    **options: Any,
) -> float:
    """Perplexity of tokens for a model that reads them in parts through a packed cache.

    Parameters
    ----------
    model, ids, chunk, attention_mask, **options
        As for `read`; the last token is predicted and not read.
    context : int
        Number of first tokens of a row, padding not counted, that are read and not scored. What a packed
        cache costs grows with what is packed: score the second half of a text to see it.

    Returns
    -------
    float
        exp of the mean negative log-likelihood of all tokens that are scored.

    Raises
    ------
    TypeError, ValueError
        As for `read`, and if no token is left to be scored.
    BudgetError
        If the budget does not hold the tokens.

    Examples
    --------
    >>> import kvlab, torch
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> config = LlamaConfig(vocab_size=99, hidden_size=64, num_hidden_layers=2, num_attention_heads=4,
    ...                      num_key_value_heads=2, intermediate_size=64)
    >>> model = LlamaForCausalLM(config).eval()
    >>> ids = torch.arange(90)[None]
    >>> exact = kvlab.perplexity(model, ids, budget=None, bits=16)
    >>> 0.9 < kvlab.perplexity(model, ids, budget=None, bits=4) / exact < 1.1
    True
    """
    with needs_extra("hf", "kvlab.perplexity"):
        import torch
    context = whole_number(context, "context", 1)
    with _caches(model, options) as make_cache:
        mask = check_ids(model, ids, attention_mask)
        ids = ids.to(model.device)
        valid = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask.to(model.device).bool()
        scored = (valid & (valid.cumsum(1) > context))[:, 1:] & valid[:, :-1]
        if not scored.any():
            raise ValueError(
                f"ids has {tuple(ids.shape)} tokens, of which the first {context} of a row are context: "
                f"none is left to be scored"
            )
        total = torch.zeros((), dtype=torch.float64)
        parts = read_chunks(
            model,
            ids[:, :-1],
            make_cache(),
            chunk=chunk,
            attention_mask=None if mask is None else mask[:, :-1],
            logits_from=context - 1,
        )
        for begin, logits in parts:
            now = slice(begin, begin + logits.shape[1])
            if not scored[:, now].any():  # before `context` there may be logits of one token only
                continue
            targets = ids[:, 1:][:, now, None]
            likelihood = logits.float().log_softmax(-1).gather(-1, targets)[..., 0]
            total -= likelihood[scored[:, now]].double().sum().cpu()
    return float((total / scored.sum().cpu()).exp())


def read_chunks(
    model: Any,
    ids: torch.Tensor,
    cache: Cache,
    *,
    chunk: int = 64,
    attention_mask: torch.Tensor | None = None,
    logits_from: int = 0,
) -> Iterator[tuple[int, torch.Tensor]]:
    """Let a model read tokens in parts, and look at the logits of each part.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        With an attention function that reads the cache; for a `KVLabCache`, "kvlab_packed" or inside
        `kvlab.quantized`.
    ids : (batch, tokens) integer tensor
    cache : transformers.Cache
        Empty; holds all tokens of the parts so far.
    chunk, attention_mask
        As for `read`.
    logits_from : int
        Logits of parts that end at or before this position are not needed: the model makes those of one token
        there.

    Yields
    ------
    begin : int
        Position of the first token of the part.
    logits : (batch, tokens of the part, vocabulary) tensor

    Raises
    ------
    TypeError, ValueError
        If `chunk` is no whole number of at least 1.

    Examples
    --------
    ::

        with kvlab.quantized(model, budget=0.3):
            for begin, logits in read_chunks(model, ids, KVLabCache(model.config, budget=0.3)):
                print(begin, logits.argmax(-1))
    """
    chunk = whole_number(chunk, "chunk", 1)
    return _read_chunks(model, ids.to(model.device), cache, chunk, attention_mask, logits_from)


def _read_chunks(
    model: Any, ids: torch.Tensor, cache: Cache, chunk: int, mask: torch.Tensor | None, logits_from: int
) -> Iterator[tuple[int, torch.Tensor]]:
    import torch

    known, positions = signature(model.forward).parameters, None
    if mask is not None:
        mask = mask.to(model.device)
        positions = (mask.long().cumsum(1) - 1).clamp(min=0)
    for begin in range(0, ids.shape[1], chunk):
        end = min(begin + chunk, ids.shape[1])
        more: dict[str, Any] = {}
        if mask is not None and positions is not None:
            more["attention_mask"] = mask[:, :end]
            if "position_ids" in known:
                more["position_ids"] = positions[:, begin:end]
        if end <= logits_from and "logits_to_keep" in known:
            more["logits_to_keep"] = 1
        with torch.no_grad():  # not around the yield: the caller's own mode holds there
            logits = model(ids[:, begin:end], past_key_values=cache, use_cache=True, **more).logits
        yield begin, logits


@contextmanager
def _caches(model: Any, options: dict[str, Any]) -> Iterator[Callable[[], KVLabCache]]:
    """Let a model run on packed caches; yield what makes one, of the block around if no option is given."""
    make_cache = None if options else cache_maker(model)
    if make_cache is not None:
        yield make_cache
    else:
        with quantized(model, **options):
            yield cache_maker(model)  # type: ignore[misc]


def check_ids(model: Any, ids: Any, mask: Any) -> torch.Tensor | None:
    """Refuse what cannot be read; return the mask if it hides something."""
    import torch

    if model.training:
        raise ValueError("model is in training mode, where it may drop activations: call model.eval()")
    if not isinstance(ids, torch.Tensor) or ids.is_floating_point() or ids.dtype == torch.bool:
        kind = f"of {ids.dtype}" if isinstance(ids, torch.Tensor) else f"a {type(ids).__name__}"
        raise TypeError(
            f"ids must be a tensor of token numbers, not {kind}; of a tokenizer's result pass "
            f"ids=found['input_ids'], attention_mask=found['attention_mask']"
        )
    if ids.ndim != 2 or not ids.numel():
        raise ValueError(
            f"ids has shape {tuple(ids.shape)}; it must be (batch, tokens), both at least 1: ids[None] makes "
            f"a batch of one row"
        )
    # What is no model of transformers is refused where it is read.
    embeddings = model.get_input_embeddings() if hasattr(model, "get_input_embeddings") else None
    vocabulary, lowest, highest = (
        getattr(embeddings, "num_embeddings", LONGEST),
        int(ids.min()),
        int(ids.max()),
    )
    if lowest < 0 or highest >= vocabulary:
        raise ValueError(
            f"ids names token {lowest if lowest < 0 else highest}; the model's vocabulary has {vocabulary}, "
            f"0 to {vocabulary - 1}: take the tokenizer of this model"
        )
    if mask is None:
        return None
    if not isinstance(mask, torch.Tensor) or mask.shape != ids.shape:
        found = tuple(mask.shape) if isinstance(mask, torch.Tensor) else type(mask).__name__
        raise ValueError(f"attention_mask is {found}; it must be a tensor like ids, {tuple(ids.shape)}")
    if not ((mask == 0) | (mask == 1)).all():
        raise ValueError(f"attention_mask={mask} must be of 0 (padding) and 1")
    return None if mask.all() else mask

"""kvlab.quantized: five lines from a transformers model to a packed cache.

This module loads neither torch nor transformers before `quantized` is used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial, wraps
from inspect import signature
from typing import TYPE_CHECKING, Any, TypeVar

from kvlab.errors import needs_extra
from kvlab.integrations.patching import by_name, no_model, replaced
from kvlab.ladder import BITS, Bits

if TYPE_CHECKING:
    from kvlab.integrations.transformers import KVLabCache

__all__ = ["cache_maker", "quantized"]

Model = TypeVar("Model")


@contextmanager
def quantized(
    model: Model,
    budget: float | int | str | None = 0.35,
    *,
    bits: Bits = BITS,
    graph: bool = False,
    **options: Any,
) -> Iterator[Model]:
    """Let a model use packed caches inside a `with` block.

    Each call of `model.generate(...)` and of `model(...)` gets a fresh `KVLabCache`, or goes on with the one
    it is given as `past_key_values`; the cache is in what it returns. The model runs the attention function
    "kvlab_packed". All is undone at the end of the block.

    Tokens of one call attend each other exactly, and are packed after that. So the logits of one call that
    reads a whole text (teacher forcing) are those of full precision: to see what a packed cache costs, let
    the model read in parts, with `kvlab.read` or `kvlab.perplexity`.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        A decoder-only model that takes its attention function from `transformers.AttentionInterface`.
    budget, bits, **options
        As for `kvlab.integrations.transformers.KVLabCache`.
    graph : bool
        Replay decode steps from CUDA graphs (see `kvlab.integrations.decode_graph`), for models on a GPU:
        several times as fast where the host is what a step waits for. Best with `max_seqlen`.

    Raises
    ------
    TypeError, ValueError
        If `model` is no such model, or an option is not valid. Inside the block: if a call asks for no cache
        (`use_cache=False`), for gradients or for a cache of another class.
    NotImplementedError
        If the model does not take attention functions, or keeps no keys and values.

    Examples
    --------
    >>> import kvlab, torch
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> config = LlamaConfig(vocab_size=99, hidden_size=64, num_hidden_layers=2, num_attention_heads=4,
    ...                      num_key_value_heads=2, intermediate_size=64)
    >>> model = LlamaForCausalLM(config).eval()
    >>> with kvlab.quantized(model, budget="1MiB", bits=(2, 4, 8)):
    ...     out = model.generate(torch.tensor([[5, 3, 8]]), max_new_tokens=8, return_dict_in_generate=True)
    ...     with torch.no_grad():
    ...         same = model(torch.tensor([[5, 3, 8]]))
    >>> out.past_key_values.packed.budget_nbytes, same.past_key_values.packed.seqlen
    (1048576, 3)
    """
    with needs_extra("hf", "kvlab.quantized"):
        from transformers import PreTrainedModel

        from kvlab.integrations.transformers import KVLabCache
    if hasattr(model, "_orig_mod") or getattr(model, "_compiled_call_impl", None) is not None:
        raise TypeError(
            "model is compiled by torch.compile, which cannot trace the kernels of a packed cache: pass the "
            "model that was compiled (model._orig_mod), or load it again if model.compile() compiled it"
        )
    if not isinstance(model, PreTrainedModel) or not model.can_generate():
        raise no_model(model)
    if "past_key_values" not in signature(model.forward).parameters:
        raise NotImplementedError(
            f"{type(model).__name__} takes no past_key_values: it keeps states, not keys and values, so "
            f"there is nothing to pack; call it outside kvlab.quantized"
        )
    make_cache = partial(KVLabCache, model.config, budget=budget, bits=bits, **options)
    make_cache()  # an invalid option shows before anything is changed
    with ExitStack() as block:
        block.enter_context(_packed_attention(model))
        if graph:
            block.enter_context(_replayed_steps(model))
        block.enter_context(replaced(model, "generate", partial(_packed_generate, model, make_cache)))
        for part in _callable_parts(model):
            block.enter_context(replaced(part, "forward", partial(_packed_forward, part, make_cache)))
        yield model


def cache_maker(model: Any) -> Callable[[], KVLabCache] | None:
    """What makes the caches of a model inside a `quantized` block; None outside."""
    return getattr(getattr(model, "forward", None), "make_cache", None)


def _replayed_steps(model: Any) -> AbstractContextManager[None]:
    from kvlab.integrations.decode_graph import replayed_steps

    if model.device.type != "cuda":
        raise ValueError(f"graph=True replays steps on a GPU, but the model is on {model.device}")
    return replayed_steps(model)


def _callable_parts(model: Any) -> list[Any]:
    """The model and the parts without its head, which callers of hidden states call by themselves."""
    found = {id(part): part for part in (model, model.base_model, model.get_decoder()) if part is not None}
    return [part for part in found.values() if "past_key_values" in signature(part.forward).parameters]


def _packed_forward(
    model: Any, make_cache: Callable[[], KVLabCache], forward: Callable[..., Any]
) -> Callable[..., Any]:
    """Return the forward pass of a model, with a packed cache where none is given."""
    parameters = signature(forward)

    @wraps(forward)
    def packed_forward(*args: Any, **kwargs: Any) -> Any:
        given = by_name(parameters, args, kwargs)
        _refuse_no_cache(given.get("use_cache"))
        _refuse_gradients(model)
        cache = _checked(given.get("past_key_values"))
        if cache is None:
            cache = make_cache()
        before = cache.packed_length
        out = forward(**{**given, "past_key_values": cache, "use_cache": True})
        if cache.packed_length == before is not None:
            raise RuntimeError(
                f"{type(model).__name__} stored nothing in the cache it was given, so its result is that of "
                f"full precision: call it outside kvlab.quantized"
            )
        return out

    packed_forward.make_cache = make_cache  # type: ignore[attr-defined]
    return packed_forward


def _packed_generate(
    model: Any, make_cache: Callable[[], KVLabCache], generate: Callable[..., Any]
) -> Callable[..., Any]:
    """Return `model.generate` with a packed cache where none is given."""

    @wraps(generate)
    def packed_generate(inputs: Any = None, generation_config: Any = None, *args: Any, **kwargs: Any) -> Any:
        settings = generation_config or model.generation_config
        _refuse_no_cache(kwargs.get("use_cache", settings.use_cache))
        _refuse_other_kinds(kwargs.get("cache_implementation") or settings.cache_implementation)
        cache = _checked(kwargs.pop("past_key_values", None))
        if cache is None:
            cache = make_cache()
            if getattr(settings, "is_assistant", False):  # what transformers does with a cache of its own
                cache.activate_past_recording()  # type: ignore[no-untyped-call]
        return generate(inputs, generation_config, *args, past_key_values=cache, **kwargs)

    return packed_generate


def _refuse_no_cache(use_cache: bool | None) -> None:
    if use_cache is False:
        raise ValueError(
            "use_cache=False leaves nothing to quantise: leave it out, or call the model outside "
            "kvlab.quantized"
        )


def _refuse_other_kinds(implementation: str | None) -> None:
    if implementation not in (None, "hybrid"):  # "hybrid" is a default of old checkpoints that none means
        raise ValueError(
            f"cache_implementation={implementation!r} names a cache of transformers, and kvlab.quantized "
            f"brings its own: leave it out, or generate outside kvlab.quantized"
        )


def _refuse_gradients(model: Any) -> None:
    import torch

    if torch.is_grad_enabled() and any(parameter.requires_grad for parameter in model.parameters()):
        raise ValueError(
            "this call would record gradients, which a packed cache does not have: call the model under "
            "torch.no_grad() or torch.inference_mode(), or train it outside kvlab.quantized"
        )
    if model.training and any(getattr(part, "gradient_checkpointing", False) for part in model.modules()):
        raise ValueError("in training mode gradient checkpointing takes the cache away: call model.eval()")


def _checked(cache: Any) -> KVLabCache | None:
    """Refuse a cache that is given and is not packed."""
    from kvlab.integrations.transformers import KVLabCache

    if cache is not None and not isinstance(cache, KVLabCache):
        raise TypeError(
            f"past_key_values is a {type(cache).__name__}; inside kvlab.quantized pass a KVLabCache, or none"
        )
    return cache


@contextmanager
def _packed_attention(model: Any) -> Iterator[None]:
    """Let a model run the attention function of packed caches inside a `with` block."""
    from kvlab.integrations.transformers import ATTENTION

    modules = [module for module in model.modules() if hasattr(module, "config")]
    before = [(config, config._attn_implementation) for module in modules for config in _tree(module.config)]
    try:
        model.set_attn_implementation(ATTENTION)  # warns and does nothing where a model cannot
        if model.config.get_text_config(decoder=True)._attn_implementation != ATTENTION:
            raise NotImplementedError(
                f"{type(model).__name__} does not take its attention function from "
                f"transformers.AttentionInterface; use a transformers.QuantizedCache"
            )
        yield
    finally:
        for config, name in before:
            config._attn_implementation = name


def _tree(config: Any) -> Iterator[Any]:
    """Yield a configuration and those inside it, outer ones first: setting one sets those inside it."""
    yield config
    for name in config.sub_configs:
        if (inner := getattr(config, name, None)) is not None:
            yield from _tree(inner)

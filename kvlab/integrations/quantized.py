"""kvlab.quantized: five lines from a transformers model to a packed cache.

This module loads neither torch nor transformers before `quantized` is used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial, wraps
from typing import TYPE_CHECKING, Any, TypeVar

from kvlab.errors import needs_extra

if TYPE_CHECKING:
    from kvlab.cache.ladder import Bits

__all__ = ["quantized"]

Model = TypeVar("Model")


@contextmanager
def quantized(
    model: Model,
    *,
    budget: float | int | str | None = 0.35,
    bits: Bits = (2, 3, 4, 8),
    graph: bool = False,
    **options: Any,
) -> Iterator[Model]:
    """Let `model.generate` use a packed cache inside a `with` block.

    Each call of `generate` gets a fresh `KVLabCache`, or goes on with the one it is given as
    `past_key_values`. The model runs the attention function "kvlab_packed". Both are undone at the end of the
    block. Code that calls `model(...)` itself passes a `KVLabCache` as `past_key_values`.

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
        If `model` is no such model, or an option is not valid.
    NotImplementedError
        If the model does not take attention functions.

    Examples
    --------
    >>> import kvlab, torch
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> config = LlamaConfig(vocab_size=99, hidden_size=64, num_hidden_layers=2, num_attention_heads=4,
    ...                      num_key_value_heads=2, intermediate_size=64)
    >>> model = LlamaForCausalLM(config).eval()
    >>> with kvlab.quantized(model, budget="1MiB", bits=(2, 4, 8)):
    ...     out = model.generate(torch.tensor([[5, 3, 8]]), max_new_tokens=8, return_dict_in_generate=True)
    >>> out.past_key_values.packed.budget_nbytes
    1048576
    """
    with needs_extra("hf", "kvlab.quantized"):
        from transformers import PreTrainedModel

        from kvlab.integrations.transformers import KVLabCache
    if not isinstance(model, PreTrainedModel) or not model.can_generate():
        raise TypeError(f"model must be a transformers model that generates, not {type(model)}")
    make_cache = partial(KVLabCache, model.config, budget=budget, bits=bits, **options)
    make_cache()  # an invalid option shows before anything is changed
    with _packed_attention(model), _replayed_steps(model) if graph else nullcontext():
        before = vars(model).get("generate")  # set on the model itself inside another such block
        model.generate = _packed_generate(model, make_cache)  # type: ignore[assignment]
        try:
            yield model
        finally:
            del model.generate
            if before is not None:
                model.generate = before


def _replayed_steps(model: Any) -> AbstractContextManager[None]:
    from kvlab.integrations.decode_graph import replayed_steps

    if model.device.type != "cuda":
        raise ValueError(f"graph=True replays steps on a GPU, but the model is on {model.device}")
    return replayed_steps(model)


def _packed_generate(model: Any, make_cache: Callable[[], Any]) -> Callable[..., Any]:
    """Return `model.generate` with a packed cache where none is given."""
    from kvlab.integrations.transformers import KVLabCache

    generate = model.generate

    @wraps(generate)
    def packed_generate(inputs: Any = None, generation_config: Any = None, *args: Any, **kwargs: Any) -> Any:
        settings = generation_config or model.generation_config
        if kwargs.get("use_cache", settings.use_cache) is False:
            raise ValueError("use_cache=False leaves nothing to quantise: generate outside kvlab.quantized")
        cache = kwargs.pop("past_key_values", None)
        if cache is None:
            cache = make_cache()
            if getattr(settings, "is_assistant", False):  # what transformers does with a cache of its own
                cache.activate_past_recording()
        elif not isinstance(cache, KVLabCache):
            raise TypeError(
                f"past_key_values is a {type(cache).__name__}; inside kvlab.quantized pass a KVLabCache"
            )
        return generate(inputs, generation_config, *args, past_key_values=cache, **kwargs)

    return packed_generate


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

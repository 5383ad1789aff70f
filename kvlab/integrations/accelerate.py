"""kvlab.accelerate: `generate()` of a transformers model, with a `kvlab.engine.Decoder` for its tokens.

transformers still does all that surrounds a token (prompts, processors of logits, sampling, stops,
streamers). Inside `generate` a decoder does the forward pass of the model: it takes the columns of a padded
batch, leaves padding out and returns logits of the newest token. Keys and values lie in the decoder; the
cache that transformers passes round knows the columns alone. This module loads neither torch nor transformers
before it is used.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial, wraps
from inspect import signature
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from kvlab.engine.decoder import Decoder
from kvlab.engine.options import MAX_ROWS, check_max_seqlen
from kvlab.engine.weights import DTYPES, Weights, from_model
from kvlab.errors import needs_extra
from kvlab.integrations.patching import by_name, no_model, replaced

__all__ = ["accelerate"]

Model = TypeVar("Model")

_KNOWN = {"input_ids", "attention_mask", "position_ids", "past_key_values", "use_cache", "return_dict",
          "logits_to_keep"}  # fmt: skip
_REORDERS, _TAKES_BACK = "a decoder cannot move its rows", "a decoder cannot take tokens back"
_REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "num_beams": ((1,), _REORDERS),
    "constraints": ((), _REORDERS),
    "force_words_ids": ((), _REORDERS),
    "penalty_alpha": ((0.0,), _REORDERS),
    "assistant_model": ((), _TAKES_BACK),
    "assistant_early_exit": ((), _TAKES_BACK),
    "prompt_lookup_num_tokens": ((), _TAKES_BACK),
    "use_mtp": ((False,), _TAKES_BACK),
    "is_assistant": ((False,), _TAKES_BACK),
    "dola_layers": ((), "a decoder gives logits of the last layer alone"),
    "output_attentions": ((False,), "a decoder gives logits alone"),
    "output_hidden_states": ((False,), "a decoder gives logits alone"),
    "guidance_scale": ((1, 1.0), "a decoder holds one batch"),
    "prefill_chunk_size": ((), "a decoder cuts prompts itself"),
    "cache_implementation": (("hybrid",), "keys and values lie in the decoder"),
    "use_cache": ((True,), "keys and values lie in the decoder"),
    "custom_generate": ((), "greedy search and sampling are supported"),
}
"""Settings of `generate` that are refused: values that mean nothing, and the reason."""

_STOPS = ("eos_token_id", "stop_strings", "stopping_criteria", "max_time")
"""Settings of `generate` that may end a text before `max_new_tokens`."""


@contextmanager
def accelerate(model: Model, *, max_seqlen: int | None = None) -> Iterator[Model]:
    """Let `generate()` of a model run on `kvlab.engine.Decoder` inside a `with` block.

    Greedy search and sampling, 1 to 16 rows, padding on the left. A result is that of the model within
    rounding; logits are float32. The cache in what `generate` returns goes on with a further turn, until
    another call of `generate` begins a text of its own. Calls `model(...)` are as outside.

    Weights are packed once, at the beginning of the block, and the model keeps its own: a block takes as much
    memory on the host as the model has weights, and on a GPU as much there, too. Keys and values take
    ``4 * layers * heads_kv * head_dim`` bytes a row and token of `max_seqlen` on a GPU. When the number of
    rows changes, the GPU gets both again. Weights that change inside the block are not seen.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        GPT-NeoX (Pythia), Llama (SmolLM2), Mistral, Qwen2 or Qwen3 with a head for causal language, in
        float16 or bfloat16, in evaluation mode, on a CPU or a GPU of compute capability 8.0 or more.
    max_seqlen : int, optional
        Tokens that a row may have; by default what the model is made for, up to 4,096.

    Raises
    ------
    TypeError, ValueError
        If an argument is none of those. In `generate`: if tokens are no tensor, a text is too long, its
        padding is not on the left, or the cache is none that can go on.
    NotImplementedError
        If the engine does not compute the model; the message names the piece. In `generate`: for beams,
        assistants and other settings that a decoder does not have, and more than 16 rows.

    Examples
    --------
    >>> import kvlab, torch
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> config = LlamaConfig(vocab_size=99, hidden_size=64, num_hidden_layers=2, num_attention_heads=2,
    ...                      num_key_value_heads=1, intermediate_size=64)
    >>> model = LlamaForCausalLM(config).eval().to(torch.bfloat16)
    >>> with kvlab.accelerate(model, max_seqlen=64):
    ...     out = model.generate(torch.tensor([[5, 3, 8]]), max_new_tokens=8, eos_token_id=None)
    >>> out.shape
    torch.Size([1, 11])
    """
    with needs_extra("hf", "kvlab.accelerate"):
        from transformers import PreTrainedModel
    if not isinstance(model, PreTrainedModel) or not model.can_generate():
        raise no_model(model)
    decoders = _Decoders(model, max_seqlen)
    with replaced(model, "generate", partial(_decoded_generate, model, decoders)):
        yield model


class _Decoders:
    """The packed weights of a model, and the decoder of the batch that came last."""

    def __init__(self, model: Any, max_seqlen: int | None) -> None:
        weights = from_model(model)  # refuses by name what the engine does not compute
        _check_model(model)
        self.max_seqlen = check_max_seqlen(max_seqlen, weights.geometry)
        self.max_positions = weights.geometry.max_positions
        self._layers, head = tuple(weights.layers), weights.head()
        self._weights: Weights = dataclasses.replace(weights, head=lambda: head)
        self._device = "cpu" if model.device.type == "cpu" else f"cuda:{model.device.index or 0}"
        self._decoder: Decoder | None = None
        self._holder: Any = None

    def of(self, holder: Any, rows: int) -> Decoder:
        """The decoder with the tokens of a cache; an empty cache takes it over."""
        if holder.get_seq_length():
            if self._holder is not holder or self._decoder is None:
                raise ValueError(
                    "past_key_values: another call of generate has begun a text since, and the decoder has "
                    "that one; leave past_key_values out and pass the whole text"
                )
            return self._decoder
        if rows > MAX_ROWS:
            raise NotImplementedError(
                f"{rows} rows: a decoder has 1 to {MAX_ROWS}; generate in parts, or outside kvlab.accelerate"
            )
        self._holder = None
        if self._decoder is None or self._decoder.batch != rows:
            self._decoder = None  # its memory is needed
            weights = dataclasses.replace(self._weights, layers=iter(self._layers))
            self._decoder = Decoder(weights, batch=rows, max_seqlen=self.max_seqlen, device=self._device)
        self._decoder.reset()
        self._holder = holder
        return self._decoder


def _check_model(model: Any) -> None:
    """Refuse what a decoder would compute otherwise than the model; its architecture is known."""
    if model.training:
        raise ValueError("model is in training mode, in which it drops numbers: call model.eval() first")
    kinds = {str(one.dtype).removeprefix("torch.") for one in model.parameters()}
    if len(kinds) > 1 or not kinds <= set(DTYPES):
        raise NotImplementedError(
            f"weights are {', '.join(sorted(kinds))}: a decoder has weights of one 16-bit type, which would "
            "change the results; load the model with dtype=torch.float16 or torch.bfloat16"
        )
    devices = sorted({str(one.device) for one in model.parameters()})
    if len(devices) > 1 or not devices[0].startswith(("cpu", "cuda")):
        raise NotImplementedError(f"the model lies on {', '.join(devices)}: put it on one GPU, or on the CPU")


def _decoded_generate(model: Any, decoders: _Decoders, generate: Callable[..., Any]) -> Callable[..., Any]:
    """Return `model.generate` with the forward pass of a decoder."""
    parameters, kind = signature(generate), _cache_class()

    @wraps(generate)
    def decoded_generate(*args: Any, **kwargs: Any) -> Any:
        given = by_name(parameters, args, kwargs)
        _check_ids(given)
        _refuse_settings(model, given)
        if (longest := _longest_row(model, given)) > decoders.max_seqlen:
            raise _too_long(longest, decoders.max_seqlen, decoders.max_positions)
        held = given.get("past_key_values")
        if held is None:
            held = kind(decoders)
        elif not isinstance(held, kind) or held.decoders is not decoders:
            raise TypeError(
                f"past_key_values is a {type(held).__name__}; inside kvlab.accelerate pass what generate has "
                "returned in the same block, or none. Blocks do not nest, nor with those of kvlab.quantized"
            )
        held.begin()
        with replaced(model, "forward", partial(_decoded_forward, held)):
            return generate(**{**given, "past_key_values": held})

    return decoded_generate


def _check_ids(given: dict[str, Any]) -> None:
    """Name the argument where transformers would miss an attribute of a tensor."""
    from torch import Tensor

    for name in ("inputs", "input_ids"):
        ids = given.get(name)
        if ids is not None and not isinstance(ids, Tensor):
            raise TypeError(
                f"{name} is a {type(ids).__name__}; generate of transformers takes a tensor of token "
                "numbers, (rows, tokens): torch.tensor([ids]), or what a tokenizer gives with "
                "return_tensors='pt' and, for rows of several lengths, padding_side='left'"
            )


def _setting(model: Any, given: dict[str, Any], name: str) -> Any:
    """A setting of a call of `generate`, from wherever it comes; None: there is none."""
    value = given.get(name)
    for source in (given.get("generation_config"), model.generation_config):
        value = getattr(source, name, None) if value is None else value
    return value


def _longest_row(model: Any, given: dict[str, Any]) -> int:
    """Tokens that the longest row will have read, where that is certain before the first; 0: it is not."""
    new, mask = _setting(model, given, "max_new_tokens"), given.get("attention_mask")
    ids = given.get("input_ids") if given.get("inputs") is None else given["inputs"]
    stops = [name for name in _STOPS if name not in given or given[name] is not None]
    if ids is None or ids.ndim != 2 or not isinstance(new, int) or new < 1:
        return 0
    if any(_setting(model, given, name) is not None for name in stops):
        return 0
    if mask is not None and mask.shape == ids.shape:
        columns = int((mask != 0).sum(1).max()) if len(mask) else 0
    else:
        padding = _setting(model, given, "pad_token_id")
        columns = 0 if padding is not None and bool((ids == padding).any()) else ids.shape[1]
    return columns + new - 1 if columns else 0


def _refuse_settings(model: Any, given: dict[str, Any]) -> None:
    for name, (harmless, reason) in _REFUSED.items():
        value = _setting(model, given, name)
        if value is not None and not any(value == one for one in harmless):
            shown = type(value).__name__ if name == "assistant_model" else repr(value)
            raise NotImplementedError(
                f"{name}={shown}: {reason}; leave it out, or generate outside kvlab.accelerate"
            )


def _decoded_forward(held: Any, forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return what `generate` calls instead of the model: logits of each row's newest token."""
    from transformers.modeling_outputs import CausalLMOutputWithPast

    parameters = signature(forward)

    @wraps(forward)
    def decoded_forward(*args: Any, **kwargs: Any) -> Any:
        given = by_name(parameters, args, kwargs)
        used = [name for name, value in given.items() if value is not None and value is not False]
        if unknown := sorted(set(used) - _KNOWN):
            raise NotImplementedError(
                f"{', '.join(unknown)}: a decoder takes token numbers, masks and positions alone; leave it "
                "out, or generate outside kvlab.accelerate"
            )
        another_text = given.get("past_key_values") is not held
        if another_text:
            raise NotImplementedError(
                "a processor of generate calls the model on a text of its own: generate outside "
                "kvlab.accelerate"
            )
        logits = held.read(given["input_ids"], given.get("attention_mask"), given.get("position_ids"))
        return CausalLMOutputWithPast(logits=logits, past_key_values=held)

    return decoded_forward


def _too_long(longest: int, max_seqlen: int, most: int) -> ValueError:
    advice = (
        f"enter kvlab.accelerate with max_seqlen up to {most}, or generate outside"
        if max_seqlen < most
        else "the model takes no more, so generate fewer"
    )
    return ValueError(f"max_seqlen={max_seqlen}: a row would have {longest} tokens; {advice}")


class _Columns:
    """What transformers passes round for the tokens of a decoder: the columns that it has read."""

    def __init__(self, decoders: _Decoders) -> None:
        self.decoders = decoders
        self._seen: NDArray[np.bool_] = np.zeros((0, 0), np.bool_)  # (rows, columns), False: padding
        self._goes_on = False

    def __repr__(self) -> str:
        return "DecoderCache: {} rows, {} columns".format(*self._seen.shape)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Columns so far, padding included."""
        return int(self._seen.shape[1])

    def begin(self) -> None:
        """Know that what comes next is the caller's: later tokens of a call of generate are its own."""
        self._goes_on = False

    def read(self, ids: Any, mask: Any, positions: Any) -> Any:
        """Take new columns, (rows, columns), through the decoder; logits, (rows, 1, vocabulary)."""
        import torch

        past, (rows, new) = self.get_seq_length(), ids.shape
        if self._goes_on and new == 1 and past:  # mask and positions of transformers itself
            decoder = self.decoders.of(self, rows)
            valid = np.concatenate([self._seen, np.ones((rows, 1), np.bool_)], 1)
            keep, longest = valid[:, past:], int(decoder.lengths.max()) + 1
        else:
            valid = self._checked(rows, new, mask, positions)
            decoder = self.decoders.of(self, rows)
            keep, longest = valid[:, past:], int(valid.sum(1).max())
        if longest > decoder.max_seqlen:
            raise _too_long(longest, decoder.max_seqlen, decoder.geometry.max_positions)
        numbers = ids.cpu().numpy()
        of_rows = [row[of_row] for row, of_row in zip(numbers, keep, strict=True)]
        if ids.device.type == "cuda" and decoder.device != "cpu":
            logits = decoder.prefill_tensor(of_rows).to(ids.device)
        else:
            logits = torch.from_numpy(decoder.prefill(of_rows)).to(ids.device)
        self._seen, self._goes_on = valid, True
        return logits[:, None]

    def _checked(self, rows: int, new: int, mask: Any, positions: Any) -> NDArray[np.bool_]:
        """Columns with the new ones, False where there is padding."""
        past = self.get_seq_length()
        valid = np.ones((rows, past + new), np.bool_) if mask is None else mask.cpu().numpy() != 0
        if valid.shape != (rows, past + new) or (past and not np.array_equal(valid[:, :past], self._seen)):
            raise ValueError(
                f"attention_mask must be that of the {past} columns so far, then {new} new ones, for "
                f"{len(self._seen) if past else rows} rows; it is {valid.shape}, or the old ones differ"
            )
        if not new:
            raise ValueError("input_ids has rows without a token; each row is at least one token")
        if not valid[:, -1].all():
            raise ValueError("attention_mask must end with 1 in every row: pad on the left")
        counted = (valid.cumsum(1) - 1)[:, past:]
        keep = valid[:, past:]
        if positions is not None and (positions.cpu().numpy() != counted)[keep].any():
            raise ValueError("position_ids must count the tokens of each row, as generate does: leave it out")
        return valid

    def reset(self) -> None:
        """Forget all tokens."""
        self._seen = np.zeros((0, 0), np.bool_)

    def _refused(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(
            "keys and values lie in a Decoder, which reads and generates alone: pass this cache to "
            "generate inside its kvlab.accelerate block, or call the model without it"
        )

    update = crop = reorder_cache = batch_repeat_interleave = batch_select_indices = _refused


@cache
def _cache_class() -> Any:
    from transformers.cache_utils import Cache

    class DecoderCache(_Columns, Cache):
        """`_Columns` as a cache of transformers; what the two have in common is of `_Columns`."""

        def __init__(self, decoders: _Decoders) -> None:
            Cache.__init__(self, layers=[])
            _Columns.__init__(self, decoders)

    return DecoderCache

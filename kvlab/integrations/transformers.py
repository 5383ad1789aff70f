"""A transformers.Cache that stays packed.

Layers with full attention and with sliding windows are packed and share one `MixedPrecisionCache`
(packed_layer.py). The attention function that reads it is in packed_attention.py; padding.py reads padding
from masks. Other layers (linear or chunked attention) keep their cache of transformers.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from typing import Any

from kvlab.arguments import whole_number
from kvlab.cache.cache import MixedPrecisionCache
from kvlab.errors import needs_extra
from kvlab.ladder import BITS, Bits

with needs_extra("hf", "kvlab.integrations.transformers"):
    import torch
    from transformers import DynamicCache, PreTrainedConfig
    from transformers.cache_utils import Cache, DynamicLayer, DynamicSlidingWindowLayer

    from kvlab.integrations.cache_bytes import layer_nbytes
    from kvlab.integrations.packed_attention import register
    from kvlab.integrations.packed_layer import ATTENTION, PackedLayer, SharedCache
    from kvlab.integrations.padding import padding_of
    from kvlab.integrations.rotary import KNOWN, head_dim_of, rotary_of

__all__ = ["ATTENTION", "KVLabCache", "register"]

register()  # so that a model can be loaded with attn_implementation="kvlab_packed"


class KVLabCache(Cache):
    """A cache for `generate` and for models called directly that keeps keys and values packed.

    Layers with full attention and with sliding windows share one `MixedPrecisionCache`, which is made at the
    first step, when batch, head counts and device are known. The other layers are those of
    `transformers.DynamicCache`; the budget does not cover them. The model must run the attention function
    "kvlab_packed", as it does after `model.set_attn_implementation("kvlab_packed")` and inside
    `kvlab.quantized(model)`.

    Parameters
    ----------
    config : transformers.PreTrainedConfig
        `model.config`.
    budget, bits, **options
        As for `kvlab.MixedPrecisionCache`; layer numbers in `bits` count the layers that are packed.
    dtype : {"float16", "bfloat16", "float32"}, optional
        Type of width 16 and of the residual window; default: that of the model. On a GPU attention is
        computed in it, too, and it must be float16 or bfloat16.

    Raises
    ------
    ValueError, TypeError
        If an option is not valid.
    NotImplementedError
        If the model is an encoder-decoder or has multi-head latent attention.

    Warns
    -----
    UserWarning
        If no layer has full attention or a sliding window, so that nothing is packed.

    Examples
    --------
    >>> import torch
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> config = LlamaConfig(vocab_size=99, hidden_size=64, num_hidden_layers=2, num_attention_heads=4,
    ...                      num_key_value_heads=2, intermediate_size=64)
    >>> model = LlamaForCausalLM(config).eval()
    >>> model.set_attn_implementation("kvlab_packed")
    >>> cache = KVLabCache(config, budget=0.25, bits=(2, 4, 8))
    >>> prompt = torch.tensor([[5, 3, 8]])
    >>> out = model.generate(prompt, past_key_values=cache, max_new_tokens=40, eos_token_id=None)
    >>> cache.get_seq_length(), cache.packed.nbytes <= cache.packed.budget_nbytes
    (42, True)
    >>> cache
    KVLabCache: 2 layers, 42 tokens, ... KiB of 128.00 KiB, ... bits an element (float16 ... KiB)
    """

    def __init__(
        self,
        config: PreTrainedConfig,
        budget: float | int | str | None = 0.35,
        *,
        bits: Bits = BITS,
        dtype: str | None = None,
        **options: Any,
    ) -> None:
        if not isinstance(config, PreTrainedConfig):
            raise TypeError(f"config must be the configuration of a model (model.config), not {type(config)}")
        if config.is_encoder_decoder:
            raise NotImplementedError("encoder-decoder models are not supported; decoder-only models are")
        text = config.get_text_config(decoder=True)
        if getattr(text, "kv_lora_rank", None):
            raise NotImplementedError(
                f"{type(text).__name__}.kv_lora_rank={text.kv_lora_rank}: multi-head latent attention caches "
                f"latents, not keys and values, and they cannot be packed: use a transformers.DynamicCache, "
                f"outside kvlab.quantized"
            )
        layers = DynamicCache(config=config).layers
        # Configurations of encoder and decoder count the layers of the encoder, also for a decoder alone.
        if (count := getattr(text, "decoder_layers", None)) is not None:
            more = [DynamicLayer() for _ in range(count - len(layers))]  # type: ignore[no-untyped-call]
            layers = [*layers, *more][:count]
        windows = {index: _window_of(text, index, layer) for index, layer in enumerate(layers)}
        packed = {index: window for index, window in windows.items() if window is not None}
        if not packed:
            kinds = sorted({type(layer).__name__ for layer in layers})
            warnings.warn(
                f"no layer has full attention or a sliding window, so nothing is packed (layers: {kinds})",
                stacklevel=2,
            )
        given = {"budget": budget, "bits": bits, **options}
        self._shared = SharedCache([*packed.values()], dtype, given, rotary_of(text, packed))
        for number, index in enumerate(packed):
            layers[index] = PackedLayer(self._shared, number)
        self._geometry = _geometry_of(text)
        super().__init__(layers=layers)

    def __repr__(self) -> str:
        packed, text = self.packed, f"KVLabCache: {len(self.layers)} layers"
        if stock := self._stock():
            text += f" ({len(stock)} not packed)"
        return f"{text}, {'empty' if packed is None else packed.describe()}"

    @property
    def nbytes(self) -> int:
        """Bytes that the cache holds: live buffers of the packed layers, all tensors of the others."""
        return (0 if self.packed is None else self.packed.nbytes) + layer_nbytes(self._stock())

    @property
    def packed(self) -> MixedPrecisionCache | None:
        """What holds the packed layers; None before the first step."""
        return self._shared.cache

    @property
    def packed_length(self) -> int | None:
        """Number of tokens that the packed layers have seen; None where no layer is packed."""
        return self._shared.lengths[0] if self._shared.lengths else None

    def hold(self, packed: MixedPrecisionCache) -> None:
        """Go on from what a `MixedPrecisionCache` holds, for example one that was saved and loaded.

        Parameters
        ----------
        packed : MixedPrecisionCache
            With a layer for each layer of the model. It keeps its own budget, widths and other options; those
            that this cache was made with are not used. If rows of it have padding, the model goes on with
            the attention_mask of all tokens and is refused without.

        Raises
        ------
        TypeError
            If `packed` is none.
        ValueError
            If the number of layers, their sliding windows, the number of heads or `head_dim` differ. If rows
            began with padding and no layer shows how much, since all drop tokens.
        NotImplementedError
            If the model has layers that are not packed, of which `packed` holds nothing.

        Examples
        --------
        >>> from transformers import LlamaConfig
        >>> cache = KVLabCache(LlamaConfig(num_hidden_layers=2))
        >>> cache.hold(MixedPrecisionCache(2, 32, 32, 128))
        """
        if not isinstance(packed, MixedPrecisionCache):
            raise TypeError(f"packed must be a MixedPrecisionCache, not {type(packed).__name__}")
        if stock := self._stock():
            kinds = ", ".join(sorted({type(layer).__name__ for layer in stock}))
            raise NotImplementedError(
                f"packed holds nothing of {len(stock)} of the model's {len(self.layers)} layers ({kinds}); a "
                f"model goes on from a packed cache if all its layers are packed: let this one read its "
                f"tokens again"
            )
        if packed.num_layers != len(self._shared.lengths):
            raise ValueError(
                f"packed has {packed.num_layers} layers, the model has {len(self._shared.lengths)}: load the "
                f"cache of this model"
            )
        if list(packed.windows) != self._shared.windows:
            raise ValueError(
                f"packed has sliding windows of {list(packed.windows)} tokens, the model has "
                f"{self._shared.windows} (0: full attention): load the cache of this model"
            )
        of_packed = {name: getattr(packed, name) for name in self._geometry}
        if of_packed != self._geometry:
            raise ValueError(
                f"packed has {_named(of_packed)}, the model {_named(self._geometry)}: load the cache of this "
                "model"
            )
        valid = padding_of(packed)
        self._shared.reset()
        self._shared.cache, self._shared.padding.valid = packed, valid
        self._shared.lengths = [packed.seqlen] * packed.num_layers

    # A recorded step of the model (decode_graph.py) has one token a row and none of them is padding.

    @contextmanager
    def unmasked(self) -> Iterator[None]:
        """Inside this block the model takes one step of one token a row, none of them padding."""
        length, self._shared.unmasked = self.get_seq_length(), True
        try:
            yield
        finally:
            self._shared.unmasked = False
        self._shared.padding.add_token(length)

    def check_step(self, mask: torch.Tensor | None) -> None:
        """Refuse a mask, (B, tokens), that hides the next token, or other ones than when they came."""
        if mask is None:
            self._shared.padding.check_none(self.get_seq_length())
            return
        valid = self._shared.padding.seen(self.get_seq_length())
        new = torch.ones_like(mask[:, :1], dtype=torch.bool)
        seen = new.expand(-1, self.get_seq_length()) if valid is None else valid
        if not torch.equal(mask.bool(), torch.cat([seen, new], 1)):
            raise ValueError(
                "attention_mask of a recorded step must be that of the tokens so far and 1 for the new ones"
            )

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Inside this block a CUDA graph records a step: nothing runs, so nothing is counted."""
        lengths = list(self._shared.lengths)
        try:
            with self._shared.whole().recording():
                yield
        finally:
            self._shared.lengths = lengths

    def replayed(self) -> None:
        """Count a step of the whole model that a CUDA graph has replayed."""
        self._shared.whole().replayed()
        self._shared.lengths = [length + 1 for length in self._shared.lengths]

    # Rows and lengths of all packed layers change together, so these belong to the cache and not to a layer.

    def reset(self) -> None:
        """Forget everything; the next step may have another batch."""
        for layer in self._stock():
            layer.reset()
        self._shared.reset()

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the newest tokens.

        Parameters
        ----------
        tokens_to_remove : int
            Zero or negative, as transformers counts: -3 removes three tokens.

        Raises
        ------
        BudgetError
            If a relative budget falls so far that what stays does not fit; the cache is as it was.
        ValueError, RuntimeError
            If a layer has dropped what it needs again, a packed one or one of transformers; the cache is as
            it was. `activate_past_recording` lets packed ones take back 64 tokens.
        """
        tokens_to_remove = whole_number(tokens_to_remove, "tokens_to_remove", -self.get_seq_length(), 0)
        before = [(layer, _attributes(layer)) for layer in self._stock()]
        try:
            for layer, _ in before:
                layer.crop(tokens_to_remove)
            self._shared.crop(-tokens_to_remove)
        except Exception:
            for layer, attributes in before:
                vars(layer).update(attributes)
            raise

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Make row i a copy of row `beam_idx[i]`.

        Parameters
        ----------
        beam_idx : (batch,) integer tensor

        Raises
        ------
        TypeError, ValueError
            If it is no vector of `batch` integers, or names a row that does not exist.
        """
        self._shared.reorder(_indices(beam_idx, "beam_idx"))
        for layer in self._stock():
            layer.reorder_cache(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row, copies side by side.

        Parameters
        ----------
        repeats : int
            1 or more.

        Raises
        ------
        BudgetError
            If so many rows do not fit the budget; the cache is as it was.
        """
        self._shared.repeat(whole_number(repeats, "repeats", 1))
        for layer in self._stock():
            layer.batch_repeat_interleave(repeats)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep the given rows, in the given order.

        Parameters
        ----------
        indices : (n,) integer or (batch,) bool tensor

        Raises
        ------
        BudgetError
            If so many rows do not fit the budget; the cache is as it was.
        TypeError, ValueError
            If it is no such tensor, or names a row that does not exist.
        """
        self._shared.select(_indices(indices, "indices"))
        for layer in self._stock():
            layer.batch_select_indices(indices)

    def _stock(self) -> list[Any]:
        return [layer for layer in self.layers if not isinstance(layer, PackedLayer)]


def _window_of(text: Any, index: int, layer: Any) -> int | None:
    """The sliding window of a layer to be packed, 0 with full attention; None: it keeps its own cache."""
    if type(layer) is DynamicLayer:
        return 0
    kinds = getattr(text, "layer_types", None)
    chunked = getattr(text, "attention_chunk_size", None) is not None
    is_window = not chunked if kinds is None else kinds[index] == "sliding_attention"
    return int(layer.sliding_window) if type(layer) is DynamicSlidingWindowLayer and is_window else None


def _geometry_of(text: Any) -> dict[str, int]:
    """Heads and their dimension, as far as a configuration says them, by the names that a cache has."""
    found = {
        "num_heads_q": getattr(text, "num_attention_heads", None),
        "num_heads_kv": getattr(text, "num_key_value_heads", None),
        "head_dim": head_dim_of(text) if text.model_type in KNOWN else getattr(text, "head_dim", None),
    }
    return {name: value for name, value in found.items() if isinstance(value, int)}


def _named(geometry: dict[str, int]) -> str:
    return ", ".join(f"{name}={value}" for name, value in geometry.items())


def _attributes(layer: Any) -> dict[str, Any]:
    """What a layer of transformers holds; to crop it puts other tensors there and writes over none."""
    return {name: copy(value) if isinstance(value, dict) else value for name, value in vars(layer).items()}


def _indices(rows: torch.Tensor, name: str) -> torch.Tensor:
    if not isinstance(rows, torch.Tensor) or rows.ndim != 1 or rows.is_floating_point() or rows.is_complex():
        raise TypeError(f"{name}={rows!r} must be a tensor of row numbers with one dimension")
    return rows

"""A transformers.Cache that stays packed.

Layers with full attention are packed and share one `MixedPrecisionCache`; the attention function that reads
it stands in packed_attention.py, what attention masks say of padding in padding.py. Layers that transformers
would not give a plain growing cache (sliding windows, linear attention) keep the layers of transformers.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from kvlab.arguments import whole_number
from kvlab.arrays import dtype_name
from kvlab.cache.cache import MixedPrecisionCache
from kvlab.cache.ladder import Bits
from kvlab.errors import needs_extra

with needs_extra("hf", "kvlab.integrations.transformers"):
    import torch
    from transformers import DynamicCache, PreTrainedConfig
    from transformers.cache_utils import Cache, CacheLayerMixin, DynamicLayer

    from kvlab.integrations.packed_attention import ATTENTION, Placeholder, register
    from kvlab.integrations.padding import Padding

__all__ = ["ATTENTION", "KVLabCache", "register"]


class KVLabCache(Cache):
    """A cache for `generate` and for models called directly that keeps keys and values packed.

    Layers with full attention share one `MixedPrecisionCache`, which is made at the first step, when batch,
    head counts and device are known. The other layers are those of `transformers.DynamicCache`; the budget
    does not cover them. The model must run the attention function "kvlab_packed", as it does after
    `model.set_attn_implementation("kvlab_packed")` and inside `kvlab.quantized(model)`.

    Parameters
    ----------
    config : transformers.PreTrainedConfig
        `model.config`.
    budget, bits, **options
        As for `kvlab.MixedPrecisionCache`; layer numbers in `bits` count the layers with full attention.
    dtype : {"float16", "bfloat16", "float32"}, optional
        Type of width 16 and of the residual window; default: that of the model. On a GPU attention is
        computed in it, too, and it must be float16 or bfloat16.

    Raises
    ------
    ValueError, TypeError
        If an option is not valid.
    NotImplementedError
        If the model is an encoder-decoder.

    Warns
    -----
    UserWarning
        If no layer has full attention, so that nothing is packed.

    Examples
    --------
    >>> import torch
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> config = LlamaConfig(vocab_size=99, hidden_size=64, num_hidden_layers=2, num_attention_heads=4,
    ...                      num_key_value_heads=2, intermediate_size=64)
    >>> model = LlamaForCausalLM(config).eval()
    >>> register()
    >>> model.set_attn_implementation("kvlab_packed")
    >>> cache = KVLabCache(config, budget=0.25, bits=(2, 4, 8))
    >>> prompt = torch.tensor([[5, 3, 8]])
    >>> out = model.generate(prompt, past_key_values=cache, max_new_tokens=40, eos_token_id=None)
    >>> cache.get_seq_length(), cache.packed.nbytes <= cache.packed.budget_nbytes
    (42, True)
    """

    def __init__(
        self,
        config: PreTrainedConfig,
        *,
        budget: float | int | str | None = 0.35,
        bits: Bits = (2, 3, 4, 8),
        dtype: str | None = None,
        **options: Any,
    ) -> None:
        if not isinstance(config, PreTrainedConfig):
            raise TypeError(f"config must be the configuration of a model (model.config), not {type(config)}")
        if config.is_encoder_decoder:
            raise NotImplementedError("encoder-decoder models are not supported; decoder-only models are")
        layers = DynamicCache(config=config).layers
        full = [number for number, layer in enumerate(layers) if type(layer) is DynamicLayer]
        if not full:
            kinds = sorted({type(layer).__name__ for layer in layers})
            warnings.warn(
                f"no layer has full attention, so nothing is packed (layers: {kinds})", stacklevel=2
            )
        self._shared = _Shared(len(full), dtype, {"budget": budget, "bits": bits, **options})
        for number, place in enumerate(full):
            layers[place] = PackedLayer(self._shared, number)
        super().__init__(layers=layers)
        register()

    @property
    def packed(self) -> MixedPrecisionCache | None:
        """What holds the layers with full attention; None before the first step."""
        return self._shared.cache

    def hold(self, packed: MixedPrecisionCache) -> None:
        """Go on from what a `MixedPrecisionCache` holds, for example one that was saved and loaded.

        Parameters
        ----------
        packed : MixedPrecisionCache
            With a layer for each layer with full attention; no row of it begins with padding.

        Raises
        ------
        ValueError
            If the number of layers differs.

        Examples
        --------
        >>> from transformers import LlamaConfig
        >>> cache = KVLabCache(LlamaConfig(num_hidden_layers=2))
        >>> cache.hold(MixedPrecisionCache(2, 32, 32, 128))
        """
        if packed.num_layers != len(self._shared.lengths):
            raise ValueError(
                f"packed has {packed.num_layers} layers, the model has {len(self._shared.lengths)} with full "
                f"attention: load the cache of this model"
            )
        self._shared.reset()
        self._shared.cache = packed
        self._shared.lengths = [packed.seqlen] * packed.num_layers

    # A recorded step of the model (decode_graph.py) has one token a row and none of them is padding.

    @contextmanager
    def unmasked(self) -> Iterator[None]:
        """Inside this block the model takes one step of one token a row, none of them padding."""
        self._shared.unmasked = True
        try:
            yield
        finally:
            self._shared.unmasked = False
        self._shared.padding.add_tokens()

    def check_step(self, mask: torch.Tensor) -> None:
        """Refuse a mask, (B, tokens), that hides the next token, or other ones than when they came."""
        steps = self._shared.padding.steps
        new = torch.ones_like(mask[:, :1], dtype=torch.bool)
        seen = new.expand(-1, self.get_seq_length()) if steps is None else steps
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
        """
        tokens_to_remove = whole_number(tokens_to_remove, "tokens_to_remove", -self.get_seq_length(), 0)
        for layer in self._stock():
            layer.crop(tokens_to_remove)
        self._shared.crop(-tokens_to_remove)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Make row i a copy of row `beam_idx[i]`."""
        self._shared.reorder(_indices(beam_idx, "beam_idx"))
        for layer in self._stock():
            layer.reorder_cache(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row, copies side by side."""
        self._shared.repeat(whole_number(repeats, "repeats", 1))
        for layer in self._stock():
            layer.batch_repeat_interleave(repeats)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep the given rows."""
        self._shared.select(_indices(indices, "indices"))
        for layer in self._stock():
            layer.batch_select_indices(indices)

    def _stock(self) -> list[Any]:
        return [layer for layer in self.layers if not isinstance(layer, PackedLayer)]


def _indices(rows: torch.Tensor, name: str) -> torch.Tensor:
    if not isinstance(rows, torch.Tensor) or rows.ndim != 1 or rows.is_floating_point() or rows.is_complex():
        raise TypeError(f"{name}={rows!r} must be a tensor of row numbers with one dimension")
    return rows


class PackedLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """One full-attention layer of a `KVLabCache`."""

    is_sliding = False
    is_croppable = True
    is_compileable = False
    supports_early_init = False  # the number of query heads is only known at the first step

    def __init__(self, shared: _Shared, number: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._shared, self._number = shared, number

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.dtype, self.device, self.is_initialized = key_states.dtype, key_states.device, True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a placeholder of all tokens, twice; `packed_attention_forward` stores the new ones."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        both = Placeholder.of(self, key_states, value_states, self._shared.lengths[self._number])
        return both, both

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        scale: float | None,
        softcap: float,
    ) -> torch.Tensor:
        """Attend with queries (B, Hq, S, D), store keys and values (B, Hkv, S, D); return (B, S, Hq, D)."""
        return self._shared.step(self._number, query, key, value, mask, scale, softcap)

    def get_seq_length(self) -> int:
        return self._shared.lengths[self._number]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        return -1

    def _of_the_whole_cache(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError("the layers of a KVLabCache change together: call the method of the cache")

    reset = crop = reorder_cache = _of_the_whole_cache
    batch_repeat_interleave = batch_select_indices = _of_the_whole_cache

    def offload(self) -> None:
        raise NotImplementedError("a KVLabCache manages its own memory and is not offloaded")

    prefetch = offload


class _Shared:
    """What the packed layers of one cache share: the `MixedPrecisionCache`, the padding, their lengths."""

    def __init__(self, num_layers: int, dtype: str | None, options: dict[str, Any]) -> None:
        self.options, self.dtype = options, dtype
        # Geometry and batch come with the first step. The smallest ones show now if the options are valid;
        # whether max_seqlen tokens fit depends on the true ones.
        valid = {**options, "max_seqlen": None}
        MixedPrecisionCache(
            max(num_layers, 1), 1, 1, 16, batch=1, dtype="float16" if dtype is None else dtype, **valid
        )
        self.cache: MixedPrecisionCache | None = None
        self.lengths = [0] * num_layers
        self.unmasked = False
        self.padding = Padding()

    def step(
        self,
        number: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: torch.Tensor | None,
        scale: float | None,
        softcap: float,
    ) -> torch.Tensor:
        batch, heads_kv, new, dim = k.shape
        if self.cache is None:
            dtype = self.dtype or dtype_name(k, "key")
            options = {"batch": batch, "device": str(k.device), "dtype": dtype, **self.options}
            self.cache = MixedPrecisionCache(len(self.lengths), q.shape[1], heads_kv, dim, **options)
        if batch != self.cache.batch:
            raise ValueError(
                f"the batch has {batch} rows, this cache {self.cache.batch}: reset() it or make a new one"
            )
        if number == 0:
            self._check_whole()
        valid = None
        if not self.unmasked and (mask is not None or self.padding.steps is not None):
            valid = self.padding.extend(mask, batch, self.lengths[number], new)
        asked, gpu = q.dtype, self.cache.gpu
        if gpu is None:
            q, k, v = (x.transpose(1, 2) for x in (q, k, v))
            out = self.cache.step(number, q, k, v, scale=scale, softcap=softcap, valid=valid)
        else:
            wanted = getattr(torch, self.cache.dtype)  # of all arrays, on a GPU
            if asked != wanted:
                q, k, v = q.to(wanted), k.to(wanted), v.to(wanted)
            out = gpu.step_heads_first(number, q, k, v, scale, softcap, valid)
        self.lengths[number] += new
        return out if out.dtype == asked else out.to(asked)

    def whole(self) -> MixedPrecisionCache:
        """The cache, whose layers stand at one length."""
        self._check_whole()
        if self.cache is None:
            raise ValueError("this cache is empty: call the model with it first")
        return self.cache

    def _check_whole(self) -> None:
        if len(set(self.lengths)) > 1:
            raise RuntimeError(
                f"an error stopped an earlier step between two layers, which now hold {max(self.lengths)} "
                f"and {min(self.lengths)} tokens: reset() this cache or make a new one"
            )

    def reset(self) -> None:
        self.cache = None
        self.lengths = [0] * len(self.lengths)
        self.padding = Padding()

    def crop(self, n: int) -> None:
        self._check_whole()
        if self.cache is not None:
            self.cache.crop(n)
            self.lengths = [length - n for length in self.lengths]
            self.padding.crop(self.lengths[0])

    def reorder(self, rows: torch.Tensor) -> None:
        if self.cache is not None:
            self.cache.reorder(rows.cpu())
            self.padding.take(lambda steps: steps[rows])

    def select(self, rows: torch.Tensor) -> None:
        if self.cache is not None:
            try:
                rows = torch.arange(self.cache.batch)[rows.cpu()]  # also masks and negative numbers
            except IndexError:
                raise ValueError(
                    f"indices={rows} names rows beyond those of a batch of {self.cache.batch}"
                ) from None
            self.cache.select(rows)
            self.padding.take(lambda steps: steps[rows])

    def repeat(self, n: int) -> None:
        if self.cache is not None:
            self.cache.repeat(n)
            self.padding.take(lambda steps: steps.repeat_interleave(n, 0))

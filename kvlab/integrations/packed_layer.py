"""The packed layers of a `KVLabCache`, and the placeholders that they pass to attention.

transformers calls `update` of a layer and gives what it returns to the attention function. A packed layer
returns placeholders: tensors of the right shape, dtype and device without data, which carry the layer and the
new keys and values, so that the attention function (packed_attention.py) can have the `MixedPrecisionCache`
attend and store in one step. Any other operation on a placeholder raises, so that a model under another
attention function cannot be silently wrong.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from kvlab.arguments import check_names
from kvlab.arrays import dtype_name
from kvlab.cache.cache import MixedPrecisionCache
from kvlab.errors import needs_extra
from kvlab.ops.plan import first_seen

with needs_extra("hf", "kvlab.integrations.transformers"):
    import torch
    from transformers.cache_utils import CacheLayerMixin

    from kvlab.integrations.padding import Padding

__all__ = ["ATTENTION", "PackedLayer", "Placeholder", "SharedCache"]

ATTENTION = "kvlab_packed"
"""Name of the attention function, for `attn_implementation=`."""
_FROM_THE_MODEL = (
    "num_layers", "num_heads_q", "num_heads_kv", "head_dim", "batch", "dtype", "sliding_window", "rotary"
)  # fmt: skip
REWIND = 64
"""Tokens that assisted decoding may take back at a time; it proposes 20, and more while all are right."""


class Placeholder(torch.Tensor):
    """Keys and values of a packed layer, old and new ones: shape, dtype and device of keys, but no data.

    Attributes
    ----------
    layer : PackedLayer
    pending : pair of (B, Hkv, S, D) tensors or None
        The new keys and values; None once they are stored.
    """

    layer: PackedLayer
    pending: tuple[torch.Tensor, torch.Tensor] | None

    @classmethod
    def of(cls, layer: PackedLayer, k: torch.Tensor, v: torch.Tensor, length: int) -> Placeholder:
        """Stand for `length` old tokens and the new ones; a call of the class would take longer."""
        batch, heads, new, dim = k.shape
        made = torch.Tensor._make_wrapper_subclass(
            cls, (batch, heads, length + new, dim), dtype=k.dtype, device=k.device
        )
        made.layer, made.pending = layer, (k, v)
        return made

    def __repr__(self, **kwargs: Any) -> str:  # type: ignore[override]
        return f"Placeholder({tuple(self.shape)}, {self.dtype})"

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise RuntimeError(
            f"{func} was called on keys or values of a KVLabCache, which are packed: only the attention "
            f"function {ATTENTION!r} reads them. If the model runs another one, use kvlab.quantized(model) "
            f"or call model.set_attn_implementation({ATTENTION!r}); if it runs this one, it uses its keys "
            f"elsewhere, too, and needs a transformers.DynamicCache outside kvlab.quantized"
        )


class PackedLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """One layer of a `KVLabCache`, with full attention or a sliding window."""

    is_croppable = True
    is_compileable = False
    supports_early_init = False  # the number of query heads is only known at the first step

    def __init__(self, shared: SharedCache, number: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._shared, self._number = shared, number
        self.sliding_window = shared.windows[number]  # 0: there is none
        self.is_sliding = self.sliding_window > 0

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
        """Keys that a mask of the next step has, and the position of the first."""
        length = self.get_seq_length()
        first = first_seen(length, self.sliding_window)
        return length - first + query_length, first

    def activate_past_recording(self) -> None:
        """From now on tokens may be taken back that have come after windows are full (assisted decoding)."""
        self._shared.allow_rewind()

    def get_max_length(self) -> int:
        return -1

    def _of_the_whole_cache(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError("the layers of a KVLabCache change together: call the method of the cache")

    reset = crop = reorder_cache = _of_the_whole_cache
    batch_repeat_interleave = batch_select_indices = _of_the_whole_cache

    def offload(self) -> None:
        raise NotImplementedError("a KVLabCache manages its own memory and is not offloaded")

    prefetch = offload


class SharedCache:
    """What the packed layers of one cache share: the `MixedPrecisionCache`, the padding, their lengths."""

    def __init__(
        self, windows: list[int], dtype: str | None, options: dict[str, Any], rotary: Any = None
    ) -> None:
        num_layers = len(windows)
        self.options, self.dtype, self.windows, self.rotary = options, dtype, windows, rotary
        known = [field.name for field in fields(MixedPrecisionCache) if field.name not in _FROM_THE_MODEL]
        check_names(options, known, "the cache")
        # Geometry and batch come with the first step. Small ones, which every ladder fits, show now if the
        # options are valid; whether max_seqlen tokens fit depends on the true ones.
        valid = {**options, "max_seqlen": None, "frames": None}
        MixedPrecisionCache(
            max(num_layers, 1), 1, 1, 64, batch=1, dtype="float16" if dtype is None else dtype, **valid
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
            options["sliding_window"] = [window or None for window in self.windows]
            options["rotary"] = self.rotary
            self.cache = MixedPrecisionCache(len(self.lengths), q.shape[1], heads_kv, dim, **options)
        if batch != self.cache.batch:
            raise ValueError(
                f"the batch has {batch} rows, this cache {self.cache.batch}: reset() it or make a new one"
            )
        if number == 0:
            self._check_whole()
        valid = None
        if not self.unmasked and (mask is not None or self.padding.valid is not None):
            valid = self.padding.extend(mask, batch, self.lengths[number], new, self.windows[number])
        own = q.dtype
        if q.is_cuda:
            wanted = getattr(torch, self.cache.dtype)  # of all arrays, on a GPU
            if own != wanted:
                q, k, v = q.to(wanted), k.to(wanted), v.to(wanted)
        out: torch.Tensor = self.cache.step_heads_first(number, q, k, v, scale, softcap, valid)
        self.lengths[number] += new
        return out if out.dtype == own else out.to(own)

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

    def allow_rewind(self) -> None:
        if any(self.windows) and self.options.get("rewind", 0) < REWIND:
            if self.cache is not None:
                self.cache.allow_rewind(REWIND)
            self.options = {**self.options, "rewind": REWIND}

    def reorder(self, rows: torch.Tensor) -> None:
        if self.cache is not None:
            self.cache.reorder(rows.cpu())
            self.padding.take(lambda valid: valid[rows])

    def select(self, rows: torch.Tensor) -> None:
        if self.cache is not None:
            try:
                rows = torch.arange(self.cache.batch)[rows.cpu()]  # also masks and negative numbers
            except IndexError:
                raise ValueError(
                    f"indices={rows} names rows beyond those of a batch of {self.cache.batch}"
                ) from None
            self.cache.select(rows)
            self.padding.take(lambda valid: valid[rows])

    def repeat(self, n: int) -> None:
        if self.cache is not None:
            self.cache.repeat(n)
            self.padding.take(lambda valid: valid.repeat_interleave(n, 0))

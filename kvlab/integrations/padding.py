"""Which time steps of each row are padding, read from the attention masks of transformers.

A packed cache does not store padding, so it must know which new tokens are padding, and must refuse other
masks: windows that are not the layer's, bidirectional blocks, or padding of old tokens that has changed since
they were stored.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray

from kvlab.cache.cache import MixedPrecisionCache
from kvlab.ladder import parse_bits
from kvlab.ops.plan import first_seen
from kvlab.pages import TOKENS_PER_PAGE, LayerPages

__all__ = ["Padding", "padding_of"]


class Padding:
    """The padding of all rows and time steps so far.

    Attributes
    ----------
    valid : (batch, time steps) bool tensor or None
        False: padding. None: there is none.
    """

    def __init__(self) -> None:
        self.valid: torch.Tensor | None = None
        self._last: dict[int, tuple[torch.Tensor, int, torch.Tensor | None]] = {}  # by the window

    def extend(
        self, mask: torch.Tensor | None, batch: int, length: int, new: int, window: int = 0
    ) -> torch.Tensor | None:
        """Take the mask of a step with `new` tokens behind `length` old ones.

        Every layer of a model calls this, all of one window with the same arguments; the later calls change
        nothing and, given the very same mask, look at nothing: a look at a mask on a GPU waits for it.

        Parameters
        ----------
        mask : (batch, 1, new, tokens) bool tensor or None
            As `transformers.masking_utils.sdpa_mask` makes it: True where a query sees a key; None: causal.
            Keys are all, `length + new`, or with a window those from `first_seen` on.
        window : int
            How many tokens a query sees, itself the last one; 0: all.

        Returns
        -------
        (batch, new) bool tensor or None
            False: the new token is padding. None: none is.

        Raises
        ------
        NotImplementedError
            If the mask is more than causal with padding.
        ValueError
            If the padding of old tokens differs from what it was.
        """
        last = self._last.get(window)
        if last is not None and last[0] is mask and last[1] == length:
            return last[2]
        valid = self._extend(mask, batch, length, new, window)
        self._last.pop(window, None)
        if mask is not None:
            self._last[window] = mask, length, valid
        return valid

    def _extend(
        self, mask: torch.Tensor | None, batch: int, length: int, new: int, window: int
    ) -> torch.Tensor | None:
        old, first = self.seen(length), first_seen(length, window)
        if mask is None:
            self.check_none(length)
            self.valid = None  # the rows or time steps with padding are gone
            return None
        visible = _visible(mask, batch, length - first, new, window)
        before = visible[:, : length - first]
        if not torch.equal(before, torch.ones_like(before) if old is None else old[:, first:]):
            raise ValueError(
                "attention_mask hides other past tokens than when they came, and a packed cache cannot hide "
                "what it stored: keep the mask of past tokens as it was, or start with a new cache"
            )
        if old is None and visible.all():
            return None
        passed = visible.new_ones(batch, first) if old is None else old[:, :first]
        self.valid, new_ones = torch.cat([passed, visible], 1), visible[:, length - first :]
        return None if new_ones.all() else new_ones.contiguous()

    def check_none(self, length: int) -> None:
        """Refuse a step without a mask behind time steps with padding."""
        old = self.seen(length)
        if old is not None and not old.all():
            raise ValueError("the cache holds rows with padding: pass the attention_mask of all tokens")

    def seen(self, length: int) -> torch.Tensor | None:
        """The padding of the first `length` time steps; those of a step that was refused may lie behind."""
        return None if self.valid is None else self.valid[:, :length]

    def add_token(self, length: int) -> None:
        """Add a time step without padding behind `length` others."""
        seen = self.seen(length)
        self.valid = None if seen is None else torch.cat([seen, torch.ones_like(seen[:, :1])], 1)
        self._last = {}

    def crop(self, length: int) -> None:
        """Forget all but the first `length` time steps."""
        self.valid, self._last = self.seen(length), {}

    def take(self, rows: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Rearrange the rows."""
        self.valid = None if self.valid is None else rows(self.valid)
        self._last = {}


def _visible(mask: torch.Tensor, batch: int, length: int, new: int, window: int) -> torch.Tensor:
    """Return which tokens are no padding, (batch, length + new); the first new one sees `length` others."""
    if mask.dtype != torch.bool or mask.shape[2:] != (new, length + new):
        raise NotImplementedError(
            f"attention_mask is {mask.dtype} of shape {tuple(mask.shape)} for {new} new tokens behind "
            f"{length}; pass a two-dimensional one, (batch, tokens), of 0 and 1"
        )
    visible = (mask[:, 0].any(1) if window else mask[:, 0, -1]).expand(batch, -1)
    causal = torch.ones(new, length + new, dtype=torch.bool, device=mask.device).tril(length)
    if window:
        causal = causal.triu(length - window + 1)
    if not torch.equal(mask, (visible[:, None, None] & causal).expand_as(mask)):
        raise NotImplementedError(
            "this attention mask is more than causal with padding (another window, a bidirectional block, "
            "several sequences in one row); a packed cache has no such mask: use a transformers.DynamicCache "
            "here"
        )
    return visible


def padding_of(packed: MixedPrecisionCache) -> torch.Tensor | None:
    """Return which time steps of a packed cache are no padding, (batch, tokens); None: all, or it is unknown.

    Padding is not stored, so a layer that drops no token shows it. Where all layers drop tokens (width 0,
    full windows) it is unknown, but a row without its first token in any layer is taken for one that began
    with padding: sinks are the last to go.

    Raises
    ------
    ValueError
        If a row began with padding and no layer shows how much.
    """
    length, ladders = packed.seqlen, parse_bits(packed.bits, packed.num_layers)
    drops = [ladder[0].total == 0 for ladder in ladders]
    shows = [not drops[i] and first_seen(length, window) == 0 for i, window in enumerate(packed.windows)]
    if any(shows):
        valid = _stored(packed.pages(shows.index(True)), length)
        return None if valid.all() else torch.from_numpy(valid).to(packed.device or "cpu")
    full = [layer for layer, window in enumerate(packed.windows) if not window]
    if packed.sink and length and full:
        begins = np.any([_stored(packed.pages(layer), length)[:, 0] for layer in full], 0)
        if not begins.all():
            raise ValueError(
                f"packed holds the first token of row {begins.argmin()} in no layer: the row began with "
                "padding, and with width 0 in all layers nobody knows how much. Let this cache read the "
                "tokens again, or save one with a layer that has no width 0 in bits"
            )
    return None


def _stored(pages: LayerPages, length: int) -> NDArray[np.bool_]:
    """Which time steps a head of a row has a token of, (batch, length)."""
    found = np.zeros((len(pages.count), length), np.bool_)
    for rung, (layout, pool) in enumerate(zip(pages.layouts, pages.pools, strict=True)):
        at = np.nonzero((pages.rung == rung) & (pages.count > 0))
        position = (pages.base[at].astype(np.int64)[:, None] << 16) + layout.positions_in(pool)[
            pages.index[at]
        ]
        page, slot = np.nonzero(np.arange(TOKENS_PER_PAGE) < pages.count[at][:, None])
        found[at[0][page], position[page, slot]] = True
    return found

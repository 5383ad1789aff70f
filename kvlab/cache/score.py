"""Importance follows attention: when it is brought up to date, and the launchers that do it on a GPU.

Bringing the importance of one layer up to date is little work, which mostly waits for its launch and for
memory: 4.8 us at batch 1 and 32K tokens on an H200, where attention takes 17. So neighbouring layers keep
their scores side by side, and the last one has all of them brought up to date (`Collector`). Nothing may
change pages before that, so whoever is about to calls `flush`.

The launchers, for ``kernels/cuda/plan/score.cu``, wait for nothing. The policies are those of
`kvlab.cache.importance` by name; a user's function is called by the host (prefill.py).
"""

from __future__ import annotations

import math
import struct
from functools import lru_cache
from threading import Lock
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvlab.arrays import CudaView, cuda_view, device_of, dtype_name, pointer_of
from kvlab.cache.importance import MOST_TOKENS, weight_of_collection
from kvlab.jit.launch import PreparedLaunch
from kvlab.ops.cuda.packed import KEPT_ROW_BYTES
from kvlab.ops.cuda.packed_mass import KEPT, score_kernel
from kvlab.ops.device_arrays import dense_pointer
from kvlab.pages import QUAD

__all__ = ["Collector", "lies_in_units", "score_new", "score_norms", "score_stored"]

_SIGHT = struct.Struct("4Q6q4i2f")
"""`Sight` of plan/score.cu: addresses of q, k, lse, codes; strides of q and k; heads, group, seqlen, window;
scale, softcap."""
_FOLLOWING = np.dtype([("take", "f4"), *((name, "i4") for name in ("span", "old", "forecast", "counted"))])
_SCORING = np.dtype([("layers", "u8"), ("kept", KEPT), ("following", _FOLLOWING)], align=True)
_THREADS, _WARPS = 256, 8
_SCORE_THREADS, _QUADS = 64, 8  # of a block of score_stored
_FILLING = Lock()  # caches of several threads may share a launch
_MOST_LAYERS = 8
_MOST_BYTES = 24 << 20  # what stays in the second-level cache of a large GPU until it is read
_KINDS = {"attention": 0, "forecast": 0, "key_norm": 0, "recency": 1, "uniform": 2}


def score_stored(
    states: int,
    scores: Any,
    lse: Any,
    *,
    importance: str,
    decay: float,
    tokens: int,
    counted: int,
    stream: int,
) -> None:
    """Bring the importance of all tokens in pages of some layers up to date with the attention they received.

    Parameters
    ----------
    states : int
        Address of the LayerState structs of the layers.
    scores : uint8 array, (layers, batch, num_heads_kv, quads, nbytes), contiguous
        What packed attention kept of the last query rows, `kvlab.ops.cuda.packed.kept_quad_bytes` a quad.
    lse : float32 array, (layers, batch, num_heads_q, seqlen), contiguous
        Of every query row over all its keys, stored or not.
    importance : {"attention", "forecast"}
        Other policies do not observe attention: they need no call.
    decay, tokens
        As for `kvlab.cache.importance.weight_of_collection`.
    counted : int
        Tokens of this call that the layers' lengths on the device count already.
    """
    layers, batch, heads, quads, nbytes = scores.shape
    group, rows = lse.shape[2] // heads, nbytes // KEPT_ROW_BYTES  # there is less than a row of padding
    grid = -(-quads // _QUADS), batch * heads, layers
    if not all(grid):
        return
    call, launch = _scoring(grid, device_of(scores).index)
    take, span = weight_of_collection(decay, tokens)
    old = min(span * (math.ceil(1 / take) - 1), 1 << 30) if take > 0 else 1 << 30
    kept = pointer_of(scores), pointer_of(lse), group, rows // group, lse.shape[-1], quads
    with _FILLING:
        call[0] = states, kept, (take, span, old, importance == "forecast", counted)
        launch(stream)


@lru_cache(maxsize=64)
def _scoring(grid: tuple[int, int, int], device: int) -> tuple[NDArray[Any], PreparedLaunch]:
    """The argument of `score_stored`, to be filled in, and its launch."""
    call = np.zeros(1, _SCORING)
    kernel = score_kernel("score_stored", device)
    return call, PreparedLaunch(kernel, grid, (_SCORE_THREADS,), call, early=True)


def score_new(
    q: CudaView, k: CudaView, lse: Any, codes: Any, *, scale: float, softcap: float = 0.0, stream: int
) -> None:
    """Importance of the tokens of a long step: the attention they get from its last rows.

    Parameters
    ----------
    q, k : CudaView, (batch, seqlen, num_heads_q or num_heads_kv, head_dim)
        float16 or bfloat16; by strides, the last axis contiguous and all vectors at multiples of 16 bytes.
        Row i sees keys 0 to i.
    lse : float32 array, (batch, num_heads_q, seqlen)
        Over all keys of each row, stored ones included. A row with an infinite one counts as if it gave no
        key any attention: padding, for example.
    codes : uint8 array, (batch * num_heads_kv, seqlen)
        Receives the importance codes.
    scale, softcap : float
        Of the attention.

    Raises
    ------
    ValueError
        If q or k does not lie at multiples of 16 bytes.
    """
    for name, view in (("q", q), ("k", k)):
        if view.strides[3] != 1 or not lies_in_units(view):
            raise ValueError(
                f"{name} must have a contiguous last axis and vectors at multiples of 16 bytes, got strides "
                f"{view.strides} at address {view.pointer}: pass a contiguous copy"
            )
    batch, seqlen, heads_q, head_dim = q.shape
    heads, whole = k.shape[2], dense_pointer(cuda_view(lse, "lse"), "lse")
    sight = _SIGHT.pack(
        q.pointer, k.pointer, whole, pointer_of(codes), *q.strides[:3], *k.strides[:3],
        heads, heads_q // heads, seqlen, min(seqlen, MOST_TOKENS), scale, softcap,
    )  # fmt: skip
    kernel = score_kernel("score_new", q.device, head_dim, q.dtype)
    keys_per_block = _WARPS * (32 if head_dim <= 128 else 16)
    kernel((-(-seqlen // keys_per_block), batch * heads), (_THREADS,), (np.void(sight),), 0, stream)


def lies_in_units(view: CudaView) -> bool:
    """Whether all vectors of an array (B, S, H, D) of 16-bit elements begin at multiples of 16 bytes."""
    return not (view.pointer % 16 or any(stride % 8 for stride in view.strides[:3]))


def score_norms(k: Any, codes: Any, importance: str, stream: int) -> None:
    """Importance of new tokens without queries: 1 / norm of the key, or what their policy says of any token.

    k (batch, seqlen, num_heads_kv, head_dim) by strides, codes (batch * num_heads_kv, seqlen) uint8.
    """
    view: CudaView = cuda_view(k, "k")
    batch, seqlen, heads, head_dim = k.shape
    kernel = score_kernel("score_norms", view.device, head_dim, dtype_name(k, "k"))
    numbers = np.int32(heads), np.int32(seqlen), np.int32(_KINDS[importance])
    strides = [np.int64(step) for step in view.strides[:3]]
    arguments = (view.pointer, cuda_view(codes, "codes").pointer, *strides, *numbers)
    kernel((-(-seqlen // _WARPS), batch * heads), (_THREADS,), arguments, 0, stream)


class Collector:
    """Scores and log-sum-exps of collecting steps of one `DeviceStore`.

    Parameters
    ----------
    kernels : Kernels
        Of the store.
    num_heads_q : int
    importance : str
    decay : float
        As for `score_stored` of the kernels.
    """

    def __init__(self, kernels: Any, num_heads_q: int, importance: str, decay: float) -> None:
        self._kernels, self._store, self._num_heads_q = kernels, kernels.store, num_heads_q
        self._importance, self._decay = importance, decay
        self._kept: dict[int, tuple[Any, Any]] = {}  # by steps: scores and lse of a group of layers
        self._steps, self._tokens, self._pending = 0, 0, range(0)

    @property
    def nbytes(self) -> int:
        """Bytes of device memory."""
        return sum(int(x.nbytes) for kept in self._kept.values() for x in kept)

    @property
    def state(self) -> tuple[int, int, range]:
        """What a step that is recorded but not run leaves as it was."""
        return self._steps, self._tokens, self._pending

    @state.setter
    def state(self, before: tuple[int, int, range]) -> None:
        self._steps, self._tokens, self._pending = before

    @property
    def pending(self) -> bool:
        """Whether scores are kept that importance does not know of yet."""
        return len(self._pending) > 0

    def place(self, layer: int, steps: int) -> tuple[Any, Any]:
        """Where a layer keeps scores, (batch, heads, quads, nbytes), and lse, (batch, heads_q, steps)."""
        if steps not in self._kept:
            group, store = self._group(steps), self._store
            empty = store.executor.empty
            lse = empty((group, store.batch, self._num_heads_q, steps), "float32", store.like)
            scores = store.executor.score_memory((group, *self.shape(steps)), store.like)
            self._kept[steps] = scores, lse
        scores, lse = self._kept[steps]
        return scores[layer % len(scores)], lse[layer % len(lse)]

    def before(self, layer: int, steps: int, tokens: int, stream: int) -> None:
        """Make way for a step of a layer: unless it goes on where the last one ended, flush.

        `tokens`: how many have come since the last collection of the layer, with this step.
        """
        goes_on = layer == self._pending.stop and (steps, tokens) == (self._steps, self._tokens)
        if self._pending and not goes_on:
            self.flush(stream)
        self._steps, self._tokens = steps, tokens

    def after(self, layer: int, steps: int, collected: bool, stream: int) -> None:
        """Count in a step of a layer; the last layer of a group settles."""
        if collected:
            self._pending = range(self._pending.start if self._pending else layer, layer + 1)
        group_ends = (layer + 1) % self._group(steps) == 0 if self._pending else False
        if group_ends or layer + 1 == len(self._store.stores):
            self.flush(stream)

    def flush(self, stream: int) -> None:
        """Bring importance up to date with all that is kept."""
        if not self._pending:
            return
        scores, lse = self._kept[self._steps]
        slots = slice(self._pending.start % len(scores), (self._pending.stop - 1) % len(scores) + 1)
        self.score(self._pending.start, scores[slots], lse[slots], self._tokens, self._steps, stream)
        self._pending = range(0)

    def score(self, first: int, scores: Any, lse: Any, tokens: int, counted: int, stream: int) -> None:
        """Bring importance of len(scores) layers up to date; arguments as of `score_stored` of kernels."""
        self._kernels.score_stored(
            first,
            scores,
            lse,
            importance=self._importance,
            decay=self._decay,
            tokens=tokens,
            counted=counted,
            stream=stream,
        )

    def forget(self) -> None:
        """Drop what is kept."""
        self._pending = range(0)

    def shape(self, steps: int) -> tuple[int, ...]:
        """Of the scores that a layer keeps of so many query tokens."""
        store = self._store
        nbytes = self._kernels.kept_quad_bytes(steps * (self._num_heads_q // store.heads))
        return store.batch, store.heads, store.entries // QUAD, nbytes

    def _group(self, steps: int) -> int:
        nbytes = max(math.prod(self.shape(steps)), 1)  # 0 in an empty batch
        return max(1, min(_MOST_LAYERS, len(self._store.stores), _MOST_BYTES // nbytes))

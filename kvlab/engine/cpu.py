"""A decoder on the CPU: the same packed weights, float32 arithmetic, keys and values in a packed cache.

Products run in Numba (kernels/numba/cpu/decoder.py), attention in `MixedPrecisionCache`, the rest is NumPy.
Nothing but weights, keys and values is rounded to 16 bits, so this is also what a GPU is compared with.
Padding is left out before the first product; only attention sees rows side by side.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvlab.arrays import numpy_dtype
from kvlab.cache.cache import MixedPrecisionCache
from kvlab.engine.packing import unpaired
from kvlab.engine.sampling import Sampling
from kvlab.engine.weights import Layer, Matrix, Weights
from kvlab.threads import run_parallel

__all__ = ["CpuExecutor", "rms_normed", "rotation"]

Floats = NDArray[np.float32]
Watch = Callable[[int, str, Floats], None]
"""Is called with a layer's index, the name of what was computed, and the numbers, a token a row."""

_CHUNK = 64  # tokens of a row that go through the model together
_WORTH_SHARING = 2_000_000  # multiplications, about a quarter of a millisecond


class CpuExecutor:
    """Carries out the tokens of a `kvlab.engine.Decoder` on the CPU.

    Attributes
    ----------
    cache : MixedPrecisionCache
    lengths : int64, (batch,)
        Tokens of each row so far.
    logits : float32, (batch, vocabulary)
        Of each row's newest token.
    hidden : float32, (batch, hidden)
        What the last layer left of it, before the final norm.
    """

    def __init__(self, weights: Weights, cache: MixedPrecisionCache) -> None:
        self._weights, self.cache = weights, cache
        self.geometry = weights.geometry
        self._layers, self._head = tuple(weights.layers), weights.head()
        self._kind = numpy_dtype(weights.dtype)
        self.lengths = np.zeros(cache.batch, np.int64)
        self.logits = np.zeros((cache.batch, self.geometry.vocabulary), np.float32)
        self.hidden = np.zeros((cache.batch, self.geometry.hidden), np.float32)

    def reset(self) -> None:
        """Forget all tokens."""
        self.cache.reset()
        self.lengths[:] = 0

    def read(self, rows: Sequence[NDArray[np.int64]]) -> None:
        """Take new tokens, at least one for each row, through the model."""
        width = max(len(row) for row in rows)
        table, valid = np.zeros((len(rows), width), np.int64), np.zeros((len(rows), width), np.bool_)
        for i, row in enumerate(rows):  # a row ends where the longest ends
            table[i, width - len(row) :], valid[i, width - len(row) :] = row, True
        for first in range(0, width, _CHUNK):
            self.run(table[:, first : first + _CHUNK], valid[:, first : first + _CHUNK])

    def run(self, ids: NDArray[np.int64], valid: NDArray[np.bool_], watch: Watch | None = None) -> None:
        """Take new tokens through the model.

        Parameters
        ----------
        ids : (batch, tokens)
        valid : (batch, tokens)
            False: padding, before or after a row's tokens.
        watch : callable, optional
        """
        rows, columns = np.nonzero(valid)
        positions = self.lengths[rows] + (np.cumsum(valid, axis=1) - 1)[rows, columns]
        x = self._weights.embedding[ids[rows, columns]].astype(np.float32)
        turn = rotation(positions, self._weights.inverse_frequencies, self._weights.rotary_scale)
        every = None if valid.all() else valid
        for index, layer in enumerate(self._layers):
            x = self._layer(index, layer, x, turn, (rows, columns), valid.shape, every, watch)
            if watch is not None:
                watch(index, "out", x)
        self.lengths += valid.sum(axis=1)
        counts = valid.sum(axis=1)
        newest, present = np.cumsum(counts)[counts > 0] - 1, counts > 0
        self.hidden[present] = x[newest]
        logits = self._product(self._head, self._normed(x[newest], self._head))
        self.logits[present] = logits[:, : self.geometry.vocabulary]

    def run_again(self) -> None:
        """Read the newest token of each row again; to time it."""
        self.cache.crop(1)
        self.lengths -= 1
        self.run(np.zeros((len(self.lengths), 1), np.int64), np.ones((len(self.lengths), 1), np.bool_))

    def layer_outputs(self, ids: NDArray[np.int64]) -> list[Floats]:
        """Run one row from its beginning; what each layer leaves of its tokens, (tokens, hidden)."""
        found: list[list[Floats]] = [[] for _ in self._layers]

        def watch(layer: int, what: str, x: Floats) -> None:
            if what == "out":
                found[layer].append(x)

        self.reset()
        for first in range(0, len(ids), _CHUNK):
            part = ids[None, first : first + _CHUNK]
            self.run(part, np.ones(part.shape, np.bool_), watch)
        return [np.concatenate(parts) for parts in found]

    def layer_values(self, ids: NDArray[np.int64]) -> dict[str, Floats]:
        """Run one row from its beginning; what every layer computes on the way, a token a row."""
        found: dict[str, list[Floats]] = {}
        self.reset()
        for first in range(0, len(ids), _CHUNK):
            part = ids[None, first : first + _CHUNK]
            self.run(
                part, np.ones(part.shape, np.bool_),
                lambda layer, what, x: found.setdefault(f"{layer}.{what}", []).append(np.array(x)),
            )  # fmt: skip
        return {name: np.concatenate(parts) for name, parts in found.items()}

    def tokens(self, sampling: Sampling, most: int) -> Iterator[NDArray[np.int64]]:
        """Choose up to `most` tokens for each row, one after the other; all but the last are run."""
        for i in range(most):
            ids = sampling.choose(self.logits, self.lengths)
            yield ids
            if i < most - 1:
                self.run(ids[:, None], np.ones((len(ids), 1), np.bool_))

    def _layer(
        self, index: int, layer: Layer, x: Floats, turn: tuple[Floats, Floats], at: tuple[Any, Any],
        shape: tuple[int, ...], valid: NDArray[np.bool_] | None, watch: Watch | None,
    ) -> Floats:  # fmt: skip
        geometry = self.geometry
        seen = watch or (lambda *_: None)
        normed = self._normed(x, layer.products[0])
        seen(index, "normed", normed)
        heads = self._product(layer.products[0], normed)[:, : geometry.products()["qkv"][0]]
        heads = heads.reshape(len(x), -1, geometry.head_dim)
        rotated, kv = geometry.heads_q + geometry.heads_kv, geometry.heads_kv
        straight = unpaired(heads[:, :rotated], geometry.rotary_dim)
        if layer.head_norms is not None:
            weight = np.repeat(layer.head_norms.astype(np.float32), (geometry.heads_q, kv), axis=0)
            straight = rms_normed(straight, geometry.eps) * weight
        seen(index, "q", straight[:, : geometry.heads_q])
        seen(index, "k", straight[:, geometry.heads_q :])
        turned = _rotate(straight, *turn)
        seen(index, "q_rotated", turned[:, : geometry.heads_q])
        seen(index, "k_rotated", turned[:, geometry.heads_q :])
        seen(index, "v", heads[:, rotated:])
        attended = self._attend(
            index, turned[:, : geometry.heads_q], turned[:, geometry.heads_q :], heads[:, rotated:],
            at, shape, valid,
        )  # fmt: skip
        seen(index, "attended", attended)
        if geometry.parallel:
            up, out = layer.products[1:]
            active = _gelu(self._product(up, self._normed(x, up)))
            return x + self._product(out, np.concatenate([attended, active], axis=1))
        output, up, down = layer.products[1:]
        x = x + self._product(output, attended)
        y = self._product(up, self._normed(x, up))
        return x + self._product(down, _silu(y[:, ::2]) * y[:, 1::2] if geometry.gated else _gelu(y))

    def _attend(
        self, index: int, q: Floats, k: Floats, v: Floats, at: tuple[Any, Any], shape: tuple[int, ...],
        valid: NDArray[np.bool_] | None,
    ) -> Floats:  # fmt: skip
        def side_by_side(part: Floats, kind: Any) -> NDArray[Any]:
            result = np.zeros((*shape, *part.shape[1:]), kind)
            result[at] = part
            return result

        out = self.cache.step(
            index, side_by_side(q, np.float32), side_by_side(k, self._kind), side_by_side(v, self._kind),
            valid=valid,
        )  # fmt: skip
        rows: Floats = np.asarray(out)[at].reshape(len(q), -1)
        return rows

    def _normed(self, x: Floats, matrix: Matrix) -> Floats:
        eps, weight, bias = self.geometry.eps, matrix.norm_weight, matrix.norm_bias
        if weight is None:
            return x
        if self.geometry.layer_norm:
            x = np.asarray(x - x.mean(axis=-1, keepdims=True, dtype=np.float64), np.float32)
        normed = rms_normed(x, eps) * weight.astype(np.float32)
        return normed if bias is None else normed + bias.astype(np.float32)

    def _product(self, matrix: Matrix, x: Floats) -> Floats:
        """Multiply tokens with a matrix and add its bias; rows as they are packed, padding included."""
        from kvlab.numba_kernels.cpu.decoder import MAX_TOKENS, multiply

        (tiles, blocks), code = matrix.packed.shape[:2], 0 if self._kind == np.float16 else 1
        packed = matrix.packed.reshape(-1).view(np.uint16)
        y = np.empty((len(x), tiles * 16), np.float32)
        for first in range(0, len(x), MAX_TOKENS):
            part = x[first : first + MAX_TOKENS]
            quads = part.reshape(len(part), -1, 2, 1, 2)  # c, c + 1 | c + 2, c + 3, each for rows g and g + 8
            spread = np.ascontiguousarray(np.broadcast_to(quads, (*quads.shape[:3], 2, 2))).reshape(-1)
            run_parallel(
                multiply, np.zeros(2, np.int64), packed, tiles, blocks, code, spread, len(part),
                y[first : first + MAX_TOKENS], alone=len(part) * packed.size < _WORTH_SHARING,
            )  # fmt: skip
        return y if matrix.bias is None else y + matrix.bias


def rotation(
    positions: NDArray[np.int64], inverse_frequencies: Floats, scale: float
) -> tuple[Floats, Floats]:
    """Cosine and sine of each position's angles, float32, (tokens, 1, rotary_dim / 2)."""
    angle = (positions.astype(np.float32)[:, None, None] * inverse_frequencies).astype(np.float64)
    return (scale * np.cos(angle)).astype(np.float32), (scale * np.sin(angle)).astype(np.float32)


def _rotate(x: Floats, cosine: Floats, sine: Floats) -> Floats:
    half = cosine.shape[-1]
    first, second = x[..., :half], x[..., half : 2 * half]
    return np.concatenate(
        [first * cosine - second * sine, second * cosine + first * sine, x[..., 2 * half :]], axis=-1
    )


def rms_normed(x: Floats, eps: float) -> Floats:
    """Divide by the root mean square of the last axis."""
    variance = np.square(x).mean(axis=-1, keepdims=True, dtype=np.float64)
    return np.asarray(x / np.sqrt(variance + eps), np.float32)


def _gelu(x: Floats) -> Floats:
    from kvlab.numba_kernels.cpu.decoder import gelu

    gelu(x.reshape(-1))  # a product of its own
    return x


def _silu(x: Floats) -> Floats:
    with np.errstate(over="ignore"):
        return np.asarray(x / (np.float32(1) + np.exp(-x)), np.float32)

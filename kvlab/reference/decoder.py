"""One decoder token in float64: the answer that every kernel and plan of the decode engine is judged against.

A token goes through the model alone: embedding, layers, final norm, head. Each layer reads the keys and
values of the tokens before it and adds its own. With x the hidden state of one token, a layer of GPT-NeoX is

    parallel:    x + attention(norm_1(x)) + mlp(norm_2(x))
    sequential:  h + mlp(norm_2(h))    with    h = x + attention(norm_1(x))

and one of the Llama family is the sequential form. The families differ in four pieces, each of which is there
or not in the weights: the norm subtracts the mean if it has a bias (LayerNorm, else RMSNorm), the MLP has a
gate (SwiGLU, else GELU with the exact erf), keys have as many heads as queries or fewer (GQA), queries and
keys are normalised head by head or not. So there is one `layer_token`, without a name of a model in it.

Rotary angles are products in float32, position times inverse frequency, because that is how the models define
them: at position 100,000 the rounding of the product is 0.004 radians, which is part of the model and no
error. All else is float64. GPT-NeoX stores query, key and value rows head by head; `split_interleaved` takes
them apart.

Sources: Black et al., "GPT-NeoX-20B" (2022), section 2; Su et al., "RoFormer" (2021), equation 34; Zhang and
Sennrich, "Root mean square layer normalization" (2019); Shazeer, "GLU variants improve transformer" (2020).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import ArrayLike, NDArray

Float64 = NDArray[np.float64]

_erf = np.vectorize(math.erf, otypes=[np.float64])


@dataclass(frozen=True)
class Norm:
    """LayerNorm, or RMSNorm without a bias: weight, bias (features,), and what the variance is raised by."""

    weight: Float64
    bias: Float64 | None
    eps: float

    def __call__(self, x: Float64) -> Float64:
        """Normalise the last axis.

        Examples
        --------
        >>> Norm(np.ones(2), np.zeros(2), 0.0)(np.array([3.0, 5.0]))
        array([-1.,  1.])
        >>> Norm(np.ones(2), None, 0.0)(np.array([2.0, 2.0]))
        array([1., 1.])
        """
        centred = x if self.bias is None else x - x.mean(axis=-1, keepdims=True)
        variance = np.square(centred).mean(axis=-1, keepdims=True)
        normed: Float64 = centred / np.sqrt(variance + self.eps) * self.weight
        return normed if self.bias is None else normed + self.bias


@dataclass(frozen=True)
class Linear:
    """weight (out, in) and bias (out,) or none."""

    weight: Float64
    bias: Float64 | None = None

    def __call__(self, x: Float64) -> Float64:
        y: Float64 = self.weight @ x
        return y if self.bias is None else y + self.bias


@dataclass(frozen=True)
class Layer:
    """Weights of one layer.

    Attributes
    ----------
    attention_norm, mlp_norm : Norm
    query, key, value, output : Linear
        Rows of query, key and value: heads one after the other.
    up, down : Linear
    gate : Linear, optional
        Present: down(silu(gate(x)) * up(x)). Absent: down(gelu(up(x))).
    query_norm, key_norm : Norm, optional
        Over the channels of each head, before the rotation.
    parallel : bool
        Attention and MLP read the same x.
    """

    attention_norm: Norm
    mlp_norm: Norm
    query: Linear
    key: Linear
    value: Linear
    output: Linear
    up: Linear
    down: Linear
    gate: Linear | None = None
    query_norm: Norm | None = None
    key_norm: Norm | None = None
    parallel: bool = False


@dataclass(frozen=True)
class Model:
    """A decoder: embedding (vocabulary, features), layers, final norm, head; heads of `head_dim` channels.

    `inverse_frequencies` are float32, half as many as rotated channels; `rotary_scale` multiplies cosine and
    sine (1 but for YaRN and LongRoPE).
    """

    embedding: Float64
    layers: tuple[Layer, ...]
    final_norm: Norm
    head: Linear
    head_dim: int
    inverse_frequencies: NDArray[np.float32]
    rotary_scale: float = 1.0


@dataclass
class KeysValues:
    """Keys, rotated, and values of the tokens so far of one layer: lists of (num_heads_kv, head_dim)."""

    keys: list[Float64] = field(default_factory=list)
    values: list[Float64] = field(default_factory=list)


@dataclass(frozen=True)
class Trace:
    """What a layer computed on its way, for comparisons operation by operation.

    normed_attention, normed_mlp : (features,); query, key (rotated), value, attended : (heads, head_dim);
    activation : (intermediate,); out : (features,).
    """

    normed_attention: Float64
    normed_mlp: Float64
    query: Float64
    key: Float64
    value: Float64
    attended: Float64
    activation: Float64
    out: Float64


def split_interleaved(rows: ArrayLike, num_heads: int) -> tuple[Float64, Float64, Float64]:
    """Take GPT-NeoX's query_key_value apart: head h has rows of q, then k, then v, then comes head h + 1.

    Parameters
    ----------
    rows : (3 * num_heads * head_dim, ...)
        The weight or the bias.
    num_heads : int

    Returns
    -------
    query, key, value : (num_heads * head_dim, ...)

    Examples
    --------
    >>> split_interleaved(np.arange(6), 2)
    (array([0., 3.]), array([1., 4.]), array([2., 5.]))
    """
    array = np.asarray(rows, np.float64)
    by_head = array.reshape(num_heads, 3, -1, *array.shape[1:])
    query, key, value = (by_head[:, i].reshape(-1, *array.shape[1:]) for i in range(3))
    return query, key, value


def gelu(x: Float64) -> Float64:
    """x times the standard normal distribution function at x, exact.

    Examples
    --------
    >>> gelu(np.array([-10.0, 0.0, 1.0])).round(6)
    array([-0.      ,  0.      ,  0.841345])
    """
    activated: Float64 = 0.5 * x * (1.0 + _erf(x / math.sqrt(2.0)))
    return activated


def silu(x: Float64) -> Float64:
    """x times the logistic function of x.

    Examples
    --------
    >>> silu(np.array([-1000.0, 0.0, 1.0])).round(6)
    array([-0.      ,  0.      ,  0.731059])
    """
    decay = np.exp(-np.abs(x))
    activated: Float64 = x * np.where(x >= 0, 1.0, decay) / (1.0 + decay)
    return activated


def rotate(
    x: Float64, position: int, inverse_frequencies: NDArray[np.float32], scale: float = 1.0
) -> Float64:
    """Rotate the first channels of each head by the angles of a position; the others pass.

    Of r = 2 * len(inverse_frequencies) rotated channels, i and i + r / 2 are a pair.

    Parameters
    ----------
    x : float64, (heads, head_dim)
    position : int
    inverse_frequencies : float32, (r / 2,)
    scale : float
        Factor on cosine and sine.

    Examples
    --------
    >>> quarter_turn = np.array([np.pi / 2], np.float32)
    >>> rotate(np.array([[1.0, 0.0, 7.0]]), 1, quarter_turn).round(6)
    array([[-0.,  1.,  7.]])
    """
    half = len(inverse_frequencies)
    angle = (np.float32(position) * inverse_frequencies).astype(np.float64)
    cosine, sine = scale * np.cos(angle), scale * np.sin(angle)
    first, second = x[:, :half], x[:, half : 2 * half]
    return np.concatenate(
        [first * cosine - second * sine, second * cosine + first * sine, x[:, 2 * half :]], axis=1
    )


def attend_token(query: Float64, past: KeysValues) -> Float64:
    """Softmax attention of one token, all heads, over every key and value in `past`.

    Query head h reads KV head h // (num_heads_q // num_heads_kv); scores are scaled by 1 / sqrt(head_dim).

    Parameters
    ----------
    query : float64, (num_heads_q, head_dim)
    past : KeysValues
        With the token's own key and value.

    Returns
    -------
    float64, (num_heads_q, head_dim)
    """
    keys, values = np.stack(past.keys), np.stack(past.values)
    num_heads_q, head_dim = query.shape
    grouped = query.reshape(keys.shape[1], -1, head_dim)
    scores = np.einsum("hgd,khd->hgk", grouped, keys) / math.sqrt(head_dim)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    attended: Float64 = np.einsum("hgk,khd->hgd", weights, values).reshape(num_heads_q, head_dim)
    return attended


def layer_token(x: Float64, layer: Layer, past: KeysValues, model: Model) -> Trace:
    """Take one token through one layer; its key and value are added to `past`, whose length is its position.

    Parameters
    ----------
    x : float64, (features,)
    layer : Layer
    past : KeysValues
        Of the tokens before it; changed.
    model : Model
        For head_dim and the rotation.
    """
    normed = layer.attention_norm(x)
    position, heads = len(past.keys), (-1, model.head_dim)
    query, key, value = (part(normed).reshape(heads) for part in (layer.query, layer.key, layer.value))
    if layer.query_norm is not None:
        query = layer.query_norm(query)
    if layer.key_norm is not None:
        key = layer.key_norm(key)
    query, key = (rotate(r, position, model.inverse_frequencies, model.rotary_scale) for r in (query, key))
    past.keys.append(key)
    past.values.append(value)
    attended = attend_token(query, past)

    after = x + layer.output(attended.reshape(-1))
    normed_mlp = layer.mlp_norm(x if layer.parallel else after)
    up = layer.up(normed_mlp)
    activation = gelu(up) if layer.gate is None else silu(layer.gate(normed_mlp)) * up
    out = after + layer.down(activation)
    return Trace(normed, normed_mlp, query, key, value, attended, activation, out)


def token_logits(token: int, model: Model, past: list[KeysValues]) -> Float64:
    """Logits of the token that follows `token`; keys and values of every layer are added to `past`.

    Parameters
    ----------
    token : int
    model : Model
    past : list of KeysValues
        One a layer, all empty before the first token.

    Returns
    -------
    float64, (vocabulary,)
    """
    x = model.embedding[token]
    for layer, keys_values in zip(model.layers, past, strict=True):
        x = layer_token(x, layer, keys_values, model).out
    return model.head(model.final_norm(x))

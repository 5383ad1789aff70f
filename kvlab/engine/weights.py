"""The weights of a decoder, from a transformers model or drawn at random, layer by layer in packed form.

`Weights` holds what every token needs (embedding, final norm, rotary frequencies) and gives the products of
one layer at a time, packed: whoever loads them has the model and one layer in memory, no more, for products
are packed a few rows at a time. Biases and norms stay beside the product that they belong to: a `Matrix` is
what one product of the engine reads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvlab.arguments import choice, whole_number
from kvlab.arrays import numpy_dtype
from kvlab.engine.geometry import Geometry, geometry_of, published
from kvlab.engine.packing import TILE_ROWS, gated_rows, pack, packed_shape, qkv_rows
from kvlab.errors import FormatError
from kvlab.views import to_numpy_view

__all__ = ["DTYPES", "Layer", "Matrix", "Weights", "dtype_of", "from_model", "from_seed"]

DTYPES = ("float16", "bfloat16")
_ROWS_AT_ONCE = 64  # packed together: a few hundred KiB

Array = NDArray[Any]


@dataclass(frozen=True)
class Matrix:
    """One product: packed weights, float32 bias by packed row or None, and the norm of what it multiplies."""

    packed: Array
    bias: NDArray[np.float32] | None = None
    norm_weight: Array | None = None
    norm_bias: Array | None = None


@dataclass(frozen=True)
class Layer:
    """Products in the order of `Geometry.products`, and the norms of query and key heads, or None."""

    products: tuple[Matrix, ...]
    head_norms: Array | None = None  # (2, head_dim)


@dataclass(frozen=True)
class Weights:
    """A decoder's weights.

    Attributes
    ----------
    geometry : Geometry
    dtype : str
        "float16" or "bfloat16".
    embedding : (vocabulary, hidden), of `dtype`
    inverse_frequencies : float32, (rotary_dim / 2,)
    rotary_scale : float
        Factor on cosine and sine.
    layers : iterator of Layer
        Packs a layer when it is asked for; can be read once.
    head : callable
        Packs the final norm and the head.
    """

    geometry: Geometry
    dtype: str
    embedding: Array
    inverse_frequencies: NDArray[np.float32]
    rotary_scale: float
    layers: Iterator[Layer]
    head: Callable[[], Matrix]


def dtype_of(dtype: Any) -> str:
    """Return the name of a 16-bit type of weights, which may be given as a dtype of torch or NumPy.

    Examples
    --------
    >>> dtype_of("bfloat16")
    'bfloat16'
    """
    text: str = getattr(dtype, "__name__", str(dtype)).removeprefix("torch.")
    return text if text in DTYPES else choice(dtype, "dtype", DTYPES)


def from_model(model: Any, dtype: str | None = None, *, consume: bool = False) -> Weights:
    """Take the weights of a transformers model.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        GPTNeoXForCausalLM, or that of Llama, Mistral, Qwen2 or Qwen3.
    dtype : {"float16", "bfloat16"}, optional
        By default the model's own, for a float32 model "float16".
    consume : bool
        Whether products that were packed may be taken out of the model.

    Raises
    ------
    NotImplementedError
        If the model is none of those, or has a piece that the engine does not compute.
    ValueError
        If a weight is beyond the range of `dtype`.
    FormatError
        If a weight is NaN or infinite; the message names it.
    """
    config = model.config
    if model.get_output_embeddings() is None:
        raise NotImplementedError(
            f"{type(model).__name__} has no head; give the model for causal language, as "
            "transformers.AutoModelForCausalLM loads it"
        )
    if any(one.is_meta for one in model.parameters()):
        raise ValueError(
            "model has parameters on the device 'meta', which have no numbers: load its weights, on the CPU "
            "or on one GPU"
        )
    body = model.base_model
    rotary = getattr(body, "rotary_emb", None)
    # Unknown families have no such module; geometry_of refuses them by name.
    frequencies = np.zeros(0, np.float32) if rotary is None else _numbers(rotary.inv_freq).astype(np.float32)
    geometry = geometry_of(config, 2 * len(frequencies))
    _refuse_other_modules(model)
    if dtype is None:
        own = str(next(iter(body.parameters())).dtype).removeprefix("torch.")
        dtype = own if own in DTYPES else "float16"
    dtype = dtype_of(dtype)
    reader = _Reader(model, geometry, dtype, consume)

    def layers() -> Iterator[Layer]:
        for layer in body.layers:
            yield reader.neox(layer) if reader.is_neox else reader.llama(layer)
            if consume:
                layer.to("meta")

    final = body.final_layer_norm if reader.is_neox else body.norm
    return Weights(
        geometry, dtype, reader.rounded(model.get_input_embeddings()), frequencies,
        float(getattr(rotary, "attention_scaling", 1.0)), layers(),
        lambda: reader.matrix([model.get_output_embeddings()], final),
    )  # fmt: skip


def _refuse_other_modules(model: Any) -> None:
    """Refuse adapters and quantised products, whose weights alone are not what they compute."""
    for name, module in model.named_modules():
        kind = type(module)
        if not kind.__module__.startswith(("torch.", "transformers.models.", "transformers.activations")):
            raise NotImplementedError(
                f"{name or 'model'} is a {kind.__module__}.{kind.__name__}, which the engine does not "
                "compute: merge adapters into the weights, load what is not quantised, or use transformers"
            )


class _Reader:
    """Modules of a transformers model as matrices."""

    def __init__(self, model: Any, geometry: Geometry, dtype: str, consume: bool) -> None:
        self.geometry, self.dtype = geometry, numpy_dtype(dtype)
        self.is_neox = model.config.model_type == "gpt_neox"
        self._consume, self._names = consume, {module: name for name, module in model.named_modules()}
        self._of_folder = f"model_or_path={model.name_or_path!r}: " if consume else ""
        sizes = geometry.heads_q, geometry.heads_kv, geometry.head_dim, geometry.rotary_dim
        self._qkv = qkv_rows(*sizes, interleaved=self.is_neox)

    def rounded(self, module: Any, kind: str = "weight") -> Array:
        """A module's weight or bias in the decoder's dtype."""
        return self._narrowed(_numbers(getattr(module, kind)), [module], kind)

    def _narrowed(self, found: Array, modules: list[Any], kind: str = "weight") -> Array:
        """Numbers of some modules in the decoder's dtype, which are finite."""
        with np.errstate(over="ignore"):
            result = np.ascontiguousarray(found.astype(self.dtype))
        if not _is_finite(result):
            raise self._refusal(modules, kind)
        return result

    def _refusal(self, modules: list[Any], kind: str) -> ValueError:
        """The error for modules of which one has a number that is not finite in the decoder's dtype."""
        for module in modules:
            numbers, name = _numbers(getattr(module, kind)), f"{self._names[module]}.{kind}"
            if faults := numbers.size - int(np.isfinite(numbers).sum()):
                return FormatError(
                    f"{self._of_folder}{name} is damaged: {faults} of its {numbers.size} numbers are NaN or "
                    "infinite, and so would logits be; fetch or make the model again"
                )
            with np.errstate(over="ignore"):
                if not _is_finite(numbers.astype(self.dtype)):
                    break
        return ValueError(
            f"dtype={self.dtype.name!r}: {name} has weights beyond its range; take dtype='bfloat16'"
        )

    def matrix(self, linears: list[Any], norm: Any = None, order: Any = None, axis: int = 0) -> Matrix:
        """Weights of linear modules joined along `axis`, rows in the given order."""
        biases = [None if one.bias is None else _numbers(one.bias).astype(np.float32) for one in linears]
        bias: NDArray[np.float32] | None = None
        if any(one is not None for one in biases):
            filled = [
                np.zeros(len(linear.weight), np.float32) if one is None else one
                for linear, one in zip(linears, biases, strict=True)
            ]
            bias = np.concatenate(filled) if axis == 0 else np.asarray(np.sum(filled, 0), np.float32)
            if not np.isfinite(bias).all():
                raise self._refusal([one for one in linears if one.bias is not None], "bias")
        packed = self._packed(linears, order, axis)
        if bias is not None:
            bias = bias if order is None else bias[order]
            bias = np.concatenate([bias, np.zeros(TILE_ROWS * len(packed) - len(bias), np.float32)])
        if norm is None:
            return Matrix(packed, bias)
        has_bias = getattr(norm, "bias", None) is not None
        return Matrix(packed, bias, self.rounded(norm), self.rounded(norm, "bias") if has_bias else None)

    def _packed(self, linears: list[Any], order: Any, axis: int) -> Array:
        """Weights joined along `axis`, rows in the given order, packed."""
        parts = [_numbers(one.weight) for one in linears]
        first = np.cumsum([0, *map(len, parts)])
        rows = int(first[-1]) if axis == 0 else len(parts[0])
        columns = parts[0].shape[1] if axis == 0 else sum(part.shape[1] for part in parts)
        packed = np.empty(packed_shape(rows, columns), self.dtype)
        order = np.arange(rows) if order is None else order
        for begin in range(0, rows, _ROWS_AT_ONCE):
            some = order[begin : begin + _ROWS_AT_ONCE]
            if axis == 0:
                weight = np.empty((len(some), columns), self.dtype)
                of_part = np.searchsorted(first, some, "right") - 1
                for i, part in enumerate(parts):
                    own = of_part == i
                    weight[own] = self._narrowed(part[some[own] - first[i]], [linears[i]])
            else:
                weight = self._narrowed(np.concatenate([part[some] for part in parts], 1), linears)
            packed[begin // TILE_ROWS :][: -(-len(some) // TILE_ROWS)] = pack(weight)
        return packed

    def _product(self, linears: list[Any], norm: Any = None, order: Any = None, axis: int = 0) -> Matrix:
        """A `matrix`; what it is made of is gone if the model is consumed."""
        found = self.matrix(linears, norm, order, axis)
        for one in linears if self._consume else ():
            one.to("meta")
        return found

    def neox(self, layer: Any) -> Layer:
        """A layer of GPT-NeoX."""
        mlp, dense = layer.mlp, layer.attention.dense
        qkv = self._product([layer.attention.query_key_value], layer.input_layernorm, self._qkv)
        up = self._product([mlp.dense_h_to_4h], layer.post_attention_layernorm)
        if self.geometry.parallel:
            return Layer((qkv, up, self._product([dense, mlp.dense_4h_to_h], axis=1)))
        return Layer((qkv, self._product([dense]), up, self._product([mlp.dense_4h_to_h])))

    def llama(self, layer: Any) -> Layer:
        """A layer of the Llama family."""
        attention, mlp = layer.self_attn, layer.mlp
        qkv = self._product(
            [attention.q_proj, attention.k_proj, attention.v_proj], layer.input_layernorm, self._qkv
        )
        gated = self._product(
            [mlp.gate_proj, mlp.up_proj], layer.post_attention_layernorm, gated_rows(self.geometry.ffn)
        )
        norms = None
        if self.geometry.head_norms:
            norms = np.stack([self.rounded(attention.q_norm), self.rounded(attention.k_norm)])
        return Layer((qkv, self._product([attention.o_proj]), gated, self._product([mlp.down_proj])), norms)


def _is_finite(x: Array) -> bool:
    """Whether 16-bit numbers are all finite: 10 times as fast as to ask each."""
    infinite = 0x7C00 if x.dtype == np.float16 else 0x7F80
    return not x.size or int((x.view(np.uint16) & 0x7FFF).max()) < infinite


def _numbers(tensor: Any) -> Array:
    return to_numpy_view(tensor.detach().cpu(), "weight")


def from_seed(name: str, seed: int = 0, dtype: str = "float16", *, layers: int | None = None) -> Weights:
    """Draw the weights of a published geometry: the same numbers for a seed on every machine.

    Products have variance 1 / columns, norms are 1 with a deviation of 0.1, biases have 0.02.

    Parameters
    ----------
    name : str
        Of `kvlab.engine.geometry.PUBLISHED`.
    seed : int
    dtype : {"float16", "bfloat16"}
    layers : int, optional
        Draw the first so many alone.
    """
    geometry, base = published(name)
    return draw(geometry, base, seed, dtype, layers)


def draw(geometry: Geometry, base: float, seed: int, dtype: str, layers: int | None = None) -> Weights:
    """`from_seed` for any geometry; `base` is that of the rotary frequencies."""
    from dataclasses import replace

    if layers is not None:
        geometry = replace(geometry, layers=whole_number(layers, "layers", 1, geometry.layers))
    dtype = dtype_of(dtype)
    kind = numpy_dtype(dtype)
    seed = whole_number(seed, "seed", 0)

    def normal(rng: np.random.Generator, *shape: int, scale: float, offset: float = 0.0) -> Array:
        table = (_normal_quantiles() * scale + offset).astype(kind)
        drawn: Array = table[rng.integers(0, 1 << 16, shape, np.uint16)]
        return drawn

    def matrix(rng: np.random.Generator, rows: int, columns: int, norm: bool, bias: bool) -> Matrix:
        weight = pack(normal(rng, rows, columns, scale=columns**-0.5))
        size = geometry.hidden
        return Matrix(
            weight,
            normal(rng, 16 * len(weight), scale=0.02).astype(np.float32) if bias else None,
            normal(rng, size, scale=0.1, offset=1.0) if norm else None,
            normal(rng, size, scale=0.02) if norm and geometry.layer_norm else None,
        )

    def layers_drawn() -> Iterator[Layer]:
        for index in range(geometry.layers):
            rng = np.random.Generator(np.random.SFC64([seed, index + 1]))
            products = tuple(
                matrix(rng, *shape, norm=which in ("qkv", "up", "gated"), bias=geometry.layer_norm)
                for which, shape in geometry.products().items()
            )
            norms = normal(rng, 2, geometry.head_dim, scale=0.1, offset=1.0) if geometry.head_norms else None
            yield Layer(products, norms)

    rng = np.random.Generator(np.random.SFC64([seed, 0]))
    half = np.arange(0, geometry.rotary_dim, 2, dtype=np.float32) / np.float32(max(geometry.rotary_dim, 1))
    return Weights(
        geometry, dtype, normal(rng, geometry.vocabulary, geometry.hidden, scale=1.0),
        (1.0 / np.float32(base) ** half).astype(np.float32), 1.0, layers_drawn(),
        lambda: matrix(rng, geometry.vocabulary, geometry.hidden, norm=True, bias=False),
    )  # fmt: skip


@cache
def _normal_quantiles() -> NDArray[np.float64]:
    """65,536 numbers, each as likely as another, that are distributed normally."""
    normal = NormalDist()
    return np.array([normal.inv_cdf((i + 0.5) / 65_536) for i in range(65_536)])

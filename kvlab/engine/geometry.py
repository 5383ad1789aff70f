"""What a decoder is made of: its sizes, and which pieces its layers have.

The families that the engine decodes differ in four pieces, as in `kvlab.reference.decoder`: LayerNorm or
RMSNorm, a gated MLP or a plain one, attention and MLP side by side or one after the other, queries and keys
normed head by head or not. `geometry_of` reads them from a configuration of transformers and refuses by name
what the engine would compute otherwise than the model does. `PUBLISHED` has the sizes of known models.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from kvlab.arguments import choice, whole_number

__all__ = ["PUBLISHED", "Geometry", "check_family", "geometry_of", "published"]

_SIZES = ("layers", "vocabulary", "hidden", "heads_q", "heads_kv", "head_dim", "ffn", "max_positions")


@dataclasses.dataclass(frozen=True)
class Geometry:
    """Sizes and pieces of a decoder.

    Attributes
    ----------
    layers, vocabulary, hidden, heads_q, heads_kv, head_dim, ffn : int
    rotary_dim : int
        Channels of a head that rotate; the others pass.
    max_positions : int
        Longest sequence that the model is made for, and that all of its layers attend as a whole: of a model
        with a sliding window up to as many tokens.
    parallel : bool
        Attention and MLP read the same x.
    layer_norm : bool
        LayerNorm with a bias; otherwise RMSNorm.
    gated : bool
        ``down(silu(gate(x)) * up(x))``; otherwise ``down(gelu(up(x)))``, with the exact erf.
    head_norms : bool
        Queries and keys are normed (RMS) head by head before they rotate.
    eps : float
        Of the norms.

    Raises
    ------
    ValueError
        If a size is none that the engine has kernels for; the message says what it has.
    """

    layers: int
    vocabulary: int
    hidden: int
    heads_q: int
    heads_kv: int
    head_dim: int
    rotary_dim: int
    ffn: int
    max_positions: int = 2048
    parallel: bool = False
    layer_norm: bool = False
    gated: bool = True
    head_norms: bool = False
    eps: float = 1e-5

    def __post_init__(self) -> None:
        for name in _SIZES:
            whole_number(getattr(self, name), name, 1)
        if self.heads_q % self.heads_kv:
            raise ValueError(
                f"heads_q={self.heads_q}, heads_kv={self.heads_kv}: query heads are a multiple of KV heads"
            )
        if self.head_dim % 16 or not 32 <= self.head_dim <= 256:
            raise ValueError(f"head_dim={self.head_dim}: multiples of 16 from 32 to 256 are supported")
        if self.rotary_dim % 2 or not 2 <= self.rotary_dim <= self.head_dim:
            raise ValueError(
                f"rotary_dim={self.rotary_dim}: even numbers from 2 to head_dim={self.head_dim} are supported"
            )
        for name, size in (("hidden", self.hidden), ("ffn", self.ffn)):
            if size % 32:
                raise ValueError(f"{name}={size}: multiples of 32 are supported")
        if self.parallel and self.gated:
            raise ValueError("parallel=True, gated=True: parallel layers have a plain MLP")

    @property
    def attended(self) -> int:
        """Channels that attention gives: heads_q * head_dim."""
        return self.heads_q * self.head_dim

    def products(self) -> dict[str, tuple[int, int]]:
        """Rows and columns of the products of a layer, in the order in which they are packed and computed."""
        qkv = ((self.heads_q + 2 * self.heads_kv) * self.head_dim, self.hidden)
        if self.parallel:
            return {"qkv": qkv, "up": (self.ffn, self.hidden), "out": (self.hidden, self.attended + self.ffn)}
        first = ("gated", (2 * self.ffn, self.hidden)) if self.gated else ("up", (self.ffn, self.hidden))
        output, down = (self.hidden, self.attended), (self.hidden, self.ffn)
        return {"qkv": qkv, "o": output, first[0]: first[1], "down": down}

    @property
    def parameters(self) -> int:
        """Weights of layers and head: what a token reads, but for norms, biases and its embedding."""
        layer = sum(rows * columns for rows, columns in self.products().values())
        return self.layers * layer + self.vocabulary * self.hidden


def _neox(hidden: int, layers: int, heads: int, vocabulary: int = 50304) -> Geometry:
    head_dim = hidden // heads
    return Geometry(
        layers, vocabulary, hidden, heads, heads, head_dim, head_dim // 4, 4 * hidden,
        parallel=True, layer_norm=True, gated=False,
    )  # fmt: skip


def _llama(
    hidden: int, layers: int, heads: tuple[int, int, int], ffn: int, vocabulary: int, **others: Any
) -> Geometry:
    return Geometry(layers, vocabulary, hidden, *heads, heads[2], ffn, **others)


PUBLISHED: dict[str, tuple[Geometry, float]] = {
    "pythia-14m": (_neox(128, 6, 4), 1e4),
    "pythia-31m": (_neox(256, 6, 8), 1e4),
    "pythia-70m": (_neox(512, 6, 8), 1e4),
    "pythia-160m": (_neox(768, 12, 12), 1e4),
    "pythia-410m": (_neox(1024, 24, 16), 1e4),
    "pythia-1b": (_neox(2048, 16, 8), 1e4),
    "pythia-1.4b": (_neox(2048, 24, 16), 1e4),
    "pythia-2.8b": (_neox(2560, 32, 32), 1e4),
    "pythia-6.9b": (_neox(4096, 32, 32, 50432), 1e4),
    "pythia-12b": (_neox(5120, 36, 40, 50688), 1e4),
    "llama-2-7b": (_llama(4096, 32, (32, 32, 128), 11008, 32000, max_positions=4096), 1e4),
    "llama-3.2-1b": (_llama(2048, 16, (32, 8, 64), 8192, 128256, max_positions=131072), 5e5),
    "llama-3.1-8b": (_llama(4096, 32, (32, 8, 128), 14336, 128256, max_positions=131072), 5e5),
    "mistral-7b-v0.3": (_llama(4096, 32, (32, 8, 128), 14336, 32768, max_positions=32768), 1e6),
    "smollm2-135m": (_llama(576, 30, (9, 3, 64), 1536, 49152, max_positions=8192), 1e5),
    "qwen3-0.6b": (
        _llama(1024, 28, (16, 8, 128), 3072, 151936, max_positions=40960, head_norms=True, eps=1e-6),
        1e6,
    ),
}
"""Known models: geometry and base of the rotary frequencies; scaled frequencies of Llama 3 are left out."""


def published(name: str) -> tuple[Geometry, float]:
    """Return an entry of `PUBLISHED`.

    Raises
    ------
    ValueError
        If there is none of that name; the message lists the names.

    Examples
    --------
    >>> geometry, base = published("pythia-2.8b")
    >>> geometry.head_dim, geometry.rotary_dim, geometry.parameters
    (80, 20, 2645360640)
    """
    if isinstance(name, str) and name not in PUBLISHED:
        raise ValueError(
            f"name={name!r} is no known size; known are {', '.join(PUBLISHED)}. Decoder.from_pretrained "
            "reads a folder, or a model of this machine by its name"
        )
    return PUBLISHED[choice(name, "name", tuple(PUBLISHED))]


_FAMILIES = ("gpt_neox", "llama", "mistral", "qwen2", "qwen3")
_ACTIVATION = {"gpt_neox": "gelu"}  # the others: silu
_SCALINGS = ("default", "linear", "llama3", "yarn")


def check_family(family: str) -> None:
    """Refuse an architecture that the engine does not decode."""
    if family not in _FAMILIES:
        raise NotImplementedError(
            f"model_type={family!r} is not supported; {', '.join(_FAMILIES)} are, so use transformers"
        )


def geometry_of(config: Any, rotary_dim: int | None = None) -> Geometry:
    """Read the geometry of a model from its configuration.

    Parameters
    ----------
    config : transformers.PretrainedConfig
        Of GPT-NeoX (Pythia), Llama (SmolLM2), Mistral, Qwen2 or Qwen3.
    rotary_dim : int, optional
        How many channels of a head the model rotates; all, where only other sizes are asked for.

    Raises
    ------
    NotImplementedError
        If the model has a piece that the engine does not compute; the message names it.
    ValueError
        As `Geometry`.
    """
    family = config.model_type
    check_family(family)
    neox = family == "gpt_neox"
    _refuse(config, "hidden_act", _ACTIVATION.get(family, "silu"))
    window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    rotary = getattr(config, "rope_parameters", None) or {}
    scaling = rotary.get("rope_type", "default")
    if scaling not in _SCALINGS:
        raise NotImplementedError(
            f"rope_type={scaling!r}: its frequencies change with the length; {', '.join(_SCALINGS)} are "
            "supported, so use transformers"
        )
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    return Geometry(
        layers=config.num_hidden_layers,
        vocabulary=config.vocab_size,
        hidden=config.hidden_size,
        heads_q=heads,
        heads_kv=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=head_dim,
        rotary_dim=head_dim if rotary_dim is None else rotary_dim,
        ffn=config.intermediate_size,
        max_positions=min(config.max_position_embeddings, window or config.max_position_embeddings),
        parallel=neox and config.use_parallel_residual,
        layer_norm=neox,
        gated=not neox,
        head_norms=family == "qwen3",
        eps=config.layer_norm_eps if neox else config.rms_norm_eps,
    )


def _refuse(config: Any, name: str, wanted: str) -> None:
    found = getattr(config, name)
    if found != wanted:
        raise NotImplementedError(
            f"{name}={found!r} is not supported for {config.model_type}; {wanted!r} is, so use transformers"
        )

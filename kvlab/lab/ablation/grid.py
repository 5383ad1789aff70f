"""Cases of an ablation, their names and ids, and grids of cases.

A case is a frozen dataclass of plain values, so it can be written to a file, compared and hashed. Its id is a
digest of its content: two processes that are given the same case agree on it without talking to each other,
and a result knows which case it is of. Its name is for people and for file names, and leaves out what all
cases of one grid share.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, NamedTuple

from kvlab.ladder import BITS as DEFAULT_BITS
from kvlab.ladder import default_bits, is_ample, parse_bits
from kvlab.sizes import MAX_FRACTION

__all__ = ["BITS", "BUDGETS", "CONTEXTS", "MODELS", "AblationCase", "Geometry", "make_grid", "within_model"]

BUDGETS = (0.2, 0.3, 0.4, 0.5, 0.6, 0.7)
BITS = ("2,3,4,8", "4,8", "2,4,8")
CONTEXTS = (512, 1024, 2048, 4096, 8192)
CHUNK = 64
"""Tokens that a model reads at a time."""
MULTIPLE = 2 * CHUNK
"""Contexts are multiples of it: half a context is unscored, and both halves are read in chunks."""
NEEDLE_DEPTHS = (0.1, 0.35, 0.6, 0.85)
"""Where needles lie in texts that are read beside the windows, one a text, as fractions of the context."""


@dataclass(frozen=True, slots=True)
class Geometry:
    """Shape of the cache of a model."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int

    def fp16_nbytes(self, tokens: int) -> int:
        """Bytes of keys and values of so many tokens in float16.

        Examples
        --------
        >>> Geometry(32, 32, 8, 128).fp16_nbytes(2048) / 2**20
        256.0
        """
        return 2 * 2 * self.num_layers * self.num_kv_heads * self.head_dim * tokens


class Text(NamedTuple):
    """How much a model has to read: characters, the longest line, the most characters a token takes.

    The last is a bound on the mean over a window; in windows of 129 tokens SmolLM2 takes 5.14 of the book.
    """

    characters: int
    longest_line: int
    characters_per_token: int


@dataclass(frozen=True, slots=True)
class Model:
    """A model that cases read text with."""

    geometry: Geometry
    shortest: int  # context that has room for a needle and its question
    longest: int  # context that it was made for
    vocabulary: int
    scored: int  # tokens, unless a case says how many windows
    tokens_per_s: float  # about what two processors read through one cache
    text: Text

    def max_windows(self, context_length: int) -> int:
        """Windows of a context, and the token behind it, that the text holds for certain.

        Windows begin at the fractions 0, 1/2, 1/4, 3/4, ... of the text (kvlab.lab.quality.text), so up to
        2**k of them are 1/2**k of the text apart, less the line that each skips to begin with a whole one.

        Examples
        --------
        >>> [MODELS["tiny"].max_windows(context) for context in (256, 1024, 4096)]
        [32, 8, 2]
        """
        text = self.text
        window = text.characters_per_token * (context_length + 1) + text.longest_line + 2
        return 1 << (text.characters // window).bit_length() - 1


MODELS = {
    "smollm2": Model(Geometry(30, 9, 3, 64), 128, 8192, 49152, 8192, 150, Text(4_137_451, 528, 6)),
    "tiny": Model(Geometry(2, 2, 1, 64), 256, 4096, 256, 1024, 9000, Text(9_442, 24, 1)),
}
"""SmolLM2-135M-Instruct, and a random Llama for tests."""


@dataclass(frozen=True, slots=True)
class AblationCase:
    """One configuration of a packed cache.

    Parameters
    ----------
    budget : float
        Fraction of the float16 bytes of the context.
    bits : str
        Ladder, as `kvlab.MixedPrecisionCache` takes it; "default" becomes that of a cache that names none,
        with profiles if the cache is a model's and packed.
    context_length : int
        Tokens in the cache, a multiple of 128.
    use_packing : bool
        False: the same allocation with one code a byte (kvlab.lab.ablation.unpacked).
    model : {"smollm2", "tiny"} or None
        None: synthetic keys and values of `geometry`, and no text.
    geometry : Geometry
    device : {"cpu", "cuda"}
    num_samples : int
        Windows of text that are scored; 0: as many as make 8,192 scored tokens (1,024 for "tiny").
    seed : int
        Of synthetic keys, values and queries.

    Raises
    ------
    ValueError
        If a value is not supported.

    Examples
    --------
    >>> case = AblationCase(0.35, "2,4,8", 512)
    >>> case.name, case.geometry.num_layers, len(case.id)
    ('b0.35_bits2_4_8_ctx512_packed', 30, 16)
    >>> AblationCase.from_dict(case.to_dict()) == case
    True
    """

    budget: float
    bits: str
    context_length: int
    use_packing: bool = True
    model: str | None = "smollm2"
    geometry: Geometry = MODELS["smollm2"].geometry
    device: str = "cpu"
    num_samples: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.budget <= MAX_FRACTION:
            raise ValueError(
                f"budget={self.budget!r} must be a fraction of float16: above 0, at most {MAX_FRACTION}"
            )
        if self.bits == DEFAULT_BITS:
            object.__setattr__(self, "bits", self._own_bits())
        parse_bits(self.bits, self.geometry.num_layers)
        if self.context_length < MULTIPLE or self.context_length % MULTIPLE:
            raise ValueError(f"context_length={self.context_length!r} must be a multiple of {MULTIPLE}")
        if self.device not in ("cpu", "cuda"):
            raise ValueError(f"device={self.device!r} is not supported; 'cpu' and 'cuda' are")
        if self.num_samples < 0:
            raise ValueError(f"num_samples={self.num_samples} must be at least 0")
        shape = self.geometry
        if min(shape.num_layers, shape.num_kv_heads) < 1 or shape.num_heads % shape.num_kv_heads:
            raise ValueError(f"{shape}: layers and heads must be positive, KV heads must divide heads")
        if shape.head_dim not in range(16, 257, 16):
            raise ValueError(f"head_dim={shape.head_dim} must be a multiple of 16 from 16 to 256")
        if self.model is None:
            return
        if self.model not in MODELS:
            raise ValueError(f"model={self.model!r} is not known; {', '.join(MODELS)} are, or None")
        known = MODELS[self.model]
        if shape != known.geometry or not known.shortest <= self.context_length <= known.longest:
            raise ValueError(
                f"model={self.model!r} has {known.geometry} and reads {known.shortest} to {known.longest} "
                f"tokens, not {shape} and {self.context_length}; take another context_length, or model=None "
                "(a geometry) for synthetic keys and values"
            )
        if self.num_samples > (most := known.max_windows(self.context_length)):
            raise ValueError(
                f"num_samples={self.num_samples}: the text of model={self.model!r} holds {most} windows of "
                f"{self.context_length} tokens; take {most} at most, or 0 for as many as are usual"
            )

    def _own_bits(self) -> str:
        frames_hold = self.model is not None and self.use_packing
        ample = is_ample(self.budget, self.context_length)
        own = default_bits(self.geometry.head_dim, frames_hold=frames_hold, is_ample=ample)
        return ",".join(map(str, own))

    @property
    def name(self) -> str:
        """Name of the case within its grid, and of its files."""
        widths = "".join(sign if sign.isalnum() else "_" for sign in self.bits)
        mode = "packed" if self.use_packing else "unpacked"
        return f"b{self.budget:g}_bits{widths}_ctx{self.context_length}_{mode}"

    @property
    def id(self) -> str:
        """Digest of the content: 16 hexadecimal digits."""
        text = json.dumps(self.to_dict(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @property
    def windows(self) -> int:
        """Windows of text that are scored; without a model none."""
        if self.model is None:
            return 0
        return self.num_samples or -(-MODELS[self.model].scored // (self.context_length // 2))

    @property
    def texts(self) -> int:
        """Texts that the model reads: windows, and those with needles; without a model none."""
        return 0 if self.model is None else self.windows + len(NEEDLE_DEPTHS)

    @property
    def texts_at_once(self) -> int:
        """As many of them as are read at once: on a GPU the host decides how long a call takes, so many.

        Examples
        --------
        >>> on_cpu = AblationCase(0.5, "4,8", 512)
        >>> on_cpu.texts, on_cpu.texts_at_once, replace(on_cpu, device="cuda").texts_at_once
        (36, 4, 36)
        """
        most = 4 if self.device == "cpu" else max((1 << 16) // self.context_length, 1)
        return min(most, self.texts)

    def to_dict(self) -> dict[str, Any]:
        """Return the content as plain values."""
        values = {name: getattr(self, name) for name in _NAMES}
        return values | {"geometry": asdict(self.geometry)}

    @staticmethod
    def from_dict(values: dict[str, Any]) -> AblationCase:
        """Return the case of such values; a ValueError says that they are not those of a case."""
        try:
            if set(values) != set(_NAMES):
                raise ValueError(f"a case has the values {sorted(_NAMES)}, not {sorted(values)}")
            return AblationCase(**{**values, "geometry": Geometry(**values["geometry"])})
        except (TypeError, AttributeError) as error:
            raise ValueError(f"these are not the values of a case: {error}") from None


_NAMES = tuple(field.name for field in fields(AblationCase))


def within_model(case: AblationCase, context_length: int) -> AblationCase:
    """Return the case at another context: synthetic, of the same shape, where the model does not reach.

    Examples
    --------
    >>> within_model(AblationCase(0.5, "4,8", 512), 16384).model is None
    True
    """
    if case.model is not None and context_length > MODELS[case.model].longest:
        return replace(case, context_length=context_length, model=None)
    return replace(case, context_length=context_length)


def make_grid(
    like: AblationCase,
    budgets: Sequence[float] = BUDGETS,
    bits: Sequence[str] = BITS,
    contexts: Sequence[int] = CONTEXTS,
    packing: Sequence[bool] = (True, False),
) -> tuple[AblationCase, ...]:
    """Return every combination, all else as in `like`; packed and unpacked stand side by side.

    A ladder "default" is that of each budget and context, with profiles if all cases are packed: else those
    that differ in packing alone could not be compared.

    Raises
    ------
    ValueError
        If a value is not supported or stands twice.

    Examples
    --------
    >>> len(make_grid(AblationCase(0.2, "4,8", 512)))
    180
    """
    cases = tuple(
        replace(
            replace(within_model(like, context), budget=budget, bits=ladder, use_packing=all(packing)),
            use_packing=packed,
        )
        for context, ladder, budget, packed in itertools.product(contexts, bits, budgets, packing)
    )
    names = [case.name for case in cases]
    if twice := {name for name in names if names.count(name) > 1}:
        raise ValueError(f"a grid must not have a case twice; {', '.join(sorted(twice))} stand twice")
    if not cases:
        raise ValueError("a grid must have at least one budget, ladder, context and packing")
    return cases

"""Quality of one ablation case: a model reads text and looks for needles through the case's cache.

Text: as `kvlab demo` does it (kvlab.lab.quality), in windows as long as the context, the second half of each
scored. Needles: a sentence with a number is hidden in the text, a question at the end asks for it, and what
counts is the share of the number's tokens that are the most probable ones, each given those before it. Texts
with needles are read beside the windows, as further rows, and not scored. The dense cache reads the same, so
that what the model cannot do is not laid at the cache's door.

Model and caches are on the device of the case; the cache that is handed on is a copy on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvlab.cache.cache import MixedPrecisionCache
from kvlab.errors import needs_extra
from kvlab.lab.ablation_cuda import to_cpu
from kvlab.lab.grid import AblationCase
from kvlab.lab.model import Subject, load_smollm2, tiny_llama
from kvlab.lab.plan import CACHE_DTYPE, Protocol, steps
from kvlab.lab.quality import Case, evaluate
from kvlab.lab.report import summarise
from kvlab.lab.scores import FULL_PRECISION, common_windows
from kvlab.lab.text import Windows, cut_windows
from kvlab.lab.turns import beside_others

with needs_extra("hf", "kvlab.lab.reading"):
    import torch

    from kvlab.integrations.transformers import KVLabCache

__all__ = ["Needles", "hide_needles", "read"]

CHUNK = 64
DEPTHS = (0.1, 0.35, 0.6, 0.85)
"""Where needles lie, as fractions of the context."""
NEEDLE = " The secret number of the king is {}. Remember it."
QUESTION = "\nQuestion: what is the secret number of the king?\nThe secret number of the king is"

Tick = Callable[[int, int], None]


@lru_cache(maxsize=1)
def _subject(model: str) -> Subject:
    return {"smollm2": load_smollm2, "tiny": tiny_llama}[model]()


def read(case: AblationCase, progress: Tick) -> tuple[dict[str, float | int], MixedPrecisionCache]:
    """Read with the model of a case.

    Parameters
    ----------
    case : AblationCase
        With a model.
    progress : callable
        Told the number of steps done and their total.

    Returns
    -------
    quality : dict
        Perplexity, divergence, agreement and retrieval, of the cache and of full precision.
    cache : MixedPrecisionCache
        That of the last window, on the CPU.

    Raises
    ------
    MissingExtraError
        If the model's packages are not installed.
    """
    subject = _subject(str(case.model))
    subject.model.to(case.device)
    length = case.context_length
    made: list[KVLabCache] = []

    def make() -> KVLabCache:
        options: dict[str, Any] = {"budget": case.budget, "bits": case.bits, "plan_length": length}
        made[:] = [KVLabCache(subject.model.config, dtype=CACHE_DTYPE, **options)]
        return made[0]

    needles = hide_needles(subject, length + 1)
    windows = cut_windows(subject.text, subject.encode, case.windows, length + 1)
    rows = Windows(np.concatenate([needles.tokens, windows.tokens]), (*needles.starts, *windows.starts))
    protocol = Protocol(length, length // 2, CHUNK, min(case.rows_at_once, len(rows.tokens)))
    hits: dict[str, list[bool]] = {FULL_PRECISION: [], case.name: []}
    total, done = steps(len(rows.tokens), 1, protocol), 0

    def tick(name: str) -> None:
        nonlocal done
        done += 1
        progress(done, total)
        pause()

    def look(first: int, name: str, begin: int, logits: torch.Tensor) -> None:
        if begin + CHUNK == length:
            hits[name] += needles.found(first, logits)

    cases = [Case(case.name, "mixed", make, case.budget)]
    with beside_others(case.device) as pause:
        scores = evaluate(subject.model, rows, cases, protocol, progress=tick, observe=look)
        packed = made[0].packed
        if packed is None:
            raise RuntimeError(f"{case.name}: the model stored nothing in its cache")
        packed.select(np.arange(packed.batch - 1, packed.batch))
        cache = to_cpu(packed)
    exact, row = summarise(common_windows(scores, windows.starts))
    quality: dict[str, float | int] = {
        "perplexity": row.perplexity,
        "perplexity_full_precision": exact.perplexity,
        "perplexity_change": row.change,
        "kl": row.kl,
        "kl_error": row.kl_error,
        "top1_agreement": row.agreement,
        "scored_tokens": case.windows * protocol.scored,
        "needle_retrieval": float(np.mean(hits[case.name])),
        "needle_retrieval_full_precision": float(np.mean(hits[FULL_PRECISION])),
    }
    return quality, cache


@dataclass(frozen=True, slots=True)
class Needles:
    """Texts with a needle, which end with the question and its answer.

    Attributes
    ----------
    tokens : (4, length) int64
    answer : int
        Tokens of an answer, the last ones of each text.
    starts : tuple of int
        Names of the texts among windows: negative, since they are no places of the book.
    """

    tokens: NDArray[np.int64]
    answer: int
    starts: tuple[int, ...]

    def found(self, first: int, logits: torch.Tensor) -> list[bool]:
        """Whether each token of the answers is the most probable; logits end the texts from `first` on."""
        answers = self.tokens[first : first + len(logits), -self.answer :]
        if not len(answers):
            return []
        guesses = logits[: len(answers), -self.answer :].argmax(-1).cpu().numpy()
        return [bool(same) for same in (guesses == answers).ravel()]


def hide_needles(subject: Subject, length: int) -> Needles:
    """Hide a number at each of `DEPTHS` in texts of so many tokens.

    Raises
    ------
    ValueError
        If that is too short.

    Examples
    --------
    >>> from kvlab.lab.model import tiny_llama
    >>> subject = tiny_llama()
    >>> needles = hide_needles(subject, 512)
    >>> text = subject.decode(needles.tokens[0].tolist())
    >>> needles.tokens.shape, text.count(text[-needles.answer :])
    ((4, 512), 2)
    """
    book = subject.encode(subject.text[: 12 * length])
    ask = subject.encode(QUESTION)
    texts = []
    for number, depth in enumerate(DEPTHS):
        digits = f" {72613 + 4337 * number}"
        question = subject.encode(QUESTION + digits)
        needle = subject.encode(NEEDLE.format(digits.strip()))
        hay = length - len(question) - len(needle)
        if hay < 1 or len(book) < hay:
            raise ValueError(f"length={length} has no room for a needle and its question")
        place = int(depth * hay)
        texts.append([*book[:place], *needle, *book[place:hay], *question])
    answer = len(question) - len(ask)
    return Needles(np.array(texts, np.int64), answer, tuple(range(-len(texts), 0)))

"""Quality of one ablation case: a model reads text and looks for needles through the case's cache.

Text: as `kvlab demo` does it (kvlab.lab.quality), in windows as long as the context, the second half of each
scored. Needles: a sentence with a number is hidden in the text, a question at the end asks for it, and what
counts is the share of the number's tokens that are the most probable ones, each given those before it. The
dense cache answers the same questions, so that what the model cannot do is not laid at the cache's door.

Model and caches are on the device of the case; the cache that is handed on is a copy on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvlab.cache.cache import MixedPrecisionCache
from kvlab.errors import needs_extra
from kvlab.lab.cases import CACHE_DTYPE
from kvlab.lab.grid import AblationCase
from kvlab.lab.model import Subject, load_smollm2, tiny_llama
from kvlab.lab.quality import Case, Protocol, evaluate, full_precision, steps
from kvlab.lab.report import summarise
from kvlab.lab.text import cut_windows

with needs_extra("hf", "kvlab.lab.reading"):
    import torch
    from transformers import Cache

    from kvlab.integrations.transformers import KVLabCache

__all__ = ["Reading", "hide_needles", "read"]

CHUNK, ROWS = 64, 4
DEPTHS = (0.1, 0.35, 0.6, 0.85)
"""Where needles lie, as fractions of the context."""
NEEDLE = " The secret number of the king is {}. Remember it."
QUESTION = "\nQuestion: what is the secret number of the king?\nThe secret number of the king is"

Tick = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Reading:
    """What a reading leaves: figures of quality, and the cache of the last window."""

    quality: dict[str, float | int]
    cache: MixedPrecisionCache


@lru_cache(maxsize=1)
def _subject(model: str) -> Subject:
    return {"smollm2": load_smollm2, "tiny": tiny_llama}[model]()


def read(case: AblationCase, progress: Tick = lambda done, total: None) -> Reading:
    """Read with the model of a case.

    Packed and unpacked cases keep the same codes, so they share a reading when they follow each other.

    Parameters
    ----------
    case : AblationCase
        With a model.
    progress : callable
        Told the number of steps done and their total.

    Raises
    ------
    MissingExtraError
        If the model's packages are not installed.
    """
    key = replace(case, use_packing=True)
    if key not in _latest:
        _latest.clear()  # before the next one takes its memory
        _latest[key] = _read(key, progress)
    return _latest[key]


_latest: dict[AblationCase, Reading] = {}
"""The last reading, for the other half of its pair."""


def _read(case: AblationCase, progress: Tick) -> Reading:
    subject = _subject(str(case.model))
    subject.model.to(case.device)
    made: list[KVLabCache] = []

    def make() -> KVLabCache:
        options: dict[str, Any] = {
            "budget": case.budget,
            "bits": case.bits,
            "plan_length": case.context_length,
        }
        made[:] = [KVLabCache(subject.model.config, dtype=CACHE_DTYPE, **options)]
        return made[0]

    quality = _scored(subject, case, make, progress)
    packed = made[0].packed
    if packed is None:
        raise RuntimeError(f"{case.name}: the model stored nothing in its cache")
    cache = _one_row(packed)
    questions, answers = hide_needles(subject, case.context_length)
    dense = full_precision(subject.model.config).make
    quality["needle_retrieval"] = _retrieved(subject, make(), questions, answers)
    quality["needle_retrieval_full_precision"] = _retrieved(subject, dense(), questions, answers)
    return Reading(quality, cache)


def _scored(
    subject: Subject, case: AblationCase, make: Callable[[], KVLabCache], progress: Tick
) -> dict[str, float | int]:
    """Read the windows; figures against full precision."""
    length = case.context_length
    protocol = Protocol(length, length // 2, CHUNK, min(ROWS, case.windows))
    total, done = steps(case.windows, 1, protocol), 0

    def tick(name: str) -> None:
        nonlocal done
        done += 1
        progress(done, total)

    windows = cut_windows(subject.text, subject.encode, case.windows, length + 1)
    cases = [Case(case.name, "mixed", make, case.budget)]
    exact, row = summarise(evaluate(subject.model, windows, cases, protocol, progress=tick))
    return {
        "perplexity": row.perplexity,
        "perplexity_full_precision": exact.perplexity,
        "perplexity_change": row.change,
        "kl": row.kl,
        "kl_error": row.kl_error,
        "top1_agreement": row.agreement,
        "scored_tokens": case.windows * protocol.scored,
    }


def _one_row(cache: MixedPrecisionCache) -> MixedPrecisionCache:
    """The first row of a cache, on the CPU."""
    cache.select(np.arange(1))
    if cache.device == "cpu":
        return cache
    with TemporaryDirectory() as folder:
        cache.save(Path(folder) / "cache")
        return MixedPrecisionCache.load(Path(folder) / "cache")


def hide_needles(subject: Subject, length: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return texts (4, length - answer) that end with the question, and the answers (4, answer).

    Examples
    --------
    >>> from kvlab.lab.model import tiny_llama
    >>> subject = tiny_llama()
    >>> questions, answers = hide_needles(subject, 512)
    >>> subject.decode(answers[0]) in subject.decode(questions[0])
    True
    """
    book = subject.encode(subject.text[: 12 * length])
    ask = subject.encode(QUESTION)
    questions, answers = [], []
    for number, depth in enumerate(DEPTHS):
        digits = f" {72613 + 4337 * number}"
        answer = subject.encode(QUESTION + digits)[len(ask) :]
        needle = subject.encode(NEEDLE.format(digits.strip()))
        hay = length - len(answer) - len(ask) - len(needle)
        if hay < 1 or len(book) < hay:
            raise ValueError(f"context_length={length} has no room for a needle and its question")
        place = int(depth * hay)
        questions.append([*book[:place], *needle, *book[place:hay], *ask])
        answers.append(answer)
    return np.array(questions, np.int64), np.array(answers, np.int64)


def _retrieved(
    subject: Subject, cache: Cache, questions: NDArray[np.int64], answers: NDArray[np.int64]
) -> float:
    """Share of the tokens of the answers that are the most probable ones."""
    # The logits that predict the answer follow the question's last token, so that is read with the answer.
    tokens = torch.from_numpy(np.concatenate([questions, answers[:, :-1]], axis=1)).to(subject.model.device)
    last = questions.shape[1] - 1
    with torch.inference_mode():
        for begin in range(0, last, CHUNK):
            part = tokens[:, begin : min(begin + CHUNK, last)]
            subject.model(part, past_key_values=cache, logits_to_keep=1)
        logits: Any = subject.model(tokens[:, last:], past_key_values=cache).logits
    return float((logits.argmax(-1).cpu().numpy() == answers).mean())

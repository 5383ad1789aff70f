"""Quality of ablation cases: a model reads text and looks for needles through the cache of each.

Text: as `kvlab demo` does it (kvlab.lab.quality.measure), in windows as long as the context, the second half
of each scored. Needles: a sentence with a number is hidden in the text, and a question at the end asks for
it. The score is the fraction of the number's tokens that are the most probable ones, each given the tokens
before it. Texts with needles are read beside the windows, as further rows, and not scored. The dense cache
reads the same, so that a failure of the model does not count against the cache. Cases of one context can be
read together: all caches advance chunk by chunk, the dense one once for all of them.

Model and caches are on the device of the cases; the caches that are handed on are copies on the CPU.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvlab.cache.cache import MixedPrecisionCache
from kvlab.errors import BudgetError, needs_extra
from kvlab.lab.ablation.grid import CHUNK, NEEDLE_DEPTHS, AblationCase
from kvlab.lab.ablation.synthetic import EvaluatedCache
from kvlab.lab.gpu_lock import shared_gpu
from kvlab.lab.quality.measure import Case, evaluate
from kvlab.lab.quality.model import Subject, load_smollm2, tiny_llama
from kvlab.lab.quality.plan import CACHE_DTYPE, Protocol, num_chunks
from kvlab.lab.quality.report import Row, summarise
from kvlab.lab.quality.scores import FULL_PRECISION, common_windows
from kvlab.lab.quality.text import Windows, cut_windows

with needs_extra("hf", "kvlab.lab.ablation.quality"):
    import torch
    from transformers import PreTrainedConfig

    from kvlab.integrations.transformers import KVLabCache

__all__ = ["Needles", "hide_needles", "measure_quality"]

NEEDLE = " The secret number of the king is {}. Remember it."
QUESTION = "\nQuestion: what is the secret number of the king?\nThe secret number of the king is"

Tick = Callable[[int, int], None]


@lru_cache(maxsize=1)
def _subject(model: str) -> Subject:
    return {"smollm2": load_smollm2, "tiny": tiny_llama}[model]()


def measure_quality(
    cases: Sequence[AblationCase], progress: Tick
) -> dict[AblationCase, EvaluatedCache | BudgetError]:
    """Let the model of some cases read through their caches.

    The cases have a model; they differ in budget and ladder alone, and all are packed. `progress` is told the
    number of chunks done and their total.

    Every case gets perplexity, divergence, agreement and retrieval, of the cache and of full precision; the
    cache of the last window; the seconds of its own chunks and its part of all else. It gets an error where
    the budget does not hold on the way.
    """
    like = cases[0]
    evaluation = _Evaluation(cases, progress)
    subject = _subject(str(like.model))
    subject.model.to(like.device)
    length = like.context_length
    needles = hide_needles(subject, length + 1)
    windows = cut_windows(subject.text, subject.encode, like.windows, length + 1)
    rows = Windows(np.concatenate([needles.tokens, windows.tokens]), (*needles.starts, *windows.starts))
    protocol = Protocol(length, length // 2, CHUNK, like.texts_at_once)
    evaluation.total = num_chunks(len(rows.tokens), len(cases), protocol)
    hits: dict[str, list[bool]] = {name: [] for name in (FULL_PRECISION, *(case.name for case in cases))}

    def look(first: int, name: str, begin: int, logits: torch.Tensor) -> None:
        if begin + CHUNK == length:
            hits[name] += needles.found(first, logits)

    caches = [Case(case.name, "mixed", evaluation.maker(case, subject.model.config)) for case in cases]
    with shared_gpu(like.device) as pause:
        scores = evaluate(
            subject.model,
            rows,
            caches,
            protocol,
            progress=lambda name: evaluation.tick(name, pause),
            observe=look,
            give_up=evaluation.failed.__setitem__,
        )
        copies = {score.name: _last_row(evaluation.made.pop(score.name)) for score in scores[1:]}
        evaluation.made.clear()
        if like.device != "cpu":
            torch.cuda.empty_cache()  # other processes of the sweep share this memory
    found = {row.cache: row for row in summarise(common_windows(scores, windows.starts))}
    shared = evaluation.shared_seconds() / len(cases)
    evaluated: dict[AblationCase, EvaluatedCache | BudgetError] = {}
    for case in cases:
        if case.name in evaluation.failed:
            evaluated[case] = evaluation.failed[case.name]
        else:
            quality = _quality(case, found, hits)
            evaluated[case] = EvaluatedCache(
                quality, copies[case.name], evaluation.seconds[case.name] + shared
            )
    return evaluated


def _quality(
    case: AblationCase, found: dict[str, Row], hits: dict[str, list[bool]]
) -> dict[str, float | int]:
    row, exact = found[case.name], found[FULL_PRECISION]
    return {
        "perplexity": row.perplexity,
        "perplexity_full_precision": exact.perplexity,
        "perplexity_change": row.change,
        "kl": row.kl,
        "kl_error": row.kl_error,
        "top1_agreement": row.agreement,
        "scored_tokens": case.windows * (case.context_length // 2),
        "needle_retrieval": float(np.mean(hits[case.name])),
        "needle_retrieval_full_precision": float(np.mean(hits[FULL_PRECISION])),
    }


class _Evaluation:
    """Caches, failures and seconds of cases that are read together."""

    def __init__(self, cases: Sequence[AblationCase], progress: Tick) -> None:
        self._progress, self._done, self.total = progress, 0, 1
        self.made: dict[str, KVLabCache] = {}
        self.failed: dict[str, BudgetError] = {}
        self.seconds = {case.name: 0.0 for case in cases}
        self._start = self._last = time.perf_counter()

    def maker(self, case: AblationCase, config: PreTrainedConfig) -> Callable[[], KVLabCache]:
        """What makes the caches of a case; the latest one is kept."""
        options: dict[str, Any] = {
            "budget": case.budget, "bits": case.bits, "plan_length": case.context_length
        }  # fmt: skip

        def make() -> KVLabCache:
            self.made[case.name] = KVLabCache(config, dtype=CACHE_DTYPE, **options)
            return self.made[case.name]

        return make

    def tick(self, name: str, pause: Callable[[], None]) -> None:
        """Count a chunk; what passed since the last one is the time of its cache."""
        now = time.perf_counter()
        if name in self.seconds:
            self.seconds[name] += now - self._last
        self._done += 1
        self._progress(self._done, self.total)
        pause()
        self._last = time.perf_counter()

    def shared_seconds(self) -> float:
        """Seconds since the beginning that are no single case's: full precision, the model, waiting."""
        return time.perf_counter() - self._start - sum(self.seconds.values())


def _last_row(cache: KVLabCache) -> MixedPrecisionCache:
    """The last window of a cache, on the CPU."""
    packed = cache.packed
    if packed is None:
        raise RuntimeError("the model stored nothing in its cache")
    packed.select(np.arange(packed.batch - 1, packed.batch))
    return packed if packed.device == "cpu" else packed.to_cpu()


@dataclass(frozen=True, slots=True)
class Needles:
    """Texts with a needle, which end with the question and its answer."""

    tokens: NDArray[np.int64]  # (4, length)
    answer: int  # tokens of an answer, the last ones of each text
    starts: tuple[int, ...]  # names of texts among windows: negative, since they are no positions in the book

    def found(self, first: int, logits: torch.Tensor) -> list[bool]:
        """Whether each token of the answers is the most probable; logits end the texts from `first` on."""
        answers = self.tokens[first : first + len(logits), -self.answer :]
        if not len(answers):
            return []
        guesses = logits[: len(answers), -self.answer :].argmax(-1).cpu().numpy()
        return [bool(same) for same in (guesses == answers).ravel()]


def hide_needles(subject: Subject, length: int) -> Needles:
    """Hide a number at each of `NEEDLE_DEPTHS` in texts of so many tokens, unless that is too short.

    Examples
    --------
    >>> from kvlab.lab.quality.model import tiny_llama
    >>> subject = tiny_llama()
    >>> needles = hide_needles(subject, 512)
    >>> text = subject.decode(needles.tokens[0].tolist())
    >>> needles.tokens.shape, text.count(text[-needles.answer :])
    ((4, 512), 2)
    """
    book = subject.encode(subject.text[: 12 * length])
    ask = subject.encode(QUESTION)
    texts = []
    for number, depth in enumerate(NEEDLE_DEPTHS):
        digits = f" {72613 + 4337 * number}"
        question = subject.encode(QUESTION + digits)
        needle = subject.encode(NEEDLE.format(digits.strip()))
        hay = length - len(question) - len(needle)
        if hay < 1 or len(book) < hay:
            raise ValueError(f"length={length} has no room for a needle and its question")
        split = int(depth * hay)
        texts.append([*book[:split], *needle, *book[split:hay], *question])
    answer = len(question) - len(ask)
    return Needles(np.array(texts, np.int64), answer, tuple(range(-len(texts), 0)))

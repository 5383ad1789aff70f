"""What a cache still answers when it is asked late: log-probabilities and exact answers.

A cache reads a text. Then every question goes to a copy of it, token by token, with the beginning of the
right answer; a token of the answer counts as found if it is the most probable one.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from kvlab.errors import needs_extra
from kvlab.lab.quality.divergence import bits_per_element
from kvlab.lab.quality.measure import Case, full_precision
from kvlab.lab.quality.prompts import Haystack, Question

with needs_extra("hf", "kvlab.lab.quality.recall"):
    import torch
    from transformers import Cache, PreTrainedModel

__all__ = ["Recall", "recall"]


@dataclass(slots=True)
class Recall:
    """Answers through one cache."""

    name: str
    kind: str
    bits: float = 0.0  # an element behind the texts, mean; everything counted
    log_p: list[float] = field(default_factory=list)  # of each answer
    exact: list[bool] = field(default_factory=list)  # whether all its tokens were the most probable ones
    depth: list[float] = field(default_factory=list)  # where in the text it stands

    def summary(self, full: Recall) -> dict[str, float]:
        """Compare with the answers of full precision to the same questions.

        Examples
        --------
        >>> full = Recall("full precision", "full precision", 16.0, [-1.0, -2.0, -9.0], [True, True, False])
        >>> found = Recall("u3", "uniform", 3.3, [-1.5, -2.0, -8.0], [True, False, True])
        >>> summary = found.summary(full)
        >>> summary["found_of_full"], summary["full_precision"], summary["found"]
        (1, 2, 2)
        """
        lost = np.subtract(self.log_p, full.log_p)
        both = np.logical_and(self.exact, full.exact)
        return {
            "bits": self.bits,
            "found": int(np.sum(self.exact)),
            "found_of_full": int(np.sum(both)),
            "full_precision": int(np.sum(full.exact)),
            "questions": len(lost),
            "log_p_change": float(lost.mean()),
            "log_p_error": float(lost.std(ddof=1) / math.sqrt(len(lost))) if len(lost) > 1 else math.nan,
        }

    def by_depth(self, full: Recall) -> dict[float, float]:
        """Mean change of the log-probability at each depth."""
        lost = np.subtract(self.log_p, full.log_p)
        depths = np.asarray(self.depth)
        return {float(depth): float(lost[depths == depth].mean()) for depth in np.unique(depths)}


def recall(
    model: PreTrainedModel,
    haystacks: Sequence[Haystack],
    cases: Sequence[Case],
    *,
    progress: Callable[[str], None] = lambda name: None,
) -> list[Recall]:
    """Ask every cache all questions.

    The model has an attention function that reads the caches of all cases ("kvlab_packed"). `progress` is
    told the name of a case after each text. Full precision stands first in the result, then the cases in
    their order. A budget that does not hold a text is a BudgetError.
    """
    everything = [full_precision(model.config), *cases]
    found = [Recall(case.name, case.kind) for case in everything]
    with torch.inference_mode():
        for haystack in haystacks:
            tokens = torch.tensor([haystack.tokens], device=model.device)
            dense = None
            for case, answers in zip(everything, found, strict=True):
                cache = case.make()
                model(tokens, past_key_values=cache, use_cache=True, logits_to_keep=1)
                dense = dense or cache
                answers.bits += bits_per_element(cache, dense) / len(haystacks)
                for question in haystack.questions:
                    log_p, exact = _answer(model, copy.deepcopy(cache), question)
                    answers.log_p.append(log_p)
                    answers.exact.append(exact)
                    answers.depth.append(question.depth)
                progress(case.name)
    return found


def _answer(model: PreTrainedModel, cache: Cache, question: Question) -> tuple[float, bool]:
    """Log-probability of the right answer, and whether each of its tokens is the most probable one."""
    tokens = torch.tensor([[*question.ask, *question.answer]], device=model.device)
    first = len(question.ask)
    log_p, exact = 0.0, True
    for at in range(tokens.shape[1] - 1):
        logits = model(tokens[:, at : at + 1], past_key_values=cache, use_cache=True).logits[0, -1]
        if at + 1 < first:
            continue
        target = int(tokens[0, at + 1])
        log_p += float(logits.float().log_softmax(-1)[target])
        exact &= int(logits.argmax()) == target
    return log_p, exact

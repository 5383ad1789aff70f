"""Free-running: a cache writes its own text, and full precision says where it would have written otherwise.

Teacher-forced divergence does not show how errors add up in text that a cache has written itself. Here the
most probable token of the cache is the next input of both. Up to the first token on which they differ, full
precision would have written the same text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvlab.errors import needs_extra
from kvlab.lab.quality.divergence import token_divergence
from kvlab.lab.quality.measure import Case, full_precision

with needs_extra("hf", "kvlab.lab.quality.free_running"):
    import torch
    from transformers import PreTrainedModel

__all__ = ["FreeRun", "free_run"]


@dataclass(frozen=True, slots=True)
class FreeRun:
    """A text that a cache wrote."""

    name: str
    tokens: list[int]
    until: int  # tokens before the first that full precision would not have written; all, if there is none
    kl: list[float]  # KL(full precision || cache) of every token, both behind the text of the cache


def free_run(model: PreTrainedModel, prompt: Sequence[int], case: Case, count: int) -> FreeRun:
    """Let a cache write the `count` most probable tokens behind a prompt that it read in one call.

    Examples
    --------
    >>> from kvlab.lab.quality.cases import uniform
    >>> from kvlab.lab.quality.model import tiny_llama
    >>> subject = tiny_llama()
    >>> run = free_run(subject.model, subject.encode("one two three"), uniform(subject.model.config)[0], 4)
    >>> run.name, len(run.tokens), len(run.kl), run.until
    ('uniform 8', 4, 4, 4)
    """
    cache, dense = case.make(), full_precision(model.config).make()
    tokens, kl, until = list[int](), list[float](), count
    fed = torch.tensor([list(prompt)], device=model.device)
    with torch.inference_mode():
        for number in range(count):
            truth, logits = (
                model(fed, past_key_values=held, use_cache=True, logits_to_keep=1).logits[0, -1:]
                for held in (dense, cache)
            )
            divergence, same = token_divergence(truth, logits)
            kl.append(float(divergence))
            if not same and until == count:
                until = number
            fed = logits.argmax(-1)[None]
            tokens.append(int(fed))
    return FreeRun(case.name, tokens, until, kl)

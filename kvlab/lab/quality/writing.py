"""Text that a cache writes: to be read beside that of another, and judged by full precision.

Teacher-forced divergence does not show how errors add up in text that a cache has written itself. So the most
probable token of a cache is the next input of both it and full precision. Up to the first token on which they
differ, full precision would have written the same text.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from kvlab.errors import needs_extra
from kvlab.lab.quality.divergence import token_divergence
from kvlab.lab.quality.measure import Case, full_precision, held_bytes
from kvlab.lab.quality.model import Subject
from kvlab.lab.quality.scores import Continuation

with needs_extra("hf", "kvlab.lab.quality.writing"):
    import torch
    from transformers import Cache, PreTrainedModel

__all__ = ["FreeRun", "continue_text", "free_run"]


def continue_text(subject: Subject, prompt: Sequence[int], cache: Cache, count: int) -> Continuation:
    """Let the model write the `count` most probable tokens behind a prompt, one after another.

    The cache is new and empty; it holds prompt and continuation afterwards.

    Examples
    --------
    >>> from kvlab.integrations.transformers import KVLabCache
    >>> from kvlab.lab.quality.model import tiny_llama
    >>> subject = tiny_llama()
    >>> cache = KVLabCache(subject.model.config, budget=0.5)
    >>> written = continue_text(subject, [104, 105], cache, 3)
    >>> len(written.tokens), written.nbytes == cache.packed.nbytes
    (3, True)
    """
    ids = torch.tensor([list(prompt)], device=subject.model.device)
    start = time.perf_counter()
    written = subject.model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        past_key_values=cache,
        max_new_tokens=count,
        min_new_tokens=count,
        do_sample=False,
        pad_token_id=0,
    )
    seconds = time.perf_counter() - start
    tokens = written[0, len(prompt) :].tolist()
    return Continuation(subject.decode(tokens), tokens, seconds, held_bytes(cache))


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

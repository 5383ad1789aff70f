"""The same prompt continued with different caches, to be read side by side."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from kvlab.errors import needs_extra
from kvlab.lab.model import Subject

with needs_extra("hf", "kvlab.lab.continuation"):
    import torch
    from transformers import Cache, DynamicCache

__all__ = ["Continuation", "continue_text"]


@dataclass(frozen=True, slots=True)
class Continuation:
    """New text after a prompt, and how fast it came (prompt included in `seconds`)."""

    text: str
    tokens: list[int]
    seconds: float


def continue_text(subject: Subject, prompt: Sequence[int], cache: Cache | None, count: int) -> Continuation:
    """Let the model write the `count` most probable tokens, one after another, through a cache.

    Parameters
    ----------
    subject : Subject
    prompt : sequence of int
        Tokens.
    cache : transformers.Cache, optional
        New and empty; holds prompt and continuation afterwards. Default: at full precision.
    count : int

    Examples
    --------
    >>> from kvlab.integrations.transformers import KVLabCache
    >>> from kvlab.lab.model import tiny_llama
    >>> subject = tiny_llama()
    >>> cache = KVLabCache(subject.model.config, budget=0.5)
    >>> len(continue_text(subject, [104, 105], cache, 3).tokens)
    3
    """
    ids = torch.tensor([list(prompt)])
    start = time.perf_counter()
    written = subject.model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        past_key_values=DynamicCache(config=subject.model.config) if cache is None else cache,
        max_new_tokens=count,
        min_new_tokens=count,
        do_sample=False,
        pad_token_id=0,
    )
    tokens = written[0, len(prompt) :].tolist()
    return Continuation(subject.decode(tokens), tokens, time.perf_counter() - start)

"""The same prompt continued with different caches, to be read side by side."""

from __future__ import annotations

import time
from collections.abc import Sequence

from kvlab.errors import needs_extra
from kvlab.lab.quality.measure import held_bytes
from kvlab.lab.quality.model import Subject
from kvlab.lab.quality.scores import Continuation

with needs_extra("hf", "kvlab.lab.quality.continuation"):
    import torch
    from transformers import Cache

__all__ = ["continue_text"]


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

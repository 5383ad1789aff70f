"""Text from the decode engine: a model's folder, its tokenizer, and a stream of words."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvlab.engine import Decoder
from kvlab.errors import needs_extra

__all__ = ["continue_text", "words"]


def continue_text(
    folder: str, prompt: str, max_new_tokens: int, *, device: str, budget: str | None, **sampling: Any
) -> Iterator[str]:
    """Continue a text with the model of a folder, until its end token; parts of the text as they come.

    Raises
    ------
    ValueError
        If `folder` is none, or the prompt is empty.
    """
    with needs_extra("hf", "text from a model"):
        from transformers import AutoTokenizer
    if not Path(folder).is_dir():
        raise ValueError(f"--model {folder!r} is no folder; give that of a model and its tokenizer")
    tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    ids = tokenizer(prompt)["input_ids"]
    if not ids:
        raise ValueError(f"--prompt {prompt!r} has no token; write some text")
    decoder = Decoder.from_pretrained(
        folder, device=device, cache_budget=budget, max_seqlen=len(ids) + max_new_tokens
    )
    decoder.prefill(ids)
    stop = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    return words(tokenizer, decoder.stream(max_new_tokens, stop=stop, **sampling))


def words(tokenizer: Any, tokens: Iterator[list[int | None]]) -> Iterator[str]:
    """Text of the first row of a stream, in parts that end where a character does."""
    pending: list[int] = []
    for token, *_ in tokens:
        if token is None:
            return
        pending.append(token)
        text = tokenizer.decode(pending, skip_special_tokens=True)
        if not text.endswith("\ufffd"):  # within a character of several tokens
            yield text
            pending = []
    if pending:
        yield tokenizer.decode(pending, skip_special_tokens=True)

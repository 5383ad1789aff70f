"""Text from the decode engine: a model's folder, its tokenizer, a stream of words, a talk."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvlab.engine import Decoder
from kvlab.engine.geometry import PUBLISHED
from kvlab.errors import needs_extra
from kvlab.sizes import format_size

__all__ = ["Chat", "continue_text", "words"]


def continue_text(
    folder: str, prompt: str, max_new_tokens: int, *, device: str, budget: str | None, **sampling: Any
) -> Iterator[str]:
    """Continue a text with the model of a folder, until its end token; parts of the text as they come.

    Raises
    ------
    ValueError
        If `folder` is none, or the prompt is empty.
    """
    tokenizer = _tokenizer(folder)
    ids = tokenizer(prompt)["input_ids"]
    if not ids:
        raise ValueError(f"--prompt {prompt!r} has no token; write some text")
    decoder = Decoder.from_pretrained(
        folder, device=device, cache_budget=_budget(budget), max_seqlen=len(ids) + max_new_tokens
    )
    decoder.prefill(ids)
    return words(tokenizer, decoder.stream(max_new_tokens, stop=_ends(tokenizer), **sampling))


class Letters:
    """The tokenizer of random weights: a byte is a token; tokens that are no letters are shown as numbers."""

    eos_token_id = None

    def __call__(self, text: str) -> dict[str, list[int]]:
        """Tokens of a text."""
        return {"input_ids": list(text.encode())}

    def decode(self, tokens: list[int], **_: Any) -> str:
        """Text of tokens."""
        if all(token < 128 and chr(token).isprintable() for token in tokens):
            return "".join(map(chr, tokens))
        return "".join(f"<{token}>" for token in tokens)


class Chat:
    """A talk with a model; what was said stays in its cache.

    Parameters
    ----------
    model : str
        The folder of a model, or a known size with random weights, whose answers are numbers.
    device : str
    budget : str, optional
        Of the cache.
    max_seqlen : int
        Tokens of the whole talk.
    """

    def __init__(self, model: str, *, device: str, budget: str | None, max_seqlen: int) -> None:
        is_known = model in PUBLISHED
        self._tokenizer: Any = Letters() if is_known else _tokenizer(model)
        make = Decoder.from_config if is_known else Decoder.from_pretrained
        self._decoder = make(model, device=device, cache_budget=_budget(budget), max_seqlen=max_seqlen)
        self._unread: list[int] = []
        self._count, self._seconds = 0, 0.0

    def answer(self, line: str, max_new_tokens: int, **sampling: Any) -> Iterator[str]:
        """Read a line and answer it, in parts as they come.

        Raises
        ------
        ValueError
            If the talk would be longer than it may be.
        """
        ids = self._unread + self._turn(line)
        room = self._decoder.max_seqlen - int(self._decoder.lengths[0]) - len(ids)
        if room < 1:
            raise ValueError(
                f"max_seqlen={self._decoder.max_seqlen}: the talk is that long; begin another, with more"
            )
        self._decoder.prefill(ids)
        said: list[int] = []
        begin = time.perf_counter()

        def tokens() -> Iterator[list[int | None]]:
            stream = self._decoder.stream(min(max_new_tokens, room), stop=_ends(self._tokenizer), **sampling)
            for token, *_ in stream:
                said.append(int(token or 0))
                self._count, self._seconds = len(said), time.perf_counter() - begin
                yield [token]

        yield from words(self._tokenizer, tokens())
        self._unread = said[-1:]  # the last token of a stream has not been read

    def summary(self) -> str:
        """Speed of the last answer, as far as it has come, and what the cache takes."""
        speed = f"{self._count} tokens, {self._count / max(self._seconds, 1e-9):.1f} a second"
        cache = self._decoder.cache
        if cache is None:
            return speed
        return f"{speed}; cache {format_size(cache.nbytes)}, {cache.bits_per_element:.2f} bits an element"

    def _turn(self, line: str) -> list[int]:
        """The tokens of a line, in the model's form of a talk if it has one."""
        if not getattr(self._tokenizer, "chat_template", None):
            return list(self._tokenizer(line)["input_ids"])
        turn = [{"role": "user", "content": line}]
        text: str = self._tokenizer.apply_chat_template(turn, add_generation_prompt=True, tokenize=False)
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])


def _budget(text: str | None) -> float | str | None:
    """A budget as it is typed: a fraction is a number, all else is left as it is."""
    is_fraction = text is not None and re.fullmatch(r"\d*\.\d+", text.strip())
    return float(text or 0) if is_fraction else text


def _tokenizer(folder: str) -> Any:
    with needs_extra("hf", "text from a model"):
        from transformers import AutoTokenizer
    if not Path(folder).is_dir():
        raise ValueError(
            f"{folder!r} is no folder of a model with its tokenizer; known sizes, for kvlab chat alone, are "
            f"{', '.join(PUBLISHED)}"
        )
    tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    return tokenizer


def _ends(tokenizer: Any) -> list[int]:
    return [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]


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

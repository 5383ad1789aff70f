"""Text from the decode engine: a model's folder, its tokenizer, a stream of words, a talk."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from kvlab.engine import Decoder
from kvlab.engine.folder import sizes_of
from kvlab.engine.geometry import PUBLISHED, published
from kvlab.engine.sampling import Sampling
from kvlab.lab.quality.model import without_progress_bars
from kvlab.ops.frame import LAST
from kvlab.sizes import format_size

__all__ = ["Chat", "continue_text", "words"]

_KNOWN = 8  # tokens in front of one that can change its text
_USUAL_TALK = 2048  # tokens
_ANSWER = "\u2063"  # stands for an answer where the form of a talk is asked for


def continue_text(
    folder: str, prompt: str, max_new_tokens: int, *, device: str, budget: str | None, **sampling: Any
) -> Iterator[str]:
    """Continue a text with a model, until an end token; parts of the text as they come.

    If `folder` is none of a model that the engine decodes, nor the name of one on this machine, that is an
    OSError or a NotImplementedError. A prompt that is empty or too long for the model is a ValueError.
    """
    geometry, tokenizer = sizes_of(folder), _tokenizer(folder)
    ids = tokenizer(prompt)["input_ids"]
    if not ids:
        raise ValueError(f"prompt={prompt!r} has no token; write some text")
    needed = len(ids) + max_new_tokens - 1  # the last one is not read
    if needed > geometry.max_positions:
        raise ValueError(
            f"prompt has {len(ids)} tokens and max_new_tokens={max_new_tokens} asks for more than the model "
            f"takes, {geometry.max_positions} in all; shorten the prompt, or ask for fewer tokens"
        )
    Sampling(**sampling)
    decoder = _loaded(folder, device=device, cache_budget=budget, max_seqlen=needed)
    decoder.prefill(ids)
    stream = decoder.stream(max_new_tokens, stop=_ends(folder, tokenizer, geometry.vocabulary), **sampling)
    return words(tokenizer, stream, ids)


class Letters:
    """The tokenizer of random weights: a byte is a token; tokens that are no letters are shown as numbers."""

    eos_token_id = None

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        """Tokens of a text."""
        return {"input_ids": list(text.encode())}

    def decode(self, tokens: list[int], **_: Any) -> str:
        """Text of tokens."""
        return "".join(chr(one) if one < 128 and chr(one).isprintable() else f"<{one}>" for one in tokens)


class Chat:
    """A talk with a model; what was said stays in its cache.

    The model is a folder, or its name in the Hugging Face cache of this machine; or a known size with random
    weights, whose answers are numbers. The whole talk has `max_seqlen` tokens; by default what the model
    takes, up to 2,048.
    """

    def __init__(self, model: str, *, device: str, budget: str | None, max_seqlen: int | None) -> None:
        is_known = model in PUBLISHED
        geometry = published(model)[0] if is_known else sizes_of(model)
        self._tokenizer: Any = Letters() if is_known else _tokenizer(model)
        self._ends = [] if is_known else _ends(model, self._tokenizer, geometry.vocabulary)
        make = Decoder.from_config if is_known else _loaded
        if max_seqlen is None:
            max_seqlen = min(_USUAL_TALK, geometry.max_positions)
        self._is_packed = budget is not None
        self._decoder = make(model, device=device, cache_budget=budget, max_seqlen=max_seqlen)
        self._unread: list[int] = []
        self._times: list[float] = []  # when tokens of the last answer came

    def answer(self, line: str, max_new_tokens: int, **sampling: Any) -> Iterator[str]:
        """Read a line and answer it, in parts as they come; a talk longer than it may be is a ValueError."""
        ids = self._turn(line)
        tokens_left = self._decoder.max_seqlen - int(self._decoder.lengths[0]) - len(ids)
        if tokens_left < 1:
            held = int(self._decoder.lengths[0])
            raise ValueError(
                f"max_seqlen={self._decoder.max_seqlen}: the talk has {held} tokens and this line "
                f"{len(ids)}; begin another, with a larger max_seqlen (the model takes "
                f"{self._decoder.geometry.max_positions}) or shorter lines"
            )
        self._decoder.prefill(ids)
        said: list[int] = []
        self._times = []

        def tokens() -> Iterator[list[int | None]]:
            stream = self._decoder.stream(min(max_new_tokens, tokens_left), stop=self._ends, **sampling)
            for token, *_ in stream:
                said.append(int(token or 0))
                self._times.append(time.perf_counter())
                yield [token]

        yield from words(self._tokenizer, tokens(), ids)
        self._unread = said[-1:]  # the last token of a stream has not been read

    def summary(self) -> str:
        """Speed of the last answer, as far as it has come, and what the cache takes.

        The speed is that of the median token: a first answer waits for kernels to be compiled.
        """
        gaps, speed = np.diff(self._times), f"{len(self._times)} tokens"
        if gaps.size:
            speed += f", {1 / max(np.median(gaps), 1e-9):.1f} a second"
        cache = self._decoder.cache
        if cache is None:
            return speed
        bits = f"cache {format_size(cache.nbytes)}, {cache.bits_per_element:.2f} bits an element"
        if self._is_packed and self._decoder.lengths[0] < LAST:
            bits += f", in a block for the first {LAST} tokens, which are packed when all have come"
        return f"{speed}; {bits}"

    def _turn(self, line: str) -> list[int]:
        """The tokens of a line, in the model's form of a talk if it has one, behind those not read yet."""
        begins = not self._decoder.lengths[0]
        if not getattr(self._tokenizer, "chat_template", None):
            return self._unread + list(self._tokenizer(line, add_special_tokens=begins)["input_ids"])
        turn = {"role": "user", "content": line}
        before = (
            [] if begins else [{"role": "user", "content": ""}, {"role": "assistant", "content": _ANSWER}]
        )
        text: str = self._tokenizer.apply_chat_template(
            [*before, turn], add_generation_prompt=True, tokenize=False
        )
        text = text.rpartition(_ANSWER)[2]  # what closes an answer, then the line; the first turn as a whole
        ids = list(self._tokenizer(text, add_special_tokens=False)["input_ids"])
        return ids if ids[:1] == self._unread else self._unread + ids  # the model may have closed its answer


def _loaded(name: str, **options: Any) -> Decoder:
    with without_progress_bars():
        return Decoder.from_pretrained(name, **options)


def _tokenizer(name: str) -> Any:
    from transformers import AutoTokenizer

    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(name, local_files_only=True)
    except Exception as error:  # of transformers, tokenizers, sentencepiece: each has its own
        raise ValueError(
            f"model_or_path={name!r} is a model without a tokenizer that can be read; it lies beside "
            "config.json as tokenizer.json: fetch the whole model with 'hf download NAME', or save one there "
            f"with AutoTokenizer.from_pretrained(NAME).save_pretrained({name!r}) "
            f"({str(error).splitlines()[0]})"
        ) from error
    return tokenizer


def _ends(name: str, tokenizer: Any, vocabulary: int) -> list[int]:
    """Tokens that end an answer: the tokenizer's, and those that the model's settings name."""
    from transformers import GenerationConfig

    try:
        found = GenerationConfig.from_pretrained(name, local_files_only=True).eos_token_id
    except OSError:  # it has none
        found = None
    named = found if isinstance(found, list) else [found]
    return sorted({one for one in (*named, tokenizer.eos_token_id) if one is not None and one < vocabulary})


def words(tokenizer: Any, tokens: Iterator[list[int | None]], before: Sequence[int] = ()) -> Iterator[str]:
    """Text of the first row of a stream, in parts that end where a character does.

    Whether a token begins with a space can depend on those in front of it; `before` is what the stream
    follows.
    """

    def text_of(ids: list[int]) -> str:
        text: str = tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text

    known, pending = list(before[-_KNOWN:]), list[int]()
    for token, *_ in tokens:
        if token is None:
            return
        pending.append(token)
        text = text_of(known + pending)[len(text_of(known)) :]
        if not text.endswith("\ufffd"):  # within a character of several tokens
            yield text
            known, pending = (known + pending)[-_KNOWN:], []
    if pending:
        yield text_of(known + pending)[len(text_of(known)) :]

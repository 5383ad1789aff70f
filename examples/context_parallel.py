"""Train a small model on real text with every sequence divided among ranks: the same losses for any number.

    torchrun --nproc_per_node=1 examples/context_parallel.py
    torchrun --nproc_per_node=2 examples/context_parallel.py README.md CHANGELOG.md
    torchrun --nproc_per_node=2 examples/context_parallel.py --steps 5

The text is this project's documentation, or that of the files that are named, read as bytes; a minute on
2 cores, and with 5 steps a third of it.
"""

from __future__ import annotations

import argparse
import datetime
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from kvlab import parallel
from kvlab.parallel.collectives import process_group

SEQLEN = 512


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a small model with sequences divided among ranks.")
    parser.add_argument("pages", type=Path, nargs="*", help="text (this project's documentation)")
    parser.add_argument("--steps", type=int, default=30, help="of training (30)")
    options = parser.parse_args()
    pages = options.pages or sorted(Path(__file__).parents[1].glob("docs/**/*.md"))
    text = torch.tensor(list(b"".join(page.read_bytes() for page in pages)))
    with process_group(datetime.timedelta(minutes=2)) as (rank, size, device):
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=256, hidden_size=128, intermediate_size=256, num_hidden_layers=3,
            num_attention_heads=8, num_key_value_heads=4,
        )  # fmt: skip
        model = LlamaForCausalLM(config).to(device)
        parallel.enable(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        for step in range(options.steps):
            first = step * SEQLEN % (len(text) - SEQLEN)
            ids = text[first : first + SEQLEN][None].to(device)
            optimizer.zero_grad()
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            optimizer.step()
            if rank == 0 and step % 5 == 4:
                print(f"{size} ranks, step {step + 1}: loss {loss.item():.4f}", flush=True)


if __name__ == "__main__":
    main()

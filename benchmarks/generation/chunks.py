"""Reading in chunks of 64 tokens through a packed cache, as the demo and the laboratory read: host and whole.

The model has the shape of SmolLM2-135M (30 layers, 9 query heads, 3 KV heads of 64 channels), random weights
and float32, caches are float16. Of every chunk of the second half of 2,048 tokens two times are taken: until
the call of the model returns, which is the host's part, and until the GPU has done it.

    python benchmarks/generation/chunks.py OUT.json [--rows 1,4,20]
"""

from __future__ import annotations

import argparse
import statistics
import time
from functools import cache, partial
from typing import Any

import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from kvlab.integrations.transformers import ATTENTION, KVLabCache, register
from kvlab.lab.benchmark import harness

CHUNK, LENGTH = 64, 2048
CONFIG = LlamaConfig(
    vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30,
    num_attention_heads=9, num_key_value_heads=3, max_position_embeddings=8192,
)  # fmt: skip
CACHES: dict[str, Any] = {
    "dense": lambda: DynamicCache(config=CONFIG),
    "uniform 4": lambda: KVLabCache(CONFIG, bits=(4,), budget=None, dtype="float16"),
    "mixed 0.2": lambda: KVLabCache(CONFIG, budget=0.2, dtype="float16", plan_length=LENGTH),
}


@torch.inference_mode()
def read(model: LlamaForCausalLM, cache: Any, rows: int) -> dict[str, float]:
    """Milliseconds a chunk, medians: of the host, and of host and GPU."""
    ids = torch.randint(0, CONFIG.vocab_size, (rows, LENGTH), device="cuda")
    host, whole = [], []
    for begin in range(0, LENGTH, CHUNK):
        torch.cuda.synchronize()
        start = time.perf_counter()
        model(ids[:, begin : begin + CHUNK], past_key_values=cache, logits_to_keep=1)
        host.append(1e3 * (time.perf_counter() - start))
        torch.cuda.synchronize()
        whole.append(1e3 * (time.perf_counter() - start))
    middle = LENGTH // CHUNK // 2
    return {"host_ms": statistics.median(host[middle:]), "whole_ms": statistics.median(whole[middle:])}


@cache
def make_model() -> LlamaForCausalLM:
    register()
    with torch.device("cuda"):
        model: LlamaForCausalLM = LlamaForCausalLM(CONFIG).eval()
    return model


def measure(name: str, rows: int) -> dict[str, Any]:
    model, make = make_model(), CACHES[name]
    model.set_attn_implementation("sdpa" if name == "dense" else ATTENTION)
    read(model, make(), rows)  # kernels are loaded, memory is taken
    return {"cache": name, "rows": rows, **read(model, make(), rows)}


def cases(given: argparse.Namespace) -> list[harness.Case]:
    return [
        harness.Case(f"{name}, {rows} rows", partial(measure, name, rows))
        for rows in given.rows
        for name in CACHES
    ]


def main() -> int:
    parser = harness.options(__doc__)
    parser.add_argument("--rows", type=harness.numbers, default="1,4,20")
    return harness.run(parser, cases)


if __name__ == "__main__":
    raise SystemExit(main())

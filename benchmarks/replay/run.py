"""A GPU and a CPU read the same pages: perplexity of the real model, budget by budget.

SmolLM2 reads windows of a book in chunks of 64 tokens (or token by token, as decoding does: `--chunk 1`)
through mixed caches on the GPU. Before a scored chunk the cache is saved and loaded on the CPU, where a
copy of the model reads the chunk from the very same pages, so that what differs is arithmetic alone: no
importance, no plan. With `--runs` two results of `kvlab demo`, one a device, whose caches made their
allocations themselves, are compared chunk by chunk, too.

    python benchmarks/replay/run.py OUT.json [--windows 4] [--budgets 0.17,0.2,0.3,0.5] [--every 4]
        [--chunk 64] [--length 2048] [--device cuda] [--tiny] [--runs GPU.json CPU.json]
"""

from __future__ import annotations

import argparse
import copy
import math
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from kvlab.integrations.transformers import KVLabCache
from kvlab.lab.benchmark import harness
from kvlab.lab.quality.cases import mixed
from kvlab.lab.quality.comparison import Comparison
from kvlab.lab.quality.model import load_smollm2, tiny_llama
from kvlab.lab.quality.replay import on_cpu
from kvlab.lab.quality.scores import FULL_PRECISION
from kvlab.lab.quality.text import cut_windows

LIMIT = 0.001
"""How far the perplexity of the same pages may differ, of one."""


def loss(model: Any, tokens: torch.Tensor, cache: KVLabCache, begin: int, chunk: int) -> torch.Tensor:
    """Negative log-likelihood of the tokens behind those of a chunk, (rows, chunk), on the CPU."""
    seen, wanted = (tokens[:, at : at + chunk].to(model.device) for at in (begin, begin + 1))
    logits: torch.Tensor = model(seen, past_key_values=cache).logits.float()
    return -logits.log_softmax(-1).gather(-1, wanted[..., None])[..., 0].cpu()


def replay(
    model: Any, host: Any, tokens: torch.Tensor, case: Any, length: int, every: int, chunk: int
) -> dict[str, Any]:
    """Read windows with a cache, and every so many chunks of the second half from the same pages on a CPU."""
    cache, losses = case.make(), []
    start = time.perf_counter()
    for begin in range(0, length, chunk):
        if begin >= length // 2 and begin // chunk % every == every - 1:
            there = loss(host, tokens, on_cpu(case, cache), begin, chunk)
            losses.append(torch.stack([loss(model, tokens, cache, begin, chunk), there]))
        else:
            model(tokens[:, begin : begin + chunk].to(model.device), past_key_values=cache, logits_to_keep=1)
    of_gpu, of_cpu = torch.stack(losses).double().unbind(1)
    ratio = float((of_gpu.mean() - of_cpu.mean()).exp()) - 1
    return {
        "case": f"replayed {case.budget}",
        "budget": case.budget,
        "scored": of_gpu.numel(),
        "bits_per_element": cache.packed.bits_per_element,
        "perplexity_gpu": float(of_gpu.mean().exp()),
        "perplexity_cpu": float(of_cpu.mean().exp()),
        "relative_difference": ratio,
        "largest_of_a_chunk": float(((of_gpu - of_cpu).mean(-1).exp() - 1).abs().max()),
        "largest_of_a_token": float((of_gpu - of_cpu).abs().max()),
        "within": abs(ratio) <= LIMIT,
        "seconds": time.perf_counter() - start,
    }


def compare(gpu: Comparison, cpu: Comparison) -> list[dict[str, Any]]:
    """Cases of both runs: perplexities and divergences, on the windows that both have read.

    Runs agree where perplexities differ by no more than the standard error of what the cache adds to the
    loss of full precision, on the CPU.
    """
    dense, found = cpu.scores[0], []
    for score in gpu.scores:
        other = next((theirs for theirs in cpu.scores if theirs.name == score.name), None)
        starts = [start for start in score.starts if other is not None and start in other.starts]
        if other is None or not starts:
            continue
        nll, its_nll, full = (chunks(of, "nll", starts) for of in (score, other, dense))
        kl, its_kl = (chunks(of, "kl", starts) for of in (score, other))
        change, error = float(nll.mean() - its_nll.mean()), standard_error(its_nll - full)
        found.append(
            {
                "case": f"own {score.name}",
                "windows": len(starts),
                "perplexity_gpu": math.exp(nll.mean()),
                "perplexity_cpu": math.exp(its_nll.mean()),
                "difference_of_loss": change,
                "standard_error": error,
                "within": abs(change) <= error or score.kind == FULL_PRECISION,
                "kl_gpu": float(kl.mean()),
                "kl_cpu": float(its_kl.mean()),
                "kl_standard_error": standard_error(its_kl),
            }
        )
    return found


def chunks(score: Any, field: str, starts: list[int]) -> NDArray[np.float64]:
    """Means of the chunks of some windows, (windows, chunks)."""
    return np.array([getattr(score, field)[score.starts.index(start)] for start in starts])


def standard_error(values: NDArray[np.float64]) -> float:
    """Of the mean of independent values."""
    return float(np.std(values, ddof=1) / math.sqrt(values.size))


def within(rows: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Rows as they come; then an error if one of them is beyond its limit."""
    beyond = []
    for row in rows:
        yield row
        beyond += [] if row["within"] else [row["case"]]
    if beyond:
        raise RuntimeError(f"beyond the limit: {', '.join(beyond)}")


def replays(given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Replay the windows with every budget."""
    length = 512 if given.tiny else given.length
    subject = tiny_llama() if given.tiny else load_smollm2()
    about = {"model": subject.name, "text": subject.text_name}
    windows = cut_windows(subject.text, subject.encode, given.windows, length + 1)
    tokens = torch.from_numpy(windows.tokens)
    host, model = subject.model, copy.deepcopy(subject.model).to(given.device)
    with torch.inference_mode():
        for case in mixed(model.config, length, given.budgets):
            yield replay(model, host, tokens, case, length, given.every, given.chunk) | about


def cases(given: argparse.Namespace) -> list[harness.Case]:
    found = []
    if given.budgets:
        found.append(harness.Case("replayed", lambda: within(replays(given))))
    if given.runs:
        found.append(harness.Case("own", lambda: within(compare(*map(Comparison.read, given.runs)))))
    return found


def budgets(text: str) -> list[float]:
    return [float(word) for word in text.split(",") if word]


def main() -> int:
    parser = harness.options(__doc__)
    parser.add_argument("--windows", type=int, default=4)
    parser.add_argument(
        "--budgets", type=budgets, default="0.17,0.2,0.3,0.5", help="empty: nothing is replayed"
    )
    parser.add_argument("--every", type=int, default=4, help="score every so many chunks of the second half")
    parser.add_argument("--chunk", type=int, default=64, help="tokens read at once; 1: as decoding does")
    parser.add_argument("--length", type=int, default=2048, help="tokens of a window")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--tiny", action="store_true", help="a small random model, short windows")
    parser.add_argument("--runs", nargs=2, type=Path, metavar=("GPU", "CPU"), help="results of kvlab demo")
    return harness.run(parser, cases, limit=LIMIT)


if __name__ == "__main__":
    raise SystemExit(main())

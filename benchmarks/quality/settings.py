"""Quality of a packed cache by its settings: many caches on one GPU, rows of several texts at once.

    python benchmarks/quality/settings.py OUT.json [CASES.json] [--device cuda] [--processes 4]

SmolLM2-135M reads 16 windows of the King James Bible, 20 texts with ten numbers each, and windows of 2,048
tokens. `CASES.json` lists options of `KVLabCache`, each with a `name` and, if not all, `tasks` (methods
of `Reader`); `"dense": true` is full precision. Processes share the GPU, and each takes the next case until
the time is over.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import queue
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import DynamicCache

from kvlab.integrations.transformers import KVLabCache
from kvlab.lab.quality.divergence import bits_per_element, token_divergence
from kvlab.lab.quality.model import load_smollm2
from kvlab.lab.quality.prompts import many_keys
from kvlab.lab.quality.text import cut_windows
from kvlab.lab.results import provenance

WINDOWS, PROMPT, SCORED = 16, 1024, 128
TEXTS, KEYS, TEXT = 20, 10, 1536
WHOLE, CHUNK, BLOCK = 2047, 64, 32
TASKS = ("single", "retrieval", "grow", "parts64")
CASES: list[dict[str, Any]] = [
    {"name": "full precision", "dense": True, "tasks": ["retrieval"]},
    *({"name": f"default {budget}", "budget": budget, "plan_length": 1} for budget in (0.17, 0.2, 0.27, 0.3)),
    *({"name": f"one width {width}", "budget": None, "bits": width} for width in (2, 3, 4)),
]


class Reader:
    """A model, the texts, and what is measured of a cache."""

    def __init__(self, device: str) -> None:
        subject = load_smollm2()
        self.model, self.config = subject.model.to(device), subject.model.config
        texts = cut_windows(subject.text, subject.encode, max(WINDOWS, TEXTS), WHOLE + 1)
        self.tokens = torch.tensor(texts.tokens[:WINDOWS], device=device)
        self.haystacks = [
            many_keys(subject.text[start:], subject.encode, TEXT, keys=KEYS, seed=seed)
            for seed, start in enumerate(texts.starts[:TEXTS])
        ]

    def cache(self, case: dict[str, Any], **more: Any) -> Any:
        options = {name: x for name, x in case.items() if name not in ("name", "tasks", "dense")} | more
        return (
            DynamicCache(config=self.config)
            if "dense" in case
            else KVLabCache(self.config, dtype="float16", **options)
        )

    def logits(self, tokens: torch.Tensor, cache: Any, keep: int = 1) -> torch.Tensor:
        found: torch.Tensor = self.model(tokens, past_key_values=cache, logits_to_keep=keep).logits
        return found

    def truth(self, begin: int, end: int) -> torch.Tensor:
        """Logits of full precision from `begin` to `end - 1`, (windows, tokens, vocabulary)."""
        return torch.cat([self.logits(row[None, :end], None, end - begin) for row in self.tokens])

    def bits(self, cache: Any, rows: int, length: int) -> float:
        config = self.config
        channels = config.hidden_size // config.num_attention_heads
        elements = 2 * config.num_hidden_layers * config.num_key_value_heads * channels * rows * length
        return (
            8 * cache.nbytes / elements if isinstance(cache, KVLabCache) else bits_per_element(cache, cache)
        )

    def single(self, case: dict[str, Any], part: int = PROMPT, scored: int = SCORED) -> dict[str, Any]:
        """Single tokens behind a prompt in one call or in parts."""
        cache, truth = self.cache(case), self.truth(PROMPT, PROMPT + scored)
        for piece in torch.split(self.tokens[:, :PROMPT], part, 1):
            self.logits(piece, cache)
        kl, same, bits = [], [], []
        for at in range(scored):
            found = self.logits(self.tokens[:, PROMPT + at : PROMPT + at + 1], cache)
            new_kl, new_same = token_divergence(truth[:, at], found[:, 0])
            kl.append(new_kl.cpu().numpy())
            same.append(float(new_same.mean()))
            if at in (0, scored - 1):
                bits.append(self.bits(cache, WINDOWS, PROMPT + at + 1))
        return _summary(np.array(kl).T) | {"top1": float(np.mean(same)), "bits": bits}

    def parts64(self, case: dict[str, Any]) -> dict[str, Any]:
        """The prompt in parts of 64."""
        return self.single(case, 64, SCORED // 2)

    def parts512(self, case: dict[str, Any]) -> dict[str, Any]:
        """The prompt in two parts."""
        return self.single(case, 512, SCORED // 2)

    def grow(self, case: dict[str, Any]) -> dict[str, Any]:
        """The demo's protocol: chunks of 64, the second half scored, a budget that is full at the end."""
        cache = self.cache(case, **({"plan_length": WHOLE + 1} if case.get("budget") else {}))
        kl = []
        for begin in range(0, WHOLE, CHUNK):
            end = min(begin + CHUNK, WHOLE)
            found = self.logits(self.tokens[:, begin:end], cache, 0 if begin >= PROMPT else 1)
            if begin < PROMPT:
                continue
            if (begin - PROMPT) % (4 * CHUNK) == 0:
                first, truth = begin, self.truth(begin, min(begin + 4 * CHUNK, WHOLE))
            new_kl, _ = token_divergence(truth[:, begin - first : end - first], found)
            kl.append(new_kl.cpu().numpy())
        return _summary(np.concatenate(kl, 1)) | {"bits": self.bits(cache, WINDOWS, WHOLE)}

    def retrieval(self, case: dict[str, Any]) -> dict[str, Any]:
        """Every question to a row of its own, whose cache has read the text before; answers are forced."""
        device = self.tokens.device
        cache = self.cache(case)
        self.logits(torch.tensor([haystack.tokens for haystack in self.haystacks], device=device), cache)
        bits = self.bits(cache, TEXTS, TEXT)
        cache.batch_repeat_interleave(KEYS)
        asked = [question for haystack in self.haystacks for question in haystack.questions]
        rows = [[*question.ask, *question.answer] for question in asked]
        longest = max(map(len, rows))
        tokens = torch.tensor([row + [0] * (longest - len(row)) for row in rows], device=device)
        begin = torch.tensor([len(question.ask) for question in asked], device=device)
        end = torch.tensor([len(row) for row in rows], device=device)
        log_p, exact = torch.zeros(len(rows), device=device), torch.ones(len(rows), device=device).bool()
        for at in range(1, longest):
            found, target = self.logits(tokens[:, at - 1 : at], cache)[:, -1].float(), tokens[:, at]
            answers = (at >= begin) & (at < end)
            log_p += found.log_softmax(-1).gather(1, target[:, None])[:, 0] * answers
            exact &= ~answers | (found.argmax(-1) == target)
        return {"log_p": log_p.tolist(), "exact": exact.int().tolist(), "bits": bits}


def _summary(kl: np.ndarray) -> dict[str, Any]:
    """Means and the standard error, from means of neighbouring tokens; kl is (windows, tokens)."""
    blocks = kl[:, : kl.shape[1] // BLOCK * BLOCK].reshape(len(kl), -1, BLOCK).mean(-1).ravel()
    return {
        "kl": float(kl.mean()), "error": float(blocks.std(ddof=1) / math.sqrt(len(blocks))),
        "median": float(np.median(kl)), "99.9": float(np.quantile(kl, 0.999)),
        "last_quarter": float(kl[:, -(kl.shape[1] // 4) :].mean()), "windows": kl.mean(1).tolist(),
    }  # fmt: skip


def _work(cases: Any, found: Any, device: str, end: float) -> None:
    torch.set_num_threads(1)
    reader = Reader(device)
    with torch.inference_mode():
        while time.time() < end:
            try:
                case = cases.get(timeout=1)
            except queue.Empty:
                return
            result = {task: getattr(reader, task)(case) for task in case.get("tasks", TASKS)}
            found.put({"case": case, **result})
            print(json.dumps({"case": case, **result}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("cases", type=Path, nargs="?")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=170)
    given = parser.parse_args()
    context, end = multiprocessing.get_context("spawn"), time.time() + given.seconds
    cases, found = context.Queue(), context.Manager().Queue()
    for case in json.loads(given.cases.read_text()) if given.cases else CASES:
        cases.put(case)
    workers = [
        context.Process(target=_work, args=(cases, found, given.device, end)) for _ in range(given.processes)
    ]
    for worker in workers:
        worker.start()
        time.sleep(8 * (worker is workers[0]))  # the first one compiles
    for worker in workers:
        worker.join()
    rows = [found.get() for _ in range(found.qsize())]
    given.out.write_text(
        json.dumps({"schema": "kvlab quality settings 1", "provenance": provenance(), "rows": rows})
    )


if __name__ == "__main__":
    main()

"""Page formats that the cache does not have, simulated with its planner, its pages and its bytes.

    python benchmarks/quality/simulation.py OUT.json FORMATS.json [--seconds 160] [--windows 16] [--layers 30]

SmolLM2-135M reads the windows and late questions of `settings.py` in plain torch, float32. Keys and values
are quantised and dequantised between RoPE and attention. Which token lies in a page of which rung is decided
as `kvlab.reference.cache_plan` does it, under a budget in bytes. No kernel of kvlab runs. Not
simulated: plans while a question is read, and more than one plan in `step` single tokens.

What a format has, an entry of the list FORMATS.json, `formats.py` says.
"""

from __future__ import annotations

import argparse
import json
import time
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from formats import DEFAULT, Cache, Frame
from full_precision import Exact, Model

from kvlab.lab.benchmark import harness
from kvlab.lab.quality.model import load_smollm2
from kvlab.lab.quality.prompts import many_keys
from kvlab.lab.quality.text import cut_windows

PROMPT, SCORED, WHOLE, TEXT, KEYS = 1024, 128, 2047, 1536, 10
EVERY = 16  # tokens between two collections of attention


class Bench:
    """Texts, their full precision, and what is measured of a format."""

    def __init__(self, windows: int, layers: int, device: str, frames: bool) -> None:
        subject = load_smollm2()
        self.model = model = Model(subject, layers, device)
        texts = cut_windows(subject.text, subject.encode, max(windows, 20), WHOLE + 1)
        self.tokens = torch.tensor(texts.tokens[:windows], device=device)
        self.exact = Exact(model, self.tokens[:, :WHOLE], PROMPT)
        stacks = [many_keys(subject.text[start:], subject.encode, TEXT, keys=KEYS, seed=seed)
                  for seed, start in enumerate(texts.starts[:windows])]  # fmt: skip
        self.stacks = Exact(model, torch.tensor([s.tokens for s in stacks], device=device), TEXT)
        asked = [question for stack in stacks for question in stack.questions]
        longest = max(len(q.ask) + len(q.answer) for q in asked)
        rows = [[*q.ask, *q.answer] + [0] * (longest - len(q.ask) - len(q.answer)) for q in asked]
        self.questions = torch.tensor(rows, device=device).view(len(stacks), KEYS, longest)
        at = torch.arange(longest - 1, device=device)
        begin = torch.tensor([len(q.ask) for q in asked], device=device)[:, None]
        end = begin + torch.tensor([len(q.answer) for q in asked], device=device)[:, None]
        self.answers = (at + 1 >= begin) & (at + 1 < end)
        self.frames: dict[Any, Frame] = {}
        self.others: dict[Any, Exact] = {}
        if frames:
            root = Path(__file__).parents[2]
            words = subject.encode((root / "README.md").read_text())
            words += subject.encode((root / "kvlab/ops/plan.py").read_text())
            half = len(words) // 2
            text = torch.tensor([words[:PROMPT], words[half : half + PROMPT]], device=device)
            noise = torch.randint(100, 49000, (2, PROMPT), generator=torch.Generator().manual_seed(0)).to(
                device
            )
            self.others = {"text": Exact(model, text, PROMPT), "random": Exact(model, noise, PROMPT)}

    def kl(self, found: torch.Tensor, begin: int) -> dict[str, Any]:
        """KL divergence of states (B, T, hidden) from `begin` on."""
        kl = []
        for row, exact in zip(found, self.exact.states[:, begin : begin + found.shape[1]], strict=True):
            p = self.model.log_p(exact)
            kl.append((p.exp() * (p - self.model.log_p(row))).sum(-1))
        kl = torch.stack(kl)
        blocks = kl[:, : kl.shape[1] // 32 * 32].reshape(-1, 32).mean(-1)
        return {"kl": float(kl.mean()), "error": float(blocks.std() / len(blocks) ** 0.5),
                "windows": kl.mean(1).tolist(), "blocks": blocks.tolist(),
                "last_quarter": float(kl[:, -(kl.shape[1] // 4) :].mean())}  # fmt: skip

    def single(self, form: dict[str, Any], part: int = PROMPT, scored: int = SCORED) -> dict[str, Any]:
        """Single tokens behind a prompt in one call or in parts."""
        cache = Cache(self, form, self.exact, PROMPT + scored)
        if part == PROMPT:
            exact = self.exact
            cache.put(exact.k[..., :PROMPT, :], exact.v[..., :PROMPT, :], exact.received, True)
            cache.plan(0)
        else:
            self.parts(cache, 0, PROMPT, part)
        step, found, used = cache.form["step"], [], []
        for begin in range(PROMPT, PROMPT + scored, step):
            cache.open(step)
            used.append(cache.used)
            x, k, v, stored, new = cache.read(self.tokens[:, None, begin : begin + step], exact=False, last=1)
            cache.put(k, v, new, False)
            if (begin + step) % EVERY == 0:
                cache.collect(stored, EVERY)
            found.append(x[:, 0])
        bits = 16 * cache.form["budget"]
        return self.kl(torch.cat(found, 1), PROMPT) | {
            "bits": [bits * used[0], bits * used[-1]],
            "over": cache.over,
        }

    def parts(
        self, cache: Cache, begin: int, end: int, part: int, keep: int | None = None
    ) -> torch.Tensor | None:
        """Read tokens in parts, each planned in; states of those from `keep` on."""
        found = []
        for at in range(begin, end, part):
            tokens = self.tokens[:, None, at : min(at + part, end)]
            x, k, v, stored, new = cache.read(tokens, exact=True, last=min(64, tokens.shape[-1]))
            cache.collect(stored, 64)
            if cache.form["states"]:
                k, v = (y[..., at : at + k.shape[-2], :] for y in (self.exact.k, self.exact.v))
            if least := cache.form["seen"]:
                rows = min(64, new.shape[-1])
                later = torch.arange(new.shape[-1], 0, -1, device=new.device)
                new = new * rows / later.clamp(min(least, rows), rows)
            if cache.form["oracle"]:
                new = cache.exact.received[..., at : at + new.shape[-1]]
            cache.put(k, v, new, True)
            cache.plan(0)
            if keep is not None and at >= keep:
                found.append(x[:, 0])
        return torch.cat(found, 1) if found else None

    def parts64(self, form: dict[str, Any]) -> dict[str, Any]:
        """The prompt in parts of 64, the budget held."""
        return self.single(form, 64, SCORED // 2)

    def single64(self, form: dict[str, Any]) -> dict[str, Any]:
        """One call, as many tokens scored as behind parts."""
        return self.single(form, PROMPT, SCORED // 2)

    def grow(self, form: dict[str, Any]) -> dict[str, Any]:
        """The demo's protocol: chunks of 64, the second half scored, bytes that grow into their budget."""
        cache = Cache(self, form | {"plan_length": WHOLE + 1}, self.exact, WHOLE)
        found = self.parts(cache, 0, WHOLE, 64, PROMPT)
        return self.kl(found, PROMPT) | {"bits": 16 * cache.form["budget"] * cache.used}

    def retrieval(self, form: dict[str, Any] | None) -> dict[str, Any]:
        """Questions behind texts that were packed before; answers are forced."""
        exact = self.stacks
        cache = Cache(self, (form or {}) | {"sink": 4}, exact, TEXT)
        cache.put(exact.k, exact.v, exact.received, True)
        if form:
            cache.plan(0)
            cache.open(16)
        x = cache.read(self.questions, exact=form is None, last=0)[0].flatten(0, 1)
        log_p, exact_ = [], []
        for row, asked, answers in zip(x, self.questions.flatten(0, 1), self.answers, strict=True):
            found, target = self.model.log_p(row[:-1][answers]), asked[1:][answers]
            log_p.append(float(found.gather(-1, target[:, None]).sum()))
            exact_.append(int((found.argmax(-1) == target).all()))
        bits = {"bits": 16 * cache.form["budget"] * cache.used} if form else {}
        return {"log_p": log_p, "exact": exact_} | bits


def cases(given: argparse.Namespace) -> list[harness.Case]:
    formats = json.loads(given.formats.read_text())

    @cache
    def bench() -> Bench:
        torch.backends.cuda.matmul.allow_tf32 = False
        return Bench(given.windows, given.layers, given.device, True)

    @cache
    def full() -> dict[str, Any]:
        return bench().retrieval(None)

    @torch.inference_mode()
    def measure(form: dict[str, Any] | None) -> dict[str, Any]:
        if form is None:
            return {"form": {"name": "full precision"}, "retrieval": full()}
        begin, row = time.time(), {"form": form}
        for task in form.get("tasks", DEFAULT["tasks"]):
            row[task] = getattr(bench(), task)(form)
        if "retrieval" in row:
            found, known = row["retrieval"], torch.tensor(full()["exact"]).bool()
            found["found"] = int((torch.tensor(found["exact"]).bool() & known).sum())
            found["lost"] = float((torch.tensor(full()["log_p"]) - torch.tensor(found["log_p"])).mean())
        return row | {"seconds": round(time.time() - begin, 2)}

    asks = any("retrieval" in form.get("tasks", DEFAULT["tasks"]) for form in formats)
    found = [harness.Case("full precision", partial(measure, None))] if asks else []
    return found + [harness.Case(form["name"], partial(measure, form)) for form in formats]


def main() -> int:
    parser = harness.options(__doc__)
    parser.add_argument("formats", type=Path)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--windows", type=int, default=16)
    parser.add_argument("--layers", type=int, default=30)
    parser.set_defaults(seconds=160.0)
    return harness.run(parser, cases, schema="kvlab quality simulation 2")


if __name__ == "__main__":
    raise SystemExit(main())

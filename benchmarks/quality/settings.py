"""Quality of a packed cache by its settings: many caches on one GPU, rows of several texts at once.

    python benchmarks/quality/settings.py OUT.json [CASES.json] [--device cuda] [--processes 4]

SmolLM2-135M reads 16 windows of the King James Bible, 20 texts with ten numbers each (or four chains of
variables, or a list to copy), and windows of 2,048 tokens. A case (an entry of the list CASES.json, else of
`CASES`) has a `name`, `tasks` (methods of `Reader`) and options of `KVLabCache`. It may also have

- `"dense": true`: full precision; `hqq`: the quantised cache of transformers with so many bits, whose exact
  tokens are counted as float16
- `scored`: single tokens behind the prompt instead of 128; `first`: tokens of the first of two calls for it
- `windows`: instead of 16; the first 16 of more are the same
- `"rotary": false`: the cache does not know how RoPE turns keys
- `frames`: a file of text; frames are measured from its first 2,000 tokens
- `text`: "manual" or "code" (`kvlab.lab.quality.text.TEXTS`) instead of the Bible
- `large`: factors of two rotary pairs of keys, from position `begin` on; `constant`: what two channels get

Processes share the GPU, and each takes the next case until the time is over.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import queue
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import DynamicCache, QuantizedCache
from transformers.utils.import_utils import is_hqq_available

from kvlab.errors import BudgetError
from kvlab.integrations.frames import measure_frames
from kvlab.integrations.transformers import KVLabCache
from kvlab.lab.benchmark import harness
from kvlab.lab.quality.divergence import token_divergence, unused_part
from kvlab.lab.quality.measure import held_bytes
from kvlab.lab.quality.model import load_smollm2
from kvlab.lab.quality.prompts import KINDS
from kvlab.lab.quality.stress import large_channels, shifted_keys
from kvlab.lab.quality.text import TEXTS as SOURCES
from kvlab.lab.quality.text import cut_windows
from kvlab.ops.key_frames import KeyFrames

WINDOWS, PROMPT, SCORED = 16, 1024, 128
TEXTS, TEXT = 20, 1536
ASKED: dict[str, dict[str, int]] = {"retrieval": {"keys": 10}, "tracking": {"chains": 4}, "copying": {}}
WHOLE, CHUNK, BLOCK = 2047, 64, 32
FRAMES_OF = 2000
TASKS = ("single", "retrieval", "grow", "parts64")
NOT_OPTIONS = {
    *("name", "tasks", "text", "dense", "hqq", "scored", "first", "large", "begin", "constant", "frames"),
    *("rotary", "windows"),
}
HELD = {f"default {budget}": {"budget": budget, "plan_length": 1} for budget in (0.17, 0.2, 0.27, 0.3)}
WIDTHS: dict[str, dict[str, Any]] = {
    f"one width {bits}": {"budget": None, "bits": [bits]} for bits in (2, 3, 4, "k3v2", "k4v2", "k4v3")
}
RIVALS: dict[str, dict[str, Any]] = {
    **{name: options for name, options in WIDTHS.items() if name != "one width 2"},
    **{
        f"one width {bits}, residual {tokens}": {"budget": None, "bits": [bits], "residual": tokens}
        for bits, windows in {
            2: (32, 64, 128),
            3: (32, 64, 128),
            4: (32,),
            "k3v2": (64,),
            "k4v3": (64,),
        }.items()
        for tokens in windows
    },
}
if is_hqq_available():
    RIVALS |= {f"hqq {bits}": {"hqq": bits} for bits in (2, 4)}
SIDES: dict[str, dict[str, Any]] = {
    "no 8": {"bits": ["k4220v2", "k4422v2", "k8422v3", "k8444v4"]},
    **{f"floor {floor}": {"floor": floor} for floor in (0, 4)},
    **{name: {"importance": name} for name in ("forecast", "key_norm", "recency", "uniform")},
    "recent 64": {"recent": 64},
}
LARGE = {"x6 and x11": [6, 11], "x45": [45, 45]}
LARGE_WINDOWS = 64


def _named(cases: dict[str, dict[str, Any]], tasks: list[str], **more: Any) -> list[dict[str, Any]]:
    return [{"name": name, "tasks": tasks, **options, **more} for name, options in cases.items()]


def _large_channels() -> list[dict[str, Any]]:
    """Large channels from the first token on, behind the prompt, and behind a first call of 10 tokens.

    A budget that holds at every length holds no first call of 10 tokens: it is that of all tokens then, and
    once that of 576, which at 3.2 bits holds little more than the first exact ones.
    """
    short = {
        f"default {budget}, first 10, plan {plan}": {"budget": budget, "plan_length": plan, "first": 10}
        for budget, plan in ((0.2, PROMPT + SCORED), (0.3, PROMPT + SCORED), (0.2, 576))
    }
    held = {name: HELD[name] for name in ("default 0.2", "default 0.3")}
    more = {"windows": LARGE_WINDOWS}
    found = _named(held, ["single"], **more) + _named(short, ["single"], **more)
    for name, factors in LARGE.items():
        for begin, base in ((0, held), (PROMPT, held), (10, short)):
            cases = {f"{which}; {name} from {begin} on": options for which, options in base.items()}
            found += _named(cases, ["single"], large=factors, begin=begin, **more)
    return found


def _constant() -> list[dict[str, Any]]:
    """100 added to two channels of keys, for ladders with and without 8 bits; without it where it is new."""
    narrow = {"default 0.23, bits 3 and 4": {"budget": 0.23, "plan_length": 1, "bits": [3, 4]}}
    cases = {**HELD, **{name: x for name, x in WIDTHS.items() if name != "one width k3v2"}, **narrow}
    return [
        *_named({**narrow, "one width 2": WIDTHS["one width 2"]}, ["single"]),
        *_named({f"{name}; constant 100": x for name, x in cases.items()}, ["single"], constant=100),
    ]


def _other_texts() -> list[dict[str, Any]]:
    """The default and one width of about its bytes on texts of other kinds."""
    cases = {name: HELD[name] for name in ("default 0.2", "default 0.27")}
    cases |= {name: WIDTHS[name] for name in ("one width 3", "one width 4")}
    found: list[dict[str, Any]] = []
    for text in ("manual", "code"):
        full = {f"full precision; {text}": {"dense": True}}
        found += _named(full, ["retrieval"], text=text)
        named = {f"{name}; {text}": options for name, options in cases.items()}
        found += _named(named, ["single", "retrieval", "grow"], text=text)
    return found


def _sides() -> list[dict[str, Any]]:
    """Options that choose between running text and late questions."""
    cases = {
        f"{name} {budget}": {"budget": budget, "plan_length": 1, **options}
        for budget in (0.2, 0.27)
        for name, options in SIDES.items()
    }
    return _named(cases, ["single", "retrieval"])


CASES: list[dict[str, Any]] = [
    *_named(HELD, ["chunks64"]),
    *_large_channels(),
    *_named(RIVALS, ["equal_bytes"]),
    *_named(HELD, ["single"], scored=256),
    *_constant(),
    {"name": "full precision", "dense": True, "tasks": [*ASKED, "floor"]},
    *_named(HELD, ["parts512", *ASKED, "parts64", "single64", "grow", "free"]),
    *_named(WIDTHS, [*ASKED, "free"]),
    *_sides(),
    *_other_texts(),
]


class Reader:
    """A model, windows and questions of a text, and what is measured of a cache."""

    def __init__(self, device: str) -> None:
        subject = load_smollm2()
        self.model, self.config = subject.model.to(device), subject.model.config
        self.encode, self.measured = subject.encode, dict[str, KeyFrames]()
        self.text, self.all = "", torch.empty(0)

    def turn_to(self, text: str, windows: int) -> None:
        if text != self.text or windows > len(self.all):
            self.text, self.source = text, SOURCES[text][1]()
            texts = cut_windows(self.source, self.encode, max(windows, TEXTS), WHOLE + 1)
            self.all = torch.tensor(texts.tokens, device=self.model.device)
            self.starts = texts.starts[:TEXTS]
        self.tokens = self.all[:windows]

    def cache(self, case: dict[str, Any], **more: Any) -> Any:
        options = {name: x for name, x in case.items() if name not in NOT_OPTIONS} | more
        if "frames" in case:
            options["frames"] = self.frames(case["frames"])
        if "dense" in case:
            return DynamicCache(config=self.config)
        if "hqq" in case:
            return QuantizedCache("hqq", self.config, case["hqq"], axis_key=1, axis_value=1)
        cache = KVLabCache(self.config, dtype="float16", **options)
        if not case.get("rotary", True):
            cache._shared.rotary = None
        return cache

    def frames(self, path: str) -> KeyFrames:
        if path not in self.measured:
            ids = torch.tensor([self.encode(Path(path).read_text())[:FRAMES_OF]], device=self.tokens.device)
            self.measured[path] = measure_frames(self.model, ids)
        return self.measured[path]

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
        nbytes = held_bytes(cache)
        if isinstance(cache, QuantizedCache):
            layers: list[Any] = cache.layers
            nbytes -= sum(layer.keys.nbytes + layer.values.nbytes for layer in layers) // 2
        return float(8 * nbytes / elements)

    def changed(self, case: dict[str, Any]) -> AbstractContextManager[None]:
        """Keys of the model with large channels or a constant, as a case has them."""
        config = self.config
        channels = config.hidden_size // config.num_attention_heads
        if "constant" in case:
            return shifted_keys(self.model, [channels // 2 - 2, channels - 2], case["constant"])
        if "large" in case:
            factors = dict(zip((channels // 2 - 3, channels // 16), case["large"], strict=True))
            return large_channels(self.model, factors, begin=case["begin"])
        return nullcontext()

    def single(self, case: dict[str, Any], part: int = PROMPT, scored: int = SCORED) -> dict[str, Any]:
        """Single tokens behind a prompt in one call or in parts."""
        scored, first = case.get("scored", scored), case.get("first", 0)
        cache, truth = self.cache(case), self.truth(PROMPT, PROMPT + scored)
        if first:
            self.logits(self.tokens[:, :first], cache)
        for piece in torch.split(self.tokens[:, first:PROMPT], part, 1):
            self.logits(piece, cache)
        kl, same, bits, unused = [], [], [], []
        for at in range(scored):
            found = self.logits(self.tokens[:, PROMPT + at : PROMPT + at + 1], cache)
            new_kl, new_same = token_divergence(truth[:, at], found[:, 0])
            kl.append(new_kl.cpu().numpy())
            same.append(float(new_same.mean()))
            if at in (0, scored - 1):
                bits.append(self.bits(cache, len(self.tokens), PROMPT + at + 1))
                unused.append(unused_part(cache))
        return _summary(np.array(kl).T) | {"top1": float(np.mean(same)), "bits": bits, "unused": unused}

    def equal_bytes(self, case: dict[str, Any]) -> dict[str, Any]:
        """Single tokens through a cache, and through the default whose budget is what that one took."""
        found = self.single(case)
        return {"case": found, "default": self.single({"budget": found["bits"][-1] / 16, "plan_length": 1})}

    def chunks64(self, case: dict[str, Any]) -> dict[str, Any]:
        """Chunks of 64 behind a prompt in one call."""
        self.logits(self.tokens[:, :PROMPT], cache := self.cache(case))
        kl = []
        for begin in range(PROMPT, PROMPT + 4 * CHUNK, CHUNK):
            truth = self.truth(begin, begin + CHUNK)
            new_kl, _ = token_divergence(truth, self.logits(self.tokens[:, begin : begin + CHUNK], cache, 0))
            kl.append(new_kl.cpu().numpy())
        return _summary(np.concatenate(kl, 1)) | {"bits": self.bits(cache, WINDOWS, PROMPT + 4 * CHUNK)}

    def parts64(self, case: dict[str, Any]) -> dict[str, Any]:
        """The prompt in parts of 64."""
        return self.single(case, 64, SCORED // 2)

    def single64(self, case: dict[str, Any]) -> dict[str, Any]:
        """The prompt in one call, as many tokens scored as behind parts."""
        return self.single(case, PROMPT, SCORED // 2)

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

    def floor(self, case: dict[str, Any]) -> dict[str, Any]:
        """What rounding alone costs: with a dense cache, the prompt in parts of 7."""
        return self.single(case, 7)

    def free(self, case: dict[str, Any]) -> dict[str, Any]:
        """The cache writes its most probable tokens; a dense one reads what it writes."""
        cache, dense = self.cache(case), DynamicCache(config=self.config)
        tokens, kl, same = self.tokens[:, :PROMPT], [], []
        for _ in range(SCORED):
            truth, found = self.logits(tokens, dense)[:, -1], self.logits(tokens, cache)[:, -1]
            new_kl, new_same = token_divergence(truth, found)
            kl.append(new_kl.cpu().numpy())
            same.append(new_same.cpu().numpy())
            tokens = found.argmax(-1)[:, None]
        until = np.cumprod(same, 0).sum(0).astype(int).tolist()
        return _summary(np.array(kl).T) | {"tokens_until_divergence": until}

    def retrieval(self, case: dict[str, Any]) -> dict[str, Any]:
        return self.asked(case, "retrieval")

    def tracking(self, case: dict[str, Any]) -> dict[str, Any]:
        return self.asked(case, "tracking")

    def copying(self, case: dict[str, Any]) -> dict[str, Any]:
        return self.asked(case, "copying")

    def asked(self, case: dict[str, Any], kind: str) -> dict[str, Any]:
        """Every question to a row of its own, whose cache has read the text before; answers are forced."""
        device = self.tokens.device
        haystacks = [
            KINDS[kind](self.source[start:], self.encode, TEXT, seed=seed, **ASKED[kind])
            for seed, start in enumerate(self.starts)
        ]
        cache = self.cache(case)
        self.logits(torch.tensor([haystack.tokens for haystack in haystacks], device=device), cache)
        bits = self.bits(cache, TEXTS, TEXT)
        cache.batch_repeat_interleave(len(haystacks[0].questions))
        asked = [question for haystack in haystacks for question in haystack.questions]
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
        depth = [round(question.depth, 4) for question in asked]
        return {"log_p": log_p.tolist(), "exact": exact.int().tolist(), "depth": depth, "bits": bits}


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
            begin, result = time.time(), {}
            reader.turn_to(case.get("text", "bible"), case.get("windows", WINDOWS))
            with reader.changed(case):
                for task in case.get("tasks", TASKS):
                    try:
                        result[task] = getattr(reader, task)(case)
                    except (BudgetError, torch.OutOfMemoryError) as error:
                        result[task] = {"error": str(error)}
            torch.cuda.empty_cache()  # for the other processes
            found.put({"case": case, "seconds": round(time.time() - begin, 1), **result})


def _lines(rows: list[dict[str, Any]]) -> list[str]:
    """A line for each case and task: what issues and pages ask for."""
    lines = []
    answers = {
        (row["case"].get("text"), task): row[task]
        for row in rows
        if "dense" in row["case"]
        for task in ASKED
        if task in row
    }
    for row in sorted(rows, key=lambda row: str(row["case"]["name"])):
        results = {task: x for task, x in row.items() if task not in ("case", "seconds", "equal_bytes")}
        results |= {f"equal bytes, {name}": x for name, x in row.get("equal_bytes", {}).items()}
        for task, x in results.items():
            full = answers.get((row["case"].get("text"), task))
            line = f"{row['case']['name']} | {task} | bits {np.max(x.get('bits', 0)):.3f} | "
            if "kl" in x:
                line += f"KL {x['kl']:.5f} +- {x['error']:.5f}, last quarter {x['last_quarter']:.5f}"
                line += f" | unused {x['unused'][-1]:.4f}" if x.get("unused") else ""
                until = x.get("tokens_until_divergence")
                line += f" | {np.mean(until):.0f} tokens until divergence" if until else ""
            elif "exact" in x and full:
                both, lost = np.logical_and(x["exact"], full["exact"]), np.subtract(x["log_p"], full["log_p"])
                line += (
                    f"found {both.sum()} of {sum(full['exact'])}, log p lost {-lost.mean():.3f} | by depth"
                )
                for depths in np.array_split(np.argsort(x["depth"], kind="stable"), 5):
                    line += f" {-lost[depths].mean():.2f}"
            lines.append(line + str(x.get("error", "")) * ("kl" not in x))
    return lines


def _read(given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Rows as processes find them; then a line for each is printed."""
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
    rows = []
    while any(worker.is_alive() for worker in workers) or not found.empty():
        try:
            rows.append(found.get(timeout=1))
        except queue.Empty:
            continue
        yield rows[-1]
    for worker in workers:
        worker.join()
    print("\n".join(_lines(rows)))


def cases(given: argparse.Namespace) -> list[harness.Case]:
    return [harness.Case(given.cases.name if given.cases else "the cases of this file", lambda: _read(given))]


def main() -> int:
    parser = harness.options(__doc__)
    parser.add_argument("cases", type=Path, nargs="?")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--processes", type=int, default=4)
    parser.set_defaults(seconds=170.0)
    return harness.run(parser, cases, schema="kvlab quality settings 1")


if __name__ == "__main__":
    raise SystemExit(main())

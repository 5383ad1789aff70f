"""Key channels that become large behind the prompt, in one frame of a head or in two, simulated on a CPU.

    python benchmarks/quality/late_channels.py OUT.json [CASES.json] [--windows 4]

As `simulation.py` with the default ladder of the cache, and two rotary pairs of keys are multiplied, and
those of queries divided, from the first token behind the prompt on. Ratios follow and shifts rise as in the
cache. A case (an entry of CASES.json, else of `CASES`) is a format of `formats.py` with

- `large`: the factors of pairs 29 and 4; left out: plain keys, which the next cases of its budget are held to
- `frames`: 1 (if left out), stored keys are encoded again where a shift rises; or 2, keys keep the frame in
  which they were written, all of a page have one, and what fills no page of the older frame is encoded again
- `together`: so many pages of a rung go to the newer frame with the one that is not full
- `follow`: the mean of a pair whose shift rises by s is multiplied by 2**s in the newer frame
- `known`: the newer frame has the factors themselves, from the first token behind the prompt on

Two of the ways of `simulation.py` differ: tokens are read and stored one by one, from the 33rd on four at a
time, and plans are made every 16 tokens.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from functools import cache, partial
from pathlib import Path
from typing import Any

import simulation
import torch
from formats import GRID, Cache, hadamard, on_grid
from full_precision import Exact, Model
from simulation import EVERY, PROMPT, SCORED, Bench

from kvlab.lab.benchmark import harness
from kvlab.lab.quality.model import load_smollm2
from kvlab.lab.quality.text import cut_windows
from kvlab.ops.frame import further_shift
from kvlab.reference.blocks import follow_ratios

PAIRS, FITTED_TO, STEP = (29, 4), 16, 16
PER_TOKEN = ("k", "v", "rung", "importance", "steps", "ratios")
PROFILES = [[[4, 2, 2, 0], 2], [[4, 4, 2, 2], 2], [[8, 4, 2, 2], 3], [[8, 4, 4, 4], 4], [8, 8]]
LARGE = {"x6 and x11": [6, 11], "x45": [45, 45]}
WAYS: dict[str, dict[str, Any]] = {
    "one frame": {},
    "one frame, its mean follows": {"follow": True},
    "two frames": {"frames": 2},
    "two frames, the mean follows": {"frames": 2, "follow": True},
    "two frames, factors known": {"frames": 2, "follow": True, "known": True},
}
CASES: list[dict[str, Any]] = []
for budget in (0.3, 0.2):
    CASES.append({"name": f"{budget}; plain keys", "budget": budget})
    CASES += [
        {"name": f"{budget}; {factors}; {way}", "budget": budget, "large": LARGE[factors], **WAYS[way]}
        for factors in LARGE
        for way in WAYS
    ]


class LateModel(Model):
    """A Llama whose keys have large channels behind the prompt."""

    factors: tuple[float, ...] = ()

    def qkv(self, layer: int, x: torch.Tensor, first: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        q, k, v = super().qkv(layer, x, first)
        late = first + torch.arange(x.shape[-2], device=x.device) >= PROMPT
        for pair, factor in zip(PAIRS, self.factors, strict=False):
            for channel in (pair, pair + self.dim // 2):
                q[..., late, channel] /= factor
                k[..., late, channel] *= factor
        return q, k, v


class LateCache(Cache):
    """A cache whose heads have an older and a newer frame."""

    def __init__(self, bench: Bench, form: dict[str, Any], exact: Exact, most: int) -> None:
        super().__init__(bench, form, exact, most)
        shape, half = exact.k.shape[:3], self.model.dim // 2
        self.two, self.follow = form.get("frames", 1) == 2, form.get("follow", False)
        self.base = self.frame(64)
        self.shift = torch.zeros(2, *shape, half)
        self.newer = torch.zeros(*shape, most, dtype=torch.long)  # the frame of a token
        self.steps = torch.zeros(*shape, most)  # of keys
        self.ratios = torch.zeros(*shape, half, dtype=torch.int16)
        self.rises = 0

    def mean_of(self, frame: int) -> torch.Tensor:
        """Means (layers, rows, heads, D) of a frame."""
        power = torch.exp2(self.shift[frame] - self.shift[0] * self.two)
        return self.base.mean * (torch.cat([power] * 2, -1) if self.follow else 1)

    def sorted(self, value: torch.Tensor) -> torch.Tensor:
        order = super().sorted(value)
        newer = self.newer[..., : self.n].reshape(value.shape).gather(-1, order)
        return order.gather(-1, newer.argsort(dim=-1, stable=True))

    def pack(self, at: torch.Tensor, to: Any, length: int, given: bool = False) -> None:
        most = self.k.shape[-2]
        k, v, steps = self.k.view(-1, self.model.dim), self.v.view(-1, self.model.dim), self.steps.view(-1)
        for part in at.split(1 << 16):
            of = torch.div(part, most, rounding_mode="floor")
            step = steps[part] if given else None
            k[part], v[part], steps[part] = self.packed(
                k[part], v[part], of, self.newer.view(-1)[part], to, step
            )

    def packed(
        self,
        k: torch.Tensor,
        v: torch.Tensor,
        of: torch.Tensor,
        newer: torch.Tensor,
        to: Any,
        step: Any = None,
    ) -> tuple[torch.Tensor, ...]:
        """Keys and values (m, D) of heads `of` as they are read from pages, and steps of keys.

        `newer`: their frames, 0 or 1. With steps given values stay as they are.
        """
        shift = torch.stack([x.flatten(0, 2) for x in self.shift])[newer, of]
        power = torch.exp2(-torch.cat([shift] * 2, -1))
        mean = torch.stack([self.mean_of(i).flatten(0, 2) for i in (0, 1)])[newer, of]
        frame = self.base
        order, ratio, weight = (x.flatten(0, 2)[of] for x in (frame.order, frame.ratio, frame.weight))
        y = hadamard(((k - mean) * power).gather(-1, order).unflatten(-1, (4, -1)))
        y, steps = on_grid(y, to[0], ratio, weight, GRID, step)
        k = torch.zeros_like(k).scatter_(-1, order, hadamard(y).flatten(-2)) / power + mean
        if step is None:
            one = torch.ones(len(v), 1)
            v = hadamard(on_grid(hadamard(v)[:, None], [to[1]], one, one, GRID)[0][:, 0])
        return k, v, steps

    def look(self, layer: int, q: torch.Tensor, k: torch.Tensor) -> None:
        """Let ratios follow queries (B, H, group, T, D) and keys (B, H, T, D), and shifts rise."""
        tokens, dim = q.shape[-2:]
        newest, newer = int(self.two), self.shift[int(self.two), layer]
        mean = self.mean_of(newest)[layer].reshape(-1, dim).numpy()
        ratios = self.ratios[layer].view(-1, dim // 2).numpy()
        queries = (q * dim**0.5).permute(3, 0, 1, 2, 4).reshape(tokens, -1, dim).numpy()
        follow_ratios(ratios, queries, k.permute(2, 0, 1, 3).reshape(tokens, -1, dim).numpy(), mean)
        if self.form.get("known"):
            if tokens == 1:
                for pair, factor in zip(PAIRS, self.model.factors, strict=True):
                    self.shift[1, layer, ..., pair] = math.log2(factor)
            return
        further = further_shift(ratios, newer.reshape(-1, dim // 2).byte().numpy())
        if not further.any():
            return
        further = torch.tensor(further.astype(int)).view(newer.shape)
        self.rises += int(further.any(-1).sum())
        risen, had = further.any(-1), (self.shift[1, layer] != self.shift[0, layer]).any(-1)
        if self.two:
            self.shift[1, layer] += further
            self._leave(layer, risen & ~had)
            self._again(layer, risen & had)
        else:
            self.shift[:, layer] += further
            self._again(layer, risen)

    def _leave(self, layer: int, heads: torch.Tensor) -> None:
        """Bring what fills no chunk of the older frame, the newest tokens of each rung, to the newer one."""
        page, n = self.form["page"] * self.form.get("together", 1), self.n
        for row, head in heads.nonzero().tolist():
            rung = self.rung[layer, row, head, :n].clamp_max(self.top)
            for r in range(len(self.bits)):
                own = (rung == r).nonzero()[:, 0]
                left = own[len(own) - len(own) % page :]
                self.newer[layer, row, head, left] = 1
                self._place(layer, row, head, left, r, False)

    def _again(self, layer: int, heads: torch.Tensor) -> None:
        """Find codes of the newest frame again."""
        for row, head in heads.nonzero().tolist():
            rung = self.rung[layer, row, head, : self.n].clamp_max(self.top)
            for r in range(len(self.bits)):
                own = rung == r
                if self.two:
                    own &= self.newer[layer, row, head, : self.n] == 1
                self._place(layer, row, head, own.nonzero()[:, 0], r, not self.follow)

    def _place(self, layer: int, row: int, head: int, at: torch.Tensor, rung: int, given: bool) -> None:
        shape = self.rung.shape
        at = ((layer * shape[1] + row) * shape[2] + head) * self.k.shape[-2] + at
        self.pack(at, self.bits[rung], self.n, given)

    def land(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rows, many, heads, tokens, dim = k.shape
        of = torch.arange(rows * heads) + layer * rows * heads
        of = of.view(rows, 1, heads, 1).expand(rows, many, heads, tokens).reshape(-1)
        newer = self.has_newer().flatten(0, 2)[of].long()
        to = self.bits[0] if self.poor else self.landing
        k2, v2, steps = self.packed(k.reshape(-1, dim), v.reshape(-1, dim), of, newer, to)
        self.steps[layer, ..., self.n : self.n + tokens] = steps.view(rows, heads, tokens)
        return k2.view(k.shape), v2.view(v.shape)

    def has_newer(self) -> torch.Tensor:
        """Which heads have a newer frame."""
        return (self.shift[1] != self.shift[0]).any(-1)

    def put(self, k: torch.Tensor, v: torch.Tensor, received: torch.Tensor, new: bool) -> None:
        self.newer[..., self.n : self.n + k.shape[-2]] = self.has_newer()[..., None]
        super().put(k, v, received, new)


class LateBench(Bench):
    """Windows, and full precision with and without large channels."""

    def __init__(self, windows: int) -> None:
        subject = load_smollm2()
        self.model = LateModel(subject, 30, "cpu")
        texts = cut_windows(subject.text, subject.encode, max(windows, 20), simulation.WHOLE + 1)
        self.tokens = torch.tensor(texts.tokens[:windows])
        self.frames, self.others = {}, {}
        self.prompts: dict[float, dict[str, torch.Tensor]] = {}
        self.truths: dict[tuple[float, ...], Exact] = {}

    def turn_to(self, factors: tuple[float, ...]) -> None:
        self.model.factors = factors
        if factors not in self.truths:
            self.truths[factors] = Exact(self.model, self.tokens[:, : PROMPT + SCORED], PROMPT)
        self.exact = self.truths[factors]

    def late(self, form: dict[str, Any]) -> dict[str, Any]:
        """Single tokens behind the prompt, a plan before each sixteenth."""
        cache, found = LateCache(self, form, self.exact, PROMPT + SCORED), []
        self.read_prompt(cache)
        for begin in range(PROMPT, PROMPT + SCORED, STEP):
            cache.open(STEP)
            # Shifts rise in the first 32 tokens: later ones may go four at a time.
            some = 1 if begin < PROMPT + 2 * STEP else 4
            for at in range(begin, begin + STEP, some):
                tokens = self.tokens[:, None, at : at + some]
                x, k, v, stored, new = cache.read(tokens, exact=False, last=1)
                cache.put(k, v, new, False)
                found.append(x[:, 0])
            cache.collect(stored, EVERY)
        shifts = [cache.shift[1][..., pair].flatten().long().bincount().tolist() for pair in PAIRS]
        rest = [p for p in range(self.model.dim // 2) if p not in PAIRS]
        more = {"shifts": shifts, "others": cache.shift[1][..., rest].flatten().long().bincount().tolist()}
        more |= {"rises": cache.rises, "bits": 16 * cache.form["budget"] * cache.used}
        return self.kl(torch.cat(found, 1), PROMPT) | more

    def read_prompt(self, cache: LateCache) -> None:
        """Store the prompt, which all cases of a budget have, and plan."""
        kept = self.prompts.setdefault(cache.form["budget"], {})
        if not kept:
            exact = self.exact
            cache.put(exact.k[..., :PROMPT, :], exact.v[..., :PROMPT, :], exact.received, True)
            for layer in range(self.model.layers):
                cache.look(layer, exact.newest[layer], exact.k[layer, ..., PROMPT - FITTED_TO : PROMPT, :])
            cache.plan(0)
            kept |= {name: getattr(cache, name).clone() for name in PER_TOKEN}
        for name, x in kept.items():
            getattr(cache, name).copy_(x)
        cache.n = PROMPT


def cases(given: argparse.Namespace) -> list[harness.Case]:
    plain: dict[float, torch.Tensor] = {}

    @cache
    def bench() -> LateBench:
        torch.set_num_threads(1)
        return LateBench(given.windows)

    @torch.inference_mode()
    def measure(case: dict[str, Any]) -> dict[str, Any]:
        begin = time.time()
        bench().turn_to(tuple(case.get("large", ())))
        row = {"case": case, **bench().late({"bits": PROFILES, **case})}
        blocks = torch.tensor(row["blocks"])
        if not case.get("large"):
            plain[case["budget"]] = blocks
        if (base := plain.get(case["budget"])) is not None:
            times = blocks.mean() / base.mean()
            row["times"] = float(times)
            row["times_error"] = float((blocks - times * base).std() / len(blocks) ** 0.5 / base.mean())
        return row | {"seconds": round(time.time() - begin)}

    chosen = json.loads(given.cases.read_text()) if given.cases else CASES
    return [harness.Case(case["name"], partial(measure, case)) for case in chosen]


def main() -> int:
    parser = harness.options(__doc__, "cpu")
    parser.add_argument("cases", type=Path, nargs="?")
    parser.add_argument("--windows", type=int, default=4)
    return harness.run(parser, cases, schema="kvlab quality late channels 2")


if __name__ == "__main__":
    raise SystemExit(main())

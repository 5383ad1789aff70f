"""Page formats that the cache does not have, simulated with its planner, its pages and its bytes.

    python benchmarks/quality/simulation.py OUT.json FORMATS.json [--seconds 160] [--windows 16] [--layers 30]

SmolLM2-135M reads the windows and late questions of `settings.py` in plain torch, float32. Keys and values
are quantised and dequantised between RoPE and attention. Which token lies in a page of which rung is decided
as `kvlab.reference.cache_plan` does it, under a budget in bytes. No kernel of kvlab runs. Not
simulated: plans while a question is read, and more than one plan in `step` single tokens.

A format (an entry of the list FORMATS.json; what is left out is that of the cache) has

- `bits`: rungs, lowest first, each [K, V]. K is a width, or a list of four for blocks of 16 channels, whose
  rotary pairs are sorted by the energy of keys times that of queries, with a frozen ratio of steps a block
- `page`: tokens of a page; `ring`: newest tokens that have slots of 8 bits beside the pages, with the sinks
- `frame`: tokens of the row that statistics come from, or "text", "random": other tokens, once for the model;
  `mean`: the same for the mean of keys alone; `again`: lengths at which the frame is taken again
- `budget`, `sink`, `recent`, `floor`, `shares` of layers; `norm`: importance adds up to 1 a head;
  `side`: bytes of steps, position and importance a token; `error`: that of widths below 4, times the grid's
- `scale`: at most one in so many tokens is recent (results without it: 1); `step`: single tokens between
  two plans
- `grid` of blocks: `ratios` of so many to an octave (0: any), `equal` weights of blocks; the best
  of `search` steps is taken. Results of 2026-11-27 call `ratios` 1 and 4 "power" and "quarter"
- `kweight`: how much more an error of keys counts; `power` of importance, relative to the mean
- `seen`: attention that a new token of a part receives is the mean of the rows that see it, of at least so
  many, not of all 64 (0); or `of`: of the last rows of the part, one in so many (1)
- `newest`: what recent tokens count as receiving at least, instead of outweighing all
- `gain`: eighths of an octave by which keys of 2 and 3 bits are longer than their codes say
- to see what costs: `ideal`: codes come from exact values, not from wider codes; `oracle`: importance is that
  at the end of the prompt; `states`: parts leave keys and values of full precision; `exact`: so many first
  tokens are exact, `exact_side`: "k", "v" or "kv" of them; `first`: what sinks count as receiving at least
- `slots`: so many first tokens lie in slots of 8 bits beside the pages, of 2 bytes beside their codes
- `steady`: means are multiplied by what RoPE leaves of them, as in the cache (results before: false);
  `fixed`: bytes of a head beside its pages; `loss`: that of profiles is the cache's, or of the `"frame"`
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from kvlab.cache.importance import weight_of_collection
from kvlab.lab.quality.model import load_smollm2
from kvlab.lab.quality.prompts import many_keys
from kvlab.lab.quality.text import cut_windows
from kvlab.lab.results import provenance
from kvlab.ladder import BITS_OF_WIDTHS, ERRORS, SHARES, parse_bits
from kvlab.ops.frame import STEADY_OVER, mean_factors
from kvlab.pages import PAGE_TABLE_BYTES, TOKENS_PER_PAGE

PROMPT, SCORED, WHOLE, TEXT, KEYS = 1024, 128, 2047, 1536, 10
EVERY = 16  # tokens between two collections of attention
SINKS, NEWEST = 2.0**24, 1e4  # weights
NEWEST_ASKED = 16
STEP = (1.0, 1.5957, 0.9957, 0.5860, 0.3352, 0.1881, 0.1041, 0.0568, 0.0308)
POWERS = (1.0, 2.0, 1.0, 0.5, 0.25, 0.0, 0.0, 0.0, 1 / 32)
GRID: dict[str, Any] = {"ratios": 0, "equal": False, "search": 5}
LOSS = (1.0, 0.3634, 0.1188, 0.03744, 0.01154, 0.003495, 0.001040, 0.000304, 0.0000877)
DEFAULT: dict[str, Any] = {
    "bits": [[r.bits_k, r.bits_v] for r in parse_bits(BITS_OF_WIDTHS, 1)[0]],
    "page": TOKENS_PER_PAGE, "ring": 0, "frame": 64, "sink": 4, "recent": 20, "floor": 1.0, "norm": False,
    "side": 5, "error": 1.0, "step": 8, "again": [], "shares": None, "scale": 16, "plan_length": 1,
    "grid": {}, "kweight": 1.0, "power": 1.0, "newest": None, "gain": [0, 0], "ideal": False, "oracle": False,
    "states": False, "exact": 0, "exact_side": "kv", "first": None,
    "slots": 0, "seen": 0, "of": 1, "steady": True, "fixed": None, "loss": "cache",
    "tasks": ["single", "retrieval"],
}  # fmt: skip


class Model:
    """The layers of a Llama, cut where a cache stands."""

    def __init__(self, subject: Any, layers: int, device: str) -> None:
        config, weights = subject.model.config, subject.model.to(device).state_dict()
        self.heads_q, self.heads = config.num_attention_heads, config.num_key_value_heads
        self.dim, self.eps = config.hidden_size // self.heads_q, config.rms_norm_eps
        self.layers = min(layers, config.num_hidden_layers)
        self.group, self.weights, self.device = self.heads_q // self.heads, weights, device
        self.frequency = subject.model.model.rotary_emb.inv_freq.to(device)
        factors = mean_factors(self.frequency.tolist(), self.dim, STEADY_OVER)
        self.steady = torch.tensor(factors, device=device)

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return F.rms_norm(x, x.shape[-1:], self.weights[f"model.{name}.weight"], self.eps)

    def linear(self, x: torch.Tensor, layer: int, name: str) -> torch.Tensor:
        return x @ self.weights[f"model.layers.{layer}.{name}.weight"].T

    def qkv(self, layer: int, x: torch.Tensor, first: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Of (..., T, hidden): q (..., H, group, T, D), k and v (..., H, T, D); q is divided by sqrt(D)."""
        h = self.norm(x, f"layers.{layer}.input_layernorm")
        q, k, v = (self.linear(h, layer, f"self_attn.{name}_proj") for name in "qkv")
        q, k, v = (y.unflatten(-1, (-1, self.dim)).transpose(-2, -3) for y in (q, k, v))
        angle = (first + torch.arange(x.shape[-2], device=self.device))[:, None] * self.frequency
        cos, sin = torch.cat([angle.cos()] * 2, -1), torch.cat([angle.sin()] * 2, -1)
        half = self.dim // 2
        q, k = (y * cos + torch.cat([-y[..., half:], y[..., :half]], -1) * sin for y in (q, k))
        return q.unflatten(-3, (self.heads, self.group)) / math.sqrt(self.dim), k, v

    def rest(self, layer: int, x: torch.Tensor, o: torch.Tensor) -> torch.Tensor:
        """What follows attention, o (..., H, group, T, D)."""
        x = x + self.linear(o.flatten(-4, -3).transpose(-2, -3).flatten(-2), layer, "self_attn.o_proj")
        h, name = self.norm(x, f"layers.{layer}.post_attention_layernorm"), "mlp.{}_proj"
        gate, up = (self.linear(h, layer, name.format(n)) for n in ("gate", "up"))
        return x + self.linear(F.silu(gate) * up, layer, name.format("down"))

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        return F.embedding(tokens, self.weights["model.embed_tokens.weight"])

    def log_p(self, x: torch.Tensor) -> torch.Tensor:
        return (self.norm(x, "norm") @ self.weights["model.embed_tokens.weight"].T).log_softmax(-1)


class Exact:
    """What rows (B, n) leave behind in full precision: keys, values, states, energies and attention.

    k, v (L, B, H, n, D); states (B, n, hidden); asked {length: (L, B, H, D)}; received (L, B, H, prompt), the
    attention that the last 64 rows of the prompt pay; newest (L, B, H, group, 16, D), its last queries.
    """

    def __init__(self, model: Model, tokens: torch.Tensor, prompt: int) -> None:
        rows, n = tokens.shape
        shape = model.layers, rows, model.heads
        self.k, self.v = (torch.empty(*shape, n, model.dim, device=model.device) for _ in range(2))
        self.asked = {cut: torch.empty(*shape, model.dim, device=model.device) for cut in (64, 256, prompt)}
        self.received = torch.empty(*shape, prompt, device=model.device)
        self.newest = torch.empty(*shape, model.group, NEWEST_ASKED, model.dim, device=model.device)
        states = []
        for begin in range(0, rows, 4):
            at = slice(begin, begin + 4)
            x = model.embed(tokens[at])
            for layer in range(model.layers):
                q, k, v = model.qkv(layer, x, 0)
                self.k[layer, at], self.v[layer, at] = k, v
                for cut, energy in self.asked.items():
                    energy[layer, at] = q[..., 4:cut, :].square().mean((-2, -3))
                self.newest[layer, at] = q[..., prompt - NEWEST_ASKED : prompt, :]
                late = q[..., max(prompt - 64, 0) : prompt, :] @ k[..., None, :prompt, :].transpose(-1, -2)
                late = late + torch.full_like(late[0, 0, 0], -torch.inf).triu(
                    late.shape[-1] - late.shape[-2] + 1
                )
                self.received[layer, at] = late.softmax(-1).mean((-2, -3))
                o = F.scaled_dot_product_attention(
                    q.flatten(1, 2), k.repeat_interleave(model.group, 1), v.repeat_interleave(model.group, 1),
                    is_causal=True, scale=1.0,
                )  # fmt: skip
                x = model.rest(layer, x, o.unflatten(1, (model.heads, model.group)))
            states.append(x)
        self.states = torch.cat(states)

    def rows(self, some: slice) -> Exact:
        """The same of fewer rows."""
        other = object.__new__(Exact)
        other.newest = self.newest[:, some]
        other.k, other.v, other.received = self.k[:, some], self.v[:, some], self.received[:, some]
        other.asked, other.states = {n: x[:, some] for n, x in self.asked.items()}, self.states[some]
        return other


def hadamard(x: torch.Tensor) -> torch.Tensor:
    """Hadamard transform along the last axis, orthonormal."""
    h = torch.ones(1, 1, device=x.device)
    while len(h) < x.shape[-1]:
        h = torch.cat([torch.cat([h, h], 1), torch.cat([h, -h], 1)], 0)
    return x @ (h / math.sqrt(len(h)))


def on_grid(
    x: torch.Tensor,
    widths: list[int],
    ratio: torch.Tensor,
    weight: torch.Tensor,
    grid: dict[str, Any],
    given: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """x (m, blocks, channels) on grids: one step a token, the best of `search`, times a ratio (m, blocks).

    Returns x and the steps (m,). Where `given` is above 0 it is the step.
    """
    used = torch.tensor([w > 0 for w in widths], device=x.device)
    top = torch.tensor([2.0**w - 1 for w in widths], device=x.device)[:, None] / 2
    ratio = torch.exp2((ratio.log2() * grid["ratios"]).round() / grid["ratios"]) if grid["ratios"] else ratio
    steps = POWERS if grid["ratios"] == 1 else STEP
    size = ratio * torch.tensor([steps[w] for w in widths], device=x.device)
    r = (x.square().mean(-1) / ratio.square() * used).sum(-1) / used.sum().clamp_min(1)
    base = (4 * r.clamp_min(1e-24).log2()).round()
    weight = 1 / ratio.square() if grid["equal"] else weight
    y = x / size[..., None]
    given = torch.zeros(len(x), device=x.device) if given is None else given
    best = found = taken = None
    for j in range(-(grid["search"] // 2), grid["search"] // 2 + 1):
        one = torch.exp2((base + (2 * j if min(widths) == 8 else j)) / 8)
        one = torch.where(given > 0, given, one)
        step = one[:, None, None]
        t = torch.minimum(torch.maximum((y / step).floor() + 0.5, -top), top) * (step * size[..., None])
        e = ((x - t).square().sum(-1) * weight).sum(-1)
        if best is None:
            best, found, taken = e, t, one
        else:
            taken = torch.where(e < best, one, taken)
            found = torch.where((e < best)[:, None, None], t, found)
            best = torch.minimum(e, best)
    return found, taken


class Frame:
    """Mean, order and ratios of each (layer, row, head); rows may be 1, for all."""

    def __init__(
        self, exact: Exact, n: int, mean_of: torch.Tensor | None, narrow: bool, pool: bool, factor: Any
    ) -> None:
        k, cut = exact.k[..., 4:n, :], min(exact.asked, key=lambda c: abs(c - n))
        self.mean = k.mean(-2) if mean_of is None else mean_of
        if pool:
            self.mean = self.mean.mean(1, keepdim=True)
        else:
            self.mean = self.mean * factor
        if narrow:
            first = exact.k[..., 0, :]
            self.mean = torch.where(self.mean.square() <= 2 * self.mean * first, self.mean, 0)
        size = (k - self.mean[..., None, :]).square().mean(-2)
        asked = exact.asked[cut]
        if pool:
            size, asked = size.mean(1, keepdim=True), asked.mean(1, keepdim=True)
        half = size.shape[-1] // 2
        pair = (size[..., :half] + size[..., half:]) * (asked[..., :half] + asked[..., half:])
        order = pair.argsort(-1, descending=True).unflatten(-1, (4, half // 4))
        self.order = torch.cat([order, order + half], -1).flatten(-2)
        blocks = [x.gather(-1, self.order).unflatten(-1, (4, half // 2)).mean(-1) for x in (size, asked)]
        self.ratio, self.weight = blocks[0].sqrt().clamp_min(1e-6), blocks[1]

    def loss(self, widths: list[int]) -> float:
        """Mean loss of keys, weighted by what queries ask."""
        energy = self.ratio.square() * self.weight
        lost = (energy * torch.tensor([LOSS[w] for w in widths], device=energy.device)).sum(-1) / energy.sum(
            -1
        )
        return float(lost.mean())

    def keys(self, k: torch.Tensor, of: torch.Tensor, width: Any, grid: dict[str, Any]) -> torch.Tensor:
        """Keys (m, D) of frames `of` as they are read from pages."""
        mean = self.mean.flatten(0, 2)[of]
        if isinstance(width, int):
            one = torch.ones(len(k), 1, device=k.device)
            return hadamard(on_grid(hadamard(k - mean)[:, None], [width], one, one, GRID)[0][:, 0]) + mean
        order = self.order.flatten(0, 2)[of]
        y = hadamard((k - mean).gather(-1, order).unflatten(-1, (4, -1)))
        y = on_grid(y, width, self.ratio.flatten(0, 2)[of], self.weight.flatten(0, 2)[of], grid)[0]
        return torch.zeros_like(k).scatter_(-1, order, hadamard(y).flatten(-2)) + mean


class Cache:
    """Rows of tokens at rungs: values as they are read, the rung of each, its importance."""

    def __init__(self, bench: Bench, form: dict[str, Any], exact: Exact, most: int) -> None:
        self.form, self.model, self.exact = DEFAULT | form, bench.model, exact
        model, form = bench.model, self.form
        layers, rows, heads = exact.k.shape[:3]
        self.k, self.v = (
            torch.empty(layers, rows, heads, most, model.dim, device=model.device) for _ in "kv"
        )
        self.rung = torch.zeros(layers, rows, heads, most, dtype=torch.long, device=model.device)
        self.importance = torch.zeros(layers, rows, heads, most, device=model.device)
        self.blocks = any(isinstance(k, list) for k, _ in form["bits"])
        bits = [*form["bits"], (8, 8)] if form["ring"] else form["bits"]
        bits = [([k] * 4 if self.blocks and isinstance(k, int) else k, v) for k, v in bits]
        self.bits, self.landing = bits[: len(form["bits"])], bits[-1]
        self.n, self.used, self.top, self.poor = 0, 0.0, len(self.bits) - 1, False
        self.whole = [torch.empty_like(x) for x in (self.k, self.v)] if form["ideal"] else []
        self.bench, self.frames = bench, {}
        page, side = form["page"], form["side"]
        self.cost = [page * (self._code_bytes(*r) + side) + PAGE_TABLE_BYTES for r in self.bits]
        fixed = form["fixed"] or 4 + 3 * model.dim + (model.dim + 18) * self.blocks
        ring = (form["ring"] + form["sink"]) * (2 * model.dim + side) if form["ring"] else 0
        self.fixed = heads * (fixed + ring + form["slots"] * (2 * model.dim + 2))
        self.loss = [self._loss(*r) for r in self.bits]
        self.share = torch.tensor(form["shares"] or [1.0] * layers, device=model.device)[:layers]
        self.share = (self.share / self.share.mean())[:, None].expand(layers, rows).reshape(-1)

    def _code_bytes(self, k: Any, v: int) -> float:
        if not isinstance(k, (list, tuple)):
            return self.model.dim / 8 * (k + v)
        n = {w: list(k).count(w) * (self.model.dim // 64) for w in (2, 3, 4, 8)}
        words = (n[2] + 1) // 2 + n[3] // 4 * 3 + n[3] % 4 + n[4] + 2 * n[8]
        return 8 * words + self.model.dim / 8 * v

    def _loss(self, k: Any, v: int) -> float:
        if isinstance(k, list) and self.form["loss"] == "cache" and set(k) <= set(ERRORS):
            of_keys = sum(share * ERRORS[width] for share, width in zip(SHARES, k, strict=True))
        else:
            of_keys = ERRORS[k] if isinstance(k, int) else self.frame(64).loss(k)
        return float(self.form["kweight"] * of_keys + (ERRORS.get(v) or LOSS[v]))

    def frame(self, length: int) -> Frame:
        """The frame that tokens written at a length have."""
        source, again = self.form["frame"], [n for n in self.form["again"] if n <= length]
        source = again[-1] if again else source
        narrow = not self.form["ring"] and self.bits[-1][0] not in (8, [8] * 4)
        key = source, self.form.get("mean"), narrow, self.form["steady"], id(self.exact)
        if key not in self.bench.frames:
            of, n = (self.exact, source) if isinstance(source, int) else (self.bench.others[source], PROMPT)
            n = min(n, of.received.shape[-1])
            mean, mean_of = self.form.get("mean"), None
            if isinstance(mean, int):
                mean_of = self.exact.k[..., 4:mean, :].mean(-2)
            factor = self.model.steady if self.form["steady"] else 1
            pool = not isinstance(source, int)
            self.bench.frames[key] = Frame(of, n, mean_of, narrow, pool, factor)
        return self.bench.frames[key]

    def pack(self, at: torch.Tensor, to: Any, length: int) -> None:
        """Bring tokens at flat indices to widths; in slices that fit memory."""
        frame, most = self.frame(length), self.k.shape[-2]
        k, v = self.k.view(-1, self.model.dim), self.v.view(-1, self.model.dim)
        whole = [x.view(-1, self.model.dim) for x in self.whole] if self.form["ideal"] else [k, v]
        for part in at.split(1 << 18):
            rows = torch.div(part, most, rounding_mode="floor")  # (layer, row, head)
            k2, v2 = self.quantised(whole[0][part], whole[1][part], rows, to, frame)
            place = part % most
            held = (place < self.form["exact"])[:, None]
            k[part] = torch.where(held, k[part], k2) if "k" in self.form["exact_side"] else k2
            v[part] = torch.where(held, v[part], v2) if "v" in self.form["exact_side"] else v2

    def quantised(self, k: Any, v: Any, of: Any, to: Any, frame: Frame) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values (m, D) as they are read from pages of widths `to`."""
        if frame.mean.shape[1] == 1:  # one for all rows
            heads, rows = self.k.shape[2], self.k.shape[1]
            of = of // (rows * heads) * heads + of % heads
        one = torch.ones(len(v), 1, device=v.device)
        found = (
            frame.keys(k, of, to[0], GRID | self.form["grid"]),
            hadamard(on_grid(hadamard(v)[:, None], [to[1]], one, one, GRID)[0][:, 0]),
        )
        if to[0] in (2, 3) and any(self.form["gain"]):
            mean = frame.mean.flatten(0, 2)[of]
            found = (found[0] - mean) * 2 ** (self.form["gain"][to[0] - 2] / 8) + mean, found[1]
        if self.form["error"] == 1:
            return found
        small = (sum(to[0]) / 4 if isinstance(to[0], list) else to[0]) < 4, to[1] < 4
        better = self.form["error"] ** 0.5
        return tuple(x + better * (y - x) if s else y for s, x, y in zip(small, (k, v), found, strict=True))

    def put(self, k: torch.Tensor, v: torch.Tensor, received: torch.Tensor, new: bool) -> None:
        """Add tokens; `new`: as they are, for the next plan, else at the widths where tokens land."""
        form, end = self.form, self.n + k.shape[-2]
        self.k[..., self.n : end, :], self.v[..., self.n : end, :] = k, v
        if self.form["ideal"]:
            self.whole[0][..., self.n : end, :], self.whole[1][..., self.n : end, :] = k, v
        self.rung[..., self.n : end] = (
            self.top + 1 if new or self.form["ring"] else 0 if self.poor else self.top
        )
        self.importance[..., self.n : end] = received
        if new and self.n < form["slots"]:
            self._move(
                torch.arange(form["slots"], device=k.device).expand(*k.shape[:-2], -1), None, self.landing
            )
        if new and self.form["ring"]:  # what is in the ring, and what leaves it, has 8 bits
            self._move(torch.arange(self.n, end, device=k.device).expand(k.shape[:-1]), None, self.landing)
        self.n = end

    def land(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values (B, n, H, T, D) of a layer where they land."""
        rows, many, heads, tokens, dim = k.shape
        of = torch.arange(rows * heads, device=k.device).view(rows, 1, heads, 1) + layer * rows * heads
        of = of.expand(rows, many, heads, tokens).reshape(-1)
        k2, v2 = self.quantised(
            k.reshape(-1, dim),
            v.reshape(-1, dim),
            of,
            self.bits[0] if self.poor else self.landing,
            self.frame(self.n),
        )
        return k2.view(k.shape), v2.view(v.shape)

    def look(self, layer: int, q: torch.Tensor, k: torch.Tensor) -> None:
        """See queries (B, H, group, T, D) and keys (B, H, T, D) before they land; frames do not follow."""

    def collect(self, received: torch.Tensor, tokens: int) -> None:
        """Bring importance up to date with what stored tokens received (L, B, H, n)."""
        if self.form["oracle"]:
            return
        n = received.shape[-1]
        least, span = weight_of_collection(0.9, tokens)
        age = (n - torch.arange(n, device=received.device)) // span
        old = self.importance[..., :n]
        old += torch.maximum(1 / (1.0 + age), torch.tensor(least, device=age.device)) * (received - old)

    def open(self, lookahead: int) -> None:
        """Plan room for single tokens: at the lowest rung where bytes hold no page of the highest."""
        heads, pages = self.rung.shape[2], -(-self.n // self.form["page"])
        smallest = heads * (pages * self.cost[0] + self.cost[-1]) + self.fixed
        self.poor = not self.form["ring"] and smallest > self._row_bytes(lookahead)
        self.plan(0 if self.poor else lookahead)

    def _row_bytes(self, lookahead: int) -> float:
        length = max(self.n + lookahead // 2, self.form["plan_length"])
        return float(self.form["budget"] * 4 * self.rung.shape[2] * self.model.dim * length)

    def plan(self, lookahead: int) -> None:
        """Choose rungs anew, as `kvlab.reference.cache_plan.plan` does."""
        form, n, page, top = self.form, self.n, self.form["page"], self.top
        shape = self.rung.shape[:3]
        groups = shape[0] * shape[1]
        rung = self.rung[..., :n].reshape(groups, shape[2], n).clone()
        position = torch.arange(n, device=rung.device)
        ring = (position < form["sink"]) | (position >= n + lookahead - form["ring"])
        ring = ring if form["ring"] else position < form["slots"]
        ring = ring.expand_as(rung)
        code = (8 * self.importance[..., :n].clamp_min(1e-9).log2()).round().clamp(-191, 63)
        value = torch.exp2(code.double() / 8).view_as(rung)
        if form["norm"]:
            rest = value * ((position >= form["sink"]) & (position < n - form["recent"]))
            value = value / rest.sum(-1, keepdim=True)
        if form["power"] != 1:
            value = (value * n) ** form["power"] / n
        value = value + form["floor"] / n
        recent = position >= n - min(form["recent"], n // form["scale"])
        if not form["ring"]:
            least = NEWEST if form["newest"] is None else value.clamp_min(form["newest"])
            value = torch.where(recent, least, value)
            sinks = SINKS if form["first"] is None else value.clamp_min(form["first"])
            value = torch.where(position < form["sink"], sinks, value)
        in_pages = rung.clamp_max(top) if form["ring"] and lookahead else rung  # one by one, to open pages
        kind = torch.where(ring, top + 2, in_pages)
        before = self.sorted(value)
        order = before.gather(-1, kind.gather(-1, before).argsort(dim=-1, stable=True))
        kind, value = kind.gather(-1, order), value.gather(-1, order)
        count = F.one_hot(kind, top + 3).sum(-2)
        rank = position - (count.cumsum(-1) - count).gather(-1, kind)
        count = count[..., :-1]

        row_bytes = self._row_bytes(lookahead)
        left_bytes = (row_bytes * self.share).long() - self.fixed
        cost = torch.tensor(self.cost, device=rung.device)
        chunks, needed = self._cut(count, left_bytes, lookahead)

        most = n // page + 1
        chunk = torch.div(rank, page, rounding_mode="floor")
        inside = (kind <= top + 1) & (chunk < torch.cat([chunks, chunks[..., :1] * 0], -1).gather(-1, kind))
        slot = torch.where(inside, kind.clamp_max(top + 1) * most + chunk, (top + 2) * most)
        weight = torch.zeros(*slot.shape[:2], (top + 2) * most + 1, dtype=torch.float64, device=rung.device)
        size = weight.clone().scatter_add_(-1, slot, torch.ones_like(value))[..., :-1]
        weight = weight.scatter_add_(-1, slot, value)[..., :-1] * page / size.clamp_min(1)
        ceiling = torch.arange(top + 2, device=rung.device).clamp_max(top).repeat_interleave(most)
        ceiling = torch.where(size > 0, ceiling, -1)

        rates = torch.zeros(*weight.shape, max(top, 1), dtype=torch.float64, device=rung.device)
        price = torch.zeros_like(rates, dtype=torch.long)
        target = torch.zeros_like(price)
        for c in range(1, top + 1):
            for i, (low, high) in enumerate(self._edges(c)):
                rate = (self.loss[low] - self.loss[high]) / (self.cost[high] - self.cost[low])
                mine = ceiling == c
                rates[..., i] = torch.where(mine, weight * rate, rates[..., i])
                price[..., i] = torch.where(mine, self.cost[high] - self.cost[low], price[..., i])
                target[..., i] = torch.where(mine, high, target[..., i])
        flat, of_flat = rates.flatten(1), price.flatten(1)
        best = flat.argsort(dim=-1, descending=True, stable=True)
        spent = of_flat.gather(-1, best).cumsum(-1)
        free = left_bytes - needed - (size > 0).sum((-1, -2)) * cost[0]
        taken = (
            torch.zeros_like(flat).scatter_(-1, best, (spent <= free[:, None]).double()).view_as(rates) > 0
        )
        level = torch.where(taken & (price > 0), target, 0).amax(-1)
        level = F.pad(level, (0, 1))
        after = torch.where(inside, level.gather(-1, slot), kind.clamp_max(top))
        after = torch.zeros_like(rung).scatter_(-1, order, after)
        after = torch.where(ring, rung, after)
        paid = (torch.where(size > 0, cost[level[..., :-1]], 0)).sum((-1, -2)) + needed + self.fixed
        self.used = float(paid.double().mean() / row_bytes)
        self.over = float((paid > row_bytes * self.share).double().mean())

        moved = (after != rung) & ~ring
        at = position.expand(*shape, n)
        for r, widths in enumerate(self.bits):
            self._move(at, (moved & (after == r)).view(*shape, n), widths)
        self.rung[..., :n] = after.view(*shape, n)

    def sorted(self, value: torch.Tensor) -> torch.Tensor:
        """Tokens of each (group, head) in the order in which those of a rung are cut into chunks."""
        return value.argsort(dim=-1, stable=True)

    def _cut(self, count: torch.Tensor, left_bytes: torch.Tensor, lookahead: int) -> tuple[torch.Tensor, ...]:
        """Chunks of each class (groups, heads, classes), and bytes (groups,) of what is in none of them."""
        page, top, ring = self.form["page"], self.top, self.form["ring"]
        cost = torch.tensor(self.cost, device=count.device)

        def rest(chunks: torch.Tensor) -> tuple[torch.Tensor, ...]:
            left = (count - chunks * page).clamp_min(0)
            opened = torch.where(left[..., -1] % page == 0, left[..., -2], left[..., -1]) % page
            slots = torch.where(opened == 0, 0, page - opened)
            extra = (slots < lookahead) & (not ring)
            pages = (-(-left // page) * cost[[*range(top + 1), top]]).sum((-1, -2))
            return pages + (extra * cost[top]).sum(-1), left, slots

        chunks = count // page
        needed, left, slots = rest(chunks)
        short = (needed + chunks.sum((-1, -2)) * cost[0]) > left_bytes
        started = torch.where(left[..., -1] % page == 0, top, top + 1)
        started = torch.where((slots >= lookahead) & (lookahead > 0 and not ring), started, -1)
        apart = torch.arange(top + 2, device=count.device) == started[..., None]
        chunks = torch.where(short[:, None, None] & ~apart, -(-count // page), chunks)
        return chunks, rest(chunks)[0]

    def _move(self, at: torch.Tensor, which: torch.Tensor | None, to: Any) -> None:
        """Bring tokens to widths; `at`, their positions, and `which` of them are (L, B, H, any)."""
        row = torch.arange(at.shape[:-1].numel(), device=at.device).view(at.shape[:-1])[..., None]
        at = row * self.k.shape[-2] + at
        self.pack(at.reshape(-1) if which is None else at[which], to, max(self.n, 1))

    def _edges(self, top: int) -> list[tuple[int, int]]:
        """Steps of the lower convex hull of (bytes, loss)."""
        here, found = 0, []
        while here < top:
            rate = {r: (self.loss[here] - self.loss[r]) / (self.cost[r] - self.cost[here])
                    for r in range(here + 1, top + 1)}  # fmt: skip
            there = max(rate, key=lambda r: rate[r])
            if rate[there] <= 0:
                break
            found.append((here, there))
            here = there
        return found

    def read(self, tokens: torch.Tensor, *, exact: bool, last: int) -> tuple[torch.Tensor, ...]:
        """Read tokens (B, n, T), n rows behind each prompt: states, k, v, received by old and new tokens.

        `exact`: tokens of the call see each other exactly, else as they land. `last`: rows to collect.
        """
        model, n = self.model, self.n
        x, size = model.embed(tokens), tokens.shape[-1]
        eye = torch.eye(size, dtype=torch.bool, device=x.device)
        later = torch.full((size, size), -torch.inf, device=x.device).triu(1)
        ks, vs, stored, new = [], [], [], []
        for layer in range(model.layers):
            q, k, v = model.qkv(layer, x, n)
            if not exact:
                self.look(layer, q[:, 0], k[:, 0])
            k2, v2 = (k, v) if exact else self.land(layer, k, v)
            rows, many, heads, group = q.shape[:4]
            flat = q.transpose(1, 2).reshape(rows, heads, -1, model.dim)
            past = (flat @ self.k[layer, ..., :n, :].transpose(-1, -2)).view(
                rows, heads, many, group, size, n
            )
            here = q @ k2[..., None, :, :].transpose(-1, -2)
            if not exact:
                here = torch.where(eye, (q * k[..., None, :, :]).sum(-1, keepdim=True), here)
            p = torch.cat([past, (here + later).transpose(1, 2)], -1).softmax(-1)
            o = (p[..., :n].flatten(2, 4) @ self.v[layer, ..., :n, :]).view(*p.shape[:-1], -1)
            own = p[..., n:].transpose(1, 2)
            o = o.transpose(1, 2) + own @ v2[..., None, :, :]
            if not exact:
                o = o + own.diagonal(dim1=-2, dim2=-1)[..., None] * (v - v2)[..., None, :, :]
            x = model.rest(layer, x, o)
            if last:
                stored.append(p[..., -last:, :n].mean((2, 3, 4)))
                new.append(p[..., -min(last, max(size // self.form["of"], 1)) :, n:].mean((2, 3, 4)))
                ks.append(k2[:, 0])
                vs.append(v2[:, 0])
        return (x, *(torch.stack(y) if y else None for y in (ks, vs, stored, new)))


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


def _shown(row: dict[str, Any], full: dict[str, Any]) -> str:
    """One line of a row; adds to it what is found of what `full` precision finds."""
    shown = []
    for task in ("single", "single64", "parts64", "parts512", "grow"):
        if task in row:
            shown.append(f"{task} {row[task]['kl']:.4f} +- {row[task]['error']:.4f}")
    if "retrieval" in row:
        found = row["retrieval"]
        known, log_p = torch.tensor(full["exact"]).bool(), torch.tensor(full["log_p"])
        found["found"] = int((torch.tensor(found["exact"]).bool() & known).sum())
        found["lost"] = float((log_p - torch.tensor(found["log_p"])).mean())
        shown.append(f"found {found['found']} of {int(known.sum())}, lost {found['lost']:.2f}")
    return "; ".join(shown) + row.get("failed", "") + f" ({row['seconds']} s)"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("formats", type=Path)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seconds", type=float, default=160)
    parser.add_argument("--windows", type=int, default=16)
    parser.add_argument("--layers", type=int, default=30)
    given = parser.parse_args()
    start, rows = time.time(), []
    torch.backends.cuda.matmul.allow_tf32 = False
    with torch.inference_mode():
        formats = json.loads(given.formats.read_text())
        bench = Bench(given.windows, given.layers, given.device, True)
        asks = any("retrieval" in form.get("tasks", DEFAULT["tasks"]) for form in formats)
        full = bench.retrieval(None) if asks else {"exact": [], "log_p": []}
        print(f"{time.time() - start:.1f} s: full precision finds {sum(full['exact'])}", flush=True)
        for form in formats:
            if time.time() - start > given.seconds:
                print("out of time at", form["name"])
                break
            begin, row = time.time(), {"form": form}
            try:
                for task in form.get("tasks", DEFAULT["tasks"]):
                    row[task] = getattr(bench, task)(form)
            except torch.OutOfMemoryError as error:
                row["failed"] = str(error)
            row["seconds"] = round(time.time() - begin, 2)
            print(f"{time.time() - start:5.1f} s", form["name"], "|", _shown(row, full), flush=True)
            rows.append(row)
            found = {"schema": "kvlab quality simulation 1", "provenance": provenance(), "full": full}
            given.out.write_text(json.dumps({**found, "rows": rows}))


if __name__ == "__main__":
    main()

"""Page formats that the cache does not have: what tokens become, and which of them lies in which page.

`simulation.py` measures them.

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

import math
from typing import Any

import torch
import torch.nn.functional as F
from full_precision import Exact

from kvlab.cache.importance import weight_of_collection
from kvlab.ladder import BITS_OF_WIDTHS, ENERGY_OF_BLOCKS, ERRORS, parse_bits
from kvlab.pages import PAGE_TABLE_BYTES, TOKENS_PER_PAGE

SINKS, NEWEST = 2.0**24, 1e4  # weights
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

    def __init__(self, bench: Any, form: dict[str, Any], exact: Exact, most: int) -> None:
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
            of_keys = sum(energy * ERRORS[width] for energy, width in zip(ENERGY_OF_BLOCKS, k, strict=True))
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
            of = self.exact if isinstance(source, int) else self.bench.others[source]
            n = min(source if isinstance(source, int) else math.inf, of.received.shape[-1])
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

"""Time what a cache on a GPU does every 16 steps: collect importance, choose widths, move tokens.

    python benchmarks/cache_plan/run.py OUT.json [--shapes ...] [--ladders ...] [--cycles 20]

The layers of a model are filled by one prefill each, at a budget of about 4 bits an element, with ladder
2, 3, 4, 8 or that of caches that name none; a shape may give all of them a sliding window. Then every cycle
appends 16 tokens a row, collects attention mass that drifts, plans all layers in one call and carries the
moves out. Heads need a page in every cycle; times are means over periods of four cycles, without the first,
by events, for all layers together. Every other period has an event behind each kernel; the others have them
around the plan alone, for an event keeps the next kernel from being launched early: `plan` is that. The
device is kept waiting until all of it is launched. A plan that leaves the budget or meets trouble is an
error. `prefill` is one layer; collecting runs as a graph.

What collecting costs is measured on the same pages, and on such of 4 and of 2 bits alone: one query token
attends every layer in turn, in a graph, without keeping scores, keeping them, and with `score_stored` behind
each layer; medians of replays. `share` is all that is done every 16 steps, of 16 steps of attention.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch

from kvlab.cache.cuda import GPU, GpuKernels
from kvlab.cache.importance import Collector
from kvlab.cache.layers import Layer, LayerFormat
from kvlab.cache.store import DeviceStore
from kvlab.lab.benchmark import harness
from kvlab.lab.timing_gpu import recorded, time_by_events
from kvlab.ladder import BITS_IN_BLOCKS, BITS_OF_WIDTHS, Bits, loss_of, parse_bits
from kvlab.ops.cuda import packed as packed_cuda
from kvlab.ops.cuda import pages as kernels
from kvlab.ops.cuda import plan
from kvlab.ops.cuda.packed import saved_quad_bytes
from kvlab.ops.layer_state import NEW_TOKENS, OBSERVED, STATE, new_tokens
from kvlab.ops.plan import Ladder, PlanShape, crop_bounds
from kvlab.pages import QUAD, TOKENS_PER_PAGE, profile_names
from kvlab.views import cuda_view

SHAPES = {  # layers, batch, tokens, KV heads, group, sliding window or 0
    "8 x 32K": (32, 8, 32768, 8, 4, 0),
    "1 x 32K": (32, 1, 32768, 8, 4, 0),
    "1 x 4K": (32, 1, 4096, 8, 4, 0),
    "1 x 128K": (32, 1, 131072, 8, 4, 0),
    "8 x 1K": (32, 8, 1024, 8, 4, 0),
    "8 x 1K of 32K": (32, 8, 32768, 8, 4, 1024),
    "1 x 1K": (32, 1, 1024, 8, 4, 0),
    "1 x 1K of 32K": (32, 1, 32768, 8, 4, 1024),
}
LADDERS: dict[str, tuple[Bits, float]] = {  # widths, bytes over those of 16 bits
    "2,3,4,8": ((2, 3, 4, 8), 0.265), "blocks": (BITS_IN_BLOCKS, 0.3), "widths": (BITS_OF_WIDTHS, 0.3),
    "4": ((4,), 0.32), "2": ((2,), 0.2),
}  # fmt: skip
HEAD_DIM, STEPS = 128, 16
PERIOD = 4  # cycles, between which the layers' scores go round
WAIT = 4_000_000  # of the device, in its cycles, while the host launches a plan
PLAN = ("count_keys", "choose_rungs", "allocate_pages", "plan_moves", "make_tables")


class Clock:
    """Events between named parts of the work on one stream."""

    def __init__(self) -> None:
        self.marks: list[tuple[str, torch.cuda.Event]] = []

    def mark(self, name: str) -> None:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self.marks.append((name, event))

    def times(self) -> dict[str, float]:
        """Microseconds before each mark, but for the first."""
        torch.cuda.synchronize()
        pairs = itertools.pairwise(self.marks)
        return {name: before.elapsed_time(after) * 1e3 for (_, before), (name, after) in pairs}


class Model:
    """Layers of one shape and what plans of them need."""

    def __init__(self, bits: Bits, fraction: float, *shape: int) -> None:
        layers, batch, tokens, heads, group, self.window = shape
        self.layers, self.batch, self.tokens, self.heads, self.group = layers, batch, tokens, heads, group
        (ladder,) = set(parse_bits(bits, layers))
        self.host = LayerFormat(ladder, heads, HEAD_DIM, "bfloat16")
        costs = tuple(self.host.page_bytes(r) for r in range(len(ladder)))
        self.ladder = Ladder(costs, tuple(map(loss_of, ladder)))
        self.profiles = profile_names(rung.bits_k for rung in ladder)
        self.row_budget = int(fraction * 4 * heads * HEAD_DIM * (self.window or tokens))
        like = torch.empty(1, device="cuda")
        of_layers = [Layer(self.host, 0, "mass", self.window, frame={})] * layers
        row_budgets, waits = [self.row_budget] * layers, [False] * layers
        self.store = DeviceStore(of_layers, batch, GPU, like, tokens + 1024, row_budgets, waits)
        self.store.tables["budget"].fill_(self.row_budget)
        self.store.tables["k_gain"].fill_(16)  # about what a frame of such keys has
        self.like, self.stream = like, torch.cuda.current_stream().cuda_stream
        rng = np.random.default_rng(0)
        self.mass = torch.from_numpy(rng.lognormal(-np.log(tokens), 1.5, batch * heads * tokens)).cuda()
        self.options = {"sink": 4, "recent": 8, "lookahead": STEPS, "fixed_nbytes": self.host.fixed_nbytes}

    def shape(self, new_tokens: int) -> PlanShape:
        segments = ((self.tokens + 1024 + STEPS) >> 16) + 1
        rungs = len(self.host.ladder)
        return PlanShape(self.batch, self.heads, self.store.entries, rungs, False, segments, new_tokens)

    def plan(
        self, first: int, n: int, workspace: Any, mark: Callable[[str], None], fresh: Any = None
    ) -> None:
        """Plan and carry out; `mark` is called after every kernel."""
        new = {}
        if fresh is not None:
            new = {"codes": int(fresh["importance"]), "num_new": int(fresh["num_new"])}
        prepare = plan._launches

        def timed(name: str, launch: Any) -> Any:
            def call(stream: int) -> None:
                launch(stream)
                mark(name)

            return call

        plan._launches = lambda *of: list(itertools.starmap(timed, zip(PLAN, prepare(*of), strict=True)))
        workspace.launches.clear()
        states = self.store.states_pointer
        plan.launch_plan(
            states, first, n, workspace, self.ladder, STATE.itemsize, self.stream, **self.options, **new
        )
        plan._launches = prepare
        workspace.launches.clear()
        moved = np.zeros(1, NEW_TOKENS)[0] if fresh is None else fresh
        states += first * STATE.itemsize
        for phase in range(2):
            lists, groups = workspace.move_lists(phase), workspace.max_groups(phase)
            kernels.write_tokens(
                HEAD_DIM, "bfloat16", 0, states, lists, n, groups, moved, self.stream, profiles=self.profiles
            )
            mark(f"write {phase}")
        kernels.copy_pages(HEAD_DIM, "bfloat16", 0, states, lists, n, workspace.max_dropped, self.stream)
        mark("copy")

    def prefill(self) -> dict[str, float]:
        """Fill every layer; times of the last."""
        n, num_bh = self.tokens, self.batch * self.heads
        new_pages = num_bh * (n // TOKENS_PER_PAGE + 4)
        workspace = plan.make_workspace(self.like, self.shape(n), 1, new_pages, num_bh * 8)
        codes = (8 * torch.log2(self.mass) + 192).round().clamp(1, 255).to(torch.uint8)
        k = torch.randn(self.batch, n, self.heads, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
        view = cuda_view(k, "k")
        fresh = new_tokens(view, view, 0, codes.data_ptr(), n, 0)
        for layer in range(self.layers):
            clock = Clock()
            clock.mark("before")
            self.plan(layer, 1, workspace, clock.mark, fresh)
            times = clock.times()
        self.check()
        return times

    def check(self) -> None:
        torch.cuda.synchronize()
        assert not bool(self.store.tables["status"].any())
        assert max(self.store.nbytes()) <= self.batch * self.row_budget

    def decode(self, cycles: int) -> dict[str, float]:
        bounds = crop_bounds(self.shape(0), self.ladder, QUAD * TOKENS_PER_PAGE, 0)
        workspace = plan.make_workspace(self.like, self.shape(0), self.layers, *bounds)
        append = [
            kernels.AppendCall(
                self.store.host_states[layer], self.host.ladder[-1], HEAD_DIM, "bfloat16", 0, num_new=STEPS,
                group=self.group, scale=1.0, softcap=0.0, observed=OBSERVED["norm"],
                in_blocks=bool(self.profiles),
            )
            for layer in range(self.layers)
        ]  # fmt: skip
        k = 500 * torch.randn(self.batch, STEPS, self.heads, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
        view = cuda_view(k, "k")
        shape = (PERIOD, self.batch, self.heads, self.store.entries // QUAD, saved_quad_bytes(self.group))
        scores = torch.randn(shape, device="cuda").mul_(17).add_(200).clamp_(0, 255).byte()
        scores[..., 64 * self.group : 68 * self.group].view(torch.float32)[...] = 55 / 8  # their references
        lse = torch.full((self.batch, self.heads * self.group, 1), float(np.log(self.tokens)), device="cuda")
        found: list[dict[str, float]] = []
        moved = []
        graphs = [self.scoring(scores, lse, turn) for turn in range(PERIOD)]
        for cycle in range(cycles):
            for layer in range(self.layers):
                append[layer](None, view, view, 0, 0, 0, False, self.stream)
            clock = Clock()
            torch.cuda._sleep(WAIT)
            clock.mark("before")
            graphs[cycle % PERIOD]()
            clock.mark("score_stored")
            in_parts = cycle // PERIOD % 2 == 1
            self.plan(0, self.layers, workspace, clock.mark if in_parts else lambda _: None)
            if not in_parts:
                clock.mark("plan")
            found.append(clock.times())
            self.check()
            heads = workspace.lists.cpu().numpy().view("<u8").reshape(2, self.layers, 5)
            at = heads[:, :, 2] - workspace.memory.data_ptr()
            memory = workspace.memory.cpu().numpy()
            moved.append([int(memory[i : i + 4].view("<i4")[0]) for i in at.ravel()])
        self.bytes = workspace.nbytes
        print("pages written a layer, last cycles:", np.mean(moved[PERIOD:], 1).round(1))
        last = found[PERIOD:]
        names = dict.fromkeys(itertools.chain.from_iterable(last))
        result = {name: float(np.mean([times[name] for times in last if name in times])) for name in names}
        return result | {"slowest plan": max(times["plan"] for times in last if "plan" in times)}

    def scoring(self, scores: torch.Tensor, lse: torch.Tensor, turn: int) -> Callable[[], object]:
        collector = self.collector()

        def score() -> None:
            stream = torch.cuda.current_stream().cuda_stream
            for layer in range(self.layers):
                kept = scores[None, (layer + turn) % PERIOD]
                collector.score(layer, kept, lse[None], STEPS, 0, stream)

        return recorded(score)

    def append(self, rounds: int = 5) -> float:
        """Microseconds of an append of one token a row, by the layer, in a graph of all."""
        heads = self.heads * self.group
        calls = [
            kernels.AppendCall(
                self.store.host_states[layer], self.host.ladder[-1], HEAD_DIM, "bfloat16", 0, num_new=1,
                group=self.group, scale=HEAD_DIM**-0.5, softcap=0.0, observed=OBSERVED["mass"],
                in_blocks=bool(self.profiles),
            )
            for layer in range(self.layers)
        ]  # fmt: skip
        k, v = torch.randn(2, self.batch, 1, self.heads, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
        q = torch.randn(self.batch, 1, heads, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
        out, lse = torch.randn_like(q), torch.zeros(self.batch, heads, 1, device="cuda")
        views = cuda_view(q, "q"), cuda_view(k, "k"), cuda_view(v, "v")

        def body() -> None:
            stream = torch.cuda.current_stream().cuda_stream
            for call in calls:
                call(*views, 0, out.data_ptr(), lse.data_ptr(), True, stream)

        tables, num_bh = self.store.tables, self.batch * self.heads
        kept = {name: tables[name].clone() for name in ("count", "seqlen")}
        open_pages = tables["open"].view(self.layers, num_bh, -1).long().clamp(min=0)
        replay, found = None, []
        for _ in range(rounds):  # an open page is enough for each
            tables["count"].view(self.layers, num_bh, -1).scatter_(2, open_pages, 0)
            replay = replay or recorded(body)
            times = time_by_events({"body": replay}, repeats=TOKENS_PER_PAGE - 4, warm=False)
            found.append(1e6 * times["body"].median / self.layers)
            self.check()
        appended = float(np.median(found))
        for name, table in kept.items():
            tables[name].copy_(table)
        return appended

    def collector(self) -> Collector:
        return Collector(GpuKernels(self.store), self.heads * self.group, "attention", 0.9)

    def collect(self, repeats: int = 30) -> dict[str, float]:
        """Microseconds a layer: attention, the same keeping scores, that and `score_stored`."""
        heads = self.heads * self.group
        q = torch.randn(self.batch, 1, heads, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
        out, lse = torch.empty_like(q), torch.empty(self.batch, heads, 1, device="cuda")
        workspace = packed_cuda.make_workspace(q, self.batch * self.heads, self.group, HEAD_DIM)
        collector = self.collector()
        places = [collector.memory_of(layer, 1) for layer in range(self.layers)]

        def run(keeps: bool, scores: bool) -> float:
            options = [
                {
                    "scale": HEAD_DIM**-0.5,
                    "scores": kept if keeps else None,
                    "window": self.store.window(layer),
                }
                for layer, (kept, _) in enumerate(places)
            ]
            pages = map(self.store.pages, range(self.layers))
            attend = [
                packed_cuda.AttendCall(q, own, workspace, **option)
                for own, option in zip(pages, options, strict=True)
            ]

            def body() -> None:
                stream = torch.cuda.current_stream().cuda_stream
                for layer, call in enumerate(attend):
                    whole = places[layer][1] if keeps else lse
                    collector.before(layer, 1, STEPS, stream)
                    call(cuda_view(q, "q"), out.data_ptr(), whole.data_ptr(), stream)
                    collector.after(layer, 1, scores, stream)

            return median_of_graph(body, repeats) / self.layers

        return {"attend": run(False, False), "keep": run(True, False), "collect": run(True, True)}


def median_of_graph(body: Callable[[], None], repeats: int) -> float:
    """Microseconds of a replay."""
    return 1e6 * time_by_events({"body": recorded(body)}, repeats=repeats, warm=False)["body"].median


def measure(shape: str, ladder: str, cycles: int) -> dict[str, Any]:
    model = Model(*LADDERS[ladder], *SHAPES[shape])
    found: dict[str, Any] = {"shape": shape, "ladder": ladder, "layers": model.layers}
    found["prefill_us"] = model.prefill()
    if len(model.ladder.cost) > 1:
        found["decode_us"] = model.decode(cycles)
        found["workspace_bytes"] = model.bytes
        found["append_us"] = model.append()
    times = found["collect_us"] = model.collect()
    more = times["collect"] - times["attend"]
    found["collecting"] = more / times["attend"]
    if "decode_us" in found:
        planned = found["decode_us"]["plan"] / model.layers
        found["share"] = (planned + more) / (STEPS * times["attend"])
    return found


def cases(given: argparse.Namespace) -> list[harness.Case]:
    return [
        harness.Case(f"{shape} {ladder}", partial(measure, shape, ladder, given.cycles))
        for shape, ladder in itertools.product(given.shapes, given.ladders)
    ]


def cycles(text: str) -> int:
    number = int(text)
    if number % (2 * PERIOD) != PERIOD or number < 3 * PERIOD:
        raise argparse.ArgumentTypeError(f"{number}: 12, 20, 28, ..., the first period and pairs of periods")
    return number


def main() -> int:
    parser = harness.options(__doc__)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--ladders", nargs="+", choices=LADDERS, default=list(LADDERS))
    parser.add_argument("--cycles", type=cycles, default=20)
    return harness.run(parser, cases)


if __name__ == "__main__":
    raise SystemExit(main())

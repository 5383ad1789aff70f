"""The planner on the GPU against its oracle: equal tables and equal moves, over whole runs of a cache."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from kvlab.ops.cuda import plan
from kvlab.ops.layer_state import STATE
from kvlab.ops.plan import PlanShape, crop_bounds, decode_bounds
from kvlab.reference.cache_layer import RETRY, Change, Layer, Tokens
from tests.planner_simulation import LADDERS, PAGE, Simulation, draw_tokens, empty_layer, run_budget

TABLES = (
    "arena", "rung", "count", "index", "base", "num_pages", "open", "used", "slab_count", "slabs",
    "free_slabs", "num_free", "entry_of", "slab_slot", "seqlen", "budget", "status",
)  # fmt: skip
MOVE = np.dtype([("from", "u4"), ("to", "u4"), *((f"f{i}", "u1") for i in range(4)), ("token", "u4")])


class Device:
    """Copies of layers on the GPU, and plans for all of them in one call."""

    def __init__(self, layers: list[Layer], sliding_window: int = 0) -> None:
        self.layers, self.memory = layers, []
        states = np.zeros(len(layers), STATE)
        for layer, state in zip(layers, states, strict=True):
            arrays = {name: np.atleast_1d(np.asarray(getattr(layer, name, 0))) for name in TABLES}
            arrays["seqlen"] = np.full(len(layer.num_pages), layer.seqlen)
            arrays["waits"] = np.zeros(layer.batch) if layer.waits is None else layer.waits
            for name in ("num_free", "status", "seqlen", "waits"):
                arrays[name] = arrays[name].astype(np.int32)
            memory = {name: torch.from_numpy(x.copy().view(np.uint8)).cuda() for name, x in arrays.items()}
            self.memory.append((memory, {name: (x.dtype, x.shape) for name, x in arrays.items()}))
            for name, tensor in memory.items():
                state[name] = tensor.data_ptr()
            for place, rung in zip(state["rungs"], layer.rungs, strict=False):
                place["record"], place["per_slab"], place["tail"] = rung.record, rung.per_slab, rung.tail
            state["batch"], state["heads"], state["entries"] = layer.batch, layer.heads, layer.rung.shape[1]
            state["num_rungs"], state["evicts"] = len(layer.rungs), layer.evicts
            state["max_slabs"], state["max_pages"] = len(layer.slab_slot), layer.entry_of.shape[1]
            state["slab_units"], state["sliding_window"] = layer.slab_units, sliding_window
        self.states = torch.from_numpy(states.view(np.uint8)).cuda()

    def table(self, number: int, name: str) -> np.ndarray:
        memory, kinds = self.memory[number]
        dtype, shape = kinds[name]
        return memory[name].cpu().numpy().view(dtype).reshape(shape)

    def plan(
        self,
        name: str,
        new: list[Tokens] | None,
        simulation: Simulation,
        bounds: tuple[int, int],
        **options: Any,
    ) -> list[Change]:
        layer, ladder = self.layers[0], LADDERS[name][0]
        steps = new[0].code.shape[1] if new else 0
        live = np.arange(layer.base.shape[1]) < layer.num_pages[:, None]
        last = int(
            layer.base[live].max(initial=0)
        )  # pages beyond the end of a row that was cropped count, too
        segments = max((layer.seqlen + steps + simulation.lookahead) >> 16, last) + 1
        shape = PlanShape(
            layer.batch, layer.heads, layer.rung.shape[1], len(layer.rungs), layer.evicts, segments, steps
        )
        workspace = plan.make_workspace(self.states, shape, len(self.layers), *bounds)
        workspace.memory.fill_(0xA5)
        results = []
        fresh = [(torch.from_numpy(t.code).cuda(), torch.from_numpy(t.valid).cuda()) for t in new or []]
        for number in range(len(self.layers)) if new else [0]:
            arguments = {}
            if new:
                code, valid = fresh[number]
                arguments = {"codes": code.data_ptr(), "valid": valid.data_ptr(), "num_new": steps}
                arguments["first_position"] = new[number].first
            count = 1 if new else len(self.layers)
            plan.launch_plan(
                self.states.data_ptr(), number, count, workspace, ladder, STATE.itemsize,
                torch.cuda.current_stream().cuda_stream, sink=simulation.sink, recent=simulation.recent,
                lookahead=simulation.lookahead, fixed_nbytes=simulation.fixed, **options, **arguments,
            )  # fmt: skip
            torch.cuda.synchronize()
            results += [self.result(workspace, i) for i in range(count)]
        return results

    def result(self, workspace: plan.Workspace, number: int) -> Change:
        """The lists of moves and copies, read through the MoveList structs."""
        memory, base = workspace.memory.cpu().numpy(), workspace.memory.data_ptr()
        lists = workspace.lists.cpu().numpy().view("<u8").reshape(2, workspace.layers, 5)

        def read(address: int, dtype: Any, n: int) -> np.ndarray:
            at = int(address) - base
            return memory[at : at + n * np.dtype(dtype).itemsize].view(dtype)

        change = Change()
        for phase in range(2):
            moves, begins, num_groups, copies, num_copies = lists[phase, number]
            groups = int(read(num_groups, "<i4", 1)[0])
            assert groups <= workspace.max_groups(phase)
            starts = read(begins, "<u4", groups + 1).astype(np.int64)
            assert starts[0] == 0
            assert (np.diff(starts) > 0).all()
            listed = [tuple(int(x) for x in move) for move in read(moves, MOVE, int(starts[-1]))]
            destinations = [{m[1] for m in listed[a:b]} for a, b in pairwise(starts)]
            assert all(len(pages) == 1 for pages in destinations)
            assert len(set().union(*destinations)) == groups
            change.phases[phase].extend(listed)
            n = int(read(num_copies, "<i4", 1)[0])
        found = read(copies, "<u4", 4 * n).reshape(n, 4)
        change.copies.extend((int(a), int(b), int(units)) for a, b, units, _ in found)
        return change


def compare(device: Device, number: int, change: Change, expected: Change, layer: Layer) -> None:
    status = int(device.table(number, "status")[0])
    assert status == expected.status
    for name in ("used", "slab_count", "num_pages", "open", "num_free", "slab_slot"):
        assert np.array_equal(device.table(number, name).ravel(), np.ravel(getattr(layer, name))), name
    live = np.arange(layer.rung.shape[1]) < layer.num_pages[:, None]
    for name in ("rung", "count", "index", "base"):
        assert np.array_equal(device.table(number, name)[live], getattr(layer, name)[live]), name
    for r in range(len(layer.rungs)):
        for name, n in (("entry_of", layer.used[r]), ("slabs", layer.slab_count[r])):
            assert np.array_equal(device.table(number, name)[r, :n], getattr(layer, name)[r, :n]), name
    free = device.table(number, "free_slabs")[: layer.num_free]
    assert np.array_equal(free, layer.free_slabs[: layer.num_free])
    assert change.phases[0] == expected.phases[0]
    assert sorted(change.phases[1]) == sorted(expected.phases[1])
    copies = [(a, b, layer.rungs[r].record) for a, b, r in expected.copies]
    assert change.copies == copies


def play_run(run: dict[str, Any]) -> int:
    """Play a run on the oracle and every change of it on the GPU; the number of changes."""
    name, batch, heads = run["name"], run["batch"], run["heads"]
    rng = np.random.default_rng(run["seed"])
    total = sum(run["lengths"]) + 16 * run["steps"]
    budget = run_budget(run)
    slabs = 40 + batch * heads * (3 * total // PAGE + 10) * (1 if run["tight_slabs"] else 4) // 2
    entries = 3 * total // PAGE + 40
    simulations = []
    for _ in range(run["layers"]):
        layer = empty_layer(name, batch, heads, entries, budget, slabs)
        layer.seqlen = run["first"]
        window = run["window"] if len(layer.rungs) > 1 else 0
        rules = {rule: run[rule] for rule in ("floor", "reach", "choose")}
        simulations.append(Simulation(layer, name, window=window, **rules))
    most = (
        batch * heads * entries if not run["tight_slabs"] else batch * heads * 96,
        batch * heads * entries,
    )
    changes = 0

    def change(new: list[Tokens] | None, bounds: tuple[int, int], cropped: bool = False) -> int:
        nonlocal changes
        rewind = run["reach"] // 3
        device = Device([s.layer for s in simulations], run["reach"] - rewind)
        by_position = run["by_position"]
        rules = {"by_position": by_position, "cropped": cropped, "window": simulations[0].window}
        rules |= {"allocator": run["choose"], "floor": run["floor"], "rewind": rewind}
        found = device.plan(name, new, simulations[0], bounds, **rules)
        status = 0
        for number, simulation in enumerate(simulations):
            fresh = new[number] if new else None
            expected = simulation.change(fresh, by_position, max_new_pages=bounds[0])
            compare(device, number, found[number], expected, simulation.layer)
            status |= expected.status
            changes += 1
        return status

    def replan(bounds: tuple[int, int], cropped: bool = False) -> None:
        for _ in range(60):
            if not change(None, bounds, cropped):
                return
        raise AssertionError("no end")

    for n in run["lengths"]:
        kind = run["kind"]
        new = [draw_tokens(rng, batch, heads, n, s.layer.seqlen, kind) for s in simulations]
        for _ in range(60):
            if not change(new, most) & RETRY:
                break
        else:
            raise AssertionError("no end")
        replan(most)
    shape = PlanShape(batch, heads, entries, 1, False, 2, 0)
    bounds = decode_bounds(shape, LADDERS[name][0])
    if run["reach"]:  # between two plans so many tokens leave the sliding window
        bounds = crop_bounds(shape, LADDERS[name][0], PAGE, 0)
    for step in range(run["steps"]):
        for simulation in simulations:
            simulation.append(rng.integers(0, 256, (batch * heads, 16)).astype(np.uint8))
            simulation.observe(rng)
        replan(bounds if step and not run["tight"] else most)
    cropped = int(rng.random() * (total - 16))
    for simulation in simulations:
        simulation.forget(cropped)
    replan(most, cropped=True)
    return changes


def draw_run(seed: int) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    lengths = [int(n) for n in rng.integers(0, 900, rng.integers(1, 4))]
    return {
        "name": sorted(LADDERS)[seed % len(LADDERS)], "batch": int(rng.integers(1, 3)),
        "heads": int(rng.integers(1, 4)), "lengths": lengths, "share": float(rng.random()),
        "steps": int(rng.integers(0, 6)), "kind": ["normal", "equal", "padded"][seed // 5 % 3],
        "first": [0, 65536 - 70][seed // 15 % 2], "tight_slabs": bool(rng.integers(2)),
        "by_position": bool(rng.integers(2)), "tight": bool(rng.integers(2)),
        "window": int(rng.choice([0, 0, 30, 130])), "choose": str(rng.choice(["greedy", "uniform", "dp"])),
        "floor": int(rng.choice([0, 1, 40])) << 32, "seed": seed, "layers": 1,
        "reach": int(rng.choice([0, 1, 40, 300])),
    }  # fmt: skip


PLAIN = {
    "tight_slabs": False,
    "tight": False,
    "choose": "greedy",
    "window": 0,
    "reach": 0,
    "floor": 1 << 32,
    "kind": "normal",
}


@pytest.mark.parametrize("seed", range(60))
def test_random_runs(seed: int) -> None:
    assert play_run(draw_run(seed)) > 0


def test_all_layers_in_one_launch() -> None:
    run = draw_run(3) | PLAIN | {"layers": 3, "name": "2348", "steps": 6}
    run |= {"lengths": [700], "share": 0.2, "batch": 2, "heads": 3}
    assert play_run(run) == 27


def test_long_sequences_with_many_warps_a_class() -> None:
    run = draw_run(0) | {"name": "2348", "heads": 1, "batch": 1, "lengths": [70_000, 3000], "steps": 2}
    play_run(run | PLAIN | {"share": 0.1, "first": 0})


@pytest.mark.parametrize("choose", ["greedy", "uniform", "dp"])
@pytest.mark.parametrize("name", ["equal", "0 equal"])
def test_levels_of_equal_bytes(name: str, choose: str) -> None:
    run = draw_run(0) | PLAIN | {"name": name, "choose": choose, "tight": True, "lengths": [150, 90]}
    play_run(run | {"steps": 2, "share": 0.1, "first": 0})


def test_comparison_refuses_wrong_tables() -> None:
    rng = np.random.default_rng(0)
    simulation = Simulation(empty_layer("248", 1, 2, 120, 90_000, 200), "248")
    new = draw_tokens(rng, 1, 2, 700, 0, "normal")
    device = Device([simulation.layer])
    found = device.plan("248", [new], simulation, (200, 200))[0]
    expected = simulation.change(new)
    compare(device, 0, found, expected, simulation.layer)
    for name in ("index", "count", "used", "entry_of", "open"):
        wrong = Layer(**{**vars(simulation.layer), name: getattr(simulation.layer, name) + 1})
        with pytest.raises(AssertionError):
            compare(device, 0, found, expected, wrong)
    with pytest.raises(AssertionError):
        compare(device, 0, Change((found.phases[0][1:], found.phases[1])), expected, simulation.layer)

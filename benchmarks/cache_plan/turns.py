"""Prefill and append of two versions in turns, in the words of `run.py` of each.

    python benchmarks/cache_plan/turns.py OUT.json BEFORE AFTER [--head-dims 128,64] [--rounds 4]

BEFORE and AFTER are folders of checkouts. One process of each answers in turns. A round fills 32 layers anew,
one prefill each: `write` is the kernel that writes the tokens, `plan` all else that a plan launches, `host`
what the host takes to launch it, while the device waits. Then `append` is one token a row, by the layer, in a
graph of all: three times twelve replays. Given are medians in microseconds. The version before has the ladder
2, 3, 4, 8; that after has it, and the default ladder with profiles, in as many bytes.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import inspect
import json
import sys
import time
from functools import partial
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import numpy as np

SHAPES = {"8 x 32K": (32, 8, 32768, 8, 4), "1 x 32K": (32, 1, 32768, 8, 4)}
FRACTION = 0.265  # of the bytes of 16 bits
REPLAYS = 12  # an open page holds so many tokens
LADDERS = {"before": ["2,3,4,8"], "after": ["2,3,4,8", "blocks"]}


def load() -> Any:
    """`run.py` of the version that this process answers for, which lies beside its kvlab."""
    import kvlab

    path = Path(kvlab.__file__).parents[1] / "benchmarks" / "cache_plan" / "run.py"
    spec = importlib.util.spec_from_file_location("run", path)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def serve() -> None:
    """Answer lines of [head_dim, shape, ladder] on stdin with the times of a round."""
    answers = sys.stdout
    with contextlib.redirect_stdout(sys.stderr):  # what a version prints is no answer
        run = load()
        for line in sys.stdin:
            print(json.dumps(times_of(run, *json.loads(line))), file=answers, flush=True)


def times_of(run: Any, head_dim: int, shape: str, ladder: str) -> dict[str, list[float]]:
    """Microseconds of a round: a prefill, then appends."""
    run.HEAD_DIM = head_dim
    sizes = SHAPES[shape] + ((0,) if len(run.SHAPES["8 x 32K"]) == 6 else ())
    model = run.Model(run.LADDERS[ladder][0], FRACTION, *sizes)
    times = {**prefill(run, model), "append": append(run, model)}
    del model
    run.torch.cuda.empty_cache()
    return times


def prefill(run: Any, model: Any) -> dict[str, list[float]]:
    """Microseconds of each layer but the first two."""
    found: list[dict[str, float]] = []

    class Clock(run.Clock):  # type: ignore[misc,name-defined]
        begin = 0.0

        def mark(self, name: str) -> None:
            if not self.marks:
                run.torch.cuda._sleep(run.WAIT)
                self.begin = time.perf_counter()
            super().mark(name)

        def times(self) -> dict[str, float]:
            host = 1e6 * (time.perf_counter() - self.begin)
            times = super().times()
            write = times["write 0"]
            found.append({"write": write, "plan": sum(times.values()) - write, "host": host})
            return times

    whole, run.Clock = run.Clock, Clock
    model.prefill()
    run.Clock = whole
    return {part: [times[part] for times in found[2:]] for part in found[0]}


def append(run: Any, model: Any) -> list[float]:
    """Microseconds of an append of one token a row, by the layer, of every replay."""
    torch, heads = run.torch, model.heads * model.group
    known = inspect.signature(run.kernels.AppendCall).parameters
    options: dict[str, Any] = {"num_new" if "num_new" in known else "steps": 1}
    if "in_blocks" in known:
        options["in_blocks"] = bool(model.profiles)
    observed = (run if hasattr(run, "OBSERVED") else run.kernels).OBSERVED["mass"]
    calls = [
        run.kernels.AppendCall(
            model.store.host_states[layer], model.host.ladder[-1], run.HEAD_DIM, "bfloat16", 0,
            group=model.group, scale=run.HEAD_DIM**-0.5, softcap=0.0, observed=observed, **options,
        )
        for layer in range(model.layers)
    ]  # fmt: skip
    k, v = torch.randn(2, model.batch, 1, model.heads, run.HEAD_DIM, device="cuda", dtype=torch.bfloat16)
    q = torch.randn(model.batch, 1, heads, run.HEAD_DIM, device="cuda", dtype=torch.bfloat16)
    out, lse = torch.randn_like(q), torch.zeros(model.batch, heads, 1, device="cuda")
    views = [run.cuda_view(x, name) for x, name in ((q, "q"), (k, "k"), (v, "v"))]

    def body() -> None:
        for call in calls:
            call(*views, 0, out.data_ptr(), lse.data_ptr(), True, torch.cuda.current_stream().cuda_stream)

    num_bh = model.batch * model.heads
    opens = model.store.tables["open"].view(model.layers, num_bh, -1).long().clamp(min=0)
    empty = partial(model.store.tables["count"].view(model.layers, num_bh, -1).scatter_, 2, opens, 0)
    empty()
    body()
    torch.cuda.synchronize()
    graph, found = torch.cuda.CUDAGraph(), []
    with torch.cuda.graph(graph):
        body()
    for _ in range(3):
        empty()
        torch.cuda._sleep(100_000)
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(REPLAYS + 1)]
        marks[0].record()
        for mark in marks[1:]:
            graph.replay()
            mark.record()
        torch.cuda.synchronize()
        found += [1e3 * a.elapsed_time(b) / model.layers for a, b in pairwise(marks)][1:]
    model.check()
    return found


def measure(folders: dict[str, Path], rounds: int, head_dim: int, shape: str) -> dict[str, Any]:
    """Both versions in turns, each of them with its ladders."""
    from kvlab.lab.benchmark.versions import ask_in_turns

    asked = [((head_dim, shape, ladder), name) for name in folders for ladder in LADDERS[name]]
    answers = ask_in_turns(__file__, folders, asked, rounds, arguments=["serve"], kernels="cuda")
    found: dict[str, dict[str, list[float]]] = {}
    for ((*_, ladder), name), each in answers.items():
        found[f"{name} {ladder}"] = {part: [x for one in each for x in one[part]] for part in each[0]}
    medians = {
        name: {part: round(float(np.median(values)), 3) for part, values in parts.items()}
        for name, parts in found.items()
    }
    base = medians["before 2,3,4,8"]
    times = {
        name: {part: round(parts[part] / base[part], 4) for part in base}
        for name, parts in medians.items()
        if name.startswith("after")
    }
    return {"head_dim": head_dim, "shape": shape, "us": medians, "times": times}


def cases(given: argparse.Namespace) -> list[Any]:
    from kvlab.lab.benchmark import harness, versions  # not above: a process that answers may be older

    both = partial(measure, versions.folders(given), given.rounds)
    return [
        harness.Case(f"{shape}, head_dim {head_dim}", partial(both, head_dim, shape))
        for head_dim, shape in product(given.head_dims, SHAPES)
    ]


def main() -> int:
    from kvlab.lab.benchmark import harness, versions

    parser = versions.options(__doc__)
    parser.add_argument("--head-dims", type=harness.numbers, default="128,64")
    parser.add_argument("--rounds", type=int, default=4)
    return harness.run(parser, cases)


if __name__ == "__main__":
    if sys.argv[1:] == ["serve"]:
        serve()
    else:
        raise SystemExit(main())

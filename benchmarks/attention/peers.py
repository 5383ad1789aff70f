"""Attention on a GPU beside cuDNN, FlashAttention 2 and, where installed, FlashAttention 4, in one loop.

    python benchmarks/attention/peers.py OUT.json [--only WHAT] [--cases TEXT] [--portable] [--before KERNELS]

forward        fixed and variable length
backward       gradients, and of kvlab also those with the same bits each time
deterministic  the latter beside FlashAttention 4's
short          gradients of short calls with few KV heads, from CUDA graphs, since the host launches them no
               faster than they run
ragged         forward over 16 sequences of 32K tokens in all, of one length and of many; kvlab alone

Without --only the first three. With --before the kernels of another checkout run in the same loop, by today's
launchers: KERNELS is its kernels/cuda. Contestants take turns, five loops each in another order every time,
behind a pause of the GPU, so that none waits for the host; medians count. kvlab is checked against float64
on one head (ragged: with calls of one sequence), and every other call against kvlab's, before it is timed.
TFLOPS count 4 operations (backward 10) * head_dim for every query head and every pair of a query and a key,
half of them under a causal mask.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch

import kvlab
from kvlab.jit.build import build
from kvlab.jit.launch import load
from kvlab.lab.benchmark import harness
from kvlab.lab.benchmark.attention_peers import backward_of, peers
from kvlab.lab.timing_gpu import recorded, time_by_events
from kvlab.ops.cuda import attention, attention_backward, attention_sm90, tile_list

Call = Callable[[], Any]
LOOP_SECONDS, PAUSE_CYCLES = 0.8e-3, 190_000  # of a turn; of the GPU, for each call of a turn
TOTAL, SEQUENCES = 32768, 16  # ragged


class Case(NamedTuple):
    batch: int
    tokens: int
    heads: int
    heads_kv: int
    head_dim: int
    causal: bool = True

    @property
    def name(self) -> str:
        mask = "causal" if self.causal else "full"
        return f"d{self.head_dim} {mask} {self.batch}x{self.tokens} {self.heads}/{self.heads_kv}"

    def draw(self) -> list[torch.Tensor]:
        """Return dout, q, k and v."""
        torch.manual_seed(0)
        heads, shape = (self.heads, self.heads, self.heads_kv, self.heads_kv), (self.batch, self.tokens)
        return [torch.randn(*shape, h, self.head_dim, device="cuda", dtype=torch.bfloat16) for h in heads]


LONG = [
    *(Case(1, tokens, 32, 8, 128) for tokens in (2048, 4096, 8192, 16384, 32768)),
    *(Case(1, 16384, 16, 16, 128, causal) for causal in (True, False)),
    *(Case(2, tokens, 64, 8, 128) for tokens in (2048, 4096, 8192)),
    *(Case(1, tokens, 32, 8, d) for d in (64, 96) for tokens in (2048, 4096, 8192, 16384, 32768)),
    *(Case(1, tokens, 16, 4, 256) for tokens in (2048, 4096, 8192, 16384, 32768)),
]
BATCHES = [Case(8, tokens, 32, 8, d) for d in (64, 96, 128, 256) for tokens in (512, 1024, 2048)]
HEADS = {
    128: ((8, 1), (8, 2), (8, 4), (8, 8), (32, 8), (64, 8)),
    64: ((8, 1), (8, 4), (64, 8)),
    256: ((8, 1), (8, 4)),
}
FEW_HEADS = [
    Case(1, tokens, *heads, d) for d in HEADS for heads in HEADS[d] for tokens in (512, 1024, 2048, 4096)
]
RAGGED = [
    Case(1, TOTAL, 16, 16, 128), Case(1, TOTAL, 16, 16, 128, causal=False), Case(1, TOTAL, 32, 8, 128),
    Case(1, TOTAL, 16, 16, 64),
]  # fmt: skip


class Others(NamedTuple):
    """Which other kernels of kvlab run beside those of the library."""

    portable: bool = False
    before: Path | None = None


def of_sources(root: Path, module: Any, launcher: Any, call: Call) -> Call:
    """Return a call of `module` whose kernels `launcher` builds from the sources below `root`."""
    prepare = lru_cache(maxsize=None)(module._Prepared)

    def with_them() -> Any:
        with mock.patch.object(module, "_prepare", prepare):
            return call()

    def kernel(name: str, entry: str, macros: tuple[tuple[str, Any], ...], device: int) -> Any:
        return load(build(name, dict(macros), "sm_90a", root=root), entry, device=device)

    attention_backward.plan_of.cache_clear()
    with (
        mock.patch.object(launcher, "build", partial(build, root=root)),
        mock.patch.object(tile_list, "cuda_kernel", kernel),
    ):
        with_them()
    attention_backward.plan_of.cache_clear()
    return with_them


def forward(case: Case, others: Others) -> dict[str, Call]:
    _, q, k, v = case.draw()
    causal = case.causal

    def ours(hopper: bool = True) -> torch.Tensor:
        attention.HOPPER = hopper
        return kvlab.attention(q, k, v, causal=causal)

    calls: dict[str, Call] = {"kvlab": ours}
    if case.batch == 8:
        cu = torch.arange(0, 9 * case.tokens, case.tokens, device="cuda", dtype=torch.int32)
        flat, n = [x.flatten(0, 1) for x in (q, k, v)], case.tokens
        calls["kvlab variable length"] = lambda: kvlab.attention_varlen(
            *flat, cu, cu, n, n, causal=causal
        ).view(q.shape)
    if others.before:
        calls |= {
            f"{name} before": of_sources(others.before, attention, attention_sm90, call)
            for name, call in calls.items()
        }
    if others.portable:
        calls["kvlab portable"] = partial(ours, False)
    calls |= {name: partial(peer, q, k, v, causal, False) for name, peer in peers("cuda").items()}
    keys, values = k[0, :, 0].double(), v[0, :, 0].double()
    want = torch.cat([p @ values for _, p in probabilities(q[0, :, 0].double(), keys, causal)])
    compare(f"kvlab {case.name}", ours()[0, :, 0], want, 6e-3)
    return checked(calls, 1e-2)


def backward(case: Case, others: Others, deterministic: bool = False) -> dict[str, Call]:
    """Return the calls by contestant; torch cannot be asked for deterministic ones call by call."""
    dout, q, k, v = case.draw()
    causal = case.causal
    out, lse = kvlab.attention(q, k, v, causal=causal, return_lse=True)

    def ours(in_order: bool = deterministic, hopper: bool = True) -> Any:
        attention_backward.HOPPER = hopper
        return kvlab.attention_backward(dout, q, k, v, out, lse, causal=causal, deterministic=in_order)

    calls: dict[str, Call] = {"kvlab": ours}
    if not deterministic:
        calls["kvlab deterministic"] = partial(ours, True)
    if others.before:
        calls |= {
            f"{name} before": of_sources(others.before, attention_backward, attention_backward, call)
            for name, call in calls.items()
        }
    if others.portable:
        calls["kvlab portable"] = partial(ours, hopper=False)
    for name, peer in peers("cuda").items():
        if deterministic and name != "fa4":
            continue
        try:
            calls[name] = backward_of(peer, dout, q, k, v, causal, deterministic)
        except (RuntimeError, AssertionError) as error:
            print(f"{name}: {str(error)[:90]}", flush=True)
    for name, got, want in zip(("dq", "dk", "dv"), ours(), exact_gradients(case, dout, q, k, v), strict=True):
        compare(f"kvlab {case.name} {name}", got[0, :, : want.shape[1]], want, 1e-2)
    if not all(map(torch.equal, ours(True), ours(True))):
        raise AssertionError(f"kvlab {case.name}: two deterministic calls differ")
    return checked(calls, 2e-2)


def short(case: Case, others: Others) -> dict[str, Call]:
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):  # of the forward, as autograd wants it
        calls = backward(case, others)
    return {name: recorded(call, stream=stream) for name, call in calls.items()}


def ragged_bounds() -> list[int]:
    """Lengths from 176 to 6,000 or so, as of texts: a lognormal draw."""
    sizes = np.random.default_rng(0).lognormal(0, 0.9, SEQUENCES)
    return [0, *np.round(np.cumsum(sizes) / sizes.sum() * TOTAL).astype(int).tolist()]


def ragged(case: Case, others: Others) -> dict[str, Call]:
    _, q, k, v = (x[0] for x in case.draw())
    even = list(range(0, TOTAL + 1, TOTAL // SEQUENCES))
    fixed = [x.reshape(SEQUENCES, -1, *x.shape[1:]) for x in (q, k, v)]
    calls: dict[str, Call] = {"kvlab fixed": lambda: kvlab.attention(*fixed, causal=case.causal)}
    for name, bounds in (("kvlab variable length", even), ("kvlab ragged", ragged_bounds())):
        cu, n = torch.tensor(bounds, device="cuda", dtype=torch.int32), int(max(np.diff(bounds)))
        calls[name] = partial(kvlab.attention_varlen, q, k, v, cu, cu, n, n, causal=case.causal)
        got = calls[name]()
        for start, stop in itertools.pairwise(bounds):
            alone = kvlab.attention(*(x[None, start:stop] for x in (q, k, v)), causal=case.causal)[0]
            compare(f"{name} {case.name}, tokens {start} to {stop}", got[start:stop], alone, 4e-3)
    return calls


def probabilities(q: torch.Tensor, k: torch.Tensor, causal: bool) -> Iterator[tuple[slice, torch.Tensor]]:
    """Softmax of one head in float64, by blocks of rows."""
    for start in range(0, len(q), 2048):
        scores = q[start : start + 2048] @ k.T / q.shape[1] ** 0.5
        if causal:
            rows = torch.arange(start, start + len(scores), device="cuda")
            scores.masked_fill_(torch.arange(len(k), device="cuda") > rows[:, None], -torch.inf)
        yield slice(start, start + len(scores)), scores.softmax(-1)


def exact_gradients(case: Case, dout: Any, q: Any, k: Any, v: Any) -> list[torch.Tensor]:
    """Gradients of the first KV head of the first row in float64, and of the query heads that read it."""
    keys, values = k[0, :, 0].double(), v[0, :, 0].double()
    group, scale = case.heads // case.heads_kv, case.head_dim**-0.5
    dq = torch.empty_like(q[0, :, :group], dtype=torch.float64)
    dk, dv = torch.zeros_like(keys), torch.zeros_like(values)
    for head in range(group):
        queries, above = (x[0, :, head].double() for x in (q, dout))
        for rows, p in probabilities(queries, keys, case.causal):
            dp = above[rows] @ values.T
            ds = p * (dp - (p * dp).sum(-1, keepdim=True)) * scale
            dq[rows, head] = ds @ keys
            dk += ds.T @ queries[rows]
            dv += p.T @ above[rows]
    return [dq, dk[:, None], dv[:, None]]


def compare(what: str, got: torch.Tensor, want: torch.Tensor, limit: float) -> None:
    """Raise unless the error is below `limit` times the norm of what is wanted, or times 1.

    dq and dk of a row that sees one key are 0 in exact arithmetic, and some 1e-6 in float32.
    """
    error = float((got.double() - want.double()).norm() / want.double().norm().clamp(min=1))
    if not error < limit:
        raise AssertionError(f"{what}: relative error {error:.2e}")


def checked(calls: dict[str, Call], limit: float) -> dict[str, Call]:
    """Return the calls that can be made, after a comparison of their results with kvlab's."""
    ours, found = calls["kvlab"](), {}
    for name, call in calls.items():
        try:
            theirs = call()
        except (RuntimeError, AssertionError) as error:
            print(f"{name}: {str(error)[:90]}", flush=True)
            continue
        for got, want in zip(theirs, ours, strict=True) if isinstance(ours, tuple) else [(theirs, ours)]:
            compare(name, got, want, limit)
        found[name] = call
    return found


WHAT: dict[str, tuple[list[Case], Callable[[Case, Others], dict[str, Call]], int]] = {
    "forward": ([*LONG, *BATCHES], forward, 4),
    "backward": ([*LONG, *BATCHES], backward, 10),
    "deterministic": ([*LONG, *BATCHES], partial(backward, deterministic=True), 10),
    "short": (FEW_HEADS, short, 10),
    "ragged": (RAGGED, ragged, 4),
}
"""Cases, the calls of one, and operations of a pair and channel."""


def measure(case: Case, what: str, others: Others) -> dict[str, Any]:
    """Return TFLOPS by contestant, and the most of those that are not kvlab."""
    _, make, each = WHAT[what]
    calls = make(case, others)
    if case.head_dim > 128:
        calls.pop("fa2", None)  # an order of magnitude slower than all others there
    lengths = dict.fromkeys(calls, [case.tokens] * case.batch)
    if what == "ragged":
        lengths = dict.fromkeys(calls, [TOTAL // SEQUENCES] * SEQUENCES)
        lengths["kvlab ragged"] = np.diff(ragged_bounds()).tolist()
    of_pair = each * case.heads * case.head_dim / (2 if case.causal else 1)
    operations = {name: of_pair * sum(n * n for n in lengths[name]) for name in calls}
    times = max(1, int(LOOP_SECONDS / (max(operations.values()) / 4.5e14 + 1e-5)))
    timings = time_by_events(calls, repeats=5, each=times, pause=PAUSE_CYCLES)
    found = {name: operations[name] / timing.median / 1e12 for name, timing in timings.items()}
    best = max((x for name, x in found.items() if not name.startswith("kvlab")), default=0.0)
    return {
        "case": f"{what} {case.name}",
        "tflops": found,
        "best peer": best,
        "ratio": found["kvlab"] / best if best else None,
    }


def cases(given: argparse.Namespace) -> list[harness.Case]:
    others = Others(given.portable, given.before)
    return [
        harness.Case(f"{what} {case.name}", partial(measure, case, what, others))
        for what in ((given.only,) if given.only else ("forward", "backward", "deterministic"))
        for case in WHAT[what][0]
        if given.cases in case.name
    ]


def main() -> int:
    parser = harness.options(__doc__)
    parser.add_argument("--only", choices=WHAT)
    parser.add_argument("--cases", default="", help='only those that contain this, as in "d128 causal"')
    parser.add_argument("--portable", action="store_true", help="time the kernel for other GPUs, too")
    parser.add_argument("--before", type=Path, help="kernels/cuda of another checkout, to time it, too")
    return harness.run(parser, cases, cudnn=torch.backends.cudnn.version())


if __name__ == "__main__":
    raise SystemExit(main())

"""Experimental attention backward on a GPU: checks against float64, then times in turns with cuDNN, kvlab.

    python make.py BUILD
    python exp.py BUILD [--deterministic] [--seconds S] [--output OUT.json]

Every timed contestant is recorded as a CUDA graph and checked against cuDNN first; medians of 5 turns.
"""

import argparse
import functools
import json
import os
import sys
import threading
import time
import traceback
from pathlib import Path

import torch
from launch import Variant, loaded, print_waits
from reference import checks, error, rand, reference
from torch.nn.attention import SDPBackend, sdpa_kernel

import kvlab

_DETERMINISTIC = ("128 o0", "128 plain", "64 o1", "96 o0")  # builds whose deterministic additions are checked
_START = time.time()
_LAST = [time.time(), "start"]  # time and name of what was begun last


def at(what):
    """Note what begins; `watch` names it when it does not end."""
    _LAST[:] = [time.time(), what]


def say(*words):
    """Print at once."""
    print(*words, flush=True)
    at(str(words)[:80])


def watch():
    """End the process when a launch does not end."""
    while True:
        time.sleep(1)
        if time.time() - _LAST[0] > 14:
            print("HANGS in", _LAST[1], flush=True)
            print_waits()
            os._exit(3)


def graph_of(call, reps):
    """Record `reps` calls; return the replay and the results of the last."""
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        call()
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(reps):
            results = call()
    return graph.replay, results


def milliseconds(replay):
    """Time of one replay."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    replay()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)


# ---- checks


def check_debug(variants, deterministic):
    """Run the builds whose waits end after a time and say where they stand."""
    for name in [n for n in variants if n.endswith("debug")]:
        variant = variants.pop(name)
        for case, tensors, options in checks(variant.m["HEAD_DIM"]):
            out, lse, *want = reference(*tensors, **options)
            at(f"{name} {case}")
            launch = variant.prepare(*tensors, out, lse, **options, ordered=int(deterministic))
            for part, kernel in enumerate(("prepare", "main", "finish"), 1):
                try:
                    launch(part)
                    torch.cuda.synchronize()
                except Exception as problem:
                    say("ENDS", name, case, kernel, repr(problem)[:150])
                    print_waits()
                    os._exit(4)
            errors = [error(g, w) for g, w in zip(launch.grads, want, strict=True)]
            if not all(e < 1e-2 for e in errors):
                say("wrong", name, case, errors)
        say("ends:", name)


def check(variant, cases, deterministic):
    """Errors of each case, launched twice; dk and dv (deterministic: dq, too) must have the same bits."""
    ordered, found = int(deterministic), []
    for name, tensors, options, (out, lse, *want) in cases:
        at(f"check {variant.name} {name}")
        launch = variant.prepare(*tensors, out, lse, **options, ordered=ordered)
        launch()
        torch.cuda.synchronize()
        once = [g.clone() for g in launch.grads]
        for g in launch.grads:
            g.fill_(float("nan"))
        launch()
        torch.cuda.synchronize()
        errors = [error(g, w) for g, w in zip(launch.grads, want, strict=True)]
        same = all(map(torch.equal, once[1 - ordered :], launch.grads[1 - ordered :]))
        found.append((name, [round(e, 5) for e in errors], same))
        if not (all(e < 1e-2 for e in errors) and same):
            say("WRONG", variant.name, found[-1])
    return found


def check_all(variants, deterministic):
    """Check every build that computes all; return what was found by name."""
    references, found = {}, {}
    for name, variant in variants.items():
        if variant.m.get("ABLATE") or (deterministic and name not in _DETERMINISTIC):
            continue
        head_dim = variant.m["HEAD_DIM"]
        if head_dim not in references:
            references[head_dim] = [(n, x, o, reference(*x, **o)) for n, x, o in checks(head_dim)]
        found[name] = check(variant, references[head_dim], deterministic)
        say("checked", name, "largest error", max(max(errors) for _, errors, _ in found[name]))
    want = next(iter(references.values()))[0][3][2]
    if error(want.roll(1, 1), want) < 0.1:
        raise RuntimeError("the comparison does not see gradients of another position")
    return found


# ---- timing


class Contestants:
    """Recorded calls of one shape, each checked against the first.

    A graph reads buffers that only its call holds, and `torch.cuda.graph` gives unused memory back to the
    driver when it begins: `held` keeps every call until all are timed.
    """

    def __init__(self, case, reps):
        self.case, self.reps, self.want = case, reps, None
        self.replays, self.held = {}, []

    def add(self, label, call, comparable=True, recorded=True):
        at(f"{self.case} {label}")
        if recorded:
            replay, results = graph_of(call, self.reps)
        else:  # autograd runs on the stream of the forward call
            results, replay = call(), functools.partial(repeat, call, self.reps)
        replay()
        torch.cuda.synchronize()
        if self.want is None:
            self.want = [x.float() for x in results]
        elif comparable:
            errors = [error(x, w) for x, w in zip(results, self.want, strict=True)]
            if not all(e < 1.5e-2 for e in errors):
                say("DIFFERS", self.case, label, errors)
        self.replays[label] = replay
        self.held.append((results, call))

    def medians(self, turns=5):
        """Milliseconds of a call, by label."""
        times = {label: [] for label in self.replays}
        for turn in range(turns + 1):
            for label, replay in self.replays.items():
                if turn == 0:
                    replay()
                took = milliseconds(replay)
                if turn:
                    times[label].append(took / self.reps)
        return {label: sorted(t)[len(t) // 2] for label, t in times.items()}


def repeat(call, reps):
    """Call `reps` times."""
    for _ in range(reps):
        call()


def turned(x):
    """Positions and heads swapped."""
    return x.transpose(1, 2)


def forward(q, k, v, causal):
    """Out and log-sum-exp of cuDNN."""
    group = q.shape[2] // k.shape[2]
    with torch.no_grad():
        out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
            turned(q),
            turned(k.repeat_interleave(group, 2)),
            turned(v.repeat_interleave(group, 2)),
            None,
            True,
            0.0,
            causal,
        )
    return turned(out).contiguous(), lse.reshape(lse.shape[:3]).contiguous()


def time_case(case, variants, deterministic):
    """TFLOPS by contestant, and microseconds of the three launches of the first build."""
    b, s, h, hk, d, causal = case["shape"]
    torch.manual_seed(1)
    flops = 10 * h * d * b * s * s * (0.5 if causal else 1)
    dout, q, k, v = rand(b, s, h, d), rand(b, s, h, d), rand(b, s, hk, d), rand(b, s, hk, d)
    out, lse = forward(q, k, v, causal)
    reps = max(1, int(1.5e-3 / (flops / 450e12 + 2e-5)))
    contestants = Contestants(case["name"], reps)
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        torch_out = torch.nn.functional.scaled_dot_product_attention(
            *map(turned, leaves), is_causal=causal, enable_gqa=h != hk
        )
    torch_dout = turned(dout)
    contestants.add(
        "cudnn",
        lambda: torch.autograd.grad(torch_out, leaves, torch_dout, retain_graph=True),
        recorded=False,
    )
    if int(deterministic) in case["today"]:
        contestants.add(
            "today",
            lambda: kvlab.attention_backward(
                dout, q, k, v, out, lse, causal=causal, deterministic=deterministic
            ),
        )
    parts = []
    for name, options in case["variants"]:
        if deterministic != bool(options.get("ordered")):
            continue
        label = name + "".join(f" {a}={b}" for a, b in options.items())
        launch = variants[name].prepare(dout, q, k, v, out, lse, causal, **options)
        contestants.add(label, launch, not variants[name].m.get("ABLATE"))
        parts = parts or [graph_of(functools.partial(launch, part), reps)[0] for part in (1, 2, 3)]
    teraflops = {n: flops / (ms * 1e-3) / 1e12 for n, ms in contestants.medians().items()}
    us = []
    for replay in parts:
        replay()
        us.append(round(1e3 * milliseconds(replay) / reps, 1))
    return teraflops, us


def main():
    """Check, time, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("build", type=Path, help="folder that make.py wrote")
    parser.add_argument("--deterministic", action="store_true", help="additions to dq in the order of keys")
    parser.add_argument("--seconds", type=float, default=40, help="begin no shape later")
    parser.add_argument("--output", type=Path, help="JSON file to write")
    arguments = parser.parse_args()
    threading.Thread(target=watch, daemon=True).start()
    manifest = json.loads((arguments.build / "manifest.json").read_text())
    cubins = {n: (macros, (arguments.build / file).read_bytes()) for n, (macros, file) in manifest.items()}
    ends = {m["HEAD_DIM"]: loaded(c, "prepare", "finish") for n, (m, c) in cubins.items() if n[:4] == "ends"}
    variants = {n: Variant(n, m, c, ends[m["HEAD_DIM"]]) for n, (m, c) in cubins.items() if n[:4] != "ends"}
    check_debug(variants, arguments.deterministic)
    result = {"device": torch.cuda.get_device_name(), "checks": check_all(variants, arguments.deterministic)}
    result |= {"TFLOPS": {}, "us of prepare, main, finish": {}}
    for case in json.loads((arguments.build / "plan.json").read_text()):
        if time.time() - _START > arguments.seconds:
            say("out of time before", case["name"])
            break
        teraflops, us = time_case(case, variants, arguments.deterministic)
        torch.cuda.empty_cache()
        result["TFLOPS"][case["name"]], result["us of prepare, main, finish"][case["name"]] = teraflops, us
        base = teraflops["cudnn"]
        ranking = sorted(teraflops.items(), key=lambda item: -item[1])
        say(f"{case['name']}:", ", ".join(f"{n} {x:.0f} ({x / base:.2f})" for n, x in ranking), us)
        if arguments.output:
            arguments.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    try:
        main()
    except Exception:  # after a fault on the device modules cannot be unloaded either
        traceback.print_exc()
        sys.stdout.flush()
        os._exit(5)

"""A token of the decode engine beside its cost model and beside transformers, compiled.

The engine: replays of the decoder's graph, one behind the other, from a position on; median of 5 times 100.
The cost model: bytes of weights, keys and values at the speed at which this card reads, measured first, and
so many microseconds a phase of a layer. transformers: `torch.compile(mode="reduce-overhead", fullgraph=True)`
of the forward pass with a static cache that is just long enough, greedy tokens fed back on the device; median
of 5 times 40. Weights are random in the published sizes, float16 in both.

    python benchmarks/engine/tokens.py OUT.json --cases pythia-2.8b:1x32,pythia-2.8b:8x1024 [--compiled]

With --lock FILE several processes prepare side by side and time one after the other.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import gc
import itertools
import statistics
import time
from collections.abc import Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from kvlab.engine import Decoder
from kvlab.engine.geometry import Geometry, published
from kvlab.engine.gpu import settings_of
from kvlab.engine.sampling import Sampling
from kvlab.lab.benchmark import harness
from kvlab.lab.benchmark.decode_cuda import read_bandwidth
from kvlab.lab.benchmark.engine import check, repeated

DRAWS = Sampling(temperature=0.8, top_k=50, top_p=0.9)
ROUNDS, REPLAYS, COMPILED_TOKENS = 5, 100, 40


@contextlib.contextmanager
def locked(path: Path | None) -> Iterator[None]:
    """Wait until no other process has the file."""
    with open(path or "/dev/null", "w", encoding="utf-8") as file:
        if path:
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def nbytes_of(geometry: Geometry, batch: int, keys: int) -> int:
    """What a token reads."""
    per_key = 2 * geometry.layers * geometry.heads_kv * geometry.head_dim
    return 2 * (geometry.parameters + batch * keys * per_key)


def modelled_us(geometry: Geometry, nbytes: int, bandwidth: float) -> dict[str, float]:
    """The cost model: 3 or 5 phases a layer, and two."""
    phases = (3 if geometry.parallel else 5) * geometry.layers + 2
    base = 1e6 * nbytes / bandwidth
    return {f"model_{c}": base + c * phases for c in (2.5, 1.2)}


def replays(decoder: Decoder, context: int) -> list[float]:
    """Microseconds a token of each round."""
    executor: Any = decoder._executor
    cupy, rounds = executor._cupy, []
    with executor._current():
        for _ in range(ROUNDS):
            executor._replay_given(np.arange(decoder.batch) + 1, np.full(decoder.batch, context))
            begin, end = cupy.cuda.Event(), cupy.cuda.Event()
            begin.record()
            for _ in range(REPLAYS):
                executor._replay()
            end.record()
            end.synchronize()
            rounds.append(1e3 * cupy.cuda.get_elapsed_time(begin, end) / REPLAYS)
    return rounds


def engine_rows(
    name: str, shapes: list[tuple[int, int]], lock: Path | None, plan: str, bandwidth: float
) -> list[dict[str, Any]]:
    """The engine's times of one model; with greedy choices, and with draws."""
    geometry, _ = published(name)
    one, rows = repeated(name), []
    layer, head = next(one.layers), one.head()
    from dataclasses import replace

    for batch, group in itertools.groupby(shapes, key=lambda shape: shape[0]):
        contexts = [context for _, context in group]
        weights = replace(one, layers=iter([layer] * geometry.layers), head=lambda: head)
        with locked(lock):
            decoder = Decoder(
                weights, batch=batch, device="cuda", max_seqlen=max(contexts) + REPLAYS + 2, plan=plan
            )  # fmt: skip
            check(decoder, name, 32)
            executor: Any = decoder._executor
            with executor._current():
                executor._settings.set(settings_of(DRAWS))
            for context, draws in itertools.product(contexts, (False, True)):
                executor._draws = draws
                times = replays(decoder, context)
                us, nbytes = statistics.median(times), nbytes_of(geometry, batch, context + REPLAYS // 2)
                rows.append({
                    "model": name, "plan": plan, "draws": draws, "batch": batch, "context": context,
                    "us": us, "all": times,
                    "tokens/s": 1e6 * batch / us, "GB/s": nbytes / us / 1e3,
                    "share": nbytes / us / 1e-6 / bandwidth, **modelled_us(geometry, nbytes, bandwidth),
                })  # fmt: skip
            del decoder
            gc.collect()
    return rows


def transformers_model(geometry: Geometry, base: float, device: str) -> Any:
    """Random weights in float16, made where they stay."""
    import torch
    import transformers

    sizes: dict[str, Any] = {
        "vocab_size": geometry.vocabulary, "hidden_size": geometry.hidden,
        "num_hidden_layers": geometry.layers, "num_attention_heads": geometry.heads_q,
        "intermediate_size": geometry.ffn, "max_position_embeddings": geometry.max_positions,
        "use_cache": True,
    }  # fmt: skip
    rotary: dict[str, Any] = {"rope_type": "default", "rope_theta": base}
    if geometry.layer_norm:
        rotary["partial_rotary_factor"] = geometry.rotary_dim / geometry.head_dim
        config: Any = transformers.GPTNeoXConfig(**sizes, rope_parameters=rotary)
    else:
        config = transformers.LlamaConfig(
            **sizes, rope_parameters=rotary, head_dim=geometry.head_dim,
            num_key_value_heads=geometry.heads_kv, tie_word_embeddings=False,
        )  # fmt: skip
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float16)
    try:
        with torch.device(device):
            model: Any = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    finally:
        torch.set_default_dtype(before)
    return model.eval().requires_grad_(False)


def compiled_row(name: str, batch: int, context: int, lock: Path | None, device: str) -> dict[str, Any]:
    """The time of transformers, compiled, with a static cache."""
    import torch
    from transformers import StaticCache

    geometry, base = published(name)
    model = transformers_model(geometry, base, device)
    most = context + (ROUNDS + 1) * COMPILED_TOKENS + 8
    cache = StaticCache(config=model.config, max_cache_len=-(-most // 64) * 64)
    ids = torch.randint(0, geometry.vocabulary, (batch, context), device=device)
    begin = time.perf_counter()
    with torch.no_grad():
        ids = model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[:, -1:].argmax(-1)
        forward = torch.compile(model.forward, mode="reduce-overhead", fullgraph=True)

        def run(ids: Any, tokens: int) -> Any:
            for _ in range(tokens):
                torch.compiler.cudagraph_mark_step_begin()
                ids = forward(ids, past_key_values=cache, use_cache=True).logits[:, -1:].argmax(-1)
            return ids

        ids = run(ids, 4)
        seconds = time.perf_counter() - begin
        with locked(lock):
            times = []
            run(ids, COMPILED_TOKENS)
            for _ in range(ROUNDS):
                if device != "cpu":
                    torch.cuda.synchronize()
                start = time.perf_counter()
                ids = run(ids, COMPILED_TOKENS)
                ids.tolist()
                times.append(1e6 * (time.perf_counter() - start) / COMPILED_TOKENS)
    return {
        "transformers": "compiled, reduce-overhead, static cache", "model": name, "batch": batch,
        "context": context, "us": statistics.median(times), "all": times, "compile_s": seconds,
    }  # fmt: skip


def cases(given: argparse.Namespace) -> Iterator[harness.Case]:
    @cache
    def bandwidth() -> float:
        with locked(given.lock):
            return read_bandwidth()

    for name, group in itertools.groupby(given.cases, key=lambda case: case[0]):
        shapes = [(batch, context) for _, batch, context in group]

        def engine(name: str = name, shapes: list[tuple[int, int]] = shapes) -> Iterator[dict[str, Any]]:
            for row in engine_rows(name, shapes, given.lock, given.plan, bandwidth()):
                yield row | {"read_bytes/s": bandwidth()}

        if not given.compiled:
            yield harness.Case(name, engine)
            continue
        for batch, context in shapes:
            compiled = partial(compiled_row, name, batch, context, given.lock, given.device)
            yield harness.Case(f"{name}:{batch}x{context}, transformers", compiled)


def main() -> int:
    parser = harness.options(__doc__)
    parser.add_argument("--cases", type=harness.shapes, required=True, help="MODEL:BATCHxTOKENS, ... ")
    parser.add_argument("--compiled", action="store_true", help="transformers in place of the engine")
    parser.add_argument("--plan", default="graph", help="of the engine")
    parser.add_argument("--lock", type=Path, help="file that a process holds while it times")
    parser.add_argument("--device", default="cuda", help="of transformers: cuda, or cpu to try the script")
    return harness.run(parser, cases)


if __name__ == "__main__":
    raise SystemExit(main())

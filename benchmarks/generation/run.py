"""Generation with a packed cache against other caches in transformers, in the geometry of Llama-3.1-8B.

Weights, keys and values are random: what is timed does not depend on them. Caches are filled directly, not by
a prefill, and then decode steps of the whole model are timed, one kind of cache after the other in one
process: `DynamicCache` under "sdpa" (dense; dense_flash: without cuDNN, whose attention plans each new length
anew on the host), `KVLabCache` (packed), the same with steps replayed from CUDA
graphs (graph), and the `QuantizedCache` of transformers with hqq. Besides: the host's time for a layer's
cache and attention when nothing waits for the GPU, and the GPU's time for attention and append (in a CUDA
graph) and for a plan (between events).

    python benchmarks/generation/run.py OUT.json [--layers 32] [--steps 32] [--cases dense:8x32768,...]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, QuantizedCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward

import kvlab
from kvlab.integrations.decode_graph import DecodeGraph
from kvlab.integrations.packed_attention import packed_attention_forward
from kvlab.integrations.transformers import ATTENTION, KVLabCache, register
from kvlab.lab.benchmark import harness
from kvlab.lab.timing_gpu import recorded, time_by_events
from kvlab.views import cuda_view

BITS, BUDGET, LOOKAHEAD = (4, 8), 0.3, 128
SHORT, SHORT_BITS = 4096, (2, 4, 8)  # up to this length open pages at 8 bits leave less than 4 bits to others
WARM_UP = 20  # steps: both kinds of a graph are recorded within 17
HEADS_Q, HEADS, DIM = 32, 8, 128
DEFAULT = ",".join(
    f"{name}:{shape}"
    for shape, names in (
        ("1x2048", "dense dense_flash packed graph"),
        ("8x32768", "dense dense_flash packed graph"),
        ("16x32768", "dense dense_flash packed graph"),
        ("4x32768", "hqq packed graph"),
        ("40x32768", "dense packed graph"),
    )
    for name in names.split()
)


def make_model(layers: int) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=layers,
        num_attention_heads=HEADS_Q, num_key_value_heads=HEADS, max_position_embeddings=1 << 17,
    )  # fmt: skip
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        model = LlamaForCausalLM(config).eval()
    torch.set_default_dtype(torch.float32)
    return model


def tokens(batch: int, n: int) -> tuple[torch.Tensor, torch.Tensor]:
    k, v = torch.randn(2, batch, n, HEADS, DIM, dtype=torch.bfloat16, device="cuda")
    return k, v


def dense_cache(config: LlamaConfig, batch: int, n: int) -> DynamicCache:
    cache = DynamicCache(config=config)
    for layer in range(config.num_hidden_layers):
        k, v = tokens(batch, n)
        cache.update(k.transpose(1, 2).contiguous(), v.transpose(1, 2).contiguous(), layer)
    return cache


def packed_cache(config: LlamaConfig, batch: int, n: int) -> KVLabCache:
    bits = SHORT_BITS if n <= SHORT else BITS
    options: dict[str, Any] = {"budget": BUDGET, "bits": bits, "max_seqlen": n + LOOKAHEAD}
    cache = KVLabCache(config, **options)
    packed = kvlab.MixedPrecisionCache(
        config.num_hidden_layers, HEADS_Q, HEADS, DIM, batch=batch, dtype="bfloat16", device="cuda", **options
    )
    for layer in range(config.num_hidden_layers):
        packed.append(layer, *tokens(batch, n))
    cache.hold(packed)
    return cache


def quantized_cache(config: LlamaConfig, batch: int, n: int) -> QuantizedCache:
    cache = QuantizedCache("hqq", config, nbits=4, axis_key=1, axis_value=1)
    for layer in range(config.num_hidden_layers):
        k, v = tokens(batch, n)
        cache.update(k.transpose(1, 2).contiguous(), v.transpose(1, 2).contiguous(), layer)
    return cache


CACHES = {
    "dense": dense_cache,
    "dense_flash": dense_cache,
    "packed": packed_cache,
    "graph": packed_cache,
    "hqq": quantized_cache,
}


@torch.no_grad()
def decode(step: Any, batch: int, steps: int, warm_up: int) -> dict[str, float]:
    """Milliseconds a step, the first few left out; `step` takes tokens and returns logits."""
    ids = torch.randint(0, 1000, (batch, 1), device="cuda")
    times = []
    for _ in range(steps + warm_up):
        torch.cuda.synchronize()
        start = time.perf_counter()
        ids = step(ids)[:, -1:].argmax(-1)
        torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - start))
    times = times[warm_up:]
    mean = statistics.fmean(times)
    return {"ms_mean": mean, "ms_median": statistics.median(times), "tokens_per_s": batch * 1e3 / mean}


def measure(model: LlamaForCausalLM, name: str, batch: int, n: int, steps: int) -> dict[str, Any]:
    make = CACHES[name]
    model.set_attn_implementation(ATTENTION if make is packed_cache else "sdpa")
    before = torch.cuda.memory_allocated()
    cache = make(model.config, batch, n)
    torch.cuda.synchronize()
    found: dict[str, Any] = {"cache": name, "batch": batch, "tokens": n}
    found["cache_bytes"] = torch.cuda.memory_allocated() - before

    def usual(ids: torch.Tensor) -> torch.Tensor:
        return model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits

    step = DecodeGraph(model, cache) if name == "graph" else usual
    before_steps = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(before_steps and name != "dense_flash")
    found |= decode(step, batch, steps, 3 if step is usual else WARM_UP)
    torch.backends.cuda.enable_cudnn_sdp(before_steps)
    if make is packed_cache:
        packed = cache.packed
        found |= {"nbytes": packed.nbytes, "reserved_nbytes": packed.reserved_nbytes}
        found["bits_per_element"] = packed.bits_per_element
        found |= device_times(packed) if batch == 8 and name == "packed" else {}
    return found


def device_times(packed: kvlab.MixedPrecisionCache) -> dict[str, float]:
    """Microseconds of device time a layer: attention, append, and a plan of all layers."""
    device = packed._device
    layers = packed.num_layers
    q = torch.randn(packed.batch, 1, HEADS_Q, DIM, dtype=torch.bfloat16, device="cuda")
    k, v = tokens(packed.batch, 1)
    views = [cuda_view(x, "x") for x in (q, k, v)]
    out, lse = torch.empty_like(q), torch.empty(packed.batch, HEADS_Q, 1, device="cuda")
    row_budgets = packed._limit.row_budgets(packed.seqlen, packed.batch)
    device.reallocate(1, row_budgets)
    calls = [device.calls.step(i, q, 1, DIM**-0.5, 0.0, False) for i in range(layers)]

    def attend(stream: int) -> None:
        for attend, *_ in calls:
            attend(views[0], out.data_ptr(), lse.data_ptr(), stream)

    def append(stream: int) -> None:
        for _, append, *_ in calls:
            append(*views, 0, out.data_ptr(), lse.data_ptr(), True, stream)

    def on_current_stream(work: Any) -> Any:
        return recorded(lambda: work(torch.cuda.current_stream().cuda_stream))

    works = {"attend_us": on_current_stream(attend), "append_us": on_current_stream(append)}
    works["plan_us"] = lambda: device.reallocate(1, row_budgets)
    return {
        name: 1e6 * time_by_events({name: work}, repeats=8, warm=False)[name].median / layers
        for name, work in works.items()
    }


@torch.no_grad()
def host_times(model: LlamaForCausalLM) -> dict[str, float]:
    """Microseconds of the host for a layer's cache and attention, batch 1, 2,048 tokens, nothing awaited."""
    config, module = model.config, model.model.layers[0].self_attn
    layers = config.num_hidden_layers
    q = torch.randn(1, HEADS_Q, 1, DIM, dtype=torch.bfloat16, device="cuda")
    k, v = torch.randn(2, 1, HEADS, 1, DIM, dtype=torch.bfloat16, device="cuda")
    dense, packed = dense_cache(config, 1, 2048), packed_cache(config, 1, 2048)

    found = {}
    for name, cache, attend in (
        ("dense", dense, sdpa_attention_forward),
        ("dense_flash", dense, sdpa_attention_forward),
        ("packed", packed, packed_attention_forward),
    ):
        torch.backends.cuda.enable_cudnn_sdp(name != "dense_flash")
        times = []
        for _ in range(40):
            torch.cuda.synchronize()
            start = time.perf_counter()
            for layer in range(layers):
                attend(module, q, *cache.update(k, v, layer), None, scaling=DIM**-0.5)
            times.append(1e6 * (time.perf_counter() - start) / layers)
        found[f"{name}_us_median"] = statistics.median(times)
        found[f"{name}_us_mean"] = statistics.fmean(times[8:])
    return found


def attempt(name: str, work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return a row; that there is too little memory for a cache is a result, too."""
    try:
        return {"name": name, **work()}
    except (torch.OutOfMemoryError, kvlab.OutOfMemory) as error:
        return {"name": name, "out_of_memory": str(error).split("\n")[0]}


def cases(given: argparse.Namespace) -> list[harness.Case]:
    @lru_cache
    def model() -> LlamaForCausalLM:
        register()
        return make_model(given.layers)

    def one(name: str, batch: int, n: int) -> dict[str, Any]:
        return measure(model(), name, batch, n, given.steps)

    works: list[tuple[str, Callable[[], dict[str, Any]]]] = [("host", lambda: host_times(model()))]
    works += [(f"{name}:{batch}x{n}", partial(one, name, batch, n)) for name, batch, n in given.cases]
    return [harness.Case(name, partial(attempt, name, work)) for name, work in works]


def main() -> int:
    parser = harness.options(__doc__)
    parser.set_defaults(bits=BITS, budget=BUDGET)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--cases", type=harness.shapes, default=DEFAULT)
    return harness.run(parser, cases)


if __name__ == "__main__":
    raise SystemExit(main())

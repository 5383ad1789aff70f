"""Forward attention on the CPU beside torch's, float32: `python benchmarks/attention/cpu.py OUT.json`.

One thread each and processor time, in turns, so that other work on the machine changes the ratio little.
"""

from __future__ import annotations

import argparse
import datetime
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
import numpy as np
import torch

import kvlab
from kvlab.device import cpu

# batch, tokens, query heads, KV heads, head_dim, causal
CASES = (
    (1, 512, 8, 8, 64, True), (1, 2048, 8, 8, 64, False), (1, 2048, 8, 8, 64, True),
    (1, 2048, 8, 2, 128, True), (1, 2048, 8, 8, 128, False),
)  # fmt: skip


def seconds(call: Callable[[], object]) -> float:
    start = time.process_time()
    call()
    return time.process_time() - start


def measure(batch: int, tokens: int, heads: int, kv_heads: int, d: int, causal: bool) -> dict[str, Any]:
    torch.manual_seed(0)
    q, k, v = (torch.randn(batch, tokens, h, d) for h in (heads, kv_heads, kv_heads))

    def ours() -> torch.Tensor:
        return kvlab.attention(q, k, v, causal=causal)

    def theirs() -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(
            *(x.transpose(1, 2) for x in (q, k, v)), is_causal=causal, enable_gqa=heads != kv_heads
        ).transpose(1, 2)

    error = float((ours() - theirs()).abs().max())
    if not error < 1e-5:
        raise AssertionError(f"the two differ by {error:.2e}")
    times = np.median([[seconds(ours), seconds(theirs)] for _ in range(7)], axis=0)
    operations = 4 * batch * heads * tokens * tokens * d / (2 if causal else 1)
    return {
        "batch": batch, "tokens": tokens, "heads": [heads, kv_heads], "head_dim": d, "causal": causal,
        "kvlab GFLOPS": round(operations / times[0] / 1e9, 1),
        "torch GFLOPS": round(operations / times[1] / 1e9, 1),
        "kvlab / torch": round(times[1] / times[0], 2),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("output", type=Path)
    output = parser.parse_args().output
    torch.set_num_threads(1)
    numba.set_num_threads(1)
    rows = []
    for case in CASES:
        rows.append(measure(*case))
        print(rows[-1], flush=True)
    about = {
        "date": datetime.date.today().isoformat(), "command": "python benchmarks/attention/cpu.py OUT.json",
        "cpu": cpu().name, "features": cpu().features, "torch": torch.__version__, "numba": numba.__version__,
    }  # fmt: skip
    output.write_text(json.dumps({"about": about, "results": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""Record what the allocator is asked while SmolLM2-135M reads: tests/data/smollm2_pages.npz.

    python benchmarks/allocator/record.py --tokens 5120

The model reads the first tokens of the book through a cache at 0.25 of fp16, in steps of 1,024 tokens; kept
is what every layer asks when it stores the tokens of the last step:

    importance (layers, pages)   sum of the importance of a page's tokens, times 64 / tokens
    ceiling (layers, pages)      its present rung, which it cannot rise above
    error, cost (rungs,)         predicted error and bytes of a page at 2, 3, 4 and 8 bits
    room                         bytes of a layer
"""

import argparse
from pathlib import Path

import numpy as np

STEP = 1024
TARGET = Path(__file__).resolve().parents[2] / "tests/data/smollm2_pages.npz"


def main() -> None:
    import torch

    from kvlab.cache import plan
    from kvlab.integrations.transformers import KVLabCache
    from kvlab.lab.quality.model import load_smollm2

    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens", type=int, default=5 * STEP, help="to read, a multiple of 1,024")
    tokens = parser.parse_args().tokens
    asked = []
    allocate = plan.allocate

    def spy(loss, cost, room, *, ceiling, method):
        asked.append((loss, cost, room, ceiling))
        return allocate(loss, cost, room, ceiling=ceiling, method=method)

    plan.allocate = spy
    subject = load_smollm2()
    numbers = subject.encode(subject.text[: 10 * tokens])[:tokens]
    cache = KVLabCache(subject.model.config, budget=0.25)
    with torch.inference_mode():
        for start in range(0, tokens, STEP):
            asked.clear()
            step = torch.tensor([numbers[start : start + STEP]])
            subject.model(step, past_key_values=cache, logits_to_keep=1)
    losses, costs, rooms, ceilings = zip(*asked, strict=True)
    error = np.array([2 * plan.ERRORS[width] for width in (2, 3, 4, 8)])
    np.savez_compressed(
        TARGET,
        importance=np.stack([loss[:, 0] / error[0] for loss in losses]).astype(np.float32),
        ceiling=np.stack(ceilings).astype(np.uint8),
        error=error,
        cost=costs[0],
        room=rooms[0],
    )


if __name__ == "__main__":
    main()

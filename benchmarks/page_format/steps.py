"""Compare rules that choose the step of a vector: mean squared error over that of the best of all bytes.

    python benchmarks/page_format/steps.py OUT.json [--vectors 4000]

Vectors are those that pages get: Gaussian ones, sums of heavy tails, or of which two channels are 20 and
8 times larger, all rotated; or they are decoded from codes of more bits, chosen by the same rule. `kvlab` is
the rule of `kvlab.reference.pages.encode`; `five, mean square` the first there was, the best of five bytes
around a multiple of the root mean square; `one, mean square` its middle byte alone. Errors are against the
vector as it was before anything was rounded; length is what is left of it along itself. No GPU is needed.
"""

import argparse
import itertools
import json
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))

from kvlab.lab.results import provenance
from kvlab.reference.codec import hadamard
from kvlab.reference.pages import STEPS, encode, grid_codes, grid_values, rotate

MEAN_SQUARE = {2: 0.4978, 3: 0.2930, 4: 0.1676, 8: 0.0135}
PATHS = ((2,), (3,), (4,), (8,), (3, 2), (4, 2), (4, 3, 2), (8, 4, 3, 2), (4, 3))
FINITE = STEPS[:0xF8]


def draw(rng: np.random.Generator, kind: str, shape: tuple[int, int]) -> np.ndarray:
    """Raw vectors."""
    x = rng.standard_t(5, shape) if kind == "heavy tails" else rng.standard_normal(shape)
    if kind == "outliers":
        x[:, [3, 7]] *= 20, 8
    return x.astype(np.float32)


def on_grid(x: np.ndarray, byte: np.ndarray, bits: int) -> np.ndarray:
    """Vectors as their codes for these step bytes stand for them."""
    step = FINITE[byte][:, None]
    return grid_values(grid_codes(x, step, bits), step, bits)


def best_of(x: np.ndarray, bits: int, candidates: np.ndarray) -> np.ndarray:
    """Decode with the candidate byte of least error, (n, number of candidates)."""
    tried = np.stack([on_grid(x, np.clip(byte, 1, 0xF7), bits) for byte in candidates.T])
    error = np.square(x - tried, dtype=np.float64).sum(axis=2)
    return tried[error.argmin(axis=0), np.arange(len(x))]


def near_mean_square(x: np.ndarray, bits: int, reach: int) -> np.ndarray:
    """The best of the bytes around a multiple of the root mean square."""
    guess = np.float32(MEAN_SQUARE[bits]) * np.sqrt(np.square(x).mean(axis=1))
    nearest = np.abs(FINITE[None] - guess[:, None]).argmin(axis=1)
    return best_of(x, bits, nearest[:, None] + np.arange(-reach, reach + 1))


def of_kvlab(x: np.ndarray, bits: int, decoded: bool) -> np.ndarray:
    """What pages hold."""
    codes, byte = encode(x, bits, decoded)
    return grid_values(codes, STEPS[byte][:, None], bits)


def of_all_bytes(x: np.ndarray, bits: int, decoded: bool) -> np.ndarray:
    """The best of all bytes near enough to matter."""
    guess = np.float32(MEAN_SQUARE[bits]) * np.sqrt(np.square(x).mean(axis=1))
    nearest = np.abs(FINITE[None] - guess[:, None]).argmin(axis=1)
    return best_of(x, bits, nearest[:, None] + np.arange(-16, 17))


RULES = {
    "kvlab": of_kvlab,
    "five, mean square": lambda x, bits, decoded: near_mean_square(x, bits, 2),
    "one, mean square": lambda x, bits, decoded: near_mean_square(x, bits, 0),
    "all bytes": of_all_bytes,
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("output", type=Path)
    parser.add_argument("--vectors", type=int, default=4000, help="of each kind, 1 or more")
    arguments = parser.parse_args()
    if arguments.vectors < 1:
        parser.error(f"--vectors must be 1 or more, got {arguments.vectors}")
    arguments.output.touch()
    print("vectors, head_dim, widths; error and length by rule:", *RULES, sep="  ")
    rng, rows = np.random.default_rng(0), []
    for kind, head_dim in itertools.product(("Gaussian", "heavy tails", "outliers"), (64, 128, 256)):
        raw = draw(rng, kind, (arguments.vectors, head_dim))
        true = hadamard(raw.astype(np.float64))
        power = np.square(true).mean(axis=1)
        for path in PATHS:
            row = {"vectors": kind, "head_dim": head_dim, "path": ">".join(map(str, path))}
            for name, rule in RULES.items():
                x = rotate(raw) if name == "kvlab" else true.astype(np.float32)
                for i, bits in enumerate(path):
                    x = rule(x, bits, i > 0)
                row[name] = float((np.square(x - true).mean(axis=1) / power).mean())
                row[f"{name}, length"] = float(((x * true).mean(axis=1) / power).mean())
            rows.append(row)
            print(
                *(f"{value:.4g}" if isinstance(value, float) else value for value in row.values()), sep="  "
            )
    arguments.output.write_text(json.dumps({"rows": rows, "provenance": provenance()}, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""Check and time every candidate page format on the GPU (after `compile.py` made the cubins).

    python benchmarks/page_format/compile.py DIR      # no GPU needed
    python benchmarks/page_format/run.py DIR OUT.json

Each variant is first checked against float64 attention over its own dequantised pages, then timed as replays
of a CUDA graph over pages that exceed the L2 cache. `large`: 64 sequences of 32K tokens in one launch;
`small`: 8 sequences of 32K tokens (one row of a GQA 32/8 model), rotated over 8 disjoint sets of pages.
"""

import json
import pathlib
import sys
import time
from itertools import pairwise

import cupy as cp
import ml_dtypes
import numpy as np
from variants import GAUSSIAN_16, VARIANTS, name, page_bytes, shared_bytes

TOKENS = 64
PAGES_PER_SEQUENCE = 512
SEQUENCES = 64
LEVELS_4 = np.array([-1.5104, -0.4528, 0.4528, 1.5104])


def pair_fields(bits: int) -> list[list[tuple[int, int, int]]]:
    """For each pair of a group: (word, bit in each 16-bit half, width) pieces, lowest bits first."""
    if bits == 2:
        return [[(0, 2 * p, 2)] for p in range(8)]
    if bits == 3:
        return [[(p // 5, 1 + 3 * (p % 5), 3)] for p in range(15)] + [[(0, 0, 1), (1, 0, 1), (2, 0, 1)]]
    if bits == 4:
        return [[(0, 4 * p, 4)] for p in range(4)]
    return [[(p // 2, 8 * (p % 2), 8)] for p in range(4)]


def unpack_fragments(region: np.ndarray, bits: int, vector: int, lut: bool) -> np.ndarray:
    """(pages, bytes) -> (pages, tiles, 16 rows, 16 columns) codes, undoing the fragment order."""
    pages = region.shape[0]
    words = region.copy().view(np.uint32)
    count = words.shape[1] // 32
    words = words.reshape(pages, count // vector, 32, vector).transpose(0, 1, 3, 2).reshape(pages, count, 32)
    fields = [[(0, 2 * bits * p, bits)] for p in range(16 // bits)] if lut else pair_fields(bits)
    half_stride = bits if lut else 16
    group_words = max(word for pieces in fields for word, _, _ in pieces) + 1
    groups = words.reshape(pages, count // group_words, group_words, 32)
    codes = np.zeros((pages, count // group_words, len(fields), 32, 2), np.uint8)
    for p, pieces in enumerate(fields):
        for half in range(2):
            shift = 0
            for word, bit, width in pieces:
                part = (groups[:, :, word] >> np.uint32(bit + half_stride * half)) & np.uint32(
                    (1 << width) - 1
                )
                codes[:, :, p, :, half] |= (part << np.uint32(shift)).astype(np.uint8)
                shift += width
    tiles = codes.reshape(pages, -1, 4, 8, 4, 2)  # tile, register, g, t, half
    tiles = tiles.reshape(pages, -1, 2, 2, 8, 4, 2)  # tile, column half, row half, g, t, half
    return tiles.transpose(0, 1, 3, 4, 2, 5, 6).reshape(pages, -1, 16, 16)


def levels(v: dict, codes: np.ndarray) -> np.ndarray:
    bits = int(v["bits"])
    if v["codec"] == "prmt":
        table = np.array(GAUSSIAN_16).astype(ml_dtypes.bfloat16).astype(np.float64)
        return np.where(codes & 8, -1, 1) * table[codes & 7]
    if v["codec"] == "lut":
        return lut_levels(bits)[codes]
    return 2.0 * codes + 1 - 2**bits


def lut_levels(bits: int) -> np.ndarray:
    magnitudes = np.array(GAUSSIAN_16)
    table = LEVELS_4 if bits == 2 else np.concatenate([-magnitudes[::-1], magnitudes])
    return table.astype(ml_dtypes.bfloat16).astype(np.float64)


def lut_words(bits: int) -> np.ndarray:
    table = lut_levels(bits).astype(ml_dtypes.bfloat16).view(np.uint16).astype(np.uint32)
    index = np.arange(1 << (2 * bits))
    return table[index & (2**bits - 1)] | (table[index >> bits] << 16)


def slots() -> np.ndarray:
    """slot[token block, row]"""
    block, row = np.meshgrid(np.arange(4), np.arange(16), indexing="ij")
    return (row % 8) * 8 + block * 2 + row // 8


def steps(v: dict, raw: np.ndarray) -> np.ndarray:
    if v["codec"] == "step8":
        return (raw.astype(np.uint16) << 7).view(np.float16).astype(np.float64)
    return raw.copy().view(np.float16).astype(np.float64)


def dequantise(v: dict, pages: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(pages, bytes) -> K and V of one sequence, float64 (tokens, head_dim), tokens in slot order."""
    bits, d, vector, codec = int(v["bits"]), int(v["head_dim"]), int(v["vector"]), v["codec"]
    size = 8 * d * bits
    count, n = len(pages), d // 16
    k = levels(v, unpack_fragments(pages[:, :size], bits, vector, codec == "lut"))
    x = levels(v, unpack_fragments(pages[:, size : 2 * size], bits, vector, codec == "lut"))
    if v["interleaved"]:  # K: channel tile, token block; V: token block, channel tile
        k, x = k.reshape(count, n, 4, 16, 16).swapaxes(1, 2), x.reshape(count, 4, n, 16, 16).swapaxes(1, 2)
    else:
        k, x = k.reshape(count, 4, n, 16, 16), x.reshape(count, n, 4, 16, 16)
    k_rows = k.transpose(0, 1, 3, 2, 4).reshape(count, 4, 16, d)
    v_rows = x.transpose(0, 2, 4, 1, 3).reshape(count, 4, 16, d)
    slot = slots()
    key, value = np.empty((count, TOKENS, d)), np.empty((count, TOKENS, d))
    key[:, slot], value[:, slot] = k_rows, v_rows
    meta = pages[:, 2 * size :]
    step = 64 if codec == "step8" else 128
    if codec == "channel":
        kind = ml_dtypes.bfloat16 if v["bf16"] else np.float16
        table = meta[:, : 4 * d].copy().view(kind).astype(np.float64).reshape(count, 2, 1, d)
        key = key * table[:, 0] + table[:, 1]
        value *= steps(v, meta[:, 4 * d : 4 * d + step])[..., None]
    elif codec == "asym":
        key = key * steps(v, meta[:, :128])[..., None] + steps(v, meta[:, 128:256])[..., None]
        value = value * steps(v, meta[:, 256:384])[..., None] + steps(v, meta[:, 384:512])[..., None]
    else:
        key *= steps(v, meta[:, :step])[..., None]
        value *= steps(v, meta[:, step : 2 * step])[..., None]
    return key.reshape(-1, d), value.reshape(-1, d)


def make_pool(v: dict, count: int, rng) -> cp.ndarray:
    """Random codes, random steps that give scores of a few units."""
    bits, d, codec = int(v["bits"]), int(v["head_dim"]), v["codec"]
    _, whole = page_bytes(v)
    pool = cp.random.randint(0, 2**32, (count, whole // 4), dtype=cp.uint32).view(cp.uint8)
    meta = 2 * 8 * d * bits
    unit = (
        1.0 if codec in ("prmt", "lut") else 1.7 / 2**bits
    )  # a code is about one unit of standard deviation
    near = lambda shape, centre: (cp.exp(cp.random.standard_normal(shape) * 0.3) * centre).astype(cp.float16)  # noqa: E731
    put = lambda at, x: pool.__setitem__((slice(None), slice(at, at + x.shape[1])), x)  # noqa: E731
    if codec == "step8":
        put(meta, (near((count, 128), unit).view(cp.uint16) >> 7).astype(cp.uint8))
    elif codec == "channel":
        table = cp.concatenate(
            [near((count, d), unit), cp.random.standard_normal((count, d)).astype(cp.float16)], 1
        )
        if v["bf16"]:
            table = (table.astype(cp.float32).view(cp.uint32) >> 16).astype(cp.uint16)
        put(meta, table.view(cp.uint8))
        put(meta + 4 * d, near((count, 64), unit).view(cp.uint8))
    elif codec == "asym":
        for i in range(2):
            put(meta + 256 * i, near((count, 64), unit).view(cp.uint8))
            put(
                meta + 256 * i + 128,
                (cp.random.standard_normal((count, 64)) * 0.1).astype(cp.float16).view(cp.uint8),
            )
    else:
        put(meta, near((count, 128), unit).view(cp.uint8))
    return pool


def attention(key, value, q):
    scores = q @ key.T
    p = np.exp2(scores - scores.max(1, keepdims=True))
    return (p / p.sum(1, keepdims=True)) @ value


def merged(partial, ctas, pages, sequence, group, d):
    first, last = sequence * PAGES_PER_SEQUENCE, (sequence + 1) * PAGES_PER_SEQUENCE
    rows = [b + sequence for b in range(ctas) if pages * b // ctas < last and pages * (b + 1) // ctas > first]
    part = (
        partial[rows]
        .reshape(len(rows), -1)[:, : group * (d + 2)]
        .reshape(len(rows), group, d + 2)
        .astype(np.float64)
    )
    weight = np.exp2(part[..., d] - part[..., d].max(0))
    return (part[..., :d] * weight[..., None]).sum(0) / (part[..., d + 1] * weight).sum(0)[..., None]


def median_time(launches, repeats: int) -> float:
    stream = cp.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        for launch in launches:
            launch()
        graph = stream.end_capture()
        for _ in range(2):
            graph.launch()
        marks = [cp.cuda.Event() for _ in range(repeats + 1)]
        marks[0].record()
        for mark in marks[1:]:
            graph.launch()
            mark.record()
        stream.synchronize()
    return (
        float(np.median([cp.cuda.get_elapsed_time(a, b) for a, b in pairwise(marks)])) / len(launches) * 1e-3
    )


def study(v: dict, folder: pathlib.Path, rng) -> dict:
    d, group, ctas = int(v["head_dim"]), int(v["group"]), cp.cuda.Device().attributes["MultiProcessorCount"]
    module = cp.RawModule(path=str(folder / f"{name(v)}.cubin"))
    kernel = module.get_function("decode_pages")
    shared = shared_bytes(v)
    kernel.max_dynamic_shared_size_bytes = shared
    needed, whole = page_bytes(v)
    total = SEQUENCES * PAGES_PER_SEQUENCE
    pool = make_pool(v, total, rng)
    order = rng.permutation(total).astype(np.uint32)
    index = cp.asarray(order)
    q = rng.standard_normal((SEQUENCES, 8, d)) * 1.44 / np.sqrt(d) * 2
    q16 = q.astype(ml_dtypes.bfloat16 if v["bf16"] else np.float16)
    q_device = cp.asarray(q16.view(np.uint16))
    partial = cp.full((ctas + SEQUENCES, 8, d + 2), cp.nan, cp.float32)
    lut = cp.asarray(lut_words(int(v["bits"])) if v["codec"] == "lut" else np.zeros(1, np.uint32))

    def launcher(first: int, sequences: int):
        pages = sequences * PAGES_PER_SEQUENCE
        cu = cp.arange(sequences + 1, dtype=cp.int32) * PAGES_PER_SEQUENCE
        offset = first * PAGES_PER_SEQUENCE
        args = (
            pool,
            index[offset : offset + pages],
            cu,
            q_device[first:],
            partial,
            np.int32(pages),
            np.int32(sequences),
            lut,
        )
        return lambda: kernel((ctas,), (32 * int(v["warps"]),), args, shared_mem=shared)

    result = dict(
        v, registers=kernel.num_regs, spills=kernel.local_size_bytes, page_bytes=whole, needed_bytes=needed
    )
    if v["compute"]:
        launcher(0, SEQUENCES)()
        out = cp.asnumpy(partial)
        errors = []
        for sequence in (0, 37):
            pages = cp.asnumpy(
                pool[
                    order[sequence * PAGES_PER_SEQUENCE : (sequence + 1) * PAGES_PER_SEQUENCE].astype(
                        np.int64
                    )
                ]
            )
            key, value = dequantise(v, pages)
            want = attention(key, value, q16[sequence, :group].astype(np.float64))
            got = merged(out, ctas, total, sequence, group, d)
            errors.append(float(np.linalg.norm(got - want) / np.linalg.norm(want)))
        result["relative_error"] = max(errors)
    copied = whole if v["read_all"] else needed
    large = median_time([launcher(0, SEQUENCES)], 20)
    small = median_time([launcher(8 * i, 8) for i in range(8)], 20)
    result |= {
        "large_us": large * 1e6,
        "small_us": small * 1e6,
        "large_tbs": total * copied / large / 1e12,
        "small_tbs": 8 * PAGES_PER_SEQUENCE * copied / small / 1e12,
        "tokens_per_us": total * TOKENS / large / 1e6,
    }
    return result


def main(folder: str, out: str, only: str = "") -> None:
    rng = np.random.default_rng(7)
    rows, started = [], time.time()
    properties = cp.cuda.runtime.getDeviceProperties(0)
    for v in VARIANTS:
        if only not in name(v):
            continue
        try:
            row = study(v, pathlib.Path(folder), rng)
        except Exception as error:  # one broken candidate must not hide the others' results
            row = dict(v, failed=repr(error)[:200])
            print("FAILED", name(v), row["failed"], flush=True)
        rows.append(row)
        if "large_tbs" in row:
            print(
                f"{name(v)} error {row.get('relative_error', float('nan')):.1e} large {row['large_tbs']:.2f} "
                f"small {row['small_tbs']:.2f} TB/s, {row['small_us']:.2f} us",
                flush=True,
            )
        report = {
            "gpu": properties["name"].decode(),
            "cupy": cp.__version__,
            "driver": cp.cuda.runtime.driverGetVersion(),
            "seconds": time.time() - started,
            "rows": rows,
        }
        pathlib.Path(out).write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main(*sys.argv[1:])

"""Grouped attention in a minute: what a rank of zigzag context parallelism computes, three ways.

    python examples/grouped_attention.py [--tokens 32768] [--ranks 8]

A rank holds two chunks of a sequence, an early and a late one, which see prefixes of the same gathered keys.
The answer is checked against ordinary attention; then the implementations are timed beside each other.
"""

import argparse
import statistics
import time

import kvlab


def main() -> None:
    import torch

    on_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=32768 if on_gpu else 2048)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--rank", type=int, default=0)
    given = parser.parse_args()
    if given.ranks < 1 or not 0 <= given.rank < given.ranks:
        parser.error(f"--rank {given.rank}: it must lie below --ranks {given.ranks}, from 0 on")
    if given.tokens < 2 * given.ranks:
        parser.error(f"--tokens {given.tokens}: {given.ranks} ranks need at least {2 * given.ranks}")
    device, dtype = ("cuda", torch.bfloat16) if on_gpu else ("cpu", torch.float32)
    heads, heads_kv, dim = (4, 1, 128) if on_gpu else (4, 1, 64)  # one KV head at a time, as it is gathered
    chunk, torch_int = given.tokens // (2 * given.ranks), {"dtype": torch.int32, "device": device}
    prefixes = (given.rank + 1) * chunk, (2 * given.ranks - given.rank) * chunk
    torch.manual_seed(0)
    q_groups = [torch.randn(chunk, heads, dim, device=device, dtype=dtype) for _ in prefixes]
    k, v = (torch.randn(given.tokens, heads_kv, dim, device=device, dtype=dtype) for _ in "kv")
    lengths = {
        "cu_seqlens_q_groups": [torch.tensor([0, chunk], **torch_int) for _ in prefixes],
        "cu_seqlens_k": torch.tensor([0, given.tokens], **torch_int),
        "prefix_lens": [torch.tensor([keys], **torch_int) for keys in prefixes],
    }

    def call(name: str) -> list[torch.Tensor]:
        outs: list[torch.Tensor] = kvlab.grouped_attention_varlen(
            q_groups, k, v, implementation=name, max_seqlen_q=chunk, max_seqlen_k=given.tokens, **lengths
        )
        if on_gpu:
            torch.cuda.synchronize()
        return outs

    expected = [
        kvlab.attention(q[None], k[None, :keys], v[None, :keys], causal=True)[0]
        for q, keys in zip(q_groups, prefixes, strict=True)
    ]
    times: dict[str, list[float]] = {"separate": [], "listed": [], "paired": []}
    limit, error = (0.01, 0.0) if on_gpu else (1e-5, 0.0)
    for name in times:
        for got, want in zip(call(name), expected, strict=True):
            error = max(error, float((got - want).abs().max() / want.abs().max()))
    for _ in range(9 if on_gpu else 3):
        for name, found in times.items():
            begin = time.perf_counter()
            call(name)
            found.append(time.perf_counter() - begin)
    medians = {name: statistics.median(found) for name, found in times.items()}
    print(
        f"{given.tokens} tokens, rank {given.rank} of {given.ranks}: {chunk} rows each, prefixes {prefixes}"
    )
    for name, seconds in medians.items():
        print(f"{name:9} {1e3 * seconds:9.3f} ms   {medians['separate'] / seconds:5.2f} x separate calls")
    print(f"largest error relative to ordinary attention: {error:.2g}")
    if error >= limit:
        raise SystemExit(f"verdict: wrong, errors must be below {limit:g}")
    best = max(("listed", "paired"), key=lambda name: -medians[name])
    gain = medians["separate"] / medians[best]
    verdict = "faster than" if gain > 1.01 else "level with" if gain > 0.99 else "slower than"
    print(f"verdict: right, and {best} is {verdict} separate calls")


if __name__ == "__main__":
    main()

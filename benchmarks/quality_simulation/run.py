"""Simulate formats of a KV cache with SmolLM2-135M: divergence, late questions, large channels of keys.

    python benchmarks/quality_simulation/prepare.py FOLDER TEXTS     # once; needs kvlab and its model
    python benchmarks/quality_simulation/run.py FOLDER OUT.json LIST.json [--tiny]

LIST.json names formats (`codec.py` says what their keys mean), what is measured of each, and a limit in
seconds; `run_1.json` and `run_2.json` are the lists of docs/performance/quality.md. Needs torch and
numpy alone. Nothing of kvlab runs here: all tokens of a window are read in one pass with masks. A query
reads older tokens quantised, itself (or its chunk) exact, the newest R tokens and the sinks at 8 bits.

Measures: "token" and "chunk" (KL divergence, single tokens and chunks of 64), "partsN" (the prompt in
parts of 64 behind a first one of N tokens), "cheatN" (the same with the statistics of the whole prompt),
"find" and "find10" (late questions in 20 or 10 haystacks). Kinds: plain, x6x11 and x45 (two rotary pairs
times as much), bias (100 added to one pair), "x45 after" (x45 that begins after the prompt).
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import numpy as np
import torch
from codec import Codec
from model import DEV, SINK, D, Net, Prefix, load
from reading import allocate, bits_per_element, read, rung_bits, store


class Bench:
    """Windows and questions read in full precision, once for all formats of a kind."""

    def __init__(self, net, data, tiny, change=None, after=False, retrieval=True):
        w = torch.from_numpy(data["windows"].astype(np.int64)).to(DEV)
        if tiny:
            w = w[:2, : 1024 - 960 + 33 + 96]
        self.change, self.net = change, net
        P = 160 if tiny else 1024
        self.n = w.shape[1] - 1 - P
        self.P = P
        self.pre = Prefix(net, w[:, :P], None if after else change)
        self.ids = w[:, None, P : P + self.n]
        self.truth = self.log_p(read(net, {}, None, self.pre, self.ids, change))
        self.first = (
            {m: Prefix(net, w[:, :m], change) for m in (64, 10, 256) if m < P} if change is None else {}
        )
        if change is not None and not after:
            self.first = {10: Prefix(net, w[:, :10], change)}
        self.w = w
        self.ret = None
        if retrieval:
            s = torch.from_numpy(data["stacks"].astype(np.int64)).to(DEV)
            qt = torch.from_numpy(data["qt"].astype(np.int64)).to(DEV)
            G = 20
            if tiny:
                s, qt, G = s[:1, -200:], qt[:10], 1
            self.rp = Prefix(net, s, change)
            self.qt = qt.view(G, 10, -1)
            self.ql = torch.from_numpy(data["ql"].astype(np.int64)).to(DEV)[: G * 10]
            self.al = torch.from_numpy(data["al"].astype(np.int64)).to(DEV)[: G * 10]
            self.depth = data["depth"][: G * 10]
            self.ret = self.answers(read(net, {}, None, self.rp, self.qt, change))

    def log_p(self, x):
        return torch.stack([self.net.logits(row[0]).log_softmax(-1) for row in x])

    def answers(self, x, some=20):
        x = x.view(-1, *x.shape[2:])
        rows = torch.arange(len(x), device=DEV)[:, None]
        n = int(self.al.max())
        at = (self.ql - self.al)[: len(x), None] + torch.arange(n, device=DEV)
        lg = self.net.logits(x[rows, at - 1]).log_softmax(-1)
        target = self.qt[:some].reshape(len(x), -1)[rows, at]
        lp = lg.gather(-1, target[..., None])[..., 0].sum(-1)
        return lp, (lg.argmax(-1) == target).all(-1)

    def kl(self, x):
        out = []
        for t, row in zip(self.truth, x, strict=True):
            lq = self.net.logits(row[0]).log_softmax(-1)
            out.append((t.exp() * (t - lq)).sum(-1))
        return torch.stack(out)

    def measure(self, cfg, modes):
        row = {}
        need = [m for m in modes if m in ("token", "chunk")]
        if need:
            n_stat = cfg.get("stat", self.P)
            codec = Codec(cfg, self.pre, min(n_stat, self.P))
            rung, mean = allocate(cfg, self.pre)
            new = rung_bits(cfg["rungs"][cfg.get("new", 0)])
            row["bpe"] = bits_per_element(cfg, self.P, mean)
            S, R = cfg.get("sink", SINK), cfg.get("R", 32)
            old = self.P - S - R
            row["bpe_end"] = bits_per_element(
                cfg, self.P + self.n, (old * mean + self.n * new) / (old + self.n)
            )
            kq, vq = store(cfg, codec, self.pre, rung)
            row["K error"] = (
                (kq - self.pre.K)[..., SINK:, :].pow(2).mean() / self.pre.K[..., SINK:, :].pow(2).mean()
            ).item()
            for m in need:
                x = read(
                    self.net,
                    cfg,
                    codec,
                    self.pre,
                    self.ids,
                    self.change,
                    1 if m == "token" else 64,
                    0,
                    kq,
                    vq,
                )
                row.update(self.summary(m, self.kl(x)))
            del kq, vq
        for m in modes:
            if m.startswith(("parts", "cheat")) and int(m[5:]) in self.first:
                first = int(m[5:])
                pre = self.first[first]
                codec = Codec(cfg, self.pre if m[0] == "c" else pre, self.P if m[0] == "c" else first)
                kq, vq = store(cfg, codec, pre, None)
                x = read(
                    self.net,
                    cfg,
                    codec,
                    pre,
                    self.w[:, None, first : self.P + self.n],
                    self.change,
                    1,
                    self.P - first,
                    kq,
                    vq,
                )
                row.update(self.summary(m, self.kl(x[:, :, self.P - first :])))
        if ("find" in modes or "find10" in modes) and self.ret is not None:
            some = 10 if "find10" in modes else 20
            rp = self.rp if some == 20 else self.rp.some(some)
            codec = Codec(cfg, rp, rp.P)
            rung, mean = allocate(cfg, rp)
            row["bpe_find"] = bits_per_element(cfg, rp.P, mean)
            kq, vq = store(cfg, codec, rp, rung)
            lp, ok = self.answers(
                read(self.net, cfg, codec, rp, self.qt[:some], self.change, 1, 0, kq, vq), some
            )
            d = lp - self.ret[0][: len(lp)]
            full = self.ret[1][: len(lp)]
            row.update(
                found=int(ok.sum()),
                of=int(full.sum()),
                both=int((ok & full).sum()),
                d=d.mean().item(),
                d_se=(d.std() / len(d) ** 0.5).item(),
                d_of=d[full].mean().item() if full.any() else 0.0,
                depth=[
                    round(float(d[torch.from_numpy(self.depth[: len(d)] == x).to(DEV)].mean()), 3)
                    for x in sorted(set(self.depth))
                ],
            )
        return row

    def summary(self, m, kl):
        n = kl.shape[1]
        b = kl[:, : n // 32 * 32].reshape(-1, 32).mean(-1)
        f = kl.flatten()
        return {
            m: f.mean().item(),
            m + "_se": (b.std() / len(b) ** 0.5).item(),
            m + "_last": kl[:, n - n // 4 :].mean().item(),
            m + "_median": f.median().item(),
            m + "_p999": f.quantile(0.999).item() if f.numel() < 10**7 else 0,
            m + "_windows": [round(a, 5) for a in kl.mean(1).tolist()],
        }


def outlier(c, pairs=(29, 4)):
    s = torch.ones(D, device=DEV)
    for x, p in zip(c, pairs, strict=True):
        s[[p, p + D // 2]] = x
    return {"c": s, "b": torch.zeros(D, device=DEV)}


def main():
    folder, out, listing = (Path(a) for a in sys.argv[1:4])
    tiny = "--tiny" in sys.argv
    t0 = time.time()
    data = np.load(folder / "data.npz")
    index = json.loads((folder / "index.json").read_text())
    net = Net(load((folder / "model.gguf").read_bytes(), index))
    if DEV == "cuda":
        torch.cuda.synchronize()
    print(f"loaded {time.time() - t0:.1f} s on {DEV}", flush=True)
    bias = {"c": torch.ones(D, device=DEV), "b": torch.zeros(D, device=DEV)}
    bias["b"][[30, 62]] = 100.0
    kinds = {
        "plain": (None, False),
        "x6x11": (outlier((6.0, 11.0)), False),
        "x45": (outlier((45.0, 45.0)), False),
        "bias": (bias, False),
        "x45 after": (outlier((45.0, 45.0)), True),
    }
    jobs = json.loads(listing.read_text())
    limit = jobs.get("limit_s", 60)
    results = {"seconds": 0, "rows": []}
    for kind in sorted({k for j in jobs["rows"] for k in j["on"]}, key=lambda k: k != "plain"):
        change, after = kinds[kind]
        bench = None  # frees the one before
        bench = Bench(net, data, tiny, change, after, retrieval=kind == "plain")
        if kind == "plain" and bench.ret is not None:
            results["full"] = {
                "answer log p": bench.ret[0].mean().item(),
                "found": int(bench.ret[1].sum()),
                "questions": len(bench.ret[1]),
                "windows": [str(x) for x in data["names"]],
            }
            results["nll"] = float(-bench.truth[:, :-1].gather(-1, bench.ids[:, 0, 1:, None]).mean())
            print(results["full"], results["nll"], f"{time.time() - t0:.1f} s", flush=True)
        for job in jobs["rows"]:
            if kind not in job["on"]:
                continue
            if time.time() - t0 > (limit if kind != "plain" else jobs.get("limit_plain_s", limit)):
                print("out of time at", job["name"])
                break
            t = time.time()
            modes = job.get("modes", ["token", "find"]) if kind == "plain" else job.get("stress", ["token"])
            if tiny:
                modes = [m for m in modes if m != "parts64" or bench.P > 64]
            row = bench.measure(job["cfg"], modes)
            row.update(name=job["name"], kind=kind, cfg=job["cfg"], s=round(time.time() - t, 3))
            results["rows"].append(row)
            shown = ("bpe", "bpe_end", "token", "token_last", "chunk", "parts64", "d", "both", "of", "s")
            print(f"{kind:9s} {job['name']:40s}", {k: row[k] for k in shown if k in row}, flush=True)
    results["seconds"] = time.time() - t0
    out.write_text(json.dumps(results))
    print(f"{time.time() - t0:.1f} s")


if __name__ == "__main__":
    main()

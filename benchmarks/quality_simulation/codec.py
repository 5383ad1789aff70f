"""Simulated formats of keys and values: quantise and dequantise, fitted to the statistics of a prompt.

A format is a dictionary; a key that is left out has the value in brackets:

- rungs: list of [bits of K, bits of V] per element, in quarters of a bit, or a list of widths by block
  of 16 channels
- kmean [True], vmean [False]: take the mean of a channel off; stat, mean_stat: tokens that statistics
  come from
- scale ["pow2"]: power of 2 a channel, sqrt(rms q / rms k); "exact", "none"; pairscale [True]: one a
  rotary pair
- order ["product"]: rotary pairs sorted by energy of K times energy of Q; any other word: order of
  frequency
- kbs [16], vbs [64]: channels of a Hadamard block; vorder [False]: channels of V sorted by energy
- allowed [0 to 6, 8]: widths of a block; across [False]: bits pooled over the KV heads of a layer; beta
  [1]: trust in energies; model_stats [False]: mean energies of all prompts; feedback: regulariser of
  error feedback in encoding
- sink [4], R [32], top [8]: sinks and newest tokens at the top width; 16 is exact; via8 [False]: through
  8 bits first
- side [24], fill [32], tables [3200]: bits of scales and positions a token and head, unfilled slots,
  bits a head
- budget, lam [.5], power [1], norm [True], pool [True], new [0]: tokens of several rungs by attention
  mass

A grid is mid-rise with one step a token on an eighth-octave grid, the best of 2 `search` + 1 (search
[3]).
"""

from __future__ import annotations

import itertools
import math

import torch
from model import DEV, SINK, D

BS = 16  # channels of a block of one width

STEP = {0: 1.0, 1: 1.5957, 2: 0.9957, 3: 0.5860, 4: 0.3352, 5: 0.1881, 6: 0.1041, 7: 0.0568, 8: 0.0308}
DIST = {
    0: 1.0,
    1: 0.3634,
    2: 0.1188,
    3: 0.03744,
    4: 0.01154,
    5: 0.003495,
    6: 0.001040,
    7: 0.000304,
    8: 0.0000877,
}
_cd = torch.tensor([STEP[i] for i in range(9)], device=DEV)


def had(x):
    """Hadamard transform along the last axis, orthonormal."""
    n = x.shape[-1]
    h = torch.ones(1, 1, device=DEV)
    while h.shape[0] < n:
        h = torch.cat([torch.cat([h, h], 1), torch.cat([h, -h], 1)], 0)
    return x @ (h / math.sqrt(n))


def quant(y, bits, sigma, weight, search=3):
    """y (..., T, nb, bs); bits, sigma, weight (..., nb): the same for all T. One step a token, 1/8 octave."""
    c = _cd[bits.long()]
    ratio = (sigma * c)[..., None, :, None].clamp_min(1e-20)
    top = (2.0**bits - 1)[..., None, :, None] / 2
    used = (bits > 0).float()
    r = (y.pow(2).mean(-1) / (sigma[..., None, :] ** 2).clamp_min(1e-30) * used[..., None, :]).sum(-1)
    r = (r / used.sum(-1).clamp_min(1)[..., None]).sqrt().clamp_min(1e-12)
    w = weight[..., None, :, None]
    best, found = None, None
    z = y / ratio
    base = (8 * r.log2()).round()
    wide = 2 if int(bits.min()) >= 7 else 1
    for j in range(-search, search + 1):
        d = torch.exp2((base + j * wide) / 8)[..., None, None]
        t = (z / d).floor() + 0.5
        t = torch.minimum(torch.maximum(t, -top), top).mul_(d).mul_(ratio)
        e = ((y - t).pow_(2) * w).sum((-1, -2))
        if best is None:
            best, found = e, t
        else:
            m = e < best
            best = torch.where(m, e, best)
            found = torch.where(m[..., None, None], t, found)
    return found


def feedback(y, t, bits, sigma, ldl):
    """Quantise again, channel after channel, so that errors stay away from what queries look at.

    The step of a token is that of t: recovered from the smallest size of its levels.
    """
    c = _cd[bits.long()]
    ratio = (sigma * c).clamp_min(1e-20)
    z = (t / ratio[..., None, :, None]).abs()
    z = torch.where(z > 0, z, torch.full_like(z, torch.inf))
    step = 2 * z.flatten(-2).amin(-1)  # half a step is the least size
    step = torch.where(step.isfinite(), step, torch.ones_like(step))
    bs = y.shape[-1]
    flat = y.flatten(-2)
    size = step[..., None] * ratio.repeat_interleave(bs, -1)[..., None, :]
    top = ((2.0**bits - 1) / 2).repeat_interleave(bs, -1)[..., None, :]
    e = torch.zeros_like(flat)
    n = flat.shape[-1]
    for i in range(n - 1, -1, -1):
        w = flat[..., i]
        if i < n - 1:
            w = w + (e[..., i + 1 :] @ ldl[..., i + 1 :, i, None])[..., 0]
        d, m = size[..., i], top[..., i]
        q = (w / d).floor() + 0.5
        q = torch.minimum(torch.maximum(q, -m), m) * d
        e[..., i] = flat[..., i] - q
    return (flat - e).view_as(y)


def pair_mean(a):
    """Mean of the two channels of each rotary pair, for both."""
    half = a.shape[-1] // 2
    return ((a[..., :half] + a[..., half:]) / 2).repeat(*[1] * (a.ndim - 1), 2)


class Codec:
    """A format fitted to statistics; all tensors are (layers, prompts, KV heads, ...)."""

    def __init__(self, cfg, pre, n_stat):
        self.cfg = cfg
        lo = min(SINK, n_stat // 2)
        k, v = pre.K[..., lo:n_stat, :], pre.V[..., lo:n_stat, :]
        shape = k.shape[:-2]
        zeros = torch.zeros(*shape, D, device=DEV)
        self.km = k.mean(-2) if cfg.get("kmean", True) else zeros
        if "mean_stat" in cfg:
            self.km = pre.K[..., lo : cfg["mean_stat"], :].mean(-2)
        self.vm = v.mean(-2) if cfg.get("vmean", False) else zeros
        kv = (k - self.km[..., None, :]).pow(2).mean(-2).clamp_min(1e-12)
        vv = (v - self.vm[..., None, :]).pow(2).mean(-2).clamp_min(1e-12)
        qq = pre.qq.clamp_min(1e-12)
        scale = cfg.get("scale", "pow2")
        if scale == "none":
            self.sc = torch.ones_like(zeros)
        else:
            kp, qp = kv, qq
            if cfg.get("pairscale", True):
                kp, qp = pair_mean(kv), pair_mean(qq)
            e = (qp / kp).log2() / 4
            self.sc = torch.exp2(e.round() if scale == "pow2" else e)
        ks, qs = kv * self.sc**2, qq / self.sc**2
        half = D // 2
        if cfg.get("order", "product") == "product":
            e = (ks[..., :half] + ks[..., half:]) * (qs[..., :half] + qs[..., half:])
            o = e.argsort(-1, descending=True)
        else:
            o = torch.arange(half, device=DEV).expand(*shape, half)
        bs = self.bs = cfg.get("kbs", BS)
        nb = D // bs
        o = o.view(*shape, nb, bs // 2)
        self.kperm = torch.cat([o, o + half], -1).reshape(*shape, D)
        self.kinv = self.kperm.argsort(-1)
        ks, qs = (
            ks.gather(-1, self.kperm).view(*shape, nb, bs),
            qs.gather(-1, self.kperm).view(*shape, nb, bs),
        )
        self.ksig, self.kw = ks.mean(-1).sqrt(), qs.mean(-1)
        beta = cfg.get("beta", 1.0)  # below 1: widths trust statistics of queries less
        energy = self.ksig**2 * self.kw
        if beta != 1:
            energy = energy**beta * (energy.mean(-1, keepdim=True) ** (1 - beta))
        if cfg.get("model_stats"):
            energy = energy.mean(1, keepdim=True).expand_as(energy).contiguous()
        self.kenergy = energy
        self.ldl = None
        if "feedback" in cfg:
            x = pre.qcov / (self.sc[..., :, None] * self.sc[..., None, :])
            i = self.kperm
            x = x.gather(-2, i[..., :, None].expand_as(x)).gather(-1, i[..., None, :].expand_as(x))
            h = had(torch.eye(bs, device=DEV))
            h = torch.block_diag(*[h] * nb)
            x = h @ x @ h
            diag = x.diagonal(dim1=-2, dim2=-1).view(*shape, nb, bs).mean(-1).repeat_interleave(bs, -1)
            f = cfg["feedback"]
            x = (1 - f) * x + f * torch.diag_embed(diag)
            c = torch.linalg.cholesky(x)  # x = c c^T, lower; unit lower L = c / diag
            self.ldl = c / c.diagonal(dim1=-2, dim2=-1)[..., None, :]
        vb = self.vbs = cfg.get("vbs", D)
        if cfg.get("vorder", False):
            self.vperm = vv.argsort(-1, descending=True)
        else:
            self.vperm = torch.arange(D, device=DEV).expand(*shape, D)
        self.vinv = self.vperm.argsort(-1)
        vs = vv.gather(-1, self.vperm).view(*shape, D // vb, vb).mean(-1)
        sub = vb // BS if vb > BS else 1  # a rotated block of 64 is cut into 4 of equal variance
        self.vsig = vs.sqrt().repeat_interleave(sub, -1)
        self.rungs = [self.widths(*r) for r in cfg["rungs"]]
        self.top = (torch.full_like(self.ksig, 8), torch.full_like(self.vsig, 8))

    def widths(self, k, v):
        return self._one(k, self.kenergy, self.ksig), self._one(v, self.vsig**2, self.vsig)

    def _one(self, spec, energy, like):
        nb = like.shape[-1]
        if isinstance(spec, (list, tuple)):
            return torch.tensor(spec, device=DEV).float().expand_as(like).contiguous()
        if spec == int(spec) and nb == 1:
            return torch.full_like(like, spec)
        units = round(spec * nb)
        allowed = self.cfg.get("allowed", (0, 1, 2, 3, 4, 5, 6, 8))
        if nb > 4:
            return self._greedy(units, energy, allowed)
        across = self.cfg.get("across")
        prof = [p for p in itertools.product(allowed, repeat=nb) if units - nb < sum(p) <= units or across]
        prof = torch.tensor(prof, device=DEV)
        d = torch.tensor([DIST[i] for i in range(9)], device=DEV)[prof]  # (n, nb)
        loss = energy @ d.T
        if not across:
            return prof[loss.argmin(-1)].float()
        size = prof.sum(-1).float()
        low, high = (
            torch.full(loss.shape[:2], -60.0, device=DEV),
            torch.full(loss.shape[:2], 20.0, device=DEV),
        )
        for _ in range(36):  # a price for each layer, heads together
            mid = (low + high) / 2
            pick = (loss + torch.exp2(mid)[..., None, None] * size).argmin(-1)
            over = size[pick].mean(-1) > units
            low, high = torch.where(over, mid, low), torch.where(over, high, mid)
        pick = (loss + torch.exp2(high)[..., None, None] * size).argmin(-1)
        return prof[pick].float()

    def _greedy(self, units, energy, allowed):
        allowed = sorted(allowed)
        at = torch.zeros_like(energy, dtype=torch.long)
        a = torch.tensor(allowed, device=DEV).float()
        d = torch.tensor([DIST[i] for i in allowed], device=DEV)
        left = torch.full(energy.shape[:-1], float(units), device=DEV) - allowed[0] * energy.shape[-1]
        for _ in range(units + 8):
            nxt = (at + 1).clamp_max(len(allowed) - 1)
            cost = a[nxt] - a[at]
            gain = energy * (d[at] - d[nxt]) / cost.clamp_min(1e-9)
            gain = torch.where((cost > 0) & (cost <= left[..., None]), gain, torch.full_like(gain, -1))
            g, i = gain.max(-1)
            ok = g > 0
            left = left - torch.where(ok, cost.gather(-1, i[..., None])[..., 0], torch.zeros_like(g))
            at = at.scatter_add(-1, i[..., None], ok.long()[..., None])
        return a[at]

    def k(self, x, rung, at=slice(None)):
        bits = (self.top if rung == "top" else self.rungs[rung])[0][at]
        y = (x - self.km[at][..., None, :]) * self.sc[at][..., None, :]
        y = y.gather(-1, self.kperm[at][..., None, :].expand_as(y))
        shape = y.shape
        y = had(y.view(*shape[:-1], -1, self.bs))
        t = quant(y, bits, self.ksig[at], self.kw[at], self.cfg.get("search", 3))
        if self.ldl is not None and rung != "top":
            t = feedback(y, t, bits, self.ksig[at], self.ldl[at])
        y = had(t).reshape(shape).gather(-1, self.kinv[at][..., None, :].expand(shape))
        return y / self.sc[at][..., None, :] + self.km[at][..., None, :]

    def v(self, x, rung, at=slice(None)):
        bits = (self.top if rung == "top" else self.rungs[rung])[1][at]
        y = x - self.vm[at][..., None, :]
        if self.cfg.get("vorder", False):
            y = y.gather(-1, self.vperm[at][..., None, :].expand_as(y))
        shape = y.shape
        y = had(y.view(*shape[:-1], -1, self.vbs)).reshape(*shape[:-1], -1, min(BS, self.vbs))
        if bits.shape[-1] == y.shape[-2]:
            y = quant(y, bits, self.vsig[at], torch.ones_like(self.vsig[at]), self.cfg.get("search", 3))
        y = had(y.reshape(*shape[:-1], -1, self.vbs)).reshape(shape)
        if self.cfg.get("vorder", False):
            y = y.gather(-1, self.vinv[at][..., None, :].expand(shape))
        return y + self.vm[at][..., None, :]

"""Read new tokens behind a prompt whose keys and values are stored in a simulated format; count its bytes."""

from __future__ import annotations

import math

import torch
from model import DEV, NK, NL, NQ, SINK, D

EL = 2 * D  # elements of K and V a token and head


def rung_bits(rung):
    """Bits of codes a token and head."""
    return sum(sum(s) / len(s) if isinstance(s, list) else s for s in rung) * D


def bits_per_element(cfg, T, base):
    """Bits an element with everything counted.

    base: mean bits of a token and head (codes) that is neither sink nor recent.
    """
    side = cfg.get("side", 24)
    S, R = cfg.get("sink", SINK), cfg.get("R", 32)
    top = cfg.get("top", 8) * EL + (side if cfg.get("top", 8) == 8 else 0)
    n = T - S - R
    total = (S + R) * top + (n + cfg.get("fill", 32)) * (base + side) + T + cfg.get("tables", 3200)
    return total / (T * EL)


def allocate(cfg, pre):
    """Rung of each token of the prompt (L, G, NK, P), and mean bits."""
    rungs = cfg["rungs"]
    costs = [rung_bits(r) for r in rungs]
    S, R = cfg.get("sink", SINK), cfg.get("R", 32)
    if len(rungs) == 1 or "budget" not in cfg:
        return None, costs[cfg.get("new", 0)]
    P = pre.P
    n = P - S - R
    lo, hi = 0.0, 3000.0
    for _ in range(60):
        mid = (lo + hi) / 2
        lo, hi = (mid, hi) if bits_per_element(cfg, P, mid) <= cfg["budget"] else (lo, mid)
    per = lo
    mass = (pre.massn if cfg.get("norm", True) else pre.mass)[..., S : P - R]
    if cfg.get("pool", True):
        w = mass / mass.mean((-1, -2), keepdim=True).clamp_min(1e-20)
    else:
        w = mass / mass.mean(-1, keepdim=True).clamp_min(1e-20)
    lam = cfg.get("lam", 0.5)
    w = w.clamp_min(0) ** cfg.get("power", 1.0)
    w = w / w.mean((-1, -2), keepdim=True)
    w = lam + (1 - lam) * w
    err = [4 ** (-c / EL) for c in costs]
    L, G = w.shape[:2]
    slopes = torch.stack(
        [w * (err[i] - err[i + 1]) / (costs[i + 1] - costs[i]) for i in range(len(rungs) - 1)], -1
    )
    price = torch.tensor([costs[i + 1] - costs[i] for i in range(len(rungs) - 1)], device=DEV).expand_as(
        slopes
    )
    flat, pr = slopes.reshape(L, G, -1), price.reshape(L, G, -1)
    order = flat.argsort(-1, descending=True)
    spent = pr.gather(-1, order).cumsum(-1)
    free = (per - costs[0]) * n * NK
    take = torch.zeros_like(flat).scatter(-1, order, (spent <= free).float())
    r = take.view_as(slopes).sum(-1).long()
    out = torch.zeros(L, G, NK, P, dtype=torch.long, device=DEV)
    out[..., S : P - R] = r
    mean = sum((r == i).float().mean().item() * c for i, c in enumerate(costs))
    return out, mean


def store(cfg, codec, pre, rung):
    """Quantised K and V of the prompt as they are read when old: (L, G, NK, P, D) each."""
    S = cfg.get("sink", SINK)
    out = []
    for f, x in ((codec.k, pre.K), (codec.v, pre.V)):
        y = f(f(x, "top") if cfg.get("via8") else x, cfg.get("new", 0) if rung is None else 0)
        if rung is not None:
            for i in range(1, len(cfg["rungs"])):
                y = torch.where((rung == i)[..., None], f(x, i), y)
        if S:
            y[..., :S, :] = x[..., :S, :] if cfg.get("top", 8) > 8 else f(x[..., :S, :], "top")
        out.append(y)
    return out


def each(write, y, rung, layer):
    """Write (G, n, NK, T, D) as one sequence of n T tokens a prompt."""
    G, n, _, T, _ = y.shape
    y = write(y.transpose(1, 2).reshape(G, NK, n * T, D), rung, layer)
    return y.view(G, NK, n, T, D).transpose(1, 2)


def dot(q, k):
    return torch.einsum("bnhgtd,bnhsd->bhngts", q, k)


def apply(p, v):
    return torch.einsum("bhngts,bnhsd->bhngtd", p, v)


def read(net, cfg, codec, pre, ids, change, chunk=1, parts=0, kq=None, vq=None):
    """ids (G, n, T): new tokens of n rows behind each prompt. Returns hidden states (G, n, T, HID).

    Rows see the prompt as it is stored, or exactly where codec is None; newest R tokens at the top
    width; tokens of the same chunk exact. Positions before `parts` are read in chunks of 64, whatever
    `chunk` is (a prompt in parts).
    """
    G, n, T = ids.shape
    P, g = pre.P, NQ // NK
    R = cfg.get("R", 32)
    exact_top = cfg.get("top", 8) > 8
    pos = torch.arange(P, P + T, device=DEV)
    at = torch.arange(T, device=DEV)
    causal = at[None] <= at[:, None]
    group = torch.where(at < parts, at // 64, parts // 64 + 1 + (at - parts) // chunk)
    same = (group[:, None] == group[None]) & causal
    begin = torch.searchsorted(group, group)[:, None]
    age_new = begin - at[None]  # tokens before the chunk's first one are stored
    recent = causal & ~same & (age_new <= R)
    old = causal & ~same & ~recent
    rp = 0 if codec is None else min(R, P)
    tail = torch.arange(P - rp, P, device=DEV)[None] - P
    recent_past = (begin - tail) <= R  # (T, rp)
    newr = cfg.get("new", 0)
    x = net.emb[ids]
    inf = torch.tensor(-torch.inf, device=DEV)
    for i in range(NL):
        q, k, v = net.qkv(i, x, pos, change)  # (G, n, H, T, D)
        q = q.view(G, n, NK, g, T, D) / math.sqrt(D)
        if codec is None:
            ko, vo, kt, vt = k, v, k, v
            kp, vp, ktp, vtp = pre.K[i], pre.V[i], None, None
        else:
            ko, vo = each(codec.k, k, newr, i), each(codec.v, v, newr, i)
            kt, vt = (
                (k, v) if exact_top or not R else (each(codec.k, k, "top", i), each(codec.v, v, "top", i))
            )
            kp, vp = kq[i], vq[i]
            ktp, vtp = pre.K[i][..., P - rp :, :], pre.V[i][..., P - rp :, :]
            if not exact_top and rp:
                ktp, vtp = codec.k(ktp, "top", i), codec.v(vtp, "top", i)
        qf = q.transpose(1, 2).reshape(G, NK, n * g * T, D)
        sp = (qf @ kp.transpose(-1, -2)).view(G, NK, n, g, T, P)
        if rp:
            st = (qf @ ktp.transpose(-1, -2)).view(G, NK, n, g, T, rp)
            sp[..., P - rp :] = torch.where(recent_past, st, sp[..., P - rp :])
        sn = torch.where(same, dot(q, k), torch.where(recent, dot(q, kt), dot(q, ko)))
        sn = torch.where(causal, sn, inf)
        a = torch.cat([sp, sn], -1).softmax(-1)
        ap, an = a[..., :P], a[..., P:]
        o = apply(an * same, v) + apply(an * recent, vt) + apply(an * old, vo)
        if rp:
            tailp = ap[..., P - rp :] * recent_past
            o = o + (tailp.reshape(G, NK, -1, rp) @ vtp).view_as(o)
            ap = torch.cat([ap[..., : P - rp], ap[..., P - rp :] * ~recent_past], -1)
        o = o + (ap.reshape(G, NK, -1, P) @ vp).view_as(o)
        o = o.permute(0, 2, 1, 3, 4, 5).reshape(G, n, NQ, T, D)
        x = net.rest(i, x, o)
    return x

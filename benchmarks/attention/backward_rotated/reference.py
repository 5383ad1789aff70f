"""What the experimental backward is compared with: float64 gradients of small calls."""

import math

import torch
from tile_list import FAR


def rand(*shape):
    """Normal bfloat16 numbers on the GPU."""
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def reference(dout, q, k, v, causal, lengths=None, window=(-1, -1)):
    """out (bf16), lse, dq, dk, dv of float64."""
    if lengths is not None:
        parts, a, b = [], 0, 0
        for lq, lk in zip(*lengths, strict=True):
            r = reference(
                dout[None, a : a + lq],
                q[None, a : a + lq],
                k[None, b : b + lk],
                v[None, b : b + lk],
                causal,
                None,
                window,
            )
            parts.append(r)
            a += lq
            b += lk

        def cat(i, d=0):
            return torch.cat([p[i][0] for p in parts], d)

        return cat(0), cat(1, 1), cat(2), cat(3), cat(4)
    g = q.shape[2] // k.shape[2]
    Q, K, V = (x.double().requires_grad_() for x in (q, k, v))
    s = torch.einsum("bihd,bjhd->bhij", Q, K.repeat_interleave(g, 2)) / math.sqrt(q.shape[-1])
    i = torch.arange(q.shape[1], device="cuda")[:, None] + k.shape[1] - q.shape[1]
    j = torch.arange(k.shape[1], device="cuda")[None]
    left, right = (FAR if w < 0 else w for w in window)
    if causal:
        right = 0
    hidden = (j < i - left) | (j > i + right)
    s = s.masked_fill(hidden, -math.inf)
    lse = (
        torch.logsumexp(s, -1)
        if k.shape[1]
        else torch.full(s.shape[:-1], -math.inf, device="cuda", dtype=torch.float64)
    )
    p = torch.exp(s - torch.where(lse.isinf(), torch.zeros_like(lse), lse)[..., None]).masked_fill(hidden, 0)
    o = torch.einsum("bhij,bjhd->bihd", p, V.repeat_interleave(g, 2))
    with torch.no_grad():
        do = dout.double()
        V2, K2 = V.repeat_interleave(g, 2), K.repeat_interleave(g, 2)
        dv = torch.einsum("bhij,bihd->bjhd", p, do)
        dp = torch.einsum("bihd,bjhd->bhij", do, V2)
        ds = p * (dp - (p * dp).sum(-1, keepdim=True)) / math.sqrt(q.shape[-1])
        dq = torch.einsum("bhij,bjhd->bihd", ds, K2)
        dk = torch.einsum("bhij,bihd->bjhd", ds, Q)

        def fold(x):
            return x.unflatten(2, (k.shape[2], g)).sum(3)

        return o.detach().bfloat16(), lse.detach().float().contiguous(), dq, fold(dk), fold(dv)


def checks(D):
    """Name, (dout, q, k, v) and options of each checked call of head dimension `D`."""
    torch.manual_seed(D)
    vl = ([0, 1, 17, 200, 333, 64, 129], [5, 1, 64, 200, 700, 0, 129])

    def c(name, b, s, sk, h, hk, causal, **o):
        return (
            name,
            (rand(b, s, h, D), rand(b, s, h, D), rand(b, sk, hk, D), rand(b, sk, hk, D)),
            dict(causal=causal, **o),
        )

    return [
        c("gqa causal", 2, 300, 300, 8, 2, True),
        c("full 3/1", 1, 130, 517, 3, 1, False),
        c("longer q", 1, 400, 250, 4, 4, True),
        c("window", 2, 600, 600, 4, 4, False, window=(50, 10)),
        c("many", 5, 512, 512, 16, 4, True),
        (
            "varlen",
            (rand(sum(vl[0]), 8, D), rand(sum(vl[0]), 8, D), rand(sum(vl[1]), 2, D), rand(sum(vl[1]), 2, D)),
            {"causal": True, "lengths": vl},
        ),
    ]


def error(a, b):
    """Norm of the difference over the norm of `b`."""
    b = b.double()
    n = float(b.norm())
    return float((a.double() - b).norm()) / n if n else float(a.double().norm())

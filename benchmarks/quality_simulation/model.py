"""SmolLM2-135M in plain torch, float32: its weights from a GGUF file, and what a prompt leaves behind.

Written out so that a simulated cache can stand between RoPE and attention, for many windows and formats
at once. `change` multiplies keys by `c` behind RoPE, divides queries by it and adds a constant `b` to
keys: full precision stays the same, and a cache meets large channels.
"""

from __future__ import annotations

import math
import os
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

torch.backends.cuda.matmul.allow_tf32 = False
torch.set_grad_enabled(False)
DEV = "cuda" if torch.cuda.is_available() else "cpu"
NL = int(os.environ.get("KVLAB_SIMULATION_LAYERS", 30))  # fewer for a trial on a CPU
NQ, NK, D, HID, EPS, THETA = 9, 3, 64, 576, 1e-5, 1e5
SINK = 4  # tokens at the beginning that keep the highest width


def load(weights: bytes, index: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Tensors of a GGUF file: name to type, shape, offset and size in bytes."""
    out = {}
    for name, (kind, shape, offset, size) in index.items():
        raw = torch.from_numpy(np.frombuffer(weights, np.uint8, size, offset).copy()).to(DEV)
        if kind == "F32":
            w = raw.view(torch.float32)
        elif kind == "Q8_0":
            b = raw.view(-1, 34)
            w = (
                b[:, 2:].contiguous().view(torch.int8).float()
                * b[:, :2].contiguous().view(torch.float16).float()
            )
        else:  # Q4_1
            b = raw.view(-1, 20)
            dm = b[:, :4].contiguous().view(torch.float16).float()
            q = torch.cat([b[:, 4:] & 15, b[:, 4:] >> 4], 1).float()
            w = q * dm[:, :1] + dm[:, 1:]
        w = w.reshape(shape)
        if "attn_q" in name or "attn_k" in name:
            w = w.view(-1, D // 2, 2, HID).transpose(1, 2).reshape(shape)
        out[name] = w.contiguous()
    return out


def norm(x, w):
    """RMS norm."""
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS) * w


def split(y, n):
    """(..., T, n D) to (..., n, T, D)."""
    return y.view(*y.shape[:-1], n, D).transpose(-2, -3)


def rope(x, pos):
    """x (..., T, D), pos (T,)."""
    inv = THETA ** (-torch.arange(0, D, 2, device=DEV).float() / D)
    a = pos[:, None].float() * inv
    c, s = torch.cat([a.cos()] * 2, -1), torch.cat([a.sin()] * 2, -1)
    return x * c + torch.cat([-x[..., D // 2 :], x[..., : D // 2]], -1) * s


class Net:
    """The layers of the model, cut where a cache stands."""

    def __init__(self, w):
        self.w, self.emb, self.out = w, w["token_embd.weight"], w["output_norm.weight"]
        self.layers = [
            {
                k: w[f"blk.{i}.{k}.weight"]
                for k in (
                    "attn_norm",
                    "attn_q",
                    "attn_k",
                    "attn_v",
                    "attn_output",
                    "ffn_norm",
                    "ffn_gate",
                    "ffn_up",
                    "ffn_down",
                )
            }
            for i in range(NL)
        ]

    def qkv(self, layer, x, pos, change):
        p = self.layers[layer]
        h = norm(x, p["attn_norm"])
        q, k = rope(split(h @ p["attn_q"].T, NQ), pos), rope(split(h @ p["attn_k"].T, NK), pos)
        if change is not None:
            q, k = q / change["c"], k * change["c"] + change["b"]
        return q, k, split(h @ p["attn_v"].T, NK)

    def rest(self, layer, x, o):
        p = self.layers[layer]
        x = x + o.transpose(-2, -3).reshape(*x.shape[:-1], HID) @ p["attn_output"].T
        h = norm(x, p["ffn_norm"])
        return x + (F.silu(h @ p["ffn_gate"].T) * (h @ p["ffn_up"].T)) @ p["ffn_down"].T

    def logits(self, x):
        return norm(x, self.out) @ self.emb.T


class Prefix:
    """Exact K and V of prompts, statistics of queries, attention mass of the last 64 rows."""

    def __init__(self, net, ids, change):
        G, P = ids.shape
        self.P, self.ids = P, ids
        self.K = torch.empty(NL, G, NK, P, D, device=DEV)
        self.V = torch.empty_like(self.K)
        self.qq = torch.empty(NL, G, NK, D, device=DEV)
        self.qcov = torch.empty(NL, G, NK, D, D, device=DEV)
        self.mass = torch.empty(NL, G, NK, P, device=DEV)
        self.massn = torch.empty(NL, G, NK, P, device=DEV)
        pos = torch.arange(P, device=DEV)
        x = net.emb[ids]
        causal = torch.ones(P, P, device=DEV, dtype=torch.bool).tril()
        n = min(64, P)
        for i in range(NL):
            q, k, v = net.qkv(i, x, pos, change)
            self.K[i], self.V[i] = k, v
            qg = q.view(G, NK, NQ // NK, P, D)
            self.qq[i] = qg[..., min(4, P // 2) :, :].pow(2).mean((2, 3))
            z = qg[..., min(4, P // 2) :, :].reshape(G, NK, -1, D)
            self.qcov[i] = z.transpose(-1, -2) @ z / z.shape[2]
            s = (q @ k.repeat_interleave(NQ // NK, 1).transpose(-1, -2)) / math.sqrt(D)
            a = s.masked_fill(~causal, -torch.inf).softmax(-1)
            last = a[..., -n:, :].view(G, NK, NQ // NK, n, P)
            self.mass[i] = last.mean((2, 3))
            rest = last.clone()
            rest[..., :SINK] = 0
            rest[..., P - min(64, P) :] *= P > 64
            rest[..., max(SINK, P - 64) :] = 0
            self.massn[i] = (rest / rest.sum(-1, keepdim=True).clamp_min(1e-9)).mean((2, 3))
            o = a @ v.repeat_interleave(NQ // NK, 1)
            x = net.rest(i, x, o)

    def some(self, n):
        """The same for the first n prompts."""
        out = object.__new__(Prefix)
        out.P, out.ids = self.P, self.ids[:n]
        for name in ("K", "V", "qq", "qcov", "mass", "massn"):
            setattr(out, name, getattr(self, name)[:, :n])
        return out

"""The layers of a Llama in plain torch, and what rows of text leave behind in full precision.

For simulation.py, whose formats (formats.py) are compared with it.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F

from kvlab.ops.frame import STEADY_OVER, mean_factors

NEWEST_ASKED = 16


class Model:
    """The layers of a Llama, cut where a cache stands."""

    def __init__(self, subject: Any, layers: int, device: str) -> None:
        config, weights = subject.model.config, subject.model.to(device).state_dict()
        self.heads_q, self.heads = config.num_attention_heads, config.num_key_value_heads
        self.dim, self.eps = config.hidden_size // self.heads_q, config.rms_norm_eps
        self.layers = min(layers, config.num_hidden_layers)
        self.group, self.weights, self.device = self.heads_q // self.heads, weights, device
        self.frequency = subject.model.model.rotary_emb.inv_freq.to(device)
        factors = mean_factors(self.frequency.tolist(), self.dim, STEADY_OVER)
        self.steady = torch.tensor(factors, device=device)

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return F.rms_norm(x, x.shape[-1:], self.weights[f"model.{name}.weight"], self.eps)

    def linear(self, x: torch.Tensor, layer: int, name: str) -> torch.Tensor:
        return x @ self.weights[f"model.layers.{layer}.{name}.weight"].T

    def qkv(self, layer: int, x: torch.Tensor, first: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Of (..., T, hidden): q (..., H, group, T, D), k and v (..., H, T, D); q is divided by sqrt(D)."""
        h = self.norm(x, f"layers.{layer}.input_layernorm")
        q, k, v = (self.linear(h, layer, f"self_attn.{name}_proj") for name in "qkv")
        q, k, v = (y.unflatten(-1, (-1, self.dim)).transpose(-2, -3) for y in (q, k, v))
        angle = (first + torch.arange(x.shape[-2], device=self.device))[:, None] * self.frequency
        cos, sin = torch.cat([angle.cos()] * 2, -1), torch.cat([angle.sin()] * 2, -1)
        half = self.dim // 2
        q, k = (y * cos + torch.cat([-y[..., half:], y[..., :half]], -1) * sin for y in (q, k))
        return q.unflatten(-3, (self.heads, self.group)) / math.sqrt(self.dim), k, v

    def rest(self, layer: int, x: torch.Tensor, o: torch.Tensor) -> torch.Tensor:
        """What follows attention, o (..., H, group, T, D)."""
        x = x + self.linear(o.flatten(-4, -3).transpose(-2, -3).flatten(-2), layer, "self_attn.o_proj")
        h, name = self.norm(x, f"layers.{layer}.post_attention_layernorm"), "mlp.{}_proj"
        gate, up = (self.linear(h, layer, name.format(n)) for n in ("gate", "up"))
        return x + self.linear(F.silu(gate) * up, layer, name.format("down"))

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        return F.embedding(tokens, self.weights["model.embed_tokens.weight"])

    def log_p(self, x: torch.Tensor) -> torch.Tensor:
        return (self.norm(x, "norm") @ self.weights["model.embed_tokens.weight"].T).log_softmax(-1)


class Exact:
    """What rows (B, n) leave behind in full precision: keys, values, states, energies and attention.

    k, v (L, B, H, n, D); states (B, n, hidden); asked {length: (L, B, H, D)}; received (L, B, H, prompt), the
    attention that the last 64 rows of the prompt pay; newest (L, B, H, group, 16, D), its last queries.
    """

    def __init__(self, model: Model, tokens: torch.Tensor, prompt: int) -> None:
        rows, n = tokens.shape
        shape = model.layers, rows, model.heads
        self.k, self.v = (torch.empty(*shape, n, model.dim, device=model.device) for _ in range(2))
        self.asked = {cut: torch.empty(*shape, model.dim, device=model.device) for cut in (64, 256, prompt)}
        self.received = torch.empty(*shape, prompt, device=model.device)
        self.newest = torch.empty(*shape, model.group, NEWEST_ASKED, model.dim, device=model.device)
        states = []
        for begin in range(0, rows, 4):
            at = slice(begin, begin + 4)
            x = model.embed(tokens[at])
            for layer in range(model.layers):
                q, k, v = model.qkv(layer, x, 0)
                self.k[layer, at], self.v[layer, at] = k, v
                for cut, energy in self.asked.items():
                    energy[layer, at] = q[..., 4:cut, :].square().mean((-2, -3))
                self.newest[layer, at] = q[..., prompt - NEWEST_ASKED : prompt, :]
                late = q[..., max(prompt - 64, 0) : prompt, :] @ k[..., None, :prompt, :].transpose(-1, -2)
                late = late + torch.full_like(late[0, 0, 0], -torch.inf).triu(
                    late.shape[-1] - late.shape[-2] + 1
                )
                self.received[layer, at] = late.softmax(-1).mean((-2, -3))
                o = F.scaled_dot_product_attention(
                    q.flatten(1, 2), k.repeat_interleave(model.group, 1), v.repeat_interleave(model.group, 1),
                    is_causal=True, scale=1.0,
                )  # fmt: skip
                x = model.rest(layer, x, o.unflatten(1, (model.heads, model.group)))
            states.append(x)
        self.states = torch.cat(states)

    def rows(self, some: slice) -> Exact:
        """The same of fewer rows."""
        other = object.__new__(Exact)
        other.newest = self.newest[:, some]
        other.k, other.v, other.received = self.k[:, some], self.v[:, some], self.received[:, some]
        other.asked, other.states = {n: x[:, some] for n, x in self.asked.items()}, self.states[some]
        return other

"""Prompts of many tokens without a GPU: the arithmetic of `Prompts` in torch on the CPU, against float64.

What needs a GPU is put in its place here: the kernel that unpacks a matrix, products of 16 bits with sums in
float32, and attention.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from kvlab.engine.cpu import rotation
from kvlab.engine.geometry import Geometry
from kvlab.engine.packing import rotary_pairs, unpack
from kvlab.engine.prompt import Prompts
from kvlab.engine.weights import Layer, Matrix, Weights, draw
from kvlab.reference.decoder import KeysValues, layer_token
from tests.engine.unpacked import oracle_of

PIECES = {
    "parallel": Geometry(2, 97, 64, 2, 2, 32, 8, 96, parallel=True, layer_norm=True, gated=False),
    "sequential": Geometry(2, 97, 64, 4, 4, 32, 16, 96, layer_norm=True, gated=False),
    "gated": Geometry(2, 97, 64, 4, 2, 32, 32, 128),
    "head-norms": Geometry(2, 97, 64, 4, 2, 48, 48, 96, head_norms=True, eps=1e-6),
}


def tensor(array: Any, dtype: str) -> Any:
    """A tensor with the bits of an array."""
    if array is None:
        return None
    bits = array.view(np.int16) if array.itemsize == 2 else array
    return torch.from_numpy(np.ascontiguousarray(bits)).view(getattr(torch, dtype))


class OnCpu(Prompts):
    def _unpacked(self, matrix: Matrix) -> Any:
        packed: Any = matrix.packed
        bits = packed.view(torch.int16).numpy()
        return torch.from_numpy(unpack(bits, 16 * len(bits))).view(packed.dtype)

    def _product(self, x: Any, weight: Any, matrix: Matrix) -> Any:
        assert x.dtype == weight.dtype == self._kind
        y = x.float() @ weight.float().T
        return y if matrix.bias is None else y + matrix.bias


def prompts_of(weights: Weights, tokens: int) -> OnCpu:
    half, order = weights.dtype, rotary_pairs(weights.geometry.head_dim, weights.geometry.rotary_dim)

    def matrix(x: Matrix) -> Any:
        parts: Any = (
            tensor(x.packed, half),
            tensor(x.bias, "float32"),
            *(None if norm is None else tensor(norm, half).float() for norm in (x.norm_weight, x.norm_bias)),
        )
        return Matrix(*parts)

    layers = [
        Layer(
            tuple(map(matrix, layer.products)),
            None if layer.head_norms is None else tensor(layer.head_norms[:, order], half).float(),
        )
        for layer in weights.layers
    ]
    turns = rotation(np.arange(tokens), weights.inverse_frequencies, weights.rotary_scale)
    angles = torch.from_numpy(np.concatenate(turns, 1).swapaxes(1, 2))
    return OnCpu(weights, layers, tensor(weights.embedding, half), angles)


def attend(layer: int, q: Any, k: Any, v: Any) -> Any:
    q, k, v = (x.float().transpose(0, 1)[None] for x in (q, k, v))
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return out[0].transpose(0, 1)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", PIECES)
def test_layers_are_those_of_the_oracle(name: str, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvlab.engine.prompt._PRODUCT_TOKENS", 5)  # products of parts
    geometry, ids = PIECES[name], np.random.default_rng(3).integers(0, 97, 13)

    def attended(layer: int, q: Any, k: Any, v: Any) -> Any:
        assert q.dtype == k.dtype == v.dtype == getattr(torch, dtype)
        return attend(layer, q, k, v).to(q.dtype)

    found: list[Any] = []
    prompts = prompts_of(draw(geometry, 1e4, 1, dtype), 20)
    x = prompts.run(
        torch.from_numpy(ids), torch.arange(13), attended, lambda x: found.append(x.clone().numpy())
    )
    oracle = oracle_of(draw(geometry, 1e4, 1, dtype))
    hidden = [oracle.embedding[token] for token in ids]
    bound = 4e-3 if dtype == "float16" else 3e-2
    for got, layer in zip(found, oracle.layers, strict=True):
        past = KeysValues()
        hidden = [layer_token(one, layer, past, oracle).out for one in hidden]
        want = np.stack(hidden)
        assert np.abs(got - want).max() <= bound * np.abs(want).max()
        assert np.abs(got - np.roll(want, 1, 0)).max() > 0.1 * np.abs(want).max(), "a shift is not seen"
    assert np.array_equal(found[-1], x.numpy())
    turned = prompts.run(torch.from_numpy(ids), torch.arange(13) + 1, attended).numpy()
    assert np.abs(turned - x.numpy()).max() <= 2 * bound * np.abs(want).max(), "positions are relative"
    apart = prompts.run(torch.from_numpy(ids), torch.arange(13) // 2, attended).numpy()
    assert np.abs(apart - want).max() > 2 * bound * np.abs(want).max(), "positions are not seen"

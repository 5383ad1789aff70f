"""Packed weights as the model of the float64 oracle."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np

from kvlab.engine.geometry import Geometry
from kvlab.engine.packing import gated_rows, qkv_rows, unpack
from kvlab.engine.weights import Layer as PackedLayer
from kvlab.engine.weights import Matrix, Weights
from kvlab.reference import decoder as reference
from kvlab.reference.decoder import Layer, Linear, Norm


def _norm(matrix: Matrix, eps: float) -> Norm:
    assert matrix.norm_weight is not None
    bias = None if matrix.norm_bias is None else matrix.norm_bias.astype(np.float64)
    return Norm(matrix.norm_weight.astype(np.float64), bias, eps)


def _rows(matrix: Matrix, rows: int, order: Any = None) -> Linear:
    """A product with its rows brought back from the packed order."""
    weight = unpack(matrix.packed, rows).astype(np.float64)
    bias = None if matrix.bias is None else matrix.bias[:rows].astype(np.float64)
    if order is not None:
        back = np.argsort(order)
        weight, bias = weight[back], None if bias is None else bias[back]
    return Linear(weight, bias)


def _split(linear: Linear, *sizes: int) -> list[Linear]:
    bounds = np.cumsum((0, *sizes))
    return [
        Linear(linear.weight[a:b], None if linear.bias is None else linear.bias[a:b])
        for a, b in pairwise(bounds)
    ]


def _layer(layer: PackedLayer, geometry: Geometry) -> Layer:
    shapes = geometry.products()
    sizes = geometry.heads_q, geometry.heads_kv, geometry.head_dim, geometry.rotary_dim
    attended, kv = geometry.attended, geometry.heads_kv * geometry.head_dim
    by_name = dict(zip(shapes, layer.products, strict=True))
    qkv = _rows(by_name["qkv"], shapes["qkv"][0], qkv_rows(*sizes, interleaved=False))
    projections = _split(qkv, attended, kv, kv)
    gate = None
    if geometry.parallel:
        up = _rows(by_name["up"], geometry.ffn)
        both = _rows(by_name["out"], geometry.hidden)
        output, down = Linear(both.weight[:, :attended], both.bias), Linear(both.weight[:, attended:])
    else:
        output, down = _rows(by_name["o"], geometry.hidden), _rows(by_name["down"], geometry.hidden)
        if geometry.gated:
            pairs = _rows(by_name["gated"], 2 * geometry.ffn, gated_rows(geometry.ffn))
            gate, up = _split(pairs, geometry.ffn, geometry.ffn)
        else:
            up = _rows(by_name["up"], geometry.ffn)
    norms = [_norm(by_name[name], geometry.eps) for name in by_name if name in ("qkv", "up", "gated")]
    heads: list[Norm | None] = [None, None]
    if layer.head_norms is not None:
        heads = [Norm(row.astype(np.float64), None, geometry.eps) for row in layer.head_norms]
    return Layer(*norms, *projections, output, up, down, gate, *heads, parallel=geometry.parallel)


def oracle_of(weights: Weights) -> reference.Model:
    """The oracle's model; reads the layers of `weights`."""
    geometry, head = weights.geometry, weights.head()
    return reference.Model(
        weights.embedding.astype(np.float64),
        tuple(_layer(layer, geometry) for layer in weights.layers),
        _norm(head, geometry.eps), _rows(head, geometry.vocabulary), geometry.head_dim,
        weights.inverse_frequencies, weights.rotary_scale,
    )  # fmt: skip

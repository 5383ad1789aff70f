"""The token kernel against the oracle: all its geometries in small depth, the same bits at every launch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from kvlab.device import compute_capability
from kvlab.engine import packing
from kvlab.engine.kernels import Layout, TokenKernel, matrix_table, prepare_token
from kvlab.jit.launch import PreparedLaunch
from kvlab.ops.device_arrays import multiprocessors
from kvlab.reference.decoder import KeysValues, Layer, Linear, Model, Norm, layer_token

pytestmark = pytest.mark.skipif(compute_capability(0) != (9, 0), reason="the kernel is for 9.0 alone")

Array = NDArray[Any]

CONTEXT, EPS, VOCABULARY = 64, 1e-5, 4096
PYTHIA_2B8 = Layout(2560, 32, 32, 80, 20, 10240, 2, VOCABULARY, parallel=True)
LLAMA_1B = Layout(2048, 32, 8, 64, 64, 8192, 2, VOCABULARY, parallel=False)
LLAMA_8B = Layout(4096, 32, 8, 128, 128, 14336, 1, VOCABULARY, parallel=False)


class Case:
    """A decoder of random weights, on the device for the kernel and in float64 for the oracle."""

    def __init__(self, kernel: TokenKernel) -> None:
        self.kernel, self.layout = kernel, kernel.layout
        self.generator = torch.Generator("cuda").manual_seed(3)
        self.held: list[torch.Tensor] = []  # what the kernel reads, by address
        self.table: list[tuple[int, int, int, int]] = []
        layers = tuple(self._layer() for _ in range(self.layout.layers))
        norm, head = self._norm(), self._linear(VOCABULARY, self.layout.hidden, bias=False)
        self._add_matrix([head], np.arange(VOCABULARY), norm)
        frequencies = (0.7 ** np.arange(self.layout.rotary_dim // 2)).astype(np.float32)
        self.model = Model(np.zeros((1, 1)), layers, norm, head, self.layout.head_dim, frequencies)
        self.positions = (np.arange(kernel.batch) * 7 + 33) % CONTEXT
        self.arrays = {
            name: torch.zeros(shape, dtype=getattr(torch, dtype), device="cuda")
            for name, (shape, dtype) in kernel.workspace().items()
        }
        shape = (self.layout.layers, kernel.batch, self.layout.heads_kv, CONTEXT, self.layout.head_dim)
        self.arrays |= {name: self._random(*shape).half() for name in "kv"}
        angle = np.float32(self.positions)[:, None] * frequencies
        self.arrays["rotation"].copy_(
            torch.from_numpy(np.stack([np.cos(angle.astype(float)), np.sin(angle.astype(float))], -1))
        )
        self.arrays["positions"].copy_(torch.from_numpy(self.positions))
        self.hidden = self._random(kernel.batch, self.layout.hidden) * 2 + 3
        self.hidden[:, 5] *= 30
        self.before = {name: self.arrays[name].clone() for name in "kv"}

    def prepare(self) -> PreparedLaunch:
        matrices = torch.from_numpy(matrix_table(self.table).view(np.uint8)).cuda()
        self.held.append(matrices)
        return prepare_token(
            self.kernel,
            matrices.data_ptr(),
            {name: array.data_ptr() for name, array in self.arrays.items()},
            self.arrays["k"].stride()[:4],
            eps=EPS,
            device=0,
            multiprocessors=multiprocessors(0),
        )

    def run(self, launch: PreparedLaunch) -> list[Array]:
        """Hidden states, logits, keys and values after a token."""
        groups = self.hidden.double().reshape(self.kernel.batch, -1, 16)
        found = torch.stack([groups.mean(-1), groups.var(-1, unbiased=False) * 16], -1)
        for name, array in {"hidden": self.hidden, "statistics": found, **self.before}.items():
            self.arrays[name].copy_(array)
        launch(torch.cuda.current_stream().cuda_stream)
        torch.cuda.synchronize()
        return [self.arrays[name].cpu().numpy() for name in ("hidden", "logits", "k", "v")]

    def expected(self) -> list[Array]:
        keys, values = (self.before[name].double().cpu().numpy() for name in "kv")
        hidden, logits = [], []
        for n, position in enumerate(self.positions):
            x = self.hidden[n].double().cpu().numpy()
            for i, layer in enumerate(self.model.layers):
                past = KeysValues(*([x[i, n, :, p] for p in range(position)] for x in (keys, values)))
                x = layer_token(x, layer, past, self.model).out
                keys[i, n, :, position], values[i, n, :, position] = past.keys[-1], past.values[-1]
            hidden.append(x)
            logits.append(self.model.head(self.model.final_norm(x)))
        return [np.stack(hidden), np.stack(logits), keys, values]

    def _random(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator, device="cuda")

    def _norm(self) -> Norm:
        weight, bias = (self._random(self.layout.hidden).mul(0.3).half().double().cpu().numpy() for _ in "wb")
        return Norm(weight + 1, bias if self.layout.parallel else None, EPS)

    def _linear(self, rows: int, columns: int, *, bias: bool) -> Linear:
        weight = self._random(rows, columns).mul(0.02).half().double().cpu().numpy()
        return Linear(weight, self._random(rows).mul(0.5).double().cpu().numpy() if bias else None)

    def _layer(self) -> Layer:
        lay = self.layout
        q, kv = lay.heads_q * lay.head_dim, lay.heads_kv * lay.head_dim
        sizes = [(q, lay.hidden), (kv, lay.hidden), (kv, lay.hidden), (lay.hidden, q)]
        sizes += [(lay.ffn, lay.hidden), (lay.hidden, lay.ffn), (lay.ffn, lay.hidden)]
        query, key, value, output, up, down, gate = (self._linear(*s, bias=lay.parallel) for s in sizes)
        norms = self._norm(), self._norm()
        heads = lay.heads_q, lay.heads_kv, lay.head_dim, lay.rotary_dim
        self._add_matrix([query, key, value], packing.qkv_rows(*heads, interleaved=False), norms[0])
        if lay.parallel:
            self._add_matrix([up], np.arange(lay.ffn), norms[1])
            self._add_matrix([output, down], np.arange(lay.hidden), None, axis=1)
        else:
            self._add_matrix([output], np.arange(lay.hidden), None)
            self._add_matrix([gate, up], packing.gated_rows(lay.ffn), norms[1])
            self._add_matrix([down], np.arange(lay.hidden), None)
        last = None if lay.parallel else gate
        return Layer(*norms, query, key, value, output, up, down, gate=last, parallel=lay.parallel)

    def _add_matrix(self, linears: list[Linear], order: Array, norm: Norm | None, axis: int = 0) -> None:
        weight = np.concatenate([one.weight for one in linears], axis).astype(np.float16)
        biases = [one.bias for one in linears if one.bias is not None]
        bias = None
        if biases:
            bias = (np.concatenate(biases) if axis == 0 else np.sum(biases, 0))[order].astype(np.float32)
        parts = [packing.pack(weight[order]), bias]
        parts += [
            None if x is None else x.astype(np.float16) for x in (norm and norm.weight, norm and norm.bias)
        ]
        weight_at, bias_at, norm_weight, norm_bias = map(self._upload, parts)
        self.table.append((weight_at, bias_at, norm_weight, norm_bias))

    def _upload(self, array: Array | None) -> int:
        """Address of a copy on the device, 0 for none."""
        if array is None:
            return 0
        self.held.append(torch.from_numpy(array).cuda())
        return self.held[-1].data_ptr()


@pytest.mark.parametrize(
    "kernel",
    [
        TokenKernel(PYTHIA_2B8),
        TokenKernel(PYTHIA_2B8, 8, warps=8),
        TokenKernel(LLAMA_1B, splits=1),
        TokenKernel(LLAMA_1B, 16, warps=8, adder_groups=2),
        TokenKernel(LLAMA_8B, splits=2),
    ],
    ids=["pythia-2.8b", "pythia-2.8b-8", "llama-1b", "llama-1b-16", "llama-8b"],
)
def test_a_token_is_the_oracle_s_and_has_the_same_bits_each_time(kernel: TokenKernel) -> None:
    case = Case(kernel)
    launch = case.prepare()
    first = case.run(launch)
    for got, want in zip(first, case.expected(), strict=True):
        assert np.abs(got - want).max() <= 3e-3 * np.abs(want).max()
    for _ in range(19):
        assert all(np.array_equal(a, b) for a, b in zip(case.run(launch), first, strict=True))
    assert not case.arrays["arrivals"].any()
    assert not case.arrays["barrier"].any()


def test_a_grid_that_is_not_on_the_device_as_a_whole_is_refused() -> None:
    """One that waits for blocks that cannot come would never end."""
    from cupy.cuda import driver

    launch = Case(TokenKernel(LLAMA_1B, splits=1)).prepare()
    larger = PreparedLaunch(
        launch.kernel, (2 * launch.grid[0],), launch.block, launch._argument, launch.shared_bytes,
        cooperative=True,
    )  # fmt: skip
    with pytest.raises(driver.CUDADriverError):
        larger(torch.cuda.current_stream().cuda_stream)

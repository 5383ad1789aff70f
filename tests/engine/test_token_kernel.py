"""The token kernel without a GPU: sizes, the struct, which bytes are read, and its order of summation.

`kernel_layer` is the arithmetic of kernels/cuda/engine in NumPy: float32 sums in the kernel's order, 16 bits
where it rounds. It reads packed weights, so it also holds row orders and splits against the oracle.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvlab.engine import kernels, packing
from kvlab.engine.geometry import PUBLISHED, Geometry, published
from kvlab.engine.kernels import CALL, CHOOSE, EMBED, MATRIX
from kvlab.engine.token_kernel import SHARED_LIMIT, TokenKernel
from kvlab.jit.build import kernel_root
from kvlab.jit.compile_gate import specialisations
from kvlab.jit.launch import PreparedLaunch
from kvlab.reference.decoder import KeysValues, Layer, Linear, Norm, layer_token
from kvlab.reference.decoder import Model as Decoder

Array = NDArray[Any]

PYTHIA, LLAMA, LLAMA_8B, QWEN = (
    published(name)[0] for name in ("pythia-2.8b", "llama-3.2-1b", "llama-3.1-8b", "qwen3-0.6b")
)
SMALL = Geometry(1, 32, 64, 2, 2, 32, 8, 192, parallel=True, layer_norm=True, gated=False)
SMALL_GATED = Geometry(1, 32, 64, 4, 2, 32, 32, 128)
WIDE = Geometry(1, 32, 8192, 64, 64, 128, 128, 32768)
CTAS = 132


def test_the_gate_builds_what_is_launched() -> None:
    declared = {item.macros for item in specialisations() if item.name == "engine/token.cu"}
    plain = ((PYTHIA, 1), (PYTHIA, 8), (LLAMA, 1), (LLAMA, 16), (QWEN, 1))
    packed = ((LLAMA_8B, 1), (LLAMA_8B, 16), (PYTHIA, 1), (QWEN, 2))
    for geometry, batch, is_packed in (*((*x, False) for x in plain), *((*x, True) for x in packed)):
        macros = TokenKernel.fitting(geometry, batch, False, CTAS, packed=is_packed).macros()
        assert tuple(sorted((name, str(value)) for name, value in macros.items())) in declared, macros


def test_the_structs_are_those_of_the_kernels() -> None:
    of_source = {"Call": ("model.cuh", CALL), "Matrix": ("model.cuh", MATRIX), "Embed": ("embed.cuh", EMBED),
                 "Choose": ("choose.cu", CHOOSE)}  # fmt: skip
    for name, (source, struct) in of_source.items():
        text = (kernel_root() / "engine" / source).read_text(encoding="utf-8")
        body = re.sub(r"//.*", "", text.partition(f"struct {name} {{")[2].partition("};")[0])
        fields = [
            re.findall(r"\w+", part)[-1]
            for line in body.split(";")
            if line.strip()
            for part in line.split(",")
        ]
        assert list(struct.dtype.names or ()) == fields
    assert [struct.size for _, struct in of_source.values()] == [272, 32, 56, 56]


@pytest.mark.parametrize("name", PUBLISHED)
@pytest.mark.parametrize("batch", [1, 5, 8, 16])
def test_known_models_have_a_kernel(name: str, batch: int) -> None:
    kernel = TokenKernel.fitting(published(name)[0], batch, True, CTAS)
    assert kernel.shared_bytes <= SHARED_LIMIT
    assert kernel.slots * kernel.slot_blocks >= 32
    assert kernel.slot_blocks >= 4
    TokenKernel.fitting(published(name)[0], batch, True, 7)  # of a small part of a GPU


@pytest.mark.parametrize(
    ("name", "splits"),
    [
        ("pythia-160m", {1: 1, 8: 5, 16: 3}),
        ("pythia-410m", {1: 2, 8: 5, 16: 4}),
        ("pythia-1b", {1: 2, 8: 4, 16: 5}),
        ("pythia-1.4b", {1: 2, 12: 5, 16: 5}),
        ("pythia-2.8b", {1: 4, 2: 4, 8: 4, 12: 5, 16: 5}),
        ("pythia-6.9b", {1: 4, 8: 4, 16: 5}),
        ("pythia-12b", {1: 4, 8: 5, 16: 5}),
        ("llama-2-7b", {8: 2, 16: 2}),
        ("llama-3.2-1b", {1: 1, 8: 4, 16: 4}),
        ("llama-3.1-8b", {1: 1, 8: 4, 12: 4, 16: 4}),
        ("qwen3-0.6b", {1: 1}),
        ("smollm2-135m", {1: 1}),
    ],
)
def test_splits_are_those_that_were_fastest(name: str, splits: dict[int, int]) -> None:
    """Or within 1.2 % of them, on an H100, one row of 6.9b and 12b on an H200: docs/performance/engine.md."""
    of = {batch: TokenKernel.fitting(published(name)[0], batch, False, CTAS).splits for batch in splits}
    assert of == splits


@pytest.mark.parametrize(
    ("name", "batch", "slots"),
    [("pythia-410m", 1, 4), ("pythia-410m", 8, 4), ("qwen3-0.6b", 1, 4), ("llama-3.2-1b", 1, 4),
     ("pythia-1b", 1, 6), ("pythia-1.4b", 1, 6), ("pythia-6.9b", 1, 6), ("pythia-2.8b", 1, 4)],
)  # fmt: skip
def test_slots_under_way_are_those_that_were_fastest(name: str, batch: int, slots: int) -> None:
    """On an H100, of as many KiB in slots of 16: docs/performance/engine.md."""
    kernel = TokenKernel.fitting(published(name)[0], batch, False, CTAS)
    assert kernel.most_under_way(3.35e12, CTAS) == slots


@pytest.mark.parametrize(
    ("name", "batch", "slots"),
    [("pythia-160m", 1, 4), ("llama-3.2-1b", 1, 6), ("pythia-1.4b", 1, 6), ("pythia-2.8b", 1, 4),
     ("pythia-2.8b", 8, 4), ("llama-3.1-8b", 1, 6), ("pythia-6.9b", 1, 8), ("pythia-12b", 1, 6)],
)  # fmt: skip
def test_slots_under_way_on_an_h200(name: str, batch: int, slots: int) -> None:
    kernel = TokenKernel.fitting(published(name)[0], batch, False, CTAS)
    assert kernel.most_under_way(4.8e12, CTAS) == slots


@pytest.mark.parametrize("splits", [1, 2, 4])
@pytest.mark.parametrize("ctas", [4, 12, 132])
def test_each_byte_of_the_weights_is_copied_once_to_the_block_that_needs_it(splits: int, ctas: int) -> None:
    rows, columns, slot = 80, 512, 4
    weight = np.arange(rows * columns, dtype=np.uint32).astype(np.uint16).reshape(rows, columns)
    packed = packing.pack(weight)
    in_order, blocks = packed.reshape(-1, 512), columns // 32 // splits
    seen = np.zeros(len(in_order), int)
    for cta in range(ctas):
        for tile in range(cta, rows // 16 * splits, ctas):
            for start in range(blocks // slot):
                first = (tile * (blocks // slot) + start) * slot  # the address, in KiB
                assert tile % splits == cta % splits  # the columns of x that the block has
                column = cta % splits * blocks + start * slot
                wanted = packed[tile // splits, column : column + slot].reshape(slot, -1)
                assert np.array_equal(in_order[first : first + slot], wanted)
                seen[first : first + slot] += 1
    assert (seen == 1).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda: TokenKernel(PYTHIA, 17), "batch=17"),
        (lambda: TokenKernel(PYTHIA, 0), "batch=0"),
        (lambda: TokenKernel(PYTHIA, 8, splits=1), "take more splits"),
        (lambda: TokenKernel(PYTHIA, splits=3), "no multiple"),
        (lambda: TokenKernel(PYTHIA, 16, warps=16), "a block has up to 1,024"),
        (lambda: TokenKernel.fitting(WIDE, 16, False, CTAS), "take a smaller batch"),
        (lambda: kernels._call(TokenKernel(PYTHIA), {}, (0,) * 3, 132), "are needed"),
        (lambda: PreparedLaunch(None, (1,), (1,), CALL, early=True, cooperative=True), "choose one"),
    ],
)
def test_what_the_kernel_cannot_do_is_refused(change: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        change()


def test_a_launch_has_what_the_kernel_reads() -> None:
    kernel = TokenKernel(PYTHIA)
    addresses = (*kernel.workspace(133), "matrices", "head_norms", "k", "v")
    embed = np.zeros(1, EMBED.dtype)
    embed["embedding"] = 4
    pointers = {**dict.fromkeys(addresses, 1), "embed": embed}
    call = kernels._call(kernel, pointers, (1, 2, 3), 133)[0]
    assert (call["split_ctas"], call["matrices"], call["kv_head"]) == (132, 1, 3)
    assert (call["tokens"], call["chooses"], call["embed"]["embedding"]) == (50_304, 0, 4)
    assert kernel.workspace(133)["kv_parts"][0] == (133, 1, 80, 4)
    with pytest.raises(ValueError, match="multiprocessors=3: at least 4"):
        kernels._call(kernel, pointers, (1, 2, 3), 3)


# ---- the arithmetic


def statistics(hidden: Array) -> Array:
    """Mean and squared deviations of every 16 channels, as the adders leave them."""
    groups = hidden.astype(np.float32).reshape(-1, 16)
    mean = groups.mean(1, dtype=np.float32)
    return np.stack([mean, np.square(groups - mean[:, None]).sum(1, dtype=np.float32)], 1)


def merged(found: Array, *, centred: bool) -> tuple[np.float32, np.float32]:
    """Mean (0 for an RMS norm) and mean square about it, of all groups."""
    mean = found[:, 0].mean(dtype=np.float32) if centred else np.float32(0)
    squares = (found[:, 1] + 16 * np.square(found[:, 0] - mean)).sum(dtype=np.float32)
    return mean, squares / np.float32(16 * len(found))


@given(st.integers(0, 2**32 - 1), st.sampled_from([0.0, 1.0, 1e3]))
def test_merged_statistics_are_those_of_two_passes(seed: int, offset: float) -> None:
    """A mean of 1,000 deviations costs no digits, where the mean of squares would keep one."""
    hidden = (np.random.default_rng(seed).standard_normal(512) + offset).astype(np.float32)
    mean, variance = merged(statistics(hidden), centred=True)
    exact = hidden.astype(float)
    assert abs(mean - exact.mean()) <= 1e-6 * (1 + offset)
    assert abs(variance / exact.var() - 1) <= (1e-3 if offset == 1e3 else 1e-5)
    _, square = merged(statistics(hidden), centred=False)
    assert abs(square / np.square(exact).mean() - 1) <= 1e-5


def product(packed: Array, rows: int, x: Array, warps: int, splits: int = 1) -> Array:
    """W x: blocks of 32 columns of a warp in turn, each half apart, then warps, then splits.

    Slots have two blocks; side s of the warps has every `sides`-th slot from s on.
    """
    weight, x = packing.unpack(packed, rows).astype(np.float32), x.astype(np.float32)
    blocks = len(x) // 32 // splits
    sides = next(n for n in (4, 2, 1) if blocks // 2 % n == 0 and warps % n == 0)
    y = np.zeros(rows, np.float32)
    for split in range(splits):
        parts = np.zeros((warps, 2, rows), np.float32)
        for block in range(blocks):
            warp = block // 2 % sides * (warps // sides) + block % 2 % (warps // sides)
            for half in range(2):
                first = 32 * (split * blocks + block) + 16 * half
                parts[warp, half] += weight[:, first : first + 16] @ x[first : first + 16]
        whole = np.zeros(rows, np.float32)
        for part in parts:
            whole += part[0] + part[1]
        y += whole
    return y


def normed(hidden: Array, norm: Norm) -> Array:
    mean, variance = merged(statistics(hidden), centred=norm.bias is not None)
    y = (hidden - mean) / np.sqrt(variance + np.float32(norm.eps)) * norm.weight
    return (y if norm.bias is None else y + norm.bias).astype(np.float16)


def rounded(rng: np.random.Generator, *shape: int, scale: float = 1.0) -> Array:
    """Random values that float16 holds."""
    return (rng.standard_normal(shape) * scale).astype(np.float16).astype(float)


def random_layer(layout: Geometry, rng: np.random.Generator) -> Layer:
    def norm() -> Norm:
        return Norm(
            1 + rounded(rng, layout.hidden, scale=0.2),
            rounded(rng, layout.hidden) if layout.parallel else None,
            1e-5,
        )

    def linear(rows: int, columns: int) -> Linear:
        bias = rng.standard_normal(rows).astype(np.float32).astype(float) if layout.parallel else None
        return Linear(rounded(rng, rows, columns, scale=columns**-0.5), bias)

    q, kv = layout.heads_q * layout.head_dim, layout.heads_kv * layout.head_dim
    up, gate = linear(layout.ffn, layout.hidden), linear(layout.ffn, layout.hidden)
    return Layer(
        norm(), norm(), linear(q, layout.hidden), linear(kv, layout.hidden), linear(kv, layout.hidden),
        linear(layout.hidden, q), up, linear(layout.hidden, layout.ffn),
        gate=None if layout.parallel else gate, parallel=layout.parallel,
    )  # fmt: skip


def stacked(*linears: Linear) -> tuple[Array, Array]:
    """Weights one under the other in float16, and biases."""
    weight = np.concatenate([one.weight for one in linears]).astype(np.float16)
    return weight, np.concatenate([np.zeros(len(o.weight)) if o.bias is None else o.bias for o in linears])


def kernel_layer(layout: Geometry, layer: Layer, hidden: Array, past: Array, rotation: Array, warps: int,
                 splits: int) -> Array:  # fmt: skip
    """Hidden state after the layer; past is [keys, values][KV head][position][channel], the last unset."""
    nq, nk, dim, half = layout.heads_q, layout.heads_kv, layout.head_dim, layout.rotary_dim // 2
    order = packing.qkv_rows(nq, nk, dim, 2 * half, interleaved=False)
    weight, bias = stacked(layer.query, layer.key, layer.value)
    y = product(packing.pack(weight[order]), len(order), normed(hidden, layer.attention_norm), warps)
    heads = (y + bias[order]).reshape(-1, dim)
    turned = heads.copy()
    even, odd = heads[: nq + nk, 0 : 2 * half : 2], heads[: nq + nk, 1 : 2 * half : 2]
    cosine, sine = rotation
    turned[: nq + nk, :half] = even * cosine - odd * sine
    turned[: nq + nk, half : 2 * half] = odd * cosine + even * sine
    turned = turned.astype(np.float16).astype(float)
    past[:, :, -1] = turned[nq:].reshape(2, nk, dim)
    grouped = turned[:nq].reshape(nk, -1, dim)
    scores = np.einsum("hgd,hkd->hgk", grouped, past[0]) / np.sqrt(dim)
    p = np.exp(scores - scores.max(-1, keepdims=True))
    attended = np.einsum("hgk,hkd->hgd", p / p.sum(-1, keepdims=True), past[1]).reshape(-1).astype(np.float16)

    def add(after: Array, x: Array, *linears: Linear) -> Array:
        packed = packing.pack(np.concatenate([one.weight for one in linears], 1).astype(np.float16))
        offset = sum(0.0 if one.bias is None else one.bias for one in linears)
        return (product(packed, layout.hidden, x, warps, splits) + offset + after).astype(np.float32)

    def mlp(x: Array) -> Array:
        if layer.gate is None:
            up = product(packing.pack(layer.up.weight.astype(np.float16)), layout.ffn, x, warps)
            return _gelu(up + layer.up.bias).astype(np.float16)
        order = packing.gated_rows(layout.ffn)
        weight, _ = stacked(layer.gate, layer.up)
        pairs = product(packing.pack(weight[order]), 2 * layout.ffn, x, warps).reshape(-1, 2)
        return (pairs[:, 0] / (1 + np.exp(-pairs[:, 0])) * pairs[:, 1]).astype(np.float16)

    if layout.parallel:
        x = np.concatenate([attended, mlp(normed(hidden, layer.mlp_norm))])
        return add(hidden, x, layer.output, layer.down)
    after = add(hidden, attended, layer.output)
    return add(after, mlp(normed(after, layer.mlp_norm)), layer.down)


def _gelu(x: Array) -> Array:
    from scipy.special import erfc

    y: Array = 0.5 * x * erfc(-x / np.sqrt(2.0))
    return y


@pytest.mark.parametrize("layout", [SMALL, SMALL_GATED], ids=["parallel", "gated"])
@pytest.mark.parametrize(("warps", "splits"), [(1, 1), (3, 2), (16, 2)])
def test_the_order_of_summation_gives_the_token_of_the_oracle(
    layout: Geometry, warps: int, splits: int
) -> None:
    rng = np.random.default_rng(warps)
    layer, frequencies = random_layer(layout, rng), (0.5 ** np.arange(layout.rotary_dim // 2)).astype("f4")
    decoder = Decoder(np.zeros((1, 1)), (layer,), layer.mlp_norm, layer.query, layout.head_dim, frequencies)
    hidden = (3 + 2 * rng.standard_normal(layout.hidden)).astype(np.float32)
    past = np.zeros((2, layout.heads_kv, 6, layout.head_dim))
    past[:, :, :5] = rounded(rng, 2, layout.heads_kv, 5, layout.head_dim)
    keys_values = KeysValues([past[0, :, i] for i in range(5)], [past[1, :, i] for i in range(5)])
    want = layer_token(hidden.astype(float), layer, keys_values, decoder)
    angle = (np.float32(5) * frequencies).astype(float)

    def error(rotation: Array) -> float:
        got = kernel_layer(layout, layer, hidden, past, rotation, warps, splits)
        return float(np.abs(got - want.out).max() / np.abs(want.out).max())

    assert error(np.stack([np.cos(angle), np.sin(angle)])) < 1e-3
    np.testing.assert_allclose(past[0, :, -1], want.key, atol=1e-2)
    np.testing.assert_allclose(past[1, :, -1], want.value, atol=1e-2)
    assert error(np.stack([np.cos(angle), -np.sin(angle)])) > 3e-3, "a wrong rotation is not seen"

"""The names of flash-attn: signatures, numbers against the reference, caches, and ring-flash-attn on top."""

from __future__ import annotations

import importlib.util
import inspect
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import kvlab  # noqa: E402
from kvlab.integrations import flash_attn, flash_attn_private  # noqa: E402
from kvlab.reference import attention as reference  # noqa: E402

# As in flash-attn 2.8.3, flash_attn/flash_attn_interface.py.
_MASK = "dropout_p softmax_scale causal window_size softcap alibi_slopes deterministic return_attn_probs"
_SIDES = "softmax_scale causal window_size_left window_size_right softcap alibi_slopes"
_SEQUENCES = "cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k"
_BACKWARD = "dout q k v out softmax_lse dq dk dv"
SIGNATURES = {
    "flash_attn_func": f"q k v {_MASK}",
    "flash_attn_kvpacked_func": f"q kv {_MASK}",
    "flash_attn_qkvpacked_func": f"qkv {_MASK}",
    "flash_attn_varlen_func": f"q k v {_SEQUENCES} {_MASK} block_table",
    "flash_attn_varlen_kvpacked_func": f"q kv {_SEQUENCES} {_MASK}",
    "flash_attn_varlen_qkvpacked_func": f"qkv cu_seqlens max_seqlen {_MASK}",
    "flash_attn_with_kvcache": "q k_cache v_cache k v rotary_cos rotary_sin cache_seqlens cache_batch_idx "
    "cache_leftpad block_table softmax_scale causal window_size softcap rotary_interleaved alibi_slopes "
    "num_splits return_softmax_lse",
    "_flash_attn_forward": f"q k v dropout_p {_SIDES} return_softmax",
    "_flash_attn_varlen_forward": f"q k v {_SEQUENCES} dropout_p {_SIDES} return_softmax block_table "
    "leftpad_k seqused_k zero_tensors num_splits",
    "_flash_attn_backward": f"{_BACKWARD} dropout_p {_SIDES} deterministic rng_state",
    "_flash_attn_varlen_backward": f"{_BACKWARD} {_SEQUENCES} dropout_p {_SIDES} deterministic rng_state "
    "zero_tensors",
}


@pytest.fixture
def _installed(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "flash_attn"]:
        monkeypatch.delitem(sys.modules, name)
    flash_attn.install()
    for name in ("flash_attn", "flash_attn.flash_attn_interface", "flash_attn.bert_padding"):
        monkeypatch.setitem(sys.modules, name, sys.modules[name])  # so that it goes away again


@pytest.mark.usefixtures("_installed")
@pytest.mark.parametrize("name", SIGNATURES)
def test_names_and_arguments_are_those_of_flash_attn(name: str) -> None:
    interface = importlib.import_module("flash_attn.flash_attn_interface")
    assert list(inspect.signature(getattr(interface, name)).parameters) == SIGNATURES[name].split()
    assert hasattr(importlib.import_module("flash_attn"), name) == (not name.startswith("_"))


@pytest.mark.usefixtures("_installed")
def test_a_padded_batch_there_and_back() -> None:
    package, padding = (importlib.import_module(f"flash_attn{name}") for name in ("", ".bert_padding"))
    mask = torch.tensor([[1, 1, 1, 0], [0, 0, 0, 0], [1, 0, 1, 1]])
    qkv = _draw(3, 4, 3, 2, 8)
    tokens, indices, cu_seqlens, longest, used = padding.unpad_input(qkv, mask)
    assert (indices.tolist(), cu_seqlens.tolist()) == ([0, 1, 2, 8, 10, 11], [0, 3, 3, 6])
    assert (longest, used.tolist(), cu_seqlens.dtype) == (3, [3, 0, 3], torch.int32)
    out = package.flash_attn_varlen_qkvpacked_func(tokens, cu_seqlens, longest, causal=True)
    padded = padding.pad_input(out, indices, 3, 4)
    for row in range(3):
        present = mask[row].bool()
        q, k, v = (x[present][None].numpy() for x in qkv[row].detach().unbind(1))
        _close(padded[row][present], reference.attention(q, k, v, causal=True)[0])
        assert not padded[row][~present].any()
    padded.sum().backward()
    assert bool((qkv.grad.abs().sum((2, 3, 4)) > 0).eq(mask.bool()).all())
    kept, _, starts, longest, used = padding.unpad_input(qkv, mask, 1 - mask)
    assert torch.equal(kept, qkv.flatten(0, 1))
    assert (starts.tolist(), longest, used.tolist()) == ([0, 4, 8, 12], 4, [3, 0, 3])


def test_install_does_not_replace_what_is_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn", type(sys)("flash_attn"))
    with pytest.raises(RuntimeError, match="another flash_attn is imported already"):
        flash_attn.install()


def _draw(*shape: int, grad: bool = True) -> Any:
    return torch.randn(*shape, dtype=torch.float32).requires_grad_(grad)


def _close(actual: Any, expected: Any) -> None:
    np.testing.assert_allclose(actual.detach().numpy(), expected, atol=3e-6)


def test_fixed_length_functions() -> None:
    qkv = _draw(2, 9, 3, 2, 16)
    q, k, v = (x.detach().numpy() for x in qkv.unbind(2))
    options: dict[str, Any] = {"softmax_scale": 0.3, "causal": True, "window_size": (4, -1), "softcap": 5.0}
    expected, lse = reference.attention(
        q, k, v, scale=0.3, causal=True, window=(4, -1), softcap=5.0, return_lse=True
    )
    out, out_lse, probabilities = flash_attn.flash_attn_qkvpacked_func(qkv, return_attn_probs=True, **options)
    _close(out, expected)
    _close(out_lse, lse)
    assert probabilities.numel() == 0
    _close(flash_attn.flash_attn_kvpacked_func(qkv[:, :, 0], qkv[:, :, 1:], **options), expected)
    _close(flash_attn.flash_attn_func(*qkv.unbind(2), **options), expected)
    out.sum().backward()
    gradients = kvlab.attention_backward(
        torch.ones_like(out), *qkv.detach().unbind(2), out.detach(), out_lse, scale=0.3, causal=True,
        window=(4, -1), softcap=5.0,
    )  # fmt: skip
    torch.testing.assert_close(qkv.grad, torch.stack(gradients, 2))


def test_variable_length_functions() -> None:
    qkv, bounds = _draw(9, 3, 2, 16), torch.tensor([0, 4, 4, 9], dtype=torch.int32)
    q, k, v = (x.detach().numpy() for x in qkv.unbind(1))
    expected = reference.attention_varlen(q, k, v, bounds, bounds, 5, 5, causal=True)
    _close(flash_attn.flash_attn_varlen_qkvpacked_func(qkv, bounds, 5, causal=True), expected)
    rest = bounds, bounds, 5, 5
    _close(flash_attn.flash_attn_varlen_kvpacked_func(qkv[:, 0], qkv[:, 1:], *rest, causal=True), expected)
    out, lse, _ = flash_attn.flash_attn_varlen_func(
        *qkv.unbind(1), *rest, causal=True, return_attn_probs=True
    )
    _close(out, expected)
    assert lse.shape == (2, 9)
    out.square().sum().backward()
    assert bool((qkv.grad[:, 2] != 0).any(dim=-1).all())


def test_private_functions_return_and_take_back_lse() -> None:
    dout, q, k, v = (_draw(1, 6, heads, 8, grad=False) for heads in (4, 4, 2, 2))
    numbers = 0.0, 0.3, True, -1, -1, 0.0, None
    out, lse, *_ = flash_attn_private._flash_attn_forward(q, k, v, *numbers, False)
    buffers = [torch.full_like(x, torch.nan) for x in (q, k, v)]
    flash_attn_private._flash_attn_backward(dout, q, k, v, out, lse, *buffers, *numbers, False)
    expected = kvlab.attention_backward(dout, q, k, v, out, lse, scale=0.3, causal=True)
    for buffer, gradient in zip(buffers, expected, strict=True):
        torch.testing.assert_close(buffer, gradient, rtol=0, atol=0)
    bounds = torch.tensor([0, 6], dtype=torch.int32)
    with pytest.raises(NotImplementedError, match="seqused_k: call flash_attn_with_kvcache"):
        flash_attn_private._flash_attn_varlen_forward(
            q[0], k[0], v[0], bounds, bounds, 6, 6, 0.0, None, True, seqused_k=bounds[1:]
        )


@pytest.mark.parametrize("layout", ["rows", "chosen", "pages"])
@pytest.mark.parametrize("starts", [False, True])
def test_attention_with_a_cache(layout: str, starts: bool) -> None:
    """New tokens go behind the old ones; what is not a token of a row is NaN."""
    batch, new, capacity, heads, kv_heads, dim = 3, 2, 16, 4, 2, 8
    lengths = torch.tensor([5, 0, 11], dtype=torch.int32)
    pads = torch.tensor([2, 0, 4], dtype=torch.int32) if starts else None
    q = _draw(batch, new, heads, dim, grad=False)
    k, v = _draw(2, batch, new, kv_heads, dim, grad=False)
    old = _draw(2, batch, capacity, kv_heads, dim, grad=False)
    options: dict[str, Any] = {"cache_seqlens": lengths, "cache_leftpad": pads}
    if layout == "pages":
        table = torch.tensor([[5, 1, 9, 0], [2, 11, 3, 7], [4, 10, 6, 8]], dtype=torch.int32)
        cache = torch.full((2, 13, 4, kv_heads, dim), torch.nan)
        options["block_table"] = table
    else:
        rows = torch.tensor([4, 1, 0]) if layout == "chosen" else torch.arange(batch)
        cache = torch.full((2, 5 if layout == "chosen" else batch, capacity, kv_heads, dim), torch.nan)
        options |= {"cache_batch_idx": rows.int()} if layout == "chosen" else {}

    def where(b: int, token: int) -> Any:
        """The place of a token, in one of both caches."""
        return (table[b, token // 4], token % 4) if layout == "pages" else (rows[b], token)

    first = [0 if pads is None else int(pad) for pad in (pads if starts else lengths)]
    first = first if starts else [0] * batch
    for b in range(batch):
        for token in range(first[b], int(lengths[b])):
            page, place = where(b, token)
            cache[:, page, place] = old[:, b, token]
    out, lse = flash_attn.flash_attn_with_kvcache(
        q, cache[0], cache[1], k, v, causal=True, return_softmax_lse=True, **options
    )
    for b in range(batch):
        own = slice(first[b], int(lengths[b]))
        keys, values = (torch.cat([old[i, b, own], x[b]]) for i, x in enumerate((k, v)))
        expected, expected_lse = reference.attention(
            q[b : b + 1], keys[None], values[None], causal=True, return_lse=True
        )
        _close(out[b : b + 1], expected)
        _close(lse[b : b + 1], expected_lse)
        page, place = where(b, int(lengths[b]) + 1)
        assert bool((cache[0, page, place] == k[b, 1]).all())


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_rotary_turns_new_keys_and_queries_to_their_positions(interleaved: bool, causal: bool) -> None:
    """Scores depend on the distance of positions alone: a whole sequence, shifted, gives the same."""
    angles = torch.arange(20.0)[:, None] * torch.tensor([1.0, 0.1])
    tables = {"rotary_cos": angles.cos(), "rotary_sin": angles.sin(), "rotary_interleaved": interleaved}
    q, k, v = (_draw(1, 4, 1, 6, grad=False) for _ in range(3))
    outs = []
    for shift in (0, 9):
        cache = torch.zeros(2, 1, 20, 1, 6)
        pad = torch.tensor([shift], dtype=torch.int32)
        outs.append(
            flash_attn.flash_attn_with_kvcache(
                q, *cache, k, v, cache_seqlens=shift, cache_leftpad=pad, causal=causal, **tables
            )
        )
        pairs = [(0, 1), (2, 3)] if interleaved else [(0, 2), (1, 3)]
        for (a, b), rate in zip(pairs, (1.0, 0.1), strict=True):
            turned = torch.complex(k[0, :, 0, a], k[0, :, 0, b]) * torch.exp(1j * rate * torch.arange(4.0))
            stored = cache[0, 0, shift : shift + 4, 0]
            torch.testing.assert_close(torch.complex(stored[:, a], stored[:, b]), turned)
        assert bool((cache[0, 0, shift : shift + 4, 0, 4:] == k[0, :, 0, 4:]).all())
    torch.testing.assert_close(outs[0], outs[1])
    plain = flash_attn.flash_attn_func(q, k, v, causal=causal)
    assert not torch.allclose(outs[0], plain)


def test_pages_of_a_variable_length_call() -> None:
    pages, table = _draw(2, 4, 4, 1, 8, grad=False), torch.tensor([[2, 0], [3, 1]], dtype=torch.int32)
    q, bounds = _draw(3, 2, 8, grad=False), torch.tensor([[0, 2, 3], [0, 7, 10]], dtype=torch.int32)
    out = flash_attn.flash_attn_varlen_func(q, *pages, *bounds, 2, 7, causal=True, block_table=table)
    k, v = (torch.cat([x[[2, 0]].flatten(0, 1)[:7], x[3, :3]]) for x in pages)
    _close(out, reference.attention_varlen(q, k, v, *bounds, 2, 7, causal=True))


def test_what_is_not_offered_says_so() -> None:
    q = _draw(1, 2, 1, 8)
    with pytest.raises(NotImplementedError, match=r"dropout_p=0.1: kvlab has no dropout"):
        flash_attn.flash_attn_func(q, q, q, dropout_p=0.1)
    with pytest.raises(NotImplementedError, match="alibi_slopes: kvlab has no ALiBi"):
        flash_attn.flash_attn_func(q, q, q, alibi_slopes=torch.ones(1))
    with pytest.raises(ValueError, match="pass both of k and v"):
        flash_attn.flash_attn_with_kvcache(q, q, q, k=q)
    with pytest.raises(
        ValueError, match="cache_seqlens=1 must lie between 0 and 0: a row of the cache holds 2"
    ):
        flash_attn.flash_attn_with_kvcache(q, q.detach(), q.detach(), q, q, cache_seqlens=1)


@pytest.mark.skipif(importlib.util.find_spec("ring_flash_attn") is None, reason="needs ring-flash-attn")
def test_ring_flash_attn_runs_on_it_unmodified() -> None:
    """Ring, zigzag ring, striped ring and llama3 over 2 and 4 processes, forward and backward."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1"}
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.integrations.ring_attention"],
        cwd=Path(__file__).parents[2], env=environment, capture_output=True, text=True, timeout=300,
        check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-3000:]
    assert "agree with float64 over 2 and 4 processes" in run.stdout

"""Wrong arguments of flash-attn's names: refused under their names, before a cache changes or is read."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from kvlab.integrations import (  # noqa: E402
    flash_attn,
    flash_attn_cache,
    flash_attn_cache_checks,
    flash_attn_padding,
    flash_attn_private,
    torch_autograd,
)


def i32(*values: Any) -> Any:
    return torch.tensor(values, dtype=torch.int32)


def draw(*shape: int) -> Any:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


Q, NEW = draw(2, 1, 2, 32), draw(2, 2, 1, 32)
CAPACITY = 16
ANGLES = torch.arange(18.0)[:, None] * torch.ones(1, 8)
APPEND = {"k": NEW, "v": NEW}
ROTARY = APPEND | {"rotary_cos": ANGLES.cos(), "rotary_sin": ANGLES.sin()}
PAGED = {"block_table": i32([0, 1, 2, 3], [4, 5, 6, 7])}

WRONG_VALUES: dict[str, tuple[dict[str, Any], str]] = {
    "length over capacity, hidden by a gap": (
        {"cache_seqlens": i32(17, 5), "cache_leftpad": i32(0, 1)},
        r"cache_seqlens\[0\]=17 must lie between 0 and 16: a row of the cache holds 16 tokens",
    ),
    "length over capacity": (
        {"cache_seqlens": i32(5, 17)},
        r"cache_seqlens\[1\]=17 must lie between 0 and 16",
    ),
    "negative length": ({"cache_seqlens": i32(3, -1)}, r"cache_seqlens\[1\]=-1 must lie between 0 and 16"),
    "negative length of an append": (
        {"cache_seqlens": i32(3, -1)} | APPEND,
        r"cache_seqlens\[1\]=-1 must lie between 0 and 14",
    ),
    "no memory for new tokens": (
        {"cache_seqlens": i32(15, 3)} | APPEND,
        r"cache_seqlens\[0\]=15 must lie between 0 and 14: .*, 2 of them new",
    ),
    "length of 64 bits": (
        {"cache_seqlens": torch.tensor([3, 2**40])},
        r"cache_seqlens\[1\]=1099511627776 must",
    ),
    "negative padding": (
        {"cache_seqlens": i32(5, 5), "cache_leftpad": i32(0, -3)},
        r"cache_leftpad\[1\]=-3 must lie between 0 and 5",
    ),
    "more padding than tokens": (
        {"cache_seqlens": i32(5, 3), "cache_leftpad": i32(0, 4)} | APPEND,
        r"cache_leftpad\[1\]=4 must lie between 0 and 3: the row's cache_seqlens",
    ),
    "negative row": ({"cache_batch_idx": i32(0, -1)}, r"cache_batch_idx\[1\]=-1 must lie between 0 and 1"),
    "row that does not exist": (
        {"cache_batch_idx": i32(2, 0)},
        r"cache_batch_idx\[0\]=2 must .*: the cache has 2 rows",
    ),
    "negative page in use": (
        {"block_table": i32([0, 1, -1, -1], [4, -1, -1, -1]), "cache_seqlens": i32(8, 5)},
        r"block_table\[1, 1\]=-1 must lie between 0 and 7: the cache has 8 pages, and row 1 has tokens",
    ),
    "page of a new token": (
        {"block_table": i32([0, 1, -1, -1], [4, 9, -1, -1]), "cache_seqlens": i32(6, 3)} | APPEND,
        r"block_table\[1, 1\]=9 must lie between 0 and 7",
    ),
    "length over all pages": (PAGED | {"cache_seqlens": i32(3, 17)}, r"cache_seqlens\[1\]=17 must lie"),
    "position beyond the tables": (
        ROTARY | {"cache_seqlens": i32(14, 3), "rotary_cos": ANGLES[:15], "rotary_sin": ANGLES[:15]},
        "rotary_cos has 15 positions: this call needs 16",
    ),
}
WRONG_KINDS: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "one length for two rows": ({"cache_seqlens": i32(3)}, ValueError, "cache_seqlens has batch = 1"),
    "length without axis": ({"cache_seqlens": torch.tensor(3)}, ValueError, "cache_seqlens must have 1 dim"),
    "lengths of float": (
        {"cache_seqlens": torch.tensor([3.9, 2.2])},
        TypeError,
        "cache_seqlens has dtype float32; it must be int32",
    ),
    "a length of float": ({"cache_seqlens": 3.5}, TypeError, "cache_seqlens=3.5 must be a whole number"),
    "an int beyond capacity": (
        {"cache_seqlens": 17},
        ValueError,
        "cache_seqlens=17 must lie between 0 and 16",
    ),
    "a negative int": ({"cache_seqlens": -1}, ValueError, "cache_seqlens=-1 must lie between 0 and 16"),
    "append to a full cache": (APPEND, ValueError, "cache_seqlens=None must lie between 0 and 14"),
    "more new tokens than capacity": (
        {"k": draw(2, 17, 1, 32), "v": draw(2, 17, 1, 32), "cache_seqlens": 0},
        ValueError,
        "k has 17 new tokens: a row of the cache holds 16",
    ),
    "padding of float": (
        {"cache_leftpad": torch.zeros(2)},
        TypeError,
        "cache_leftpad has dtype float32; it must be int32",
    ),
    "padding that is no tensor": (
        {"cache_leftpad": [0, 1]},
        TypeError,
        "cache_leftpad must be a tensor of torch",
    ),
    "padding of one row": ({"cache_leftpad": i32(1)}, ValueError, "cache_leftpad has batch = 1"),
    "rows of bool": (
        {"cache_batch_idx": torch.tensor([True, False])},
        TypeError,
        "cache_batch_idx has dtype bool; it must be int32",
    ),
    "pages of one row": ({"block_table": i32([0, 1])}, ValueError, "block_table has batch = 1"),
    "pages and rows": (
        PAGED | {"cache_batch_idx": i32(0, 1)},
        ValueError,
        "pass block_table or cache_batch_idx, not both",
    ),
    "new keys of another dtype": (
        {"k": NEW.half(), "v": NEW.half(), "cache_seqlens": 0},
        TypeError,
        "k has dtype float16, q has float32",
    ),
    "q of another dtype": (
        {"q": Q.half(), "cache_seqlens": 0} | APPEND,
        TypeError,
        "k_cache has dtype float32",
    ),
    "new keys of another shape": (
        {"k": NEW[..., :16], "v": NEW, "cache_seqlens": 0},
        ValueError,
        "k has D = 16",
    ),
    "new keys of one row": ({"k": NEW[:1], "v": NEW[:1], "cache_seqlens": 0}, ValueError, "k has batch = 1"),
    "tables of two lengths": (
        ROTARY | {"cache_seqlens": 0, "rotary_sin": ANGLES[:9]},
        ValueError,
        "rotary_sin has positions = 9",
    ),
    "tables wider than heads": (
        ROTARY | {"cache_seqlens": 0, "rotary_cos": torch.ones(18, 17), "rotary_sin": torch.ones(18, 17)},
        ValueError,
        "rotary_cos turns 34 channels: q has a head_dim of 32",
    ),
    "tables of integers": (
        ROTARY | {"cache_seqlens": 0, "rotary_cos": ANGLES.int()},
        TypeError,
        "rotary_cos has dtype int32",
    ),
    "a flag": (
        ROTARY | {"cache_seqlens": 0, "rotary_interleaved": "no"},
        TypeError,
        "rotary_interleaved='no' must",
    ),
    "splits": ({"num_splits": 1.5}, TypeError, "num_splits=1.5 must be a whole number"),
    "scale": (
        {"softmax_scale": "1"} | APPEND | {"cache_seqlens": 0},
        TypeError,
        "softmax_scale='1' must be a number",
    ),
}


def call(caches: Any, **arguments: Any) -> Any:
    """Call with a cache of 2 rows, or of 8 pages of 4 tokens."""
    shape = (2, 8, 4, 1, 32) if "block_table" in arguments else (2, 2, CAPACITY, 1, 32)
    q = arguments.pop("q", Q)
    return flash_attn.flash_attn_with_kvcache(q, *caches.view(shape), causal=True, **arguments)


REFUSED = {
    name: (values, ValueError, message) for name, (values, message) in WRONG_VALUES.items()
} | WRONG_KINDS


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_right_is_refused_before_the_cache_changes(name: str) -> None:
    arguments, kind, message = REFUSED[name]
    caches = draw(2, 2 * CAPACITY * 32)
    before = caches.clone()
    with pytest.raises(kind, match=message):
        call(caches, **arguments)
    assert torch.equal(caches, before)


@pytest.mark.parametrize("name", WRONG_VALUES)
def test_where_values_are_not_looked_at_nothing_outside_is_read_or_written(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a GPU does, on the CPU, whose indexing raises where a GPU would read; NaN around the cache."""
    for module in (flash_attn_cache, flash_attn_cache_checks):
        monkeypatch.setattr(module, "can_look", lambda x: False)
    memory = torch.full((2, 4 * CAPACITY * 32), torch.nan)
    caches = memory[:, CAPACITY * 32 : 3 * CAPACITY * 32]
    caches[:] = draw(*caches.shape)
    out = call(caches, **WRONG_VALUES[name][0])
    assert bool(out.isfinite().all())
    assert int(memory.isnan().sum()) == memory.numel() // 2


def test_a_wrong_length_spoils_no_other_row(monkeypatch: pytest.MonkeyPatch) -> None:
    caches = draw(2, 2 * CAPACITY * 32)
    right = call(caches, cache_seqlens=i32(16, 5), cache_leftpad=i32(0, 1))
    monkeypatch.setattr(flash_attn_cache_checks, "can_look", lambda x: False)
    assert torch.equal(call(caches, cache_seqlens=i32(17, 5), cache_leftpad=i32(-2, 1)), right)


def test_conventions_of_flash_attn_are_taken() -> None:
    caches = draw(2, 2 * CAPACITY * 32)
    expected = call(caches, cache_seqlens=i32(5, 5))
    assert torch.equal(call(caches, cache_seqlens=5), expected)
    assert torch.equal(call(caches, cache_seqlens=torch.tensor([5, 5])), expected)
    unused = {"block_table": i32([0, 1, -1, 10**6], [4, 5, -1, -1])}
    assert torch.equal(call(caches, cache_seqlens=5, **unused), expected)
    padded = call(caches, cache_seqlens=5, cache_leftpad=i32(4, 4))
    unused = {"block_table": i32([-1, 1, -1, 10**6], [-1, 5, -1, -1])}
    assert torch.equal(call(caches, cache_seqlens=5, cache_leftpad=i32(4, 4), **unused), padded)
    assert torch.equal(call(caches, q=Q[:1], cache_seqlens=5), expected[:1])  # the first rows of the cache
    k_cache, v_cache = caches.view(2, 2, CAPACITY, 1, 32)
    lists = flash_attn.flash_attn_with_kvcache(
        Q, k_cache, v_cache, cache_seqlens=5, window_size=[4, 0], causal=1
    )
    pairs = flash_attn.flash_attn_with_kvcache(Q, k_cache, v_cache, cache_seqlens=5, window_size=(4, 0))
    assert torch.equal(lists, pairs)
    assert not call(caches, block_table=i32([-1], [-1]), cache_seqlens=0).any()


def test_empty_batches_of_a_cache() -> None:
    cache, new = torch.zeros(2, 16, 1, 32), torch.zeros(0, 2, 1, 32)
    arguments = {"cache_seqlens": torch.zeros(0, dtype=torch.int32), "cache_batch_idx": i32()}
    out = flash_attn.flash_attn_with_kvcache(Q[:0], cache, cache, new, new, **arguments)
    assert out.shape == (0, 1, 2, 32)
    pool = torch.zeros(0, 4, 1, 32)
    out = flash_attn.flash_attn_with_kvcache(Q, pool, pool, cache_seqlens=0, block_table=i32([-1], [-1]))
    assert not out.any()


@pytest.mark.parametrize(
    ("bounds_k", "table", "message"),
    [
        ([0, 9, 10], [[0, 1], [2, 3]], r"cu_seqlens_k is \[0, 9, 10\]: it must rise from 0 by at most 8"),
        ([0, 4, 3], [[0, 1], [2, 3]], r"cu_seqlens_k is \[0, 4, 3\]: it must rise"),
        ([0, 4, 12], [[0, 1], [2, -1]], r"block_table\[1, 1\]=-1 must lie between 0 and 3"),
        ([0, 4, 12], [[0, 1]], "block_table has batch = 1"),
    ],
)
def test_pages_of_a_variable_length_call(
    bounds_k: list[int], table: list[list[int]], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pages = draw(4, 4, 1, 8)
    q = draw(3, 2, 8)
    arguments = i32(0, 2, 3), i32(*bounds_k), 2, 12
    with pytest.raises(ValueError, match=message):
        flash_attn.flash_attn_varlen_func(q, pages, pages, *arguments, block_table=i32(*table))
    if len(table) == 2:
        for module in (flash_attn_cache, flash_attn_cache_checks):
            monkeypatch.setattr(module, "can_look", lambda x: False)
        out = flash_attn.flash_attn_varlen_func(q, pages, pages, *arguments, block_table=i32(*table))
        assert bool(out.isfinite().all())


OPTIONS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"causal": "no"}, TypeError, "causal='no' must be True or False, not str"),
    ({"softcap": -1.0}, ValueError, "softcap=-1.0 must be at least 0"),
    ({"softmax_scale": float("nan")}, ValueError, "softmax_scale=nan must be finite"),
    ({"window_size": 3}, TypeError, "window_size=3 must be two numbers of keys"),
    ({"window_size": (2, 2, 2)}, TypeError, r"window_size=\(2, 2, 2\) must be two numbers"),
    ({"window_size": (None, None)}, TypeError, "window_size=None must be a whole number"),
    ({"deterministic": "yes"}, TypeError, "deterministic='yes' must be True or False"),
    ({"return_attn_probs": None}, TypeError, "return_attn_probs=None must be True or False"),
    ({"dropout_p": "0.1"}, TypeError, "dropout_p='0.1' must be a number"),
    ({"dropout_p": 0.1}, NotImplementedError, "dropout_p=0.1: kvlab has no dropout"),
]


@pytest.mark.parametrize(("options", "kind", "message"), OPTIONS, ids=str)
def test_options_are_refused_by_name(options: dict[str, Any], kind: type[Exception], message: str) -> None:
    q, bounds = draw(1, 3, 2, 8), i32(0, 3)
    with pytest.raises(kind, match=message):
        flash_attn.flash_attn_func(q, q, q, **options)
    with pytest.raises(kind, match=message):
        flash_attn.flash_attn_varlen_func(*[q[0]] * 3, bounds, bounds, 3, 3, **options)


@pytest.mark.parametrize("value", ["5", 5.7, None])
def test_lengths_are_refused_by_name(value: Any) -> None:
    q, bounds = draw(3, 2, 8), i32(0, 3)
    with pytest.raises(TypeError, match=r"max_seqlen_q=.* must be a whole number"):
        flash_attn.flash_attn_varlen_func(q, q, q, bounds, bounds, value, 3)
    with pytest.raises(TypeError, match=r"max_seqlen_k=.* must be a whole number"):
        flash_attn.flash_attn_varlen_func(q, q, q, bounds, bounds, 3, value)
    with pytest.raises(TypeError, match=r"max_seqlen_q=.* must be a whole number"):
        flash_attn_private._flash_attn_varlen_forward(q, q, q, bounds, bounds, value, 3, 0.0, None, True)


def test_options_of_private_functions_and_of_autograd() -> None:
    q = draw(1, 3, 2, 8)
    with pytest.raises(TypeError, match="window_size_left=None must be a whole number"):
        flash_attn_private._flash_attn_forward(q, q, q, 0.0, None, True, None, -1, 0.0, None, False)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"softcap=-1.0 must be at least 0"):
        flash_attn_private._flash_attn_forward(q, q, q, 0.0, None, True, -1, -1, -1.0, None, False)
    with pytest.raises(TypeError, match="causal='no' must be True or False"):
        torch_autograd.attention(q, q, q, causal="no")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="window=3 must be two numbers"):
        torch_autograd.attention(q, q, q, window=3)  # type: ignore[arg-type]


def test_unpadding_an_empty_batch_and_shapes_that_do_not_fit() -> None:
    for shape in ((0, 5), (3, 0), (0, 0)):
        mask = torch.ones(shape, dtype=torch.int64)
        tokens, indices, starts, longest, used = flash_attn_padding.unpad_input(
            torch.ones(*shape, 2, 4), mask
        )
        assert (tokens.shape, indices.shape, longest) == ((0, 2, 4), (0,), 0)
        assert starts.tolist() == [0] * (shape[0] + 1)
        assert used.tolist() == [0] * shape[0]
        assert flash_attn_padding.pad_input(tokens, indices, *shape).shape == (*shape, 2, 4)
    with pytest.raises(ValueError, match="attention_mask has seqlen = 4"):
        flash_attn_padding.unpad_input(torch.ones(2, 3, 4), torch.ones(2, 4, dtype=torch.int64))

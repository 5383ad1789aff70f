"""Attention of a sequence over several gloo ranks against attention of one process, forward and backward."""

from __future__ import annotations

import os
import re
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import kvlab
from kvlab import parallel
from kvlab.errors import RankError
from kvlab.ops.cuda.query_gradients import Seen
from kvlab.parallel import gathered as gathered_attention
from tests.parallel.ranks import Ranks

Tensor = torch.Tensor
LENGTHS = (48, 16, 0, 64)
FUNCTIONS = ("zigzag_llama3", "llama3", "ring", "zigzag_ring")
WORLDS = (1, 2, 4)

alone = pytest.mark.skipif(
    "RANK" in os.environ, reason="torchrun has started ranks; this wants others or none"
)


def bounds(lengths: tuple[int, ...]) -> Tensor:
    return torch.tensor(np.concatenate([[0], np.cumsum(lengths)]), dtype=torch.int32)


def inputs(lengths: tuple[int, ...], dtype: torch.dtype, seed: int = 0, size: float = 1.0) -> list[Tensor]:
    """q, k, v and dout of all ranks: 6 heads on 3 of 16 channels."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(sum(lengths), heads, 16) for heads in (6, 3, 3, 6)]
    return [size * torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def whole(lengths: tuple[int, ...], arrays: list[Tensor], **options: Any) -> list[Tensor]:
    """Out, dq, dk and dv of one process, float32 inside."""
    q, k, v, dout = (x.float() for x in arrays)
    cu, longest = bounds(lengths), max(lengths)
    out, lse = kvlab.attention_varlen(q, k, v, cu, cu, longest, longest, return_lse=True, **options)
    gradients = kvlab.attention_varlen_backward(dout, q, k, v, out, lse, cu, cu, longest, longest, **options)
    return [out, *gradients]


def on_rank(
    rank: int, size: int, function: str, lengths: tuple[int, ...], dtype: torch.dtype, seed: int,
    options: dict[str, Any], scale: float = 1.0,
) -> list[Tensor]:  # fmt: skip
    """This rank's rows of out, dq, dk and dv, and where they stand in the stream."""
    arrays, cu = inputs(lengths, dtype, seed, scale), bounds(lengths)
    stream = torch.arange(sum(lengths))
    if function == "llama3":
        take = lambda x: x.chunk(size)[rank]  # noqa: E731
    else:
        take = lambda x: parallel.extract_local(x, cu, zigzag="zigzag" in function)  # noqa: E731
    q, k, v, dout = (take(x).clone() for x in arrays)
    for x in (q, k, v):
        x.requires_grad_()
    mine, longest = cu // size, max(lengths) // size
    window = options.pop("window", (-1, -1))
    if function == "zigzag_llama3":
        stride = 2 if len(lengths) > 1 else 1  # two strides, the second of one head; or three
        out = parallel.zigzag_llama3_flash_attn_varlen_func(
            q, k, v, mine, cu, longest, max(lengths), stride, window_size=window, **options
        )
    elif function == "llama3":
        prepared = parallel.llama3_flash_attn_prepare_cu_seqlens(cu, options["causal"], rank, size)
        out = parallel.llama3_flash_attn_varlen_func(
            q, k, v, *prepared[:4], 2, prepared[4], window_size=window, **options
        )
    else:
        call = getattr(parallel, f"{function}_flash_attn_varlen_func")
        out = call(q, k, v, mine, longest, **options)
    out.backward(dout)
    return [
        x.detach().numpy()
        for x in (out.float(), q.grad.float(), k.grad.float(), v.grad.float(), take(stream))
    ]


def gathered(results: list[list[Any]]) -> list[Tensor]:
    """Rows of all ranks where they stand."""
    order = np.argsort(np.concatenate([result[-1] for result in results]))
    return [torch.tensor(np.concatenate(parts)[order]) for parts in list(zip(*results, strict=True))[:-1]]


def assert_near(found: list[Tensor], wanted: list[Tensor], limit: float, gradients: float) -> None:
    for name, one, other in zip(("out", "dq", "dk", "dv"), found, wanted, strict=True):
        error = (one - other).abs().max().item() / max(1.0, other.abs().max().item())
        assert error <= (limit if name == "out" else gradients), f"{name}: {error}"


@pytest.mark.parametrize("size", WORLDS)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("lengths", [LENGTHS, (64,)])
def test_ranks_together_give_what_one_process_gives(
    ranks: Any, function: str, causal: bool, size: int, lengths: tuple[int, ...]
) -> None:
    options = {"causal": causal}
    found = gathered(ranks(size)(on_rank, function, lengths, torch.float32, 3, options))
    assert_near(found, whole(lengths, inputs(lengths, torch.float32, 3), causal=causal), 2e-6, 2e-6)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_deterministic_calls_give_the_same_bits(ranks: Any, function: str) -> None:
    options = {"causal": True, "deterministic": True}
    calls = [gathered(ranks(2)(on_rank, function, LENGTHS, torch.float32, 3, options)) for _ in range(2)]
    assert all(torch.equal(one, other) for one, other in zip(*calls, strict=True))
    assert_near(calls[0], whole(LENGTHS, inputs(LENGTHS, torch.float32, 3), causal=True), 2e-6, 2e-6)


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float16, 1e-3), (torch.bfloat16, 8e-3)])
def test_error_of_16_bit_floats_does_not_grow_with_the_ranks(
    ranks: Any, function: str, dtype: torch.dtype, limit: float
) -> None:
    wanted = whole(LENGTHS, inputs(LENGTHS, dtype, 5), causal=True)
    for size in WORLDS:
        found = gathered(ranks(size)(on_rank, function, LENGTHS, dtype, 5, {"causal": True}))
        assert_near(found, wanted, limit, limit)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_large_inputs(ranks: Any, function: str) -> None:
    wanted = whole(LENGTHS, inputs(LENGTHS, torch.float32, 7, 10.0), causal=True)
    found = gathered(ranks(2)(on_rank, function, LENGTHS, torch.float32, 7, {"causal": True}, 10.0))
    assert_near(found, wanted, 1e-5, 1e-4)


@pytest.mark.parametrize("size", WORLDS)
@pytest.mark.parametrize(
    "word", ["separate", "listed", "paired", "use_triton_grouped", "use_grouped_attention"]
)
def test_one_call_for_both_chunks(ranks: Any, word: str, size: int) -> None:
    own = {word: True} if word.startswith("use") else {"implementation": word}
    found = gathered(ranks(size)(on_rank, "zigzag_llama3", LENGTHS, torch.float32, 4, own | {"causal": True}))
    assert_near(found, whole(LENGTHS, inputs(LENGTHS, torch.float32, 4), causal=True), 2e-6, 2e-6)


def heads_of_calls(rank: int, size: int, *arguments: Any) -> list[tuple[int, bool]]:
    """KV heads of each call of the backward, in order, and whether the keys are this rank's own."""
    kept, found = gathered_attention.gradients, []

    def record(*given: Any) -> Any:
        found.append((given[4].shape[1], given[6].causal))
        return kept(*given)

    gathered_attention.gradients = record  # type: ignore[assignment]
    try:
        on_rank(rank, size, *arguments)
    finally:
        gathered_attention.gradients = kept
    return found


def test_own_keys_of_a_single_stride_come_before_those_of_others_and_behind(ranks: Any) -> None:
    arguments = "zigzag_llama3", LENGTHS, torch.float32, 8, {"causal": True}  # all 3 heads at once
    assert ranks(2)(heads_of_calls, *arguments) == [[(1, True), (3, False), (2, True)]] * 2


class Summed:
    """What `kvlab.ops.cuda.query_gradients` does on GPUs, by calls of a CPU."""

    def __init__(self, queries: Any, scale: Any, dq: Tensor, *own: Any) -> None:
        self.queries, self.scale, self.dq, self.sums = queries, scale, dq, torch.zeros_like(dq)
        self.own = own

    def add_own(self) -> tuple[Tensor, Tensor]:
        return self.add(*self.own)

    def add(self, k: Tensor, v: Tensor, seen: Seen) -> tuple[Tensor, Tensor]:
        groups, rows = len(seen.prefix_lens), seen.longest[0]
        dout, q, out = (x.split(rows) for x in self.queries[:3])
        found, dk, dv = kvlab.grouped_attention_varlen_backward(
            dout, q, k, v, out, self.queries[3].split(rows, 1), scale=self.scale,
            cu_seqlens_q_groups=[seen.cu_q] * groups, cu_seqlens_k=seen.cu_k, prefix_lens=seen.prefix_lens,
            causal=seen.causal,
        )  # fmt: skip
        self.sums += torch.cat(list(found))
        return dk, dv

    def finish(self) -> None:
        self.dq.copy_(self.sums)


class WithoutLast(Summed):
    """Leaves out the last key of every prefix."""

    def add(self, k: Tensor, v: Tensor, seen: Seen) -> tuple[Tensor, Tensor]:
        return super().add(k, v, seen._replace(prefix_lens=[(n - 1).clamp(min=0) for n in seen.prefix_lens]))


def on_rank_summed(rank: int, size: int, summed: type[Summed], *arguments: Any) -> list[Tensor]:
    kept, used = gathered_attention.begin_sum, []

    def begin(*given: Any) -> Summed:
        used.append(summed(*given))
        return used[-1]

    gathered_attention.begin_sum = begin  # type: ignore[assignment]
    try:
        found = on_rank(rank, size, *arguments)
    finally:
        gathered_attention.begin_sum = kept
    assert bool(used) == (size > 1)
    return found


@pytest.mark.parametrize("size", WORLDS)
def test_dq_summed_over_keys_by_kernels(ranks: Any, size: int) -> None:
    lengths = (64,)
    arguments = "zigzag_llama3", lengths, torch.float32, 6, {"causal": True}
    wanted = whole(lengths, inputs(lengths, torch.float32, 6), causal=True)
    assert_near(gathered(ranks(size)(on_rank_summed, Summed, *arguments)), wanted, 2e-6, 2e-6)
    if size > 1:
        found = gathered(ranks(size)(on_rank_summed, WithoutLast, *arguments))
        with pytest.raises(AssertionError, match="dq"):
            assert_near(found, wanted, 2e-6, 2e-6)


TWO_WORDS = {"implementation": "listed", "use_triton_grouped": True}


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"implementation": "triton"}, ValueError, "implementation='triton'"),
        (TWO_WORDS, ValueError, "ask for listed and paired: choose one"),
        (TWO_WORDS | {"use_grouped_attention": True}, ValueError, "listed and paired and separate"),
        ({"implementation": "paired", "causal": False}, NotImplementedError, "needs causal=True"),
        ({"implementation": "paired", "window_size": (3, 0)}, NotImplementedError, "and no window"),
        ({"dropout_p": 0.1}, NotImplementedError, "dropout_p=0.1"),
    ],
)
def test_what_cannot_be_is_refused_by_name(options: Any, error: type[Exception], words: str) -> None:
    x, cu = torch.zeros(8, 1, 16), bounds((8,))
    with pytest.raises(error, match=re.escape(words)):
        parallel.zigzag_llama3_flash_attn_varlen_func(x, x, x, cu, cu, 8, 8, 1, **{"causal": True} | options)


X, CU = torch.zeros(8, 2, 16), [0, 8]


@pytest.fixture
def one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank of one, which never communicates."""
    monkeypatch.setattr("kvlab.parallel.functions.rank_and_size", lambda group: (0, 1))


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"q": torch.zeros(8, 3, 16)}, ValueError, "q has 3 heads: it must be a multiple of the 2 heads"),
        ({"k": X.half()}, TypeError, "k is torch.float16 on cpu, q torch.float32 on cpu"),
        ({"q": X.numpy()}, TypeError, "q is a ndarray: ranks exchange torch tensors alone"),
        ({"v": None}, TypeError, "v is a NoneType"),
        ({"q": torch.tensor(1.0)}, ValueError, "q is one number"),
        ({"cu_seqlens_q": [0, 7.5]}, TypeError, "cu_seqlens_q=[0, 7.5]: it must be one row of numbers"),
        ({"cu_seqlens_k": [[0, 8]]}, TypeError, "cu_seqlens_k=[[0, 8]]"),
        ({"cu_seqlens_k": "abc"}, TypeError, "cu_seqlens_k='abc'"),
        ({"cu_seqlens_q": [0, 2**31]}, ValueError, "cu_seqlens_q rises to 2147483648"),
        ({"cu_seqlens_k": [0, 9, 8]}, ValueError, "cu_seqlens_k=[0, 9, 8]"),
        ({"max_seqlen_q": 7}, ValueError, "max_seqlen_q=7: the longest sequence has 8 tokens; pass at least"),
        ({"max_seqlen_k": "x"}, TypeError, "max_seqlen_k='x'"),
        ({"heads_k_stride": [1]}, TypeError, "heads_k_stride=[1]"),
        ({"local_k_slice": 5}, TypeError, "local_k_slice=5"),
    ],
)
@pytest.mark.parametrize("name", ["zigzag_llama3_flash_attn_varlen_func", "llama3_flash_attn_varlen_func"])
@pytest.mark.usefixtures("one_rank")
def test_bad_arguments_raise_before_a_rank_waits(
    name: str, arguments: dict[str, Any], error: type[Exception], words: str
) -> None:
    right = {"q": X, "k": X, "v": X, "cu_seqlens_q": CU, "cu_seqlens_k": CU, "max_seqlen_q": 8}
    right |= {"max_seqlen_k": 8, "heads_k_stride": 1, "local_k_slice": slice(0, 8), "causal": True}
    with pytest.raises(error, match=re.escape(words)):
        getattr(parallel, name)(**right | arguments)


@pytest.mark.parametrize(
    ("cu_q", "cu_k", "keys", "error", "words"),
    [
        ([0, 5], [0, 8], slice(0, 8), ValueError, "q has 8 tokens; the lengths add up to 5"),
        ([0, 8], [0, 4, 8], slice(0, 8), ValueError, "cu_seqlens_q has 1 sequences and cu_seqlens_k 2"),
        ([0, 8], [0, 8], slice(0, 7), ValueError, "it has 7 of 8 keys; cu_seqlens_k has 8"),
        ([0, 8], [0, 8], None, TypeError, "local_k_slice=None"),
    ],
)
@pytest.mark.usefixtures("one_rank")
def test_pieces_of_a_stream_are_checked(
    cu_q: Any, cu_k: Any, keys: Any, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=re.escape(words)):
        parallel.llama3_flash_attn_varlen_func(X, X, X, cu_q, cu_k, 8, 8, 1, keys)


@pytest.mark.usefixtures("one_rank")
def test_tensors_and_ranks_are_checked() -> None:
    prepare = parallel.llama3_flash_attn_prepare_cu_seqlens
    assert prepare([0, 8], True, 1, 2)[4] == slice(0, 8)
    with pytest.raises(ValueError, match="rank=9"):
        prepare([0, 8], True, 9, 2)
    with pytest.raises(ValueError, match="world_size=0"):
        prepare([0, 8], True, 0, 0)
    with pytest.raises(TypeError, match="rank='0'"):
        prepare([0, 8], True, "0", 2)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="x is a ndarray"):
        parallel.extract_local(X.numpy(), CU)
    with pytest.raises(TypeError, match=r"local is torch\.float16"):
        parallel.scatter_local(X.clone(), X.half(), CU)
    with pytest.raises(TypeError, match="like is a NoneType"):
        parallel.position_ids(CU, None)
    with pytest.raises(TypeError, match="q is a list"):
        parallel.ring_flash_attn_func([X], X[None], X[None])


@pytest.mark.parametrize("left", [0, 5, 30])
def test_windows(ranks: Any, left: int) -> None:
    options = {"causal": True, "window": (left, 0)}
    wanted = whole(LENGTHS, inputs(LENGTHS, torch.float32, 9), causal=True, window=(left, 0))
    found = gathered(ranks(2)(on_rank, "zigzag_llama3", LENGTHS, torch.float32, 9, options))
    assert_near(found, wanted, 2e-6, 2e-6)


def two_calls(rank: int, size: int) -> bool:
    """Whether two forward calls and then their backward calls give what each call gives by itself."""
    cu, results = bounds((32,)), []
    arguments = (cu // size, cu, 32, 32, 1)

    def leaves(seed: int) -> list[Tensor]:
        arrays = inputs((32,), torch.float32, seed)[:3]
        return [parallel.extract_local(x, cu).requires_grad_() for x in arrays]

    for together in (False, True):
        calls = []
        for seed in (1, 2):
            mine = leaves(seed)
            calls.append(
                (mine, parallel.zigzag_llama3_flash_attn_varlen_func(*mine, *arguments, causal=True))
            )
            if not together:
                calls[-1][1].square().sum().backward()
        if together:
            sum(out.square().sum() for _, out in calls).backward()
        results.append([x for mine, out in calls for x in (out.detach(), *(y.grad for y in mine))])
    return all(torch.equal(one, other) for one, other in zip(*results, strict=True))


def test_calls_under_way_together_share_no_buffer(ranks: Any) -> None:
    assert all(ranks(2)(two_calls))


def memory(rank: int, size: int, calls: int) -> tuple[int, int]:
    """Bytes of tensors alive before and after many calls."""
    import gc

    cu = bounds((8 * size,))
    q, k, v, _ = (parallel.extract_local(x, cu) for x in inputs((8 * size,), torch.float32))

    def alive() -> int:
        gc.collect()
        return sum(x.nbytes for x in gc.get_objects() if type(x) is Tensor)

    before = 0
    for n in range(calls):
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        parallel.zigzag_llama3_flash_attn_varlen_func(
            *leaves, cu // size, cu, 8 * size, 8 * size, 1, causal=True
        ).sum().backward()
        if n == 10:
            before = alive()
    return before, alive()


def test_many_calls_keep_no_memory(ranks: Any) -> None:
    assert all(before == after for before, after in ranks(2)(memory, 200))


def in_groups(rank: int, size: int) -> bool:
    """Two groups of two ranks each compute their own sequence."""
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    return own_sequence(rank % 2, groups[rank % 2])


def in_a_mesh(rank: int, size: int) -> bool:
    """The same by a mesh of data and context parallelism; as a whole it is refused."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    with pytest.raises(ValueError, match=r"a mesh of 2 axes \(dp, cp\): pass one of them"):
        parallel.extract_local(torch.zeros(32), bounds((32,)), group=mesh)
    return own_sequence(rank // 2, mesh["cp"])


def own_sequence(number: int, group: Any) -> bool:
    cu = bounds((32,))
    arrays = inputs((32,), torch.float32, number)
    wanted = whole((32,), arrays, causal=True)[0]
    for name in ("zigzag_llama3", "zigzag_ring"):
        q, k, v, _ = (parallel.extract_local(x, cu, group=group) for x in arrays)
        if name == "zigzag_ring":
            out = parallel.zigzag_ring_flash_attn_func(q[None], k[None], v[None], causal=True, group=group)[0]
        else:
            out = parallel.zigzag_llama3_flash_attn_varlen_func(
                q, k, v, cu // 2, cu, 16, 32, 3, causal=True, group=group
            )
        there = parallel.scatter_local(torch.zeros_like(wanted), out, cu, group=group)
        mine = parallel.extract_local(torch.arange(32), cu, group=group)
        assert torch.allclose(there[mine], wanted[mine], atol=1e-6)
        assert not there[[n for n in range(32) if n not in mine]].any()
    return True


def test_groups_meshes_and_sequences_of_one_length(ranks: Any) -> None:
    assert all(ranks(4)(in_groups))
    assert all(ranks(4)(in_a_mesh))


def dead_neighbour(rank: int, size: int, last_words: bool) -> str:
    """Rank 1 ends, or does nothing; the others call a collective."""
    import os
    import time

    if rank == 1:
        if last_words:
            os._exit(1)
        time.sleep(600)
    cu = bounds((32,))
    q, k, v, _ = (parallel.extract_local(x, cu) for x in inputs((32,), torch.float32))
    try:
        parallel.zigzag_llama3_flash_attn_varlen_func(q, k, v, cu // size, cu, 32, 32, 1, causal=True)
    except RankError as error:
        return str(error)
    return "no error"


@alone
@pytest.mark.parametrize("dies", [True, False])
def test_a_rank_that_dies_or_hangs_ends_the_others_in_time(dies: bool) -> None:
    group = Ranks(2, timeout=10)
    try:
        group.start(dead_neighbour, dies)
        ((fine, words),) = group.outcomes([0])
        assert fine, words
        assert "a rank of the group died or did not answer" in words
        assert group.processes[1].is_alive() != dies  # a rank that hangs is not waited for
    finally:
        group.close()


@alone
def test_a_call_without_a_process_group_says_so() -> None:
    with pytest.raises(RuntimeError, match=r"init_process_group first"):
        parallel.extract_local(torch.zeros(4), [0, 4])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"cu_seqlens_q": [0, 10]}, r"cu_seqlens_q=\[0, 10\]: on 1 ranks cu_seqlens_k means \[0, 32\]"),
        ({"cu_seqlens_k": [1, 32]}, "cu_seqlens_k=.*rise from 0"),
        ({"max_seqlen_k": 31}, "max_seqlen_k=31: the longest sequence has 32 tokens"),
        ({"heads_k_stride": 4}, "heads_k_stride"),
        ({"local_k_slice": slice(0, 16)}, "local_k_slice=.*all keys"),
        ({"dropout_p": 0.1}, "dropout_p=0.1"),
        ({"window_size": (3, 3)}, "causal"),
    ],
)
def test_errors_name_the_argument(ranks: Any, change: dict[str, Any], words: str) -> None:
    group = ranks(1)
    group.start(wrong_call, change)
    ((fine, text),) = group.outcomes()
    assert not fine
    assert re.search(words, text), text


def wrong_call(rank: int, size: int, change: dict[str, Any]) -> None:
    q, k, v, _ = inputs((32,), torch.float32)
    arguments = {
        "cu_seqlens_q": [0, 32], "cu_seqlens_k": [0, 32], "max_seqlen_q": 32, "max_seqlen_k": 32,
        "heads_k_stride": 1,
    } | change  # fmt: skip
    parallel.zigzag_llama3_flash_attn_varlen_func(q, k, v, **arguments)


def inference_first(rank: int, size: int) -> float:
    """The sum of gradients through indices that were first used where no gradients are recorded."""
    bounds = [0, 40 * size]  # which no other test has
    with torch.inference_mode():
        parallel.extract_local(torch.zeros(40 * size), bounds)
    x = torch.zeros(40 * size, requires_grad=True)
    parallel.extract_local(x, bounds).sum().backward()
    assert x.grad is not None
    return float(x.grad.sum())


def test_training_goes_on_after_inference(ranks: Any) -> None:
    assert ranks(2)(inference_first) == [40.0, 40.0]


def test_the_comparison_rejects_a_rank_in_the_wrong_place() -> None:
    arrays = inputs(LENGTHS, torch.float32)
    right = whole(LENGTHS, arrays, causal=True)
    assert_near(right, right, 0, 0)
    with pytest.raises(AssertionError, match="out"):
        assert_near([right[0].roll(1, 0), *right[1:]], right, 1e-3, 1e-2)
    with pytest.raises(AssertionError, match="dk"):
        assert_near([*right[:2], right[2] * 1.1, right[3]], right, 1e-3, 1e-2)

"""What attention on a GPU hands to the driver, call after call, on a stand-in for one."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import kvlab  # noqa: E402
from kvlab.integrations import torch_autograd  # noqa: E402
from kvlab.ops import array_kinds, attention_call  # noqa: E402
from kvlab.ops.array_kinds import kinds_of, splitter  # noqa: E402
from kvlab.ops.cuda import attention as attention_cuda  # noqa: E402
from kvlab.ops.cuda import (  # noqa: E402
    attention_backward,
    attention_sm90,
    grouped_backward,
    query_gradients,
    tile_list,
)
from tests.stand_in_gpu import Launch, StandInGpu  # noqa: E402

BATCH, TOKENS, HEADS, HEADS_KV, DIM = 2, 96, 4, 2, 128


def arrays(dtype: Any = torch.bfloat16, dim: int = DIM) -> list[Any]:
    return [torch.zeros(BATCH, TOKENS, heads, dim, dtype=dtype) for heads in (HEADS, HEADS_KV, HEADS_KV)]


def flat(dtype: Any = torch.bfloat16) -> tuple[list[Any], tuple[Any, ...]]:
    cu = torch.arange(0, (BATCH + 1) * TOKENS, TOKENS, dtype=torch.int32)
    return [x.flatten(0, 1) for x in arrays(dtype)], (cu, cu.clone(), TOKENS, TOKENS)


def call_in(launch: Launch, layout: Any) -> Any:
    return np.frombuffer(launch.parameters[-1][-layout.size :], layout.dtype)[0]


def maps_in(launch: Launch, count: int = 4) -> list[int]:
    return np.frombuffer(b"".join(launch.parameters)[: 128 * count], np.uint64)[::16].tolist()


def hopper_call(launch: Launch) -> Any:
    return np.frombuffer(launch.parameters[0][512:][: attention_sm90._CALL.size], attention_sm90._CALL.dtype)[
        0
    ]


def test_calls_that_come_again_change_addresses_alone(gpu: StandInGpu) -> None:
    for number in range(3):
        q, k, v = arrays()
        out, lse = kvlab.attention(q, k, v, causal=True, return_lse=True)
        *made, run = gpu.launches[-1 if number else 0 :]
        assert [launch.name for launch in made] == ([] if number else ["make_tile_list"])
        assert len(gpu.launches) == 2 + number
        assert (run.name, run.early) == ("attend", number == 0)
        assert maps_in(run) == [x.data_ptr() for x in (q, k, v, out)]
        call = hopper_call(run)
        assert call["lse"] == lse.data_ptr()
        assert call["semaphore"] == call["list"] + tile_list.SEMAPHORE_OFFSET
        assert (call["dim"], call["right"], call["lse_batch"]) == (DIM, 0, HEADS * TOKENS)
        assert (call["out"], call["out_batch"]) == (out.data_ptr(), TOKENS * HEADS * DIM)
        assert (call["out_position"], call["out_head"]) == (HEADS * DIM, DIM)
        assert out.shape == q.shape
        assert out.is_contiguous()
        assert lse.shape == (BATCH, HEADS, TOKENS)
    lists = {int(hopper_call(launch)["list"]) for launch in gpu.launches if launch.name == "attend"}
    assert lists == {int(call_in(gpu.launches[0], tile_list._CALL)["list"])}


def test_variable_length_and_captured_calls_make_their_lists(gpu: StandInGpu) -> None:
    (q, k, v), lengths = flat()
    for _ in range(2):
        kvlab.attention_varlen(q, k, v, *lengths)
        made, run = gpu.launches[-2:]
        call = call_in(made, tile_list._CALL)
        assert (call["cu_q"], call["cu_k"]) == (lengths[0].data_ptr(), lengths[1].data_ptr())
        assert call["list"] == hopper_call(run)["list"]
        assert (made.early, run.early) == (True, True)
        assert hopper_call(run)["lse"] == 0  # not wanted
    gpu.is_capturing = True
    for _ in range(2):
        kvlab.attention_varlen(q, k, v, *lengths)
        kvlab.attention(*arrays())
        assert [launch.name for launch in gpu.launches[-4:]] == ["make_tile_list", "attend"] * 2


def test_results_are_merged_into_those_of_other_keys_by_one_kernel(gpu: StandInGpu) -> None:
    (q, k, v), lengths = flat()
    out, lse = torch.zeros(BATCH * TOKENS, 2 * HEADS, DIM), torch.zeros(2 * HEADS, BATCH * TOKENS + 8)
    into = out[:, HEADS:], lse[HEADS:, 8:]
    for _ in range(2):
        found: Any = kvlab.attention_varlen(q, k, v, *lengths, into=into)
        assert found is into
        assert [launch.name for launch in gpu.launches[-2:]] == ["make_tile_list", "attend"]
        run = gpu.launches[-1]
        assert maps_in(run, 3) == [x.data_ptr() for x in (q, k, v)]
        layout = attention_sm90._CALL
        call = np.frombuffer(run.parameters[0][384:][: layout.size], layout.dtype)[0]
        assert (call["out"], call["lse"]) == tuple(x.data_ptr() for x in into)
        assert (call["out_position"], call["out_head"]) == (2 * HEADS * DIM, DIM)
        assert (call["lse_batch"], call["lse_head"]) == (0, BATCH * TOKENS + 8)


def test_captured_calls_read_a_list_that_is_complete_with_semaphores_of_their_own(
    gpu: StandInGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tile_list, "_SEMAPHORES", 3)
    q, k, v = arrays()
    kvlab.attention(q, k, v)
    gpu.is_capturing = gpu.is_behind = True
    kvlab.attention(q, k, v)
    assert [launch.name for launch in gpu.launches] == ["make_tile_list", "attend"] * 2
    gpu.is_behind = False
    for _ in range(3):
        kvlab.attention(q, k, v)
    eager, _, *captured = [hopper_call(launch) for launch in gpu.launches if launch.name == "attend"]
    assert {int(call["list"]) for call in captured} == {int(eager["list"])}
    assert len({int(call["semaphore"]) for call in (eager, *captured)}) == 4
    assert len(gpu.launches) == 7
    kvlab.attention(q, k, v)  # no semaphore is left
    assert [launch.name for launch in gpu.launches[-2:]] == ["make_tile_list", "attend"]
    gpu.is_capturing = False
    kvlab.attention(q, k, v)
    assert int(hopper_call(gpu.launches[-1])["semaphore"]) == int(eager["semaphore"])
    assert len(gpu.launches) == 10


def test_without_memory_to_keep_a_list_every_call_makes_its_own(gpu: StandInGpu) -> None:
    q, k, v = arrays()
    gpu.is_full = True
    for _ in range(2):
        kvlab.attention(q, k, v)
        assert [launch.name for launch in gpu.launches[-2:]] == ["make_tile_list", "attend"]
    gpu.is_full = False
    for _ in range(2):
        kvlab.attention(q, k, v)
    assert [launch.name for launch in gpu.launches[-3:]] == ["make_tile_list", "attend", "attend"]


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_the_portable_kernels_get_all_addresses(
    gpu: StandInGpu, monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    monkeypatch.setattr(attention_cuda, "HOPPER", False)
    (q, k, v), lengths = flat(getattr(torch, dtype))
    out, lse = kvlab.attention_varlen(q, k, v, *lengths, return_lse=True)
    made, run = gpu.launches
    call = call_in(run, attention_cuda._CALL)
    of_list = call_in(made, tile_list._CALL)
    assert (of_list["cu_q"], of_list["cu_k"]) == tuple(x.data_ptr() for x in lengths[:2])
    assert (call["list"], call["variable"]) == (of_list["list"], 1)
    assert (call["pack"], call["positions"]) == (of_list["pack"], of_list["positions"]["value"])
    assert run.grid[0] == of_list["capacity"]
    for name, x in (("q", q), ("k", k), ("v", v), ("out", out)):
        assert call[name]["address"] == x.data_ptr()
        assert call[name]["strides"].tolist() == [0, *x.stride()[:2]]
    assert call["lse"] == lse.data_ptr()
    kvlab.attention_varlen(q, k, v, *lengths)
    assert call_in(gpu.launches[-1], attention_cuda._CALL)["lse"] == 0  # not wanted
    assert [launch.name for launch in gpu.launches] == ["make_tile_list", "attend"] * 2
    fixed = arrays(getattr(torch, dtype))
    for _ in range(2):
        kvlab.attention(*fixed)
    assert [launch.name for launch in gpu.launches[4:]] == ["make_tile_list", "attend", "attend"]
    empty = torch.zeros(0, 3, HEADS, DIM, dtype=getattr(torch, dtype))
    assert kvlab.attention(empty, empty, empty).shape == empty.shape
    assert len(gpu.launches) == 7  # a grid without blocks


@pytest.mark.parametrize("hopper", [True, False])
@pytest.mark.parametrize("variable", [True, False])
def test_gradients_are_three_launches(
    gpu: StandInGpu, monkeypatch: pytest.MonkeyPatch, hopper: bool, variable: bool
) -> None:
    monkeypatch.setattr(attention_backward, "HOPPER", hopper)
    (q, k, v), lengths = flat() if variable else (arrays(), ())
    backward = kvlab.attention_varlen_backward if variable else kvlab.attention_backward
    lse = torch.zeros((HEADS, BATCH * TOKENS) if variable else (BATCH, HEADS, TOKENS))
    for _ in range(2):
        dout, out = torch.zeros_like(q), torch.zeros_like(q)
        dq, dk, dv = backward(dout, q, k, v, out, lse, *lengths, deterministic=True)
        launches = gpu.launches[-3:]
        assert [launch.name for launch in launches] == ["preprocess", "attend_backward", "postprocess"]
        calls = [call_in(launch, attention_backward._CALL) for launch in launches]
        assert len({call.tobytes() for call in calls}) == 1
        named = {"q": q, "k": k, "v": v, "dout": dout, "out": out, "dq": dq, "dk": dk, "dv": dv}
        for name, x in named.items():
            assert calls[0][name]["address"] == x.data_ptr(), name
            assert calls[0][name]["strides"].tolist() == [0, *x.stride()][-4:-1], name
        assert calls[0]["lse"] == lse.data_ptr()
        assert calls[0]["deterministic"] == 1
        bounds = tuple(x.data_ptr() for x in lengths[:2]) if variable else (0, 0)
        assert (calls[0]["cu_q"], calls[0]["cu_k"]) == bounds
        if hopper:
            assert maps_in(launches[1]) == [x.data_ptr() for x in (q, k, v, dout)]
            assert len(launches[1].parameters) == 5


@pytest.mark.parametrize("causal", [True, False])
def test_gradients_of_long_calls_have_a_workspace_for_long_steps(gpu: StandInGpu, causal: bool) -> None:
    tokens, heads, steps = 8300, 8, attention_backward.LONG_STEPS[DIM]
    q, k, v = (torch.zeros(1, tokens, x, DIM, dtype=torch.bfloat16) for x in (heads, heads, heads))
    kvlab.attention_backward(q, q, k, v, q, torch.zeros(1, heads, tokens), causal=causal)
    made, *launches = gpu.launches
    calls = [call_in(launch, attention_backward._CALL) for launch in launches]
    assert [call["rows"] for call in calls] == [8320] * 3
    assert [launch.grid for launch in launches] == [(260, heads, 1), (132, 1, 1), (260, heads, 1)]
    of_list = call_in(made, tile_list._CALL)
    assert [of_list[name]["value"].item() for name in ("positions", "block_n")] == [
        steps.block_n,
        steps.block_m,
    ]


def test_parts_of_results_may_be_changed_in_place() -> None:
    whole = torch.zeros(4, 6)
    for axis, sizes in ((0, [1, 0, 3]), (1, [2, 4])):
        parts = splitter(sizes, axis, array_kinds.kinds_of([whole], ["whole"])[0][0])(whole)
        assert [part.shape[axis] for part in parts] == sizes
        assert parts[0].data_ptr() == whole.data_ptr()
        with torch.no_grad():
            last = splitter(sizes, axis, array_kinds.kinds_of([whole], ["whole"])[0][0])(whole)[-1]
        last.add_(torch.ones(last.shape, requires_grad=True))
        assert whole.select(axis, -1).min() > 0


def test_what_is_remembered_is_no_more_than_what_is_equal(gpu: StandInGpu) -> None:
    """A call whose values equal those of a good one, but are of another kind, is refused as ever."""
    q, k, v = arrays()
    kvlab.attention(q, k, v, causal=True, window=(1, 0), softcap=1.0, scale=1.0)
    for options, message in (
        ({"causal": 1.0}, r"causal=1\.0 must be True or False, not float"),
        ({"window": (1.0, 0)}, r"window=1\.0 must be a whole number, not float"),
        ({"softcap": True}, "softcap=True must be a number, not bool"),
        ({"sm_margin": False}, "sm_margin=False must be a whole number, not bool"),
        ({"scale": True}, "scale=True must be a number, not bool"),
    ):
        whole = {"causal": True, "window": (1, 0), "softcap": 1.0, "scale": 1.0} | options
        with pytest.raises(TypeError, match=message):
            kvlab.attention(q, k, v, **whole)
    before = len(gpu.launches)
    with pytest.raises(TypeError, match="q requires grad, and this function records nothing"):
        kvlab.attention(q.requires_grad_(), k, v, causal=True)
    with pytest.raises(TypeError, match="k is a lazy or sparse tensor"):
        kvlab.attention(q.detach(), k.to_sparse(), v)
    assert len(gpu.launches) == before


def test_other_strides_and_places_are_other_calls(gpu: StandInGpu) -> None:
    q, k, v = arrays()
    kvlab.attention(q, k, v)
    heads_first = q.transpose(1, 2).contiguous().transpose(1, 2)
    kvlab.attention(heads_first, k, v)
    assert gpu.launches[-1].parameters[0][8:128] != gpu.launches[1].parameters[0][8:128]
    memory = torch.zeros(q.numel() + 1, dtype=q.dtype)
    moved = memory[1:].view(q.shape)  # 2 bytes off: no tensor copy reads it
    kvlab.attention(moved, k, v)
    assert call_in(gpu.launches[-1], attention_cuda._CALL)["q"]["address"] == moved.data_ptr()


def test_tensors_as_before_are_not_looked_at_again(gpu: StandInGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    looks = []

    def counted(*args: Any) -> Any:
        looks.append(args)
        return kinds_of(*args)

    monkeypatch.setattr(attention_call, "kinds_of", counted)
    for _ in range(4):
        q, k, v = arrays()
        kvlab.attention(q, k, v)
        assert maps_in(gpu.launches[-1])[:3] == [x.data_ptr() for x in (q, k, v)]
    assert len(looks) == 2
    others = [
        q.transpose(1, 2).contiguous().transpose(1, 2), q.half(), q[:, :-1], q[..., :64].contiguous(),
        torch.zeros(q.numel() + 1, dtype=q.dtype)[1:].view(q.shape),
        torch._neg_view(q), np.zeros(q.shape, np.float32), q.clone().requires_grad_(), k, None,
    ]  # fmt: skip
    for x in others:
        looks.clear()
        kvlab.attention(q, k, v)
        assert not looks
        with suppress(TypeError, ValueError):
            kvlab.attention(x, k, v)
        assert len(looks) == 1
        for _ in range(2):
            kvlab.attention(q, k, v)


def test_equal_prefix_sums_are_one_tensor(gpu: StandInGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """As most callers have them; a tensor that is two arguments is none that torch compares in one go."""
    looks = []
    monkeypatch.setattr(attention_call, "kinds_of", lambda *args: looks.append(args) or kinds_of(*args))
    for length in (TOKENS, TOKENS, TOKENS, TOKENS, TOKENS // 2):
        (q, k, v), _ = flat()
        cu = torch.arange(0, BATCH * TOKENS + 1, length, dtype=torch.int32)
        kvlab.attention_varlen(q, k, v, cu, cu, TOKENS, TOKENS)
        assert call_in(gpu.launches[-2], tile_list._CALL)["cu_q"] == cu.data_ptr()
    assert len(looks) == 3
    kvlab.attention_varlen(q, k, v, cu, cu.clone(), TOKENS, TOKENS)
    assert len(looks) == 4
    x = q[None]
    for _ in range(4):
        kvlab.attention(x, x, x)
    assert len(looks) == 8


def test_gradients_are_of_what_a_hook_gives_back(gpu: StandInGpu) -> None:
    """Kept tensors may come back with other strides, and elsewhere."""
    moved: list[Any] = []

    def unpack(x: Any) -> Any:
        moved.append(x.transpose(0, 1).contiguous().transpose(0, 1) if x.dim() == 4 else x)
        return moved[-1]

    for turn in range(6):
        q, k, v = (x.requires_grad_() for x in arrays())
        hooks = torch.autograd.graph.saved_tensors_hooks(lambda x: x, unpack)
        with hooks if turn % 2 else nullcontext():
            torch_autograd.attention(q, k, v).backward(torch.zeros_like(q))
        run = gpu.launches[-2]
        assert run.name == "attend_backward"
        for name, x in zip("qkv", moved[-5:] if turn % 2 else (q, k, v), strict=False):
            found = call_in(run, attention_backward._CALL)[name]
            assert (found["address"], found["strides"].tolist()) == (x.data_ptr(), [*x.stride()][:3])


def test_calls_of_several_threads_do_not_meet(gpu: StandInGpu) -> None:
    """Each launch has the addresses of one call, forward and backward."""
    kept: list[Any] = []

    def attend() -> None:
        for _ in range(10):
            q, k, v = (x.requires_grad_() for x in arrays())
            out = torch_autograd.attention(q, k, v)
            kept.append((q, k, v, out, torch.autograd.grad(out, (q, k, v), torch.zeros_like(q))))

    with ThreadPoolExecutor(4) as pool:
        for future in [pool.submit(attend) for _ in range(4)]:
            future.result()
    forwards = {tuple(maps_in(launch)) for launch in gpu.launches if launch.name == "attend"}
    assert forwards == {tuple(x.data_ptr() for x in call[:4]) for call in kept}
    names = ("q", "k", "v", "out", "dq", "dk", "dv")
    backwards = set()
    for launch in gpu.launches:
        if launch.name == "attend_backward":
            call = call_in(launch, attention_backward._CALL)
            backwards.add(tuple(int(call[name]["address"]) for name in names))
            assert maps_in(launch)[:3] == [int(call[name]["address"]) for name in "qkv"]
    assert backwards == {tuple(x.data_ptr() for x in (*call[:4], *call[4])) for call in kept}


def test_maps_that_do_not_begin_with_an_address_are_written_whole(
    gpu: StandInGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    def encode(kind: Any, rank: int, address: int, *rest: Any) -> tuple[int, Any]:
        return 0, SimpleNamespace(opaque=[5, 6, 7, address, *[8] * 12])

    monkeypatch.setattr("cuda.bindings.driver.cuTensorMapEncodeTiled", encode)
    for _ in range(3):
        q, k, v = arrays()
        out, lse = kvlab.attention(q, k, v, return_lse=True)
        dout = torch.zeros_like(q)
        dq, *_ = kvlab.attention_backward(dout, q, k, v, out, lse)
        forward, backward = (
            next(launch for launch in gpu.launches[::-1] if launch.name == name)
            for name in ("attend", "attend_backward")
        )
        assert hopper_call(forward)["out"] == out.data_ptr()
        assert call_in(backward, attention_backward._CALL)["dq"]["address"] == dq.data_ptr()
        for launch, last in ((forward, out), (backward, dout)):
            maps = np.frombuffer(b"".join(launch.parameters)[:512], np.uint64).reshape(4, 16)
            for words, x in zip(maps.tolist(), (q, k, v, last), strict=True):
                assert words == [5, 6, 7, x.data_ptr(), *[8] * 12]


def test_gradients_of_keys_can_be_float32(gpu: StandInGpu) -> None:
    q, k, v = arrays()
    lse = torch.zeros((BATCH, HEADS, TOKENS))
    for wide in (False, True):
        dq, dk, dv = kvlab.attention_backward(q, q, k, v, q, lse, float32_dk_dv=wide)
        assert (dq.dtype, dk.dtype, dv.dtype) == (q.dtype, *2 * (torch.float32 if wide else k.dtype,))
        call = call_in(gpu.launches[-2], attention_backward._CALL)
        assert (call["float32_dk_dv"], call["deterministic"]) == (wide, 0)


def test_gradients_leave_multiprocessors_to_others(gpu: StandInGpu) -> None:
    """Of a short call, which clusters would share, too; above 128 channels by pairs of blocks."""
    for dim, tokens, expected in (
        (DIM, 4096, (132, 131, 116, 1)),
        (DIM, 1024, (2 * 64, 64, 64, 1)),
        (256, 4096, (2 * 8 * 32, 130, 116, 2)),
        (200, 512, (2 * 64, 64, 64, 2)),
    ):
        q = torch.zeros(1, tokens, 8, dim, dtype=torch.bfloat16)
        lse = torch.zeros((1, 8, tokens))
        for margin, blocks in zip((0, 1, 16, 1 << 20), expected, strict=True):
            kvlab.attention_backward(q, q, q, q, q, lse, causal=True, sm_margin=margin)
            assert gpu.launches[-2].grid == (blocks, 1, 1)


@pytest.mark.parametrize(
    ("batch", "tokens", "dim", "causal", "variable", "expected"),
    [
        (4, 2048, 128, True, False, True),
        (8, 1025, 64, True, False, True),
        (8, 1024, 64, True, False, False),
        (4, 2049, 128, True, False, False),
        (1, 2048, 128, True, False, False),
        (3, 2048, 128, True, False, False),
        (4, 2048, 256, True, False, False),
        (4, 2048, 128, False, False, False),
        (4, 2048, 128, True, True, False),
    ],
)
def test_gradients_of_many_heads_of_medium_length_are_made_in_order(
    gpu: StandInGpu, batch: int, tokens: int, dim: int, causal: bool, variable: bool, expected: bool
) -> None:
    q, kv = (torch.zeros(batch, tokens, h, dim, dtype=torch.bfloat16) for h in (32, 8))
    lse = torch.zeros(batch, 32, tokens)
    if variable:
        bounds = torch.arange(0, (batch + 1) * tokens, tokens, dtype=torch.int32)
        q, kv, lse = q.flatten(0, 1), kv.flatten(0, 1), torch.zeros(32, batch * tokens)
        sizes = bounds, bounds, tokens, tokens
        kvlab.attention_varlen_backward(q, q, kv, kv, q, lse, *sizes, causal=causal)
    else:
        kvlab.attention_backward(q, q, kv, kv, q, lse, causal=causal)
    made, *launches = gpu.launches
    assert call_in(made, tile_list._CALL)["in_order"] == expected
    assert call_in(launches[0], attention_backward._CALL)["deterministic"] == expected


@pytest.mark.parametrize(
    ("batch", "tokens", "heads", "dim", "expected"),
    [
        (1, 4096, (64, 8), 128, True),
        (2, 4096, (64, 8), 96, True),
        (2, 3072, (64, 8), 128, True),
        (4, 4096, (64, 8), 128, False),  # more tiles
        (2, 4224, (64, 8), 128, False),
        (2, 4096, (64, 8), 64, False),
        (4, 3072, (32, 8), 128, False),
    ],
)
def test_gradients_of_large_groups_of_heads_are_made_in_order_up_to_4096_keys(
    gpu: StandInGpu, batch: int, tokens: int, heads: tuple[int, int], dim: int, expected: bool
) -> None:
    q, kv = (torch.zeros(batch, tokens, h, dim, dtype=torch.bfloat16) for h in heads)
    kvlab.attention_backward(q, q, kv, kv, q, torch.zeros(batch, heads[0], tokens), causal=True)
    assert call_in(gpu.launches[0], tile_list._CALL)["in_order"] == expected


@pytest.mark.parametrize("deterministic", [False, True])
def test_gradients_of_groups_are_three_launches_behind_a_list(gpu: StandInGpu, deterministic: bool) -> None:
    rows, tokens = (300, 0, 4000), 5000
    q = [torch.zeros(n, HEADS, DIM, dtype=torch.bfloat16) for n in rows]
    k, v = (torch.zeros(tokens, HEADS_KV, DIM, dtype=torch.bfloat16) for _ in "kv")
    lengths = [
        torch.tensor(x, dtype=torch.int32) for x in ([0, 300], [0, 0], [0, 4000], [300], [0], [tokens])
    ]
    own = {
        "cu_seqlens_q_groups": lengths[:3], "prefix_lens": lengths[3:],
        "cu_seqlens_k": torch.tensor([0, tokens], dtype=torch.int32),
    }  # fmt: skip
    for _ in range(2):
        outs, douts = ([torch.zeros_like(x) for x in q] for _ in "od")
        lses = [torch.zeros(HEADS, n) for n in rows]
        dq, dk, dv = kvlab.grouped_attention_varlen_backward(
            douts, q, k, v, outs, lses, deterministic=deterministic, float32_dk_dv=True, **own
        )
        made, *launches = gpu.launches[-4:]
        names = ["preprocess", "attend_backward", "postprocess"]
        assert [launch.name for launch in (made, *launches)] == ["make_tile_list", *names]
        of_list = call_in(made, tile_list._GROUPED_CALL)
        assert (of_list["num_groups"], of_list["in_order"]) == (2, deterministic)
        assert (of_list["cu_q"], of_list["cu_k"]) == (own["cu_seqlens_k"].data_ptr(), 0)
        assert of_list["cu_rows1"] == lengths[2].data_ptr()
        assert of_list["prefix_lens1"] == lengths[5].data_ptr()
        calls = [call_in(launch, grouped_backward._CALL) for launch in launches]
        assert len({call.tobytes() for call in calls}) == 1
        call, groups = calls[0], calls[0]["groups"][:2]
        assert (call["num_groups"], call["sequences"], call["float32_dk_dv"]) == (2, 1, 1)
        assert call["list"] == of_list["list"]
        assert (call["cu_q"], call["cu_k"]) == (lengths[0].data_ptr(), own["cu_seqlens_k"].data_ptr())
        assert [x.dtype for x in (dk, dv)] == [torch.float32] * 2
        for name, given in (("dout", douts), ("out", outs)):
            assert groups[name]["address"].tolist() == [given[g].data_ptr() for g in (0, 2)]
            assert groups[name]["strides"].tolist() == [[0, HEADS * DIM, DIM]] * 2
        assert groups["lse"].tolist() == [lses[g].data_ptr() for g in (0, 2)]
        assert groups["lse_head"].tolist() == [300, 4000]
        assert groups["first_row"].tolist() == [0, 300]
        assert groups["workspace_row"].tolist() == [0, 384]
        maps = maps_in(launches[1], 34)
        mapped = [q[0], q[2], k, v, douts[0], douts[2]]
        assert [maps[i] for i in (0, 1, 16, 17, 18, 19)] == [x.data_ptr() for x in mapped]
        assert (call["dq"]["address"], call["dk"]["address"]) == (dq[0].data_ptr(), dk.data_ptr())
        assert [tuple(x.shape) for x in dq] == [tuple(x.shape) for x in q]


def test_a_sum_of_dq_is_one_workspace_and_a_launch_for_each_array_of_keys(gpu: StandInGpu) -> None:
    rows, kept = 512, [torch.tensor([n], dtype=torch.int32) for n in (0, 512, 1024, 2048)]
    cu_q, cu_k, far_cu_k = (torch.tensor([0, n], dtype=torch.int32) for n in (rows, 2 * rows, 4 * rows))
    own = query_gradients.Seen(cu_q, cu_k, kept[1:3], True, (rows, 2 * rows), "own")
    theirs = query_gradients.Seen(cu_q, far_cu_k, [kept[0], kept[3]], False, (rows, 4 * rows), "theirs")
    q, dout, out, dq = (torch.zeros(1024, 2 * HEADS, DIM, dtype=torch.bfloat16)[:, HEADS:] for _ in range(4))
    k, v, far_k, far_v = (torch.zeros(n * 1024, HEADS_KV, DIM, dtype=torch.bfloat16) for n in (1, 1, 2, 2))
    lse = torch.zeros(HEADS, 1024)
    for number in range(2):
        summed = query_gradients.begin_sum((dout, q, out, lse), None, dq, k, v, own)
        assert summed is not None
        found = [summed.add_own(), summed.add(far_k, far_v, theirs)]
        summed.finish()
        names = ["preprocess", *["make_tile_list", "attend_backward"] * 2, "postprocess"]
        *_, before, first, second, behind = launches = gpu.launches[-4 if number else -6 :]
        assert [x.name for x in launches] == [x for x in names if not number or x != "make_tile_list"]
        if not number:
            before, first, lists = launches[0], launches[2], launches[3]
            assert call_in(lists, tile_list._GROUPED_CALL)["prefix_lens1"] == kept[3].data_ptr()
        assert [(x.dtype, len(x)) for pair in found for x in pair] == [
            (torch.float32, n) for n in (1024, 1024, 2048, 2048)
        ]
        calls = [call_in(x, grouped_backward._CALL) for x in (before, first, second, behind)]
        for name in ("rows", "dq_accum", "lse_log2", "dpsum", "sequences", "num_groups"):
            assert len({str(call[name]) for call in calls}) == 1, name
        assert (calls[0]["sequences"], calls[0]["num_groups"], calls[0]["rows"]) == (1, 2, 2 * (4 + 1) * 128)
        assert calls[3]["dq"]["address"] == dq.data_ptr()
        assert calls[3]["dq"]["strides"].tolist() == [0, 2 * HEADS * DIM, DIM]
        for call in calls:
            groups = call["groups"][:2]
            assert groups["dout"]["address"].tolist() == [x.data_ptr() for x in dout.split(rows)]
            assert groups["lse"].tolist() == [x.data_ptr() for x in lse.split(rows, 1)]
            assert groups["workspace_row"].tolist() == [0, (4 + 1) * 128]
            assert groups["first_row"].tolist() == [0, rows]
        for launch, keys in ((first, (k, v)), (second, (far_k, far_v))):
            mapped = [*q.split(rows), *keys, *dout.split(rows)]
            assert [x for x in maps_in(launch, 34) if x] == [x.data_ptr() for x in mapped]
        assert before.grid == (16, HEADS, 2)


@pytest.mark.parametrize(("rows", "long_steps"), [(4096, True), (4095, False)])
def test_long_sums_of_dq_have_long_steps_of_all_keys(gpu: StandInGpu, rows: int, long_steps: bool) -> None:
    """Of few keys, too, which alone would be shared by blocks of a cluster: the workspace is one."""
    cu_q, cu_k, far_cu_k = (torch.tensor([0, n], dtype=torch.int32) for n in (rows, 2 * rows, 128))
    lens = [torch.tensor([n], dtype=torch.int32) for n in (rows, 2 * rows, 0, 128)]
    own = query_gradients.Seen(cu_q, cu_k, lens[:2], True, (rows, 2 * rows), "own")
    theirs = query_gradients.Seen(cu_q, far_cu_k, lens[2:], False, (rows, 128), "theirs")
    q, dout, out, dq = (torch.zeros(2 * rows, 8, 128, dtype=torch.bfloat16) for _ in range(4))
    k, v = (torch.zeros(2 * rows, 8, 128, dtype=torch.bfloat16) for _ in range(2))
    summed = query_gradients.begin_sum((dout, q, out, torch.zeros(8, 2 * rows)), None, dq, k, v, own)
    assert summed is not None
    summed.add_own()
    summed.add(k[:128], v[:128], theirs)
    summed.finish()
    before, _, first, _, second, behind = gpu.launches
    most = grouped_backward.FEW_GROUPS if long_steps else grouped_backward.MAX_GROUPS
    aligned = 160 if long_steps else 128
    for launch in (before, first, second, behind):
        call = call_in(launch, grouped_backward._CALLS[most])
        assert (call["num_groups"], call["rows"]) == (2, 2 * (rows // aligned + 1) * aligned)
        assert call["groups"]["workspace_row"][:2].tolist() == [0, (rows // aligned + 1) * aligned]
    mapped = [*q.split(rows), k, v, *dout.split(rows)]
    assert [x for x in maps_in(first, 2 * most + 2) if x] == [x.data_ptr() for x in mapped]
    assert second.grid[0] == (8 if long_steps else 8 * 8)  # of the tile of each KV head

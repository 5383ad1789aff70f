"""What attention over runs of keys hands to the driver, on a stand-in for a GPU."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from kvlab.ops.cuda import gathered  # noqa: E402
from kvlab.ops.cuda.gathered import Arrival, attend_runs  # noqa: E402
from kvlab.ops.cuda.run_list import ENTRY, run_table  # noqa: E402
from kvlab.parallel.layout import Shard, zigzag_llama3_plan  # noqa: E402
from tests.stand_in_gpu import StandInGpu  # noqa: E402

HEADS, HEADS_KV, DIM = 8, 2, 128
ARRIVAL = Arrival(4096, 5, 1)
MAP_BYTES = 128
NUM_MAPS = 29  # of Q 16, of K and of V by whose rows and how many a copy brings, of out


def call(lengths: tuple[int, ...], rank: int, **change: Any) -> tuple[Any, ...]:
    plan = zigzag_llama3_plan(Shard(lengths, rank, 2), True)
    total, come = sum(lengths) // 2, int(plan.takes[rank].sum())
    dtype = change.get("dtype", torch.bfloat16)
    q, k, v, far_k, far_v = (
        torch.zeros(rows, heads, change.get("dim", DIM), dtype=dtype)
        for rows, heads in ((total, HEADS), *[(total, HEADS_KV)] * 2, *[(come, HEADS_KV)] * 2)
    )
    return q, (k, v), (far_k, far_v), plan.runs, ARRIVAL, change.get("scale")


def at(address: int, nbytes: int) -> Any:
    return np.frombuffer(ctypes.string_at(address, nbytes), np.uint8)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_call_is_one_launch_with_its_list(gpu: StandInGpu, rank: int) -> None:
    arguments = call((512, 64), rank)
    out, lse = attend_runs(*arguments)
    assert (out.shape, lse.shape) == ((288, HEADS, DIM), (HEADS, 288))
    (launch,) = gpu.launches
    argument = launch.parameters[0]
    maps = np.frombuffer(argument[: NUM_MAPS * MAP_BYTES], np.uint64).reshape(NUM_MAPS, 16)
    q, (k, v), (far_k, far_v), runs, *_ = arguments
    keys = [x for x in (k, far_k, v, far_v) for _ in range(3)]
    assert maps[[0, 1, *range(16, 29)], 0].tolist() == [x.data_ptr() for x in (q, q, *keys, out)]
    kinds = maps[16:28, 1].reshape(2, 2, 3)  # by K or V, whose rows, size of a copy
    assert (np.diff(np.sort(kinds)) != 0).all()
    assert (kinds[0] == kinds[1]).all()
    fields = np.frombuffer(argument[NUM_MAPS * MAP_BYTES :][: gathered._CALL.size], gathered._CALL.dtype)[0]
    assert fields["arrived"] == ARRIVAL.counters
    assert (fields["first_arrival"], fields["heads_of_piece"]) == (5, 1)
    assert (fields["lse"], fields["lse_head"], fields["variable"]) == (lse.data_ptr(), 288, 1)
    assert (fields["pack"], fields["positions"], fields["right"]) == (4, 16, 0)
    assert (fields["out"], fields["out_position"], fields["out_head"]) == (out.data_ptr(), HEADS * DIM, DIM)
    count, semaphore, *_ = at(int(fields["list"]), 16).view(np.int32)
    assert semaphore == 0
    assert launch.grid[0] == min(count, 132)
    tiles = at(int(fields["list"]) + 16, 2 * ENTRY.itemsize * count).view(ENTRY)
    rows = np.concatenate([np.arange(t["position"], min(t["position"] + 16, t["q_length"])) + t["q_start"]
                           for t in tiles if t["head_q"] == 0])  # fmt: skip
    assert sorted(rows) == list(range(288))
    table = run_table(runs)
    assert (at(int(fields["runs"]), table.nbytes).view(np.int32).reshape(table.shape) == table).all()


def test_later_calls_copy_no_list_and_wait_for_their_own_pieces(
    gpu: StandInGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    q, own, others, runs, arrival, scale = call((256,), 1)
    attend_runs(q, own, others, runs, arrival, scale)
    monkeypatch.setattr("cuda.bindings.driver.cuMemcpyHtoDAsync", None)
    attend_runs(q, own, others, runs, Arrival(8192, (1 << 32) + 9, 2), scale)
    behind = slice(NUM_MAPS * MAP_BYTES, NUM_MAPS * MAP_BYTES + gathered._CALL.size)
    first, second = (
        np.frombuffer(one.parameters[0][behind], gathered._CALL.dtype)[0] for one in gpu.launches
    )
    assert first["list"] == second["list"]
    assert (second["arrived"], second["first_arrival"], second["heads_of_piece"]) == (8192, 9, 2)


@pytest.mark.parametrize(
    "change", [{"dtype": torch.float32}, {"dim": 20}, {"dim": 264}, {"scale": -1.0}, {"lengths": (48,)}]
)
def test_what_there_is_no_kernel_for(gpu: StandInGpu, change: dict[str, Any]) -> None:
    assert attend_runs(*call(change.pop("lengths", (256,)), 0, **change)) is None
    assert not gpu.launches

"""What attention of groups on Hopper hands to the driver, call after call, on a stand-in for a GPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import kvlab  # noqa: E402
from kvlab.ops.cuda import grouped  # noqa: E402
from tests.stand_in_gpu import Launch, StandInGpu  # noqa: E402

ROWS, TOKENS, HEADS, HEADS_KV, DIM = (300, 0, 4000), 5000, 4, 2, 128


def arrays(dim: int = DIM) -> tuple[list[Any], dict[str, Any]]:
    """Return q of each group, k and v, and the lengths."""
    whole = [torch.tensor([0, n], dtype=torch.int32) for n in (*ROWS, TOKENS)]
    shapes = [*((n, HEADS) for n in ROWS), *[(TOKENS, HEADS_KV)] * 2]
    return [torch.zeros(*shape, dim, dtype=torch.bfloat16) for shape in shapes], {
        "cu_seqlens_q_groups": whole[:3], "cu_seqlens_k": whole[3],
        "prefix_lens": [torch.tensor([n], dtype=torch.int32) for n in (300, 0, TOKENS)],
    }  # fmt: skip


def read(launch: Launch, layout: Any, maps: int) -> tuple[list[int], Any]:
    """Return the addresses of tensor maps, and the call behind them."""
    argument = launch.parameters[0]
    call = np.frombuffer(argument[128 * maps :][: layout.size], layout.dtype)[0]
    return np.frombuffer(argument[: 128 * maps], np.uint64)[::16].tolist(), call


def test_a_call_is_a_list_and_a_kernel(gpu: StandInGpu) -> None:
    (*q, k, v), own = arrays()
    for return_lse in (True, False):
        found: Any = kvlab.grouped_attention_varlen(q, k, v, return_lse=return_lse, **own)
        outs, lses = found if return_lse else (found, [])
        made, run = gpu.launches[-2:]
        assert [launch.name for launch in (made, run)] == ["make_grouped_list", "attend"]
        of_list = np.frombuffer(made.parameters[0], grouped._LIST_CALL.dtype)[0]
        assert (of_list["groups"], of_list["cu_k"]) == (2, own["cu_seqlens_k"].data_ptr())
        maps, call = read(run, grouped._CALL, 19)
        assert [maps[i] for i in (0, 1, 16, 17, 18)] == [x.data_ptr() for x in (q[0], q[2], k, v, outs[0])]
        assert call["results"]["lse"].tolist() == [lses[0].data_ptr() if return_lse else 0]
        assert call["results"]["lse_head"].tolist() == [sum(ROWS)]
        assert call["results"]["out"].tolist() == [outs[0].data_ptr()]
        assert call["results"]["out_position"].tolist() == [HEADS * DIM]
        assert call["results"]["out_head"].tolist() == [DIM]
        assert (call["list"], call["segments"], call["arrivals"]) == (of_list["list"], 0, of_list["arrivals"])
        assert [int(call[f"first_row{g}"]) for g in range(2)] == [0, 300]


@pytest.mark.parametrize("segmented", [False, True])
def test_groups_are_merged_into_arrays_of_their_own(gpu: StandInGpu, segmented: bool) -> None:
    """Of which some are parts of wider ones; a group without rows has no place."""
    (*q, k, v), own = arrays()
    if segmented:
        own |= {"segment_table": torch.zeros(1, TOKENS // 8, dtype=torch.int32), "segment_len": 8}
    wide = [torch.zeros(n, 2 * HEADS, DIM) for n in ROWS]
    outs, lses = [x[:, HEADS:] for x in wide], [torch.zeros(HEADS, n + 5)[:, 5:] for n in ROWS]
    for _ in range(2):
        found: Any = kvlab.grouped_attention_varlen(q, k, v, into=(outs, lses), **own)
        assert [*map(id, found[0]), *map(id, found[1])] == [*map(id, outs), *map(id, lses)]
        assert [launch.name for launch in gpu.launches[-2:]] == ["make_grouped_list", "attend"]
        maps, call = read(gpu.launches[-1], grouped._MERGING_CALL, 18)
        assert [maps[i] for i in (0, 1, 16, 17)] == [x.data_ptr() for x in (q[0], q[2], k, v)]
        results = call["results"][:2]
        assert results["out"].tolist() == [outs[g].data_ptr() for g in (0, 2)]
        assert results["lse"].tolist() == [lses[g].data_ptr() for g in (0, 2)]
        assert results["lse_head"].tolist() == [305, 4005]
        assert results["out_position"].tolist() == [2 * HEADS * DIM] * 2
        assert results["out_head"].tolist() == [DIM] * 2
        assert [int(call[f"first_row{g}"]) for g in range(2)] == [0, 0]
        assert call["segments"] == (own["segment_table"].data_ptr() if segmented else 0)


def test_what_the_kernel_cannot_merge_into_is_merged_behind_it(
    gpu: StandInGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    (*q, k, v), own = arrays()
    merged: list[Any] = []
    monkeypatch.setattr("kvlab.ops.grouped.merge_into", lambda *given: merged.append(given))
    outs = [torch.zeros(n * HEADS * DIM + 1)[1:].view(n, HEADS, DIM) for n in ROWS]  # off 16 bytes
    lses = [torch.zeros(HEADS, n) for n in ROWS]
    kvlab.grouped_attention_varlen(q, k, v, into=(outs, lses), **own)
    read(gpu.launches[-1], grouped._CALL, 19)
    assert [given[0][0] is out for given, out in zip(merged, outs, strict=True)] == [True] * 3
    assert [tuple(given[1][1].shape) for given in merged] == [(HEADS, n) for n in ROWS]

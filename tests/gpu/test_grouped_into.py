"""grouped_attention_varlen that merges into results over other keys, on GPUs: by its kernel, or behind it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import kvlab
from tests.compare import assert_accurate
from tests.gpu.attention_cases import DTYPES, to_numpy
from tests.gpu.test_grouped_flash_attention import arguments, on_gpu
from tests.grouped import (
    GroupedCase,
    expected_of_parts,
    in_segments,
    make_case,
    other_keys,
    scenarios,
    zigzag,
)

Results = tuple[list[torch.Tensor], list[torch.Tensor]]


def new_results(case: GroupedCase) -> tuple[Results, list[torch.Tensor]]:
    """Return outs of NaN and lses of -inf, parts of wider memory that is 7, and that memory."""
    outs, lses, memory = [], [], []
    for q in case.q_groups:
        rows, heads, dim = q.shape
        wide = torch.full((rows + 2, heads + 2, dim + 8), 7.0, device="cuda")
        wide_lse = torch.full((heads + 2, rows + 2), 7.0, device="cuda")
        outs.append(wide[1:-1, 1:-1, :dim].fill_(torch.nan))
        lses.append(wide_lse[1:-1, 1:-1].fill_(-torch.inf))
        memory += [wide, wide_lse]
    return (outs, lses), memory


def merge(parts: list[GroupedCase], into: Results, **options: Any) -> None:
    for case in parts:
        arrays, own = arguments(case)
        kvlab.grouped_attention_varlen(*arrays, into=into, **own, **options)
        assert kvlab.last_backend() == "cuda"


def assert_right(parts: list[GroupedCase], into: Results) -> None:
    expected, low = expected_of_parts(parts)
    for kind, name in enumerate(("outs", "lses")):
        whole = [
            np.concatenate(x, kind) for x in ([to_numpy(x) for x in into[kind]], expected[kind], low[kind])
        ]
        assert_accurate(*whole, name)


@pytest.fixture
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """On Hopper the kernel of attention merges, and nothing behind it."""
    if torch.cuda.get_device_capability() == (9, 0):
        monkeypatch.delattr("kvlab.ops.grouped.merge_into")


@pytest.mark.usefixtures("_alone")
@pytest.mark.parametrize(
    ("heads", "head_dim", "dtype"),
    [((32, 8), 128, "bfloat16"), ((8, 2), 64, "float16"), ((4, 4), 96, "float16"), ((8, 1), 256, "bfloat16")],
)
@pytest.mark.parametrize("name", [x for x in scenarios() if x not in ("no keys", "no sequences", "no rows")])
def test_parts_of_the_keys_one_after_the_other(
    name: str, heads: tuple[int, int], head_dim: int, dtype: str
) -> None:
    """Beside the results nothing changes."""
    case = make_case(**scenarios(3)[name], heads=heads, head_dim=head_dim, dtype=DTYPES[dtype])
    others = [x for x in (other_keys(case, seed) for seed in (1, 2)) if len(x.k)]
    parts = [*others, case]
    for implementation in ("listed", "paired"):
        into, memory = new_results(case)
        merge(parts, into, implementation=implementation)
        assert_right(parts, into)
        for x in (*into[0], *into[1]):
            x.fill_(7)
        assert all(bool((x == 7).all()) for x in memory)


@pytest.mark.usefixtures("_alone")
@pytest.mark.parametrize("implementation", ["listed", "paired"])
def test_tiles_split_over_keys(implementation: str) -> None:
    """The same bits fifty times, whichever part of a tile comes last and merges."""
    case = zigzag(8192, 8, 3, heads=(4, 1), head_dim=128, seed=5)
    parts = [next(x for x in (other_keys(case, seed) for seed in range(20)) if len(x.k)), case]
    first, _ = new_results(case)
    merge(parts, first, implementation=implementation)
    assert_right(parts, first)
    for _ in range(50):
        again, _ = new_results(case)
        merge(parts, again, implementation=implementation)
        for one, other in zip((*first[0], *first[1]), (*again[0], *again[1]), strict=True):
            assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("head_dim", "options"), [(128, {"implementation": "separate"}), (36, {}), (128, {"backend": "numba"})]
)
def test_groups_that_are_merged_behind_attention(head_dim: int, options: dict[str, Any]) -> None:
    case = make_case(**scenarios(2)["unrelated prefixes"], heads=(8, 2), head_dim=head_dim)
    parts, (into, _) = [other_keys(case, 1), case], new_results(case)
    for part in parts:
        arrays, own = arguments(part)
        kvlab.grouped_attention_varlen(*arrays, into=into, **own, **options)
    assert_right(parts, into)


@pytest.mark.usefixtures("_alone")
def test_keys_in_segments() -> None:
    case = make_case(**scenarios(3)["thirty-two sequences"], heads=(8, 2), head_dim=128)
    k, v, table = (on_gpu(x) for x in in_segments(case, 16))
    (q_groups, *_), own = arguments(case)
    into, _ = new_results(case)
    for _ in range(2):
        kvlab.grouped_attention_varlen(q_groups, k, v, segment_table=table, segment_len=16, into=into, **own)
    assert_right([case, case], into)


@pytest.mark.usefixtures("_alone")
def test_in_a_graph() -> None:
    case = zigzag(4096, 4, 2, heads=(8, 2), head_dim=128)
    arrays, own = arguments(case)
    expected, _ = new_results(case)
    merge([case, case], expected)
    into, _ = new_results(case)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kvlab.grouped_attention_varlen(*arrays, into=into, **own)
    for _ in range(2):
        graph.replay()
    assert all(map(torch.equal, (*expected[0], *expected[1]), (*into[0], *into[1])))


def test_a_part_that_is_forgotten_would_be_noticed() -> None:
    case = make_case([[200, 9], [20, 90]], [[300, 11], [600, 250]], [640, 400], head_dim=128, seed=3)
    parts = [other_keys(case, 1), case]
    for wrong in (parts[:1], parts[1:], [*parts, case]):
        into, _ = new_results(case)
        merge(wrong, into)
        with pytest.raises(AssertionError):
            assert_right(parts, into)

"""Lists of tiles of groups that the device makes against those of the reference."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from kvlab.ops import grouped as operation
from kvlab.ops.cuda import grouped as grouped_cuda
from kvlab.ops.cuda import tile_list as tile_list_cuda
from kvlab.ops.cuda.attention_sm90 import SHAPES
from kvlab.ops.cuda.grouped import LAST_PARTS, LAST_TILES, SPLIT_DIM
from kvlab.ops.cuda.tile_list import HEAD_BYTES, ROWS, ListBuilder, Tiling, heads_of_tile
from kvlab.reference.grouped_tiles import ENTRY, KEYS_PART, grouped_tiles, tiles_of_backward, tiles_of_keys
from kvlab.reference.tile_list import section_of

FIELDS = [name for name in ENTRY.names or () if name != "slot"]


def made_list(rows: Any, lens: Any, keys: Any, heads: tuple[int, int], dim: int, **options: Any) -> Any:
    """Return the tiles that the device makes, and the call."""
    bounds = [torch.from_numpy(np.cumsum([0, *x]).astype(np.int32)).cuda() for x in rows]
    q = [torch.empty(int(x.sum()), heads[0], dim, device="cuda", dtype=torch.float16) for x in rows]
    k = torch.empty(int(keys.sum()), heads[1], dim, device="cuda", dtype=torch.float16)
    arrays = operation.GroupedArrays(
        q, k, k, bounds, [torch.from_numpy(x.astype(np.int32)).cuda() for x in lens],
        torch.from_numpy(np.cumsum([0, *keys]).astype(np.int32)).cuda(),
    )  # fmt: skip
    implementation = "paired" if options["paired"] else "listed"
    call, addresses = operation.call_of(
        "grouped_attention", arrays, options["causal"], None, implementation, (None, None), 0, None
    )
    listed = grouped_cuda.ListedCall(call, list(range(len(rows))))
    memory, _ = listed._launch_list(addresses, torch.cuda.current_stream().cuda_stream)
    stored = memory.cpu().numpy()
    count, semaphore = stored[:8].view(np.int32)
    assert semaphore == 0
    entries = SHAPES[dim][1]
    size = ENTRY.itemsize * entries * count
    return stored[HEAD_BYTES : HEAD_BYTES + size].view(ENTRY).reshape(count, entries), listed


@pytest.mark.parametrize("small_l2", [False, True])
@pytest.mark.parametrize("seed", range(24))
def test_lists_of_the_device_are_those_of_the_reference(
    seed: int, small_l2: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where K and V of a pair are larger than L2, too."""
    if small_l2:
        for module in (grouped_cuda, tile_list_cuda):
            monkeypatch.setattr(module, "SECTION_BYTES", 1)
    rng = np.random.default_rng(seed)
    number, groups = int(rng.choice([1, 1, 2, 7, 300, 4096])), int(rng.choice([1, 2, 2, 3, 16]))
    keys = rng.integers(1, 2 + 400_000 // number // 16, number)
    lens = np.stack([rng.integers(0, keys + 1) for _ in range(groups)])
    rows = np.stack([rng.integers(0, 1 + 100_000 // number // groups // 16, number) for _ in range(groups)])
    rows[:, 0] += 1
    group = int(rng.choice([1, 4, 8, 12]))
    heads_kv = int(rng.choice([1, 1, 2, 8]))
    dim = int(rng.choice([64, 96, 128, 256]))
    block_n, entries, _ = SHAPES[dim]
    pack = heads_of_tile(group)
    options = {"causal": bool(rng.integers(4)), "paired": bool(rng.integers(2))}
    tiles, listed = made_list(rows, lens, keys, (heads_kv * group, heads_kv), dim, **options)
    expected = grouped_tiles(
        rows, lens, keys, heads_kv, group, pack=pack, positions=ROWS // pack, entries=entries,
        block_n=block_n, blocks=listed.split_blocks, last_tiles=listed.last_tiles, sections=listed.sections,
        longest=-(-int(keys.sum()) // block_n), **options,
    )  # fmt: skip
    assert listed.last_tiles == (
        LAST_TILES if small_l2 and dim <= SPLIT_DIM and not listed.split_blocks else 0
    )
    no_rows = (tiles["q_length"] == 0).all(1)
    assert (tiles["loaded_keys"][no_rows] == 0).all()
    if listed.last_tiles:
        whole = (expected["part"][:, 0] == 0).sum()
        places = listed.sections * listed.last_tiles * (LAST_PARTS - 1)
        assert len(tiles) == whole + places <= listed.capacity
        tiles = tiles[~no_rows]
    assert len(tiles) == len(expected) <= listed.capacity
    assert _sorted(tiles) == _sorted(expected)
    slots = tiles["slot"][:, 0] + tiles["part"][:, 0]
    split = tiles["num_parts"][:, 0] > 1
    max_parts = 2 * listed.split_blocks + listed.sections * listed.last_tiles * LAST_PARTS
    assert len(set(slots[split].tolist())) == split.sum() <= max_parts
    assert slots[split].max(initial=0) < max(1, max_parts)
    section = section_of(tiles[:, 0], number * heads_kv, heads_kv, listed.sections)
    assert (np.diff(section) >= 0).all()
    lengths = tiles_of_keys(tiles, block_n)
    for one in np.unique(section) if lengths.max() < 1000 else ():
        assert (np.diff(lengths[section == one]) <= 0).all()


def _sorted(tiles: Any) -> list[Any]:
    return sorted(map(tuple, tiles[FIELDS].reshape(len(tiles), -1).tolist()))


def test_a_wrong_list_would_be_noticed() -> None:
    rows, lens, keys = np.array([[300], [200]]), np.array([[300], [9000]]), np.array([9000])
    tiles, _ = made_list(rows, lens, keys, (4, 1), 128, causal=True, paired=False)
    shape = {"pack": 4, "positions": 16, "entries": 2, "block_n": 128, "causal": True}
    same = {"paired": False, "blocks": torch.cuda.get_device_properties(0).multi_processor_count}
    assert _sorted(tiles) == _sorted(grouped_tiles(rows, lens, keys, 1, 4, **shape, **same))
    for change in ({"paired": True}, {"blocks": 0}):
        assert _sorted(tiles) != _sorted(grouped_tiles(rows, lens, keys, 1, 4, **shape, **same | change))
    assert _sorted(tiles) != _sorted(grouped_tiles(rows, lens - 1, keys, 1, 4, **shape, **same))


@pytest.mark.parametrize("seed", range(12))
def test_lists_of_the_backward_are_those_of_the_reference(seed: int) -> None:
    rng = np.random.default_rng(seed)
    number, groups = int(rng.choice([1, 2, 7, 300])), int(rng.choice([1, 2, 3, 16]))
    keys = rng.integers(1, 2 + 100_000 // number // 16, number)
    lens = np.stack([rng.integers(0, keys + 1) for _ in range(groups)])
    rows = np.stack([rng.integers(0, 1 + 50_000 // number // groups // 16, number) for _ in range(groups)])
    heads_kv, causal, in_order = int(rng.choice([1, 2, 8])), bool(rng.integers(4)), bool(rng.integers(2))
    max_rows = int((-(-rows // 64)).sum(0).max()) * 64
    sections, far = int(rng.integers(1, 1 + number * heads_kv)), 1 << 30
    builder = ListBuilder(
        Tiling(1, 128, 64), (number, int(keys.max()), max_rows), int(keys.sum()), heads_kv, 1,
        (0 if causal else far, far), 0, True, 0, in_order, sections, groups,
    )  # fmt: skip
    memory = torch.full((builder.nbytes,), 255, device="cuda", dtype=torch.uint8)
    cu_k, *cu_q = (torch.from_numpy(np.cumsum([0, *x]).astype(np.int32)).cuda() for x in (keys, *rows))
    prefixes = [torch.from_numpy(x.astype(np.int32)).cuda() for x in lens]
    bounds = [x.data_ptr() for x in (*cu_q, *prefixes)]
    builder.build(memory.data_ptr(), (cu_k.data_ptr(), 0, *bounds), torch.cuda.current_stream().cuda_stream)
    stored = memory.cpu().numpy()
    count, semaphore = stored[:8].view(np.int32)
    expected = tiles_of_backward(
        rows, lens, keys, heads_kv, positions=128, block_n=64, sections=sections, causal=causal,
        in_order=in_order,
    )  # fmt: skip
    assert (count, semaphore) == (len(expected), 0)
    size = KEYS_PART.itemsize * groups * count
    tiles = stored[HEAD_BYTES : HEAD_BYTES + size].view(KEYS_PART).reshape(count, groups)
    assert sorted(x.tobytes() for x in tiles) == sorted(x.tobytes() for x in expected)
    if not in_order:
        steps = [x["num_tiles_of_keys"].sum(1) for x in (tiles, expected)]
        assert (steps[0] == steps[1]).all()

"""Lists of tiles that the device makes against those of the reference."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvlab.ops.cuda.tile_list import HEAD_BYTES, ListBuilder, Tiling, heads_of_tile
from kvlab.reference.tile_list import TILE, counter_of, section_of, tile_list


@pytest.mark.parametrize("seed", range(12))
def test_lists_of_the_device_are_those_of_the_reference(seed: int) -> None:
    rng = np.random.default_rng(seed)
    number = int(rng.choice([1, 2, 7, 300, 4096]))
    variable = bool(rng.integers(2))
    lengths = [rng.integers(0, 1 + 2_000_000 // number // 16, number) for _ in range(2)]
    if not variable:
        lengths = [np.full(number, x.max()) for x in lengths]
    heads_kv, group = int(rng.integers(1, 9)), int(rng.choice([1, 2, 3, 8, 12]))
    pack = heads_of_tile(group)
    tiling = Tiling(pack, 64 // pack * int(rng.integers(2, 5)), int(rng.choice([64, 80, 112, 128])))
    window = tuple(int(x) for x in rng.choice([0, 33, 5000, 1 << 30], 2))
    longest = [int(x.max()) for x in lengths]
    total = int(lengths[0].sum()) if variable else longest[0]
    bytes_of_keys = 4 * 128 * heads_kv * int(lengths[1].sum())
    in_order = bool(rng.integers(2))
    builder = ListBuilder(
        tiling, (number, *longest), total, heads_kv, group, window, bytes_of_keys, variable, 0, in_order
    )
    memory = torch.full((builder.nbytes,), 255, device="cuda", dtype=torch.uint8)
    bounds = [torch.from_numpy(np.cumsum([0, *x]).astype(np.int32)).cuda() for x in lengths]
    addresses = [x.data_ptr() for x in bounds] if variable else []
    builder.build(memory.data_ptr(), addresses, torch.cuda.current_stream().cuda_stream)
    stored = memory.cpu().numpy()
    count, semaphore = stored[:8].view(np.int32)
    pairs = number * heads_kv
    sections = builder.sections
    assert 1 <= sections <= pairs
    expected = tile_list(
        *lengths, heads_kv, group, **tiling._asdict(), sections=sections, window=window, variable=variable,
        in_order=in_order,
    )  # fmt: skip
    assert (count, semaphore) == (len(expected), 0)
    assert count == builder.capacity or variable
    tiles = stored[HEAD_BYTES : HEAD_BYTES + TILE.itemsize * count].view(TILE)
    most = -(-longest[1] // tiling.block_n)
    sections_of = [section_of(x, pairs, heads_kv, sections) for x in (tiles, expected)]
    assert (sections_of[0] == sections_of[1]).all()
    if in_order:
        assert (tiles["position"] == expected["position"]).all()
    else:
        counters = [counter_of(x["num_tiles_of_keys"], most) for x in (tiles, expected)]
        assert (counters[0] == counters[1]).all()
    assert (np.sort(tiles, order=TILE.names) == np.sort(expected, order=TILE.names)).all()

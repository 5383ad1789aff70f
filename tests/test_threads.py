"""Parallel kernels where Numba's threads would end the process: after a fork, and from several threads."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from kvlab.threads import run_parallel

FORKED = """
import multiprocessing, numpy, kvlab
from kvlab.threads import run_parallel

def work(x):
    packed, items, done = kvlab.pack(x, 3), list(range(100)), []
    run_parallel(lambda: [done.append(items.pop()) for _ in range(50)])  # the caller and one helper
    return [packed, kvlab.unpack(packed, 3, x.size)]

if __name__ == "__main__":
    x = numpy.random.default_rng(0).integers(0, 8, 300_000).astype("u1")
    expected = work(x)  # from here on there are threads
    with multiprocessing.get_context("fork").Pool(2) as pool:
        for found in pool.map_async(work, [x, x, x]).get(timeout=60):
            assert all(map(numpy.array_equal, found, expected))
    assert all(map(numpy.array_equal, work(x), expected))
"""

LOADED = """
import numpy, torch, kvlab

class Packed(torch.utils.data.Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        return kvlab.pack(torch.full((300_000,), index, dtype=torch.uint8), 3)

if __name__ == "__main__":
    data = Packed()
    expected = [data[i] for i in range(4)]
    loader = torch.utils.data.DataLoader(
        data, batch_size=None, num_workers=2, timeout=60, multiprocessing_context="fork"
    )
    for _ in range(2):
        assert all(map(torch.equal, loader, expected))
"""

FROM_THREADS = """
import numba, numpy, kvlab
from concurrent.futures import ThreadPoolExecutor

x = numpy.random.default_rng(0).integers(0, 8, 300_000).astype("u1")
expected = kvlab.pack(x, 3)

def work(_):
    packed = kvlab.pack(x, 3)
    return numpy.array_equal(packed, expected) and numpy.array_equal(kvlab.unpack(packed, 3, x.size), x)

with ThreadPoolExecutor(4) as pool:
    assert all(pool.map(work, range(200)))
print(numba.threading_layer())
"""


def run(program: str, **environment: str) -> str:
    """Run a program with two threads in a process of its own; return what it prints."""
    found = subprocess.run(
        [sys.executable, "-c", program], env=os.environ | {"NUMBA_NUM_THREADS": "2"} | environment,
        capture_output=True, text=True, timeout=150, check=False,
    )  # fmt: skip
    assert found.returncode == 0, found.stderr[-3000:]
    return found.stdout.strip()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("layer", ["omp", "workqueue"])
def test_children_of_a_fork_pool_give_the_same_bits(layer: str) -> None:
    run(FORKED, NUMBA_THREADING_LAYER=layer)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_workers_of_a_data_loader_give_the_same_bits() -> None:
    pytest.importorskip("torch")
    run(LOADED)


@pytest.mark.parametrize("layer", ["default", "workqueue"])
def test_several_threads_call_parallel_kernels(layer: str) -> None:
    found = run(FROM_THREADS, NUMBA_THREADING_LAYER=layer)
    assert layer in ("default", found)


@pytest.mark.parametrize("done", [True, False])
def test_helpers_are_waited_for_unless_all_items_are_done(done: bool) -> None:
    import numba

    if numba.get_num_threads() < 2:
        pytest.skip("one thread: there are no helpers")
    begun, go_on, ended = threading.Event(), threading.Event(), threading.Event()

    def work() -> bool:
        if threading.current_thread() is threading.main_thread():
            assert begun.wait(60)
            if not done:
                go_on.set()
            return done
        begun.set()
        go_on.wait(60)
        ended.set()
        return done

    run_parallel(work)
    assert ended.is_set() != done
    go_on.set()
    assert ended.wait(60)


@pytest.mark.parametrize("helpers", [0, 1, 3])
def test_items_of_a_product_are_all_done(helpers: int) -> None:
    from kvlab.numba_kernels.cpu.decoder import multiply

    tiles, blocks = 40, 2
    packed = np.full(tiles * blocks * 512, np.float16(1).view(np.uint16))
    x, y = np.ones(blocks * 64, np.float32), np.zeros((1, tiles * 16), np.float32)
    counter = np.zeros(2, np.int64)
    with ThreadPoolExecutor(max(helpers, 1)) as pool:
        others = [pool.submit(multiply, counter, packed, tiles, blocks, 0, x, 1, y) for _ in range(helpers)]
        mine = multiply(counter, packed, tiles, blocks, 0, x, 1, y)
        results = [mine, *(other.result() for other in others)]
    assert any(results)
    assert counter[1] == tiles
    np.testing.assert_array_equal(y, 64)

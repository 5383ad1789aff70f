"""Kernels that Numba keeps from process to process: the same bits as fresh ones, and stale after any edit."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from kvlab.numba_kernels.cpu import cache as cpu_cache
from kvlab.numba_kernels.cpu import codec as cpu_codec
from kvlab.numba_kernels.cpu import packed as cpu_packed
from numba.core.caching import IndexDataCacheFile

ROOT = Path(__file__).resolve().parents[2]

SCRIPT = """
import hashlib, json
import numpy as np
from kvlab.lab.benchmark.decode import make_pages
from kvlab.numba_kernels.cpu.packed import attend_pages
from kvlab.ops.packed import packed_attention

rng = np.random.default_rng(3)
pages = make_pages(rng, (2, 3, 4, 8), 512)
digests = []
for positions, softcap in ((1, 0.0), (3, 0.0), (2, 30.0)):
    q = 4 * rng.standard_normal((1, positions, 32, 128), np.float32)
    result = packed_attention(q, pages, softcap=softcap, keep_scores=1)
    digests.append([hashlib.sha256(np.ascontiguousarray(x).tobytes()).hexdigest() for x in result])
hits = sum(attend_pages.stats.cache_hits.values())
print(json.dumps({"digests": digests, "loaded": hits > 0}))
"""


@pytest.mark.slow
def test_a_process_that_loads_kernels_gives_the_bits_of_one_that_compiles(tmp_path: Path) -> None:
    environment = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    compiled, loaded = (
        json.loads(
            subprocess.run(
                [sys.executable, "-c", SCRIPT], env=environment, check=True, capture_output=True, text=True
            ).stdout
        )
        for _ in range(2)
    )
    assert (compiled["loaded"], loaded["loaded"]) == (False, True)
    assert compiled["digests"] == loaded["digests"]
    assert len({digest for call in compiled["digests"] for digest in call}) == 9


def test_an_edit_of_any_file_that_a_kernel_is_made_of_makes_it_stale(tmp_path: Path) -> None:
    folder = Path(cpu_cache.__file__).parent
    for path in folder.glob("*.py"):
        shutil.copy(path, tmp_path)
    kernel = tmp_path / "packed.py"
    before = cpu_cache.stamp_of(kernel)
    assert before == cpu_cache.stamp_of(folder / "packed.py")
    for name in ("packed.py", "fragments.py", "simd.py"):
        text = (tmp_path / name).read_text()
        (tmp_path / name).write_text(text + "\n")
        assert cpu_cache.stamp_of(kernel) != before, name
        (tmp_path / name).write_text(text)
    (tmp_path / "codec.py").write_text("")  # nothing of it is in that kernel
    assert cpu_cache.stamp_of(kernel) == before


def test_kernels_are_kept_under_that_stamp() -> None:
    parallel: Any = cpu_codec.quantize_rows
    for kernel, name in ((cpu_packed.attend_pages, "packed"), (parallel.__wrapped__, "codec")):
        locator = kernel._cache._impl.locator
        path = Path(cpu_cache.__file__).with_name(f"{name}.py")
        assert locator.get_source_stamp() == cpu_cache.stamp_of(path)
    assert cpu_cache.KernelLocator.from_function(stranger, __file__) is None


@pytest.mark.parametrize("name", ["kvlab.no_such_module", "kvlab.errors"])
def test_an_index_that_names_what_is_no_more_is_empty(tmp_path: Path, name: str) -> None:
    """Of a kernel's; one that is none of kvlab's is an error as it was."""
    for stamp, raises in ((b"stamp", False), ((1.0, 2), True)):
        index = IndexDataCacheFile(str(tmp_path), "kernel", stamp)
        version = pickle.dumps(index._version, protocol=-1)
        Path(index._index_path).write_bytes(version + f"c{name}\nFrames\n.".encode())
        if raises:
            with pytest.raises((ImportError, AttributeError)):
                index.load("float32")
            continue
        assert index.load("float32") is None
        index.save("float32", "code")
        assert index.load("float32") == "code"


def stranger() -> None:
    """A function outside the folder of kernels."""

"""Building CUDA sources without a GPU: what decides the bytes, what is refused."""

from __future__ import annotations

import ast
import multiprocessing
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvlab.errors import BuildError, MissingExtraError
from kvlab.jit import build as build_module
from kvlab.jit import nvrtc
from kvlab.jit.build import Built, build, content_key, kernel_root
from kvlab.jit.cubin import read_resources

SOURCE = """#include "include/scale.cuh"
extern "C" __global__ void fill(float* out, int count) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < count) out[i] = scaled(VALUE);
}
"""
HEADER = """#pragma once
#include <cuda_fp16.h>
#include <cuda_bf16.h>
#include <cuda_fp8.h>
__device__ float scaled(float x) { return 2.0f * __half2float(__float2half(x)); }
"""
MACROS = {"VALUE": 7}
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["tests.test_build", "cuda.core"])  # import once, fork 32 times


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of sources, with an empty cache of its own."""
    monkeypatch.setenv("KVLAB_CACHE_DIR", str(tmp_path / "cache"))
    return _write_sources(tmp_path / "sources")


def _write_sources(folder: Path) -> Path:
    (folder / "include").mkdir(parents=True)
    (folder / "fill.cu").write_text(SOURCE)
    (folder / "include" / "scale.cuh").write_text(HEADER)
    return folder


def _forbid_compiling(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object) -> bytes:
        raise AssertionError("compiled although it is in the cache")

    monkeypatch.setattr(build_module, "compile_cubin", never)


# ---- what comes out


@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_89", "sm_90", "sm_90a", "sm_100a", "sm_120a"])
def test_builds_an_image_with_the_kernel_for_every_architecture(root: Path, arch: str) -> None:
    built = build("fill", MACROS, arch, root=root)
    assert read_resources(built.cubin)["fill"].parameter_bytes == (8, 4)
    assert (built.name, built.macros, built.arch) == ("fill", (("VALUE", "7"),), arch)
    assert built.key == content_key("fill", MACROS, arch, root=root)


def test_a_source_without_macros_builds(root: Path) -> None:
    (root / "fill.cu").write_text(SOURCE.replace("VALUE", "1"))
    assert "fill" in read_resources(build("fill", {}, "sm_90a", root=root).cubin)


def test_the_second_build_comes_from_the_cache(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = build("fill", MACROS, "sm_90a", root=root)
    _forbid_compiling(monkeypatch)
    assert build("fill", MACROS, "sm_90a", root=root) == first


def test_bytes_depend_on_no_path_and_no_process(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = build("fill", MACROS, "sm_90a", root=root)
    monkeypatch.setenv("KVLAB_CACHE_DIR", str(tmp_path / "another_cache"))
    elsewhere = _write_sources(tmp_path / "a" / "longer" / "way")
    assert build("fill", MACROS, "sm_90a", root=elsewhere) == first


def _build_at(start: float, root: Path, results: multiprocessing.Queue[Built]) -> None:
    time.sleep(max(0.0, start - time.time()))
    results.put(build("fill", MACROS, "sm_90a", root=root))


def test_32_cold_processes_get_the_same_bytes(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results = PROCESSES.Queue()
    arguments = (time.time() + 3, root, results)
    workers = [PROCESSES.Process(target=_build_at, args=arguments) for _ in range(32)]
    for worker in workers:
        worker.start()
    built = [results.get(timeout=120) for _ in workers]
    for worker in workers:
        worker.join(timeout=60)
    assert [worker.exitcode for worker in workers] == [0] * 32
    _forbid_compiling(monkeypatch)
    assert set(built) == {build("fill", MACROS, "sm_90a", root=root)}


# ---- what decides the bytes


def test_key_changes_with_all_that_decides_the_bytes(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = [content_key("fill", MACROS, "sm_90a", root=root)]

    def changed(macros: dict[str, int | str] | None = None, arch: str = "sm_90a") -> None:
        keys.append(content_key("fill", MACROS if macros is None else macros, arch, root=root))
        assert len(set(keys)) == len(keys)

    changed({"VALUE": 8})
    changed({"VALUES": 7})
    changed({"MORE": 1, "VALUE": 7})
    changed({"MORE": "1VALUE=7"})
    changed({"VALUE": "7MORE=1"})
    changed(arch="sm_90")
    (root / "include" / "scale.cuh").write_text(HEADER + "\n")
    changed()
    (root / "include" / "scale.cuh").write_text(f'#include "include/another.cuh"\n{HEADER}')
    changed()
    (root / "include" / "another.cuh").write_text("")
    changed()
    (root / "include" / "another.cuh").write_text('#include "include/scale.cuh"\n')
    changed()
    (root / "fill.cu").write_text(SOURCE + "\n")
    changed()
    monkeypatch.setattr(build_module, "compiler", lambda: "another compiler")
    changed()


def test_key_depends_on_nothing_else(root: Path) -> None:
    key = content_key("fill", {"VALUE": 7, "MORE": True}, "sm_90a", root=root)
    (root / "unrelated.cu").write_text("")
    (root / "include" / "notes.txt").write_text("")
    (root / "include" / "unrelated.cuh").write_text("")
    assert content_key("fill", {"MORE": "1", "VALUE": "7"}, "sm_90a", root=root) == key
    assert content_key("fill", {"VALUE": np.int64(7), "MORE": 1}, "sm_90a", root=root) == key


def test_an_edited_header_is_compiled_again(root: Path) -> None:
    before = build("fill", MACROS, "sm_90a", root=root)
    (root / "include" / "scale.cuh").write_text(HEADER.replace("2.0f", "3.0f"))
    after = build("fill", MACROS, "sm_90a", root=root)
    assert after.cubin != before.cubin


# ---- what is refused


@pytest.mark.parametrize(
    ("macros", "words"),
    [
        ({"T": 256}, "'T' is no macro name"),
        ({"": 1}, "'' is no macro name"),
        ({"2D": 1}, "'2D' is no macro name"),
        ({"HEAD DIM": 1}, "'HEAD DIM' is no macro name"),
        ({"AB\n": 1}, "is no macro name"),
        ({3: 1}, "3 is no macro name"),
        ({"VALUE": 1.5}, r"macros\['VALUE'\]=1.5 is a float; int and str are supported"),
        ({"VALUE": None}, r"macros\['VALUE'\]=None is a NoneType"),
        ({"VALUE": [1]}, "is a list"),
        ({"VALUE": ""}, "is empty"),
        ({"VALUE": "1\n2"}, "cannot stand on one line"),
    ],
)
def test_malformed_macros_are_value_errors(root: Path, macros: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        build("fill", macros, "sm_90a", root=root)


@pytest.mark.parametrize("arch", ["sm_70", "sm_75", "sm_999", "compute_90", "90a", "sm_90b", "", "sm_90a\n"])
def test_unknown_architectures_are_value_errors_that_list_the_known(root: Path, arch: str) -> None:
    with pytest.raises(
        ValueError, match=r"arch=.* not supported by this NVRTC; supported are sm_80,.*sm_90a"
    ):
        build("fill", MACROS, arch, root=root)


def test_an_unknown_source_is_a_value_error_that_lists_the_known(root: Path) -> None:
    with pytest.raises(ValueError, match=r"name='full'.*there are: fill"):
        build("full", MACROS, "sm_90a", root=root)


def test_an_error_in_a_source_shows_the_compilers_log(root: Path) -> None:
    (root / "fill.cu").write_text("\n\n" + SOURCE.replace("VALUE", "VALUE + missing_name"))
    with pytest.raises(BuildError) as caught:
        build("fill", MACROS, "sm_90a", root=root)
    assert 'fill.cu(6): error: identifier "missing_name" is undefined' in str(caught.value)
    assert f"{root / 'fill.cu'} for sm_90a -DVALUE=7" in str(caught.value)


def test_an_error_in_a_header_names_the_header_and_line(root: Path) -> None:
    (root / "include" / "scale.cuh").write_text(HEADER + "int broken(;\n")
    with pytest.raises(BuildError, match=r"scale\.cuh\(6\): error"):
        build("fill", MACROS, "sm_90a", root=root)


def test_a_failed_build_is_not_remembered(root: Path) -> None:
    (root / "fill.cu").write_text(SOURCE.replace("scaled", "scald"))
    for _ in range(2):
        with pytest.raises(BuildError):
            build("fill", MACROS, "sm_90a", root=root)
    (root / "fill.cu").write_text(SOURCE)
    assert build("fill", MACROS, "sm_90a", root=root).cubin


@pytest.fixture
def fresh_compiler() -> Any:
    """Forget what was found of the compiler, before the test and after it."""
    found = (nvrtc._nvrtc, nvrtc._cuda_include, nvrtc.compiler, nvrtc.check_arch)
    for function in found:
        function.cache_clear()
    yield
    for function in found:
        function.cache_clear()


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("package", ["cuda.bindings", "cuda.core", "cuda.pathfinder"])
def test_a_missing_package_is_one_line_that_says_what_to_install(
    root: Path, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingExtraError, match=r"^kvlab\.jit\.build needs .* pip install 'kvlab\[cu13\]'$"):
        build("fill", MACROS, "sm_90a", root=root)


@pytest.mark.usefixtures("fresh_compiler")
def test_a_missing_compiler_library_is_one_line(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from cuda.bindings import nvrtc as bindings
    from cuda.pathfinder import DynamicLibNotFoundError

    def missing() -> None:
        raise DynamicLibNotFoundError("libnvrtc.so\nwas sought in\nmany places")

    monkeypatch.setattr(bindings, "nvrtcVersion", missing)
    with pytest.raises(MissingExtraError, match=r"^kvlab\.jit\.build needs the library NVRTC.*pip install "):
        build("fill", MACROS, "sm_90a", root=root)


@pytest.mark.usefixtures("fresh_compiler")
def test_missing_cuda_headers_are_one_line(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from cuda import pathfinder

    monkeypatch.setattr(pathfinder, "find_nvidia_header_directory", lambda name: None)
    with pytest.raises(MissingExtraError, match=r"^kvlab\.jit\.build needs cuda_fp16\.h.*pip install .*$"):
        build("fill", MACROS, "sm_90a", root=root)


def test_a_folder_that_cannot_be_written_costs_a_warning_and_no_more(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored = build("fill", MACROS, "sm_90a", root=root)
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("KVLAB_CACHE_DIR", str(tmp_path / "file"))
    with pytest.warns(RuntimeWarning, match="Set KVLAB_CACHE_DIR"):
        assert build("fill", MACROS, "sm_90a", root=root) == stored


# ---- where the sources are


def test_kernel_root_is_the_folder_of_kvlabs_sources() -> None:
    package = ast.parse((kernel_root() / "__init__.py").read_text())
    assert "kvlab.jit.build" in (ast.get_docstring(package) or "")


def test_importing_the_module_loads_no_compiler_and_no_cupy() -> None:
    code = "import sys, kvlab.jit.build; print({'cupy', 'cuda.core', 'cuda.bindings'} & set(sys.modules))"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "set()"


# ---- the launcher, as far as it goes without a device

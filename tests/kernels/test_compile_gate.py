"""The compile gate over kvlab's own CUDA sources, and over planted sources that it must refuse."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from kvlab.errors import FormatError
from kvlab.jit import compile_gate
from kvlab.jit.build import kernel_root, source_names
from kvlab.jit.compile_gate import GATED_ARCHS, TABLE, Row, fast, full, specialisations
from kvlab.jit.numba import numba_kernel_root
from tests.spilling_kernel import SPILLS

GOOD = """extern "C" __global__ void good(float* out) { out[threadIdx.x] = BITS; }
// gate: BITS=2,4 registers<=40 arch=sm_80,sm_90a
"""
GATED_SPILLS = SPILLS.rstrip() + "\n// gate: registers<=255 arch=sm_90a\n"


def test_kvlabs_own_kernels_pass() -> None:
    assert [f"{name}.cu" for name in source_names(kernel_root())] == sorted(
        {item.name for item in specialisations()}
    )
    assert fast() == []


def test_kvlabs_own_numba_kernels_pass() -> None:
    declared = {item.name for item in specialisations(numba_kernel_root())}
    assert {"packed.py:attend_pages", "packed_merge.py:merge_parts"} <= declared
    assert fast(numba_kernel_root()) == []


# ---- what the lines mean


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder of sources, with an empty cache of its own."""
    monkeypatch.setenv("KVLAB_CACHE_DIR", str(tmp_path / "cache"))
    (tmp_path / "sources").mkdir()
    return tmp_path / "sources"


def test_a_line_stands_for_every_combination(root: Path) -> None:
    (root / "one.cu").write_text("// gate: WIDTH=128,64 BITS=4,2,8 registers<=128\n")
    found = specialisations(root)
    assert {(item.name, item.macros, item.arch) for item in found} == {
        ("one.cu", (("BITS", bits), ("WIDTH", width)), arch)
        for bits in ("2", "4", "8")
        for width in ("64", "128")
        for arch in GATED_ARCHS
    }
    assert len(found) == 24
    assert {item.max_registers for item in found} == {128}
    assert [str(item) for item in found if item.first] == [
        f"one.cu {arch} BITS=4 WIDTH=128" for arch in GATED_ARCHS
    ]


def test_lines_add_up_with_archs_and_limits_of_their_own(root: Path) -> None:
    (root / "one.cu").write_text(
        "code\n// gate: TYPE=__half registers<=64 arch=sm_90a\n\n//gate : registers<=255 arch=sm_80,sm_89\n"
    )
    assert [(str(item), item.max_registers, item.first) for item in specialisations(root)] == [
        ("one.cu sm_90a TYPE=__half", 64, True),
        ("one.cu sm_80", 255, True),
        ("one.cu sm_89", 255, True),
    ]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("void f();\n", r"one\.cu declares no specialisation"),
        ("\n// gate: BITS=2\n", r"one\.cu:2: .* one registers<=N"),
        ("// gate: registers<=4 registers<=5\n", "one registers<=N"),
        ("// gate: BITS registers<=4\n", "'BITS' is not NAME=value"),
        ("// gate: BITS= registers<=4\n", "'BITS=' is not NAME=value"),
        ("// gate: BITS=2,,4 registers<=4\n", "'BITS=2,,4' is not"),
        ("// gate: BITS=2 BITS=4 registers<=4\n", "'BITS=4' is not .* each once"),
        ("// gate: registers<=many\n", "'registers<=many' is not"),
        ("\n// gate: registers<=4\ncode\n", r"one\.cu:2: gate lines are the last of a source"),
        ("// gate: BITS=2,4 registers<=4\n// gate: BITS=4 registers<=9\n", "declare a specialisation twice"),
    ],
)
def test_malformed_declarations_are_refused(root: Path, text: str, words: str) -> None:
    (root / "one.cu").write_text(text)
    with pytest.raises(ValueError, match=words):
        fast(root)


def test_lines_of_numba_kernels_name_the_function_that_makes_them(root: Path) -> None:
    code, line = "def pack(bits): ...\n", "# gate: pack bits=2,4 registers<=40 arch=sm_90a\n"
    (root / "cuda_one.py").write_text(code + line)
    (root / "cuda_shared.py").write_text("def helper(): ...\n")
    assert list(map(str, specialisations(root))) == [
        f"cuda_one.py:pack sm_90a bits={bits}" for bits in (2, 4)
    ]
    for unnamed in (line.replace("pack ", ""), line.replace("pack", "unpack")):
        (root / "cuda_one.py").write_text(code + unnamed)
        with pytest.raises(ValueError, match=r"cuda_one\.py:2: the first word of a gate line is the funct"):
            specialisations(root)


# ---- what is refused


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (GATED_SPILLS, r"one\.cu sm_90a: spills has \d+ bytes of local memory \(spills\) a thread"),
        (GOOD.replace("<=40", "<=4"), r"one\.cu sm_80 BITS=2: good takes \d+ registers of 4"),
        (GOOD.replace("BITS;", "BIT;"), r"one\.cu\(1\): error: identifier \"BIT\" is undefined"),
        (GOOD.replace("= BITS;", "= sizeof(char[1 - 2 * (BITS == 4)]);"), r"-DBITS=4\n"),
    ],
)
def test_a_bad_kernel_fails_and_leaves_no_table(root: Path, source: str, words: str) -> None:
    (root / "one.cu").write_text(source)
    for failures in (fast(root), full(root)[1]):
        assert failures
        assert any(re.search(words, failure) for failure in failures), failures
    assert not (root / TABLE).exists()


# ---- the resource table


def _built(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Everything that is built from now on."""
    names: list[str] = []
    build_rows = compile_gate._build_rows

    def record(item: compile_gate.Specialisation, root: Path) -> list[Row] | str:
        names.append(str(item))
        return build_rows(item, root)

    monkeypatch.setattr(compile_gate, "_build_rows", record)
    return names


def test_the_full_gate_writes_one_line_for_every_kernel(root: Path) -> None:
    (root / "one.cu").write_text(GOOD.splitlines()[0].replace("good", "also") + "\n" + GOOD)
    rows, failures = full(root)
    assert failures == []
    assert [(row.specialisation, row.kernel) for row in rows] == [
        (f"one.cu {arch} BITS={bits}", kernel)
        for arch in ("sm_80", "sm_90a")
        for bits in (2, 4)
        for kernel in ("also", "good")
    ]
    text = (root / TABLE).read_text()
    assert [Row(**fields) for fields in json.loads(text)] == rows
    assert len(text.splitlines()) == len(rows) + 2
    assert full(root) == (rows, [])
    assert (root / TABLE).read_text() == text


def test_the_fast_gate_builds_the_first_of_each_and_what_changed(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (root / "one.cu").write_text(GOOD)
    full(root)
    built = _built(monkeypatch)
    assert fast(root) == []
    assert built == ["one.cu sm_80 BITS=2", "one.cu sm_90a BITS=2"]
    (root / "one.cu").write_text(GOOD.replace("BITS;", "BITS + 1;"))
    built.clear()
    assert fast(root) == []
    assert sorted(built) == sorted(map(str, specialisations(root)))


def test_a_change_that_breaks_another_specialisation_is_found(root: Path) -> None:
    (root / "one.cu").write_text(GOOD)
    full(root)
    (root / "one.cu").write_text(GOOD.replace("= BITS;", "= sizeof(char[1 - 2 * (BITS == 4)]);"))
    assert len(fast(root)) == 2


@pytest.mark.parametrize(("field", "lie"), [("registers", 30), ("shared_bytes", 16), ("kernel", "other")])
def test_a_table_that_says_something_else_fails(root: Path, field: str, lie: object) -> None:
    (root / "one.cu").write_text(GOOD)
    full(root)
    rows = json.loads((root / TABLE).read_text())
    assert rows[0]["specialisation"] == "one.cu sm_80 BITS=2"
    assert rows[0][field] != lie
    rows[0][field] = lie
    (root / TABLE).write_text(json.dumps(rows))
    failures = fast(root)
    assert len(failures) == 1
    assert "one.cu sm_80 BITS=2: resources.json does not hold what the compiler gives" in failures[0]


def test_a_few_registers_more_or_less_are_what_the_table_holds(root: Path) -> None:
    """Where the declared limit still holds: the compiler gives more or fewer now and then."""
    (root / "one.cu").write_text(GOOD)
    full(root)
    rows = json.loads((root / TABLE).read_text())
    rows[0]["registers"] += 3
    (root / TABLE).write_text(json.dumps(rows))
    assert fast(root) == []


def test_a_table_whose_rows_break_the_limits_fails(root: Path) -> None:
    (root / "one.cu").write_text(GOOD)
    full(root)
    rows = json.loads((root / TABLE).read_text())
    assert rows[1]["specialisation"] == "one.cu sm_80 BITS=4"
    rows[1]["local_bytes"] = 8
    (root / TABLE).write_text(json.dumps(rows))
    assert fast(root) == ["one.cu sm_80 BITS=4: good has 8 bytes of local memory (spills) a thread"]


@pytest.mark.parametrize("text", ["", "[", "3", '[{"registers": 1}]', '["row"]', "{}x"])
def test_a_damaged_table_is_refused(root: Path, text: str) -> None:
    (root / "one.cu").write_text(GOOD)
    (root / TABLE).write_text(text)
    with pytest.raises(FormatError, match=r"resources\.json is damaged .* run make compile-gate"):
        fast(root)


def test_many_specialisations_are_built_in_processes(root: Path) -> None:
    (root / "one.cu").write_text(GOOD.replace("BITS=2,4", "BITS=1,2,3,4,5"))
    rows, failures = full(root)
    assert failures == []
    assert len(rows) == 10


# ---- the command


def test_the_command_exits_with_the_verdict(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (root / "one.cu").write_text(GOOD)
    assert compile_gate.main(["--root", str(root)]) == 0
    assert "one.cu sm_90a BITS=4 good: " in capsys.readouterr().out
    assert (root / TABLE).exists()
    assert compile_gate.main(["--fast", "--root", str(root)]) == 0
    (root / "two.cu").write_text(GATED_SPILLS)
    assert compile_gate.main(["--fast", "--root", str(root)]) == 1
    assert "two.cu sm_90a: spills has" in capsys.readouterr().err

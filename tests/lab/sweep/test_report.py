"""Reports of a sweep: views whose answers are known, planted claims that fail, files that stand alone."""

from __future__ import annotations

import json
import os
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kvlab import cli
from kvlab.lab.results import Row
from kvlab.lab.sweep import tables, views
from kvlab.lab.sweep.claims import judge_claims
from kvlab.lab.sweep.report import all_views, to_markdown, write_report
from tests.browser import MISSING, browser, dump


def row(budget: float, bits: str, context: int, packed: bool, **values: object) -> Row:
    """A row of a summary whose figures follow the budget: half the budget, four times the loss."""
    scale = 1.0 if packed else 2.0
    figures = {
        "experiment": f"b{budget}_{bits}_{context}_{packed}", "budget": budget, "bits": bits,
        "context_length": context, "use_packing": packed, "memory_ratio": scale * budget,
        "avg_bits": 14 * budget,
        "allocated_gb": scale * budget * context / 1e6, "avg_latency_ms": scale * context / 1e3,
        "p5_latency_ms": scale * context / 1e3, "p50_latency_ms": scale * context / 1e3,
        "throughput_tps": 1e6 / context / scale, "status": "ok",
        "bits_per_element": scale * 16 * budget, "kl": 1e-3 / budget**2, "perplexity_change": 2e-3 / budget,
        "top1_agreement": 0.9, "needle_retrieval": 1.0, "actual_vs_fp16": 1 / budget / scale,
        "actual_vs_int8": 0.5 / budget / scale, "model": "smollm2", "device": "cpu", "num_layers": 30,
        "backend": "cpu", "commit": "0123456789ab",
    }  # fmt: skip
    return dict.fromkeys(tables.COLUMNS) | figures | values


ROWS = [
    row(budget, bits, context, packed)
    for context in (512, 2048)
    for bits in ("2,4,8", "2,3,4,8")
    for budget in (0.2, 0.4, 0.7)
    for packed in (True, False)
]


GRAPH = "cache work of 32 layers in one CUDA graph, a token at 2K"


def verdicts(rows: list[Row], *files: dict[str, Any]) -> dict[str, str]:
    return {str(claim["claim"]): str(claim["verdict"]) for claim in judge_claims(rows, files)}


def test_views_answer_what_the_rows_say() -> None:
    assert len(views.by_budget(ROWS)) == 12
    assert {view["saved"] for view in views.packing_impact(ROWS)} == {0.5}
    scaling = views.context_scaling(ROWS)
    assert [view["context_length"] for view in scaling] == [512, 2048]
    assert scaling[1]["avg_latency_ms"] == pytest.approx(2.048)
    more = views.context_scaling(ROWS + [each | {"num_layers": 32} for each in ROWS])
    assert [(view["layers"], view["context_length"]) for view in more] == [
        (30, 512), (30, 2048), (32, 512), (32, 2048),
    ]  # fmt: skip
    best = {view["context_length"]: view["budget"] for view in views.best_under(ROWS, 0.006)}
    assert best == {512: 0.4, 2048: 0.4}
    assert views.best_under(ROWS, 0.001) == []
    assert views.devices(ROWS) == []
    gpu = [each | {"device": "cuda", "p50_latency_ms": 0.1} for each in ROWS]
    assert {view["speedup"] for view in views.devices(ROWS + gpu)} == {5.12, 20.48}


def test_the_pareto_front_leaves_out_what_is_beaten() -> None:
    worse = row(0.5, "4,8", 512, True, kl=1.0)
    front = views.pareto([*ROWS, worse])
    assert all(point["bits"] != "4,8" for point in front)
    for context in (512, 2048):
        points = [point for point in front if point["context_length"] == context]
        losses = [point["loss"] for point in points]
        assert losses == sorted(losses, reverse=True)
        assert [point["budget"] for point in points] == [0.2, 0.4, 0.7]


def test_cases_without_figures_stay_out() -> None:
    broken = row(0.3, "4,8", 512, True, status="failed: gpu", kl=None, allocated_gb=None)
    infeasible = row(0.2, "8", 512, True, status="infeasible", kl=None, smallest_feasible_budget=0.2703)
    assert len(views.by_budget([*ROWS, broken, infeasible])) == 13
    assert views.pareto([*ROWS, broken, infeasible]) == views.pareto(ROWS)
    (shown,) = views.by_budget([infeasible])
    assert (shown["status"], shown["smallest_feasible_budget"]) == ("infeasible", 0.271)


def test_claims_pass_and_planted_failures_fail() -> None:
    found = verdicts(ROWS)
    assert "fail" not in found.values()
    assert found["2-bit codes packed"] == "pass"
    assert found["saved against fp16, budgets up to 0.4"] == "pass"
    assert found[GRAPH] == "not measured"
    assert found["GPU against CPU"] == "not measured"

    big = [each | {"actual_vs_fp16": 1.5, "actual_vs_int8": 0.75} for each in ROWS]
    assert verdicts(big)["saved against fp16, budgets up to 0.4"] == "fail"
    assert verdicts(big)["saved against int8, budgets up to 0.4"] == "fail"
    slow = [each | {"num_layers": 32, "p50_latency_ms": 25.0, "device": "cuda"} for each in ROWS]
    assert verdicts(slow)[GRAPH] == "fail"
    gpu = [each | {"device": "cuda"} for each in ROWS]
    assert verdicts(ROWS + gpu)["GPU against CPU"] == "fail"
    upside = [each | {"avg_bits": 10 - 10 * float(each["budget"] or 0)} for each in ROWS]
    assert verdicts(upside)["lower budget gives fewer bits"] == "fail"
    other_model = [each | {"num_layers": 2, "context_length": 8192, "p5_latency_ms": 0.1} for each in ROWS]
    assert verdicts(ROWS + other_model)["throughput falls with context"] == "pass"
    flat = [each | {"p5_latency_ms": 1e4 / int(each["context_length"] or 1)} for each in ROWS]
    assert verdicts(flat)["throughput falls with context"] == "fail"


def test_claims_of_other_files_pass_and_planted_failures_fail() -> None:
    step, equal = "end to end, a token at 2K, 32 layers", "CPU equals GPU in float32"
    assert verdicts([])[step] == verdicts([])[equal] == "not measured"
    results = Path(__file__).parents[3] / "benchmarks" / "results"
    generation, validate = (
        json.loads((results / f"2026-11-21-h200-{name}.json").read_text())
        for name in ("generation", "validate")
    )
    found = verdicts([], generation, validate)
    assert found[step] == found[equal] == "pass"
    case = next(each for each in generation["cases"] if each["name"] == "graph:1x2048")
    case["ms_median"] = 21.0
    wrong = next(each for each in validate["rows"] if each["dtype"] == "float32")
    wrong["from_cpu"] = 2e-5
    found = verdicts([], generation, validate)
    assert found[step] == found[equal] == "fail"
    assert verdicts([], generation | {"layers": 16})[step] == "not measured"


def test_a_step_is_found_in_files_of_every_age() -> None:
    """The number of layers once stood at the top, and rows were `cases`."""
    results = Path(__file__).parents[3] / "benchmarks" / "results"
    first = json.loads((results / "2026-11-21-h200-generation.json").read_text())
    for layers, verdict in ((32, "pass"), (16, "not measured")):
        settings = {"provenance": {"settings": {"layers": layers}}}
        for rows in ("cases", "rows"):
            found = verdicts([], settings | {rows: first["cases"]})
            assert found["end to end, a token at 2K, 32 layers"] == verdict


class Page(HTMLParser):
    """What a page refers to, and how many tables and pictures it holds."""

    def __init__(self) -> None:
        super().__init__()
        self.links: list[str] = []
        self.tags: list[str] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [value or "" for name, value in attributes if name in ("src", "href", "xlink:href")]


def test_the_page_needs_nothing_but_itself(tmp_path: Path) -> None:
    write_report([*ROWS, row(0.3, '<script>"&', 512, True, status="infeasible")], tmp_path)
    text = (tmp_path / "report.html").read_text()
    page = Page()
    page.feed(text)
    assert all(link.startswith(("#", "data:")) for link in page.links)
    assert page.tags.count("script") == 1
    assert page.tags.count("svg") == 3
    assert page.tags.count("table") == 7
    assert '<script>"&' not in text
    assert {path.name for path in tmp_path.iterdir()} == {
        "report.md", "report.html",
        *(f"{name}.{kind}" for name in ("quality", "packing", "context") for kind in ("png", "svg")),
    }  # fmt: skip


def test_markdown_has_a_row_for_every_row() -> None:
    shown = all_views(ROWS)
    lines = to_markdown(shown).splitlines()
    assert sum(line.startswith("| ") for line in lines) == sum(len(view.rows) + 2 for view in shown)


@pytest.mark.skipif(browser() is None, reason=MISSING)
def test_the_page_in_a_browser(tmp_path: Path) -> None:
    """No errors of its script, a table sorts when its heading is clicked, nothing wider than a phone."""
    reason = "ValueError " + "a/path/without/a/space" * 20
    write_report([*ROWS, row(0.3, "4,8", 512, True, status="failed: gpu", reason=reason)], tmp_path)
    page = tmp_path / "report.html"
    check = """<script>
    window.onerror = message => document.title = "error: " + message;
    addEventListener("load", () => {
      const table = document.querySelectorAll("table")[1], at = [...table.tHead.rows[0].cells];
      const column = at.findIndex(head => head.textContent === "loss");
      at[column].firstElementChild.click();
      const values = [...table.tBodies[0].rows].map(row => parseFloat(row.cells[column].dataset.value));
      const sorted = values.every((value, i) => i === 0 || values[i - 1] <= value);
      document.title = JSON.stringify([sorted, document.documentElement.scrollWidth, innerWidth]);
    });</script>"""
    page.write_text(page.read_text().replace("<head>", f"<head>{check}", 1))
    found = dump(page, tmp_path / "profile", width=390, height=844)
    title = re.search("<title>(.*?)</title>", found)
    assert title is not None
    is_sorted, width, window = json.loads(title[1])
    assert is_sorted
    assert width <= window


def test_texts_that_look_like_numbers_and_times_stay_texts(tmp_path: Path) -> None:
    values = {
        "bits": "8",
        "case_id": "1234567890123456",
        "commit": "12e4567890",
        "time": "2026-11-21T20:00:00+00:00",
    }
    tables.write_summary([row(0.6, "", 512, True) | values], tmp_path)
    (read,) = tables.read_summary(tmp_path)
    assert {name: read[name] for name in values} == values
    assert (read["model"], read["experiment"]) == ("smollm2", "b0.6__512_True")
    assert read["reason"] is None
    assert read["budget"] == 0.6
    assert read["use_packing"] is True


def test_a_column_that_is_empty_in_one_sweep_keeps_its_type_beside_another(tmp_path: Path) -> None:
    folders = [tmp_path / "text", tmp_path / "synthetic"]
    for folder, values in zip(folders, ({}, {"kl": None, "attention_error": 0.1}), strict=True):
        folder.mkdir()
        tables.write_summary([row(0.6, "4", 512, True, **values)], folder)
    for order in (folders, folders[::-1]):
        rows = tables.read_summary(*order)
        assert sorted(each["kl"] or 0 for each in rows) == [0, pytest.approx(1e-3 / 0.36)]
        assert sorted(each["attention_error"] or 0 for each in rows) == [0, 0.1]


def test_the_command_reads_several_sweeps(tmp_path: Path) -> None:
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder, device in zip(folders, ("cpu", "cuda"), strict=True):
        folder.mkdir()
        tables.write_summary([each | {"device": device, "p50_latency_ms": 1.0} for each in ROWS], folder)
    runner, paths = CliRunner(), [os.fspath(folder) for folder in folders]
    shown = runner.invoke(cli.app(), ["report", "show", *paths, "--json"])
    assert len(json.loads(shown.output)["GPU against CPU"]) == 12
    asked = runner.invoke(
        cli.app(), ["report", "query", "select count(*) as n from results", *paths, "--json"]
    )
    assert json.loads(asked.output) == {"rows": [{"n": 48}]}
    judged = runner.invoke(cli.app(), ["report", "expected", *paths])
    assert judged.exit_code == 1  # the GPU is as fast as the CPU here
    steps = {"layers": 32, "cases": [{"cache": "graph", "batch": 1, "tokens": 2048, "ms_median": 4.0}]}
    (tmp_path / "steps.json").write_text(json.dumps(steps))
    more = ["--output", str(tmp_path / "out"), "--file", str(tmp_path / "steps.json")]
    written = runner.invoke(cli.app(), ["report", "write", *paths, *more])
    assert "report.html" in written.output
    assert "4 ms, steps in CUDA graphs" in (tmp_path / "out" / "report.md").read_text()

"""Results of a sweep as one table: `ablation_summary.csv`, Parquet, and SQL over either.

A row is a case, in the order of the manifest, whatever order they ran in. The first columns are those that
users of the earlier scripts know. A case that failed is a row with its class as status, its message as reason
and no figures, so that nobody takes a missing figure for a missing case; one that never ran is no row.

DuckDB writes the Parquet and answers queries, so no other library is needed to read a table; pandas reads
the CSV as it is: ``pandas.read_csv("ablation_summary.csv")``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvlab.errors import needs_extra
from kvlab.files import write_whole
from kvlab.lab.results import Row, to_csv
from kvlab.lab.sweep.manifest import Manifest, failure_of, recorded

__all__ = ["COLUMNS", "SUMMARY", "TIMES", "collect", "query", "read_summary", "write_summary"]

SUMMARY = "ablation_summary.csv"
TIMES = (
    *("throughput_tps", "avg_latency_ms", "p5_latency_ms", "p50_latency_ms", "p95_latency_ms"),
    *("gb_per_s", "seconds", "time"),
)
"""Columns that differ from run to run; all others are the same bits on the same machine."""

_FIRST = (
    *("experiment", "budget", "bits", "context_length", "use_packing", "memory_ratio", "avg_bits"),
    *("allocated_gb", "throughput_tps", "avg_latency_ms"),
)
_PARTS: dict[str, tuple[str, ...]] = {
    "": ("status", "smallest_feasible_budget", "reason"),
    "memory": ("bits_per_element", "fp16_gb"),
    "quality": (
        *("perplexity", "perplexity_full_precision", "perplexity_change", "kl", "kl_error"),
        *("top1_agreement", "needle_retrieval", "needle_retrieval_full_precision", "scored_tokens"),
        "attention_error",
    ),
    "performance": ("p5_latency_ms", "p50_latency_ms", "p95_latency_ms", "gb_per_s"),
    "compression": ("actual_vs_fp16", "actual_vs_int8", "theoretical_ratio"),
    "config": ("model", "device", "seed"),
    "geometry": ("num_layers", "num_heads", "num_kv_heads", "head_dim"),
    "provenance": ("case_id", "backend", "gpu", "commit", "modified", "kvlab", "seconds", "time"),
}
_TEXTS = (
    *("experiment", "bits", "status", "reason", "model", "device", "case_id", "backend", "gpu", "commit"),
    *("kvlab", "time"),
)
"""Columns that are text whatever they look like: the ladder 8, a digest of digits, a time."""
_WHOLE = ("context_length", "scored_tokens", "seed", "num_layers", "num_heads", "num_kv_heads", "head_dim")
COLUMNS = (*_FIRST, *(name for names in _PARTS.values() for name in names))
"""Columns of the summary."""
_TYPES = (
    dict.fromkeys(COLUMNS, "DOUBLE")
    | dict.fromkeys(_TEXTS, "VARCHAR")
    | dict.fromkeys(_WHOLE, "BIGINT")
    | dict.fromkeys(("use_packing", "modified"), "BOOLEAN")
)
"""Said for every column: one that is empty in a sweep must join that of another sweep."""


def collect(folder: Path, manifest: Manifest) -> tuple[list[Row], list[int]]:
    """Read every result of a sweep.

    Returns
    -------
    rows : list of dict
        One for each case that is done or failed.
    missing : list of int
        Numbers of the cases that have neither.
    """
    rows, missing = [], []
    for number, case in enumerate(manifest.cases):
        result = recorded(folder, case)
        if result is None:
            failure = failure_of(folder, case)
            if failure is None:
                missing.append(number)
                continue
            result = {
                "experiment": case.name,
                "status": f"failed: {failure.kind}",
                "reason": failure.message,
                "config": case.to_dict(),
                "provenance": {"case_id": case.id},
            }
        rows.append(_row(result))
    return rows, missing


def _row(result: dict[str, Any]) -> Row:
    source = dict(result["provenance"])
    gpus, git = source.get("gpus") or [], source.get("git") or {}
    source |= {"gpu": gpus[0]["name"] if gpus else None} | git
    flat = {**result, **(result.get("memory") or {}), **(result.get("performance") or {}), **result["config"]}
    row: Row = {name: flat.get(name) for name in _FIRST}
    parts = {"": result, "provenance": source, "geometry": result["config"]["geometry"]}
    for part, names in _PARTS.items():
        values = parts.get(part) or result.get(part) or {}
        row |= {name: values.get(name) for name in names}
    return row


def write_summary(rows: list[Row], folder: Path) -> list[Path]:
    """Write `ablation_summary.csv` and `ablation_summary.parquet` into a folder.

    Raises
    ------
    MissingExtraError
        If DuckDB is not installed.
    FileExistsError
        If there are no rows, and a summary that has some, as in a folder whose single results were removed.
    """
    paths = [folder / SUMMARY, (folder / SUMMARY).with_suffix(".parquet")]
    if not rows and paths[0].exists() and len(paths[0].read_text(encoding="utf-8").splitlines()) > 1:
        raise FileExistsError(f"{folder} has no results of cases, but {paths[0]} has rows: it stays as it is")
    write_whole(paths[0], to_csv(rows, COLUMNS).encode())
    temporary = paths[1].with_suffix(".tmp")
    table = _connection().read_csv(str(paths[0]), header=True, dtype=_TYPES)
    table.write_parquet(str(temporary))
    temporary.replace(paths[1])
    return paths


def read_summary(*folders: Path) -> list[Row]:
    """Return the rows of summaries with their types.

    Raises
    ------
    FileNotFoundError
        If the folder has none; the message says how to make one.
    ValueError
        If there is no case in them.
    """
    columns, rows = query("select * from results", *folders)
    if not rows:
        where = " ".join(map(str, folders))
        raise ValueError(f"no case of {where} has a result: kvlab sweep run, then kvlab sweep collect")
    return [dict(zip(columns, row, strict=True)) for row in rows]


def query(sql: str, *folders: Path) -> tuple[list[str], list[tuple[Any, ...]]]:
    """Ask the summaries of folders in SQL; together they are the table `results`.

    Returns
    -------
    columns : list of str
    rows : list of tuple

    Raises
    ------
    FileNotFoundError
        If the folder has no summary.
    ValueError
        If DuckDB does not understand the question.
    MissingExtraError
        If DuckDB is not installed.
    """
    paths = [(folder / SUMMARY).with_suffix(".parquet") for folder in folders]
    for path in paths:
        if not path.exists():
            raise FileNotFoundError(
                f"{path} is not there; kvlab sweep collect {path.parent} writes it when the sweep has run"
            )
    connection = _connection()
    connection.read_parquet(list(map(str, paths)), union_by_name=True).create_view("results")
    with needs_extra("lab", "kvlab report"):
        import duckdb
    try:
        answer = connection.execute(sql)
        return [column[0] for column in answer.description or []], answer.fetchall()
    except duckdb.Error as error:
        raise ValueError(f"query {sql!r}: {error}") from None


def _connection() -> Any:
    with needs_extra("lab", "tables in Parquet"):
        import duckdb
    return duckdb.connect(config={"threads": 1})

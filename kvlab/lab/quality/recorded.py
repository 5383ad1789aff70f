"""Recorded figures of caches whose budget holds at every length, beside one width for all tokens.

They take a GPU minutes and two processors hours, so `kvlab demo` shows them and does not measure them. The
files are those of benchmarks/quality/settings.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from kvlab.lab.quality.report import figures, with_error
from kvlab.lab.results import results_of

__all__ = ["read_held"]

SCHEMA = "kvlab quality settings 1"


def read_held(path: Path) -> list[dict[str, str]]:
    """Return a row of texts for each cache of a file, few bits first: single tokens, late questions.

    The rows of the file include full precision; a file of something else is a FormatError.
    """
    with results_of(SCHEMA, path) as results:
        full: dict[str, Any] = next(row["retrieval"] for row in results["rows"] if row["case"].get("dense"))
        caches: dict[str, dict[str, Any]] = {}
        for row in results["rows"]:
            if name := _name(row["case"]):
                single = row.get("single") or row.get("equal_bytes", {}).get("case")
                found = caches.setdefault(name, {})
                found |= {"single": single} if single else {}
                found |= {"asked": row["retrieval"]} if "retrieval" in row else {}
        both = [(name, found["single"], found["asked"]) for name, found in caches.items() if len(found) == 2]
        return [_cells(*cache, full) for cache in sorted(both, key=lambda cache: max(cache[1]["bits"]))]


def _name(case: dict[str, Any]) -> str:
    """The name of the demo for a cache with nothing but a held budget or one width; else nothing."""
    match {option: x for option, x in case.items() if option not in ("name", "tasks")}:
        case {"budget": float(budget), "plan_length": 1, **others} if not others:
            return f"mixed {budget:g}"
        case {"budget": None, "bits": [bits], **others} if not others:
            return f"uniform {bits}"
    return ""


def _cells(name: str, single: dict[str, Any], asked: dict[str, Any], full: dict[str, Any]) -> dict[str, str]:
    answers = int(np.sum(full["exact"]))
    found = int(np.logical_and(asked["exact"], full["exact"]).sum())
    return {
        "cache": name,
        "bits": f"{max(single['bits']):.2f}",
        "KL": with_error(single["kl"], single["error"]),
        "last quarter": figures(single["last_quarter"]),
        "found": f"{found} of {answers}",
        "log p lost": f"{np.mean(np.subtract(full['log_p'], asked['log_p'])):.2f}",
    }

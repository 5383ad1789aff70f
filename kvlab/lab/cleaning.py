"""`kvlab clean`: what kvlab itself has written to disk, and its removal.

kvlab writes the folder of compiled kernels (`kvlab.jit.filecache.cache_folder`), what Numba keeps of the CPU
kernels beside their sources, and results in a folder that the user names. Nothing else is touched: of a
folder of results only files that hold a result of kvlab are counted, by their content and not by their name.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from kvlab.jit.build import kernel_folder
from kvlab.jit.filecache import cache_folder

__all__ = ["find", "remove"]

_LARGEST_RESULT = 64 * 2**20


def find(results: Path | None) -> list[dict[str, Any]]:
    """Return what there is to clean.

    Each thing that exists has ``what``, ``path``, ``files`` and ``bytes``. `results` is a folder of results,
    which is searched without its subfolders; if it is no folder, that is a ValueError.
    """
    found = []
    cache = cache_folder()
    if (cache / "cubin").is_dir():
        found.append(_entry("compiled CUDA kernels", cache / "cubin", list((cache / "cubin").rglob("*"))))
    compiled = kernel_folder("numba") / "cpu" / "__pycache__"
    kept = [path for ending in ("*.nbi", "*.nbc") for path in compiled.glob(ending)]
    if kept:
        found.append(_entry("compiled CPU kernels", compiled, kept))
    if results is not None:
        if not results.is_dir():
            raise ValueError(f"results={str(results)!r} is no folder")
        found += [
            _entry("result", path, [path]) for path in sorted(results.glob("*.json")) if _is_result(path)
        ]
    return found


def remove(found: list[dict[str, Any]]) -> None:
    """Delete what `find` listed; what has gone in the meantime is no error."""
    for entry in found:
        path = Path(entry["path"])
        if entry["what"] == "compiled CPU kernels":
            for ending in ("*.nbi", "*.nbc"):
                for file in path.glob(ending):
                    file.unlink(missing_ok=True)
        elif path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def _entry(what: str, path: Path, inside: list[Path]) -> dict[str, Any]:
    sizes = [file.stat().st_size for file in inside if file.is_file()]
    return {"what": what, "path": str(path), "files": len(sizes), "bytes": sum(sizes)}


def _is_result(path: Path) -> bool:
    """Whether a file was written by kvlab: a dict whose provenance names the kvlab that made it."""
    try:
        if path.stat().st_size > _LARGEST_RESULT:
            return False
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    source = content.get("provenance") if isinstance(content, dict) else None
    return isinstance(source, dict) and "kvlab" in source

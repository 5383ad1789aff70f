"""Count the lines of `kvlab` and `kernels` by what they are for, as docs/lines.md has them.

    python docs/lines.py

Left out are the engine, context parallelism, grouped attention and lists of tiles, as in CONTRIBUTING.md. A
line is blank, of an import, of a comment or docstring, or else code.
"""

from __future__ import annotations

import ast
import re
import subprocess
from collections import Counter, defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[1]
LEFT_OUT = re.compile(
    r"engine|chat\.py|decoder|accelerate|parallel/|context_parallel|gathered|run_list|merge_rows|grouped"
    r"|add_groups|query_gradients|tile_list|list_items|prefixes\.cu"
)
PURPOSES = {  # by path; the first that fits counts
    "oracles in NumPy": r"^kvlab/reference/",
    "laboratory: quality": r"^kvlab/lab/quality/",
    "laboratory: benchmarks": r"^kvlab/lab/(benchmark/|timing)",
    "laboratory: ablations, sweeps": r"^kvlab/lab/(ablation|sweep)/",
    "laboratory: the rest; commands": r"^kvlab/(lab|cli)/",
    "integrations: flash-attn, autograd": r"^kvlab/integrations/(flash_attn|torch_)",
    "integrations: transformers": r"^kvlab/integrations/",
    "compiling, launching, arrays, devices": r"^kvlab/jit/",
    "codecs, bit packing": r"codec|/bits|bit_stream|codebook|columns|ternary|(?<!cache_)groups\.py|units"
    r"|elements\.cuh|expand",
    "attention": r"^(?!.*packed).*attention|tiles\.py|softmax\.py|fragments|array_kinds|into",
    "the packed cache": r"kvlab/cache|packed|pages?\.|pages/|plan|ladder|frame|store|layer|allocator|cache_"
    r"|rows|refit|page_tokens|scores|scales|doubles|files|words|raw|exact\.py",
}
FOLDERS = {
    "CUDA C++": r"^kernels/cuda/",
    "Numba, CPU and GPU": r"^kernels/numba/",
    "`jit`, `reference`": r"^kvlab/(jit|reference)/",
    "`integrations`": r"^kvlab/integrations/",
    "`lab`, `cli`": r"^kvlab/(lab|cli)/",
    "`kvlab/cache`, `ops` and what lies in `kvlab` itself": r"",
}
KINDS = ("code", "prose", "import", "blank")


def name_of(path: str, patterns: dict[str, str]) -> str:
    fitting = (name for name, pattern in patterns.items() if re.search(pattern, path))
    return next(fitting, "compiling, launching, arrays, devices")


def kinds_in(path: str, text: str) -> Counter[str]:
    """Count the lines of a source by kind."""
    lines = text.splitlines()
    kinds = ["code" if line.strip() else "blank" for line in lines]
    if path.endswith(".py"):
        for node in ast.walk(ast.parse(text)):
            is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
            if is_text or isinstance(node, ast.Import | ast.ImportFrom):
                size = node.end_lineno - node.lineno + 1
                kinds[node.lineno - 1 : node.end_lineno] = ["prose" if is_text else "import"] * size
    for number, line in enumerate(lines):
        if line.strip().startswith("#include"):
            kinds[number] = "import"
        elif re.match(r"\s*(//|#)(?! gate:|if|el|end|def|undef|pragma)", line):
            kinds[number] = "prose"
    return Counter(kinds)


def main() -> None:
    command = ["git", "ls-files", "kvlab", "kernels"]
    paths = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    found: dict[str, Counter[str]] = defaultdict(Counter)
    for path in paths:
        if path.endswith((".py", ".cu", ".cuh")) and not LEFT_OUT.search(path):
            kinds = kinds_in(path, (ROOT / path).read_text())
            for name in (name_of(path, PURPOSES), name_of(path, FOLDERS), "all of it"):
                found[name] += kinds + Counter(files=1, lines=kinds.total())
    purposes = sorted(found.keys() - FOLDERS.keys() - {"all of it"}, key=lambda name: -found[name]["lines"])
    print(
        "| for | files | lines | code | docstrings, comments | imports | blank |", "|---" * 7 + "|", sep="\n"
    )
    for name in (*purposes, "all of it"):
        print(f"| {name} |", " | ".join(f"{found[name][kind]:,}" for kind in ("files", "lines", *KINDS)), "|")
    print("\n| in | lines |\n|---|---|")
    for name in FOLDERS:
        print(f"| {name} | {found[name]['lines']:,} |")


if __name__ == "__main__":
    main()

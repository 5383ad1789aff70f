"""Who may import whom: the dependency direction of the package, read from its import statements.

A module may import modules of lower layers and of its own; imports inside functions count as well. The
oracles of `kvlab.reference` and what they judge stay independent of each other: oracles import NumPy and each
other, and no production module imports them. Kernels import nothing of kvlab but each other.
"""

from __future__ import annotations

import ast
import copy
import re
import sys
from collections import defaultdict
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

LAYERS = (
    {"errors", "arguments", "estimates", "shapes", "sizes"},
    {"arrays", "device", "environment", "new_arrays", "threads", "torch_compile", "views"},
    {"files", "jit", "ladder", "pages", "registry"},
    {"ops"},
    {"cache"},
    {"engine", "parallel"},
    {"integrations"},
    {"lab"},
    {"cli"},
)
LAYER_OF = {name: layer for layer, names in enumerate(LAYERS) for name in names}
MAY_IMPORT_FRAMEWORKS = (
    "kvlab.integrations.",
    "kvlab.parallel.collectives",
    "kvlab.engine.prompt",
    "kvlab.parallel.copy_engines",
    "kvlab.parallel.lanes",
    "kvlab.engine.folder",
    "kvlab.lab.",
)
MAY_IMPORT_ORACLES = ("kvlab.ops.reference.", "kvlab.lab.")  # the launchers of that backend; what judges
KERNELS = ("kvlab.cuda_kernels", "kvlab.numba_kernels")


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(tree: ast.AST, module: str = "") -> set[str]:
    """Return the dotted names a tree imports; `from a import b` gives `a.b`, be b a module or not."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            package = ".".join(module.split(".")[: -node.level]) + "." if node.level else ""
            found |= {f"{package}{node.module or ''}.{alias.name}" for alias in node.names}
    return found


def top(name: str) -> str:
    return name.partition(".")[0]


def part(name: str) -> str:
    """Return the part of kvlab a module belongs to: `kvlab.ops.bits` is of `ops`."""
    return name.split(".")[1]


def violations(modules: dict[str, set[str]]) -> list[str]:
    """Return every import that goes against the rules, given the imports of each module."""
    found = []
    for module, imported in modules.items():
        for name in imported:
            if not allowed(module, name):
                found.append(f"{module} imports {name}")
    return sorted(found)


def allowed(module: str, name: str) -> bool:
    if (
        top(name) == "kernels"
    ):  # by that name it is another distribution; `from .` is how kernels share helpers
        return module.startswith("kernels.") and name.startswith(f"{module.rpartition('.')[0]}.")
    if top(name) in ("torch", "transformers"):
        return f"{module}.".startswith(MAY_IMPORT_FRAMEWORKS)
    if module.startswith("kernels"):
        return top(name) != "kvlab"
    if module.startswith("kvlab.reference"):
        return top(name) in (*sys.stdlib_module_names, "numpy") or name.startswith("kvlab.reference")
    if top(name) != "kvlab" or module == "kvlab":
        return True
    if name.startswith("kvlab.reference"):
        return module.startswith(MAY_IMPORT_ORACLES)
    if name.startswith(KERNELS):
        return LAYER_OF[part(module)] >= LAYER_OF["ops"]
    if name in ("kvlab", "kvlab.__version__"):
        return True
    if part(name) not in LAYER_OF:  # a public name, through `kvlab` itself
        return LAYER_OF[part(module)] >= LAYER_OF["lab"]
    return LAYER_OF[part(name)] <= LAYER_OF[part(module)]


def source_modules() -> dict[str, ast.Module]:
    paths = [*ROOT.glob("kvlab/**/*.py"), *ROOT.glob("kernels/**/*.py")]
    return {module_name(path): ast.parse(path.read_text()) for path in paths}


def test_imports_follow_the_layers() -> None:
    assert violations({name: imports_of(tree, name) for name, tree in source_modules().items()}) == []


def test_every_part_of_the_package_has_a_layer() -> None:
    parts = {part(name) for name in source_modules() if name.startswith("kvlab.")} - {"reference"}
    assert parts <= set(LAYER_OF), "name the layer of a new part in LAYERS"


def test_modules_do_not_need_each_other_in_a_circle() -> None:
    """Imports inside functions and for type checkers count, too: two files that need each other are one."""
    trees = source_modules()
    graph: dict[str, set[str]] = {}
    for name, tree in trees.items():
        names = imports_of(tree, name)
        graph[name] = {
            known for known in trees for item in names if item == known or item.rpartition(".")[0] == known
        }
        graph[name] -= {name, "kvlab"}  # the public names, of which one is of every layer
    assert list(TopologicalSorter(graph).static_order())


def without_types(tree: ast.AST) -> ast.AST:
    """A copy of a tree without what type checkers alone import."""

    class Without(ast.NodeTransformer):
        def visit_If(self, node: ast.If) -> ast.AST | list[ast.stmt]:
            return node.orelse if "TYPE_CHECKING" in ast.unparse(node.test) else self.generic_visit(node)

    return Without().visit(copy.deepcopy(tree))


def longest_chain(graph: dict[str, set[str]]) -> list[str]:
    """Return the longest list of modules each of which imports the next one."""
    chains: dict[str, list[str]] = {}
    for name in TopologicalSorter(graph).static_order():
        chains[name] = [name, *max((chains[x] for x in graph[name]), key=len, default=[])]
    return max(chains.values(), key=len)


def test_the_cache_is_no_tower() -> None:
    """Who reads one file of the cache meets no more than four others below it."""
    trees = {name: tree for name, tree in source_modules().items() if name.startswith("kvlab.cache.")}
    graph = {
        name: {x.rpartition(".")[0] for x in imports_of(without_types(tree), name)}
        | imports_of(without_types(tree), name)
        for name, tree in trees.items()
    }
    graph = {name: imported & set(trees) - {name} for name, imported in graph.items()}
    assert len(longest_chain(graph)) <= 5, longest_chain(graph)


def test_chains_are_found() -> None:
    graph = {"a": {"b", "d"}, "b": {"c"}, "c": {"d"}, "d": set(), "e": {"a"}}
    assert longest_chain(graph) == list("eabcd")
    tree = ast.parse("if TYPE_CHECKING:\n    from x import a\nelse:\n    import b\ndef f():\n    import c")
    assert imports_of(without_types(tree)) == {"b", "c"}
    assert imports_of(tree) == {"x.a", "b", "c"}


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("kvlab.errors", "kvlab.arrays.dtype_name"),
        ("kvlab.ops.bits", "kvlab.cache.store"),
        ("kvlab.cache.cache", "kvlab.integrations.transformers"),
        ("kvlab.cache.cache", "kvlab.attention"),
        ("kvlab.arrays", "torch"),
        ("kvlab.ops.attention", "torch.nn"),
        ("kvlab.engine.plan", "transformers.AutoModel"),
        ("kvlab.reference.attention", "kvlab.errors.FormatError"),
        ("kvlab.reference.attention", "scipy.special"),
        ("kvlab.ops.cpu.codec", "kvlab.reference.codec"),
        ("kvlab.pages", "kvlab.reference.pages.bit_address"),
        ("kvlab.ops.plan", "kvlab.reference.cache_plan"),
        ("kvlab.arrays", "kvlab.numba_kernels.cpu.bits"),
        ("kvlab.pages", "kvlab.numba_kernels.cpu.pages"),
        ("kernels.numba.cpu.bits", "kvlab.arrays"),
        ("kernels.numba.cpu.bits", "kernels.cuda.flash"),
        ("kvlab.ops.bits", "kernels.numba.cpu.bits"),
    ],
)
def test_a_planted_violation_is_found(module: str, name: str) -> None:
    assert violations({module: {name}}) == [f"{module} imports {name}"]


def test_kernels_is_no_package_and_nothing_imports_it() -> None:
    """`kernels` is the import name of another distribution, which must stay importable beside this one."""
    assert not (ROOT / "kernels" / "__init__.py").exists()
    for path in ROOT.glob("tests/**/*.py"):
        assert "kernels" not in {top(name) for name in imports_of(ast.parse(path.read_text()))}, path


def headers_to_fold(texts: dict[str, str], most: int = 450) -> list[str]:
    """Return the CUDA headers that one source alone includes, and that would fit into it."""
    included = {name: re.findall(r'^#include "(.+)"', text, re.MULTILINE) for name, text in texts.items()}
    users = defaultdict(set)
    for source in (name for name in texts if name.endswith(".cu")):
        wanted = [source]
        while wanted:
            for header in included[wanted.pop()]:
                if source not in users[header]:
                    users[header].add(source)
                    wanted.append(header)
    lines = {name: text.count("\n") for name, text in texts.items()}
    alone = {header: source for header, (source, *others) in users.items() if not others}
    return sorted(header for header, source in alone.items() if lines[header] + lines[source] <= most)


def test_a_header_serves_two_sources_or_keeps_one_short() -> None:
    root = ROOT / "kernels" / "cuda"
    texts = {path.relative_to(root).as_posix(): path.read_text() for path in root.rglob("*.cu*")}
    assert headers_to_fold(texts) == []


def test_headers_to_fold_are_found() -> None:
    texts = {"a.cu": '#include "b.cuh"\n', "b.cuh": '#include "c.cuh"\n', "c.cuh": "\n", "d.cu": ""}
    assert headers_to_fold(texts) == ["b.cuh", "c.cuh"]
    assert headers_to_fold(texts, most=1) == []
    assert headers_to_fold(texts | {"d.cu": '#include "c.cuh"\n'}) == ["b.cuh"]

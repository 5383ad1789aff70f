"""How Sphinx builds the documentation: `sphinx-build -W docs build/docs`, with the extra "docs".

The table of backends is made from the registry, of which dispatch and error messages are made, too.
"""

from typing import Any

import kvlab
from kvlab.registry import BACKENDS, all_rows, describe

project = "kvlab"
author = "the kvlab maintainers"
version = release = kvlab.__version__

extensions = ["myst_parser", "numpydoc", "sphinx.ext.autodoc", "sphinx.ext.mathjax"]
myst_heading_anchors = 3
source_suffix = {".md": "markdown"}
exclude_patterns = ["performance/*.svg"]

autodoc_member_order = "bysource"
autosummary_generate = False  # numpydoc brings it; api.md names everything itself
numpydoc_show_class_members = False

html_theme = "pydata_sphinx_theme"
html_theme_options = {"show_toc_level": 2}


def backends() -> str:
    """Return the rows of the registry as a Markdown table."""
    lines = ["| operation | backend | on | what it supports |", "|---|---|---|---|"]
    for row in all_rows():
        supports = [f"{name}: {describe(allowed)}" for name, allowed in row.supports.items()]
        device = BACKENDS[row.backend]
        lines.append(f"| {row.operation} | {row.backend} | {device} | {'; '.join(supports) or 'all'} |")
    return "\n".join(lines)


def fill_in(app: Any, page: str, source: list[str]) -> None:
    """Put the table where a page asks for it."""
    source[0] = source[0].replace("{{ backends }}", backends())


def setup(app: Any) -> None:
    """Called by Sphinx."""
    app.connect("source-read", fill_in)

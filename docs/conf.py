"""How Sphinx builds the documentation: `sphinx-build -W docs build/docs`, with the extra "docs"."""

import kvlab

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

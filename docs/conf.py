"""Settings of the documentation site: `make docs` builds it into docs/_build/html."""

import shardlab  # noqa: F401 - so that a missing environment ends here, in one line

project = "shardlab"
author = "the authors of shardlab"
extensions = [
    "myst_parser",
    "sphinx_external_toc",
    "sphinxcontrib.mermaid",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = "shardlab"

myst_fence_as_directive = ["mermaid"]
# headings that pages link to
myst_heading_anchors = 4
autodoc_typehints = "none"
autodoc_member_order = "bysource"
napoleon_numpy_docstring = False

# output of commands is no program
highlight_language = "none"

"""How the pages become a site: `make docs`, with any warning an error."""

from __future__ import annotations

import kempner

project = "kempner"
author = "the kempner developers"
project_copyright = "the kempner developers"
version = release = kempner.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
source_suffix = {".md": "markdown"}
nitpicky = False

myst_enable_extensions = ["colon_fence", "tasklist"]
myst_heading_anchors = 4

autodoc_typehints = "description"
autodoc_member_order = "bysource"

html_theme = "furo"
html_title = f"kempner {version}"
html_theme_options = {"navigation_with_keys": True}
html_show_sphinx = False
default_role = "code"  # docstrings write names as Markdown does
html_static_path = ["_static"]
html_css_files = ["tables.css"]

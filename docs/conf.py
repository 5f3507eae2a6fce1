"""How the pages become a site: `make docs`, with any warning an error."""

from __future__ import annotations

from pathlib import Path

from sphinx.application import Sphinx

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
html_theme_options = {"navigation_with_keys": True, "top_of_page_buttons": []}
html_show_sphinx = False
default_role = "code"  # docstrings write names as Markdown does
html_static_path = ["_static"]
html_css_files = ["tables.css"]

# What Sphinx and the theme leave out for those who use a keyboard or have the page read to them.
ACCESSIBLE = {
    '<p class="caption" role="heading">': '<p class="caption" role="heading" aria-level="2">',
    "<pre>": '<pre tabindex="0">',  # it can be scrolled
    '<div class="table-wrapper': '<div tabindex="0" class="table-wrapper',  # so can it
    '<th class="head"><p></p></th>': '<td class="head"></td>',
    '<aside class="sidebar-drawer">': '<aside class="sidebar-drawer" aria-label="Pages">',
    '<aside class="toc-drawer">': '<aside class="toc-drawer" aria-label="On this page">',
}


def make_accessible(app: Sphinx, error: Exception | None) -> None:
    for path in Path(app.outdir).rglob("*.html"):
        text = new = path.read_text()
        for old, better in ACCESSIBLE.items():
            new = new.replace(old, better)
        if new != text:
            path.write_text(new)


def setup(app: Sphinx) -> None:
    app.connect("build-finished", make_accessible)

"""Sphinx's settings for the pages of this folder: `make docs` writes them to out/site.

Nothing is fetched while it is built or read: search, styles and pictures are files of the site,
which works from a disk (file://) as it does from a server.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(Path(__file__).with_name("_ext"))]

from pygments.lexers.shell import BashLexer  # noqa: E402
from sphinx.highlighting import lexers  # noqa: E402

import fa4  # noqa: E402, after the path that finds it

lexers["console"] = BashLexer()  # commands without a prompt in front of them

project = "fa4"
author = "The fa4 authors"
copyright = author
version = release = fa4.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "terms",
    "files",
    "plain_docstrings",
    "command_pages",
    "role_graphs",
    "scripts",
    "notebooks",
    "accessible",
]
source_suffix = {".md": "markdown"}
exclude_patterns = ["_*"]
root_doc = "index"

myst_enable_extensions = ["deflist", "attrs_block", "attrs_inline", "colon_fence"]
myst_heading_anchors = 4
suppress_warnings = ["myst.strikethrough"]

nitpicky = True  # a link to what is not there is an error
nitpick_ignore_regex = [("py:.*", ".*")]  # types of other packages have no page here
autodoc_typehints = "none"  # the docstrings say shapes and types in words
autodoc_mock_imports = ["torch"]  # the drop-in functions need it; their docstrings do not
autodoc_member_order = "bysource"
toc_object_entries_show_parents = "hide"
default_role = "code"  # `name` in docstrings
smartquotes = False

html_theme = "furo"
html_title = "fa4"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_search_summary = False  # a page on the disk may not read the others
html_show_sphinx = False
html_baseurl = ""
html_theme_options = {
    "light_css_variables": {"color-brand-primary": "#0072B2", "color-brand-content": "#0072B2"},
    "dark_css_variables": {"color-brand-primary": "#56B4E9", "color-brand-content": "#56B4E9"},
}
pygments_style = "a11y-high-contrast-light"
pygments_dark_style = "a11y-high-contrast-dark"

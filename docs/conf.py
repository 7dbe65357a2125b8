"""The site: ``make docs`` builds it with Sphinx, from these pages and the docstrings, into build/docs.

Links between the pages are relative Markdown links, so that they work on GitHub too. Those that lead out of
docs/ become links to the repository here. Warnings, such as one of a link that leads nowhere, are errors.
"""

from __future__ import annotations

import re
from pathlib import Path

from sphinx.application import Sphinx
from sphinx.util import logging

import pyhvd
from pyhvd.config import suffix_of

ROOT = Path(__file__).resolve().parent.parent
REPOSITORY = "https://github.com/pyhvd/pyhvd"

project = "pyhvd"
version = release = pyhvd.__version__
extensions = ["myst_parser", "numpydoc", "sphinx.ext.autodoc"]
nitpicky = True

html_theme = "furo"
html_title = f"pyhvd {version}"
html_copy_source = False
html_show_copyright = False
html_theme_options = {
    "source_repository": f"{REPOSITORY}/",
    "source_branch": "main",
    "source_directory": "docs/",
}

myst_heading_anchors = 3  # GitHub's anchors of headings

autodoc_member_order = "bysource"
autodoc_preserve_defaults = True  # Compression.none, not its repr
autodoc_typehints = "none"  # the docstrings say more: shapes and units
numpydoc_show_class_members = False  # autodoc shows them
numpydoc_validation_checks = {"GL06", "GL07", "PR02", "PR03", "PR07", "RT03"}


def link_to_repository(app: Sphinx, docname: str, source: list[str]) -> None:
    """Make links to files outside of docs/ links to the repository."""

    def replaced(match: re.Match[str]) -> str:
        if not (ROOT / match["path"]).exists():
            logging.getLogger(__name__).warning("%s does not exist", match["path"], location=docname)
        return f"]({REPOSITORY}/blob/main/{match['path']}"

    source[0] = re.sub(r"\]\(\.\./(?P<path>[^)#]*)", replaced, source[0])


def without_self(
    app: Sphinx,
    what: str,
    name: str,
    obj: object,
    options: object,
    signature: str | None,
    returns: str | None,
) -> tuple[str, str | None] | None:
    """Leave ``self`` out, which Cython writes into the signatures of its methods."""
    if signature is None or not signature.startswith("(self"):
        return None
    return re.sub(r"^\(self(, )?", "(", signature), returns


def describe_knobs(app: Sphinx, what: str, name: str, obj: object, options: object, lines: list[str]) -> None:
    """Append the table of knobs to the docstring of `Config`."""
    if obj is not pyhvd.Config:
        return
    lines += ["Attributes", "----------"]
    for knob in pyhvd.Config.knobs():
        variable = f"PYHVD_{suffix_of(knob)}"
        lines += [
            f"{knob.name} : {knob.type}",
            f"    {knob.metadata['doc']} (``{variable}``; ``{knob.default!r}``)",
        ]
    lines.append("")


def setup(app: Sphinx) -> None:
    """Called by Sphinx."""
    before_numpydoc = 400
    app.connect("source-read", link_to_repository)
    app.connect("autodoc-process-signature", without_self, before_numpydoc)
    app.connect("autodoc-process-docstring", describe_knobs, before_numpydoc)

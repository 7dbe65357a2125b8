"""Relative links in the Markdown files lead somewhere, as GitHub follows them; the site checks anchors too."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("benchmarks/**/*.md")]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    prose = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)
    targets = re.findall(r"\]\((?!https?:|#)([^)#]+)", prose)
    assert [target for target in targets if not (page.parent / target).exists()] == []


def test_every_page_is_in_the_contents() -> None:
    """A page that no toctree has can only be reached by who knows of it."""
    index = (ROOT / "docs" / "index.md").read_text()
    listed = re.findall(r"^(\w+)$", index, re.M)
    assert sorted(listed) == sorted(page.stem for page in ROOT.glob("docs/*.md") if page.stem != "index")

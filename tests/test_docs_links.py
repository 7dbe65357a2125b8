"""Relative links in the Markdown files lead somewhere, as GitHub follows them.

The build of the site checks those of docs/ again, with their anchors.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("benchmarks/**/*.md")]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    prose = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)
    targets = re.findall(r"\]\((?!https?:|#)([^)#]+)", prose)
    assert [target for target in targets if not (page.parent / target).exists()] == []

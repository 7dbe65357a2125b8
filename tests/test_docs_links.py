"""Relative links in the Markdown files lead somewhere, and generated parts are up to date.

The build of the site checks the links of docs/ again, with their anchors.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("benchmarks/**/*.md")]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    prose = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)
    targets = re.findall(r"\]\((?!https?:|#)([^)#]+)", prose)
    assert [target for target in targets if not (page.parent / target).exists()] == []


def test_the_picture_of_the_packages_is_up_to_date() -> None:
    command = [sys.executable, str(ROOT / "scripts" / "draw_packages.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("page", ["architecture", "mechanisms", "internals"])
def test_files_that_are_named_exist(page: str) -> None:
    """A file may be named by the end of its path."""
    files = [f"/{path}" for folder in ("pyhvd", "tests") for path in (ROOT / folder).rglob("*")]
    text = (ROOT / "docs" / f"{page}.md").read_text().split("## Where this differs")[0]
    generated = r"<!-- walk: .*?<!-- end of walk -->"  # by a tree that had these files
    named = re.findall(r"[\w/]+\.(?:py[xi]?|px[id]|[ch]|cu)\b", re.sub(generated, "", text, flags=re.S))
    assert len(named) > 10
    assert [name for name in named if not any(file.endswith(f"/{name}") for file in files)] == []

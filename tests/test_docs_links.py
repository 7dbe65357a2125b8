"""Links in the Markdown files lead somewhere, and generated parts are up to date.

No network: a link to this repository's own address is looked up in the tree. The build of the site checks the
links of docs/ again.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
OWN_ADDRESS = re.compile(
    r"https://(?:github\.com/pyhvd/pyhvd/(?P<kind>blob|tree)|raw\.githubusercontent\.com/pyhvd/pyhvd)/main/"
)
PAGES = [
    *ROOT.glob("*.md"),
    *(path for part in ("docs", "benchmarks", "examples", "compat") for path in ROOT.glob(f"{part}/**/*.md")),
]
page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def _prose(page: Path) -> str:
    """Return a page without its blocks of code."""
    return re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)


def _targets(page: Path) -> list[str]:
    return re.findall(r"\]\(([^)\s]+)", _prose(page))


def _anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub and the site make them."""
    headings = re.findall(r"^#+ (.*)$", _prose(page), re.M)
    plain = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower() for heading in headings]
    return {re.sub(r"[^\w\- ]", "", heading).replace(" ", "-") for heading in plain}


def _fault(page: Path, target: str) -> str:
    """Return why a link does not lead anywhere; empty if it does, or leads to another site."""
    own = OWN_ADDRESS.match(target)
    if own is None and re.match(r"https?:", target):
        return ""
    path, _, anchor = target.removeprefix(own[0] if own else "").partition("#")
    leads_to = (ROOT if own else page.parent) / path if path else page
    if not leads_to.exists():
        return "no such file"
    if own and leads_to.is_dir() != (own["kind"] == "tree"):
        return "GitHub has folders at /tree/ and files at /blob/"
    return "no such heading" if anchor and anchor not in _anchors(leads_to) else ""


@page
def test_links_lead_somewhere(page: Path) -> None:
    faults = {target: _fault(page, target) for target in _targets(page)}
    assert {target: fault for target, fault in faults.items() if fault} == {}


def test_the_page_on_pypi_has_no_relative_links() -> None:
    """README.md is the long description there, with no files beside it."""
    targets = _targets(ROOT / "README.md")
    assert len(targets) > 20
    assert [target for target in targets if not target.startswith("https://")] == []


def test_the_picture_of_the_packages_is_up_to_date() -> None:
    command = [sys.executable, str(ROOT / "scripts" / "draw_packages.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("page", ["architecture", "mechanisms", "internals"])
def test_files_that_are_named_exist(page: str) -> None:
    """A file may be named by the end of its path."""
    files = [f"/{path}" for folder in ("pyhvd", "tests") for path in (ROOT / folder).rglob("*")]
    text = (ROOT / "docs" / f"{page}.md").read_text().split("## Where this differs")[0]
    # Made by a tree that had these files; and C of the reader's.
    generated = r"<!-- walk: .*?<!-- end of walk -->|```c\n.*?```"
    named = re.findall(r"[\w/]+\.(?:py[xi]?|px[id]|[ch]|cu)\b", re.sub(generated, "", text, flags=re.S))
    assert len(named) > 10
    assert [name for name in named if not any(file.endswith(f"/{name}") for file in files)] == []

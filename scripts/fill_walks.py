"""Fill the lists of files in docs/internals.md from the output of `make walk`.

A list stands between ``<!-- walk: first_allreduce -->`` and ``<!-- end of walk -->``; the name is that
of a count of scripts/walk.py.

  make walk ARGS="--json build/walk.json"
  python scripts/fill_walks.py build/walk.json
"""

from __future__ import annotations

import argparse
import json
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "internals.md"
BLOCK = re.compile(r"(<!-- walk: (?P<count>\w+) -->\n).*?(<!-- end of walk -->)", re.S)
COLUMN = 40
WIDTH = 110
MOST_FUNCTIONS = 6


def functions_by_file(visits: list[dict[str, Any]]) -> dict[str, list[str]]:
    """Return the files in the order of their first visit, with the functions entered in any visit."""
    files: dict[str, list[str]] = {}
    for visit in visits:
        functions = files.setdefault(visit["file"], [])
        functions += [each for each in visit["functions"] if each not in functions]
    return files


def describe(walk: dict[str, Any]) -> Iterator[str]:
    """Return the lines for one walk: each thread with its files."""
    for thread in walk["threads"]:
        files = functions_by_file(thread["visits"])
        if not files:
            continue
        plural = "" if len(files) == 1 else "s"
        yield f"{thread['name']}: {len(files)} file{plural}"
        for file, functions in files.items():
            first = f"  {file:<{COLUMN - 3}} "
            shown = functions[:MOST_FUNCTIONS] + ["..."] * (len(functions) > MOST_FUNCTIONS)
            yield from textwrap.wrap(
                ", ".join(shown), WIDTH, initial_indent=first, subsequent_indent=" " * COLUMN
            )
        yield ""


def fill(page: str, walks: list[dict[str, Any]]) -> str:
    """Return the page with the lists of these walks; a walk that was not made keeps its old list."""

    def replaced(match: re.Match[str]) -> str:
        for walk in walks:
            if match["count"] in walk["counts"]:
                text = "\n".join(describe(walk)).rstrip()
                return f"{match[1]}```text\n{text}\n```\n{match[3]}"
        return match[0]

    return BLOCK.sub(replaced, page)


def main() -> None:
    """Fill the page from the files named on the command line."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="+", type=Path, help="what walk.py --json has written")
    walks = [walk for file in parser.parse_args().files for walk in json.loads(file.read_text())["walks"]]
    PAGE.write_text(fill(PAGE.read_text(), walks))


if __name__ == "__main__":
    main()

"""Tables on the terminal: by rich if it is installed (extra ``cli``), else in plain columns."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence


def print_table(title: str, headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table with the first column left-aligned, the others right-aligned, and a sum in the last row.

    If stdout is not a terminal, the table is plain, so that a pipe gets whole lines of any width.
    """
    if sys.stdout.isatty() and importlib.util.find_spec("rich") is not None:
        _print_rich(title, headings, rows)
    else:
        print(plain_table(title, headings, rows))


def plain_table(title: str, headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table as text."""
    wide = [max(len(line[i]) for line in (headings, *rows)) for i in range(len(headings))]

    def line(cells: Sequence[str]) -> str:
        first = cells[0].ljust(wide[0])
        return "  ".join(
            [first, *(cell.rjust(w) for cell, w in zip(cells[1:], wide[1:], strict=True))]
        ).rstrip()

    rule = "  ".join("-" * w for w in wide)
    return "\n".join([title, line(headings), rule, *map(line, rows[:-1]), rule, line(rows[-1])])


def _print_rich(title: str, headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table(title=escape(title))
    for index, heading in enumerate(headings):
        table.add_column(escape(heading), justify="right" if index else "left", overflow="fold")
    for row in rows[:-1]:
        table.add_row(*map(escape, row))
    table.add_section()
    table.add_row(*map(escape, rows[-1]))
    Console().print(table)

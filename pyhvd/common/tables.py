"""Tables on the terminal: by rich if it is installed (extra ``cli``), else in plain columns."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.table import Table


def print_table(title: str, headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table with the first column left-aligned, the others right-aligned, and a sum in the last row.

    If stdout is not a terminal, the table is plain, so that a pipe gets whole lines of any width.
    """
    if sys.stdout.isatty() and importlib.util.find_spec("rich") is not None:
        _print_rich(title, headings, rows)
        return
    lines = align([headings, *rows], left=1)
    rule = "  ".join("-" * width for width in _widths([headings, *rows]))
    print(title, lines[0], rule, *lines[1:-1], rule, lines[-1], sep="\n")


def align(rows: Sequence[Sequence[str]], left: int = 0) -> list[str]:
    """Return rows as lines with aligned columns, the first ``left`` of them to the left."""
    widths = _widths(rows)
    return [
        "  ".join(
            cell.ljust(width) if i < left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def _widths(rows: Sequence[Sequence[str]]) -> list[int]:
    return [max(map(len, column)) for column in zip(*rows, strict=True)]


def _print_rich(title: str, headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    from rich.console import Console
    from rich.markup import escape

    table = rich_table(headings, rows[:-1], title=escape(title))
    table.columns[0].justify = "left"
    for column in table.columns:
        column.overflow = "fold"
    table.add_section()
    table.add_row(*map(escape, rows[-1]))
    Console().print(table)


def rich_table(headings: Sequence[str], rows: Iterable[Sequence[str]], **options: Any) -> Table:
    """Return a table of rich, with the texts as they are, to the right."""
    from rich.markup import escape
    from rich.table import Column, Table

    table = Table(*(Column(escape(heading), justify="right") for heading in headings), **options)
    for row in rows:
        table.add_row(*map(escape, row))
    return table

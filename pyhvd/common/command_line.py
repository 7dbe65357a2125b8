"""The parser of a subcommand's flags, and its progress line."""

from __future__ import annotations

import argparse
import sys
from typing import Any


class CommandParser(argparse.ArgumentParser):
    """A parser whose help ends with examples, as they are written; so do the parsers of its actions."""

    def __init__(self, *, examples: str, **options: Any) -> None:
        layout = argparse.RawDescriptionHelpFormatter
        super().__init__(epilog=examples, formatter_class=layout, **options)


def show_progress(text: str) -> None:
    """Redraw the progress line on a terminal; elsewhere do nothing. An empty text removes it."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)

"""The parser of a subcommand's flags."""

from __future__ import annotations

import argparse
from typing import Any


class CommandParser(argparse.ArgumentParser):
    """A parser whose help ends with examples, as they are written; so do the parsers of its actions."""

    def __init__(self, *, examples: str, **options: Any) -> None:
        layout = argparse.RawDescriptionHelpFormatter
        super().__init__(epilog=examples, formatter_class=layout, **options)

"""Texts for errors and reports: cut, escaped and summarised."""

from __future__ import annotations

import traceback
from collections.abc import Mapping, Sequence


def sendable(text: str) -> str:
    """Return a text that UTF-8 can encode: other characters, as in odd file names, become escapes."""
    return text.encode("utf-8", "backslashreplace").decode()


MAX_TEXT = 6000
"""Most characters of an exception's text, or of its traceback, in a message."""


def exception_text(exc: BaseException) -> str:
    """Return an exception's type and full text; an exception whose ``str()`` fails still has a type."""
    try:
        text = str(exc)
    except Exception as of_str:
        text = f"<its str() raised {type(of_str).__name__}>"
    return f"{type(exc).__name__}: {text}" if text else type(exc).__name__


def describe_exception(exc: BaseException) -> str:
    """Return an exception's type and text; the middle of a long text is cut out."""
    return shorten(exception_text(exc))


def describe_traceback(exc: BaseException, skip: int = 0) -> str:
    """Return an exception's traceback as Python shows it, without the first ``skip`` frames.

    The middle of a long traceback is cut out.
    """
    link = exc.__traceback__
    for _ in range(skip):
        link = link.tb_next if link is not None else None
    return shorten("".join(traceback.format_exception(type(exc), exc, link)))


def shorten(text: str, between: str = "\n") -> str:
    """Return a text that can be sent; above MAX_TEXT characters a note replaces its middle."""
    if len(text) > MAX_TEXT:
        half = MAX_TEXT // 2
        said = f"... {len(text) - 2 * half} characters left out ..."
        text = f"{text[:half]}{between}{said}{between}{text[-half:]}"
    return sendable(text)


def describe_ranks(ranks: Sequence[int]) -> str:
    """Return ``"rank 3"`` or ``"ranks 0-2, 5"``."""
    ordered = sorted(ranks)
    runs: list[list[int]] = []
    for rank in ordered:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    text = ", ".join(f"{a}" if a == b else f"{a}-{b}" for a, b in runs)
    return f"rank {text}" if len(ordered) == 1 else f"ranks {text}"


def describe_values(per_rank: Mapping[int, str]) -> str:
    """Return ``"ranks 0-2: (3,); rank 3: (4,)"``."""
    by_value: dict[str, list[int]] = {}
    for rank in sorted(per_rank):
        by_value.setdefault(per_rank[rank], []).append(rank)
    return "; ".join(f"{describe_ranks(ranks)}: {value}" for value, ranks in by_value.items())

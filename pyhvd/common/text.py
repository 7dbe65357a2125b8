"""Texts for errors and reports: cut, escaped and summarised."""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import TypeVar


def sendable(text: str) -> str:
    """Return a text that UTF-8 can encode: other characters, as in odd file names, become escapes."""
    return text.encode("utf-8", "backslashreplace").decode()


def cut(text: str, most: int) -> str:
    """Return a text of at most so many characters; dots stand for the rest."""
    return text if len(text) <= most else f"{text[: most - 3]}..."


MAX_TEXT = 6000
"""Most characters of an exception's text, or of its traceback, in a message."""


def exception_text(exc: BaseException) -> str:
    """Return an exception's type and full text; an exception whose ``str()`` fails still has a type."""
    try:
        text = str(exc)
    except Exception as of_str:
        text = f"<its str() raised {type(of_str).__name__}>"
    return f"{type(exc).__name__}: {text}" if text else type(exc).__name__


def describe_import_error(exc: ImportError, package: str, extra: str, module: str = "") -> str:
    """Return why a package cannot be imported, and the remedy: it is absent, or its own import fails.

    Parameters
    ----------
    exc : ImportError
        The failure of its import.
    package : str
        What pip installs.
    extra : str
        The extra of pyhvd that brings the package.
    module : str
        The package's module; by default it has the same name, with underscores.
    """
    absent = isinstance(exc, ModuleNotFoundError) and (exc.name or "").partition(".")[0]
    if absent == (module or package.replace("-", "_")):
        return f'{package}, which is not installed: pip install "pyhvd[{extra}]"'
    return f"{package}, which is installed, but its import fails: {type(exc).__name__}: {exc}"


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


MAX_LISTED = 16
"""Most items of a list in a text; of more, the first ones and the last ones are shown."""

_FIRST, _LAST = 4, 2
_HOSTS = 8  # so many names of hosts are listed as they are
_NUMBERED = re.compile(r"(.*?)(\d+)(\D*)", re.DOTALL)
_T = TypeVar("_T")


def list_some(items: Sequence[_T], between: str = ", ", show: Callable[[_T], str] = str) -> str:
    """Return ``"a, b"``, or of more than MAX_LISTED items ``"a, b, c, d, ... y, z"``."""
    if len(items) <= MAX_LISTED:
        return between.join(map(show, items))
    first, last = map(show, items[:_FIRST]), map(show, items[-_LAST:])
    return f"{between.join(first)}{between}... {between.join(last)}"


def list_numbers(numbers: Iterable[int]) -> str:
    """Return ``"0-2, 5"``, as :func:`list_some` does of many."""
    return list_some(_runs(sorted(numbers)), show=_describe_run)


def list_members(ranks: Sequence[int]) -> str:
    """Return ``"[0, 2]"``, as Python does; of many ranks as :func:`describe_ranks` does."""
    return str([*ranks]) if len(ranks) <= MAX_LISTED else describe_ranks(ranks)


def list_hosts(names: Sequence[str]) -> str:
    """Return ``"a, b"``; of many hosts with numbered names ``"h0-h1249"``, as :func:`list_some` does."""
    if len(names) <= _HOSTS:
        return ", ".join(names)
    runs: list[list[str]] = []
    for name in names:
        if runs and _next_name(runs[-1][-1]) == name:
            runs[-1][1:] = [name]
        else:
            runs.append([name])
    return list_some(runs, show="-".join)


def describe_ranks(ranks: Iterable[int], note: str = "") -> str:
    """Return ``"rank 3"`` or ``"ranks 0-2, 5"``.

    Of more than MAX_LISTED ranges the text has the first ones, the last ones, and the number of all ranks:
    ``"ranks 1, 3, 5, 7, ... 9997, 9999 (5,000 ranks)"``. A note follows in the same parentheses.
    """
    ordered = sorted(ranks)
    runs = _runs(ordered)
    count = f"{len(ordered):,} ranks" if len(runs) > MAX_LISTED else ""
    notes = ": ".join(filter(None, [count, note]))
    text = f"{'rank' if len(ordered) == 1 else 'ranks'} {list_some(runs, show=_describe_run)}"
    return f"{text} ({notes})" if notes else text


def describe_hosts(names: Sequence[str]) -> str:
    """Return ``"host a"``, ``"hosts a, b"`` or ``"hosts h0-h1249 (1,250 hosts)"``."""
    count = f" ({len(names):,} hosts)" if len(names) > _HOSTS else ""
    return f"{'host' if len(names) == 1 else 'hosts'} {list_hosts(names)}{count}"


def describe_values(per_rank: Mapping[int, str]) -> str:
    """Return ``"ranks 0-2: (3,); rank 3: (4,)"``; of many values, some and their number."""
    by_value: dict[str, list[int]] = {}
    for rank in sorted(per_rank):
        by_value.setdefault(per_rank[rank], []).append(rank)
    text = list_some([*by_value.items()], "; ", lambda each: f"{describe_ranks(each[1])}: {each[0]}")
    return f"{text} ({len(by_value):,} different values)" if len(by_value) > MAX_LISTED else text


def cut_lines(items: Sequence[_T], most: int, what: str, show: Callable[[_T], str] = str) -> list[str]:
    """Return a line for each of at most ``most`` items, and one with the number of the others."""
    lines = [*map(show, items[:most])]
    left = len(items) - most
    return [*lines, f"  ... and {left} more {what}"] if left > 0 else lines


def _runs(ordered: Sequence[int]) -> list[tuple[int, int]]:
    """Return the first and the last number of each range of sorted numbers."""
    if not ordered:
        return []
    gaps = [(a, b) for a, b in pairwise(ordered) if b > a + 1]
    return [*zip([ordered[0], *(b for _, b in gaps)], [*(a for a, _ in gaps), ordered[-1]], strict=True)]


def _describe_run(run: tuple[int, int]) -> str:
    first, last = run
    return f"{first}" if first == last else f"{first}-{last}"


def _next_name(name: str) -> str | None:
    """Return the name with the next number, if the name has one."""
    if (found := _NUMBERED.fullmatch(name)) is None:
        return None
    before, number, after = found.groups()
    return f"{before}{int(number) + 1:0{len(number)}d}{after}"

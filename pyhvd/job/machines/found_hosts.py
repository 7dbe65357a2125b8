"""The hosts that a script prints or a function returns: what is read, and what is wrong with it. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from pyhvd.common.host_entry import is_host, parse_entry
from pyhvd.job.machines.member_host import FoundHost

_LINE_SHOWN = 80


@dataclass(frozen=True)
class Found:
    """A run that ended well: the hosts, and a text for each bad line."""

    hosts: tuple[FoundHost, ...]
    problems: tuple[str, ...]


@dataclass(frozen=True)
class DiscoveryFailed:
    """A run that failed, and why."""

    why: str


def parse_hosts(lines: Iterable[object], slots: int = 1) -> tuple[tuple[FoundHost, ...], tuple[str, ...]]:
    """Return the hosts of lines that a script printed or a function returned, and a text for each bad line.

    Blank lines, and text after ``#``, are ignored. Of a host that is printed twice the last line counts.

    Parameters
    ----------
    lines : iterable
        Lines such as ``h``, ``h:2``, ``[fe80::1]`` or ``[fe80::1]:2``; an object that is no str is a bad one.
    slots : int
        The slots of a line that gives none.
    """
    hosts: dict[str, int] = {}
    problems = []
    for number, line in enumerate(lines, 1):
        entry = line.partition("#")[0].strip() if isinstance(line, str) else line
        if entry == "":
            continue
        try:
            name, given = parse_entry(entry if isinstance(entry, str) else "")
        except ValueError:
            problems.append(f"line {number}, {show_value(entry)}: expected h, h:2 or [fe80::1]:2")
        else:
            hosts[name] = given or slots
    return tuple(FoundHost(name, each) for name, each in hosts.items()), tuple(problems)


def check_hosts(given: Iterable[tuple[object, object]]) -> tuple[tuple[FoundHost, ...], tuple[str, ...]]:
    """Return the hosts of pairs of name and slots, and a text for each bad pair."""
    hosts = []
    problems = []
    for name, slots in given:
        if not isinstance(name, str) or not is_host(name):
            problems.append(f"host {show_value(name)}: expected a host name or an IPv6 address")
        elif not isinstance(slots, int) or isinstance(slots, bool) or slots <= 0:
            problems.append(
                f"host {show_value(name)}, slots {show_value(slots)}: expected a whole number above 0"
            )
        else:
            hosts.append(FoundHost(name, slots))
    return tuple(hosts), tuple(problems)


def show_value(value: object) -> str:
    """Return a value as errors show it."""
    if isinstance(value, str):
        return repr(value if len(value) <= _LINE_SHOWN else f"{value[:_LINE_SHOWN]}...")
    shown = repr(value)
    return shown if len(shown) <= _LINE_SHOWN else f"{shown[:_LINE_SHOWN]}..."

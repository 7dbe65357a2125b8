"""Hosts of a job, as the user or a cluster names them, and which ranks each host gets. Pure.

Rules
-----
1. Hosts stay in the given order, and are filled one after the other. Rank 0 is on the first.
2. A name that is given twice is one host, with the sum of the slots.
3. Names can stand on a command line: none begins with a dash.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, replace

from pyhvd.common.host_entry import FORMS, is_host, parse_entry, parse_slots

_USER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+\\-]*\$?")
_LOOPBACK_NAMES = {
    *("localhost", "localhost.localdomain", "localhost4", "localhost6"),
    *("ip6-localhost", "ip6-loopback"),
}


class HostsError(ValueError):
    """Hosts are named wrongly, or have too few slots; the text says where, and what to change."""


@dataclass(frozen=True, slots=True)
class Host:
    """A host, and how many ranks it takes.

    Attributes
    ----------
    name : str
        A host name, or an IPv4 or IPv6 address without brackets.
    slots : int
        The largest number of ranks on it, at least 1.
    user : str
        The user to log in as; empty if none was given.
    """

    name: str
    slots: int
    user: str = ""

    def __post_init__(self) -> None:
        """Check the rules that a host on a command line must keep."""
        if not is_host(self.name):
            raise HostsError(f"invalid host name {self.name!r}: expected a name or an address")
        if self.slots < 1:
            raise HostsError(f"host {self.name}: slots must be at least 1, not {self.slots}")

    @property
    def destination(self) -> str:
        """The host for an agent's command: ``name``, or ``user@name``."""
        return f"{self.user}@{self.name}" if self.user else self.name

    def __str__(self) -> str:
        """Return the host as ``-H`` takes it."""
        name = f"[{self.name}]" if ":" in self.name else self.name
        return f"{self.user}@{name}:{self.slots}" if self.user else f"{name}:{self.slots}"


@dataclass(frozen=True, slots=True)
class HostRanks:
    """The ranks of one host.

    Attributes
    ----------
    host : Host
        The host.
    ranks : range
        Its ranks, at least one.
    own : bool
        Whether it is the launcher's host.
    """

    host: Host
    ranks: range
    own: bool


@dataclass(frozen=True, slots=True)
class JobHosts:
    """Which ranks run where, and how an agent is started there.

    Attributes
    ----------
    hosts : tuple of HostRanks
        The hosts that have ranks, in rank order.
    agent : str
        The agent's command: a template with ``{host}`` and ``{command}``; see
        :mod:`pyhvd.run.hosts.agent_template`.
    interface : str
        The network interface that the cluster names; empty if it names none.
    """

    hosts: tuple[HostRanks, ...]
    agent: str
    interface: str = ""

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self.hosts[-1].ranks.stop

    @property
    def on_this_host(self) -> bool:
        """Whether all ranks are on the launcher's host."""
        return all(placed.own for placed in self.hosts)


def parse_hosts(text: str, slots_per_host: int = 1, where: str = "-H") -> tuple[Host, ...]:
    """Return the hosts of ``-H``.

    Parameters
    ----------
    text : str
        Entries with commas between them, each ``h``, ``h:2``, ``user@h:2`` or ``[fe80::1]:2``.
    slots_per_host : int
        The slots of an entry that gives none.
    where : str
        The source of the text, for errors.

    Raises
    ------
    HostsError
        An entry is empty or malformed, or a host is given with two users.
    """
    hosts = []
    for entry in text.split(","):
        name, user, slots = _parse_entry(entry.strip(), where)
        hosts.append(Host(name, slots or slots_per_host, user))
    return merged(hosts, where)


def _parse_entry(entry: str, where: str) -> tuple[str, str, int | None]:
    """Return name, user and slots of one entry of ``-H``; the slots are None if they are not given."""
    if not entry:
        raise HostsError(f"{where}: an entry is empty: expected {FORMS}, with commas between hosts")
    user, at, rest = entry.rpartition("@")
    if at and not _USER.fullmatch(user):
        raise HostsError(f"{where}: {entry!r}: invalid user {user!r}: expected {FORMS}")
    try:
        name, slots = parse_entry(rest)
    except ValueError as exc:
        raise HostsError(f"{where}: {entry!r}: {exc}") from None
    return name, user, slots


def parse_hostfile(text: str, path: str, slots_per_host: int = 1) -> tuple[Host, ...]:
    """Return the hosts of a hostfile: one on a line, as ``h slots=2``, ``h:2`` or ``h``.

    Blank lines and text after ``#`` are ignored, and so is ``max_slots``.

    Raises
    ------
    HostsError
        A line is malformed, or the file names no host; the text has the file and the line's number.
    """
    hosts = []
    for number, line in enumerate(text.splitlines(), 1):
        words = re.sub(r"\s*=\s*", "=", line.partition("#")[0]).split()
        if words:
            hosts.append(_hostfile_line(words, f"{path}, line {number}", slots_per_host))
    if not hosts:
        raise HostsError(f"{path} names no host: expected lines such as: h1 slots=2")
    return merged(hosts, path)


def _hostfile_line(words: list[str], where: str, slots_per_host: int) -> Host:
    name, user, slots = _parse_entry(words[0], where)
    line = " ".join(words)
    for word in words[1:]:
        key, equals, value = word.partition("=")
        if equals and key in ("max_slots", "max-slots"):
            continue
        if not equals or key != "slots":
            raise HostsError(f"{where}: {line!r}: {word!r} is unknown: expected h slots=2, h:2 or h")
        if slots is not None:
            raise HostsError(f"{where}: {line!r}: the slots are given twice: expected h slots=2, or h:2")
        try:
            slots = parse_slots(value)
        except ValueError as exc:
            raise HostsError(f"{where}: {line!r}: {exc}") from None
    return Host(name, slots or slots_per_host, user)


def merged(hosts: Iterable[Host], where: str) -> tuple[Host, ...]:
    """Return the hosts, each name once with the sum of its slots, in the order of first appearance."""
    found: dict[str, Host] = {}
    for host in hosts:
        known = found.get(host.name)
        if known is not None and known.user != host.user:
            raise HostsError(
                f"{where}: host {host.name} is given as {known.destination} and as {host.destination}:"
                " give it with one user"
            )
        found[host.name] = host if known is None else replace(known, slots=known.slots + host.slots)
    return tuple(found.values())


def place_ranks(
    hosts: Sequence[Host], size: int | None, number: str = "-n", *, oversubscribe: bool = False
) -> tuple[tuple[Host, range], ...]:
    """Return the ranks of each host; hosts without a rank are left out.

    Parameters
    ----------
    hosts : sequence of Host
        The hosts, at least one.
    size : int or None
        The number of ranks; None: as many as there are slots.
    number : str
        The name of the option with that number, for errors.
    oversubscribe : bool
        If there are more ranks than slots: put the others on the last host, instead of raising an error.

    Raises
    ------
    HostsError
        There are more ranks than slots.
    """
    total = sum(host.slots for host in hosts)
    left = total if size is None else size
    if left > total and not oversubscribe:
        raise HostsError(
            f"{number} {left} is more than the {total} slots of {_named(hosts)}:"
            f" give a smaller {number}, or more slots or hosts"
        )
    placed: list[tuple[Host, range]] = []
    first = 0
    for index, host in enumerate(hosts):
        count = left if index == len(hosts) - 1 else min(left, host.slots)
        if count:
            placed.append((host, range(first, first + count)))
        first += count
        left -= count
    return tuple(placed)


def mark_own(placed: Iterable[tuple[Host, range]], own: Container[Host]) -> tuple[HostRanks, ...]:
    """Return the ranks of each host, and whether it is the launcher's.

    Raises
    ------
    HostsError
        A host is localhost, and another is not the launcher's.
    """
    marked = tuple(HostRanks(host, ranks, host in own) for host, ranks in placed)
    loopback = next((each.host for each in marked if is_loopback(each.host.name)), None)
    remote = next((each.host for each in marked if not each.own and each.host != loopback), None)
    if loopback is not None and remote is not None:
        raise HostsError(
            f"{loopback.name} is among other hosts, and {remote.name} cannot reach this host by that name:"
            " give this host's own name or address instead"
        )
    return marked


def _named(hosts: Sequence[Host]) -> str:
    """Return the hosts for a message, at most 8 of them."""
    more = f", ... ({len(hosts)} hosts)" if len(hosts) > 8 else ""
    return ", ".join(map(str, hosts[:8])) + more


def is_loopback(name: str) -> bool:
    """Return whether a name or address always means the host on which it is used."""
    if name.lower() in _LOOPBACK_NAMES:
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False

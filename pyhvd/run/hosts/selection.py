"""Which hosts a job gets, by which rule, which of them is this one, and which ranks sit on each.

Rules, in this order
--------------------
1. ``-H``, or ``--hostfile``.
2. The hosts that a cluster allocated to this job.
3. This host, with ``-n`` ranks.
"""

from __future__ import annotations

import os
import pwd
import socket
from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass, replace

from pyhvd.common.tables import align
from pyhvd.job.spec import HOSTFILE, HOSTS, NUM_PROC
from pyhvd.run.hosts.agent_template import SSH, ssh_command
from pyhvd.run.hosts.clusters.detection import explain_pod_of_job, find_allocation
from pyhvd.run.hosts.clusters.results import Allocation, Surroundings
from pyhvd.run.hosts.hosts import (
    Host,
    HostRanks,
    HostsError,
    JobHosts,
    is_loopback,
    mark_own,
    parse_hostfile,
    parse_hosts,
    place_ranks,
)
from pyhvd.run.options import Options

FindOwn = Callable[[Iterable[Host]], Container[Host]]
# So many names are looked up at a time: a lookup that fails may take 10 s.
_LOOKUPS = 64
_MISSING_SIZE = "the number of ranks is missing: give e.g. -n 2"


@dataclass(frozen=True, slots=True)
class HostSelection:
    """The hosts of a job.

    Attributes
    ----------
    rule : str
        The rule that chose them.
    hosts : tuple of Host
        The hosts, also those without a rank.
    placed : JobHosts or None
        The ranks of each host; None if the number of ranks is missing.
    note : str
        A sentence about the rule, or why `placed` is None; empty if there is none.
    """

    rule: str
    hosts: tuple[Host, ...]
    placed: JobHosts | None
    note: str = ""


def select(options: Options, around: Surroundings, find_own: FindOwn) -> HostSelection:
    """Return the hosts of a job, and which ranks sit on each.

    Parameters
    ----------
    options : Options
        The command line.
    around : Surroundings
        The environment, and how files are read.
    find_own : callable
        Returns those of the hosts that are the launcher's.

    Raises
    ------
    HostsError
        The hosts are named wrongly, cannot be read, or have too few slots.
    """
    if options.chooses_hosts:
        return _given(options, around, find_own)
    allocation = find_allocation(around)
    if allocation is not None and allocation.hosts:
        return _allocated(allocation, options, find_own)
    if options.num_proc is None:
        note = explain_pod_of_job(around.environ) or _MISSING_SIZE
        return HostSelection("this host", (), None, note)
    return _seat(Allocation("this host", (Host("localhost", options.num_proc),)), options, find_own)


def _given(options: Options, around: Surroundings, find_own: FindOwn) -> HostSelection:
    name_of, slots = options.name_of, options.slots_per_host or 1
    if options.hosts is not None and options.hostfile is not None:
        raise HostsError(f"{name_of(HOSTS)} and {name_of(HOSTFILE)} both choose the hosts: give one of them")
    if options.hosts is not None:
        rule, hosts = "-H", parse_hosts(options.hosts, slots, name_of(HOSTS))
    else:
        path = options.hostfile or ""
        text = _read_hostfile(path, around, name_of(HOSTFILE))
        rule, hosts = f"--hostfile {path}", parse_hostfile(text, path, slots)
    reaching = _reaching(hosts, around) or Allocation(rule, hosts)
    return _seat(replace(reaching, system=rule, hosts=hosts, note=""), options, find_own)


def read_file(path: str) -> str:
    """Return the text of a file, for :class:`Surroundings`."""
    with open(path, encoding="utf-8") as file:
        return file.read()


def _agent(options: Options, usual: str) -> str:
    """Return the agent's command: the user's, or the usual one with the user's options for ssh."""
    if options.launch_agent is not None:
        return options.launch_agent
    return ssh_command(options.ssh_port, options.ssh_identity_file) if usual == SSH else usual


def _read_hostfile(path: str, around: Surroundings, option: str) -> str:
    try:
        return around.read(path)
    except (OSError, UnicodeDecodeError) as exc:
        raise HostsError(f"{option}: cannot read {path}: {exc}") from None


def _reaching(hosts: tuple[Host, ...], around: Surroundings) -> Allocation | None:
    """Return the allocation whose agent reaches the given hosts: it has them all, or names no hosts.

    Only ssh can log in as another user.
    """
    if any(host.user for host in hosts):
        return None
    try:
        allocation = find_allocation(around)
    except HostsError:  # the user has given hosts instead
        return None
    if allocation is None:
        return None
    known = {host.name for host in allocation.hosts}
    return allocation if not known or all(host.name in known for host in hosts) else None


def _allocated(allocation: Allocation, options: Options, find_own: FindOwn) -> HostSelection:
    hosts = allocation.hosts
    # On one host the user chooses the number of ranks, as without a cluster.
    too_many = options.num_proc is not None and options.num_proc > sum(host.slots for host in hosts)
    own = find_own(hosts) if too_many else ()
    oversubscribe = too_many and all(host in own for host in hosts)
    return _seat(allocation, options, find_own, oversubscribe=oversubscribe)


def _seat(
    allocation: Allocation, options: Options, find_own: FindOwn, *, oversubscribe: bool = False
) -> HostSelection:
    """Return the ranks of each host of an allocation, or of hosts that the user gives."""
    number = options.name_of(NUM_PROC)
    placed = place_ranks(allocation.hosts, options.num_proc, number, oversubscribe=oversubscribe)
    marked = mark_own(placed, find_own(host for host, _ in placed))
    seated = JobHosts(marked, _agent(options, allocation.agent), allocation.interface)
    return HostSelection(allocation.system, allocation.hosts, seated, allocation.note)


def find_own(hosts: Iterable[Host]) -> set[Host]:
    """Return those hosts that are this one, and on which no other user is to log in."""
    candidates = [host for host in hosts if host.user in ("", _login())]
    own = {host for host in candidates if is_own(host.name)}
    others = [host for host in candidates if host not in own]
    return own | {host for host, found in zip(others, _each_resolves_here(others), strict=True) if found}


def is_own(name: str) -> bool:
    """Return whether a name is this host's, without looking it up."""
    mine = socket.gethostname().lower()
    return name.lower() in (mine, mine.partition(".")[0]) or is_loopback(name)


def _login() -> str:
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:  # a container whose user has no entry
        return ""


def _each_resolves_here(hosts: list[Host]) -> list[bool]:
    if not hosts:
        return []
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(min(len(hosts), _LOOKUPS)) as pool:
        return list(pool.map(lambda host: _resolves_here(host.name), hosts))


def _resolves_here(name: str) -> bool:
    """Return whether a name has an address of this host; False for an unknown name."""
    try:
        found = socket.getaddrinfo(name, 9, type=socket.SOCK_DGRAM)
    except (OSError, UnicodeError):
        return False
    return any(_is_here(family, address) for family, _, _, _, address in found)


def _is_here(family: int, address: tuple[object, ...]) -> bool:
    """Return whether an address is this host's: the kernel then sends to it from the address itself.

    Connecting a socket for datagrams sends nothing.
    """
    if is_loopback(str(address[0])):
        return True
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)
            return bool(probe.getsockname()[0] == address[0])
    except OSError:
        return False


def describe(selection: HostSelection) -> str:
    """Return rule, hosts with slots and ranks, and the agent's command."""
    lines = [f"rule: {selection.rule}"]
    if selection.note:
        lines.append(f"note: {selection.note}")
    placed = selection.placed
    if placed is None:
        return "\n".join(lines)
    by_host = {each.host: each for each in placed.hosts}
    lines.append("hosts:")
    rows = [_row(host, by_host.get(host)) for host in selection.hosts]
    lines += [f"  {line}" for line in align(rows, left=4)]
    if placed.interface:
        lines.append(f"interface: {placed.interface}")
    unused = " (not used: all ranks are on this host)" if placed.on_this_host else ""
    return "\n".join([*lines, f"agent: {placed.agent}{unused}"])


def _row(host: Host, placed: HostRanks | None) -> list[str]:
    slots = f"{host.slots} slot{'s' if host.slots > 1 else ''}"
    if placed is None:
        return [host.destination, slots, "no rank", ""]
    first, last = placed.ranks.start, placed.ranks.stop - 1
    ranks = f"rank {first}" if first == last else f"ranks {first}-{last}"
    return [host.destination, slots, ranks, "this host" if placed.own else ""]

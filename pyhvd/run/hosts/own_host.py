"""Which of the given hosts are the host of this process."""

from __future__ import annotations

import os
import pwd
import socket
from collections.abc import Iterable

from pyhvd.run.hosts.hosts import Host, is_loopback

# So many names are looked up at a time: a lookup that fails may take 10 s.
_LOOKUPS = 64


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

"""The addresses that the driver listens on, and those that it tells the tasks. Uses Linux's ioctl."""

from __future__ import annotations

import fcntl
import socket
import struct
from collections.abc import Iterable

_SIOCGIFADDR = 0x8915
_LONGEST_NAME = 15


def interface_address(name: str) -> str:
    """Return the IPv4 address of a network interface.

    Raises
    ------
    ValueError
        The interface does not exist, or has no address; the text lists the interfaces.
    """
    request = struct.pack("256s", name.encode()[:_LONGEST_NAME])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
        except OSError as exc:
            known = ", ".join(known for _, known in socket.if_nameindex())
            raise ValueError(
                f"nics: interface {name!r} has no address ({exc}); this host's interfaces are {known}"
            ) from None
    return socket.inet_ntoa(answer[20:24])


def interface_addresses(nics: Iterable[str]) -> list[str]:
    """Return the IPv4 addresses of network interfaces, at least one; see :func:`interface_address`."""
    addresses = [interface_address(name) for name in nics]
    if not addresses:
        raise ValueError("nics is empty: name an interface, or leave nics out")
    return addresses

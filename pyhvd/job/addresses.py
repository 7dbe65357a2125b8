"""On which addresses the driver listens, and which the tasks are told. Linux's ioctl, no packages."""

from __future__ import annotations

import fcntl
import socket
import struct
from collections.abc import Iterable

_SIOCGIFADDR = 0x8915
_NAME = 15


def interface_address(name: str) -> str:
    """Return the IPv4 address of a network interface.

    Raises
    ------
    ValueError
        There is no such interface, or it has none; the text names those there are.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:_NAME]))
        except OSError as exc:
            there = ", ".join(known for _, known in socket.if_nameindex())
            raise ValueError(f"nics: interface {name!r} has no address ({exc}); there are {there}") from None
    return socket.inet_ntoa(answer[20:24])


def listening_places(nics: Iterable[str] | None, host: str, bind: str) -> list[tuple[str, str]]:
    """Return pairs of an address to listen on and the address that tasks are told.

    Parameters
    ----------
    nics : iterable of str or None
        Interfaces to listen on; none but these.
    host : str
        The name by which Spark's executors know the driver (spark.driver.host).
    bind : str
        The address that Spark itself listens on (spark.driver.bindAddress).
    """
    if nics is not None:
        addresses = [interface_address(name) for name in nics]
        if not addresses:
            raise ValueError("nics is empty: name an interface, or leave it out")
        return [(address, address) for address in addresses]
    # Spark writes addresses of IPv6 in brackets.
    return [(bind.strip("[]"), host.strip("[]"))]

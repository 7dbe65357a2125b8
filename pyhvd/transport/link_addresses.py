"""The addresses of this host, and which of a peer's addresses to try, in which order.

Owns the choice of addresses; opens no connection. Reads the interfaces by getifaddrs(3), on Linux.
"""

from __future__ import annotations

import ctypes
import ipaddress
import os
import socket
import sys
from collections.abc import Sequence

import msgspec

Interface = ipaddress.IPv4Interface | ipaddress.IPv6Interface


class HostAddress(msgspec.Struct, frozen=True, array_like=True):
    """One address of a host.

    Attributes
    ----------
    nic : str
        The interface that has the address.
    cidr : str
        The address and the length of its subnet's prefix: ``10.0.0.1/24``.
    """

    nic: str
    cidr: str

    @property
    def interface(self) -> Interface:
        """The address with its subnet."""
        return ipaddress.ip_interface(self.cidr)


class _IfAddrs(ctypes.Structure):
    """``struct ifaddrs`` of <ifaddrs.h>, up to the netmask."""


_IfAddrs._fields_ = [
    ("next", ctypes.POINTER(_IfAddrs)),
    ("name", ctypes.c_char_p),
    ("flags", ctypes.c_uint),
    ("address", ctypes.c_void_p),
    ("netmask", ctypes.c_void_p),
]
_WORKS = 0x41  # IFF_UP and IFF_RUNNING: a cable is plugged in
# Offset and length of the address in a sockaddr_in and in a sockaddr_in6.
_PLACES = {int(socket.AF_INET): (4, 4), int(socket.AF_INET6): (8, 16)}


def host_addresses(interfaces: Sequence[str] = ()) -> list[HostAddress]:
    """Return the addresses of this host's interfaces that are up, without link-local IPv6 addresses.

    Parameters
    ----------
    interfaces : sequence of str
        Names of interfaces, addresses, or subnets such as ``10.0.0.0/8``: an address must match one of them.
        Empty: any address.

    Raises
    ------
    OSError
        The kernel does not tell the addresses.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    first = ctypes.POINTER(_IfAddrs)()
    if libc.getifaddrs(ctypes.byref(first)):
        error = ctypes.get_errno()
        raise OSError(error, f"getifaddrs: {os.strerror(error)}")
    try:
        found = []
        entry = first
        while entry:
            if address := _read(entry.contents):
                found.append(address)
            entry = entry.contents.next
    finally:
        libc.freeifaddrs(first)
    return [address for address in found if not interfaces or any(_matches(address, i) for i in interfaces)]


def _read(entry: _IfAddrs) -> HostAddress | None:
    if entry.flags & _WORKS != _WORKS or not entry.address or not entry.netmask:
        return None
    family = int.from_bytes(ctypes.string_at(entry.address, 2), sys.byteorder)
    if family not in _PLACES:
        return None
    offset, length = _PLACES[family]
    ip = ipaddress.ip_address(ctypes.string_at(entry.address + offset, length))
    if ip.version == 6 and ip.is_link_local:
        return None
    prefix = int.from_bytes(ctypes.string_at(entry.netmask + offset, length), "big").bit_count()
    return HostAddress(entry.name.decode(), f"{ip}/{prefix}")


def _matches(address: HostAddress, wanted: str) -> bool:
    try:
        return address.interface.ip in ipaddress.ip_network(wanted, strict=False)
    except ValueError:
        return address.nic == wanted


def candidates(
    mine: Sequence[HostAddress], theirs: Sequence[HostAddress], *, same_network: bool
) -> list[str]:
    """Return the peer's addresses to connect to, the most promising one first.

    1. In one network namespace loopback addresses come first; otherwise they would reach this host itself.
    2. Addresses that this host has too, such as those of container bridges, are left out for the same reason.
    3. Addresses in a subnet of this host come before others.
    """
    own = {address.interface.ip for address in mine}
    subnets = {address.interface.network for address in mine}
    ips = [address.interface.ip for address in theirs]
    if not same_network:
        ips = [ip for ip in ips if not (ip.is_loopback or ip in own)]
    ips.sort(key=lambda ip: (not ip.is_loopback, not any(ip in subnet for subnet in subnets)))
    return [str(ip) for ip in ips]

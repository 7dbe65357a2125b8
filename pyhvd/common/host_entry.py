"""One host as users and scripts write it: ``h``, ``h:2``, ``[fe80::1]`` or ``[fe80::1]:2``. Pure."""

from __future__ import annotations

import ipaddress
import re

FORMS = "h, h:2, user@h:2 or [fe80::1]:2"
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
_MOST_DIGITS = 9


def parse_entry(entry: str) -> tuple[str, int | None]:
    """Return name and slots, None if they are not given; raise ValueError if the entry is malformed."""
    if entry.startswith("["):
        name, bracket, tail = entry[1:].partition("]")
        if not bracket or tail[:1] not in ("", ":") or not _is_ipv6(name):
            raise ValueError("expected an IPv6 address in brackets, e.g. [fe80::1]:2")
        colon, slots = tail[:1], tail[1:]
    elif entry.count(":") > 1:
        raise ValueError("write an IPv6 address in brackets, e.g. [fe80::1]:2")
    else:
        name, colon, slots = entry.partition(":")
        if not _NAME.fullmatch(name):
            raise ValueError(f"invalid host name {name!r}: expected {FORMS}")
    return name, parse_slots(slots) if colon else None


def parse_slots(text: str) -> int:
    """Return a number of slots; raise ValueError if it is none."""
    digits = text.strip()
    good = digits.isascii() and digits.isdecimal() and len(digits) <= _MOST_DIGITS
    if not good or int(digits) < 1:
        raise ValueError(f"slots must be a whole number of at least 1, not {text!r}")
    return int(digits)


def is_host(name: str) -> bool:
    """Return whether a text is a host's name, or an IPv4 or IPv6 address without brackets."""
    return _NAME.fullmatch(name) is not None or _is_ipv6(name)


def _is_ipv6(text: str) -> bool:
    """Return whether a text is an IPv6 address; its scope, which Python takes as it is, must be a name."""
    address, percent, scope = text.partition("%")
    try:
        ipaddress.IPv6Address(address)
    except ValueError:
        return False
    return not percent or _NAME.fullmatch(scope) is not None

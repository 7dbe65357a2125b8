"""Which hosts are this host."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from pyhvd.run.hosts import selection
from pyhvd.run.hosts.hosts import Host

KNOWN = {
    "alias.example": "127.0.1.1",
    "n1.cluster": "127.0.0.1",
    "other": "192.0.2.7",  # for documentation: no host has it
    "broken": "999",
}


@pytest.fixture(autouse=True)
def _names(monkeypatch: pytest.MonkeyPatch) -> None:
    def getaddrinfo(name: str, port: int, **_kinds: Any) -> list[Any]:
        if name not in KNOWN:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [(socket.AF_INET, socket.SOCK_DGRAM, 0, "", (KNOWN[name], port))]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    monkeypatch.setattr(socket, "gethostname", lambda: "N1.Cluster")
    monkeypatch.setattr(selection, "_login", lambda: "me")


@pytest.mark.parametrize(
    ("name", "user", "own"),
    [
        ("n1.cluster", "", True),
        ("n1", "", True),
        ("n1", "me", True),
        ("n1", "you", False),
        ("localhost", "", True),
        ("127.0.0.5", "", True),
        ("alias.example", "", True),
        ("other", "", False),
        ("broken", "", False),
        ("unknown", "", False),
    ],
)
def test_own(name: str, user: str, own: bool) -> None:
    host = Host(name, 1, user)
    assert selection.find_own([host]) == ({host} if own else set())


def test_many_names_are_looked_up_together() -> None:
    hosts = [Host(f"h{k}", 1) for k in range(100)]
    assert selection.find_own([*hosts, Host("n1", 1)]) == {Host("n1", 1)}


def test_an_address_of_an_interface() -> None:
    """The kernel tells which addresses are this host's; the loopback interface has one too."""
    assert selection._is_here(socket.AF_INET, ("127.0.0.1", 9))
    assert not selection._is_here(socket.AF_INET, ("192.0.2.7", 9))

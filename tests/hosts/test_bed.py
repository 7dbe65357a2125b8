"""The bed itself: addresses, congestion control, the links' rates, and what cuts a host off."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.bed import Bed, Host, bed, why_not

pytestmark = pytest.mark.any_mpi

MBIT = 1e6 / 8
_LISTEN = """
import socket, sys
with socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True) as server:
    print(server.getsockname()[1], flush=True)
    connection, _ = server.accept()
    while connection.recv(1 << 20):
        pass
"""
_SEND = """
import socket, sys, time
address, port, nbytes = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
with socket.create_connection((address, port), 2) as connection:
    start = time.perf_counter()
    connection.sendall(bytes(nbytes))
    connection.shutdown(socket.SHUT_WR)
    connection.recv(1)
    print(time.perf_counter() - start)
"""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bed]:
    if reason := why_not("1gbit"):
        pytest.skip(reason)
    with bed(["a", "b"], tmp_path_factory.mktemp("bed"), nics=2) as hosts:
        yield hosts


def output(host: Host, *arguments: str) -> str:
    return subprocess.run(
        host.command(arguments), capture_output=True, text=True, timeout=30, check=True
    ).stdout


def seconds_to_send(nbytes: int, sender: Host, receiver: Host, address: str) -> float:
    """Return the seconds for bytes from host to host over one TCP connection."""
    listener = subprocess.Popen(
        receiver.command([sys.executable, "-c", _LISTEN]), stdout=subprocess.PIPE, text=True
    )
    try:
        assert listener.stdout is not None
        port = listener.stdout.readline().strip()
        return float(output(sender, sys.executable, "-c", _SEND, address, port, str(nbytes)))
    finally:
        listener.kill()
        listener.communicate()


def test_every_nic_has_both_families(made: Bed) -> None:
    a, b = made.hosts.values()
    for nic in range(2):
        for address in b.addresses[nic]:
            assert seconds_to_send(1000, a, b, address.split("/")[0]) < 2


def test_tcp_runs_reno_everywhere(made: Bed) -> None:
    for host in (made.head, *made.hosts.values()):
        assert output(host, "cat", "/proc/sys/net/ipv4/tcp_congestion_control") == "reno\n"


def test_links_have_the_rate_in_each_direction(made: Bed) -> None:
    """Beyond a burst no direction is faster than its rate, and the end of a limit ends it."""
    a, b = made.hosts.values()
    nbytes, burst, rate = 4 << 20, 512 << 10, 100 * MBIT
    assert seconds_to_send(nbytes, a, b, b.address) < nbytes / rate
    for limited in (a, b):
        made.limit_host(limited, "100mbit")
        for sender, receiver in ((a, b), (b, a)):
            assert seconds_to_send(nbytes, sender, receiver, receiver.address) > (nbytes - 2 * burst) / rate
        made.limit("")
    assert seconds_to_send(nbytes, a, b, b.address) < nbytes / rate


def test_a_host_that_is_cut_off_rejoins(made: Bed) -> None:
    a, b = made.hosts.values()
    made.cut_off(b)
    for addresses in b.addresses:
        with pytest.raises(subprocess.CalledProcessError):
            seconds_to_send(1000, a, b, addresses[0].split("/")[0])
    made.rejoin(b)
    until = time.monotonic() + 10
    while time.monotonic() < until:
        try:
            assert seconds_to_send(1000, a, b, b.address) > 0
            return
        except subprocess.CalledProcessError:
            continue  # the neighbour is unknown for up to a second more
    raise AssertionError("no connection 10 s after the host has rejoined")


def test_a_bed_without_ipv4(tmp_path: Path, made: Bed) -> None:
    with bed(["a", "b"], tmp_path, ipv4=False) as other:
        a, b = other.hosts.values()
        assert ":" in b.address
        assert seconds_to_send(1000, a, b, "b") < 2
        assert "10.99" not in output(a, "ip", "address")


def test_the_reason_names_what_is_missing(made: Bed, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert "nonsense" in why_not("nonsense")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert why_not() == "not installed: bridge, ip, nsenter, setpriv, unshare, bash"
    assert why_not("1gbit").endswith(", tc")

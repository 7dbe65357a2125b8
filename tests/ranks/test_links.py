"""Links of ranks on made-up hosts: all ranks get working links, or all get the same cause in time."""

from __future__ import annotations

import gc
import itertools
import logging
import os
import re
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest

from pyhvd.transport import link_sharing, links
from pyhvd.transport.fabric import Unavailable
from pyhvd.transport.inprocess import ThreadFabric, ThreadGroup
from pyhvd.transport.link_addresses import HostAddress, host_addresses
from pyhvd.transport.link_handshakes import Handshakes
from pyhvd.transport.link_layout import Layout, LinkRole, parents_of
from pyhvd.transport.links import LinkOptions, Links, open_links
from pyhvd.transport.tcp.connection import Address, listen, new_key
from tests.unit.transport.test_link_layout import LAYOUTS

LONG = 60.0
HOST = re.escape(socket.gethostname())
PATIENT = LinkOptions(timeout=LONG)
IMPATIENT = LinkOptions(timeout=1.0)


@pytest.fixture(autouse=True)
def _no_descriptor_is_left() -> Iterator[None]:
    gc.collect()  # what earlier tests of the process left
    before = len(os.listdir("/proc/self/fd"))
    yield
    assert len(os.listdir("/proc/self/fd")) == before


def open_on(
    nodes: Sequence[int], options: LinkOptions = PATIENT, agreement: bool = True
) -> list[Links | Unavailable]:
    """Return what open_links returns on each rank; ranks are threads, named by their numbers."""
    group = ThreadGroup(len(nodes), LONG)

    def play(rank: int) -> Links | Unavailable:
        threading.current_thread().name = f"rank-{rank}"
        return open_links(ThreadFabric(group, rank), Layout(rank, nodes, agreement=agreement), options)

    with ThreadPoolExecutor(len(nodes)) as pool:
        return list(pool.map(play, range(len(nodes)), timeout=2 * LONG))


def linked(
    nodes: Sequence[int], stack: ExitStack, options: LinkOptions = PATIENT, agreement: bool = True
) -> list[Links]:
    """Return each rank's links, which the stack closes."""
    made = []
    for result in open_on(nodes, options, agreement):
        assert isinstance(result, Links), result
        stack.callback(result.close)
        made.append(result)
    return made


def cause_on(nodes: Sequence[int], options: LinkOptions) -> str:
    """Return the cause, the same on all ranks, why there are no links."""
    results = open_on(nodes, options)
    assert all(result == results[0] for result in results)
    assert isinstance(results[0], Unavailable)
    assert not results[0].expected
    return results[0].cause


def send(source: socket.socket | None, destination: socket.socket | None, token: bytes) -> None:
    """Assert that what is sent on one socket, and nothing else, arrives on the other."""
    assert source is not None
    assert destination is not None
    source.sendall(token)
    assert wait_for(destination) == token


def wait_for(peer: socket.socket) -> bytes:
    """Return what has arrived; the socket stays non-blocking, which other ranks' descriptors share."""
    until = time.monotonic() + LONG
    while time.monotonic() < until:
        try:
            return peer.recv(64)
        except BlockingIOError:
            time.sleep(1e-3)
    raise AssertionError("nothing has arrived")


def by_host(made: Sequence[Links]) -> list[list[Links]]:
    """Return the links of each host's ranks, by local rank."""
    hosts: list[list[Links]] = [[] for _ in range(made[0].layout.hosts)]
    for each in made:
        hosts[each.layout.host].append(each)
    return hosts


def agree(a: int, b: int, hosts: int) -> bool:
    """Return whether two hosts have an agreement connection: tops have, and parent and child."""
    parents = parents_of(hosts)
    return a != b and (parents[a] == parents[b] == -1 or parents[a] == b or parents[b] == a)


@pytest.mark.parametrize("nodes", LAYOUTS.values(), ids=LAYOUTS)
def test_every_descriptor_leads_to_its_counterpart(nodes: list[int]) -> None:
    with ExitStack() as stack:
        hosts = by_host(linked(nodes, stack))
        slices = max(map(len, hosts))
        for a, b in itertools.permutations(range(len(hosts)), 2):
            for k in range(slices):
                one, other = (hosts[g][k * len(hosts[g]) // slices] for g in (a, b))
                send(one.rails[k][b], other.rails[k][a], f"slice {k} from {a} to {b}".encode())
            for one, other in itertools.product(hosts[a], hosts[b]) if agree(a, b, len(hosts)) else ():
                text = f"{one.layout.local_rank} of {a} to {other.layout.local_rank} of {b}"
                send(one.agreement[b], other.agreement[a], text.encode())


@pytest.mark.parametrize("nodes", LAYOUTS.values(), ids=LAYOUTS)
def test_every_rank_has_its_rails_and_no_others(nodes: list[int]) -> None:
    with ExitStack() as stack:
        hosts = by_host(linked(nodes, stack))
        slices = max(map(len, hosts))
        for g, local in enumerate(hosts):
            for rank, mine in enumerate(local):
                assert (mine.layout.hosts, mine.layout.host) == (len(hosts), g)
                assert (mine.layout.local_size, mine.layout.local_rank) == (len(local), rank)
                expected = [agree(g, h, len(hosts)) for h in range(len(hosts))]
                assert [peer is not None for peer in mine.agreement] == expected
                assert len(mine.rails) == slices
                for k, row in enumerate(mine.rails):
                    owned = k * len(local) // slices == rank
                    assert [peer is not None for peer in row] == [owned and h != g for h in range(len(hosts))]


def test_every_local_rank_can_wake_every_other() -> None:
    with ExitStack() as stack:
        for local in by_host(linked(LAYOUTS["1+2+4"], stack)):
            for ringing, woken in itertools.product(local, local):
                caller, called = ringing.layout.local_rank, woken.layout.local_rank
                os.eventfd_write(ringing.bells[called], 1 + caller)
                assert os.eventfd_read(woken.bells[called]) == 1 + caller
                with pytest.raises(BlockingIOError):
                    os.eventfd_read(woken.bells[called])


def test_sockets_neither_block_nor_pass_to_other_programs() -> None:
    with ExitStack() as stack:
        for each in linked(LAYOUTS["2x2"], stack):
            sockets = [peer for row in [*each.rails, each.agreement] for peer in row if peer is not None]
            assert sockets
            for peer in sockets:
                assert not os.get_blocking(peer.fileno())
                assert not peer.get_inheritable()
            assert not any(os.get_inheritable(bell) or os.get_blocking(bell) for bell in each.bells)


def test_agreement_connections_are_made_if_wanted() -> None:
    with ExitStack() as stack:
        for each in linked(LAYOUTS["3+1"], stack, agreement=False):
            assert each.agreement == [None, None]
            assert len(each.bells) == each.layout.local_size


def test_a_closed_rank_ends_its_rails_and_no_agreement_that_others_share() -> None:
    with ExitStack() as stack:
        made = linked(LAYOUTS["2x2"], stack)
        made[1].close()
        made[1].close()
        assert made[1].bells == []
        rail = made[3].rails[1][0]
        assert rail is not None
        assert wait_for(rail) == b""
        send(made[0].agreement[1], made[3].agreement[0], b"shared")


def test_ranks_of_one_host_need_no_links() -> None:
    assert open_on([5, 5, 5]) == [Unavailable("all ranks are on one host", expected=True)] * 3


def test_ipv6() -> None:
    if not any(each.cidr == "::1/128" for each in host_addresses()):
        pytest.skip("no IPv6 on this host")
    with ExitStack() as stack:
        for each in linked(LAYOUTS["2x2"], stack, LinkOptions(("::1",), LONG)):
            peer = each.agreement[1 - each.layout.host]
            assert peer is not None
            assert peer.family == socket.AF_INET6
            assert peer.getpeername()[0] == "::1"


def test_a_range_of_ports() -> None:
    with listen("127.0.0.1", 1) as taken:
        port = taken.getsockname()[1]
        narrow = LinkOptions(("127.0.0.1",), LONG, ports=range(port, port + 1))
        assert "in use" in cause_on(LAYOUTS["2x2"], narrow)
    ports = range(20_000, 20_200)  # below the kernel's own
    with ExitStack() as stack:
        for each in linked(LAYOUTS["2x2"], stack, LinkOptions(("127.0.0.1",), LONG, ports=ports)):
            peer = each.agreement[1 - each.layout.host]
            assert peer is not None
            assert {peer.getsockname()[1], peer.getpeername()[1]} & set(ports)


def test_the_addresses_in_use_are_logged_once_for_each_pair(caplog: pytest.LogCaptureFixture) -> None:
    with ExitStack() as stack, caplog.at_level(logging.INFO, "pyhvd"):
        linked(LAYOUTS["1+2+4"], stack, LinkOptions(("lo",), LONG))
    pattern = rf"link: host {HOST} \(127\.0\.0\.1\) <-> host {HOST} \(127\.0\.0\.1\)"
    assert [bool(re.fullmatch(pattern, text)) for text in caplog.messages] == [True] * 3


def test_strangers_on_every_port_do_no_harm(monkeypatch: pytest.MonkeyPatch) -> None:
    strangers: list[socket.socket] = []

    class Visited(Handshakes):
        def __init__(
            self,
            key: bytes,
            listeners: Sequence[socket.socket],
            accepts: set[LinkRole],
            dials: Mapping[LinkRole, Sequence[Address]],
        ) -> None:
            for listener in listeners:
                if listener.family == socket.AF_INET:
                    for said in (b"", b"SSH-2.0-scan\r\n", b"pyhvd/1\n"):
                        strangers.append(socket.create_connection(("127.0.0.1", listener.getsockname()[1])))
                        strangers[-1].sendall(said)
            super().__init__(key, listeners, accepts, dials)

    monkeypatch.setattr(links, "Handshakes", Visited)
    with ExitStack() as stack:
        made = linked(LAYOUTS["3+1"], stack)
        send(made[3].agreement[0], made[2].agreement[1], b"works")
        assert len(strangers) >= 3
        for stranger in strangers:
            stranger.close()


def test_without_addresses_all_ranks_know_why() -> None:
    cause = cause_on(LAYOUTS["2x2"], LinkOptions(("nosuch0", "240.0.0.0/8")))
    assert re.fullmatch(
        rf"{HOST}: no address on nosuch0 or 240\.0\.0\.0/8; its addresses are: lo 127\.0\.0\.1/8.*", cause
    )


def test_a_host_that_cannot_be_reached_is_named_without_a_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """The hosts are in different networks, and one has no address outside of itself."""

    def addresses(interfaces: Sequence[str] = ()) -> list[HostAddress]:
        first = threading.current_thread().name == "rank-0"
        return [HostAddress("eth0", "127.0.0.1/8" if first else "10.9.9.1/24")]

    monkeypatch.setattr(links, "host_addresses", addresses)
    monkeypatch.setattr(links, "node_of", lambda namespace: threading.current_thread().name)
    begin = time.monotonic()
    cause = cause_on(LAYOUTS["2x1"], PATIENT)
    assert time.monotonic() - begin < LONG / 2
    assert re.fullmatch(
        rf"host {HOST} \(10\.9\.9\.1/24\) finds no address to connect to on host {HOST} \(127\.0\.0\.1/8\)",
        cause,
    )


class Wrong(Handshakes):
    """The connections of ranks of which rank 2 got another key."""

    def __init__(
        self,
        key: bytes,
        listeners: Sequence[socket.socket],
        accepts: set[LinkRole],
        dials: Mapping[LinkRole, Sequence[Address]],
    ) -> None:
        wrong = threading.current_thread().name == "rank-2"
        super().__init__(new_key() if wrong else key, listeners, accepts, dials)


def test_one_pair_that_does_not_connect_ends_all_links_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "Handshakes", Wrong)
    begin = time.monotonic()
    cause = cause_on([0, 1, 2, 3], LinkOptions(("127.0.0.0/8",), 1.0))
    assert time.monotonic() - begin < LONG / 2
    assert re.fullmatch(
        rf"no TCP connection from host {HOST} to host {HOST} within 1 s \(127\.0\.0\.1:\d+: .*\)", cause
    )


def test_a_rank_without_descriptors_left_takes_part_in_the_exchange(monkeypatch: pytest.MonkeyPatch) -> None:
    class Exhausted(Wrong):
        def run(self, until: float) -> dict[LinkRole, str]:
            if threading.current_thread().name == "rank-1":
                raise OSError(24, "Too many open files")
            return super().run(until)

    monkeypatch.setattr(links, "Handshakes", Exhausted)
    cause = cause_on(LAYOUTS["2x2"], IMPATIENT)
    assert re.fullmatch(rf"{HOST}: \[Errno 24\] Too many open files", cause)


def test_a_local_rank_that_cannot_share_ends_all_links(monkeypatch: pytest.MonkeyPatch) -> None:
    folders: list[str] = []
    listen = link_sharing.listen

    def noted(backlog: int, stack: ExitStack) -> tuple[socket.socket, str]:
        listener, path = listen(backlog, stack)
        folders.append(os.path.dirname(path))
        return listener, path

    def refuse(path: str, local_rank: int, bell: int, count: int, until: float) -> list[int]:
        raise OSError("no room")

    monkeypatch.setattr(link_sharing, "listen", noted)
    monkeypatch.setattr(link_sharing, "follow", refuse)
    begin = time.monotonic()
    cause = cause_on(LAYOUTS["3+1"], IMPATIENT)
    assert time.monotonic() - begin < LONG / 2
    assert re.fullmatch(rf"{HOST}: sharing descriptors: no room", cause)
    assert len(folders) == 1
    assert not os.path.exists(folders[0])


def test_the_key_is_fresh_and_in_no_text(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    keys: list[bytes] = []

    def noted() -> bytes:
        keys.append(new_key())
        return keys[-1]

    monkeypatch.setattr(links, "new_key", noted)
    with ExitStack() as stack, caplog.at_level(logging.DEBUG):
        for each in [*linked(LAYOUTS["2x1"], stack), *linked(LAYOUTS["2x1"], stack)]:
            assert not any(key.hex() in repr(each) or repr(key) in repr(each) for key in keys)
    assert len(keys) == len(set(keys)) == 2
    assert not any(key.hex() in caplog.text or repr(key) in caplog.text for key in keys)

"""The TCP connections of one rank to the ranks of other hosts, which the fast path uses without Python.

Owns the steps by which all ranks of a process set get their links or none does:

1. Each rank finds its connections (`link_layout.py`), lists its host's addresses, and listens. The ranks
   exchange cards over the fabric: addresses, ports and, from rank 0, a fresh secret. The secret is in no
   argument, variable, file, log or error.
2. The ranks connect; `link_handshakes.py` states the handshake.
3. The ranks of each host share descriptors, see `link_sharing.py`.

After each step the ranks exchange what failed, over the fabric. So all go on, or all return the same cause.
Steps 2 and 3 have a time limit; a rank that has failed still takes part in the exchange.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass

import msgspec

from pyhvd.common.kernel import node_of
from pyhvd.transport import link_sharing
from pyhvd.transport.fabric import Fabric, Unavailable, allgather_bytes, allgather_decoded, decode_from
from pyhvd.transport.link_addresses import HostAddress, candidates, host_addresses
from pyhvd.transport.link_carrier import OpenMpi
from pyhvd.transport.link_handshakes import Handshakes
from pyhvd.transport.link_layout import Kind, Layout, LinkRole
from pyhvd.transport.tcp.connection import Address, listen, new_key

_log = logging.getLogger("pyhvd")
_SHARING_S = 1.0


@dataclass(frozen=True, slots=True)
class LinkOptions:
    """How links are made.

    Attributes
    ----------
    interfaces : tuple of str
        Names of interfaces, addresses or subnets whose addresses may be used; empty: any.
    timeout : float
        Time limit for all connections, in seconds. Sharing descriptors on a host may take 1 s more.
    carrier : str
        The carrier of the rails: ``auto``, ``tcp`` or ``mpi``; see :mod:`pyhvd.transport.link_carrier`.
    open_mpi : callable or None
        Opens MPI as a carrier.
    ports : range
        The ports on which to listen; 0 is any.
    """

    interfaces: tuple[str, ...] = ()
    timeout: float = 10.0
    carrier: str = "auto"
    open_mpi: OpenMpi | None = None
    ports: range = range(1)


@dataclass(slots=True)
class Links:
    """Connections of one rank to other hosts, and what the ranks of its host share.

    All sockets are authenticated and do not block.

    Attributes
    ----------
    layout : Layout
        This rank's place among the hosts.
    rails : list of list
        ``rails[k][g]``: the connection for slice k to its owner on host g. None for slices of other ranks,
        and for this rank's host.
    agreement : list
        By host, the one connection between the two hosts: all local ranks have it. None for hosts that are
        no neighbours in the tree of hosts, and everywhere if the set has no agreement connections.
    control : dict
        By rank, the connection for messages to a rank beside this one in the tree of messages; empty if the
        set has no agreement connections.
    bells, background_bells : list of int
        By local rank, two eventfds: for a thread that waits, and for the background thread. All local ranks
        have all of them.
    """

    layout: Layout
    rails: list[list[socket.socket | None]]
    agreement: list[socket.socket | None]
    control: dict[int, socket.socket]
    bells: list[int]
    background_bells: list[int]

    def close(self) -> None:
        """Close this rank's descriptors."""
        rails = (peer for rail in self.rails for peer in rail)
        for peer in [*self.agreement, *self.control.values(), *rails]:
            if peer is not None:
                peer.close()
        for bells in (self.bells, self.background_bells):
            while bells:
                os.close(bells.pop())


class _Card(msgspec.Struct, array_like=True):
    """What a rank tells the others before they connect; `failure` is empty if the rest is complete."""

    name: str
    network: str
    failure: str = ""
    addresses: list[HostAddress] = []
    ports: Sequence[int] = (0, 0)  # IPv4, IPv6; 0: the rank does not listen
    meeting: str = ""  # where the local ranks share descriptors
    key: bytes = b""


# Made here: with ranks as threads, several first uses at once may crash msgspec.
_card = msgspec.msgpack.Decoder(_Card)
_failure = msgspec.msgpack.Decoder(tuple[int, str])


def open_links(fabric: Fabric, layout: Layout, options: LinkOptions) -> Links | Unavailable:
    """Connect the ranks of a fabric across hosts; collective.

    Parameters
    ----------
    fabric : Fabric
        The ranks, which MPI or threads connect already.
    layout : Layout
        This rank's place among the hosts.
    options : LinkOptions
        The same on all ranks.

    Returns
    -------
    Links or Unavailable
        The same kind on all ranks.
    """
    if layout.hosts == 1:
        return Unavailable("all ranks are on one host", expected=True)
    if not hasattr(os, "eventfd"):
        return Unavailable("links between hosts need Linux", expected=True)
    with ExitStack() as stack:
        return _Opening(fabric, layout, options, stack).open()


class _Opening:
    """The steps of one :func:`open_links`; the stack closes what only these steps need."""

    def __init__(self, fabric: Fabric, layout: Layout, options: LinkOptions, stack: ExitStack) -> None:
        self._fabric = fabric
        self._layout = layout
        self._options = options
        self._stack = stack
        self._listeners: list[socket.socket] = []
        self._meeting: socket.socket | None = None
        self._mine = _Card(socket.gethostname(), node_of("net"))

    def open(self) -> Links | Unavailable:
        """Carry out the steps."""
        try:
            self._listen()
        except OSError as exc:
            self._mine.failure = f"{self._mine.name}: {exc}"
        if self._fabric.rank == 0:
            self._mine.key = new_key()
        cards = allgather_bytes(self._fabric, msgspec.msgpack.encode(self._mine))
        wanted = {0, self._layout.leader, *self._layout.peers.values()}
        known = {rank: decode_from(rank, cards[rank], _card.decode, "its addresses") for rank in wanted}
        dials = {
            role: self._addresses(known[peer])
            for role, peer in self._layout.peers.items()
            if role.high == self._layout.host
        }
        if cause := self._agree(self._mine.failure, self._unreachable(known, dials)):
            return Unavailable(cause)

        until = time.monotonic() + self._options.timeout
        made: dict[LinkRole, socket.socket] = {}
        try:
            handshakes = Handshakes(known[0].key, self._listeners, self._layout.accepts, dials)
            with closing(handshakes):
                made = handshakes.made
                failures = self._lost(known, handshakes.run(until))
        except OSError as exc:
            failures = (f"{self._mine.name}: {exc}", "")
        links = self._arrange(made)
        with ExitStack() as failed:
            failed.callback(links.close)
            if cause := self._agree(*failures):
                return Unavailable(cause)
            self._tell(known, made)
            until = max(until, time.monotonic() + _SHARING_S)
            failure = ""
            try:
                self._share(links, known[self._layout.leader].meeting, until)
            except OSError as exc:
                failure = f"{self._mine.name}: sharing descriptors: {exc}"
            # Local rank 0 fails when another one does, which knows more.
            if cause := self._agree(*(("", failure) if self._meeting else (failure,))):
                return Unavailable(cause)
            failed.pop_all()
            return links

    def _listen(self) -> None:
        """Find the addresses, and listen for peers and for local ranks."""
        layout, mine = self._layout, self._mine
        mine.addresses = host_addresses(self._options.interfaces)
        if not mine.addresses:
            wanted = " or ".join(self._options.interfaces) or "any interface"
            known = ", ".join(f"{each.nic} {each.cidr}" for each in host_addresses()) or "none"
            raise OSError(f"no address on {wanted}; its addresses are: {known}")
        if layout.accepts:
            versions = {each.interface.version for each in mine.addresses}
            wildcards = ((4, "0.0.0.0"), (6, "::"))
            mine.ports = [self._listen_on(ip) if version in versions else 0 for version, ip in wildcards]
        if layout.local_rank == 0 and layout.local_size > 1:
            self._meeting, mine.meeting = link_sharing.listen(layout.local_size, self._stack)

    def _listen_on(self, host: str) -> int:
        """Return the port of a new listening socket."""
        backlog = len(self._layout.accepts) + socket.SOMAXCONN
        listener = self._stack.enter_context(listen(host, backlog, self._options.ports))
        self._listeners.append(listener)
        return int(listener.getsockname()[1])

    def _addresses(self, peer: _Card) -> list[Address]:
        same_network = bool(peer.network) and peer.network == self._mine.network
        found = candidates(self._mine.addresses, peer.addresses, same_network=same_network)
        return [(ip, port) for ip in found if (port := peer.ports[":" in ip])]

    def _unreachable(self, known: Mapping[int, _Card], dials: Mapping[LinkRole, Sequence[Address]]) -> str:
        """Return the text for a peer to which no address leads; empty if there is none."""
        for role, addresses in dials.items():
            if not addresses:
                peer = known[self._layout.peers[role]]
                texts = [", ".join(each.cidr for each in card.addresses) for card in (self._mine, peer)]
                return (
                    f"host {self._mine.name} ({texts[0]}) finds no address to connect to"
                    f" on host {peer.name} ({texts[1]})"
                )
        return ""

    def _lost(self, known: Mapping[int, _Card], missing: Mapping[LinkRole, str]) -> tuple[str, str]:
        """Return the texts for a peer that this rank has not reached, and for one that has not come."""
        texts = ["", ""]
        for role, why in missing.items():
            passive = role in self._layout.accepts
            ends = [self._mine.name, known[self._layout.peers[role]].name]
            source, destination = reversed(ends) if passive else ends
            texts[passive] = (
                f"no TCP connection from host {source} to host {destination}"
                f" within {self._options.timeout:g} s ({why})"
            )
        return texts[0], texts[1]

    def _agree(self, *failures: str) -> str:
        """Return one rank's failure, the same on all ranks; a rank names the one that says most first."""
        mine = next(((k, text) for k, text in enumerate(failures) if text), (len(failures), ""))
        every = allgather_decoded(self._fabric, mine, _failure, "why it has no links")
        return min(every, key=lambda failure: failure[0])[1]

    def _tell(self, known: Mapping[int, _Card], made: Mapping[LinkRole, socket.socket]) -> None:
        """Log the addresses of each pair of hosts, once in the job."""
        for role, peer in made.items():
            if role[:2] == (Kind.RAIL, 0) and role not in self._layout.accepts:
                ours = f"{self._mine.name} ({peer.getsockname()[0]})"
                theirs = f"{known[self._layout.peers[role]].name} ({peer.getpeername()[0]})"
                _log.info("link: host %s <-> host %s", theirs, ours)

    def _arrange(self, made: Mapping[LinkRole, socket.socket]) -> Links:
        """Return the links with the sockets of this rank, without eventfds."""
        layout = self._layout
        rails: list[list[socket.socket | None]] = [[None] * layout.hosts for _ in range(layout.slices)]
        agreement: list[socket.socket | None] = [None] * layout.hosts
        control: dict[int, socket.socket] = {}
        for role, peer in made.items():
            if role.kind == Kind.CONTROL:
                control[layout.peers[role]] = peer
                continue
            row = rails[role.slice] if role.kind == Kind.RAIL else agreement
            row[role.low + role.high - layout.host] = peer
        return Links(layout, rails, agreement, control, [], [])

    def _share(self, links: Links, meeting: str, until: float) -> None:
        """Share the eventfds of the local ranks, and the agreement connections of the host."""
        own = [os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK) for _ in range(2)]
        links.bells, links.background_bells = own[:1], own[1:]
        layout = self._layout
        bells = 2 * layout.local_size
        if self._meeting is not None:
            sockets = [peer.fileno() for peer in links.agreement if peer is not None]
            fds = link_sharing.lead(self._meeting, own, layout.local_size, sockets, until)
        elif meeting:
            fds = link_sharing.follow(meeting, layout.local_rank, own, bells + len(layout.neighbours), until)
            for bell in own:
                os.close(bell)
            for g, fd in zip(layout.neighbours, fds[bells:], strict=True):
                links.agreement[g] = socket.socket(fileno=fd)
        else:
            fds = own
        links.bells, links.background_bells = fds[:bells:2], fds[1:bells:2]

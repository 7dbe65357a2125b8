"""A simulated network: each host sends and receives at a rate, and a message takes a while to arrive."""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from pyhvd.simulation.clock import Clock

_HEADER = 78
"""Bytes of Ethernet's, IP's and TCP's headers, which each message has at least once."""


@dataclass(frozen=True)
class Network:
    """The network between hosts, and the memory inside them.

    Attributes
    ----------
    latency : float
        Seconds until a message from another host arrives.
    rate : float
        Bytes per second that each host can send, and receive.
    jitter : float
        Seconds by which a message may be later, at most; uniformly distributed.
    inside : float
        Seconds until a message of the same host arrives.
    wake : float
        Seconds until a thread that waits for a message runs.
    message_cpu : float
        CPU seconds of sending or receiving one message.
    """

    latency: float = 20e-6
    rate: float = 25e9 / 8
    jitter: float = 0.0
    inside: float = 2e-6
    wake: float = 30e-6
    message_cpu: float = 5e-6


@dataclass
class Traffic:
    """What one host has sent and received, together, over the network."""

    messages: int = 0
    nbytes: int = 0


@dataclass
class Wires:
    """Carries messages between hosts, in order between each two ends. Those of lost hosts are lost.

    Attributes
    ----------
    traffic : dict of int to Traffic
        By host.
    lost : dict of int to float
        When a host was lost.
    """

    clock: Clock
    network: Network
    seed: int
    traffic: dict[int, Traffic] = field(default_factory=lambda: defaultdict(Traffic))
    lost: dict[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self._out_free: dict[int, float] = defaultdict(float)
        self._in_free: dict[int, float] = defaultdict(float)
        self._last: dict[tuple[object, ...], float] = {}

    def send(
        self,
        ends: tuple[object, ...],
        hosts: tuple[int, int],
        nbytes: int,
        now: float,
        arrive: Callable[..., object],
        *args: Any,
    ) -> None:
        """Send a message at a time not before the clock's; `arrive` is called with `args` when it is there.

        Parameters
        ----------
        ends : tuple of hashable
            Sender and receiver.
        hosts : tuple of int
            Their hosts.
        nbytes : int
            The message's size.
        now : float
            When it is sent.
        arrive : callable
            See above; it is not called if either host is lost meanwhile.
        *args
            Its arguments.
        """
        source, target = hosts
        network = self.network
        if source == target:
            when = now + network.inside
        else:
            bits = nbytes + _HEADER
            for host in hosts:
                self.traffic[host].messages += 1
                self.traffic[host].nbytes += bits
            left = self._out_free[source] = max(now, self._out_free[source]) + bits / network.rate
            when = left + network.latency
            if network.jitter:
                when += self._random.uniform(0.0, network.jitter)
            # Its last byte is there at `when`, unless bytes of other hosts come first.
            when = self._in_free[target] = max(when, self._in_free[target] + bits / network.rate)
        when = self._last[ends] = max(when, self._last.get(ends, 0.0))
        self.clock.at(when, self._arrive, now, hosts, arrive, args)

    def lose(self, host: int) -> None:
        """Lose a host now, with all that is under way to it and from it."""
        self.lost.setdefault(host, self.clock.now)

    def _arrive(
        self, sent: float, hosts: tuple[int, int], arrive: Callable[..., object], args: tuple[Any, ...]
    ) -> None:
        gone = min(self.lost.get(host, math.inf) for host in hosts)
        if self.clock.now < gone or (hosts[1] not in self.lost and sent < gone):
            arrive(*args)

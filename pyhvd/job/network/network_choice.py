"""The driver's choice of the network by which the ranks of several hosts talk: plans, a probe, and variables.

Pure but for the tokens: returns the messages for the agents, and sends none.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from pyhvd.common.text import MAX_LISTED, cut_lines, list_some
from pyhvd.job.errors import LaunchError
from pyhvd.job.messages import TOKEN, Dialed, FromDriver, HostNetwork, Listening, Member
from pyhvd.job.network.network_plans import (
    NetworkPlan,
    Wish,
    describe,
    plans_of,
    port_variables,
    unfulfilled,
    wishes_for,
)
from pyhvd.job.network.reach import Reach
from pyhvd.job.spec import NETWORK_INTERFACES, NameOf, flag_of

_MOST_SHOWN = 20

Sent = Iterable[tuple[int, FromDriver]]
"""Agents by their index, and messages to them."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """What the user wants of the network.

    Attributes
    ----------
    wishes : tuple of Wish
        The interfaces that may be used; empty for any.
    source : str
        Where the wishes come from, for messages; empty for the option.
    probe : bool
        Whether pyhvd chooses interfaces at all; otherwise MPI does.
    show : bool
        Whether to show the choice.
    ports : range
        The ports on which ranks listen; 0 is any.
    name_of : NameOf
        The names of options in errors.
    """

    wishes: tuple[Wish, ...] = ()
    source: str = ""
    probe: bool = True
    show: bool = False
    ports: range = range(1)
    name_of: NameOf = flag_of


class NetworkChoice:
    """The choice for one job, whose agents have all registered.

    Parameters
    ----------
    number : int
        Another one for each choice of a driver.
    groups : sequence of sequence of Member
        The agents of each host; the first one probes.
    names : sequence of str
        The name of each agent's host, as the user gave it.
    wanted : Wanted
        What the user wants.
    now : float
        The time.

    Attributes
    ----------
    shows : bool
        Whether the user wants to see the choice.

    Raises
    ------
    LaunchError
        A host has no interface that may be used, or the hosts cannot have a network in common.
    """

    def __init__(
        self,
        number: int,
        groups: Sequence[Sequence[Member]],
        names: Sequence[str],
        wanted: Wanted,
        now: float,
    ) -> None:
        self._hosts = {member.index: host for host, group in enumerate(groups) for member in group}
        self._probers = [group[0].index for group in groups]
        self._names = [[names[member.index] for member in group] for group in groups]
        self._networks = [network_of(group[0]) for group in groups]
        self.shows = wanted.show
        self._ports = wanted.ports
        self._option = wanted.name_of(NETWORK_INTERFACES)
        self._plan: NetworkPlan | None = None
        self._reach: Reach | None = None
        if not wanted.probe or len(groups) == 1 or (not wanted.wishes and self._is_one_network()):
            return
        plans = self._make_plans(wanted)
        tokens = [os.urandom(TOKEN) for _ in groups]
        self._reach = Reach(number, [names[0] for names in self._names], plans, tokens, now, wanted.ports)

    def begin(self) -> Sent:
        """Return the first messages."""
        return [] if self._reach is None else self._to_agents(self._reach.begin())

    def hear(self, index: int, message: Listening | Dialed) -> Sent:
        """Handle an agent's answer; return the next messages."""
        if self._reach is None or index not in self._probers:
            return []
        return self._to_agents(self._reach.hear(self._hosts[index], message))

    def decide(self, now: float) -> bool:
        """Return whether the choice is made.

        Raises
        ------
        LaunchError
            No network connects the hosts; the text says who reached whom, and the remedy.
        """
        if self._reach is None or self._plan is not None:
            return True
        try:
            self._plan = self._reach.decide(now)
        except LaunchError as exc:
            raise LaunchError("\n".join([str(exc), *self._remedy()])) from None
        return self._plan is not None

    def describe(self) -> str:
        """Return the choice in one line; empty if none was needed."""
        if self._plan is None:
            return ""
        hosts = zip(self._names, self._plan.chosen, strict=True)
        placed = [f"{names[0]} {each.name} {each.cidr}" for names, each in hosts]
        return f"{self._plan.title}: {list_some(placed)}"

    def variables(self, index: int) -> Mapping[str, str]:
        """Return the variables of an agent's ranks; valid if neither their host nor the user has set them."""
        found = port_variables(self._ports)
        if self._plan is not None:
            host = self._hosts[index]
            found |= self._plan.variables(host, self._networks[host].rdma)
        return found

    def _to_agents(self, messages: Mapping[int, FromDriver]) -> Sent:
        return [(self._probers[host], message) for host, message in messages.items()]

    def _is_one_network(self) -> bool:
        """Return whether the hosts share all interfaces, as containers may."""
        namespaces = {network.namespace for network in self._networks}
        return len(namespaces) == 1 and "" not in namespaces

    def _make_plans(self, wanted: Wanted) -> list[NetworkPlan]:
        wishes = [wishes_for(names, wanted.wishes) for names in self._names]
        lacking = [
            f"host {names[0]}: {text}" + (f" ({wanted.source or self._option})" if each else "")
            for names, network, each in zip(self._names, self._networks, wishes, strict=True)
            if (text := unfulfilled(network, each))
        ]
        if lacking:
            raise LaunchError("\n".join(cut_lines(lacking, MAX_LISTED, "hosts")))
        plans = plans_of(self._networks, wishes)
        if not plans:
            raise LaunchError("\n".join(["the hosts have no network in common", *self._remedy()]))
        return plans

    def _remedy(self) -> Iterator[str]:
        hosts = list(zip(self._names, self._networks, strict=True))
        for names, network in hosts[:_MOST_SHOWN]:
            yield f"host {names[0]} has {describe(network)}"
        yield (
            "let the hosts connect to each other (firewall, security group; --port-range limits the ports),"
            f" or choose connected interfaces: {self._option} eth0, 10.0.0.0/24 or h1=eth0,h2=ib0"
        )


def network_of(member: Member) -> HostNetwork:
    """Return the network that an agent of a host has told."""
    assert member.facts is not None
    return member.facts.network

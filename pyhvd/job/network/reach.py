"""Which plan of :mod:`pyhvd.job.network.network_plans` connects the hosts: all agents probe. Pure.

1. Each agent listens at its addresses of all plans, and tells the ports.
2. Then each agent dials the next two hosts, or all of up to 16 hosts, at their addresses of all plans.
3. The first plan in which every dial reached its host is taken. A plan without an answer is waited for at
   most 2 s if a later one works, and 5 s if none does.
4. If no plan works, the error has a table of who reached whom, after all answers or 5 s. An agent that is
   lost during the probe sends no answer and refuses the others' dials: the driver then probes again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from pyhvd.job.errors import LaunchError
from pyhvd.job.messages import Dial, Dialed, Listen, Listening, Target
from pyhvd.job.network.network_plans import NetworkPlan

_DIAL_ALL = 16
_NEIGHBOURS = 2
_PREFERRED_S = 2.0
_NONE_WORKS_S = 5.0
# The longest time that counts between two looks at the clock: this process may have been stopped.
_TICK_S = 0.5
_MOST_LINES = 20


@dataclass(eq=False)
class Reach:
    """One probe.

    Attributes
    ----------
    number : int
        Its number, so that answers to an earlier one are told apart.
    names : sequence of str
        The names of the hosts, for messages.
    plans : sequence of NetworkPlan
        At least one; the best first.
    tokens : sequence of bytes
        A random token for each host.
    last : float
        The time of the beginning, then of the last look at the clock.
    ports : range
        The ports on which to listen; 0 is any.
    """

    number: int
    names: Sequence[str]
    plans: Sequence[NetworkPlan]
    tokens: Sequence[bytes]
    last: float
    ports: range = range(1)
    _listening: dict[int, list[int]] = field(default_factory=dict)  # the ports of each host
    _outcomes: dict[tuple[int, int, str], str] = field(default_factory=dict)  # of dials; "" for a success
    _waited: float = 0.0

    def __post_init__(self) -> None:
        self._addresses = [
            list(dict.fromkeys(plan.addresses[host] for plan in self.plans))
            for host in range(len(self.names))
        ]
        # By caller, the callee and address of each of its dials.
        self._dials: list[list[tuple[int, str]]] = [[] for _ in self.names]

    def begin(self) -> dict[int, Listen]:
        """Return the first message to each host's agent."""
        return {
            host: Listen(self.number, token, addresses, (self.ports[0], self.ports[-1]))
            for host, (token, addresses) in enumerate(zip(self.tokens, self._addresses, strict=True))
        }

    def hear(self, host: int, message: Listening | Dialed) -> Mapping[int, Dial]:
        """Handle an answer of a host's agent; return the next messages, by host."""
        if message.probe != self.number:
            return {}
        if isinstance(message, Dialed):
            if 0 <= message.target < len(self._dials[host]):
                self._outcomes[host, *self._dials[host][message.target]] = message.error
            return {}
        if host in self._listening or len(message.ports) != len(self._addresses[host]):
            return {}
        self._listening[host] = message.ports
        if len(self._listening) < len(self.names):
            return {}
        return {caller: Dial(self.number, list(self._targets(caller))) for caller in range(len(self.names))}

    def _targets(self, caller: int) -> Iterator[Target]:
        for callee in callees(caller, len(self.names)):
            for address, port in zip(self._addresses[callee], self._listening[callee], strict=True):
                if port:
                    self._dials[caller].append((callee, address))
                    yield Target(address, port, self.tokens[callee])
                else:
                    self._outcomes[caller, callee, address] = f"{self.names[callee]} cannot listen there"

    def decide(self, now: float) -> NetworkPlan | None:
        """Return the plan to take, or None if answers that matter may still come.

        Raises
        ------
        LaunchError
            No plan works; the text says who reached whom.
        """
        self._waited += min(now - self.last, _TICK_S)
        self.last = now
        for plan in self.plans:
            outcomes = [outcome for _, _, outcome in self._outcomes_of(plan)]
            if not any(outcome is None or outcome for outcome in outcomes):
                return plan
            if not any(outcomes) and self._waited < _PREFERRED_S:  # no failure, but answers are missing
                return None
        known = [outcome for plan in self.plans for _, _, outcome in self._outcomes_of(plan)]
        if None in known and self._waited < _NONE_WORKS_S:
            return None
        raise LaunchError("\n".join(self._explain()))

    def _outcomes_of(self, plan: NetworkPlan) -> Iterator[tuple[int, int, str | None]]:
        """Yield caller, callee and outcome of each dial of a plan; None for an outcome that is not known."""
        for caller in range(len(self.names)):
            for callee in callees(caller, len(self.names)):
                yield caller, callee, self._outcomes.get((caller, callee, plan.addresses[callee]))

    def _explain(self) -> Iterator[str]:
        yield "no network connects all hosts: MPI's ranks could not reach each other"
        for plan in self.plans:
            hosts = zip(self.names, plan.chosen, plan.addresses, strict=True)
            placed = [f"{name} {each.name} {address}" for name, each, address in hosts]
            yield f"{plan.title}: {', '.join(placed[:_MOST_LINES])}"
            outcomes = list(self._outcomes_of(plan))
            if len(self.names) <= _DIAL_ALL:
                yield from self._table({(caller, callee): why for caller, callee, why in outcomes})
            failed = [(caller, callee, why) for caller, callee, why in outcomes if why != ""]
            for caller, callee, why in failed[:_MOST_LINES]:
                reason = f"no answer within {_NONE_WORKS_S:g} s" if why is None else why
                yield f"  {self.names[caller]} to {self.names[callee]} {plan.addresses[callee]}: {reason}"
            if len(failed) > _MOST_LINES:
                yield f"  and {len(failed) - _MOST_LINES} more"

    def _table(self, outcomes: Mapping[tuple[int, int], str | None]) -> Iterator[str]:
        """Yield the lines of a table: from the host at the left to the one at the top."""
        hosts = range(len(self.names))
        rows = [["from \\ to", *self.names]]
        for caller in hosts:
            cells = (
                "-" if callee == caller else "no" if outcomes[caller, callee] != "" else "yes"
                for callee in hosts
            )
            rows.append([self.names[caller], *cells])
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        for row in rows:
            cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
            yield f"  {'  '.join(cells)}".rstrip()


def callees(caller: int, size: int) -> list[int]:
    """Return the hosts that a host dials: all others of up to 16, or else the next two."""
    count = size - 1 if size <= _DIAL_ALL else _NEIGHBOURS
    return [(caller + step) % size for step in range(1, count + 1)]

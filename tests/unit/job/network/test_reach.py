"""The probe of a network: who dials whom, which plan is taken, and what is said if none works."""

from __future__ import annotations

import selectors
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest
from hypothesis import given, strategies as st

from pyhvd.job.agent.prober import Prober
from pyhvd.job.errors import LaunchError
from pyhvd.job.messages import Dial, Dialed, Facts, HostNetwork, Interface, Listen, Listening, Member, Target
from pyhvd.job.network.network_choice import NetworkChoice, Wanted
from pyhvd.job.network.network_plans import NetworkPlan, parse_wishes
from pyhvd.job.network.reach import Reach, callees

linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="agents need Linux")
TOKENS = [bytes([host]) * 16 for host in range(32)]


def plan_of(number: int, hosts: int) -> NetworkPlan:
    chosen = (Interface(f"eth{number}", f"10.{number}.0.{host}/24") for host in range(hosts))
    return NetworkPlan(f"subnet 10.{number}.0.0/24", tuple(chosen))


def address(plan: int, host: int) -> str:
    return f"10.{plan}.0.{host}"


def begin(hosts: int, plans: int) -> tuple[Reach, Mapping[int, Dial]]:
    """Return a probe at the time 0, in which all hosts listen, and the messages that tell whom to dial."""
    names = [f"h{host}" for host in range(hosts)]
    reach = Reach(3, names, [plan_of(number, hosts) for number in range(plans)], TOKENS[:hosts], 0.0)
    dials: Mapping[int, Dial] = {}
    for host, listen in reach.begin().items():
        assert listen == Listen(3, TOKENS[host], [address(number, host) for number in range(plans)])
        assert dials == {}
        dials = reach.hear(host, Listening(3, [1000 + 10 * host + number for number in range(plans)]))
    return reach, dials


@pytest.mark.parametrize("size", [2, 3, 16, 17, 40])
def test_each_host_dials_others_and_is_dialed(size: int) -> None:
    dialed = [callees(host, size) for host in range(size)]
    assert {len(set(each)) for each in dialed} == {size - 1 if size <= 16 else 2}
    assert all(host not in each for host, each in enumerate(dialed))
    assert {host for each in dialed for host in each} == set(range(size))


def test_targets_have_the_ports_and_tokens_of_their_hosts() -> None:
    _, dials = begin(3, 2)
    assert dials[2] == Dial(
        3,
        [
            Target("10.0.0.0", 1000, TOKENS[0]),
            Target("10.1.0.0", 1001, TOKENS[0]),
            Target("10.0.0.1", 1010, TOKENS[1]),
            Target("10.1.0.1", 1011, TOKENS[1]),
        ],
    )


class World:
    """What happens to each dial: it arrives, it fails, or there is no answer."""

    def __init__(self, hosts: int, plans: int, outcomes: list[str | None]) -> None:
        self.keys = [(a, b, p) for a in range(hosts) for b in callees(a, hosts) for p in range(plans)]
        self.outcomes = dict(zip(self.keys, outcomes, strict=False))
        self.plans = plans

    def of_plan(self, plan: int) -> list[str | None]:
        return [outcome for (_, _, number), outcome in self.outcomes.items() if number == plan]

    def works(self, plan: int) -> bool:
        return all(outcome == "" for outcome in self.of_plan(plan))

    def is_silent(self, plan: int) -> bool:
        """Whether a plan neither works nor fails."""
        return not self.works(plan) and not any(self.of_plan(plan))


@given(st.data())
def test_the_first_plan_that_works_is_taken(data: st.DataObject) -> None:
    hosts, plans = data.draw(st.integers(2, 4)), data.draw(st.integers(1, 3))
    count = plans * sum(len(callees(host, hosts)) for host in range(hosts))
    fates = st.sampled_from(["", "", "", "", "refused", None])
    world = World(hosts, plans, data.draw(st.lists(fates, min_size=count, max_size=count)))
    reach, dials = begin(hosts, plans)
    pending = [
        (
            caller,
            number,
            world.outcomes[caller, int(target.address.split(".")[3]), int(target.address.split(".")[1])],
        )
        for caller, dial in dials.items()
        for number, target in enumerate(dial.targets)
    ]
    now, taken, error = 0.0, None, ""
    for caller, number, outcome in data.draw(st.permutations(pending)):
        if outcome is not None:
            reach.hear(caller, Dialed(3, number, outcome))
        reach.hear(caller, Dialed(2, number, "an earlier probe's"))
    working = [plan for plan in range(plans) if world.works(plan)]
    while taken is None and not error:
        try:
            taken = reach.decide(now)
        except LaunchError as exc:
            error = str(exc)
        now += 0.25
    took = now - 0.25
    if working:
        assert taken is not None
        assert taken.addresses == plan_of(working[0], hosts).addresses
        waits = any(world.is_silent(plan) for plan in range(working[0]))
        assert took == (2.0 if waits else 0.0)
        return
    assert took == (5.0 if None in world.outcomes.values() else 0.0)
    for (caller, callee, plan), outcome in world.outcomes.items():
        why = "no answer within 5 s" if outcome is None else outcome
        assert (f"  h{caller} to h{callee} {address(plan, callee)}: {why}" in error) == bool(why)


def test_the_table_of_who_reached_whom() -> None:
    reach, dials = begin(3, 1)
    for caller in range(3):
        for number, target in enumerate(dials[caller].targets):
            if (caller, target.address) not in ((0, "10.0.0.2"), (2, "10.0.0.0")):
                reach.hear(caller, Dialed(3, number))
    reach.hear(2, Dialed(3, 0, "Connection refused"))
    for tenths in range(50):
        assert reach.decide(tenths / 10) is None  # host 0's missing answer may mean that its agent is lost
    with pytest.raises(LaunchError) as caught:
        reach.decide(5.0)
    assert str(caught.value).splitlines() == [
        "no network connects all hosts: MPI's ranks could not reach each other",
        "subnet 10.0.0.0/24: h0 eth0 10.0.0.0, h1 eth0 10.0.0.1, h2 eth0 10.0.0.2",
        "  from \\ to  h0   h1   h2",
        "  h0         -    yes  no",
        "  h1         yes  -    yes",
        "  h2         no   yes  -",
        "  h0 to h2 10.0.0.2: no answer within 5 s",
        "  h2 to h0 10.0.0.0: Connection refused",
    ]


def test_a_driver_that_was_stopped_waits_for_answers() -> None:
    reach, dials = begin(2, 1)
    assert reach.decide(1000.0) is None
    for caller in (0, 1):
        reach.hear(caller, Dialed(3, 0))
    assert dials
    assert reach.decide(1000.1) == plan_of(0, 2)


def test_answers_that_make_no_sense_are_ignored() -> None:
    reach, _ = begin(2, 1)
    assert reach.hear(0, Listening(3, [1])) == {}
    assert reach.hear(0, Dialed(3, 7)) == {}
    assert reach.hear(0, Dialed(3, -1)) == {}
    assert reach.decide(0.0) is None


def test_a_host_that_cannot_listen_at_an_address() -> None:
    reach = Reach(1, ["h0", "h1"], [plan_of(0, 2), plan_of(1, 2)], TOKENS[:2], 0.0)
    assert reach.hear(0, Listening(1, [5])) == {}
    assert reach.hear(0, Listening(1, [0, 5])) == {}
    dials = reach.hear(1, Listening(1, [6, 7]))
    assert [target.port for target in dials[1].targets] == [5]
    for caller, dial in dials.items():
        for number in range(len(dial.targets)):
            reach.hear(caller, Dialed(1, number))
    assert reach.decide(0.0) == plan_of(1, 2)


def test_ports_of_a_range() -> None:
    wanted = {"ports": range(5, 8)}
    made = choice(host(1), host(2), **wanted)
    assert [message.ports for _, message in made.begin() if isinstance(message, Listen)] == [(5, 7)] * 2
    expected = {
        "UCX_TCP_PORT_RANGE": "5-7",
        "FI_TCP_PORT_LOW_RANGE": "5",
        "FI_TCP_PORT_HIGH_RANGE": "7",
        "OMPI_MCA_btl_tcp_port_min_v4": "5",
        "OMPI_MCA_btl_tcp_port_range_v4": "3",
        "PYHVD_LINK_PORTS": "5-7",
    }
    assert choice(host(1), **wanted).variables(0) == expected


def members(*networks: HostNetwork) -> list[list[Member]]:
    """Return an agent for each network, each on a host of its own."""
    return [
        [Member(index, 0, str(index), "host", 1, Facts("MPICH", "", True, "", network))]
        for index, network in enumerate(networks)
    ]


def host(number: int, namespace: str = "") -> HostNetwork:
    return HostNetwork(namespace or str(number), [Interface("eth0", f"10.0.0.{number}/24")], ["mlx5_0:1"])


def choice(*networks: HostNetwork, **wanted: Any) -> NetworkChoice:
    names = [f"h{index}" for index in range(len(networks))]
    return NetworkChoice(0, members(*networks), names, Wanted(**wanted), 0.0)


def test_one_host_or_one_network_needs_no_choice() -> None:
    for made in (
        choice(host(1)),
        choice(host(1, "same"), host(1, "same")),
        choice(host(1), host(2), probe=False),
    ):
        assert (list(made.begin()), made.decide(0.0), made.variables(0)) == ([], True, {})
        assert made.describe() == ""
    assert choice(host(1, "same"), host(1, "same"), wishes=parse_wishes(["eth0"])).begin()


def test_two_agents_of_one_host_share_the_choice() -> None:
    networks = [host(1), host(1), host(2)]
    (first,), (second,), (third,) = members(*networks)
    made = NetworkChoice(0, [[first, second], [third]], ["a", "10.0.0.1", "b"], Wanted(), 0.0)
    assert [index for index, _ in made.begin()] == [0, 2]
    assert made.hear(1, Listening(0, [1])) == []
    assert made.hear(0, Listening(0, [1])) == []
    assert [index for index, _ in made.hear(2, Listening(0, [2]))] == [0, 2]
    assert not made.decide(0.1)
    made.hear(0, Dialed(0, 0))
    made.hear(2, Dialed(0, 0))
    assert made.decide(0.2)
    assert made.describe() == "subnet 10.0.0.0/24: a eth0 10.0.0.1/24, b eth0 10.0.0.2/24"
    assert made.variables(1)["UCX_NET_DEVICES"] == "eth0,mlx5_0:1"


def test_hosts_without_a_network_in_common() -> None:
    with pytest.raises(LaunchError) as caught:
        choice(host(1), HostNetwork("", [Interface("eth0", "fd00::1/64")]))
    assert str(caught.value).splitlines()[:3] == [
        "the hosts have no network in common",
        "host h0 has eth0 10.0.0.1/24",
        "host h1 has eth0 fd00::1/64",
    ]
    with pytest.raises(LaunchError) as caught:
        choice(host(1), host(2), HostNetwork("", []), wishes=parse_wishes(["h0=eth0,h1=ib0"]))
    assert str(caught.value).splitlines() == [
        "host h1: no interface ib0 is up there; it has eth0 10.0.0.2/24 (--network-interfaces)",
        "host h2: no interface but loopback is up and has an address",
    ]


class Probers:
    """Probers in one thread."""

    def __init__(self, selector: selectors.BaseSelector) -> None:
        self._selector = selector
        self.told: list[tuple[int, Listening | Dialed]] = []
        self.made: list[Prober] = []

    def add(self, *addresses: str, ports: tuple[int, int] = (0, 0)) -> Prober:
        number = len(self.made)
        tell = lambda message: self.told.append((number, message))  # noqa: E731
        self.made.append(Prober(Listen(1, TOKENS[number], list(addresses), ports), self._selector, tell))
        return self.made[-1]

    def ports(self, number: int) -> list[int]:
        return next(
            message.ports for each, message in self.told if each == number and isinstance(message, Listening)
        )

    def outcomes(self, count: int) -> dict[tuple[int, int], str]:
        """Return the outcomes of dials, by prober and target."""
        until = time.monotonic() + 20
        while True:
            found = {(n, each.target): each.error for n, each in self.told if isinstance(each, Dialed)}
            if len(found) == count:
                return found
            assert time.monotonic() < until, found
            for key, _ in self._selector.select(1):
                key.data()


@contextmanager
def probers() -> Iterator[Probers]:
    with selectors.DefaultSelector() as selector:
        made = Probers(selector)
        yield made
        for each in made.made:
            each.close()
        assert not selector.get_map()


@linux
def test_probers_reach_each_other() -> None:
    with probers() as made:
        one, two = made.add("127.0.0.1", "127.0.0.2"), made.add("127.0.0.1")
        first, second = made.ports(0), made.ports(1)
        two.dial(
            Dial(1, [Target("127.0.0.1", first[0], TOKENS[0]), Target("127.0.0.2", first[1], TOKENS[0])])
        )
        one.dial(Dial(1, [Target("127.0.0.1", second[0], TOKENS[1])]))
        one.dial(Dial(0, [Target("127.0.0.1", second[0], TOKENS[1])] * 3))
        assert made.outcomes(3) == {(0, 0): "", (1, 0): "", (1, 1): ""}


@linux
def test_what_a_prober_cannot_reach() -> None:
    with probers() as made:
        one = made.add("127.0.0.1", "192.0.2.1")
        two = made.add("127.0.0.1")
        assert made.ports(0)[1] == 0
        gone = made.ports(1)[0]
        targets = [
            Target("127.0.0.1", made.ports(0)[0], TOKENS[5]),
            Target("127.0.0.1", gone, TOKENS[1]),
        ]
        two.close()
        one.dial(Dial(1, targets))
        assert made.outcomes(2) == {(0, 0): "another program has answered", (0, 1): "Connection refused"}


@linux
def test_a_prober_without_a_free_port() -> None:
    with probers() as made:
        made.add("127.0.0.1")
        (port,) = made.ports(0)
        made.add("127.0.0.1", ports=(port, port))
        made.add("127.0.0.1", ports=(5, 4))
        assert made.ports(1) == made.ports(2) == [0]


@linux
def test_a_prober_closes_what_is_under_way() -> None:
    with probers() as made:
        one, two = made.add("127.0.0.1"), made.add("127.0.0.1")
        one.dial(Dial(1, [Target("127.0.0.1", made.ports(1)[0], TOKENS[1])] * 40))
        two.close()

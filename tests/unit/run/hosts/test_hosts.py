"""Parsing ``-H`` and hostfiles, and giving ranks to hosts."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from pyhvd.run.hosts.hosts import (
    Host,
    HostsError,
    JobHosts,
    is_loopback,
    mark_own,
    merged,
    parse_hostfile,
    parse_hosts,
    place_ranks,
)

NAMES = st.one_of(
    st.from_regex(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,20}", fullmatch=True),
    st.ip_addresses(v=4).map(str),
    st.ip_addresses(v=6).map(str),
)
USERS = st.one_of(st.just(""), st.from_regex(r"[A-Za-z0-9_][A-Za-z0-9_.+-]{0,8}", fullmatch=True))
HOSTS = st.builds(Host, NAMES, st.integers(1, 10**6), USERS)
DISTINCT = st.lists(HOSTS, min_size=1, max_size=12, unique_by=lambda host: host.name)


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("h", [Host("h", 3)]),
        ("h:2", [Host("h", 2)]),
        ("h1:2,h2", [Host("h1", 2), Host("h2", 3)]),
        (" h1:2 , h2:1 ", [Host("h1", 2), Host("h2", 1)]),
        ("user@h:2", [Host("h", 2, "user")]),
        ("a.b+c@10.0.0.7", [Host("10.0.0.7", 3, "a.b+c")]),
        ("[fe80::1]:2,[::2]", [Host("fe80::1", 2), Host("::2", 3)]),
        ("me@[fe80::1%eth0]:2", [Host("fe80::1%eth0", 2, "me")]),
        ("h1:2,h2:1,h1", [Host("h1", 5), Host("h2", 1)]),
        ("n_1.example-net.org:08", [Host("n_1.example-net.org", 8)]),
    ],
)
def test_hosts_of_the_command_line(text: str, hosts: list[Host]) -> None:
    assert list(parse_hosts(text, slots_per_host=3)) == hosts


FORMS = "expected h, h:2, user@h:2 or [fe80::1]:2"
BRACKETS = "expected an IPv6 address in brackets, e.g. [fe80::1]:2"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", f"-H: an entry is empty: {FORMS}, with commas between hosts"),
        ("h1,,h2", f"-H: an entry is empty: {FORMS}, with commas between hosts"),
        ("h1,", f"-H: an entry is empty: {FORMS}, with commas between hosts"),
        ("h:", "-H: 'h:': slots must be a whole number of at least 1, not ''"),
        ("h:0", "-H: 'h:0': slots must be a whole number of at least 1, not '0'"),
        ("h:-1", "-H: 'h:-1': slots must be a whole number of at least 1, not '-1'"),
        ("h:two", "-H: 'h:two': slots must be a whole number of at least 1, not 'two'"),
        ("h:\u0662", "-H: 'h:\u0662': slots must be a whole number of at least 1, not '\u0662'"),
        (":2", f"-H: ':2': invalid host name '': {FORMS}"),
        ("-oProxyCommand=x", f"-H: '-oProxyCommand=x': invalid host name '-oProxyCommand=x': {FORMS}"),
        ("h1 h2", f"-H: 'h1 h2': invalid host name 'h1 h2': {FORMS}"),
        ("n[1-3]:2", f"-H: 'n[1-3]:2': invalid host name 'n[1-3]': {FORMS}"),
        ("h$(x)", f"-H: 'h$(x)': invalid host name 'h$(x)': {FORMS}"),
        ("@h", f"-H: '@h': invalid user '': {FORMS}"),
        ("-l@h", f"-H: '-l@h': invalid user '-l': {FORMS}"),
        ("user@", f"-H: 'user@': invalid host name '': {FORMS}"),
        ("fe80::1", "-H: 'fe80::1': write an IPv6 address in brackets, e.g. [fe80::1]:2"),
        ("[fe80::1", f"-H: '[fe80::1': {BRACKETS}"),
        ("[h]:2", f"-H: '[h]:2': {BRACKETS}"),
        ("[fe80::1]2", f"-H: '[fe80::1]2': {BRACKETS}"),
        ("[fe80::1%]:2", f"-H: '[fe80::1%]:2': {BRACKETS}"),
        ("[fe80::1%-x]:2", f"-H: '[fe80::1%-x]:2': {BRACKETS}"),
        ("[fe80::1%$(id)]:2", f"-H: '[fe80::1%$(id)]:2': {BRACKETS}"),
        ("[fe80::1%a b]:2", f"-H: '[fe80::1%a b]:2': {BRACKETS}"),
        ("[fe80::1%e%f]:2", f"-H: '[fe80::1%e%f]:2': {BRACKETS}"),
        ("[fe80::1]:", "-H: '[fe80::1]:': slots must be a whole number of at least 1, not ''"),
        ("a@h:1,h:1,b@h:1", "-H: host h is given as a@h and as h: give it with one user"),
    ],
)
def test_malformed_hosts(text: str, message: str) -> None:
    with pytest.raises(HostsError) as caught:
        parse_hosts(text)
    assert str(caught.value) == message


HOSTFILE = """\
# the cluster
h1 slots=2   # Open MPI's form

user@h2:3
  h3
h4 slots = 4 max_slots=8
h5 max-slots=8
[fe80::1]:2
h1 slots=1
"""


def test_a_hostfile() -> None:
    assert " ".join(map(str, parse_hostfile(HOSTFILE, "hosts", 7))) == (
        "h1:3 user@h2:3 h3:7 h4:4 h5:7 [fe80::1]:2"
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "hosts names no host: expected lines such as: h1 slots=2"),
        ("# nothing\n\n", "hosts names no host: expected lines such as: h1 slots=2"),
        (
            "h1\n\nh2 slots=x\n",
            "hosts, line 3: 'h2 slots=x': slots must be a whole number of at least 1, not 'x'",
        ),
        ("h1 slots=", "hosts, line 1: 'h1 slots=': slots must be a whole number of at least 1, not ''"),
        ("h1 4", "hosts, line 1: 'h1 4': '4' is unknown: expected h slots=2, h:2 or h"),
        ("h1 cpu=4", "hosts, line 1: 'h1 cpu=4': 'cpu=4' is unknown: expected h slots=2, h:2 or h"),
        (
            "h1:2 slots=2",
            "hosts, line 1: 'h1:2 slots=2': the slots are given twice: expected h slots=2, or h:2",
        ),
        ("h1:0", "hosts, line 1: 'h1:0': slots must be a whole number of at least 1, not '0'"),
        ("h1,h2", f"hosts, line 1: 'h1,h2': invalid host name 'h1,h2': {FORMS}"),
        ("a@h\nb@h", "hosts: host h is given as a@h and as b@h: give it with one user"),
    ],
)
def test_malformed_hostfiles(text: str, message: str) -> None:
    with pytest.raises(HostsError) as caught:
        parse_hostfile(text, "hosts")
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("name", "slots", "message"),
    [
        ("-x", 1, "invalid host name '-x': expected a name or an address"),
        ("h", 0, "host h: slots must be at least 1, not 0"),
    ],
)
def test_a_host_keeps_its_rules(name: str, slots: int, message: str) -> None:
    with pytest.raises(HostsError) as caught:
        Host(name, slots)
    assert str(caught.value) == message


@given(DISTINCT)
def test_hosts_come_back_as_they_were_written(hosts: list[Host]) -> None:
    assert list(parse_hosts(",".join(map(str, hosts)))) == hosts
    assert list(parse_hostfile("\n".join(map(str, hosts)), "hosts")) == hosts
    slotted = "\n".join(f"{str(host).rpartition(':')[0]} slots={host.slots}" for host in hosts)
    assert list(parse_hostfile(slotted, "hosts")) == hosts


def _read(text: str) -> tuple[Host, ...] | str:
    try:
        return parse_hosts(text)
    except HostsError as exc:
        return str(exc)


@given(st.text(max_size=30))
def test_any_text_is_read_or_named(text: str) -> None:
    found = _read(text)
    if isinstance(found, str):
        assert found.startswith("-H: ")
    else:
        assert found
        assert not any(host.destination.startswith("-") for host in found)


@given(st.lists(st.builds(Host, st.sampled_from(["a", "b", "c"]), st.integers(1, 9)), min_size=1))
def test_a_name_given_twice_adds_up(hosts: list[Host]) -> None:
    found = merged(hosts, "-H")
    assert [host.name for host in found] == list(dict.fromkeys(host.name for host in hosts))
    for host in found:
        assert host.slots == sum(each.slots for each in hosts if each.name == host.name)


SMALL = st.lists(
    st.builds(Host, NAMES, st.integers(1, 20)), min_size=1, max_size=8, unique_by=lambda h: h.name
)


@given(SMALL, st.data())
def test_seats_fill_the_hosts_in_order(hosts: list[Host], data: st.DataObject) -> None:
    total = sum(host.slots for host in hosts)
    size = data.draw(st.none() | st.integers(1, total))
    placed = place_ranks(hosts, size)
    ranks = [rank for _, ranks in placed for rank in ranks]
    assert ranks == list(range(total if size is None else size))
    assert [host for host, _ in placed] == hosts[: len(placed)]
    assert all(len(ranks) == host.slots for host, ranks in placed[:-1])
    assert 0 < len(placed[-1][1]) <= placed[-1][0].slots


@given(SMALL, st.integers(1, 50))
def test_too_many_ranks(hosts: list[Host], more: int) -> None:
    total = sum(host.slots for host in hosts)
    with pytest.raises(HostsError, match=f"^-n {total + more} is more than the {total} slots of "):
        place_ranks(hosts, total + more)
    placed = place_ranks(hosts, total + more, oversubscribe=True)
    assert [len(ranks) for _, ranks in placed[:-1]] == [host.slots for host in hosts[:-1]]
    assert len(placed[-1][1]) == hosts[-1].slots + more


@pytest.mark.parametrize(
    ("count", "named"),
    [(2, "h0:1, h1:1"), (9, "h0:1, h1:1, h2:1, h3:1, h4:1, h5:1, h6:1, h7:1, ... (9 hosts)")],
)
def test_the_error_has_both_numbers(count: int, named: str) -> None:
    with pytest.raises(HostsError) as caught:
        place_ranks([Host(f"h{k}", 1) for k in range(count)], 20)
    assert str(caught.value) == (
        f"-n 20 is more than the {count} slots of {named}: give a smaller -n, or more slots or hosts"
    )


@pytest.mark.parametrize(
    ("name", "loopback"),
    [
        ("localhost", True),
        ("LocalHost.localdomain", True),
        ("127.0.1.1", True),
        ("::1", True),
        ("10.0.0.1", False),
        ("fe80::1", False),
        ("localhost2", False),
    ],
)
def test_loopback(name: str, loopback: bool) -> None:
    assert is_loopback(name) == loopback


def test_localhost_among_other_hosts() -> None:
    localhost, own, other = Host("localhost", 2), Host("h1", 2), Host("h2", 2)
    placed = place_ranks([localhost, own, other], None)
    with pytest.raises(HostsError) as caught:
        mark_own(placed, {localhost, own})
    assert str(caught.value) == (
        "localhost is among other hosts, and h2 cannot reach this host by that name: give this host's own"
        " name or address instead"
    )
    here = JobHosts(
        mark_own(place_ranks([localhost, own, other], 4), {localhost, own}), "ssh {host} {command}"
    )
    assert here.on_this_host
    assert here.size == 4
    there = JobHosts(mark_own(place_ranks([own, other], 4), {own}), "ssh {host} {command}")
    assert not there.on_this_host
    assert [(each.host.name, each.ranks, each.own) for each in there.hosts] == [
        ("h1", range(2), True),
        ("h2", range(2, 4), False),
    ]

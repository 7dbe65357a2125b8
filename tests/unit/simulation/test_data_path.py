"""The model of the data path: what its formulas tend to, and what never makes a collective cheaper."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, strategies as st

from pyhvd.negotiation.messages import RequestType
from pyhvd.simulation.data_path import FLAT, KIB, PAYLOAD, Cost, DataPath, Machine
from pyhvd.simulation.network import Network

MIB = KIB * KIB
# A machine whose CPU takes no time, and one on a network that takes none.
IDEAL = Machine(
    copy=math.inf, reduce=math.inf, tcp=0.0, frame=0.0, chunk=0.0, tensor=0.0, call=0.0, python=0.0
)
INSTANT = Network(latency=0.0, rate=math.inf, message_cpu=0.0)
SLOW = Network(latency=20e-6, rate=1e9 / 8, message_cpu=0.0)
DATA = (
    RequestType.ALLREDUCE,
    RequestType.ALLGATHER,
    RequestType.BROADCAST,
    RequestType.ALLTOALL,
    RequestType.REDUCESCATTER,
    RequestType.ADASUM,
)
SIZES = st.integers(1, 256 * MIB)


def bytes_sent(kind: RequestType, nbytes: int, hosts: int, local: int) -> float:
    """Return the bytes of headers and data that the busiest host sends, by the time of its link."""
    network = Network(latency=0.0, rate=1.0, message_cpu=0.0)
    return DataPath(network, IDEAL)(kind, nbytes, hosts, local).link


@pytest.mark.parametrize(
    ("kind", "share"),
    [
        (RequestType.ALLREDUCE, 2 * 3 / 4),
        (RequestType.REDUCESCATTER, 3 / 4),
        (RequestType.ALLGATHER, 3 / 4),
        (RequestType.BROADCAST, 3),
        (RequestType.ALLTOALL, 2 * 3 / 4),
        (RequestType.ADASUM, 2 * 3 / 4),
    ],
)
def test_large_tensors_take_the_time_of_their_bytes_on_the_link(kind: RequestType, share: float) -> None:
    """4 hosts with 2 ranks each: the bytes are those of docs/across_hosts.md, and 5 % of headers."""
    nbytes = 64 * MIB
    cost = DataPath(SLOW, IDEAL)(kind, nbytes, 4, 2)
    assert cost.bound == "link"
    assert share * nbytes / SLOW.rate < cost.link < 1.06 * share * nbytes / SLOW.rate
    assert cost.link <= cost.seconds < 1.06 * cost.link


def test_the_bytes_of_a_host_do_not_depend_on_its_ranks() -> None:
    """With 8 ranks on 4 hosts a slice of a chunk has 48 KiB; the slices of a chunk count together."""
    assert bytes_sent(RequestType.ALLREDUCE, 64 * MIB, 4, 8) == pytest.approx(
        bytes_sent(RequestType.ALLREDUCE, 64 * MIB, 4, 2)
    )


def test_small_tensors_take_one_step_and_larger_ones_two() -> None:
    path = DataPath(Network(latency=1.0, rate=math.inf, message_cpu=0.0), IDEAL)
    steps = [
        path(RequestType.ALLREDUCE, nbytes, 4, 1) for nbytes in (PAYLOAD, PAYLOAD + 1, FLAT + 1, 384 * KIB)
    ]
    assert [cost.latency for cost in steps] == [0.0, 1.0, 1.0, 2.0]
    assert [cost.bound for cost in steps[1:]] == ["latency"] * 3


def test_a_step_waits_for_the_last_of_the_messages() -> None:
    """The latest of three messages, each up to a second late, is three quarters of a second late."""
    path = DataPath(Network(latency=1.0, rate=math.inf, jitter=1.0), IDEAL)
    assert path(RequestType.ALLREDUCE, FLAT, 4, 2).seconds == 1.75


@pytest.mark.parametrize(("hosts", "tensors"), [(9, 1), (2, 17)])
def test_what_does_not_travel_with_the_agreement_takes_a_step(hosts: int, tensors: int) -> None:
    assert DataPath(SLOW, IDEAL)(RequestType.ALLREDUCE, 64, hosts, 1, tensors).latency == SLOW.latency


def test_at_most_four_chunks_wait_at_once() -> None:
    """On a network with nothing but latency, a batch of 16 chunks of two steps needs four of their times."""
    cost = DataPath(Network(latency=1.0, rate=math.inf), IDEAL)(RequestType.ALLREDUCE, 16 * 384 * KIB, 2, 1)
    assert cost.seconds == cost.latency == 2.0 + 15 * 2.0 / 4


def test_one_host_is_bound_by_its_cores_and_needs_no_network() -> None:
    cost = DataPath(SLOW, Machine(copy=20e9, reduce=10e9, chunk=0.0, call=0.0))(
        RequestType.ALLREDUCE, 64 * MIB, 1, 4
    )
    assert (cost.link, cost.latency, cost.bound) == (0.0, 0.0, "CPU")
    assert cost.cpu == pytest.approx(64 * MIB * (3 * 3 / 4 / 20e9 + 1 / 10e9), rel=1e-3)


@pytest.mark.parametrize(
    ("cores", "shared", "turns"), [(8, False, 1), (2, False, 2), (8, True, 1), (4, True, 2)]
)
def test_ranks_take_turns_on_too_few_cores(cores: int, shared: bool, turns: int) -> None:
    alone, crowded = (
        DataPath(INSTANT, Machine(cores=n, shared_cores=shared))(RequestType.ALLREDUCE, MIB, 2, 4)
        for n in (100, cores)
    )
    assert crowded.seconds == pytest.approx(turns * alone.seconds)


def test_a_rank_alone_copies_only_chunks_of_several_tensors() -> None:
    """One tensor is sent from where it lies; a chunk with a part of another one is packed, and unpacked."""
    path = DataPath(INSTANT, Machine(copy=1.0, reduce=math.inf, tcp=0.0, frame=0.0, chunk=0.0, tensor=0.0))
    one, many = (path(RequestType.ALLREDUCE, 4 * MIB, 2, 1, tensors).cpu for tensors in (1, 10_000))
    assert one < 1.0
    assert many == pytest.approx(2 * 4 * MIB)


@pytest.mark.parametrize("local", [1, 8])
def test_mpi_carries_partial_results_between_more_than_64_hosts(local: int) -> None:
    """A host's partial results cross to their owners, and results around a ring of each rail."""
    nbytes, hosts = 4 * MIB * local, 65
    crossing = nbytes * (hosts - 1) / hosts + nbytes
    assert bytes_sent(RequestType.ALLREDUCE, nbytes, hosts, local) == pytest.approx(crossing * 1514 / 1448)
    assert bytes_sent(RequestType.ALLREDUCE, nbytes, hosts - 1, 1) < 2.2 * nbytes


def test_a_rank_exchanges_messages_with_one_rank_of_each_host_without_links() -> None:
    network = Network(latency=0.0, rate=math.inf, message_cpu=1.0)
    cost = DataPath(network, IDEAL)(RequestType.ALLREDUCE, 16 * MIB, 65, 8)
    assert cost.cpu == 2 * 2 * 64  # one piece: slices to 64 others, and 64 steps around the ring


@pytest.mark.parametrize(
    "kind", [RequestType.JOIN, RequestType.ADD_PROCESS_SET, RequestType.REMOVE_PROCESS_SET]
)
def test_what_moves_no_bytes_costs_nothing(kind: RequestType) -> None:
    assert DataPath(SLOW)(kind, 0, 4, 2) == Cost(0, 0, 0, 0)


@pytest.mark.parametrize(("hosts", "steps"), [(2, 1), (64, 1), (128, 7)])
def test_a_barrier_is_a_step_or_log2_of_the_ranks_over_mpi(hosts: int, steps: int) -> None:
    assert DataPath(SLOW, IDEAL)(RequestType.BARRIER, 0, hosts, 1).latency == pytest.approx(
        steps * SLOW.latency
    )


@given(st.sampled_from(DATA), SIZES, st.integers(1, 100), st.integers(1, 16), st.integers(1, 200))
def test_every_collective_takes_as_long_as_its_slowest_part_and_no_longer_than_all(
    kind: RequestType, nbytes: int, hosts: int, local: int, tensors: int
) -> None:
    cost = DataPath(Network())(kind, nbytes, hosts, local, tensors)
    assert min(cost.link, cost.cpu, cost.latency) >= 0.0
    assert (cost.seconds > 0.0) is (hosts * local > 1)
    assert max(cost.link, cost.cpu, cost.latency) <= cost.seconds * (1 + 1e-9)
    assert cost.seconds <= (cost.link + cost.cpu + cost.latency) * (1 + 1e-9)


@given(st.sampled_from(DATA[1:]), SIZES, SIZES, st.integers(1, 100), st.integers(1, 8))
def test_more_bytes_never_take_less_time(
    kind: RequestType, nbytes: int, more: int, hosts: int, local: int
) -> None:
    """Of an allreduce this holds within one way only: a slice that goes whole may need more bytes."""
    path = DataPath(Network())
    few, many = (path(kind, each, hosts, local).seconds for each in (nbytes, nbytes + more))
    assert few <= many * (1 + 1e-9)


@given(SIZES, st.integers(2, 64))
def test_more_chunks_send_more(nbytes: int, hosts: int) -> None:
    """A rank alone on its host sends all full chunks in two steps, so the bytes grow with them."""
    few, many = (bytes_sent(RequestType.ALLREDUCE, each, hosts, 1) for each in (nbytes, 2 * MIB + nbytes))
    assert few < many


@given(st.sampled_from(DATA), st.integers(1, 63))
def test_more_hosts_never_send_less(kind: RequestType, hosts: int) -> None:
    """The bytes are whole chunks: the short rest of a batch may go whole, and so send more."""
    few, many = (bytes_sent(kind, 192 * MIB, each, 1) for each in (hosts, hosts + 1))
    assert few <= many * (1 + 1e-9)

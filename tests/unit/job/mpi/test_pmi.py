"""The PMI-1 server, with scripted clients, and with real MPICH ranks as plain processes."""

from __future__ import annotations

import os
import selectors
import socket
import subprocess
import sys
import time
from collections.abc import Callable

import pytest
from hypothesis import given, strategies as st

from pyhvd.job.errors import LaunchError
from pyhvd.job.mpi.flavour import find_library
from pyhvd.job.mpi.pmi import Abort, PmiError, PmiServer, answer_get, name_of_world, process_mapping
from pyhvd.job.mpi.rank_env import MPICH


def expand(mapping: str, size: int) -> list[int]:
    """Return the node of each rank, as MPI reads a mapping."""
    nodes = []
    for block in mapping.removeprefix("(vector,").removesuffix(")").split("),("):
        first, hosts, each = map(int, block.strip("()").split(","))
        nodes += [first + host for host in range(hosts) for _ in range(each)]
    return [nodes[rank % len(nodes)] for rank in range(size)]


@given(st.lists(st.integers(1, 9), min_size=1, max_size=60))
def test_mapping_says_who_shares_a_host(counts: list[int]) -> None:
    expected = [host for host, count in enumerate(counts) for _ in range(count)]
    assert expand(process_mapping(expected), len(expected)) == expected


@given(st.lists(st.integers(0, 5), min_size=1, max_size=60))
def test_mapping_of_ranks_in_any_order(hosts: list[int]) -> None:
    numbers = {host: number for number, host in enumerate(dict.fromkeys(hosts))}
    expected = [numbers[host] for host in hosts]
    assert expand(process_mapping(expected), len(expected)) == expected


@pytest.mark.parametrize("turn", [[0, 1], [0, 0, 1], [0, 1, 1, 0, 2]])
def test_long_mapping_is_repeated_by_mpi(turn: list[int]) -> None:
    expected = (turn * 1000)[:2001]
    mapping = process_mapping(expected)
    assert len(mapping) < 60
    assert expand(mapping, len(expected)) == expected


def test_mapping_that_does_not_fit_is_refused() -> None:
    hosts = [host for pair in range(100) for host in (2 * pair, 2 * pair + 1, 2 * pair + 1)]
    with pytest.raises(PmiError, match="which of 300 ranks share the 200 hosts"):
        process_mapping(hosts)


def test_worlds_have_names_of_their_own() -> None:
    assert PmiServer([0]).name != PmiServer([0]).name


def test_scripted_start() -> None:
    server = PmiServer([0, 0])
    assert server.handle(0, "cmd=init pmi_version=1 pmi_subversion=1") == [
        (0, "cmd=response_to_init pmi_version=1 pmi_subversion=1 rc=0\n")
    ]
    assert server.handle(0, "cmd=get_maxes") == [
        (0, "cmd=maxes kvsname_max=256 keylen_max=64 vallen_max=1024\n")
    ]
    assert server.handle(1, "cmd=get_my_kvsname") == [(1, f"cmd=my_kvsname kvsname={server.name}\n")]
    assert name_of_world(server.handle(1, "cmd=get_my_kvsname")[0][1]) == server.name
    assert name_of_world(server.handle(1, "cmd=get_appnum")[0][1]) == ""
    assert server.handle(1, "cmd=get kvsname=pyhvd key=PMI_process_mapping") == [
        (1, "cmd=get_result rc=0 msg=success value=(vector,(0,1,2))\n")
    ]
    assert server.handle(0, "cmd=put kvsname=pyhvd key=a value=x=1#y") == [
        (0, "cmd=put_result rc=0 msg=success\n")
    ]
    assert server.handle(1, "cmd=get kvsname=pyhvd key=a") == [
        (1, "cmd=get_result rc=0 msg=success value=x=1#y\n")
    ]
    assert server.handle(1, "cmd=get kvsname=pyhvd key=b") == [
        (1, "cmd=get_result rc=-1 msg=key_not_found value=unknown\n")
    ]
    assert server.handle(0, "cmd=finalize") == [(0, "cmd=finalize_ack\n")]


def test_what_was_put_is_shared_once_in_parts_and_answers_like_the_server() -> None:
    server = PmiServer([0, 0])
    for number in range(5):
        server.handle(0, f"cmd=put kvsname={server.name} key=k{number} value={'v' * 10}{number}")
    parts = server.take_unshared(20)
    assert [sorted(part) for part in parts] == [["k0", "k1"], ["k2", "k3"], ["k4"]]
    assert server.take_unshared(20) == []
    values = {key: value for part in parts for key, value in part.items()}
    for line in (f"cmd=get kvsname={server.name} key=k{number}" for number in range(5)):
        assert [(1, answer_get(line, server.name, values))] == server.handle(1, line)
        assert answer_get(line, "another world", values) is None
    assert answer_get(f"cmd=get kvsname={server.name} key=absent", server.name, values) is None
    assert answer_get(f"cmd=put kvsname={server.name} key=k1 value=x", server.name, values) is None
    server.handle(1, f"cmd=put kvsname={server.name} key=late value=x")
    assert server.take_unshared(20) == [{"late": "x"}]


@given(st.integers(1, 6), st.data())
def test_barriers_let_nobody_through_before_all_are_in(size: int, data: st.DataObject) -> None:
    server = PmiServer([0] * size)
    for _ in range(3):
        order = data.draw(st.permutations(range(size)))
        for rank in order[:-1]:
            assert server.handle(rank, "cmd=barrier_in") == []
        out = server.handle(order[-1], "cmd=barrier_in")
        assert sorted(out) == [(rank, "cmd=barrier_out\n") for rank in range(size)]


def test_a_key_is_put_once() -> None:
    server = PmiServer([0])
    server.handle(0, "cmd=put kvsname=pyhvd key=a value=1")
    assert "rc=-1" in server.handle(0, "cmd=put kvsname=pyhvd key=a value=2")[0][1]
    assert "rc=-1" in server.handle(0, f"cmd=put kvsname=pyhvd key=b value={'v' * 1025}")[0][1]
    assert "rc=-1" in server.handle(0, f"cmd=put kvsname=pyhvd key={'k' * 65} value=1")[0][1]


def test_abort_names_the_rank_and_its_code() -> None:
    with pytest.raises(Abort) as caught:
        PmiServer([0, 0, 0]).handle(2, "cmd=abort exitcode=7")
    assert (caught.value.rank, caught.value.code) == (2, 7)


@pytest.mark.parametrize("first", ["leave", "barrier"])
def test_waiting_for_a_rank_that_is_gone_is_an_error(first: str) -> None:
    server = PmiServer([0, 0])
    steps: list[Callable[[], object]] = [lambda: server.leave(1), lambda: server.handle(0, "cmd=barrier_in")]
    if first == "barrier":
        steps.reverse()
    steps[0]()
    with pytest.raises(PmiError, match="rank 1 has ended without taking part in MPI, but rank 0 waits"):
        steps[1]()


@given(st.text(max_size=80))
def test_nonsense_is_refused(line: str) -> None:
    with pytest.raises(PmiError, match="pyhvd does not support"):
        PmiServer([0]).handle(0, "cmd=spawn " + line.replace("cmd=", ""))


_PROGRAM = """
from mpi4py import MPI
comm = MPI.COMM_WORLD
shared = comm.Split_type(MPI.COMM_TYPE_SHARED).Get_size()
print(comm.Get_rank(), comm.Get_size(), comm.allreduce(comm.Get_rank() + 1), shared, flush=True)
"""


def _is_mpich() -> bool:
    try:
        return find_library().family == MPICH
    except LaunchError:
        return False


@pytest.mark.skipif(not _is_mpich(), reason="mpi4py here is not built on MPICH")
@pytest.mark.parametrize("hosts", [[0, 0, 1], [0, 1, 0]])
def test_real_ranks_find_each_other(hosts: list[int]) -> None:
    server = PmiServer(hosts)
    selector = selectors.DefaultSelector()
    ranks, ends = [], []
    for rank in range(3):
        mine, its = socket.socketpair()
        env = {k: v for k, v in os.environ.items() if not k.startswith(("PMI_", "MPI_"))}
        env |= {"PMI_FD": str(its.fileno()), "PMI_RANK": str(rank), "PMI_SIZE": "3"}
        # Ranks of the other "host" of the mapping are reached over TCP.
        env |= {"UCX_NET_DEVICES": "lo", "FI_TCP_IFACE": "lo", "MPIR_CVAR_POLLS_BEFORE_YIELD": "1"}
        command = [sys.executable, "-c", _PROGRAM]
        ranks.append(
            subprocess.Popen(command, env=env, pass_fds=[its.fileno()], stdout=subprocess.PIPE, text=True)
        )
        its.close()
        ends.append(mine)
        selector.register(mine, selectors.EVENT_READ, rank)
    try:
        _serve(server, selector, ends, time.monotonic() + 60)
        said = [rank.communicate(timeout=20)[0].split() for rank in ranks]
    finally:
        for process in ranks:
            process.kill()
            process.wait()
        for end in ends:
            end.close()
        selector.close()
    assert said == [[str(rank), "3", "6", str(hosts.count(hosts[rank]))] for rank in range(3)]


def _serve(
    server: PmiServer, selector: selectors.BaseSelector, ends: list[socket.socket], until: float
) -> None:
    begun = [b""] * len(ends)
    while selector.get_map() and time.monotonic() < until:
        for key, _ in selector.select(1.0):
            data = ends[key.data].recv(4096)
            if not data:
                selector.unregister(ends[key.data])
                continue
            *lines, begun[key.data] = (begun[key.data] + data).split(b"\n")
            for line in lines:
                for rank, answer in server.handle(key.data, line.decode()):
                    ends[rank].sendall(answer.encode())

"""Which rule chooses the hosts of a job, and the text of ``--show-config``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import pytest

from pyhvd.run.hosts.agent_template import SSH
from pyhvd.run.hosts.clusters import slurm, small
from pyhvd.run.hosts.clusters.results import Surroundings
from pyhvd.run.hosts.hosts import Host, HostsError
from pyhvd.run.hosts.selection import HostSelection, describe, select
from pyhvd.run.options import Options

SLURM = {"SLURM_JOB_ID": "42", "SLURM_JOB_NODELIST": "n[1-3]", "SLURM_TASKS_PER_NODE": "2(x3)"}
ONE_NODE = {"SLURM_JOB_ID": "42", "SLURM_JOB_NODELIST": "n1", "SLURM_TASKS_PER_NODE": "2"}
PBS = {"PBS_JOBID": "9", "PBS_NODEFILE": "/nodes", "PBS_O_WORKDIR": "/home/u"}
FILES = {"/hosts": "h1 slots=2\nh2\n", "/nodes": "n1\nn2\n"}


def chosen(environ: Mapping[str, str] | None = None, own: str = "", **given: Any) -> HostSelection:
    def read(path: str) -> str:
        if path not in FILES:
            raise FileNotFoundError(2, "No such file or directory", path)
        return FILES[path]

    def find_own(hosts: Iterable[Host]) -> set[Host]:
        return {host for host in hosts if host.name in ("localhost", own)}

    options = Options(["x.py"], **given)
    return select(options, Surroundings(environ or {}, read, options.slots_per_host), find_own)


def seats_of(selection: HostSelection) -> str:
    assert selection.placed is not None
    return " ".join(
        f"{each.host.name}:{each.ranks.start}-{each.ranks.stop - 1}{'*' if each.own else ''}"
        for each in selection.placed.hosts
    )


@pytest.mark.parametrize(
    ("environ", "given", "rule", "placed"),
    [
        ({}, {"num_proc": 3}, "this host", "localhost:0-2*"),
        ({}, {"hosts": "h1:2,h2"}, "-H", "h1:0-1 h2:2-2"),
        ({}, {"hosts": "h1:2,h2", "slots_per_host": 3}, "-H", "h1:0-1 h2:2-4"),
        ({}, {"hosts": "h1:2,h2:2", "num_proc": 3}, "-H", "h1:0-1 h2:2-2"),
        ({}, {"hosts": "localhost:2,h2:2", "num_proc": 2}, "-H", "localhost:0-1*"),
        ({}, {"hostfile": "/hosts"}, "--hostfile /hosts", "h1:0-1 h2:2-2"),
        (SLURM, {}, "Slurm's job 42", "n1:0-1* n2:2-3 n3:4-5"),
        (SLURM, {"num_proc": 3}, "Slurm's job 42", "n1:0-1* n2:2-2"),
        (SLURM, {"num_proc": 2}, "Slurm's job 42", "n1:0-1*"),
        (SLURM, {"hosts": "h1:2"}, "-H", "h1:0-1"),
        (SLURM, {"hostfile": "/hosts"}, "--hostfile /hosts", "h1:0-1 h2:2-2"),
        (ONE_NODE, {}, "Slurm's job 42", "n1:0-1*"),
        (ONE_NODE, {"num_proc": 5}, "Slurm's job 42", "n1:0-4*"),
        ({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, {"num_proc": 3}, "this host", "localhost:0-2*"),
        ({"FLUX_URI": "local:///x"}, {"num_proc": 3}, "this host", "localhost:0-2*"),
    ],
)
def test_rules(environ: dict[str, str], given: dict[str, Any], rule: str, placed: str) -> None:
    found = chosen(environ, own="n1", **given)
    assert found.rule == rule
    assert seats_of(found) == placed


@pytest.mark.parametrize(
    ("environ", "given", "agent"),
    [
        ({}, {"num_proc": 1}, SSH),
        ({}, {"hosts": "h1"}, SSH),
        (SLURM, {}, slurm.AGENT),
        (SLURM, {"hosts": "n3:1,n2:1"}, slurm.AGENT),
        (SLURM, {"hosts": "n3:1,h1:1"}, SSH),
        (SLURM, {"hosts": "me@n3:1"}, SSH),
        (SLURM, {"launch_agent": "x {host} {command}"}, "x {host} {command}"),
        (SLURM, {"hosts": "n3", "launch_agent": "x {host} {command}"}, "x {host} {command}"),
        ({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, {"hosts": "pod-0:2"}, small.KUBERNETES_AGENT),
        ({"PBS_JOBID": "9", "PBS_NODEFILE": "/gone"}, {"hosts": "h1"}, SSH),
    ],
)
def test_agents(environ: dict[str, str], given: dict[str, Any], agent: str) -> None:
    placed = chosen(environ, **given).placed
    assert placed is not None
    assert placed.agent == agent


@pytest.mark.parametrize(
    ("environ", "given", "message"),
    [
        (
            {},
            {"hosts": "h1", "hostfile": "/hosts"},
            "-H and --hostfile both choose the hosts: give one of them",
        ),
        (
            {},
            {"hostfile": "/gone"},
            "--hostfile: cannot read /gone: [Errno 2] No such file or directory: '/gone'",
        ),
        (
            {},
            {"hosts": "h1:2,h2:1", "num_proc": 4},
            "-n 4 is more than the 3 slots of h1:2, h2:1: give a smaller -n, or more slots or hosts",
        ),
        (
            {},
            {"hosts": "localhost:2", "num_proc": 4},
            "-n 4 is more than the 2 slots of localhost:2: give a smaller -n, or more slots or hosts",
        ),
        (
            SLURM,
            {"num_proc": 7},
            "-n 7 is more than the 6 slots of n1:2, n2:2, n3:2: give a smaller -n, or more slots or hosts",
        ),
        (
            {"PBS_JOBID": "9", "PBS_NODEFILE": "/gone"},
            {"num_proc": 2},
            "PBS_NODEFILE names the hosts of this job, but /gone cannot be read (No such file or directory):"
            " give the hosts with -H or --hostfile",
        ),
        (
            {},
            {"hosts": "localhost:2,h2:2"},
            "localhost is among other hosts, and h2 cannot reach this host by that name:"
            " give this host's own name or address instead",
        ),
    ],
)
def test_errors(environ: dict[str, str], given: dict[str, Any], message: str) -> None:
    with pytest.raises(HostsError) as caught:
        chosen(environ, own="n1", **given)
    assert str(caught.value) == message


def test_the_interface_of_the_cluster() -> None:
    sagemaker = {"SM_HOSTS": '["a1", "a2"]', "SM_CURRENT_HOST": "a1", "SM_NETWORK_INTERFACE_NAME": "eth0"}
    for given, interface in (({}, "eth0"), ({"hosts": "a2:1,a1:1"}, "eth0"), ({"hosts": "b1:1"}, "")):
        placed = chosen(sagemaker, **given).placed
        assert placed is not None
        assert placed.interface == interface


def test_the_number_of_ranks_is_missing() -> None:
    assert chosen().placed is None
    assert chosen().note == "the number of ranks is missing: give e.g. -n 2"
    pod = chosen({"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": "1"})
    assert pod.placed is None
    assert pod.note.startswith("this is pod 1 of an indexed Job of Kubernetes, which is no rank: ")


@pytest.mark.parametrize(
    ("environ", "given", "text"),
    [
        ({}, {}, "rule: this host\nnote: the number of ranks is missing: give e.g. -n 2"),
        (
            {},
            {"num_proc": 1},
            f"""\
rule: this host
hosts:
  localhost  1 slot  rank 0  this host
agent: {SSH} (not used: all ranks are on this host)""",
        ),
        (
            SLURM,
            {"num_proc": 3},
            f"""\
rule: Slurm's job 42
hosts:
  n1  2 slots  ranks 0-1  this host
  n2  2 slots  rank 2
  n3  2 slots  no rank
agent: {slurm.AGENT}""",
        ),
        (
            {},
            {"hosts": "me@h1:12,[fe80::1]:2", "launch_agent": "rsh {host} {command}"},
            """\
rule: -H
hosts:
  me@h1    12 slots  ranks 0-11
  fe80::1  2 slots   ranks 12-13
agent: rsh {host} {command}""",
        ),
        (
            PBS,
            {},
            f"""\
rule: PBS's job 9
note: PBS starts jobs in the home directory; this job was submitted in /home/u
hosts:
  n1  1 slot  rank 0  this host
  n2  1 slot  rank 1
agent: {SSH}""",
        ),
    ],
)
def test_show_config(environ: dict[str, str], given: dict[str, Any], text: str) -> None:
    assert describe(chosen(environ, own="n1", **given)) == text

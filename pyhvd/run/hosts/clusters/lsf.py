"""LSF: ranks that jsrun started, and the hosts of a job.

The options of blaunch are those of IBM's reference of LSF 10.1, not tried on a cluster.
"""

from __future__ import annotations

from pyhvd.run.hosts.clusters.results import (
    Allocation,
    Environ,
    ForeignRank,
    Surroundings,
    number,
    rank_env,
    read_named,
)
from pyhvd.run.hosts.hosts import Host, HostsError, merged

AGENT = "blaunch -no-shell {host} sh -c {command}"


def find_rank(environ: Environ) -> ForeignRank | None:
    """Return the rank that jsrun started."""
    rank = number(environ, "JSM_NAMESPACE_RANK")
    if rank is None:
        return None
    of_host = [number(environ, f"JSM_NAMESPACE_LOCAL_{name}") for name in ("RANK", "SIZE")]
    return ForeignRank("jsrun", rank_env(environ, rank, number(environ, "JSM_NAMESPACE_SIZE"), *of_host))


def find_allocation(around: Surroundings) -> Allocation | None:
    """Return the hosts of the job, without the launch node that LSF adds on systems with jsrun."""
    environ = around.environ
    job = environ.get("LSB_JOBID")
    if not job:
        return None
    hosts = _of_files(around) or _of_pairs(environ)
    return Allocation(f"LSF's job {job}", hosts, AGENT) if hosts else None


def _of_files(around: Surroundings) -> tuple[Host, ...]:
    """Return the hosts of the files that have a line for each slot."""
    environ = around.environ
    if environ.get("LSB_DJOB_RANKFILE"):
        lines = read_named("LSB_DJOB_RANKFILE", around).split()
        return _counted(lines[1:] if _has_launch_node(lines, environ) else lines, "LSB_DJOB_RANKFILE")
    if environ.get("LSB_DJOB_HOSTFILE"):
        return _counted(read_named("LSB_DJOB_HOSTFILE", around).split(), "LSB_DJOB_HOSTFILE")
    return ()


def _has_launch_node(lines: list[str], environ: Environ) -> bool:
    """Return whether the first line is the launch node, which takes no ranks.

    It is one with CSM. Elsewhere it is one if it is there once and every other host several times. Without
    CSM LSF writes the first host of the job there, which takes ranks.
    """
    others = lines[1:]
    if not others or lines[0] in others:
        return False
    return "CSM_ALLOCATION_ID" in environ or all(others.count(name) > 1 for name in set(others))


def _of_pairs(environ: Environ) -> tuple[Host, ...]:
    """Return the hosts of LSB_MCPU_HOSTS: ``h1 4 h2 4``."""
    text = environ.get("LSB_MCPU_HOSTS", "")
    words = text.split()
    names, counts = words[::2], words[1::2]
    if len(names) != len(counts) or not all(word.isdecimal() and int(word) > 0 for word in counts):
        raise HostsError(f"cannot read LSB_MCPU_HOSTS={text!r}")
    return merged((Host(*pair) for pair in zip(names, map(int, counts), strict=True)), "LSB_MCPU_HOSTS")


def _counted(lines: list[str], where: str) -> tuple[Host, ...]:
    return merged((Host(name, 1) for name in lines), where)
